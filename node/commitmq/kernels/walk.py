"""Walks the log: fills the columns of a DispatchBatch, and scans records for a recovery."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from commitmq.kernels.raw import (
    CRC_SLOT_BYTES,
    MAGIC_BLANK,
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
from commitmq.kernels.words import load4, load8, same_bytes, until_mark, until_two

# One row a record. Spans are (start, size) in bytes from the record's first byte; a missing part has size 0.
ROW = np.dtype(
    [
        ("physical_offset", np.int64),
        ("queue_offset", np.int64),
        ("tags_code", np.int64),
        ("store_timestamp", np.int64),
        ("born_timestamp", np.int64),
        ("prepared_offset", np.int64),
        ("inner_base", np.int64),  # value of INNER_BASE (spec 2.8), -1 when absent or no number
        ("size", np.int32),
        ("queue_id", np.int32),
        ("topic", np.int32),  # index into the batch's list of topics
        ("sys_flag", np.int32),
        ("delay_level", np.int32),  # value of DELAY, 0 when absent or no number
        ("reconsume_times", np.int32),
        ("body_start", np.int32),
        ("body_size", np.int32),
        ("properties_start", np.int32),
        ("properties_size", np.int32),
        ("keys_start", np.int32),
        ("keys_size", np.int32),
        ("uniq_start", np.int32),
        ("uniq_size", np.int32),
        ("tags_start", np.int32),
        ("tags_size", np.int32),
        ("topic_start", np.int32),
        ("topic_size", np.int32),
        ("multi_start", np.int32),  # INNER_MULTI_DISPATCH (spec 3.10)
        ("multi_offsets_start", np.int32),  # INNER_MULTI_QUEUE_OFFSET
        ("multi_size", np.int16),
        ("multi_offsets_size", np.int16),
        ("inner_num", np.int16),  # value of INNER_NUM, -1 when absent or no number up to 32767
    ],
    align=True,
)
_ROWS = from_dtype(ROW)[::1]

# Results of a walk.
WALK_LIMIT = 0  # the limit was reached exactly
WALK_FULL = 1  # all rows are filled
WALK_BLANK = 2  # a filler: the log continues in the next segment
WALK_BAD = 3  # no record here, see the reason

_KEYS = int.from_bytes(b"KEYS", "big")
_TAGS = int.from_bytes(b"TAGS", "big")
_UNIQ = int.from_bytes(b"UNIQ_KEY", "big")
_DELAY = np.frombuffer(b"DELAY", np.uint8)
_INNER_NUM = np.frombuffer(b"INNER_NUM", np.uint8)
_INNER_BASE = np.frombuffer(b"INNER_BASE", np.uint8)
_MULTI = np.frombuffer(b"INNER_MULTI_DISPATCH", np.uint8)
_MULTI_OFFSETS = np.frombuffer(b"INNER_MULTI_QUEUE_OFFSET", np.uint8)
_MAX_DIGITS = 18  # of a number that certainly fits 64 bits


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


@njit(inline="always")
def _is(buf, at, size, name):  # type: ignore[no-untyped-def]
    return size == name.size and same_bytes(buf, at, name, 0, size)


@njit(inline="always")
def _number(buf, start, size):  # type: ignore[no-untyped-def]
    """The decimal number in ``buf[start:start+size]``; -1 when it has another character, or too many digits."""
    if size > _MAX_DIGITS:
        return np.int64(-1)
    number = np.int64(0)
    for index in range(size):
        digit = np.int64(buf[start + index]) - 48
        if digit < 0 or digit > 9:
            return np.int64(-1)
        number = number * 10 + digit
    return number


def _walk_signature() -> Any:
    readonly = types.Array(types.uint8, 1, "C", readonly=True)
    i8 = types.int64
    return i8(
        readonly,
        i8,
        i8,
        i8,
        _ROWS,
        types.Array(types.int64, 2, "C"),
        types.Array(types.int32, 1, "C"),
        types.Array(i8, 1, "C"),
    )


@njit(_walk_signature(), cache=True, nogil=True)
def walk(segment, start, limit, base_offset, rows, topics, table, out):  # type: ignore[no-untyped-def]
    """Fill ``rows`` with the records of ``segment[start:limit]``; reads no bodies and checks no CRCs (spec 7, step 4).

    ``topics[k]`` becomes (position in the segment, size) of the k-th different topic; ``table`` is scratch for finding
    topics: a power of two of -1, at least twice as long as ``rows``. ``out`` becomes (rows filled, topics found,
    position reached, reason). Returns one of WALK_*.
    """
    count = 0
    known = np.int64(0)
    at = start
    mask = table.size - 1
    last_topic = np.int64(-1)
    result = WALK_LIMIT
    reason = OK
    while True:
        if at >= limit:
            break
        if count >= rows.size:
            result = WALK_FULL
            break
        if at + 8 <= limit and load4(segment, at + 4) == MAGIC_BLANK:
            result = WALK_BLANK
            break
        (why, total, born, host, body, body_size, topic, topic_size, properties, properties_size) = layout(
            segment, at, limit
        )
        if why != OK:
            result = WALK_BAD
            reason = why
            break
        if load8(segment, at + 28) != base_offset + at:
            result = WALK_BAD
            reason = REASON_PHYSICAL_OFFSET
            break
        row = rows[count]
        row.physical_offset = base_offset + at
        row.size = total
        row.queue_id = load4(segment, at + 12)
        row.queue_offset = load8(segment, at + 20)
        row.sys_flag = load4(segment, at + 36)
        row.born_timestamp = load8(segment, at + 40)
        row.store_timestamp = load8(segment, at + 48 + born)
        row.reconsume_times = load4(segment, at + 56 + born + host)
        row.prepared_offset = load8(segment, at + 60 + born + host)
        row.body_start = body - at
        row.body_size = body_size
        row.topic_start = topic - at
        row.topic_size = topic_size
        row.properties_start = properties - at
        row.properties_size = properties_size
        row.keys_start = 0
        row.keys_size = 0
        row.uniq_start = 0
        row.uniq_size = 0
        row.tags_start = 0
        row.tags_size = 0
        row.tags_code = 0
        row.delay_level = 0
        row.inner_base = -1
        row.inner_num = -1
        row.multi_start = 0
        row.multi_size = 0
        row.multi_offsets_start = 0
        row.multi_offsets_size = 0

        # Find the topic: usually that of the record before.
        number = last_topic
        if (
            number < 0
            or topics[number, 1] != topic_size
            or not same_bytes(segment, topics[number, 0], segment, topic, topic_size)
        ):
            mixed = np.uint64(1469598103934665603)
            for index in range(topic_size):
                mixed = (mixed ^ np.uint64(segment[topic + index])) * np.uint64(1099511628211)
            slot = np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))
            while True:
                number = np.int64(table[slot])
                if number < 0:
                    number = known
                    table[slot] = number
                    topics[number, 0] = topic
                    topics[number, 1] = topic_size
                    known += 1
                    break
                if topics[number, 1] == topic_size and same_bytes(
                    segment, topics[number, 0], segment, topic, topic_size
                ):
                    break
                slot = (slot + 1) & mask
            last_topic = number
        row.topic = number

        # Properties: the last pair of a name counts; a pair needs a name and a value (spec 2.5).
        position = properties
        stop = properties + properties_size
        while position < stop:
            name = position
            position = until_mark(segment, position, stop)
            name_size = position - name
            if position >= stop or segment[position] == 2:
                position += 1
                continue
            position += 1
            value = position
            position = until_two(segment, position, stop)
            value_size = position - value
            position += 1
            if name_size == 0 or value_size == 0:
                continue
            if name_size == 4:
                four = load4(segment, name)
                if four == _TAGS:
                    row.tags_start = value - at
                    row.tags_size = value_size
                elif four == _KEYS:
                    row.keys_start = value - at
                    row.keys_size = value_size
            elif name_size == 8:
                if load8(segment, name) == _UNIQ:
                    row.uniq_start = value - at
                    row.uniq_size = value_size
            elif name_size == 5:
                if same_bytes(segment, name, _DELAY, 0, 5) and value_size <= 9:
                    row.delay_level = max(_number(segment, value, value_size), np.int64(0))
            elif name_size >= _INNER_NUM.size and segment[name] == 73:  # I
                if _is(segment, name, name_size, _INNER_NUM):
                    number = _number(segment, value, value_size)
                    row.inner_num = number if number <= 32767 else np.int64(-1)
                elif _is(segment, name, name_size, _INNER_BASE):
                    row.inner_base = _number(segment, value, value_size)
                elif _is(segment, name, name_size, _MULTI):
                    row.multi_start = value - at
                    row.multi_size = value_size
                elif _is(segment, name, name_size, _MULTI_OFFSETS):
                    row.multi_offsets_start = value - at
                    row.multi_offsets_size = value_size
        if row.tags_size > 0:
            begin = at + np.int64(row.tags_start)
            row.tags_code = string_hash(segment, begin, begin + np.int64(row.tags_size))
        at += total
        count += 1
    out[0] = count
    out[1] = known
    out[2] = at
    out[3] = reason
    return result


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
        if at + 8 <= end and load4(segment, at + 4) == MAGIC_BLANK:
            return WALK_BLANK
        (reason, total, born, _host, body, body_size, topic, topic_size, properties, properties_size) = layout(
            segment, at, end
        )
        if reason == OK and load8(segment, at + 28) != base_offset + at:
            reason = REASON_PHYSICAL_OFFSET
        if reason == OK:
            crc = np.int64(crc32(segment, body, body_size, np.uint32(0))) & 0x7FFFFFFF if body_size else np.int64(0)
            if crc != load4(segment, at + 8):
                reason = REASON_BODY_CRC
        if reason == OK:
            if has_crc_slot(segment, properties, properties_size):
                crc = np.int64(crc32(segment, at, total - CRC_SLOT_BYTES, np.uint32(0))) & 0x7FFFFFFF
                if crc != crc_slot_value(segment, at + total - CRC_SLOT_BYTES):
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
        out[3] = load8(segment, at + 48 + born)
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
    last = min(stop, np.int64(segment.size) - 91 + 1)
    for at in range(start, last):
        if segment[at + 4] != 0xDA or segment[at + 5] != 0xA3 or segment[at + 6] != 0x20:
            continue
        if load8(segment, at + 28) != base_offset + at:
            continue
        scan_until(segment, at, at + 1, segment.size, base_offset, False, out)
        if out[0] == 1:
            return at
        if out[4] == REASON_BODY_CRC or out[4] == REASON_RECORD_CRC or out[4] == REASON_PROPERTIES:
            budget -= load4(segment, at)
            if budget < 0:
                return np.int64(-2)
    return np.int64(-1)
