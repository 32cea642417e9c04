"""Reads the half topic and the op topic: their one queue, and their records in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commitmq.control import DispatcherWord, Word
from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError
from commitmq.format.constants import MIN_RECORD_BYTES, PREBLANK_SIZE
from commitmq.format.record import Record, decode_record
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.expired_segments import ExpiredSegments

QUEUE: Final = 0
_HEAD_BYTES: Final = 8


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

    def records(
        self, topic: str, offset: int, count: int, wanted: Callable[[int, bytes], bool] | None = None
    ) -> tuple[int, list[Record]]:
        """``(offset behind, records)`` of up to ``count`` units from ``offset`` on. Units without a record are left out.

        ``wanted`` is told a queue offset and the bytes of its record; only records that it wants are decoded.
        """
        bound, floor = self._bounds()
        at, units = self._reader.units(topic, QUEUE, offset, count, bound=bound, floor=floor)
        found = []
        places = zip(units["physical_offset"].tolist(), units["size"].tolist(), strict=True)
        for number, (place, size) in enumerate(places, at):
            if size < MIN_RECORD_BYTES or size == PREBLANK_SIZE:
                continue
            if wanted is not None and not self._is_wanted(number, place, size, wanted):
                continue
            if (record := self.record(place)) is not None:
                found.append(record)
        return at + len(units), found

    def _is_wanted(self, offset: int, place: int, size: int, wanted: Callable[[int, bytes], bool]) -> bool:
        try:
            return wanted(offset, bytes(self.log.read(place, size)))
        except OffsetOutOfRangeError:
            return False

    def record(self, place: int) -> Record | None:
        """The record at physical offset ``place``; None when none is there (any more)."""
        if not self._control.get(Word.MIN_OFFSET) <= place <= self._control.committed() - MIN_RECORD_BYTES:
            return None
        try:
            size = int.from_bytes(self.log.read(place, _HEAD_BYTES)[:4], "big")
            if not MIN_RECORD_BYTES <= size <= self.log.segment_bytes:
                return None
            return decode_record(self.log.read(place, size), expected_physical_offset=place)
        except (OffsetOutOfRangeError, CorruptRecordError, ValueError):
            return None

    def _bounds(self) -> tuple[int, int]:
        return self._control.dispatcher(0, DispatcherWord.DISPATCHED), self._control.get(Word.MIN_OFFSET)

    def close(self) -> None:
        self._reader.close()
