"""The share of a processor that requests of one kind may take from a loop.

A loop that answers as fast as it is asked takes a whole processor from the processes that carry messages, for a client
that only asks and never reads. So it counts the processor time of these requests, and rests when they took more than
their share. Unread requests wait in the connections of their clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

BURST_S: Final = 0.05
LONGEST_REST_S: Final = 0.2


class ShareOfTime:
    """``share``: of one processor, above 0 and below 1. After an idle time :data:`BURST_S` of processor time are free."""

    __slots__ = ("_clock_s", "_left_s", "_seen_s", "_share")

    def __init__(self, share: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock_s = clock_s
        self._left_s, self._seen_s = BURST_S, clock_s()

    def spend(self, used_s: float) -> float:
        """Requests took ``used_s`` of processor time. Returns the seconds to rest before further ones."""
        now_s = self._clock_s()
        left_s = min(BURST_S, self._left_s + self._share * (now_s - self._seen_s)) - used_s
        self._left_s, self._seen_s = max(left_s, -self._share * LONGEST_REST_S), now_s
        return max(0.0, -self._left_s / self._share)
