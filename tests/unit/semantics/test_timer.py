"""Goal: a request for a timer becomes RocketMQ's record of the timer topic, or is refused, by RocketMQ's rules.

Method: the golden store's timer topic is made anew, byte for byte; limits and roundings are tried by hand and by generated
times. The way through the wheel is tried in ``tests/unit/workers``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.format.timer import SLOTS, Slot
from commitmq.semantics.timer import (
    REQUESTS,
    TIMER_TOPIC,
    TimerRefusedError,
    TimerRules,
    asks_for_timer,
    refused_share,
    rounded,
    slot_for,
    slot_index,
    timer_request,
)
from pending_store import PendingStore

NOW = 1_795_339_323_000
ADDED = (Property.TIMER_OUT_MS, Property.REAL_TOPIC, Property.REAL_QUEUE_ID)
DAYS_7 = TimerRules(max_delay_s=604_800)


def message(**properties: str) -> Record:
    return Record("orders", 2, properties={"UNIQ_KEY": "AB", **properties}, body=b"x")


def asked(record: Record) -> Record:
    """The message that was sent and stored as ``record`` of the timer topic."""
    kept = {name: value for name, value in record.properties.items() if name not in ADDED}
    topic, queue = record.properties[Property.REAL_TOPIC], int(record.properties[Property.REAL_QUEUE_ID])
    return replace(record, topic=topic, queue_id=queue, properties=kept)


# ---------------------------------------------------------------- the request


def test_a_request_is_stored_as_rocketmq_stores_it(pending: PendingStore) -> None:
    sent = [
        record
        for record in pending.of(TIMER_TOPIC)
        if Property.TIMER_ROLL_TIMES not in record.properties and Property.CLUSTER in record.properties
    ]
    assert len(sent) > 30
    for record in sent:
        source = asked(record)
        assert asks_for_timer(source.topic, source.properties)
        # RocketMQ looked at its clock a moment before it stored the message.
        clocks = range(record.store_timestamp, record.born_timestamp - 1, -1)
        made = (timer_request(source, now_ms, DAYS_7) for now_ms in clocks)
        assert any(one is not None and pending.has(one, record) for one in made), record.properties


def test_a_time_that_has_passed_stays_a_plain_message(pending: PendingStore) -> None:
    (record,) = [one for one in pending.of("PendingTimerTwo") if one.properties["KEYS"] == "timer-past"]
    assert asks_for_timer(record.topic, record.properties)
    assert timer_request(record, record.store_timestamp) is None


@pytest.mark.parametrize(
    ("properties", "deliver_ms"),
    [
        ({"TIMER_DELAY_SEC": "2", "TIMER_DELAY_MS": "5000", "TIMER_DELIVER_MS": "1"}, NOW + 2_000),
        ({"TIMER_DELAY_MS": "5001", "TIMER_DELIVER_MS": "1"}, NOW + 5_001),
        ({"TIMER_DELIVER_MS": str(NOW + 7_500)}, NOW + 7_500),
    ],
)
def test_the_first_request_present_wins(properties: dict[str, str], deliver_ms: int) -> None:
    made = timer_request(message(**properties), NOW)
    assert made is not None
    assert made.properties[Property.TIMER_OUT_MS] == str(rounded(deliver_ms))
    assert (made.topic, made.queue_id, made.properties[Property.REAL_QUEUE_ID]) == (TIMER_TOPIC, 0, "2")


def test_a_delay_level_wins_over_a_timer() -> None:
    properties = {"DELAY": "3", "TIMER_DELAY_SEC": "2", "TIMER_DELAY_MS": "1", "TIMER_DELIVER_MS": "9", "KEYS": "k"}
    assert not asks_for_timer("orders", properties)
    assert asks_for_timer("orders", {**properties, "DELAY": "0"})
    assert not asks_for_timer("orders", {"KEYS": "k"})


def test_a_timer_message_is_not_transformed_again() -> None:
    assert not asks_for_timer(TIMER_TOPIC, {"TIMER_DELAY_SEC": "2"})
    assert not asks_for_timer("orders", {"TIMER_DELAY_SEC": "2", "TIMER_OUT_MS": "1"})


@pytest.mark.parametrize(
    ("asked_ms", "out_ms"),
    [(5_000, 4_000), (5_001, 5_000), (5_999, 5_000), (6_000, 5_000)],
)
def test_an_exact_second_goes_one_second_earlier(asked_ms: int, out_ms: int) -> None:
    assert rounded(asked_ms) == out_ms
    assert rounded(asked_ms * 10, 10_000) == out_ms * 10


@given(st.integers(1, 2**45), st.integers(1, 100_000))
def test_a_timer_is_due_at_most_one_precision_before_the_asked_time(asked_ms: int, precision_ms: int) -> None:
    out_ms = rounded(asked_ms, precision_ms)
    assert out_ms % precision_ms == 0
    assert 0 < asked_ms - out_ms <= precision_ms


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("text", ["x", "", " 1", "1_0", "٣", "9223372036854775808", "1.0"])
def test_a_request_that_is_no_number_is_illegal(name: str, text: str) -> None:
    with pytest.raises(TimerRefusedError, match=name) as caught:
        timer_request(message(**{name: text}), NOW)
    assert caught.value.code == "WHEEL_TIMER_MSG_ILLEGAL"


def test_a_delay_beyond_the_limit_is_illegal() -> None:
    longest = message(TIMER_DELAY_SEC="259200")
    assert timer_request(longest, NOW) is not None
    with pytest.raises(TimerRefusedError, match="at most 259200000 ms") as caught:
        timer_request(message(TIMER_DELAY_MS="259200001"), NOW)
    assert caught.value.code == "WHEEL_TIMER_MSG_ILLEGAL"
    assert timer_request(message(TIMER_DELAY_MS="259200001"), NOW, DAYS_7) is not None


def test_the_place_of_a_half_message_survives_the_timer() -> None:
    """A committed message with a timer keeps its transaction bits and the half message's offset in the timer topic."""
    committed = replace(message(TIMER_DELAY_SEC="9"), sys_flag=8, prepared_transaction_offset=77)
    made = timer_request(committed, NOW)
    assert made is not None
    assert (made.sys_flag, made.prepared_transaction_offset) == (8, 77)


