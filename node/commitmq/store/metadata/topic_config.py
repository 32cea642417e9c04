"""Topics, as ``topics.json`` stores them (spec 1.4). Unknown members are kept unchanged."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion, Encoded, MemberTexts, scalar

PERM_INHERIT: Final = 1
PERM_WRITE: Final = 2
PERM_READ: Final = 4
DEFAULT_QUEUES: Final = 16
DEFAULT_PERM: Final = PERM_READ | PERM_WRITE

QUEUE_TYPE: Final = "queue.type"
QUEUE_TYPE_BATCH: Final = "BatchCQ"
MESSAGE_TYPE: Final = "message.type"
MESSAGE_TYPE_PRIORITY: Final = "PRIORITY"
QUEUE_TYPE_SIMPLE: Final = "SimpleCQ"
STORAGE_TYPE: Final = "storage.type"
"""CommitMQ's own attribute: where the messages of a topic are, ``log`` (default) or STORAGE_MEMORY."""
STORAGE_MEMORY: Final = "memory"
STORAGE_CREATED: Final = "storage.created"
"""CommitMQ's own attribute, set by the node on every topic that it makes: the topic's *incarnation*, which
distinguishes it from earlier and later topics of the same name. It is about the time when the topic was made (ms). It
is greater than that of every topic the store had before, also with a clock that went back. RocketMQ loads, keeps and
ignores unknown attributes. A topic made by RocketMQ, or by a version before this one, lacks it: its incarnation is 0.
"""

_MEMBERS: Final = frozenset(
    (
        *("topicName", "readQueueNums", "writeQueueNums", "perm"),
        *("attributes", "order", "topicFilterType", "topicSysFlag"),
    )
)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while very many long-lived objects are made: it would scan them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(slots=True)
class TopicConfig:
    """One topic. Its numbers of queues may differ while it shrinks: readers still drain the queues that writers left."""

    name: str
    read_queues: int = DEFAULT_QUEUES
    write_queues: int = DEFAULT_QUEUES
    perm: int = DEFAULT_PERM
    attributes: dict[str, str] = field(default_factory=dict)
    order: bool = False
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    unknown: dict[str, Any] = field(default_factory=dict)

    @property
    def incarnation(self) -> int:
        """See STORAGE_CREATED; 0 when the topic has none."""
        value = self.attributes.get(STORAGE_CREATED, "0")
        return int(value) if value.isascii() and value.isdecimal() else 0

    @property
    def settings(self) -> dict[str, str]:
        """The attributes except the incarnation: those that a user chose."""
        return {name: value for name, value in self.attributes.items() if name != STORAGE_CREATED}

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> TopicConfig:
        """The topic of one entry of ``topicConfigTable``; missing members keep their default."""
        get, attributes = data.get, data.get("attributes")
        return cls(
            name,
            int(get("readQueueNums", DEFAULT_QUEUES)),
            int(get("writeQueueNums", DEFAULT_QUEUES)),
            int(get("perm", DEFAULT_PERM)),
            dict(attributes) if attributes else {},
            bool(get("order", False)),
            str(get("topicFilterType", "SINGLE_TAG")),
            int(get("topicSysFlag", 0)),
            # A new dict: an emptied dict would keep its memory, a hundred thousand times.
            {} if data.keys() <= _MEMBERS else {key: value for key, value in data.items() if key not in _MEMBERS},
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


def _encode(name: str, topic: TopicConfig) -> Encoded | None:
    """The result of ``json_config.encode_members`` for one entry, but faster: there may be a hundred thousand."""
    if topic.unknown:
        return None
    entries = ",".join(f"\n\t\t\t\t{scalar(key)}:{scalar(value)}" for key, value in topic.attributes.items())
    quoted = scalar(name)
    return Encoded(
        f"\n\t\t{quoted}:{{"
        f'\n\t\t\t"attributes":{{{entries or _NO_ENTRY}\n\t\t\t}},'
        f'\n\t\t\t"order":{"true" if topic.order else "false"},'
        f'\n\t\t\t"perm":{topic.perm},'
        f'\n\t\t\t"readQueueNums":{topic.read_queues},'
        f'\n\t\t\t"topicFilterType":{scalar(topic.filter_type)},'
        f'\n\t\t\t"topicName":{scalar(topic.name)},'
        f'\n\t\t\t"topicSysFlag":{topic.sys_flag},'
        f'\n\t\t\t"writeQueueNums":{topic.write_queues}'
        "\n\t\t}"
    )


_NO_ENTRY: Final = "\n\t\t\t\t"  # an empty map takes three lines


@dataclass(slots=True)
class TopicTable:
    """All of ``topics.json``: topics by name, in the file's order.

    A topic is changed by replacing it, never in place: its text is encoded once, because encoding all of them at each
    change would make creating many topics quadratic in the most expensive step (1,000 of them took 15 s).
    """

    topics: dict[str, TopicConfig] = field(default_factory=dict)
    version: DataVersion = field(default_factory=DataVersion)
    unknown: dict[str, Any] = field(default_factory=dict)
    _texts: MemberTexts = field(default_factory=lambda: MemberTexts(1, _encode), repr=False, compare=False)
    _newest: int = field(default=-1, repr=False, compare=False)  # the newest assigned incarnation

    @classmethod
    def load(cls, path: Path) -> TopicTable:
        """The table in ``path`` or its ``.bak``; empty when neither exists. Raises StoreError."""
        return cls.from_json(json_config.load(path) or {}, path)

    @classmethod
    def from_json(cls, data: Any, path: Path | None = None) -> TopicTable:
        try:
            rest = dict(data)
            version = DataVersion.from_json(rest.pop("dataVersion", None))
            table = rest.pop("topicConfigTable", None) or {}
            # A name of only digits becomes an int key if the writer omits the quotes.
            with collector_paused():
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
        """``topics.json``: the result of :func:`json_config.dumps` for :meth:`to_json`, in less time."""
        entries = self._texts.join(self.topics)
        members = {"dataVersion": self.version.to_json(), "topicConfigTable": entries, **self.unknown}
        return json_config.dumps(dict(sorted(members.items())))

    def next_incarnation(self) -> int:
        """An incarnation that no topic of this store has or had.

        The version's timestamp is not below any assigned incarnation, including those of deleted topics; an existing
        topic may have a greater one, if RocketMQ wrote the version since.
        """
        newest = (
            max((topic.incarnation for topic in self.topics.values()), default=0) if self._newest < 0 else self._newest
        )
        self._newest = max(newest, self.version.timestamp, time.time_ns() // 1_000_000 - 1) + 1
        return self._newest

    def prepare(self, entries: Iterable[tuple[str, TopicConfig]]) -> None:
        """Encode these topics now, instead of all at once later."""
        self._texts.prepare(entries)

    def put(self, topic: TopicConfig) -> None:
        """Add or replace a topic; counts as one change."""
        self.topics[topic.name] = topic
        self.version.advance()
        self._keep_newest()

    def _keep_newest(self) -> None:
        self.version.timestamp = max(self.version.timestamp, self._newest)

    def remove(self, names: Iterable[str]) -> None:
        """Remove topics; each existing one counts as one change."""
        for name in names:
            if self.topics.pop(name, None) is not None:
                self.version.advance()
                self._keep_newest()

    def persist(self, path: Path) -> None:
        """Write ``topics.json``, durably."""
        json_config.replace_text(path, self.dumps())
