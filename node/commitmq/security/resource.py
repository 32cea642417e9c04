"""Resources: what a request touches, and the patterns of policies that name them (RocketMQ's ACL 2.0).

Written as RocketMQ writes them: ``*``, ``Topic:*``, ``Topic:orders-*``, ``Topic:orders``. The first colon ends the type, whose
case does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

MAX_NAME_CHARACTERS: Final = 255
_EVERYTHING: Final = "*"


class ResourceType(StrEnum):
    """The kinds of resources. ``ANY`` is that of the pattern ``*`` only; no request touches it."""

    ANY = "Any"
    CLUSTER = "Cluster"
    NAMESPACE = "Namespace"
    TOPIC = "Topic"
    GROUP = "Group"


_TYPES: Final = {one.lower(): one for one in ResourceType}


class Resource(NamedTuple):
    """One resource that a request touches; a tuple, because each request makes one."""

    type: ResourceType
    name: str

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"


@dataclass(frozen=True, slots=True)
class ResourcePattern:
    """Resources that a policy names. ``prefix``: all whose name begins with ``name``, which is empty for all of the type."""

    type: ResourceType
    name: str
    prefix: bool

    @classmethod
    def parse(cls, text: str) -> ResourcePattern:
        """Raises ValueError."""
        if text == _EVERYTHING:
            return cls(ResourceType.ANY, "", True)
        kind, colon, name = text.partition(":")
        found = _TYPES.get(kind.lower())
        if not colon or found is None:
            known = ", ".join(f"{one}:NAME" for one in ResourceType if one is not ResourceType.ANY)
            raise ValueError(f"a resource is *, or one of {known}, not {text!r:.300}")
        is_prefix = name.endswith(_EVERYTHING)
        name = name.removesuffix(_EVERYTHING)
        if not name and not is_prefix:
            raise ValueError(f"the resource {text!r:.300} has no name")
        if found is ResourceType.ANY and (name or not is_prefix):
            raise ValueError(f"a resource of type Any is everything and has no name: {text!r:.300}")
        if _EVERYTHING in name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            raise ValueError(
                f"a resource's name has at most {MAX_NAME_CHARACTERS} printable characters, and * only at its end:"
                f" {text!r:.300}"
            )
        return cls(found, name, is_prefix)

    def matches(self, resource: Resource) -> bool:
        """Whether the pattern names ``resource``."""
        if self.type is ResourceType.ANY:
            return True
        if self.type is not resource.type:
            return False
        return resource.name.startswith(self.name) if self.prefix else resource.name == self.name

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Patterns that match one resource, sorted by it, have the one that counts first: a type before ``*``, a name
        before a prefix, a longer prefix before a shorter one.
        """
        return self.type is ResourceType.ANY, int(self.prefix) + int(self.prefix and not self.name), -len(self.name)

    def __str__(self) -> str:
        if self.type is ResourceType.ANY:
            return _EVERYTHING
        return f"{self.type}:{self.name}{_EVERYTHING if self.prefix else ''}"
