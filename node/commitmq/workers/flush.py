"""flush: makes the CommitLog durable; one fdatasync acknowledges everything written before it began.

Owns: fdatasync of the CommitLog, ``checkpoint`` and the sidecar beside it; with the transient store pool the log's
files too (:class:`LogCommitter`). Reads: ``written``, ``flush_wanted``, the dispatchers' durable
positions. Advances: ``flushed``, ``committed``. Sockets: doorbell (rung by the writer, and by a reader when its first
pull begins to wait), rings writer and reput. Exit codes: workers.runtime.context.ExitCode.

Synchronous mode: flush syncs at once when a sender waits, otherwise a moment later, so that sends with ack=memory share
one fdatasync; the moment is longer while no consumer waits for messages (:mod:`commitmq.workers.runtime.coalescing`).
Asynchronous mode: RocketMQ's rules (spec 6.3: every 500 ms, at least 4 pages, everything after 10 s), and at once when
a sender asked for ack=flushed all the same.

The writer itself syncs for a sender that waits alone (:mod:`commitmq.workers.writer.writer_sync`). It publishes the
position in ``writer_synced``, and this process copies it to ``flushed`` at its next look.

A failed fdatasync is never retried: the kernel has marked the pages clean, so the next call would report success
wrongly. The errno goes to ``flush_errno``, which makes the store read-only until the node is started again. Opening a
segment is tried again when descriptors are short: the device was not asked for anything. ``flushing`` tells a successor
that this process died in a sync of unknown outcome (:mod:`commitmq.workers.runtime.failed_sync`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable

from commitmq import failpoints
from commitmq.control import ControlBlock, DispatcherWord, Word, WorkerWord, WriterSync, role_slot
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import write_all
from commitmq.format.file_names import segment_name
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.log.transient_pool import TransientPool, pool_folder, zero
from commitmq.store.recovery.abort_file import NO_TOKEN
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.workers.runtime.coalescing import CoalescingDelay
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.failed_sync import SyncCounts, leave_note, write_again

_PAGE_BYTES = 4096
_HEAD_BYTES = 8
_COMMIT_AGAIN_MS = 500
_LAST_TRIES = 10  # tries of a node that stops, as in RocketMQ
_NAP_MS = 5
_STAY_NEAR_MS = 10


def attach_pool(context: WorkerContext) -> TransientPool:
    """This node's pool. Raises StoreError when it is gone."""
    return TransientPool(pool_folder(context.layout))


