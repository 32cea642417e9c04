"""Delay levels: where a delayed message is kept, and when it is due (spec 12.1).

A message with the property ``DELAY`` = n is stored in ``SCHEDULE_TOPIC_XXXX``, queue n - 1, with its own topic and queue
in ``REAL_TOPIC`` and ``REAL_QID``. All messages of a queue have the same delay, so the queue is in order of delivery.
The unit of a queue has the time of delivery as its tags code. The mover :mod:`commitmq.workers.schedule` appends the
message to its own topic when it is due.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"

DELAY_LEVELS_MS: Final[Sequence[int]] = (
    *(seconds * 1000 for seconds in (1, 5, 10, 30)),
    *(minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(hours * 3_600_000 for hours in (1, 2)),
)
"""RocketMQ's ``messageDelayLevel``, in ms; level 1 comes first."""

MAX_LEVEL: Final = len(DELAY_LEVELS_MS)
_JAVA_INT = re.compile(r"[+-]?[0-9]{1,10}")


def parse_level(text: str) -> int:
    """The level that the property ``DELAY`` asks for, at most MAX_LEVEL; 0 for a message that is not delayed.

    RocketMQ takes a level of 0 and below for no delay, and a higher one than the last for the last. Raises ValueError
    for a text that is no integer.
    """
    if not _JAVA_INT.fullmatch(text) or not -(1 << 31) <= int(text) < 1 << 31:
        raise ValueError(f"property DELAY must be a delay level from 1 to {MAX_LEVEL}, not {text[:32]!r}")
    return max(0, min(int(text), MAX_LEVEL))


def level_at_least(delay_ms: int) -> int:
    """The lowest level whose delay is at least ``delay_ms``; the last one for a longer delay."""
    for number, level_ms in enumerate(DELAY_LEVELS_MS, 1):
        if level_ms >= delay_ms:
            return number
    return MAX_LEVEL


def queue_of(level: int) -> int:
    """The queue of SCHEDULE_TOPIC_XXXX that keeps the messages of ``level``."""
    return level - 1
