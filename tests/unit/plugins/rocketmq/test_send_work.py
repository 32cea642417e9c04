"""Goal: plain sends of RocketMQ's clients keep costing few calls each, a batch none for its messages; what comes together is
one run, and what the writer refuses is refused alone.

Method: the real parser, sends, runs and lanes over a line that the test answers; calls are counted by a profile function.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from commitmq.config import NodeConfig
from commitmq.config.schema import FlowConfig
from commitmq.format.client_batch import BatchElement, encode_client_batch
from commitmq.format.record import decode_record
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.sending import SendMessageProcessor
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.frame import FrameParser, encode, request

SEND = {"a": "pg", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1763800000000", "h": "0", "j": "0",
        "k": "false", "m": "false"}  # fmt: skip
# Calls of Python and C functions for one message more of a turn, from its frame to the frame of its answer, and for one more
# of a batch: measured and limit.
CALLS = (66, 75)
BATCH_CALLS = (0.0, 0.2)


class Line:
    """Keeps each request until it is answered."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], bytes, Callable[[Any], None]]] = []
        self.at = 0

    def call(self, op: str, fields: dict[str, Any], done: Any, payload: tuple[Any, ...], *, timeout_s: float) -> None:
        self.requests.append((fields, bytes(payload[0]), done))

    def answer(self, **refusal: Any) -> None:
        fields, _, done = self.requests.pop(0)
        header = {"ok": True, "queue_offset": self.at, "parts": [[fields["count"], self.at * 1_000]]}
        if not refusal:
            self.at += fields["count"]
        done(({**header, **refusal}, []))


class Peer:
    """A connection that keeps the answers; ``unwanted`` has those that only end a one-way request."""

    def __init__(self, port: int = 40_000) -> None:
        self.memo: dict[Any, Any] = {}
        self.peer, self.user = ("127.0.0.1", port), ""
        self.name = f"127.0.0.1:{port}"
        self.frames: list[bytes] = []
        self.unwanted: list[Any] = []
        self.parser = FrameParser()

    def send_frame(self, opaque: int, frame: bytes) -> None:
        self.frames.append(frame)

    def send(self, command: Any) -> None:
        if command.is_unwanted:
            self.unwanted.append(command)
        else:
            self.frames.append(encode(command))

    def answers(self) -> list[dict[str, Any]]:
        return [orjson.loads(one[8:]) for one in self.frames]


class Stage:
    def __init__(self, config: NodeConfig | None = None, retries: Any = None) -> None:
        loop = asyncio.get_running_loop()
        self.line, self.peer = Line(), Peer()
        local = SimpleNamespace(call=lambda *_, **__: False)
        node = SimpleNamespace(
            config=config or NodeConfig(),
            quotas=SimpleNamespace(bounds_sends=False),
            line=lambda _: self.line,
            local_line=lambda: local,
        )
        topic = TopicConfig("T", 4, 4)
        topics = SimpleNamespace(sync=lambda: None, version=3, get=lambda name: topic if name == "T" else None)
        self.counting = Counting("cluster", loop)
        self.sends = SendMessageProcessor(node, topics, retries, None, loop, self.counting)  # type: ignore[arg-type]

    def put(self, data: bytes, peer: Peer | None = None) -> None:
        peer = peer or self.peer
        for command in peer.parser.feed(data):
            assert self.sends.handle(peer, command) is None  # type: ignore[arg-type]


def frames(count: int, **fields: str) -> bytes:
    return b"".join(frame(number, fields) for number in range(count))


def frame(number: int, fields: dict[str, str], *, oneway: bool = False) -> bytes:
    command = request(
        RequestCode.SEND_MESSAGE_V2,
        {**SEND, "i": f"UNIQ_KEY\x01K{number}\x02WAIT\x01true\x02", **fields},
        b"b" * 100,
        oneway=oneway,
    )
    command.opaque = number
    return encode(command)


def run(main: Callable[[Stage], Any], config: NodeConfig | None = None, retries: Any = None) -> None:
    async def staged() -> None:
        stage = Stage(config, retries)
        try:
            await main(stage)
        finally:
            stage.counting.close()

    asyncio.run(staged())


