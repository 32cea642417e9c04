"""Goal: single sends over the writer's Unix socket say about each message what ZeroMQ sends say, whatever ends meanwhile.

Method: a real node; producers that use the socket, ones that may not, and hand-made connections that misbehave. The writer
is killed and halted.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import orjson
import pytest

from commitmq import InvalidMessageError, Outcome, Producer, SendError
from commitmq.format.constants import Host
from commitmq.format.message_id import pack_host
from commitmq.protocol.channel import MAX_PACKET_BYTES, LocalSocket
from commitmq.store.log.run_check import RecordForm, RunCheck
from messages_stored import read_all
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)
MOST = 4


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = ("topics.default_queues=1", f"network.max_local_connections={MOST}")
    with start_node(tmp_path_factory.mktemp("local"), *settings) as made:
        yield made


@pytest.fixture
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose writer a test may end."""
    with start_node(tmp_path_factory.mktemp("killed"), "topics.default_queues=1") as made:
        yield made


def local_of(producer: Producer) -> LocalSocket | None:
    return producer._lanes.writer.lane.local


def path_of(node: Node) -> str:
    with Producer(node.address) as producer:
        producer.send("path", b"x")
        local = local_of(producer)
        assert local is not None
        return local.path


def connected(node: Node) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(10)
    made.connect(path_of(node))
    assert made.recv(100) == b'{"v":1,"id":null,"ok":true}'
    return made


