"""The topic table of the writer and the readers: existing and deleted topics, kept current by the coordinator's news.

The coordinator stores its changes, then moves ``Word.TOPICS_VERSION``, then publishes them. News may be lost or late.
So when the version is ahead of the news taken, or news skip a version, the rest is read in the files
(:class:`commitmq.store.metadata.topic_files.TopicReader`), in a time proportional to the changes. Every change names
its topics, because the cached data of their queues must be dropped.

A topic that is ending (:mod:`commitmq.coordination.topics`) is no topic here any more. Late information about an
ended incarnation, such as an answer that crossed the news on the way, does not bring it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.deleted_topics import NO_END, WatchedTable
from commitmq.store.metadata.topic_config import (
    PERM_READ,
    PERM_WRITE,
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    QUEUE_TYPE_SIMPLE,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
    TopicTable,
    collector_paused,
)
from commitmq.store.metadata.topic_files import TopicChange, TopicReader

_IN_MEMORY = (STORAGE_TYPE, STORAGE_MEMORY)
_BATCH = (QUEUE_TYPE, QUEUE_TYPE_BATCH)
_REMEMBERED = 65_536  # ended incarnations; late information about one comes within seconds


class TopicView(NamedTuple):
    """The settings of a topic that sends and pulls need; small, for there may be a hundred thousand topics."""

    read_queues: int
    write_queues: int
    perm: int
    attributes: tuple[tuple[str, str], ...] = ()  # sorted; a tuple, because views are compared as set members
    incarnation: int = 0  # see commitmq.store.metadata.topic_config

    @classmethod
    def of(
        cls, read_queues: int, write_queues: int, perm: int, attributes: Mapping[str, str], incarnation: int = 0
    ) -> TopicView:
        """From the fields that topics.json, ``topic.route`` and the news share. ``attributes`` are those set explicitly."""
        return cls(
            read_queues, write_queues, perm, tuple(sorted(attributes.items())) if attributes else (), incarnation
        )

    def attribute(self, name: str, default: str) -> str:
        """The value of a topic attribute (spec 1.4), ``default`` when the topic does not have it."""
        return next((value for key, value in self.attributes if key == name), default)

    @property
    def is_memory(self) -> bool:
        """True for a topic whose messages the memory dispatcher keeps; they never reach the CommitLog."""
        return _IN_MEMORY in self.attributes

    @property
    def is_batch(self) -> bool:
        """True for a topic whose queues count batches: one record holds several messages (spec 2.8)."""
        return _BATCH in self.attributes

    @property
    def queue_type(self) -> str:
        """``SimpleCQ`` or ``BatchCQ``."""
        return self.attribute(QUEUE_TYPE, QUEUE_TYPE_SIMPLE)

    @property
    def is_readable(self) -> bool:
        return bool(self.perm & PERM_READ)

    @property
    def is_writable(self) -> bool:
        return bool(self.perm & PERM_WRITE)


class TopicViews:
    """Topics by name, and the tombstones of deleted ones: records below a tombstone belong to no topic.

    ``ended`` has the names of topics that ended in the last :meth:`reload` or :meth:`hear`.
    """

    def __init__(self, layout: StoreLayout, control: ControlBlock) -> None:
        """Raises StoreError when the files cannot be read."""
        self._layout = layout
        self._control = control
        self._topics: dict[str, TopicView] = {}
        self._tombstones: dict[str, int] = {}
        self._endings: dict[str, int] = {}  # name -> incarnation
        self._files = TopicReader(layout)
        self._endings_file = WatchedTable(layout.endings)
        self._tombstones_file = WatchedTable(layout.tombstones)
        self._buried: dict[str, int] = {}  # name -> the version that its tombstone came with, until :meth:`is_cleared`
        self._gone: dict[str, int] = {}  # the newest incarnation of a name that is known to have ended
        self._version = -1
        self.ended: set[str] = set()
        self.reload()

    def get(self, name: str) -> TopicView | None:
        return self._topics.get(name)

    def tombstone(self, name: str) -> int:
        """Physical offset below which nothing belongs to the topic of this name; 0 when it was never deleted."""
        return NO_END if name in self._endings else self._tombstones.get(name, 0)

    def tombstones(self) -> dict[str, int]:
        """A copy of all tombstones; NO_END for topics that are ending."""
        return {**self._tombstones, **dict.fromkeys(self._endings, NO_END)}

    @property
    def version(self) -> int:
        """The TOPICS_VERSION up to which all changes are known here."""
        return self._version

    def is_cleared(self, name: str) -> bool:
        """Whether the ConsumeQueue dispatcher has removed the queues of deleted topics of this name: units found there
        now belong to the present topic.
        """
        version = self._buried.get(name)
        if version is None:
            return True
        if self._control.dispatcher(0, DispatcherWord.TOPICS) < version:
            return False
        del self._buried[name]
        return True

    @property
    def has_endings(self) -> bool:
        """True while the deletion of a topic is decided and not finished."""
        return bool(self._endings)

    @property
    def is_stale(self) -> bool:
        """True when the coordinator's version is ahead of this table."""
        return self._control.get(Word.TOPICS_VERSION) > self._version

    def reload(self) -> set[str]:
        """Read the changes in the files. Returns the names whose entry or tombstone changed. Raises StoreError, and can
        be called again then.
        """
        # Take the version before the files are read: a change in between is then read once more, not missed.
        version = self._control.get(Word.TOPICS_VERSION)
        # Read the endings before the topics: a topic created after its predecessor ended is not taken for that
        # predecessor.
        endings, tombstones = self._endings_file.load(), self._tombstones_file.load()
        changes = self._files.changes(version) if self._version >= 0 else None
        if changes is None:
            with collector_paused():
                changed = self._take_all(self._files.everything(), endings)
        else:
            changed = self._take(changes, endings)
        changed |= self._bury(tombstones, version)
        self._version = version
        return changed

    def _bury(self, tombstones: dict[str, int], version: int) -> set[str]:
        """Take over the tombstones. Returns the names whose tombstone changed."""
        if tombstones is self._tombstones:
            return set()
        buried = {name for name, _ in tombstones.items() ^ self._tombstones.items()}
        self._buried = {name: at for name, at in self._buried.items() if name in tombstones}
        self._buried.update(dict.fromkeys(buried & tombstones.keys(), version))
        self._tombstones = tombstones
        return buried

    def _take(self, changes: list[TopicChange], endings: dict[str, int]) -> set[str]:
        """Take over the changes of the files since the last time."""
        changed: set[str] = set()
        self.ended = set()
        for name, incarnation in endings.items():
            if self._endings.get(name) != incarnation:
                self._end(name, incarnation)
                changed.add(name)
        changed |= self._endings.keys() - endings.keys()
        for one in changes:
            if _is_folder(one.name) and self._take_one(one, endings):
                changed.add(one.name)
        # A topic that began since is a normal topic, although the older endings file still lists its name.
        self._endings = {name: incarnation for name, incarnation in endings.items() if name not in self._topics}
        return changed

    def _take_one(self, change: TopicChange, endings: dict[str, int]) -> bool:
        """Take over one change. False when it was known, or is older than the known state."""
        name, known = change.name, self._topics.get(change.name)
        if change.topic is None:
            if known is None or known.incarnation > change.incarnation:
                return False
            self._end(name, known.incarnation)
            return True
        view = _view_of(change.topic)
        if view.incarnation <= endings.get(name, -1):
            return False
        if known is not None and (known == view or known.incarnation > view.incarnation):
            return False
        if known is not None and known.incarnation != view.incarnation:
            self._end(name, known.incarnation)
        self._topics[name] = view
        return True

    def _take_all(self, table: TopicTable, endings: dict[str, int]) -> set[str]:
        """Take over the complete content of the files."""
        topics = {
            name: _view_of(one)
            for name, one in table.topics.items()
            if _is_folder(name) and one.incarnation > endings.get(name, -1)
        }
        # A topic that began since is a normal topic, although the older endings file still lists its name.
        endings = {name: incarnation for name, incarnation in endings.items() if name not in topics}
        changed = {name for name, _ in topics.items() ^ self._topics.items()}
        changed |= {name for name, _ in endings.items() ^ self._endings.items()}
        self.ended = set()
        for name, incarnation in endings.items():
            if self._endings.get(name) != incarnation:
                self._end(name, incarnation)
        for name, known in list(self._topics.items()):
            found = topics.get(name)
            if found is None or found.incarnation != known.incarnation:
                self._end(name, known.incarnation)
        self._topics, self._endings = topics, endings
        return changed

    def hear(self, frame: bytes) -> set[str]:
        """Take one message of news. Returns the names it changed. Raises StoreError when the files had to be read and
        could not be.
        """
        news: dict[str, Any] = orjson.loads(frame)
        version = int(news["version"])
        self.ended = set()
        if version <= self._version:
            return set()
        if version != self._version + 1:
            changed = self.reload()
            self._version = max(self._version, version)
            return changed
        self._version = version
        changed = set()
        for name, incarnation in news.get("ending", ()):
            self._endings[name] = incarnation
            self._end(name, incarnation)
            changed.add(name)
        for name, offset, incarnation in news.get("deleted", ()):
            if self._endings.pop(name, None) is None and name in self._topics:
                self._end(name, incarnation)
            if self._tombstones.get(name) != int(offset):
                self._tombstones = {**self._tombstones, name: int(offset)}
            self._buried[name] = version
            changed.add(name)
        for name, one in news.get("topics", {}).items():
            if _is_folder(name):
                self.learn(name, one)
                changed.add(name)
        return changed

    def learn(self, name: str, route: dict[str, Any]) -> bool:
        """Take over one topic as ``topic.route`` and the news describe it. False for a topic that has ended since."""
        incarnation = int(route.get("incarnation", 0))
        if incarnation <= self._gone.get(name, -1):
            return False
        self._topics[name] = TopicView.of(
            int(route["read_queues"]),
            int(route["write_queues"]),
            int(route["perm"]),
            route.get("attributes") or {},
            incarnation,
        )
        return True

    def _end(self, name: str, incarnation: int) -> None:
        """Record that this incarnation and all before it have ended. A topic of the name that began since stays."""
        known = self._topics.get(name)
        if known is not None and known.incarnation > incarnation:
            return
        self.ended.add(name)
        self._topics.pop(name, None)
        self._gone[name] = max(incarnation, self._gone.pop(name, -1))
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]


def _view_of(one: TopicConfig) -> TopicView:
    return TopicView.of(one.read_queues, one.write_queues, one.perm, one.settings, one.incarnation)


def _is_folder(name: str) -> bool:
    """A topic's name becomes a folder's name. A name that would lead to another folder is not served, even if the file
    has it.
    """
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")
