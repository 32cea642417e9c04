"""The files behind a queue's units, whatever a unit is: sparse files of one size, named after their first byte.

A queue grows at its end only, byte by byte (*logical bytes*, counted from the queue's beginning); what was cut is zeroed,
because a stale unit that is left there would link up again once the queue has grown to it. Blocks come with the units:
10,000 preallocated queues would take 60 GB.

Objects are small and hold no descriptor: a node has thousands of them, all sharing one :class:`FdCache`. One process
writes a queue, others only read it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final, Protocol

from commitmq import failpoints
from commitmq.errors import DiskFullError, StoreError
from commitmq.files import disk
from commitmq.files.disk import sync_folder
from commitmq.files.fd_cache import FdCache
from commitmq.files.mapped_file import check_size, list_sizes
from commitmq.files.writeback import start_writeback
from commitmq.format.file_names import segment_name

_UNIT_HEAD: Final = struct.Struct(">qi")  # every kind of unit begins with a record's physical offset and size
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_TAIL_BYTES: Final = 4096
_TAIL_UNITS: Final = 4096

Span = tuple[int, int]
"""Begin and end of a unit's record in the log; ``(-1, -1)`` for a place that is taken without one."""

Proof = Callable[[int, int, int], bool]
"""Whether the log, at ``(queue_offset, physical_offset, size)``, has this queue's record of that number."""


class SyncLaterError(StoreError):
    """What was to be synced could not be opened, for want of a descriptor: nothing is lost, and a later try may succeed.

    After any other error of a sync the kernel calls the pages clean, so that no later try proves anything.
    """


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


def close_shared_files() -> None:
    """Close the files that queues without a cache of their own have open: other files have their names now."""
    if _shared_fds is not None:
        _shared_fds.close()


_shared_fds: FdCache | None = None


