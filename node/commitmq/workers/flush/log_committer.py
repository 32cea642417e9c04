"""Copies records from the transient store pool into the log's files; part of the flush process.

Used only with ``commit_log.transient_store_pool``. Commit rules (spec 6.4): commit everything written so far at once
when a sender waits for a flush, when the writer went on to another segment, and before the end. Otherwise commit when
at least ``commit_least_pages`` pages are pending, and everything after ``commit_thorough_interval_ms``. The writer's
rings wake the committer (RocketMQ's ``wakeCommitWhenPutMessage``); while something is pending it only naps, so that the
writer need not ring.

A commit writes a range of records from its second 8 bytes on, then the first 8: killed in between, it leaves nothing
that a reader takes for a record. Then ``COMMITTED`` moves, then the range is zeroed in the pool.

A failed write is tried again: unlike after a failed sync, everything is still in the pool. Until a write succeeds
nothing more becomes visible or durable, and sends are refused once the pool is full.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from commitmq import failpoints
from commitmq.control import Word
from commitmq.errors import StoreError
from commitmq.files.write_all import write_all
from commitmq.format.file_names import segment_name
from commitmq.store.log.transient_pool import TransientPool, pool_folder, zero
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

_PAGE_BYTES = 4096
_HEAD_BYTES = 8
_RETRY_MS = 500
_LAST_TRIES = 10  # tries of a node that stops, as in RocketMQ
_NAP_MS = 5
_STAY_NEAR_MS = 10


def attach_pool(context: WorkerContext) -> TransientPool:
    """This node's pool. Raises StoreError when it is gone."""
    return TransientPool(pool_folder(context.layout))


class LogCommitter:
    """Decides when to commit, and commits; the loop is in workers.flush.process."""

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
        """Zero the committed range from ``start`` to ``end``, and give back the buffers of whole segments."""
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
        self._retry_at_ms = now_ms + (_RETRY_MS if not self._context.stopping else _RETRY_MS // 5)
        if self._tries == 1:
            text = os.strerror(error.errno or 5)
            self._context.log.error("cannot write to the log; the messages stay in the pool for now", error=text)
            self._context.tell(commit_error=text)

    def close(self) -> None:
        self._pool.close()
