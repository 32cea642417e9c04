"""Requests with a long header wait in a line of their own, so that short ones do not wait for them.

A header must be parsed before anything is known about its request, and a long one takes milliseconds: a group's join with
100,000 topics 9 ms, a pull with 60 KB of tags 1 ms. So a process handles short requests as they come. After a long
request it takes no further one for :data:`REST` times as long as that one took. The first one is taken at once.

The peers in the line take turns. A peer with a request in the line gets its later requests, short ones too, behind it:
the order of one peer's requests never changes. The bytes in the line are bounded: :mod:`.router` ends the connection
that holds the most, and forgets its requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.network.connection import Connection

LONG_HEADER_BYTES: Final = 48 * 1024
"""A longer header is long. That of an ordinary send is not: the properties of a message have 32 KiB at most."""
REST: Final = 9
MAX_BYTES: Final = 64 * 1024 * 1024
_LONGEST_REST_NS: Final = 200_000_000
_REQUEST_BYTES: Final = 512  # of memory that a request takes besides its frames


@dataclass(slots=True)
class _Peer:
    owner: Connection
    requests: deque[tuple[list[Any], int]] = field(default_factory=deque)
    size: int = 0


class LongRequests:
    """The line of one ROUTER. ``waiting``: the number of its requests; ``total_bytes``: the memory they take; ``began_ns``:
    when the long request was taken that is being handled, else 0.
    """

    __slots__ = ("_clock_ns", "_due_ns", "_peers", "_released", "_rests", "began_ns", "total_bytes", "waiting")

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.waiting = 0
        self.total_bytes = 0
        self._clock_ns = clock_ns
        self._peers: dict[bytes, _Peer] = {}  # the first one is the next
        # Short requests that came behind a long one of their peer, which has been taken.
        self._released: deque[list[Any]] = deque()
        self.began_ns = self._due_ns = 0
        self._rests = True

    def add(self, request: list[Any], size: int, owner: Connection) -> None:
        """Put ``request``, ``[routing id, header, …]`` of ``size`` bytes in all, behind the others of its peer."""
        self.settle()
        peer = self._peers.setdefault(request[0], _Peer(owner))
        peer.owner = owner
        size += _REQUEST_BYTES
        peer.requests.append((request, size))
        peer.size += size
        self.total_bytes += size
        self.waiting += 1

    def holds(self, identity: bytes) -> bool:
        """Whether a request of this peer waits, so that its next one must wait too."""
        return identity in self._peers or any(one[0] == identity for one in self._released)

    def take(self) -> list[Any] | None:
        """The next request whose time has come."""
        if self._released:
            self.waiting -= 1
            return self._released.popleft()
        self.settle()
        if not self._peers or (self._rests and self._clock_ns() < self._due_ns):
            return None
        identity = next(iter(self._peers))
        peer = self._peers.pop(identity)
        request = self._pop(peer)
        self.waiting -= 1
        while peer.requests and len(peer.requests[0][0][1]) <= LONG_HEADER_BYTES:
            self._released.append(self._pop(peer))
        if peer.requests:
            self._peers[identity] = peer  # behind the others
        self.began_ns = self._clock_ns()
        return request

    def wait_ms(self) -> float:
        """How long :meth:`take` will give nothing, while requests wait."""
        self.settle()
        if self._released or not self._rests:
            return 0.0
        return max(0.0, (self._due_ns - self._clock_ns()) / 1e6)

    def settle(self) -> None:
        """The last long request has been handled: the loop says so before its next request, and before it sleeps."""
        if self.began_ns:
            now_ns = self._clock_ns()
            self._due_ns = now_ns + min(REST * (now_ns - self.began_ns), _LONGEST_REST_NS)
            self.began_ns = 0

    def next_owner(self) -> Connection | None:
        """The connection of the next long request."""
        first = next(iter(self._peers.values()), None)
        return None if first is None else first.owner

    def drop_next(self) -> None:
        """Forget the requests of the peer that is the next."""
        self._drop(next(iter(self._peers)))

    def drop_worst(self) -> tuple[Connection, int]:
        """Forget the requests of the peer that holds the most bytes; returns its connection and these bytes."""
        return self._drop(max(self._peers, key=lambda one: self._peers[one].size))

    def stop_resting(self) -> None:
        """The process ends: give everything without a rest."""
        self._rests = False

    def _drop(self, identity: bytes) -> tuple[Connection, int]:
        peer = self._peers.pop(identity)
        self.waiting -= len(peer.requests)
        self.total_bytes -= peer.size
        return peer.owner, peer.size

    def _pop(self, peer: _Peer) -> list[Any]:
        request, size = peer.requests.popleft()
        peer.size -= size
        self.total_bytes -= size
        return request
