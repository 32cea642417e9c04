"""A queue of a topic in memory: what a mover reads of it, over a log that a test has built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commitmq.format.record import Record

UNIT = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])


class QueueInMemory:
    """In place of a QueueReader. ``codes``: the tags code of each unit; ``low``: the first queue offset."""

    def __init__(self, records: Sequence[Record], codes: Sequence[int] = (), low: int = 0) -> None:
        self.low = low
        self.rows = np.zeros(len(records), UNIT)
        self.rows["physical_offset"] = [one.physical_offset for one in records]
        self.rows["size"] = [one.total_size for one in records]
        if codes:
            self.rows["tags_code"] = codes

    def bounds(self, *_: object, **__: object) -> tuple[int, int]:
        return self.low, self.low + len(self.rows)

    def units(self, _topic: str, _queue: int, offset: int, count: int, **__: object) -> tuple[int, Any]:
        at = offset - self.low
        return offset, self.rows[at : at + count]
