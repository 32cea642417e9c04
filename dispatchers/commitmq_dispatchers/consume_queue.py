"""The ConsumeQueue dispatcher: appends one 20-byte unit for each record to its queue's files (spec section 3).

There are two additions: records of BatchCQ topics get a unit of another shape (:class:`BatchQueues`), and a record may name
further queues (:mod:`commitmq.store.log.dispatch_batch`).

Invariants: the units of a queue are appended in the order of their records, at queue offset x 20; a unit is in its file
before the batch's end is published (so a reader that sees the position finds the unit); appending is idempotent by
physical offset, so after any death the batch is simply dispatched again.

A whole batch is grouped by queue with numpy and written with one pwrite for each queue and file; no Python code runs
for each message. Memory grows with the number of queues only: a small object each, and descriptors in a bounded cache.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.errors import FilterError, StoreError
from commitmq.files import disk
from commitmq.files.fd_cache import FdCache, affordable_files
from commitmq.format.bloom import BITMAP_BYTES
from commitmq.format.constants import BATCH_UNIT_BYTES, UNIT_BYTES, SysFlag
from commitmq.format.units import UNIT
from commitmq.kernels.codes import MATCH, NO_MATCH
from commitmq.plugin.hookspecs import DispatcherSpec, DispatcherView, hookimpl
from commitmq.store.log import dispatch_batch
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, Rows, by_queue, consecutive, consumable
from commitmq.store.log.expiry import list_bases
from commitmq.store.metadata.topic_config import QUEUE_TYPE, QUEUE_TYPE_BATCH
from commitmq.store.queues import queue_ends
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue, make_units
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import MAX_ADDRESS, ConsumeQueueExt, ExtensionReader, is_address
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq.store.queues.queue_files import (
    LogProof,
    QueueFiles,
    SyncLaterError,
    list_queues,
    sync_error,
    sync_folders,
)

QueueKey = tuple[str, int]
_LOOK_UNITS: Final = 8_192
_LOOK_S: Final = 0.03


class QueueExtensions:
    """Extension units (spec 3.8), written before the units that point to them, and cut with them.

    Units are added only while ``consume_queue.enable_ext`` is on. Without it, existing extension files are still cut and
    expired with their queues; else switching it on again would meet stale units.

    After a crash, and where an extension's end was lost, the addresses of all units are looked at beside the other work
    (:meth:`look_again`). A unit whose address leads nowhere gets its record's tags code in place of it. So does the unit
    before it: its bit map may reach into the bytes that are lost, and bits that are missing would hide its message.

    The extensions of all queues.
    """

    def __init__(self, view: DispatcherView, fds: FdCache) -> None:
        config = view.config.consume_queue
        self._root = view.layout.consume_queue_ext
        self._view = view
        self._enabled = config.enable_ext
        self._with_bitmaps = config.enable_filter_bit_map
        self._file_bytes = config.ext_file_bytes
        self._fds = fds
        self._queues: dict[QueueKey, ConsumeQueueExt] = {}
        self._walker = LogWalker(view.commit_log, max_rows=1, max_bytes=1 << 30)
        self._reader = ExtensionReader(self._root, self._file_bytes, fds)
        self._look: Iterator[ConsumeQueue | None] = iter(())
        self.looked_at = (0, 0)
        """How many queues were looked at, and how many shall be."""

    def truncate(self, queues: Mapping[QueueKey, ConsumeQueue]) -> None:
        """Load every extension again, and cut it behind the extension unit that the last unit of its queue points to."""
        self._queues.clear()
        suspects = [] if self._view.node_clean or not self._root.is_dir() else list(queues.values())
        for topic, queue_id, folder in list_queues(self._root):
            ext = ConsumeQueueExt(folder, self._file_bytes, self._fds)
            queue = queues.get((topic, queue_id))
            if queue is None or not queue.has_files:
                ext.destroy()  # nothing points to it any more
                continue
            if not _open_behind(ext, queue) and self._view.node_clean:
                suspects.append(queue)
            if queue.is_dirty:
                ext.expect_unsynced(0)  # units that point here are synced again, so the extension units are too
            self._queues[topic, queue_id] = ext
        self._look = self._look_at(suspects)
        self.looked_at = (0, len(suspects))

    # ------------------------------------------------------------ lost units

    def look_again(self) -> list[ConsumeQueue]:
        """Look at the addresses of some more units, for some hundredths of a second; returns the queues that changed."""
        changed, until = [], time.monotonic() + _LOOK_S
        try:
            for queue in self._look:
                if queue is not None:
                    changed.append(queue)
                if time.monotonic() >= until:
                    break
        except StoreError as error:  # an address that leads nowhere costs a look at the record, and no message
            self.looked_at = (0, 0)
            self._view.log.warning("extension units cannot be looked at", error=str(error))
        return changed

    def _look_at(self, queues: Sequence[ConsumeQueue]) -> Iterator[ConsumeQueue | None]:
        """A step yields the queue that it changed, or None."""
        for number, queue in enumerate(queues):
            self.looked_at = (number, len(queues))
            at, end, healed = queue.min_offset, queue.max_offset, 0
            while at < end:
                at = max(at, queue.min_offset)
                units = np.frombuffer(queue.read_units(at, _LOOK_UNITS), UNIT)
                if not len(units):
                    break
                for row in self._lost(queue.key, units).tolist():
                    code = self._code_of(units[row])
                    if code is not None:
                        queue.put_tags_code(at + row, code)
                        healed += 1
                        yield queue
                # The last one is looked at with the one behind it, too.
                at += len(units) - (at + len(units) < end)
                yield None
            if healed:
                topic, queue_id = queue.key
                self._view.log.warning(
                    "lost extension units were made up for", topic=topic, queue=queue_id, units=healed
                )
        self.looked_at = (len(queues), len(queues))

    def _lost(self, key: QueueKey, units: Rows) -> NDArray[np.int64]:
        """The rows of ``units`` whose address leads nowhere, and those just before them."""
        codes = units["tags_code"].astype(np.int64)
        found = self._reader.resolve(f"{key[0]}/{key[1]}", codes)
        if found is None:
            return np.empty(0, np.int64)
        addressed = codes <= MAX_ADDRESS
        lost = found.codes <= MAX_ADDRESS
        lost[:-1] |= lost[1:] & addressed[:-1]
        return np.flatnonzero(lost)

    def _code_of(self, unit: np.void) -> int | None:
        """The tags code of the unit's record; None when the record has expired or cannot be read."""
        start = int(unit["physical_offset"])
        try:
            batch = self._walker.walk(start, start + int(unit["size"]))
        except StoreError:
            return None
        rows = batch.rows
        is_it = len(rows) > 0 and int(rows["physical_offset"][0]) == start
        return int(rows["tags_code"][0]) if is_it else None

    def add(self, key: QueueKey, queue: ConsumeQueue, rows: Rows, units: Rows) -> None:
        """Write the extension units of ``rows``, and put their addresses into ``units``, which ``queue`` gets next.
        Rows that the queue already has are skipped, as the queue itself does.
        """
        if not self._enabled:
            return
        fresh = int(np.searchsorted(rows["physical_offset"] + rows["size"], queue.max_physical_offset, side="right"))
        if fresh == len(rows):
            return
        ext = self._queues.get(key)
        if ext is None:
            ext = ConsumeQueueExt(self._root / key[0] / str(key[1]), self._file_bytes, self._fds)
            _open_behind(ext, queue)
            self._queues[key] = ext
        rows = rows[fresh:]
        bitmaps = self._bitmaps(key[0], rows) if self._with_bitmaps else None
        units["tags_code"][fresh:] = ext.append(rows["tags_code"], rows["store_timestamp"], bitmaps)

    def _bitmaps(self, topic: str, rows: Rows) -> NDArray[np.uint8] | None:
        """Which subscriptions match each record; None when the topic has none."""
        subscriptions = self._view.subscriptions_of(topic)
        if not subscriptions:
            return None
        # A batch never crosses its segment's end.
        first, last = rows[0], rows[-1]
        base = int(first["physical_offset"])
        view = self._view.commit_log.read(base, int(last["physical_offset"]) + int(last["size"]) - base)
        data = np.frombuffer(view, np.uint8)
        positions = rows["physical_offset"] - base
        sizes = rows["size"].astype(np.int64)
        bitmaps = np.zeros((len(rows), BITMAP_BYTES), np.uint8)
        verdicts = np.empty(len(rows), np.uint8)
        for mask, wanted in subscriptions:
            try:
                wanted.judge(data, positions, sizes, verdicts)
            except FilterError as error:
                # Too many bits cost a read of the record; too few bits would lose the record.
                self._view.log.error("a subscription's filter failed", topic=topic, error=str(error))
                verdicts[:] = MATCH
            bitmaps[verdicts != NO_MATCH] |= np.frombuffer(mask, np.uint8)
        return bitmaps

    def flush(self, key: QueueKey) -> None:
        """Sync one queue's extension; to be called before its queue is synced."""
        ext = self._queues.get(key)
        if ext is not None and ext.is_dirty:
            ext.flush()

    def forget(self, topic: str) -> None:
        """A topic was deleted: delete its extensions."""
        for key in [key for key in self._queues if key[0] == topic]:
            self._queues.pop(key).destroy()
        folder = self._root / topic
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def expire(self, queues: Mapping[QueueKey, ConsumeQueue]) -> None:
        """Delete the files that are wholly below the extension unit that each queue's first unit points to."""
        for key, ext in self._queues.items():
            queue = queues.get(key)
            first = None if queue is None else queue.unit(queue.min_offset)
            if first is not None and is_address(first[2]):
                ext.delete_below(first[2])


