"""What a handler says of a message: RocketMQ's consume status, by a return value or an exception."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from commitmq.client import checks
from commitmq.client.handling.backoff import too_long


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


class Verdict(NamedTuple):
    """What came of one call of a handler. ``delay_s``: what the handler asked for; None: the back-off decides."""

    result: ConsumeResult
    delay_s: float | None = None
    error: BaseException | None = None


def of_value(value: Any) -> Verdict:
    """The verdict of a handler that returned ``value``.

    Another value than those of :class:`ConsumeResult` is a mistake, so the message counts as failed: if it counted as done, a
    handler that returns a status of its own would lose messages.
    """
    if value is None or value is True:
        return _DONE
    if value is False:
        return Verdict(ConsumeResult.RETRY)
    if isinstance(value, ConsumeResult):
        return Verdict(value)
    return Verdict(
        ConsumeResult.RETRY,
        error=TypeError(f"a handler must return None, a bool or a ConsumeResult, not {type(value).__name__}"),
    )


def of_error(error: BaseException, longest_s: float | None = None) -> Verdict:
    """The verdict of a handler that raised ``error``. A RetryLater above ``longest_s`` is a mistake: the message fails."""
    if isinstance(error, RetryLater):
        if longest_s is not None and error.delay_s > longest_s:
            return Verdict(ConsumeResult.RETRY, error=too_long("the delay of RetryLater", error.delay_s))
        return Verdict(ConsumeResult.RETRY, error.delay_s)
    return Verdict(ConsumeResult.RETRY, error=error)


_DONE = Verdict(ConsumeResult.DONE)
