"""The ends of queues at a place of the log, before the dispatchers have caught up with it.

Below the place where dispatchers begin the ConsumeQueues have every unit; behind it the records themselves say which queue
and offset they have. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from commitmq.format.constants import UNIT_BYTES, SysFlag
from commitmq.store.layout import StoreLayout
from commitmq.store.log import multi_dispatch
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, consumable
from commitmq.store.queues.batch_queue_reader import BatchQueueReader
from commitmq.store.queues.queue_reader import QueueReader

_MAX_FILES: Final = 64
_MAX_QUEUES: Final = 64
_ROWS: Final = 16_384
_BYTES: Final = 16 << 20


class EndsAt:
    """The next offset of each queue when the log ended at ``place``. Close it."""

    def __init__(
        self,
        layout: StoreLayout,
        log: CommitLog,
        *,
        file_bytes: int,
        batch_file_bytes: int,
        dispatched: int,
        place: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Every unit of a record below ``dispatched`` is in its queue; both positions are records' boundaries. Reads the log
        between them. Raises CorruptRecordError.
        """
        self._bound = min(dispatched, place)
        kept: Any = {"max_open_files": _MAX_FILES, "max_queues": _MAX_QUEUES}  # each queue is asked for once
        self._plain = QueueReader(log, layout.consume_queue, file_bytes, **kept)
        self._batches = BatchQueueReader(layout.batch_consume_queue, batch_file_bytes, **kept)
        self._behind: dict[tuple[str, int], int] = {}
        walker = LogWalker(log, max_rows=_ROWS, max_bytes=_BYTES)
        at = max(self._bound, log.min_offset)
        while at < place:
            batch = walker.walk(at, place)
            self._take(batch)
            at = batch.end
            beat()
        walker.release()

    def _take(self, batch: DispatchBatch) -> None:
        rows = batch.rows[consumable(batch.rows)]
        inner = (rows["inner_num"] > 0) & (rows["inner_base"] >= 0) & (rows["sys_flag"] & SysFlag.INNER_BATCH != 0)
        ends = np.where(inner, rows["inner_base"] + rows["inner_num"], rows["queue_offset"] + 1)
        for topic, queue, end in zip(rows["topic"].tolist(), rows["queue_id"].tolist(), ends.tolist(), strict=True):
            self._behind[batch.topics[topic], queue] = end
        if rows["multi_size"].any():
            for key, first, units in multi_dispatch.runs(batch, rows):
                self._behind[key] = first + len(units) // UNIT_BYTES

    def end(self, topic: str, queue: int, *, in_batches: bool = False) -> int | None:
        """The next offset of a queue; None for one without any file or record. Raises StoreError."""
        found = self._behind.get((topic, queue))
        if found is None:
            reader = self._batches if in_batches else self._plain
            bounds = reader.bounds(topic, queue, bound=self._bound)
            found = None if bounds is None else bounds[1]
        return found

    def close(self) -> None:
        self._plain.close()
        self._batches.close()
