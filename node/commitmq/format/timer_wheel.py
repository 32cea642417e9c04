"""One slot of the file ``timerwheel`` (spec 12.2): the head of a chain of timer log units that are due together.

    offset  field           why it is there
    0       time i8         due time / precision: tells this turn of the wheel from an earlier one with the same slot
    8       firstPos i8     position of the oldest unit in the timer log; RocketMQ reads it after damage only
    16      lastPos i8      position of the newest unit: the chain is walked from here, backwards
    24      messages i4      units put in minus cancellations: for the limit of a slot and for figures
    28      magic i4        always 0

The file has 14 days of slots at a precision of one second, twice the 7 days that a message may wait in it, so that a
slot that has passed is not taken for one to come. Passed slots keep their content (spec 18). A slot of zeros was never
used: time 0 is the year 1970.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from commitmq.errors import StoreError

SLOT_BYTES: Final = 32
SLOTS_TO_COME: Final = 7 * 86_400
"""Slots of the time to come; their number is the same at each precision."""
SLOTS: Final = 2 * SLOTS_TO_COME
WHEEL_BYTES: Final = SLOTS * SLOT_BYTES
NO_POSITION: Final = -1
"""The position before the first unit of a chain."""

_SLOT: Final = struct.Struct(">qqqii")


class Slot(NamedTuple):
    """One slot; ``time`` is the due time divided by the precision, positions are bytes of the timer log."""

    time: int
    first: int
    last: int
    messages: int
    magic: int = 0


def encode_slot(slot: Slot) -> bytes:
    """The 32 bytes of ``slot``. Raises struct.error for a number that its field cannot hold."""
    return _SLOT.pack(*slot)


def decode_slot(wheel: bytes | bytearray | memoryview, index: int) -> Slot:
    """Slot ``index`` of ``wheel``. Raises StoreError when ``wheel`` ends before it."""
    offset = index * SLOT_BYTES
    if index < 0 or offset + SLOT_BYTES > len(wheel):
        raise StoreError(f"the timer wheel has no slot {index}: it has {len(wheel)} bytes")
    return Slot._make(_SLOT.unpack_from(wheel, offset))
