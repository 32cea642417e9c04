"""The unfinished messages of all queues of a consumer, and whose turn it is. Pure, as :mod:`process_queue`.

Queues that have something to start take turns, so that a queue with much does not keep another one waiting: the retry topic's
messages come between those of the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable

from commitmq.client.handling.process_queue import Entry, Limits, ProcessQueue
from commitmq.client.message import Message


class Backlog:
    """See the module. :meth:`open` makes its queues."""

    def __init__(self, limits: Limits, *, ordered: bool) -> None:
        self._limits = limits
        self._ordered = ordered
        self._ready: OrderedDict[ProcessQueue, None] = OrderedDict()  # those that may have something to start
        self._later: list[tuple[float, int, ProcessQueue]] = []  # heap: when to look at which queue
        self._count = itertools.count()
        self._queues: set[ProcessQueue] = set()

    def open(self) -> ProcessQueue:
        """A queue that was assigned, or is again."""
        queue = ProcessQueue(self._limits, ordered=self._ordered)
        self._queues.add(queue)
        return queue

    def drop(self, queue: ProcessQueue) -> None:
        """The queue was taken away."""
        queue.drop()
        self._queues.discard(queue)
        self._ready.pop(queue, None)

    def revoke(self, queue: ProcessQueue, wanted_back: bool) -> None:
        """The queue is wanted back, or stays after all."""
        queue.is_revoked = wanted_back
        self._look_at(queue)

    def add(self, queue: ProcessQueue, messages: Iterable[Message]) -> None:
        """Messages of ``queue`` that were fetched."""
        queue.add(messages)
        self._look_at(queue)

    def take(self, now: float) -> Entry | None:
        """The next entry to be handled, which is out from now on."""
        self.due(now)
        while self._ready:
            queue, _ = self._ready.popitem(last=False)
            entry = queue.take(now)
            if entry is not None:
                if queue.is_startable(now):
                    self._ready[queue] = None  # behind the others
                return entry
            self._plan(queue)
        return None

    def finish(self, entry: Entry) -> None:
        """See :meth:`ProcessQueue.finish`."""
        entry.queue.finish(entry)
        self._look_at(entry.queue)

    def put_back(self, entry: Entry, at: float) -> None:
        """See :meth:`ProcessQueue.put_back`."""
        entry.queue.put_back(entry, at)
        self._plan(entry.queue)

    def due(self, now: float) -> int:
        """Look at the queues in which something is due again; returns how many they are."""
        count = 0
        while self._later and self._later[0][0] <= now:
            self._look_at(heapq.heappop(self._later)[2])
            count += 1
        return count

    def next_at(self) -> float | None:
        """When something is due that cannot start now; None: nothing is."""
        return self._later[0][0] if self._later else None

    @property
    def unfinished(self) -> int:
        """The unfinished messages of all queues."""
        return sum(map(len, self._queues))

    @property
    def out(self) -> int:
        """The entries that are out, of the queues that were not taken away."""
        return sum(queue.out for queue in self._queues)

    def _look_at(self, queue: ProcessQueue) -> None:
        if not queue.is_dropped:
            self._ready[queue] = None

    def _plan(self, queue: ProcessQueue) -> None:
        at = queue.next_at()
        if at is not None and not queue.is_dropped:
            heapq.heappush(self._later, (at, next(self._count), queue))
