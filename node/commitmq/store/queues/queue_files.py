"""The files of a queue's units, of any kind: sparse files of one size, named after their first byte.

A queue grows only at its end, byte by byte (*logical bytes*, counted from the queue's beginning). Cut bytes are zeroed,
because a stale unit left there would become valid again once the queue has grown to it. Blocks are allocated with the
units: 10,000 preallocated queues would take 60 GB. :class:`QueueBytes`
reads them, and :class:`LogProof` proves by the log that a unit is right.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import start_writeback, sync_folder, write_all
from commitmq.files.disk_space import kind_of
from commitmq.files.fd_cache import FdCache
from commitmq.files.mapped_file import check_size, list_segments, list_sizes
from commitmq.format.constants import (
    BODY_SIZE_OFFSET,
    HOST_BYTES,
    HOST_V6_BYTES,
    MAGIC_V1,
    MAGIC_V2,
    PREBLANK_SIZE,
    SysFlag,
)
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT_HEAD
from commitmq.store.log.commit_log import CommitLog

_TAIL_BYTES: Final = 4096
_TAIL_UNITS: Final = 4096
_PIECE_UNITS: Final = 50_000

Span = tuple[int, int]
"""Begin and end of a unit's record in the log; ``(-1, -1)`` for a place that is taken without a record."""

Proof = Callable[[int, int, int], bool]
"""Whether the log, at ``(queue_offset, physical_offset, size)``, has this queue's record of that number."""


def _default_fds() -> FdCache:
    global _shared_fds
    if _shared_fds is None:
        _shared_fds = FdCache()
    return _shared_fds


def close_shared_files() -> None:
    """Close the files that queues without their own cache have open: their names now belong to other files."""
    if _shared_fds is not None:
        _shared_fds.close()


_shared_fds: FdCache | None = None


