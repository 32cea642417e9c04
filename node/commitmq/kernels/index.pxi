# Index files: inserts the keys of a batch, and walks, checks and undoes the chains of items.
#
# A file is accessed as 32-bit words because each field below the header is one or two aligned words. A store to a slot is
# then one machine access, so a process killed anywhere leaves an old or a new slot, never half of one. The values in the
# file are big-endian. Layout and rules: spec 4.1, 4.2; commitmq.store.index.index_file.

cdef inline int64_t item_of(int64_t slots, int64_t number) noexcept nogil:
    """The first word of an item."""
    return INDEX_HEADER_WORDS + slots + INDEX_ITEM_WORDS * number


cdef inline int64_t item_offset(const int32_t *words, int64_t item) noexcept nogil:
    """Physical offset in the item whose first word is ``item``."""
    return <int64_t>((<uint64_t>swap(words[item + 1]) << 32) | (swap(words[item + 2]) & <int64_t>0xFFFFFFFF))


# ---------------------------------------------------------------- insertion

cdef inline void put_item(
    int32_t *words, int64_t slots, int64_t *state, uint32_t key_hash, int64_t offset, int64_t stamp
) noexcept nogil:
    """Append one item and link it (spec 4.2 steps 3 to 8); the header stays as it is until the caller commits."""
    cdef int64_t number = state[STATE_COUNT]
    cdef int64_t hashed = <int32_t>key_hash
    cdef int64_t begin = state[STATE_BEGIN_TIMESTAMP]
    cdef int64_t seconds = 0
    cdef int64_t item = item_of(slots, number)
    cdef int64_t slot, old
    if hashed < 0:
        hashed = -hashed
    if hashed > 0x7FFFFFFF:
        hashed = 0
    slot = INDEX_HEADER_WORDS + slot_of(hashed, slots)
    old = swap(words[slot])
    if old <= 0 or old > number:
        old = 0
    if begin > 0 and stamp > begin:
        seconds = min((stamp - begin) // 1000, 0x7FFFFFFF)
    words[item] = swap(hashed)
    words[item + 1] = swap(offset >> 32)
    words[item + 2] = swap(offset)
    words[item + 3] = swap(seconds)
    words[item + 4] = swap(old)
    # The item is complete before the slot points to it: an undo trusts every item that a slot names.
    store_last(words + slot, swap(number))
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


cdef int64_t insert_row(
    int32_t *words, int64_t slots, int64_t max_items, int64_t allocated, const uint8_t *log, const Row *row, int64_t at,
    uint32_t topic_hash, int64_t present, int64_t *state
) noexcept nogil:
    """Insert the items of one record, at ``at`` of ``log``, but the first ``present``."""
    cdef int64_t ordinal = 0
    cdef int64_t position, stop, end
    cdef uint32_t seed
    cdef int kind
    for kind in range(3):
        seed = topic_hash * 31 + 35  # "#" stands between the topic and a key
        if kind == 0:
            position = at + row.uniq_start
            stop = position + row.uniq_size
        elif kind == 1:
            position = at + row.keys_start
            stop = position + row.keys_size
        else:
            position = at + row.tags_start
            stop = position + row.tags_size
            seed = (seed * 31 + 84) * 31 + 35  # and "#T#" before a tag
        while position < stop:
            end = stop
            if kind == 1:
                end = position
                while end < stop and log[end] != 32:  # keys stand between spaces
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
                put_item(
                    words, slots, state, hash_from(log, position, end, seed), row.physical_offset, row.store_timestamp
                )
            position = end + 1
    return INSERT_DONE


def insert(words, int64_t slots, int64_t max_items, int64_t allocated, log, int64_t base, rows, state):
    """Index ``rows[state[STATE_ROW]:]``, whose records are in ``log``, the segment that begins at ``base``.

    ``words`` is the whole file with ``slots`` hash slots and room for items below ``max_items``; items below
    ``allocated`` have disk space. Records older than the newest indexed one are skipped, and so are those items of the
    newest one that exist; so a batch may be given again. ``state`` (int64, STATE_*) is updated; the header in the file
    is not. Returns one of INSERT_*.
    """
    cdef int32_t *words_data = words_out(words)
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const Row *rows_data = rows_in(rows)
    cdef int64_t rows_size = length(rows)
    cdef int64_t *state_data = numbers_out(state)
    cdef int64_t result = INSERT_DONE
    cdef int64_t last_topic = -1
    cdef uint32_t topic_hash = 0
    cdef int64_t number, at, present
    cdef const Row *row
    with nogil:
        for number in range(state_data[STATE_ROW], rows_size):
            state_data[STATE_ROW] = number
            row = &rows_data[number]
            present = 0
            if row.physical_offset < state_data[STATE_LAST_OFFSET]:
                continue
            if row.physical_offset == state_data[STATE_LAST_OFFSET]:
                present = state_data[STATE_LAST_ITEMS]
            elif state_data[STATE_COUNT] >= max_items:
                # RocketMQ checks for room before each record, whether or not the record has keys.
                result = INSERT_FULL
                break
            if row.sys_flag & SYS_FLAG_TRANSACTION_ROLLBACK == SYS_FLAG_TRANSACTION_ROLLBACK:
                continue
            at = row.physical_offset - base
            if row.topic != last_topic:
                topic_hash = hash_from(log_data, at + row.topic_start, at + row.topic_start + row.topic_size, 0)
                last_topic = row.topic
            result = insert_row(
                words_data, slots, max_items, allocated, log_data, row, at, topic_hash, present, state_data
            )
            if result != INSERT_DONE:
                break
        if result == INSERT_DONE:
            state_data[STATE_ROW] = rows_size
    return result


def count_items(log, int64_t base, rows, counts):
    """``counts[i]`` becomes the number of items that :func:`insert` makes of ``rows[i]``; ``log`` begins at ``base``."""
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const Row *rows_data = rows_in(rows)
    cdef int64_t rows_size = length(rows)
    cdef int64_t *counts_data = numbers_out(counts)
    cdef int64_t number, items, start, at
    cdef uint8_t before
    cdef const Row *row
    with nogil:
        for number in range(rows_size):
            row = &rows_data[number]
            items = 0
            if row.sys_flag & SYS_FLAG_TRANSACTION_ROLLBACK != SYS_FLAG_TRANSACTION_ROLLBACK:
                items += row.uniq_size > 0
                items += row.tags_size > 0
                start = row.physical_offset - base + row.keys_start
                before = 32
                for at in range(start, start + row.keys_size):
                    items += before == 32 and log_data[at] != 32
                    before = log_data[at]
            counts_data[number] = items


# ---------------------------------------------------------------- chains

def check_chains(words, int64_t slots, int64_t count, heads, wrong_items, wrong_slots, out):
    """Whether each item below ``count`` points to the item before it in its slot, and each slot to its newest item.

    ``heads`` is scratch: one zero for each slot. ``wrong_items`` gets (item, where it points, where it must),
    ``wrong_slots`` the same for slots, as many as there is room for. ``out`` becomes (wrong items, wrong slots, slots
    in use).
    """
    cdef const int32_t *words_data = words_in(words)
    cdef int32_t *heads_data = words_out(heads)
    cdef int64_t *wrong_items_data = table_out(wrong_items)
    cdef Py_ssize_t wrong_items_width = width(wrong_items)
    cdef int64_t wrong_items_size = length(wrong_items)
    cdef int64_t *wrong_slots_data = table_out(wrong_slots)
    cdef Py_ssize_t wrong_slots_width = width(wrong_slots)
    cdef int64_t wrong_slots_size = length(wrong_slots)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t number, item, slot, previous
    with nogil:
        out_data[0] = 0
        out_data[1] = 0
        out_data[2] = 0
        for number in range(1, count):
            item = item_of(slots, number)
            slot = slot_of(swap(words_data[item]), slots)
            previous = swap(words_data[item + 4])
            if previous != heads_data[slot]:
                if out_data[0] < wrong_items_size:
                    wrong_items_data[out_data[0] * wrong_items_width + 0] = number
                    wrong_items_data[out_data[0] * wrong_items_width + 1] = previous
                    wrong_items_data[out_data[0] * wrong_items_width + 2] = heads_data[slot]
                out_data[0] += 1
            heads_data[slot] = number
        for slot in range(slots):
            previous = swap(words_data[INDEX_HEADER_WORDS + slot])
            out_data[2] += previous != 0
            if previous != heads_data[slot]:
                if out_data[1] < wrong_slots_size:
                    wrong_slots_data[out_data[1] * wrong_slots_width + 0] = slot
                    wrong_slots_data[out_data[1] * wrong_slots_width + 1] = previous
                    wrong_slots_data[out_data[1] * wrong_slots_width + 2] = heads_data[slot]
                out_data[1] += 1


cdef int64_t mark_strays(
    const int32_t *words, int64_t slots, int64_t count, int64_t floor, int64_t high, uint8_t *strays, int32_t *ends,
    int32_t *before
) noexcept nogil:
    # The longest non-decreasing sequence: ends[k] is the item with which the best sequence of k + 1 items ends.
    cdef int64_t length = 0
    cdef int64_t number, offset, low, top, middle
    for number in range(1, count):
        offset = item_offset(words, item_of(slots, number))
        strays[number - 1] = 1
        if offset < floor or offset >= high:
            continue
        low = 0
        top = length
        if length > 0 and item_offset(words, item_of(slots, ends[length - 1])) <= offset:
            low = length
        while low < top:
            middle = (low + top) // 2
            if item_offset(words, item_of(slots, ends[middle])) <= offset:
                low = middle + 1
            else:
                top = middle
        ends[low] = number
        before[number] = ends[low - 1] if low > 0 else 0
        length = max(length, low + 1)
    number = ends[length - 1] if length > 0 else 0
    while number > 0:
        strays[number - 1] = 0
        number = before[number]
    return count - 1 - length


def find_strays(words, int64_t slots, int64_t count, int64_t floor, int64_t high, strays):
    """Mark, in ``strays``, the fewest items below ``count`` whose removal leaves physical offsets that never decrease.

    ``strays[i]`` stands for item ``i + 1``. An item with an offset below ``floor`` or not below ``high`` is marked too.
    Returns the number of marked items.
    """
    cdef const int32_t *words_data = words_in(words)
    cdef uint8_t *strays_data = bytes_out(strays)
    cdef int64_t last = floor
    cdef int64_t number, offset
    cdef bint is_sorted = True
    cdef int32_t *scratch
    with nogil:
        for number in range(1, count):
            offset = item_offset(words_data, item_of(slots, number))
            if offset < last or offset >= high:
                is_sorted = False
                break
            last = offset
    if is_sorted:
        return 0
    scratch = <int32_t *>malloc(2 * count * sizeof(int32_t))
    if scratch == NULL:
        raise MemoryError(f"tables for {count} items")
    with nogil:
        number = mark_strays(words_data, slots, count, floor, high, strays_data, scratch, scratch + count)
    free(scratch)
    return number


def undo(words, int64_t slots, int64_t max_items, int64_t count):
    """Unlink and zero every item from number ``count`` on, whether or not the header counts it; returns slots in use.

    It follows the slots and not the items, so it needs no mark of where the items end: an item is linked only when it
    is complete, and an unlinked item can only be the one behind all linked ones.
    """
    cdef int32_t *words_data = words_out(words)
    cdef int64_t used = 0
    cdef int64_t highest = count - 1
    cdef int64_t slot, first, number, previous, word
    with nogil:
        for slot in range(INDEX_HEADER_WORDS, INDEX_HEADER_WORDS + slots):
            first = swap(words_data[slot])
            number = first
            while number >= count:
                if number >= max_items:
                    number = 0  # no item has this number: the slot is damaged
                    break
                highest = max(highest, number)
                previous = swap(words_data[item_of(slots, number) + 4])
                number = previous if previous < number else 0
            if number < 0:
                number = 0
            if number != first:
                words_data[slot] = swap(number)
            if number > 0:
                used += 1
        for word in range(item_of(slots, count), item_of(slots, min(highest + 2, max_items))):
            if words_data[word] != 0:
                words_data[word] = 0
    return used


def items_below(words, int64_t slots, int64_t count, int64_t offset):
    """Number of the first item below ``count`` whose record is at or behind ``offset``; ``count`` if there is none."""
    cdef const int32_t *words_data = words_in(words)
    cdef int64_t number = count
    with nogil:
        while number > 1 and item_offset(words_data, item_of(slots, number - 1)) >= offset:
            number -= 1
    return number


cdef int64_t walk_keys(
    const int32_t *words, int64_t slots, int64_t max_items, int64_t hashed, int64_t start, int64_t before, int64_t floor,
    int64_t begin, int64_t end, int64_t begin_timestamp, int64_t budget, int64_t *offsets, int64_t room, int64_t *items,
    int64_t *out
) noexcept nogil:
    cdef int64_t taken = 0
    cdef int64_t examined = 0
    cdef int64_t slot = slot_of(hashed, slots)
    cdef int64_t number = start
    cdef int64_t item, found, offset, time, previous
    out[3] = 0
    if number <= 0:
        number = swap(words[INDEX_HEADER_WORDS + slot])
    while number > 0 and number < max_items and taken < room and examined < budget:
        item = item_of(slots, number)
        examined += 1
        found = swap(words[item])
        if slot_of(found, slots) != slot:
            out[3] = 1
            break
        offset = item_offset(words, item)
        # The seconds of the first item count from the end of the file before (spec 4.2).
        time = begin_timestamp
        if number > 1:
            time += swap(words[item + 3]) * 1000
        previous = swap(words[item + 4])
        if previous >= number or previous < 0:
            previous = 0
        if time + 999 < begin or offset < floor:
            number = 0  # all following items are older
            break
        if found == hashed and offset < before and time <= end:
            offsets[taken] = offset
            items[taken] = number
            taken += 1
            before = offset
        number = previous
    if number < 0 or number >= max_items:
        number = 0
    out[0] = taken
    out[1] = number
    out[2] = examined
    return taken


def walk_key_chain(
    words, int64_t slots, int64_t max_items, int64_t hashed, int64_t start, int64_t before, int64_t floor,
    int64_t begin, int64_t end, int64_t begin_timestamp, int64_t budget, offsets, items, out,
):
    """Follow the chain of ``hashed`` (>= 0) and collect records that may have the key, newest first.

    ``start`` is the item to begin with, 0 for the newest. An item is taken if it has this hash, a physical offset in
    [``floor``, ``before``) that falls from one item to the next (so no record is taken twice), and a time that may be
    in [``begin``, ``end``] (ms; an item stores whole seconds after ``begin_timestamp``). ``offsets`` and ``items``
    (equal size) get offsets and item numbers. ``out`` becomes (taken, next item or 0 at the chain's end, items
    examined, 1 when an item was not of this chain: it is being written or undone at this moment). Stops when the arrays
    are full, after ``budget`` items, or at items older than ``begin`` or below ``floor``.
    """
    cdef const int32_t *words_data = words_in(words)
    cdef int64_t *offsets_data = numbers_out(offsets)
    cdef int64_t offsets_size = length(offsets)
    cdef int64_t *items_data = numbers_out(items)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t taken
    with nogil:
        taken = walk_keys(
            words_data, slots, max_items, hashed, start, before, floor, begin, end, begin_timestamp, budget, offsets_data,
            offsets_size, items_data, out_data,
        )
    return taken
