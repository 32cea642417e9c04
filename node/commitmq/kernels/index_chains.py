"""The chains of items in an index file: walks one, checks all, finds items that do not fit, undoes the newest items."""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.kernels.index_words import HEADER_WORDS, ITEM_WORDS, item_offset, swap


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
        item = HEADER_WORDS + slots + ITEM_WORDS * number
        slot = swap(words[item]) % slots
        previous = swap(words[item + 4])
        if previous != heads[slot]:
            if out[0] < wrong_items.shape[0]:
                wrong_items[out[0], 0] = number
                wrong_items[out[0], 1] = previous
                wrong_items[out[0], 2] = heads[slot]
            out[0] += 1
        heads[slot] = number
    for slot in range(slots):
        first = swap(words[HEADER_WORDS + slot])
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
        offset = item_offset(words, HEADER_WORDS + slots + ITEM_WORDS * number)
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
        offset = item_offset(words, HEADER_WORDS + slots + ITEM_WORDS * number)
        strays[number - 1] = 1
        if offset < floor or offset >= high:
            continue
        low = np.int64(0)
        top = length
        if length > 0 and item_offset(words, HEADER_WORDS + slots + ITEM_WORDS * np.int64(ends[length - 1])) <= offset:
            low = length
        while low < top:
            middle = (low + top) // 2
            if item_offset(words, HEADER_WORDS + slots + ITEM_WORDS * np.int64(ends[middle])) <= offset:
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
    for slot in range(HEADER_WORDS, HEADER_WORDS + slots):
        first = swap(words[slot])
        number = first
        while number >= count:
            if number >= max_items:
                number = np.int64(0)  # no item has this number: the slot is damaged
                break
            highest = max(highest, number)
            previous = swap(words[HEADER_WORDS + slots + ITEM_WORDS * number + 4])
            number = previous if previous < number else np.int64(0)
        if number < 0:
            number = np.int64(0)
        if number != first:
            words[slot] = np.int32(swap(number))
        if number > 0:
            used += 1
    start = HEADER_WORDS + slots + ITEM_WORDS * count
    stop = HEADER_WORDS + slots + ITEM_WORDS * min(highest + 2, max_items)
    for word in range(start, stop):
        if words[word] != 0:
            words[word] = np.int32(0)
    return used


@njit("int64(Array(int32, 1, 'C', readonly=True), int64, int64, int64)", cache=True, nogil=True)
def items_below(words, slots, count, offset):  # type: ignore[no-untyped-def]
    """Number of the first item below ``count`` whose record is at or behind ``offset``; ``count`` if there is none."""
    number = count
    while number > 1 and item_offset(words, HEADER_WORDS + slots + ITEM_WORDS * (number - 1)) >= offset:
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
        number = swap(words[HEADER_WORDS + slot])
    while number > 0 and number < max_items and taken < offsets.size and examined < budget:
        item = HEADER_WORDS + slots + ITEM_WORDS * number
        examined += 1
        found = swap(words[item])
        if found % slots != slot:
            out[3] = 1
            break
        offset = item_offset(words, item)
        # The seconds of the first item count from the end of the file before (spec 4.2).
        time = begin_timestamp
        if number > 1:
            time += swap(words[item + 3]) * 1000
        previous = swap(words[item + 4])
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
