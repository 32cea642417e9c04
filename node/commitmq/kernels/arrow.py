"""Records as Arrow columns: fields, bodies, texts and property maps of many records, without an object for any of them.

All functions take a stretch of the log as bytes and arrays of positions in it. The arrays they fill have Arrow's
layout: values one after the other, and 32-bit offsets, one for the beginning of each value and one for the end of the
last.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    CRC_PROPERTY_BYTES,
    ELEMENT_BODY_OFFSET,
    ELEMENT_BODY_SIZE_OFFSET,
    ELEMENT_BYTES,
    ELEMENT_FLAG_OFFSET,
    FLAG_OFFSET,
    MIN_RECORD_BYTES,
    PHYSICAL_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
    STORE_HOST_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
)
from commitmq.kernels.raw import (
    OK,
    REASON_BODY_CRC,
    REASON_PHYSICAL_OFFSET,
    REASON_RECORD_CRC,
    REASON_RECORD_CRC_MISSING,
    REASON_SHORT,
    crc32,
    crc_slot_value,
    has_crc_slot,
    layout,
)
from commitmq.kernels.words import copy_bytes, load2, load4, load8, same_bytes, until_mark, until_two

# Rows of the matrix that ``heads`` fills. Starts are positions in the stretch, sizes bytes, times milliseconds.
QUEUE_ID = 0
FLAG = 1
QUEUE_OFFSET = 2
SYS_FLAG = 3
BORN_TIMESTAMP = 4
STORE_TIMESTAMP = 5
STORE_HOST = 6
STORE_HOST_SIZE = 7
RECONSUME_TIMES = 8
BODY = 9
BODY_SIZE = 10
TOPIC = 11
TOPIC_SIZE = 12
PROPERTIES = 13
PROPERTIES_SIZE = 14
FIELDS = 15

# Value of ``crc_from`` in :func:`heads`: no record needs a CRC, and no record's CRC is checked.
NO_CRC_NEEDED = (1 << 63) - 1
UNCHECKED = -1

_DIGITS = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_CRC = np.frombuffer(b"__CRC32#", np.uint8)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int64, 1, 'C'), "
    "int64, boolean, Array(int64, 2, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def heads(log, positions, sizes, physical_offsets, crc_from, check_body, fields, why):  # type: ignore[no-untyped-def]
    """Fill ``fields[FIELDS, n]`` from the n records at ``positions``; returns how many were records.

    ``why[i]`` becomes OK, or the reason (:mod:`commitmq.kernels.raw`) why there is no record of ``sizes[i]`` bytes
    whose physicalOffset is ``physical_offsets[i]``. With ``check_body`` the body must match its bodyCRC. Unless
    ``crc_from`` is :data:`UNCHECKED`, the record must match its ``__CRC32#``, and must have one if it is at or behind
    ``crc_from``. The fields of an invalid record keep their values.
    """
    good = 0
    for index in range(positions.size):
        at = positions[index]
        if at < 0 or at > log.size:
            why[index] = REASON_SHORT
            continue
        (reason, total, born, host, body, body_size, topic, topic_size, properties, properties_size) = layout(
            log, at, log.size
        )
        if reason == OK and total != sizes[index]:
            reason = REASON_SHORT
        if reason == OK and load8(log, at + PHYSICAL_OFFSET_OFFSET) != physical_offsets[index]:
            reason = REASON_PHYSICAL_OFFSET
        if reason == OK and crc_from != UNCHECKED:
            if has_crc_slot(log, properties, properties_size):
                crc = np.int64(crc32(log, at, total - CRC_PROPERTY_BYTES, np.uint32(0))) & 0x7FFFFFFF
                if crc != crc_slot_value(log, at + total - CRC_PROPERTY_BYTES):
                    reason = REASON_RECORD_CRC
            elif crc_from <= physical_offsets[index]:
                reason = REASON_RECORD_CRC_MISSING
        if reason == OK and check_body:
            crc = np.int64(crc32(log, body, body_size, np.uint32(0))) & 0x7FFFFFFF if body_size else np.int64(0)
            if crc != load4(log, at + BODY_CRC_OFFSET):
                reason = REASON_BODY_CRC
        why[index] = reason
        if reason != OK:
            continue
        good += 1
        fields[QUEUE_ID, index] = load4(log, at + QUEUE_ID_OFFSET)
        fields[FLAG, index] = load4(log, at + FLAG_OFFSET)
        fields[QUEUE_OFFSET, index] = load8(log, at + QUEUE_OFFSET_OFFSET)
        fields[SYS_FLAG, index] = load4(log, at + SYS_FLAG_OFFSET)
        fields[BORN_TIMESTAMP, index] = load8(log, at + BORN_TIMESTAMP_OFFSET)
        fields[STORE_TIMESTAMP, index] = load8(log, at + STORE_TIMESTAMP_OFFSET + born)
        fields[STORE_HOST, index] = at + STORE_HOST_OFFSET + born
        fields[STORE_HOST_SIZE, index] = host
        fields[RECONSUME_TIMES, index] = load4(log, at + RECONSUME_TIMES_OFFSET + born + host)
        fields[BODY, index] = body
        fields[BODY_SIZE, index] = body_size
        fields[TOPIC, index] = topic
        fields[TOPIC_SIZE, index] = topic_size
        fields[PROPERTIES, index] = properties
        fields[PROPERTIES_SIZE, index] = properties_size
    return good


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def split(frame, positions, sizes, physical_offsets):  # type: ignore[no-untyped-def]
    """Split ``frame`` into its records, which lie one after the other: their positions, sizes and physicalOffsets.
    Returns their number; -1 when the frame is anything else. Examines no more records than the arrays hold.
    """
    at = np.int64(0)
    count = 0
    while at < frame.size and count < positions.size:
        if at + MIN_RECORD_BYTES > frame.size:
            return -1
        size = load4(frame, at)
        if size < MIN_RECORD_BYTES or at + size > frame.size:
            return -1
        positions[count] = at
        sizes[count] = size
        physical_offsets[count] = load8(frame, at + PHYSICAL_OFFSET_OFFSET)
        count += 1
        at += size
    return count


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), int64, "
    "Array(int64, 2, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def elements(data, starts, sizes, room, fields, owners):  # type: ignore[no-untyped-def]
    """Find the messages in the inner batches at ``starts`` of ``data``; returns their number.

    With ``room`` 0 it only counts them. Otherwise it fills FLAG, BODY, BODY_SIZE, PROPERTIES, PROPERTIES_SIZE and
    QUEUE_OFFSET (the message's number in the batch) of ``fields``, and ``owners`` (its batch). -1 - i when batch i is
    invalid.
    """
    count = 0
    for owner in range(starts.size):
        at = starts[owner]
        end = at + sizes[owner]
        number = 0
        while at < end:
            if end - at < ELEMENT_BYTES:
                return -1 - owner
            size = load4(data, at)
            body_size = load4(data, at + ELEMENT_BODY_SIZE_OFFSET)
            if size < ELEMENT_BYTES or size > end - at or body_size < 0 or body_size > size - ELEMENT_BYTES:
                return -1 - owner
            properties_size = load2(data, at + ELEMENT_BODY_OFFSET + body_size)
            if properties_size < 0 or ELEMENT_BYTES + body_size + properties_size != size:
                return -1 - owner
            if count < room:
                owners[count] = owner
                fields[FLAG, count] = load4(data, at + ELEMENT_FLAG_OFFSET)
                fields[QUEUE_OFFSET, count] = number
                fields[BODY, count] = at + ELEMENT_BODY_OFFSET
                fields[BODY_SIZE, count] = body_size
                fields[PROPERTIES, count] = at + ELEMENT_BYTES + body_size
                fields[PROPERTIES_SIZE, count] = properties_size
            count += 1
            number += 1
            at += size
    return count


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def gather(log, starts, sizes, out):  # type: ignore[no-untyped-def]
    """Copy each ``log[starts[i]:starts[i] + sizes[i]]`` to ``out``, one after the other; they must fill it exactly."""
    target = np.int64(0)
    for index in range(starts.size):
        copy_bytes(out, target, log, starts[index], sizes[index])
        target += sizes[index]


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int64, 1, 'C'), "
    "Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def message_ids(log, hosts, host_sizes, physical_offsets, out):  # type: ignore[no-untyped-def]
    """Write offset message ids (spec 2.10) one after the other: the store host and the physical offset in hexadecimal."""
    at = np.int64(0)
    for index in range(hosts.size):
        for byte in range(host_sizes[index]):
            value = log[hosts[index] + byte]
            out[at] = _DIGITS[value >> 4]
            out[at + 1] = _DIGITS[value & 15]
            at += 2
        offset = physical_offsets[index]
        for nibble in range(16):
            out[at] = _DIGITS[(offset >> (60 - 4 * nibble)) & 15]
            at += 1


@njit(inline="always")
def _next_pair(log, position, stop):  # type: ignore[no-untyped-def]
    """The first pair at or behind ``position``: (name, its size, value, its size, where the search continues).

    Skips a pair without name or value (spec 2.5) and the record's own CRC; at the end the name's size is 0.
    """
    zero = np.int64(0)
    while position < stop:
        name = position
        position = until_mark(log, position, stop)
        name_size = position - name
        if position >= stop or log[position] == 2:
            position += 1
            continue
        position += 1
        value = position
        position = until_two(log, position, stop)
        value_size = position - value
        position += 1
        if name_size == 0 or value_size == 0:
            continue
        if name_size == _CRC.size and same_bytes(log, name, _CRC, 0, name_size):
            continue
        return (name, name_size, value, value_size, position)
    return (stop, zero, stop, zero, stop)


@njit(inline="always")
def _comes_again(log, name, name_size, position, stop):  # type: ignore[no-untyped-def]
    """Whether a pair of this name is at ``position`` or behind; if so, the later one counts (spec 2.5)."""
    while True:
        (other, other_size, _value, _value_size, position) = _next_pair(log, position, stop)
        if other_size == 0:
            return False
        if other_size == name_size and same_bytes(log, name, log, other, name_size):
            return True


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int32, 1, 'C'), "
    "Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def measure_properties(log, starts, sizes, offsets, totals):  # type: ignore[no-untyped-def]
    """``offsets[i + 1]`` becomes the pairs of the first i + 1 records; ``totals`` (pairs, name bytes, value bytes)."""
    pairs = np.int64(0)
    names = np.int64(0)
    values = np.int64(0)
    offsets[0] = 0
    for index in range(starts.size):
        position = starts[index]
        stop = position + sizes[index]
        while True:
            (name, name_size, _value, value_size, position) = _next_pair(log, position, stop)
            if name_size == 0:
                break
            if _comes_again(log, name, name_size, position, stop):
                continue
            pairs += 1
            names += name_size
            values += value_size
        offsets[index + 1] = pairs
    totals[0] = pairs
    totals[1] = names
    totals[2] = values


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int32, 1, 'C'), "
    "Array(uint8, 1, 'C'), Array(int32, 1, 'C'), Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def take_properties(log, starts, sizes, name_offsets, names, value_offsets, values):  # type: ignore[no-untyped-def]
    """Fill names and values of all pairs; ``measure_properties`` counted them before."""
    pair = 0
    name_at = np.int64(0)
    value_at = np.int64(0)
    name_offsets[0] = 0
    value_offsets[0] = 0
    for index in range(starts.size):
        position = starts[index]
        stop = position + sizes[index]
        while True:
            (name, name_size, value, value_size, position) = _next_pair(log, position, stop)
            if name_size == 0:
                break
            if _comes_again(log, name, name_size, position, stop):
                continue
            for byte in range(name_size):
                names[name_at + byte] = log[name + byte]
            for byte in range(value_size):
                values[value_at + byte] = log[value + byte]
            name_at += name_size
            value_at += value_size
            pair += 1
            name_offsets[pair] = name_at
            value_offsets[pair] = value_at


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 1, 'C'), "
    "Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C'), Array(int64, 2, 'C'), Array(int64, 2, 'C'))",
    cache=True,
    nogil=True,
)
def property_values(log, starts, sizes, names, bounds, found, lengths):  # type: ignore[no-untyped-def]
    """Find the values of some properties in the encoded properties at ``starts``.

    Name ``k`` is ``names[bounds[k]:bounds[k + 1]]``; its value in record ``i`` becomes
    ``log[found[k, i]:found[k, i] + lengths[k, i]]``, the last one when there are several; 0 bytes when there is none.
    """
    wanted = bounds.size - 1
    for index in range(starts.size):
        for number in range(wanted):
            found[number, index] = 0
            lengths[number, index] = 0
        position = starts[index]
        stop = position + sizes[index]
        while True:
            (name, name_size, value, value_size, position) = _next_pair(log, position, stop)
            if name_size == 0:
                break
            for number in range(wanted):
                begin = bounds[number]
                if bounds[number + 1] - begin == name_size and same_bytes(log, name, names, begin, name_size):
                    found[number, index] = value
                    lengths[number, index] = value_size
                    break
