"""One delay level: the part of its queue that is due, as runs for the queues to which the messages belong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import OffsetOutOfRangeError
from commitmq.format.constants import PREBLANK_SIZE, SYS_FLAG_OFFSET, Property, SysFlag
from commitmq.semantics.delay import DELAY_LEVELS_MS, SCHEDULE_TOPIC, queue_of
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.readdressing import Target, find, readdress
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.run_mover import MovedRun

NEVER_MS: Final = 1 << 62
_HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"

Report = Callable[[str, int], None]
"""Told why a message is not delivered, and its physical offset."""


@dataclass(slots=True)
class Portion:
    """Messages that are taken together. ``behind``: the offset of the level once all of ``runs`` are appended."""

    behind: int
    log: int
    """Where the log ended when they were taken: what is appended of them lies behind."""
    runs: list[MovedRun] = field(default_factory=list)


class Level:
    """The queue of level ``number`` from ``offset`` on."""

    def __init__(self, number: int, offset: int, reader: QueueReader, log: CommitLog) -> None:
        self.number = number
        self.offset = offset
        self.next_due_ms = 0
        """When the next message is due, as far as known; NEVER_MS when none waits."""
        self.waiting: Portion | None = None
        """Taken, and not all of it appended yet."""
        self._seen = -1
        self._reader = reader
        self._log = log

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
        *,
        count: int,
        bound: int,
        floor: int,
        target: Callable[[str, int], Target],
        max_run_bytes: int,
        log_end: int,
        is_moved: Callable[[memoryview], bool] | None,
        report: Report,
    ) -> Portion | None:
        """Up to ``count`` messages that are due, as runs; None when none is. Sets ``next_due_ms``.

        ``log_end`` is the log's end now. ``is_moved``: tells of a record whether its message was delivered already.
        Messages that cannot be delivered are reported and left out.
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
        late = due > now_ms
        # A time further away than the level's delay comes from a clock that went back: such a message is due now.
        late &= due <= now_ms + DELAY_LEVELS_MS[self.number - 1]
        ready = int(np.argmax(late)) if late.any() else len(units)
        if ready < len(units):
            self.next_due_ms = int(due[ready])
        if not ready:
            return None
        if ready == len(units):
            self.next_due_ms = 0  # more may be due already
        portion = Portion(at + ready, log_end)
        sizes = units["size"][:ready].astype(np.int64)
        real = (sizes > 0) & (sizes != PREBLANK_SIZE)
        places = units["physical_offset"][:ready].astype(np.int64)[real]
        for base, positions, lengths in self._by_segment(places, sizes[real], report):
            data = np.frombuffer(self._log.read(base, self._log.segment_bytes), np.uint8)
            if is_moved is not None:
                new = [not is_moved(data[p : p + s].data) for p, s in zip(positions, lengths, strict=True)]
                positions, lengths = positions[new], lengths[new]
            portion.runs += self._runs(base, data, positions, lengths, target, max_run_bytes, report)
        return portion

    def _clamp(self, bound: int, floor: int) -> None:
        """RocketMQ's rule: an offset outside of the queue goes to its nearer end."""
        bounds = self._reader.bounds(SCHEDULE_TOPIC, queue_of(self.number), bound=bound, floor=floor)
        if bounds is not None:
            self.offset = min(max(self.offset, bounds[0]), bounds[1])

    def _by_segment(
        self, places: NDArray[np.int64], sizes: NDArray[np.int64], report: Report
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """``(base, positions, sizes)`` of the records of each segment that is still there."""
        segment_bytes = self._log.segment_bytes
        bases = places - places % segment_bytes
        for base in np.unique(bases).tolist():
            mine = bases == base
            try:
                self._log.segment(base)
            except OffsetOutOfRangeError:
                for place in places[mine].tolist():
                    report("its record has expired", place)
                continue
            yield base, places[mine] - base, sizes[mine]

    def _runs(
        self,
        base: int,
        data: NDArray[np.uint8],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        target: Callable[[str, int], Target],
        max_run_bytes: int,
        report: Report,
    ) -> Iterator[MovedRun]:
        """The messages at ``positions`` of ``data`` as runs, each of one queue and layout of born hosts."""
        if not len(positions):
            return
        found = find(data, positions, sizes, [Property.REAL_TOPIC, Property.REAL_QUEUE_ID])
        numbers, firsts = found.alike()
        wide = (data[positions + SYS_FLAG_OFFSET + 3] & SysFlag.BORN_HOST_V6) != 0
        for number, first in enumerate(firsts):
            topic, queue = _address(found.value(0, first), found.value(1, first))
            for born_v6 in (False, True):
                mine = (numbers == number) & (wide == born_v6)
                good = mine & found.whole
                if topic is None or topic == _HALF_TOPIC:
                    good &= False
                for place in positions[mine & ~good].tolist():
                    report("its record does not say where it belongs", base + place)
                if good.any():
                    aim = target(topic or "", queue)
                    for part in _parts(sizes[good], max_run_bytes):
                        run = _readdressed(data, positions[good][part], aim, base, report)
                        if run is not None:
                            yield MovedRun(topic or "", queue, run, born_v6)


def _address(topic: bytes, queue: bytes) -> tuple[str | None, int]:
    try:
        return (topic.decode() or None), int(queue)
    except ValueError:
        return None, 0


def _parts(sizes: NDArray[np.int64], max_run_bytes: int) -> Iterator[slice]:
    """Cuts into runs; a record grows by at most its topic's name and a CRC."""
    ends = np.cumsum(sizes + 256)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + max_run_bytes, side="right")))
        yield slice(start, stop)
        start = stop


def _readdressed(
    data: NDArray[np.uint8], positions: NDArray[np.int64], aim: Target, base: int, report: Report
) -> CheckedRun | None:
    try:
        return readdress(data, np.ascontiguousarray(positions), aim)
    except MessageIllegalError as error:
        for place in positions.tolist():
            report(str(error), base + place)
        return None


def one_by_one(one: MovedRun) -> Iterator[MovedRun]:
    """The messages of a run, each as a run of its own."""
    start = 0
    for end in one.run.ends.tolist():
        data = one.run.data[start:end]
        yield MovedRun(one.topic, one.queue_id, CheckedRun(data, np.array([end - start], np.int64), 1), one.born_v6)
        start = end


def unique_key(one: MovedRun) -> str:
    """The unique key of the first message of a run, for people who look for it."""
    found = find(one.run.data, np.zeros(1, np.int64), one.run.ends[:1], [Property.UNIQUE_KEY])
    return found.value(0, 0).decode("utf-8", "replace")
