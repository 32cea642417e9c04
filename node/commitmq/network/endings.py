"""The ends that the receiving thread asks for, and the record of all ended connections.

A connection that breaks a rule is ended a moment after its answer, so that the peer can read it. Requests that come
meanwhile are dropped: the peer waits for no answer, so it is ended at once, before it sends still more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from typing import Final, NamedTuple

from commitmq.log import Log
from commitmq.network.connection import Connection

_ANSWER_S: Final = 0.1  # within this time the I/O thread sends an answer
_LOG_INTERVAL_S: Final = 1.0


class Ending(NamedTuple):
    """Which connection is to be ended, the bound that it broke, and a sentence that says how."""

    connection: Connection
    bound: str
    why: str


class Endings:
    """``wake``: an eventfd that the gate's thread waits for. ``ended``: the number of ended connections by bound."""

    def __init__(self, log: Log, wake: int) -> None:
        self.ended: Counter[str] = Counter()
        self._log = log
        self._wake = wake
        self._asked: deque[tuple[float, Ending]] = deque()
        self._hurried: deque[Ending] = deque()
        self._next_line_s = 0.0

    def __len__(self) -> int:
        """Ends that were asked for and are not due."""
        return len(self._asked)

    # ------------------------------------------------------------ the receiving thread's side

    def ask(self, connection: Connection, bound: str, why: str) -> None:
        """See :meth:`commitmq.network.gate.Gate.end`."""
        if connection.ending:
            return
        connection.ending = True
        self._asked.append((time.monotonic() + _ANSWER_S, Ending(connection, bound, why)))
        self._ring()

    def drop(self, connection: Connection) -> None:
        """A request of an ``ending`` connection was dropped."""
        if connection.hurried:
            return
        connection.hurried = True
        self._hurried.append(Ending(connection, "ending", "it sent more requests after the one that ends it"))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ the gate's thread

    def hurried(self) -> Ending | None:
        """The next one that must not wait until it is due."""
        return self._hurried.popleft() if self._hurried else None

    def due(self, now_s: float) -> Ending | None:
        """The next one that is due."""
        return self._asked.popleft()[1] if self._asked and self._asked[0][0] <= now_s else None

    def tell(self, ending: Ending) -> None:
        """Count a connection that was ended, and write it to the log."""
        self.ended[ending.bound] += 1
        now = time.monotonic()
        if now >= self._next_line_s:
            # One line a second: a client that breaks a bound a thousand times must not fill the log.
            self._next_line_s = now + _LOG_INTERVAL_S
            client, in_all = ending.connection.client, self.ended.total()
            self._log.warning("connection ended", bound=ending.bound, why=ending.why, client=client, in_all=in_all)
