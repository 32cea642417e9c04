"""The ConsumeQueue of one queue: 20-byte units that point into the CommitLog (spec 3).

    0    physical offset i8    where the record lies
    8    size i4               its length; 0 in a place that was never written
    12   tags code i8          hash of the tag, so that a filter needs no look into the log

The unit of queue offset q lies at logical byte q * 20; files of ``file_bytes`` are named after the logical byte they
begin with, and are sparse: blocks come with the units (10,000 preallocated queues would take 60 GB).

A queue whose first unit is not number 0 of its file begins with pre-blank units (physical offset 0, size 2**31 - 1)
up to the first real one. RocketMQ needs them; here they count as neither readable nor as a position in the log.

Objects are small and hold no descriptor: a node has thousands of them, all sharing one :class:`FdCache`. One process
writes a queue; others follow it with :meth:`ConsumeQueue.refresh`.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from commitmq.errors import CorruptRecordError, DiskFullError, StoreError
from commitmq.log import get_log
from commitmq.store.fd_cache import FdCache
from commitmq.store.format import PREBLANK_SIZE, UNIT_BYTES
from commitmq.store.json_config import sync_folder
from commitmq.store.layout import segment_name
from commitmq.store.mapped_file import check_size

_UNIT: Final = struct.Struct(">qiq")
_UNIT_TYPE: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_PREBLANK: Final = _UNIT.pack(0, PREBLANK_SIZE, 0)
_FILE_NAME: Final = re.compile(r"\d{20}", re.ASCII)
_SCAN_BYTES: Final = 4096 * UNIT_BYTES
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)

Unit = tuple[int, int, int]
"""Physical offset, record size, tags code."""


class StoreTimes(Protocol):
    """What a look-up by time needs of the CommitLog."""

    @property
    def min_offset(self) -> int: ...

    def store_timestamp(self, offset: int, size: int) -> int:
        """Store time (ms) of a record, -1 when it cannot be read."""
        ...


def _default_fds() -> FdCache:
    global _shared_fds
    if _shared_fds is None:
        _shared_fds = FdCache()
    return _shared_fds


_shared_fds: FdCache | None = None


class ConsumeQueue:
    """Units of one queue in ``folder``. Call :meth:`recover` (its writer) or :meth:`refresh` (a reader) before use.

    Offsets named ``queue_offset`` count units; ``max_physical_offset`` and the like are bytes of the CommitLog.
    """

    __slots__ = ("_dirty", "_end", "_fds", "_first", "_made", "_min", "file_bytes", "folder", "max_physical_offset")

    def __init__(self, folder: Path | str, file_bytes: int, fds: FdCache | None = None) -> None:
        """Nothing is read yet. ``file_bytes`` must be a multiple of 20."""
        if file_bytes <= 0 or file_bytes % UNIT_BYTES:
            raise ValueError(f"a ConsumeQueue file has a multiple of {UNIT_BYTES} bytes, not {file_bytes}")
        self.folder = str(folder)
        self.file_bytes = file_bytes
        self._fds = fds if fds is not None else _default_fds()
        self._first = -1  # logical byte at which the first file begins; -1 without a file
        self._end = 0  # logical byte behind the last valid unit
        self._min = 0  # logical byte of the first unit that may be read
        self.max_physical_offset = -1
        """End of the last unit's record in the log, -1 when there is none: what is below needs no unit any more."""
        self._dirty: set[int] | None = None  # files written since the last flush
        self._made = False  # a file was made or deleted since the last flush

    # ------------------------------------------------------------ bounds

    @property
    def max_offset(self) -> int:
        """The next queue offset."""
        return self._end // UNIT_BYTES

    @property
    def min_offset(self) -> int:
        """The first queue offset that may be read; equal to :attr:`max_offset` when there is none."""
        return min(self._min, self._end) // UNIT_BYTES

    @property
    def has_files(self) -> bool:
        """False until the first unit was appended (or found)."""
        return self._first >= 0

    @property
    def is_dirty(self) -> bool:
        """True when :meth:`flush` has something to do."""
        return bool(self._dirty) or self._made

    # ------------------------------------------------------------ opening

    def recover(self) -> None:
        """Find the end as the writing process, and clear away what lies behind it (spec 3.5).

        Begins at the third-last file. Files behind the end are deleted, bytes behind it are zeroed and synced: a stale
        unit left there would link up again once the queue has grown to it. :attr:`min_offset` is the first file's
        begin until :meth:`correct_min_offset`. Raises SegmentSizeError.
        """
        bases = self._list_files(repair=True)
        self._scan(bases, max(0, len(bases) - 3))
        if self.max_physical_offset < 0:
            # Made, perhaps pre-blanked, but no unit came: the next append must begin the queue as if it were new.
            self._forget(bases)
        else:
            self._cut(bases)

    def refresh(self) -> int:
        """Find the current end as a reader, which changes nothing on disk; returns :attr:`max_offset`.

        Cheap when little was added: units behind the known end are read until one is not valid. When the unit before
        the known end is gone (its writer truncated), the queue is looked at from its last files anew.
        """
        if self._first >= 0:
            last = self.unit(self._end // UNIT_BYTES - 1) if self._end > self._first else None
            if last is not None and last[1] > 0 and self.max_physical_offset in (-1, last[0] + last[1]):
                self._follow()
                return self.max_offset
        bases = self._list_files(repair=False)
        self._scan(bases, max(0, len(bases) - 2))
        return self.max_offset

    def _follow(self) -> None:
        """Extend the end over units that were added since."""
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
            # Nothing real in the files looked at, but units before them: the last of those ends the queue.
            last = self.unit(self._end // UNIT_BYTES - 1)
            if last is not None and last[1] not in (0, PREBLANK_SIZE):
                self.max_physical_offset = last[0] + last[1]
        self._min = max(self._min, self._first)

    def _scan_file(self, base: int, position: int) -> bool:
        """Move the end over the valid units of one file from ``position``; True when the file is valid to its end.

        Valid means physical offset >= 0, size > 0 (spec 3.5) and, which RocketMQ does not ask, a physical offset that
        grows: one that falls can only be stale.
        """
        while position < self.file_bytes:
            data = self._pread(base, position, min(_SCAN_BYTES, self.file_bytes - position))
            units = np.frombuffer(data, dtype=_UNIT_TYPE, count=len(data) // UNIT_BYTES)
            if not len(units):
                return False
            offsets = units["physical_offset"].astype(np.int64)
            sizes = units["size"].astype(np.int64)
            blank = (sizes == PREBLANK_SIZE) & (offsets == 0)
            valid = (offsets >= 0) & (sizes > 0)
            ends = np.where(blank, -1, offsets + sizes)
            previous = np.concatenate(([self.max_physical_offset], ends[:-1]))
            valid &= blank | (offsets >= previous)
            count = int(np.argmin(valid)) if not valid.all() else len(valid)
            if count:
                # Blanks only come first, so the last unit decides unless all are blank.
                self.max_physical_offset = max(self.max_physical_offset, int(ends[count - 1]))
                position += count * UNIT_BYTES
                self._end = base + position
            if count < len(valid):
                return False
        return True

    def _list_files(self, *, repair: bool) -> list[int]:
        sizes: list[tuple[int, int]] = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if _FILE_NAME.fullmatch(entry.name) and entry.is_file():
                        sizes.append((int(entry.name), entry.stat().st_size))
        except FileNotFoundError:
            return []
        sizes.sort()
        if sizes and sizes[-1][1] == 0:  # the crash came between making the file and giving it its size
            base, _ = sizes.pop()
            if repair:
                self._delete(base)
        for index, (base, size) in enumerate(sizes):
            check_size(Path(self._path(base)), size, self.file_bytes)
            if base != sizes[0][0] + index * self.file_bytes:
                raise StoreError("a file of the queue is missing before this one", path=self._path(base))
        return [base for base, _ in sizes]

    # ------------------------------------------------------------ reading

    def unit(self, queue_offset: int) -> Unit | None:
        """The unit at ``queue_offset``, below :attr:`min_offset` too; None outside the files."""
        at = queue_offset * UNIT_BYTES
        if not max(0, self._first) <= at < self._end:
            return None
        base = at - at % self.file_bytes
        data = self._pread(base, at - base, UNIT_BYTES)
        return _UNIT.unpack(data) if len(data) == UNIT_BYTES else None

    def read_units(self, queue_offset: int, count: int) -> bytes:
        """Up to ``count`` units from ``queue_offset`` on: 20 bytes each, across files, none skipped.

        Empty below :attr:`min_offset` and at or above :attr:`max_offset`.
        """
        at = queue_offset * UNIT_BYTES
        if self._first < 0 or not self._min <= at < self._end:
            return b""
        end = min(self._end, at + count * UNIT_BYTES)
        parts = []
        while at < end:
            base = at - at % self.file_bytes
            wanted = min(end, base + self.file_bytes) - at
            data = self._pread(base, at - base, wanted)
            parts.append(data)
            at += wanted
            if len(data) < wanted:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def last_offset_below(self, physical_offset: int) -> int:
        """The next queue offset when only units of records that begin below ``physical_offset`` count.

        A binary search: physical offsets grow along a queue. Pre-blank units count, as their places are taken.
        """
        return self._search(max(0, self._first) // UNIT_BYTES, self.max_offset, physical_offset)

    def _search(self, low: int, high: int, physical_offset: int) -> int:
        """The first queue offset in [low, high) whose unit is at or above ``physical_offset``, else ``high``."""
        while low < high:
            middle = (low + high) // 2
            unit = self.unit(middle)
            if unit is None:
                raise CorruptRecordError(f"unit {middle} of the queue cannot be read", path=self.folder)
            if unit[0] < physical_offset or unit[1] == PREBLANK_SIZE:
                low = middle + 1
            else:
                high = middle
        return low

    def _pread(self, base: int, position: int, size: int) -> bytes:
        try:
            return os.pread(self._fds.read_fd(self._path(base)), size, position)
        except FileNotFoundError:
            return b""
        except OSError as error:
            path = self._path(base)
            raise StoreError(f"cannot read the queue: {error.strerror}", path=path, offset=position) from error

    # ------------------------------------------------------------ appending

    def append_units(self, queue_offset: int, units: bytes | bytearray | memoryview) -> int:
        """Append consecutive ``units`` (20 bytes each), the first of which belongs at ``queue_offset``; returns how
        many were new.

        Idempotent: units of records that end at or below :attr:`max_physical_offset`, or whose place is taken, are
        skipped. A queue offset beyond the end is logged and the units go to the end, as RocketMQ does (spec 3.3);
        only a queue that has no unit may begin anywhere. Not durable before :meth:`flush`.
        Raises DiskFullError or StoreError; the same call may then be repeated.
        """
        if len(units) % UNIT_BYTES:
            raise ValueError(f"units have {UNIT_BYTES} bytes each, {len(units)} bytes are none")
        view = memoryview(units)
        while len(view):
            offset, size, _ = _UNIT.unpack_from(view)
            if offset + size > self.max_physical_offset:
                break
            view = view[UNIT_BYTES:]
            queue_offset += 1
        if not len(view):
            return 0
        expected = queue_offset * UNIT_BYTES
        if self._first < 0:
            self._begin(expected)
        elif queue_offset and expected < self._end:
            taken = min(self._end - expected, len(view))
            view = view[taken:]
        elif expected != self._end:
            get_log("consume_queue").warning(
                "unit does not follow its queue's end", queue=self.folder, expected=queue_offset, end=self.max_offset
            )
        if not len(view):
            return 0
        written = len(view) // UNIT_BYTES
        offset, size, _ = _UNIT.unpack_from(view, len(view) - UNIT_BYTES)
        self._write_at(self._end, view)
        self._end += len(view)
        self.max_physical_offset = offset + size
        return written

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

    def _write_at(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            base = at - at % self.file_bytes
            chunk = view[: base + self.file_bytes - at]
            self._pwrite(base, at - base, chunk)
            at += len(chunk)
            view = view[len(chunk) :]

    def _pwrite(self, base: int, position: int, data: bytes | memoryview) -> None:
        path = self._path(base)
        try:
            try:
                fd = self._fds.write_fd(path)
            except FileNotFoundError:
                fd = self._make_file(base)
            if self._dirty is None:
                self._dirty = set()
            self._dirty.add(base)
            while len(data):
                written = os.pwrite(fd, data, position)
                data = data[written:]
                position += written
        except OSError as error:
            kind = DiskFullError if error.errno in _NO_SPACE else StoreError
            raise kind(f"cannot append to the queue: {error.strerror}", path=path, offset=position) from error

    def _make_file(self, base: int) -> int:
        """Make a sparse file of full size; returns its descriptor."""
        path = self._path(base)
        self._made = True
        try:
            os.makedirs(self.folder, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            fd = self._fds.write_fd(path)
            os.ftruncate(fd, self.file_bytes)
        except OSError as error:
            kind = DiskFullError if error.errno in _NO_SPACE else StoreError
            raise kind(f"cannot make a file of the queue: {error.strerror}", path=path) from error
        return fd

    def flush(self) -> None:
        """fdatasync what was appended since the last call, and the names of files made since. Raises StoreError."""
        try:
            for base in sorted(self._dirty or ()):
                os.fdatasync(self._fds.write_fd(self._path(base)))
            if self._made and os.path.isdir(self.folder):
                # The queue's folder may be new, and its topic's: their names lie in the two folders above.
                folder = Path(self.folder)
                for one in (folder, folder.parent, folder.parent.parent):
                    sync_folder(one)
        except OSError as error:
            raise StoreError(f"cannot flush the queue: {error.strerror}", path=self.folder) from error
        self._dirty = None
        self._made = False

    # ------------------------------------------------------------ cutting

    def truncate(self, physical_offset: int) -> None:
        """Remove every unit whose record begins at or above ``physical_offset``, durably (spec 3.5).

        Files left without a unit are deleted; what is cut of the last one is zeroed and synced. A unit that RocketMQ
        keeps unconditionally, the first of a file, begins below the offset here too. A queue that keeps no unit is as
        one that never had any: units of records below the offset may be appended again.
        """
        bases = self._list_files(repair=True)
        self._end = self.last_offset_below(physical_offset) * UNIT_BYTES
        last = self.unit(self._end // UNIT_BYTES - 1) if self._end else None
        if last is None or last[1] == PREBLANK_SIZE:
            # Only blanks (or nothing) stay: without a file the next append begins the queue as if it were new.
            self._forget(bases)
            return
        self.max_physical_offset = last[0] + last[1]
        self._cut(bases)

    def delete_expired(self, log_min: int) -> int:
        """Delete files, oldest first and never the last, whose last unit lies below ``log_min`` (spec 3.6); returns
        how many, and corrects :attr:`min_offset`.
        """
        deleted = 0
        while 0 <= self._first < self._end - self.file_bytes:
            last = self.unit((self._first + self.file_bytes) // UNIT_BYTES - 1)
            if last is not None and last[0] >= log_min:
                break
            self._delete(self._first)
            self._first += self.file_bytes
            deleted += 1
        self.correct_min_offset(log_min)
        return deleted

    def correct_min_offset(self, log_min: int) -> None:
        """Move :attr:`min_offset` up to the first unit whose record is still in the log (spec 3.6).

        Unlike RocketMQ this passes over pre-blank units when ``log_min`` is 0, where their physical offset 0 would
        count as present, and goes on into the second file when nothing of the first is left.
        """
        if self._first < 0 or self._min >= self._end:
            return
        low = max(self._min, self._first) // UNIT_BYTES
        kept = self.unit(low)
        if kept is not None and kept[0] >= log_min and kept[1] != PREBLANK_SIZE:
            self._min = low * UNIT_BYTES
            return
        self._min = self._search(low, self.max_offset, log_min) * UNIT_BYTES

    def destroy(self) -> None:
        """Delete every file of the queue and its folder."""
        self._forget(self._list_files(repair=True))
        try:
            os.rmdir(self.folder)
        except OSError:
            return  # something that is not ours lies in it, or it was never made

    def _forget(self, bases: list[int]) -> None:
        for base in reversed(bases):
            self._delete(base)
        self._first, self._end, self._min = -1, 0, 0
        self.max_physical_offset = -1
        self._dirty = None
        if bases:
            self.flush()

    def _cut(self, bases: list[int]) -> None:
        """Delete the files that begin at or behind the end, zero what is behind it in the one before."""
        for base in reversed(bases):
            if base < self._end:
                self._zero_behind_end(base)
                break
            self._delete(base)
        self._min = min(max(self._min, max(0, self._first)), self._end)
        if self.is_dirty:
            self.flush()

    def _zero_behind_end(self, base: int) -> None:
        """Write zeros over what is not zero behind the end; holes of the sparse file stay holes."""
        position = self._end - base
        fd = self._fds.read_fd(self._path(base))
        while position < self.file_bytes:
            try:
                position = max(position, os.lseek(fd, position, os.SEEK_DATA))
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                raise StoreError(f"cannot read the queue: {error.strerror}", path=self._path(base)) from error
            data = self._pread(base, position, min(1 << 16, self.file_bytes - position))
            if any(data):
                self._pwrite(base, position, bytes(len(data)))
            position += len(data)
            fd = self._fds.read_fd(self._path(base))

    def _delete(self, base: int) -> None:
        path = self._path(base)
        self._fds.drop(path)
        self._made = True
        if self._dirty:
            self._dirty.discard(base)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return

    # ------------------------------------------------------------ by time

    def offset_by_time(self, timestamp: int, boundary: str, commit_log: StoreTimes) -> int:
        """The queue offset for store time ``timestamp`` (ms): the first with time >= it, or with ``boundary`` "upper"
        the last with time <= it; clamped into [min, max] (spec 3.7).
        """
        upper = boundary.lower() == "upper"
        return max(self.min_offset, min(self.max_offset, self._offset_by_time(timestamp, upper, commit_log)))

    def _offset_by_time(self, timestamp: int, upper: bool, log: StoreTimes) -> int:
        first, end = self.min_offset, self.max_offset
        if first >= end:
            return 0
        file_units = self.file_bytes // UNIT_BYTES
        low, high = self._range_of_file(timestamp, upper, log, first, end, file_units)
        if self._time(high, log) < timestamp:
            return high if upper else high + 1
        if self._time(low, log) > timestamp:
            return 0 if upper else low - low % file_units
        floor, ceiling = low, high
        left, right, found = -1, -1, -1
        while low <= high:
            middle = (low + high) // 2
            unit = self.unit(middle)
            if unit is None:
                return 0
            if unit[0] < log.min_offset or unit[1] == PREBLANK_SIZE:
                low = left = middle + 1
                continue
            time = log.store_timestamp(unit[0], unit[1])
            if time < 0:
                return 0
            if time == timestamp:
                found = middle
                break
            if time > timestamp:
                high, right = middle - 1, middle
            else:
                low, left = middle + 1, middle
        if found < 0:
            return left if upper else right
        step, stop = (1, ceiling) if upper else (-1, floor)
        while found != stop and self._time(found + step, log) == timestamp:
            found += step
        return found

    def _range_of_file(
        self, timestamp: int, upper: bool, log: StoreTimes, first: int, end: int, file_units: int
    ) -> tuple[int, int]:
        """First and last queue offset of the file that a look-up by time searches (steps 1 and 2)."""
        starts = list(range(first - first % file_units, end, file_units))
        ranges = [(max(first, start), min(end, start + file_units) - 1) for start in starts]
        if upper:
            return next((one for one in reversed(ranges) if self._time(one[0], log) <= timestamp), ranges[0])
        return next((one for one in ranges if self._time(one[1], log) >= timestamp), ranges[-1])

    def _time(self, queue_offset: int, log: StoreTimes) -> int:
        unit = self.unit(queue_offset)
        return -1 if unit is None else log.store_timestamp(unit[0], unit[1])

    def _path(self, base: int) -> str:
        return f"{self.folder}/{segment_name(base)}"


def list_queues(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """``(topic, queue id, folder of the queue)`` of every queue under ``consumequeue/``, sorted.

    A sub-folder that is no queue number is skipped, as RocketMQ does (spec 8.1).
    """
    try:
        topics = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except FileNotFoundError:
        return
    for topic in topics:
        numbers = [entry.name for entry in os.scandir(folder / topic) if entry.is_dir() and entry.name.isascii()]
        for number in sorted((name for name in numbers if name.isdigit()), key=int):
            yield topic, int(number), folder / topic / number
