"""Warms the page cache ahead of the log's tail, and locks segments into memory on request.

Owns nothing and changes nothing in a file: pages are read in through read-only mappings, so none becomes dirty (a whole
segment populated for writing made the next fdatasync of 256 MiB take 75 ms instead of 0.2).

Why: the writer's first store into a page that is not in the cache makes the kernel read around it. A fresh segment has
nothing to read, but the kernel zeroes all those pages while the writer waits: with 8 MiB of read-ahead a first store
took 1.4 to 22 ms, and 20 microseconds after another process had read the pages in (``MADV_POPULATE_READ``, Linux 5.14).
The writer still maps its own window for writing (see ``populate_ahead`` in :mod:`commitmq.store.log.append`). With the
pages in the cache that takes half the time, and a 256 KiB piece takes 0.3 ms at most instead of 5.

Only a window ahead of the tail is read in, not the whole segment: the window bounds the memory, and pages read in too
early may be evicted again.

No huge pages: ``MADV_HUGEPAGE`` on segments was tried and left out. It quartered the time of bulk stores into cold
pages, but reading the pages in does that too. Each small append that is flushed then dirties 2 MiB: for 3,000 flushed
appends of 1,100 bytes the device wrote 2 MiB each instead of 5 KiB, and an fdatasync took 470 instead of 96
microseconds (ext4, Linux 6.18). On pages that were read in before it changed nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Final

import numpy as np

from commitmq.control import Word
from commitmq.errors import StoreError
from commitmq.files.mapped_file import MappedFile
from commitmq.files.writeback import start_writeback
from commitmq.format.file_names import segment_name
from commitmq.workers.runtime.context import WorkerContext

_MADV_POPULATE_READ: Final = 22  # the mmap module has no name for it yet
_STEP_BYTES: Final = 4 << 20


class SegmentMemory:
    """Warms and locks the segments from the tail on, for the allocate process."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._control = context.control
        self._folder = context.layout.commit_log
        self._segment_bytes = context.config.commit_log.segment_bytes
        self._window_bytes = context.config.commit_log.warm_ahead_bytes
        self._locks = context.config.commit_log.mlock
        self._populated_bytes = context.config.commit_log.populate_window_bytes
        self._warm_end = 0
        self._locked: dict[int, mmap.mmap] = {}

    def work(self) -> None:
        """Follow the tail: read in, write back, lock."""
        if self._window_bytes:
            self._warm()
        if self._locks or self._locked:
            self._lock()
        if self._populated_bytes:
            self._write_back()

    def close(self) -> None:
        """Unlock everything."""
        for mapping in self._locked.values():
            mapping.close()
        self._locked.clear()

    def _warm(self) -> None:
        """Read in the missing part of the window behind ``written``."""
        written = self._control.get(Word.WRITTEN)
        start = max(self._warm_end, written)
        end = min(written + self._window_bytes, self._control.get(Word.ALLOCATED))
        # Read in steps large enough for a mapping, but never stop short of a segment's end.
        if end - start < min(_STEP_BYTES, self._window_bytes // 2) and end % self._segment_bytes:
            return
        while start < end:
            base = start - start % self._segment_bytes
            stop = min(end, base + self._segment_bytes)
            try:
                segment = MappedFile(self._folder / segment_name(base), base, self._segment_bytes)
                try:
                    first = start - base
                    for at in range(first - first % mmap.PAGESIZE, stop - base, _STEP_BYTES):
                        segment.advise(_MADV_POPULATE_READ, at, min(_STEP_BYTES, stop - base - at))
                finally:
                    segment.try_close()
            except (StoreError, OSError) as error:
                # An older kernel, or little memory: the writer's stores then fault page by page.
                self._context.log.warning("the pages ahead of the log cannot be read in", error=str(error))
                self._window_bytes = 0
                return
            self._warm_end = start = stop

    def _write_back(self) -> None:
        """Make the device write the pages that the writer has populated in the next segment, once its window reaches
        there.

        Populated pages are dirty. Within a segment each flush finds a few of them. At a roll the first flush would find
        the whole window, and the send that rolled would wait for it.
        """
        written = self._control.get(Word.WRITTEN)
        following = written - written % self._segment_bytes + self._segment_bytes
        if written + self._populated_bytes <= following or self._control.get(Word.ALLOCATED) <= following:
            return
        # Errors do not matter here: these pages hold no records yet, and flush syncs them when they do.
        with contextlib.suppress(OSError):
            fd = os.open(self._folder / segment_name(following), os.O_RDWR | os.O_CLOEXEC)
            try:
                start_writeback(fd)
            finally:
                os.close(fd)

    def _lock(self) -> None:
        """Lock the segments from the tail to the last existing one; unlock those that are flushed."""
        flushed = self._control.get(Word.FLUSHED)
        for base in [base for base in self._locked if base + self._segment_bytes <= flushed]:
            self._locked.pop(base).close()
        written = self._control.get(Word.WRITTEN)
        for base in range(
            written - written % self._segment_bytes, self._control.get(Word.ALLOCATED), self._segment_bytes
        ):
            if base in self._locked or not self._locks:
                continue
            try:
                self._locked[base] = lock_file(self._folder / segment_name(base))
            except OSError as error:
                # Only speed is lost. Locked segments stay locked, so that a limit that allows some of them is used.
                self._context.log.warning(
                    "segments cannot be locked into memory: see the limit of locked memory (ulimit -l)",
                    segment=segment_name(base),
                    error=os.strerror(error.errno or 0),
                )
                self._context.tell(mlock=f"not locked: {os.strerror(error.errno or 0)}")
                self._locks = False


def lock_file(path: os.PathLike[str]) -> mmap.mmap:
    """A read-only mapping of a file. All its pages are in memory and stay there while it is mapped. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    library = ctypes.CDLL(None, use_errno=True)
    # numpy gives the address of a read-only buffer, ctypes does not.
    if library.mlock(ctypes.c_void_p(np.frombuffer(mapping, np.uint8).ctypes.data), ctypes.c_size_t(len(mapping))):
        number = ctypes.get_errno()
        with contextlib.suppress(BufferError):
            mapping.close()
        raise OSError(number, os.strerror(number), os.fspath(path))
    return mapping
