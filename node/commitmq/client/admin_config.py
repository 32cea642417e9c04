"""Carries the settings of topics and groups from one node to another.

The document of ``commitmq export config``: topics, settings of groups and committed offsets of a node, as JSON.

    {"format": "commitmq-config", "version": 1, "node": "commitmq", "exported": "2026-11-27T03:00:00Z",
     "topics": [{"name": "orders", "read_queues": 4, "write_queues": 4, "perm": 6, "attributes": {}}],
     "groups": [{"name": "kitchen", "settings": {"retryMaxTimes": 16}}],
     "offsets": [{"group": "kitchen", "topic": "orders", "queue": 0, "offset": 4711}]}

``version`` changes when an older program would misread the document. Topics and groups of the system, and topics of retries
and dead letters, which come with their groups, are not in it. ``offsets`` is null where it was not asked for. It has no
secrets and no messages. It has the member ``users`` only where that was asked for (:mod:`commitmq.security.imported_access`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from commitmq.client.admin_results import TopicInfo
from commitmq.errors import GroupNotFoundError, InvalidMessageError, ProtocolError, TopicNotFoundError
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.store.metadata.group_config import CHANGEABLE, GroupConfig
from commitmq.store.metadata.topic_config import (
    QUEUE_TYPE,
    QUEUE_TYPE_SIMPLE,
    STORAGE_TYPE,
    is_system_group,
    validate_group,
    validate_topic,
)

FORMAT: Final = "commitmq-config"
VERSION: Final = 1
FIXED: Final = {STORAGE_TYPE: "log", QUEUE_TYPE: QUEUE_TYPE_SIMPLE, "cleanup.policy": "DELETE"}
"""Attributes that a topic has for its life, with their defaults."""
_MOST_QUEUES: Final = 4_096
_MOST_PERM: Final = 7
_MOST_OFFSET: Final = (1 << 63) - 1

Ask = Callable[[str, str, dict[str, Any]], dict[str, Any]]
Pages = Callable[[str, dict[str, Any]], Iterator[dict[str, Any]]]
Offset = tuple[str, str, int]
"""Group, topic and queue."""


@dataclass(frozen=True, slots=True)
class ExportedConfig:
    """A document that was read: settings of topics and of groups by name, and offsets; None where it has none."""

    topics: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    offsets: dict[Offset, int] | None

    @classmethod
    def of(cls, document: object) -> ExportedConfig:
        """Raises ValueError, which names the place in the document, what is expected there and what stands there.

        The member ``users`` is for another reader.
        """
        known = {"format", "version", "node", "exported", "topics", "groups", "offsets", "users"}
        members = _object("the document", document, known)
        if members.get("format") != FORMAT:
            raise _wrong("format", f"{FORMAT!r}, as `commitmq export config` writes it", members.get("format"))
        if members.get("version") != VERSION:
            raise _wrong("version", f"{VERSION}, the one that this program reads", members.get("version"))
        topics: dict[str, dict[str, Any]] = {}
        groups: dict[str, dict[str, Any]] = {}
        for place, one in _list("topics", members.get("topics")):
            row = _object(place, one, {"name", "read_queues", "write_queues", "perm", "attributes"})
            name = _new_name(place, row, topics, validate_topic)
            topics[name] = _topic(place, row)
        for place, one in _list("groups", members.get("groups")):
            row = _object(place, one, {"name", "settings"})
            name = _new_name(place, row, groups, validate_group)
            groups[name] = _settings(place, name, row)
        offsets = None if members.get("offsets") is None else _offsets(members["offsets"])
        return cls(topics, groups, offsets)


def is_exported(topic: str, *, system: bool) -> bool:
    """Whether the document has a topic."""
    return not system and not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


def exported_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group's settings, those that can be changed."""
    return {name: value for name, value in settings.items() if name in CHANGEABLE}


def _topic(place: str, row: dict[str, Any]) -> dict[str, Any]:
    attributes = row.get("attributes", {})
    if type(attributes) is not dict or not all(type(value) is str for value in attributes.values()):
        raise _wrong(f"{place}.attributes", "an object with texts as values", attributes)
    return {
        "read_queues": _integer(place, row, "read_queues", 1, _MOST_QUEUES),
        "write_queues": _integer(place, row, "write_queues", 1, _MOST_QUEUES),
        "perm": _integer(place, row, "perm", 0, _MOST_PERM),
        "attributes": attributes,
    }


def _settings(place: str, name: str, row: dict[str, Any]) -> dict[str, Any]:
    settings = _object(f"{place}.settings", row.get("settings"), CHANGEABLE)
    try:
        GroupConfig(name).changed(settings)
    except ValueError as error:
        raise ValueError(f"{place}.settings: {error}") from None
    return settings


