"""Goal: the reader process answers pulls, long polls and look-ups as the protocol says, whatever it is asked.

Method: the real worker runs in a process of its own on a store written through the project's codecs (or a golden
store); the test plays dispatcher, coordinator and supervisor: it owns the control block, publishes on the two ipc
endpoints and holds the other end of the lifeline. Clients are plain ZeroMQ DEALERs.
"""

from __future__ import annotations

import json
import operator
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import zmq

from commitmq.control import ControlBlock, DispatcherWord, Word, WorkerState, WorkerWord, role_slot
from commitmq.format.record import Record, decode_record
from commitmq.protocol import wire
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_files import list_queues
from commitmq.supervision import node_files
from commitmq.workers.runtime.context import monotonic_ms
from commitmq.workers.runtime.doorbell import NAPPING, Doorbell
from golden_stores import GOLDEN_QUEUE_FILE_BYTES, GOLDEN_SEGMENT_BYTES, GoldenStore
from nodes import eventually
from queue_store import QueueStore

PROCESS = Path(__file__).parent / "reader_process.py"
Reply = tuple[dict[str, Any], list[bytes]]


class Client:
    """One DEALER; requests may be outstanding."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, **options: int) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)
        self._next = 0

    def send(self, op: str, **fields: Any) -> int:
        self._next += 1
        self.socket.send(wire.pack({"op": op, "id": self._next, **fields}))
        return self._next

    def receive(self, timeout_s: float = 10) -> Reply:
        assert self.socket.poll(int(timeout_s * 1000)), "the reader did not answer"
        header, *frames = self.socket.recv_multipart()
        return orjson.loads(header), frames

    def ask(self, op: str, **fields: Any) -> Reply:
        request = self.send(op, **fields)
        reply = self.receive()
        assert (reply[0]["v"], reply[0]["id"]) == (1, request)
        return reply

    def pull(self, topic: str, queue: int, offset: int, **fields: Any) -> Reply:
        return self.ask("pull", topic=topic, queue=queue, offset=offset, **fields)

    def refusal(self, op: str, **fields: Any) -> str:
        header, frames = self.ask(op, **fields)
        assert not header["ok"]
        assert not frames
        assert len(header["error"]) > 10
        code: str = header["code"]
        return code

    def is_silent(self, seconds: float) -> bool:
        return not self.socket.poll(int(seconds * 1000))


class ReaderNode:
    """A reader worker and everything around it that the test plays."""

    def __init__(self, root: Path, config: dict[str, dict[str, Any]]) -> None:
        self.config = config
        self.layout = QueueStore(root).layout  # only for its folders
        node_files.make_folders(self.layout)
        node_files.empty_run_folder(self.layout)
        self.control = ControlBlock(self.layout.control, create=True)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.changes = self._publisher("queues-changed")
        self.topics = self._publisher("topics")
        self.clients: list[Client] = []
        self.exit_code: int | None = None

    def _publisher(self, name: str) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self.context.socket(zmq.XPUB)
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind(self.layout.ipc(name))
        return sock

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [sys.executable, str(PROCESS), str(self.layout.root), str(theirs.fileno()), json.dumps(self.config)]
        self.process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        theirs.close()
        self.lifeline = ours
        ours.settimeout(60)
        message = orjson.loads(ours.recv(65_536))
        assert message["event"] == "ready", message
        self.tcp, self.ipc = message["endpoints"]
        for publisher in (self.changes, self.topics):
            assert publisher.poll(10_000), "the reader did not subscribe"
            publisher.recv()

    def client(self, *, tcp: bool = False, **options: int) -> Client:
        self.clients.append(Client(self.context, self.tcp if tcp else self.ipc, **options))
        return self.clients[-1]

    def show(self, end: int) -> None:
        """Play the dispatcher: everything below ``end`` is in the queues."""
        self.control.put_dispatcher(0, DispatcherWord.DISPATCHED, end)

    def changed(self, *queues: tuple[str, int]) -> None:
        self.changes.send_multipart([b"q", orjson.dumps(queues)])

    def stop(self) -> None:
        if self.exit_code is None:
            self.lifeline.send(orjson.dumps({"command": "stop"}))
            self.exit_code = self.process.wait(20)

    def close(self) -> None:
        try:
            self.stop()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            assert self.process.stderr is not None
            text = self.process.stderr.read().decode()
            self.process.stderr.close()
            sys.stderr.write(text)
            self.lifeline.close()
            for one in self.clients:
                one.socket.close()
            self.changes.close()
            self.topics.close()
            self.context.term()
            self.control.close()
            shutil.rmtree(self.layout.sockets)
        assert self.exit_code == 0
        assert "traceback" not in text


Start = Callable[..., tuple[ReaderNode, QueueStore]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(fill, reader={…}, segment_bytes=…)``: a running reader on a store that ``fill`` wrote."""
    nodes: list[ReaderNode] = []

    def run(
        fill: Callable[[QueueStore], object] = lambda store: None,
        *,
        reader: dict[str, Any] | None = None,
        segment_bytes: int = 65_536,
    ) -> tuple[ReaderNode, QueueStore]:
        store = QueueStore(tmp_path / "store", segment_bytes)
        store.topic("t")
        fill(store)
        config = {
            "commit_log": {"segment_bytes": segment_bytes},
            "consume_queue": {"file_bytes": store.file_bytes},
            "reader": reader or {},
        }
        node = ReaderNode(store.root, config)
        nodes.append(node)
        node.show(store.end)
        node.start()
        return node, store

    yield run
    for node in nodes:
        node.close()


