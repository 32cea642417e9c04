"""The live producers of each group, which can be asked about a transaction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from commitmq.errors import ProtocolError


@dataclass(slots=True)
class _Session:
    group: str
    until_ms: int


class Producers:
    """Producers by routing id. Each registers again and again; one that does not for ``timeout_ms`` is forgotten."""

    def __init__(self, *, timeout_ms: int, most: int) -> None:
        self.timeout_ms = timeout_ms
        self._most = most
        self._sessions: dict[bytes, _Session] = {}
        self._turns: dict[str, deque[bytes]] = {}
        """Whom to ask next in a group. It may name producers that have gone."""

    def __len__(self) -> int:
        return len(self._sessions)

    def register(self, peer: bytes, group: str, now_ms: int) -> None:
        """``peer`` is a live producer of ``group``. Raises ProtocolError SYSTEM_BUSY when there are too many."""
        session = self._sessions.get(peer)
        if session is not None and session.group == group:
            session.until_ms = now_ms + self.timeout_ms
            return
        if session is None and len(self._sessions) >= self._most:
            self.expire(now_ms)
            if len(self._sessions) >= self._most:
                raise ProtocolError(
                    "SYSTEM_BUSY",
                    f"{self._most} producers are registered (transaction.max_producers)",
                    retry_after_ms=self.timeout_ms,
                )
        self.leave(peer)
        self._sessions[peer] = _Session(group, now_ms + self.timeout_ms)
        self._turns.setdefault(group, deque()).append(peer)

    def leave(self, peer: bytes) -> None:
        """``peer`` is asked no more."""
        session = self._sessions.pop(peer, None)
        if session is None:
            return
        turn = self._turns[session.group]
        turn.remove(peer)
        if not turn:
            del self._turns[session.group]

    def expire(self, now_ms: int) -> None:
        """Forget those that did not register again."""
        for peer in [peer for peer, session in self._sessions.items() if session.until_ms <= now_ms]:
            self.leave(peer)

    def pick(self, group: str, now_ms: int, can_take: Callable[[bytes], bool]) -> bytes | None:
        """A live producer of ``group``, each in its turn; None when there is none. ``can_take``: it is still connected."""
        turn = self._turns.get(group)
        for _ in range(len(turn or ())):
            assert turn is not None
            peer = turn[0]
            turn.rotate(-1)
            if self._sessions[peer].until_ms > now_ms and can_take(peer):
                return peer
        return None
