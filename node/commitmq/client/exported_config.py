"""The document of ``commitmq export config``: topics, settings of groups and committed offsets of a node, as JSON.

    {"format": "commitmq-config", "version": 1, "node": "commitmq", "exported": "2026-11-27T03:00:00Z",
     "topics": [{"name": "orders", "read_queues": 4, "write_queues": 4, "perm": 6, "attributes": {}}],
     "groups": [{"name": "kitchen", "settings": {"retryMaxTimes": 16}}],
     "offsets": [{"group": "kitchen", "topic": "orders", "queue": 0, "offset": 4711}]}

``version`` changes when an older program would misread the document. Topics and groups of the system, and topics of retries
and dead letters, which come with their groups, are not in it. ``offsets`` is null where it was not asked for. It has no
secrets and no messages. It has the member ``users`` only where that was asked for (:mod:`commitmq.security.imported_access`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import DLQ_PREFIX, RETRY_PREFIX
from commitmq.store.metadata.group_config import CHANGEABLE, GroupConfig
from commitmq.store.metadata.topic_config import (
    QUEUE_TYPE,
    QUEUE_TYPE_SIMPLE,
    STORAGE_TYPE,
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
