"""Where the messages of a topic are, and which of them may be shown: the log's files, or those of a memory topic.

The topic table decides. SUB ``topics`` (the coordinator) tells which topics changed; a version in the control block
covers lost news.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import zmq

from commitmq.control import DispatcherWord, Word
from commitmq.errors import ProtocolError, StoreError
from commitmq.files.fd_cache import affordable_files
from commitmq.format.constants import LMQ_PREFIX
from commitmq.semantics.delay import MAX_LEVEL, SCHEDULE_TOPIC
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory_files import UNIT_FILE_BYTES, MemoryTopics
from commitmq.store.metadata.topic_config import PERM_READ
from commitmq.store.queues.batch_consume_queue import BatchQueueReader
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.recovery.cut_history import CutHistory
from commitmq.store.shared_memory import memory_folder
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.topic_view import TopicView, TopicViews

_BATCH_FILES: Final = 512
_LMQ: Final = TopicView(1, 1, PERM_READ)
# Messages wait in these until their time; they exist on every node, and the topic table need not name them.
_WAITING: Final = {
    SCHEDULE_TOPIC: TopicView(MAX_LEVEL, MAX_LEVEL, PERM_READ),
    TIMER_TOPIC: TopicView(1, 1, PERM_READ),
}


class ReadableTopic(NamedTuple):
    """Where a topic's messages are. A message may be shown when it lies in [floor, bound) of ``log``."""

    queues: QueueReader | BatchQueueReader
    log: CommitLog
    bound: int
    floor: int
    in_memory: bool = False


class NoSuchQueueError(ProtocolError):
    """The topic has fewer queues; the answer says how many it has."""

    def __init__(self, topic: str, read_queues: int, queue: int) -> None:
        super().__init__("INVALID_PARAMETER", f"topic {topic!r} has the queues 0 to {read_queues - 1}, not {queue}")
        self._read_queues = read_queues

    @property
    def more(self) -> dict[str, Any]:
        return {**super().more, "read_queues": self._read_queues}


def subscribe(ctx: WorkerContext, *names: str) -> zmq.Socket[bytes]:
    """A registered SUB socket for the publishers ``names``."""
    sock: zmq.Socket[bytes] = ctx.zmq.socket(zmq.SUB)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SUBSCRIBE, b"")
    for name in names:
        sock.connect(ctx.layout.ipc(name))
    ctx.register(sock)
    return sock


class ReadableTopics:
    """The files that a reader reads, and the topics in them."""

    def __init__(self, ctx: WorkerContext, topics_changed: Callable[[set[str]], None]) -> None:
        """``topics_changed`` is called with the names of topics that changed."""
        self._ctx = ctx
        self._topics_changed = topics_changed
        config = ctx.config
        self.cuts = CutHistory.load(ctx.layout)  # a log is cut before its node serves anybody
        self.log = CommitLog(
            ctx.layout.commit_log, config.commit_log.segment_bytes, max_mapped=config.commit_log.max_mapped_segments
        )
        self.queues = QueueReader(
            self.log,
            ctx.layout.consume_queue,
            config.consume_queue.file_bytes,
            ext_file_bytes=config.consume_queue.ext_file_bytes,
            max_open_files=affordable_files(config.consume_queue.max_open_files),
        )
        self._batches = BatchQueueReader(
            ctx.layout.batch_consume_queue,
            config.consume_queue.batch_file_bytes,
            max_open_files=affordable_files(min(_BATCH_FILES, config.consume_queue.max_open_files)),
        )
        self._lmq_enabled = config.consume_queue.enable_lmq
        self.memory = MemoryTopics(memory_folder(ctx.layout))
        # Answers for a memory topic that holds no messages.
        self._nothing = QueueReader(self.log, self.memory.folder / "nothing", UNIT_FILE_BYTES)
        self.changes = subscribe(ctx, "topics")
        self.topics = TopicViews(ctx.layout, ctx.control)

    def close(self) -> None:
        self._ctx.unregister(self.changes)
        self.changes.close()
        self.queues.close()
        self._batches.close()
        self.memory.close()

    def drop_deleted_files(self) -> None:
        """Close the ConsumeQueue files that were deleted."""
        self.queues.drop_deleted_files()
        self._batches.drop_deleted_files()

    # ------------------------------------------------------------ the readable range

    def bound(self) -> int:
        """End of the readable log."""
        return self._ctx.control.dispatcher(0, DispatcherWord.DISPATCHED)

    def floor(self, topic: str) -> int:
        """Physical offset below which no message of ``topic`` may be shown."""
        return max(self._ctx.control.get(Word.MIN_OFFSET), self.topics.tombstone(topic))

    def place(self, name: str, topic: TopicView) -> ReadableTopic:
        """Where the messages of a topic are, and which of them may be shown now."""
        if not topic.is_memory:
            queues = self._batches if topic.is_batch else self.queues
            return ReadableTopic(queues, self.log, self.bound(), self.floor(name))
        found = self.memory.get(name, topic.incarnation)
        if found is None:
            return ReadableTopic(self._nothing, self.log, 0, 0, in_memory=True)
        # Read the bound first: a floor that is read later cannot be the older of the two.
        bound = found.bound
        return ReadableTopic(found.queues, found.log, bound, found.floor, in_memory=True)

    def nowhere(self) -> ReadableTopic:
        """The place of a topic in the log whose queues still belong to a deleted topic of the same name."""
        return ReadableTopic(self._nothing, self.log, 0, 0)

    # ------------------------------------------------------------ topics

    def topic(self, name: str, incarnation: int | None = None) -> TopicView:
        """The topic, of this ``incarnation`` if one is named. Raises ProtocolError TOPIC_NOT_EXIST."""
        topic = self.topics.get(name)
        is_behind = topic is None or (incarnation is not None and topic.incarnation < incarnation)
        if is_behind and self.topics.is_stale:
            self.hear_topics()
            if self.topics.is_stale:
                self.reload_topics()
            topic = self.topics.get(name)
        if topic is None and self._lmq_enabled and name.startswith(LMQ_PREFIX) and "/" not in name:
            # A light message queue (LMQ) exists as soon as messages name it.
            return _LMQ
        topic = topic or _WAITING.get(name)
        if topic is None:
            raise ProtocolError("TOPIC_NOT_EXIST", f"there is no topic {name!r:.300}")
        if incarnation is not None and topic.incarnation != incarnation:
            raise ProtocolError(
                "TOPIC_NOT_EXIST",
                f"topic {name!r:.300} was recreated: incarnation {incarnation} is gone, this is {topic.incarnation}",
            )
        return topic

    def check_queue(self, name: str, topic: TopicView, queue: int) -> None:
        """Raise NoSuchQueueError unless the topic has ``queue``."""
        if not 0 <= queue < topic.read_queues:
            raise NoSuchQueueError(name, topic.read_queues, queue)

    def hear_topics(self) -> None:
        """Take the news of changed topics."""
        while True:
            try:
                frame = self.changes.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.Again:
                return
            self._update(partial(self.topics.hear, frame))

    def reload_topics(self) -> None:
        """Read the topic table again."""
        self._update(self.topics.reload)

    def _update(self, update: Callable[[], set[str]]) -> None:
        """Bring the topic table up to date, and drop the cached data of changed topics."""
        try:
            changed = update()
        except StoreError as error:
            # The old table is better than none. The next turn tries again because the version is still ahead.
            self._ctx.log.error("cannot read the topics again", error=str(error))
            return
        for name in changed:
            self.queues.forget(name)
            self._batches.forget(name)
        self._topics_changed(changed)
