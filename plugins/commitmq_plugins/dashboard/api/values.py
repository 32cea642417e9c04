"""Requests as dataclasses: each field has a type (str, int, bool, list of int or str), limits and a sentence."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from commitmq.errors import CommitMQError

_T = TypeVar("_T")
_TRUE: Final = ("1", "true", "on", "yes")
_FALSE: Final = ("0", "false", "off", "no", "")
MAX_OFFSET: Final = (1 << 63) - 1
_LONGEST: Final = 1_024


class BadValueError(CommitMQError, ValueError):
    """A value of a request does not fit; the sentence names it."""


def value(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    low: int = 0,
    high: int = MAX_OFFSET,
    choices: tuple[str, ...] = (),
    longest: int = _LONGEST,
) -> Any:
    """A field of a request: ``longest`` in characters, or in entries of a list."""
    facts = {"doc": doc, "low": low, "high": high, "choices": choices, "longest": longest}
    if default == ():
        return dataclasses.field(default_factory=tuple, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A type without its None: ``name`` is str, int or bool; ``many`` for a tuple of them."""

    name: str
    many: bool
    optional: bool


def kind_of(annotation: Any) -> Kind:
    """The kind of a field's type, resolved."""
    optional = False
    if isinstance(annotation, types.UnionType):
        parts = [one for one in typing.get_args(annotation) if one is not type(None)]
        [annotation], optional = parts, True
    if typing.get_origin(annotation) is tuple:
        return Kind(typing.get_args(annotation)[0].__name__, True, optional)
    return Kind(annotation.__name__, False, optional)


def take(schema: type[_T], given: Mapping[str, Sequence[Any]]) -> _T:
    """``given``: all values by name, texts or JSON's. Raises BadValueError. Names that the schema lacks are refused."""
    fields = {one.name: one for one in dataclasses.fields(schema)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(fields)):
        raise BadValueError(f"there is no value {unknown[0]!r:.100} here; there are {', '.join(fields) or 'none'}")
    hints = typing.get_type_hints(schema)
    taken: dict[str, Any] = {}
    for name, field in fields.items():
        kind = kind_of(hints[name])
        values = [one for one in given.get(name, ()) if one is not None]
        if kind.optional and all(one == "" for one in values):
            values = []
        if not values:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise BadValueError(f"{name} is missing")
            continue
        if kind.many:
            most = field.metadata["longest"]
            if len(values) > most:
                raise BadValueError(f"{name} has {most} entries at most, not {len(values)}")
            taken[name] = tuple(_one(name, kind.name, one, field.metadata) for one in values)
        else:
            taken[name] = _one(name, kind.name, values[-1], field.metadata)
    return schema(**taken)


def _one(name: str, kind: str, given: Any, facts: Mapping[str, Any]) -> str | int | bool:
    if kind == "bool":
        text = str(given).lower()
        if text not in (*_TRUE, *_FALSE):
            raise BadValueError(f"{name} is true or false, not {given!r:.100}")
        return text in _TRUE
    if kind == "int":
        if isinstance(given, bool | float) or not _is_integer(str(given)):
            raise BadValueError(f"{name} is a whole number, not {given!r:.100}")
        if not facts["low"] <= int(given) <= facts["high"]:
            raise BadValueError(f"{name} is between {facts['low']} and {facts['high']}, not {int(given)}")
        return int(given)
    if not isinstance(given, str):
        raise BadValueError(f"{name} is a text, not {given!r:.100}")
    if len(given) > facts["longest"]:
        raise BadValueError(f"{name} has {facts['longest']} characters at most, not {len(given)}")
    if facts["choices"] and given not in facts["choices"]:
        raise BadValueError(f"{name} is one of {', '.join(facts['choices'])}, not {given!r:.100}")
    return given


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 20


def moment(name: str, text: str) -> datetime:
    """``2026-06-01T12:00`` (UTC unless it says otherwise), or milliseconds. Raises BadValueError."""
    try:
        if _is_integer(text):
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise BadValueError(f"{name} is a time as 2026-06-01T12:00 (UTC), or milliseconds, not {text!r:.100}") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
