"""Java's hash of a string that is UTF-8 in a buffer: for tags codes in ConsumeQueues, and for keys in index files."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit("uint32(Array(uint8, 1, 'C', readonly=True), int64, int64, uint32)", cache=True, nogil=True)
def hash_on(buf, start, end, value):  # type: ignore[no-untyped-def]
    """Java's string hash continued from ``value`` over the UTF-16 units of the UTF-8 in ``buf[start:end]`` (spec 0.1)."""
    thirty_one = np.uint32(31)
    at = start
    while at < end:
        first = np.uint32(buf[at])
        if first < 0x80:
            value = value * thirty_one + first
            at += 1
        elif first < 0xE0 and at + 1 < end:
            unit = ((first & np.uint32(0x1F)) << np.uint32(6)) | (np.uint32(buf[at + 1]) & np.uint32(0x3F))
            value = value * thirty_one + unit
            at += 2
        elif first < 0xF0 and at + 2 < end:
            unit = (
                ((first & np.uint32(0x0F)) << np.uint32(12))
                | ((np.uint32(buf[at + 1]) & np.uint32(0x3F)) << np.uint32(6))
                | (np.uint32(buf[at + 2]) & np.uint32(0x3F))
            )
            value = value * thirty_one + unit
            at += 3
        elif at + 3 < end:
            point = (
                ((first & np.uint32(0x07)) << np.uint32(18))
                | ((np.uint32(buf[at + 1]) & np.uint32(0x3F)) << np.uint32(12))
                | ((np.uint32(buf[at + 2]) & np.uint32(0x3F)) << np.uint32(6))
                | (np.uint32(buf[at + 3]) & np.uint32(0x3F))
            ) - np.uint32(0x10000)
            value = value * thirty_one + (np.uint32(0xD800) + (point >> np.uint32(10)))
            value = value * thirty_one + (np.uint32(0xDC00) + (point & np.uint32(0x3FF)))
            at += 4
        else:
            # An incomplete sequence: Java decodes it to the replacement character.
            value = value * thirty_one + np.uint32(0xFFFD)
            at = end
    return value


@njit("int64(Array(uint8, 1, 'C', readonly=True), int64, int64)", cache=True, nogil=True)
def string_hash(buf, start, end):  # type: ignore[no-untyped-def]
    """Java's hash of the string whose UTF-8 is ``buf[start:end]``: over UTF-16 units, 32 bits, signed (spec 0.1)."""
    return np.int64(np.int32(hash_on(buf, start, end, np.uint32(0))))