def _offsets(value: object) -> dict[Offset, int]:
    found: dict[Offset, int] = {}
    for place, one in _list("offsets", value):
        row = _object(place, one, {"group", "topic", "queue", "offset"})
        group, topic = _name(place, row, "group", validate_group), _name(place, row, "topic", validate_topic)
        key = group, topic, _integer(place, row, "queue", 0, _MOST_QUEUES - 1)
        if key in found:
            raise ValueError(f"{place}: group {group} has two offsets in queue {key[2]} of {topic}; leave one out")
        found[key] = _integer(place, row, "offset", 0, _MOST_OFFSET)
    return found


def _object(place: str, value: object, known: set[str] | frozenset[str]) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong(place, "an object", value)
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{place} has no member {unknown[0]!r:.100}; there are {', '.join(sorted(known))}")
    return value


def _list(place: str, value: object) -> list[tuple[str, object]]:
    if type(value) is not list:
        raise _wrong(place, "a list", value)
    return [(f"{place}[{number}]", one) for number, one in enumerate(value)]


def _integer(place: str, row: dict[str, Any], field: str, low: int, high: int) -> int:
    value = row.get(field)
    if type(value) is not int or not low <= value <= high:
        raise _wrong(f"{place}.{field}", f"an integer from {low} to {high}", value)
    return value


def _name(place: str, row: dict[str, Any], field: str, check: Any) -> str:
    name = row.get(field)
    if type(name) is not str:
        raise _wrong(f"{place}.{field}", "a name", name)
    try:
        check(name)
    except InvalidMessageError as error:
        raise ValueError(f"{place}.{field}: {error}") from None
    return name


def _new_name(place: str, row: dict[str, Any], before: Mapping[str, object], check: Any) -> str:
    name = _name(place, row, "name", check)
    if name in before:
        raise ValueError(f"{place}: {name} is there twice; leave one out")
    return name


def _wrong(place: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"{place} must be {wanted}, not {value!r:.60}")


class ConfigChange(NamedTuple):
    """What an import changes: ``kind`` is ``topic``, ``group`` or ``offset``, ``name`` says which.

    ``before`` and ``after`` have the settings that differ; ``before`` is None for what is new. ``error``: why the node refused
    it, else None.
    """

    kind: str
    name: str
    before: dict[str, Any] | None
    after: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ConfigImport:
    """``conflicts``: what the node can never take, a sentence each; nothing was changed then. ``applied``: the changes were
    made, except those with an error.
    """

    changes: list[ConfigChange]
    conflicts: list[str]
    applied: bool


