"""Consumer groups, as ``subscriptionGroup.json`` stores them (spec 1.4). Unknown members are kept.

Consumer group offsets, as ``consumerOffset.json`` stores them (spec 1.4, 12.10).

``offsetTable`` maps ``topic@group`` to the next queue offset to consume by queue id; ``groupTopicMap`` is derived from
it on write and ignored on read. Unknown members are kept unchanged.

The entries of one group or topic are found without scanning the others, and the text of an entry is encoded again only
when it changed: a node may have thousands of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import orjson

from commitmq.format.java import hash_map_order
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion, Encoded, MemberTexts, Table, rocketmq_shape

SEPARATOR: Final = "@"
_GROUP_BUCKETS: Final = 64
_TOPIC_BUCKETS: Final = 16


@dataclass(slots=True)
class ConsumerOffsets(Table):
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
    def from_json(cls, data: Any, path: Path | None = None) -> Self:
        """Accepts both quoted and unquoted queue ids; drops an entry without ``@``, which has no group."""
        with rocketmq_shape("the consumer offsets", path):
            rest = dict(data)
            version = DataVersion.from_json(rest.pop("dataVersion", None))
            rest.pop("groupTopicMap", None)
            offsets: dict[tuple[str, str], dict[int, int]] = {}
            for name, queues in (rest.pop("offsetTable", None) or {}).items():
                topic, separator, group = str(name).partition(SEPARATOR)
                if separator:
                    offsets[topic, group] = {int(queue): int(offset) for queue, offset in queues.items()}
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
    """The journal of changes since ``consumerOffset.json`` was written; see :mod:`commitmq.store.metadata.journal`."""
    return layout.own / "offsets.journal"


def load_snapshot(layout: StoreLayout) -> tuple[ConsumerOffsets, str]:
    """``consumerOffset.json`` or its ``.bak``, and its name; empty when neither exists. Raises StoreError."""
    path = layout.config / "consumerOffset.json"
    data, name = json_config.load_named(path, journal=journal_path(layout))
    return ConsumerOffsets.from_json(data or {}, path), name


_DEFAULTS: dict[str, Any] = {
    "attributes": {},
    "brokerId": 0,
    "consumeBroadcastEnable": True,
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "consumeMessageOrderly": False,
    "consumeTimeoutMinute": 15,
    "groupRetryPolicy": {"type": "CUSTOMIZED"},
    "groupSysFlag": 0,
    "notifyConsumerIdsChangedEnable": True,
    "retryMaxTimes": 16,
    "retryQueueNums": 1,
    "whichBrokerWhenConsumeSlowly": 1,
}

FORBIDDEN_READ: Final = 1 << 2
"""The bit of ``forbiddenTable`` for a topic that a group must not read."""

# The settings that can be changed, and the values that each may have: true and false, or a range.
_MOST = (1 << 31) - 1
SETTABLE: dict[str, range | None] = {
    "consumeBroadcastEnable": None,
    "consumeEnable": None,
    "consumeFromMinEnable": None,
    "consumeMessageOrderly": None,
    "notifyConsumerIdsChangedEnable": None,
    "brokerId": range(_MOST),
    "consumeTimeoutMinute": range(1, _MOST),
    "groupSysFlag": range(_MOST),
    "retryMaxTimes": range(_MOST),
    "retryQueueNums": range(1_025),
    "whichBrokerWhenConsumeSlowly": range(_MOST),
}
_OBJECTS: Final = {"attributes": 1, "groupRetryPolicy": 8}
"""Settings that are objects, and how deep each may be nested: the file and lists of groups have them in their midst. The node
keeps them for RocketMQ's tools, and reads one attribute of them.
"""
CHANGEABLE: Final = frozenset((*SETTABLE, *_OBJECTS))
"""The names of all settings that can be changed."""
_PRIORITY_FACTOR: Final = "priority.factor"


@dataclass(slots=True)
class GroupConfig:
    """One group. ``settings`` are RocketMQ's members under their own names; members that a file omits are not added."""

    name: str
    settings: dict[str, Any] = field(default_factory=lambda: {name: _copy(value) for name, value in _DEFAULTS.items()})

    @property
    def retry_queues(self) -> int:
        """Queues of its retry topic; 0 or less: failed messages are not kept."""
        return _number(self.settings.get("retryQueueNums"), 1)

    @property
    def max_retries(self) -> int:
        """So often a failed message is given to the group again before it is a dead letter."""
        return _number(self.settings.get("retryMaxTimes"), 16)

    @property
    def priority_factor(self) -> int:
        """Of 100 pops of a PRIORITY topic this many begin with its highest queue: RocketMQ's priority.factor."""
        attributes = self.settings.get("attributes")
        text = str(attributes.get(_PRIORITY_FACTOR, "")) if isinstance(attributes, dict) else ""
        is_number = text.isascii() and text.isdigit() and len(text) <= 3
        return min(int(text), 100) if is_number else 100

    @property
    def consume_enabled(self) -> bool:
        """False when an administrator has stopped the group."""
        return bool(self.settings.get("consumeEnable", True))

    @property
    def broadcast_enabled(self) -> bool:
        """False when no member may read all queues for itself."""
        return bool(self.settings.get("consumeBroadcastEnable", True))

    def changed(self, changes: dict[str, Any]) -> GroupConfig:
        """A copy with other settings; the rest stays as it is. Raises ValueError for a setting or a value that is none."""
        for name, value in changes.items():
            if name in _OBJECTS:
                if type(value) is not dict:
                    raise ValueError(f"{name} must be an object, not {value!r:.100}")
                if _is_deeper(value, _OBJECTS[name]):
                    raise ValueError(f"{name} is nested more than {_OBJECTS[name]} deep")
                continue
            if name not in SETTABLE:
                raise ValueError(
                    f"there is no setting {name!r:.100} to change; there are {', '.join(sorted(SETTABLE))}"
                )
            values = SETTABLE[name]
            if values is None and type(value) is not bool:
                raise ValueError(f"{name} must be true or false, not {value!r:.100}")
            if values is not None and (type(value) is not int or value not in values):
                raise ValueError(f"{name} must be an integer from {values[0]} to {values[-1]}, not {value!r:.100}")
        return GroupConfig(self.name, {**self.settings, **changes})

    @property
    def object_bytes(self) -> int:
        """Bytes of the settings whose size a client chooses; 0 for a group that has none of its own."""
        own = {name: self.settings.get(name) for name in _OBJECTS if self.settings.get(name) != _DEFAULTS[name]}
        return len(orjson.dumps(own)) if any(own.values()) else 0

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> GroupConfig:
        """The group of one entry of ``subscriptionGroupTable``."""
        return cls(name, {key: value for key, value in data.items() if key != "groupName"})

    def to_json(self) -> dict[str, Any]:
        """The entry as RocketMQ writes it: members sorted by name."""
        return dict(sorted({**self.settings, "groupName": self.name}.items()))


