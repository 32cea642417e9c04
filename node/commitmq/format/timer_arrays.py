"""Many slots of the timer wheel and units of the timer log at once; the fields are in :mod:`commitmq.format.timer`
and :mod:`commitmq.format.timer`, which need no numpy.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from commitmq.format import timer

SLOT: Final = np.dtype([("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("messages", ">i4"), ("magic", ">i4")])
UNIT: Final = np.dtype(
    [
        ("size", ">i4"),
        ("previous", ">i8"),
        ("magic", ">i4"),
        ("write_ms", ">i8"),
        ("delay_ms", ">i4"),
        ("physical_offset", ">i8"),
        ("record_bytes", ">i4"),
        ("topic_hash", ">i4"),
        ("reserved", ">i8"),
    ]
)
assert (SLOT.itemsize, UNIT.itemsize) == (timer.SLOT_BYTES, timer.UNIT_BYTES)
