"""Why a topic or a group cannot have a name, in RocketMQ's words (spec 2.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import MAX_GROUP_UNITS, MAX_LONG_TOPIC_UNITS, MAX_TOPIC_UNITS
from commitmq.store.metadata.topic_name import validate_group, validate_topic

_ALLOWED: Final = "^[%|a-zA-Z0-9_-]+$"


def topic_refusal(name: str) -> str | None:
    """None for a legal name."""
    if name.startswith(("%RETRY%", "%DLQ%")) and len(name) > MAX_LONG_TOPIC_UNITS:
        return (
            f"The specified topic is DLQ or Retry topic: {name}, and it's longer than topic max length:"
            f" {MAX_LONG_TOPIC_UNITS}"
        )
    return _refusal("topic", name, validate_topic, MAX_TOPIC_UNITS)


def group_refusal(name: str) -> str | None:
    """None for a legal name."""
    return _refusal("group", name, validate_group, MAX_GROUP_UNITS)


def _refusal(kind: str, name: str, validate: Callable[[str], None], most: int) -> str | None:
    if not name.strip():
        return f"The specified {kind} is blank."
    try:
        validate(name)
    except InvalidMessageError:
        if len(name) > most:
            return f"The specified {kind}: {name}, is longer than {kind} max length: {most}"
        return f"The specified {kind}: {name}, contains illegal characters, allowing only {_ALLOWED}"
    return None
