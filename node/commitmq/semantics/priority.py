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


def queue_of(properties: Mapping[str, str], write_queues: int) -> int | None:
    """The queue of a message with a priority: the priority itself, or the last of ``write_queues``. None for a message
    without one, and for one that is delayed, ordered or part of a transaction: there it does not count.
    """
    text = properties.get(Property.PRIORITY, "")
    if not _INTEGER.fullmatch(text) or not 0 <= (priority := int(text)) <= _MOST:
        return None
    if properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true" or any(
        name in properties for name in _OTHER_KINDS
    ):
        return None
    return max(0, min(priority, write_queues - 1))
