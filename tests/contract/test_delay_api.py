"""Goal: every way of sending can delay its messages, and says where they wait; a wrong delay is refused before it is sent.

Method: a real node, delay level 1 (one second), short delays and times of delivery, and a reader of the topic; wrong values
for each way of sending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from commitmq import Admin, AsyncProducer, ExactlyOnce, InvalidMessageError, Message, Producer, SendError, SendResult
from delays import everything
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)
SCHEDULE, TIMER = "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("delays"), "topics.default_queues=2") as made:
        with Admin(made.address) as admin:
            admin.topic_create("batches", 1, attributes={"queue.type": "BatchCQ"})
            admin.topic_create("in-memory", 1, attributes={"storage.type": "memory"})
        yield made


def send(node: Node, topic: str, body: bytes, **delay: Any) -> list[SendResult]:
    with Producer(node.address) as producer:
        return [producer.send(topic, body, **delay)]


def send_message(node: Node, topic: str, body: bytes, **delay: Any) -> list[SendResult]:
    with Producer(node.address, compress="zlib") as producer:
        return [producer.send(topic, Message(body, tags="a", key="k"), **delay)]


def send_async(node: Node, topic: str, body: bytes, **delay: Any) -> list[SendResult]:
    with Producer(node.address) as producer:
        futures = [producer.send_async(topic, body, queue=1, tags="a", **delay) for _ in range(5)]
        futures.append(producer.send_async(topic, body, queue=1, **delay))
        return [future.result(10) for future in futures]


def send_batch(node: Node, topic: str, body: bytes, **delay: Any) -> list[SendResult]:
    with Producer(node.address) as producer:
        return list(producer.send_batch(topic, [body] * 3, **delay))


def send_batch_of_messages(node: Node, topic: str, body: bytes, **delay: Any) -> list[SendResult]:
    with Producer(node.address) as producer:
        many = [Message(body, key=str(number)) for number in range(4)]
        return list(producer.send_batch_async(topic, many, **delay).result(10))


def send_from_a_loop(node: Node, topic: str, body: bytes, **delay: Any) -> list[SendResult]:
    async def main() -> list[SendResult]:
        async with AsyncProducer(node.address) as producer:
            found = [await producer.send(topic, body, **delay), await producer.send_async(topic, body, **delay)]
            found += await producer.send_batch(topic, [body], **delay)
            return [*found, *await producer.send_batch_async(topic, [body], **delay)]

    return asyncio.run(main())


WAYS: list[Callable[..., list[SendResult]]] = [
    send, send_message, send_async, send_batch, send_batch_of_messages, send_from_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("where", [SCHEDULE, TIMER])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_sending(node: Node, way: Callable[..., list[SendResult]], where: str) -> None:
    topic = f"{way.__name__}-{where}"
    way(node, topic, b"at once")
    before = time.time_ns() // 1_000_000
    delay_ms = 1_000 if where == SCHEDULE else 321
    delay: dict[str, Any] = {"delay_level": 1} if where == SCHEDULE else {"delay": timedelta(milliseconds=delay_ms)}
    results = way(node, topic, b"later", **delay)
    assert {one.stored_topic for one in results} == {where}
    assert {one.topic for one in results} == {topic}
    assert f"waits in {where}" in repr(results[0])
    with Admin(node.address) as admin:
        for one in results:  # each offset is that of a record
            stored = admin.message(one.msg_id)
            assert (stored.topic, stored.queue_offset) == (where, one.queue_offset)
            assert stored.unique_id == one.unique_id
    eventually(lambda: len(late(node, topic)) >= len(results), "all are delivered")
    assert len(late(node, topic)) == len(results)
    assert min(one.store_timestamp for one in late(node, topic)) >= before + delay_ms


def late(node: Node, topic: str) -> list[Any]:
    return [one for one in everything(node, topic) if one.body == b"later"]


def test_the_ways_to_name_a_time(node: Node) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    ways: list[tuple[dict[str, Any], str]] = [
        ({"delay_level": 1}, SCHEDULE),
        ({"delay_level": 18}, SCHEDULE),
        ({"delay": 3_600}, TIMER),
        ({"delay": 3_600.5}, TIMER),
        ({"delay": timedelta(minutes=10)}, TIMER),
        ({"deliver_at": soon}, TIMER),
        ({"deliver_at": soon.astimezone(timezone(timedelta(hours=-5)))}, TIMER),
        ({"deliver_at": int(soon.timestamp() * 1000)}, TIMER),
    ]
    with Producer(node.address) as producer:
        for fields, where in ways:
            assert producer.send("levels", b"x", **fields).stored_topic == where
        for plain in (producer.send("levels", b"x"), producer.send("levels", b"x", deliver_at=10**12)):
            assert plain.stored_topic is None, "without a delay, or at a time that has passed"
            assert "waits" not in repr(plain)
            assert plain.to_json()["stored_topic"] is None


def test_messages_of_several_levels_travel_in_runs_of_their_own(node: Node) -> None:
    levels = [None if number % 4 == 0 else 1 + number % 3 for number in range(200)]
    with Producer(node.address, linger_ms=50) as producer:
        futures = [producer.send_async("mixed", b"x", queue=0, delay_level=level) for level in levels]
        results = [future.result(10) for future in futures]
    assert [one.stored_topic is None for one in results] == [level is None for level in levels]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"delay": 0}, "more than 0"),
    ({"delay": -1}, "more than 0"),
    ({"deliver_at": datetime(2030, 1, 1)}, "time zone"),
    ({"deliver_at": 1.5}, "milliseconds since 1970"),
    ({"deliver_at": -1}, "milliseconds since 1970"),
    ({"deliver_at": True}, "milliseconds since 1970"),
    ({"deliver_at": 1_800_000_000}, "multiply seconds by 1000"),
    ({"deliver_at": 10**12 - 1}, "before September 2001"),
    ({"delay": 1, "deliver_at": 1}, "not two"),
    ({"delay": float("nan")}, ""),
    ({"delay": float("inf")}, ""),
    ({"delay": "1s"}, "timedelta"),
    ({"delay": True}, "timedelta"),
    ({"delay_level": 0}, "from 1 to 18"),
    ({"delay_level": 19}, "from 1 to 18"),
    ({"delay_level": "1"}, "from 1 to 18"),
    ({"delay_level": True}, "from 1 to 18"),
    ({"delay": 1, "delay_level": 1}, "not two"),
    ({"properties": {"DELAY": "1"}}, "meaning of its own"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_wrong_values(node: Node, fields: dict[str, Any], words: str) -> None:
    with Producer(node.address) as producer:
        calls: list[tuple[Callable[..., object], object]] = [
            (producer.send, b"x"),
            (producer.send_async, b"x"),
            (producer.send_batch, [b"x"]),
            (producer.send_batch_async, [b"x"]),
        ]
        for call, content in calls:
            with pytest.raises(InvalidMessageError) as caught:
                call("wrong", content, **fields)
            assert words in str(caught.value)


def test_what_cannot_be_delayed(node: Node) -> None:
    with Producer(node.address) as producer:
        with pytest.raises(InvalidMessageError, match="inner batches"):
            producer.send_batch("batches", [b"x"], delay=1)
        with pytest.raises(InvalidMessageError, match="further queues"):
            producer.send("t", b"x", multi_dispatch=["%LMQ%a"], delay=1)
        with pytest.raises((SendError, InvalidMessageError)):
            producer.send("in-memory", b"x", delay=1)
    with Producer(node.address, delivery=ExactlyOnce()) as producer:
        with pytest.raises(InvalidMessageError, match="idempotent"):
            producer.send("t", b"x", delay=1)
        with pytest.raises(InvalidMessageError, match="idempotent"):
            producer.send_batch("t", [b"x"], delay_level=1)
