"""A worker's view of the topic table, brought up to date by the coordinator's news and its version word.

News come over PUB/SUB and may be lost; a ``topics_version`` ahead of what was heard makes the view read the files again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from commitmq.control import ControlBlock, Word
from commitmq.errors import StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.topic_config import PERM_READ, PERM_WRITE, TopicTable


@dataclass(frozen=True, slots=True)
class TopicView:
    """What sends and pulls need to know of a topic."""

    name: str
    read_queues: int
    write_queues: int
    perm: int

    @property
    def readable(self) -> bool:
        return bool(self.perm & PERM_READ)

    @property
    def writable(self) -> bool:
        return bool(self.perm & PERM_WRITE)


class TopicViews:
    """Topics by name, and the tombstones of deleted ones (bytes of the log below which nothing is theirs)."""

    def __init__(self, layout: StoreLayout, control: ControlBlock) -> None:
        """Raises StoreError when ``topics.json`` cannot be read."""
        self._path = layout.config / "topics.json"
        self._tombstones_path = layout.own / "deleted_topics.json"
        self._control = control
        self._topics: dict[str, TopicView] = {}
        self._tombstones: dict[str, int] = {}
        self._version = 0
        self.reload()

    def get(self, name: str) -> TopicView | None:
        return self._topics.get(name)

    def tombstone(self, name: str) -> int:
        """Records of topic ``name`` below this physical offset are of a deleted topic; 0 when it never was deleted."""
        return self._tombstones.get(name, 0)

    def tombstones(self) -> dict[str, int]:
        """A copy of all tombstones."""
        return dict(self._tombstones)

    @property
    def stale(self) -> bool:
        """True when the coordinator changed something that was not heard."""
        return self._control.get(Word.TOPICS_VERSION) > self._version

    def reload(self) -> set[str]:
        """Read the files again; returns the names of topics that changed."""
        # The version first: a change that comes in between is then read again, never missed.
        version = self._control.get(Word.TOPICS_VERSION)
        tombstones = self._load_tombstones()
        topics = {
            name: TopicView(name, one.read_queues, one.write_queues, one.perm)
            for name, one in TopicTable.load(self._path).topics.items()
        }
        changed = {name for name in topics.keys() | self._topics.keys() if topics.get(name) != self._topics.get(name)}
        changed |= {name for name, offset in tombstones.items() if self._tombstones.get(name, 0) != offset}
        self._topics, self._tombstones = topics, tombstones
        self._version = max(self._version, version)
        return changed

    def hear(self, frame: bytes) -> set[str]:
        """Take one piece of news; returns the names of topics that changed. A gap in versions is left to :attr:`stale`."""
        news = orjson.loads(frame)
        changed: set[str] = set()
        for name, offset in news.get("deleted", []):
            if self._tombstones.get(name, 0) < offset:
                self._tombstones[name] = offset
            self._topics.pop(name, None)
            changed.add(name)
        for name, route in news.get("topics", {}).items():
            self.learn(name, route)
            changed.add(name)
        if news["version"] == self._version + 1:
            self._version = news["version"]
        return changed

    def learn(self, name: str, route: dict[str, Any]) -> None:
        """Take over one topic as ``topic.route`` describes it."""
        self._topics[name] = TopicView(name, route["read_queues"], route["write_queues"], route["perm"])

    def _load_tombstones(self) -> dict[str, int]:
        try:
            data = orjson.loads(self._tombstones_path.read_bytes())
            return {str(name): int(offset) for name, offset in data.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"the tombstones of deleted topics cannot be read: {error}", path=self._tombstones_path) from error
