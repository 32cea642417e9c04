"""What a send asks of the node beyond to store a message: a delay, a time of delivery, a transaction, a reply.

An operation of message semantics is no way of its own through the client. It is properties on a message, which the writer
reads (:mod:`commitmq.workers.writer.put_rules`). A send without any has None in the place of an :class:`SystemProperties`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property

_MOST_S: Final = 100 * 366 * 86_400  # the node has a limit of its own
_MOST_MS: Final = 1 << 47
LEAST_DELIVER_MS: Final = 10**12
"""In September 2001: an integer below it is surely a number of seconds, whose message would come at once."""


@dataclass(frozen=True, slots=True)
class SystemProperties:
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


def asked_time(
    delay: float | timedelta | None, delay_level: int | None = None, deliver_at: datetime | int | None = None
) -> SystemProperties:
    """What a send with one of these asks for. Raises InvalidMessageError."""
    if (delay is not None) + (delay_level is not None) + (deliver_at is not None) != 1:
        raise InvalidMessageError("give one of delay, delay_level and deliver_at, not two")
    if delay_level is not None:
        level = _checked_level(delay_level)
        return SystemProperties.of(f"level {level}", {Property.DELAY: str(level)})
    if delay is not None:
        return SystemProperties.of("timer", {Property.TIMER_DELAY_MS: str(_delay_ms(delay))})
    return SystemProperties.of("timer", {Property.TIMER_DELIVER_MS: str(_time_ms(deliver_at))})


def _checked_level(level: int) -> int:
    from commitmq.semantics.delay import MAX_LEVEL

    if type(level) is not int or not 1 <= level <= MAX_LEVEL:
        raise InvalidMessageError(f"delay_level must be an integer from 1 to {MAX_LEVEL}, not {level!r}")
    return level


def _delay_ms(delay: float | timedelta) -> int:
    """The delay in milliseconds, rounded up: a message never comes early."""
    if isinstance(delay, bool) or not isinstance(delay, timedelta | float | int):
        raise InvalidMessageError(f"delay must be a timedelta or seconds, not {delay!r}")
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if not 0 < seconds <= _MOST_S:
        raise InvalidMessageError(f"delay must be more than 0 and at most {_MOST_S} seconds, not {delay!r}")
    return math.ceil(round(seconds * 1000, 6))


def _time_ms(deliver_at: datetime | int | None) -> int:
    was_datetime = isinstance(deliver_at, datetime)
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise InvalidMessageError(
                f"deliver_at needs a time zone, such as datetime.now(timezone.utc), not {deliver_at!r}"
            )
        since = deliver_at - datetime(1970, 1, 1, tzinfo=UTC)
        deliver_at = -(since // -timedelta(milliseconds=1))
    if type(deliver_at) is not int or not 0 <= deliver_at <= _MOST_MS:
        raise InvalidMessageError(f"deliver_at must be a datetime or milliseconds since 1970, not {deliver_at!r}")
    if not was_datetime and deliver_at < LEAST_DELIVER_MS:
        raise InvalidMessageError(
            f"deliver_at is in milliseconds since 1970, and {deliver_at!r} is before September 2001; multiply seconds by 1000"
        )
    return deliver_at
