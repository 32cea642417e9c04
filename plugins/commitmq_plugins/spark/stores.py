"""A store folder as the source reads it: which queues there are, and which of their messages may be shown.

Looks only, never locks: the node may run meanwhile. While it runs, its control block says what is flushed and in the
ConsumeQueues; of a store that nobody uses the end of the log is found as a recovery finds it, without changing anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.store import json_config
from commitmq.store.batch_queue_reader import BatchQueueReader
from commitmq.store.commit_log import CommitLog
from commitmq.store.dispatch_batch import LogWalker, consumable
from commitmq.store.layout import StoreLayout
from commitmq.store.log_proof import has_record_before
from commitmq.store.mapped_file import list_sizes
from commitmq.store.queue_reader import QueueReader
from commitmq.store.recovery import scan_to_end
from commitmq.store.sidecar import Sidecar
from commitmq.store.store_lock import lock_holder

_QUEUE_FILE_BYTES: Final = 6_000_000
_BATCH_FILE_BYTES: Final = 13_800_000
_MAX_MAPPED: Final = 4
_CHUNK_UNITS: Final = 65_536
_WALK_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of each kind of file, as the store's files have them."""

    segment: int
    queue_file: int
    batch_file: int


@dataclass(frozen=True)
class Slice:
    """Queue offsets ``[first, end)`` of one queue; records below physical offset ``floor`` belong to nobody."""

    topic: str
    queue_id: int
    is_batch: bool
    first: int
    end: int
    floor: int = 0

    @property
    def count(self) -> int:
        """Messages, as far as offsets tell."""
        return self.end - self.first


