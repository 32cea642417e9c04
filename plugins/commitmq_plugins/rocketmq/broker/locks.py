"""Locks of ordered queues (remoting 6.4). Pure: no socket, no clock.

A lock belongs to a client of a group, which is its user and its id, and lasts ``lease_ms`` after its last renewal. Locks are
memory only, as in RocketMQ: after a restart the first client that asks has the lock. No place, as an address, holds more than
``max_of_place``: one client cannot keep all others from locking.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from commitmq_plugins.rocketmq.remoting.bodies import LockBatchRequestBody, lock_answer
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.connection import place_of
from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

LEASE_MS: Final = 60_000
_PAUSE_MS: Final = 1_000
"""Between two looks at all locks: a client that has all it may have can ask as often as it wants."""

Queue = tuple[str, int]
Owner = tuple[str, str]
"""User, empty where the node asks for none, and client id, which is the client's own choice."""
_NOBODY: Final[Owner] = ("", "")


class QueueLocks:
    """Per group: queue, owner, time of the last renewal, place that made it."""

    def __init__(self, lease_ms: int = LEASE_MS, max_locks: int = 200_000, max_of_place: int = 200_000) -> None:
        self._lease_ms, self._max, self._max_of_place = lease_ms, max_locks, max_of_place
        self._groups: dict[str, dict[Queue, tuple[Owner, int, str]]] = {}
        self._places: Counter[str] = Counter()
        self._count = 0
        self._expired_ms = -_PAUSE_MS

    def __len__(self) -> int:
        return self._count

    def lock(self, group: str, owner: Owner, queues: Iterable[Queue], now_ms: int, place: str = "") -> list[Queue]:
        """The queues of ``queues`` that ``owner`` has now. No more than ``max_locks`` are kept in all."""
        table = self._groups.setdefault(group, {})
        taken = []
        for queue in queues:
            holder, at, made_at = table.get(queue, (_NOBODY, -self._lease_ms - 1, place))
            if holder not in (_NOBODY, owner) and now_ms - at <= self._lease_ms:
                continue
            if queue not in table:
                if self._is_full(place) and now_ms - self._expired_ms >= _PAUSE_MS:
                    self.expire(now_ms)
                    table = self._groups.setdefault(group, table)
                if self._is_full(place):
                    break
                self._count += 1
                self._places[place] += 1
            table[queue] = owner, now_ms, made_at
            taken.append(queue)
        if not table:
            self._groups.pop(group, None)
        return taken

    def unlock(self, group: str, owner: Owner, queues: Iterable[Queue]) -> None:
        """Remove the locks of ``owner``; those of others stay."""
        table = self._groups.get(group, {})
        for queue in queues:
            if table.get(queue, (_NOBODY,))[0] == owner:
                self._drop(table, queue)
        if not table:
            self._groups.pop(group, None)

    def is_held(self, group: str, now_ms: int) -> bool:
        """Whether any lock of ``group`` is alive: its consumers are ordered ones (remoting 3.6)."""
        return any(now_ms - at <= self._lease_ms for _, at, _ in self._groups.get(group, {}).values())

    def expire(self, now_ms: int) -> None:
        """Drop the locks that are over."""
        self._expired_ms = now_ms
        for group, table in list(self._groups.items()):
            for queue in [queue for queue, (_, at, _) in table.items() if now_ms - at > self._lease_ms]:
                self._drop(table, queue)
            if not table:
                del self._groups[group]

    def _is_full(self, place: str) -> bool:
        return self._count >= self._max or self._places[place] >= self._max_of_place

    def _drop(self, table: dict[Queue, tuple[Owner, int, str]], queue: Queue) -> None:
        place = table.pop(queue)[2]
        self._count -= 1
        self._places[place] -= 1
        if not self._places[place]:
            del self._places[place]


class LockRequests:
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ (remoting 6.4)."""

    def __init__(self, locks: QueueLocks, broker_name: str) -> None:
        self._locks, self._broker_name = locks, broker_name
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
        }

    def lock(self, connection: Connection, command: Command) -> Command:
        """Request 41."""
        body = LockBatchRequestBody.decode(command.body)
        wanted = [(one.topic, one.queue_id) for one in body.queues]
        now_ms = time.monotonic_ns() // 1_000_000
        owner = connection.user, body.client_id
        taken = self._locks.lock(body.consumer_group, owner, wanted, now_ms, place_of(connection.peer[0]))
        return command.answer(body=lock_answer(MessageQueue(topic, self._broker_name, queue) for topic, queue in taken))

    def unlock(self, connection: Connection, command: Command) -> Command:
        """Request 42."""
        body = LockBatchRequestBody.decode(command.body)
        owner = connection.user, body.client_id
        self._locks.unlock(body.consumer_group, owner, [(one.topic, one.queue_id) for one in body.queues])
        return command.answer()
