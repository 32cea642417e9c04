"""Check points in memory: what was handed out and is not done, and the limits of that.

A check point stays here until its copy in the revive topic was met, also when it is done: so the process knows of each
check point it made, and never takes one for RocketMQ's. Done ones beyond ``MAX_DONE`` are
forgotten, in the order in which they were done.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from commitmq.config import PopConfig
from commitmq.semantics.pop_revive import CheckPoint, CheckPointKey
from commitmq.workers.pop.pop_counts import PopCounts
from commitmq.workers.runtime.context import WorkerContext

MAX_DONE: Final = 100_000
OVERDUE_MS: Final = 60_000

_Key = TypeVar("_Key")


@dataclass(slots=True, eq=False)
class Point:
    """``log``: the end of the log before the check point was stored. ``open``: how many of its messages are not done."""

    check_point: CheckPoint
    revive_queue: int
    client: bytes
    log: int
    open: int = 0
    due_ms: int = 0
    """When its messages come back, by the clock of now. (That of the check point may have been another.)"""

    @property
    def queue(self) -> tuple[str, str, int]:
        """Group, topic and queue."""
        key = self.check_point.key
        return key.group, key.topic, key.queue_id


@dataclass(slots=True)
class Points:
    """All of them, in the order of the log."""

    limits: PopConfig
    by_key: dict[CheckPointKey, Point] = field(default_factory=dict)
    open: int = 0
    """Messages in flight."""
    counts: PopCounts | None = None
    _groups: Counter[str] = field(default_factory=Counter)
    _queues: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    _clients: Counter[bytes] = field(default_factory=Counter)
    _heap: list[tuple[int, int, Point]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _done: dict[Point, None] = field(default_factory=dict)

    @classmethod
    def of(cls, context: WorkerContext) -> Points:
        """Nothing is in flight yet."""
        return cls(context.config.pop, counts=PopCounts.of(context))

    def room(self, group: str, topic: str, queue: int, client: bytes, *, taken: int, of_queue: int) -> int:
        """How many more messages of the queue ``client`` may get, who is getting ``taken``, ``of_queue`` of this queue."""
        limits = self.limits
        return max(
            0,
            min(
                limits.max_in_flight - self.open - taken,
                limits.max_in_flight_of_group - self._groups[group] - taken,
                limits.max_in_flight_of_queue - self._queues[group, topic, queue] - of_queue,
                limits.max_in_flight_of_client - self._clients[client] - taken,
            ),
        )

    def is_full(self, client: bytes) -> bool:
        """Whether ``client`` has as many messages as it may have."""
        return self._clients[client] >= self.limits.max_in_flight_of_client

    def in_flight_of(self, group: str) -> int:
        """Messages of ``group`` that are not done."""
        return self._groups[group]

    def queues_of(self, group: str) -> dict[tuple[str, int], int]:
        """How many messages of each topic and queue ``group`` has in flight."""
        return {(topic, queue): count for (name, topic, queue), count in self._queues.items() if name == group}

    def add(self, point: Point, due_ms: int | None = None) -> None:
        """A check point that is being stored. ``due_ms``: when its messages come back, if not at the time in it."""
        self.by_key[point.check_point.key] = point
        self._count(point, len(point.check_point.left()))
        point.due_ms = point.check_point.revive_ms if due_ms is None else due_ms
        heapq.heappush(self._heap, (point.due_ms, next(self._numbers), point))

    def shift(self, jump_ms: int) -> None:
        """The clock was set forward by so much: everything is due as soon from now on as it was."""
        self._heap = [(due_ms + jump_ms, number, point) for due_ms, number, point in self._heap]
        for point in self.by_key.values():
            point.due_ms += jump_ms

    def drop(self, point: Point) -> None:
        """It was not stored, or its copy in the revive topic was met."""
        if self.by_key.get(point.check_point.key) is not point:
            return
        del self.by_key[point.check_point.key]
        self._done.pop(point, None)
        self._count(point, -point.open)

    def settle(self, point: Point, *offsets: int) -> None:
        """The messages at ``offsets`` are acked, or were copied to the retry topic."""
        before = point.check_point
        point.check_point = before.acked(*offsets)
        done = (point.check_point.bits ^ before.bits).bit_count()
        if not done or self.by_key.get(before.key) is not point:
            return
        self._count(point, -done)
        if not point.open:
            self._done[point] = None
            if len(self._done) > MAX_DONE:
                self.drop(next(iter(self._done)))

    def has(self, key: CheckPointKey, offset: int) -> Point | None:
        """The check point under whose key the message at ``offset`` is in flight."""
        point = self.by_key.get(key)
        return point if point is not None and point.check_point.is_left(offset) else None

    def due(self, now_ms: int, most: int) -> list[Point]:
        """Take out up to ``most`` whose time has come and that have messages left."""
        found: dict[Point, None] = {}
        while self._heap and self._heap[0][0] <= now_ms and len(found) < most:
            point = heapq.heappop(self._heap)[2]
            if point.open and self.by_key.get(point.check_point.key) is point:
                found[point] = None
        if len(self._heap) > 2 * len(self.by_key) + 1_024:
            self._heap = [entry for entry in self._heap if entry[2].open]
            heapq.heapify(self._heap)
        return list(found)

    def forget_old(self, now_ms: int) -> None:
        """Forget the oldest that are done and whose copies are overdue in the revive topic: the node runs no timer."""
        while self.by_key:
            first = next(iter(self.by_key.values()))
            if first.open or first.due_ms + OVERDUE_MS > now_ms:
                return
            self.drop(first)

    def again(self, point: Point, at_ms: int) -> None:
        """It could not be revived: :meth:`due` gives it at ``at_ms``."""
        heapq.heappush(self._heap, (at_ms, next(self._numbers), point))

    def next_due_ms(self) -> int | None:
        """When the next one is due; it may turn out to be done."""
        return self._heap[0][0] if self._heap else None

    def log(self) -> int | None:
        """Where the log begins to have one of them; None without any."""
        first = next(iter(self.by_key.values()), None)
        return None if first is None else first.log

    def _count(self, point: Point, change: int) -> None:
        point.open += change
        self.open += change
        _change(self._groups, point.check_point.key.group, change)
        _change(self._queues, point.queue, change)
        _change(self._clients, point.client, change)
        if self.counts is not None:
            self.counts.in_flight(point.check_point.key.topic, point.check_point.key.group, change)


def _change(counter: Counter[_Key], key: _Key, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]
