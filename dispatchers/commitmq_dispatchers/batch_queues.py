"""Queues of topics with ``queue.type=BatchCQ``: one 46-byte unit for each record (spec 3.9).

It is a part of the ConsumeQueue dispatcher and keeps its invariants: units are in the order of their records, they are
in the file before the batch's end is published, and appending them again changes nothing.

The topic table says which topics these are. For a topic that is not in the table (it was just deleted) the record
decides: only the node's writer makes inner batches, and only for such topics. A record of these topics without
INNER_NUM and INNER_BASE counts as a batch of one, as in RocketMQ 5.4.0, where plain sends to such a topic are possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import BATCH_UNIT_BYTES, SysFlag
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.log.dispatch_batch import DispatchBatch, Rows, by_queue
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue, make_units
from commitmq.store.queues.queue_files import list_queues
from commitmq_dispatchers.unsynced import Unsynced


class BatchQueues:
    """All queues under ``batchconsumequeue/``. Appended units wait in ``unsynced`` for their sync."""

    def __init__(self, view: DispatcherView, fds: FdCache, unsynced: Unsynced) -> None:
        self._view = view
        self._root: Path = view.layout.batch_consume_queue
        self._file_bytes = view.config.consume_queue.batch_file_bytes
        self._fds = fds
        self._queues: dict[tuple[str, int], BatchConsumeQueue] = {}
        self._is_batch: dict[str, bool] = {}
        self._unsynced = unsynced

    def load(self, offset: int) -> None:
        """Load every queue again and cut it at physical ``offset``, durably."""
        self._queues.clear()
        deleted = self._view.topics_deleted()
        for topic, queue_id, folder in list_queues(self._root):
            queue = BatchConsumeQueue(folder, self._file_bytes, self._fds)
            queue.recover(offset)
            queue.truncate(offset)
            if topic in deleted and queue.max_physical_offset <= deleted[topic]:
                # The topic was deleted, but these files were not: base offsets of a new topic of the same name begin at
                # 0 again.
                queue.destroy()
                continue
            durable = self._view.durable
            if durable is not None and durable < offset and queue.max_physical_offset > durable:
                # A killed process of this dispatcher may have left units that are in the page cache only.
                queue.expect_unsynced(0)
            if queue.is_dirty:
                self._unsynced.add(queue, 0)
            self._queues[topic, queue_id] = queue

    def queues(self) -> Iterable[BatchConsumeQueue]:
        """All of these queues."""
        return self._queues.values()

    def split(self, batch: DispatchBatch, rows: Rows) -> tuple[Rows, Rows]:
        """Split ``rows`` (of ``batch``) into those of plain topics, and those that get a 46-byte unit."""
        plain = [number for number, topic in enumerate(batch.topics) if self._is_plain(topic)]
        if len(plain) == len(batch.topics):
            return rows, rows[:0]
        unknown = [number for number, topic in enumerate(batch.topics) if topic not in self._is_batch]
        # The topic is no longer in the table: its records decide.
        marked = _is_inner(rows) & (rows["sys_flag"] & SysFlag.INNER_BATCH != 0)
        is_plain = np.isin(rows["topic"], plain) | (np.isin(rows["topic"], unknown) & ~marked)
        return rows[is_plain], rows[~is_plain]

    def _is_plain(self, topic: str) -> bool:
        """True for a topic that certainly has plain queues. The result stays valid: the type cannot be changed."""
        known = self._is_batch.get(topic)
        if known is None:
            attributes = self._view.topic_attributes(topic)
            if attributes is None:
                return False
            known = self._is_batch[topic] = attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH
        return not known

    def append(self, batch: DispatchBatch, rows: Rows) -> list[tuple[str, int]]:
        """Append the units of ``rows``; returns the queues that grew."""
        changed: list[tuple[str, int]] = []
        deleted = self._view.topics_deleted()
        rows, starts = by_queue(rows)
        inner = _is_inner(rows)
        units = make_units(
            rows["physical_offset"],
            rows["size"],
            rows["tags_code"],
            rows["store_timestamp"],
            np.where(inner, rows["inner_base"], rows["queue_offset"]),
            np.where(inner, rows["inner_num"], 1),
        )
        for start, stop in pairwise(starts):
            topic, queue_id = batch.topics[int(rows["topic"][start])], int(rows["queue_id"][start])
            # Records from before the topic was deleted get no units.
            start += int(np.searchsorted(rows["physical_offset"][start:stop], deleted.get(topic, 0)))
            if start == stop:
                continue
            key = (topic, queue_id)
            queue = self._queues.get(key)
            if queue is None:
                queue = BatchConsumeQueue(self._root / topic / str(queue_id), self._file_bytes, self._fds)
                self._queues[key] = queue
            queue.append_units(units[start:stop])
            self._unsynced.add(queue, (stop - start) * BATCH_UNIT_BYTES)
            changed.append(key)
        return changed

    def forget(self, topic: str) -> None:
        """A topic was deleted: delete its queues."""
        self._is_batch.pop(topic, None)
        for key in [key for key in self._queues if key[0] == topic]:
            queue = self._queues.pop(key)
            self._unsynced.discard(queue)
            queue.destroy()
        folder = self._root / topic
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def expire(self, min_offset: int) -> None:
        """Delete files whose last unit points below ``min_offset`` (spec 3.6)."""
        for queue in self._queues.values():
            queue.delete_files_below(min_offset, settled_below=min_offset)


def _is_inner(rows: Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which records hold a batch, by their properties."""
    result: np.ndarray[Any, np.dtype[np.bool_]] = (rows["inner_num"] > 0) & (rows["inner_base"] >= 0)
    return result
