"""Clocks for a machine whose time may be set while a node runs.

Times that are stored or that RocketMQ reads are of the wall clock, and so are the times at which messages are due. What
lasts a while is measured by the monotonic clock, which is never set. Between the two stand the clocks of this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

Clock = Callable[[], int]
"""Gives milliseconds, or nanoseconds where that is said."""

JUMP_MS: Final = 500
"""A smaller difference is followed and not told: clocks are slewed."""
_MS: Final = 1_000_000
_JUMP_NS: Final = JUMP_MS * _MS
_FORWARD_MS: Final = 60_000
_BELIEVED_AFTER_MS: Final = 3_600_000


def wall_ms() -> int:
    """Milliseconds since 1970, as the machine knows them now."""
    return time.time_ns() // _MS


def _monotonic_ms() -> int:
    return time.monotonic_ns() // _MS


class SteadyClock:
    """The wall clock, which jumps only when its owner takes it up: at the beginning of a turn, never within one.

    It counts in nanoseconds. The milliseconds of the two clocks begin at different moments: by their difference it would be
    up to a millisecond ahead of the wall clock, and what is due would be stored before its time.
    """

    def __init__(self, wall: Clock = time.time_ns, monotonic: Clock = time.monotonic_ns) -> None:
        """Both give nanoseconds."""
        self._wall, self._monotonic = wall, monotonic
        self._ahead_ns = wall() - monotonic()

    def now_ms(self) -> int:
        """Milliseconds since 1970, by the wall clock of the last :meth:`take_up`."""
        return (self._monotonic() + self._ahead_ns) // _MS

    @property
    def jump_ms(self) -> int:
        """By how much the wall clock was set forward since the last :meth:`take_up`; negative for back, 0 for not at all."""
        least_ns, most_ns = self._difference()
        jump_ns = least_ns if least_ns >= _JUMP_NS else most_ns if most_ns <= -_JUMP_NS else 0
        return jump_ns // _MS

    def take_up(self) -> int:
        """Go by the wall clock as it is now. Returns :attr:`jump_ms`, of before."""
        least_ns, most_ns = self._difference()
        change_ns = max(least_ns, min(most_ns, 0))
        self._ahead_ns += change_ns
        return change_ns // _MS if abs(change_ns) >= _JUMP_NS else 0

    def _difference(self) -> tuple[int, int]:
        """Between which bounds the wall clock is ahead of this one. (A process may stand still between two looks.)"""
        before = self._monotonic()
        wall = self._wall()
        return wall - self._monotonic() - self._ahead_ns, wall - before - self._ahead_ns


class DoubtingClock:
    """The wall clock for what cannot be made good: what is deleted or given up by age.

    That the clock was set forward by more than a minute counts an hour later, if it still says so. A clock that is put right
    before has done no harm. At the start of a process the clock is believed.
    """

    def __init__(self, wall: Clock = wall_ms, monotonic: Clock = _monotonic_ms) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._ahead_ms = wall() - monotonic()
        self._doubted: tuple[int, int] | None = None
        """How far the clock is ahead that is not believed, and since when."""

    def now_ms(self) -> int:
        """Milliseconds since 1970. Call it at least once a minute."""
        now = self._monotonic()
        ahead = self._wall() - now
        if ahead <= self._ahead_ms + _FORWARD_MS:
            self._ahead_ms, self._doubted = ahead, None
        elif self._doubted is None or abs(ahead - self._doubted[0]) > _FORWARD_MS:
            self._doubted = ahead, now
        elif now - self._doubted[1] >= _BELIEVED_AFTER_MS:
            self._ahead_ms, self._doubted = ahead, None
        return now + self._ahead_ms


def fresh_ms(now_ms: int, *used_ms: int) -> int:
    """A time from now on that differs from ``used_ms``: the next ms, unless those are of a clock that was set back since."""
    near = [one for one in used_ms if now_ms <= one < now_ms + JUMP_MS]
    return max([now_ms, *(one + 1 for one in near)])
