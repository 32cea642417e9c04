"""Goal: timers follow RocketMQ's rules from the request to the delivery, with its records, units and slots.

Method: the golden store's timer topic, timer log, wheel and delivered messages are made anew, byte for byte; limits and
roundings are tried by hand, and the way through the wheel by generated times.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.format.timer_log import TimerUnit, encode_unit, place_of_next
from commitmq.format.timer_wheel import SLOTS, Slot, decode_slot
from commitmq.semantics.timer import (
    LATE_ENQUEUE_MS,
    REQUESTS,
    TIMER_TOPIC,
    TimerRefusedError,
    TimerRules,
    asks_for_timer,
    delete_keys,
    delivered,
    due_units,
    first_read_time,
    is_cancelled,
    refused_share,
    rolled,
    rounded,
    slot_for,
    slot_index,
    slot_time,
    slot_with,
    timer_request,
    timer_unit,
    without_requests,
)
from commitmq.workers.timer.incoming import delete_keys as encoded_keys
from pending_store import TIMER_LOG_FILE_BYTES, PendingStore

NOW = 1_795_339_323_000
ADDED = (Property.TIMER_OUT_MS, Property.REAL_TOPIC, Property.REAL_QUEUE_ID)
ROLLED = (Property.TIMER_ENQUEUE_MS, Property.TIMER_DEQUEUE_MS, Property.TIMER_ROLL_TIMES)
DAYS_7 = TimerRules(max_delay_s=604_800)
# The golden broker's first run, until this time, had a window of 12 slots.
SECOND_RUN_MS = 1_795_339_360_000


def message(**properties: str) -> Record:
    return Record("orders", 2, properties={"UNIQ_KEY": "AB", **properties}, body=b"x")


def asked(record: Record) -> Record:
    """The message that was sent and stored as ``record`` of the timer topic."""
    kept = {name: value for name, value in record.properties.items() if name not in ADDED}
    topic, queue = record.properties[Property.REAL_TOPIC], int(record.properties[Property.REAL_QUEUE_ID])
    return replace(record, topic=topic, queue_id=queue, properties=kept)


def golden_rules(write_ms: int) -> TimerRules:
    return TimerRules(max_delay_s=604_800, roll_window_slots=12 if write_ms < SECOND_RUN_MS else 21_600)


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
    assert without_requests(properties) == {"DELAY": "3", "KEYS": "k"}
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


def test_a_full_slot_refuses() -> None:
    rules = TimerRules(congest_count=10)
    assert timer_request(message(TIMER_DELAY_SEC="9"), NOW, rules, slot_count=19) is not None
    with pytest.raises(TimerRefusedError) as caught:
        timer_request(message(TIMER_DELAY_SEC="9"), NOW, rules, slot_count=20)
    assert caught.value.code == "WHEEL_TIMER_FLOW_CONTROL"
    assert [refused_share(count, rules) for count in (0, 10, 15, 20, 99)] == [0, 0, 0.5, 1, 1]


def test_the_place_of_a_half_message_survives_the_timer() -> None:
    """A committed message with a timer keeps its transaction bits and the half message's offset in the timer topic."""
    committed = replace(message(TIMER_DELAY_SEC="9"), sys_flag=8, prepared_transaction_offset=77)
    made = timer_request(committed, NOW)
    assert made is not None
    assert (made.sys_flag, made.prepared_transaction_offset) == (8, 77)


# ---------------------------------------------------------------- the wheel


def test_every_unit_of_the_timer_log_and_every_slot_of_the_wheel_is_rocketmqs(pending: PendingStore) -> None:
    """Enqueuing the timer topic anew, at the times that the units have, gives the same log and the same wheel."""
    wheel: dict[int, Slot] = {}
    position = 0
    log = pending.timer_log()
    assert len(log) == len(pending.of(TIMER_TOPIC)) == 88
    for (stored_at, stored), record in zip(log, pending.of(TIMER_TOPIC), strict=True):
        rules = golden_rules(stored.write_ms)
        time_ms, _ = slot_time(int(record.properties[Property.TIMER_OUT_MS]), stored.write_ms, rules)
        raw = wheel.get(slot_index(time_ms), Slot(0, 0, 0, 0))
        slot = slot_for(raw, time_ms)
        unit = timer_unit(record, stored.write_ms, slot, rules)
        position = place_of_next(position, TIMER_LOG_FILE_BYTES)
        assert position == stored_at
        assert encode_unit(unit) == encode_unit(stored)
        wheel[slot_index(time_ms)] = slot_with(slot, unit, position)
        position += 52
    data = (pending.root / "timerwheel").read_bytes()
    assert {index: decode_slot(data, index) for index in wheel} == wheel


