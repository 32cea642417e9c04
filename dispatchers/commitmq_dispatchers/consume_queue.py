"""The ConsumeQueue dispatcher: appends one 20-byte unit for each record to its queue's files (spec section 3).

There are two additions: records of BatchCQ topics get a unit of another shape
(:mod:`commitmq_dispatchers.batch_queues`), and a record may name further queues
(:mod:`commitmq.store.log.multi_dispatch`).

Invariants: the units of a queue are appended in the order of their records, at queue offset x 20; a unit is in its file
before the batch's end is published (so a reader that sees the position finds the unit); appending is idempotent by
physical offset, so after any death the batch is simply dispatched again.

A whole batch is grouped by queue with numpy and written with one pwrite for each queue and file; no Python code runs
for each message. Memory grows with the number of queues only: a small object each, and descriptors in a bounded cache.
"""

from __future__ import annotations

import math
import time
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np

from commitmq.config import NodeConfig
from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache, affordable_files
from commitmq.format.constants import UNIT_BYTES
from commitmq.format.units import UNIT
from commitmq.plugin.hookspecs import DispatcherSpec, DispatcherView, hookimpl
from commitmq.store.log import multi_dispatch
from commitmq.store.log.dispatch_batch import DispatchBatch, Rows, by_queue, consecutive, consumable
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.log_proof import LogProof
from commitmq.store.queues.queue_files import QueueFiles, SyncLaterError, list_queues, sync_error, sync_folders
from commitmq_dispatchers.background_sync import BackgroundSync
from commitmq_dispatchers.batch_queues import BatchQueues
from commitmq_dispatchers.ends_record import EndsRecord
from commitmq_dispatchers.queue_extensions import QueueExtensions
from commitmq_dispatchers.unsynced import Unsynced

_PAGE_BYTES = 4096
_FEW_QUEUES = 64
_FEW_FILES = 128  # each needs one more descriptor while it is synced
_QUEUES_A_REPORT = 64
_FLUSH_SLICE = 64
_FLUSH_S = 0.2  # time of one call, unless all queues must be synced
_MOST_UNSYNCED_BYTES = 64 << 20  # bytes of log whose units a recovery would dispatch again


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    """The built-in ConsumeQueue dispatcher."""
    return [DispatcherSpec("consume_queue", "commitmq_dispatchers.consume_queue:ConsumeQueueDispatcher")]


