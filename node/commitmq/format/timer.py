"""The files of the timer (spec 12.2): a slot of ``timerwheel``, a unit of the files below ``timerlog/``, and
``config/timercheck``.

A slot of the wheel is the head of a chain of timer log units that are due together:

    offset  field           why it is there
    0       time i8         due time / precision: tells this turn of the wheel from an earlier one with the same slot
    8       firstPos i8     position of the oldest unit in the timer log; RocketMQ reads it after damage only
    16      lastPos i8      position of the newest unit: the chain is walked from here, backwards
    24      messages i4     units put in minus cancellations: for the limit of a slot and for figures
    28      magic i4        always 0

The file has 14 days of slots at a precision of one second, twice the 7 days that a message may wait in it, so that a
slot that has passed is not taken for one to come. Passed slots keep their content (spec 18). A slot of zeros was never
used: time 0 is the year 1970.

A unit of the timer log is a message that waits, or a cancellation:

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

The file ``config/timercheck`` says how far the timer has come: 4096 bytes, zero behind the fields.

    offset  field                       why it is there
    0       lastReadTimeMs i8           every slot before this time was read out: delivery continues here
    8       lastTimerLogFlushPos i8     the timer log is on the device below it; a recovery reads from a file earlier
    16      lastTimerQueueOffset i8     next unit of rmq_sys_wheel_timer to enqueue, as of the last flush
    24      masterTimerQueueOffset i8   the same as the master said; on a master its own
    32      stateVersion i8             RocketMQ's DataVersion, for slaves that copy this file
    40      timestamp i8
    48      counter i8
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from commitmq.errors import CorruptRecordError, StoreError
from commitmq.format.constants import MAGIC_FILLER

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
    """What is at ``offset`` of ``buf``: a unit, a filler, or None where the log ends, in zeros. Raises
    CorruptRecordError, with ``offset``, for anything else.
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
    return ((file_bytes - FILLER_BYTES) // UNIT_BYTES - 1) * UNIT_BYTES


def _corrupt(offset: int, reason: str) -> CorruptRecordError:
    error = CorruptRecordError(reason)
    error.offset = offset
    return error


FILE_BYTES: Final = 4096
_FIELDS: Final = struct.Struct(">7q")


class TimerCheck(NamedTuple):
    """The fields of the file; times in ms, the log position in bytes, queue offsets as ordinals."""

    last_read_ms: int
    log_flushed: int
    queue_offset: int
    master_queue_offset: int
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0


def encode_check(check: TimerCheck) -> bytes:
    """The 4096 bytes of the file."""
    return _FIELDS.pack(*check).ljust(FILE_BYTES, b"\0")


def decode_check(data: bytes | bytearray | memoryview) -> TimerCheck:
    """The fields in ``data``. Raises StoreError when it is shorter than the fields."""
    if len(data) < _FIELDS.size:
        raise StoreError(f"the file timercheck has {len(data)} bytes, its fields take {_FIELDS.size}")
    return TimerCheck._make(_FIELDS.unpack_from(data))