def ten(store: QueueStore) -> None:
    """Ten messages in t/0, tags A and B in turn, stored at 1000, 1010 …"""
    for number in range(10):
        store.put("t", 0, b"%d" % number, tag="AB"[number % 2], timestamp=1_000 + 10 * number)


def records_of(reply: Reply) -> list[Record]:
    """The records of a reply in mode "bytes"."""
    header, frames = reply
    data = b"".join(frames)
    records = []
    while data:
        records.append(decode_record(data))
        data = data[records[-1].total_size :]
    assert header["count"] == len(records)
    return records


def bodies(reply: Reply) -> list[bytes]:
    return [record.body for record in records_of(reply)]


# ---------------------------------------------------------------- pulls


def test_every_golden_message_is_served(golden_copy: Callable[[str], GoldenStore]) -> None:
    """Each queue of the clean store, in both modes and over both transports, against messages.jsonl."""
    golden = golden_copy("clean")
    log = CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES)
    config = {
        "commit_log": {"segment_bytes": GOLDEN_SEGMENT_BYTES},
        "consume_queue": {"file_bytes": GOLDEN_QUEUE_FILE_BYTES},
    }
    node = ReaderNode(golden.root, config)
    node.show(sum(max(log.iter_spans())))
    node.start()
    seen = []
    try:
        for topic, queue, _ in list_queues(golden.layout.consume_queue):
            for tcp in (False, True):
                client = node.client(tcp=tcp)
                offset = 0
                records: list[Record] = []
                while (reply := client.pull(topic, queue, offset, max_messages=13))[0]["status"] == "FOUND":
                    records += records_of(reply)
                    ranges = client.pull(topic, queue, offset, max_messages=13, mode="ranges")
                    assert ranges[0] | {"id": 0} == reply[0] | {"id": 0}
                    units = list(struct.iter_unpack(">qiq", b"".join(ranges[1])))
                    assert [unit[:2] for unit in units] == [
                        (one.physical_offset, one.total_size) for one in records_of(reply)
                    ]
                    offset = reply[0]["next_offset"]
                assert reply[0]["status"] == "OFFSET_OVERFLOW_ONE"
            if not topic.startswith("%DLQ%"):
                seen += [record.to_json() for record in records]
    finally:
        node.close()
    by_place = operator.itemgetter("physical_offset")
    assert sorted(seen, key=by_place) == sorted(golden.messages, key=by_place)


