"""How long a failed message waits for its next try."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, Final

from commitmq.client import checks
from commitmq.semantics.delay import DELAY_LEVELS_MS

Backoff = float | Sequence[float] | Callable[[int], float] | None
"""Seconds; a list of seconds, whose last one goes for all further tries; a function of the try, 0 for the first retry; or
None: RocketMQ's delay levels, 10 s for the first retry, then 30 s, 1 min, … 2 h (in ordered mode: 1 s). A message that is
sent back waits at one of these levels, so its seconds are at most LONGEST_S, and are rounded up to the next level.
"""

LONGEST_S: Final = DELAY_LEVELS_MS[-1] / 1000
"""The delay of RocketMQ's last level: a longer one would come early."""


def check_backoff(backoff: Backoff, longest_s: float | None = None) -> Backoff:
    """``backoff`` itself. Raises ValueError for what is none, and for seconds above ``longest_s``."""
    if backoff is None or callable(backoff):
        return backoff
    if isinstance(backoff, numbers.Real):
        return _seconds("backoff", backoff, longest_s)
    if isinstance(backoff, str) or not isinstance(backoff, Sequence) or not backoff:
        raise ValueError(f"backoff must be seconds, a list of seconds, a function or None, not {backoff!r}")
    return [_seconds("backoff", one, longest_s) for one in backoff]


def delay_of(backoff: Backoff, times: int, longest_s: float | None = None) -> float | None:
    """Seconds before retry ``times`` (0 is the first); None: RocketMQ's rule.

    Raises what the program's function raises, and ValueError for what it must not return, such as more than ``longest_s``.
    """
    if backoff is None or isinstance(backoff, int | float):
        return backoff
    if callable(backoff):
        return _seconds("what backoff returns", backoff(times), longest_s)
    return backoff[min(times, len(backoff) - 1)]


def too_long(name: str, value: Any) -> ValueError:
    """The error of a delay above LONGEST_S."""
    return ValueError(f"{name} must be at most {LONGEST_S:g} seconds (2 hours, RocketMQ's last level), not {value!r}")


def _seconds(name: str, value: Any, longest_s: float | None) -> float:
    known = checks.seconds(name, value, zero=True)
    if longest_s is not None and known > longest_s:
        raise too_long(name, value)
    return known
