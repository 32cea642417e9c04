"""Option types for numbers: sizes, times, queues and offsets.

For sizes and times a plain number has the option's unit, others name one (:mod:`commitmq.config.schema`). The files of a
store keep queues and offsets in 32 and 64 bits.

Times on the command line: ISO 8601 or milliseconds since 1970, UTC unless they say otherwise.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import click

from commitmq.config import schema

MAX_INT: Final = (1 << 31) - 1
MAX_LONG: Final = (1 << 63) - 1
_MAX_S: Final = 1_000_000_000  # a longer time is more than any system call takes


class Quantity(click.ParamType):  # type: ignore[type-arg]
    """A number of ``unit`` (a name from :func:`commitmq.config.schema.unit_of`), from ``low`` to ``high``."""

    def __init__(self, unit: str, *, low: float = 0, high: float | None = None, whole: bool = True) -> None:
        self.unit, self.low, self.high, self.whole = unit, low, high, whole
        self.name = "size" if unit in ("bytes", "mib", "gib") else "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found: float = value if not isinstance(value, str) else self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found < self.low or (self.high is not None and found > self.high):
            most = "" if self.high is None else f" and at most {self.high:.15g}"
            self.fail(
                f"{value} is out of range: at least {self.low:g}{most}, in {schema.word_of(self.unit)}", param, ctx
            )
        return found

    def _parse(self, text: str) -> float:
        return schema.parse(text, self.unit) if self.whole else schema.parse_float(text, self.unit)


def seconds(low: float = 0) -> Quantity:
    """A time in seconds."""
    return Quantity("s", low=low, high=_MAX_S, whole=False)


def long(digits: str, option: str) -> int:
    """The offset or time in ms in ``digits``. Raises BadParameter for a value that no store can have."""
    # Check the number of digits first: Python refuses thousands of digits with a message of its own.
    if len(digits.lstrip("0")) > len(str(MAX_LONG)) or int(digits) > MAX_LONG:
        shown = digits if len(digits) <= 40 else f"{digits[:40]}…"
        raise click.BadParameter(f"{shown} is too large: the largest is {MAX_LONG}", param_hint=option)
    return int(digits)


def parse_time(text: str, option: str) -> int | datetime:
    """Milliseconds since 1970 from digits, else a datetime with a zone from ISO 8601. BadParameter for anything else."""
    if text.isascii() and text.isdigit():
        return long(text, option)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no ISO 8601 time and no number of ms", param_hint=option) from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def optional_time(text: str | None, option: str) -> int | datetime | None:
    """:func:`parse_time` of an option that may be absent."""
    return None if text is None else parse_time(text, option)


def milliseconds(when: int | datetime) -> int:
    """``when`` in milliseconds since 1970."""
    return int(when.timestamp() * 1000) if isinstance(when, datetime) else when


def utc(timestamp_ms: int) -> str:
    """Milliseconds since 1970 as a date and a time of UTC."""
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def parse_position(text: str, option: str) -> str | int | datetime:
    """``earliest``, ``latest``, a queue offset or a time, which is UTC without a zone; click.BadParameter of ``option`` for
    anything else.
    """
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return long(text, option)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not earliest, latest, an ISO 8601 time or a queue offset", param_hint=option
        ) from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
