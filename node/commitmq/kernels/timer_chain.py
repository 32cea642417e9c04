"""Walks the chains of the timer log (spec 12.2): each unit names the position of the one before it in its slot."""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.kernels.words import load4, load8

_UNIT_BYTES = np.int64(52)
_PREVIOUS_AT = np.int64(4)
_MAGIC_AT = np.int64(12)
_WRITE_AT = np.int64(16)
_DELAY_AT = np.int64(24)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64, Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def walk_chain(data, base, position, stop, slot_ms, positions):  # type: ignore[no-untyped-def]
    """Walk backwards from ``position`` through one file, ``data``, which begins at ``base`` of the log.

    Fills ``positions``, whose element 0 becomes the number of units and element 1 the position at which the walk goes on:
    below ``stop`` (or -1) at the chain's end, in another file, or of the next unit when ``positions`` is full. Returns 0;
    1 where no unit of the slot ``slot_ms`` lies.
    """
    count = np.int64(2)
    while position >= stop and position >= base and count < positions.size:
        at = position - base
        if at + _UNIT_BYTES > data.size or load4(data, at) != _UNIT_BYTES:
            positions[0], positions[1] = count - 2, position
            return 1
        magic = load4(data, at + _MAGIC_AT)
        due = load8(data, at + _WRITE_AT) + load4(data, at + _DELAY_AT)
        previous = load8(data, at + _PREVIOUS_AT)
        if magic & 1 == 0 or magic < 0 or magic > 15 or due // 1000 != slot_ms // 1000 or previous >= position:
            positions[0], positions[1] = count - 2, position
            return 1
        positions[count] = position
        count += 1
        position = previous
    positions[0], positions[1] = count - 2, position
    return 0
