"""One line of the audit log: a JSON object in the chain of its file.

    {"n":7,"time":"2026-11-26T07:15:02.123456Z","prev":"<64 hex>","user":"shop","key":"<12>","protocol":"native",
     "address":"10.1.2.3","op":"topic.create","resource":"Topic:orders","decision":"allowed","reason":"",
     "request":17,"before":null,"after":{...}}

``n`` counts the lines of one process from 1. ``prev`` is the SHA-256 of the line before without its line end, empty for the
first: a line that was changed, taken out or put in does not fit its neighbours. Members without a value are left out. ``key``
is the beginning of the public key. ``torn``: how many bytes of an unfinished line stand before this one; ``lost``: how many
lines could not be written since the line before, as on a full disk. Texts are cut, so a line has a bounded length.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

MAX_LINE_BYTES: Final = 16 * 1024
_MAX_TEXT: Final = 200
MAX_NAME: Final = 144  # "Topic:" and the longest name of a topic
_MAX_VALUE_BYTES: Final = 2_000
_KEY_CHARACTERS: Final = 12


class Decision(StrEnum):
    """What became of a request. ``ALLOWED`` is written before a change is made, ``FAILED`` when it then was not."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks. ``name``: a user; ``uid N`` for an account of this machine; empty where nobody is asked. ``key``: the public
    key.
    """

    name: str = ""
    protocol: str = ""
    address: str = ""
    key: str = ""

    def cut(self) -> Actor:
        """As it stands in a line: a client whose signature is wrong may claim a name of any length."""
        return Actor(*(one[:MAX_NAME] for one in (self.name, self.protocol, self.address, self.key)))


@dataclass(frozen=True, slots=True)
class Event:
    """What was asked for. ``before`` and ``after``: of a change, as JSON; bodies, properties and secrets never stand there."""

    actor: Actor
    operation: str
    resource: str = ""
    decision: Decision = Decision.ALLOWED
    reason: str = ""
    request: int | None = None
    before: Any = None
    after: Any = None

    def members(self) -> dict[str, Any]:
        """The line's members, without those of the chain, and without empty ones."""
        actor = self.actor
        found = {
            "user": _text(actor.name, MAX_NAME),
            "key": _text(actor.key, _KEY_CHARACTERS),
            "protocol": _text(actor.protocol, MAX_NAME),
            "address": _text(actor.address, MAX_NAME),
            "op": _text(self.operation, MAX_NAME),
            "resource": _text(self.resource, MAX_NAME),
            "decision": str(self.decision),
            "reason": _text(self.reason, _MAX_TEXT),
            "request": _bounded(self.request),
            "before": _bounded(self.before),
            "after": _bounded(self.after),
        }
        return {name: value for name, value in found.items() if value not in ("", None)}


def _text(text: str, most: int) -> str:
    """Cut, and without lone surrogates, which JSON does not carry."""
    return text[:most].encode(errors="replace").decode()


def _bounded(value: Any) -> Any:
    if value is None:
        return None
    try:
        data = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return {"cut": _text(repr(value), _MAX_TEXT)}
    return value if len(data) <= _MAX_VALUE_BYTES else {"cut": data[:_MAX_VALUE_BYTES].decode(errors="replace")}


def encoded(members: dict[str, Any], number: int, previous: str, time_ns: int) -> bytes:
    """The line with its line end."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}Z"
    line = {"n": number, "time": stamp, "prev": previous, **members}
    return orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The members of a line without its line end; None for what is none."""
    try:
        found = orjson.loads(line)
    except ValueError:
        return None
    is_line = isinstance(found, dict) and type(found.get("n")) is int and isinstance(found.get("prev"), str)
    return found if is_line and isinstance(found.get("time"), str) else None


def digest(line: bytes) -> str:
    """The ``prev`` of the line behind ``line``, which is without its line end."""
    return hashlib.sha256(line).hexdigest()
