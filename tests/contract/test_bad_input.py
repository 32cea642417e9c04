"""Goal: whatever comes in on a socket, the node refuses it by name, stores nothing of it, and goes on.

Method: one real node; raw ZeroMQ frames to all of its four sockets; after each case the next good message must lie where
the log ended before (so nothing was stored), have the next queue offset, and no process may have been started again.
The limits are small, so that every one of them is reached with little data: a segment holds 64 KiB, as much as a body.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commitmq.client.sending.run_encoder import RunLayout, encode_messages, encode_user_properties
from commitmq.control import ControlBlock, Word, WorkerWord, role_slot
from commitmq.format.message_id import UniqueIds
from commitmq.format.record import body_crc
from commitmq.protocol import wire
from commitmq.store.layout import StoreLayout
from nodes import WORKERS, Node, commitmq, start_node
from one_message import OneMessage

SEGMENT_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 1 << 16
MAX_RUN_BYTES = 1 << 18
MAX_FRAME_BYTES = 2 << 20
TOPIC = "orders"
READ_ONLY = "archive"
WRITE_ONLY = "intake"
SOCKETS = ("admin", "writer", "coordinator", "reader-0")
GOOD_OPS = {"admin": "metadata", "writer": "hello", "coordinator": "topic.list", "reader-0": "offsets"}
TIMEOUT_MS = 5_000


class Peer:
    """A client that says whatever it is told to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.connect(endpoint)
        self._id = 0

    def say(self, *frames: bytes) -> dict[str, Any]:
        """Send ``frames``; the header of the answer."""
        self.socket.send_multipart(frames)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads(self.socket.recv_multipart()[0])
        assert answer["v"] == wire.PROTOCOL_VERSION
        return answer

    def ask(self, op: str, *payload: bytes, **fields: Any) -> dict[str, Any]:
        """A well-formed request; its answer."""
        self._id += 1
        answer = self.say(wire.pack({"op": op, "id": self._id, **fields}), *payload)
        assert answer["id"] == self._id
        return answer

    def close(self) -> None:
        self.socket.close()


