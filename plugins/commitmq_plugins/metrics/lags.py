"""How far groups are behind: in messages, and in time, from the store time of the oldest message that waits.

Read from the ConsumeQueues and the log themselves, as a reader does, so it costs the node's processes nothing. A figure that
cannot be read (a queue under repair, a record that expired meanwhile) is None, and not shown.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from commitmq.control import DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.plugin import WorkerContext
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory.memory_files import MemoryTopics
from commitmq.store.memory.shared_memory import memory_folder
from commitmq.store.metadata.deleted_topics import WatchedTable
from commitmq.store.queues.batch_queue_reader import BatchQueueReader
from commitmq.store.queues.pull_result import PullStatus
from commitmq.store.queues.queue_reader import QueueReader

_MAX_FILES: Final = 256
_MAX_MAPPED: Final = 4
_MOST_KEPT: Final = 50_000


class Position(NamedTuple):
    """The next message of a queue that ``group`` will read."""

    group: str
    topic: str
    queue: int
    offset: int


@dataclass(frozen=True, slots=True)
class QueueLag:
    """``messages`` from ``offset`` to the queue's end; ``since_ms``: when the first of them was stored, None without one."""

    group: str
    topic: str
    queue: int
    offset: int
    end: int
    messages: int
    since_ms: int | None


class _Place(NamedTuple):
    queues: QueueReader | BatchQueueReader
    log: CommitLog
    bound: int
    floor: int


class Lags:
    """The view of one process. Not thread-safe."""

    def __init__(self, context: WorkerContext) -> None:
        config, layout = context.config, context.layout
        self._control = context.control
        self._log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, _MAX_MAPPED)
        self._queues = QueueReader(
            self._log,
            layout.consume_queue,
            config.consume_queue.file_bytes,
            ext_file_bytes=config.consume_queue.ext_file_bytes,
            max_open_files=_MAX_FILES,
        )
        self._batches = BatchQueueReader(
            layout.batch_consume_queue, config.consume_queue.batch_file_bytes, max_open_files=_MAX_FILES
        )
        self._memory_folder: Path = memory_folder(layout)
        self._memory = MemoryTopics(self._memory_folder)
        self._tombstones = WatchedTable(layout.tombstones)
        self._topics: Mapping[str, Mapping[str, Any]] = {}
        self._since: dict[tuple[str, int, int, int], int] = {}

    def close(self) -> None:
        self._queues.close()
        self._batches.close()
        self._memory.close()
        self._log.close()

    def begin(self, topics: Mapping[str, Mapping[str, Any]]) -> None:
        """Before each look: ``topics`` as the coordinator describes them. Lets go of expired files."""
        self._log.release_below(self._control.get(Word.MIN_OFFSET))
        self._queues.drop_deleted_files()
        self._batches.drop_deleted_files()
        self._memory.release_evicted()
        for name in self._topics.keys() - topics.keys():
            self._queues.forget(name)
            self._batches.forget(name)
        self._topics = topics
        if len(self._since) > _MOST_KEPT:
            self._since.clear()

    def bounds(self, topic: str, queue: int) -> tuple[int, int] | None:
        """Offsets of the queue's first message and of its next one; None while they are not known."""
        try:
            place = self._place(topic)
            if place is None:
                return None
            return place.queues.bounds(topic, queue, bound=place.bound, floor=place.floor) or (0, 0)
        except (StoreError, OSError):
            return None

    def of(self, positions: Iterable[Position], most: int) -> list[QueueLag]:
        """The ``most`` largest lags of positions whose queues can be read. The log is read for these alone."""
        ends: dict[tuple[str, int], tuple[int, int] | None] = {}  # many groups read one queue
        behind: list[tuple[int, int, int, Position]] = []
        for one in positions:
            place = one.topic, one.queue
            if place not in ends:
                ends[place] = self.bounds(*place)
            if (bounds := ends[place]) is not None:
                first = max(one.offset, bounds[0])
                behind.append((max(0, bounds[1] - first), first, bounds[1], one))
        if len(behind) > most:
            behind = heapq.nlargest(most, behind, key=lambda one: one[0])
        return [
            QueueLag(*one, end, messages, self._stored_ms(one.topic, one.queue, first) if messages else None)
            for messages, first, end, one in behind
        ]

    def oldest_ms(self) -> int | None:
        """When the oldest message of the log was stored."""
        begin = self._control.get(Word.MIN_OFFSET)
        key = ("", 0, 0, begin)
        if begin >= self._control.get(Word.FLUSHED):
            return None
        if key not in self._since:
            try:
                self._since[key] = self._log.record(begin, check_crc=False).store_timestamp
            except (StoreError, OSError):
                return None
        return self._since[key]

    def _place(self, name: str) -> _Place | None:
        topic = self._topics.get(name)
        if topic is None:
            return None
        attributes = topic["attributes"]
        if attributes.get("storage.type") == "memory":
            found = self._memory.get(name, topic["incarnation"])
            if found is None:
                return None
            bound = found.bound
            return _Place(found.queues, found.log, bound, found.floor)
        bound = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
        if bound < self._control.get(Word.RECOVERED_END):
            return None  # after a crash the queues are being made again
        floor = max(self._control.get(Word.MIN_OFFSET), self._tombstones.load().get(name, 0))
        queues = self._batches if attributes.get("queue.type") == "BatchCQ" else self._queues
        return _Place(queues, self._log, bound, floor)

    def _stored_ms(self, topic: str, queue: int, offset: int) -> int | None:
        incarnation = self._topics[topic]["incarnation"]
        key = (topic, incarnation, queue, offset)
        known = self._since.get(key)
        if known is not None:
            return known
        try:
            place = self._place(topic)
            if place is None:
                return None
            result = place.queues.read(
                topic, queue, offset, bound=place.bound, floor=place.floor, max_messages=1, max_bytes=1
            )
            if result.status is not PullStatus.FOUND:
                return None
            unit = result.units[0]
            stored = place.log.store_timestamp(int(unit["physical_offset"]), int(unit["size"]))
        except (StoreError, OSError):
            return None
        if stored < 0:
            return None
        self._since[key] = stored
        return stored
