"""Reads the fields of a request's header: each function returns a value of the right kind or refuses by name.

All raise ProtocolError INVALID_PARAMETER, which names the field, the expected value and the actual value.

The result of an operation of the coordinator: the answer, and the writes that must end before the answer is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from commitmq.coordination.membership import Queue
from commitmq.errors import ProtocolError

Header = dict[str, Any]
MAX_NAME_CHARACTERS = 255
MAX_EXPRESSION_CHARACTERS = 65_536
_MAX_OFFSET = (1 << 63) - 1
_SHOWN_CHARACTERS = 60


def refuse(field: str, wanted: str, value: Any) -> ProtocolError:
    """The error for ``field``; the value is shown, shortened."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "…"
    return ProtocolError("INVALID_PARAMETER", f"{field} must be {wanted}, not {shown}")


def text(header: Header, field: str, most: int = MAX_NAME_CHARACTERS) -> str:
    """A non-empty string of at most ``most`` characters."""
    value = header.get(field)
    if type(value) is not str or not 0 < len(value) <= most:
        raise refuse(field, f"a string of 1 to {most} characters", value)
    return value


def optional_text(header: Header, field: str, most: int = MAX_NAME_CHARACTERS) -> str | None:
    """Like :func:`text`; None when the field is absent or null."""
    return None if header.get(field) is None else text(header, field, most)


def flag(header: Header, field: str) -> bool:
    """True or false; false when absent."""
    value = header.get(field, False)
    if type(value) is not bool:
        raise refuse(field, "true or false", value)
    return value


def optional_integer(header: Header, field: str, low: int, high: int) -> int | None:
    """An integer in ``low..high``; None when the field is absent or null."""
    value = header.get(field)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise refuse(field, f"an integer from {low} to {high}", value)
    return value


def integer(header: Header, field: str, low: int, high: int) -> int:
    """Like :func:`optional_integer`, but the field must be there."""
    value = optional_integer(header, field, low, high)
    if value is None:
        raise refuse(field, f"an integer from {low} to {high}", None)
    return value


def names(header: Header, field: str) -> list[str]:
    """A non-empty list of strings of 1 to 255 characters."""
    value = header.get(field)
    if type(value) is not list or not value:
        raise refuse(field, "a non-empty list of names", value)
    for one in value:
        if type(one) is not str or not 0 < len(one) <= MAX_NAME_CHARACTERS:
            raise refuse(field, f"a list of names of 1 to {MAX_NAME_CHARACTERS} characters", one)
    return value


def limit(header: Header, most: int) -> int:
    """The number of entries of a page: ``most`` unless the request asks for fewer."""
    return min(optional_integer(header, "limit", 1, _MAX_OFFSET) or most, most)


def cursor(header: Header, *kinds: type) -> list[Any]:
    """``after``, where a page begins: the list from the last page's ``next``; empty when absent or null."""
    value = header.get("after")
    if value is None:
        return []
    if type(value) is not list or [type(one) for one in value] != [*kinds]:
        raise refuse("after", "the value of next in the page before", value)
    return value


def part_cursor(header: Header) -> list[Any]:
    """Like :func:`cursor`, for ``group.describe``, whose pages are of members, queues or offsets."""
    value = header.get("after")
    if type(value) is list and value[:1] == ["members"]:
        return cursor(header, str, str)
    return _queue_cursor(header, value)


def _queue_cursor(header: Header, value: Any) -> list[Any]:
    found = cursor(header, str, str, int)
    if found and found[0] not in ("queues", "offsets"):
        raise refuse("after", "the value of next in the page before", value)
    return found


def mapping(header: Header, field: str) -> dict[str, str]:
    """An object of strings; empty when absent."""
    value = header.get(field)
    if value is None:
        return {}
    if type(value) is not dict or not all(type(one) is str for one in value.values()):
        raise refuse(field, "an object with strings as values", value)
    return value


