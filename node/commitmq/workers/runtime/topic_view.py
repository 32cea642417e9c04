"""The topic table of the writer and the readers: existing and deleted topics, kept current by the coordinator's news.

The coordinator stores its changes, then moves ``Word.TOPICS_VERSION``, then publishes them. News may be lost or late.
So when the version is ahead of the news taken, or news skip a version, the rest is read in the files
(:class:`commitmq.store.metadata.topic_files.TopicReader`), in a time proportional to the changes. Every change names
its topics, because the cached data of their queues must be dropped.

A topic that is ending (:mod:`commitmq.coordination.topics`) is no topic here any more. Late information about an
ended incarnation, such as an answer that crossed the news on the way, does not bring it back.

Which waiting messages went with their topic: a mover drops them, however the next topic of the name came to be.

SQL92 subscriptions in the ConsumeQueue dispatcher and the readers (see commitmq.coordination.subscriptions).

The list is read again whenever ``Word.SUBSCRIPTIONS_VERSION`` moved. When it cannot be read, no subscription is known:
a message then gets no bits and no unit is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from commitmq.control import ControlBlock, DispatcherWord, Word
from commitmq.coordination.subscriptions import subscriptions_path
from commitmq.errors import RequestError
from commitmq.format import bloom
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
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
from commitmq.store.metadata.topic_files import NO_END, TopicChange, TopicReader, WatchedTable
from commitmq.store.queues.consume_queue_ext import Extensions
from commitmq.store.queues.record_filter import RecordFilter, Units
from commitmq.workers.reader.filters import Filters
from commitmq.workers.runtime.context import WorkerContext


class DeletedTopics:
    """``dropped`` counts messages; ``status`` shows it at the process."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._tombstones = WatchedTable(context.layout.tombstones)
        self._endings = WatchedTable(context.layout.endings)
        self.dropped = 0

    def floors(self) -> dict[str, int]:
        """Physical offsets by topic: a message below is of a deleted one. Mostly empty. Raises StoreError."""
        tombstones, endings = self._tombstones.load(), self._endings.load()
        return {**tombstones, **dict.fromkeys(endings, NO_END)} if endings else tombstones

    def drop(self, count: int) -> None:
        """Count messages that are not moved."""
        self.dropped += count
        self._context.tell(dropped=self.dropped)


_NEVER = 1 << 62


class KnownSubscription(NamedTuple):
    """One subscription: its expression, its bits, and the log offset at which bit maps begin to include it."""

    kind: str
    expression: str
    mask: bytes
    since: int


class SubscriptionView:
    """Subscriptions by topic and group."""

    def __init__(self, layout: StoreLayout, control: ControlBlock) -> None:
        self._path = subscriptions_path(layout)
        self._control = control
        self._version = -1
        self._known: dict[str, dict[str, KnownSubscription]] = {}

    def refresh(self) -> bool:
        """Read the list again if it changed. True when it was read."""
        # Take the version first: a change in between is then read once more, not missed.
        version = self._control.get(Word.SUBSCRIPTIONS_VERSION)
        if version == self._version:
            return False
        self._version = version
        before, self._known = self._known, {}
        if not version:
            return True
        texts: dict[str, str] = {}  # many groups may use one expression
        try:
            for one in orjson.loads(self._path.read_bytes()):
                topic, group = one["topic"], one["group"]
                since = _NEVER if one["from"] is None else int(one["from"])
                expression = texts.setdefault(one["expression"], one["expression"])
                known = before.get(topic, {}).get(group)
                mask = bloom.mask(group, topic) if known is None else known.mask
                self._known.setdefault(topic, {})[group] = KnownSubscription(one["type"], expression, mask, since)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._known = {}
            get_log("subscriptions").error("the list of subscriptions cannot be read", error=str(error))
        return True

    def of_topic(self, topic: str) -> Iterable[KnownSubscription]:
        return self._known.get(topic, {}).values()

    def expressions(self) -> set[tuple[str, str]]:
        """Type and expression of every subscription."""
        return {(one.kind, one.expression) for of_topic in self._known.values() for one in of_topic.values()}

    def of_group(self, topic: str, group: str) -> KnownSubscription | None:
        return self._known.get(topic, {}).get(group)


class CompiledSubscriptions:
    """For the dispatcher: the filters of a topic's subscriptions, each with its bits. Only the node's own filter types.

    An expression is compiled once, when the first message of its topic comes, and kept as long as a subscription has it.
    """

    def __init__(self, layout: StoreLayout, control: ControlBlock, specs: Iterable[Mapping[str, Any]]) -> None:
        self._view = SubscriptionView(layout, control)
        # Every subscription on a topic is evaluated for every message of it, so none may be compiled again and again.
        self._filters = Filters(specs, limit=_NEVER)
        self._wrong: set[tuple[str, str]] = set()
        self._of_topic: dict[str, list[tuple[bytes, RecordFilter]]] = {}

    def __call__(self, topic: str) -> list[tuple[bytes, RecordFilter]]:
        """``(bits, filter)`` of each current subscription on ``topic``."""
        if self._view.refresh():
            self._of_topic.clear()
            expressions = self._view.expressions()
            self._filters.keep_only(expressions)
            self._wrong &= expressions
        found = self._of_topic.get(topic)
        if found is None:
            found = self._of_topic[topic] = []
            for one in self._view.of_topic(topic):
                if (one.kind, one.expression) in self._wrong:
                    continue
                try:
                    compiled = self._filters.get(one.kind, one.expression)
                except RequestError:
                    self._wrong.add((one.kind, one.expression))
                    continue  # its consumers get that error with every pull, so no unit is ever skipped for them
                if compiled is not None:
                    found.append((one.mask, compiled))
        return found


class BitMapFilter:
    """A pull's filter that first looks at the bit maps. ``wanted`` decides about every message that they do not exclude."""

    def __init__(self, wanted: RecordFilter, known: KnownSubscription) -> None:
        self._wanted = wanted
        self._mask: NDArray[np.uint8] = np.frombuffer(known.mask, np.uint8)
        self._since = known.since
        self.judge = wanted.judge
        self.terms = wanted.terms

    def may_match(self, units: Units, codes: NDArray[np.int64], extensions: Extensions | None) -> NDArray[np.bool_]:
        """Which units can belong to wanted messages. Bit maps older than the subscription exclude nothing."""
        possible = self._wanted.may_match(units, codes, extensions)
        if extensions is None:
            return possible
        known = extensions.has_bitmap & (units["physical_offset"] >= self._since)
        hit = ((extensions.bitmaps & self._mask) == self._mask).all(axis=1)
        return np.asarray(possible & (hit | ~known), np.bool_)


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
    """Topics by name, and the tombstones of deleted ones: records below a tombstone belong to no topic. ``ended`` has
    the names of topics that ended in the last :meth:`reload` or :meth:`hear`.
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
        """Take one message of news. Returns the names it changed. Raises StoreError when files cannot be read."""
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
    """A topic's name becomes a folder's: one that leads elsewhere is not served, even if the file has it."""
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")
