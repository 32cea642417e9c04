"""Finds the marks of idempotent producers in records of the log (:mod:`commitmq.format.producer_mark`)."""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.format.constants import CRC_PROPERTY_BYTES
from commitmq.kernels.raw import has_crc_slot
from commitmq.kernels.run import MARK_DIGITS, mark_number
from commitmq.kernels.words import same_bytes

_NAME = np.frombuffer(b"__PSEQ__\x01", np.uint8)
_MAX_EPOCH_DIGITS = 18
# Columns of a row of ``marks``.
ID_START, ID_SIZE, EPOCH, SEQUENCE, FOLLOWS = range(5)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int64, 2, 'C'))",
    cache=True,
    nogil=True,
)
def find_marks(log, properties, sizes, marks):  # type: ignore[no-untyped-def]
    """Find the mark of each record whose properties are ``log[properties[i]:properties[i] + sizes[i]]``.

    ``marks[i]`` becomes (position of the producer's id in ``log``, its bytes, epoch, sequence, whether the record
    before has the same id and epoch and the preceding sequence); sequence -1 where there is no mark. Returns the number
    of marks.
    """
    found = 0
    for index in range(properties.size):
        marks[index, 1] = 0
        marks[index, 3] = -1
        marks[index, 4] = 0
        start = properties[index]
        stop = start + sizes[index]
        if has_crc_slot(log, start, sizes[index]):
            stop -= CRC_PROPERTY_BYTES
        # Parsed from its end: 0x02, the digits of the sequence, a colon, the epoch, a colon, the id, the name before
        # 0x01.
        at = stop - 1 - MARK_DIGITS
        if at - 1 - _NAME.size < start or log[stop - 1] != 2 or log[at - 1] != 58:
            continue
        sequence = mark_number(log, at)
        if sequence < 0:
            continue
        at -= 2
        epoch = np.int64(0)
        scale = np.int64(1)
        digits = 0
        while at >= start and log[at] >= 48 and log[at] <= 57 and digits < _MAX_EPOCH_DIGITS:
            epoch += (np.int64(log[at]) - 48) * scale
            scale *= 10
            digits += 1
            at -= 1
        if digits == 0 or at < start or log[at] != 58:
            continue
        end = at
        while at > start and log[at - 1] != 1 and log[at - 1] != 2:
            at -= 1
        name = at - _NAME.size
        if at == end or name < start or not same_bytes(log, name, _NAME, 0, _NAME.size):
            continue
        if name > start and log[name - 1] != 2:
            continue
        marks[index, 0] = at
        marks[index, 1] = end - at
        marks[index, 2] = epoch
        marks[index, 3] = sequence
        found += 1
        if (
            index
            and sequence > 0
            and marks[index - 1, 3] == sequence - 1
            and marks[index - 1, 2] == epoch
            and marks[index - 1, 1] == end - at
            and same_bytes(log, marks[index - 1, 0], log, at, end - at)
        ):
            marks[index, 4] = 1
    return found
