"""Inserts the keys of a batch into an index file, and counts the items that a batch will have."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from commitmq.kernels.index_words import HEADER_WORDS, ITEM_WORDS, swap
from commitmq.kernels.java_hash import hash_on
from commitmq.kernels.walk import ROW

_ROLLBACK = 0xC
_HASH_SIGN = 0x23  # the "#" between topic and key
_SPACE = 0x20
_T = 0x54  # "#T#" stands between the topic and a tag

# Results of an insertion.
INSERT_DONE = 0
INSERT_FULL = 1  # the file is full: continue in a new one
INSERT_SPACE = 2  # the next item is beyond the allocated space

# Words of an insertion's state (int64).
STATE_COUNT = 0  # number of the next item
STATE_SLOTS = 1  # slots in use
STATE_BEGIN_TIMESTAMP = 2
STATE_BEGIN_OFFSET = 3
STATE_END_TIMESTAMP = 4
STATE_END_OFFSET = 5
STATE_ROW = 6  # row of the batch at which to continue
STATE_LAST_OFFSET = 7  # the newest record that has items, in this file or an older one; -1 when none has
STATE_LAST_ITEMS = 8  # how many of its items exist
STATE_WORDS = 9


@njit(inline="always")
def _put(words, slots, state, key_hash, offset, stamp):  # type: ignore[no-untyped-def]
    """Append one item and link it (spec 4.2 steps 3 to 8); the header stays as it is until the caller commits."""
    number = state[STATE_COUNT]
    hashed = np.int64(np.int32(key_hash))
    if hashed < 0:
        hashed = -hashed
    if hashed > 0x7FFFFFFF:
        hashed = np.int64(0)
    slot = HEADER_WORDS + hashed % slots
    old = swap(words[slot])
    if old <= 0 or old > number:
        old = np.int64(0)
    begin = state[STATE_BEGIN_TIMESTAMP]
    seconds = np.int64(0)
    if begin > 0 and stamp > begin:
        seconds = min((stamp - begin) // 1000, np.int64(0x7FFFFFFF))
    item = HEADER_WORDS + slots + ITEM_WORDS * number
    words[item] = np.int32(swap(hashed))
    words[item + 1] = np.int32(swap(offset >> 32))
    words[item + 2] = np.int32(swap(offset))
    words[item + 3] = np.int32(swap(seconds))
    words[item + 4] = np.int32(swap(old))
    # The item is complete before the slot points to it: an undo trusts every item that a slot names.
    words[slot] = np.int32(swap(number))
    if number <= 1:
        state[STATE_BEGIN_OFFSET] = offset
        state[STATE_BEGIN_TIMESTAMP] = stamp
    if old == 0:
        state[STATE_SLOTS] += 1
    state[STATE_COUNT] = number + 1
    state[STATE_END_OFFSET] = offset
    state[STATE_END_TIMESTAMP] = stamp
    if state[STATE_LAST_OFFSET] == offset:
        state[STATE_LAST_ITEMS] += 1
    else:
        state[STATE_LAST_OFFSET] = offset
        state[STATE_LAST_ITEMS] = 1


def _insert_signature() -> Any:
    i8 = types.int64
    words = types.Array(types.int32, 1, "C")
    rows = types.Array(from_dtype(ROW), 1, "C", readonly=True)
    log = types.Array(types.uint8, 1, "C", readonly=True)
    return i8(words, i8, i8, i8, log, i8, rows, types.Array(i8, 1, "C"))


@njit(_insert_signature(), cache=True, nogil=True)
def insert(words, slots, max_items, allocated, log, base, rows, state):  # type: ignore[no-untyped-def]
    """Index ``rows[state[STATE_ROW]:]``, whose records are in ``log``, the segment that begins at ``base``.

    ``words`` is the whole file with ``slots`` hash slots and room for items below ``max_items``; items below
    ``allocated`` have disk space. Records older than the newest indexed one are skipped, and so are those items of the
    newest one that exist; so a batch may be given again. ``state`` (int64, STATE_*) is updated; the header in the file
    is not. Returns one of INSERT_*.
    """
    last_topic = np.int64(-1)
    topic_hash = np.uint32(0)
    for number in range(state[STATE_ROW], rows.size):
        state[STATE_ROW] = number
        row = rows[number]
        offset = row.physical_offset
        newest = state[STATE_LAST_OFFSET]
        present = np.int64(0)
        if offset < newest:
            continue
        if offset == newest:
            present = state[STATE_LAST_ITEMS]
        elif state[STATE_COUNT] >= max_items:
            # RocketMQ checks for room before each record, whether or not the record has keys.
            return INSERT_FULL
        if row.sys_flag & _ROLLBACK == _ROLLBACK:
            continue
        at = offset - base
        if row.topic != last_topic:
            topic = at + np.int64(row.topic_start)
            topic_hash = hash_on(log, topic, topic + np.int64(row.topic_size), np.uint32(0))
            topic_hash = topic_hash * np.uint32(31) + np.uint32(_HASH_SIGN)
            last_topic = np.int64(row.topic)
        ordinal = np.int64(0)  # of the items of the record
        for kind in range(3):
            if kind == 0:
                position = at + np.int64(row.uniq_start)
                stop = position + np.int64(row.uniq_size)
            elif kind == 1:
                position = at + np.int64(row.keys_start)
                stop = position + np.int64(row.keys_size)
            else:
                position = at + np.int64(row.tags_start)
                stop = position + np.int64(row.tags_size)
            while position < stop:
                end = stop
                if kind == 1:
                    end = position
                    while end < stop and log[end] != _SPACE:
                        end += 1
                    if end == position:
                        position += 1
                        continue
                ordinal += 1
                if ordinal > present:
                    if state[STATE_COUNT] >= max_items:
                        return INSERT_FULL
                    if state[STATE_COUNT] >= allocated:
                        return INSERT_SPACE
                    seed = topic_hash
                    if kind == 2:
                        seed = seed * np.uint32(31) + np.uint32(_T)
                        seed = seed * np.uint32(31) + np.uint32(_HASH_SIGN)
                    _put(words, slots, state, hash_on(log, position, end, seed), offset, np.int64(row.store_timestamp))
                position = end + 1
    state[STATE_ROW] = rows.size
    return INSERT_DONE


def _count_signature() -> Any:
    rows = types.Array(from_dtype(ROW), 1, "C", readonly=True)
    log = types.Array(types.uint8, 1, "C", readonly=True)
    return types.void(log, types.int64, rows, types.Array(types.int64, 1, "C"))


@njit(_count_signature(), cache=True, nogil=True)
def count_items(log, base, rows, counts):  # type: ignore[no-untyped-def]
    """``counts[i]`` becomes the number of items that :func:`insert` makes of ``rows[i]``; ``log`` begins at ``base``."""
    for number in range(rows.size):
        row = rows[number]
        items = np.int64(0)
        if row.sys_flag & _ROLLBACK != _ROLLBACK:
            items += row.uniq_size > 0
            items += row.tags_size > 0
            position = row.physical_offset - base + np.int64(row.keys_start)
            before = np.int64(_SPACE)
            for at in range(position, position + np.int64(row.keys_size)):
                byte = np.int64(log[at])
                items += before == _SPACE and byte != _SPACE
                before = byte
        counts[number] = items