def test_limits_and_filter(start: Start) -> None:
    node, store = start(ten)
    client = node.client()
    header, _ = reply = client.pull("t", 0, 0, max_messages=3)
    assert (header["status"], header["next_offset"], header["min_offset"], header["max_offset"]) == ("FOUND", 3, 0, 10)
    assert bodies(reply) == store.bodies("t", 0)[:3]
    assert bodies(client.pull("t", 0, 9, max_bytes=1)) == [b"9"]
    assert bodies(client.pull("t", 0, 0, filter=" B || none ")) == [b"1", b"3", b"5", b"7", b"9"]
    assert bodies(client.pull("t", 0, 0, filter="*")) == store.bodies("t", 0)
    reply = client.pull("t", 0, 0, filter="none")
    assert (reply[0]["status"], reply[0]["next_offset"], reply[1]) == ("NO_MATCHED_MESSAGE", 10, [])
    assert client.pull("t", 0, -1)[0]["status"] == "OFFSET_TOO_SMALL"
    assert client.pull("t", 0, 11)[0]["status"] == "OFFSET_OVERFLOW_BADLY"
    assert client.pull("t", 1, 0)[0]["status"] == "NO_MATCHED_LOGIC_QUEUE"


def test_configured_limits_cap_requests(start: Start) -> None:
    def fill(store: QueueStore) -> None:
        for _ in range(10):
            store.put("t", 0, b"x" * 1_000)

    node, _ = start(fill, reader={"max_pull_messages": 6, "max_pull_bytes": 4_096, "max_wait_ms": 100})
    client = node.client()
    assert client.pull("t", 0, 0, max_messages=1_000, max_bytes=1 << 40)[0]["count"] == 3
    assert client.pull("t", 0, 0)[0]["count"] == 3
    began = time.monotonic()
    assert client.pull("t", 0, 10, wait_ms=1 << 40)[0]["count"] == 0
    assert time.monotonic() - began < 5


def test_large_messages_come_from_the_mapping(start: Start) -> None:
    """Replies of several megabytes, with the segment deleted while they may still be on their way."""

    def fill(store: QueueStore) -> None:
        for number in range(12):
            store.put("t", 0, bytes([number]) * 700_000)

    node, store = start(fill, segment_bytes=16 << 20)
    for tcp in (True, False):
        client = node.client(tcp=tcp)
        assert bodies(client.pull("t", 0, 0)) == store.bodies("t", 0)[:11]
        for _ in range(5):
            client.send("pull", topic="t", queue=0, offset=0)
        for _ in range(5):
            assert bodies(client.receive()) == store.bodies("t", 0)[:11]


def test_nothing_above_the_bound_or_below_the_minimum(start: Start) -> None:
    node, store = start(ten)
    records = store.records["t", 0]
    client = node.client()
    hidden = store.put("t", 0, b"hidden")
    assert client.pull("t", 0, 10)[0]["status"] == "OFFSET_OVERFLOW_ONE"
    node.show(store.end - 1)
    assert client.pull("t", 0, 10)[0]["status"] == "OFFSET_OVERFLOW_ONE"
    assert client.refusal("view", physical_offset=hidden.physical_offset) == "INVALID_PARAMETER"
    node.control.put(Word.FLUSHED, store.end)  # its producer may have its place now, the queue has it not yet
    _, [view] = client.ask("view", physical_offset=hidden.physical_offset)
    assert decode_record(view).body == b"hidden"
    assert client.pull("t", 0, 10)[0]["status"] == "OFFSET_OVERFLOW_ONE"
    node.show(store.end)
    assert bodies(client.pull("t", 0, 10)) == [b"hidden"]
    node.control.put(Word.MIN_OFFSET, records[4].physical_offset)
    header, _ = client.pull("t", 0, 0)
    assert (header["status"], header["next_offset"], header["min_offset"]) == ("OFFSET_TOO_SMALL", 4, 4)
    assert client.refusal("view", physical_offset=records[3].physical_offset) == "INVALID_PARAMETER"


def test_a_consumer_is_not_sent_back_while_the_dispatcher_catches_up(start: Start) -> None:
    """After a crash the queues may end below what was shown before; they will grow to it again."""
    node, store = start(ten)
    client = node.client()
    node.control.put(Word.RECOVERED_END, store.end + 1_000)
    header, _ = client.pull("t", 0, 12)
    assert (header["status"], header["next_offset"]) == ("OFFSET_OVERFLOW_ONE", 12)
    node.control.put(Word.RECOVERED_END, store.end)
    header, _ = client.pull("t", 0, 12)
    assert (header["status"], header["next_offset"]) == ("OFFSET_OVERFLOW_BADLY", 10)


