"""The CommitLog's tail: where the log ends when the writer starts, and how the end moves.

The writer scans the log from min(flushed, dispatched), skips what recovery has checked, and finds the tail, which never
lies below ``written``. It zeroes the bytes behind the tail. Queue offsets are the ConsumeQueue ends (units below
``dispatched``; BatchCQ topics and LMQs have their own files) plus the records from there on. The producer table is its
snapshot plus the records behind it. That is the whole state, so a writer may die between any two lines: a record is
published or it is not, and only published records are acknowledged.

With the transient store pool the writer appends to the pool, and only the flush process writes the log's files. A start
then waits until all published records are in the files, and gives up complete records that were not published.

Queue offsets of a deleted topic begin at 0 again: records below its tombstone do not count, and neither do queues that
hold only such records and whose folders the dispatcher has not removed yet.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping

import numpy as np

from commitmq import failpoints
from commitmq.control import DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import pack_host
from commitmq.store.log.append import CommitLogAppender, PoolFullError
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, consumable
from commitmq.store.log.transient_pool import TransientPool
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery.scan import map_segment, writer_tail, zero_behind
from commitmq.workers.runtime.context import StartProgress, WorkerContext, monotonic_ms
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.producers import ProducerStateManager
from commitmq.workers.writer.put_rules import further_offsets, offset_behind

_WRITTEN, _WRITTEN_TIMESTAMP = int(Word.WRITTEN), int(Word.WRITTEN_TIMESTAMP)  # plain ints, see workers.writer.process
_COMMIT_PATIENCE_MS = 30_000
_FEW_FILES = 8  # each queue is opened only once
_QUEUES_A_REPORT = 64


class LogTail:
    """The tail while the writer runs: the appender moves it, :meth:`publish` shows it to the other processes."""

    def __init__(self, context: WorkerContext, pool: TransientPool | None, position: int, stamp: int) -> None:
        """``position`` and ``stamp`` as :func:`recover_tail` found them; ``pool`` takes the appends when there is one."""
        self._context = context
        self._control = context.control
        self._pool = pool
        config = context.config
        self.appender = CommitLogAppender(
            position,
            segment_bytes=config.commit_log.segment_bytes,
            open_segment=self._open_segment,
            close_segment=None if pool is None else lambda _buffer: None,
            store_host=pack_host(Host(config.network.store_host, config.network.store_port)),
            max_message_bytes=config.commit_log.max_message_bytes,
            properties_crc=config.commit_log.append_properties_crc,
            last_timestamp=max(stamp, self._control.get(Word.WRITTEN_TIMESTAMP)),
            max_clock_lead_ms=config.commit_log.max_clock_lead_ms,
            populate_window_bytes=config.commit_log.populate_window_bytes,
        )
        self._stamp = self._control.get(_WRITTEN_TIMESTAMP)

    def _open_segment(self, base: int) -> mmap.mmap | None:
        """The mapping or pool buffer that takes the appends of the segment at ``base``; None while it is not allocated.
        Raises StoreError, PoolFullError.

        An existing file is not enough: until ``allocated`` covers it, a power cut may remove its name. A pool buffer
        needs an allocated segment as well, or a full disk would show too late.
        """
        segment_bytes = self._context.config.commit_log.segment_bytes
        if base + segment_bytes > self._control.get(Word.ALLOCATED):
            return None
        if self._pool is None:
            return map_segment(self._context.layout.commit_log / segment_name(base), segment_bytes)
        buffer = self._pool.take(base)
        if buffer is None:
            raise PoolFullError(base)
        return buffer

    def publish(self) -> None:
        """Publish the appended records; the timestamp first, so that it never belongs to a newer record."""
        if failpoints.ACTIVE:
            failpoints.hit("writer.before_publish")
        if self.appender.position > self._control.get(_WRITTEN):
            stamp = self.appender.last_timestamp
            if stamp < self._stamp:
                self._tell_clock(self._stamp - stamp)
            self._stamp = stamp
            self._control.put(_WRITTEN_TIMESTAMP, stamp)
            self._control.put(_WRITTEN, self.appender.position)
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_publish")

    def _tell_clock(self, ahead_ms: int) -> None:
        """Log that the clock stamped the records before this one ``ahead_ms`` too far in the future."""
        self._context.log.error(
            "the clock was ahead: store timestamps go back with it",
            ahead_ms=ahead_ms,
            from_offset=self._control.get(_WRITTEN),
        )
        self._context.tell(clock={"was_ahead_ms": ahead_ms, "until_offset": self._control.get(_WRITTEN)})


def recover_tail(
    context: WorkerContext,
    producers: ProducerStateManager | None = None,
    pool: TransientPool | None = None,
    deleted: Mapping[str, int] | None = None,
) -> tuple[dict[tuple[str, int], int], int, int]:
    """Queue offsets by (topic, queue), the log's end and the newest store timestamp; see the module.

    ``producers`` is brought up to the log's end. ``deleted`` has for each deleted topic the physical offset below which
    its records do not count; it must come from the same topic table that sends are checked against later.
    """
    config, control, layout = context.config, context.control, context.layout
    segment_bytes = config.commit_log.segment_bytes
    started = time.monotonic()
    dispatched = control.dispatcher(0, DispatcherWord.DISPATCHED)
    published = control.get(Word.WRITTEN)
    if pool is not None:
        published = _committed(context, pool)
    log = CommitLog(layout.commit_log, segment_bytes, config.commit_log.max_mapped_segments)
    # Recovery has checked the log up to here. The scan need not begin earlier, however far behind the ConsumeQueues
    # are.
    start = max(control.get(Word.RECOVERED_END), min(published, control.get(Word.FLUSHED), dispatched))
    position, stamp = writer_tail(log, segment_bytes, start=start, published=published)
    segment = layout.commit_log / segment_name(position - position % segment_bytes)
    if segment.exists() and pool is None:
        zero_behind(segment, position % segment_bytes)
    following = layout.commit_log / segment_name(position - position % segment_bytes + segment_bytes)
    if following.exists() and pool is None:
        # A dead writer may have stored records in the next segment before it published any of them.
        zero_behind(following, 0)
    if deleted is None:
        deleted = TopicViews(layout, control).tombstones()
    offsets: dict[tuple[str, int], int] = {}
    fds = FdCache(_FEW_FILES)
    progress = StartProgress(context)
    queues = list(list_queues(layout.consume_queue))
    for number, (topic, queue_id, folder) in enumerate(queues):
        if number % _QUEUES_A_REPORT == 0:
            progress("looking at the ends of queues", number, len(queues), "queues")
        queue = ConsumeQueue(folder, config.consume_queue.file_bytes, fds)
        # No proof is needed: the dispatcher opened before this process, and cleared the units behind the ends.
        if queue.refresh(dispatched, proof=lambda *_unit: True) and not (
            topic in deleted and queue.last_offset_below(deleted[topic]) == queue.max_offset
        ):
            offsets[topic, queue_id] = queue.max_offset
    for topic, queue_id, folder in list_queues(layout.batch_consume_queue):
        batches = BatchConsumeQueue(folder, config.consume_queue.batch_file_bytes, fds)
        if batches.refresh():
            end = batches.max_offset_below(dispatched)
            if not (topic in deleted and batches.max_offset_below(deleted[topic]) >= end):
                offsets[topic, queue_id] = end
    fds.close()
    walker = LogWalker(log, max_rows=16_384, max_bytes=32 * 1024 * 1024)
    known = position if producers is None else producers.open(log, position, deleted)
    at = begin = min(dispatched, known)
    while at < position:
        batch = walker.walk(at, position)
        if producers is not None and batch.end > known:
            producers.replay(batch.after(known), deleted)
        if batch.end > dispatched:
            _count_rows(batch.after(dispatched), deleted, offsets)
        at = batch.end
        progress("counting the records that are not in the queues yet", at - begin, position - begin)
    progress.over()
    walker.release()
    log.close()
    context.log.info(
        "tail found",
        end=position,
        scanned_bytes=position - start,
        counted_bytes=position - begin,
        queues=len(offsets),
        seconds=round(time.monotonic() - started, 3),
    )
    return offsets, position, stamp


def _committed(context: WorkerContext, pool: TransientPool) -> int:
    """Wait until all published records are in the log's files, and zero the unpublished ones; returns the log's end.

    After a failed flush nothing is committed any more, and a node that stops commits after this process has ended. In
    both cases the log ends where its files end so far: sends are refused, so nothing is appended there, and nothing is
    zeroed.
    """
    control = context.control
    deadline = monotonic_ms() + _COMMIT_PATIENCE_MS
    while control.get(Word.COMMITTED) < control.get(Word.WRITTEN):
        if control.get(Word.FLUSH_ERRNO) or context.stopping:
            return control.get(Word.COMMITTED)
        if monotonic_ms() > deadline:
            raise StoreError("the messages in the transient store pool cannot be committed", path=pool.folder)
        context.wait(5)
    pool.zero_from(control.get(Word.WRITTEN))
    return control.get(Word.WRITTEN)


def _count_rows(batch: DispatchBatch, deleted: Mapping[str, int], offsets: dict[tuple[str, int], int]) -> None:
    """Raise ``offsets`` to behind the batch's last record of each queue. Records of a deleted topic do not count."""
    rows = batch.rows[consumable(batch.rows)]
    # Log order is queue order, so the last row of each queue decides. It is the first one in the reversed columns.
    keys = rows["topic"][::-1].astype(np.int64) << 32 | rows["queue_id"][::-1]
    _, last = np.unique(keys, return_index=True)
    for row in rows[::-1][last]:
        key = (batch.topics[int(row["topic"])], int(row["queue_id"]))
        if int(row["physical_offset"]) >= deleted.get(key[0], -1):
            offsets[key] = max(offsets.get(key, 0), offset_behind(row))
    for key, behind in further_offsets(batch, rows):
        offsets[key] = max(offsets.get(key, 0), behind)