@dataclass(slots=True)
class GroupTable(Table):
    """All of ``subscriptionGroup.json``: groups by name, in the file's order. A group is changed by replacing it."""

    groups: dict[str, GroupConfig] = field(default_factory=dict)
    version: DataVersion = field(default_factory=DataVersion)
    forbidden: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)
    object_bytes: int = field(default=0, init=False, compare=False)
    """Bytes that clients chose, of all groups: their own objects, and the topics that they must not read."""
    disabled: set[str] = field(default_factory=set, init=False, compare=False)
    """Groups whose consumeEnable is off."""
    reads: int = field(default=0, init=False, compare=False)
    """Grows when what a group may read changes."""
    _texts: MemberTexts = field(default_factory=lambda: MemberTexts(1), repr=False, compare=False)

    def __post_init__(self) -> None:
        self.object_bytes = sum(one.object_bytes for one in self.groups.values())
        self.object_bytes += sum(map(_forbidden_bytes, self.forbidden.values()))
        self.disabled = {name for name, one in self.groups.items() if not one.consume_enabled}

    @classmethod
    def from_json(cls, data: Any, path: Path | None = None) -> Self:
        with rocketmq_shape("the groups", path):
            rest = dict(data)
            version = DataVersion.from_json(rest.pop("dataVersion", None))
            forbidden = dict(rest.pop("forbiddenTable", None) or {})
            table = rest.pop("subscriptionGroupTable", None) or {}
            groups = {str(name): GroupConfig.from_json(str(name), one) for name, one in table.items()}
        return cls(groups, version, forbidden, rest)

    def to_json(self) -> dict[str, Any]:
        members = {
            "dataVersion": self.version.to_json(),
            "forbiddenTable": self.forbidden,
            "subscriptionGroupTable": {name: one.to_json() for name, one in self.groups.items()},
            **self.unknown,
        }
        return dict(sorted(members.items()))

    def put(self, group: GroupConfig) -> None:
        """Add or replace a group; counts as one change."""
        known = self.groups.get(group.name)
        self.object_bytes += group.object_bytes - (0 if known is None else known.object_bytes)
        self.groups[group.name] = group
        self._note(group.name, is_disabled=not group.consume_enabled)
        self.version.advance()

    def remove(self, name: str) -> None:
        """Remove a group, and what it must not read; counts as one change if it existed."""
        self.put_forbidden(name, None)
        known = self.groups.pop(name, None)
        self._note(name, is_disabled=False)
        if known is not None:
            self.object_bytes -= known.object_bytes
            self.version.advance()

    def forbid(self, name: str, topic: str, *, readable: bool) -> int:
        """Say whether the group may read ``topic``. Returns the bits that it has for the topic then (spec remoting 1.9)."""
        table = dict(self.forbidden.get(name) or {})
        bits = _number(table.get(topic), 0) & ~FORBIDDEN_READ | (0 if readable else FORBIDDEN_READ)
        table[topic] = bits
        if not bits:
            del table[topic]
        self.put_forbidden(name, table)
        self.version.advance()
        return bits

    def put_forbidden(self, name: str, topics: dict[str, Any] | None) -> None:
        """Set what a group must not read. Counts as no change of the table."""
        known = self.forbidden.pop(name, None)
        self.object_bytes += _forbidden_bytes(topics) - _forbidden_bytes(known)
        self.reads += (topics or None) != (known or None)
        if topics:
            self.forbidden[name] = topics

    def _note(self, name: str, *, is_disabled: bool) -> None:
        if is_disabled is not (name in self.disabled):
            (self.disabled.add if is_disabled else self.disabled.discard)(name)
            self.reads += 1

    def prepare(self, entries: Iterable[tuple[str, GroupConfig]]) -> None:
        """Encode the texts of ``entries`` for :meth:`persist` now."""
        self._texts.prepare(entries)

    def persist(self, path: Path) -> None:
        """Write ``subscriptionGroup.json``, durably."""
        members = {
            "dataVersion": self.version.to_json(),
            "forbiddenTable": self.forbidden,
            "subscriptionGroupTable": self._texts.join(self.groups),
            **self.unknown,
        }
        json_config.persist(path, dict(sorted(members.items())))


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether ``value``, an object or a list, has more than ``depth`` levels of both."""
    level = [value]
    for _ in range(depth):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
                 if isinstance(inner, dict | list)]  # fmt: skip
    return bool(level)


def _forbidden_bytes(topics: Any) -> int:
    """Of one group's entry of ``forbiddenTable``."""
    return len(orjson.dumps(topics)) if topics else 0


def _number(value: Any, default: int) -> int:
    """``value`` of a setting, which a hand may have written."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default