def test_a_seek_to_a_message_that_is_not_dispatched_waits_for_it(start: Start) -> None:
    """What is acknowledged may be sought at once: the consumer was sent back to the end of what was dispatched."""
    node, store = start(ten)
    client = node.client()
    for body in (b"10", b"11", b"12"):
        store.put("t", 0, body)
    node.control.put(Word.WRITTEN, store.end)
    client.send("pull", topic="t", queue=0, offset=12, wait_ms=20_000)
    assert client.is_silent(0.3)
    node.show(store.end)
    assert bodies(client.receive()) == [b"12"]
    assert client.pull("t", 0, 15, wait_ms=20_000)[0]["status"] == "OFFSET_OVERFLOW_BADLY"


def test_an_offset_behind_the_log_is_told_so_once_the_dispatcher_is_there(start: Start) -> None:
    node, store = start(ten)
    client = node.client()
    store.put("t", 0, b"10")
    node.control.put(Word.WRITTEN, store.end)
    header, _ = client.pull("t", 0, 50, wait_ms=300)
    assert (header["status"], header["next_offset"]) == ("OFFSET_OVERFLOW_ONE", 50)
    assert client.pull("t", 0, 50)[0]["status"] == "OFFSET_OVERFLOW_BADLY"  # without a wait at once
    client.send("pull", topic="t", queue=0, offset=50, wait_ms=20_000)
    assert client.is_silent(0.3)
    node.show(store.end)
    node.control.put(Word.WRITTEN, store.end + 1_000)  # whoever keeps sending does not make the answer later
    header, _ = client.receive()
    assert (header["status"], header["next_offset"]) == ("OFFSET_OVERFLOW_BADLY", 11)


# ---------------------------------------------------------------- long polls


def test_a_parked_pull_is_woken(start: Start) -> None:
    """By the dispatcher's word about its queue and no other; sweeps are out of reach here."""
    node, store = start(ten, reader={"sweep_interval_ms": 60_000})
    client = node.client()
    client.send("pull", topic="t", queue=0, offset=10, wait_ms=20_000)
    assert client.is_silent(0.3)
    store.put("t", 0, b"new")
    node.show(store.end)
    node.changed(("t", 1), ("u", 0))
    assert client.is_silent(0.3)
    node.changed(("t", 1), ("t", 0))
    assert bodies(client.receive()) == [b"new"]


def test_wake_ups_while_nobody_waits_cost_nothing(start: Start) -> None:
    """Dispatched batches do not wake a reader without parked pulls; a pull parked behind thousands of them is woken."""
    node, store = start(ten, reader={"sweep_interval_ms": 60_000})
    client = node.client()
    client.pull("t", 0, 0)
    time.sleep(0.2)
    process = psutil.Process(node.process.pid)
    before = process.num_ctx_switches().voluntary
    for _ in range(100):
        time.sleep(0.01)
        for _ in range(50):
            node.changed(("t", 0))
    assert process.num_ctx_switches().voluntary - before < 20
    client.send("pull", topic="t", queue=0, offset=10, wait_ms=20_000)
    assert client.is_silent(0.5)
    store.put("t", 0, b"new")
    node.show(store.end)
    node.changed(("t", 0))
    assert bodies(client.receive()) == [b"new"]


def is_readable(bells: list[Doorbell], timeout_s: float) -> bool:
    """Whether one of them rings in time; a suite may have more descriptors than ``select`` can name."""
    poller = select.poll()
    for bell in bells:
        poller.register(bell, select.POLLIN)
    return bool(poller.poll(timeout_s * 1_000))


