"""Users, and their secrets, which nothing shows by mistake.

What a user may take of a node: quotas, of all users in the settings ``[flow]`` and of one in the file of users.

The signature of a RocketMQ client: HMAC-SHA1 over the header's fields and the body.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
    """Those that are not the node's for all users (:mod:`commitmq.security.user`)."""

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
        """Without the secret."""
        return {
            "type": "Super" if self.is_super else "Normal",
            "status": "enable" if self.is_enabled else "disable",
        }
