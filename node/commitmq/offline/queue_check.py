"""Checks the ConsumeQueues at a start: whether their files still exist, and whether each queue ends where it did.

The work is bounded. With the node's own record (:mod:`commitmq.store.queues.queue_ends`) each queue is opened as its
dispatcher will open it, and must end where it ended at the record's position; no file may be missing at its beginning
or between two others. Units behind that position are dispatched again, so they are not checked. Without a record,
because RocketMQ or an older version used the store last, the check compares the queues with samples of records from
both ends of the log.

After an orderly stop the content of the files is not read: ``store verify`` does that. After another end the units of up
to a gigabyte of queues are read, and must belong to records that follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import LMQ_PREFIX, UNIT_BYTES
from commitmq.format.units import UNIT
from commitmq.offline.extents import BATCH, Queue
from commitmq.offline.held_store import StoreView
from commitmq.offline.rebuild_pieces import units_of
from commitmq.offline.verify_queues import locate
from commitmq.store.queues import queue_ends
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_ends import QueueEnd, QueueEnds
from commitmq.store.queues.queue_files import LogProof, list_queues

Progress = Callable[[str, int, int, str], None]

_FEW_FILES: Final = 8
_QUEUES_A_REPORT: Final = 64
_SAMPLE_BYTES: Final = 16 << 20
_MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Loss:
    """A queue whose files changed, and how that is known."""

    topic: str
    queue_id: int
    folder: Path
    why: str

    def __str__(self) -> str:
        return f"{self.topic} queue {self.queue_id} [{self.folder}]: {self.why}"


def find_losses(view: StoreView, ends: QueueEnds | None, limit: int, progress: Progress) -> list[Loss]:
    """Queues that must be rebuilt from the log before anything is appended to them. Changes nothing.

    ``limit``: every record that begins below it has its unit; records behind it are dispatched again. ``ends``: the
    record, if no other program is known to have used the store since. Raises StoreError when the log cannot be read.
    """
    check = _QueueComparison(view, limit, progress)
    try:
        known = {} if ends is None else {(end.kind, end.topic, end.queue_id): end for end in ends.queues}
        losses = check.recorded(known, ends) if ends is not None else []
        losses += check.unrecorded(known)
        if ends is None:
            losses += check.samples()
    finally:
        check.close()
    return list({(loss.folder): loss for loss in reversed(losses)}.values())[::-1]


class _QueueComparison:
    def __init__(self, view: StoreView, limit: int, progress: Progress) -> None:
        self._view = view
        self._limit = limit
        self._progress = progress
        self._left = _MOST_BYTES if view.was_open else 0
        """Bytes of queues that may still be read."""
        self._fds = FdCache(_FEW_FILES)
        self._proof = LogProof(view.layout.commit_log, view.segment_bytes)
        self._roots = {queue_ends.PLAIN: view.layout.consume_queue, queue_ends.BATCH: view.layout.batch_consume_queue}

    def close(self) -> None:
        self._fds.close()
        self._proof.close()

    def _opened(self, kind: int, topic: str, queue_id: int, limit: int) -> ConsumeQueue | BatchConsumeQueue:
        """The queue as its dispatcher would find it if it is cut at ``limit``. Raises StoreError."""
        folder = self._roots[kind] / topic / str(queue_id)
        config = self._view.config.consume_queue
        if kind == queue_ends.BATCH:
            batches = BatchConsumeQueue(folder, config.batch_file_bytes, self._fds)
            batches.refresh_below(limit)
            return batches
        queue = ConsumeQueue(folder, config.file_bytes, self._fds)
        queue.refresh(limit, proof=self._proof.of(topic, queue_id))
        return queue

    def _broken_file(self, queue: ConsumeQueue | BatchConsumeQueue) -> str | None:
        size = queue.end_byte - max(0, queue.first_byte)
        is_whole = size <= self._left
        self._left -= size if is_whole else 0
        return queue.broken_file(whole=is_whole)

    # ------------------------------------------------------------ with the record

    def recorded(self, known: Mapping[tuple[int, str, int], QueueEnd], ends: QueueEnds) -> list[Loss]:
        """Queues that differ from the record."""
        losses = []
        limit = min(ends.position, self._limit)
        for number, ((kind, topic, queue_id), end) in enumerate(known.items()):
            if number % _QUEUES_A_REPORT == 0:
                self._progress("comparing queues with their record", number, len(known), "queues")
            if end.last_end <= self._view.deleted.get(topic, 0):
                continue  # the topic was deleted since
            why = self._difference(end, limit, ends.expires_below)
            if why:
                losses.append(Loss(topic, queue_id, self._roots[kind] / topic / str(queue_id), why))
        return losses

    def _difference(self, end: QueueEnd, limit: int, expires_below: int) -> str | None:
        try:
            queue = self._opened(end.kind, end.topic, end.queue_id, limit)
        except StoreError as error:
            return str(error)
        if not queue.has_files:
            return f"its files are gone, and its next offset is {end.next_offset}"
        if queue.first_byte > end.first and expires_below < 0:
            return f"files are missing before the one that begins at {queue.first_byte}: it began at {end.first}"
        if end.last_end <= limit:
            # All units that it had then are behind the limit now.
            found = queue.max_offset, queue.max_physical_offset
            if found[0] < end.next_offset:
                return f"its units end at offset {found[0]}, and its next offset is {end.next_offset}"
            has_expired = found[1] < 0 and end.last_end <= expires_below  # together with its last unit's file
            if found[0] == end.next_offset and found[1] != end.last_end and not has_expired:
                return f"its last unit, {found[0] - 1}, points at another record"
        broken = self._broken_file(queue)
        return None if broken is None else f"{Path(broken).name} does not hold units of records that follow each other"

    # ------------------------------------------------------------ without a record

    def unrecorded(self, known: Mapping[tuple[int, str, int], QueueEnd]) -> list[Loss]:
        """Queues that are missing in the record, and whose files cannot be right."""
        losses = []
        for kind, root in self._roots.items():
            for topic, queue_id, folder in list_queues(root):
                if (kind, topic, queue_id) in known:
                    continue
                try:
                    broken = self._broken_file(self._opened(kind, topic, queue_id, self._limit))
                    why = "" if broken is None else f"{Path(broken).name} does not hold units that follow each other"
                except StoreError as error:
                    why = str(error)
                if why:
                    losses.append(Loss(topic, queue_id, folder, why))
        return losses

    def samples(self) -> list[Loss]:
        """Queues that lack the unit of a record at the log's beginning or end."""
        view, losses = self._view, []
        if not view.bases:
            return []
        newest = max(view.bases[0], self._limit - _SAMPLE_BYTES)
        newest -= (newest - view.bases[0]) % view.segment_bytes
        for start, end in ((view.bases[0], min(self._limit, view.bases[0] + _SAMPLE_BYTES)), (newest, self._limit)):
            for queue, kind, number, physical_offset in self._sample(start, end):
                why = self._unit_missing(queue, kind, number, physical_offset)
                if why:
                    root = self._roots[queue_ends.BATCH if kind == BATCH else queue_ends.PLAIN]
                    losses.append(Loss(*queue, root / queue[0] / str(queue[1]), why))
        return losses

    def _sample(self, start: int, end: int) -> Iterator[tuple[Queue, int, int, int]]:
        """The first and the last record of each queue in [start, end): queue, kind, queue offset, physical offset."""
        first: dict[tuple[Queue, int], tuple[int, int]] = {}
        last: dict[tuple[Queue, int], tuple[int, int]] = {}
        log = self._view.open_log()
        walker = self._view.walker(log)
        position = start
        while position < end:
            batch = walker.walk(position, end)
            for queue, kind, number, units in units_of(self._view, batch):
                if queue[0] not in self._view.batch_topics and not queue[0].startswith(LMQ_PREFIX):
                    continue  # RocketMQ deleted it
                places = (np.frombuffer(units, UNIT) if kind != BATCH else units)["physical_offset"]
                first.setdefault((queue, kind), (number, int(places[0])))
                last[queue, kind] = (number + len(places) - 1, int(places[-1]))
            position = batch.end
            self._progress("comparing samples of the log with the queues", position - start, end - start, "bytes")
        walker.release()
        log.close()
        for found in (first, last):
            for (queue, kind), (number, place) in found.items():
                yield queue, kind, number, place

    def _unit_missing(self, queue: Queue, kind: int, number: int, physical_offset: int) -> str | None:
        """Why a record's unit is missing; None when it exists, or when the queue was recreated behind that record."""
        try:
            found = self._opened(queue_ends.BATCH if kind == BATCH else queue_ends.PLAIN, *queue, self._limit)
        except StoreError:
            return None  # :meth:`unrecorded` reports it
        if not found.has_files and queue[0] not in self._view.batch_topics:
            return None  # a light queue, which RocketMQ may be told not to fill
        is_behind = found.max_physical_offset <= physical_offset
        if kind == BATCH:
            is_before = found.first_byte > 0 and locate(self._roots[queue_ends.BATCH], queue, physical_offset) < 0
        else:
            is_before = number * UNIT_BYTES < found.first_byte
        return f"the record at physical offset {physical_offset} has no unit" if is_behind or is_before else None
