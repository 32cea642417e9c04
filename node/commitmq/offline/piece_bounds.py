"""Begin and end of each ConsumeQueue in a piece of the log, as the check of one piece tells them to that of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Queue = tuple[str, int]

PLAIN, LIGHT, BATCH = range(3)
BOUNDS: Final = np.dtype(
    [
        ("topic", np.int32),  # index into the names beside it
        ("queue_id", np.int32),
        ("kind", np.int8),  # PLAIN, LIGHT (a record of another queue names it) or BATCH
        ("first", np.int64),  # queue offset of the first record
        ("next", np.int64),  # behind that of the last one, for LIGHT the highest
        ("physical_offset", np.int64),  # of the first record
        ("size", np.int32),
        ("count", np.int64),
        ("place", np.int64),  # BATCH: number of the first one's unit, -1 when it was not found
    ]
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Names of topics, and rows of :data:`BOUNDS` for each queue and kind."""

    names: tuple[str, ...] = ()
    table: NDArray[np.void] = field(default_factory=lambda: np.empty(0, BOUNDS))
