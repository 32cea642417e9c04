"""One unit of the timer log, the files below ``timerlog/`` (spec 12.2): a message that waits, or a cancellation.

    offset  field           why it is there
    0       size i4         52: the step to the next unit, and a check
    4       previous i8     position of the unit before it in the same slot, -1 for none: the slot's chain
    12      magic i4        bits: 1 always, 2 roll (due for another round), 4 delete (cancels another message)
    16      writeTime i8    clock of the enqueuing side, ms, rounded down to the precision
    24      delay i4        slot's time minus writeTime, ms: a recovery finds the slot again with it
    28      offset i8       physical offset of the message's record in rmq_sys_wheel_timer
    36      recordSize i4   bytes of that record
    40      topicHash i4    hash of the real topic: figures per topic without a look at the log
    44      reserved i8     0

A unit never straddles files. Where a unit and 16 bytes more do not fit, a filler ends the file:

    0       blank i4        bytes left in the file, this filler included
    4       zero i8
    12      magic i4        0xCBD43194, where a unit has its magic

What a reader meets is one of three things: a unit, a filler, or the end of the log (zeros). Anything else is
corruption.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from commitmq.errors import CorruptRecordError
from commitmq.format.constants import MAGIC_FILLER

UNIT_BYTES: Final = 52
FILLER_BYTES: Final = 16
MAGIC_DEFAULT: Final = 1
MAGIC_ROLL: Final = 2
MAGIC_DELETE: Final = 4
_MAGIC_MASK: Final = 0xF

_UNIT: Final = struct.Struct(">iqiqiqiiq")
_FILLER: Final = struct.Struct(">iqi")


class TimerUnit(NamedTuple):
    """One unit; positions and offsets are bytes, times and ``delay_ms`` milliseconds."""

    previous: int
    magic: int
    write_ms: int
    delay_ms: int
    physical_offset: int
    record_bytes: int
    topic_hash: int

    @property
    def slot_ms(self) -> int:
        """Time of the slot whose chain this unit belongs to."""
        return self.write_ms + self.delay_ms

    @property
    def rolls(self) -> bool:
        """True for a message that is due later than its slot: it goes round once more."""
        return bool(self.magic & MAGIC_ROLL)

    @property
    def deletes(self) -> bool:
        """True for a cancellation. One that rolls cancels nothing yet."""
        return bool(self.magic & MAGIC_DELETE)


class TimerFiller(NamedTuple):
    """The end of a file; ``blank_bytes`` are left from the filler's first byte on."""

    blank_bytes: int


def encode_unit(unit: TimerUnit) -> bytes:
    """The 52 bytes of ``unit``. Raises struct.error for a number that its field cannot hold."""
    return _UNIT.pack(UNIT_BYTES, *unit, 0)


def encode_filler(blank_bytes: int) -> bytes:
    """The 16 bytes that end a file in which ``blank_bytes`` are left."""
    return _FILLER.pack(blank_bytes, 0, MAGIC_FILLER)


def decode_unit(buf: bytes | bytearray | memoryview, offset: int = 0) -> TimerUnit | TimerFiller | None:
    """What is at ``offset`` of ``buf``: a unit, a filler, or None where the log ends, in zeros.

    Raises CorruptRecordError, with ``offset``, for anything else.
    """
    view = memoryview(buf)
    if len(view) - offset >= FILLER_BYTES:
        blank, _, magic = _FILLER.unpack_from(view, offset)
        if magic == MAGIC_FILLER:
            if blank < FILLER_BYTES:
                raise _corrupt(offset, f"a filler of the timer log claims {blank} bytes")
            return TimerFiller(blank)
    if not any(view[offset : offset + UNIT_BYTES]):
        return None
    if len(view) - offset < UNIT_BYTES:
        raise _corrupt(offset, f"{len(view) - offset} bytes are left, a unit of the timer log has {UNIT_BYTES}")
    size, *fields, _ = _UNIT.unpack_from(view, offset)
    unit = TimerUnit._make(fields)
    if size != UNIT_BYTES or not unit.magic & MAGIC_DEFAULT or unit.magic & ~_MAGIC_MASK:
        raise _corrupt(offset, f"no unit of the timer log starts here: size {size}, magic {unit.magic:#x}")
    return unit


def fits(position: int, file_bytes: int) -> bool:
    """Whether a unit may be written at ``position`` of the log; else a filler ends the file there."""
    return file_bytes - position % file_bytes >= UNIT_BYTES + FILLER_BYTES


def place_of_next(position: int, file_bytes: int) -> int:
    """Where the next unit goes in a log that ends at ``position``."""
    return position if fits(position, file_bytes) else (position // file_bytes + 1) * file_bytes


def last_unit_offset(file_bytes: int) -> int:
    """Offset in a full file of its last unit."""
    return ((file_bytes - FILLER_BYTES) // UNIT_BYTES - 1) * UNIT_BYTES


def _corrupt(offset: int, reason: str) -> CorruptRecordError:
    error = CorruptRecordError(reason)
    error.offset = offset
    return error