def _open_behind(ext: ConsumeQueueExt, queue: ConsumeQueue) -> bool:
    """Load ``ext`` and let it continue behind the extension unit that the newest pointing unit of the queue points to.
    Returns False where that unit was lost.

    Without files the whole queue is searched for that unit: the files may have been lost, and an old address must never
    lead to a new unit.
    """
    ext.recover()
    end = queue.max_offset
    least = max(queue.min_offset, end - 1) if ext.has_files else queue.min_offset
    while end > least:
        first = max(least, end - _LOOK_UNITS)
        units = np.frombuffer(queue.read_units(first, end - first), UNIT)
        found = np.flatnonzero(units["tags_code"] <= MAX_ADDRESS)
        if len(found):
            return ext.truncate_behind(int(units["tags_code"][found[-1]]))
        end = first
    return True


_FOLDER: Final = "queue_folder"


class BackgroundSync:
    """Syncs some queues in a thread, so that waiting consumers are not delayed.

    An fdatasync of a queue that has grown waits for the file system's journal, and so for all other writes on their way
    to the device: beside an asynchronous flush of the log it took 75 ms, in which nothing was dispatched.

    The loop passes on separate descriptors (a queue's own may be closed in the meantime, and its files deleted) and the
    durable position that the sync will reach. Units appended in the meantime wait for the next sync. The thread touches
    nothing else, and the loop that started it reads the result after its end.

    One sync.
    """

    def __init__(self, queues: list[QueueFiles], folders: set[str]) -> None:
        """Take over the unsynced files of ``queues`` and the names in ``folders``: they count as synced from now on.
        Raises StoreError when a descriptor cannot be opened; then nothing was taken over.
        """
        self._durable = (0, 0)
        self._error: BaseException | None = None
        self._files: list[tuple[str, int]] = []
        try:
            for queue in queues:
                self._files += [(queue.place, fd) for fd in queue.unsynced_descriptors()]
            names = folders.union(*(queue.folders_to_sync() for queue in queues))
            # Deepest folder first: a folder's durable name is worth nothing before its content is durable.
            for folder in sorted(names, key=lambda path: path.count("/"), reverse=True):
                # A folder that was deleted in the meantime, with its topic, has no names to keep.
                with contextlib.suppress(FileNotFoundError):
                    self._files.append((_FOLDER, disk.open_folder(folder)))
        except OSError as error:
            self._close()
            raise sync_error(error, "") from error
        except StoreError:
            self._close()
            raise
        for queue in queues:
            queue.hand_over_unsynced()
        self._thread = threading.Thread(target=self._run, name="queue-sync", daemon=True)

    def start(self, durable: tuple[int, int]) -> None:
        """Begin. ``durable``: ``(position, timestamp)`` below which everything is on the device if this succeeds."""
        self._durable = durable
        try:
            self._thread.start()
        except RuntimeError:  # no room for a thread: the loop waits, as it would without one
            self._run()

    def _run(self) -> None:
        try:
            for place, fd in self._files:
                if failpoints.ACTIVE and place != _FOLDER:
                    failpoints.hit(f"{place}.before_fdatasync")
                disk.sync(fd, place, metadata=place == _FOLDER)
        except BaseException as error:
            # Any error counts: a sync that did not happen must not be reported as durable.
            self._error = error
        finally:
            self._close()

    def _close(self) -> None:
        for _, fd in self._files:
            os.close(fd)
        self._files.clear()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> tuple[int, int]:
        """Wait for the end: the durable position and timestamp. Raises StoreError when something could not be synced."""
        self.join()
        if self._error is not None:
            reason = getattr(self._error, "strerror", None) or repr(self._error)
            raise StoreError(f"cannot flush the queue: {reason}") from self._error
        return self._durable


