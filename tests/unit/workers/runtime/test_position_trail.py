"""Goal: after a cut of the log a mover goes back to positions that speak of nothing that is gone, and no further than
necessary.

Method: trails of random lives, cut anywhere; then the files of schedule, timer and pop, and those that RocketMQ left.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.format.timer import TimerCheck, encode_check
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.workers.pop.recovery import ProgressFile
from commitmq.workers.runtime.mover_positions import UNKNOWN, Trail
from commitmq.workers.schedule import progress as schedule
from commitmq.workers.timer import progress as timer

LOG = get_log("test")
NEAR = 65_536


@pytest.fixture
def layout(tmp_path: object) -> StoreLayout:
    layout = StoreLayout(tmp_path / "store")  # type: ignore[operator]
    layout.own.mkdir(parents=True)
    layout.config.mkdir()
    return layout


@given(st.lists(st.integers(1, 5_000_000), min_size=1, max_size=300), st.data())
def test_what_is_left_needs_no_more_and_is_near(steps: list[int], data: st.DataObject) -> None:
    trail, end, ends = Trail(), 0, []
    for number, step in enumerate(steps):
        end += step
        ends.append(end)
        trail.note(end, number)
    assert [one[0] for one in trail.entries][:: len(trail.entries) - 1 or 1][0] == ends[0]
    assert trail.end == end
    assert len(trail.entries) < 64
    place = data.draw(st.integers(0, end))
    copy = Trail.from_json(trail.to_json())
    found = copy.cut(place)
    if place < ends[0]:
        assert found is None
        return
    assert found is not None
    assert ends[found] <= place
    widest = max((later - earlier for earlier, later in pairwise([0, *ends])), default=0)
    assert end - ends[found] <= 4 * (end - place) + 4 * NEAR + 4 * widest


def test_the_same_place_has_the_newest_positions() -> None:
    trail = Trail()
    for end, positions in ((10, "a"), (10, "b"), (200_000, "c"), (5, "d")):
        trail.note(end, positions)
    assert trail.to_json() == [[5, "d"]], "a log that ends earlier has nothing behind"


def test_delay_levels(layout: StoreLayout) -> None:
    flushed = [1_000]
    files = schedule.ScheduleProgressFiles(layout, LOG, lambda: flushed[0])
    files.load()
    for at in range(1, 6):
        flushed[0] = at * 100_000
        files.store(schedule.ScheduleProgress({3: at * 10}, at * 100_000 - 50))

    def lowered(place: int) -> schedule.ScheduleProgress | None:
        other = schedule.ScheduleProgressFiles(layout, LOG, lambda: place)
        changed = other.lower(place, lambda _level: 1 << 40)
        assert not schedule.ScheduleProgressFiles(layout, LOG, lambda: place).lower(place, lambda _level: 1 << 40)
        return schedule.ScheduleProgressFiles(layout, LOG).load() if changed else None

    assert lowered(500_000) is None
    assert lowered(450_000) == schedule.ScheduleProgress({3: 40}, 399_950)
    assert lowered(399_990) == schedule.ScheduleProgress({3: 30}, 299_950)
    assert lowered(99_999) == schedule.ScheduleProgress({}, UNKNOWN), "everything is looked at again"


def test_delay_levels_of_rocketmq(layout: StoreLayout) -> None:
    json_config.persist(layout.config / "delayOffset.json", {"offsetTable": {"3": 10}})
    files = schedule.ScheduleProgressFiles(layout, LOG, lambda: 700)
    assert not files.lower(700, {3: 10}.get)
    assert files.lower(700, {3: 9}.get), "a message itself is gone, and perhaps deliveries too"
    assert schedule.ScheduleProgressFiles(layout, LOG).load() == schedule.ScheduleProgress({}, UNKNOWN)


def test_the_timer(layout: StoreLayout) -> None:
    assert not timer.TimerProgressFiles(layout, LOG, lambda: 10).lower(10, None), "there is no timer"
    flushed = [0]
    files = timer.TimerProgressFiles(layout, LOG, lambda: flushed[0])
    back = timer.ClockSetBack(25, 1, 1, 1, 300_000)
    later = timer.ClockSetBack(25, 1, 1, 1, 400_000)
    for at in range(1, 6):
        flushed[0] = at * 100_000
        files.store(timer.TimerProgress(at * 1_000, at * 10, at * 100_000 - 50, at * 52, True, (back, later)))
    assert not timer.TimerProgressFiles(layout, LOG, lambda: 500_000).lower(500_000, 50)
    assert timer.TimerProgressFiles(layout, LOG, lambda: 399_990).lower(399_990, 40)
    assert timer.TimerProgressFiles(layout, LOG).load() == timer.TimerProgress(3_000, 30, 299_950, set_backs=(back,)), (
        "what was delivered before the other may be gone"
    )
    assert timer.TimerProgressFiles(layout, LOG, lambda: 99_999).lower(99_999, 5)
    assert timer.TimerProgressFiles(layout, LOG).load() == timer.TimerProgress()


def test_the_timer_of_rocketmq(layout: StoreLayout) -> None:
    (layout.config / "timercheck").write_bytes(encode_check(TimerCheck(5_000, 0, 10, 10)))
    assert not timer.TimerProgressFiles(layout, LOG, lambda: 700).lower(700, 10)
    assert timer.TimerProgressFiles(layout, LOG, lambda: 700).lower(700, 9)
    assert timer.TimerProgressFiles(layout, LOG).load() == timer.TimerProgress()


def test_sharing(layout: StoreLayout) -> None:
    assert not ProgressFile(layout, LOG, lambda: 0).lower(0), "nobody has shared queues"
    flushed = [0]
    file = ProgressFile(layout, LOG, lambda: flushed[0])
    for at in range(1, 6):
        flushed[0] = at * 100_000
        file.store(at * 100_000 - 7)

    def lowered(place: int) -> int | None:
        return (
            ProgressFile(layout, LOG, lambda: place).load()
            if ProgressFile(layout, LOG, lambda: place).lower(place)
            else None
        )

    assert lowered(500_000) is None
    assert lowered(499_999) == 399_993
    assert lowered(399_999) == 299_993
    assert lowered(1) == 0