class ConfigTransfer:
    """The settings of topics and groups at a node, and what its groups have committed."""

    def __init__(self, ask: Ask, pages: Pages) -> None:
        """``ask(role, op, fields)`` gives an answer of the node, ``pages(op, fields)`` those of a list of the coordinator."""
        self._ask, self._pages = ask, pages

    def exported(self, node: str, *, offsets: bool) -> dict[str, Any]:
        """The document. ``node`` is the node's name; with ``offsets`` it has what the groups have committed."""
        topics = [one for one in self._topics() if is_exported(one.name, system=one.system)]
        settings = self._group_settings()
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "node": node,
            "exported": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "topics": [{"name": one.name, **_settings_of(one)} for one in topics],
            "groups": [{"name": name, "settings": one} for name, one in settings.items() if not is_system_group(name)],
            "offsets": None,
        }
        if offsets:
            exported = {one.name for one in topics}
            groups = dict.fromkeys(row["name"] for page in self._pages("group.list", {}) for row in page["groups"])
            document["offsets"] = [
                {"group": group, "topic": topic, "queue": queue, "offset": offset}
                for group in groups
                if not is_system_group(group)
                for topic, queue, offset in self._committed(group)
                if topic in exported
            ]
        return document

    def imported(self, document: object, *, offsets: bool, dry_run: bool) -> ConfigImport:
        """Make the node's settings those of ``document``. Raises ValueError for what is no such document."""
        wanted = ExportedConfig.of(document)
        if offsets and wanted.offsets is None:
            raise ValueError("offsets: the document has none; export it with them")
        changes, conflicts = self._topic_changes(wanted)
        changes += self._group_changes(wanted)
        if offsets:
            moves, beyond = self._offset_changes(wanted)
            changes, conflicts = changes + moves, conflicts + beyond
        if dry_run or conflicts:
            return ConfigImport(changes, conflicts, applied=False)
        return ConfigImport([self._applied(one, wanted) for one in changes], [], applied=True)

    # ------------------------------------------------------------ differences

    def _topic_changes(self, wanted: ExportedConfig) -> tuple[list[ConfigChange], list[str]]:
        changes, conflicts = [], []
        known = {one.name: one for one in self._topics()}
        for name, settings in wanted.topics.items():
            now = known.get(name)
            if now is None:
                changes.append(ConfigChange("topic", name, None, settings))
                continue
            before = {**_settings_of(now), **{f"attributes.{one}": value for one, value in now.attributes.items()}}
            after = {**settings, **{f"attributes.{one}": value for one, value in settings["attributes"].items()}}
            del after["attributes"]
            for one, default in FIXED.items():
                if (value := settings["attributes"].get(one, default)) != (has := now.attributes.get(one, default)):
                    conflicts.append(f"topic {name} has {one} {has}, not {value}, and that never changes")
            differing = {one: value for one, value in after.items() if before.get(one) != value}
            if differing:
                changes.append(ConfigChange("topic", name, {one: before.get(one) for one in differing}, differing))
        return changes, conflicts

    def _group_changes(self, wanted: ExportedConfig) -> list[ConfigChange]:
        changes = []
        known = self._group_settings()
        for name, settings in wanted.groups.items():
            now = known.get(name)
            differing = (
                settings if now is None else {one: value for one, value in settings.items() if now.get(one) != value}
            )
            if now is None or differing:
                before = None if now is None else {one: now.get(one) for one in differing}
                changes.append(ConfigChange("group", name, before, differing))
        return changes

    def _offset_changes(self, wanted: ExportedConfig) -> tuple[list[ConfigChange], list[str]]:
        changes, conflicts = [], []
        committed: dict[str, dict[tuple[str, int], int]] = {}
        ends: dict[str, dict[int, int]] = {}
        for (group, topic, queue), offset in (wanted.offsets or {}).items():
            if group not in committed:
                committed[group] = {(one, number): at for one, number, at in self._committed(group)}
            if topic not in ends:
                ends[topic] = self._ends(topic)
            before, end = committed[group].get((topic, queue)), ends[topic].get(queue, 0)
            if offset > end:
                conflicts.append(
                    f"group {group} is at {offset} in queue {queue} of {topic}, which ends at {end} here:"
                    " the messages before are missing"
                )
            elif before is None or offset > before:
                name = f"{group} {topic} {queue}"
                changes.append(
                    ConfigChange("offset", name, None if before is None else {"offset": before}, {"offset": offset})
                )
        return changes, conflicts

    # ------------------------------------------------------------ the node

    def _applied(self, change: ConfigChange, wanted: ExportedConfig) -> ConfigChange:
        try:
            if change.kind == "topic":
                self._put_topic(change.name, wanted.topics[change.name])
            elif change.kind == "group":
                self._ask("coordinator", "group.config", {"group": change.name, "set": change.after})
            else:
                group, topic, queue = change.name.split(" ")
                offsets = [[topic, int(queue), change.after["offset"]]]
                self._ask("coordinator", "offset.commit", {"group": group, "offsets": offsets, "by_person": True})
        except ProtocolError as error:
            return change._replace(error=error.message)
        return change

    def _put_topic(self, name: str, settings: dict[str, Any]) -> None:
        try:
            known = TopicInfo.of(self._ask("coordinator", "topic.describe", {"topic": name})["topic"]).attributes
        except TopicNotFoundError:
            known = {}
        fields = {
            "topic": name,
            "queues": settings["write_queues"],
            "read_queues": settings["read_queues"],
            "perm": settings["perm"],
            "attributes": {**known, **settings["attributes"]},
            "update": True,
        }
        self._ask("coordinator", "topic.create", fields)

    def _topics(self) -> list[TopicInfo]:
        return [TopicInfo.of(one) for page in self._pages("topic.list", {}) for one in page["topics"]]

    def _group_settings(self) -> dict[str, dict[str, Any]]:
        rows = [row for page in self._pages("group.configs", {}) for row in page["configs"]]
        return {str(row["groupName"]): exported_settings(row) for row in rows}

    def _committed(self, group: str) -> list[tuple[str, int, int]]:
        try:
            rows = [row for page in self._pages("group.describe", {"group": group}) for row in page["group"]["offsets"]]
            return [(topic, queue, offset) for topic, queue, offset in rows]
        except GroupNotFoundError:
            return []

    def _ends(self, topic: str) -> dict[int, int]:
        try:
            rows = self._ask("reader", "offsets", {"topic": topic})["queues"]
        except TopicNotFoundError:
            return {}
        return {row[0]: row[2] for row in rows}


def _settings_of(topic: TopicInfo) -> dict[str, Any]:
    names = ("read_queues", "write_queues", "perm", "attributes")
    return {name: getattr(topic, name) for name in names}
