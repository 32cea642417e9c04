"""The bytes of one queue as its files have them, of any kind of units: reads, and the search for the last unit.

Logical bytes are counted from the queue's beginning, and each file is named after its first one
(:mod:`commitmq.store.queues.queue_files`).

Objects are small and hold no descriptor: a node has thousands of them, all sharing one :class:`FdCache`. One process
writes a queue, others only read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import PREBLANK_SIZE
from commitmq.format.file_names import segment_name

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
    """The bytes of one queue in ``folder``. Nothing here writes."""

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
        """The record that a unit's bytes point at, None when nothing was written there (or nothing that can be valid)."""
        raise NotImplementedError

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