def test_who_waits_is_published_and_ends_the_pauses_of_others(start: Start) -> None:
    """The first one rings; who is only away to work off what it got does not, for nobody has slowed down meanwhile."""
    node, store = start(ten, reader={"sweep_interval_ms": 60_000})
    bells = [Doorbell(node.layout.doorbell(role)) for role in ("flush", "reput")]
    try:
        for role in ("flush", "reput"):
            node.control.put_worker(role_slot(role), WorkerWord.ASLEEP, NAPPING)

        def until_ms() -> int:
            return node.control.worker(role_slot("reader-0"), WorkerWord.AWAITED_UNTIL_MS)

        def rung() -> bool:
            return all(is_readable([bell], 5) for bell in bells)

        def is_quiet() -> bool:
            return not is_readable(bells, 0.1)

        def park(offset: int) -> None:
            client.send("pull", topic="t", queue=0, offset=offset, wait_ms=20_000)
            eventually(lambda: until_ms() > 1 << 60, "it is published that someone waits")

        def answer() -> None:
            store.put("t", 0, b"new")
            node.show(store.end)
            node.changed(("t", 0))
            assert bodies(client.receive()) == [b"new"]
            eventually(lambda: until_ms() < 1 << 60, "it is published that nobody waits any more")

        client = node.client()
        client.pull("t", 0, 0)
        assert until_ms() == 0
        assert is_quiet()
        park(10)
        assert rung()
        answer()
        assert 0 < until_ms() - monotonic_ms() <= 100
        time.sleep(0.2)
        for bell in bells:
            bell.clear()
        park(11)
        assert rung()
        answer()
        node.control.put_worker(role_slot("reader-0"), WorkerWord.AWAITED_UNTIL_MS, monotonic_ms() + 5_000)
        for bell in bells:
            bell.clear()
        park(12)
        assert is_quiet()
    finally:
        for bell in bells:
            bell.close()


def test_a_lost_wake_up_is_covered_by_the_sweep(start: Start) -> None:
    node, store = start(ten, reader={"sweep_interval_ms": 100})
    client = node.client()
    for topic, queue, offset in (("t", 0, 10), ("t", 1, 0)):
        client.send("pull", topic=topic, queue=queue, offset=offset, wait_ms=20_000)
    assert client.is_silent(0.3)
    store.put("t", 0, b"new")
    store.put("t", 1, b"first of its queue")
    node.show(store.end)
    found = {bodies(client.receive(3))[0], bodies(client.receive(3))[0]}
    assert found == {b"new", b"first of its queue"}


def test_time_runs_out_in_order(start: Start) -> None:
    node, _ = start(ten)
    client = node.client()
    waits = {client.send("pull", topic="t", queue=0, offset=10, wait_ms=wait): wait for wait in (900, 100, 500)}
    began = time.monotonic()
    for wait in (100, 500, 900):
        header, frames = client.receive()
        assert waits[header["id"]] == wait
        assert (header["status"], header["count"], header["next_offset"]) == ("OFFSET_OVERFLOW_ONE", 0, 10)
        assert not frames
        assert wait / 1000 - 0.01 <= time.monotonic() - began < wait / 1000 + 2


def test_a_filter_waits_on_behind_what_it_rejects(start: Start) -> None:
    node, store = start(ten)
    client = node.client()
    client.send("pull", topic="t", queue=0, offset=0, wait_ms=20_000, filter="C")
    assert client.is_silent(0.2)
    for tag in ("D", "D", "C", "D"):
        store.put("t", 0, tag.encode(), tag=tag)
        node.show(store.end)
        node.changed(("t", 0))
        if tag == "D" and store.bodies("t", 0)[-1] != b"C" and len(store.bodies("t", 0)) < 13:
            assert client.is_silent(0.2)
    header, _ = reply = client.receive()
    assert bodies(reply) == [b"C"]
    assert header["next_offset"] in (13, 14)
    header, _ = client.pull("t", 0, 0, wait_ms=200, filter="none")
    assert (header["status"], header["next_offset"], header["count"]) == ("NO_MATCHED_MESSAGE", 14, 0)


def test_parked_pulls_are_bounded(start: Start) -> None:
    """Eight in all, a quarter of them from one client; those of clients that left make room when their time is up."""
    node, _ = start(ten, reader={"max_parked_pulls": 8})
    clients = [node.client() for _ in range(5)]
    for client in clients[:4]:
        for _ in range(2):
            client.send("pull", topic="t", queue=0, offset=10, wait_ms=1_500)
    assert all(client.is_silent(0.1) for client in clients)
    for client in (clients[0], clients[4]):
        header, _ = client.ask("pull", topic="t", queue=0, offset=10, wait_ms=1_500)
        assert (header["code"], header["retry_after_ms"]) == ("SYSTEM_BUSY", 1_000)
    assert bodies(clients[0].pull("t", 0, 9)) == [b"9"]  # only waiting is refused
    for client in clients[:4]:
        client.socket.close()
    time.sleep(2)
    clients[4].send("pull", topic="t", queue=0, offset=10, wait_ms=100)
    assert clients[4].receive()[0]["count"] == 0


