"""Goal: what the timer writes has RocketMQ's bytes: units of the timer log, slots of the wheel, rolled and delivered messages.

Method: the timer topic of a golden store is put into a new wheel by the process's own columns, at the times that RocketMQ's
units have, and its messages are delivered and rolled by the process's own runs, at the clocks that RocketMQ's copies name.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.config import load
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record
from commitmq.format.timer import MAGIC_DELETE, SLOTS
from commitmq.semantics.timer import LATE_ENQUEUE_MS, TIMER_TOPIC, TimerRules
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.workers.runtime.clocks import SteadyClock
from commitmq.workers.runtime.run_making import RunMaker
from commitmq.workers.runtime.run_mover import MovedBefore
from commitmq.workers.timer import deliveries as module
from commitmq.workers.timer.deliveries import ROW, Deliveries, DueSlot
from commitmq.workers.timer.incoming import Incoming, TimerQueue, delete_keys, message_key, slots_of
from commitmq.workers.timer.process import Timer, oldest_slot_ms
from commitmq.workers.timer.wheel import TimerIndex
from golden_stores import GOLDEN_SEGMENT_BYTES
from log_builder import HOST, build_log
from pending_store import TIMER_LOG_FILE_BYTES, PendingStore, blank
from queue_in_memory import QueueInMemory

PLAIN = load(None, ["commit_log.append_properties_crc=false"])
NOW_MS = 1_795_339_323_000
# The golden broker's first run, until this time, had a window of 12 slots.
SECOND_RUN_MS = 1_795_339_360_000


def queue_of(records: list[Record], log: CommitLog) -> TimerQueue:
    return TimerQueue(QueueInMemory(records), log, pytest.fail)  # type: ignore[arg-type]


def log_of(store: PendingStore) -> CommitLog:
    return CommitLog(store.root / "commitlog", GOLDEN_SEGMENT_BYTES, 4)


def enqueue(index: TimerIndex, messages: Incoming, write_ms: int, window_slots: int) -> None:
    """As the process does."""
    slots, rolls = slots_of(messages.out_ms, write_ms, TimerRules(roll_window_slots=window_slots))
    index.add(messages, slots, rolls, write_ms)


@pytest.fixture(scope="module")
def made(pending: PendingStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[StoreLayout, TimerIndex]:
    """Wheel and timer log, made anew from the golden timer topic."""
    layout = StoreLayout(tmp_path_factory.mktemp("made"))
    index = TimerIndex.make_empty(layout, TIMER_LOG_FILE_BYTES)
    records = pending.of(TIMER_TOPIC)
    queue = queue_of(records, log_of(pending))
    for number, (_, unit) in enumerate(pending.timer_log()):
        messages = queue.take(number, 1, bound=0, floor=0)
        assert messages is not None
        enqueue(index, messages, unit.write_ms, 12 if unit.write_ms < SECOND_RUN_MS else 21_600)
    index.flush()
    return layout, index


def test_every_unit_of_the_timer_log_is_rocketmqs(pending: PendingStore, made: tuple[StoreLayout, TimerIndex]) -> None:
    """All columns: previous unit, magic with roll and delete, write time, delay, place and size of the record, hash of the
    topic; and the filler at the end of each file.
    """
    layout, _ = made
    files = sorted(path.name for path in (pending.root / "timerlog").iterdir())
    assert sorted(path.name for path in (layout.root / "timerlog").iterdir()) == files
    for name in files:
        assert (layout.root / "timerlog" / name).read_bytes() == (pending.root / "timerlog" / name).read_bytes()
    magics = {unit.magic for _, unit in pending.timer_log()}
    assert magics == {1, 3, 5, 7}, "plain units, rolls, cancellations, and cancellations that roll"


def test_every_slot_of_the_wheel_is_rocketmqs(pending: PendingStore, made: tuple[StoreLayout, TimerIndex]) -> None:
    """Time, first and last unit, number of messages (which a cancellation lowers), magic 0; passed slots stay."""
    layout, _ = made
    assert (layout.root / "timerwheel").read_bytes() == (pending.root / "timerwheel").read_bytes()


def test_a_cancellation_has_its_magic_and_lowers_the_count_of_its_slot(tmp_path: Path) -> None:
    plain = timer_record({})
    cancels = timer_record({"TIMER_DEL_UNIQKEY": "AB"})
    records = build_log(tmp_path / "commitlog", [plain, plain, cancels])
    messages = queue_of(records, CommitLog(tmp_path / "commitlog", 4096, 4)).take(0, 9, bound=0, floor=0)
    assert messages is not None
    index = TimerIndex.make_empty(StoreLayout(tmp_path), TIMER_LOG_FILE_BYTES)
    enqueue(index, messages, NOW_MS, 172_800)
    units = index.log.units(np.array([0, 52, 104], np.int64))
    assert units["magic"].tolist() == [1, 1, 1 | MAGIC_DELETE]
    assert units["previous"].tolist() == [-1, 0, 52]
    assert units["topic_hash"].tolist() == [java_string_hash("orders")] * 3
    slot = index.wheel.slots[(NOW_MS + 2_000) // 1_000 % len(index.wheel.slots)]
    assert slot.tolist() == ((NOW_MS + 2_000) // 1_000, 0, 104, 1, 0)


@pytest.mark.parametrize(
    ("ahead_ms", "slot_ms", "rolls"),
    [
        (11_000, 11_000, False),
        (12_000, 6_000, True),  # a little beyond: the middle, so that the last round is long enough
        (15_000, 6_000, True),
        (16_000, 12_000, True),
        (9_000_000, 12_000, True),
    ],
)
def test_what_is_beyond_the_window_rolls(ahead_ms: int, slot_ms: int, rolls: bool) -> None:
    times, rolled = slots_of(np.array([NOW_MS + ahead_ms]), NOW_MS, TimerRules(roll_window_slots=12))
    assert (times.tolist(), rolled.tolist()) == ([NOW_MS + slot_ms], [rolls])


@given(st.integers(1, 40 * 86_400), st.integers(3, 604_740))
def test_a_rolling_message_comes_to_its_time_and_never_beyond(delay_s: int, window: int) -> None:
    rules = TimerRules(roll_window_slots=window)
    out_ms, now_ms, rounds = NOW_MS + delay_s * 1_000, NOW_MS, 0
    while True:
        (time_ms,), (rolls,) = (column.tolist() for column in slots_of(np.array([out_ms]), now_ms, rules))
        assert now_ms < time_ms <= out_ms
        if not rolls or rounds > 200:
            break
        now_ms, rounds = time_ms, rounds + 1
    assert rolls or time_ms == out_ms


@pytest.mark.parametrize("window", [12, 21_600, 172_800, 604_740])
def test_no_slot_that_a_start_opens_is_taken_for_one_that_is_to_come(window: int) -> None:
    """The furthest slot that a message may take is less than a turn of the wheel away from the oldest one."""
    rules = TimerRules(roll_window_slots=window)
    oldest_ms, furthest_ms = oldest_slot_ms(NOW_MS, rules), NOW_MS + rules.window_ms
    assert 0 < SLOTS * 1_000 - (furthest_ms - oldest_ms) <= 60_000
    assert oldest_ms <= NOW_MS - 7 * 86_400_000 + 120_000, "at least as far back as RocketMQ goes"


# ---------------------------------------------------------------- out of the wheel


class Clock:
    """The clock that a delivery sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = NOW_MS
        monkeypatch.setattr(module, "time", SimpleNamespace(time_ns=lambda: self.now_ms * 1_000_000))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def deliveries_of(log: CommitLog, reports: list[str]) -> Deliveries:
    made: Any = object.__new__(Deliveries)
    made.records = RunMaker(log, PLAIN, lambda why, _: reports.append(why))
    made._delivered, made._rolled = MovedBefore(), MovedBefore()
    return made  # type: ignore[no-any-return]


