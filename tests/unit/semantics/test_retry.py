"""Goal: a message that is sent back becomes RocketMQ's retry or dead letter, under RocketMQ's names.

Method: every retry record and dead letter of the golden store is made anew from the record that the consumer sent back;
each rule of counting and naming is tried by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from commitmq.format.constants import Host, Property
from commitmq.format.message_id import parse_offset_message_id
from commitmq.format.record import Record
from commitmq.semantics.derived import broker_order, derived
from commitmq.semantics.retry import (
    dead_letter_topic,
    is_pop_retry_v2,
    pop_retry_topic,
    popped_topic,
    retry_topic,
    sent_back,
)
from pending_store import PendingStore

GROUP = "Pending_retry"
SCHEDULE = "SCHEDULE_TOPIC_XXXX"


def source_of(pending: PendingStore, record: Record) -> Record:
    """The record that was sent back: the first delivery, or the retry before."""
    if record.reconsume_times == 1:
        return pending.at(parse_offset_message_id(record.properties[Property.ORIGIN_MESSAGE_ID])[1])
    retries = pending.with_key(retry_topic(GROUP), record.properties[Property.UNIQUE_KEY])
    return next(one for one in retries if one.reconsume_times == record.reconsume_times - 1)


def scheduled(record: Record) -> Record:
    """What the delay rules store of a record with a level."""
    properties = {
        **record.properties,
        Property.REAL_TOPIC: record.topic,
        Property.REAL_QUEUE_ID: str(record.queue_id),
    }
    return derived(record, SCHEDULE, int(record.properties[Property.DELAY]) - 1, broker_order(properties))


# ---------------------------------------------------------------- send-back


def test_a_retry_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    stored = [one for one in pending.of(SCHEDULE) if one.properties[Property.REAL_TOPIC] == retry_topic(GROUP)]
    rounds = []
    for record in stored:
        level = int(record.properties[Property.DELAY])
        source = source_of(pending, record)
        back = sent_back(
            source,
            GROUP,
            int(record.properties[Property.REAL_QUEUE_ID]),
            delay_level=0 if level == 3 + source.reconsume_times else level,
        )
        assert not back.dead
        assert pending.has(scheduled(back.record), record)
        rounds.append(record.reconsume_times)
    assert (rounds.count(1), rounds.count(2)) == (16, 6)


def test_a_dead_letter_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    """Two went there at once and have no REAL_TOPIC, two after two tries and have it."""
    stored = pending.of(dead_letter_topic(GROUP))
    for record in stored:
        source = source_of(pending, record)
        back = sent_back(source, GROUP, 5, delay_level=-1 if source.reconsume_times == 0 else 0, max_retries=2)
        assert back.dead
        assert pending.has(back.record, record)
    assert [Property.REAL_TOPIC in one.properties for one in stored] == [False, False, True, True]
    assert [one.reconsume_times for one in stored] == [1, 1, 3, 3]


def test_the_level_is_three_and_the_tries_so_far() -> None:
    for times in range(4):
        back = sent_back(Record("orders", reconsume_times=times), "g", 0)
        assert back.record.properties[Property.DELAY] == str(3 + times)
        assert back.record.reconsume_times == times + 1
    assert sent_back(Record("orders"), "g", 0, delay_level=7).record.properties[Property.DELAY] == "7"


@pytest.mark.parametrize(
    ("times", "most", "level", "dead"),
    [(15, 16, 0, False), (16, 16, 0, True), (0, 0, 0, True), (2, 3, 0, False), (3, 3, 5, True), (0, 16, -1, True)],
)
def test_the_last_try_is_at_the_limit(times: int, most: int, level: int, dead: bool) -> None:
    back = sent_back(Record("orders", reconsume_times=times), "g", 0, delay_level=level, max_retries=most)
    assert back.dead == dead
    assert back.record.topic == ("%DLQ%g" if dead else "%RETRY%g")
    assert (back.record.properties[Property.DELAY] == "0") == dead


def test_retry_topic_and_origin_are_set_once() -> None:
    first = Record("orders", physical_offset=77, store_host=Host("10.0.0.1", 10911), properties={"WAIT": "true"})
    once = sent_back(first, "g", 0).record
    again = sent_back(replace(once, physical_offset=99, store_host=first.store_host), "g", 0).record
    for record in (once, again):
        assert record.properties[Property.RETRY_TOPIC] == "orders"
        assert record.properties[Property.ORIGIN_MESSAGE_ID] == first.offset_msg_id
        assert record.properties[Property.WAIT] == "false"
    assert again.reconsume_times == 2


def test_body_flag_and_born_host_of_a_retry_are_the_originals() -> None:
    first = Record("t", flag=9, sys_flag=0x301, born_timestamp=5, born_host=Host("10.0.0.9", 1), body=b"b")
    back = sent_back(first, "g", 3).record
    assert back.queue_id == 3
    for name in ("flag", "sys_flag", "born_timestamp", "born_host", "body"):
        assert getattr(back, name) == getattr(first, name)


# ---------------------------------------------------------------- names


def test_names_of_retry_and_dead_letter_topics() -> None:
    assert (retry_topic("g"), dead_letter_topic("g")) == ("%RETRY%g", "%DLQ%g")


def test_names_of_pop_retry_topics(pending: PendingStore) -> None:
    assert pop_retry_topic("PendingPop", "Pending_pop") == "%RETRY%Pending_pop_PendingPop"
    assert pending.of("%RETRY%Pending_pop_PendingPop")
    assert pop_retry_topic("orders", "g", v2=True) == "%RETRY%g+orders"
    assert is_pop_retry_v2("%RETRY%g+orders")
    assert not is_pop_retry_v2("%RETRY%g_orders")
    assert not is_pop_retry_v2("g+orders")
    for v2 in (False, True):
        assert popped_topic(pop_retry_topic("a_b", "g_1", v2=v2), "g_1") == "a_b"
    assert popped_topic("orders", "g") == "orders"
