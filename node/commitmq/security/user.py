"""Users, and their secrets, which nothing shows by mistake."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from commitmq.security.quota import quotas_from_json

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
    """Those that are not the node's for all users (:mod:`commitmq.security.quota`)."""

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
