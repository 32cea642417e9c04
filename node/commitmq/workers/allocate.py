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

No huge pages: ``MADV_HUGEPAGE`` on segments was tried and omitted. It quartered the time of bulk stores into cold
pages, but reading the pages in does that too. Each small append that is flushed then dirties 2 MiB: for 3,000 flushed
appends of 1,100 bytes the device wrote 2 MiB each instead of 5 KiB, and an fdatasync took 470 instead of 96
microseconds (ext4, Linux 6.18). On pages that were read in before it changed nothing.

allocate: creates CommitLog segments before the writer needs them.

Owns: segment files in creation under ``run/``, unused segments ahead of the tail. Reads: ``written``,
``segment_wanted``. Advances: ``allocated``, and the disk flags that make the writer refuse sends. Sockets: only the
lifeline. Exit codes: workers.runtime.context.ExitCode.

A segment is created as ``run/segment.new`` and fallocated in full (a store into an unallocated page of a mapped file on
a full disk is SIGBUS, not an error code). Then it is synced, renamed into ``commitlog/``, and the folder is synced.
Only then ``allocated`` moves, and the writer uses no segment that ends behind it. Killed anywhere, or refused by the
device anywhere, the process leaves nothing, or ``run/segment.new`` (created again later), or a whole all-zero segment,
which the next try finds, syncs and publishes as it is.

Invariants: ``allocated`` is the end of the last segment that exists in full, under a durable name; segments in
``commitlog/`` follow each other without a gap. This process never replaces or cuts a file in ``commitlog/``: the name
is taken, or it is free. On stop it deletes the segments behind the tail, as RocketMQ does (spec 8.6).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
from pathlib import Path
from typing import Final

import numpy as np

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.control import DiskFlag, Word
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import start_writeback
from commitmq.files.disk_space import COPY_ON_WRITE, file_system_of
from commitmq.files.mapped_file import MappedFile, list_segments
from commitmq.format.file_names import segment_name
from commitmq.store.log.expiry import list_bases
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

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


ROLE = "allocate"
_POLL_MS = 100  # the pages ahead of the tail must last for this time under the fastest senders, so never longer