def row_of(record: Record, *, enqueued_ms: int = NOW_MS, rolls: bool = False) -> np.ndarray[Any, Any]:
    rows = np.zeros(1, ROW)
    rows["physical"], rows["size"] = record.physical_offset, record.total_size
    rows["write_ms"], rows["rolls"] = enqueued_ms, rolls
    return rows


def moved(deliveries: Deliveries, row: np.ndarray[Any, Any]) -> list[tuple[str, int, bytes]]:
    return [
        (one.topic, one.queue_id, one.run.data.tobytes())
        for one in deliveries._runs(row, is_roll=bool(row["rolls"][0]))
    ]


def times_of(record: Record) -> tuple[int, int]:
    return int(record.properties[Property.TIMER_ENQUEUE_MS]), int(record.properties[Property.TIMER_DEQUEUE_MS])


def test_a_due_message_is_delivered_in_rocketmqs_bytes(pending: PendingStore, clock: Clock) -> None:
    """It keeps REAL_TOPIC, REAL_QID and TIMER_OUT_MS; the times of enqueuing and dequeuing come to them, in Java's order."""
    deliveries, seen = deliveries_of(log_of(pending), []), 0
    for record in pending.of("PendingTimer", "PendingTimerTwo", "rmq_sys_REVIVE_LOG_C"):
        if Property.TIMER_DEQUEUE_MS not in record.properties:
            continue
        source = pending.with_key(TIMER_TOPIC, record.properties[Property.UNIQUE_KEY])[-1]
        enqueued_ms, clock.now_ms = times_of(record)
        wanted = (record.topic, record.queue_id, blank(pending.data[record.physical_offset]))
        assert moved(deliveries, row_of(source, enqueued_ms=enqueued_ms)) == [wanted]
        seen += 1
    assert seen == 8