class QueueBytes:
    """The bytes of one queue as its files have them, of any kind of units: reads, and the search for the last unit.

    Logical bytes are counted from the queue's beginning, and each file is named after its first one
    (:mod:`commitmq.store.queues.queue_files`).

    Objects are small and hold no descriptor: a node has thousands of them, all sharing one :class:`FdCache`. One process
    writes a queue, others only read it.

    The bytes of one queue in ``folder``. Nothing here writes.
    """

    __slots__ = ("_end", "_fds", "_first", "file_bytes", "folder", "max_physical_offset")

    unit_bytes: ClassVar[int]

    def __init__(self, folder: Path | str, file_bytes: int, fds: FdCache | None = None) -> None:
        """Reads nothing yet. ``file_bytes`` must be a multiple of a unit's size."""
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
        """End of the last unit's record in the log, -1 when there is none: records below it need no unit any more."""

    @property
    def key(self) -> tuple[str, int]:
        """Topic and queue id, from the names of the folder and of its parent."""
        above, queue_id = os.path.split(self.folder)
        return os.path.basename(above), int(queue_id)

    @property
    def has_files(self) -> bool:
        """False until the first unit is appended (or found)."""
        return self._first >= 0

    @property
    def first_byte(self) -> int:
        """Logical byte at which the first file begins; -1 without a file."""
        return self._first

    @property
    def end_byte(self) -> int:
        """Logical byte behind the last unit."""
        return self._end

    # ------------------------------------------------------------ reading

    def _path(self, base: int) -> str:
        return f"{self.folder}/{segment_name(base)}"

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

    def broken_file(self, *, whole: bool = False) -> str | None:
        """A file whose units' records do not follow each other; None when no such file is found.

        Unless the ``whole`` queue is to be read, the search is bounded: the first and the last unit of each file, and the
        newest :data:`_TAIL_UNITS` of the queue.
        """
        size, previous = self.unit_bytes, 0
        heads = np.dtype({"names": ["at", "size"], "formats": [">i8", ">i4"], "offsets": [0, 8], "itemsize": size})
        tail = self._end - _TAIL_UNITS * size
        for base in range(max(0, self._first), self._end, self.file_bytes):
            stop = min(self.file_bytes, self._end - base)
            pieces = [(at, min(stop, at + _PIECE_UNITS * size)) for at in range(0, stop, _PIECE_UNITS * size)]
            if not whole:
                pieces = [(0, size), (max(size, min(stop - size, tail - base)), stop)]
            for start, end in pieces:
                data = self._pread(base, start, end - start)
                units = np.frombuffer(data, heads, len(data) // size)
                places, sizes = units["at"].astype(np.int64), units["size"].astype(np.int64)
                is_blank = (places == 0) & (sizes == PREBLANK_SIZE)
                ends = np.maximum.accumulate(np.append(previous, np.where(is_blank, 0, places + sizes)))
                good = is_blank | ((sizes > 0) & (places >= ends[:-1]))
                if len(units) * size < end - start or not good.all():
                    return self._path(base)
                previous = int(ends[-1])
        return None

    # ------------------------------------------------------------ finding the end

    def _span(self, unit: bytes) -> Span | None:
        """The record that a unit's bytes point at, None when nothing was written there (or nothing that can be valid).
        Here none: the bytes have no units of one size unless a subclass says how to read them.
        """
        return None

    def _last_unit(self, bases: list[int], limit: int) -> int:
        """Logical byte of the last unit whose record begins below ``limit``, found with a handful of reads; -1 if there
        is none.

        The result is right if the valid units are contiguous from the beginning on, with growing physical offsets, and
        the bytes behind them are zero or point at or above ``limit``. Other bytes behind the end can mislead the search
        (units before it cannot: the result is a unit, and the place behind it is not). So the caller needs a
        :data:`Proof` of the unit, or must read them all.
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
        """Number of the last unit in a file whose first unit is good and whose record ends at ``end``. Raises OSError."""
        size = self.unit_bytes
        low, high = 0, -(-self._data_end(fd) // size)
        start = max(1, high - _TAIL_BYTES // size)
        if start < high:
            # Files are sparse: the end of the data is usually the end of the units, to within a block.
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
        """Where the first hole of a file begins; the file's size on a file system that does not report holes."""
        try:
            return min(self.file_bytes, os.lseek(fd, 0, os.SEEK_HOLE))
        except OSError:
            return self.file_bytes


# Size, magic, queue id, queue offset, physical offset, sysFlag of a record (spec 2.1).
_HEAD: Final = struct.Struct(">ii4xi4xqqi")
_SEARCH_BYTES: Final = 1 << 16
_HOST_BYTES: Final = {False: HOST_BYTES, True: HOST_V6_BYTES}


def has_record_before(log: CommitLog, offset: int) -> bool:
    """Whether a record ends at physical ``offset``. At a segment's beginning, where a filler may end, that counts as
    proven. The record's length is unknown, so its head is searched backwards. Nearly always it is near.
    """
    base = offset - offset % log.segment_bytes
    end = offset - base
    if not end:
        return True
    segment = log.read(base, log.segment_bytes)
    magics = [struct.pack(">i", magic) for magic in (MAGIC_V1, MAGIC_V2)]
    stop = end
    while stop > 0:
        start = max(0, stop - _SEARCH_BYTES)
        # This piece contains exactly the heads that begin before ``stop``.
        piece = bytes(segment[start : min(end, stop + _HEAD.size)])
        for magic in magics:
            at = piece.rfind(magic)
            while at >= 4:
                if len(piece) - at + 4 >= _HEAD.size:
                    size, _, _, _, position, _ = _HEAD.unpack_from(piece, at - 4)
                    if (start + at - 4 + size, position) == (end, base + start + at - 4):
                        return True
                at = piece.rfind(magic, 0, at)
        stop = start
    return False


class LogProof:
    """Proves from the CommitLog that a queue's unit is right: see :data:`commitmq.store.queues.queue_files.Proof`.

    A queue's files may hold stale units behind their end: RocketMQ does not zero cut units, and a power cut leaves some
    pages and not others. The log has no such leftovers below its end, and a record contains its topic, queue and queue
    offset. So reading the record of the last unit proves more than all units before it.

    Records are read with pread instead of through a map: the records of many queues are scattered over the log, and a page
    fault would read unwanted pages around each.

    Finds records in the log in ``folder``. Not thread-safe. Not for RocketMQ's LMQ queues, which records list as
    properties: for them it proves nothing.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        """Raises StoreError or SegmentSizeError when the log's files are damaged."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        bases = list_segments(folder, segment_bytes)
        self._min_offset = bases[0] if bases else 0
        self._fds = FdCache(64)

    def of(self, topic: str, queue_id: int) -> Proof:
        """The proof for units of one queue. A record that expired counts as proven: then nothing of the queue can be
        read any more, and the position of its end does not matter as long as it does not go back.
        """
        name = topic.encode()

        def is_record(queue_offset: int, physical_offset: int, size: int) -> bool:
            if physical_offset + size <= self._min_offset:
                return True
            head = self._read(physical_offset, _HEAD.size)
            if len(head) < _HEAD.size:
                return False
            found_size, magic, found_queue, found_offset, position, sys_flag = _HEAD.unpack(head)
            if (found_size, found_queue, found_offset, position) != (size, queue_id, queue_offset, physical_offset):
                return False
            if magic not in (MAGIC_V1, MAGIC_V2):
                return False
            hosts = (
                _HOST_BYTES[bool(sys_flag & SysFlag.BORN_HOST_V6)] + _HOST_BYTES[bool(sys_flag & SysFlag.STORE_HOST_V6)]
            )
            at = physical_offset + BODY_SIZE_OFFSET + hosts
            length = self._read(at, 4)
            if len(length) < 4:
                return False
            wide = magic == MAGIC_V2
            prefix = len(name).to_bytes(2 if wide else 1, "big") if len(name) < (1 << 15 if wide else 1 << 8) else b"?"
            wanted = prefix + name
            at += 4 + max(0, struct.unpack(">i", length)[0])
            return at + len(wanted) <= physical_offset + size and self._read(at, len(wanted)) == wanted

        return is_record

    def close(self) -> None:
        self._fds.close()

    def _read(self, offset: int, size: int) -> bytes:
        base = offset - offset % self._segment_bytes
        try:
            return os.pread(self._fds.read_fd(f"{self._folder}/{segment_name(base)}"), size, offset - base)
        except OSError:
            return b""


class SyncLaterError(StoreError):
    """A file to be synced could not be opened, for lack of a descriptor: nothing is lost, and a later try may succeed.
    After any other error of a sync the kernel marks the pages clean, so that no later try proves anything.
    """


class QueueFiles(QueueBytes):
    """Files of one queue in ``folder``, with the operations that change them; the base of every kind of queue."""

    __slots__ = ("_dirty", "_made")

    place: ClassVar[str] = "queue"
    """Prefix of its failpoints."""

    def __init__(self, folder: Path | str, file_bytes: int, fds: FdCache | None = None) -> None:
        """Reads nothing yet. ``file_bytes`` must be a multiple of a unit's size."""
        super().__init__(folder, file_bytes, fds)
        self._dirty: set[int] | None = None  # files written since the last flush
        self._made = False  # a file was made or deleted since the last flush

    @property
    def is_dirty(self) -> bool:
        """True when :meth:`flush` has something to do."""
        return bool(self._dirty) or self._made

    @property
    def unsynced_files(self) -> int:
        """How many files :meth:`flush` has to sync."""
        return len(self._dirty or ())

    # ------------------------------------------------------------ listing

    def _list_files(self, *, repair: bool, limit: int | None = None) -> list[int]:
        """Base offsets of the files, ascending. Raises SegmentSizeError, and StoreError for a missing file between two
        others.

        Units that point at or above ``limit`` were not synced when the node ended: there, a power cut may have taken a
        file, or its size, and left later ones. With ``repair`` such files are deleted.
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
        """Whether a file's first unit points below ``limit``; always True without a limit."""
        if limit is None:
            return True
        head = self._pread(base, 0, UNIT_HEAD.size)
        offset, size = UNIT_HEAD.unpack(head) if len(head) == UNIT_HEAD.size else (0, 0)
        return bool(size > 0 and offset < limit)

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
            write_all(fd, data, position, place=f"{self.place}.append")
        except OSError as error:
            kind = kind_of(error)
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
            # A file without its size would be taken for complete at the next try, and refused by its size at the next
            # start.
            self._fds.drop(path)
            with contextlib.suppress(OSError):
                disk.unlink(path, self.place)
            kind = kind_of(error)
            raise kind(f"cannot make a file of the queue: {error.strerror}", path=path) from error
        return fd

    def start_flush(self) -> None:
        """Start the write-back that :meth:`flush` will wait for: many queues are then flushed in little time."""
        for base in self._dirty or ():
            with contextlib.suppress(OSError):  # the sync will meet the error too
                start_writeback(self._fds.write_fd(self._path(base)))

    def unsynced_descriptors(self) -> list[int]:
        """New descriptors of the files that :meth:`flush` would sync; the caller syncs, closes them. Raises StoreError."""
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
        """Count everything as flushed: the caller has taken the descriptors and folders and does the sync."""
        self._dirty = None
        self._made = False

    def flush(self, folders: set[str] | None = None) -> None:
        """fdatasync the units appended since the last call, and the names of files made since.

        With ``folders`` the caller syncs the names: the folders that need a sync are added to the set. Raises
        SyncLaterError, and another StoreError when the device reports an error.
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
        """The queue's folder, its topic's and its kind's may be new: their names are in the three folders above."""
        topic = os.path.dirname(self.folder)
        kind = os.path.dirname(topic)
        return {self.folder, topic, kind, os.path.dirname(kind)}

    def expect_unsynced(self, at: int) -> None:
        """Count everything from logical byte ``at`` on as unflushed: a process that died may not have flushed it."""
        if self._first < 0 or at >= self._end:
            return
        at = max(at, self._first)
        # Write it again: if a sync of that process failed, the kernel counts these pages as clean.
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
            return  # the folder has foreign files, or was never made

    def _forget(self, bases: list[int], *, durable: bool = True) -> None:
        for base in reversed(bases):
            self._delete(base)
        self._first, self._end = -1, 0
        self.max_physical_offset = -1
        self._dirty = None
        if bases and durable:
            self.flush()

    def _cut(self, bases: list[int], *, durable: bool = True) -> None:
        """Delete the files that begin at or behind the end, and zero the bytes behind it in the file before."""
        for base in reversed(bases):
            if base < self._end:
                self._zero_behind_end(base)
                break
            self._delete(base)
        if self.is_dirty and durable:
            self.flush()

    def _zero_behind_end(self, base: int) -> None:
        """Zero the nonzero bytes behind the end; holes of the sparse file stay holes."""
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
                # No more than needed: further zeros would take blocks, and be read again at every start.
                blank, used = len(data) - len(data.lstrip(b"\0")), len(data.rstrip(b"\0"))
                self._pwrite(base, position + blank, bytes(used - blank))
            position += len(data)

    def _delete_first(self, *, is_next: bool) -> None:
        """Delete the first of several files; ``is_next``: another one was deleted just before."""
        if is_next:
            # A power cut must not leave a missing file between two others.
            sync_folder(Path(self.folder))
        self._delete(self._first)
        self._first += self.file_bytes

    def _pass_deleted(self) -> None:
        """For a reader: notice that the owner has deleted files at the queue's beginning."""
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


def sync_error(error: OSError, path: str | Path) -> StoreError:
    """The exception to raise when a sync of queues failed with ``error``."""
    kind = SyncLaterError if error.errno in disk.NO_DESCRIPTOR else StoreError
    return kind(f"cannot flush the queue: {error.strerror}", path=path)


def sync_folders(folders: set[str]) -> None:
    """Make names in ``folders`` durable, and remove each synced folder from the set. Raises OSError."""
    # Deepest folder first: a folder's durable name is worth nothing before its content is durable.
    for folder in sorted(folders, key=lambda path: path.count("/"), reverse=True):
        if os.path.isdir(folder):
            sync_folder(Path(folder))
        folders.discard(folder)


def list_queues(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """``(topic, queue id, folder of the queue)`` of every queue under ``consumequeue/``, sorted. A sub-folder that is
    not a queue number is skipped, as in RocketMQ (spec 8.1).
    """
    try:
        topics = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except FileNotFoundError:
        return
    for topic in topics:
        numbers = [entry.name for entry in os.scandir(folder / topic) if entry.is_dir() and entry.name.isascii()]
        for number in sorted((name for name in numbers if name.isdigit()), key=int):
            yield topic, int(number), folder / topic / number
