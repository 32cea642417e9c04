"""Topics as ``topics.json`` holds them (spec 1.4). Members that we do not know are kept as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.store import json_config
from commitmq.store.json_config import DataVersion, Encoded

PERM_INHERIT: Final = 1
PERM_WRITE: Final = 2
PERM_READ: Final = 4
DEFAULT_QUEUES: Final = 16
DEFAULT_PERM: Final = PERM_READ | PERM_WRITE

QUEUE_TYPE: Final = "queue.type"
QUEUE_TYPE_BATCH: Final = "BatchCQ"
QUEUE_TYPE_SIMPLE: Final = "SimpleCQ"
STORAGE_TYPE: Final = "storage.type"
"""Attribute of our own: where the messages of a topic are, ``log`` (default) or STORAGE_MEMORY."""
STORAGE_MEMORY: Final = "memory"
STORAGE_CREATED: Final = "storage.created"
"""Set by the node on memory topics: when the topic was made (ms), which tells it from an earlier one of its name."""


@dataclass(slots=True)
class TopicConfig:
    """One topic. Numbers of queues may differ while a topic shrinks: readers still drain what writers left."""

    name: str
    read_queues: int = DEFAULT_QUEUES
    write_queues: int = DEFAULT_QUEUES
    perm: int = DEFAULT_PERM
    attributes: dict[str, str] = field(default_factory=dict)
    order: bool = False
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> TopicConfig:
        """From one entry of ``topicConfigTable``; missing members keep their default."""
        rest = dict(data)
        rest.pop("topicName", None)
        return cls(
            name,
            read_queues=int(rest.pop("readQueueNums", DEFAULT_QUEUES)),
            write_queues=int(rest.pop("writeQueueNums", DEFAULT_QUEUES)),
            perm=int(rest.pop("perm", DEFAULT_PERM)),
            attributes=dict(rest.pop("attributes", None) or {}),
            order=bool(rest.pop("order", False)),
            filter_type=str(rest.pop("topicFilterType", "SINGLE_TAG")),
            sys_flag=int(rest.pop("topicSysFlag", 0)),
            unknown=rest,
        )

    def to_json(self) -> dict[str, Any]:
        """The entry as RocketMQ writes it: members sorted by name."""
        members = {
            "attributes": self.attributes,
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queues,
            "topicFilterType": self.filter_type,
            "topicName": self.name,
            "topicSysFlag": self.sys_flag,
            "writeQueueNums": self.write_queues,
            **self.unknown,
        }
        return dict(sorted(members.items()))


@dataclass(slots=True)
class TopicTable:
    """The whole of ``topics.json``: topics by name, in the file's order.

    A topic changes by being replaced, never in place: its text is made once, because encoding all of them at each change
    would make creating many topics quadratic in what costs most (1,000 of them took 15 s).
    """

    topics: dict[str, TopicConfig] = field(default_factory=dict)
    version: DataVersion = field(default_factory=DataVersion)
    unknown: dict[str, Any] = field(default_factory=dict)
    _texts: dict[str, tuple[TopicConfig, Encoded]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: Path) -> TopicTable:
        """From ``path`` or its ``.bak``; an empty table when there is neither. Raises StoreError."""
        return cls.from_json(json_config.load(path) or {}, path)

    @classmethod
    def from_json(cls, data: Any, path: Path | None = None) -> TopicTable:
        try:
            rest = dict(data)
            version = DataVersion.from_json(rest.pop("dataVersion", None))
            table = rest.pop("topicConfigTable", None) or {}
            # A name of digits only comes as an int key from a writer that leaves out the quotes.
            topics = {str(name): TopicConfig.from_json(str(name), one) for name, one in table.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the topics are not in RocketMQ's shape: {error}", path=path) from error
        return cls(topics, version, rest)

    def to_json(self) -> dict[str, Any]:
        members = {
            "dataVersion": self.version.to_json(),
            "topicConfigTable": {name: one.to_json() for name, one in self.topics.items()},
            **self.unknown,
        }
        return dict(sorted(members.items()))

    def dumps(self) -> str:
        """``topics.json``: what :func:`json_config.dumps` makes of :meth:`to_json`, in less time."""
        entries = json_config.join_members([self._text(name, one) for name, one in self.topics.items()], 1)
        members = {"dataVersion": self.version.to_json(), "topicConfigTable": entries, **self.unknown}
        return json_config.dumps(dict(sorted(members.items())))

    def _text(self, name: str, topic: TopicConfig) -> Encoded:
        known = self._texts.get(name)
        if known is not None and known[0] is topic:
            return known[1]
        if len(self._texts) > 2 * len(self.topics) + 64:
            self._texts = {name: one for name, one in self._texts.items() if name in self.topics}
        text = json_config.encode_members({name: topic.to_json()}, 1)
        self._texts[name] = topic, text
        return text

    def put(self, topic: TopicConfig) -> None:
        """Add or replace a topic; counts as one change."""
        self.topics[topic.name] = topic
        self.version.advance()

    def remove(self, names: Iterable[str]) -> None:
        """Take topics out; each that was there counts as one change."""
        for name in names:
            if self.topics.pop(name, None) is not None:
                self.version.advance()

    def persist(self, path: Path) -> None:
        """Write ``topics.json``, durably."""
        json_config.replace_text(path, self.dumps())
