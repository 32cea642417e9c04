"""Locks of ordered queues (remoting 6.4). Pure: no socket, no clock.

A lock belongs to a client of a group and lasts ``lease_ms`` after its last renewal. Locks are memory only, as in RocketMQ:
after a restart the first client that asks has the lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LEASE_MS: Final = 60_000

Queue = tuple[str, int]


class QueueLocks:
    """Per group: queue, owner, time of the last renewal."""

    def __init__(self, lease_ms: int = LEASE_MS, max_locks: int = 200_000) -> None:
        self._lease_ms, self._max = lease_ms, max_locks
        self._groups: dict[str, dict[Queue, tuple[str, int]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def lock(self, group: str, client_id: str, queues: Iterable[Queue], now_ms: int) -> list[Queue]:
        """The queues of ``queues`` that ``client_id`` has now. No more than ``max_locks`` are kept in all."""
        table = self._groups.setdefault(group, {})
        taken = []
        for queue in queues:
            owner, at = table.get(queue, ("", -self._lease_ms - 1))
            if owner and owner != client_id and now_ms - at <= self._lease_ms:
                continue
            if not owner:
                if self._count >= self._max:
                    self.expire(now_ms)
                    table = self._groups.setdefault(group, {})
                    if self._count >= self._max:
                        break
                self._count += 1
            table[queue] = client_id, now_ms
            taken.append(queue)
        if not table:
            self._groups.pop(group, None)
        return taken

    def unlock(self, group: str, client_id: str, queues: Iterable[Queue]) -> None:
        """Remove the locks of ``client_id``; those of others stay."""
        table = self._groups.get(group, {})
        for queue in queues:
            if table.get(queue, ("", 0))[0] == client_id:
                del table[queue]
                self._count -= 1
        if not table:
            self._groups.pop(group, None)

    def is_held(self, group: str, now_ms: int) -> bool:
        """Whether any lock of ``group`` is alive: its consumers are ordered ones (remoting 3.6)."""
        return any(now_ms - at <= self._lease_ms for _, at in self._groups.get(group, {}).values())

    def expire(self, now_ms: int) -> None:
        """Drop the locks that are over."""
        for group, table in list(self._groups.items()):
            for queue in [queue for queue, (_, at) in table.items() if now_ms - at > self._lease_ms]:
                del table[queue]
                self._count -= 1
            if not table:
                del self._groups[group]
