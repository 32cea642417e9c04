"""The ends of queues, so that no group commits an offset behind the stored messages.

The coordinator reads the same ConsumeQueue files as the readers, up to the same bound. So every message shown to a
consumer lies below the end that is found here afterwards. An end only grows as long as its topic lives. The last end
found is kept, and files are read only when an offset lies behind it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Final

from commitmq.config import NodeConfig
from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.errors import StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory.memory_files import MemoryTopics
from commitmq.store.memory.shared_memory import memory_folder
from commitmq.store.metadata.topic_config import (
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    QUEUE_TYPE_SIMPLE,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
)
from commitmq.store.queues.batch_consume_queue import BatchQueueReader
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory

_MAX_KEPT: Final = 100_000
_MAX_FILES: Final = 64


class QueueEnds:
    """The queue ends of one coordinator. Changes nothing in the store."""

    def __init__(self, layout: StoreLayout, config: NodeConfig, control: ControlBlock) -> None:
        self._control = control
        self.cuts = CutHistory.load(layout)  # a log is cut before its node serves anybody
        self._log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, max_mapped=1)
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
        self._memory = MemoryTopics(memory_folder(layout))
        self._kept: OrderedDict[tuple[str, int, int], int] = OrderedDict()  # topic, incarnation, queue
        self._at_cuts: OrderedDict[tuple[str, int, int, int], int] = OrderedDict()  # and the cut's end

    def close(self) -> None:
        self._queues.close()
        self._batches.close()
        self._memory.close()
        self._log.close()

    def forget(self, topic: str) -> None:
        """``topic`` was deleted or changed: its files may be other ones by now."""
        self._queues.forget(topic)
        self._batches.forget(topic)

    def end(self, topic: TopicConfig, queue: int, offset: int, floor: int) -> int | None:
        """A lower bound of the queue's next offset, if it decides whether ``offset`` is valid; else ``offset``. None
        when it is unknown: the queues are being repaired after a crash, or cannot be read.

        ``floor``: physical offset below which no record belongs to the topic.
        """
        key = (topic.name, topic.incarnation, queue)
        if self._kept.get(key, 0) >= offset:
            return offset
        bound = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
        in_memory = topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY
        # Without a supervisor no process dispatches. After a crash consumers may have seen more than is dispatched
        # again so far.
        if not self._control.get(Word.EPOCH) or (not in_memory and bound < self._control.get(Word.RECOVERED_END)):
            return None
        found: tuple[int, int] | None = None
        try:
            if in_memory:
                memory = self._memory.get(topic.name, topic.incarnation)
                if memory is not None:
                    top = memory.bound
                    found = memory.queues.bounds(topic.name, queue, bound=top, floor=memory.floor)
            elif topic.attributes.get(QUEUE_TYPE, QUEUE_TYPE_SIMPLE) == QUEUE_TYPE_BATCH:
                found = self._batches.bounds(topic.name, queue, bound=bound, floor=floor)
            else:
                found = self._queues.bounds(topic.name, queue, bound=bound, floor=floor)
        except (StoreError, OSError):
            return None
        end = 0 if found is None else found[1]
        with contextlib.suppress(KeyError):
            del self._kept[key]
        self._kept[key] = end
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return end

    def end_since(self, topic: TopicConfig, queue: int, generation: int) -> int | None:
        """The queue's end at the lowest cut of the log since ``generation``: an offset that was learnt then and lies behind it
        is of a message that is gone. None without such a cut, and for queues that cannot be read now.
        """
        cut = self.cuts.end_since(generation)
        if cut == NO_CUT or topic.attributes.get(STORAGE_TYPE) == STORAGE_MEMORY:
            return None
        key = (topic.name, topic.incarnation, queue, cut)
        if (found := self._at_cuts.get(key)) is not None:
            return found
        is_batch = topic.attributes.get(QUEUE_TYPE, QUEUE_TYPE_SIMPLE) == QUEUE_TYPE_BATCH
        try:
            bound = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
            found = (self._batches if is_batch else self._queues).offset_at(topic.name, queue, cut, bound=bound)
        except (StoreError, OSError):
            return None
        if found is not None and bound >= min(cut, self._control.get(Word.RECOVERED_END)):
            self._at_cuts[key] = found  # what is behind the cut changes it no more
            if len(self._at_cuts) > _MAX_KEPT:
                self._at_cuts.popitem(last=False)
        return found
