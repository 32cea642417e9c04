"""Goal: what an idempotent producer sends is stored once, whoever sends it again, and it is told so.

Method: a real node; the log is read back by a consumer of every queue. Repetitions are made by new producers of the same id,
by requests as a client of another language would send them, and by killing processes between the append and the answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from commitmq import Admin, BatchSendError, ExactlyOnce, InvalidMessageError, Message, Outcome, Producer, SendError
from commitmq.client.aio import AsyncProducer
from commitmq.client.sending.run_encoder import RunLayout, encode_run
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import UniqueIds
from commitmq.format.producer_mark import mark_prefix, parse_mark
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.producers import ProducerSnapshot
from golden_stores import GOLDEN_SEGMENT_BYTES, GoldenStore
from messages_stored import read_all
from nodes import Node, commitmq, eventually, free_ports, start_node, started

pytestmark = pytest.mark.timeout(180)

SEGMENT_BYTES = 1 << 18
SETTINGS = (
    f"commit_log.segment_bytes={SEGMENT_BYTES}",
    "commit_log.max_message_bytes=65536",
    "producers.window=3",
    "producers.snapshot_bytes=65536",
    "producers.snapshot_interval_ms=100",
    "supervisor.restart_backoff_max_ms=200",
)
IDS = UniqueIds()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = ("consume_queue.enable_lmq=true", "consume_queue.enable_multi_dispatch=true")
    with start_node(tmp_path_factory.mktemp("idempotent"), *SETTINGS, *settings) as made:
        yield made


class Peer:
    """A client of another language: it says what it wants."""

    def __init__(self, node: Node) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.socket.connect(node.endpoints()["writer"])
        self.number = 0

    def ask(self, op: str, payload: bytes, **fields: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send_multipart([orjson.dumps({"v": 1, "op": op, "id": self.number, **fields}), payload])
        answer: dict[str, Any] = orjson.loads(self.socket.recv())
        assert answer["id"] == self.number
        return answer

    def run(self, name: str, epoch: int, topic: str, queue: int, sequence: int, count: int) -> dict[str, Any]:
        layout = RunLayout(topic, born_v6=False, store_v6=False, properties_crc=True, mark=mark_prefix(name, epoch))
        bodies = [b"%d" % number for number in range(sequence, sequence + count)]
        run = encode_run(layout, queue, bodies, b"", IDS, born=1, sequence=sequence)
        fields = {"producer_id": name, "producer_epoch": epoch, "sequence": sequence}
        return self.ask("append", run.data, topic=topic, queue=queue, count=count, **fields)


@pytest.fixture
def peer(node: Node) -> Iterator[Peer]:
    made = Peer(node)
    yield made
    made.context.destroy(linger=0)


def bodies_of(messages: list[Message], queue: int) -> list[bytes]:
    return [one.body for one in sorted(messages, key=lambda one: one.queue_offset) if one.queue_id == queue]


def as_named(node: Node, name: str, epoch: int = 0, **settings: Any) -> Producer:
    return Producer(node.address, delivery=ExactlyOnce(name, epoch), **settings)


# ---------------------------------------------------------------- repetitions


def test_a_second_attempt_stores_only_what_is_missing(node: Node) -> None:
    rows = [b"row %d" % number for number in range(1000)]
    with as_named(node, "job") as producer:
        first = list(producer.send_batch("again", rows[:400], queue=1))
        single = producer.send("again", rows[400], queue=1)
        later = producer.send_async("again", rows[401], queue=1).result()
    assert not any(one.duplicate for one in (*first, single, later))
    with as_named(node, "job") as producer:
        # Cut into batches differently, with ids of its own.
        parts = [list(producer.send_batch("again", rows[at : at + 150], queue=1)) for at in range(0, 1000, 150)]
    second = [one for part in parts for one in part]
    assert [one.duplicate for one in second] == [True] * 402 + [False] * 598
    known = [one for one in second[:402] if one.queue_offset >= 0]
    assert known, "the last runs must be remembered"
    for before, after in zip([*first, single, later], second, strict=False):
        if after.queue_offset >= 0:
            assert after == before._replace(duplicate=True)
        else:
            assert (after.physical_offset, after.msg_id, after.unique_id) == (-1, "", "")
    assert [one.queue_offset for one in second[402:]] == list(range(402, 1000))
    messages = read_all(node, "again")
    assert bodies_of(messages, 1) == rows
    by_offset = {one.queue_offset: one for one in messages}
    for one in second[402:]:
        assert by_offset[one.queue_offset].physical_offset == one.physical_offset
        assert by_offset[one.queue_offset].msg_id == one.msg_id
    marks = [parse_mark(one.properties["__PSEQ__"]) for one in by_offset.values()]
    assert sorted(mark for mark in marks if mark is not None) == [("job", 0, number) for number in range(1000)]


def test_a_run_that_spans_segments_is_told_where_all_of_it_lies(node: Node) -> None:
    rows = [b"%03d" % number * 300 for number in range(400)]
    with as_named(node, "long") as producer:
        first = list(producer.send_batch("long", rows, queue=0))
    with as_named(node, "long") as producer:
        second = list(producer.send_batch("long", rows, queue=0))
    assert len({one.physical_offset // SEGMENT_BYTES for one in first}) > 1
    assert second == [one._replace(duplicate=True) for one in first]


def test_two_attempts_at_once_store_each_message_once(node: Node) -> None:
    rows = [b"%d" % number for number in range(3000)]

    def attempt(size: int) -> int:
        with as_named(node, "speculation") as producer:
            return sum(
                not one.duplicate
                for at in range(0, len(rows), size)
                for one in producer.send_batch("race", rows[at : at + size], queue=0)
            )

    with ThreadPoolExecutor(3) as pool:
        stored = list(pool.map(attempt, (70, 100, 130)))
    assert sum(stored) == len(rows)
    assert bodies_of(read_all(node, "race"), 0) == rows


def test_several_queues_by_sharding_key(node: Node) -> None:
    rows = [b"%d" % number for number in range(500)]
    keys = [f"key {number % 7}" for number in range(500)]
    for attempt in range(2):
        with as_named(node, "sharded") as producer:
            results = producer.send_batch("sharded", rows, sharding_keys=keys)
            assert [one.duplicate for one in results] == [bool(attempt)] * 500
            assert len({one.queue for one in results}) > 1
    assert sorted(one.body for one in read_all(node, "sharded")) == sorted(rows)


def test_threads_futures_and_batches_share_one_producer(node: Node) -> None:
    with Producer(node.address, delivery=ExactlyOnce()) as producer:

        def work(number: int) -> None:
            for at in range(20):
                name = b"%d/%d" % (number, at)
                producer.send("mixed", name + b"/one", queue=at % 2)
                producer.send_batch("mixed", [name + b"/two", name + b"/three"])
                producer.send_async("mixed", name + b"/four")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        producer.flush()
    bodies = [one.body for one in read_all(node, "mixed")]
    assert len(bodies) == len(set(bodies)) == 4 * 20 * 4


def test_the_asyncio_twin(node: Node) -> None:
    async def both() -> list[bool]:
        found = []
        for _ in range(2):
            async with AsyncProducer(node.address, delivery=ExactlyOnce("aio")) as producer:
                found.append((await producer.send("aio", b"one", queue=0)).duplicate)
                found += [one.duplicate for one in await producer.send_batch("aio", [b"two"], queue=0)]
        return found

    assert asyncio.run(both()) == [False, False, True, True]


def test_a_message_that_was_received_can_be_sent_on(node: Node) -> None:
    with as_named(node, "from") as producer:
        producer.send("received", b"x", queue=0, tags="T")
    (message,) = read_all(node, "received")
    with Producer(node.address) as plain, as_named(node, "to") as sure:
        plain.send("passed-on", message, queue=0)
        sure.send("passed-on", message, queue=0)
    marks = sorted(one.properties.get("__PSEQ__", "") for one in read_all(node, "passed-on"))
    assert marks == ["", "to:0:000000000000"]


# ---------------------------------------------------------------- epochs, gaps, refusals


def test_a_higher_epoch_shuts_out_the_lower_one(node: Node) -> None:
    with as_named(node, "fenced", 1) as old, as_named(node, "fenced", 2) as new:
        assert not old.send("fence", b"old", queue=0).duplicate
        assert not new.send("fence", b"new", queue=0).duplicate
        with pytest.raises(SendError) as refused:
            old.send("fence", b"late", queue=1)
        assert (refused.value.code, refused.value.outcome) == ("PRODUCER_FENCED", Outcome.NOT_STORED)
        with pytest.raises(SendError, match="make a new one"):
            old.send_batch("fence", [b"later"], queue=0)
        assert not new.send("fence", b"newer", queue=0).duplicate
    assert bodies_of(read_all(node, "fence"), 0) == [b"old", b"new", b"newer"]


@pytest.mark.parametrize("delivery", [ExactlyOnce("gap"), ExactlyOnce()], ids=["given", "own"])
def test_what_the_node_refuses_leaves_no_gap(node: Node, delivery: ExactlyOnce) -> None:
    """Messages that were refused must not keep those behind them out, nor take their numbers."""
    topic = f"gap-{delivery.producer_id}"
    with Producer(node.address, delivery=delivery) as producer, Admin(node.address) as admin:
        expected = []
        for number in range(3):
            _permit(admin, topic, 6)
            body = b"a%d" % number
            eventually(lambda body=body: _is_stored(producer, topic, body), "it can be written to")  # type: ignore[misc]
            producer.send_batch(topic, [b"b%d" % number, b"c%d" % number], queue=0)
            expected += [body, b"b%d" % number, b"c%d" % number]
            _permit(admin, topic, 4)
            eventually(lambda: not _is_stored(producer, topic, b"x"), "it cannot be written to")
            refused = [producer.send_async(topic, b"no", queue=0) for _ in range(500)]
            errors = [one.exception() for one in refused]
            assert all(isinstance(one, SendError) and one.outcome is Outcome.NOT_STORED for one in errors)
            with pytest.raises(BatchSendError) as batch:
                producer.send_batch(topic, [b"no"] * 3, queue=0)
            assert batch.value.outcome is Outcome.NOT_STORED
    assert [body for body in bodies_of(read_all(node, topic), 0) if body != b"x"] == expected


def _permit(admin: Admin, topic: str, perm: int) -> None:
    admin._ask("coordinator", "topic.create", {"topic": topic, "queues": 1, "perm": perm, "update": True})


def _is_stored(producer: Producer, topic: str, body: bytes) -> bool:
    try:
        producer.send(topic, body, queue=0)
    except SendError as error:
        assert (error.code, error.outcome) == ("NO_PERMISSION", Outcome.NOT_STORED)
        return False
    return True


def test_a_topic_made_anew_begins_anew(node: Node) -> None:
    with Producer(node.address, delivery=ExactlyOnce()) as own, as_named(node, "remade") as named:
        with Admin(node.address) as admin:
            for producer in (own, named):
                producer.send_batch("remade", [b"1", b"2"], queue=0)
            eventually(
                lambda: admin.status()["positions"]["dispatched"] == admin.status()["positions"]["written"], "all"
            )
            admin.topic_delete("remade")
            admin.topic_create("remade", queues=1)
            time.sleep(0.5)  # the writer hears of it
        assert not own.send("remade", b"3", queue=0).duplicate, "it goes on by itself, in a new epoch"
        assert own.send_batch("remade", [b"4"], queue=0)[0].queue_offset == 1
        with pytest.raises(SendError) as refused:
            named.send("remade", b"5", queue=0)
        assert refused.value.code == "UNKNOWN_PRODUCER_ID"
    with as_named(node, "remade") as named:
        assert not named.send("remade", b"6", queue=0).duplicate
    assert bodies_of(read_all(node, "remade"), 0) == [b"3", b"4", b"6"]


def test_what_takes_no_idempotent_sends_says_so(node: Node, peer: Peer) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("inner", queues=1, attributes={"queue.type": "BatchCQ"})
        admin.topic_create("volatile", queues=1, attributes={"storage.type": "memory"})
    with Producer(node.address, delivery=ExactlyOnce()) as own, as_named(node, "named") as named:
        with pytest.raises(InvalidMessageError, match="BatchCQ"):
            own.send_batch("inner", [b"x"])
        with pytest.raises((InvalidMessageError, SendError), match="memory"):
            own.send("volatile", b"x")
        with pytest.raises((InvalidMessageError, SendError), match="memory"):
            own.send_batch("volatile", [b"x"])
        with pytest.raises(InvalidMessageError, match="further queues"):
            own.send("t", b"x", multi_dispatch=["%LMQ%a"])
        for send in (named.send, named.send_async):
            with pytest.raises(InvalidMessageError, match="needs queue"):
                send("t", b"x")
        with pytest.raises(InvalidMessageError, match="needs queue"):
            named.send_batch("t", [b"x"])
    for of in (("a:b", 0), ("a", -1), (None, 1)):
        with pytest.raises(ValueError, match="producer_"):
            Producer(node.address, delivery=ExactlyOnce(*of))
    good = {"producer_id": "raw", "producer_epoch": 0, "sequence": 0, "topic": "t", "queue": 0}
    for wrong in (
        {"producer_id": "a:b"},
        {"producer_id": ""},
        {"producer_id": "x" * 65},
        {"producer_id": 7},
        {"producer_id": None},
        {"producer_epoch": -1},
        {"producer_epoch": "0"},
        {"producer_epoch": 10**15},
        {"sequence": -1},
        {"sequence": 10**12},
        {"sequence": True},
        {"queue": -1},
    ):
        answer = peer.ask("send", b"x", **{**good, **wrong})
        assert (answer["code"], answer["outcome"]) == ("INVALID_PARAMETER", "not_stored"), wrong
    for missing in ("producer_epoch", "sequence", "queue"):
        answer = peer.ask("send", b"x", **{name: value for name, value in good.items() if name != missing})
        assert (answer["code"], answer["outcome"]) == ("INVALID_PARAMETER", "not_stored"), missing
    forged = peer.ask("send", b"x", topic="t", queue=0, properties={"__PSEQ__": "raw:0:000000000000"})
    assert forged["code"] == "MESSAGE_ILLEGAL"
    multi = peer.ask("send", b"x", **good, properties={"INNER_MULTI_DISPATCH": "%LMQ%a"})
    assert multi["code"] == "MESSAGE_ILLEGAL"
    assert peer.ask("batch", b"x", **{**good, "topic": "inner"}, count=1)["code"] == "MESSAGE_ILLEGAL"
    assert peer.ask("send", b"x", **good)["ok"] is True


def test_a_run_must_carry_the_numbers_of_its_header(node: Node, peer: Peer) -> None:
    layout = RunLayout("liar", born_v6=False, store_v6=False, properties_crc=True, mark=mark_prefix("liar", 0))
    run = encode_run(layout, 0, [b"a", b"b"], b"", IDS, born=1, sequence=5)
    good = {"producer_id": "liar", "producer_epoch": 0, "sequence": 5, "topic": "liar", "queue": 0, "count": 2}
    for wrong in ({"sequence": 0}, {"producer_epoch": 1}, {"producer_id": "liar2"}):
        answer = peer.ask("append", run.data, **{**good, **wrong})
        assert (answer["code"], answer["outcome"]) == ("MESSAGE_ILLEGAL", "not_stored")
        assert "__PSEQ__" in answer["error"]
    plain = encode_run(
        RunLayout("liar", born_v6=False, store_v6=False, properties_crc=True), 0, [b"a", b"b"], b"", IDS, born=1
    )
    assert "__PSEQ__" in peer.ask("append", plain.data, **good)["error"]
    marked = {name: good[name] for name in ("topic", "queue", "count")}
    assert peer.ask("append", run.data, **marked)["code"] == "MESSAGE_ILLEGAL", "a mark without its header"
    assert peer.ask("append", run.data, **good)["code"] == "UNKNOWN_PRODUCER_ID"


def test_requests_in_any_order_store_each_number_once(node: Node, peer: Peer) -> None:
    assert peer.run("any", 0, "any", 0, 0, 10)["queue_offset"] == 0
    assert peer.run("any", 0, "any", 0, 11, 5)["code"] == "OUT_OF_ORDER_SEQUENCE"
    overlap = peer.run("any", 0, "any", 0, 5, 10)
    assert (overlap["duplicate"], overlap["rest"]["queue_offset"]) == (False, 10)
    assert [one[0] for one in overlap["stored_before"]] == [5, 6, 7, 8, 9]
    inside = peer.run("any", 0, "any", 0, 3, 9)
    assert inside["duplicate"] is True
    assert [one[0] for one in inside["stored_before"]] == list(range(3, 12))
    assert peer.run("any", 0, "any", 1, 0, 1)["queue_offset"] == 0, "each queue counts by itself"
    assert peer.run("any", 1, "any", 0, 4, 1)["code"] == "OUT_OF_ORDER_SEQUENCE", "a new epoch begins at 0"
    for number in range(10):
        # Another producer between, or neighbours would be one place.
        peer.ask("send", b"other", topic="any", queue=1)
        peer.run("any", 0, "any", 0, 15 + number, 1)
    forgotten = peer.run("any", 0, "any", 0, 0, 2)
    assert forgotten["duplicate"] is True
    assert forgotten["stored_before"] == [[-1, -1, -1, ""]] * 2
    assert bodies_of(read_all(node, "any"), 0) == [b"%d" % number for number in range(25)]


def test_the_command(node: Node, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\nthree\n")
    send = ("produce", "by-command", "--node", node.address, "--file", str(lines))
    for _ in range(2):
        done = commitmq(*send, "--producer-id", "load/1", "--queue", "0")
        assert done.returncode == 0, done.stderr
    assert bodies_of(read_all(node, "by-command"), 0) == [b"one", b"two", b"three"]
    assert commitmq(*send, "--idempotent").returncode == 0
    assert commitmq(*send, "--producer-id", "load/1").returncode == 2
    assert commitmq(*send, "--producer-id", "a:b", "--queue", "0").returncode == 2


# ---------------------------------------------------------------- deaths


@pytest.mark.slow
def test_remembered_across_restarts_and_kills(tmp_path: Path) -> None:
    rows = [b"%d" % number for number in range(300)]
    with start_node(tmp_path, *SETTINGS) as node:

        def attempt(stored_before: int) -> None:
            with as_named(node, "job") as producer:
                results = list(producer.send_batch("jobs", rows, queue=0))
                assert sum(one.duplicate for one in results) == stored_before
                assert [one.queue_offset for one in results] == list(range(len(rows)))

        attempt(0)
        layout = StoreLayout(node.store)
        assert node.stop().returncode == 0
        clean = ProducerSnapshot.load(layout.producers)
        assert clean is not None
        assert b"job" in clean.table, "a stop leaves all of it"
        assert node.start().returncode == 0
        tail = [line for line in node.log().splitlines() if "tail found" in line][-1]
        assert "scanned_bytes=0 " in tail, "after a clean stop nothing has to be read"
        attempt(300)
        before = node.pids()
        os.kill(before["writer"], signal.SIGKILL)
        attempt(300)
        rows += [b"more %d" % number for number in range(100)]
        attempt(300)
        node.kill_all()
        assert node.start().returncode == 0
        attempt(400)
        # Without the snapshot's truth nothing is taken for new: the whole log is read.
        node.kill_all()
        layout.producers.write_bytes(b"nonsense")
        assert node.start().returncode == 0
        assert "the table of idempotent producers is rebuilt from the whole log" in node.log()
        attempt(400)
        node.kill_all()
        ProducerSnapshot(1 << 40, clean.table).save(layout.producers)
        assert node.start().returncode == 0
        attempt(400)
        assert bodies_of(read_all(node, "jobs"), 0) == rows


@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_lost_snapshot_is_made_from_the_log(tmp_path: Path, how: str) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        with as_named(node, "pid") as producer:
            assert not producer.send("jobs", b"once", queue=0).duplicate
        layout = StoreLayout(node.store)
        if how == "stopped":
            assert node.stop().returncode == 0
        else:
            node.kill_all()
        layout.producers.unlink()
        assert node.start().returncode == 0
        told = [
            line
            for line in node.log().splitlines()
            if "the table of idempotent producers is rebuilt from the whole log" in line
        ]
        assert len(told) == 1
        assert str(layout.producers) in told[0]
        with as_named(node, "pid") as producer:
            assert producer.send("jobs", b"once", queue=0).duplicate
        assert bodies_of(read_all(node, "jobs"), 0) == [b"once"]


def test_a_lost_snapshot_is_made_before_the_log_of_a_closed_store_expires(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        with as_named(node, "pid") as producer:
            producer.send("jobs", b"once", queue=0)
        with Producer(node.address) as producer:
            producer.send_batch("other", [bytes(50_000)] * 15, queue=0)
        assert node.stop().returncode == 0
        layout = StoreLayout(node.store)
        layout.producers.unlink()
        expired = commitmq("store", "expire", str(node.store), "--keep-bytes", str(SEGMENT_BYTES))
        assert expired.returncode == 0, expired.stderr
        assert not (layout.commit_log / segment_name(0)).exists()
        assert node.start().returncode == 0
        with as_named(node, "pid") as producer:
            assert producer.send("jobs", b"once", queue=0).duplicate


def test_an_empty_store_and_one_of_rocketmq_are_not_read_for_producers(
    golden_copy: Callable[[str], GoldenStore], tmp_path: Path
) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        assert node.stop().returncode == 0
        StoreLayout(node.store).producers.unlink()
        assert node.start().returncode == 0
        assert "producers are made" not in node.log()
        with as_named(node, "first") as producer:
            assert not producer.send("jobs", b"once", queue=0).duplicate
    golden = golden_copy("clean")
    log = CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES)
    end = max(start + size for start, size in log.iter_spans())
    log.close()
    node = Node(golden.root)
    node.settings = ["network.port=0"]
    with started(node):
        assert "producers are made" not in node.log()
        found = ProducerSnapshot.load(golden.layout.producers)
        assert found is not None
        assert found.position == end
        assert "counted_bytes=0 " in node.log()


def test_snapshots_are_taken_while_it_runs(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node, as_named(node, "runs") as producer:
        path = StoreLayout(node.store).producers
        first = ProducerSnapshot.load(path)
        assert first is not None, "there before the first send"
        assert first.position == 0
        producer.send_batch("t", [b"x"] * 100, queue=0)

        def is_known() -> bool:
            producer.send("t", b"x", queue=0)
            found = ProducerSnapshot.load(path)
            return found is not None and found.position > 0 and b'"runs"' in found.table

        eventually(is_known, "a snapshot with the producer")


@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("writer.after_append", "kill"),
        pytest.param("writer.before_answer", "kill_node", marks=pytest.mark.long),
        pytest.param("writer.before_publish", "kill", marks=pytest.mark.long),
        pytest.param("writer.before_answer", "kill", marks=pytest.mark.slow),
        pytest.param("writer.after_append", "kill_node", marks=pytest.mark.slow),
        pytest.param("writer.before_publish", "kill_node", marks=pytest.mark.long),
    ],
)
def test_killed_between_append_and_answer(tmp_path: Path, point: str, action: str) -> None:
    """The producer's own repetition is answered, or stores what the dead one had not."""
    fired = tmp_path / "fired"
    fired.mkdir()
    extra = {"COMMITMQ_FAILPOINTS": f"{point}={action}@4", "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, f"network.port={free_ports()}", **extra) as node:
        with Producer(node.address, delivery=ExactlyOnce(), timeout_s=60) as producer:
            if action == "kill_node":
                starter = threading.Thread(target=_start_again, args=(node, fired))
                starter.start()
            results = []
            for number in range(4):
                results.append(producer.send("t", b"single %d" % number, queue=0))
                results += producer.send_batch("t", [b"%d/%d" % (number, at) for at in range(50)], queue=0)
            if action == "kill_node":
                starter.join(60)
        assert list(fired.iterdir()), "the failpoint must have fired"
        assert [one.queue_offset for one in results] == list(range(4 * 51))
        expected = [body for n in range(4) for body in (b"single %d" % n, *(b"%d/%d" % (n, at) for at in range(50)))]
        messages = read_all(node, "t")
        assert bodies_of(messages, 0) == expected
        assert {one.queue_offset: one.physical_offset for one in messages} == {
            one.queue_offset: one.physical_offset for one in results
        }


def _start_again(node: Node, fired: Path) -> None:
    deadline = time.monotonic() + 60
    while not list(fired.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    if not node.is_ready():
        node.kill_all()
        node.start()
