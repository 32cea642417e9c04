"""Counts answers that ZeroMQ still holds because their client does not read, so that they can be bounded.

A ROUTER must not block for one slow peer, and its queues count answers, not bytes. Without this count a client that
asks and never reads could make a node hold any amount of memory.

A tracker on the last frame tells that an answer has left; it costs a hand-over between threads. Answers to one client
leave in order, so one tracker covers everything sent before it: the sizes of small answers are summed up until they are
worth a tracker.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from zmq import MessageTracker

_TRACK_BYTES: Final = 1024 * 1024
_MAX_UNTRACKED_CLIENTS: Final = 4_096
# One client gets at most a quarter of the total, and no more than is free: n clients that never read end up with
# 1/(n+1) each, and the same share is left for the others. A client without unsent answers may exceed the total by this
# share.
_CLIENT_SHARE: Final = 4
_NEWCOMERS_SHARE: Final = 4


class UnsentAnswers:
    """Bytes handed to ZeroMQ and not yet out, by client."""

    def __init__(self, max_total_bytes: int) -> None:
        self._max_client_bytes = max_total_bytes // _CLIENT_SHARE
        self._max_total_bytes = max_total_bytes
        self._answers: dict[bytes, deque[tuple[MessageTracker, int]]] = {}
        self._bytes: dict[bytes, int] = {}
        self._total = 0
        # Clients come and go: the entries of the longest silent clients are dropped, with the few bytes they may stand
        # for.
        self._untracked: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Bytes of all answers with a tracker, as of the last look."""
        return self._total

    def wants_tracker(self, client: bytes, size: int) -> bool:
        """Count an answer of ``size`` bytes that is about to be sent. True when it must be sent with a tracker."""
        size += self._untracked.pop(client, 0)
        self._untracked[client] = size
        if len(self._untracked) > _MAX_UNTRACKED_CLIENTS:
            self._untracked.popitem(last=False)
        return size >= _TRACK_BYTES

    def add(self, client: bytes, tracker: MessageTracker | None) -> None:
        """``tracker`` covers all answers counted for ``client`` since the last tracker."""
        size = self._untracked.pop(client, 0)
        if tracker is None:
            return
        self._settle(client)
        self._answers.setdefault(client, deque()).append((tracker, size))
        self._bytes[client] = self._bytes.get(client, 0) + size
        self._total += size

    def is_over(self, client: bytes) -> bool:
        """Whether ``client`` must read before it gets more answers."""
        if not self._total:
            return False
        if self._breaks(client):
            for one in list(self._answers):
                self._settle(one)
        return self._breaks(client)

    def worst(self) -> bytes | None:
        """The client that holds the most bytes; None when none holds any."""
        return max(self._bytes, key=self._bytes.__getitem__, default=None)

    def holds(self, client: bytes) -> int:
        """Bytes of ``client`` as of the last look."""
        return self._bytes.get(client, 0)

    def _breaks(self, client: bytes) -> bool:
        held = self._bytes.get(client, 0)
        if not held:
            return self._total >= self._max_total_bytes + self._max_total_bytes // _NEWCOMERS_SHARE
        return held >= min(self._max_client_bytes, self._max_total_bytes - self._total)

    def _settle(self, client: bytes) -> None:
        answers = self._answers.get(client)
        if answers is None:
            return
        while answers and answers[0][0].done:
            size = answers.popleft()[1]
            self._bytes[client] -= size
            self._total -= size
        if not answers:
            del self._answers[client], self._bytes[client]
