"""The ConsumeQueue dispatcher: one 20-byte unit a record into the queue's files (spec section 3).

Invariants: units of a queue are appended in the order of their records, at queue offset x 20; a unit is in its file before
the batch's end is published (so a reader that sees the position finds the unit); appending is idempotent by physical
offset, so after any death the batch is simply dispatched again.

A whole batch is grouped by queue with numpy and written with one pwrite a queue and file; work per message in Python is
none. Memory grows with the number of queues only: a small object each, descriptors in a bounded cache.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from commitmq.config import NodeConfig
from commitmq.hookspecs import DispatcherSpec, DispatcherView, hookimpl
from commitmq.store.consume_queue import ConsumeQueue, list_queues
from commitmq.store.dispatch_batch import DispatchBatch, consumable
from commitmq.store.fd_cache import FdCache
from commitmq.store.log_proof import LogProof

_UNIT = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_PAGE_BYTES = 4096
_FEW_QUEUES = 64


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    """The built-in ConsumeQueue dispatcher."""
    return [DispatcherSpec("consume_queue", "commitmq_dispatchers.consume_queue:ConsumeQueueDispatcher")]


class ConsumeQueueDispatcher:
    """See the module's text; the interface is :class:`commitmq.hookspecs.Dispatcher`."""

    def open(self, view: DispatcherView) -> int:
        """Load every queue, cut what lies at or behind the resume position."""
        self._view = view
        self._root: Path = view.layout.consume_queue
        self._file_bytes = view.config.consume_queue.file_bytes
        self._fds = FdCache(view.config.consume_queue.max_open_files)
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._written: dict[tuple[str, int], int] = {}
        self._position = view.position
        self._timestamp = 0
        self._durable = (view.position, 0)
        self._load(view.position)
        return view.position

    def truncate(self, offset: int) -> None:
        """Cut every queue at ``offset``, durably."""
        self._load(offset)
        self.flush(thorough=True)

    def _load(self, offset: int) -> None:
        """Find the end of every queue below ``offset`` and clear away the rest, which is synced like what is appended:
        nothing at or above ``offset`` counts as durable before that.
        """
        self._queues.clear()
        self._written.clear()
        proof = LogProof(self._view.layout.commit_log, self._view.config.commit_log.segment_bytes)
        for topic, queue_id, folder in list_queues(self._root):
            queue = ConsumeQueue(folder, self._file_bytes, self._fds)
            queue.recover(offset, proof=proof.of(topic, queue_id), durable=False)
            self._queues[topic, queue_id] = queue
            if queue.is_dirty:
                self._written[topic, queue_id] = 0
        proof.close()
        self._position = offset
        self._durable = (offset, self._timestamp)

    def dispatch(self, batch: DispatchBatch) -> None:
        """Append the batch's units and announce which queues grew."""
        rows = batch.rows
        if len(rows):
            self._timestamp = max(self._timestamp, int(rows["store_timestamp"][-1]))
            changed = self._append(batch, rows if consumable(rows).all() else rows[consumable(rows)])
            self._view.announce(changed)
        self._position = batch.end

    def _append(self, batch: DispatchBatch, rows: np.ndarray[Any, np.dtype[np.void]]) -> list[tuple[str, int]]:
        topics, queues = rows["topic"], rows["queue_id"]
        changed: list[tuple[str, int]] = []
        deleted = self._view.topics_deleted()
        if len(rows) == 0:
            return changed
        boundaries = (topics[1:] != topics[:-1]) | (queues[1:] != queues[:-1])
        if boundaries.any():
            # Stable, so records of one queue stay in log order.
            order = np.lexsort((queues, topics))
            rows = rows[order]
            topics, queues = rows["topic"], rows["queue_id"]
            boundaries = (topics[1:] != topics[:-1]) | (queues[1:] != queues[:-1])
        units = np.empty(len(rows), _UNIT)
        units["physical_offset"] = rows["physical_offset"]
        units["size"] = rows["size"]
        units["tags_code"] = rows["tags_code"]
        data = units.view(np.uint8).data
        starts = [0, *(np.flatnonzero(boundaries) + 1).tolist(), len(rows)]
        for start, stop in pairwise(starts):
            topic, queue_id = batch.topics[int(topics[start])], int(queues[start])
            gone_below = deleted.get(topic, -1)
            if gone_below > 0:
                # Records from before the topic was deleted belong to nobody; a new topic of the name began behind.
                start += int(np.searchsorted(rows["physical_offset"][start:stop], gone_below))
                if start == stop:
                    continue
            self._queue(topic, queue_id).append_units(int(rows["queue_offset"][start]), data[start * 20 : stop * 20])
            self._written[topic, queue_id] = self._written.get((topic, queue_id), 0) + (stop - start) * 20
            changed.append((topic, queue_id))
        return changed

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = ConsumeQueue(self._root / topic / str(queue_id), self._file_bytes, self._fds)
            self._queues[topic, queue_id] = queue
        return queue

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        """Sync queues with ``consume_queue.flush_least_pages`` or more unsynced pages, all when thorough (spec 6.5).

        The durable position moves at thorough flushes, or when nothing was left over. A few queues are synced in full
        each time: it costs little, and a recovery then starts a second back instead of a minute.
        """
        few = len(self._written) <= _FEW_QUEUES
        least = 0 if thorough or few else self._view.config.consume_queue.flush_least_pages * _PAGE_BYTES
        for key, size in list(self._written.items()):
            if size >= least:
                self._queues[key].flush()
                del self._written[key]
        if not self._written:
            self._durable = (self._position, self._timestamp)
        return self._durable

    def forget(self, topic: str) -> None:
        """A topic was deleted: delete its queues."""
        for key in [key for key in self._queues if key[0] == topic]:
            self._queues.pop(key).destroy()
            self._written.pop(key, None)
        folder = self._root / topic
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def expire(self, min_offset: int) -> None:
        """Delete files whose last unit points below ``min_offset`` (spec 3.6)."""
        for queue in self._queues.values():
            queue.delete_expired(min_offset)

    def close(self) -> None:
        """Close the descriptors."""
        self._fds.close()