class ConsumeQueueDispatcher:
    """See the module's text; the interface is :class:`commitmq.plugin.hookspecs.Dispatcher`."""

    spreads_flush = True  # flush(thorough=False) syncs every queue in time

    def open(self, view: DispatcherView) -> int:
        """Load every queue, and cut its units at or behind the resume position."""
        self._view = view
        self._root: Path = view.layout.consume_queue
        self._file_bytes = view.config.consume_queue.file_bytes
        self._fds = FdCache(affordable_files(view.config.consume_queue.max_open_files))
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._extensions = QueueExtensions(view, self._fds)
        self._unsynced = Unsynced()
        self._batches = BatchQueues(view, self._fds, self._unsynced)
        self._position = view.position
        self._timestamp = 0
        self._durable = (view.position, 0)
        self._round_end = self._round_share = 0
        self._sync_failed = False
        self._folders: set[str] = set()
        self._background: BackgroundSync | None = None
        self._record = EndsRecord(view, lambda: chain(self._queues.values(), self._batches.queues()))
        self._is_late = False  # a sync failed for lack of a descriptor
        self._load(view.position)
        return view.position

    def truncate(self, offset: int) -> None:
        """Cut every queue at ``offset``, durably."""
        if self._background is not None:
            try:
                self._settle(wait=True)
            except StoreError as error:
                self._give_up(error)
        self._load(offset)
        self.flush(thorough=True)

    def _load(self, offset: int) -> None:
        """Find the end of every queue below ``offset`` and clear away the rest. The clearing is synced like appended
        units: nothing at or above ``offset`` counts as durable before that.
        """
        self._queues.clear()
        self._unsynced.clear()
        deleted = self._view.topics_deleted()
        durable = offset if self._view.durable is None else min(offset, self._view.durable)
        self._unsynced.reached(durable, 0)
        proof = LogProof(self._view.layout.commit_log, self._view.config.commit_log.segment_bytes)
        queues = list(list_queues(self._root))
        for number, (topic, queue_id, folder) in enumerate(queues):
            if number % _QUEUES_A_REPORT == 0:
                self._view.progress("opening queues", number, len(queues), "queues")
            queue = ConsumeQueue(folder, self._file_bytes, self._fds)
            queue.recover(offset, proof=proof.of(topic, queue_id), durable=False)
            if topic in deleted and queue.max_physical_offset <= deleted[topic]:
                # The topic was deleted, but these files were not, or a power cut brought them back. The last record
                # decides: the first places may be blank, where messages expired or were lost.
                queue.destroy()
                continue
            if durable < offset and queue.max_physical_offset > durable:
                # A killed process of this dispatcher may have left units that are in the page cache only.
                queue.expect_unsynced(queue.last_offset_below(durable) * queue.unit_bytes)
            self._queues[topic, queue_id] = queue
            if queue.is_dirty:
                self._unsynced.add(queue, 0)
        proof.close()
        self._extensions.truncate(self._queues)
        self._batches.load(offset)
        self._position = offset
        self._durable = (durable, 0)
        self._round_end = 0
        self._unsynced.reached(offset, self._timestamp)
        self._record.opened(offset)

    def dispatch(self, batch: DispatchBatch) -> None:
        """Append the batch's units and announce the queues that grew."""
        rows = batch.rows
        if len(rows):
            self._timestamp = int(rows["store_timestamp"][-1])
            if not consumable(rows).all():
                rows = rows[consumable(rows)]
            plain, inner = self._batches.split(batch, rows)
            changed = self._append(batch, plain)
            if len(inner):
                changed += self._batches.append(batch, inner)
            if plain["multi_size"].any():
                changed += self._append_further(batch, plain)
            self._view.announce(changed)
        self._position = batch.end
        self._unsynced.reached(batch.end, self._timestamp)

    def _append(self, batch: DispatchBatch, rows: Rows) -> list[tuple[str, int]]:
        changed: list[tuple[str, int]] = []
        if len(rows) == 0:
            return changed
        deleted = self._view.topics_deleted()
        rows, starts = by_queue(rows)
        topics, queues = rows["topic"], rows["queue_id"]
        units = np.empty(len(rows), UNIT)
        units["physical_offset"] = rows["physical_offset"]
        units["size"] = rows["size"]
        units["tags_code"] = rows["tags_code"]
        data = units.view(np.uint8).data
        for start, stop in pairwise(starts):
            topic, queue_id = batch.topics[int(topics[start])], int(queues[start])
            gone_below = deleted.get(topic, -1)
            if gone_below > 0:
                # Records from before the topic was deleted get no units; a new topic of the same name began behind
                # them.
                start += int(np.searchsorted(rows["physical_offset"][start:stop], gone_below))
                if start == stop:
                    continue
            queue = self._queue(topic, queue_id)
            self._extensions.add((topic, queue_id), queue, rows[start:stop], units[start:stop])
            for first, last in consecutive(rows["queue_offset"], start, stop):
                queue.append_units(int(rows["queue_offset"][first]), data[first * UNIT_BYTES : last * UNIT_BYTES])
            self._unsynced.add(queue, (stop - start) * UNIT_BYTES)
            changed.append((topic, queue_id))
        return changed

    def _append_further(self, batch: DispatchBatch, rows: Rows) -> list[tuple[str, int]]:
        """Append units to further queues that records name. A deleted topic's records too: an LMQ belongs to no topic."""
        changed = []
        for key, queue_offset, units in multi_dispatch.runs(batch, rows):
            queue = self._queue(*key)
            queue.append_units(queue_offset, units)
            self._unsynced.add(queue, len(units))
            changed.append(key)
        return changed

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = ConsumeQueue(self._root / topic / str(queue_id), self._file_bytes, self._fds)
            self._queues[topic, queue_id] = queue
        return queue

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        """Sync queues (:meth:`_flush`), and from time to time write down where they end."""
        for queue in self._extensions.look_again():
            self._unsynced.add(queue, 0)
        durable = self._flush(thorough=thorough)
        self._record.flushed(self._position, durable[0])
        if thorough:
            self._record.settle()
        return durable

    def _flush(self, *, thorough: bool) -> tuple[int, int]:
        """Sync all queues when thorough, else some (spec 6.5): queues with ``consume_queue.flush_least_pages`` or more
        unsynced pages, and a share of the others, so that every queue is synced within ``flush_thorough_interval_ms``.

        RocketMQ syncs all of them at the end of that interval. With thousands of queues that is a pause of seconds, in
        which nothing is dispatched. Here a call takes a bounded time, and the queues that wait longest come first. The
        durable position is where the queue that now waits longest began to wait. The log that a recovery must dispatch
        again is bounded in bytes too, as far as a call's time allows. A few queues are synced in full each time, in a
        thread: one call begins the sync, and one of the next calls, which should come soon while :attr:`is_flushing`,
        takes the result.

        A sync that could not begin for lack of a descriptor is repeated at the next call.

        After a failed sync the kernel marks the pages clean, and the next sync would report a false success. So the
        durable position stays where it is: the queues still serve, from the page cache, and the next start rewrites
        them from that position.
        """
        if self._sync_failed:
            return self._durable
        try:
            if self._background is not None and not self._settle(wait=thorough):
                return self._durable
            if thorough:
                self._sync(list(self._unsynced), math.inf)
            elif len(self._unsynced) <= _FEW_QUEUES:
                if sum(queue.unsynced_files for queue in self._unsynced) <= _FEW_FILES:
                    self._sync_behind(list(self._unsynced))
                    return self._durable
                self._sync(list(self._unsynced), math.inf)
            else:
                self._sync_some()
        except SyncLaterError as error:
            if not self._is_late:
                self._view.log.warning("ConsumeQueues cannot be synced now", error=str(error))
            self._is_late = True
            return self._durable
        except StoreError as error:
            self._give_up(error)
            return self._durable
        self._is_late = False
        self._durable = max(self._durable, self._unsynced.durable())
        return self._durable

    def _give_up(self, error: StoreError) -> None:
        self._sync_failed = True
        self._view.log.error(
            "a sync of ConsumeQueues failed: the next start rebuilds them from here on",
            durable=self._durable[0],
            error=str(error),
        )

    @property
    def remaking(self) -> tuple[str, int, int, str] | None:
        """What is made again beside the other work, how much of it is done, of how much, and the unit of both."""
        done, total = self._extensions.looked_at
        return ("looking for lost extension units", done, total, "queues") if done < total else None

    @property
    def is_flushing(self) -> bool:
        """Whether a sync is under way; the next call of :meth:`flush` takes its result if it has ended."""
        return self._background is not None

    def _settle(self, *, wait: bool) -> bool:
        """Take the result of the running sync if it has ended or ``wait`` is set; returns ``wait``. Raises StoreError."""
        assert self._background is not None
        if not wait and not self._background.is_done:
            return False
        background, self._background = self._background, None
        self._durable = max(self._durable, background.result())
        return wait

    def _sync_behind(self, queues: list[QueueFiles]) -> None:
        """Begin to sync queues in a thread. Raises StoreError."""
        if not queues and not self._folders:
            self._durable = max(self._durable, self._unsynced.durable())
            return
        for queue in queues:
            self._extensions.flush(queue.key)
        background = BackgroundSync(queues, self._folders)
        for queue in queues:
            self._unsynced.discard(queue)
        self._folders = set()
        background.start(self._unsynced.durable())
        self._background, self._is_late = background, False

    def _sync_some(self) -> None:
        config = self._view.config.consume_queue
        if self._durable[0] >= self._round_end:
            # A queue that is written to just after its turn waits for two rounds.
            calls = max(1, config.flush_thorough_interval_ms // (2 * config.flush_interval_ms))
            self._round_end, self._round_share = self._position, -(-len(self._unsynced) // calls)
        deadline = time.monotonic() + _FLUSH_S
        self._sync(list(islice(self._unsynced, self._round_share)), deadline)
        self._sync(self._unsynced.waiting_below(self._position - _MOST_UNSYNCED_BYTES), deadline)
        self._sync(self._unsynced.with_bytes(config.flush_least_pages * _PAGE_BYTES), deadline)

    def _sync(self, queues: list[QueueFiles], deadline: float) -> None:
        """Sync queues, slice by slice until ``deadline``, at least one slice."""
        done = 0
        while done < len(queues) and (done == 0 or time.monotonic() < deadline):
            part = [queue for queue in queues[done : done + _FLUSH_SLICE] if queue in self._unsynced]
            for queue in part:
                self._extensions.flush(queue.key)
                queue.start_flush()
            for queue in part:
                queue.flush(self._folders)
                self._unsynced.discard(queue)
            done += _FLUSH_SLICE
        try:
            sync_folders(self._folders)
        except OSError as error:
            raise sync_error(error, self._root) from error

    def forget(self, topic: str) -> None:
        """A topic was deleted: delete its queues."""
        self._extensions.forget(topic)
        self._batches.forget(topic)
        for key in [key for key in self._queues if key[0] == topic]:
            queue = self._queues.pop(key)
            self._unsynced.discard(queue)
            queue.destroy()
        folder = self._root / topic
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def expire(self, min_offset: int) -> None:
        """Delete files whose last unit points below ``min_offset`` (spec 3.6)."""
        self._record.expires(min_offset)
        for queue in self._queues.values():
            queue.delete_files_below(min_offset, settled_below=min_offset)
        self._extensions.expire(self._queues)
        self._batches.expire(min_offset)

    def close(self) -> None:
        """Write down where the queues end, if they are durable; close the descriptors."""
        if self._background is not None:
            self._background.join()
        self._record.closed(self._position, self._durable[0])
        self._fds.close()
