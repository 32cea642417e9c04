"""Changes of a topic's attributes as RocketMQ's tools write them: ``+name=value,-name`` (remoting 1.8). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from commitmq.errors import CommitMQError

_KNOWN: Final = ("queue.type", "cleanup.policy", "message.type", "reserve.time")
_FIXED: Final = ("queue.type", "cleanup.policy")


class AttributesError(CommitMQError):
    """A change that RocketMQ refuses, in its words."""


def parse(text: str | None) -> dict[str, str]:
    """The changes by name, each with its sign; an empty text for a removal. Raises AttributesError."""
    changes: dict[str, str] = {}
    for part in (text or "").split(","):
        if not part:
            continue
        name, equals, value = part.partition("=")
        if equals:
            if not name.startswith("+"):
                raise AttributesError(f"add/alter attribute format is wrong: {name}")
            if not value or "=" in value:
                raise AttributesError("kv string format wrong.")
        elif not name.startswith("-"):
            raise AttributesError(f"delete attribute format is wrong: {name}")
        if name in changes:
            raise AttributesError(f"key duplication: {name}")
        changes[name] = value
    return changes


def merged(known: Mapping[str, str] | None, changes: Mapping[str, str]) -> dict[str, str]:
    """The attributes of a topic after ``changes``; ``known`` is None for a new topic. Raises AttributesError."""
    found = dict(known or {})
    names: set[str] = set()
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        if name in names:
            raise AttributesError(f"alter duplication key. key: {name}")
        names.add(name)
        if sign not in ("+", "-"):
            raise AttributesError(f"wrong format key: {signed}")
        if name not in _KNOWN:
            raise AttributesError(f"unsupported key: {name}")
        if known is None and sign == "-":
            raise AttributesError(f"only add attribute is supported while creating topic. key: {name}")
        if known is not None and name in _FIXED:
            raise AttributesError(f"attempt to update an unchangeable attribute. key: {name}")
        if sign == "+":
            found[name] = value
        elif name not in found:
            raise AttributesError(f"attempt to delete a nonexistent key: {name}")
        else:
            del found[name]
    return found