def test_a_slot_of_another_turn_is_not_taken() -> None:
    time_ms = 1_795_339_335_000
    assert slot_index(time_ms) == 292_935
    assert slot_index(time_ms + SLOTS * 1_000) == 292_935
    raw = Slot(time_ms // 1_000, 0, 156, 4)
    assert slot_for(raw, time_ms) is raw
    assert slot_for(raw, time_ms + 999) is raw
    assert slot_for(raw, time_ms + SLOTS * 1_000) is None


def test_a_cancellation_lowers_the_slots_count() -> None:
    record = Record("t", properties={"TIMER_OUT_MS": str(NOW + 2_000), "REAL_TOPIC": "orders"})
    first = timer_unit(record, NOW, None, TimerRules())
    slot = slot_with(None, first, 0)
    cancel = replace(record, properties={**record.properties, "TIMER_DEL_UNIQKEY": "AB"})
    second = timer_unit(cancel, NOW, slot, TimerRules())
    assert (first.magic, second.magic, second.previous) == (1, 5, 0)
    assert slot_with(slot, second, 52) == Slot(slot.time, 0, 52, 0)


def test_what_is_beyond_the_window_rolls() -> None:
    rules = TimerRules(roll_window_slots=12)
    assert slot_time(NOW + 11_000, NOW, rules) == (NOW + 11_000, False)
    # A little beyond: the middle of the window, so that the last round is long enough.
    assert slot_time(NOW + 12_000, NOW, rules) == (NOW + 6_000, True)
    assert slot_time(NOW + 15_000, NOW, rules) == (NOW + 6_000, True)
    assert slot_time(NOW + 16_000, NOW, rules) == (NOW + 12_000, True)


@pytest.mark.parametrize("slots", [0, 1, 604_741])
def test_a_window_that_the_wheel_cannot_hold_is_its_whole_length(slots: int) -> None:
    assert TimerRules(roll_window_slots=slots).window_ms == 604_740_000
    assert TimerRules(roll_window_slots=604_740).window_ms == 604_740_000


@given(st.integers(1, 40 * 86_400), st.integers(3, 604_740))
def test_a_rolling_timer_comes_to_its_time_and_never_beyond(delay_s: int, window: int) -> None:
    rules = TimerRules(roll_window_slots=window)
    out_ms, now_ms, rounds = NOW + delay_s * 1_000, NOW, 0
    while True:
        time_ms, rolls = slot_time(out_ms, now_ms, rules)
        assert now_ms < time_ms <= out_ms
        if not rolls or rounds > 200:
            break
        now_ms, rounds = time_ms, rounds + 1
    assert rolls or time_ms == out_ms


def test_reading_begins_where_it_ended_but_not_where_the_wheel_was_overwritten() -> None:
    rules = TimerRules()
    assert first_read_time(NOW - 5_000, NOW + 17, rules) == NOW - 5_000
    assert first_read_time(0, NOW + 17, rules) == NOW - 604_800_000 + 60_000


# ---------------------------------------------------------------- a slot that is due


def test_a_rolled_message_is_put_as_rocketmq_puts_it(pending: PendingStore) -> None:
    found = 0
    for record in pending.of(TIMER_TOPIC):
        if Property.TIMER_ROLL_TIMES in record.properties:
            times = int(record.properties[Property.TIMER_ROLL_TIMES])
            source = pending.with_key(TIMER_TOPIC, record.properties[Property.UNIQUE_KEY])[times - 1]
            made = rolled(source, *times_of(record))
            assert pending.has(made, record)
            found += 1
    assert found == 10


def test_a_due_message_is_delivered_as_rocketmq_delivers_it(pending: PendingStore) -> None:
    found = 0
    for record in pending.of("PendingTimer", "PendingTimerTwo", "rmq_sys_REVIVE_LOG_C"):
        if Property.TIMER_DEQUEUE_MS in record.properties:
            source = pending.with_key(TIMER_TOPIC, record.properties[Property.UNIQUE_KEY])[-1]
            made = delivered(source, *times_of(record))
            assert made is not None
            assert pending.has(made, record)
            found += 1
    assert found == 8


def times_of(record: Record) -> tuple[int, int]:
    return int(record.properties[Property.TIMER_ENQUEUE_MS]), int(record.properties[Property.TIMER_DEQUEUE_MS])


def test_cancellations_come_first_and_messages_in_the_order_of_enqueuing(pending: PendingStore) -> None:
    log = dict(pending.timer_log())
    position, chain = 3_276, []  # the slot of the recalled message that is due
    while position != -1:
        chain.append(log[position])
        position = log[position].previous
    due = due_units(chain)
    keys = set().union(*(delete_keys(pending.at(unit.physical_offset)) for unit in due.cancellations))
    messages = [pending.at(unit.physical_offset) for unit in due.messages]
    assert [one.properties["KEYS"] for one in messages] == ["recalled-due", "recalled-kept-neighbour"]
    assert [is_cancelled(one, keys) for one in messages] == [True, False]
    stored = {one.properties["KEYS"] for one in pending.of("PendingTimer")}
    assert "recalled-kept-neighbour" in stored
    assert "recalled-due" not in stored


@pytest.mark.parametrize(
    ("stored", "topic", "meant"),
    [
        ("AB", "orders", True),
        ("AB", "parcels", False),
        ("orders+AB", "orders", True),
        ("orders+AB", "parcels", True),
        ("parcels+AB", "orders", False),
        ("A", "orders", False),
    ],
)
def test_a_cancellation_means_a_message_of_its_topic(stored: str, topic: str, meant: bool) -> None:
    """RocketMQ compares bare ids (its default), or ids with topics: the topic in a key wins over that of the cancellation."""
    cancellation = Record(TIMER_TOPIC, properties={"UNIQ_KEY": "AB", "REAL_TOPIC": topic, "TIMER_DEL_UNIQKEY": stored})
    record = Record(TIMER_TOPIC, properties={"UNIQ_KEY": "AB", "REAL_TOPIC": "orders"})
    assert is_cancelled(record, delete_keys(cancellation)) is meant
    assert encoded_keys(stored.encode(), topic.encode()) == {one.encode() for one in delete_keys(cancellation)}


def test_a_cancellation_that_rolls_counts_as_a_message() -> None:
    units = [TimerUnit(-1, magic, 0, 0, magic, 0, 0) for magic in (7, 5, 3, 1)]
    due = due_units(units)
    assert [unit.magic for unit in due.cancellations] == [5]
    assert [unit.magic for unit in due.messages] == [1, 3, 7]


def test_a_cancellation_is_never_delivered_but_rolls(pending: PendingStore) -> None:
    cancel = next(one for one in pending.of(TIMER_TOPIC) if Property.TIMER_DELETE_KEY in one.properties)
    assert delivered(cancel, 1, 2) is None
    again = rolled(cancel, 1, 2)
    assert (again.topic, again.properties[Property.TIMER_ROLL_TIMES]) == (TIMER_TOPIC, "1")


def test_a_message_that_was_due_before_its_enqueuing_has_the_largest_time(pending: PendingStore) -> None:
    made = delivered(pending.of(TIMER_TOPIC)[0], LATE_ENQUEUE_MS, NOW)
    assert made is not None
    assert made.properties[Property.TIMER_ENQUEUE_MS] == "9223372036854775807"


def test_a_record_without_a_real_queue_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match="names no real topic"):
        delivered(Record(TIMER_TOPIC, properties={"REAL_TOPIC": "orders", "REAL_QID": "x"}), 1, 2)


def test_a_cancellation_of_what_has_passed_is_illegal() -> None:
    with pytest.raises(TimerRefusedError) as caught:
        timer_request(message(TIMER_DELIVER_MS=str(NOW), TIMER_DEL_UNIQKEY="AB"), NOW)
    assert caught.value.code == "WHEEL_TIMER_MSG_ILLEGAL"
