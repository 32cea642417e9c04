"""What one event of the loop causes to be sent goes out together, at the end of the event.

A reader of requests, or of the node's answers, calls :meth:`Turn.begin` before and :meth:`Turn.end` behind them. What is
sent at other times goes out with the next round of the loop.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Sender(Protocol):
    """A connection with something to send."""

    def flush(self) -> None: ...


class Turn:
    """See the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Sender] = []
        self._is_inside = self._is_scheduled = False

    def begin(self) -> None:
        """An event begins; :meth:`end` follows in any case."""
        self._is_inside = True

    def end(self) -> None:
        """Send everything that the event caused."""
        self._is_inside = False
        if self._due:
            self._flush()

    def add(self, sender: Sender) -> None:
        """``sender`` has something to send. It is not added again before its flush."""
        self._due.append(sender)
        if not self._is_inside and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._later)

    def _later(self) -> None:
        self._is_scheduled = False
        self._flush()

    def _flush(self) -> None:
        due, self._due = self._due, []
        for sender in due:
            try:
                sender.flush()
            except Exception as error:  # an error of one connection is no error of the others
                self._loop.call_exception_handler({"message": "a connection was not flushed", "exception": error})
