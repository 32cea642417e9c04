"""Users and what they may do: secrets and signatures, quotas, and policies of actions on resources (RocketMQ's ACL 2.0).

Nothing shows a secret by mistake. A client of RocketMQ signs with it: HMAC-SHA1 over the header's fields and the body. Quotas
are those of all users in the settings ``[flow]``, and of one in the file of users.

A policy names resources by patterns as RocketMQ writes them: ``*``, ``Topic:*``, ``Topic:orders-*``, ``Topic:orders``. The
first colon ends the type, whose case does not count. Whether a user may do something is one pure function: no file, no
socket, no clock. Super users may do everything. Of all others' entries those count that match the resource, one of the
actions and the peer's address; default entries only if no custom one does. Among those the most exact pattern decides, and
among equally exact ones Deny wins. Without a matching entry the answer is no.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

QUOTAS: Final = (
    "send_messages_per_s",
    "send_bytes_per_s",
    "pull_messages_per_s",
    "pull_bytes_per_s",
    "topics",
    "groups",
    "connections",
    "pending_bytes",
)
"""The setting of each for all users is ``flow.user_NAME``. With 0 there is no bound."""
MAX_QUOTA: Final = 1 << 50
_SIZES: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1_000**at for at, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1_024**at for at, prefix in enumerate("kmgt", 1)},
}
_TEXT: Final = re.compile(r"(\d[\d_]*)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quota:
    """All quotas of one user."""

    send_messages_per_s: int = 0
    send_bytes_per_s: int = 0
    pull_messages_per_s: int = 0
    pull_bytes_per_s: int = 0
    topics: int = 0
    groups: int = 0
    connections: int = 0
    pending_bytes: int = 0

    @classmethod
    def of_settings(cls, flow: object) -> Quota:
        """That of all users, in the settings ``[flow]``."""
        return cls(**{name: getattr(flow, f"user_{name}") for name in QUOTAS})

    def laid_over(self, quotas: Mapping[str, int]) -> Quota:
        """With those that a user has instead."""
        return Quota(**{name: quotas.get(name, getattr(self, name)) for name in QUOTAS})


def quotas_from_json(members: Any) -> tuple[tuple[str, int], ...]:
    """A user's own quotas in the file of users, in the order of QUOTAS. Raises ValueError."""
    if not isinstance(members, dict):
        raise ValueError(f"quotas must be an object, not {members!r:.100}")
    for name, number in members.items():
        if name not in QUOTAS:
            raise ValueError(f"there is no quota {name!r:.100}; they are {', '.join(QUOTAS)}")
        if type(number) is not int or not 0 <= number <= MAX_QUOTA:
            raise ValueError(f"the quota {name} must be a number from 0 to {MAX_QUOTA}, not {number!r:.100}")
    return tuple((name, members[name]) for name in QUOTAS if name in members)


def parse_quota(text: str) -> tuple[str, int | None]:
    """``NAME=NUMBER``; a quota of bytes may have a unit, as in ``send_bytes_per_s=10MiB``. None for ``NAME=default``.
    Raises ValueError.
    """
    name, equals, value = (one.strip() for one in text.partition("="))
    if name not in QUOTAS or not equals:
        raise ValueError(f"{text!r:.100} is no quota: write NAME=NUMBER, with a name of {', '.join(QUOTAS)}")
    if value == "default":
        return name, None
    found = _TEXT.fullmatch(value)
    unit = found[2].lower() if found else ""
    if found is None or unit not in _SIZES or (unit and "bytes" not in name):
        units = ", or bytes with a unit such as 10MiB" if "bytes" in name else ""
        raise ValueError(f"{name}={value!r:.100}: write a whole number{units}; 0 for no bound, default for the node's")
    number = int(found[1].replace("_", "")) * _SIZES[unit]
    if number > MAX_QUOTA:
        raise ValueError(f"{name}={value:.100}: the most is {MAX_QUOTA}")
    return name, number


ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"


def sign(fields: Mapping[str, str], body: bytes | bytearray | memoryview, secret: str, *, without: str = "") -> str:
    """Base64 of HMAC-SHA1 over the values of all ``fields`` but the signature and ``without``, in the order of their names,
    and ``body`` (RocketMQ's AclUtils).
    """
    values = [value for name, value in sorted(fields.items()) if name not in (SIGNATURE, without)]
    mac = hmac.new(secret.encode(), "".join(values).encode(errors="surrogatepass"), hashlib.sha1)
    mac.update(body)
    return base64.b64encode(mac.digest()).decode()


def is_signed(
    fields: Mapping[str, str], body: bytes | bytearray | memoryview, secret: str, *, without: str = ""
) -> bool:
    """Whether ``fields`` have the right signature. Takes the same time for each wrong one."""
    given = fields.get(SIGNATURE, "").encode(errors="replace")
    return hmac.compare_digest(given, sign(fields, body, secret, without=without).encode())