class Victim:
    """The node under test, and how the log stands."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Not by the op status: it measures memory, which takes longer than all of a case.
        self.control = ControlBlock(StoreLayout(node.store).control)
        self.endpoints = node.endpoints()
        self.peers = {name: self.new_peer(name) for name in SOCKETS}
        for name, perm in ((TOPIC, 6), (READ_ONLY, 4), (WRITE_ONLY, 2)):
            assert self.peers["coordinator"].ask("topic.create", topic=name, queues=2, perm=perm)["ok"]
        first = self.send()
        self.end, self.next_offset = first["physical_offset"], first["queue_offset"]
        self.good_send()
        self.lives = self.lives_now()

    def new_peer(self, name: str) -> Peer:
        return Peer(self.context, self.endpoints[name])

    def send(self) -> dict[str, Any]:
        answer = self.peers["writer"].ask("send", b"good", topic=TOPIC, queue=0)
        assert answer["ok"], answer
        return answer

    def written(self) -> int:
        return self.control.get(Word.WRITTEN)

    def lives_now(self) -> dict[str, tuple[int, int]]:
        """Pid and restarts of each worker."""
        return {
            role: (
                self.control.worker(role_slot(role), WorkerWord.PID),
                self.control.worker(role_slot(role), WorkerWord.RESTARTS),
            )
            for role in WORKERS
        }

    def good_send(self) -> None:
        answer = self.send()
        self.next_offset = answer["queue_offset"] + 1
        self.end = self.written()

    def check_unharmed(self) -> None:
        """Nothing was stored since the last check, and everything works."""
        end, self.end = self.end, self.written()
        assert self.end == end, "something was stored"
        answer = self.send()
        # Taken over before it is judged: one case that fails must not make all that follow fail.
        next_offset, self.next_offset = self.next_offset, answer["queue_offset"] + 1
        self.end = self.written()
        assert answer["queue_offset"] == next_offset
        assert answer["physical_offset"] in (end, end - end % SEGMENT_BYTES + SEGMENT_BYTES)
        for name in SOCKETS:
            assert self.peers[name].ask(GOOD_OPS[name], topic=TOPIC)["ok"]
        assert self.lives_now() == self.lives


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    settings = (
        f"commit_log.segment_bytes={SEGMENT_BYTES}",
        f"commit_log.max_message_bytes={MAX_MESSAGE_BYTES}",
        f"commit_log.max_run_bytes={MAX_RUN_BYTES}",
        f"network.max_frame_bytes={MAX_FRAME_BYTES}",
        "topics.auto_create=false",
        "groups.auto_create=false",
    )
    with start_node(tmp_path_factory.mktemp("bad-input"), *settings) as node:
        made = Victim(node)
        try:
            yield made
            log = node.log()
            assert " failed" not in log, [line for line in log.splitlines() if " failed" in line][:5]
            ended = node.stop()
            assert ended.returncode == 0, ended.stderr
            dumped = commitmq("store", "dump", str(node.store))
            assert dumped.returncode == 0, dumped.stderr
            assert "stopped" not in dumped.stderr
        finally:
            made.control.close()
            made.context.destroy(linger=0)


def check_refusal(answer: dict[str, Any], code: str, words: str, *, is_send: bool = False) -> None:
    assert not answer["ok"], answer
    assert answer["code"] == code, answer
    assert words in answer["error"], answer
    assert ("outcome" in answer) == is_send, answer
    if is_send:
        assert answer["outcome"] == "not_stored"


# ---------------------------------------------------------------- headers, to every socket

GOOD = {"v": 1, "op": "x", "id": 7}
HEADERS: dict[str, tuple[bytes, str, str, int | None]] = {
    "empty": (b"", "BAD_HEADER", "JSON object", None),
    "no JSON": (b"\xff\xfe\x00", "BAD_HEADER", "JSON object", None),
    "JSON cut short": (b'{"v":1,"op":', "BAD_HEADER", "JSON object", None),
    "nested without end": (b"[" * 100_000, "BAD_HEADER", "JSON object", None),
    "a list": (b"[1]", "BAD_HEADER", "JSON object", None),
    "a number": (b"1", "BAD_HEADER", "JSON object", None),
    "null": (b"null", "BAD_HEADER", "JSON object", None),
    "no v": (orjson.dumps({"op": "x", "id": 7}), "BAD_HEADER", "needs v", 7),
    "v is a string": (orjson.dumps(GOOD | {"v": "1"}), "BAD_HEADER", "needs v", 7),
    "v is true": (orjson.dumps(GOOD | {"v": True}), "BAD_HEADER", "needs v", 7),
    "another version": (orjson.dumps(GOOD | {"v": 2}), "UNSUPPORTED_VERSION", "version 1, not 2", 7),
    "no op": (orjson.dumps({"v": 1, "id": 7}), "BAD_HEADER", "needs op", 7),
    "op is a number": (orjson.dumps(GOOD | {"op": 1}), "BAD_HEADER", "needs op", 7),
    "no id": (orjson.dumps({"v": 1, "op": "x"}), "BAD_HEADER", "needs id", None),
    "id is a string": (orjson.dumps(GOOD | {"id": "7"}), "BAD_HEADER", "needs id", None),
    "id is a float": (orjson.dumps(GOOD | {"id": 7.5}), "BAD_HEADER", "needs id", None),
    "id beyond 64 bits": (b'{"v":1,"op":"x","id":99999999999999999999}', "BAD_HEADER", "needs id", None),
    "unknown op": (orjson.dumps(GOOD | {"op": "explode"}), "UNKNOWN_OP", "explode", 7),
    "empty op": (orjson.dumps(GOOD | {"op": ""}), "UNKNOWN_OP", "''", 7),
}


@pytest.mark.parametrize("socket", SOCKETS)
@pytest.mark.parametrize("case", HEADERS)
def test_a_malformed_header_is_refused(victim: Victim, socket: str, case: str) -> None:
    frame, code, words, identity = HEADERS[case]
    answer = victim.peers[socket].say(frame)
    check_refusal(answer, code, words, is_send=socket == "writer")
    assert answer["id"] == identity
    victim.check_unharmed()


@pytest.mark.parametrize("socket", [name for name in SOCKETS if name != "admin"])
def test_a_header_that_is_too_large_is_refused(victim: Victim, socket: str) -> None:
    frame = wire.pack({"op": "hello", "id": 7, "pad": "x" * wire.MAX_HEADER_BYTES})
    check_refusal(victim.peers[socket].say(frame), "BAD_HEADER", "at most 1048576", is_send=socket == "writer")
    victim.check_unharmed()


@pytest.mark.parametrize("socket", SOCKETS)
def test_a_frame_over_the_limit_costs_its_sender_the_connection(victim: Victim, socket: str) -> None:
    peer = victim.new_peer(socket)
    assert peer.ask(GOOD_OPS[socket], topic=TOPIC)["ok"]
    monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.socket.send_multipart([wire.pack({"op": "send", "id": 1, "topic": TOPIC}), bytes(MAX_FRAME_BYTES + 1)])
    gone = monitor.poll(TIMEOUT_MS)
    peer.socket.disable_monitor()
    monitor.close()
    peer.close()
    assert gone, "the connection is still there"
    victim.check_unharmed()


@pytest.mark.parametrize("socket", SOCKETS)
def test_a_client_that_vanishes_with_its_request_is_no_trouble(victim: Victim, socket: str) -> None:
    peer = victim.new_peer(socket)
    peer.socket.setsockopt(zmq.LINGER, 1_000)
    peer.socket.send(wire.pack({"op": GOOD_OPS[socket], "id": 1, "topic": TOPIC}))
    peer.close()
    victim.check_unharmed()


@pytest.mark.parametrize("socket", ["admin", "coordinator", "reader-0"])
def test_a_payload_where_none_belongs_is_refused(victim: Victim, socket: str) -> None:
    answer = victim.peers[socket].ask(GOOD_OPS[socket], b"surplus", topic=TOPIC)
    check_refusal(answer, "INVALID_PARAMETER", "takes no payload")
    victim.check_unharmed()


# ---------------------------------------------------------------- single sends

Send = tuple[dict[str, Any], tuple[bytes, ...], str, str]


def send_case(code: str, words: str, *payload: bytes, **fields: Any) -> Send:
    return {"topic": TOPIC, "queue": 0, **fields}, payload or (b"x",), code, words


SENDS: dict[str, Send] = {
    "no body frame": ({"topic": TOPIC}, (), "BAD_HEADER", "one payload frame, not 1"),
    "two body frames": send_case("BAD_HEADER", "one payload frame, not 3", b"a", b"b"),
    "a hundred frames": send_case("BAD_HEADER", "one payload frame", *[b"a"] * 99),
    "oversize body": send_case("MESSAGE_ILLEGAL", "max_message_bytes allows 65536", bytes(MAX_MESSAGE_BYTES + 1)),
    "a record no segment holds": send_case("MESSAGE_ILLEGAL", "cannot fit a segment", bytes(MAX_MESSAGE_BYTES)),
    "properties over 32767 bytes": send_case("PROPERTIES_SIZE_EXCEEDED", "at most", properties={"a": "x" * 32_767}),
    "properties are a list": send_case("INVALID_PARAMETER", "object of strings", properties=[1]),
    "a property is a number": send_case("INVALID_PARAMETER", "'a' must be a string", properties={"a": 1}),
    "a property without a name": send_case("MESSAGE_ILLEGAL", "name", properties={"": "x"}),
    "a separator in a value": send_case("MESSAGE_ILLEGAL", "properties", properties={"a": "x\x02y"}),
    "a separator in a name": send_case("MESSAGE_ILLEGAL", "properties", properties={"a\x01b": "x"}),
    "a forged timer": send_case("MESSAGE_ILLEGAL", "only the node may set", properties={"TIMER_OUT_MS": "3"}),
    "a forged CRC": send_case("MESSAGE_ILLEGAL", "only the node may set", properties={"__CRC32#": "0000000000"}),
    "no topic": ({"queue": 0}, (b"x",), "INVALID_PARAMETER", "topic"),
    "topic is a number": send_case("INVALID_PARAMETER", "topic", topic=5),
    "topic is a list": send_case("INVALID_PARAMETER", "topic", topic=[TOPIC]),
    "empty topic": send_case("INVALID_PARAMETER", "topic", topic=""),
    "topic with a slash": send_case("INVALID_PARAMETER", "topic", topic="a/b"),
    "topic that leaves the folder": send_case("INVALID_PARAMETER", "topic", topic="../../etc"),
    "topic with a space": send_case("INVALID_PARAMETER", "topic", topic="a b"),
    "topic with an umlaut": send_case("INVALID_PARAMETER", "topic", topic="grün"),
    "topic with a NUL": send_case("INVALID_PARAMETER", "topic", topic="a\0b"),
    "topic of 128 characters": send_case("INVALID_PARAMETER", "127", topic="x" * 128),
    "topic of a megabyte": send_case("INVALID_PARAMETER", "topic", topic="x" * 900_000),
    "unknown topic": send_case("TOPIC_NOT_EXIST", "nowhere", topic="nowhere"),
    "the node's own topic": send_case("NO_PERMISSION", "SCHEDULE_TOPIC_XXXX", topic="SCHEDULE_TOPIC_XXXX"),
    "topic that only reads": send_case("NO_PERMISSION", "not writable", topic=READ_ONLY),
    "queue that is not there": send_case("INVALID_PARAMETER", "queue 2", queue=2),
    "queue below any": send_case("INVALID_PARAMETER", "queue", queue=-2),
    "queue beyond any": send_case("INVALID_PARAMETER", "queue", queue=1 << 40),
    "queue is a string": send_case("INVALID_PARAMETER", "queue", queue="0"),
    "queue is a float": send_case("INVALID_PARAMETER", "queue", queue=0.5),
    "queue is true": send_case("INVALID_PARAMETER", "queue", queue=True),
    "unknown ack": send_case("INVALID_PARAMETER", "ack must be", ack="maybe"),
    "ack is a list": send_case("INVALID_PARAMETER", "ack must be", ack=[]),
    "sys_flag of a transaction": send_case("MESSAGE_ILLEGAL", "compression bits", sys_flag=0x4),
    "sys_flag of another layout": send_case("MESSAGE_ILLEGAL", "compression bits", sys_flag=0x10),
    "sys_flag of no compression": send_case("MESSAGE_ILLEGAL", "compression bits", sys_flag=0x401),
    "sys_flag is a string": send_case("INVALID_PARAMETER", "sys_flag", sys_flag="1"),
    "flag beyond 32 bits": send_case("INVALID_PARAMETER", "flag", flag=1 << 31),
    "born in the far future": send_case("INVALID_PARAMETER", "born", born=(1 << 63) - 1),
    "born is a string": send_case("INVALID_PARAMETER", "born", born="now"),
}


@pytest.mark.parametrize("case", SENDS)
def test_a_bad_send_is_refused(victim: Victim, case: str) -> None:
    fields, payload, code, words = SENDS[case]
    answer = victim.peers["writer"].ask("send", *payload, **fields)
    check_refusal(answer, code, words, is_send=True)
    assert len(answer["error"]) < 2_000, "a sentence must not repeat a megabyte to its sender"
    victim.check_unharmed()


# ---------------------------------------------------------------- runs

_IDS = UniqueIds()
# Places in a record over IPv4 (spec 2.1).
SIZE, MAGIC, CRC, QUEUE, QUEUE_OFFSET, PHYSICAL, SYS_FLAG, BORN, BORN_HOST = 0, 4, 8, 12, 20, 28, 36, 40, 48
STORE_TIME, RECONSUME, PREPARED, BODY_LENGTH, BODY = 56, 72, 76, 84, 88


def record(body: bytes = b"body", *, topic: str = TOPIC, queue: int = 0, crc: bool = True, **properties: str) -> bytes:
    layout = RunLayout(topic, born_v6=False, store_v6=False, properties_crc=crc)
    encoded = encode_user_properties(properties)
    message = OneMessage(body, (encoded, 0, 0), 1_700_000_000_000)
    return encode_messages(layout, queue, [message], _IDS.block(1))[1]


def patched(data: bytes, at: int, value: int, form: str = ">i") -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


def raw_properties(encoded: bytes) -> bytes:
    """A record whose properties are ``encoded`` and the CRC slot, whatever that is."""
    plain = record(b"b")
    slot = plain[-20:]
    head = plain[: BODY + 1 + 1 + len(TOPIC)]
    whole = head + struct.pack(">h", len(encoded) + 20) + encoded + slot
    return patched(whole, SIZE, len(whole))


def grown(data: bytes, at: int, by: int, form: str = ">i") -> bytes:
    return patched(data, at, struct.unpack_from(form, data, at)[0] + by, form)


ONE = record()
TOPIC_LENGTH = BODY + 4
PROPERTIES_LENGTH = TOPIC_LENGTH + 1 + len(TOPIC)
Run = tuple[dict[str, Any], bytes, str, str]


def run_case(words: str, *records: bytes, code: str = "MESSAGE_ILLEGAL", **fields: Any) -> Run:
    return {"topic": TOPIC, "queue": 0, "count": len(records), **fields}, b"".join(records), code, words


RUNS: dict[str, Run] = {
    "empty": run_case("shorter than one record", count=1),
    "one byte": run_case("shorter than one record", b"x"),
    "zeros": run_case("magic", bytes(200)),
    "ones": run_case("magic", b"\xff" * 200),
    "size too large by one": run_case("past the end", grown(ONE, SIZE, 1)),
    "size too small by one": run_case("do not add up", grown(ONE, SIZE, -1)),
    "size is 0": run_case("past the end", patched(ONE, SIZE, 0)),
    "size is negative": run_case("past the end", patched(ONE, SIZE, -len(ONE))),
    "size of two gigabytes": run_case("past the end", patched(ONE, SIZE, 0x7FFFFFFF)),
    "size that swallows the next record": run_case("do not add up", patched(ONE, SIZE, 2 * len(ONE)), ONE),
    "body length too large": run_case("do not add up", grown(ONE, BODY_LENGTH, 1)),
    "body length past the end": run_case("do not add up", grown(ONE, BODY_LENGTH, 1 << 20)),
    "body length negative": run_case("do not add up", patched(ONE, BODY_LENGTH, -1)),
    "body length of two gigabytes": run_case("do not add up", patched(ONE, BODY_LENGTH, 0x7FFFFFFF)),
    "topic length too large": run_case("do not add up", grown(ONE, TOPIC_LENGTH, 1, ">b")),
    "topic length 0": run_case("do not add up", patched(ONE, TOPIC_LENGTH, 0, ">b")),
    "topic length negative": run_case("do not add up", patched(ONE, TOPIC_LENGTH, -1, ">b")),
    "properties length too large": run_case("do not add up", grown(ONE, PROPERTIES_LENGTH, 1, ">h")),
    "properties length negative": run_case("do not add up", patched(ONE, PROPERTIES_LENGTH, -1, ">h")),
    "truncated": run_case("past the end", ONE, ONE[:-1]),
    "truncated in the head": run_case("past the end", ONE, ONE[:90]),
    "bytes behind the last record": run_case("past the end", ONE, ONE, b"xyz", count=2),
    "hosts of IPv6 that are not there": run_case("do not add up", patched(patched(ONE[:91], SIZE, 91), SYS_FLAG, 0x30)),
    "an IPv6 layout": run_case("", patched(ONE, SYS_FLAG, 0x30)),
    "CRC wrong": run_case("bodyCRC", grown(ONE, CRC, 1)),
    "body changed": run_case("bodyCRC", patched(ONE, BODY, 0)),
    "CRC wrong in the last of many": run_case("record 9", *[ONE] * 9, grown(ONE, CRC, 1)),
    "another magic": run_case("magic", patched(ONE, MAGIC, 0x12345678)),
    "a filler": run_case("magic", patched(ONE, MAGIC, -875286124)),
    "another topic": run_case("another topic", record(topic="other")),
    "another topic as the second": run_case("another topic", ONE, record(topic="orderz")),
    "another queue": run_case("another queue", record(queue=1)),
    "another queue as the second": run_case("another queue", ONE, record(queue=1)),
    "a queue offset": run_case("not zero", patched(ONE, QUEUE_OFFSET, 5, ">q")),
    "a physical offset": run_case("not zero", patched(ONE, PHYSICAL, 5, ">q")),
    "a store timestamp": run_case("not zero", patched(ONE, STORE_TIME, 5, ">q")),
    "a prepared transaction": run_case("not zero", patched(ONE, PREPARED, 5, ">q")),
    "negative reconsume times": run_case("", patched(ONE, RECONSUME, -1)),
    "a negative birth": run_case("", patched(ONE, BORN, -1, ">q")),
    "a transaction's sysFlag": run_case("sysFlag", patched(ONE, SYS_FLAG, 0x8)),
    "a sysFlag of all bits": run_case("", patched(ONE, SYS_FLAG, -1)),
    "no CRC slot": run_case("__CRC32#", record(crc=False)),
    "a forged timer": run_case("only the node may set", record(TIMER_OUT_MS="3")),
    "properties without end": run_case("properties", raw_properties(b"a\x01b")),
    "properties without a value": run_case("properties", raw_properties(b"a\x02")),
    "properties of no UTF-8": run_case("UTF-8", raw_properties(b"a\x01\xff\xfe\x02")),
    "a body over the limit": run_case("max_message_bytes", record(bytes(MAX_MESSAGE_BYTES + 1))),
    "a record no segment holds": run_case("cannot fit a segment", record(bytes(MAX_MESSAGE_BYTES))),
    "a record no segment holds as the second": run_case("cannot fit a segment", ONE, record(bytes(MAX_MESSAGE_BYTES))),
    "a record no segment holds after a roll": run_case(
        "cannot fit a segment", *[record(bytes(60_000))] * 2, record(bytes(MAX_MESSAGE_BYTES))
    ),
    "a run over the limit": run_case("max_run_bytes", *[record(bytes(50_000))] * 6, code="FRAME_TOO_LARGE"),
    "count too low": run_case("holds 2", ONE, ONE, count=1),
    "count too high": run_case("holds 2", ONE, ONE, count=3),
    "count 0": run_case("holds 1", ONE, count=0),
    "no count": ({"topic": TOPIC, "queue": 0}, ONE, "MESSAGE_ILLEGAL", "holds 1"),
    "count is a string": run_case("count", ONE, code="INVALID_PARAMETER", count="1"),
    "no queue": ({"topic": TOPIC, "count": 1}, ONE, "INVALID_PARAMETER", "needs the queue"),
    "queue that is not there": run_case("queue 2", record(queue=2), code="INVALID_PARAMETER", queue=2),
    "unknown topic": run_case("nowhere", record(topic="nowhere"), code="TOPIC_NOT_EXIST", topic="nowhere"),
    "topic that only reads": run_case("not writable", record(topic=READ_ONLY), code="NO_PERMISSION", topic=READ_ONLY),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_bad_run_is_refused_as_a_whole(victim: Victim, case: str) -> None:
    fields, data, code, words = RUNS[case]
    answer = victim.peers["writer"].ask("append", data, **fields)
    check_refusal(answer, code, words, is_send=True)
    victim.check_unharmed()


def test_the_run_that_the_bad_ones_are_made_of_is_good(victim: Victim) -> None:
    fields, data, _, _ = run_case("", ONE, ONE)
    answer = victim.peers["writer"].ask("append", data, **fields)
    assert answer["ok"], answer
    assert (answer["count"], answer["queue_offset"]) == (2, victim.next_offset)
    assert body_crc(b"body") == struct.unpack_from(">i", ONE, CRC)[0]
    victim.good_send()


# ---------------------------------------------------------------- coordinator, reader

Ask = tuple[str, dict[str, Any], str, str]
HUGE = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
COORDINATOR: dict[str, Ask] = {
    "create without a name": ("topic.create", {}, "INVALID_PARAMETER", "topic"),
    "create an illegal name": ("topic.create", {"topic": "../x"}, "INVALID_PARAMETER", "topic"),
    "create a name of 128": ("topic.create", {"topic": "x" * 128}, "INVALID_PARAMETER", "127"),
    "create no queues": ("topic.create", {"topic": "new", "queues": 0}, "INVALID_PARAMETER", "queues"),
    "create too many queues": ("topic.create", {"topic": "new", "queues": 1 << 31}, "INVALID_PARAMETER", "queues"),
    "create queues as text": ("topic.create", {"topic": "new", "queues": "4"}, "INVALID_PARAMETER", "queues"),
    "create an odd perm": ("topic.create", {"topic": "new", "perm": 8}, "INVALID_PARAMETER", "perm"),
    "create odd attributes": ("topic.create", {"topic": "new", "attributes": [1]}, "INVALID_PARAMETER", "attributes"),
    "route of an unknown topic": ("topic.route", {"topic": "nowhere"}, "TOPIC_NOT_EXIST", "nowhere"),
    "route with auto-create off": ("topic.route", {"topic": "nowhere", "create": True}, "TOPIC_NOT_EXIST", "nowhere"),
    "route with an odd create": ("topic.route", {"topic": TOPIC, "create": 1}, "INVALID_PARAMETER", "create"),
    "describe an unknown topic": ("topic.describe", {"topic": "nowhere"}, "TOPIC_NOT_EXIST", "nowhere"),
    "delete an unknown topic": ("topic.delete", {"topic": "nowhere"}, "TOPIC_NOT_EXIST", "nowhere"),
    "join without topics": ("group.join", {"group": "g", "member": "m"}, "INVALID_PARAMETER", "topics"),
    "join an unknown group": (
        "group.join",
        {"group": "g", "member": "m", "topics": [TOPIC]},
        "GROUP_NOT_EXIST",
        "auto_create",
    ),
    "join an illegal group": (
        "group.join",
        {"group": "a/b", "member": "m", "topics": [TOPIC]},
        "INVALID_PARAMETER",
        "group",
    ),
    "join with a short session": (
        "group.join",
        {"group": "g", "member": "m", "topics": [TOPIC], "session_timeout_ms": 1},
        "INVALID_PARAMETER",
        "session_timeout_ms",
    ),
    "heartbeat of a stranger": (
        "group.heartbeat",
        {"group": "g", "member": "m", "generation": 1, "owned": []},
        "UNKNOWN_MEMBER",
        "m",
    ),
    "describe an unknown group": ("group.describe", {"group": "g"}, "GROUP_NOT_EXIST", "g"),
    "commit of no list": ("offset.commit", {"group": "g", "offsets": {}}, "INVALID_PARAMETER", "offsets"),
    "commit of a pair": ("offset.commit", {"group": "g", "offsets": [[TOPIC, 0]]}, "INVALID_PARAMETER", "offsets"),
    "commit below 0": ("offset.commit", {"group": "g", "offsets": [[TOPIC, 0, -1]]}, "INVALID_PARAMETER", "offsets"),
    "commit beyond any": (
        "offset.commit",
        {"group": "g", "offsets": [[TOPIC, 0, 1 << 63]]},
        "INVALID_PARAMETER",
        "offsets",
    ),
    "commit to a missing queue": (
        "offset.commit",
        {"group": "g", "offsets": [[TOPIC, 2, 1]]},
        "INVALID_PARAMETER",
        "2",
    ),
    "commit to a missing topic": (
        "offset.commit",
        {"group": "g", "offsets": [["nowhere", 0, 1]]},
        "TOPIC_NOT_EXIST",
        "nowhere",
    ),
    "fetch of no list": ("offset.fetch", {"group": "g", "queues": 1}, "INVALID_PARAMETER", "queues"),
    "fetch of an illegal group": ("offset.fetch", {"group": "", "queues": []}, "INVALID_PARAMETER", "group"),
}
READER: dict[str, Ask] = {
    "pull without a topic": ("pull", {"queue": 0, "offset": 0}, "INVALID_PARAMETER", "topic"),
    "pull of an unknown topic": ("pull", {"topic": "nowhere", "queue": 0, "offset": 0}, "TOPIC_NOT_EXIST", "nowhere"),
    "pull of a path": ("pull", {"topic": "../x", "queue": 0, "offset": 0}, "TOPIC_NOT_EXIST", "../x"),
    "pull of a write-only topic": (
        "pull",
        {"topic": WRITE_ONLY, "queue": 0, "offset": 0},
        "NO_PERMISSION",
        "may not be read",
    ),
    "pull of a missing queue": ("pull", {"topic": TOPIC, "queue": 2, "offset": 0}, "INVALID_PARAMETER", "0 to 1"),
    "pull of queue -1": ("pull", {"topic": TOPIC, "queue": -1, "offset": 0}, "INVALID_PARAMETER", "0 to 1"),
    "pull of a queue as text": ("pull", {"topic": TOPIC, "queue": "0", "offset": 0}, "INVALID_PARAMETER", "queue"),
    "pull without an offset": ("pull", {"topic": TOPIC, "queue": 0}, "INVALID_PARAMETER", "offset"),
    "pull with an odd offset": ("pull", {"topic": TOPIC, "queue": 0, "offset": 0.5}, "INVALID_PARAMETER", "offset"),
    "pull of no messages": (
        "pull",
        {"topic": TOPIC, "queue": 0, "offset": 0, "max_messages": 0},
        "INVALID_PARAMETER",
        "max_messages",
    ),
    "pull that waits backwards": (
        "pull",
        {"topic": TOPIC, "queue": 0, "offset": 0, "wait_ms": -1},
        "INVALID_PARAMETER",
        "wait_ms",
    ),
    "pull in an unknown mode": (
        "pull",
        {"topic": TOPIC, "queue": 0, "offset": 0, "mode": "psychic"},
        "INVALID_PARAMETER",
        "mode",
    ),
    "pull with an odd filter": (
        "pull",
        {"topic": TOPIC, "queue": 0, "offset": 0, "filter": 5},
        "INVALID_PARAMETER",
        "filter",
    ),
    "offsets of an unknown topic": ("offsets", {"topic": "nowhere"}, "TOPIC_NOT_EXIST", "nowhere"),
    "offsets of odd queues": ("offsets", {"topic": TOPIC, "queues": ["0"]}, "INVALID_PARAMETER", "queues"),
    "offsets of a missing queue": ("offsets", {"topic": TOPIC, "queues": [7]}, "INVALID_PARAMETER", "0 to 1"),
    "offsets at an odd time": ("offsets", {"topic": TOPIC, "timestamp": "now"}, "INVALID_PARAMETER", "timestamp"),
    "offsets with an odd boundary": (
        "offsets",
        {"topic": TOPIC, "boundary": "middle"},
        "INVALID_PARAMETER",
        "boundary",
    ),
    "view without an offset": ("view", {}, "INVALID_PARAMETER", "physical_offset"),
    "view inside a record": ("view", {"physical_offset": 5}, "INVALID_PARAMETER", "no message"),
    "view of text": ("view", {"physical_offset": "0"}, "INVALID_PARAMETER", "physical_offset"),
    **{f"view at {at}": ("view", {"physical_offset": at}, "INVALID_PARAMETER", "") for at in HUGE},
}


@pytest.mark.parametrize("case", COORDINATOR)
def test_the_coordinator_refuses(victim: Victim, case: str) -> None:
    op, fields, code, words = COORDINATOR[case]
    check_refusal(victim.peers["coordinator"].ask(op, **fields), code, words)
    victim.check_unharmed()


@pytest.mark.parametrize("case", READER)
def test_the_reader_refuses(victim: Victim, case: str) -> None:
    op, fields, code, words = READER[case]
    check_refusal(victim.peers["reader-0"].ask(op, **fields), code, words)
    victim.check_unharmed()


@pytest.mark.parametrize("number", HUGE)
def test_numbers_at_the_edge_of_64_bits_get_an_answer_about_the_request(victim: Victim, number: int) -> None:
    reader = victim.peers["reader-0"]
    answers = [
        reader.ask("pull", topic=TOPIC, queue=0, offset=number),
        reader.ask("pull", topic=TOPIC, queue=0, offset=0, max_messages=number),
        reader.ask("pull", topic=TOPIC, queue=0, offset=0, max_bytes=number),
        reader.ask("pull", topic=TOPIC, queue=number, offset=0),
        reader.ask("offsets", topic=TOPIC, timestamp=number),
        reader.ask("offsets", topic=TOPIC, queues=[number]),
        reader.ask("query", topic=TOPIC, key="k", begin=number),
        reader.ask("query", topic=TOPIC, key="k", end=number),
        reader.ask("query", topic=TOPIC, key="k", max=number),
        reader.ask("query", topic=TOPIC, key="k", up_to=number),
        reader.ask("view", physical_offset=number),
    ]
    assert {answer.get("code") for answer in answers} <= {None, "INVALID_PARAMETER"}, answers
    victim.check_unharmed()


# ---------------------------------------------------------------- anything at all

# "stop" is left out: it is no bad input.
OPS: tuple[str, ...] = ()
OPS += (
    "metadata",
    "status",
    "hello",
    "send",
    "append",
    "topic.route",
    "topic.create",
    "topic.list",
    "topic.describe",
)
OPS += ("topic.delete", "group.join", "group.heartbeat", "group.leave", "group.list", "group.describe")
OPS += ("offset.commit", "offset.fetch", "pull", "offsets", "view", "query")
FIELDS: tuple[str, ...] = ()
FIELDS += (
    "topic",
    "queue",
    "queues",
    "offset",
    "offsets",
    "group",
    "member",
    "topics",
    "owned",
    "generation",
    "count",
)
FIELDS += ("properties", "flag", "sys_flag", "born", "ack", "mode", "filter", "max_messages", "max_bytes", "timestamp")
FIELDS += (
    "boundary",
    "physical_offset",
    "perm",
    "attributes",
    "create",
    "reset",
    "running",
    "update",
    "session_timeout_ms",
)
FIELDS += ("filter_type", "key", "type", "begin", "end", "max", "next", "up_to")
# No valid topic name but one that does not exist: what is well-formed by chance must not change the topics.
words = st.sampled_from(
    ["", TOPIC, "nowhere", "a/b", "x" * 300, "memory", "flushed", "ranges", "TagA || TagB", "\0", "ü"]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    words,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
envelopes = st.fixed_dictionaries({"v": st.just(1), "op": st.sampled_from(OPS), "id": st.integers(0, 1000)})
requests = st.builds(
    lambda envelope, fields: orjson.dumps({**fields, **envelope}),
    envelopes,
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=8),
)
loose = st.dictionaries(st.sampled_from((*FIELDS, "v", "op", "id")), values, max_size=6).map(orjson.dumps)


@st.composite
def mutated_runs(draw: Callable[..., Any]) -> list[bytes]:
    """An append whose run was good until some of its bytes were changed, cut out or doubled."""
    data = bytearray(b"".join([record(b"first"), record(b"", TAGS="red"), record(b"third" * 50)]))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(("set", "flip", "cut", "double", "long")))
        if kind == "set":
            data[at] = draw(st.integers(0, 255))
        elif kind == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        else:
            data[at : at + 4] = struct.pack(">i", draw(st.integers(-(1 << 31), (1 << 31) - 1)))
        if not data:
            break
    header = {"op": "append", "id": 1, "topic": TOPIC, "queue": 0, "count": draw(st.sampled_from((3, 2, 1, 0)))}
    return [wire.pack(header), bytes(data)]


garbage = st.one_of(
    st.lists(st.binary(max_size=200), min_size=1, max_size=5),
    st.builds(lambda header, rest: [header, *rest], requests, st.lists(st.binary(max_size=200), max_size=2)),
    st.builds(lambda header, rest: [header, *rest], loose, st.lists(st.binary(max_size=200), max_size=2)),
)
# One example is several requests, so that one process meets thousands of them within seconds.
examples: dict[str, Any] = {"max_examples": 100, "deadline": None, "suppress_health_check": list(HealthCheck)}


def check_volley(victim: Victim, socket: str, volley: list[list[bytes]]) -> None:
    """Send every request of ``volley``, then a good one; each must be answered and none may have met a bug."""
    peer = victim.new_peer(socket)
    try:
        for frames in volley:
            peer.socket.send_multipart(frames)
        last = 1 << 40
        peer.socket.send(wire.pack({"op": GOOD_OPS[socket], "id": last, "topic": TOPIC}))
        found = 0
        stored = False
        while found < len(volley) + 1:
            answer = peer.hear()
            found += 1
            if answer["ok"]:
                stored = stored or answer.get("status") == "PUT_OK"
                continue
            assert answer["code"] not in ("SYSTEM_ERROR",), answer
            assert answer["error"], answer
            if socket == "writer":
                assert answer["outcome"] == "not_stored", answer
    finally:
        peer.close()
    if stored:  # what was a good send by chance
        victim.good_send()
    else:
        victim.check_unharmed()


@pytest.mark.parametrize("socket", SOCKETS)
def test_garbage_gets_an_answer_and_harms_nothing(victim: Victim, socket: str) -> None:
    @settings(**examples)
    @given(st.lists(garbage, min_size=1, max_size=12))
    def volleys(volley: list[list[bytes]]) -> None:
        check_volley(victim, socket, volley)

    volleys()


def test_a_mutated_run_is_refused_or_stored_as_valid_messages(victim: Victim) -> None:
    @settings(**examples)
    @given(st.lists(mutated_runs(), min_size=1, max_size=12))
    def volleys(volley: list[list[bytes]]) -> None:
        check_volley(victim, "writer", volley)

    volleys()
    # That what was stored is valid is seen at the end, when the whole store is dumped.
