"""Goal: check points, acks and revived messages have RocketMQ's bytes, and acks find their check points.

Method: every check point, ack and pop retry record of the golden store is made anew; what the store's acks leave open is
compared with what its ``expected.json`` says must come again; rules of revival are tried by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.semantics.pop import ReceiptHandle
from commitmq.semantics.pop_revive import (
    ACK_TAG,
    BATCH_ACK_TAG,
    CHECK_POINT_TAG,
    REWRITE_INTERVALS_S,
    Ack,
    CheckPoint,
    CheckPointKey,
    ack_record,
    check_point_record,
    checked_topic,
    retried,
    revive_topic,
)
from commitmq.semantics.timer import TIMER_TOPIC, TimerRules, timer_request
from pending_store import BROKER, PendingStore

REVIVE = revive_topic("C")
KEY = CheckPointKey("orders", "g", 2, 40, 1_763_800_001_000, "b0")
POINT = CheckPoint(KEY, 60_000, (0, 1, 5))


def stored(pending: PendingStore, *tags: str) -> list[Record]:
    """Check points or acks as they were put first, in the timer topic."""
    waiting = [one for one in pending.of(TIMER_TOPIC) if one.properties[Property.REAL_TOPIC] == REVIVE]
    return [one for one in waiting if one.properties[Property.TAGS] in tags]


def has_as_timer(pending: PendingStore, made: Record, record: Record) -> bool:
    timer = timer_request(made, record.born_timestamp, TimerRules(max_delay_s=604_800), fresh=True)
    return timer is not None and pending.has(timer, record)


def check_points(pending: PendingStore) -> dict[CheckPointKey, CheckPoint]:
    points = [CheckPoint.parse(one.body) for one in stored(pending, CHECK_POINT_TAG)]
    return {point.key: point for point in points}


def test_a_check_point_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    records = stored(pending, CHECK_POINT_TAG)
    assert len(records) == 19
    for record in records:
        point = CheckPoint.parse(record.body)
        assert point.body() == record.body
        assert point.unique_key == record.properties[Property.UNIQUE_KEY]
        queue = int(record.properties[Property.REAL_QUEUE_ID])
        made = check_point_record(point, "C", queue, record.born_timestamp, BROKER)
        assert has_as_timer(pending, made, record)


def test_an_ack_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    points = check_points(pending)
    records = stored(pending, ACK_TAG, BATCH_ACK_TAG)
    assert len(records) == 22
    for record in records:
        ack = Ack.parse(record.body)
        assert ack.body() == record.body
        assert (ack.tag, ack.unique_key) == (record.properties["TAGS"], record.properties["UNIQ_KEY"])
        queue = int(record.properties[Property.REAL_QUEUE_ID])
        made = ack_record(ack, points[ack.key].invisible_ms, "C", queue, record.born_timestamp, BROKER)
        assert has_as_timer(pending, made, record)


def test_a_revived_message_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    records = pending.of("%RETRY%Pending_pop_PendingPop")
    assert len(records) == 2
    point = next(one for one in check_points(pending).values() if one.invisible_ms == 6_000)
    for record, offset in zip(records, (1, 3), strict=True):
        (source,) = [one for one in pending.of("PendingPop") if (one.queue_id, one.queue_offset) == (3, offset)]
        assert pending.has(retried(source, point, BROKER), record)


def test_what_no_ack_names_comes_again(pending: PendingStore) -> None:
    """The golden store's acks, matched to its check points, leave what ``expected.json`` calls unacked."""
    points = check_points(pending)
    for record in stored(pending, ACK_TAG, BATCH_ACK_TAG):
        ack = Ack.parse(record.body)
        for offset in ack.acked:
            points[ack.key] = points[ack.key].acked(offset)
    left = {(key.topic, key.queue_id, offset): point for key, point in points.items() for offset in point.left()}
    revived = {("PendingPop", 3, 1), ("PendingPop", 3, 3)}
    assert revived <= set(left)
    again = {}
    for message in expected_messages(pending):
        if message["must"] == "redeliver-at":
            handle = ReceiptHandle.parse(message.get("changed_handle") or message["pop"]["handle"])
            if not handle.is_ordered and handle.queue_offset is not None:
                place = (handle.topic(message["topic"], message["group"]), handle.queue_id, handle.queue_offset)
                again[place] = message["visible_again_ms"]
    assert set(left) - revived == set(again)
    assert len(again) == 25
    assert {place: left[place].revive_ms for place in again} == again


def test_every_receipt_handle_of_the_golden_broker_names_its_check_point(pending: PendingStore) -> None:
    points = check_points(pending)
    found = 0
    for message in expected_messages(pending):
        texts = [message.get("pop", {}).get("handle"), message.get("changed_handle")]
        for text in filter(None, texts):
            handle = ReceiptHandle.parse(text)
            assert str(handle) == text
            topic = handle.topic(message["topic"], message["group"])
            key = CheckPointKey(
                topic, message["group"], handle.queue_id, handle.start_offset, handle.pop_time, handle.broker_name
            )
            assert handle.is_ordered or points[key].revive_ms == handle.expires_ms
            assert handle.is_ordered or handle.queue_offset in points[key].offsets
            found += 1
    assert found > 50