class LogCommitter:
    """Copies records from the transient store pool into the log's files; part of the flush process.

    Used only with ``commit_log.transient_store_pool``. Commit rules (spec 6.4): commit everything written so far at
    once when a sender waits for a flush, when the writer continued to another segment, and before the end. Otherwise
    commit when at least ``commit_least_pages`` pages are pending, and everything after ``commit_thorough_interval_ms``.
    The writer's rings wake the committer (RocketMQ's ``wakeCommitWhenPutMessage``); while something is pending it only
    naps, so that the writer need not ring.

    A commit writes a range of records from its second 8 bytes on, then the first 8: killed in between, it leaves
    nothing that a reader takes for a record. Then ``COMMITTED`` moves, then the range is zeroed in the pool.

    A failed write is tried again: unlike after a failed sync, everything is still in the pool. Until a write succeeds
    nothing more becomes visible or durable, and sends are refused once the pool is full.

    Decides when to commit, and commits; the loop is in workers.flush.process.
    """

    def __init__(self, context: WorkerContext, file_of: Callable[[int], int]) -> None:
        """``file_of(base)``: returns a descriptor of the segment at ``base``; it may raise OSError."""
        self._control = context.control
        self._context = context
        self._config = context.config.commit_log
        self._segment_bytes = self._config.segment_bytes
        self._file_of = file_of
        self._pool = attach_pool(context)
        self._pause_ms = max(1, context.config.dispatch.coalesce_us // 1000)
        self._last_ms = self._last_thorough_ms = monotonic_ms()
        self._tries = 0
        self._retry_at_ms = 0
        # A predecessor may have died between publishing and zeroing.
        self._tidy(self._pool.in_use()[0][0] if self._pool.in_use() else 0, self._control.get(Word.COMMITTED))

    @property
    def pending_bytes(self) -> int:
        return self._control.get(Word.WRITTEN) - self._control.get(Word.COMMITTED)

    @property
    def is_stuck(self) -> bool:
        """True while the last write failed."""
        return self._tries > 0

    @property
    def gave_up(self) -> bool:
        """True when a stopping node cannot write: the rest stays in the pool."""
        return self._context.stopping and self._tries >= _LAST_TRIES

    def work(self, now_ms: int, *, at_once: bool) -> bool:
        """Commit when it is due, or with ``at_once`` when anything is pending. True when something was committed."""
        pending = self.pending_bytes
        if pending <= 0:
            self._last_thorough_ms = now_ms
            return False
        if not self._is_due(now_ms, at_once):
            return False
        before = self._control.get(Word.COMMITTED)
        try:
            self._commit()
        except OSError as error:
            self._failed(error, now_ms)
        else:
            if self._tries:
                self._context.log.info("the log can be written to again")
                self._context.tell(commit_error=None)
            self._tries = 0
        self._last_ms = self._last_thorough_ms = monotonic_ms()
        return self._control.get(Word.COMMITTED) > before

    def wait_ms(self, now_ms: int) -> float:
        """How long the loop may sleep without missing a commit."""
        if self._tries:
            return max(1, self._retry_at_ms - now_ms)
        if self.pending_bytes > 0:
            return self._pause_ms if self._has_pages() else _NAP_MS
        return self._pause_ms if now_ms - self._last_ms < _STAY_NEAR_MS else 100

    def _is_due(self, now_ms: int, at_once: bool) -> bool:
        if self._tries:
            return now_ms >= self._retry_at_ms
        if at_once:
            return True
        written, committed = self._control.get(Word.WRITTEN), self._control.get(Word.COMMITTED)
        if written // self._segment_bytes > committed // self._segment_bytes:
            return True
        if now_ms - self._last_thorough_ms >= self._config.commit_thorough_interval_ms:
            return True
        return self._has_pages() and now_ms - self._last_ms >= self._pause_ms

    def _has_pages(self) -> bool:
        """Spec 6.1, with ``commit_least_pages``."""
        written, committed = self._control.get(Word.WRITTEN), self._control.get(Word.COMMITTED)
        return written // _PAGE_BYTES - committed // _PAGE_BYTES >= max(1, self._config.commit_least_pages)

    def _commit(self) -> None:
        control = self._control
        # Read the timestamp first: it may then be older than the newest record covered, never newer (spec 1.6).
        stamp = control.get(Word.WRITTEN_TIMESTAMP)
        target = control.get(Word.WRITTEN)
        start = control.get(Word.COMMITTED)
        while start < target:
            base = start - start % self._segment_bytes
            end = min(target, base + self._segment_bytes)
            buffer = self._pool.find(base)
            if buffer is None:
                raise StoreError(
                    f"no buffer of the transient store pool stands for segment {segment_name(base)}",
                    path=self._pool.folder,
                )
            if failpoints.ACTIVE:
                failpoints.hit("flush.before_commit")
            self._copy(self._file_of(base), buffer, start - base, end - base)
            if failpoints.ACTIVE:
                failpoints.hit("flush.after_commit")
            self._pool.set_committed(end)
            if end == target:
                control.put(Word.COMMITTED_TIMESTAMP, stamp)
            control.put(Word.COMMITTED, end)
            if failpoints.ACTIVE:
                failpoints.hit("flush.before_zero")
            self._tidy(start, end)
            self._context.heartbeat()
            start = end

    def _copy(self, fd: int, buffer: mmap.mmap, start: int, end: int) -> None:
        with memoryview(buffer) as view:
            head = min(end, start + _HEAD_BYTES)
            write_all(fd, view[head:end], head, place="flush.commit")
            if failpoints.ACTIVE:
                failpoints.hit("flush.inside_commit")
            write_all(fd, view[start:head], start, place="flush.commit")

    def _tidy(self, start: int, end: int) -> None:
        """Zero the committed range from ``start`` to ``end``, and return the buffers of whole segments."""
        for base, buffer in self._pool.in_use():
            if base >= end:
                break
            zero(buffer, max(0, start - base), min(self._segment_bytes, end - base))
            if base + self._segment_bytes <= end:
                if failpoints.ACTIVE:
                    failpoints.hit("flush.before_give_back")
                self._pool.give_back(base)

    def _failed(self, error: OSError, now_ms: int) -> None:
        self._tries += 1
        self._retry_at_ms = now_ms + (_COMMIT_AGAIN_MS if not self._context.stopping else _COMMIT_AGAIN_MS // 5)
        if self._tries == 1:
            text = os.strerror(error.errno or 5)
            self._context.log.error("cannot write to the log; the messages stay in the pool for now", error=text)
            self._context.tell(commit_error=text)

    def close(self) -> None:
        self._pool.close()


ROLE = "flush"
_LEAST_PAUSE_S = 0.001
_CHECKPOINT_MS = 1000
_POLL_MS = 100
_RETRY_MS = 200
_LOOK_S = 0.0002
_STAY_NEAR_S = 0.010


class LogFlusher:
    """Syncs the log and saves the checkpoint, in :func:`run`. ``answers_sender``: one waited for the last flush."""

    def __init__(self, context: WorkerContext) -> None:
        self._control = context.control
        self._layout = context.layout
        self._log, self._room = context.log, context.room
        self._segment_bytes = context.config.commit_log.segment_bytes
        self._owner = int(context.params.get("owner", NO_TOKEN))
        self._files: dict[int, int] = {}
        self._checkpoint = Checkpoint.load_durable(context.layout.checkpoint)
        pooled = self._control.get(Word.POOL_BUFFERS)
        self._stamp_word = Word.COMMITTED_TIMESTAMP if pooled else Word.WRITTEN_TIMESTAMP
        self._flushed_timestamp = self._control.get(self._stamp_word)
        self.answers_sender = False
        self.retry_at_ms = 0
        self._complained = ""
        self._alive = context.heartbeat
        self._counts = SyncCounts.of(context, ROLE)
        self._on_disk: tuple[int, ...] | None = None
        self._next_checkpoint_ms = 0
        if self._control.get(Word.FLUSHED) < 0:
            self._control.put(Word.FLUSHED, 0)

    @property
    def failed(self) -> bool:
        """True once an fdatasync failed."""
        return self._control.get(Word.FLUSH_ERRNO) != 0

    @property
    def is_late(self) -> bool:
        """True after a flush could not begin, until the time of the next try."""
        return monotonic_ms() < self.retry_at_ms

    def pending_bytes(self) -> int:
        return self._control.committed() - self._control.get(Word.FLUSHED)

    def pages_due(self, least_pages: int) -> bool:
        """Spec 6.1: a full segment, or at least ``least_pages`` pages behind."""
        written, flushed = self._control.committed(), self._control.get(Word.FLUSHED)
        if written // self._segment_bytes > flushed // self._segment_bytes:
            return True
        return written // _PAGE_BYTES - flushed // _PAGE_BYTES >= max(1, least_pages)

    def flush(self) -> bool:
        """Sync everything that is in the files now. False when the device refuses; the store is read-only from then on."""
        control = self._control
        # Read the timestamp first: it may then be older than the newest record covered, never newer (spec 1.6).
        stamp = control.get(self._stamp_word)
        target = control.committed()
        start = control.get(Word.FLUSHED)
        bases = range(start - start % self._segment_bytes, target, self._segment_bytes)
        try:
            self.settle()
            fds = [self.file(base) for base in bases]
        except OSError as error:
            # The device was not asked for anything yet, so a retry is safe. A segment that is gone or unreadable is a
            # failure.
            if error.errno in (errno.ENOENT, errno.EIO):
                self._fail(error)
            else:
                self._retry_later(error)
            return False
        control.put(Word.FLUSHING, target)
        began_ns = time.monotonic_ns()
        try:
            for fd in fds:
                if failpoints.ACTIVE:
                    failpoints.hit("flush.before_fdatasync")
                disk.sync(fd, "segment")
                if failpoints.ACTIVE:
                    failpoints.hit("flush.after_fdatasync")
        except OSError as error:
            self._fail(error)
            return False
        if self._counts is not None:
            self._counts.synced(time.monotonic_ns() - began_ns, target - start)
        if self.writer_failed():
            return False
        if target // self._segment_bytes > start // self._segment_bytes:
            # With this checkpoint on the disk a recovery knows that torn records in an earlier segment had been
            # flushed, and does not take damage for a torn tail. It is written at once, but a waiting sender does not
            # wait for it: acknowledged records are durable without it.
            self._next_checkpoint_ms = 0
        control.put(Word.FLUSHED, target)
        control.put(Word.FLUSHING, 0)
        # Senders that waited for less than the previous end were rung then. This look must follow the store above. The
        # writer works in the opposite order: it stores ``flush_wanted`` and then, before it sleeps, looks how far the
        # flush is. So at least one of the two sees the other's store. A ring that is lost all the same costs at most
        # the writer's bound of 20 ms.
        self.answers_sender = control.get(Word.FLUSH_WANTED) > start
        self._flushed_timestamp = stamp
        self._checkpoint.physic_msg_timestamp = stamp or self._checkpoint.physic_msg_timestamp
        self._drop_files_below(target)
        if self._complained:
            self._complained = ""
            self._log.info("the log can be flushed again")
        return True

    def _fail(self, error: OSError) -> None:
        self._control.put(Word.FLUSH_ERRNO, error.errno or errno.EIO)
        leave_note(self._layout.flush_failed, error, self._log)
        self._log.error(
            "fdatasync failed: the store is read-only until it is started again",
            from_offset=self._control.get(Word.FLUSHED),
            error=error.strerror or os.strerror(error.errno or errno.EIO),
        )

    def _retry_later(self, error: OSError) -> None:
        self.retry_at_ms = monotonic_ms() + _RETRY_MS
        reason = os.strerror(error.errno or errno.EIO)
        if reason != self._complained:
            self._complained = reason
            self._log.error("the log cannot be flushed now", error=reason)

    def settle(self) -> None:
        """Dirty again the pages that a process killed in a sync (an earlier flush or the writer) may have left clean
        without their being on the device. Raises OSError.
        """
        control = self._control
        writer_died = control.get(Word.WRITER_SYNC) == WriterSync.SYNCING and not self._writer_lives()
        if self.failed or not (control.get(Word.FLUSHING) or writer_died):
            return
        start, end = control.get(Word.FLUSHED), control.committed()
        self._log.warning(
            "a process was killed in a sync: the bytes of that sync are written again", start=start, end=end
        )
        write_again(self._layout, start, end, self._segment_bytes, self._alive)
        control.put(Word.FLUSHING, 0)

    def _writer_lives(self) -> bool:
        return os.path.exists(f"/proc/{self._control.worker(role_slot('writer'), WorkerWord.PID)}")

    def take_over(self) -> bool:
        """Publish the position that the writer has synced to. True when that is new."""
        control = self._control
        # As in flush: read the timestamp first.
        stamp = control.get(Word.WRITER_SYNCED_TIMESTAMP)
        synced = control.get(Word.WRITER_SYNCED)
        if synced <= control.get(Word.FLUSHED) or self.failed:
            return False
        control.put(Word.FLUSHED, synced)
        self.keep_open()
        self._flushed_timestamp = stamp
        self._checkpoint.physic_msg_timestamp = stamp or self._checkpoint.physic_msg_timestamp
        return True

    def keep_open(self) -> None:
        """Keep the segment open that is being written to. The kernel reports an error met by another process only to
        the descriptors that were open at that time.
        """
        flushed = self._control.get(Word.FLUSHED)
        with contextlib.suppress(OSError):
            self.file(flushed - flushed % self._segment_bytes)
        self._drop_files_below(flushed)

    def writer_failed(self) -> bool:
        """After a sync here: whether a sync of the writer failed. This waits while the writer is in a sync, because its
        outcome is not known yet: the writer may have consumed the write error, so that this process's sync of the same
        pages did not see it.
        """
        control = self._control
        while control.get(Word.WRITER_SYNC) == WriterSync.SYNCING and self._writer_lives():
            time.sleep(_LOOK_S)
        number = -control.get(Word.WRITER_SYNC)
        if number > 0 and not self.failed:
            control.put(Word.FLUSH_ERRNO, number)
            self._log.error(
                "fdatasync failed in the writer: the store is read-only until it is started again",
                error=os.strerror(number),
            )
        return number > 0

    def save_checkpoint(self, *, force: bool = False) -> None:
        """Write sidecar and ``checkpoint`` when they changed and a second has passed, or at once with ``force``."""
        now = monotonic_ms()
        if not force and now < self._next_checkpoint_ms:
            return
        self._next_checkpoint_ms = now + _CHECKPOINT_MS
        self._save(self._control.get(Word.FLUSHED), self._flushed_timestamp)

    def _save(self, flushed: int, stamp: int) -> bool:
        """Write sidecar and checkpoint unless they are up to date. False when the device refuses."""
        point, control = self._checkpoint, self._control
        # Both may go back: the clock had been wrong (commit_log.max_clock_lead_ms).
        logics = control.dispatcher(0, DispatcherWord.DURABLE_TIMESTAMP)
        point.logics_msg_timestamp = logics or point.logics_msg_timestamp
        # May go back: an index file that had been durable was cut, because the log lost its end.
        index = control.dispatcher(1, DispatcherWord.DURABLE_TIMESTAMP)
        point.index_msg_timestamp = index or point.index_msg_timestamp
        sidecar = Sidecar(
            flushed,
            stamp,
            control.dispatcher(0, DispatcherWord.DURABLE),
            control.get(Word.CRC_FROM),
            self._segment_bytes,
            self._owner,
        )
        values = (
            point.physic_msg_timestamp,
            point.logics_msg_timestamp,
            point.index_msg_timestamp,
            sidecar.flushed,
            sidecar.queues_durable,
        )
        if values == self._on_disk:
            return True
        try:
            if failpoints.ACTIVE:
                failpoints.hit("flush.before_checkpoint")
            sidecar.save_with(self._layout.sidecar, point, self._layout.checkpoint)
            if failpoints.ACTIVE:
                failpoints.hit("flush.after_checkpoint")
        except OSError as error:
            # Old files only make the next recovery start earlier. They are written again a second later.
            if self._room.lacked("checkpoint", error):
                return False
            self._log.warning("cannot write the checkpoint", error=os.strerror(error.errno or 5))
            return False
        self._room.found("checkpoint")
        self._on_disk = values
        return True

    def file(self, base: int) -> int:
        """A descriptor of the segment at ``base``. Raises OSError."""
        fd = self._files.get(base)
        if fd is None:
            path = self._layout.commit_log / segment_name(base)
            fd = self._files[base] = disk.open_file(path, os.O_RDWR, "segment")
        return fd

    def _drop_files_below(self, offset: int) -> None:
        if len(self._files) > 1:
            for base in [base for base in self._files if base + self._segment_bytes <= offset]:
                os.close(self._files.pop(base))

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _is_wanted(control: ControlBlock) -> bool:
    """Whether a sender waits for bytes that are not flushed yet."""
    return control.get(Word.FLUSH_WANTED) > control.get(Word.FLUSHED)


def _has_come(control: ControlBlock, empty: LogFlusher | None, coalescing: CoalescingDelay) -> Callable[[], bool]:
    """A check after ASLEEP was published: an awake process is not rung. ``empty``: it had nothing to flush."""

    def has_come() -> bool:
        return _is_wanted(control) or coalescing.is_late() or (empty is not None and empty.pending_bytes() > 0)

    return has_come


def run(context: WorkerContext) -> None:
    """The loop; the module says when it flushes."""
    flusher = LogFlusher(context)
    committer = LogCommitter(context, flusher.file) if context.control.get(Word.POOL_BUFFERS) else None
    writer, reput = context.ringer("writer"), context.ringer("reput")
    control, log_config = context.control, context.config.commit_log
    sync = context.config.sync_flush
    coalescing = CoalescingDelay(control, context.config, least_s=_LEAST_PAUSE_S)
    last_flush_ms = last_thorough_ms = monotonic_ms()
    flusher.keep_open()
    with contextlib.suppress(OSError):  # flush will try again, and reports why it cannot
        flusher.settle()
    context.ready()
    while True:
        now = monotonic_ms()
        due = naps = nothing = False
        wait_ms: float = _POLL_MS
        coalescing.look()
        start = control.get(Word.FLUSHED)
        if flusher.take_over():
            last_flush_ms = now
            coalescing.done(control.get(Word.FLUSHED) - start)
            if sync:
                reput.ring(urgent=False)
        if control.get(Word.WRITER_SYNC) < 0 and not flusher.failed:
            flusher.writer_failed()
            writer.ring()
        wanted = _is_wanted(control) or context.stopping
        if committer is not None and not flusher.failed:
            if committer.work(now, at_once=wanted) and not sync:
                reput.ring(urgent=False)
            wait_ms = committer.wait_ms(now)
        if flusher.failed:
            wait_ms = 1000
        elif flusher.pending_bytes() > 0:
            if now < flusher.retry_at_ms:
                wait_ms = min(wait_ms, flusher.retry_at_ms - now)
            elif wanted:
                due = True
            elif sync:
                left_s = coalescing.left_s(flusher.pending_bytes())
                due = left_s <= 0
                wait_ms, naps = min(wait_ms, max(1, left_s * 1000)), True
            else:
                thorough = now - last_thorough_ms >= log_config.flush_thorough_interval_ms
                interval_over = now - last_flush_ms >= log_config.flush_interval_ms
                due = thorough or (interval_over and flusher.pages_due(log_config.flush_least_pages))
        else:
            nothing = True
            last_thorough_ms = now
            left_s = coalescing.left_s()
            if sync and (left_s > 0 or coalescing.since_s() < _STAY_NEAR_S):
                # More appends are likely soon, and a nap costs the writer less than a ring.
                wait_ms, naps = min(wait_ms, max(1, left_s * 1000)), True
            elif committer is None:
                wait_ms = context.poll_ms
        if due:
            start = control.get(Word.FLUSHED)
            if flusher.flush():
                if flusher.answers_sender:
                    writer.ring()
                if sync:
                    reput.ring(urgent=False)
            elif flusher.failed:
                writer.ring()
            last_flush_ms = last_thorough_ms = monotonic_ms()
            coalescing.done(control.get(Word.FLUSHED) - start)
        flusher.save_checkpoint()
        nothing_left = committer is None or committer.pending_bytes <= 0 or committer.gave_up
        if context.stopping and (flusher.failed or (flusher.pending_bytes() <= 0 and nothing_left)):
            break
        stuck = flusher.failed or flusher.is_late or (committer is not None and committer.is_stuck)
        context.wait(
            0 if due and flusher.pending_bytes() > 0 and not flusher.is_late else wait_ms,
            unless=coalescing.is_late if stuck else _has_come(control, flusher if nothing else None, coalescing),
            nap=naps,
        )
    flusher.save_checkpoint(force=True)
    if committer is not None:
        committer.close()
    flusher.close()
