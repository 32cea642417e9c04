"""A line of threads for something that one thread uses at a time, safe against exceptions that come from outside.

Ctrl-C, or a signal handler that raises, can come between any two calls. It can come after the ``acquire`` of a
``threading.Lock`` with a time-out, or without waiting, and before the ``try`` behind it: then the lock stays locked for ever.
The methods of a ``threading.Condition`` are Python code and have the same gap. A ``with`` of a plain lock has no gap, and this
line has none.

A thread puts a ticket at the end of the line. It is its turn while its ticket is the first. It takes the ticket out in a
``finally`` whose first call is :meth:`Line.remove`, so that no interruption can come before::

    ticket = line.ticket()
    try:
        line.append(ticket)
        if line.wait(ticket, deadline):
            ...
    finally:
        line.remove(ticket)
        line.wake()

``append`` and ``remove`` are the deque's own: an interruption comes before or after them, and never half-way. One that comes
between ``remove`` and ``wake`` costs the next in the line a twentieth of a second.
"""

from __future__ import annotations

import _thread
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

_LOOK_S: Final = 0.05

Ticket = _thread.LockType


class Line(deque[Any]):
    """A queue of threads for something that one thread uses at a time. The thread of the first ticket has its turn."""

    __slots__ = ()

    @staticmethod
    def ticket() -> Ticket:
        """A ticket for :meth:`wait`. (For one look at the line, without waiting, any new object will do.)"""
        ticket = _thread.allocate_lock()
        ticket.acquire()
        return ticket

    def wait(self, ticket: Ticket, deadline: float) -> bool:
        """Wait until ``ticket``, which is in the line, is the first; False when ``deadline`` (monotonic seconds) passed."""
        while self[0] is not ticket:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            ticket.acquire(timeout=min(left_s, _LOOK_S))
        return True

    def wake(self) -> None:
        """Tell the first in the line that it is the first."""
        try:
            self[0].release()
        except (IndexError, AttributeError, RuntimeError):
            return  # no thread waits, or it is awake already


def wake_all(waiting: list[Ticket]) -> None:
    """Wake the threads that sleep on these tickets."""
    for ticket in tuple(waiting):  # others come and go in the meantime
        if ticket.locked():
            try:
                ticket.release()
            except RuntimeError:
                continue  # another thread has woken it in this moment


_TICKET_LOOK_S: Final = 1.0
_T = TypeVar("_T")


class Wait(Generic[_T]):
    """Waiting for one outcome, safe against exceptions that come from outside.

    It is no future: an exception from outside can leave a future's condition locked (:mod:`commitmq.client.sending.line`),
    and the pump needs that lock to tell the outcome.

    The outcome of a job for which one thread waits. ``settle`` is called just before the thread wakes.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._ticket = Line.ticket()
        self._result: _T | None = None
        self._error: Exception | None = None
        self._is_done = False
        self._is_withdrawn = False

    def start(self) -> bool:
        """The first request is about to be sent; False when the thread was interrupted and does not wait any more."""
        return not self._is_withdrawn

    def done_with(self, result: _T | None, error: Exception | None) -> None:
        """Tell the outcome: exactly one of both is not None."""
        self._settle()
        self._result, self._error = result, error
        self._is_done = True
        self._ticket.release()

    def wait(self) -> _T:
        """Wait for the result. Raises the error of a job that failed. An interruption withdraws a job that was not begun."""
        try:
            while not self._is_done:
                self._ticket.acquire(timeout=_TICKET_LOOK_S)
        except BaseException:
            self._is_withdrawn = True
            raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