def expected_messages(pending: PendingStore) -> list[dict[str, Any]]:
    text = (pending.root.parent / "expected.json").read_text(encoding="utf-8")
    messages: list[dict[str, Any]] = json.loads(text)["messages"]
    return messages


# ---------------------------------------------------------------- rules


def test_acks_mark_messages_by_their_index() -> None:
    assert POINT.offsets == (40, 41, 45)
    assert POINT.acked(45).bits == 0b100
    assert POINT.acked(45).acked(40).left() == [41]
    assert POINT.acked(42) == POINT, "an offset that the pop did not hand out"
    assert POINT.acked(40, 42, 45) == POINT.acked(45).acked(40)
    for one in (POINT, POINT.acked(41), replace(POINT, deltas=(), count=3), replace(POINT, deltas=(), count=3, bits=2)):
        assert [offset for offset in range(30, 60) if one.is_left(offset)] == one.left()


def test_a_check_point_without_distances_has_consecutive_messages() -> None:
    body = b'{"so":40,"pt":1,"it":2,"bm":2,"n":3,"q":2,"t":"orders","c":"g"}'
    point = CheckPoint.parse(body)
    assert point.offsets == (40, 41, 42)
    assert point.left() == [40, 42]
    assert point.key.broker_name == ""


def test_a_check_point_is_due_two_seconds_after_its_time() -> None:
    assert not POINT.is_due(POINT.revive_ms + 2_000)
    assert POINT.is_due(POINT.revive_ms + 2_001)


def test_a_check_point_is_put_off_by_the_table_of_intervals() -> None:
    assert len(REWRITE_INTERVALS_S) == 17
    point, invisible_ms = POINT, POINT.invisible_ms
    for failures in range(20):
        point = point.rewritten(45, point.revive_ms)
        invisible_ms += REWRITE_INTERVALS_S[min(failures, 16)] * 1_000
        assert (point.invisible_ms, point.rewrites) == (invisible_ms, failures + 1)
        assert (point.offsets, point.left()) == ((45,), [45])
    assert b'"rp":"20"' in point.body()
    assert CheckPoint.parse(point.body()) == point
    overdue = POINT.rewritten(45, POINT.revive_ms + 86_400_000)
    assert overdue.revive_ms == POINT.revive_ms + 86_400_000 + 10_000, "from now on: it is not due again at once"
    with pytest.raises(InvalidMessageError):
        CheckPoint.parse(b'{"so":40,"pt":1,"it":2,"n":99999999,"q":2,"t":"orders","c":"g"}')
    early = POINT.rewritten(45, POINT.revive_ms - 1)
    assert early.invisible_ms == POINT.invisible_ms


def test_a_retried_message_is_counted_and_stays_in_its_retry_topic() -> None:
    point = replace(POINT, key=KEY._replace(topic="%RETRY%g_orders"))
    record = Record("%RETRY%g_orders", reconsume_times=1, properties={"1ST_POP_TIME": "5", "ORIGIN_GROUP": "g"})
    made = retried(record, point, BROKER)
    assert (made.topic, made.reconsume_times, made.properties["1ST_POP_TIME"]) == ("%RETRY%g_orders", 2, "5")
    assert checked_topic(point) == "orders"
    first = retried(Record("orders", properties={"1ST_POP_TIME": "5"}), POINT, BROKER)
    assert first.properties["1ST_POP_TIME"] == str(KEY.pop_time), "not a producer's own"
    second = retried(Record("orders"), POINT, BROKER, v2=True)
    assert (second.topic, second.born_host) == ("%RETRY%g+orders", BROKER)
    assert second.properties == {"1ST_POP_TIME": str(KEY.pop_time), "ORIGIN_GROUP": "g"}


names = st.text(st.sampled_from("ab%|_-9"), min_size=1, max_size=9)
longs = st.integers(0, 2**62)
keys = st.builds(CheckPointKey, names, names, st.integers(0, 2**31 - 1), longs, longs, names)


@given(keys, longs, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8), st.none() | st.integers(0, 99))
def test_a_check_point_comes_back_from_its_body(
    key: CheckPointKey, invisible_ms: int, deltas: list[int], rewrites: int | None
) -> None:
    point = CheckPoint(key, invisible_ms, tuple(deltas), len(deltas), rewrites=rewrites)
    assert CheckPoint.parse(point.body()) == point


@given(keys, longs, st.none() | st.lists(longs, max_size=8).map(tuple))
def test_an_ack_comes_back_from_its_body(key: CheckPointKey, offset: int, offsets: tuple[int, ...] | None) -> None:
    ack = Ack(key, offset if offsets is None else -1, offsets)
    assert Ack.parse(ack.body()) == ack


def test_the_long_names_of_an_ack_are_read_too() -> None:
    body = b'{"ackOffset":41,"startOffset":40,"consumerGroup":"g","topic":"orders","queueId":2,'
    body += b'"popTime":1763800001000,"brokerName":"b0"}'
    assert Ack.parse(body) == Ack(KEY, 41)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"so":1}', b'{"t":1,"c":"g","q":0,"so":0,"pt":0,"it":0}'])
def test_another_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        CheckPoint.parse(body)
    with pytest.raises(InvalidMessageError):
        Ack.parse(body)
