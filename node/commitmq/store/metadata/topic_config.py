"""Topics, as ``topics.json`` stores them (spec 1.4). Unknown members are kept unchanged.

The legal names of topics and groups, and the topics that take no plain sends (spec 2.7).

A topic's name is also a folder's name, so a name that breaks these rules must never reach the file system.
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import (
    DEAD_LETTER_GROUP,
    DLQ_PREFIX,
    LMQ_PREFIX,
    MAX_GROUP_UNITS,
    MAX_LONG_TOPIC_UNITS,
    MAX_TOPIC_UNITS,
    RETRY_PREFIX,
)
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion, Encoded, MemberTexts, Table, rocketmq_shape, scalar

FORBIDDEN_TOPICS = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    }
)
"""Topics to which only the node itself may append."""

SYSTEM_GROUPS = frozenset(
    {
        "TOOLS_CONSUMER",
        "FILTERSRV_CONSUMER",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PULL",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
    }
)
"""RocketMQ's predefined consumer groups (spec 1.5), besides those of the prefix."""

_SYSTEM_PREFIX = "rmq_sys_"
_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
_TIMER_TOPIC = "rmq_sys_wheel_timer"
_REVIVE_PREFIX = "rmq_sys_REVIVE_LOG_"
_ALLOWED = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII)
_POP_RETRY_V2 = re.compile(rf"{RETRY_PREFIX}[^+]+\+[^+]+")


def validate_topic(topic: str) -> None:
    """Raise InvalidMessageError unless ``topic`` is a legal name: ``% | a-z A-Z 0-9 _ -``, 1 to 127 characters (255 for
    a group's retry and dead-letter topics and for light message queues, which are not stored as a record's topic).

    A pop retry topic of the second form has one ``+``, between group and topic (spec 12.6).
    """
    if topic.startswith(RETRY_PREFIX) and "+" in topic:
        if not _POP_RETRY_V2.fullmatch(topic):
            raise InvalidMessageError(
                f"topic {topic!r} is no {RETRY_PREFIX}group+topic: one +, with a name on each side"
            )
        topic = topic.replace("+", "_")
    long_name = topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))
    _validate("topic", topic, MAX_LONG_TOPIC_UNITS if long_name else MAX_TOPIC_UNITS)


def validate_group(group: str) -> None:
    """Raise InvalidMessageError unless ``group`` is a legal name: the same characters, 1 to 120 of them."""
    _validate("group", group, MAX_GROUP_UNITS)


def is_send_forbidden(topic: str) -> bool:
    """True for a system topic that takes no plain sends: the node does what its messages say.

    RocketMQ takes sends to its timer topic, and stumbles over them. It takes them to its revive topic too: who forges a check
    point there makes the node copy messages of any topic into a retry topic.
    """
    return topic in FORBIDDEN_TOPICS or topic == _TIMER_TOPIC or topic.startswith(_REVIVE_PREFIX)


def is_nodes_own(topic: str) -> bool:
    """True for a topic into which movers put messages, though the topic table need not name it."""
    return is_send_forbidden(topic) or topic.startswith(_SYSTEM_PREFIX)


def is_system_group(group: str) -> bool:
    """True for a consumer group of RocketMQ's or of the node's own parts, which no program of a user belongs to."""
    return group in SYSTEM_GROUPS or group.startswith(_SYSTEM_GROUP_PREFIX) or group == DEAD_LETTER_GROUP


def _validate(kind: str, name: str, limit: int) -> None:
    if not name:
        raise InvalidMessageError(f"the {kind} name is empty")
    # All allowed characters are ASCII, so there are equally many characters, UTF-16 units and bytes.
    if not _ALLOWED.fullmatch(name):
        raise InvalidMessageError(f"{kind} {name!r} has characters other than % | a-z A-Z 0-9 _ -")
    if len(name) > limit:
        raise InvalidMessageError(f"{kind} {name!r} has {len(name)} characters, at most {limit} are allowed")


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
class TopicTable(Table):
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
    def from_json(cls, data: Any, path: Path | None = None) -> Self:
        with rocketmq_shape("the topics", path):
            rest = dict(data)
            version = DataVersion.from_json(rest.pop("dataVersion", None))
            table = rest.pop("topicConfigTable", None) or {}
            # A name of only digits becomes an int key if the writer omits the quotes.
            with collector_paused():
                topics = {str(name): TopicConfig.from_json(str(name), one) for name, one in table.items()}
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
