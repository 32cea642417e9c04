"""Checks of times, offsets and callbacks that a program gives a client. A ValueError has the argument's name and value."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, Final

MOST_SECONDS: Final = 2e6
"""Three weeks. A longer time, also ``math.inf``, counts as this one, because ZeroMQ counts milliseconds in 32 bits."""

MAX_OFFSET: Final = (1 << 63) - 1


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """``value`` as a time to wait. It must be above 0; with ``zero`` it may also be 0."""
    known = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else -1.0
    if not (known > 0 or (zero and known == 0)):
        raise ValueError(f"{name} must be {'a number of seconds, not below 0' if zero else 'positive'}, not {value!r}")
    return min(known, MOST_SECONDS)


def offset(name: str, value: Any) -> int:
    """``value`` as a queue offset."""
    number = integer(name, value)
    if not 0 <= number <= MAX_OFFSET:
        raise ValueError(f"{name} must be between 0 and 2^63 - 1, not {value!r}")
    return number


def integer(name: str, value: Any) -> int:
    """``value`` as an integer. numpy's integers are accepted."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {value!r}") from None


def callback(name: str, value: Callable[..., object] | None) -> None:
    """Raise ValueError unless ``value`` is None or can be called."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function, not {value!r}")
