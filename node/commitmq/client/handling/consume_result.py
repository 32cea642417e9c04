"""What a handler says of a message: RocketMQ's consume status, by a return value or an exception.

How long a failed message waits for its next try.

What a pool of handlers works on: the engine of a consumer, or of a share consumer.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

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


class ConsumeResult(StrEnum):
    """What becomes of a message after its handler returned."""

    DONE = "done"
    """The message is done. ``None`` and ``True`` mean the same."""
    RETRY = "retry"
    """The handler wants the message again, after the back-off. ``False`` means the same, and so does an exception."""
    DEAD = "dead"
    """The message goes to the dead letters of the group at once."""


class RetryLater(Exception):
    """Raised in a handler: the message comes again after ``delay`` (seconds, or a timedelta). It is no error.

    ``delay_s`` has the delay in seconds. ``message.retry_later(delay)`` raises it too. In :meth:`commitmq.Consumer.run`
    without ``ordered`` the delay is rounded up to the next of RocketMQ's 18 levels, the last of which is 2 hours. With a
    longer one the message counts as failed, by a ValueError.
    """

    def __init__(self, delay: float | timedelta) -> None:
        """Raises ValueError for a delay below 0, or what is none."""
        self.delay_s = checks.seconds(
            "delay", delay.total_seconds() if isinstance(delay, timedelta) else delay, zero=True
        )
        super().__init__(f"again in {self.delay_s:g} s")


class HandlerResult(NamedTuple):
    """What came of one call of a handler. ``delay_s``: what the handler asked for; None: the back-off decides."""

    result: ConsumeResult
    delay_s: float | None = None
    error: BaseException | None = None


def of_value(value: Any) -> HandlerResult:
    """The verdict of a handler that returned ``value``.

    Another value than those of :class:`ConsumeResult` is a mistake, so the message counts as failed: if it counted as done, a
    handler that returns a status of its own would lose messages.
    """
    if value is None or value is True:
        return _DONE
    if value is False:
        return HandlerResult(ConsumeResult.RETRY)
    if isinstance(value, ConsumeResult):
        return HandlerResult(value)
    return HandlerResult(
        ConsumeResult.RETRY,
        error=TypeError(f"a handler must return None, a bool or a ConsumeResult, not {type(value).__name__}"),
    )


def of_error(error: BaseException, longest_s: float | None = None) -> HandlerResult:
    """The verdict of a handler that raised ``error``. A RetryLater above ``longest_s`` is a mistake: the message fails."""
    if isinstance(error, RetryLater):
        if longest_s is not None and error.delay_s > longest_s:
            return HandlerResult(ConsumeResult.RETRY, error=too_long("the delay of RetryLater", error.delay_s))
        return HandlerResult(ConsumeResult.RETRY, error.delay_s)
    return HandlerResult(ConsumeResult.RETRY, error=error)


_DONE = HandlerResult(ConsumeResult.DONE)


class Concurrency(Protocol):
    """How many handlers run at a time."""

    @property
    def workers(self) -> int: ...


class Work(Protocol):
    """``take`` and ``wake`` are called with ``lock`` held; an entry has the attribute ``message``."""

    lock: Any
    wake: Callable[[int], None]
    is_stopping: bool

    @property
    def settings(self) -> Concurrency: ...
    def take(self) -> Any: ...
    def judge(self, entry: Any, verdict: HandlerResult) -> None: ...
    def abandon(self, entry: Any) -> None: ...
