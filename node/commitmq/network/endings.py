"""The ends that the receiving thread asks for, and the record of all ended connections.

A connection that breaks a rule is ended a moment after its answer, so that the peer can read it. Requests that come
meanwhile are dropped: the peer waits for no answer, so it is ended at once, before it sends still more.

A request may wait until its connection has gone, and until another peer has the descriptor. So an end is for a routing id, and
the gate does not end a connection that has another one by then. A connection that is new has a second to show that. A request
under an id that its peer must not have says even less: whoever has the descriptor is ended after a second in which no other
request came, and one that had asked for something before, only when the forbidden requests go on.
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
_DOUBT_S: Final = 1.0
_GOES_ON_S: Final = 0.5  # requests of a peer that has gone are read within this time
_LOG_INTERVAL_S: Final = 1.0
_LONGEST_LOG_INTERVAL_S: Final = 60.0


class Ending(NamedTuple):
    """Which connection is to be ended, the bound that it broke, and a sentence that says how."""

    connection: Connection
    bound: str
    why: str


class Asked(NamedTuple):
    """An end that is due at ``at_s``, for the peer with the id ``identity``. ``is_doubt``: its peer has no right to its id."""

    at_s: float
    identity: bytes | None
    ending: Ending
    is_doubt: bool = False


class Endings:
    """``wake``: an eventfd that the gate's thread waits for. ``ended``: the number of ended connections by bound."""

    def __init__(self, log: Log, wake: int) -> None:
        self.ended: Counter[str] = Counter()
        self._log = log
        self._wake = wake
        self._asked: deque[Asked] = deque()
        self._doubtful: deque[Asked] = deque()
        self._hurried: deque[Asked] = deque()
        self._lines: dict[str, tuple[float, float]] = {}  # by bound: when the next may come, and the pause before that

    def __len__(self) -> int:
        """Ends that were asked for and are not due."""
        return len(self._asked) + len(self._doubtful)

    # ------------------------------------------------------------ the receiving thread's side

    def ask(self, connection: Connection, bound: str, why: str) -> None:
        """See :meth:`commitmq.network.gate.Gate.end`."""
        if connection.ending:
            return
        connection.ending = True
        ending, now = Ending(connection, bound, why), time.monotonic()
        if connection.accepted_s > now - _DOUBT_S:
            self._doubtful.append(Asked(now + _DOUBT_S, connection.identity, ending))
        else:
            self._asked.append(Asked(now + _ANSWER_S, connection.identity, ending))
        self._ring()

    def doubt(self, connection: Connection, bound: str, why: str) -> None:
        """A request came under an id that its peer must not have: end ``connection`` if that goes on."""
        connection.last_fault_s = now = time.monotonic()
        if not connection.doubted:
            connection.doubted = True
            asked = Asked(now + _DOUBT_S, connection.identity, Ending(connection, bound, why), is_doubt=True)
            self._doubtful.append(asked)
            self._ring()

    def drop(self, connection: Connection) -> None:
        """A request of an ``ending`` connection was dropped."""
        if connection.hurried or connection.accepted_s > time.monotonic() - _DOUBT_S:
            return
        connection.hurried = True
        ending = Ending(connection, "ending", "it sent more requests after the one that ends it")
        self._hurried.append(Asked(0.0, connection.identity, ending))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ the gate's thread

    def hurried(self) -> Asked | None:
        """The next one that must not wait until it is due."""
        return self._hurried.popleft() if self._hurried else None

    def due(self, now_s: float) -> Asked | None:
        """The next one that is due."""
        for waiting in (self._asked, self._doubtful):
            if waiting and waiting[0].at_s <= now_s:
                return waiting.popleft()
        return None

    def holds(self, asked: Asked) -> bool:
        """Whether an end that is due now still is for this connection."""
        one = asked.ending.connection
        if asked.is_doubt:
            one.doubted = False
            goes_on = one.last_fault_s > asked.at_s - _DOUBT_S + _GOES_ON_S
            return one.identity is None or (one.identity == asked.identity and goes_on)
        return one.identity == asked.identity

    def put_off(self, asked: Asked, now_s: float) -> None:
        """The gate has not heard of the connection yet."""
        self._asked.append(asked._replace(at_s=now_s + _ANSWER_S))

    def tell(self, ending: Ending) -> None:
        """Count a connection that was ended, and write it to the log."""
        self.ended[ending.bound] += 1
        now = time.monotonic()
        next_s, pause_s = self._lines.get(ending.bound, (0.0, 0.0))
        if now >= next_s:
            # A line for each bound, and ever fewer while it goes on: a client that breaks one a thousand times, or goes on for
            # days, must not fill the log.
            is_new = now > next_s + _LONGEST_LOG_INTERVAL_S
            pause_s = _LOG_INTERVAL_S if is_new else min(2 * pause_s, _LONGEST_LOG_INTERVAL_S)
            self._lines[ending.bound] = now + pause_s, pause_s
            client, in_all = ending.connection.client, self.ended.total()
            self._log.warning("connection ended", bound=ending.bound, why=ending.why, client=client, in_all=in_all)
