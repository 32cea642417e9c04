"""Compares the records that an index file proposes with the key that a query asks for."""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.format.constants import PHYSICAL_OFFSET_OFFSET, STORE_TIMESTAMP_OFFSET
from commitmq.kernels.raw import OK, layout
from commitmq.kernels.words import load8, same_bytes, until_mark, until_two

_SPACE = 0x20

# Results of comparing a candidate with its record.
NO_MATCH = 0
MATCH = 1
NO_RECORD = 2  # the bytes there are not a record

# Kinds of keys that a query can ask for.
BY_KEY = 0
BY_UNIQUE_KEY = 1
BY_TAG = 2

_KEYS = np.frombuffer(b"KEYS", np.uint8)
_TAGS = np.frombuffer(b"TAGS", np.uint8)
_UNIQ = np.frombuffer(b"UNIQ_KEY", np.uint8)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(int64, 1, 'C', readonly=True),"
    " Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, int64, int64,"
    " Array(int64, 1, 'C'), Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def match_keys(  # type: ignore[no-untyped-def]
    log, base, limit, offsets, topic, key, kind, begin, end, sizes, verdicts
):
    """Compare the records at physical ``offsets``, all in the segment ``log`` that begins at ``base``; returns matches.

    A record matches when it is below position ``limit`` of the segment, its topic is ``topic``, its store time is in
    [``begin``, ``end``], and ``key`` is one of its KEYS, its UNIQ_KEY or its TAGS, as ``kind`` (BY_*) says.
    ``sizes[i]`` and ``verdicts[i]`` (NO_MATCH, MATCH, NO_RECORD) are set for each.
    """
    matched = np.int64(0)
    for index in range(offsets.size):
        sizes[index] = 0
        verdicts[index] = NO_RECORD
        at = offsets[index] - base
        if at < 0 or at >= limit:
            continue
        (reason, total, born, _host, _body, _body_size, topic_at, topic_size, properties, properties_size) = layout(
            log, at, limit
        )
        if reason != OK or load8(log, at + PHYSICAL_OFFSET_OFFSET) != offsets[index]:
            continue
        sizes[index] = total
        verdicts[index] = NO_MATCH
        stamp = load8(log, at + STORE_TIMESTAMP_OFFSET + born)
        if stamp < begin or stamp > end:
            continue
        if topic_size != topic.size or not same_bytes(log, topic_at, topic, 0, topic_size):
            continue
        value = np.int64(0)
        value_end = np.int64(0)
        position = properties
        stop = properties + properties_size
        while position < stop:
            name = position
            position = until_mark(log, position, stop)
            if position >= stop or log[position] == 2:
                position += 1
                continue
            size = position - name
            position += 1
            first = position
            position = until_two(log, position, stop)
            if position > first and (
                (kind == BY_KEY and size == _KEYS.size and same_bytes(log, name, _KEYS, 0, size))
                or (kind == BY_UNIQUE_KEY and size == _UNIQ.size and same_bytes(log, name, _UNIQ, 0, size))
                or (kind == BY_TAG and size == _TAGS.size and same_bytes(log, name, _TAGS, 0, size))
            ):
                value = first
                value_end = position
            position += 1
        while value < value_end:
            token = value_end
            if kind == BY_KEY:
                token = value
                while token < value_end and log[token] != _SPACE:
                    token += 1
            if token - value == key.size and same_bytes(log, value, key, 0, key.size):
                verdicts[index] = MATCH
                matched += 1
                break
            value = token + 1
    return matched
