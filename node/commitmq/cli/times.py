"""Times on the command line: ISO 8601 or milliseconds since 1970, UTC unless they say otherwise."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from commitmq.cli.quantity import long


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
