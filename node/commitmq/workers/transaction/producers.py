"""The live producers of each group, which can be asked about a transaction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from commitmq.errors import ProtocolError

NOBODY_TO_ASK: Final = (
    "no producer of the group can be asked about its transactions; they are given up after check_max rounds"
)
_MOST_UNHEARD: Final = 1_000
_MOST_SHOWN: Final = 10


class UnheardGroups:
    """Groups with open transactions and no producer to ask, so that people are told once of each."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    @property
    def shown(self) -> list[str]:
        """Some of them, for ``status``."""
        return sorted(self._groups)[:_MOST_SHOWN]

    def note(self, group: str) -> bool:
        """True when ``group`` is a new one."""
        if group in self._groups or len(self._groups) >= _MOST_UNHEARD:
            return False
        self._groups.add(group)
        return True

    def forget(self, group: str | None = None) -> bool:
        """A producer of ``group`` was asked; None: no transaction is open any more. True when that changes anything."""
        gone = set(self._groups) if group is None else self._groups & {group}
        self._groups -= gone
        return bool(gone)


class Producers:
    """Producers by routing id and group. Each registers again and again; one that does not for ``timeout_ms`` is forgotten.

    A gateway of the node registers the groups of all its clients over one connection.
    """

    def __init__(self, *, timeout_ms: int, most: int) -> None:
        self.timeout_ms = timeout_ms
        self._most = most
        self._until: dict[tuple[bytes, str], int] = {}
        self._turns: dict[str, deque[bytes]] = {}
        """Whom to ask next in a group. It may name producers that have gone."""

    def __len__(self) -> int:
        return len(self._until)

    def register(self, peer: bytes, group: str, now_ms: int) -> None:
        """``peer`` is a live producer of ``group``. Raises ProtocolError SYSTEM_BUSY when there are too many."""
        if (peer, group) not in self._until:
            if len(self._until) >= self._most:
                self.expire(now_ms)
            if len(self._until) >= self._most:
                raise ProtocolError(
                    "SYSTEM_BUSY",
                    f"{self._most} producers are registered (transaction.max_producers)",
                    retry_after_ms=self.timeout_ms,
                )
            self._turns.setdefault(group, deque()).append(peer)
        self._until[peer, group] = now_ms + self.timeout_ms

    def leave(self, peer: bytes, group: str | None = None) -> None:
        """``peer`` is asked no more for ``group``; without one, for none of its groups."""
        groups = [one for who, one in self._until if who == peer] if group is None else [group]
        for one in groups:
            self._forget(peer, one)

    def _forget(self, peer: bytes, group: str) -> None:
        if self._until.pop((peer, group), None) is None:
            return
        turn = self._turns[group]
        turn.remove(peer)
        if not turn:
            del self._turns[group]

    def expire(self, now_ms: int) -> None:
        """Forget those that did not register again."""
        for peer, group in [key for key, until_ms in self._until.items() if until_ms <= now_ms]:
            self._forget(peer, group)

    def pick(self, group: str, now_ms: int, can_take: Callable[[bytes], bool]) -> bytes | None:
        """A live producer of ``group``, each in its turn; None when there is none. ``can_take``: it is still connected."""
        turn = self._turns.get(group)
        for _ in range(len(turn or ())):
            assert turn is not None
            peer = turn[0]
            turn.rotate(-1)
            if self._until[peer, group] > now_ms and can_take(peer):
                return peer
        return None
