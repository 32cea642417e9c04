"""The coordinator's news of topics, and the writer's confirmation that it has heard of a deletion.

A topic ends when this process hears of the deletion, before the coordinator reads the log's end for the tombstone
(:mod:`commitmq.coordination.topics`): the writer takes no more messages for the topic, forgets its queue offsets,
and then confirms the deletion in ``writer_topics``. It confirms nothing before its own start has published the log's
end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

from commitmq import failpoints
from commitmq.control import Word
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.topic_view import TopicViews


class TopicNews:
    """SUB socket ``topics``, and the topic table that it keeps up to date."""

    def __init__(self, context: WorkerContext, topics: TopicViews) -> None:
        """Subscribe: nothing that is published from now on is missed. :meth:`say_heard` belongs to the end of the start."""
        self._control = context.control
        self._topics = topics
        self._bell = context.ringer("coordinator")
        self.socket: zmq.Socket[bytes] = context.zmq.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"topics")
        self.socket.connect(context.layout.ipc("topics"))

    def hear(self) -> Iterator[str]:
        """Take the news. Yields the topics that ended, and confirms their deletion after that."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._topics.hear(self.socket.recv_multipart(zmq.NOBLOCK)[-1])
                yield from self._topics.ended
        if self._topics.is_stale:
            self._topics.reload()
            yield from self._topics.ended
        self.say_heard()

    def say_heard(self) -> None:
        """Confirm the deletions that this process knows, so that the coordinator continues them."""
        version = self._topics.version
        if version == self._control.get(Word.WRITER_TOPICS):
            return
        if failpoints.ACTIVE:
            failpoints.hit("writer.before_heard")
        self._control.put(Word.WRITER_TOPICS, version)
        if self._topics.has_endings:
            self._bell.ring()
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_heard")
