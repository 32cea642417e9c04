"""Limits expensive work that is not urgent: not before an interval is over, and only for a small share of the time."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

SHARE: Final = 50  # of the time, at most one part in this number


class Pace:
    """``with pace:`` around the work measures it. :attr:`next_ms` (monotonic) is when it may be done again.

    So the cost of a file does not grow with its size: a larger one is written less often.
    """

    def __init__(self, least_ms: int) -> None:
        """``least_ms``: the shortest time between the end of the work and its next beginning. 0: no pause at all."""
        self._least_ms = least_ms
        self._began_ms = 0
        self.next_ms = 0

    def is_due(self, now_ms: int) -> bool:
        return now_ms >= self.next_ms

    def __enter__(self) -> Self:
        self._began_ms = _monotonic_ms()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_ms = _monotonic_ms()
        if self._least_ms:
            self.next_ms = ended_ms + max(self._least_ms, SHARE * (ended_ms - self._began_ms))


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
