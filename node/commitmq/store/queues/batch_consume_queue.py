"""The ConsumeQueue of a topic with ``queue.type=BatchCQ``: 46-byte units, one for each record (spec 3.9).

    0    physical offset i8      of the record
    8    size i4                 of the record; 0 in a place that was never written
    12   tags code i8            hash of the record's own tag, 0 when it has none: messages inside have their own tags
    20   store timestamp i8      ms; a look-up by time need not read the log
    28   base offset i8          queue offset of the first message in the record
    36   count i2                messages in the record: they have the queue offsets base … base + count - 1
    38   compacted offset i4     -1; RocketMQ's compaction uses it
    42   reserved i4             0

A record that is a plain message counts as a batch of one.

A unit stands for many queue offsets, so its position does not tell them: files are named after the logical byte they
begin with, number n (*index* here) is at byte n * 46, and a queue offset is found by bisection over the base offsets,
which grow along the queue as the physical offsets do.

RocketMQ treats a record as already built when it begins at or below the last unit's record (for plain queues: when it
ends there). Records do not overlap, so the two rules are equivalent.

Reads queues of BatchCQ topics; the answers have the form of the plain queues' reader.

The reader of plain queues is :class:`commitmq.store.queues.queue_reader.QueueReader`. Here too another process appends;
``bound`` and ``floor`` limit the visible units, and both are monotone along a queue. A unit stands for a batch, so a
pull may begin inside one: the whole record is returned, and the client drops the messages below the offset it asked
for. Units are returned in the form of plain ones, because a client needs no more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import CorruptRecordError, ProtocolError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import BATCH_UNIT_BYTES
from commitmq.format.units import BATCH_UNIT, UNIT
from commitmq.log import get_log
from commitmq.store.queues.queue_files import QueueFiles, Span
from commitmq.store.queues.queue_reader import QueueStates
from commitmq.store.queues.record_filter import PullResult, PullStatus, RecordFilter, Units
from commitmq.store.queues.tag_filter import TagFilter

MAX_INNER_MESSAGES: Final = 32_767
"""Most messages in one record: the count is a signed 16-bit number."""

BatchUnits = np.ndarray[Any, np.dtype[np.void]]
"""Array of :data:`BATCH_UNIT`."""

_SCAN_UNITS: Final = 2_048


def make_units(
    physical_offset: Any, size: Any, tags_code: Any, store_timestamp: Any, base_offset: Any, count: Any
) -> BatchUnits:
    """Units of records with these columns (equal lengths)."""
    units = np.zeros(len(physical_offset), BATCH_UNIT)
    units["physical_offset"] = physical_offset
    units["size"] = size
    units["tags_code"] = tags_code
    units["store_timestamp"] = store_timestamp
    units["base_offset"] = base_offset
    units["count"] = count
    units["compacted_offset"] = -1
    return units


class BatchConsumeQueue(QueueFiles):
    """Units of one queue in ``folder``. Call :meth:`recover` (its writer) or :meth:`refresh` (a reader) before use.
    ``index`` counts units from the queue's beginning (including expired ones), ``queue_offset`` messages.
    """

    __slots__ = ("_end_offset", "_first_offset", "_last_start", "_min")

    unit_bytes: ClassVar[int] = BATCH_UNIT_BYTES
    place: ClassVar[str] = "batch_queue"

    def __init__(self, folder: Path | str, file_bytes: int, fds: FdCache | None = None) -> None:
        """Reads nothing yet. ``file_bytes`` must be a multiple of 46."""
        super().__init__(folder, file_bytes, fds)
        self._min = 0  # logical byte of the first readable unit
        self._last_start = -1  # physical offset of the last unit's record
        self._first_offset = -1  # base offset of the unit at _min; -1: unknown
        self._end_offset = 0

    # ------------------------------------------------------------ bounds

    @property
    def max_offset(self) -> int:
        """The next queue offset: behind the last unit's batch, 0 without a unit."""
        return self._end_offset

    @property
    def min_offset(self) -> int:
        """The first readable queue offset: :attr:`max_offset` when all expired, -1 without a unit."""
        if self._end <= max(0, self._first):
            return -1
        if self._min >= self._end:
            return self._end_offset
        if self._first_offset < 0:
            self._first_offset = int(self.unit(self.min_index)["base_offset"])
        return self._first_offset

    @property
    def min_index(self) -> int:
        """Index of the first readable unit; equal to :attr:`end_index` when there is none."""
        return max(0, min(max(self._min, self._first), self._end)) // BATCH_UNIT_BYTES

    @property
    def end_index(self) -> int:
        """Index behind the last unit."""
        return self._end // BATCH_UNIT_BYTES

    # ------------------------------------------------------------ opening

    def recover(self, limit: int | None = None) -> None:
        """Find the end as the writing process, and clear away everything behind it (spec 3.5).

        The search begins at the third-last file. Files behind the end are deleted, bytes behind it are zeroed and
        synced. At or above physical offset ``limit`` files may be missing before others, as a power cut leaves them.
        Raises SegmentSizeError.
        """
        bases = self._list_files(repair=True, limit=limit)
        self._scan(bases, max(0, len(bases) - 3))
        if self._last_start < 0:
            self._forget(bases)
        else:
            self._cut(bases)

    def refresh_below(self, limit: int) -> int:
        """Find the end that :meth:`recover` and :meth:`truncate` at ``limit`` would find, without changing the disk;
        returns :attr:`max_offset`. Raises SegmentSizeError, and StoreError for a missing file between two others.
        """
        bases = self._list_files(repair=False, limit=limit)
        self._scan(bases, max(0, len(bases) - 3))
        if self._last_start >= limit:
            first = max(0, self._first) // BATCH_UNIT_BYTES
            index = self.first_index(lambda unit: int(unit["physical_offset"]) >= limit, low=first)
            self._forget_end()
            if index > first:
                self._note_end(self.unit(index - 1))
            self._end = index * BATCH_UNIT_BYTES
        return self._end_offset

    def refresh(self) -> int:
        """Find the current end as a reader, without changing the disk; returns :attr:`max_offset`.

        Cheap when little was added. When the unit before the known end differs (the writer truncated, or the queue was
        deleted and recreated), the search starts again from the last files.
        """
        if self._last_start >= 0:
            last = self._units_at(self._end - BATCH_UNIT_BYTES, 1)
            if len(last) and int(last["physical_offset"][0]) == self._last_start and int(last["size"][0]) > 0:
                base = self._end - self._end % self.file_bytes
                while self._scan_file(base, self._end - base):
                    base += self.file_bytes
                self._pass_deleted()
                return self._end_offset
        self._min = 0
        bases = self._list_files(repair=False)
        self._scan(bases, max(0, len(bases) - 2))
        return self._end_offset

    def _scan(self, bases: list[int], index: int) -> None:
        self._forget_end()
        if not bases:
            self._first, self._end, self._min = -1, 0, 0
            return
        self._first = bases[0]
        self._end = bases[index]
        self._first_offset = -1
        while self._scan_file(bases[index], 0) and index + 1 < len(bases):
            index += 1
        if self._last_start < 0 and self._end > self._first:
            # No unit in the examined files, but units before them: the last of those ends the queue.
            self._note_end(self.unit(self.end_index - 1))
        self._min = max(self._min, self._first)

    def _scan_file(self, base: int, position: int) -> bool:
        """Move the end over the valid units of one file from ``position``; True when the file is valid to its end.

        A unit is valid by RocketMQ's conditions (physical offset and base >= 0, size and count > 0) and one more: its
        physical offset grows. A falling one can only be stale.
        """
        while position < self.file_bytes:
            units = self._units_at(base + position, min(_SCAN_UNITS, (self.file_bytes - position) // BATCH_UNIT_BYTES))
            if not len(units):
                return False
            starts = units["physical_offset"].astype(np.int64)
            ends = starts + units["size"]
            valid = (starts >= 0) & (units["size"] > 0) & (units["base_offset"] >= 0) & (units["count"] > 0)
            valid &= starts >= np.concatenate(([self.max_physical_offset], ends[:-1]))
            count = int(np.argmin(valid)) if not valid.all() else len(valid)
            if count:
                self._note_end(units[count - 1])
                self._end = base + position + count * BATCH_UNIT_BYTES
            if count < len(units):
                return False
            position += count * BATCH_UNIT_BYTES
        return True

    def _span(self, unit: bytes) -> Span | None:
        found = np.frombuffer(unit, BATCH_UNIT)[0]
        start, size = int(found["physical_offset"]), int(found["size"])
        return (start, start + size) if start >= 0 and size > 0 and int(found["count"]) > 0 else None

    def _note_end(self, last: np.void) -> None:
        self._last_start = int(last["physical_offset"])
        self.max_physical_offset = self._last_start + int(last["size"])
        self._end_offset = int(last["base_offset"]) + int(last["count"])

    def _forget_end(self) -> None:
        self.max_physical_offset = self._last_start = -1
        self._end_offset = 0

    # ------------------------------------------------------------ reading

    def unit(self, index: int) -> np.void:
        """The unit of ``index``. Raises CorruptRecordError outside the files."""
        at = index * BATCH_UNIT_BYTES
        if max(0, self._first) <= at < self._end:
            units = self._units_at(at, 1)
            if len(units):
                return units[0]  # type: ignore[no-any-return]
        raise CorruptRecordError(f"unit {index} of the queue cannot be read", path=self.folder)

    def units(self, index: int, count: int) -> BatchUnits:
        """Up to ``count`` units from ``index`` on, across files; fewer at the end or when a file is missing."""
        at = index * BATCH_UNIT_BYTES
        if self._first < 0 or at < self._first or at >= self._end:
            return np.empty(0, BATCH_UNIT)
        return self._units_at(at, min(count, (self._end - at) // BATCH_UNIT_BYTES))

    def _units_at(self, at: int, count: int) -> BatchUnits:
        data = self._read(at, count * BATCH_UNIT_BYTES)
        return np.frombuffer(data, BATCH_UNIT, len(data) // BATCH_UNIT_BYTES)

    def index_of(self, queue_offset: int, stop: int | None = None) -> int:
        """Index of the unit whose batch holds ``queue_offset``, or of the first unit behind it if there is none.

        Only units from :attr:`min_index` up to ``stop`` (default: all) are considered; ``stop`` when all are before the
        offset.
        """
        return self.first_index(lambda unit: int(unit["base_offset"]) + int(unit["count"]) > queue_offset, stop)

    def first_index(self, is_true: Callable[[np.void], bool], stop: int | None = None, low: int | None = None) -> int:
        """The first index for whose unit ``is_true`` holds (and then for all behind it), else ``stop``."""
        low = self.min_index if low is None else low
        high = self.end_index if stop is None else stop
        while low < high:
            middle = (low + high) // 2
            if is_true(self.unit(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def max_offset_below(self, physical_offset: int) -> int:
        """The next queue offset if only units of records that begin below ``physical_offset`` count."""
        first = max(0, self._first) // BATCH_UNIT_BYTES
        index = self.first_index(lambda unit: int(unit["physical_offset"]) >= physical_offset, low=first)
        if index == first:
            return 0
        last = self.unit(index - 1)
        return int(last["base_offset"]) + int(last["count"])

    # ------------------------------------------------------------ appending

    def append_units(self, units: BatchUnits) -> int:
        """Append ``units`` (of records in the log's order); returns how many were new.

        Idempotent: units of records that begin at or below the last one are skipped. Not durable before :meth:`flush`.
        Raises DiskFullError or StoreError; then the same call may be repeated.
        """
        skip = int(np.searchsorted(units["physical_offset"].astype(np.int64), self._last_start, side="right"))
        new = units[skip:]
        if not len(new):
            return 0
        first = int(new["base_offset"][0])
        if first != self._end_offset and self._last_start >= 0:
            get_log("consume_queue").warning(
                "a batch does not follow its queue's end", queue=self.folder, expected=first, end=self._end_offset
            )
        if self._first < 0:
            self._make_file(0)
            self._first = 0
        self._write_at(self._end, np.ascontiguousarray(new).view(np.uint8).data)
        self._end += len(new) * BATCH_UNIT_BYTES
        self._note_end(new[-1])
        return len(new)

    # ------------------------------------------------------------ cutting

    def truncate(self, physical_offset: int) -> None:
        """Remove every unit whose record begins at or above ``physical_offset``, durably (spec 3.5).

        Files left without a unit are deleted; bytes cut from the last file are zeroed and synced. A queue that keeps no
        unit is treated as one that never had any.
        """
        bases = self._list_files(repair=True, limit=physical_offset)
        first = max(0, self._first) // BATCH_UNIT_BYTES
        index = self.first_index(lambda unit: int(unit["physical_offset"]) >= physical_offset, low=first)
        if index == first:
            self._forget(bases)
            return
        self._note_end(self.unit(index - 1))
        self._end = index * BATCH_UNIT_BYTES
        self._cut(bases)

    def delete_expired(self, log_min: int) -> int:
        """Delete files, oldest first and never the last, whose last unit points below ``log_min`` (spec 3.6), and
        correct :attr:`min_offset`; returns the number of deleted files.
        """
        deleted = self.delete_files_below(log_min, settled_below=None)
        self.correct_min_offset(log_min)
        return deleted

    def delete_files_below(self, log_min: int, *, settled_below: int | None) -> int:
        """See :meth:`commitmq.store.queues.consume_queue.ConsumeQueue.delete_files_below`."""
        deleted = 0
        while 0 <= self._first < self._end - self.file_bytes:
            last = self.unit((self._first + self.file_bytes) // BATCH_UNIT_BYTES - 1)
            if int(last["physical_offset"]) >= log_min:
                break
            following = self.unit((self._first + self.file_bytes) // BATCH_UNIT_BYTES)
            if settled_below is not None and int(following["physical_offset"]) >= settled_below:
                break
            self._delete_first(is_next=deleted > 0)
            deleted += 1
        return deleted

    def correct_min_offset(self, log_min: int) -> None:
        """Move :attr:`min_offset` up to the first batch whose record is still in the log (spec 3.9)."""
        if self._first < 0:
            return
        low, high = self.min_index, self.end_index
        while low < high:
            middle = (low + high) // 2
            # A file that its owner deletes in the meantime counts as below.
            unit = self._units_at(middle * BATCH_UNIT_BYTES, 1)
            if len(unit) and int(unit["physical_offset"][0]) >= log_min:
                high = middle
            else:
                low = middle + 1
        index = low
        self._min = index * BATCH_UNIT_BYTES
        self._first_offset = -1

    def _forget(self, bases: list[int], *, durable: bool = True) -> None:
        self._min = 0
        self._first_offset = -1
        self._forget_end()
        super()._forget(bases, durable=durable)

    def _cut(self, bases: list[int], *, durable: bool = True) -> None:
        super()._cut(bases, durable=durable)
        self._min = min(max(self._min, max(0, self._first)), self._end)
        self._first_offset = -1

    # ------------------------------------------------------------ by time

    def offset_by_time(self, timestamp: int, boundary: str, stop: int | None = None) -> int:
        """The queue offset for store time ``timestamp`` (ms): the first message stored then or later (behind the last
        message when all are older), or with ``boundary`` "upper" the last one stored then or earlier (the first message
        when none is).

        All messages of a batch were stored at one time. 0 without a unit. ``stop``: see :meth:`index_of`.
        """
        stop = self.end_index if stop is None else stop
        if self.min_index >= stop:
            return 0
        limit = timestamp + 1 if boundary.lower() == "upper" else timestamp
        index = self.first_index(lambda unit: int(unit["store_timestamp"]) >= limit, stop)
        if boundary.lower() == "upper" and index == self.min_index:
            return int(self.unit(index)["base_offset"])
        if limit == timestamp and index < stop:
            return int(self.unit(index)["base_offset"])
        last = self.unit(index - 1)
        behind = int(last["base_offset"]) + int(last["count"])
        return behind if limit == timestamp else behind - 1


SCAN_UNITS: Final = 8_192
"""Units examined by one filtered read, so that no pull delays the others."""

_NOTHING: Final = np.empty(0, UNIT)


class _Queue:
    """One queue as of ``bound`` and ``floor``: units ``low`` to ``high`` may be shown."""

    __slots__ = ("bound", "floor", "high", "low", "queue")

    def __init__(self, queue: BatchConsumeQueue) -> None:
        self.queue = queue
        self.low = self.high = 0
        self.bound = self.floor = -1


class BatchQueueReader(QueueStates[_Queue]):
    """Reads of all queues under one ``batchconsumequeue/`` folder. Not thread-safe."""

    def __init__(self, folder: Path, file_bytes: int, *, max_open_files: int = 512, max_queues: int = 65_536) -> None:
        super().__init__(max_queues, FdCache(max_open_files))
        self.folder = folder
        self.file_bytes = file_bytes

    def bounds(self, topic: str, queue: int, *, bound: int, floor: int = 0) -> tuple[int, int] | None:
        """``(min offset, max offset)`` of the readable messages; max is the next message's offset. None without a unit."""
        state = self._synced(topic, queue, bound, floor)
        return None if state is None else self._bounds(state)

    def _synced(self, topic: str, queue: int, bound: int, floor: int) -> _Queue | None:
        """The readable part now; None when the queue never had a unit."""
        key = (topic, queue)
        state = self._queues.get(key)
        if state is None:
            state = _Queue(BatchConsumeQueue(self.folder / topic / str(queue), self.file_bytes, self._fds))
            self._queues[key] = state
            if len(self._queues) > self.max_queues:
                self._queues.popitem(last=False)
        else:
            self._queues.move_to_end(key)
        if state.bound != bound or state.floor != floor:
            units = state.queue
            units.refresh()
            units.correct_min_offset(floor)
            state.low, state.high = units.min_index, units.end_index
            if units.max_physical_offset > bound:
                state.high = units.first_index(lambda unit: int(unit["physical_offset"]) + int(unit["size"]) > bound)
            state.bound, state.floor = bound, floor
        if not state.queue.has_files:
            del self._queues[key]
            return None
        return state

    def _bounds(self, state: _Queue) -> tuple[int, int]:
        units = state.queue
        if state.low < state.high:
            last = units.unit(state.high - 1)
            return int(units.unit(state.low)["base_offset"]), int(last["base_offset"]) + int(last["count"])
        # Everything expired, or nothing is readable yet.
        behind = units.max_offset if state.low >= units.end_index else int(units.unit(state.low)["base_offset"])
        return behind, behind

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
        """The records whose batches end behind queue offset ``offset``, at least one, within the limits (spec 9.1).

        ``wanted`` skips batches whose own tag is another one, as a whole. A batch without a tag of its own passes: its
        messages may have any tag, and the client checks them. Raises ProtocolError for another kind of filter, which
        would have to evaluate the messages inside.
        """
        if wanted is not None and not isinstance(wanted, TagFilter):
            raise ProtocolError("INVALID_PARAMETER", "a topic with queue.type=BatchCQ can be filtered by tags only")
        for is_second in (False, True):
            result = self._read(topic, queue, offset, bound, floor, max_messages, max_bytes, wanted, is_second)
            if result is not None:
                return result
            # As with plain queues: a unit is not as expected, and a second try tells whether it is damaged.
            self._queues.pop((topic, queue), None)
        raise AssertionError("the second look has an answer")

    def _read(
        self,
        topic: str,
        queue: int,
        offset: int,
        bound: int,
        floor: int,
        max_messages: int,
        max_bytes: int,
        tags: TagFilter | None,
        is_second: bool,
    ) -> PullResult | None:
        """One try; None when it is the first and the unit at ``offset`` is not as expected."""
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return PullResult(PullStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, _NOTHING)
        low, high = self._bounds(state)
        if high == 0:
            return PullResult(PullStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0, _NOTHING)
        if offset < low:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, low, low, high, _NOTHING)
        if offset >= high:
            if offset == high:
                return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, offset, low, high, _NOTHING)
            return PullResult(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high, _NOTHING)
        index = state.queue.index_of(offset, state.high)
        # A batch has at least one message, so without a filter at most as many units as messages are needed.
        count = min(state.high - index, SCAN_UNITS if tags is not None else max_messages, SCAN_UNITS)
        units = state.queue.units(index, count)
        whole = _whole(units, offset, bound)
        if len(units) and not whole[0]:
            if not is_second:
                return None
            there = np.flatnonzero(whole)
            following = int(units["base_offset"][there[0]]) if len(there) else high
            return PullResult(PullStatus.MESSAGE_WAS_REMOVING, max(following, offset + 1), low, high, _NOTHING)
        if not whole.all():
            units = units[: int(np.argmin(whole))]
        units, following = self._matching(state, units, offset, max_messages, max_bytes, tags)
        return PullResult(
            PullStatus.FOUND if len(units) else PullStatus.NO_MATCHED_MESSAGE, following, low, high, _plain(units)
        )

    def _matching(
        self,
        state: _Queue,
        units: BatchUnits,
        offset: int,
        max_messages: int,
        max_bytes: int,
        tags: TagFilter | None,
    ) -> tuple[BatchUnits, int]:
        if not len(units):
            return units, self._bounds(state)[1]
        passed = np.ones(len(units), np.bool_)
        if tags is not None:
            codes = units["tags_code"].astype(np.int64)
            passed = tags.may_match(units, codes, None) | (codes == 0)
        places = np.flatnonzero(passed)
        counts = units["count"][places].astype(np.int64)
        if len(places):
            # Messages of the first batch below the offset are not wanted and do not count.
            counts[0] -= max(0, offset - int(units["base_offset"][places[0]]))
        messages = np.searchsorted(np.cumsum(counts), max_messages, side="right")
        size = np.searchsorted(np.cumsum(units["size"][places].astype(np.int64)), max_bytes, side="right")
        taken = places[: max(1, int(min(messages, size)))]
        last = units[-1] if len(taken) == len(places) else units[taken[-1]]
        return units[taken], int(last["base_offset"]) + int(last["count"])

    # ------------------------------------------------------------ place and time

    def offset_at(self, topic: str, queue: int, physical: int, *, bound: int, floor: int = 0) -> int | None:
        """Queue offset at which the first batch begins whose record is at or behind ``physical``, clamped into [min,
        max]. None when the queue has no unit.
        """
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return None
        index = state.queue.first_index(lambda unit: int(unit["physical_offset"]) >= physical, state.high, state.low)
        return int(state.queue.unit(index)["base_offset"]) if index < state.high else self._bounds(state)[1]

    def offset_by_time(
        self, topic: str, queue: int, timestamp: int, *, upper: bool = False, bound: int, floor: int = 0
    ) -> int | None:
        """First queue offset stored at ``timestamp`` (ms) or later, with ``upper`` the last one stored then or earlier;
        clamped into [min, max]. None when the queue has no unit.
        """
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return None
        if state.low >= state.high:
            return self._bounds(state)[1]
        return state.queue.offset_by_time(timestamp, "upper" if upper else "lower", state.high)


def _whole(units: BatchUnits, offset: int, bound: int) -> NDArray[np.bool_]:
    """Which of ``units`` are valid: a batch below ``bound`` each, the first one containing ``offset``."""
    physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
    counts = units["count"].astype(np.int64)
    ends = units["base_offset"].astype(np.int64) + counts
    return (sizes > 0) & (counts > 0) & (physical >= 0) & (physical + sizes <= bound) & (ends > offset)


def _plain(units: BatchUnits) -> Units:
    """``units`` in the form of a plain queue's."""
    result = np.empty(len(units), UNIT)
    for name in ("physical_offset", "size", "tags_code"):
        result[name] = units[name]
    return result
