"""A read of a queue: the filter of its messages, the work that it may spend, and its result, a status with RocketMQ's name
(spec 9.1) and the units of the messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from commitmq.format.units import UNIT
from commitmq.store.queues.consume_queue_ext import Extensions

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


# Budget of one read for a filter that evaluates properties: bytes times terms, some 10 ms. A record has no more bytes
# of properties than this, and each term costs this many bytes again for every array it makes.
JUDGED_BYTES: Final = 16 * 1024 * 1024
_MAX_PROPERTIES_BYTES: Final = 33_000
_TERM_BYTES: Final = 32_768


class RecordFilter(Protocol):
    """Decides which messages a pull wants: first by their units, then by the records themselves. ``terms`` is how often
    it evaluates a record's properties, which determines its cost.
    """

    @property
    def terms(self) -> int: ...

    def may_match(self, units: Units, codes: NDArray[np.int64], extensions: Extensions | None) -> NDArray[np.bool_]:
        """Which units can belong to wanted messages, by their tags ``codes`` and their extension units."""
        ...

    def judge(
        self,
        data: NDArray[np.uint8],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        verdicts: NDArray[np.uint8],
    ) -> None:
        """Set ``verdicts`` to MATCH, NO_MATCH or NO_RECORD for the records at ``positions`` of ``data``."""
        ...


def affordable(sizes: NDArray[Any], terms: int, work: int) -> int:
    """How many of the records of ``sizes`` may be evaluated for ``work`` bytes times terms."""
    spent = np.minimum(sizes, _MAX_PROPERTIES_BYTES).astype(np.int64).cumsum() * terms
    return int(np.searchsorted(spent, work, side="right"))


def cost_of(sizes: NDArray[Any], terms: int) -> int:
    """The cost of evaluating the records of ``sizes``."""
    return (int(np.minimum(sizes, _MAX_PROPERTIES_BYTES).astype(np.int64).sum()) + _TERM_BYTES) * terms
