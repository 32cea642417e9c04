"""How long a failed message waits for its next try."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

from commitmq.client import checks

Backoff = float | Sequence[float] | Callable[[int], float] | None
"""Seconds; a list of seconds, whose last one goes for all further tries; a function of the try, 0 for the first retry; or
None: RocketMQ's delay levels, 10 s for the first retry, then 30 s, 1 min, … 2 h (in ordered mode: 1 s).
"""


def check_backoff(backoff: Backoff) -> Backoff:
    """``backoff`` itself. Raises ValueError for what is none."""
    if backoff is None or callable(backoff):
        return backoff
    if isinstance(backoff, numbers.Real):
        return checks.seconds("backoff", backoff, zero=True)
    if isinstance(backoff, str) or not isinstance(backoff, Sequence) or not backoff:
        raise ValueError(f"backoff must be seconds, a list of seconds, a function or None, not {backoff!r}")
    return [checks.seconds("backoff", one, zero=True) for one in backoff]


def delay_of(backoff: Backoff, times: int) -> float | None:
    """Seconds before retry ``times`` (0 is the first); None: RocketMQ's rule. Raises what the program's function raises."""
    if backoff is None or isinstance(backoff, int | float):
        return backoff
    if callable(backoff):
        return checks.seconds("what backoff returns", backoff(times), zero=True)
    return backoff[min(times, len(backoff) - 1)]
