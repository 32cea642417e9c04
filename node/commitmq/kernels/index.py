"""Index files: inserts the keys of a batch, undoes items, walks a chain, and compares candidates with the real record.

A file is accessed as 32-bit words, because each field below the header is one or two aligned words. A store to a slot
is then one machine access, so a process killed anywhere leaves an old or a new slot, never half of one. The values in
the file are big-endian. Layout and rules: spec 4.1, 4.2; :mod:`commitmq.store.index.index_file`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from commitmq.kernels.raw import OK, layout
from commitmq.kernels.walk import ROW, hash_on
from commitmq.kernels.words import load8, same_bytes, until_mark, until_two

_LITTLE = sys.byteorder == "little"
_HEADER_WORDS = 10
_ITEM_WORDS = 5
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


@njit(inline="always")
def _swap(value):  # type: ignore[no-untyped-def]
    """Swap the bytes of a 32-bit word between the file's order and the host's; int64."""
    if not _LITTLE:
        return np.int64(np.int32(value))
    word = np.uint32(value)
    return np.int64(
        np.int32(
            (word >> np.uint32(24))
            | ((word >> np.uint32(8)) & np.uint32(0xFF00))
            | ((word << np.uint32(8)) & np.uint32(0xFF0000))
            | (word << np.uint32(24))
        )
    )


@njit(inline="always")
def _item_offset(words, item):  # type: ignore[no-untyped-def]
    """Physical offset in the item whose first word is ``item``."""
    return (_swap(words[item + 1]) << 32) | (_swap(words[item + 2]) & np.int64(0xFFFFFFFF))


@njit(inline="always")
def _put(words, slots, state, key_hash, offset, stamp):  # type: ignore[no-untyped-def]
    """Append one item and link it (spec 4.2 steps 3 to 8); the header stays as it is until the caller commits."""
    number = state[STATE_COUNT]
    hashed = np.int64(np.int32(key_hash))
    if hashed < 0:
        hashed = -hashed
    if hashed > 0x7FFFFFFF:
        hashed = np.int64(0)
    slot = _HEADER_WORDS + hashed % slots
    old = _swap(words[slot])
    if old <= 0 or old > number:
        old = np.int64(0)
    begin = state[STATE_BEGIN_TIMESTAMP]
    seconds = np.int64(0)
    if begin > 0 and stamp > begin:
        seconds = min((stamp - begin) // 1000, np.int64(0x7FFFFFFF))
    item = _HEADER_WORDS + slots + _ITEM_WORDS * number
    words[item] = np.int32(_swap(hashed))
    words[item + 1] = np.int32(_swap(offset >> 32))
    words[item + 2] = np.int32(_swap(offset))
    words[item + 3] = np.int32(_swap(seconds))
    words[item + 4] = np.int32(_swap(old))
    # The item is complete before the slot points to it: an undo trusts every item that a slot names.
    words[slot] = np.int32(_swap(number))
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


@njit(
    "void(Array(int32, 1, 'C', readonly=True), int64, int64, Array(int32, 1, 'C'), Array(int64, 2, 'C'),"
    " Array(int64, 2, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def check_chains(words, slots, count, heads, wrong_items, wrong_slots, out):  # type: ignore[no-untyped-def]
    """Whether each item below ``count`` points to the item before it in its slot, and each slot to its newest item.

    ``heads`` is scratch: one zero for each slot. ``wrong_items`` gets (item, where it points, where it must),
    ``wrong_slots`` the same for slots, as many as there is room for. ``out`` becomes (wrong items, wrong slots, slots
    in use).
    """
    out[0] = 0
    out[1] = 0
    out[2] = 0
    for number in range(1, count):
        item = _HEADER_WORDS + slots + _ITEM_WORDS * number
        slot = _swap(words[item]) % slots
        previous = _swap(words[item + 4])
        if previous != heads[slot]:
            if out[0] < wrong_items.shape[0]:
                wrong_items[out[0], 0] = number
                wrong_items[out[0], 1] = previous
                wrong_items[out[0], 2] = heads[slot]
            out[0] += 1
        heads[slot] = number
    for slot in range(slots):
        first = _swap(words[_HEADER_WORDS + slot])
        out[2] += first != 0
        if first != heads[slot]:
            if out[1] < wrong_slots.shape[0]:
                wrong_slots[out[1], 0] = slot
                wrong_slots[out[1], 1] = first
                wrong_slots[out[1], 2] = heads[slot]
            out[1] += 1


@njit(
    "int64(Array(int32, 1, 'C', readonly=True), int64, int64, int64, int64, Array(uint8, 1, 'C'))",
    cache=True,
    nogil=True,
)
def find_strays(words, slots, count, floor, high, strays):  # type: ignore[no-untyped-def]
    """Mark, in ``strays``, the fewest items below ``count`` whose removal leaves physical offsets that never decrease.

    ``strays[i]`` stands for item ``i + 1``. An item with an offset below ``floor`` or not below ``high`` is marked too.
    Returns the number of marked items.
    """
    last = floor
    is_sorted = True
    for number in range(1, count):
        offset = _item_offset(words, _HEADER_WORDS + slots + _ITEM_WORDS * number)
        if offset < last or offset >= high:
            is_sorted = False
            break
        last = offset
    if is_sorted:
        return np.int64(0)
    # The longest non-decreasing sequence: ends[k] is the item with which the best sequence of k + 1 items ends.
    ends = np.empty(count, np.int32)
    before = np.empty(count, np.int32)
    length = np.int64(0)
    for number in range(1, count):
        offset = _item_offset(words, _HEADER_WORDS + slots + _ITEM_WORDS * number)
        strays[number - 1] = 1
        if offset < floor or offset >= high:
            continue
        low = np.int64(0)
        top = length
        if (
            length > 0
            and _item_offset(words, _HEADER_WORDS + slots + _ITEM_WORDS * np.int64(ends[length - 1])) <= offset
        ):
            low = length
        while low < top:
            middle = (low + top) // 2
            if _item_offset(words, _HEADER_WORDS + slots + _ITEM_WORDS * np.int64(ends[middle])) <= offset:
                low = middle + 1
            else:
                top = middle
        ends[low] = number
        before[number] = ends[low - 1] if low > 0 else 0
        length = max(length, low + 1)
    kept = np.int64(ends[length - 1]) if length > 0 else np.int64(0)
    while kept > 0:
        strays[kept - 1] = 0
        kept = np.int64(before[kept])
    return np.int64(count - 1 - length)


@njit("int64(Array(int32, 1, 'C'), int64, int64, int64)", cache=True, nogil=True)
def undo(words, slots, max_items, count):  # type: ignore[no-untyped-def]
    """Unlink and zero every item from number ``count`` on, whether or not the header counts it; returns slots in use.

    It follows the slots and not the items, so it needs no mark of where the items end: an item is linked only when it
    is complete, and an unlinked item can only be the one behind all linked ones.
    """
    used = np.int64(0)
    highest = count - 1
    for slot in range(_HEADER_WORDS, _HEADER_WORDS + slots):
        first = _swap(words[slot])
        number = first
        while number >= count:
            if number >= max_items:
                number = np.int64(0)  # no item has this number: the slot is damaged
                break
            highest = max(highest, number)
            previous = _swap(words[_HEADER_WORDS + slots + _ITEM_WORDS * number + 4])
            number = previous if previous < number else np.int64(0)
        if number < 0:
            number = np.int64(0)
        if number != first:
            words[slot] = np.int32(_swap(number))
        if number > 0:
            used += 1
    start = _HEADER_WORDS + slots + _ITEM_WORDS * count
    stop = _HEADER_WORDS + slots + _ITEM_WORDS * min(highest + 2, max_items)
    for word in range(start, stop):
        if words[word] != 0:
            words[word] = np.int32(0)
    return used


@njit("int64(Array(int32, 1, 'C', readonly=True), int64, int64, int64)", cache=True, nogil=True)
def items_below(words, slots, count, offset):  # type: ignore[no-untyped-def]
    """Number of the first item below ``count`` whose record is at or behind ``offset``; ``count`` if there is none."""
    number = count
    while number > 1 and _item_offset(words, _HEADER_WORDS + slots + _ITEM_WORDS * (number - 1)) >= offset:
        number -= 1
    return number


@njit(
    "int64(Array(int32, 1, 'C', readonly=True), int64, int64, int64, int64, int64, int64, int64, int64, int64, int64,"
    " Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def walk_chain(  # type: ignore[no-untyped-def]
    words, slots, max_items, hashed, start, before, floor, begin, end, begin_timestamp, budget, offsets, items, out
):
    """Follow the chain of ``hashed`` (>= 0) and collect records that may have the key, newest first.

    ``start`` is the item to begin with, 0 for the newest. An item is taken if it has this hash, a physical offset in
    [``floor``, ``before``) that falls from one item to the next (so no record is taken twice), and a time that may be
    in [``begin``, ``end``] (ms; an item stores whole seconds after ``begin_timestamp``). ``offsets`` and ``items``
    (equal size) get offsets and item numbers. ``out`` becomes (taken, next item or 0 at the chain's end, items
    examined, 1 when an item was not of this chain: it is being written or undone at this moment). Stops when the arrays
    are full, after ``budget`` items, or at items older than ``begin`` or below ``floor``.
    """
    taken = np.int64(0)
    examined = np.int64(0)
    out[3] = 0
    slot = hashed % slots
    number = start
    if number <= 0:
        number = _swap(words[_HEADER_WORDS + slot])
    while number > 0 and number < max_items and taken < offsets.size and examined < budget:
        item = _HEADER_WORDS + slots + _ITEM_WORDS * number
        examined += 1
        found = _swap(words[item])
        if found % slots != slot:
            out[3] = 1
            break
        offset = _item_offset(words, item)
        # The seconds of the first item count from the end of the file before (spec 4.2).
        time = begin_timestamp
        if number > 1:
            time += _swap(words[item + 3]) * 1000
        previous = _swap(words[item + 4])
        if previous >= number or previous < 0:
            previous = np.int64(0)
        if time + 999 < begin or offset < floor:
            number = np.int64(0)  # all following items are older
            break
        if found == hashed and offset < before and time <= end:
            offsets[taken] = offset
            items[taken] = number
            taken += 1
            before = offset
        number = previous
    if number < 0 or number >= max_items:
        number = np.int64(0)
    out[0] = taken
    out[1] = number
    out[2] = examined
    return taken


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
        if reason != OK or load8(log, at + 28) != offsets[index]:
            continue
        sizes[index] = total
        verdicts[index] = NO_MATCH
        stamp = load8(log, at + 48 + born)
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