def test_a_client_that_does_not_read_is_held_back(start: Start) -> None:
    """Two hundred answers of 8 MiB for nobody: the node's memory stays bounded, other clients are served."""

    def fill(store: QueueStore) -> None:
        for number in range(24):
            store.put("t", number % 2, bytes([number]) * 700_000)

    node, store = start(fill, segment_bytes=32 << 20)
    process = psutil.Process(node.process.pid)
    node.client().pull("t", 0, 0)
    before = process.memory_full_info().uss
    greedy = node.client(tcp=True, RCVHWM=1, RCVBUF=65_536)
    for _ in range(200):
        greedy.send("pull", topic="t", queue=0, offset=0)
    other = node.client()
    for _ in range(20):
        assert bodies(other.pull("t", 1, 0)) == store.bodies("t", 1)[:11]
        time.sleep(0.02)
    assert process.memory_full_info().uss - before < 250 << 20
    codes = [greedy.receive()[0].get("code", "served") for _ in range(200)]
    assert codes.count("served") >= 5
    assert codes.count("SYSTEM_BUSY") >= 100
    assert bodies(greedy.pull("t", 0, 0)) == store.bodies("t", 0)[:11]


# ---------------------------------------------------------------- topics


def test_topics_come_and_go(start: Start) -> None:
    node, store = start(ten)
    client = node.client()
    assert client.refusal("pull", topic="new", queue=0, offset=0) == "TOPIC_NOT_EXIST"
    settings = {"read_queues": 2, "write_queues": 2, "perm": 6, "attributes": {}}
    # The coordinator's order: file, word, news. Without the file a reader that does not subscribe yet never learns of it.
    store.topic("new", 2)
    store.put("new", 0, b"hello")
    node.show(store.end)
    node.control.put(Word.TOPICS_VERSION, 1)
    node.topics.send_multipart([b"topics", orjson.dumps({"version": 1, "topics": {"new": settings}, "deleted": []})])
    deadline = time.monotonic() + 5
    while not client.pull("new", 0, 0)[0]["ok"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert bodies(client.pull("new", 0, 0)) == [b"hello"]
    # Without any news: the word alone makes the reader look.
    store.topic("silent", 1, perm=2)
    node.control.put(Word.TOPICS_VERSION, 2)
    assert client.refusal("pull", topic="silent", queue=0, offset=0) == "NO_PERMISSION"
    # A deletion answers those who wait and hides what was stored before, also from a namesake.
    client.send("pull", topic="new", queue=0, offset=1, wait_ms=20_000)
    assert client.is_silent(0.2)
    tombstone = store.end
    (store.layout.own / "deleted_topics.json").write_bytes(orjson.dumps({"new": tombstone}))
    del store.topics["new"]
    store.save_topics()
    node.control.put(Word.TOPICS_VERSION, 3)
    news = {"version": 3, "topics": {}, "deleted": [["new", tombstone, 0]]}
    node.topics.send_multipart([b"topics", orjson.dumps(news)])
    assert client.receive()[0]["code"] == "TOPIC_NOT_EXIST"
    store.topic("new", 2)
    node.control.put(Word.TOPICS_VERSION, 4)
    # Until the dispatcher has removed the old queue, what lies there says nothing of the namesake.
    header, _ = client.pull("new", 0, 0)
    assert (header["status"], header["count"], header["next_offset"]) == ("OFFSET_OVERFLOW_ONE", 0, 0)
    assert client.ask("offsets", topic="new", queues=[0])[0]["queues"] == [[0, 0, 0, None]]
    assert client.refusal("view", physical_offset=tombstone - 150) == "INVALID_PARAMETER"
    store.delete_queue("new", 0)
    node.control.put_dispatcher(0, DispatcherWord.TOPICS, 4)
    store.put("new", 0, b"namesake")
    node.show(store.end)
    assert bodies(client.pull("new", 0, 0)) == [b"namesake"]
    assert client.refusal("pull", topic="new", queue=0, offset=0, incarnation=7) == "TOPIC_NOT_EXIST"
    assert bodies(client.pull("new", 0, 0, incarnation=0)) == [b"namesake"]


def test_news_that_skip_a_version_mean_the_file(start: Start) -> None:
    node, store = start(ten)
    client = node.client()
    store.topic("lost", 1)
    node.control.put(Word.TOPICS_VERSION, 6)
    node.topics.send_multipart([b"topics", orjson.dumps({"version": 6, "topics": {}, "deleted": []})])
    deadline = time.monotonic() + 5
    while not client.pull("lost", 0, 0)[0]["ok"]:
        assert time.monotonic() < deadline


# ---------------------------------------------------------------- look-ups


def test_offsets(start: Start) -> None:
    node, store = start(ten)
    client = node.client()
    header, _ = client.ask("offsets", topic="t")
    assert header["queues"] == [[0, 0, 10, None], [1, 0, 0, None], [2, 0, 0, None], [3, 0, 0, None]]
    for boundary, timestamp, expected in [
        ("lower", 1_041, 5), ("upper", 1_041, 4), ("lower", 1_040, 4), ("upper", 1_040, 4), ("lower", 0, 0),
        ("upper", 0, 0), ("lower", 1 << 50, 10), ("upper", 1 << 50, 9),
    ]:  # fmt: skip
        header, _ = client.ask("offsets", topic="t", queues=[1, 0], timestamp=timestamp, boundary=boundary)
        assert header["queues"] == [[1, 0, 0, 0], [0, 0, 10, expected]]
    node.control.put(Word.MIN_OFFSET, store.records["t", 0][7].physical_offset)
    assert client.ask("offsets", topic="t", queues=[0])[0]["queues"] == [[0, 7, 10, None]]


def test_view(start: Start) -> None:
    node, store = start(ten)
    client = node.client()
    for record in store.records["t", 0]:
        header, frames = client.ask("view", physical_offset=record.physical_offset)
        assert header["size"] == record.total_size
        assert decode_record(frames[0]).body == record.body
    for offset in (-1, 1, store.end, 1 << 62, 1 << 63):
        assert client.refusal("view", physical_offset=offset) == "INVALID_PARAMETER"


# ---------------------------------------------------------------- bad requests


BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("UNKNOWN_OP", {"op": "send"}),
    ("UNKNOWN_OP", {"op": "x" * 10_000}),
    ("TOPIC_NOT_EXIST", {"op": "pull", "topic": "nobody", "queue": 0, "offset": 0}),
    ("TOPIC_NOT_EXIST", {"op": "pull", "topic": "../../etc", "queue": 0, "offset": 0}),
    ("TOPIC_NOT_EXIST", {"op": "offsets", "topic": "nobody"}),
    ("NO_PERMISSION", {"op": "pull", "topic": "write-only", "queue": 0, "offset": 0}),
    *[
        ("INVALID_PARAMETER", {"op": "pull", "topic": "t", "queue": 0, "offset": 0, **wrong})  # type: ignore[dict-item]
        for wrong in [
            {"topic": None}, {"topic": 5}, {"topic": ""}, {"queue": None}, {"queue": "0"}, {"queue": 4}, {"queue": -1},
            {"queue": True}, {"queue": 1 << 63}, {"offset": None}, {"offset": 1.5}, {"offset": "0"},
            {"max_messages": 0}, {"max_messages": -5}, {"max_messages": []}, {"max_bytes": 0}, {"wait_ms": -1},
            {"wait_ms": "1"}, {"mode": "words"}, {"mode": 7}, {"mode": []}, {"filter": 7}, {"filter": "||"},
            {"filter": "x" * 70_000},
        ]
    ],
    *[
        ("INVALID_PARAMETER", {"op": "offsets", "topic": "t", **wrong})  # type: ignore[dict-item]
        for wrong in [
            {"topic": {}}, {"queues": 0}, {"queues": ["0"]}, {"queues": [4]}, {"queues": [0] * 5}, {"timestamp": "now"},
            {"timestamp": 0, "boundary": "middle"},
        ]
    ],
    ("INVALID_PARAMETER", {"op": "view"}),
    ("INVALID_PARAMETER", {"op": "view", "physical_offset": "0"}),
]  # fmt: skip


