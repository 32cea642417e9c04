"""Reads queues by offset and time, as RocketMQ's getMessage does (spec 3.4 - 3.7, 9.1), without owning a file.

Another process appends to the ConsumeQueues; this one only reads. :mod:`commitmq.store.queues.queue_bounds` finds the
units that may be shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import PREBLANK_SIZE
from commitmq.format.units import UNIT
from commitmq.kernels.codes import MATCH, NO_RECORD
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.consume_queue_ext import ExtensionReader
from commitmq.store.queues.pull_result import NO_UNITS, PullResult, PullStatus, Units
from commitmq.store.queues.queue_bounds import QueueBounds, QueueState
from commitmq.store.queues.record_filter import JUDGED_BYTES, RecordFilter, affordable, cost_of

# Units examined by one filtered read: 1.3 MB of index, about a millisecond, so that no pull delays the others.
SCAN_UNITS: Final = 65_536
# Records examined by one filtered read, for a filter that units can hardly decide: a few milliseconds.
SCAN_RECORDS: Final = 16_384
_CHUNK_UNITS: Final = 8_192
MAX_CACHED_QUEUES: Final = 65_536
# Sending a view of the mapping costs a hand-over between threads in pyzmq (about 100 us); below this size a copy is
# cheaper. Gathered records are cut into parts of this size: malloc serves them without fresh pages each time.
VIEW_BYTES: Final = 256 * 1024
GATHER_BYTES: Final = 128 * 1024
MAX_FRAMES: Final = 64


@dataclass(slots=True)
class _Looks:
    """The parameters of one read; a second try skips a unit that is still not as expected."""

    bound: int
    floor: int
    max_messages: int
    max_bytes: int
    wanted: RecordFilter | None
    is_second: bool = False

    @staticmethod
    def passed_over(offset: int, readable: NDArray[np.bool_], units: Units) -> tuple[Units, int, bool]:
        """An empty result up to the first readable unit behind ``offset``: the consumer is told of a gap."""
        there = np.flatnonzero(readable)
        return NO_UNITS, offset + (int(there[0]) if len(there) else len(units)), True


class QueueReader(QueueBounds):
    """Reads of all queues under one ``consumequeue/`` folder. Not thread-safe."""

    def __init__(
        self,
        commit_log: CommitLog,
        folder: Path,
        file_bytes: int,
        *,
        ext_file_bytes: int = 50_331_648,
        max_open_files: int = 512,
        max_queues: int = MAX_CACHED_QUEUES,
        fds: FdCache | None = None,
        holes: bool = False,
    ) -> None:
        """``fds``: descriptors shared with other readers of this process, instead of its own ``max_open_files``.
        ``holes``: the first file of a queue may begin with one; such files should be small.
        """
        shared = FdCache(max_open_files) if fds is None else fds
        super().__init__(commit_log, folder, file_bytes, max_queues=max_queues, fds=shared, holes=holes)
        self._extensions = ExtensionReader(folder.with_name("consumequeue_ext"), ext_file_bytes, self._fds)

    # ------------------------------------------------------------ pulls

    def read(
        self,
        topic: str,
        queue: int,
        offset: int,
        *,
        bound: int,
        floor: int = 0,
        max_messages: int,
        max_bytes: int,
        wanted: RecordFilter | None = None,
    ) -> PullResult:
        """The messages from queue offset ``offset`` on, at least one however large, within the limits (spec 9.1).

        With ``wanted``, other messages are examined and skipped, at most SCAN_UNITS units and SCAN_RECORDS records in
        one call. Raises FilterError when the filter fails.
        """
        looks = _Looks(bound, floor, max_messages, max_bytes, wanted)
        result = self._read(topic, queue, offset, looks)
        if result is None:
            # An expected unit is missing. Either it was being written at that moment (a read during a write may show
            # half of it), or the queue's end was cut and is being rewritten: a second read shows the case. Or it is
            # damaged, and stays so.
            self._queues.pop((topic, queue), None)
            looks.is_second = True
            result = self._read(topic, queue, offset, looks)
            assert result is not None
        return result

    def _read(self, topic: str, queue: int, offset: int, looks: _Looks) -> PullResult | None:
        """One try; None when it is the first and the unit at ``offset`` is not as expected."""
        bound, floor = looks.bound, looks.floor
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return PullResult(PullStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, NO_UNITS)
        low, high = state.min, state.max
        if high == 0:
            return PullResult(PullStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0, NO_UNITS)
        if offset < low:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, low, low, high, NO_UNITS)
        if offset >= high:
            if offset == high:
                return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, offset, low, high, NO_UNITS)
            return PullResult(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high, NO_UNITS)
        if looks.wanted is None:
            found = self._read_all(state, offset, looks)
        else:
            found = self._read_wanted(state, offset, looks, looks.wanted)
        if found is None:
            return None
        units, following, missing = found
        if len(units):
            status = PullStatus.FOUND
        else:
            status = PullStatus.MESSAGE_WAS_REMOVING if missing else PullStatus.NO_MATCHED_MESSAGE
        return PullResult(status, following, low, high, units)

    def _read_all(self, state: QueueState, offset: int, looks: _Looks) -> tuple[Units, int, bool] | None:
        count = min(looks.max_messages, state.max - offset)
        # Half a kilobyte for a message is a guess that keeps a pull of few large messages from reading a long index.
        guess = min(count, max(64, looks.max_bytes // 512))
        units = self._units(state, offset, guess)
        if not len(units):
            return NO_UNITS, self._gap(state, offset), True
        readable, sizes, whole = _readable(units, looks.bound, looks.floor)
        if not whole:
            return looks.passed_over(offset, readable, units) if looks.is_second else None
        if whole < len(units):
            units, readable, sizes = units[:whole], readable[:whole], sizes[:whole]
        if not readable.all():
            kept = np.flatnonzero(readable)
            if not len(kept):
                return NO_UNITS, offset + len(units), True
            taken = _fitting(sizes[kept], looks.max_bytes)
            following = offset + (len(units) if taken == len(kept) else int(kept[taken]))
            return units[kept[:taken]], following, False
        taken = _fitting(sizes, looks.max_bytes)
        return units[:taken], offset + taken, False

    def _read_wanted(
        self, state: QueueState, offset: int, looks: _Looks, wanted: RecordFilter
    ) -> tuple[Units, int, bool] | None:
        max_messages, max_bytes = looks.max_messages, looks.max_bytes
        found: list[Units] = []
        count = total = looked_at = 0
        missing = True  # no unit so far leads to a record
        at = offset
        stop = min(state.max, offset + SCAN_UNITS)
        # Records are examined slice by slice: a pull of ten messages must not touch eight thousand records, unless it
        # turns out that few match.
        slice_units = min(_CHUNK_UNITS, max(64, 2 * max_messages))
        work = JUDGED_BYTES
        while at < stop and count < max_messages and total < max_bytes and looked_at < SCAN_RECORDS:
            units = self._units(state, at, min(_CHUNK_UNITS, stop - at))
            if not len(units):
                return (np.concatenate(found, dtype=UNIT) if found else NO_UNITS), self._gap(state, at), True
            readable, _, whole = _readable(units, looks.bound, looks.floor)
            if not whole:
                if at > offset:
                    break  # return the records found first; the next read begins here
                return looks.passed_over(offset, readable, units) if looks.is_second else None
            if whole < len(units):
                units, readable = units[:whole], readable[:whole]
            codes = units["tags_code"].astype(np.int64)
            extensions = self._extensions.resolve(state.folder[len(self.folder) + 1 :], codes)
            if extensions is not None:
                codes = extensions.codes
            may_match = wanted.may_match(units, codes, extensions)
            candidates = np.flatnonzero(readable & may_match)
            missing = missing and not (readable & ~may_match).any()
            first = 0
            while first < len(candidates):
                part = candidates[first : first + slice_units]
                most = affordable(units["size"][part], wanted.terms, work)
                if not most and looked_at:
                    # Let other consumers have their turn; the next read begins here.
                    return (
                        np.concatenate(found, dtype=UNIT) if found else NO_UNITS,
                        at + int(candidates[first]),
                        missing,
                    )
                part = part[: max(1, most)]
                work -= cost_of(units["size"][part], wanted.terms)
                first += len(part)
                verdicts = self._verdicts(units[part], wanted)
                looked_at += len(part)
                missing = missing and bool((verdicts == NO_RECORD).all())
                matched = part[verdicts == MATCH]
                if not len(matched):
                    slice_units = min(_CHUNK_UNITS, 2 * slice_units)
                    continue
                sizes = units["size"][matched].astype(np.int64)
                taken = min(_fitting(sizes, max_bytes - total, at_least=not count), max_messages - count)
                found.append(units[matched[:taken]])
                count += taken
                total += int(sizes[:taken].sum())
                if taken < len(matched):
                    return np.concatenate(found, dtype=UNIT), at + int(matched[taken]), missing
                if count >= max_messages or total >= max_bytes:
                    return np.concatenate(found, dtype=UNIT), at + int(matched[-1]) + 1, missing
            at += len(units)
        return (np.concatenate(found, dtype=UNIT) if found else NO_UNITS), at, missing

    def _verdicts(self, units: Units, wanted: RecordFilter) -> NDArray[np.uint8]:
        """For each unit: MATCH, NO_MATCH or NO_RECORD, from the records themselves."""
        verdicts = np.full(len(units), NO_RECORD, np.uint8)
        physical = units["physical_offset"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        for first, end, base, segment in self._by_segment(physical, sizes):
            # The slice of verdicts is filled in place.
            wanted.judge(
                np.frombuffer(segment, np.uint8), physical[first:end] - base, sizes[first:end], verdicts[first:end]
            )
        return verdicts

    def _by_segment(
        self, physical: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, int, memoryview]]:
        """``(first, end, physical offset of the view, view)`` for each stretch of records in one existing segment."""
        numbers = physical // self.commit_log.segment_bytes
        first = 0
        while first < len(numbers):
            end = first + int(np.searchsorted(numbers[first:], numbers[first], side="right"))
            base = int(physical[first])
            try:
                view = self.commit_log.read(base, int(physical[end - 1] + sizes[end - 1]) - base)
            except StoreError:
                first = end  # expired since the unit was read, or the unit is wrong
                continue
            yield first, end, base, view
            first = end

    # ------------------------------------------------------------ bytes

    def frames(self, units: Units) -> list[memoryview | bytes]:
        """The records of ``units`` in queue order, as few buffers.

        Records adjacent in the log become one buffer. Large buffers are views (no copy; the segment stays mapped while
        they live), smaller records are gathered into ``bytes``. At most MAX_FRAMES. Raises OffsetOutOfRangeError when a
        record no longer exists.
        """
        physical = units["physical_offset"].astype(np.int64)
        ends = physical + units["size"].astype(np.int64)
        breaks = np.flatnonzero(physical[1:] != ends[:-1]) + 1
        starts: list[int] = physical[np.concatenate(([0], breaks))].tolist()
        stops: list[int] = ends[np.concatenate((breaks - 1, [-1]))].tolist()
        total = sum(stops) - sum(starts)
        read = self.commit_log.read
        if len(starts) == 1 or (len(starts) <= MAX_FRAMES and total >= len(starts) * VIEW_BYTES):
            return [read(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
        frames: list[memoryview | bytes] = []
        part_bytes = max(GATHER_BYTES, -(-total // (MAX_FRAMES // 2)))
        part: list[memoryview] = []
        size = 0
        base = end = 0
        segment = memoryview(b"")
        for start, stop in zip(starts, stops, strict=True):
            if not base <= start < end:
                base = start - start % self.commit_log.segment_bytes
                end = base + self.commit_log.segment_bytes
                segment = read(base, end - base)
            part.append(segment[start - base : stop - base])
            size += stop - start
            if size >= part_bytes:
                frames.append(b"".join(part))
                part, size = [], 0
        if part:
            frames.append(b"".join(part))
        return frames


def _readable(units: Units, bound: int, floor: int) -> tuple[NDArray[np.bool_], NDArray[np.int64], int]:
    """Which units may be shown, all sizes, and the number of units before the first one that is neither readable nor
    pre-blank: such a unit must not be skipped silently.
    """
    physical = units["physical_offset"].astype(np.int64)
    sizes = units["size"].astype(np.int64)
    blank = sizes == PREBLANK_SIZE
    readable = (sizes > 0) & ~blank & (physical >= floor) & (physical + sizes <= bound)
    if readable.all():
        return readable, sizes, len(units)
    wrong = np.flatnonzero(~(readable | blank))
    return readable, sizes, int(wrong[0]) if len(wrong) else len(units)


def _fitting(sizes: NDArray[np.int64], max_bytes: int, at_least: bool = True) -> int:
    """How many of the first ``sizes`` fit into ``max_bytes``; with ``at_least`` at least one."""
    return max(int(sizes.cumsum().searchsorted(max_bytes, side="right")), 1 if at_least else 0)
