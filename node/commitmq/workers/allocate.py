"""allocate: makes CommitLog segments before the writer needs them.

Owns: files being made under ``run/``, unused segments ahead of the tail. Reads: ``written``, ``segment_wanted``. Advances:
``allocated``, and the disk flags that make the writer refuse sends. Sockets: none but the lifeline. Exit codes:
workers.runtime.ExitCode.

A segment is made as ``run/segment.new``, fallocated in full (a store into an unallocated page of a mapped file on a full
disk is SIGBUS, not an error code), synced, renamed into ``commitlog/`` and the folder synced; only then ``allocated`` moves.
Killed anywhere, it leaves either nothing, or ``run/segment.new`` (made anew), or a whole all-zero segment (used as it is).

Invariants: ``allocated`` is the end of the last segment that exists in full; segments in ``commitlog/`` follow each other
without a gap. On stop the segments behind the tail go again, as RocketMQ does (spec 8.6).
"""

from __future__ import annotations

import errno
import os
import shutil

from commitmq import failpoints
from commitmq.control import DiskFlag, Word
from commitmq.store.layout import segment_name
from commitmq.workers.runtime import WorkerContext, monotonic_ms
from commitmq.workers.segment_memory import SegmentMemory

ROLE = "allocate"
_POLL_MS = 100  # the pages ahead of the tail must last that long under the fastest senders, so it is never longer


class SegmentAllocator:
    """The work without the loop."""

    def __init__(self, context: WorkerContext) -> None:
        self._control = context.control
        self._config = context.config
        self._layout = context.layout
        self._log = context.log
        self._segment_bytes = context.config.commit_log.segment_bytes
        self._writer = context.ringer("writer")
        self._flags = 0
        self._next_disk_check_ms = 0
        self._complained = ""
        context.layout.commit_log.mkdir(parents=True, exist_ok=True)
        self._control.put(Word.ALLOCATED, self._existing_end())

    def _existing_end(self) -> int:
        names = sorted(name for name in os.listdir(self._layout.commit_log) if name.isdigit())
        return int(names[-1]) + self._segment_bytes if names else self._tail_base()

    def _tail_base(self) -> int:
        written = self._control.get(Word.WRITTEN)
        return written - written % self._segment_bytes

    def wanted_end(self) -> int:
        """Where ``allocated`` should be: the tail's own segment and ``preallocate_segments`` behind it, or what the writer
        waits for.
        """
        ahead = self._tail_base() + (1 + self._config.commit_log.preallocate_segments) * self._segment_bytes
        return max(ahead, self._control.get(Word.SEGMENT_WANTED) + self._segment_bytes)

    def work(self) -> None:
        """Look at the disk when it is time, and make at most one segment."""
        now = monotonic_ms()
        if now >= self._next_disk_check_ms:
            self._next_disk_check_ms = now + self._config.disk.check_interval_ms
            self._check_disk()
            retry = True
        else:
            retry = not self._flags & DiskFlag.NO_SEGMENT
        if retry and self._control.get(Word.ALLOCATED) < self.wanted_end():
            self._make(self._control.get(Word.ALLOCATED))

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

    def _make(self, base: int) -> None:
        new = self._layout.run / "segment.new"
        final = self._layout.commit_log / segment_name(base)
        try:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                if failpoints.ACTIVE:
                    failpoints.hit("allocate.before_fallocate")
                os.posix_fallocate(fd, 0, self._segment_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            if failpoints.ACTIVE:
                failpoints.hit("allocate.before_rename")
            os.rename(new, final)
            _sync_folder(self._layout.commit_log)
        except OSError as error:
            new.unlink(missing_ok=True)
            # The tail's own segment and the next one are needed now; the one after that can wait for space.
            needed = base <= max(self._tail_base() + self._segment_bytes, self._control.get(Word.SEGMENT_WANTED))
            reason = os.strerror(error.errno or errno.EIO)
            if reason != self._complained:
                self._log.error("cannot allocate a segment", segment=str(final), error=reason, needed_now=needed)
                self._complained = reason
            self._set(DiskFlag.NO_SEGMENT, needed)
            self._next_disk_check_ms = monotonic_ms() + self._config.disk.check_interval_ms
            return
        if failpoints.ACTIVE:
            failpoints.hit("allocate.before_publish")
        self._control.put(Word.ALLOCATED, base + self._segment_bytes)
        if self._complained:
            self._log.info("segments can be allocated again")
            self._complained = ""
        self._set(DiskFlag.NO_SEGMENT, False)
        self._writer.ring()

    def _set(self, flag: DiskFlag, on: bool) -> None:
        flags = self._flags | flag if on else self._flags & ~flag
        if flags != self._flags:
            self._flags = flags
            self._control.put(Word.DISK_FLAGS, flags)
            self._writer.ring()

    def remove_unused(self) -> None:
        """Delete the segments that hold nothing; only after the writer has stopped."""
        written = self._control.get(Word.WRITTEN)
        base = self._control.get(Word.ALLOCATED) - self._segment_bytes
        while base >= written:
            if failpoints.ACTIVE:
                failpoints.hit("allocate.before_remove")
            (self._layout.commit_log / segment_name(base)).unlink(missing_ok=True)
            # One at a time: a power cut that undid only the later deletion would leave a hole between two segments.
            _sync_folder(self._layout.commit_log)
            self._control.put(Word.ALLOCATED, base)
            base -= self._segment_bytes


def _sync_folder(folder: os.PathLike[str]) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def run(context: WorkerContext) -> None:
    """The loop: one look every 100 ms or when the writer rings at a roll."""
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
