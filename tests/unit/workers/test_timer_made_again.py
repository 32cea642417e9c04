"""Goal: what waits is found again from the queue of the timer topic alone: no cancelled message comes.

Method: a real log with messages, rolls and cancellations, and a queue in memory over it. Columns are compared with times
chosen by hand, among them those that a RocketMQ with another precision leaves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commitmq.errors import StoreError
from commitmq.format.record import Record
from commitmq.semantics.timer import TIMER_TOPIC, TimerRules
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.workers.timer.incoming import Incoming, TimerQueue, slots_of
from commitmq.workers.timer.progress import ClockSetBack, TimerProgress
from commitmq.workers.timer.wheel import MakingAgain, TimerIndex
from log_builder import HOST, build_log
from queue_in_memory import QueueInMemory

SEGMENT_BYTES = 1 << 20
DAY_MS = 86_400_000
NOW_MS = 1_795_000_000_000
OLD_MS = NOW_MS - 13 * DAY_MS


def queue_of(folder: Path, records: Sequence[Record]) -> TimerQueue:
    placed = build_log(folder, records, segment_bytes=SEGMENT_BYTES)
    log = CommitLog(folder, SEGMENT_BYTES, 4)
    return TimerQueue(QueueInMemory(placed), log, pytest.fail)  # type: ignore[arg-type]


def timed(body: bytes, out_ms: int, key: str, stored_ms: int = OLD_MS, **more: str) -> Record:
    properties = {"UNIQ_KEY": key, "TIMER_OUT_MS": str(out_ms), "REAL_TOPIC": "orders", "REAL_QID": "0", **more}
    return Record(
        TIMER_TOPIC, body=body, properties=properties, store_timestamp=stored_ms, born_host=HOST, store_host=HOST
    )


def all_keys(messages: Incoming) -> Any:
    return np.ones(len(messages), np.bool_)


def waiting(queue: TimerQueue, progress: TimerProgress, opens_ms: int) -> list[str]:
    """The keys of the messages that wait; cancellations with a minus before them."""
    again = MakingAgain(progress)
    again.survey(queue, 0, 0, NOW_MS, opens_ms, lambda: None)
    messages = queue.take(0, 100, bound=0, floor=0, with_keys=all_keys)
    assert messages is not None
    again.keep_waiting(messages)
    names = [keys.unique.decode() for keys in messages.keys]
    return ["-" * is_one + name for name, is_one in zip(names, messages.cancels.tolist(), strict=True)]


def test_a_slot_that_is_not_opened_any_more_has_its_cancellations(tmp_path: Path) -> None:
    """The node was down for so long that the wheel has no room for these slots."""
    slot, later = OLD_MS - 1_000, OLD_MS + 5 * DAY_MS
    queue = queue_of(
        tmp_path,
        [
            timed(b"gone", slot, "A"),
            timed(b"gone too", slot, "B"),
            timed(b"the same id at another time", slot + 1_000, "A"),
            timed(b"stays", slot, "C"),
            timed(b"in a slot that is opened", later, "D"),
            timed(b"0", slot, "A", TIMER_DEL_UNIQKEY="A"),
            timed(b"0", slot, "B", TIMER_DEL_UNIQKEY="orders+B"),
            timed(b"0", later, "D", TIMER_DEL_UNIQKEY="D"),
        ],
    )
    progress = TimerProgress(read_ms=slot - 1_000)
    assert waiting(queue, progress, NOW_MS - 12 * DAY_MS) == ["A", "C", "D", "-A", "-B", "-D"]


def test_a_message_without_a_unique_id_cannot_be_cancelled(tmp_path: Path) -> None:
    old = NOW_MS - DAY_MS
    message, cancels = timed(b"m", old, ""), timed(b"c", old, "b", TIMER_DEL_UNIQKEY="orders+")
    del message.properties["UNIQ_KEY"]
    assert waiting(queue_of(tmp_path, [message, cancels]), TimerProgress(OLD_MS), NOW_MS) == ["", "-b"]


def test_another_topic_may_have_the_same_unique_id(tmp_path: Path) -> None:
    """A cancellation means a message of its own topic, and a copy that rolled stands for one of its own topic."""
    slot, due = OLD_MS - 1_000, NOW_MS + 3 * DAY_MS
    queue = queue_of(
        tmp_path,
        [
            timed(b"gone", slot, "A"),
            timed(b"stays", slot, "A", REAL_TOPIC="parcels"),
            timed(b"0", slot, "A", TIMER_DEL_UNIQKEY="A"),
            timed(b"first", due, "B"),
            timed(b"stays", due, "B", REAL_TOPIC="parcels"),
            timed(b"first", due, "B", TIMER_ROLL_TIMES="1"),
        ],
    )
    assert waiting(queue, TimerProgress(read_ms=slot - 1_000), NOW_MS - 12 * DAY_MS) == ["A", "-A", "B", "B"]


def test_a_cancellation_rolls_on_its_own(tmp_path: Path) -> None:
    """It has the unique id and the time of its message. One that came behind the message's roll is not replaced by it."""
    due = NOW_MS + 3 * DAY_MS
    queue = queue_of(
        tmp_path,
        [
            timed(b"first", due, "A"),
            timed(b"first", due, "A", TIMER_ROLL_TIMES="1"),
            timed(b"0", due, "A", TIMER_DEL_UNIQKEY="A"),
            timed(b"other", due, "B"),
            timed(b"0", due, "B", TIMER_DEL_UNIQKEY="B"),
            timed(b"0", due, "B", TIMER_DEL_UNIQKEY="B", TIMER_ROLL_TIMES="1"),
        ],
    )
    assert waiting(queue, TimerProgress(read_ms=NOW_MS), NOW_MS) == ["A", "-A", "B", "-B"]


