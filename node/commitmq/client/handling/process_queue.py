"""The unfinished messages of one queue: RocketMQ's ProcessQueue. Pure: the caller brings the clock, and one lock for all
calls.

An entry *waits*, or it is *out*: with a handler, or on its way back to the node. ``first`` is the lowest unfinished offset,
above which nothing may be committed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from commitmq.client.message import Message


class Limits(NamedTuple):
    """The most unfinished messages, bytes and span of offsets of one queue; ``span`` None: no limit."""

    messages: int
    size_bytes: int
    span: int | None


class Entry:
    """One unfinished message."""

    __slots__ = ("message", "offset", "queue", "size_bytes")

    def __init__(self, queue: ProcessQueue, message: Message) -> None:
        self.queue = queue
        self.message = message
        self.offset = message.queue_offset
        self.size_bytes = len(message.raw_body)


class ProcessQueue:
    """See the module. In ``ordered`` mode one entry is out at most, and it is the first."""

    def __init__(self, limits: Limits, *, ordered: bool) -> None:
        self.limits = limits
        self.ordered = ordered
        self.size_bytes = 0
        self.out = 0  # entries that a handler has, or that are on their way back
        self.is_revoked = False  # it is wanted back: nothing starts
        self.is_dropped = False  # it was taken away: nothing starts, and nothing counts any more
        self.is_held = False  # its limits keep it from being fetched
        self._unfinished: OrderedDict[int, Entry] = OrderedDict()
        self._waiting: deque[Entry] = deque()
        self._later: list[tuple[float, int, Entry]] = []  # heap: to be tried again, with the time
        self._suspended_until = 0.0  # ordered mode
        self._last = -1  # the highest offset that was fetched

    def __len__(self) -> int:
        """The unfinished messages."""
        return len(self._unfinished)

    @property
    def first(self) -> int | None:
        """The lowest unfinished offset."""
        return next(iter(self._unfinished), None)

    def add(self, messages: Iterable[Message]) -> None:
        """Messages that were fetched, in the order of their offsets. One that is here already is passed over."""
        for message in messages:
            if message.queue_offset in self._unfinished:
                continue
            entry = Entry(self, message)
            self._unfinished[entry.offset] = entry
            self._last = entry.offset
            self.size_bytes += entry.size_bytes
            self._waiting.append(entry)

    def take(self, now: float) -> Entry | None:
        """The next entry to be handled, which is out from now on."""
        if not self.is_startable(now):
            return None
        if self._later and self._later[0][0] <= now:
            entry = heapq.heappop(self._later)[2]
        else:
            entry = self._waiting.popleft()
        self.out += 1
        return entry

    def is_startable(self, now: float) -> bool:
        """Whether :meth:`take` has an entry."""
        if self.is_revoked or self.is_dropped:
            return False
        if self.ordered:
            return bool(self._waiting) and not self.out and self._suspended_until <= now
        return bool(self._waiting) or bool(self._later and self._later[0][0] <= now)

    def next_at(self) -> float | None:
        """When an entry that is tried again here is due; None: there is none."""
        if self.ordered:
            return self._suspended_until if self._waiting and not self.out else None
        return self._later[0][0] if self._later else None

    def finish(self, entry: Entry) -> None:
        """An entry that was out is done."""
        self.out -= 1
        if self._unfinished.pop(entry.offset, None) is not None:
            self.size_bytes -= entry.size_bytes

    def put_back(self, entry: Entry, at: float) -> None:
        """An entry that was out is tried again here, not before ``at``. In ordered mode the queue waits for it."""
        self.out -= 1
        if self.is_dropped:
            return
        if self.ordered:
            self._waiting.appendleft(entry)
            self._suspended_until = at
        else:
            heapq.heappush(self._later, (at, entry.offset, entry))

    def give_up(self, entry: Entry) -> None:
        """An entry that was out came to no end: it stays unfinished, and nothing starts it again."""
        self.out -= 1

    def drop(self) -> None:
        """The queue was taken away. What is out may come back, without an effect."""
        self.is_dropped = True
        self._unfinished.clear()
        self._waiting.clear()
        self._later.clear()
        self.size_bytes = 0

    def room(self) -> tuple[int, int]:
        """How many messages and bytes more the limits allow; 0 messages when the queue is full."""
        messages = self.limits.messages - len(self._unfinished)
        if self.limits.span is not None:
            # RocketMQ measures it to the highest unfinished offset, which bounds nothing when all but the first are done. Here
            # it bounds what is handled again after a crash. Offsets that a filter left out count too.
            first = self.first
            messages = min(messages, self.limits.span - (0 if first is None else self._last - first))
        size_bytes = self.limits.size_bytes - self.size_bytes
        return (messages, size_bytes) if messages > 0 and size_bytes > 0 else (0, 0)
