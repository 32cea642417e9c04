"""Waiting for one outcome, safe against exceptions that come from outside.

It is no future: an exception from outside can leave a future's condition locked (:mod:`commitmq.client.sending.line`), and the
pump needs that lock to tell the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from commitmq.client.sending.line import Line

_LOOK_S: Final = 1.0
_T = TypeVar("_T")


class Wait(Generic[_T]):
    """The outcome of a job for which one thread waits. ``settle`` is called just before the thread wakes."""

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
                self._ticket.acquire(timeout=_LOOK_S)
        except BaseException:
            self._is_withdrawn = True
            raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
