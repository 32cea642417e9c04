"""fdatasync in the writer itself, for a single sender that waits for the device.

Going through the flush process costs two wake-ups, as much as the device itself takes for a small record. When many
senders wait, flush is the better place: it groups them, and the writer continues in the meantime. So the writer syncs
only when one answer waits, the last request before it came from the same sender, flush sleeps, and the unsynced bytes
are few and all in one segment.

``flushed`` stays flush's word: the writer publishes in ``writer_synced`` how far it got, answers, and leaves the rest
to flush. A device that is slow for a moment would keep all other senders waiting too. So after a sync of more than
``commit_log.writer_sync_slow_ms`` flush syncs alone for some seconds.

Invariants: ``writer_synced`` is stored only after the fdatasync that covers it, and that fdatasync began after
everything below it was in the file. ``WRITER_SYNC`` is SYNCING from before the call until the word has the outcome.
Flush may sync the same pages in the meantime; the word makes sure that flush never publishes pages whose write error
the writer consumed. A writer that is killed inside the call has answered no send, and its successor writes the range of
that sync again (:mod:`commitmq.workers.runtime.failed_sync`). After a failure the writer leaves the note for the next
recovery, and never syncs again. The writer opens the segment before it looks whether flush is in a sync or has failed:
the words show a failure before that, and the kernel reports a later failure to every descriptor that was open then.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Final

from commitmq import failpoints
from commitmq.control import Word, WorkerWord, WriterSync, role_slot
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.format.file_names import segment_name
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.failed_sync import SyncCounts, leave_note, write_again

_SYNC, _SYNCED, _TIMESTAMP = int(Word.WRITER_SYNC), int(Word.WRITER_SYNCED), int(Word.WRITER_SYNCED_TIMESTAMP)
_FLUSHED, _FLUSH_ERRNO = int(Word.FLUSHED), int(Word.FLUSH_ERRNO)
_ASLEEP = int(WorkerWord.ASLEEP)
_REST_S: Final = 5.0


class InlineFsync:
    """The writer's own fdatasync; see the module."""

    def __init__(self, context: WorkerContext, *, pooled: bool) -> None:
        """With a transient store pool (``pooled``) flush writes the log's files, and the writer syncs nothing."""
        self._control = context.control
        self._layout = context.layout
        self._log = context.log
        log_config = context.config.commit_log
        self._segment_bytes = log_config.segment_bytes
        self._most_bytes = 0 if pooled else log_config.writer_sync_bytes
        self._flush_slot = role_slot("flush")
        self._file: tuple[int, int] | None = None  # base of the segment, descriptor
        self._slow_s = log_config.writer_sync_slow_ms / 1000
        self._rests_until = 0.0
        self.synced = 0
        self._counts = SyncCounts.of(context, "writer")
        if self._control.get(_SYNC) == WriterSync.SYNCING:
            # An earlier writer was killed in its sync, and the outcome is unknown. If flush was killed as well, no
            # process has the write error.
            self._write_again(context)
        self._control.put(_SYNC, min(self._control.get(_SYNC), WriterSync.IDLE))

    def _write_again(self, context: WorkerContext) -> None:
        start, end = self._control.get(_FLUSHED), self._control.get(Word.WRITTEN)
        try:
            write_again(self._layout, start, end, self._segment_bytes, context.heartbeat)
        except OSError as error:
            raise StoreError(
                f"the log cannot be written again after a sync of unknown outcome: {error.strerror}",
                path=self._layout.commit_log,
            ) from error

    def suits(self, end: int) -> bool:
        """Whether the writer should sync everything up to ``end``, the log's end, here and now."""
        control = self._control
        start = max(control.get(_FLUSHED), self.synced)
        if not self._most_bytes or not self._open(end - 1):
            return False
        return (
            0 < end - start <= self._most_bytes
            and (end - 1) // self._segment_bytes == start // self._segment_bytes
            and control.worker(self._flush_slot, _ASLEEP) != 0
            and not control.get(_FLUSH_ERRNO)
            and control.get(_SYNC) == 0
            and time.monotonic() >= self._rests_until
        )

    def sync(self, end: int, timestamp: int) -> bool:
        """Sync everything up to ``end``; False when that failed. All unsynced bytes up to ``end`` lie in one segment.
        ``timestamp``: of the last record. After a failure sends are refused as soon as flush has seen it.
        """
        control = self._control
        assert self._file is not None
        control.put(_SYNC, WriterSync.SYNCING)
        began = time.monotonic()
        try:
            if failpoints.ACTIVE:
                failpoints.hit("writer.before_fdatasync")
            disk.sync(self._file[1], "segment")
            if failpoints.ACTIVE:
                failpoints.hit("writer.after_fdatasync")
        except OSError as error:
            control.put(_SYNC, -(error.errno or errno.EIO))
            self._log.error("fdatasync failed", segment=segment_name(end - 1 - (end - 1) % self._segment_bytes))
            leave_note(self._layout.writer_sync_failed, error, self._log)
            return False
        over = time.monotonic()
        if over - began > self._slow_s:
            self._rests_until = over + _REST_S
        if control.get(_FLUSH_ERRNO):
            control.put(_SYNC, WriterSync.IDLE)
            return False
        if self._counts is not None:
            self._counts.synced(round((over - began) * 1e9), end - max(control.get(_FLUSHED), self.synced))
        self.synced = end
        control.put(_SYNCED, end)
        control.put(_TIMESTAMP, timestamp)
        control.put(_SYNC, WriterSync.IDLE)
        return True

    def roll(self) -> None:
        """The tail is in another segment now: close the old one, which may be deleted some day."""
        self.close()

    def _open(self, position: int) -> bool:
        base = position - position % self._segment_bytes
        if self._file is None or self._file[0] != base:
            self.close()
            try:
                path = self._layout.commit_log / segment_name(base)
                self._file = base, disk.open_file(path, os.O_RDWR, "segment")
            except OSError:
                return False  # flush will try, and reports why it cannot
        return True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file[1])
            self._file = None
