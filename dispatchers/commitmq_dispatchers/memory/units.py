"""The unit files of one queue of a memory topic; they keep only the memory that readers may still need.

Units that point below the topic's floor are freed by whole files, and in the first needed file by whole pages, which
are given back to the file system (a hole: its bytes read as zeros, the size stays). The last unit of a queue always
stays, so that another process finds the next queue offset: behind the last unit, or in the name of a file without
units. So a queue whose messages are all evicted keeps one page, or two where its last unit crosses their border.

Every method that frees or takes memory returns its size in bytes of pages, because the kernel counts pages for the
files.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from commitmq.files.fd_cache import FdCache
from commitmq.files.write_all import write_all
from commitmq.format.constants import UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT, UNIT_STRUCT
from commitmq.store.memory.memory_files import UNIT_FILE_BYTES
from commitmq.store.memory.shared_memory import PAGE_BYTES


class UnitFiles:
    """``next``: the next message's queue offset. Files are known by their first byte, ``first`` and ``last``; ``last``
    is -1 without a file. The first ``hole`` bytes of the first file are given back; ``allocated`` is where the pages of
    the last file end.
    """

    __slots__ = ("_fds", "allocated", "first", "folder", "hole", "last", "next")

    def __init__(self, folder: Path, fds: FdCache) -> None:
        self.folder = os.fspath(folder)
        self._fds = fds
        self.next = 0
        self.first = 0
        self.last = -1
        self.allocated = 0
        self.hole = 0

    def _path(self, base: int) -> str:
        return f"{self.folder}/{segment_name(base)}"

    # ------------------------------------------------------------ writing

    def reserve(self, count: int, allocate: Callable[[int, int, int], None]) -> None:
        """Allocate the places of the next ``count`` units with ``allocate(descriptor, start, size)``."""
        start, stop = self.next * UNIT_BYTES, (self.next + count) * UNIT_BYTES
        for base in range(start - start % UNIT_FILE_BYTES, stop, UNIT_FILE_BYTES):
            if base < self.last:
                continue  # fully allocated for an append that then failed
            if base != self.last:
                self._make(base)
            needed = min(UNIT_FILE_BYTES, pages(stop - base))
            if needed > self.allocated:
                allocate(self._fds.write_fd(self._path(base)), self.allocated, needed - self.allocated)
                self.allocated = needed

    def _make(self, base: int) -> None:
        if self.last < 0:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            self.first = base
        fd = os.open(self._path(base), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, UNIT_FILE_BYTES)
        finally:
            os.close(fd)
        self.last, self.allocated = base, 0

    def give_up_reserve(self) -> int:
        """Free the memory that :meth:`reserve` took for a run that was then refused; returns the bytes."""
        if self.last < 0:
            return 0
        freed = 0
        end = self.next * UNIT_BYTES
        while self.last > self.first and self.last >= end:
            self._unlink(self.last)
            freed += self.allocated
            self.last, self.allocated = self.last - UNIT_FILE_BYTES, UNIT_FILE_BYTES
        kept = pages(end - self.last)
        if kept < self.allocated:
            self._cut(kept)
            freed += self.allocated - kept
            self.allocated = kept
        return freed

    def write(self, data: bytes) -> None:
        """Write the units of the next messages, whose places are reserved; ``next`` does not change."""
        at = self.next * UNIT_BYTES
        view = memoryview(data)
        while len(view):
            base = at - at % UNIT_FILE_BYTES
            piece = view[: base + UNIT_FILE_BYTES - at]
            write_all(self._fds.write_fd(self._path(base)), piece, at - base)
            at += len(piece)
            view = view[len(piece) :]

    def _cut(self, size: int) -> None:
        """Empty the last file from byte ``size`` on. Readers never look there: it is behind the acknowledged messages."""
        fd = self._fds.write_fd(self._path(self.last))
        os.ftruncate(fd, size)
        os.ftruncate(fd, UNIT_FILE_BYTES)

    def _unlink(self, base: int) -> None:
        path = self._path(base)
        self._fds.drop(path)
        os.unlink(path)

    # ------------------------------------------------------------ evicting

    def expire(self, floor: int) -> int:
        """Free files and pages whose units all point below ``floor``; returns the bytes."""
        freed = 0
        while self.first < self.last and self._is_below(self.first + UNIT_FILE_BYTES, floor):
            self._unlink(self.first)
            self.first += UNIT_FILE_BYTES
            freed += UNIT_FILE_BYTES - self.hole
            self.hole = 0
        # The last unit stays; for a queue of few units this returns without reading its file.
        stop = min((self.next - 1) * UNIT_BYTES - self.first, UNIT_FILE_BYTES) // PAGE_BYTES
        low, high = self.hole // PAGE_BYTES, stop
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_below(self.first + middle * PAGE_BYTES, floor):
                low = middle
            else:
                high = middle - 1
        end = low * PAGE_BYTES
        if end > self.hole and self._punch(end):
            freed += end - self.hole
            self.hole = end
        return freed

    def _is_below(self, end: int, floor: int) -> bool:
        """Whether the last unit that begins before byte ``end`` of the queue is written and points below ``floor``."""
        number = -(-end // UNIT_BYTES) - 1
        if number >= self.next:
            return False
        at = number * UNIT_BYTES
        base = at - at % UNIT_FILE_BYTES
        data = os.pread(self._fds.write_fd(self._path(base)), UNIT_BYTES, at - base)
        physical: int = UNIT_STRUCT.unpack(data)[0]
        return physical < floor

    def _punch(self, end: int) -> bool:
        """Give back the pages of the first file up to ``end``; False on a file system without holes."""
        with mmap.mmap(self._fds.write_fd(self._path(self.first)), UNIT_FILE_BYTES) as mapped:
            try:
                mapped.madvise(mmap.MADV_REMOVE, self.hole, end - self.hole)
            except OSError:
                return False
        return True

    # ------------------------------------------------------------ taking over

    def reopen(self, bound: int) -> int:
        """Take over another process's files: units that point behind ``bound`` are cut, and the first of them is
        ``next``. Returns the allocated bytes.
        """
        bases = sorted(int(name) for name in os.listdir(self.folder))
        if not bases:
            return 0
        self.first = bases[0]
        while True:
            self.last = bases[-1]
            data = np.fromfile(self._path(self.last), UNIT)
            ends = data["physical_offset"].astype(np.int64) + data["size"]
            # A file may begin with a hole: the position of the last unit counts, not the number of units.
            written = np.flatnonzero((data["size"] > 0) & (ends <= bound))
            if len(written) or len(bases) == 1:
                break
            self._unlink(bases.pop())
        count = int(written[-1]) + 1 if len(written) else 0
        self.next = self.last // UNIT_BYTES + count
        self.allocated = pages(count * UNIT_BYTES)
        self._cut(count * UNIT_BYTES)
        there = np.flatnonzero(np.fromfile(self._path(self.first), np.uint8))
        self.hole = int(there[0]) // PAGE_BYTES * PAGE_BYTES if len(there) else 0
        if self.allocated:
            start = self.hole if self.first == self.last else 0
            os.posix_fallocate(self._fds.write_fd(self._path(self.last)), start, self.allocated - start)
        return (len(bases) - 1) * UNIT_FILE_BYTES + self.allocated - self.hole


def pages(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
