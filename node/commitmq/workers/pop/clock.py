"""The process's clock: times of check points are of the wall clock, and it jumps between two turns only."""

from __future__ import annotations

from typing import Final

from commitmq.workers.runtime.clocks import SteadyClock

CLOCK: Final = SteadyClock()


def now_ms() -> int:
    """Milliseconds since 1970."""
    return CLOCK.now_ms()