def selector(header: Header, field: str) -> tuple[str, str | None]:
    """``{"type", "expression"}`` as a pair; ``("TAG", None)`` when absent."""
    value = header.get(field)
    if value is None:
        return "TAG", None
    kind = value.get("type") if type(value) is dict else None
    expression = value.get("expression") if type(value) is dict else None
    if type(kind) is not str or type(expression) is not str or len(expression) > MAX_EXPRESSION_CHARACTERS:
        wanted = (
            f"an object with type and expression, strings, the latter of at most {MAX_EXPRESSION_CHARACTERS} characters"
        )
        raise refuse(field, wanted, value)
    return kind, expression


def incarnations(header: Header, field: str) -> dict[str, int]:
    """An object of topics and their incarnations; empty when absent."""
    value = header.get(field)
    if value is None:
        return {}
    if type(value) is not dict or not all(type(one) is int and 0 <= one <= _MAX_OFFSET for one in value.values()):
        raise refuse(field, "an object with a topic's incarnation as each value", value)
    return value


def objects(header: Header, field: str, most: int) -> list[Header]:
    """A list of at most ``most`` objects."""
    value = header.get(field)
    if type(value) is not list or len(value) > most or not all(type(one) is dict for one in value):
        raise refuse(field, f"a list of at most {most} objects", value)
    return value


def queues(header: Header, field: str, *, optional: bool = False) -> list[Queue]:
    """A list of ``[topic, queue]``; with ``optional`` empty when absent."""
    value = header.get(field)
    if value is None and optional:
        return []
    if type(value) is not list:
        raise refuse(field, "a list of [topic, queue]", value)
    return [_queue(field, one, 2) for one in value]


def offsets(header: Header, field: str) -> list[tuple[str, int, int]]:
    """A list of ``[topic, queue, next offset]``."""
    value = header.get(field)
    if type(value) is not list:
        raise refuse(field, "a list of [topic, queue, next offset]", value)
    found = []
    for one in value:
        topic, queue = _queue(field, one, 3)
        if type(one[2]) is not int or not 0 <= one[2] <= _MAX_OFFSET:
            raise refuse(field, "a list of [topic, queue, next offset] with offsets from 0 to 2^63 - 1", one)
        found.append((topic, queue, one[2]))
    return found


def known_offsets(header: Header, field: str, count: int) -> list[int] | None:
    """A list of ``count`` offsets, -1 for unknown ones; None when absent."""
    value = header.get(field)
    if value is None:
        return None
    if (
        type(value) is not list
        or len(value) != count
        or not all(type(one) is int and -1 <= one <= _MAX_OFFSET for one in value)
    ):
        raise refuse(field, f"a list of {count} offsets, one for each of offsets, -1 for an unknown one", value)
    return value


def _is_known(value: Any) -> bool:
    return type(value) is int and -1 <= value <= _MAX_OFFSET


def _queue(field: str, one: Any, length: int) -> Queue:
    shape = "[topic, queue]" if length == 2 else "[topic, queue, next offset]"
    if type(one) is not list or len(one) != length:
        raise refuse(field, f"a list of {shape}", one)
    topic, queue = one[0], one[1]
    if type(topic) is not str or not 0 < len(topic) <= MAX_NAME_CHARACTERS or type(queue) is not int or queue < 0:
        raise refuse(field, f"a list of {shape}", one)
    return topic, queue


Part = Literal["topics", "offsets", "groups"]
Fields = dict[str, Any]


class Answer(NamedTuple):
    """A positive answer. ``fields`` is called after the turn's writes, unless the part in ``needs`` failed. ``after``:
    a topic and its incarnation whose deletion must finish first, see :meth:`Service.is_ending`.
    """

    fields: Callable[[], Fields]
    needs: Part | None = None
    after: tuple[str, int] | None = None


Operations = dict[str, Callable[[Header, int], Answer]]
"""Operations by the name in a request. Each gets the header and the monotonic time in ms; it raises ProtocolError for the
answer, StoreError when the disk refused.
"""
