"""One IndexFile: finds records by the hash of a key (spec 4.1, 4.2).

    0             beginTimestamp i8    store time (ms) of the first record, for choosing files by time
    8             endTimestamp i8      of the newest
    16            beginPhyOffset i8    physical offset of the first record
    24            endPhyOffset i8      of the newest: a rebuild begins there
    32            hashSlotCount i4     slots in use
    36            indexCount i4        number of the next item; 1 in a fresh file, so that 0 can mean "none"
    40            slots i4             newest item of each chain
    40 + 4 slots  items of 20 bytes    keyHash i4, phyOffset i8, seconds after beginTimestamp i4, previous item i4

The file has its full size from the start and is mapped for writing; written parts are allocated before, because a store
into a hole on a full disk is SIGBUS. Order of stores: an item, its slot, the header's ends, and last slots in use and
indexCount, which share one word. So a process that dies anywhere leaves a header that counts complete items only, and
:meth:`IndexFile.repair` finds the items behind them through the slots and removes them.
"""

from __future__ import annotations

import os
import struct
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import write_all
from commitmq.files.disk_space import kind_of
from commitmq.format.index import (
    HEADER_BYTES,
    ITEM_BYTES,
    SLOTS_AND_COUNT,
    IndexHeader,
    IndexShape,
    check_file_size,
    header_of,
    host_order,
)
from commitmq.kernels import codes, compiled
from commitmq.kernels.compiled import check_chains, find_strays, items_below, undo

_ALLOCATE_BYTES: Final = 4 << 20

_HEADER: Final = struct.Struct(">qqqqii")

State = NDArray[np.int64]


class IndexFile:
    """One file, mapped for writing by the one process that owns the index."""

    def __init__(self, path: Path, shape: IndexShape) -> None:
        """Open ``path``. Raises StoreError for a wrong size, DiskFullError when its slots cannot be allocated."""
        self.path = path
        self.shape = shape
        self._fd = -1
        try:
            self._fd = disk.open_file(path, os.O_RDWR, "index")
            check_file_size(path, os.fstat(self._fd).st_size, shape)
            self._map = disk.map_file(self._fd, shape.file_bytes, "index")
        except OSError as error:
            self._close_fd()
            raise StoreError(f"cannot open the index file: {error.strerror}", path=path) from error
        except StoreError:
            self._close_fd()
            raise
        self._header = memoryview(self._map)[:HEADER_BYTES].cast("q")
        self.words: NDArray[np.int32] = np.frombuffer(self._map, np.int32)
        self._allocated = 0  # items below this number have disk space
        self._allocated_bytes = 0

    # ------------------------------------------------------------ header

    @property
    def header(self) -> IndexHeader:
        return header_of(self._header)

    def commit(self, state: State) -> None:
        """Store the header fields of ``state``; the word that counts the items comes last."""
        if failpoints.ACTIVE:
            failpoints.hit("index.before_header")
        self._put(0, int(state[codes.STATE_BEGIN_TIMESTAMP]))
        self._put(1, int(state[codes.STATE_END_TIMESTAMP]))
        self._put(2, int(state[codes.STATE_BEGIN_OFFSET]))
        self._put(3, int(state[codes.STATE_END_OFFSET]))
        if failpoints.ACTIVE:
            failpoints.hit("index.inside_header")
        self._put_count(int(state[codes.STATE_SLOTS]), int(state[codes.STATE_COUNT]))
        if failpoints.ACTIVE:
            failpoints.hit("index.after_header")

    def load(self, state: State) -> None:
        """Copy the header into ``state``; its fields about the newest record do not change."""
        header = self.header
        state[codes.STATE_COUNT] = header.count
        state[codes.STATE_SLOTS] = header.slots_used
        state[codes.STATE_BEGIN_TIMESTAMP] = header.begin_timestamp
        state[codes.STATE_END_TIMESTAMP] = header.end_timestamp
        state[codes.STATE_BEGIN_OFFSET] = header.begin_offset
        state[codes.STATE_END_OFFSET] = header.end_offset

    def _put(self, index: int, value: int) -> None:
        self._header[index] = host_order(value)

    def _put_count(self, slots_used: int, count: int) -> None:
        # A slot count above 2^31 is impossible, so the combined value is not negative.
        self._header[SLOTS_AND_COUNT] = host_order(slots_used << 32 | count)

    # ------------------------------------------------------------ items

    def insert(self, log: NDArray[np.uint8], base: int, rows: NDArray[np.void], state: State) -> bool:
        """Index the rows from ``state`` on and commit; True when all are indexed, False when the file is full.

        ``log`` is the segment that begins at physical offset ``base`` and holds the records. Raises DiskFullError after
        committing everything that was inserted: the same rows may be given again.
        """
        while True:
            count = int(state[codes.STATE_COUNT])
            if count >= self._allocated and count < self.shape.max_items:
                self._allocate(count)
            result = compiled.insert(
                self.words, self.shape.hash_slots, self.shape.max_items, self._allocated, log, base, rows, state
            )
            if int(state[codes.STATE_COUNT]) != count:
                self.commit(state)
            if result == codes.INSERT_DONE:
                return True
            if result == codes.INSERT_FULL:
                return False

    def item_offset(self, number: int) -> int:
        """Physical offset in item ``number``."""
        at = self.shape.item_position(number) + 4
        return int.from_bytes(self._map[at : at + 8], "big", signed=True)

    def items_of(self, offset: int) -> int:
        """Number of the newest items that belong to the record at ``offset``."""
        count = self.header.count
        return count - self.first_item_from(offset)

    def first_item_from(self, offset: int) -> int:
        """Number of the first item whose record is at or behind ``offset``; the next item's number when there is none."""
        return int(items_below(self.words, self.shape.hash_slots, self.header.count, offset))

    def cut(self, count: int, end_timestamp: int, end_offset: int) -> None:
        """Keep the items below number ``count``; the two ends are those of the newest kept record.

        The header is written first: a process that dies in between leaves items that the header does not count, and
        :meth:`repair` removes them.
        """
        used = self.header.slots_used
        self._put_count(used, count)
        self._put(1, end_timestamp)
        self._put(3, end_offset)
        if failpoints.ACTIVE:
            failpoints.hit("index.inside_cut")
        self._undo(count)

    def repair(self, end_timestamp: int, end_offset: int) -> None:
        """Remove the items that a dead process left behind the counted ones."""
        self.cut(self.header.count, end_timestamp, end_offset)

    def reset_begin(self, timestamp: int, offset: int) -> None:
        """Give a file without items its original begin."""
        self._put(0, timestamp)
        self._put(2, offset)

    def _undo(self, count: int) -> None:
        used = undo(self.words, self.shape.hash_slots, self.shape.max_items, count)
        self._put_count(int(used), count)

    # ------------------------------------------------------------ disk

    def _allocate(self, count: int) -> None:
        """Allocate the slots, and room for items from number ``count`` on."""
        end = min(self.shape.item_position(count + 1) + _ALLOCATE_BYTES, self.shape.file_bytes)
        allocate(self._fd, self._allocated_bytes, end - self._allocated_bytes, self.path)
        self._allocated_bytes = end
        self._allocated = (end - self.shape.item_position(0)) // ITEM_BYTES

    def sync(self) -> None:
        """Make the file durable. Raises OSError; then the file must not be trusted any more."""
        disk.sync(self._fd, "index")

    def close(self) -> None:
        self.words = np.empty(0, np.int32)
        self._header.release()
        self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def allocate(fd: int, position: int, size: int, path: Path) -> None:
    """Give ``size`` bytes at ``position`` disk space. Raises DiskFullError, or StoreError for another cause."""
    try:
        if failpoints.ACTIVE:
            failpoints.hit("index.before_allocate")
        disk.reserve(fd, position, size, "index")
    except OSError as error:
        raise store_error(f"cannot allocate {size} bytes of an index file", error, path) from error


