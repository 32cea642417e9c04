"""Offsets of the CommitLog as a dispatcher may have them: where records begin, and which record begins there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commitmq.control import Word
from commitmq.errors import CorruptRecordError
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.workers.runtime.context import WorkerContext


class LogPositions:
    """Looks into the log. Nothing here is fast: it reads from the beginning of a segment, or one record at a time."""

    def __init__(self, context: WorkerContext, log: CommitLog) -> None:
        self._context, self._control, self._log = context, context.control, log

    def begins_a_record(self, offset: int) -> bool:
        """Whether a record begins at ``offset``. True also at the end of the log, below its beginning, and where it cannot be
        read yet: such an offset was the writer's own end of the log at some time.
        """
        end = self._control.committed()
        if end <= offset <= self._control.get(Word.WRITTEN) or offset < self._control.get(Word.MIN_OFFSET):
            return True
        try:
            LogWalker(self._log, max_rows=1, max_bytes=self._log.segment_bytes).walk(offset, end)
        except CorruptRecordError:
            return False
        return True

    def check(self, said_by: str, offset: int) -> None:
        """Raise ValueError for a dispatcher's offset that is not between two records."""
        if not self.begins_a_record(offset):
            raise ValueError(f"{said_by} returned the offset {offset}, where no record begins")

    def record_behind(self, position: int, limit: int) -> dict[str, Any]:
        """The record behind ``position``: offset, size, topic, queue and queue offset (offset alone at ``limit``)."""
        start = position
        while start < limit:
            batch = LogWalker(self._log, max_rows=1, max_bytes=self._log.segment_bytes).walk(start, limit)
            if len(batch):
                row = batch.rows[0]
                return {
                    "physical_offset": int(row["physical_offset"]),
                    "size": int(row["size"]),
                    "topic": batch.topics[int(row["topic"])],
                    "queue": int(row["queue_id"]),
                    "queue_offset": int(row["queue_offset"]),
                }
            start = batch.end
        return {"physical_offset": position}

    def is_boundary(self, offset: int, low: int, high: int) -> bool:
        """Whether a record between ``low`` and ``high`` begins at ``offset``, or it is one of the two."""
        if offset in (low, high):
            return True
        start = max(low, offset - offset % self._log.segment_bytes)
        for batch in self._walk(start, high):
            if batch.end > offset:
                return bool((batch.rows["physical_offset"] == offset).any())
            if batch.end == offset:
                return True
        return False

    def offset_by_time(self, timestamp: int, low: int, high: int) -> int:
        """Physical offset of the first record stored at ``timestamp`` or later; ``high`` when there is none."""
        start = low
        for base in self._log.segments():
            if low < base < high:
                first = next(iter(self._walk(base, high, rows=1)), None)
                if first is None or not len(first) or int(first.rows["store_timestamp"][0]) >= timestamp:
                    break
                start = base
        for batch in self._walk(start, high):
            found = (batch.rows["store_timestamp"] >= timestamp).nonzero()[0]
            if len(found):
                return int(batch.rows["physical_offset"][found[0]])
        return high

    def _walk(self, start: int, limit: int, rows: int = 16_384) -> Iterator[DispatchBatch]:
        walker = LogWalker(self._log, max_rows=rows, max_bytes=32 * 1024 * 1024)
        while start < limit:
            batch = walker.walk(start, limit)
            yield batch
            start = batch.end
            self._context.heartbeat()