def packet(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(4, "big") + header + body


def record(topic: str, queue: int, body: bytes) -> bytes:
    """A message as a client puts it into a run."""
    check = RunCheck(store_host=pack_host(Host("127.0.0.1", 10911)), max_message_bytes=4096, properties_crc=True)
    host = pack_host(Host("127.0.0.1", 0))
    form = RecordForm(check, topic.encode(), queue, sys_flag=0, flag=0, born_host=host)
    return form.record(body, b"UNIQ_KEY\x01K\x02", 1_763_800_000_000)


def send_header(number: int, topic: str = "raw", **more: object) -> bytes:
    return orjson.dumps({"v": 1, "op": "send", "id": number, "topic": topic, **more})


@pytest.mark.parametrize("ack", ["memory", "flushed"])
def test_sends_go_there_and_are_stored(node: Node, ack: str) -> None:
    with Producer(node.address, ack=ack) as producer:
        results = [producer.send(f"there-{ack}", f"{number}".encode(), keys="k") for number in range(20)]
        assert local_of(producer) is not None
    assert [one.queue_offset for one in results] == list(range(20))
    stored = read_all(node, f"there-{ack}")
    assert [bytes(one.body) for one in stored] == [f"{number}".encode() for number in range(20)]


def test_ways_take_turns_in_the_order_of_the_calls(node: Node) -> None:
    """What does not fit goes over ZeroMQ, runs do always; one thread's messages stay in order."""
    with Producer(node.address) as producer:
        expected = []
        for number in range(40):
            size = LocalSocket.MAX_BODY_BYTES + (number % 3 - 1) if number % 4 else 10
            body = b"%02d" % number + b"." * (size - 2)
            expected.append(body)
            if number % 5 == 4:
                producer.send_async("turns", body)
            elif number % 7 == 6:
                producer.flush()
                producer.send_batch("turns", [body])
            else:
                producer.send("turns", body)
        producer.flush()
    assert [bytes(one.body) for one in read_all(node, "turns")] == expected


def test_long_headers_go_over_zeromq(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send("wide", b"first")
        result = producer.send("wide", b"second", properties={"long": "x" * 8_000})
    assert result.queue_offset == 1
    assert len(read_all(node, "wide")[1].properties["long"]) == 8_000


def test_refusals_leave_the_connection_usable(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send("refused", b"x")
        before = local_of(producer)
        with pytest.raises(SendError, match="queue 77") as refused:
            producer.send("refused", b"x", queue=77)
        assert refused.value.outcome is Outcome.NOT_STORED
        with pytest.raises(InvalidMessageError):
            producer.send("refused", b"x" * (5 << 20))
        assert producer.send("refused", b"y").queue_offset == 1
        assert local_of(producer) is before


def test_more_producers_than_connections(node: Node) -> None:
    """Those beyond the limit work as well; when one ends, there is room again."""
    producers = [Producer(node.address) for _ in range(MOST + 3)]
    try:
        for turn in range(3):
            for producer in producers:
                producer.send("many", b"%d" % turn)
        assert len(read_all(node, "many")) == 3 * len(producers)
    finally:
        for producer in producers:
            producer.close()

    def has_room() -> bool:
        with Producer(node.address) as late:
            late.send("many", b"a")
            late.send("many", b"b")
            return local_of(late) is not None

    eventually(has_room, "there is room again")


def test_a_packet_that_is_no_request_ends_its_connection(node: Node) -> None:
    for wrong in (b"", b"\0", b"\0\0\0\xff{}", b"\xff\xff\xff\xff", bytes(MAX_PACKET_BYTES + 1)):
        with connected(node) as client:
            client.send(wrong)
            answers = []
            while answer := client.recv(4096):
                answers.append(orjson.loads(answer))
            assert not wrong or answers[0]["code"] == "BAD_HEADER", wrong
    with connected(node) as client:
        for nonsense in (b"\0\0\0\0", packet(b"no json", b""), packet(b'{"v":9,"op":"send","id":1}', b"")):
            client.send(nonsense)
            assert orjson.loads(client.recv(4096))["outcome"] == "not_stored"
        client.send(packet(send_header(5), b"still taken"))
        assert orjson.loads(client.recv(4096))["ok"]


def test_a_client_that_does_not_read_loses_its_connection_only(node: Node) -> None:
    with connected(node) as client:
        client.settimeout(0.2)
        with pytest.raises(OSError):  # time-out, or the connection is closed
            for number in range(100_000):
                client.send(packet(send_header(number, ack="memory"), b"x"))
    with Producer(node.address) as producer:
        producer.send("after", b"x")


def test_requests_of_a_client_that_left_are_stored(node: Node) -> None:
    with connected(node) as client:
        client.send(packet(send_header(1, "left"), b"kept"))
    eventually(
        lambda: [bytes(one.body) for one in read_all(node, "left")] == [b"kept"], "the topic is made, and it is there"
    )


def test_an_unknown_topic_is_made(node: Node) -> None:
    with connected(node) as client:
        client.send(packet(send_header(1, "made-here"), b"x"))
        answer = orjson.loads(client.recv(4096))
        assert answer["ok"]
        assert answer["queue_offset"] == 0


def test_the_limit_zero_switches_it_off(tmp_path: Path) -> None:
    with start_node(tmp_path, "network.max_local_connections=0") as node, Producer(node.address) as producer:
        producer.send("t", b"x")
        assert local_of(producer) is None


def test_over_tcp_it_is_not_used(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commitmq.protocol.directory.token_matches", lambda *_arguments: False)
    with Producer(node.address) as producer:
        producer.send("tcp", b"x")
        assert producer._lanes.writer.lane.channel is not None
        assert producer._lanes.writer.lane.channel.endpoint.startswith("tcp")
        assert local_of(producer) is None


@pytest.mark.parametrize("pause_s", [0.0, 0.2])
def test_a_new_writer_is_found(own_node: Node, pause_s: float) -> None:
    """The old connection's end is noticed before the next send, which is not of unknown fate then."""
    with Producer(own_node.address, timeout_s=20) as producer:
        producer.send("t", b"before")
        old = own_node.pids()["writer"]
        os.kill(old, signal.SIGKILL)
        eventually(lambda: own_node.healed("writer", old), "the writer is back")
        time.sleep(pause_s)
        assert producer.send("t", b"after").queue_offset == 1
        assert producer.send("t", b"again").queue_offset == 2
        assert local_of(producer) is not None
    assert [bytes(one.body) for one in read_all(own_node, "t")] == [b"before", b"after", b"again"]


def test_every_send_has_an_outcome_when_the_writer_dies(own_node: Node) -> None:
    """Acknowledged messages are there, refused ones are not; each of the rest is there once or not at all."""
    outcomes: dict[bytes, Outcome | None] = {}
    stop = threading.Event()

    def send_all() -> None:
        with Producer(own_node.address, ack="memory", timeout_s=10) as producer:
            number = 0
            while not stop.is_set():
                body = b"%d" % number
                number += 1
                try:
                    producer.send("t", body)
                    outcomes[body] = None
                except SendError as error:
                    outcomes[body] = error.outcome

    sender = threading.Thread(target=send_all)
    sender.start()
    try:
        for _ in range(3):
            time.sleep(0.5)
            old = own_node.pids()["writer"]
            os.kill(old, signal.SIGKILL)
            eventually(partial(own_node.healed, "writer", old), "the writer is back")
        time.sleep(0.5)
    finally:
        stop.set()
        sender.join()
    acked = [body for body, outcome in outcomes.items() if outcome is None]
    assert len(acked) > 300
    stored = [bytes(one.body) for one in read_all(own_node, "t")]
    assert len(stored) == len(set(stored))
    assert set(acked) <= set(stored)
    assert not {body for body, outcome in outcomes.items() if outcome is Outcome.NOT_STORED} & set(stored)


def test_no_answer_in_time_is_unknown(own_node: Node) -> None:
    with Producer(own_node.address, timeout_s=1.0) as producer:
        producer.send("t", b"first")
        pid = own_node.pids()["writer"]
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(SendError) as error:
                producer.send("t", b"halted")
            assert error.value.outcome is Outcome.UNKNOWN
            assert 0.9 < time.monotonic() - began < 3
        finally:
            os.kill(pid, signal.SIGCONT)
        assert producer.send("t", b"after", timeout_s=10).queue_offset == 2


def test_a_child_does_not_keep_the_connection(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send("fork", b"x")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if producer._lanes.writer.lane.local is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert producer.send("fork", b"y").queue_offset == 1


def test_a_program_s_own_time_out_passes_through(own_node: Node) -> None:
    """TimeoutError is an OSError; raised by a signal handler it says nothing about the socket."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError("the program's own")

    with Producer(own_node.address, timeout_s=10) as producer:
        producer.send("t", b"first")
        pid = own_node.pids()["writer"]
        before = signal.signal(signal.SIGALRM, late)
        os.kill(pid, signal.SIGSTOP)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError, match="the program's own"):
                producer.send("t", b"interrupted")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            os.kill(pid, signal.SIGCONT)
        assert producer.send("t", b"after").queue_offset == 2
        assert local_of(producer) is not None


def test_only_synchronous_sends_open_it(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send_async("lazy", b"x").result(5)
        producer.send_batch("lazy", [b"x"])
        assert local_of(producer) is None
        producer.send("lazy", b"x")
        assert local_of(producer) is not None


def test_it_takes_sends_and_runs_only(node: Node) -> None:
    with connected(node) as client:
        client.send(packet(b'{"v":1,"op":"batch","id":1,"topic":"raw","queue":0,"count":1}', b""))
        assert orjson.loads(client.recv(4096))["code"] == "UNKNOWN_OP"


@pytest.mark.parametrize("ack", ["memory", "flushed"])
def test_a_run_that_fits_is_stored(node: Node, ack: str) -> None:
    run = b"".join(record(f"runs-{ack}", 0, f"{number}".encode()) for number in range(3))
    header = {"v": 1, "op": "append", "id": 7, "topic": f"runs-{ack}", "queue": 0, "count": 3, "ack": ack}
    with connected(node) as client:
        client.send(packet(orjson.dumps(header), run))
        answer = orjson.loads(client.recv(4096))
        assert answer["ok"], answer["error"]
        assert (answer["id"], answer["queue_offset"], answer["count"]) == (7, 0, 3)
        client.send(packet(orjson.dumps({**header, "count": 2}), run))
        refused = orjson.loads(client.recv(4096))
        assert (refused["code"], refused["outcome"]) == ("MESSAGE_ILLEGAL", "not_stored")
    assert [message.body for message in read_all(node, f"runs-{ack}")] == [b"0", b"1", b"2"]
