"""The file ``config/timercheck``: how far the timer has come (spec 12.2). 4096 bytes, zero behind the fields.

offset  field                       why it is there
0       lastReadTimeMs i8           every slot before this time was read out: delivery goes on here
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

from commitmq.errors import StoreError

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
