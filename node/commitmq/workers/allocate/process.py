"""allocate: creates CommitLog segments before the writer needs them.

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
import errno
import os
import shutil
from pathlib import Path

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.control import DiskFlag, Word
from commitmq.files import disk
from commitmq.files.file_system import COPY_ON_WRITE, file_system_of
from commitmq.files.mapped_file import list_segments
from commitmq.format.file_names import segment_name
from commitmq.store.log.expiry import list_bases
from commitmq.workers.allocate.segment_memory import SegmentMemory
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

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
        """The target of ``allocated``: the tail's own segment and ``preallocate_segments`` behind it, or the segment
        that the writer waits for.
        """
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
        """Create the segment ``final``, whole and durable, unless a former try has left it. Raises OSError."""
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
        """Delete the unused segments, the last one first; only after the writer has stopped.

        A segment that was made and never published is deleted as well: it would lie behind a hole, or be the beginning
        of the log.
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
