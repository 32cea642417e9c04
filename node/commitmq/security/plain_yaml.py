"""The YAML of RocketMQ's ``plain_acl.yml``, read by PyYAML (the extra ``acl``), with the numbers of its lines.

Every text stays as it is written: the secret ``0123`` is no number. Several documents, aliases and tags are refused. An error
never shows what a line holds, which may be a secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

_NULLS: Final = ("", "~", "null", "Null", "NULL")
_MOST_LEVELS: Final = 8


@dataclass(frozen=True, slots=True)
class Node:
    """A value, and the number of its line, from 1 on. None: there is nothing behind the key."""

    line: int
    value: Value


Value: TypeAlias = str | dict[str, Node] | list[Node] | None


def read_yaml(text: str) -> Node:
    """The document. Raises ValueError that names the line, and ImportError without PyYAML."""
    import yaml

    try:
        for event in yaml.parse(text, yaml.BaseLoader):
            if isinstance(event, yaml.AliasEvent):
                raise _error(event, "an alias (*) is not read")
            if isinstance(event, yaml.DocumentStartEvent) and event.explicit and event.start_mark.line:
                raise _error(event, "only one document is read")
        found = yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"line {mark.line + 1 if mark else 1}: it is no YAML") from None
    except (yaml.YAMLError, RecursionError):
        raise ValueError("it is no YAML") from None
    return Node(1, None) if found is None else _node(found, 0)


def _node(found: Any, level: int) -> Node:
    line = found.start_mark.line + 1
    if level > _MOST_LEVELS:
        raise _error(found, f"more than {_MOST_LEVELS} levels")
    if not found.tag.startswith("tag:yaml.org,2002:") or found.tag.rpartition(":")[2] not in ("str", "seq", "map"):
        raise _error(found, "a tag (!) is not read")
    if found.id == "scalar":
        return Node(line, None if found.style is None and found.value in _NULLS else found.value)
    if found.id == "sequence":
        return Node(line, [_node(one, level + 1) for one in found.value])
    members: dict[str, Node] = {}
    for key, value in found.value:
        if key.id != "scalar":
            raise _error(key, "a key must be a text")
        if key.value in members:
            raise _error(key, f"the key {key.value!r:.40} is there twice")
        members[key.value] = _node(value, level + 1)
    return Node(line, members)


def _error(place: Any, sentence: str) -> ValueError:
    return ValueError(f"line {place.start_mark.line + 1}: {sentence}")
