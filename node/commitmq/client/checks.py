"""Checks of times, offsets and callbacks that a program gives a client. A ValueError has the argument's name and value.

A bell between threads that a poller can wait for: an eventfd, or a pipe on a system without eventfd (macOS).

The kinds of topics, by which an administrator lists them: from their names and attributes alone.
"""

from __future__ import annotations

import contextlib
import numbers
import operator
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.semantics.reply import REPLY_TOPIC_POSTFIX

if TYPE_CHECKING:
    from commitmq.client.admin_results import TopicInfo


class Bell:
    """``fd`` is readable from the first :meth:`ring` until :meth:`clear`."""

    __slots__ = ("_wake", "fd")

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._wake, False)

    def ring(self) -> None:
        """Make ``fd`` readable without waiting. A second ring before :meth:`clear` or one after :meth:`close` does nothing."""
        if self._wake < 0:
            return
        with contextlib.suppress(BlockingIOError):
            # An eventfd takes a number of 8 bytes. A pipe takes any bytes.
            os.write(self._wake, _ONE)

    def clear(self) -> None:
        """Forget every earlier :meth:`ring`."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, _MOST_BYTES)) == _MOST_BYTES:
                pass

    def close(self) -> None:
        """Closing twice is allowed."""
        ends = {self.fd, self._wake} - {-1}
        self.fd = self._wake = -1
        for end in ends:
            os.close(end)


_ONE = (1).to_bytes(8, sys.byteorder)
_MOST_BYTES = 4096


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


KINDS: Final = ("normal", "batch", "memory", "retry", "dlq", "system")
"""``batch``: BatchCQ topics. ``retry`` and ``dlq``: those of groups. ``system``: the node's own, and those of replies."""


def kind_of(topic: TopicInfo) -> str:
    """One of :data:`KINDS`. A name tells more than an attribute (spec 2.7): a retry topic is one wherever it is kept."""
    if topic.system or topic.name.endswith(REPLY_TOPIC_POSTFIX):
        return "system"
    if topic.name.startswith(RETRY_PREFIX):
        return "retry"
    if topic.name.startswith(DLQ_PREFIX):
        return "dlq"
    if topic.attributes.get("storage.type") == "memory":
        return "memory"
    return "batch" if topic.attributes.get("queue.type") == "BatchCQ" else "normal"
