"""Goal: a clock that jumps is followed where that is wanted, and doubted where nothing can be made good.

Method: both clocks are handed in.
"""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import commitmq
from commitmq.workers.runtime.clocks import JUMP_MS, DoubtingClock, SteadyClock, fresh_ms

MS = 1_000_000  # in nanoseconds
NOW_MS = 1_795_000_000_000
HOUR_MS = 3_600_000
JUMPS_MS = [2_000, -2_000, HOUR_MS, -HOUR_MS, 96 * HOUR_MS, -96 * HOUR_MS]


class Clocks:
    """A monotonic clock, which begins at 0, and a wall clock that may be set."""

    def __init__(self) -> None:
        self.passed_ms = self.ahead_ms = 0

    def wall(self) -> int:
        return NOW_MS + self.passed_ms + self.ahead_ms

    def monotonic(self) -> int:
        return self.passed_ms

    def steady(self) -> SteadyClock:
        return SteadyClock(lambda: self.wall() * MS, lambda: self.monotonic() * MS)


@given(st.sampled_from(JUMPS_MS), st.integers(0, HOUR_MS))
def test_a_steady_clock_jumps_when_it_is_taken_up(jump_ms: int, later_ms: int) -> None:
    clocks = Clocks()
    clock = clocks.steady()
    clocks.passed_ms = later_ms
    assert (clock.now_ms(), clock.jump_ms, clock.take_up()) == (NOW_MS + later_ms, 0, 0)
    clocks.ahead_ms = jump_ms
    assert clock.now_ms() == NOW_MS + later_ms
    assert clock.jump_ms == jump_ms
    assert clock.take_up() == jump_ms
    assert (clock.now_ms(), clock.jump_ms) == (NOW_MS + later_ms + jump_ms, 0)


def test_a_steady_clock_follows_one_that_is_slewed_and_tells_nothing() -> None:
    clocks = Clocks()
    clock = clocks.steady()
    for _ in range(20):
        clocks.ahead_ms += JUMP_MS - 1
        assert clock.take_up() == 0
    assert clock.now_ms() == clocks.wall()


def test_a_pause_between_two_looks_is_no_jump() -> None:
    clocks = Clocks()
    clock = clocks.steady()

    def stands_still() -> int:
        found = clocks.passed_ms * MS
        clocks.passed_ms += 30_000
        return found

    clock._monotonic = stands_still
    assert (clock.jump_ms, clock.take_up()) == (0, 0)


@given(st.integers(0, MS - 1), st.lists(st.integers(0, 3 * MS), min_size=1))
def test_a_steady_clock_is_never_ahead_of_the_wall_clock(phase_ns: int, passed_ns: list[int]) -> None:
    """Also by less than a millisecond: what is due at this clock is stored with a time of the wall clock."""
    now_ns = 0
    clock = SteadyClock(lambda: NOW_MS * MS + phase_ns + now_ns, lambda: now_ns)
    for step_ns in passed_ns:
        clock.take_up()
        now_ns += step_ns
        assert clock.now_ms() == (NOW_MS * MS + phase_ns + now_ns) // MS


def test_a_jump_forward_is_doubted_for_an_hour() -> None:
    clocks = Clocks()
    clock = DoubtingClock(clocks.wall, clocks.monotonic)
    clocks.ahead_ms = 96 * HOUR_MS
    for minute in range(60):
        clocks.passed_ms = minute * 60_000
        assert clock.now_ms() == NOW_MS + clocks.passed_ms, "nothing is four days older"
    clocks.passed_ms = HOUR_MS
    assert clock.now_ms() == clocks.wall(), "it stayed so"
    clocks.ahead_ms = -HOUR_MS
    assert clock.now_ms() == clocks.wall(), "what is younger than it was can wait"
    clocks.ahead_ms += 59_000
    assert clock.now_ms() == clocks.wall(), "a little is no jump"


def test_a_doubted_clock_that_is_put_right_has_done_nothing() -> None:
    clocks = Clocks()
    clock = DoubtingClock(clocks.wall, clocks.monotonic)
    for hours in (96, 0, 200, 96, 0):
        clocks.ahead_ms = hours * HOUR_MS
        for _ in range(50):
            clocks.passed_ms += 60_000
            assert clock.now_ms() == NOW_MS + clocks.passed_ms


def test_a_fresh_time_is_now_or_just_behind_those_that_are_used() -> None:
    assert fresh_ms(NOW_MS) == fresh_ms(NOW_MS, NOW_MS - 1) == NOW_MS
    assert fresh_ms(NOW_MS, NOW_MS + 3, NOW_MS) == NOW_MS + 4
    assert fresh_ms(NOW_MS, NOW_MS + 96 * HOUR_MS, NOW_MS + 3) == NOW_MS + 4, "the other clock was ahead"


WALL = {
    "coordination/service.py": "generations of groups begin above those of the process before",
    "coordination/subscriptions.py": "RocketMQ's file has these times; a filter without members is kept for a day",
    "security/audit.py": "lines of the audit log",
    "supervision/live_settings.py": "when a setting was changed",
    "workers/cleanup.py": "when segments were deleted; their ages are of a doubting clock",
    "workers/runtime/clocks.py": "the clocks themselves",
    "workers/runtime/set_aside.py": "when a message was set aside, for people",
    "workers/timer/deliveries.py": "TIMER_DEQUEUE_MS",
    "workers/timer/progress.py": "the version of timercheck; what time no timer can have written",
    "workers/transaction/process.py": "the age of half messages, which have their producers' time",
    "workers/transaction/ends.py": "the age of half messages; when a committed message with a time is due",
    "workers/writer/producers.py": "a producer is forgotten after a week, by the times of its messages",
    "workers/writer/send_requests.py": "when a message was born, and whether it is due already",
    "workers/writer/put_rules.py": "when a message is due, and which slots have passed",
}
"""The modules that look at the wall clock, and for what. Leases, sessions, locks, rates and time-outs are not among it."""


def test_only_these_modules_of_a_node_look_at_the_wall_clock() -> None:
    node = Path(commitmq.__file__).parent
    found = {
        str(path.relative_to(node))
        for part in ("coordination", "network", "security", "semantics", "supervision", "workers")
        for path in (node / part).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\b|\bwall_ms\b", path.read_text(encoding="utf-8"))
    }
    assert found == WALL.keys(), "a clock that is set must not end, refuse or hold back anything by this"