def test_the_share_of_refused_requests_grows_with_the_slot() -> None:
    rules = TimerRules(congest_count=10)
    assert [refused_share(count, rules) for count in (0, 10, 15, 20, 99)] == [0, 0, 0.5, 1, 1]


# ---------------------------------------------------------------- the wheel


def test_a_slot_of_another_turn_is_not_taken() -> None:
    time_ms = 1_795_339_335_000
    assert slot_index(time_ms) == 292_935
    assert slot_index(time_ms + SLOTS * 1_000) == 292_935
    raw = Slot(time_ms // 1_000, 0, 156, 4)
    assert slot_for(raw, time_ms) is raw
    assert slot_for(raw, time_ms + 999) is raw
    assert slot_for(raw, time_ms + SLOTS * 1_000) is None


@pytest.mark.parametrize("slots", [0, 1, 604_741])
def test_a_window_that_the_wheel_cannot_hold_is_its_whole_length(slots: int) -> None:
    assert TimerRules(roll_window_slots=slots).window_ms == 604_740_000
    assert TimerRules(roll_window_slots=604_740).window_ms == 604_740_000


def test_a_cancellation_of_what_has_passed_is_illegal() -> None:
    with pytest.raises(TimerRefusedError) as caught:
        timer_request(message(TIMER_DELIVER_MS=str(NOW), TIMER_DEL_UNIQKEY="AB"), NOW)
    assert caught.value.code == "WHEEL_TIMER_MSG_ILLEGAL"