def is_whole(path: Path, shape: IndexShape) -> bool:
    """Whether items are in the log's order and in their chains; reads the whole file. True for a lost file."""
    try:
        fd = disk.open_file(path, os.O_RDONLY, "index")
    except FileNotFoundError:
        return True
    try:
        check_file_size(path, os.fstat(fd).st_size, shape)
        data = disk.map_file(fd, shape.file_bytes, "index", writable=False)
    except (OSError, StoreError):
        return False
    finally:
        os.close(fd)
    header = header_of(memoryview(data)[:HEADER_BYTES].cast("q"))
    if not 1 <= header.count <= shape.max_items:
        return False
    words, out = np.frombuffer(data, np.int32), np.zeros(3, np.int64)
    heads, none = np.zeros(shape.hash_slots, np.int32), np.zeros((0, 3), np.int64)
    check_chains(words, shape.hash_slots, header.count, heads, none, none.copy(), out)
    if out[0] or out[1] or out[2] != header.slots_used:
        return False
    strays = np.zeros(header.count - 1, np.uint8)
    return not find_strays(words, shape.hash_slots, header.count, header.begin_offset, header.end_offset + 1, strays)


def file_name(now: datetime, newest: str | None) -> str:
    """The name of a new file: local time to the millisecond, moved behind ``newest`` if the clock is not (spec 1.2)."""
    name = _format(now)
    if newest is None or name > newest:
        return name
    try:
        after = datetime.strptime(newest + "000", "%Y%m%d%H%M%S%f") + timedelta(milliseconds=1)
    except ValueError:
        return f"{int(newest) + 1:017d}"
    return _format(after)


def _format(when: datetime) -> str:
    return when.strftime("%Y%m%d%H%M%S") + f"{when.microsecond // 1000:03d}"


def create(path: Path, temporary: Path, shape: IndexShape, predecessor: IndexHeader | None) -> IndexFile:
    """Make ``path`` by way of ``temporary`` (same file system), so that no process ever sees half a file.

    A file that succeeds a full one begins and ends where that one ends (spec 4.2, last paragraph). Raises DiskFullError
    or StoreError with nothing left behind.
    """
    try:
        fd = disk.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, "index")
    except OSError as error:
        raise store_error("cannot make an index file", error, temporary) from error
    try:
        try:
            disk.resize(fd, shape.file_bytes, "index")
            allocate(fd, 0, shape.item_position(1), temporary)
            stamp, offset = (0, 0) if predecessor is None else (predecessor.end_timestamp, predecessor.end_offset)
            write_all(fd, _HEADER.pack(stamp, stamp, offset, offset, 0, 1), 0, place="index.create")
        finally:
            os.close(fd)
        if failpoints.ACTIVE:
            failpoints.hit("index.before_rename")
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.rename(temporary, path, "index")
    except StoreError:
        temporary.unlink(missing_ok=True)
        raise
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise store_error("cannot make an index file", error, path) from error
    return IndexFile(path, shape)


def new_state() -> State:
    """An empty insertion state (see the kernel)."""
    state = np.zeros(codes.STATE_WORDS, np.int64)
    state[codes.STATE_LAST_OFFSET] = -1
    state[codes.STATE_COUNT] = 1
    return state


def store_error(sentence: str, error: OSError, path: Path) -> StoreError:
    """``error`` as DiskFullError, which may pass, when there is no space; else as StoreError."""
    kind = kind_of(error)
    return kind(f"{sentence}: {os.strerror(error.errno or 0)}", path=path)