MIN_SECRET_CHARACTERS: Final = 8
MAX_SECRET_CHARACTERS: Final = 256
MAX_KEYS: Final = 16
"""Of one user."""
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}").fullmatch
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,128}").fullmatch


class Secret:
    """A text that neither ``str`` nor ``repr`` shows; :meth:`reveal` does."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        """Raises ValueError for a text that is too short, too long, or has blanks or control characters."""
        if not MIN_SECRET_CHARACTERS <= len(text) <= MAX_SECRET_CHARACTERS:
            raise ValueError(f"a secret has {MIN_SECRET_CHARACTERS} to {MAX_SECRET_CHARACTERS} characters")
        if not text.isprintable() or " " in text:
            raise ValueError("a secret has printable characters without blanks")
        self._text = text

    @classmethod
    def make(cls) -> Secret:
        """A new one, of 192 random bits."""
        return cls(secrets.token_urlsafe(24))

    def reveal(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and secrets.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "***"


def check_name(name: str) -> str:
    """The name, if it is one. Raises ValueError."""
    if not isinstance(name, str) or not _NAME(name):
        raise ValueError(f"a user's name has 1 to 128 letters, digits and _ . @ -, not {name!r:.200}")
    return name


def check_key(key: str) -> str:
    """A public key, if it is one. Raises ValueError, which does not show it: it may be a secret key by mistake."""
    if not isinstance(key, str) or not _KEY(key):
        raise ValueError("a public key has 40 characters of Z85; `commitmq user key new` makes one")
    return key


@dataclass(frozen=True, slots=True)
class User:
    """``name`` is the access key of RocketMQ's clients, ``secret`` their secret key. A super user may do everything."""

    name: str
    secret: Secret
    is_super: bool = False
    is_enabled: bool = True
    keys: tuple[str, ...] = ()
    """Public keys (CURVE, Z85) of the user's clients of the native protocol."""
    quotas: tuple[tuple[str, int], ...] = ()
    """Those that are not the node's for all users (:mod:`commitmq.security.policy`)."""

    @classmethod
    def from_json(cls, name: str, members: dict[str, Any]) -> User:
        """Raises ValueError, TypeError, KeyError."""
        kind, status = members["type"], members["status"]
        if kind not in ("Super", "Normal"):
            raise ValueError(f"a user's type is Super or Normal, not {kind!r:.100}")
        if status not in ("enable", "disable"):
            raise ValueError(f"a user's status is enable or disable, not {status!r:.100}")
        keys = tuple(check_key(one) for one in members.get("keys", ()))
        quotas = quotas_from_json(members.get("quotas", {}))
        return cls(check_name(name), Secret(members["secret"]), kind == "Super", status == "enable", keys, quotas)

    def to_json(self) -> dict[str, Any]:
        """With the secret in clear: HMAC needs it."""
        keys = {"keys": list(self.keys)} if self.keys else {}
        return {**self.shown(), "secret": self.secret.reveal(), **keys, **self.shown_quotas()}

    def shown_quotas(self) -> dict[str, Any]:
        """The member ``quotas``, where the user has any."""
        return {"quotas": dict(self.quotas)} if self.quotas else {}

    def shown(self) -> dict[str, str]:
        return {
            "type": "Super" if self.is_super else "Normal",
            "status": "enable" if self.is_enabled else "disable",
        }


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
class PolicyEntry:
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
    def from_json(cls, members: dict[str, Any]) -> PolicyEntry:
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

    custom: tuple[PolicyEntry, ...] = ()
    default: tuple[PolicyEntry, ...] = ()

    def entry_for(self, pattern: ResourcePattern) -> PolicyEntry | None:
        """The custom entry for these resources."""
        return next((one for one in self.custom if one.pattern == pattern), None)

    def with_entry(self, entry: PolicyEntry) -> Policies:
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
            tuple(PolicyEntry.from_json(one) for one in members.get("custom", ())),
            tuple(PolicyEntry.from_json(one) for one in members.get("default", ())),
        )

    def to_json(self) -> dict[str, Any]:
        parts = (("custom", self.custom), ("default", self.default))
        return {name: [one.to_json() for one in entries] for name, entries in parts if entries}


class Decision(NamedTuple):
    """``entry`` decided; None for a super user, a disabled one, and where nothing matches."""

    allowed: bool
    reason: str
    entry: PolicyEntry | None = None


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
) -> list[PolicyEntry]:
    """The entries that speak of one of ``actions`` on ``resource``, but not of a peer at ``address``."""
    entries = (*policies.custom, *policies.default)
    matching = [one for one in entries if one.pattern.matches(resource) and one.does(actions)]
    return [one for one in matching if not one.comes_from(address)]