def test_bad_requests_are_answered_and_survived(start: Start) -> None:
    def fill(store: QueueStore) -> None:
        ten(store)
        store.topic("write-only", 1, perm=2)

    node, store = start(fill)
    client = node.client()
    for code, fields in BAD_REQUESTS:
        assert client.refusal(**fields) == code, fields
    raw = [
        ("BAD_HEADER", b""),
        ("BAD_HEADER", b"{"),
        ("BAD_HEADER", b"[]"),
        ("BAD_HEADER", b'{"v":1,"id":1}'),
        ("BAD_HEADER", b'{"v":1,"op":"pull"}'),
        ("BAD_HEADER", b'{"v":1,"op":"pull","id":"1"}'),
        ("BAD_HEADER", b"\xff\xfe"),
        ("BAD_HEADER", b" " * (1 << 21)),
        ("UNSUPPORTED_VERSION", b'{"v":2,"op":"pull","id":1}'),
    ]
    for code, frame in raw:
        client.socket.send(frame)
        assert client.receive()[0]["code"] == code
    client.socket.send_multipart([b"", b"", b"junk"])
    assert client.receive()[0]["code"] == "BAD_HEADER"
    assert client.pull("t", 0, (1 << 63) - 1)[0]["status"] == "OFFSET_OVERFLOW_BADLY"
    assert bodies(client.pull("t", 0, 0)) == store.bodies("t", 0)


