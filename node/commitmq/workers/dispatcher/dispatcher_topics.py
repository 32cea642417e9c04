"""One dispatcher's view of topics: the deleted ones, and the attributes of the others.

A deletion comes between the records stored before it and those after it. ``to_forget`` has the deletions that the
dispatcher has not reached yet.
"""

from __future__ import annotations

import bisect
import contextlib

import orjson
import zmq

from commitmq.control import DispatcherWord, Word
from commitmq.plugin.hookspecs import Dispatcher
from commitmq.store.metadata.deleted_topics import WatchedTable
from commitmq.workers.dispatcher.log_positions import LogPositions
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.topic_view import TopicViews


class DispatcherTopics:
    """Deletions and attributes of topics; ``position`` is always that of the dispatcher."""

    def __init__(self, context: WorkerContext, slot: int, positions: LogPositions) -> None:
        self._context, self._control, self._slot = context, context.control, slot
        self._positions = positions
        self.dispatcher: Dispatcher | None = None
        """The open dispatcher; without one a deletion waits."""
        self._tombstones = WatchedTable(context.layout.tombstones)
        self._checked: dict[str, int] | None = None
        self.deleted = dict(self._tombstones.load())
        self._told = dict(self.deleted)  # deletions that the dispatcher knows of, or will when it reaches their offset
        self.to_forget: list[
            tuple[int, str, int]
        ] = []  # (offset, topic, a version that did not have it yet), ascending
        self._topics_version = -1  # the TOPICS_VERSION up to which deletions are known
        self._views: TopicViews | None = None  # created when the dispatcher first asks: most do not

    def load(self) -> TopicViews:
        """The topic table, which is kept up to date from now on."""
        if self._views is None:
            self._views = TopicViews(self._context.layout, self._control)
        return self._views

    def resume(self, position: int) -> None:
        """A plugin's dispatcher begins at ``position``: it is told again of the deletions behind it."""
        self._told = {topic: at for topic, at in self.deleted.items() if not self._is_to_be_told(at, position)}

    def _is_to_be_told(self, deleted_at: int, position: int) -> bool:
        """Whether the dispatcher, opened at ``position``, must yet be told of a topic that was deleted at
        ``deleted_at``.

        Everything behind ``position`` comes again, deletions as well as records, or was never told because the process
        was dead or parked. An offset at which no record begins any more dates from a log that was cut since.
        """
        return position <= deleted_at <= self._control.get(Word.WRITTEN) and self._positions.begins_a_record(deleted_at)

    def hear(self, socket: zmq.Socket[bytes], position: int) -> None:
        """Take the coordinator's news; only deletions matter here."""
        with contextlib.suppress(zmq.Again):
            while True:
                frame = socket.recv_multipart(zmq.NOBLOCK)[1]
                if self._views is not None:
                    self._views.hear(frame)
                news = orjson.loads(frame)
                for topic, offset, _incarnation in news.get("deleted", []):
                    self._delete_topic(topic, offset, int(news["version"]) - 1, position)

    def check(self, position: int) -> None:
        """Compare versions, because news may be lost, and read the tombstones when the version moved."""
        self.forget_due(position)
        version = self._control.get(Word.TOPICS_VERSION)
        if version == self._topics_version:
            return
        # Read before the version counts as known, so that an unreadable file is tried again.
        tombstones = self._tombstones.load()
        if tombstones is not self._checked:
            for topic, offset in tombstones.items():
                self._delete_topic(topic, offset, self._topics_version, position)
            self._checked = tombstones
        self._topics_version = version
        self._say_carried_out()

    def _delete_topic(self, topic: str, offset: int, before: int, position: int) -> None:
        """Tell the dispatcher of the deletion after the records stored before it, below ``offset``, and before later
        ones.

        The dispatcher may be far behind, so the log is read up to ``offset`` in the loop's own time.
        """
        if self.dispatcher is None or self._told.get(topic, -1) >= offset:
            return
        self._told[topic] = offset
        bisect.insort(self.to_forget, (offset, topic, before))
        self.forget_due(position)

    def forget_due(self, position: int) -> None:
        """Tell the dispatcher of the deletions whose offset it has reached."""
        while self.to_forget and self.to_forget[0][0] <= position:
            offset, topic, _ = self.to_forget.pop(0)
            self.deleted[topic] = offset
            forget = getattr(self.dispatcher, "forget", None)
            if forget is not None:
                forget(topic)
                self._context.log.info("topic deleted", topic=topic, below=offset)
            self._say_carried_out()

    def _say_carried_out(self) -> None:
        """Publish the TOPICS_VERSION up to which deleted topics are fully removed. From then on readers may trust the
        queues of new topics of the same names, and tombstones may be dropped when the log holds nothing below them any
        more.
        """
        if self.dispatcher is not None:
            version = min((before for _, _, before in self.to_forget), default=self._topics_version)
            if version > self._control.dispatcher(self._slot, DispatcherWord.TOPICS):
                self._control.put_dispatcher(self._slot, DispatcherWord.TOPICS, version)

    def attributes(self, topic: str) -> dict[str, str] | None:
        """See DispatcherView. The topic table's file has a topic before a message of it can be in the log."""
        views = self.load()
        view = views.get(topic)
        # A topic that was created again under an old name may be of another kind than the known one.
        if (view is None or topic in self.deleted) and views.is_stale:
            views.reload()
            view = views.get(topic)
        return None if view is None else dict(view.attributes)
