"""What one lane of a producer with several nodes tells about its node (:mod:`commitmq.client.producing`).

A producer of one node waits for it: its messages stay pending while the node is away, full or silent. Where further nodes are,
the messages that name no queue must not wait. The pump gives those back that were not handed over, as not stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from commitmq.client.routes import not_stored
from commitmq.client.sending.line import Line, Ticket
from commitmq.errors import SendError

_NEVER_S: Final = float("inf")
_LOOK_S: Final = 0.1


class Free(Protocol):
    """The messages that wait: an outbox."""

    def fail_free(self, error: SendError) -> None: ...


class NodeWatch:
    """Used by the owner of the connection and by the pump; any thread may read ``since``. Times are monotonic seconds.

    ``gives_back``: messages that name no queue do not wait for this node. No try to connect then takes longer than
    ``connect_timeout_s``. ``silence_s`` tells for how long a request has no answer; after ``most_silence_s`` the messages
    that were not handed over go to another node, while ``has_other`` says that one is there. ``latency`` gets the time of
    each answered run, ``away`` the error of each try to connect that failed.
    """

    def __init__(
        self,
        *,
        gives_back: bool,
        connect_timeout_s: float,
        most_silence_s: float,
        silence_s: Callable[[], float],
        latency: Callable[[float], None],
        away: Callable[[SendError], None],
        has_other: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gives_back = gives_back
        self.connect_timeout_s = connect_timeout_s if gives_back else _NEVER_S
        self.since = _NEVER_S
        """When the oldest run without an answer was handed over; infinite without one."""
        self._most_silence_s = most_silence_s
        self._silence_s = silence_s
        self._latency = latency
        self._away = away
        self._has_other = has_other
        self._clock = clock

    def sent(self, at: float) -> None:
        """A run was handed over."""
        if self.since == _NEVER_S:
            self.since = at

    def answered(self, sent_at: float, oldest: float) -> None:
        """A run has its answer. ``oldest``: when the oldest of the others was handed over."""
        self.since = oldest
        self._latency(self._clock() - sent_at)

    def not_reached(self, error: SendError, pending: Free) -> None:
        """There is no connection to the node."""
        self._away(error)
        if self.gives_back:
            pending.fail_free(error)

    def look(self, pending: Free) -> None:
        """Give the messages back that wait behind a request without an answer."""
        if not self.gives_back:
            return
        silence_s = self._silence_s()
        if silence_s >= self._most_silence_s and self._has_other():
            sentence = f"the node has not answered for {silence_s:.1f} s, and this message was not sent"
            pending.fail_free(not_stored("CLIENT_BUSY", sentence))

    def wait(self, line: Line, ticket: Ticket, pending: Free) -> None:
        """Wait for the connection, which a calling thread may have until its own time is over."""
        while not line.wait(ticket, time.monotonic() + _LOOK_S):
            self.look(pending)
