"""Typed headers: a dataclass whose fields are converted from and to the texts of ``extFields``.

    @header
    class SearchOffsetRequestHeader(Header):
        topic: str                          # required
        queue_id: Int                       # 32 bits
        timestamp: Long                     # 64 bits
        boundary_type: str | None = None    # optional

A field's name on the wire is its name in Java's spelling (``queueId``); ``WIRE`` names the exceptions. A value must be
a number that fits its type, or FieldError names field and value; a boolean is true for "true" in any case and false for
everything else (remoting 1.1). Unknown fields are ignored, those that every request may carry (ns, nsd, bname, oway, lo)
among them. Absent optional fields have their defaults; those that are None are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Self, TypeVar, dataclass_transform, get_type_hints

from commitmq_plugins.rocketmq.remoting.errors import FieldError

Int = Annotated[int, 32]
Long = Annotated[int, 64]

_Kind = TypeVar("_Kind", bound="type[Header]")
_Reader = Callable[[str], Any]
_REQUIRED: Any = object()
_LONGEST = 500


class Header:
    """Base of all headers. Made by :func:`header`."""

    WIRE: ClassVar[Mapping[str, str]] = {}
    """Names on the wire that are not the field's own name in Java's spelling."""

    __slots__ = ()
    _plan: ClassVar[tuple[tuple[str, _Reader, Any], ...]] = ()
    _names: ClassVar[tuple[tuple[str, str], ...]] = ()

    @classmethod
    def decode(cls, ext_fields: Mapping[str, str]) -> Self:
        """The header in ``ext_fields``. Raises FieldError for a missing or a wrong field."""
        get = ext_fields.get
        values: list[Any] = []
        wire, text = "", None
        try:
            for wire, read, default in cls._plan:
                text = get(wire)
                if text is None:
                    if default is _REQUIRED:
                        raise FieldError(f"the custom field <{wire}> is null", wire)
                    values.append(default)
                else:
                    values.append(text if read is str else read(text))
        except ValueError as error:
            raise FieldError(
                f"the custom field <{wire}> has the wrong value {text!r:.100}: {error}", wire, text or ""
            ) from error
        return cls(*values)

    def encode(self) -> dict[str, str]:
        """The texts of all fields that are not None."""
        texts: dict[str, str] = {}
        for wire, name in self._names:
            value = getattr(self, name)
            if value is None:
                continue
            if value is True:
                texts[wire] = "true"
            elif value is False:
                texts[wire] = "false"
            else:
                texts[wire] = str(value)
        return texts


@dataclass_transform()
def header(kind: _Kind) -> _Kind:
    """Make ``kind`` a header: a dataclass with slots and the conversions of its fields."""
    made: Any = dataclass(slots=True)(kind)
    hints = get_type_hints(made, include_extras=True)
    plan, names = [], []
    for one in fields(made):
        wire = made.WIRE.get(one.name) or _java_name(one.name)
        if one.default_factory is not MISSING:
            raise TypeError(f"{kind.__name__}.{one.name}: a header's field has no default factory")
        default = _REQUIRED if one.default is MISSING else one.default
        plan.append((wire, _reader(hints[one.name]), default))
        names.append((wire, one.name))
    made._plan, made._names = tuple(plan), tuple(names)
    return made  # type: ignore[no-any-return]


def _java_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def _reader(hint: Any) -> _Reader:
    """The conversion for a field's type; for an optional field that of the type without None."""
    for other in getattr(hint, "__args__", ()):
        if other is type(None):
            hint = next(one for one in hint.__args__ if one is not type(None))
            break
    if hint is str:
        return str
    if hint is bool:
        return _boolean
    if hint is float:
        return float
    return {Int: _int, Long: _long}[hint]


def _boolean(text: str) -> bool:
    return text == "true" or text.lower() == "true"


def _int(text: str) -> int:
    value = int(text)
    if not -0x8000_0000 <= value <= 0x7FFF_FFFF:
        raise ValueError("it does not fit 32 bits")
    return value


def _long(text: str) -> int:
    value = int(text)
    if not -0x8000_0000_0000_0000 <= value <= 0x7FFF_FFFF_FFFF_FFFF:
        raise ValueError("it does not fit 64 bits")
    return value