class SegmentAllocator:
    """Creates and removes segments; the loop is :func:`run`."""

    def __init__(self, context: WorkerContext) -> None:
        self._control = context.control
        self._take_settings(context.config)
        context.on_settings(self._take_settings)
        self._layout = context.layout
        self._log = context.log
        self._segment_bytes = context.config.commit_log.segment_bytes
        self._writer = context.ringer("writer")
        self._flags = 0
        self._next_disk_check_ms = 0
        self._complained = ""
        self._has_looked = False
        context.layout.commit_log.mkdir(parents=True, exist_ok=True)
        found = file_system_of(context.layout.commit_log)
        if found in COPY_ON_WRITE:
            self._log.warning(
                "the log is on a copy-on-write file system: no space is reserved for overwrites, so a full disk can"
                " kill the writer (SIGBUS), which loses nothing that was acknowledged",
                file_system=found,
                disk_full_from_percent=round(context.config.disk.warning_ratio * 100, 1),
            )
            context.tell(file_system=found)

    def _look_at_folder(self) -> None:
        """Publish the end of the existing segments. When it raises OSError, it has published nothing."""
        # The process that made these segments may have died, or got an error, before their names were durable.
        disk.sync_folder(self._layout.commit_log, "segment")
        bases = list_segments(self._layout.commit_log, self._segment_bytes)
        self._control.put(Word.ALLOCATED, bases[-1] + self._segment_bytes if bases else self._tail_base())
        self._has_looked = True

    def _tail_base(self) -> int:
        written = self._control.get(Word.WRITTEN)
        return written - written % self._segment_bytes

    def wanted_end(self) -> int:
        """The target of ``allocated``: ``preallocate_segments`` behind the tail's, or what the writer waits for."""
        ahead = self._tail_base() + (1 + self._config.commit_log.preallocate_segments) * self._segment_bytes
        return max(ahead, self._control.get(Word.SEGMENT_WANTED) + self._segment_bytes)

    def work(self) -> None:
        """Look at the disk when it is time, and create at most one segment."""
        now = monotonic_ms()
        if now >= self._next_disk_check_ms:
            self._next_disk_check_ms = now + self._config.disk.check_interval_ms
            self._check_disk()
            retry = True
        else:
            retry = not self._flags & DiskFlag.NO_SEGMENT
        if retry and not (self._has_looked and self._control.get(Word.ALLOCATED) >= self.wanted_end()):
            self._allocate()

    def _take_settings(self, config: NodeConfig) -> None:
        self._config = config

    def _check_disk(self) -> None:
        usage = shutil.disk_usage(self._layout.root)
        ratio = usage.used / (usage.used + usage.free) if usage.used + usage.free else 1.0
        full = ratio > self._config.disk.warning_ratio
        if full != bool(self._flags & DiskFlag.DISK_FULL):
            if full:
                self._log.error(
                    "disk is too full, sends are refused",
                    used_percent=round(ratio * 100, 1),
                    limit_percent=round(self._config.disk.warning_ratio * 100, 1),
                    free_bytes=usage.free,
                )
            else:
                self._log.info("disk has space again, sends are accepted", used_percent=round(ratio * 100, 1))
        self._set(DiskFlag.DISK_FULL, full)

    def _allocate(self) -> None:
        """Create and publish one more segment, or log why that fails."""
        try:
            if not self._has_looked:
                self._look_at_folder()
            base = self._control.get(Word.ALLOCATED)
            if base >= self.wanted_end():
                return
            self._make(self._layout.commit_log / segment_name(base))
        except OSError as error:
            self._complain(os.strerror(error.errno or errno.EIO))
            return
        if failpoints.ACTIVE:
            failpoints.hit("allocate.before_publish")
        self._control.put(Word.ALLOCATED, base + self._segment_bytes)
        if self._complained:
            self._log.info("segments can be allocated again")
            self._complained = ""
        self._set(DiskFlag.NO_SEGMENT, False)
        self._writer.ring()

    def _make(self, final: Path) -> None:
        """Create the segment ``final``, whole and durable, unless an earlier try has left it. Raises OSError."""
        if not final.exists() or final.stat().st_size == 0:  # RocketMQ leaves an empty one when it dies at this point
            final.unlink(missing_ok=True)
            new = self._layout.run / "segment.new"
            new.unlink(missing_ok=True)
            try:
                with disk.opened(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, "segment") as fd:
                    disk.reserve(fd, 0, self._segment_bytes, "segment")
                    disk.sync(fd, "segment", metadata=True)
                disk.rename(new, final, "segment")
            except OSError:
                with contextlib.suppress(OSError):
                    new.unlink(missing_ok=True)
                raise
        disk.sync_folder(self._layout.commit_log, "segment")

    def _complain(self, reason: str) -> None:
        base = self._control.get(Word.ALLOCATED)
        # The tail's own segment and the next one are needed now; the one after that can wait for space.
        needed = base <= max(self._tail_base() + self._segment_bytes, self._control.get(Word.SEGMENT_WANTED))
        if reason != self._complained:
            self._log.error("cannot allocate a segment", segment=segment_name(base), error=reason, needed_now=needed)
            self._complained = reason
        self._set(DiskFlag.NO_SEGMENT, needed)
        self._next_disk_check_ms = monotonic_ms() + self._config.disk.check_interval_ms

    def _set(self, flag: DiskFlag, on: bool) -> None:
        flags = self._flags | flag if on else self._flags & ~flag
        if flags != self._flags:
            self._flags = flags
            self._control.put(Word.DISK_FLAGS, flags)
            self._writer.ring()

    def remove_unused(self) -> None:
        """Delete the unused segments, the last one first; only after the writer has stopped. A segment that was made
        and never published is deleted as well: it would lie behind a hole, or be the beginning of the log.
        """
        written = self._control.get(Word.WRITTEN)
        base = self._tail_base()
        try:
            for base in reversed(list_bases(self._layout.commit_log)):
                if base < written:
                    break
                disk.unlink(self._layout.commit_log / segment_name(base), "segment", missing_ok=True)
                # One at a time: a power cut that undid only the later deletion would leave a hole between two segments.
                disk.sync_folder(self._layout.commit_log, "segment")
                self._control.put(Word.ALLOCATED, base)
        except OSError as error:
            # They are empty, and the next start uses them as they are.
            self._log.warning(
                "unused segments stay", first=segment_name(base), error=os.strerror(error.errno or errno.EIO)
            )


def run(context: WorkerContext) -> None:
    """The loop: it looks every 100 ms, and when the writer rings at a roll."""
    allocator = SegmentAllocator(context)
    memory = SegmentMemory(context)
    allocator.work()
    memory.work()
    context.ready()
    control = context.control
    while not context.stopping:
        allocator.work()
        memory.work()
        behind = control.get(Word.ALLOCATED) < allocator.wanted_end() and not control.get(Word.DISK_FLAGS)
        context.wait(0 if behind else _POLL_MS)
    memory.close()
    allocator.remove_unused()
