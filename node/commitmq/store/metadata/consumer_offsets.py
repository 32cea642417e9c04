"""Consumer group offsets, as ``consumerOffset.json`` stores them (spec 1.4, 12.10).

``offsetTable`` maps ``topic@group`` to the next queue offset to consume by queue id; ``groupTopicMap`` is derived from
it on write and ignored on read. Unknown members are kept unchanged.

The entries of one group or topic are found without scanning the others, and the text of an entry is encoded again only
when it changed: a node may have thousands of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.format.java import hash_map_order
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion, Encoded

SEPARATOR: Final = "@"
_GROUP_BUCKETS: Final = 64
_TOPIC_BUCKETS: Final = 16


@dataclass(slots=True)
class ConsumerOffsets:
    """The table: ``offsets[(topic, group)][queue id]`` is the next queue offset, in the file's order."""

    offsets: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    version: DataVersion = field(default_factory=DataVersion)
    unknown: dict[str, Any] = field(default_factory=dict)
    _topics_of: dict[str, dict[str, None]] = field(default_factory=dict, repr=False, compare=False)
    _groups_of: dict[str, dict[str, None]] = field(default_factory=dict, repr=False, compare=False)
    _texts: dict[tuple[str, str], Encoded] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for topic, group in self.offsets:
            self._index(topic, group)

    def _index(self, topic: str, group: str) -> None:
        self._topics_of.setdefault(group, {})[topic] = None
        self._groups_of.setdefault(topic, {})[group] = None

    @classmethod
    def load(cls, path: Path) -> ConsumerOffsets:
        """The table in ``path`` or its ``.bak``; empty when neither exists. Raises StoreError."""
        return cls.from_json(json_config.load(path) or {}, path)

    @classmethod
    def from_json(cls, data: Any, path: Path | None = None) -> ConsumerOffsets:
        """Accepts both quoted and unquoted queue ids; drops an entry without ``@``, which has no group."""
        try:
            rest = dict(data)
            version = DataVersion.from_json(rest.pop("dataVersion", None))
            rest.pop("groupTopicMap", None)
            offsets: dict[tuple[str, str], dict[int, int]] = {}
            for name, queues in (rest.pop("offsetTable", None) or {}).items():
                topic, separator, group = str(name).partition(SEPARATOR)
                if separator:
                    offsets[topic, group] = {int(queue): int(offset) for queue, offset in queues.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the consumer offsets are not in RocketMQ's shape: {error}", path=path) from error
        return cls(offsets, version, rest)

    def to_json(self) -> dict[str, Any]:
        """The file's content; queue ids are unquoted keys, ascending."""
        return self._content(
            {
                f"{topic}{SEPARATOR}{group}": dict(sorted(queues.items()))
                for (topic, group), queues in self.offsets.items()
            }
        )

    def dumps(self) -> str:
        """``consumerOffset.json``: the result of :func:`json_config.dumps` for :meth:`to_json`, in less time."""
        return json_config.dumps(self._content(json_config.join_members(map(self._text, self.offsets), 1)))

    def _text(self, key: tuple[str, str]) -> Encoded:
        text = self._texts.get(key)
        if text is None:
            entry = {f"{key[0]}{SEPARATOR}{key[1]}": dict(sorted(self.offsets[key].items()))}
            text = self._texts[key] = json_config.encode_members(entry, 1)
        return text

    def _content(self, offset_table: Any) -> dict[str, Any]:
        topics = self._topics_of
        members = {
            "dataVersion": self.version.to_json(),
            # RocketMQ has hash maps here, whose order is not guaranteed; keeping the order costs nothing and makes
            # equal bytes.
            "groupTopicMap": {
                group: hash_map_order(topics[group], _TOPIC_BUCKETS) for group in hash_map_order(topics, _GROUP_BUCKETS)
            },
            "offsetTable": offset_table,
            **self.unknown,
        }
        return dict(sorted(members.items()))

    def get(self, group: str, topic: str, queue: int) -> int | None:
        """The stored next queue offset; None when the group never committed one."""
        return self.offsets.get((topic, group), {}).get(queue)

    def put(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Store the next queue offset; the caller decides whether it may go back."""
        queues = self.offsets.get((topic, group))
        if queues is None:
            queues = self.offsets[topic, group] = {}
            self._index(topic, group)
        queues[queue] = offset
        self._texts.pop((topic, group), None)

    def of_group(self, group: str) -> Iterator[tuple[str, int, int]]:
        """``(topic, queue id, next queue offset)`` of one group."""
        for topic in self._topics_of.get(group, ()):
            for queue, offset in self.offsets[topic, group].items():
                yield topic, queue, offset

    def groups(self) -> Iterable[str]:
        """Groups that have committed an offset."""
        return self._topics_of.keys()

    def topics_of(self, group: str) -> Iterable[str]:
        """Topics in which ``group`` has committed an offset."""
        return self._topics_of.get(group, {}).keys()

    def groups_of(self, topic: str) -> Iterable[str]:
        """Groups that have committed an offset in ``topic``."""
        return self._groups_of.get(topic, {}).keys()

    def remove_topic(self, topic: str) -> None:
        """Forget a deleted topic: a new topic of the same name begins at 0 again."""
        for group in [*self.groups_of(topic)]:
            self._remove(topic, group)

    def remove_group(self, group: str) -> None:
        """Forget a deleted group."""
        for topic in [*self.topics_of(group)]:
            self._remove(topic, group)

    def _remove(self, topic: str, group: str) -> None:
        del self.offsets[topic, group]
        self._texts.pop((topic, group), None)
        for index, key, entry in ((self._topics_of, group, topic), (self._groups_of, topic, group)):
            del index[key][entry]
            if not index[key]:
                del index[key]

    def persist(self, path: Path) -> None:
        """Write ``consumerOffset.json``, durably."""
        json_config.replace_text(path, self.dumps())


def journal_path(layout: StoreLayout) -> Path:
    """The journal of changes since ``consumerOffset.json`` was written; see :mod:`commitmq.store.metadata.offsets_journal`."""
    return layout.own / "offsets.journal"


def load_snapshot(layout: StoreLayout) -> tuple[ConsumerOffsets, str]:
    """``consumerOffset.json`` or its ``.bak``, and its name; empty when neither exists. Raises StoreError."""
    path = layout.config / "consumerOffset.json"
    data, name = json_config.load_named(path, journal=journal_path(layout))
    return ConsumerOffsets.from_json(data or {}, path), name