def taken(tmp_path: Path, record: Record) -> Incoming:
    found = queue_of(tmp_path, [record]).take(0, 10, bound=0, floor=0)
    assert found is not None
    return found


def put(index: TimerIndex, messages: Incoming) -> TimerProgress:
    slots, rolls = slots_of(messages.out_ms, NOW_MS, TimerRules())
    index.add(messages, slots, rolls, NOW_MS)
    index.flush()
    return TimerProgress(NOW_MS, len(messages), log_end=index.log.end, is_whole=True)


def test_a_folder_in_the_place_of_the_wheel_makes_way(tmp_path: Path) -> None:
    (tmp_path / "timerwheel").mkdir()
    (tmp_path / "timerlog" / "copies").mkdir(parents=True)
    TimerIndex.make_empty(StoreLayout(tmp_path), 1_040).flush()
    assert (tmp_path / "timerwheel").is_file()


@pytest.mark.parametrize("damage", ["zeros", "older"])
def test_a_wheel_that_lacks_messages_is_made_again(tmp_path: Path, damage: str) -> None:
    # No slot of such a wheel is wrong. Its messages would have waited for ever.
    records = [timed(b"x", NOW_MS + 60_000 + 1_000 * (number // 2), str(number), NOW_MS) for number in range(6)]
    queue, layout = queue_of(tmp_path / "log", records), StoreLayout(tmp_path)
    index = TimerIndex.make_empty(layout, 1_040)
    first = queue.take(0, 3, bound=0, floor=0)
    assert first is not None
    put(index, first)
    older = (tmp_path / "timerwheel").read_bytes()
    later = queue.take(3, 3, bound=0, floor=0)
    assert later is not None
    progress = put(index, later)
    assert TimerIndex.open(layout, 1_040, progress).wheel.count(0) == 6
    (tmp_path / "timerwheel").write_bytes(older if damage == "older" else bytes(len(older)))
    with pytest.raises(StoreError, match="lacks units"):
        TimerIndex.open(layout, 1_040, progress)
    # What is delivered needs no slot any more.
    behind = replace(progress, read_ms=NOW_MS + 3_600_000)
    assert TimerIndex.open(layout, 1_040, behind).wheel.count(behind.read_ms // 1_000) == 0


@pytest.mark.parametrize(
    ("out_ms", "request_", "due_ms"),
    [
        (NOW_MS + 500, {"TIMER_DELIVER_MS": str(NOW_MS + 555)}, NOW_MS + 555),
        (NOW_MS, {"TIMER_DELIVER_MS": str(NOW_MS + 42_000)}, NOW_MS + 42_000),
        (NOW_MS, {"TIMER_DELIVER_MS": str(NOW_MS + 9_000_000)}, NOW_MS + 60_000),
        (NOW_MS, {"TIMER_DELAY_MS": "42000"}, NOW_MS + 1_000),
    ],
    ids=["a tenth of a second", "a minute", "nonsense", "a relative time, renewed by a roll"],
)
def test_another_precision(tmp_path: Path, out_ms: int, request_: dict[str, str], due_ms: int) -> None:
    """RocketMQ's timerPrecisionMs: no slot of ours is missed, and no message comes early."""
    messages = taken(tmp_path, timed(b"x", out_ms, "A", NOW_MS, **request_))
    assert messages.due_ms.tolist() == [due_ms]
    slots, rolls = slots_of(messages.out_ms, NOW_MS, TimerRules())
    assert (slots.tolist(), rolls.tolist()) == ([NOW_MS], [False])


def test_large_messages_are_taken_a_few_at_once(tmp_path: Path) -> None:
    """What is late is delivered at once: so many bytes are copied."""
    records = [timed(bytes(3 << 20), OLD_MS, str(number)) for number in range(8)]
    placed = build_log(tmp_path, records, segment_bytes=32 << 20)
    log = CommitLog(tmp_path, 32 << 20, 4)
    queue = TimerQueue(QueueInMemory(placed), log, pytest.fail)  # type: ignore[arg-type]
    behind, counts = 0, []
    while (messages := queue.take(behind, 16_384, bound=0, floor=0)) is not None:
        counts.append(len(messages))
        behind = messages.behind
    assert counts == [5, 3]


def test_after_the_clock_was_set_back_nobody_waits_longer_than_asked_for(tmp_path: Path) -> None:
    """The clock was four days ahead for a while: the first slots were delivered then."""
    ahead_ms = NOW_MS + 4 * DAY_MS
    in_10_s = {"TIMER_DELAY_MS": "10000"}
    records = [
        timed(b"", NOW_MS + DAY_MS, "delivered meanwhile"),
        timed(b"", ahead_ms - 1_000, "delivered in time", TIMER_DELAY_SEC="7", TIMER_DELAY_MS="1"),
        timed(b"", ahead_ms, "delivered in the slot that was open", TIMER_DELIVER_MS=str(ahead_ms + 100)),
        timed(b"", ahead_ms, "not yet", TIMER_DELIVER_MS=str(ahead_ms + 900)),
        timed(b"", ahead_ms + 10_000, "relative", ahead_ms, **in_10_s),
        timed(b"", ahead_ms + 9_000, "cancelled", ahead_ms, **in_10_s),
        timed(b"", ahead_ms + 9_000, "cancelled", TIMER_DEL_UNIQKEY="cancelled"),
        timed(b"", ahead_ms + 10_000, "absolute", ahead_ms, TIMER_DELIVER_MS=str(ahead_ms + 10_500)),
        timed(b"", NOW_MS + DAY_MS, "came later"),
    ]
    queue = queue_of(tmp_path, records)
    one = ClockSetBack(8, ahead_ms, ahead_ms + 500, NOW_MS + 300, 0)
    progress = TimerProgress(NOW_MS // 1000 * 1000, 8, set_backs=(one,))
    again = MakingAgain(progress)
    again.survey(queue, 0, 0, NOW_MS, NOW_MS, lambda: None)
    messages = queue.take(0, 100, bound=0, floor=0, with_keys=all_keys)
    assert messages is not None
    again.keep_waiting(messages)
    found = {
        keys.unique.decode(): (out - NOW_MS, due - NOW_MS)
        for keys, out, due, cancels in zip(
            messages.keys, messages.out_ms.tolist(), messages.due_ms.tolist(), messages.cancels.tolist(), strict=True
        )
        if not cancels
    }
    assert found == {
        "not yet": (4 * DAY_MS, 4 * DAY_MS + 900),
        "relative": (10_000, 10_300),
        "absolute": (4 * DAY_MS + 10_000, 4 * DAY_MS + 10_500),
        "came later": (DAY_MS, DAY_MS + 1_000),
    }
    # Made again a second time, when the ten seconds are over, and the clock has not come to the other times.
    later = replace(progress, read_ms=NOW_MS + 11_000, queue_offset=9)
    messages = queue.take(0, 100, bound=0, floor=0, with_keys=all_keys)
    assert messages is not None
    MakingAgain(later).keep_waiting(messages)
    names = [keys.unique.decode() for keys in messages.keys]
    assert [name for name in names if name != "cancelled"] == ["not yet", "absolute", "came later"]


@pytest.mark.parametrize("count", [1, 7, 100])
def test_what_is_due_soon_comes_first_and_each_message_once(tmp_path: Path, count: int) -> None:
    chance = random.Random(count)
    times = [NOW_MS + chance.choice([-5_000, 1_000, 59_000, 61_000, DAY_MS]) for _ in range(60)]
    queue = queue_of(tmp_path, [timed(b"", out, str(number)) for number, out in enumerate(times)])
    again = MakingAgain(TimerProgress(NOW_MS - 5_000))
    again.survey(queue, 0, 0, NOW_MS, NOW_MS, lambda: None)
    again.until -= 3  # these came later
    found: list[list[int]] = []
    for part in (again.soon, again.others):
        found.append([])
        while (messages := part(queue, count, 0, 0)) is not None:
            found[-1] += messages.offsets.tolist()
    assert found == [
        [number for number, out in enumerate(times[:-3]) if out <= NOW_MS + 60_000],
        [number for number, out in enumerate(times[:-3]) if out > NOW_MS + 60_000],
    ]
