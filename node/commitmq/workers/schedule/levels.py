"""One delay level: the part of its queue that is due, as runs for the queues to which the messages belong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.format.constants import PREBLANK_SIZE
from commitmq.semantics.delay import DELAY_LEVELS_MS, SCHEDULE_TOPIC, queue_of
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.run_making import RunMaker, few_enough
from commitmq.workers.runtime.run_mover import MovedRun

Integers = NDArray[np.int64]

NEVER_MS: Final = 1 << 62
_MARKS: Final = 16
"""In the time of a delay so many marks are made while store timestamps are ahead: so late a message may be."""


@dataclass(slots=True)
class Portion:
    """Messages that are taken together. ``behind``: the offset of the level once all of ``runs`` are appended."""

    behind: int
    log: int
    """Where the log ended when they were taken: what is appended of them lies behind."""
    runs: list[MovedRun] = field(default_factory=list)


class Level:
    """The queue of level ``number`` from ``offset`` on."""

    def __init__(self, number: int, offset: int, reader: QueueReader) -> None:
        self.number = number
        self.offset = offset
        self.next_due_ms = 0
        """When the next message is due, as far as known; NEVER_MS when none waits."""
        self.waiting: Portion | None = None
        """Taken, and not all of it appended yet."""
        self._seen = -1
        self._reader = reader
        self._until: deque[tuple[int, int]] = deque()
        """(offset, monotonic ms): by then all messages before the offset have waited for as long as the level's delay."""
        self._mark_at_ms = 0

    def may_have_news(self, bound: int) -> bool:
        """Whether a message may have come to a queue that had none: anything was dispatched (up to ``bound``) since."""
        return self.next_due_ms == NEVER_MS and bound != self._seen

    def first_record(self, bound: int, floor: int) -> int | None:
        """The physical offset of the next message; None when none waits."""
        self._clamp(bound, floor)
        _, units = self._reader.units(SCHEDULE_TOPIC, queue_of(self.number), self.offset, 1, bound=bound, floor=floor)
        return int(units["physical_offset"][0]) if len(units) else None

    def end(self, bound: int, floor: int) -> int:
        """The offset behind the last message that is there now."""
        bounds = self._reader.bounds(SCHEDULE_TOPIC, queue_of(self.number), bound=bound, floor=floor)
        return 0 if bounds is None else bounds[1]

    def take(
        self,
        now_ms: int,
        monotonic_ms: int,
        *,
        count: int,
        bound: int,
        floor: int,
        runs: RunMaker,
        log_end: int,
        is_moved: Callable[[memoryview], bool] | None,
    ) -> Portion | None:
        """Up to ``count`` messages that are due, as runs; None when none is. Sets ``next_due_ms``.

        A time further away than the level's delay comes from a clock that was set back since. Such a message waits for the
        delay from when it was seen: nobody knows how long it has waited already. (RocketMQ delivers it at once.)

        ``log_end`` is the log's end now. ``is_moved``: tells of a record whether its message was delivered already.
        """
        self._seen = bound
        self._clamp(bound, floor)
        at, units = self._reader.units(
            SCHEDULE_TOPIC, queue_of(self.number), self.offset, count, bound=bound, floor=floor
        )
        self.next_due_ms = NEVER_MS
        if not len(units):
            return None
        due = units["tags_code"].astype(np.int64)
        delay_ms = DELAY_LEVELS_MS[self.number - 1]
        is_ahead = bool((due > now_ms + delay_ms).any())
        if is_ahead and monotonic_ms >= self._mark_at_ms:
            self._mark_at_ms = monotonic_ms + delay_ms // _MARKS
            self.mark(self.end(bound, floor), monotonic_ms)
        due = self._bounded(due, now_ms, monotonic_ms) if self._until else due
        late = due > now_ms
        ready = int(np.argmax(late)) if late.any() else len(units)
        ready = few_enough(units["size"][:ready])
        if ready < len(units):
            self.next_due_ms = min(int(due[ready]), now_ms + delay_ms // _MARKS) if is_ahead else int(due[ready])
        if not ready:
            return None
        if ready == len(units):
            self.next_due_ms = 0  # more may be due already
        portion = Portion(at + ready, log_end)
        sizes = units["size"][:ready].astype(np.int64)
        real = (sizes > 0) & (sizes != PREBLANK_SIZE)
        places = units["physical_offset"][:ready].astype(np.int64)[real]
        sizes = sizes[real]
        for base, data, which in runs.by_segment(places):
            positions, lengths = places[which] - base, sizes[which]
            if is_moved is not None:
                new = [not is_moved(data[p : p + s].data) for p, s in zip(positions, lengths, strict=True)]
                positions, lengths = positions[new], lengths[new]
            portion.runs += runs.runs(base, data, positions, lengths)
        return portion

    def mark(self, end: int, monotonic_ms: int) -> None:
        """All messages before the offset ``end`` are stored by now: none of them waits longer than the delay from now on."""
        if end > (self._until[-1][0] if self._until else self.offset):
            self._until.append((end, monotonic_ms + DELAY_LEVELS_MS[self.number - 1]))

    def _bounded(self, due: Integers, now_ms: int, monotonic_ms: int) -> Integers:
        """``due``, of messages from :attr:`offset` on, as :meth:`mark` bounds it."""
        while self._until and self._until[0][0] <= self.offset:
            self._until.popleft()
        latest = np.full(len(due), NEVER_MS, np.int64)
        for offset, until_ms in reversed(self._until):
            latest[: offset - self.offset] = now_ms + until_ms - monotonic_ms
        return np.minimum(due, latest)

    def _clamp(self, bound: int, floor: int) -> None:
        """RocketMQ's rule: an offset outside of the queue goes to its nearer end."""
        bounds = self._reader.bounds(SCHEDULE_TOPIC, queue_of(self.number), bound=bound, floor=floor)
        if bounds is not None:
            self.offset = min(max(self.offset, bounds[0]), bounds[1])
