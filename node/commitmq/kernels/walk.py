"""Walks the log: fills the columns of a DispatchBatch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from commitmq.format.constants import (
    BORN_TIMESTAMP_OFFSET,
    FILLER_BYTES,
    MAGIC_FILLER,
    MAGIC_OFFSET,
    PHYSICAL_OFFSET_OFFSET,
    PREPARED_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
)
from commitmq.kernels.java_hash import string_hash
from commitmq.kernels.raw import OK, REASON_PHYSICAL_OFFSET, layout
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

# Results of a walk, and of a scan (:mod:`commitmq.kernels.scan`).
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
        if at + FILLER_BYTES <= limit and load4(segment, at + MAGIC_OFFSET) == MAGIC_FILLER:
            result = WALK_BLANK
            break
        (why, total, born, host, body, body_size, topic, topic_size, properties, properties_size) = layout(
            segment, at, limit
        )
        if why != OK:
            result = WALK_BAD
            reason = why
            break
        if load8(segment, at + PHYSICAL_OFFSET_OFFSET) != base_offset + at:
            result = WALK_BAD
            reason = REASON_PHYSICAL_OFFSET
            break
        row = rows[count]
        row.physical_offset = base_offset + at
        row.size = total
        row.queue_id = load4(segment, at + QUEUE_ID_OFFSET)
        row.queue_offset = load8(segment, at + QUEUE_OFFSET_OFFSET)
        row.sys_flag = load4(segment, at + SYS_FLAG_OFFSET)
        row.born_timestamp = load8(segment, at + BORN_TIMESTAMP_OFFSET)
        row.store_timestamp = load8(segment, at + STORE_TIMESTAMP_OFFSET + born)
        row.reconsume_times = load4(segment, at + RECONSUME_TIMES_OFFSET + born + host)
        row.prepared_offset = load8(segment, at + PREPARED_OFFSET_OFFSET + born + host)
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
