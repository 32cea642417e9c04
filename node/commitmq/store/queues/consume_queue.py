"""The ConsumeQueue of one queue: 20-byte units that point into the CommitLog (spec 3).

    0    physical offset i8    of the record
    8    size i4               of the record; 0 in a place that was never written
    12   tags code i8          hash of the tag, so that a filter need not read the log

The unit of queue offset q is at logical byte q * 20. Files of ``file_bytes`` are named after the logical byte they
begin with, and are sparse: blocks are allocated with the units (10,000 preallocated queues would take 60 GB).

A queue whose first unit is not number 0 of its file begins with pre-blank units (physical offset 0, size 2**31 - 1) up
to the first real one. RocketMQ needs them; CommitMQ treats them neither as readable nor as a position in the log.

Objects are small and hold no descriptor: a node has thousands of them, all sharing one :class:`FdCache`. One process
writes a queue; others follow it with :meth:`ConsumeQueue.refresh`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from commitmq.errors import CorruptRecordError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.units import UNIT, UNIT_STRUCT
from commitmq.log import get_log
from commitmq.store.queues.queue_files import Proof, QueueFiles, Span

_PREBLANK: Final = UNIT_STRUCT.pack(0, PREBLANK_SIZE, 0)
_SCAN_BYTES: Final = 4096 * UNIT_BYTES
MAX_GAP_UNITS: Final = 10_000_000

Unit = tuple[int, int, int]
"""Physical offset, record size, tags code."""


class ConsumeQueue(QueueFiles):
    """Units of one queue in ``folder``. Call :meth:`recover` (its writer) or :meth:`refresh` (a reader) before use.
    Offsets named ``queue_offset`` count units; ``max_physical_offset`` and similar names are bytes of the CommitLog.
    """

    __slots__ = ("_min",)

    unit_bytes: ClassVar[int] = UNIT_BYTES

    def __init__(self, folder: Path | str, file_bytes: int, fds: FdCache | None = None) -> None:
        """Reads nothing yet. ``file_bytes`` must be a multiple of 20."""
        super().__init__(folder, file_bytes, fds)
        self._min = 0  # logical byte of the first readable unit

    # ------------------------------------------------------------ bounds

    @property
    def max_offset(self) -> int:
        return self._end // UNIT_BYTES

    @property
    def min_offset(self) -> int:
        """The first readable queue offset; equal to :attr:`max_offset` when there is none."""
        return min(self._min, self._end) // UNIT_BYTES

    # ------------------------------------------------------------ opening

    def recover(self, limit: int | None = None, *, proof: Proof | None = None, durable: bool = True) -> None:
        """Find the end as the writing process, and clear away everything behind it (spec 3.5).

        Only units of records that begin below ``limit`` stay. At ``limit`` and above the units may be in any disorder
        that a power cut leaves, and files may be missing before others. Files behind the end are deleted, bytes behind
        it are zeroed and synced: a stale unit left there would become valid again once the queue has grown to it.
        Without ``durable`` the sync is left to :meth:`flush`, which must come before the caller takes anything at or
        above ``limit`` for durable.

        With ``proof`` a few reads suffice, however long the queue is; without it, and when the proof fails, all units
        from the third-last file on are examined. :attr:`min_offset` is the first file's begin until
        :meth:`correct_min_offset`. A queue that keeps no unit is treated as one that never had any. Raises
        SegmentSizeError.
        """
        bases = self._list_files(repair=True, limit=limit)
        self._find_end(bases, limit, proof, files=3)
        self._settle(bases, durable=durable)

    def refresh(self, limit: int | None = None, *, proof: Proof | None = None) -> int:
        """Find the current end as a reader, without changing the disk; returns :attr:`max_offset`.

        Cheap when little was added: units behind the known end are read until one is invalid. When the unit before the
        known end is gone (the writer truncated), the search starts again from the last files. With ``limit`` or
        ``proof`` it starts again every time, as :meth:`recover` does.
        """
        if self._first >= 0 and limit is None and proof is None:
            last = self.unit(self._end // UNIT_BYTES - 1) if self._end > self._first else None
            if last is not None and last[1] > 0 and self.max_physical_offset in (-1, last[0] + last[1]):
                self._follow()
                self._pass_deleted()
                return self.max_offset
        bases = self._list_files(repair=False, limit=limit)
        self._find_end(bases, limit, proof, files=2 if limit is None and proof is None else 3)
        return self.max_offset

    def _find_end(self, bases: list[int], limit: int | None, proof: Proof | None, *, files: int) -> None:
        if proof is not None and bases and self._probe(bases, sys.maxsize if limit is None else limit, proof):
            return
        self._scan(bases, max(0, len(bases) - files))
        if limit is not None:
            self._end_below(limit)

    def _probe(self, bases: list[int], limit: int, proof: Proof) -> bool:
        """Find the end with a few reads; False when they prove nothing.

        If the log has a unit's record under this queue and number, the unit was written after all units before it and
        was not taken back since. So no unit before it is stale, and the place behind it, which is not a unit, is where
        a scan stops too.
        """
        at = self._last_unit(bases, limit)
        if at < 0:
            first = self._span(self._pread(bases[0], 0, UNIT_BYTES))
            if first is None or first[0] < limit:
                return False
            # All units are above the limit, because they grow: none of them stays.
            self._first, self._end, self.max_physical_offset = bases[0], bases[0], -1
            return True
        span = self._span(self._pread(at - at % self.file_bytes, at % self.file_bytes, UNIT_BYTES))
        if span is None or span[0] < 0 or not proof(at // UNIT_BYTES, span[0], span[1] - span[0]):
            return False
        self._first, self._end = bases[0], at + UNIT_BYTES
        self.max_physical_offset = span[1]
        self._min = max(self._min, self._first)
        return True

    def _span(self, unit: bytes) -> Span | None:
        offset, size, _ = UNIT_STRUCT.unpack(unit)
        if offset == 0 and size == PREBLANK_SIZE:
            return -1, -1
        return (offset, offset + size) if offset >= 0 and size > 0 else None

    def _follow(self) -> None:
        """Extend the end over newly added units."""
        while True:
            base = self._end - self._end % self.file_bytes
            if not self._scan_file(base, self._end - base):
                return

    def _scan(self, bases: list[int], index: int) -> None:
        self.max_physical_offset = -1
        if not bases:
            self._first, self._end, self._min = -1, 0, 0
            return
        self._first = bases[0]
        self._end = bases[index]
        while self._scan_file(bases[index], 0) and index + 1 < len(bases):
            index += 1
        if self.max_physical_offset < 0 and self._end > self._first:
            # No real unit in the examined files, but units before them: the last of those ends the queue.
            last = self.unit(self._end // UNIT_BYTES - 1)
            if last is not None and last[1] not in (0, PREBLANK_SIZE):
                self.max_physical_offset = last[0] + last[1]
        self._min = max(self._min, self._first)

    def _scan_file(self, base: int, position: int) -> bool:
        """Move the end over the valid units of one file from ``position``; True when the file is valid to its end.

        A unit is valid by RocketMQ's conditions (physical offset >= 0, size > 0, spec 3.5) and one more: its physical
        offset grows. A falling one can only be stale.
        """
        while position < self.file_bytes:
            data = self._pread(base, position, min(_SCAN_BYTES, self.file_bytes - position))
            units = np.frombuffer(data, dtype=UNIT, count=len(data) // UNIT_BYTES)
            if not len(units):
                return False
            offsets = units["physical_offset"].astype(np.int64)
            sizes = units["size"].astype(np.int64)
            blank = (sizes == PREBLANK_SIZE) & (offsets == 0)
            valid = (offsets >= 0) & (sizes > 0)
            ends = np.where(blank, -1, offsets + sizes)
            previous = np.maximum.accumulate(np.concatenate(([self.max_physical_offset], ends[:-1])))
            valid &= blank | (offsets >= previous)
            count = int(np.argmin(valid)) if not valid.all() else len(valid)
            if count:
                # Pre-blank units come first, and last where a repair took the newest messages out.
                self.max_physical_offset = max(self.max_physical_offset, int(ends[:count].max()))
                position += count * UNIT_BYTES
                self._end = base + position
            if count < len(valid):
                return False
        return True

    # ------------------------------------------------------------ reading

    def unit(self, queue_offset: int) -> Unit | None:
        """The unit at ``queue_offset``, below :attr:`min_offset` too; None outside the files."""
        at = queue_offset * UNIT_BYTES
        if not max(0, self._first) <= at < self._end:
            return None
        base = at - at % self.file_bytes
        data = self._pread(base, at - base, UNIT_BYTES)
        return UNIT_STRUCT.unpack(data) if len(data) == UNIT_BYTES else None

    def read_units(self, queue_offset: int, count: int) -> bytes:
        """Up to ``count`` units from ``queue_offset`` on: 20 bytes each, across files, without gaps. Empty below
        :attr:`min_offset` and at or above :attr:`max_offset`.
        """
        at = queue_offset * UNIT_BYTES
        if self._first < 0 or not self._min <= at < self._end:
            return b""
        return self._read(at, min(self._end - at, count * UNIT_BYTES))

    def last_offset_below(self, physical_offset: int) -> int:
        """The next queue offset if only units of records that begin below ``physical_offset`` count.

        This is a binary search: physical offsets grow along a queue. Pre-blank units count with the real one before
        them: their places are taken, by no message or by a lost one.
        """
        first, end = max(0, self._first) // UNIT_BYTES, self.max_offset
        return self._next_real(self._search(first, end, physical_offset), end) if first < end else first

    def _search(self, low: int, high: int, physical_offset: int) -> int:
        """The first queue offset in [low, high) whose unit is at or above ``physical_offset``, else ``high``."""
        while low < high:
            middle = (low + high) // 2
            real = self._next_real(middle, high)
            if real < high and self._unit_at(real)[0] < physical_offset:
                low = real + 1
            else:
                high = middle
        return low

    def _next_real(self, queue_offset: int, stop: int) -> int:
        """The first unit from ``queue_offset`` on, below ``stop``, that is not pre-blank; ``stop`` if there is none."""
        if queue_offset >= stop or self._unit_at(queue_offset)[1] != PREBLANK_SIZE:
            return queue_offset
        while queue_offset < stop:
            data = self._read(
                queue_offset * UNIT_BYTES, min(stop - queue_offset, _SCAN_BYTES // UNIT_BYTES) * UNIT_BYTES
            )
            sizes = np.frombuffer(data, UNIT)["size"]
            real = np.flatnonzero(sizes != PREBLANK_SIZE)
            if len(real):
                return queue_offset + int(real[0])
            if not len(sizes):
                break
            queue_offset += len(sizes)
        return stop

    def _unit_at(self, queue_offset: int) -> Unit:
        unit = self.unit(queue_offset)
        if unit is None:
            raise CorruptRecordError(f"unit {queue_offset} of the queue cannot be read", path=self.folder)
        return unit

    # ------------------------------------------------------------ appending

    def append_units(self, queue_offset: int, units: bytes | bytearray | memoryview) -> int:
        """Append consecutive ``units`` (20 bytes each), beginning at ``queue_offset``; returns the number of new ones.

        Idempotent: units of records that end at or below :attr:`max_physical_offset`, or whose place is taken, are
        skipped. A queue offset beyond the end is logged, and the places up to it are filled with pre-blank units,
        because every message must stay at its offset (RocketMQ would move it to the end, spec 3.3); a gap of more than
        :data:`MAX_GAP_UNITS` is not believed. Only a queue without units may begin at any offset. Not durable before
        :meth:`flush`. Raises DiskFullError or StoreError; then the same call may be repeated.
        """
        if len(units) % UNIT_BYTES:
            raise ValueError(f"units have {UNIT_BYTES} bytes each, {len(units)} bytes are none")
        view = memoryview(units)
        while len(view):
            offset, size, _ = UNIT_STRUCT.unpack_from(view)
            if offset + size > self.max_physical_offset:
                break
            view = view[UNIT_BYTES:]
            queue_offset += 1
        if not len(view):
            return 0
        expected = queue_offset * UNIT_BYTES
        if self._first < 0:
            self._begin(expected)
        elif expected < self._end:
            # RocketMQ appends a unit of queue offset 0 at the end instead; there a reader would never find it by its
            # offset.
            taken = min(self._end - expected, len(view))
            view = view[taken:]
        elif expected != self._end:
            get_log("consume_queue").warning(
                "unit does not follow its queue's end", queue=self.folder, expected=queue_offset, end=self.max_offset
            )
            self.pad_to(queue_offset)
        if not len(view):
            return 0
        written = len(view) // UNIT_BYTES
        offset, size, _ = UNIT_STRUCT.unpack_from(view, len(view) - UNIT_BYTES)
        self._write_at(self._end, view)
        self._end += len(view)
        self.max_physical_offset = offset + size
        return written

    def put_tags_code(self, queue_offset: int, code: int) -> None:
        """Put another tags code into the unit at ``queue_offset``: its address in the extension leads nowhere any more."""
        self._write_at(queue_offset * UNIT_BYTES + UNIT_BYTES - 8, code.to_bytes(8, "big", signed=True))

    def pad_to(self, queue_offset: int) -> None:
        """Fill the places from the end up to ``queue_offset`` with pre-blank units, or none if over MAX_GAP_UNITS."""
        gap = queue_offset - self.max_offset
        if 0 < gap <= MAX_GAP_UNITS:
            self._write_at(self._end, _PREBLANK * gap)
            self._end += gap * UNIT_BYTES

    def _begin(self, expected: int) -> None:
        """Make the queue's first file; pre-blank it up to ``expected`` (spec 3.3 step 3)."""
        first = expected - expected % self.file_bytes
        blank = expected - first
        if blank:
            self._write_at(first, _PREBLANK * (blank // UNIT_BYTES))
        else:
            self._make_file(first)
        self._first = first
        self._end = self._min = expected

    # ------------------------------------------------------------ cutting

    def truncate(self, physical_offset: int) -> None:
        """Remove every unit whose record begins at or above ``physical_offset``, durably (spec 3.5).

        Files left without a unit are deleted; bytes cut from the last file are zeroed and synced. The first unit of a
        file, which RocketMQ keeps unconditionally, must begin below the offset here too. A queue that keeps no unit is
        treated as one that never had any: units of records below the offset may be appended again.
        """
        bases = self._list_files(repair=True, limit=physical_offset)
        self._end_below(physical_offset)
        self._settle(bases, durable=True)

    def _end_below(self, limit: int) -> None:
        first, end = max(0, self._first) // UNIT_BYTES, self.max_offset
        found = self._search(first, end, limit) if first < end else first
        last = self._unit_at(found - 1) if found > first else None
        self.max_physical_offset = -1 if last is None else last[0] + last[1]
        self._end = (self._next_real(found, end) if first < end else end) * UNIT_BYTES

    def _settle(self, bases: list[int], *, durable: bool) -> None:
        """Make the files agree with the end."""
        if self.max_physical_offset < 0:
            # Files exist, perhaps pre-blanked, but no unit stays: the next append must begin the queue like a new one.
            self._forget(bases, durable=durable)
        else:
            self._cut(bases, durable=durable)

    def delete_expired(self, log_min: int) -> int:
        """Delete files, oldest first and never the last, whose last unit points below ``log_min`` (spec 3.6), and
        correct :attr:`min_offset`; returns the number of deleted files.
        """
        deleted = self.delete_files_below(log_min, settled_below=None)
        self.correct_min_offset(log_min)
        return deleted

    def delete_files_below(self, log_min: int, *, settled_below: int | None) -> int:
        """Only the deletions of :meth:`delete_expired`, which cost nothing for a queue of one file.

        With ``settled_below`` a file also stays until the first unit behind it points below that offset: a unit that a
        power cut can still take, with its record, must not be the only one that tells the queue's next offset.
        """
        deleted = 0
        while 0 <= self._first < self._end - self.file_bytes:
            last = self.unit((self._first + self.file_bytes) // UNIT_BYTES - 1)
            if last is not None and last[0] >= log_min:
                break
            following = self.unit((self._first + self.file_bytes) // UNIT_BYTES)
            if settled_below is not None and (following is None or following[0] >= settled_below):
                break
            self._delete_first(is_next=deleted > 0)
            deleted += 1
        self._min = max(self._min, self._first)
        return deleted

    def correct_min_offset(self, log_min: int) -> None:
        """Move :attr:`min_offset` up to the first unit whose record is still in the log (spec 3.6).

        Unlike RocketMQ this skips pre-blank units when ``log_min`` is 0, where their physical offset 0 would count as
        present, and continues in the second file when nothing of the first is left.
        """
        if self._first < 0 or self._min >= self._end:
            return
        low = max(self._min, self._first) // UNIT_BYTES
        kept = self.unit(low)
        if kept is not None and kept[0] >= log_min and kept[1] != PREBLANK_SIZE:
            self._min = low * UNIT_BYTES
            return
        found = self._search(low, self.max_offset, log_min)
        self._min = (self._next_real(found, self.max_offset) if found < self.max_offset else found) * UNIT_BYTES

    def _forget(self, bases: list[int], *, durable: bool = True) -> None:
        self._min = 0
        super()._forget(bases, durable=durable)

    def _cut(self, bases: list[int], *, durable: bool = True) -> None:
        super()._cut(bases, durable=durable)
        self._min = min(max(self._min, max(0, self._first)), self._end)
