"""Policies: which actions on which resources a user may do, from which addresses (RocketMQ's ACL 2.0)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from commitmq.security.resource import ResourcePattern

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