# ---------------------------------------------------------------- life


def test_stop_answers_those_who_wait(start: Start) -> None:
    node, _ = start(ten)
    client = node.client()
    requests = {client.send("pull", topic="t", queue=0, offset=10, wait_ms=20_000) for _ in range(50)}
    assert client.is_silent(0.2)
    node.stop()
    answers = [client.receive(2)[0] for _ in range(50)]
    assert {answer["id"] for answer in answers} == requests
    assert {(answer["status"], answer["count"]) for answer in answers} == {("OFFSET_OVERFLOW_ONE", 0)}
    assert node.exit_code == 0
    assert node.control.worker(role_slot("reader-0"), WorkerWord.STATE) == WorkerState.STOPPED


def test_idle_costs_next_to_nothing(start: Start) -> None:
    """A thousand pulls parked with different deadlines: at most about five wake-ups a second."""
    node, _ = start(ten)
    client = node.client()
    for number in range(1_000):
        client.send("pull", topic="t", queue=0, offset=10, wait_ms=20_000 + number)
    assert client.is_silent(1)
    process = psutil.Process(node.process.pid)
    before = process.num_ctx_switches().voluntary, sum(process.cpu_times()[:2])
    time.sleep(3)
    after = process.num_ctx_switches().voluntary, sum(process.cpu_times()[:2])
    assert after[0] - before[0] <= 15
    assert after[1] - before[1] <= 0.15


def test_a_dead_supervisor_ends_it(start: Start) -> None:
    node, _ = start(ten)
    node.lifeline.close()
    assert node.process.wait(10) == 75
    node.exit_code = 0  # as it should be; the fixture expects a clean stop


def test_wrong_segment_size_is_refused(tmp_path: Path) -> None:
    """The exit code tells the supervisor not to try again; the reason names both sizes."""
    store = QueueStore(tmp_path / "store")
    store.topic("t")
    store.put("t", 0, b"x")
    node_files.make_folders(store.layout)
    node_files.empty_run_folder(store.layout)
    ControlBlock(store.layout.control, create=True).close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    config = json.dumps({"commit_log": {"segment_bytes": 131_072}})
    arguments = [sys.executable, str(PROCESS), str(store.root), str(theirs.fileno()), config]
    with ours, theirs:
        done = subprocess.run(
            arguments, pass_fds=[theirs.fileno()], capture_output=True, timeout=60, env=os.environ, check=False
        )
        assert done.returncode == 74
        message = orjson.loads(ours.recv(65_536))
    shutil.rmtree(store.layout.sockets)
    assert message["event"] == "error"
    assert "65536" in message["error"]
    assert "131072" in message["error"]
