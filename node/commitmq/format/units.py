"""The units of a ConsumeQueue and of a BatchCQ queue (spec 3.1, 3.9), for one unit and for arrays of units.

A ConsumeQueue's unit:

    offset   field                  why it is there
    0        physical offset i8     where the record begins in the log
    8        size i4                of the record, so one read gets all of it; PREBLANK_SIZE: no record
    12       tags code i8           a filter by tag need not read the log

A BatchCQ queue's unit begins with the same fields and continues:

    20       store timestamp i8     ms; a look-up by time need not read the log
    28       base offset i8         queue offset of the record's first message
    36       count i2               messages in the record
    38       compacted offset i4    for RocketMQ's compaction, not used here
    42       reserved i4

This module needs numpy; the sizes alone are in :mod:`commitmq.format.constants`.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from commitmq.format.constants import BATCH_UNIT_BYTES, UNIT_BYTES

UNIT_STRUCT: Final = struct.Struct(">qiq")
UNIT_HEAD: Final = struct.Struct(">qi")
"""The physical offset and the size, with which every kind of unit begins."""

_FIELDS: Final = [("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")]
UNIT: Final = np.dtype(_FIELDS)
BATCH_UNIT: Final = np.dtype(
    [
        *_FIELDS,
        ("store_timestamp", ">i8"),
        ("base_offset", ">i8"),
        ("count", ">i2"),
        ("compacted_offset", ">i4"),
        ("reserved", ">i4"),
    ]
)
assert (UNIT.itemsize, BATCH_UNIT.itemsize) == (UNIT_BYTES, BATCH_UNIT_BYTES) == (UNIT_STRUCT.size, 46)