class OpenStore:
    """The store in ``root``, opened to read. Not thread-safe."""

    def __init__(self, root: Path, sizes: Sizes | None = None) -> None:
        """Raises StoreError when it is no store. ``sizes``: known already, so that the folder need not be searched."""
        self.layout = StoreLayout(root.absolute())
        if not self.layout.commit_log.is_dir():
            raise StoreError("this is no store: it has no folder commitlog", path=root)
        self.sizes = sizes or found_sizes(self.layout)
        self.log = CommitLog(self.layout.commit_log, self.sizes.segment, max_mapped=_MAX_MAPPED)
        self.queues = QueueReader(self.log, self.layout.consume_queue, self.sizes.queue_file)
        self.batches = BatchQueueReader(self.layout.batch_consume_queue, self.sizes.batch_file)
        self._deleted: dict[str, int] = json_config.load(self.layout.own / "deleted_topics.json") or {}

    def close(self) -> None:
        """Give back descriptors and maps."""
        self.queues.close()
        self.batches.close()
        self.log.close()

    @property
    def is_live(self) -> bool:
        """Whether a node runs on the store."""
        return bool(lock_holder(self.layout.lock)) and self.layout.control.exists()

    def span(self) -> tuple[int, int]:
        """``(floor, bound)``: the physical offsets between which records may be shown: flushed, and not expired."""
        if self.is_live:
            control = ControlBlock(self.layout.control)
            try:
                # The floor first: it may only be older than the bound.
                floor = control.get(Word.MIN_OFFSET)
                return floor, min(control.get(Word.FLUSHED), control.dispatcher(0, DispatcherWord.DISPATCHED))
            finally:
                control.close()
        return self.log.min_offset, self._end_at_rest()

    def _end_at_rest(self) -> int:
        """Where the log ends when nobody uses the store: behind the last whole record."""
        start = next((base for base in reversed(self.log.segments()) if any(self.log.read(base, 8))), None)
        if start is None:
            return 0
        known = Sidecar.load(self.layout.sidecar)
        if known is not None and start < known.flushed < self.log.end_offset:
            # What lies below was checked by the node that flushed it; it counts if the log still has a record there.
            start = known.flushed if has_record_before(self.log, known.flushed) else start
        return scan_to_end(self.log, start).end

    def unqueued(self, bound: int) -> list[tuple[str, int, int]]:
        """``(topic, queue, queue offset)`` of messages at the end of the log that are in no ConsumeQueue.

        A crash may leave some, until the next start of a node puts them there. What is looked at is the log behind the
        last record that any queue has; a queue that lost more than others is for ``store verify`` to find.
        """
        ends = {(one.topic, one.queue_id): one for one in self.slices(0, bound)}
        last = max(
            (self.place(one, one.end - 1, bound) for one in ends.values() if one.count), default=self.log.min_offset
        )
        walker = LogWalker(self.log, max_rows=_CHUNK_UNITS, max_bytes=_WALK_BYTES)
        found = []
        while last < bound:
            batch = walker.walk(last, bound)
            for row in batch.rows[consumable(batch.rows)]:
                topic, queue = batch.topics[row["topic"]], int(row["queue_id"])
                known = ends.get((topic, queue))
                end = 0 if known is None else known.end
                if int(row["queue_offset"]) >= end and int(row["physical_offset"]) >= self.floor_of(topic, 0):
                    found.append((topic, queue, int(row["queue_offset"])))
            last = batch.end
        walker.release()
        return found

    def floor_of(self, topic: str, floor: int) -> int:
        """``floor``, or where the present topic of this name may begin when an earlier one was deleted."""
        return max(floor, int(self._deleted.get(topic, 0)))

    def place(self, queue: Slice, offset: int, bound: int) -> int:
        """Physical offset of the first message at or behind queue ``offset``; ``bound`` without one."""
        found = self._reader(queue).read(
            queue.topic, queue.queue_id, offset, bound=bound, floor=queue.floor, max_messages=1, max_bytes=1
        )
        return int(found.units["physical_offset"][0]) if found.count else bound

    def offset_at(self, queue: Slice, physical: int, bound: int) -> int:
        """First queue offset in the slice whose record begins at or behind ``physical``; its end without one."""
        found = self._reader(queue).offset_at(queue.topic, queue.queue_id, physical, bound=bound, floor=queue.floor)
        return queue.end if found is None else min(max(found, queue.first), queue.end)

    def within_bytes(self, queue: Slice, budget: int, bound: int) -> int:
        """The queue offset up to which the slice's records take at most ``budget`` bytes together."""
        at = queue.first
        while at < queue.end:
            found = self._reader(queue).read(
                queue.topic, queue.queue_id, at, bound=bound, floor=queue.floor,
                max_messages=min(_CHUNK_UNITS, queue.end - at), max_bytes=max(budget, 1),
            )  # fmt: skip
            taken = int(found.units["size"].sum(dtype="i8"))
            if found.next_offset <= at or taken > budget:
                break
            budget -= taken
            at = found.next_offset
        return min(at, queue.end)

    def _reader(self, queue: Slice) -> QueueReader | BatchQueueReader:
        return self.batches if queue.is_batch else self.queues

    def offset_by_time(self, queue: Slice, timestamp: int, bound: int) -> int:
        """First queue offset stored at ``timestamp`` (ms) or later, within the slice; its end when all is older."""
        found = self._reader(queue).offset_by_time(
            queue.topic, queue.queue_id, timestamp, bound=bound, floor=queue.floor
        )
        return queue.end if found is None else min(max(found, queue.first), queue.end)

    def slices(self, floor: int, bound: int, wants: Callable[[str], bool] = lambda _topic: True) -> list[Slice]:
        """All queues of wanted topics as far as they may be shown, by topic and number; also those that are empty."""
        found = []
        for folder, is_batch in ((self.layout.consume_queue, False), (self.layout.batch_consume_queue, True)):
            reader = self.batches if is_batch else self.queues
            for topic, queue_id in _folders(folder, wants):
                lowest = self.floor_of(topic, floor)
                span = reader.bounds(topic, queue_id, bound=bound, floor=lowest)
                if span is not None:
                    found.append(Slice(topic, queue_id, is_batch, *span, lowest))
        return sorted(found, key=lambda one: (one.topic, one.queue_id, one.is_batch))


def found_sizes(layout: StoreLayout) -> Sizes:
    """The sizes that the files of a store show; RocketMQ's own where there is no file yet."""
    segments = list_sizes(layout.commit_log, 1)
    return Sizes(
        next((size for _, size in segments if size), 1 << 30),
        _first_queue_file(layout.consume_queue) or _QUEUE_FILE_BYTES,
        _first_queue_file(layout.batch_consume_queue) or _BATCH_FILE_BYTES,
    )


def _first_queue_file(folder: Path) -> int:
    return next((size for path in folder.glob("*/*/" + "[0-9]" * 20) if (size := path.stat().st_size)), 0)


def _folders(root: Path, wants: Callable[[str], bool]) -> list[tuple[str, int]]:
    """``(topic, queue)`` of every queue folder of a wanted topic below ``root``."""
    if not root.is_dir():
        return []
    return [
        (topic.name, int(queue.name))
        for topic in root.iterdir()
        if topic.is_dir() and wants(topic.name)
        for queue in topic.iterdir()
        if queue.name.isascii() and queue.name.isdigit()
    ]
