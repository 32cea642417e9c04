"""Decides where a recovery begins, and which records it must find. Reads sidecar, checkpoint and ConsumeQueues, and
changes nothing.

    start      the scan of the log begins here
    durable    everything below is in the ConsumeQueues, on the device; dispatchers restart here
    promised   what the log must still have: an offset, or the store time of a record, that was reported as durable

Rules
    * The store's own sidecar agrees with the checkpoint and with ``abort``, so no other program used the store: the
      scan starts at the flushed position, and dispatchers restart at the durable position of the ConsumeQueues. A log
      in which no record ends at that place belongs to another moment (``contradiction``): a scan that begins inside a
      record would cut everything that follows.
    * Else, clean stop (no ``abort``): ConsumeQueues cover the log; the scan starts in the segment of their newest
      record.
    * Else: the scan starts at the newest segment whose first record is older than the checkpoint's least timestamp
      (minus 3 s), because everything older was flushed, in the log and in the ConsumeQueues.
    * Only in a store that this node crashed on must every record have a ``__CRC32#`` where the sidecar says so: a
      record without one is torn there. In every other store such a record is RocketMQ's, and valid.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.file_names import segment_name
from commitmq.kernels.codes import ROW, WALK_BAD, WALK_LIMIT
from commitmq.kernels.compiled import scan, walk
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import LogProof, has_record_before, list_queues
from commitmq.store.recovery.sidecar import Sidecar, this_boot

_FEW_FILES: Final = 8  # each queue is read once


@dataclass(frozen=True, slots=True)
class RecoveryStart:
    """Where a recovery begins, and which records it must find. Offsets in bytes of the log, times in ms."""

    clean: bool
    start: int
    durable: int
    timestamp: int
    """Store time of the newest record below ``start``, as far as it is known."""
    crc_from: int = -1
    """Every record from here on has a ``__CRC32#``, by the sidecar; -1 when that is not known."""
    by_sidecar: bool = False
    power_may_have_gone: bool = True
    """False when the sidecar was written in this very boot of the machine: then the page cache has all written bytes."""
    covered: int = -1
    """End of the newest record that a ConsumeQueue points to; -1 when this was not examined."""
    promised_timestamp: int = 0
    """By the checkpoint, records up to this time were flushed; 0 when the sidecar tells it more exactly."""
    contradiction: str = ""
    """Why the sidecar, though no other program used the store since, does not match this log; empty when it does."""

    @property
    def must_have_crc_from(self) -> int:
        """From here on the scan takes a record without ``__CRC32#`` for torn; -1 for nowhere."""
        return self.crc_from if self.by_sidecar and not self.clean else -1


def where_to_begin(
    layout: StoreLayout,
    commit_log: CommitLog,
    checkpoint: Checkpoint,
    *,
    clean: bool,
    previous: int | None,
    consume_queue_bytes: int,
    batch_queue_bytes: int,
) -> RecoveryStart:
    """Decide by the rules above. ``previous`` is the token in ``abort``. Raises StoreError for files of another size."""
    bases, segment_bytes = commit_log.segments(), commit_log.segment_bytes
    sidecar = Sidecar.load(layout.sidecar)
    contradiction = ""
    if sidecar is not None and not sidecar.agrees_with(
        layout.checkpoint, segment_bytes=segment_bytes, previous=previous
    ):
        sidecar = None
    if sidecar is not None:
        contradiction = _contradiction(sidecar, commit_log, bases)
        if not contradiction:
            boot = this_boot()
            return RecoveryStart(
                clean,
                max(sidecar.flushed, bases[0] if bases else 0),
                sidecar.queues_durable,
                sidecar.flushed_timestamp,
                crc_from=sidecar.crc_from,
                by_sidecar=True,
                power_may_have_gone=not boot
                or sidecar.boot != boot
                or any(note.exists() for note in layout.failed_syncs),
            )
    promised = checkpoint.physic_msg_timestamp
    if not bases:
        return RecoveryStart(clean, 0, 0, 0, promised_timestamp=promised, contradiction=contradiction)
    covered = _covered_by_queues(layout, segment_bytes, consume_queue_bytes, batch_queue_bytes) if clean else -1
    start = _start_segment(commit_log, bases, covered if clean else None, checkpoint.min_timestamp)
    return RecoveryStart(
        clean,
        start,
        covered if clean and covered >= 0 else start,
        promised,
        covered=covered,
        promised_timestamp=promised,
        contradiction=contradiction,
    )


def _contradiction(sidecar: Sidecar, commit_log: CommitLog, bases: list[int]) -> str:
    end = bases[-1] + commit_log.segment_bytes if bases else 0
    if sidecar.flushed > end:
        last = f"its last segment is {segment_name(bases[-1])}" if bases else "it has no segment at all"
        return (
            f"the log must reach physical offset {sidecar.flushed}, which was acknowledged as flushed, but {last}: segments "
            "are missing"
        )
    if bases and sidecar.flushed > bases[0] and not has_record_before(commit_log, sidecar.flushed):
        return (
            f"no record ends at physical offset {sidecar.flushed}, up to which the log was flushed: these are files of "
            "different moments, or of different stores, or a segment was damaged"
        )
    return ""


def _start_segment(commit_log: CommitLog, bases: list[int], covered: int | None, min_timestamp: int) -> int:
    """The segment a scan starts in: see the rules in the module's text."""
    out = np.zeros(5, np.int64)
    rows = np.zeros(1, ROW)
    for base in reversed(bases):
        segment = np.frombuffer(commit_log.read(base, commit_log.segment_bytes), np.uint8)
        # One record only: the scan is bounded by its end.
        topics, table = np.zeros((1, 2), np.int64), np.full(4, -1, np.int32)
        walked = np.zeros(4, np.int64)
        result = walk(segment, 0, segment.size, base, rows, topics, table, walked)
        if int(walked[0]) != 1 or result == WALK_BAD:
            continue
        if scan(segment, 0, int(rows["size"][0]), base, False, out) != WALK_LIMIT or not int(out[0]):
            continue
        if covered is not None:
            if base <= covered:
                return base
        elif 0 < int(rows["store_timestamp"][0]) <= min_timestamp:
            return base
    return bases[0]


def _covered_by_queues(layout: StoreLayout, segment_bytes: int, file_bytes: int, batch_file_bytes: int) -> int:
    """End of the newest record that any ConsumeQueue points to; -1 when there is no unit at all."""
    covered = -1
    proof = LogProof(layout.commit_log, segment_bytes)
    fds = FdCache(_FEW_FILES)
    for _topic, _queue, folder in list_queues(layout.batch_consume_queue):
        batches = BatchConsumeQueue(folder, batch_file_bytes, fds)
        with contextlib.suppress(StoreError):  # a file is missing: the queue is rebuilt before it is used
            batches.refresh()
        covered = max(covered, batches.max_physical_offset)
    for topic, queue_id, folder in list_queues(layout.consume_queue):
        queue = ConsumeQueue(folder, file_bytes, fds)
        with contextlib.suppress(StoreError):
            queue.refresh(proof=proof.of(topic, queue_id))
        covered = max(covered, queue.max_physical_offset)
    fds.close()
    proof.close()
    return covered