def test_a_message_that_rolls_goes_round_in_rocketmqs_bytes(pending: PendingStore, clock: Clock) -> None:
    """TIMER_ROLL_TIMES is 1 first and counts up; TIMER_OUT_MS stays; the times are those of the last round."""
    deliveries, rounds = deliveries_of(log_of(pending), []), []
    for record in pending.of(TIMER_TOPIC):
        if Property.TIMER_ROLL_TIMES not in record.properties:
            continue
        times = int(record.properties[Property.TIMER_ROLL_TIMES])
        source = pending.with_key(TIMER_TOPIC, record.properties[Property.UNIQUE_KEY])[times - 1]
        enqueued_ms, clock.now_ms = times_of(record)
        wanted = (TIMER_TOPIC, 0, blank(pending.data[record.physical_offset]))
        assert moved(deliveries, row_of(source, enqueued_ms=enqueued_ms, rolls=True)) == [wanted]
        assert record.properties[Property.TIMER_OUT_MS] == source.properties[Property.TIMER_OUT_MS]
        rounds.append(times)
    assert len(rounds) == 10
    assert max(rounds) > 1


def test_a_message_that_never_was_in_the_wheel_has_the_largest_time_of_enqueuing(
    pending: PendingStore, clock: Clock
) -> None:
    source = pending.of(TIMER_TOPIC)[0]
    ((_, _, data),) = moved(deliveries_of(log_of(pending), []), row_of(source, enqueued_ms=LATE_ENQUEUE_MS))
    assert b"TIMER_ENQUEUE_MS\x019223372036854775807\x02" in data


def timer_record(more: dict[str, str], *drop: str) -> Record:
    properties = {
        "UNIQ_KEY": "AB",
        "TIMER_OUT_MS": str(NOW_MS + 2_000),
        "REAL_TOPIC": "orders",
        "REAL_QID": "2",
        **more,
    }
    kept = {name: value for name, value in properties.items() if name not in drop}
    return Record(TIMER_TOPIC, body=b"x", properties=kept, store_timestamp=NOW_MS, born_host=HOST, store_host=HOST)


@pytest.mark.parametrize(
    ("more", "drop"),
    [
        ({}, ("REAL_TOPIC",)),
        ({}, ("REAL_QID",)),
        ({"REAL_QID": "x"}, ()),
        ({"REAL_TOPIC": "RMQ_SYS_TRANS_HALF_TOPIC"}, ()),
    ],
)
def test_a_message_without_a_real_queue_is_passed_and_reported(
    tmp_path: Path, more: dict[str, str], drop: tuple[str, ...]
) -> None:
    good = timer_record({})
    records = build_log(tmp_path, [timer_record(more, *drop), good])
    reports: list[str] = []
    deliveries = deliveries_of(CommitLog(tmp_path, 4096, 4), reports)
    rows = np.concatenate([row_of(one) for one in records])
    runs = list(deliveries._runs(rows, is_roll=False))
    assert [(one.topic, one.queue_id, one.run.count) for one in runs] == [("orders", 2, 1)]
    assert reports == ["its record does not say where it belongs"]


# ---------------------------------------------------------------- cancelling


def test_a_cancellation_takes_its_message_out_of_the_slot(
    pending: PendingStore, made: tuple[StoreLayout, TimerIndex]
) -> None:
    """The slot of the recalled message that is due; the message beside it is delivered."""
    _, index = made
    unit = dict(pending.timer_log())[3_276]
    slot_ms = unit.write_ms + unit.delay_ms
    slot = DueSlot(slot_ms, 0)
    records = RunMaker(log_of(pending), PLAIN, lambda *_: None)
    slot.take_in(index.newest(slot_ms), index.log, records)
    taken = slot.take(slot.end_ms, 100, records)
    keys = [pending.at(int(place)).properties["KEYS"] for place in taken["physical"]]
    assert (keys, slot.cancelled) == (["recalled-kept-neighbour"], 1)


