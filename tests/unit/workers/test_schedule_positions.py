"""Goal: the schedule process writes down no position that a power cut or a second death could make untrue.

Method: the loop's state without a node. The test moves the words ``written`` and ``flushed`` as writer and flush process do,
and reads what was stored.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.control import Word
from commitmq.workers.runtime.mover_positions import MoverPositions
from commitmq.workers.schedule.process import LevelRuns, Schedule
from commitmq.workers.schedule.progress import ScheduleProgress
from small_disk import room

stored: list[ScheduleProgress] = []


@pytest.fixture
def schedule() -> Schedule:
    stored.clear()
    made: Any = object.__new__(Schedule)
    made._control = {Word.WRITTEN: 1_000, Word.FLUSHED: 1_000}
    made._context = SimpleNamespace(tell=lambda **_: None, control=made._control, room=room())
    made._positions = MoverPositions(
        made._context, 0, take=made._progress, store=stored.append, start=ScheduleProgress()
    )
    made._delivery = SimpleNamespace(report_again=lambda: None)
    made._levels = [SimpleNamespace(number=number, offset=5, waiting=None) for number in (1, 2)]
    made._noted, made._begins_at = {}, None
    return made  # type: ignore[no-any-return]


def test_copies_of_all_levels_are_flushed_first(schedule: Schedule) -> None:
    """One level waits since the log ended at 300; the copies of the other one lie behind that."""
    schedule._levels[0].waiting = LevelRuns(9, 300)
    words: Any = schedule._control
    words[Word.FLUSHED] = 700
    schedule._write_down()
    assert not stored
    words.update({Word.WRITTEN: 2_000, Word.FLUSHED: 1_000})
    schedule._write_down()
    assert stored == [ScheduleProgress({1: 5, 2: 5}, 300)]


def test_what_was_found_stays_in_view_until_the_offsets_have_passed_it(schedule: Schedule) -> None:
    schedule._begins_at = 200
    schedule._write_down()
    assert stored == [ScheduleProgress({1: 5, 2: 5}, 200)], "after a second death it is needed again"
    schedule._begins_at = None
    schedule._levels[0].offset = 6
    schedule._write_down()
    assert stored[-1] == ScheduleProgress({1: 6, 2: 5}, 1_000)


def test_a_level_has_passed_it_when_what_was_due_is_done(schedule: Schedule) -> None:
    """What comes due later was not delivered before, so the view must not last until then."""
    schedule._ends, schedule._resumed_ms = {1: 10}, 5_000
    level: Any = schedule._levels[0]
    for waiting, offset, next_due_ms, passed in (
        (None, 5, 0, False),
        (None, 5, 5_000, False),
        (None, 5, 5_001, True),
        (None, 10, 0, True),
        (LevelRuns(10, 300), 5, 5_001, False),
    ):
        level.waiting, level.offset, level.next_due_ms = waiting, offset, next_due_ms
        assert schedule._has_passed(level) is passed
