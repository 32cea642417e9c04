"""Policies: which actions on which resources a user may do, from which addresses (RocketMQ's ACL 2.0).

Resources: what a request touches, and the patterns of policies that name them (RocketMQ's ACL 2.0).

Written as RocketMQ writes them: ``*``, ``Topic:*``, ``Topic:orders-*``, ``Topic:orders``. The first colon ends the type, whose
case does not count.

May a user do this? One pure function: no file, no socket, no clock (RocketMQ's ACL 2.0).

Super users may do everything. Of all others' entries those count that match the resource, one of the actions and the peer's
address; default entries only if no custom one does. Among those the most exact pattern decides, and among equally exact
ones Deny wins. Without a matching entry the answer is no.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from commitmq.security.user import User

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


Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class Action(StrEnum):
    """What a request does. An entry with ``ALL`` allows or denies each of them; a request with ``ANY`` needs whichever."""

    ALL = "All"
    ANY = "Any"
    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


_ACTIONS = {one.lower(): one for one in Action}


def parse_actions(texts: Iterable[str]) -> frozenset[Action]:
    """The actions of an entry, whatever their case. Raises ValueError."""
    found = set()
    for text in texts:
        action = _ACTIONS.get(text.strip().lower())
        if action is None or action is Action.ANY:
            known = ", ".join(one for one in Action if one is not Action.ANY)
            raise ValueError(f"an action is one of {known}, not {text!r:.100}")
        found.add(action)
    if not found:
        raise ValueError("an entry needs at least one action")
    return frozenset(found)


def parse_network(text: str) -> Network:
    """An address or a network, ``10.1.0.0/16``. Bits behind the prefix count as 0. Raises ValueError."""
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ValueError(f"an address is an IP or a network such as 10.1.0.0/16, not {text!r:.100}") from None


def parse_address(text: str) -> Address | None:
    """The address of a peer; an IPv4 address that is mapped into IPv6 counts as IPv4. None for what is none."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a policy. No ``networks``: from everywhere."""

    pattern: ResourcePattern
    actions: frozenset[Action]
    networks: tuple[Network, ...]
    allow: bool

    def does(self, wanted: Iterable[Action]) -> bool:
        """Whether the entry speaks of one of the actions."""
        return any(one is Action.ANY or one in self.actions for one in wanted) or Action.ALL in self.actions

    def comes_from(self, address: Address | None) -> bool:
        """Whether the entry speaks of a peer at ``address``."""
        return not self.networks or (address is not None and any(address in one for one in self.networks))

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Entry:
        """Raises ValueError, TypeError, KeyError."""
        decision = members["decision"]
        if decision not in ("Allow", "Deny"):
            raise ValueError(f"a decision is Allow or Deny, not {decision!r:.100}")
        return cls(
            ResourcePattern.parse(members["resource"]),
            parse_actions(members["actions"]),
            tuple(parse_network(one) for one in members.get("from", ())),
            decision == "Allow",
        )

    def __str__(self) -> str:
        """``Topic:orders Allow Pub,Sub from 10.1.0.0/16``."""
        networks = f" from {','.join(map(str, self.networks))}" if self.networks else ""
        return f"{self.pattern} {'Allow' if self.allow else 'Deny'} {','.join(sorted(self.actions))}{networks}"

    def to_json(self) -> dict[str, Any]:
        members: dict[str, Any] = {
            "resource": str(self.pattern),
            "actions": sorted(self.actions),
            "decision": "Allow" if self.allow else "Deny",
        }
        if self.networks:
            members["from"] = [str(one) for one in self.networks]
        return members


@dataclass(frozen=True, slots=True)
class Policies:
    """All entries of one user. Those in ``default`` count only where none in ``custom`` matches."""

    custom: tuple[Entry, ...] = ()
    default: tuple[Entry, ...] = ()

    def entry_for(self, pattern: ResourcePattern) -> Entry | None:
        """The custom entry for these resources."""
        return next((one for one in self.custom if one.pattern == pattern), None)

    def with_entry(self, entry: Entry) -> Policies:
        """A copy in which ``entry`` is the only custom one for its resources, as RocketMQ replaces them."""
        rest = tuple(one for one in self.custom if one.pattern != entry.pattern)
        return Policies((*rest, entry), self.default)

    def with_all(self, other: Policies) -> Policies:
        """A copy with the entries of ``other`` too; one of these stands instead of an entry for the same resources."""
        added = {one.pattern for one in other.custom}, {one.pattern for one in other.default}
        return Policies(
            (*(one for one in self.custom if one.pattern not in added[0]), *other.custom),
            (*(one for one in self.default if one.pattern not in added[1]), *other.default),
        )

    def without(self, pattern: ResourcePattern) -> Policies:
        """A copy without the entries for these resources. Raises KeyError when there are none."""
        left = Policies(
            tuple(one for one in self.custom if one.pattern != pattern),
            tuple(one for one in self.default if one.pattern != pattern),
        )
        if left == self:
            raise KeyError(str(pattern))
        return left

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Policies:
        """Raises ValueError, TypeError, KeyError."""
        return cls(
            tuple(Entry.from_json(one) for one in members.get("custom", ())),
            tuple(Entry.from_json(one) for one in members.get("default", ())),
        )

    def to_json(self) -> dict[str, Any]:
        parts = (("custom", self.custom), ("default", self.default))
        return {name: [one.to_json() for one in entries] for name, entries in parts if entries}


class Decision(NamedTuple):
    """``entry`` decided; None for a super user, a disabled one, and where nothing matches."""

    allowed: bool
    reason: str
    entry: Entry | None = None


def decide(
    user: User, policies: Policies, resource: Resource, actions: Collection[Action], address: Address | None
) -> Decision:
    """Whether ``user`` at ``address`` may do one of ``actions`` on ``resource``."""
    if not user.is_enabled:
        return Decision(False, f"user {user.name} is disabled")
    if user.is_super:
        return Decision(True, "a super user may do everything")
    for entries in (policies.custom, policies.default):
        matching = [
            one for one in entries if one.pattern.matches(resource) and one.does(actions) and one.comes_from(address)
        ]
        if matching:
            entry = min(matching, key=lambda one: (one.pattern.rank, one.allow))
            wanted = "|".join(sorted(actions))
            verb = "allows" if entry.allow else "denies"
            return Decision(entry.allow, f"the entry {entry.pattern} of user {user.name} {verb} {wanted}", entry)
    wanted = "|".join(sorted(actions))
    return Decision(False, f"no entry of user {user.name} allows {wanted} on {resource}")


def of_other_addresses(
    policies: Policies, resource: Resource, actions: Collection[Action], address: Address | None
) -> list[Entry]:
    """The entries that speak of one of ``actions`` on ``resource``, but not of a peer at ``address``."""
    entries = (*policies.custom, *policies.default)
    matching = [one for one in entries if one.pattern.matches(resource) and one.does(actions)]
    return [one for one in matching if not one.comes_from(address)]