def slot_with(folder: Path, *records: Record, later: tuple[int, ...] = ()) -> tuple[DueSlot, RunMaker, list[Record]]:
    """A slot with the messages ``records``, of which those roll that are due later. ``later``: how many slots behind it each
    message is put.
    """
    placed = build_log(folder / "commitlog", records)
    log = CommitLog(folder / "commitlog", 4096, 4)
    messages = queue_of(placed, log).take(0, 99, bound=0, floor=0)
    assert messages is not None
    index = TimerIndex.make_empty(StoreLayout(folder), TIMER_LOG_FILE_BYTES)
    slots = np.full(len(placed), NOW_MS + 2_000, np.int64)
    if later:
        slots += 1_000 * np.array(later, np.int64)
    index.add(messages, slots, messages.out_ms > slots, NOW_MS)
    slot = DueSlot(NOW_MS + 2_000, 0)
    maker = RunMaker(log, PLAIN, lambda *_: None)
    slot.take_in(index.newest(slot.slot_ms), index.log, maker)
    return slot, maker, placed


def test_messages_come_in_the_order_in_which_they_were_enqueued_also_before_their_cancellation(tmp_path: Path) -> None:
    """A cancellation may be enqueued first or last: it is looked at before all messages of its slot."""
    sent = [timer_record({"UNIQ_KEY": key}) for key in "abcd"]
    first, last = (timer_record({"UNIQ_KEY": key, "TIMER_DEL_UNIQKEY": key}) for key in "bc")
    slot, maker, placed = slot_with(tmp_path, first, *sent, last)
    taken = slot.take(slot.end_ms, 99, maker)
    assert taken["physical"].tolist() == [placed[1].physical_offset, placed[4].physical_offset]


def test_a_cancellation_that_rolls_is_a_message_and_cancels_nothing_yet(tmp_path: Path) -> None:
    later = {"TIMER_OUT_MS": str(NOW_MS + 90_000_000)}
    cancels = timer_record({"TIMER_DEL_UNIQKEY": "AB", **later})
    slot, maker, placed = slot_with(tmp_path, timer_record({}), cancels)
    taken = slot.take(slot.end_ms, 99, maker)
    places = [(one.physical_offset, rolls) for one, rolls in zip(placed, (False, True), strict=True)]
    assert sorted(taken[["physical", "rolls"]].tolist()) == places
    assert slot.cancelled == 0


def test_a_cancellation_of_another_time_cancels_nothing(tmp_path: Path) -> None:
    other = {"TIMER_OUT_MS": str(NOW_MS + 3_000)}
    records = timer_record({}), timer_record({"TIMER_DEL_UNIQKEY": "AB", **other})
    slot, maker, placed = slot_with(tmp_path, *records, later=(0, 1))
    assert slot.take(slot.end_ms, 99, maker)["physical"].tolist() == [placed[0].physical_offset]


def test_a_message_without_a_unique_id_cannot_be_cancelled(tmp_path: Path) -> None:
    """RocketMQ looks for no key of it; a key that is a topic and nothing means no message."""
    message = timer_record({}, "UNIQ_KEY")
    slot, maker, placed = slot_with(tmp_path, message, timer_record({"TIMER_DEL_UNIQKEY": "orders+"}))
    assert slot.take(slot.end_ms, 99, maker)["physical"].tolist() == [placed[0].physical_offset]


@pytest.mark.parametrize(
    ("stored", "topic", "meant"),
    [
        ("AB", "orders", True),
        ("orders+AB", "orders", True),
        ("orders+AB", "other", False),
        ("AB", "other", False),
        ("other+AB", "orders", False),
        ("", "orders", False),
    ],
)
def test_a_cancellation_means_a_message_of_its_own_topic(stored: str, topic: str, meant: bool) -> None:
    """RocketMQ compares bare ids (its default), or ids with topics: with these anybody cancels anything."""
    assert (message_key(b"orders", b"AB") in delete_keys(stored.encode(), topic.encode())) is meant


def test_no_topic_of_a_cancellation_runs_into_an_id() -> None:
    """The topics %RETRY%g and %RETRY%g+t, with the ids t+AB and AB, are two messages."""
    assert message_key(b"%RETRY%g+t", b"AB") not in delete_keys(b"t+AB", b"%RETRY%g")


def test_a_cancellation_whose_slot_has_passed_is_no_message(tmp_path: Path) -> None:
    """It is never delivered: of two late ones only the message is."""
    records = build_log(tmp_path, [timer_record({}), timer_record({"TIMER_DEL_UNIQKEY": "AB"})])
    messages = queue_of(records, CommitLog(tmp_path, 4096, 4)).take(0, 9, bound=0, floor=0)
    assert messages is not None
    timer: Any = object.__new__(Timer)
    timer._now_ms = timer._read_ms = NOW_MS + 60_000
    timer._clock = SteadyClock()
    timer._rules = TimerRules()
    put: list[np.ndarray[Any, Any]] = []
    timer._deliveries = SimpleNamespace(put=put.append)
    timer._put(messages)
    assert [rows["physical"].tolist() for rows in put] == [[records[0].physical_offset]]
    assert put[0]["write_ms"].tolist() == [LATE_ENQUEUE_MS]
