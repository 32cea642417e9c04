"""Goal: a pass over a revive queue revives exactly what was not acked in time, in order, and keeps its position.

Method: the golden store's revive queue is passed through; generated pops, acks and crashes never lose a message, and
revive none that was acked in time; the rules are tried one by one.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.errors import InvalidMessageError
from commitmq.format.record import Record
from commitmq.semantics.pop_revive import (
    Ack,
    CheckPoint,
    CheckPointKey,
    ReviveRound,
    ack_record,
    check_point_record,
    revive_topic,
)
from pending_store import BROKER, PendingStore

NOW = 1_763_800_000_000
LATER = 1 << 60
KEY = CheckPointKey("orders", "g", 0, 10, NOW, "b0")
POINT = CheckPoint(KEY, 10_000, (0, 1, 2))


def queue(*contents: CheckPoint | Ack, invisible_ms: int = 10_000) -> list[Record]:
    """A revive queue with ``contents`` in that order."""
    records = []
    for offset, one in enumerate(contents):
        if isinstance(one, CheckPoint):
            record = check_point_record(one, "C", 0, NOW, BROKER)
        else:
            record = ack_record(one, invisible_ms, "C", 0, NOW, BROKER)
        record.queue_offset = offset
        records.append(record)
    return records


def passed(records: list[Record], position: int = -1, *, now_ms: int | None = None) -> ReviveRound:
    round_ = ReviveRound(position)
    for record in records[round_.next_offset :]:
        round_.take(record)
    if now_ms is not None:
        round_.idle(now_ms)
    return round_


def test_the_golden_queue_revives_what_was_not_acked(pending: PendingStore) -> None:
    records = pending.of(revive_topic("C"))
    round_ = passed(records)
    assert round_.due(LATER) == [], "the queue's newest delivery is not late enough"
    round_.idle(round_.newest_ms + 3_001)
    (point,) = round_.due(LATER)
    assert (point.offset, point.check_point.left()) == (0, [1, 3])
    retried = [one.properties["KEYS"] for one in pending.of("%RETRY%Pending_pop_PendingPop")]
    popped = {(one.queue_id, one.queue_offset): one.properties["KEYS"] for one in pending.of("PendingPop")}
    assert retried == [popped[3, offset] for offset in point.check_point.left()]
    round_.processed(point)
    assert round_.position == 0, "the offset that consumerOffset.json has"
    assert (round_.waiting(), round_.next_offset) == (0, 3)


def test_a_quiet_queue_counts_as_read_up_to_now() -> None:
    round_ = passed(queue(POINT))
    newest_ms = round_.newest_ms
    assert newest_ms == POINT.revive_ms - 1_000
    round_.idle(newest_ms + 3_000)
    assert round_.newest_ms == newest_ms
    round_.idle(newest_ms + 3_001)
    assert [one.check_point for one in round_.due(LATER)] == [POINT]
    empty = passed([], now_ms=NOW)
    assert empty.newest_ms == 0


def test_processing_ends_at_the_first_check_point_that_is_not_due() -> None:
    late = CheckPoint(KEY._replace(pop_time=NOW + 1), 20_000, (0,))
    third = CheckPoint(KEY._replace(pop_time=NOW + 2), 10_000, (0,))
    round_ = passed(queue(POINT, late, third), now_ms=NOW + 15_000)
    # The late one holds up what lies behind it, as the committed offset could not pass it.
    assert [one.offset for one in round_.due(LATER)] == [0]
    round_.newest_ms = late.revive_ms + 2_001
    assert [one.offset for one in round_.due(LATER)] == [0, 1, 2]


def test_a_check_point_that_was_put_off_replaces_the_first_one() -> None:
    single = CheckPoint(KEY, 10_000, (0,))
    again = single.rewritten(10, single.revive_ms)
    assert again.key == single.key
    round_ = passed(queue(single, again))
    assert round_.waiting() == 1
    round_.newest_ms = single.revive_ms + 5_000
    assert round_.due(LATER) == []
    round_.newest_ms = again.revive_ms + 5_000
    assert [one.offset for one in round_.due(LATER)] == [1]


def test_a_check_point_that_was_put_off_takes_its_new_place_in_the_queue() -> None:
    single = CheckPoint(KEY, 10_000, (0,))
    other = CheckPoint(KEY._replace(pop_time=NOW + 1), 10_000, (0,))
    round_ = passed(queue(single, other, single.rewritten(10, single.revive_ms)))
    round_.newest_ms = other.revive_ms + 2_001
    assert [one.offset for one in round_.due(LATER)] == [1]


def test_a_check_point_whose_times_do_not_fit_holds_up_no_others() -> None:
    records = queue(CheckPoint(KEY, 10**15, (0,)), POINT)
    records[0].properties["TIMER_DELIVER_MS"] = str(NOW)
    round_ = ReviveRound(-1)
    with pytest.raises(InvalidMessageError):
        round_.take(records[0])
    round_.take(records[1])
    round_.newest_ms = POINT.revive_ms + 2_001
    assert [one.offset for one in round_.due(LATER)] == [1]


def test_the_newest_delivery_is_the_latest_and_not_the_last() -> None:
    late = CheckPoint(KEY._replace(pop_time=NOW + 1), 60_000, (0,))
    round_ = passed(queue(late, POINT))
    assert round_.newest_ms == late.revive_ms - 1_000


def test_a_clock_that_was_set_back_makes_nothing_due_early_and_holds_up_nothing() -> None:
    ahead = CheckPoint(KEY._replace(pop_time=NOW + 345_600_000), 10_000, (0,))
    round_ = passed(queue(ahead, POINT))
    assert round_.newest_ms > NOW + 345_600_000
    assert [one.offset for one in round_.due(POINT.revive_ms + 2_000)] == [0]
    assert [one.offset for one in round_.due(POINT.revive_ms + 2_001)] == [0, 1]


def test_an_ack_without_its_check_point_changes_nothing() -> None:
    round_ = passed(queue(Ack(KEY, 10), POINT))
    round_.newest_ms = POINT.revive_ms + 5_000
    assert round_.due(LATER)[0].check_point.left() == [10, 11, 12]


def test_acks_of_one_and_of_many_are_matched() -> None:
    round_ = passed(queue(POINT, Ack(KEY, 11), Ack(KEY, offsets=(10, 99))))
    round_.newest_ms = POINT.revive_ms + 5_000
    assert round_.due(LATER)[0].check_point.left() == [12]


@pytest.mark.parametrize(
    "record", [Record("r", queue_offset=4), Record("r", queue_offset=4, properties={"TAGS": "ck"})]
)
def test_a_strange_record_is_refused_and_passed(record: Record) -> None:
    round_ = ReviveRound(3)
    with pytest.raises(InvalidMessageError):
        round_.take(record)
    assert round_.next_offset == 5


@given(st.data())
def test_passes_revive_every_message_without_an_ack_once(data: st.DataObject) -> None:
    """Each pass begins at the committed offset, as after a crash of the process that made the pass before."""
    contents: list[CheckPoint | Ack] = []
    open_: set[tuple[int, int]] = set()
    for number in range(data.draw(st.integers(1, 6))):
        key = KEY._replace(pop_time=NOW + number * 100, start_offset=10 * number)
        point = CheckPoint(key, 10_000, tuple(range(data.draw(st.integers(1, 5)))))
        contents.append(point)
        acked = data.draw(st.lists(st.sampled_from(point.offsets), unique=True))
        contents += [Ack(key, offset) for offset in acked]
        open_ |= {(key.pop_time, offset) for offset in point.offsets if offset not in acked}
    records = queue(*contents)
    position, revived = -1, []
    for now_ms in [*sorted(data.draw(st.lists(st.integers(NOW, NOW + 20_000), max_size=4))), NOW + 20_000]:
        round_ = passed(records, position)
        round_.newest_ms = now_ms
        for due in round_.due(LATER):
            assert now_ms > due.check_point.revive_ms
            revived += [(due.check_point.key.pop_time, offset) for offset in due.check_point.left()]
            round_.processed(due)
        assert round_.position >= position
        position = round_.position
    assert sorted(revived) == sorted(open_)