def calls_of(work: Callable[[], object]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    work()  # what is made at first use is made
    gc.disable()  # a collector's callback would be counted too
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_what_comes_together_is_one_run_with_an_answer_for_each() -> None:
    async def main(stage: Stage) -> None:
        stage.put(frames(20))
        await asyncio.sleep(0)
        assert [one[0]["count"] for one in stage.line.requests] == [20]
        run_, records, at = stage.line.requests[0][1], [], 0
        while at < len(run_):
            records.append(decode_record(run_, at, check_crc=False))
            at += records[-1].total_size
        stage.line.answer()
        answers = stage.peer.answers()
        assert [one["opaque"] for one in answers] == list(range(20))
        assert [one["extFields"]["queueOffset"] for one in answers] == [str(one) for one in range(20)]
        assert [one["extFields"]["transactionId"] for one in answers] == [f"K{one}" for one in range(20)]
        assert [one.properties["UNIQ_KEY"] for one in records] == [f"K{one}" for one in range(20)]
        assert {one.properties["CLUSTER"] for one in records} == {"DefaultCluster"}
        sizes = [one.total_size for one in records]
        places = [int(one["extFields"]["msgId"][-16:], 16) for one in answers]
        assert places == [sum(sizes[:number]) for number in range(20)]

    run(main)


def test_a_refused_run_is_stored_without_the_message_that_is_wrong() -> None:
    async def main(stage: Stage) -> None:
        stage.put(frames(3))
        await asyncio.sleep(0)
        wrong = {"ok": False, "code": "MESSAGE_ILLEGAL", "error": "record 1", "outcome": "not_stored"}
        stage.line.answer(**wrong)
        assert [one[0]["count"] for one in stage.line.requests] == [1, 1, 1]
        stage.line.answer()
        stage.line.answer(**wrong)
        stage.line.answer()
        assert [(one["opaque"], one["code"]) for one in stage.peer.answers()] == [(0, 0), (1, 13), (2, 0)]

    run(main)


def test_a_oneway_send_ends_its_request_without_an_answer() -> None:
    async def main(stage: Stage) -> None:
        stage.put(frames(1) + frame(0, {}, oneway=True))
        await asyncio.sleep(0)
        stage.line.answer()
        assert len(stage.peer.frames) == 1
        assert [(one.opaque, one.code) for one in stage.peer.unwanted] == [(0, 0)]
        stage.put(frame(0, {}, oneway=True))
        await asyncio.sleep(0)
        stage.line.answer(ok=False, code="MESSAGE_ILLEGAL", error="no", outcome="not_stored")
        assert [one.code for one in stage.peer.unwanted] == [0, 13]

    run(main)


@pytest.mark.parametrize(("rate", "runs"), [(0, [(None, 4)]), (5, [("127.0.0.1:40000", 2), ("127.0.0.1:40001", 2)])])
def test_where_clients_have_rates_each_has_its_own_runs(rate: int, runs: list[tuple[str | None, int]]) -> None:
    async def main(stage: Stage) -> None:
        other = Peer(40_001)
        for _ in range(2):
            stage.put(frames(1))
            stage.put(frames(1), other)
        await asyncio.sleep(0)
        assert [(one[0].get("client"), one[0]["count"]) for one in stage.line.requests] == runs

    run(main, NodeConfig(flow=FlowConfig(client_send_messages_per_s=rate)))


def test_what_is_not_plain_gets_all_that_a_broker_does() -> None:
    async def main(stage: Stage) -> None:
        asked: list[str] = []
        stage.sends.expects_reply = lambda connection, properties: asked.append(properties["CORRELATION_ID"])
        stage.put(frames(1, i="UNIQ_KEY\x01K\x02REPLY_TO_CLIENT\x01c\x02CORRELATION_ID\x01one\x02"))
        stage.put(
            frames(1, i="UNIQ_KEY\x01K\x02TIMER_OUT_MS\x01oh\x02__PSEQ__\x011\x02POP_CK\x01p\x02__CRC32#\x01c\x02")
        )
        stage.put(frames(1, i="UNIQ_KEY\x01K\x02DELAY\x013\x02"))
        await asyncio.sleep(0)
        assert asked == ["one"]
        assert [one[0]["count"] for one in stage.line.requests] == [2, 1]
        data = stage.line.requests[0][1]
        first = decode_record(data, 0, check_crc=False)
        second = decode_record(data, first.total_size, check_crc=False)
        assert set(second.properties) == {"UNIQ_KEY", "CLUSTER", "MSG_REGION", "TRACE_ON"}
        for _ in range(2):
            stage.line.answer()
        total = stage.counting.statistics.total
        assert (total("TOPIC_PUT_NUMS", "T"), total("TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX")) == (3, 1)

    run(main)


def test_a_dead_letter_is_looked_at_each_time() -> None:
    """Whether a consumer's send to its retry topic is a dead letter, is found out anew for each."""
    topics: list[str] = []

    class Retried:
        async def place(self, connection: Any, header: Any, version: int) -> TopicConfig:
            topics.append(header.topic)
            header.topic, header.queue_id = "%DLQ%g", 0
            return TopicConfig("%DLQ%g", 1, 1)

    async def main(stage: Stage) -> None:
        for _ in range(3):
            (command,) = stage.peer.parser.feed(frames(1, b="%RETRY%g", j="17"))
            assert await stage.sends.handle(stage.peer, command) is None  # type: ignore[arg-type,misc]
        await asyncio.sleep(0)
        assert [(one[0]["topic"], one[0]["count"]) for one in stage.line.requests] == [("%DLQ%g", 3)]

    run(main, retries=Retried())
    assert topics == ["%RETRY%g"] * 3


@pytest.mark.parametrize(
    ("topic", "text"), [("%RETRY%g", "TRAN_MSG\x01true\x02DELAY\x014\x02"), ("%DLQ%g", "DELAY\x01-1\x02")]
)
def test_a_message_that_is_tried_again_is_stored_with_its_level_and_no_state_of_before(topic: str, text: str) -> None:
    """Clients before 4.6.1 leave TRAN_MSG in it; the last DELAY of a dead letter is the one that counts."""

    class Retried:
        async def place(self, connection: Any, header: Any, version: int) -> TopicConfig:
            header.topic, header.queue_id = topic, 0
            return TopicConfig(topic, 1, 1)

    async def main(stage: Stage) -> None:
        sent = f"UNIQ_KEY\x01K\x02DELAY\x015\x02TIMER_DELAY_SEC\x015\x02{text}"
        (command,) = stage.peer.parser.feed(frames(1, b="%RETRY%g", j="3", f="4", i=sent))
        assert await stage.sends.handle(stage.peer, command) is None  # type: ignore[arg-type,misc]
        await asyncio.sleep(0)
        ((fields, data, _),) = stage.line.requests
        record = decode_record(data, 0, check_crc=False)
        assert (fields["topic"], record.reconsume_times, record.sys_flag & 0xC) == (topic, 3, 0)
        assert record.properties["DELAY"] == ("-1" if topic == "%DLQ%g" else "4")
        assert not record.properties.keys() & {"TRAN_MSG", "TIMER_DELAY_SEC"}

    run(main, retries=Retried())


def test_a_topic_that_changed_is_looked_at_again() -> None:
    async def main(stage: Stage) -> None:
        stage.put(frames(1))
        assert len(stage.peer.memo) == 1
        (target,) = stage.peer.memo.values()
        stage.sends._topics.version = 4  # type: ignore[misc]
        stage.put(frames(1))
        (again,) = stage.peer.memo.values()
        assert (target.version, again.version) == (3, 4)

    run(main)


@pytest.mark.parametrize("field", ["a", "b", "x"])
def test_what_a_connection_keeps_is_bounded(field: str) -> None:
    async def main(stage: Stage) -> None:
        for number in range(1_000):
            stage.put(frames(1, l="3", **{field: "T", "a": f"group{number}"}))
        assert 0 < len(stage.peer.memo) <= 256
        before = len(stage.peer.memo)
        stage.put(frames(1, a="g" * 5_000))
        assert len(stage.peer.memo) == before

    run(main)


def test_a_plain_send_makes_few_calls() -> None:
    async def main(stage: Stage) -> None:
        def turn(count: int) -> None:
            stage.put(frames_of[count])
            stage.sends._runs._end_turn()
            stage.line.answer()

        frames_of = {count: frames(count) for count in (1, 10, 60)}
        turn(10)
        turn(60)
        few, many = calls_of(lambda: turn(10)), calls_of(lambda: turn(60))
        check((many - few) / 50, CALLS)

    run(main)


def test_a_batch_makes_few_calls_for_its_messages() -> None:
    async def main(stage: Stage) -> None:
        def batch(count: int) -> bytes:
            elements = [BatchElement(b"x" * 50, b"UNIQ_KEY\x01K\x02")] * count
            return encode(request(RequestCode.SEND_BATCH_MESSAGE, {**SEND, "i": ""}, encode_client_batch(elements)))

        def turn(data: bytes) -> None:
            stage.put(data)
            stage.sends._runs._end_turn()
            stage.line.answer()

        small, large = batch(100), batch(1_100)
        turn(large)
        few, many = calls_of(lambda: turn(small)), calls_of(lambda: turn(large))
        check((many - few) / 1_000, BATCH_CALLS)

    run(main)


def check(got: float, figures: tuple[float, float]) -> None:
    measured, limit = figures
    assert measured / 2 <= got <= limit, f"{got:.1f} calls a message, {measured} were measured"