# A start after a crash dispatches the log behind the record again: a fraction of a second's work.
_INTERVAL_BYTES: Final = 64 << 20
# With many queues a record takes longer to write: 4 KiB of log for each queue keep its share of the time small.
_INTERVAL_BYTES_A_QUEUE: Final = 4096

Queues = Callable[[], Iterable[ConsumeQueue | BatchConsumeQueue]]


class EndsRecord:
    """Decides when the dispatcher writes down which queues there are and where they end.

    The file is :mod:`commitmq.store.queues.queue_ends`. Every recorded end must be on the device already: a start takes a
    queue that ends before its record for damaged. So the ends are taken at one place of the log and kept until everything
    below it is durable.

    While messages are dispatched, a thread writes the record so that waiting consumers are not delayed: a sync takes as
    long as the device needs. Only one thread runs at a time, and every operation that would make a record wrong waits for
    it first.

    The record of one dispatcher's queues. A record that cannot be written is a warning: a start works without it.
    """

    def __init__(self, view: DispatcherView, queues: Queues) -> None:
        self._path = view.layout.queue_ends
        self._log = view.log
        self._folder = view.commit_log.folder
        self._queues = queues
        self._taken = -1
        self._interval = _INTERVAL_BYTES
        self._waiting: QueueEnds | None = None
        self._writer: threading.Thread | None = None

    def opened(self, position: int) -> None:
        """All queues were opened and cut at ``position``."""
        self._take(position)

    def flushed(self, position: int, durable: int) -> None:
        """The queues have all units below ``position``; those below ``durable`` are on the device."""
        if self._writer is not None and self._writer.is_alive():
            return
        if self._waiting is not None and durable >= self._waiting.position:
            self._save_behind()
        elif self._waiting is None and position - self._taken >= self._interval:
            self._take(position)
            if durable >= position:
                self._save_behind()

    def closed(self, position: int, durable: int) -> None:
        """The stop: nothing more is appended."""
        self.settle()
        if durable >= position:
            self._take(position)
            self._save(self._taken_out())

    def expires(self, min_offset: int) -> None:
        """Files whose last unit points below ``min_offset`` are about to go. Raises StoreError: then they must stay."""
        if any(0 <= queue.first_byte < queue.end_byte - queue.file_bytes for queue in self._queues()):
            self.settle()
            queue_ends.expect_expiry(self._path, min_offset)
            self._waiting, self._taken = None, -self._interval  # the next record has the remaining ones

    def _take(self, position: int) -> None:
        # Without a segment the log continues at its end, which is then its beginning. The folder is listed for this:
        # this process may have mapped nothing since the log was empty.
        log_start = next(iter(list_bases(self._folder)), position)
        ends = QueueEnds.at(position, log_start, self._queues())
        self._waiting, self._taken = ends, position
        self._interval = max(_INTERVAL_BYTES, len(ends.queues) * _INTERVAL_BYTES_A_QUEUE)

    def _taken_out(self) -> QueueEnds:
        assert self._waiting is not None
        ends, self._waiting = self._waiting, None
        return ends

    def _save_behind(self) -> None:
        ends = self._taken_out()
        self._writer = threading.Thread(target=self._save, args=(ends,), name="queue-ends", daemon=True)
        try:
            self._writer.start()
        except RuntimeError:  # no room for a thread
            self._writer = None
            self._save(ends)

    def settle(self) -> None:
        """Wait for the thread to end."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _save(self, ends: QueueEnds) -> None:
        try:
            ends.save(self._path)
        except (StoreError, MemoryError) as error:
            self._log.warning("the record of the queues' ends was not written", error=str(error) or repr(error))


Q = TypeVar("Q", bound=QueueFiles)


class Unsynced:
    """Tracks the queues whose units are not all on the device yet, and so the position below which everything is.

    The queue that waits longest comes first, with the position that the log was dispatched to before its first unsynced
    unit: below that position no unit of any queue is missing on the device. So the durable position follows the syncs one
    by one, in any order, and a recovery begins at the unit that waits longest, not at the last time that all were synced.

    Queues by the position of their first unsynced unit. :meth:`reached` sets that position for the units added next.
    """

    def __init__(self) -> None:
        self._waiting: dict[
            QueueFiles, list[int]
        ] = {}  # bytes, and position and time when it began to wait; in that order
        self._position = 0
        self._timestamp = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueueFiles]:
        return iter(self._waiting)

    def __contains__(self, queue: QueueFiles) -> bool:
        return queue in self._waiting

    def reached(self, position: int, timestamp: int) -> None:
        """Everything below ``position`` (bytes of the log) was added; ``timestamp`` (ms) is that of its newest record."""
        self._position, self._timestamp = position, timestamp

    def add(self, queue: QueueFiles, size: int) -> None:
        """``size`` bytes were appended to ``queue``, of records at or behind the position reached."""
        found = self._waiting.get(queue)
        if found is None:
            self._waiting[queue] = [size, self._position, self._timestamp]
        else:
            found[0] += size

    def discard(self, queue: QueueFiles) -> None:
        """``queue`` is synced, or deleted."""
        self._waiting.pop(queue, None)

    def forget(self, topic: str, queues: dict[tuple[str, int], Q], root: Path) -> None:
        """Delete the ``queues`` of a topic that was deleted, and its folder below ``root``."""
        for key in [key for key in queues if key[0] == topic]:
            queue = queues.pop(key)
            self.discard(queue)
            queue.destroy()
        folder = root / topic
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def clear(self) -> None:
        self._waiting.clear()

    def durable(self) -> tuple[int, int]:
        """``(position, timestamp)`` below which no queue waits."""
        for _, position, timestamp in self._waiting.values():
            return position, timestamp
        return self._position, self._timestamp

    def waiting_below(self, position: int) -> list[QueueFiles]:
        """Queues with unsynced units of records that begin, or may begin, below ``position``; the oldest first."""
        found = []
        for queue, (_, since, _) in self._waiting.items():
            if since >= position:
                break
            found.append(queue)
        return found

    def with_bytes(self, least: int) -> list[QueueFiles]:
        """Queues with at least ``least`` unsynced bytes."""
        return [queue for queue, (size, _, _) in self._waiting.items() if size >= least]


class BatchQueues:
    """Queues of topics with ``queue.type=BatchCQ``: one 46-byte unit for each record (spec 3.9).

    It keeps the dispatcher's invariants: units are in the order of their records, they are in the file before the batch's end
    is published, and appending them again changes nothing.

    The topic table says which topics these are. For a topic that is not in the table (it was just deleted) the record
    decides: only the node's writer makes inner batches, and only for such topics. A record of these topics without
    INNER_NUM and INNER_BASE counts as a batch of one, as in RocketMQ 5.4.0, where plain sends to such a topic are possible.

    All queues under ``batchconsumequeue/``. Appended units wait in ``unsynced`` for their sync.
    """

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
        self._unsynced.forget(topic, self._queues, self._root)

    def expire(self, min_offset: int) -> None:
        """Delete files whose last unit points below ``min_offset`` (spec 3.6)."""
        for queue in self._queues.values():
            queue.delete_files_below(min_offset, settled_below=min_offset)


def _is_inner(rows: Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which records hold a batch, by their properties."""
    result: np.ndarray[Any, np.dtype[np.bool_]] = (rows["inner_num"] > 0) & (rows["inner_base"] >= 0)
    return result


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
    """Appends a unit for each record to the file of its queue (see :class:`commitmq.plugin.hookspecs.Dispatcher`)."""

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
        for key, queue_offset, units in dispatch_batch.runs(batch, rows):
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
        """What is rebuilt beside the other work, how much of it is done, of how much, and the unit of both."""
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
        self._unsynced.forget(topic, self._queues, self._root)

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