class QueueFiles:
    """Files of one queue in ``folder``; the base of every kind of queue."""

    __slots__ = ("_dirty", "_end", "_fds", "_first", "_made", "file_bytes", "folder", "max_physical_offset")

    unit_bytes: ClassVar[int]
    place: ClassVar[str] = "queue"
    """What its failpoints begin with."""

    def __init__(self, folder: Path | str, file_bytes: int, fds: FdCache | None = None) -> None:
        """Nothing is read yet. ``file_bytes`` must be a multiple of a unit's size."""
        if file_bytes <= 0 or file_bytes % self.unit_bytes:
            raise ValueError(
                f"a {type(self).__name__} file has a multiple of {self.unit_bytes} bytes, not {file_bytes}"
            )
        self.folder = str(folder)
        self.file_bytes = file_bytes
        self._fds = fds if fds is not None else _default_fds()
        self._first = -1  # logical byte at which the first file begins; -1 without a file
        self._end = 0  # logical byte behind the last valid unit
        self.max_physical_offset = -1
        """End of the last unit's record in the log, -1 when there is none: what is below needs no unit any more."""
        self._dirty: set[int] | None = None  # files written since the last flush
        self._made = False  # a file was made or deleted since the last flush

    @property
    def key(self) -> tuple[str, int]:
        """Topic and queue id, which the names of the folder and of the one above say."""
        above, queue_id = os.path.split(self.folder)
        return os.path.basename(above), int(queue_id)

    @property
    def has_files(self) -> bool:
        """False until the first unit was appended (or found)."""
        return self._first >= 0

    @property
    def first_byte(self) -> int:
        """Logical byte at which the first file begins; -1 without a file."""
        return self._first

    @property
    def end_byte(self) -> int:
        """Logical byte behind the last unit."""
        return self._end

    @property
    def is_dirty(self) -> bool:
        """True when :meth:`flush` has something to do."""
        return bool(self._dirty) or self._made

    @property
    def unsynced_files(self) -> int:
        """How many files :meth:`flush` has to sync."""
        return len(self._dirty or ())

    # ------------------------------------------------------------ reading

    def _list_files(self, *, repair: bool, limit: int | None = None) -> list[int]:
        """Where the files begin, ascending. Raises SegmentSizeError, and StoreError for a hole between two files.

        What points at or above ``limit`` was not synced when the node ended: there, a power cut may have taken a file,
        or its size, and left later ones. With ``repair`` such files are deleted.
        """
        sizes = list_sizes(self.folder, self.file_bytes)
        for index, (base, size) in enumerate(sizes):
            hole = base != sizes[0][0] + index * self.file_bytes
            behind = sizes[index + (size == 0) :]
            if (hole or size == 0) and not any(self._begins_below(one, limit) for one, _ in behind):
                if repair:
                    for one, _ in reversed(sizes[index:]):
                        self._delete(one)
                return [before for before, _ in sizes[:index]]
            check_size(Path(self._path(base)), size, self.file_bytes)
            if hole:
                raise StoreError("a file of the queue is missing before this one", path=self._path(base))
        return [base for base, _ in sizes]

    def _begins_below(self, base: int, limit: int | None) -> bool:
        """Whether a file's first unit points below ``limit``; always without one."""
        if limit is None:
            return True
        head = self._pread(base, 0, _UNIT_HEAD.size)
        offset, size = _UNIT_HEAD.unpack(head) if len(head) == _UNIT_HEAD.size else (0, 0)
        return bool(size > 0 and offset < limit)

    def _pread(self, base: int, position: int, size: int) -> bytes:
        try:
            return os.pread(self._fds.read_fd(self._path(base)), size, position)
        except FileNotFoundError:
            return b""
        except OSError as error:
            path = self._path(base)
            raise StoreError(f"cannot read the queue: {error.strerror}", path=path, offset=position) from error

    def _read(self, at: int, size: int) -> bytes:
        """Up to ``size`` bytes from logical byte ``at``, across files; fewer when a file is missing."""
        parts = []
        end = at + size
        while at < end:
            base = at - at % self.file_bytes
            wanted = min(end, base + self.file_bytes) - at
            data = self._pread(base, at - base, wanted)
            parts.append(data)
            at += wanted
            if len(data) < wanted:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def broken_file(self) -> str | None:
        """A file that does not hold units of records that follow each other; None when nothing says so.

        Bounded: the first and the last unit of each file, and the newest :data:`_TAIL_UNITS` of the queue.
        """
        size, previous = self.unit_bytes, -1
        for base in range(max(0, self._first), self._end - self.file_bytes, self.file_bytes):
            for at in (0, self.file_bytes - size):
                end = self._record_end(self._pread(base, at, size), previous, sys.maxsize)
                if end is None:
                    return self._path(base)
                previous = max(previous, end)
        last = max(0, self._end - size)
        start = max(0, self._first, last - last % self.file_bytes, self._end - _TAIL_UNITS * size)
        data = self._read(start, self._end - start) if self._first >= 0 else b""
        for at in range(0, len(data), size):
            end = self._record_end(data[at : at + size], previous, sys.maxsize)
            if end is None:
                return self._path(last - last % self.file_bytes)
            previous = max(previous, end)
        return None

    # ------------------------------------------------------------ finding the end

    def _span(self, unit: bytes) -> Span | None:
        """What the bytes of a unit point at, None when nothing was written there (or nothing that can be valid)."""
        raise NotImplementedError

    def _last_unit(self, bases: list[int], limit: int) -> int:
        """Logical byte of the last unit whose record begins below ``limit``, in a handful of reads; -1 without one.

        Right if what is valid is one piece from the beginning on, with physical offsets that grow, and what follows is
        zero or lies at or above ``limit``. Something else behind the end can mislead it (never before: what it names
        is a unit, and the place behind is not), so the caller needs a :data:`Proof` of the unit or must read them all.
        """
        size = self.unit_bytes
        for base in reversed(bases):
            try:
                fd = self._fds.read_fd(self._path(base))
                end = self._record_end(os.pread(fd, size, 0), -1, limit)
                if end is not None:
                    return base + self._last_in_file(fd, end, limit) * size
            except OSError as error:
                raise StoreError(f"cannot read the queue: {error.strerror}", path=self._path(base)) from error
        return -1

    def _last_in_file(self, fd: int, end: int, limit: int) -> int:
        """Number of the last unit in a file whose first one is good and whose record ends at ``end``. Raises OSError."""
        size = self.unit_bytes
        low, high = 0, -(-self._data_end(fd) // size)
        start = max(1, high - _TAIL_BYTES // size)
        if start < high:
            # Files are sparse: the end of the data is mostly the end of the units, to within a block.
            data = os.pread(fd, (high - start) * size, start * size)
            used = -(-len(data.rstrip(b"\0")) // size)
            high = start + used
            if used:
                last = data[(used - 1) * size : used * size].ljust(size, b"\0")
                if self._record_end(last, end, limit) is not None:
                    return high - 1
        while high - low > 1:
            middle = (low + high) // 2
            found = self._record_end(os.pread(fd, size, middle * size), end, limit)
            if found is None:
                high = middle
            else:
                low, end = middle, found
        return low

    def _record_end(self, unit: bytes, least: int, limit: int) -> int | None:
        """End of a unit's record (``least`` for a blank); None unless it begins in [least, limit)."""
        span = self._span(unit) if len(unit) == self.unit_bytes else None
        if span is None or span == (-1, -1):
            return None if span is None else least
        return span[1] if least <= span[0] < limit else None

    def _data_end(self, fd: int) -> int:
        """Where the first hole of a file begins; all of it where the file system knows no holes."""
        try:
            return min(self.file_bytes, os.lseek(fd, 0, os.SEEK_HOLE))
        except OSError:
            return self.file_bytes

    # ------------------------------------------------------------ appending

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
                piece = failpoints.clip(f"{self.place}.append", data) if failpoints.ACTIVE else data
                written = os.pwrite(fd, piece, position)
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
            if failpoints.ACTIVE:
                failpoints.hit(f"{self.place}.before_create")
            os.makedirs(self.folder, exist_ok=True)
            os.close(disk.open_file(path, os.O_RDWR | os.O_CREAT, self.place))
            fd = self._fds.write_fd(path)
            if failpoints.ACTIVE:
                failpoints.hit(f"{self.place}.inside_create")
            disk.resize(fd, self.file_bytes, self.place)
        except OSError as error:
            # One without its size would be taken for whole at the next try, and refused by its size at the next start.
            self._fds.drop(path)
            with contextlib.suppress(OSError):
                disk.unlink(path, self.place)
            kind = DiskFullError if error.errno in _NO_SPACE else StoreError
            raise kind(f"cannot make a file of the queue: {error.strerror}", path=path) from error
        return fd

    def start_flush(self) -> None:
        """Let the device begin with what :meth:`flush` will wait for: many queues are then flushed in little time."""
        for base in self._dirty or ():
            with contextlib.suppress(OSError):  # the sync will meet it too
                start_writeback(self._fds.write_fd(self._path(base)))

    def unsynced_descriptors(self) -> list[int]:
        """New descriptors of the files that :meth:`flush` would sync, for the caller to sync and close. Raises StoreError."""
        fds: list[int] = []
        try:
            for base in sorted(self._dirty or ()):
                fds.append(os.dup(self._fds.write_fd(self._path(base))))
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise sync_error(error, self.folder) from error
        return fds

    def folders_to_sync(self) -> set[str]:
        """The folders that :meth:`flush` would sync."""
        return self._folders_of_names() if self._made and os.path.isdir(self.folder) else set()

    def hand_over_unsynced(self) -> None:
        """Leave to the caller, who has taken the descriptors and the folders, what :meth:`flush` would do."""
        self._dirty = None
        self._made = False

    def flush(self, folders: set[str] | None = None) -> None:
        """fdatasync what was appended since the last call, and the names of files made since.

        With ``folders`` the names are left to the caller: the folders that must be synced for them are added to it.
        Raises SyncLaterError, and another StoreError when the device refused.
        """
        named = set[str]() if folders is None else folders
        try:
            for base in sorted(self._dirty or ()):
                fd = self._fds.write_fd(self._path(base))
                if failpoints.ACTIVE:
                    failpoints.hit(f"{self.place}.before_fdatasync")
                disk.sync(fd, self.place)
            named |= self.folders_to_sync()
            if folders is None:
                sync_folders(named)
        except OSError as error:
            raise sync_error(error, self.folder) from error
        self._dirty = None
        self._made = False

    def _folders_of_names(self) -> set[str]:
        """The queue's folder may be new, its topic's too, and the one for all queues of this kind: their names lie in the
        three folders above.
        """
        topic = os.path.dirname(self.folder)
        kind = os.path.dirname(topic)
        return {self.folder, topic, kind, os.path.dirname(kind)}

    def expect_unsynced(self, at: int) -> None:
        """Count everything from logical byte ``at`` on as not flushed: a process that died may not have come to it."""
        if self._first < 0 or at >= self._end:
            return
        at = max(at, self._first)
        # Written once more: should a sync of that process have failed, the kernel calls these pages clean.
        self._write_at(at, self._read(at, self._end - at))
        self._dirty = {*(self._dirty or ()), *range(at - at % self.file_bytes, self._end, self.file_bytes)}
        self._made = True

    # ------------------------------------------------------------ cutting

    def destroy(self) -> None:
        """Delete every file of the queue and its folder."""
        self._forget(self._list_files(repair=True, limit=0))
        try:
            os.rmdir(self.folder)
        except OSError:
            return  # something that is not ours lies in it, or it was never made

    def _forget(self, bases: list[int], *, durable: bool = True) -> None:
        for base in reversed(bases):
            self._delete(base)
        self._first, self._end = -1, 0
        self.max_physical_offset = -1
        self._dirty = None
        if bases and durable:
            self.flush()

    def _cut(self, bases: list[int], *, durable: bool = True) -> None:
        """Delete the files that begin at or behind the end, zero what is behind it in the one before."""
        for base in reversed(bases):
            if base < self._end:
                self._zero_behind_end(base)
                break
            self._delete(base)
        if self.is_dirty and durable:
            self.flush()

    def _zero_behind_end(self, base: int) -> None:
        """Write zeros over what is not zero behind the end; holes of the sparse file stay holes."""
        position = self._end - base
        path = self._path(base)
        while position < self.file_bytes:
            try:
                fd = self._fds.read_fd(path)
                position = os.lseek(fd, position, os.SEEK_DATA)
                hole = os.lseek(fd, position, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                raise StoreError(f"cannot read the queue: {error.strerror}", path=path) from error
            data = self._pread(base, position, min(1 << 16, max(hole, position + 1) - position))
            if data != bytes(len(data)):
                # No more than needed: zeros beyond would take blocks, and be read again at every start.
                blank, used = len(data) - len(data.lstrip(b"\0")), len(data.rstrip(b"\0"))
                self._pwrite(base, position + blank, bytes(used - blank))
            position += len(data)

    def _delete_first(self, *, is_next: bool) -> None:
        """Delete the first of several files; ``is_next``: one was deleted just before it."""
        if is_next:
            # After a power cut no file may be missing between two others.
            sync_folder(Path(self.folder))
        self._delete(self._first)
        self._first += self.file_bytes

    def _pass_deleted(self) -> None:
        """As a reader: notice that the owner has deleted files at the queue's beginning."""
        while self._first < self._end - self.file_bytes and not os.path.exists(self._path(self._first)):
            self._first += self.file_bytes

    def _delete(self, base: int) -> None:
        path = self._path(base)
        self._fds.drop(path)
        self._made = True
        if self._dirty:
            self._dirty.discard(base)
        if failpoints.ACTIVE:
            failpoints.hit("queue.before_delete")
        try:
            disk.unlink(path, self.place)
        except FileNotFoundError:
            return

    def _path(self, base: int) -> str:
        return f"{self.folder}/{segment_name(base)}"


def sync_error(error: OSError, path: str | Path) -> StoreError:
    """What to raise when a sync of queues met ``error``."""
    kind = SyncLaterError if error.errno in disk.NO_DESCRIPTOR else StoreError
    return kind(f"cannot flush the queue: {error.strerror}", path=path)


def sync_folders(folders: set[str]) -> None:
    """Make names in ``folders`` durable, and take each that is done out of the set. Raises OSError."""
    # The deepest first: a folder's name is worth nothing before what it holds.
    for folder in sorted(folders, key=lambda path: path.count("/"), reverse=True):
        if os.path.isdir(folder):
            sync_folder(Path(folder))
        folders.discard(folder)


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
