"""Reads the half topic and the op topic: their one queue, and their records in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from commitmq.control import DispatcherWord, Word
from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError
from commitmq.format.constants import MIN_RECORD_BYTES, PREBLANK_SIZE
from commitmq.format.record import Record, body_bytes_of, decode_record
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.expired_segments import ExpiredSegments

QUEUE: Final = 0
_HEAD_BYTES: Final = 8

Wanted = Callable[[int, memoryview], bool]


class Head(NamedTuple):
    """A half message whose body was not read: ``record`` has none."""

    record: Record
    body_bytes: int


class HalfQueues:
    """The queues as far as they are dispatched, and the log as far as it is committed."""

    def __init__(self, context: WorkerContext) -> None:
        config, layout = context.config, context.layout
        self._control = context.control
        self.log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, config.commit_log.max_mapped_segments)
        self._expired = ExpiredSegments(context, self.log)
        self._reader = QueueReader(self.log, layout.consume_queue, config.consume_queue.file_bytes)

    def release(self) -> None:
        """Unmap what is to be deleted; call it in every turn."""
        self._expired.release()

    def bounds(self, topic: str) -> tuple[int, int]:
        """``(first offset, next offset)`` of a queue; zeros for one that has never had a message."""
        bound, floor = self._bounds()
        return self._reader.bounds(topic, QUEUE, bound=bound, floor=floor) or (0, 0)

    def records(self, topic: str, offset: int, count: int) -> tuple[int, list[Record]]:
        """``(offset behind, records)`` of up to ``count`` units from ``offset`` on. Units without a record are left out."""
        behind, places = self._places(topic, offset, count)
        found = [record for _, place, _ in places if (record := self.record(place)) is not None]
        return behind, found

    def heads(self, topic: str, offset: int, count: int, wanted: Wanted) -> tuple[int, list[Head]]:
        """As :meth:`records`, without bodies: a look at many half messages costs what their properties cost.

        ``wanted`` is told a queue offset and the bytes of its record; only records that it wants are decoded.
        """
        behind, places = self._places(topic, offset, count)
        found = []
        for number, place, size in places:
            try:
                is_wanted = wanted(number, self.log.read(place, size))
            except OffsetOutOfRangeError:
                continue
            if is_wanted and (head := self.head(place)) is not None:
                found.append(head)
        return behind, found

    def record(self, place: int) -> Record | None:
        """The record at physical offset ``place``; None when none is there (any more)."""
        data = self._data(place)
        try:
            return None if data is None else decode_record(data, expected_physical_offset=place)
        except (CorruptRecordError, ValueError):
            return None

    def head(self, place: int) -> Head | None:
        """As :meth:`record`, without the body."""
        data = self._data(place)
        try:
            if data is None:
                return None
            record = decode_record(data, with_body=False, expected_physical_offset=place)
        except (CorruptRecordError, ValueError):
            return None
        return Head(record, body_bytes_of(data))

    def _places(self, topic: str, offset: int, count: int) -> tuple[int, list[tuple[int, int, int]]]:
        """``(offset behind, (queue offset, physical offset, size) of each unit that has a record)``."""
        bound, floor = self._bounds()
        at, units = self._reader.units(topic, QUEUE, offset, count, bound=bound, floor=floor)
        pairs = zip(units["physical_offset"].tolist(), units["size"].tolist(), strict=True)
        found = [
            (number, place, size)
            for number, (place, size) in enumerate(pairs, at)
            if size >= MIN_RECORD_BYTES and size != PREBLANK_SIZE
        ]
        return at + len(units), found

    def _data(self, place: int) -> memoryview | None:
        if not self._control.get(Word.MIN_OFFSET) <= place <= self._control.committed() - MIN_RECORD_BYTES:
            return None
        try:
            size = int.from_bytes(self.log.read(place, _HEAD_BYTES)[:4], "big")
            return self.log.read(place, size) if MIN_RECORD_BYTES <= size <= self.log.segment_bytes else None
        except (OffsetOutOfRangeError, ValueError):
            return None

    def _bounds(self) -> tuple[int, int]:
        return self._control.dispatcher(0, DispatcherWord.DISPATCHED), self._control.get(Word.MIN_OFFSET)

    def close(self) -> None:
        self._reader.close()
