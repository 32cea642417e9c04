"""Scans records of the log one by one, bodies and CRCs included, for a recovery and for checks of a store."""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    CRC_PROPERTY_BYTES,
    FILLER_BYTES,
    MAGIC_FILLER,
    MAGIC_OFFSET,
    MAGIC_V1,
    MIN_RECORD_BYTES,
    PHYSICAL_OFFSET_OFFSET,
    STORE_TIMESTAMP_OFFSET,
)
from commitmq.kernels.raw import (
    OK,
    REASON_BODY_CRC,
    REASON_PHYSICAL_OFFSET,
    REASON_PROPERTIES,
    REASON_RECORD_CRC,
    REASON_RECORD_CRC_MISSING,
    REASON_SHORT,
    SECTOR_BYTES,
    crc32,
    crc_slot_value,
    has_crc_slot,
    layout,
)
from commitmq.kernels.walk import WALK_BAD, WALK_BLANK, WALK_LIMIT
from commitmq.kernels.words import load4, load8

# The bytes that both magics begin with.
_MAGIC_0, _MAGIC_1, _MAGIC_2 = MAGIC_V1.to_bytes(4, "big", signed=True)[:3]


@njit("boolean(Array(uint8, 1, 'C', readonly=True), int64, int64, int64)", cache=True, nogil=True)
def _lacks_sector(segment, start, stop, base_offset):  # type: ignore[no-untyped-def]
    """Whether all bytes that some sector has in ``segment[start:stop]`` are zeros; segments begin at a sector's start."""
    at = start
    while at < stop:
        end = min(stop, at + SECTOR_BYTES - (base_offset + at) % SECTOR_BYTES)
        index = at
        while index < end and segment[index] == 0:
            index += 1
        if index == end:
            return True
        at = end
    return False


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64, boolean, Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def scan_until(segment, start, stop, end, base_offset, require_crc, out):  # type: ignore[no-untyped-def]
    """Like :func:`scan`, for the records that begin in ``segment[start:stop]``; the last one may extend to ``end``."""
    at = start
    out[0] = 0
    out[1] = start
    out[2] = -1
    out[3] = 0
    out[4] = OK
    while at < stop:
        if at + FILLER_BYTES <= end and load4(segment, at + MAGIC_OFFSET) == MAGIC_FILLER:
            return WALK_BLANK
        (reason, total, born, _host, body, body_size, topic, topic_size, properties, properties_size) = layout(
            segment, at, end
        )
        if reason == OK and load8(segment, at + PHYSICAL_OFFSET_OFFSET) != base_offset + at:
            reason = REASON_PHYSICAL_OFFSET
        if reason == OK:
            crc = np.int64(crc32(segment, body, body_size, np.uint32(0))) & 0x7FFFFFFF if body_size else np.int64(0)
            if crc != load4(segment, at + BODY_CRC_OFFSET):
                reason = REASON_BODY_CRC
        if reason == OK:
            if has_crc_slot(segment, properties, properties_size):
                crc = np.int64(crc32(segment, at, total - CRC_PROPERTY_BYTES, np.uint32(0))) & 0x7FFFFFFF
                if crc != crc_slot_value(segment, at + total - CRC_PROPERTY_BYTES):
                    reason = REASON_RECORD_CRC
            elif require_crc:
                reason = REASON_RECORD_CRC_MISSING
            else:
                # Without that CRC a sector that never reached the disk still shows: it reads as zeros. No topic
                # contains zeros; a property's value may, but not in all bytes that a sector has of the properties.
                for index in range(topic, topic + topic_size):
                    if segment[index] == 0:
                        reason = REASON_PROPERTIES
                if _lacks_sector(segment, properties, properties + properties_size, base_offset):
                    reason = REASON_PROPERTIES
        if reason != OK:
            out[4] = reason
            return WALK_BAD
        out[0] += 1
        out[2] = at
        out[3] = load8(segment, at + STORE_TIMESTAMP_OFFSET + born)
        at += total
        out[1] = at
    out[4] = REASON_SHORT
    return WALK_LIMIT


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, boolean, Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def scan(segment, start, end, base_offset, require_crc, out):  # type: ignore[no-untyped-def]
    """Check records of ``segment[start:end]`` one by one, bodies and CRCs included, as a recovery does (spec 8.3).

    A record is good when its length chain, magic, physical offset and body CRC are right, and its ``__CRC32#`` too if
    it has one; with ``require_crc`` it must have one. ``out`` becomes (records, end of the last good one, its start,
    its store timestamp, reason of the stop). Returns WALK_LIMIT, WALK_BLANK or WALK_BAD.
    """
    return scan_until(segment, start, end, end, base_offset, require_crc, out)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64, Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def find_record(segment, start, stop, base_offset, budget, out):  # type: ignore[no-untyped-def]
    """Position of the first complete record that begins in ``segment[start:stop]``; -1 if there is none.

    A body may hold anything, even bytes that look like a record: only a record with its own physical offset and right
    CRCs counts. Checking CRCs of false candidates may cost ``budget`` bytes; -2 when they are used up. ``out`` is
    scratch, as of scan.
    """
    last = min(stop, np.int64(segment.size) - MIN_RECORD_BYTES + 1)
    for at in range(start, last):
        if segment[at + 4] != _MAGIC_0 or segment[at + 5] != _MAGIC_1 or segment[at + 6] != _MAGIC_2:
            continue
        if load8(segment, at + PHYSICAL_OFFSET_OFFSET) != base_offset + at:
            continue
        scan_until(segment, at, at + 1, segment.size, base_offset, False, out)
        if out[0] == 1:
            return at
        if out[4] == REASON_BODY_CRC or out[4] == REASON_RECORD_CRC or out[4] == REASON_PROPERTIES:
            budget -= load4(segment, at)
            if budget < 0:
                return np.int64(-2)
    return np.int64(-1)
