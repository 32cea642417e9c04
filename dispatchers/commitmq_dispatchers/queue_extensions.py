"""The ConsumeQueue dispatcher's extension units (spec 3.8), written before the units that point to them, and cut with
them.

Units are added only while ``consume_queue.enable_ext`` is on. Without it, existing extension files are still cut and
expired with their queues; else switching it on again would meet stale units.

After a crash, and where an extension's end was lost, the addresses of all units are looked at beside the other work
(:meth:`QueueExtensions.look_again`). A unit whose address leads nowhere gets its record's tags code in place of it. So does
the unit before it: its bit map may reach into the bytes that are lost, and bits that are missing would hide its message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import FilterError, StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.bloom import BITMAP_BYTES
from commitmq.format.units import UNIT
from commitmq.kernels.codes import MATCH, NO_MATCH
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.log.dispatch_batch import LogWalker, Rows
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import MAX_ADDRESS, ConsumeQueueExt, ExtensionReader, is_address
from commitmq.store.queues.queue_files import list_queues

QueueKey = tuple[str, int]
_LOOK_UNITS: Final = 8_192
_LOOK_S: Final = 0.03


class QueueExtensions:
    """The extensions of all queues."""

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
