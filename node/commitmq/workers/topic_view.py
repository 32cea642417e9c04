"""What the writer and readers know of topics: ``config/topics.json`` and the tombstones, kept fresh by the coordinator's news.

The coordinator stores its changes, then moves ``Word.TOPICS_VERSION``, then publishes them. News may be lost, so a
version that is ahead of what was heard, or news that skip one, mean: read the files again. Every change names the
topics it touched, because what is cached of their queues must go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from commitmq.control import ControlBlock, Word
from commitmq.store import json_config
from commitmq.store.layout import StoreLayout
from commitmq.store.topic_config import (
    PERM_READ,
    PERM_WRITE,
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    QUEUE_TYPE_SIMPLE,
    STORAGE_CREATED,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicTable,
)

_IN_MEMORY = (STORAGE_TYPE, STORAGE_MEMORY)
_BATCH = (QUEUE_TYPE, QUEUE_TYPE_BATCH)


class TopicView(NamedTuple):
    """What sends and pulls need to know of a topic; small, for there may be a hundred thousand."""

    read_queues: int
    write_queues: int
    perm: int
    attributes: tuple[tuple[str, str], ...] = ()  # sorted; a tuple, because views are compared as set members

    @classmethod
    def of(cls, read_queues: int, write_queues: int, perm: int, attributes: Mapping[str, str]) -> TopicView:
        """From the members that topics.json, ``topic.route`` and the news all have."""
        return cls(read_queues, write_queues, perm, tuple(sorted(attributes.items())) if attributes else ())

    def attribute(self, name: str, default: str) -> str:
        """The value of a topic attribute (spec 1.4), ``default`` when the topic does not have it."""
        return next((value for key, value in self.attributes if key == name), default)

    @property
    def is_memory(self) -> bool:
        """True for a topic whose messages are kept by the memory dispatcher and never reach the CommitLog."""
        return _IN_MEMORY in self.attributes

    @property
    def is_batch(self) -> bool:
        """True for a topic whose queues count batches: one record holds several messages (spec 2.8)."""
        return _BATCH in self.attributes

    @property
    def incarnation(self) -> int:
        """What tells a memory topic from an earlier one of its name."""
        value = self.attribute(STORAGE_CREATED, "0")
        return int(value) if value.isdecimal() else 0

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
    """Topics by name, and the tombstones of deleted ones: records below them belong to nobody."""

    def __init__(self, layout: StoreLayout, control: ControlBlock) -> None:
        """Raises StoreError when the files cannot be read."""
        self._topics_path = layout.config / "topics.json"
        self._deleted_path = layout.own / "deleted_topics.json"
        self._control = control
        self._topics: dict[str, TopicView] = {}
        self._tombstones: dict[str, int] = {}
        self._version = -1
        self.reload()

    def get(self, name: str) -> TopicView | None:
        return self._topics.get(name)

    def tombstone(self, name: str) -> int:
        """Physical offset below which nothing belongs to the topic of this name; 0 when it was never deleted."""
        return self._tombstones.get(name, 0)

    def tombstones(self) -> dict[str, int]:
        """A copy of all tombstones."""
        return dict(self._tombstones)

    @property
    def is_stale(self) -> bool:
        """True when the coordinator is ahead of what is known here."""
        return self._control.get(Word.TOPICS_VERSION) > self._version

    def reload(self) -> set[str]:
        """Read the files; returns the names whose entry or tombstone changed. Raises StoreError, changing nothing."""
        # The version is taken before the files are read: a change in between is then read once more, not missed.
        version = self._control.get(Word.TOPICS_VERSION)
        table = TopicTable.load(self._topics_path)
        deleted = json_config.load(self._deleted_path) or {}
        topics = {
            name: TopicView.of(one.read_queues, one.write_queues, one.perm, one.attributes)
            for name, one in table.topics.items()
            if _is_folder(name)
        }
        tombstones = {str(name): int(offset) for name, offset in deleted.items()}
        changed = {name for name, _ in topics.items() ^ self._topics.items()}
        changed |= {name for name, _ in tombstones.items() ^ self._tombstones.items()}
        self._topics, self._tombstones, self._version = topics, tombstones, version
        return changed

    def hear(self, frame: bytes) -> set[str]:
        """Take one piece of news; returns the names it changed. Raises StoreError when the files had to be read."""
        news: dict[str, Any] = orjson.loads(frame)
        version = int(news["version"])
        if version <= self._version:
            return set()
        if version != self._version + 1:
            changed = self.reload()
            self._version = max(self._version, version)
            return changed
        self._version = version
        changed = set()
        for name, offset in news.get("deleted", ()):
            self._topics.pop(name, None)
            self._tombstones[name] = int(offset)
            changed.add(name)
        for name, one in news.get("topics", {}).items():
            if _is_folder(name):
                self.learn(name, one)
                changed.add(name)
        return changed

    def learn(self, name: str, route: dict[str, Any]) -> None:
        """Take over one topic as ``topic.route`` and the news describe it."""
        self._topics[name] = TopicView.of(
            int(route["read_queues"]), int(route["write_queues"]), int(route["perm"]), route.get("attributes") or {}
        )


def _is_folder(name: str) -> bool:
    """A topic's name becomes a folder's; one that would lead elsewhere is not served, whoever put it into the file."""
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")
