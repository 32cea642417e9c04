"""The result of a read of a queue: a status with RocketMQ's name (spec 9.1), and the units of the messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from commitmq.format.units import UNIT

Units = NDArray[np.void]
"""Array of :data:`UNIT`: the 20 bytes of each ConsumeQueue unit as they are on disk."""

NO_UNITS: Units = np.empty(0, UNIT)


class PullStatus(StrEnum):
    """Result of a read, with RocketMQ's names (spec 9.1)."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"


@dataclass(slots=True)
class PullResult:
    """``units`` are the matched messages in queue order; the next read begins at ``next_offset``."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    units: Units

    @property
    def count(self) -> int:
        return len(self.units)
