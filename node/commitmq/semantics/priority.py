"""Priorities of messages (remoting 3.1, 5.2): a priority is a queue, and a pop looks into the highest queue first.

Only topics of the type PRIORITY are popped in this order; a message with a priority may be in any topic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from commitmq.format.constants import Property

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,10}")
_MOST: Final = (1 << 31) - 1
_OTHER_KINDS: Final = (
    Property.DELAY,
    Property.TIMER_DELIVER_MS,
    Property.TIMER_DELAY_SECONDS,
    Property.TIMER_DELAY_MS,
    Property.SHARDING_KEY,
)


def priority_of(properties: Mapping[str, str]) -> int:
    """The priority that a message names, from 0; -1 for one that names none, or no number."""
    text = properties.get(Property.PRIORITY, "")
    priority = int(text) if _INTEGER.fullmatch(text) else -1
    return priority if 0 <= priority <= _MOST else -1


def counts(properties: Mapping[str, str]) -> bool:
    """Whether a priority counts: not for a message that is delayed, ordered or part of a transaction. There a broker takes the
    property away.
    """
    is_half = properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true"
    return not is_half and not any(name in properties for name in _OTHER_KINDS)


def queue_of(priority: int, write_queues: int) -> int:
    """The priority itself, or the last of ``write_queues``."""
    return max(0, min(priority, write_queues - 1))
