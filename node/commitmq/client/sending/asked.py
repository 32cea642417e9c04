"""What a send asks of the node beyond to store a message: a delay, a time of delivery, a transaction, a reply.

An operation of message semantics is no way of its own through the client. It is properties on a message, which the writer
reads (:mod:`commitmq.workers.writer.put_rules`). A send without any has None in the place of an :class:`Asked`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property


@dataclass(frozen=True, slots=True)
class Asked:
    """``key``: single messages with the same one may travel in one run, because the node stores them in one place.

    ``encoded`` has the properties as a record has them. ``json`` has them as members of an object, each followed by a comma.
    """

    key: str
    encoded: bytes
    json: str

    @classmethod
    def of(cls, key: str, properties: Mapping[str, str]) -> Self:
        """What asks by ``properties``. Names and values need no escape: no control characters, quotes and backslashes."""
        return cls(
            key,
            "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode(),
            "".join(f'"{name}":"{value}",' for name, value in properties.items()),
        )


def asked_delay(delay: float | timedelta | None, delay_level: int | None) -> Asked:
    """What ``delay`` or ``delay_level`` asks for. One of both is given. Raises InvalidMessageError."""
    level = _level(delay, delay_level)
    return Asked.of(f"level {level}", {Property.DELAY: str(level)})


def _level(delay: float | timedelta | None, delay_level: int | None) -> int:
    from commitmq.semantics.delay import MAX_LEVEL, level_of

    if delay_level is None:
        if isinstance(delay, bool) or not isinstance(delay, timedelta | float | int):
            raise InvalidMessageError(f"delay must be a timedelta or seconds, not {delay!r}")
        try:
            return level_of(delay)
        except (ValueError, OverflowError) as error:  # not a number, infinite
            raise InvalidMessageError(str(error)) from None
    if delay is not None:
        raise InvalidMessageError("give delay or delay_level, not both")
    if type(delay_level) is not int or not 1 <= delay_level <= MAX_LEVEL:
        raise InvalidMessageError(f"delay_level must be an integer from 1 to {MAX_LEVEL}, not {delay_level!r}")
    return delay_level
