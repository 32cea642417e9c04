# Walks: of the log, which fills the rows of a DispatchBatch, and of a chain in the timer log. Java's hash of strings.

cdef uint32_t hash_from(const uint8_t *buf, int64_t at, int64_t end, uint32_t value) noexcept nogil:
    """Java's string hash continued from ``value`` over the UTF-16 units of the UTF-8 in ``buf[at:end]`` (spec 0.1)."""
    cdef uint32_t first
    cdef int64_t point
    while at < end:
        first = buf[at]
        if first < 0x80:
            value = value * 31 + first
            at += 1
        elif first < 0xE0 and at + 1 < end:
            value = value * 31 + (((first & 0x1F) << 6) | (buf[at + 1] & 0x3F))
            at += 2
        elif first < 0xF0 and at + 2 < end:
            value = value * 31 + (((first & 0x0F) << 12) | ((buf[at + 1] & 0x3F) << 6) | (buf[at + 2] & 0x3F))
            at += 3
        elif at + 3 < end:
            point = (
                ((first & 0x07) << 18) | ((buf[at + 1] & 0x3F) << 12) | ((buf[at + 2] & 0x3F) << 6) | (buf[at + 3] & 0x3F)
            )
            point -= 0x10000
            value = value * 31 + <uint32_t>(0xD800 + (point >> 10))
            value = value * 31 + <uint32_t>(0xDC00 + (point & 0x3FF))
            at += 4
        else:
            # An incomplete sequence: Java decodes it to the replacement character.
            value = value * 31 + 0xFFFD
            at = end
    return value


def hash_on(buf, int64_t start, int64_t end, uint32_t value):
    """Java's string hash continued from ``value`` over the UTF-16 units of the UTF-8 in ``buf[start:end]`` (spec 0.1)."""
    cdef const uint8_t *buf_data = bytes_in(buf)
    return hash_from(buf_data, start, end, value)


def string_hash(buf, int64_t start, int64_t end):
    """Java's hash of the string whose UTF-8 is ``buf[start:end]``: over UTF-16 units, 32 bits, signed (spec 0.1)."""
    cdef const uint8_t *buf_data = bytes_in(buf)
    return <int32_t>hash_from(buf_data, start, end, 0)


# One pair of properties; starts are positions in the buffer.
cdef struct Pair:
    int64_t name
    int64_t name_size
    int64_t value
    int64_t value_size


cdef inline int64_t next_pair(const uint8_t *buf, int64_t size, int64_t at, int64_t stop, Pair *pair) noexcept nogil:
    """Find the first pair at or behind ``at``; returns where the search continues, -1 when there is none.

    Skips a pair without name or value (spec 2.5). ``size``: of the whole buffer.
    """
    while at < stop:
        pair.name = at
        at = until_mark(buf, size, at, stop)
        pair.name_size = at - pair.name
        if at >= stop or buf[at] == 2:
            at += 1
            continue
        pair.value = at + 1
        at = until_two(buf, size, at + 1, stop)
        pair.value_size = at - pair.value
        at += 1
        if pair.name_size and pair.value_size:
            return at
    return -1


cdef inline int64_t number_in(const uint8_t *text, int64_t size) noexcept nogil:
    """The decimal number in ``text``; -1 when it has another character, or too many digits for 64 bits."""
    cdef int64_t number = 0
    cdef int64_t index
    if size > 18:
        return -1
    for index in range(size):
        if text[index] < 48 or text[index] > 57:
            return -1
        number = number * 10 + text[index] - 48
    return number


cdef inline void take_pair(Row *row, const uint8_t *segment, int64_t at, Pair *pair) noexcept nogil:
    """Note the pair in the row of the record at ``at`` if it is one that a row has."""
    cdef const uint8_t *name = segment + pair.name
    cdef const uint8_t *value = segment + pair.value
    cdef int64_t number
    if pair.name_size == 4:
        if same_bytes(name, b"TAGS", 4):
            row.tags_start = pair.value - at
            row.tags_size = pair.value_size
        elif same_bytes(name, b"KEYS", 4):
            row.keys_start = pair.value - at
            row.keys_size = pair.value_size
    elif pair.name_size == 8:
        if same_bytes(name, b"UNIQ_KEY", 8):
            row.uniq_start = pair.value - at
            row.uniq_size = pair.value_size
    elif pair.name_size == 5:
        if same_bytes(name, b"DELAY", 5) and pair.value_size <= 9:
            row.delay_level = max(number_in(value, pair.value_size), 0)
    elif pair.name_size >= 9 and name[0] == 73:  # I
        if pair.name_size == 9 and same_bytes(name, b"INNER_NUM", 9):
            number = number_in(value, pair.value_size)
            row.inner_num = number if number <= 32767 else -1
        elif pair.name_size == 10 and same_bytes(name, b"INNER_BASE", 10):
            row.inner_base = number_in(value, pair.value_size)
        elif pair.name_size == 20 and same_bytes(name, b"INNER_MULTI_DISPATCH", 20):
            row.multi_start = pair.value - at
            row.multi_size = pair.value_size
        elif pair.name_size == 24 and same_bytes(name, b"INNER_MULTI_QUEUE_OFFSET", 24):
            row.multi_offsets_start = pair.value - at
            row.multi_offsets_size = pair.value_size


cdef int64_t walk_log(
    const uint8_t *segment, int64_t size, int64_t start, int64_t limit, int64_t base_offset, Row *rows, int64_t room,
    int64_t *topics, int32_t *table, int64_t mask, int64_t *out
) noexcept nogil:
    cdef int64_t count = 0
    cdef int64_t known = 0
    cdef int64_t at = start
    cdef int64_t last_topic = -1
    cdef int64_t reason = OK
    cdef int64_t result = WALK_LIMIT
    cdef int64_t number, slot, index, position, stop
    cdef uint64_t mixed
    cdef const uint8_t *topic
    cdef Row *row
    cdef Parts parts
    cdef Pair pair
    while at < limit:
        if count >= room:
            result = WALK_FULL
            break
        if at + FILLER_BYTES <= limit and load4(segment + at + MAGIC_OFFSET) == MAGIC_FILLER:
            result = WALK_BLANK
            break
        reason = layout(segment, at, limit, &parts)
        if reason == OK and load8(segment + at + PHYSICAL_OFFSET_OFFSET) != base_offset + at:
            reason = REASON_PHYSICAL_OFFSET
        if reason != OK:
            result = WALK_BAD
            break
        row = rows + count
        memset(row, 0, sizeof(Row))
        row.physical_offset = base_offset + at
        row.size = parts.total
        row.queue_id = load4(segment + at + QUEUE_ID_OFFSET)
        row.queue_offset = load8(segment + at + QUEUE_OFFSET_OFFSET)
        row.sys_flag = load4(segment + at + SYS_FLAG_OFFSET)
        row.born_timestamp = load8(segment + at + BORN_TIMESTAMP_OFFSET)
        row.store_timestamp = load8(segment + at + STORE_TIMESTAMP_OFFSET + parts.born)
        row.reconsume_times = load4(segment + at + RECONSUME_TIMES_OFFSET + parts.born + parts.host)
        row.prepared_offset = load8(segment + at + PREPARED_OFFSET_OFFSET + parts.born + parts.host)
        row.body_start = parts.body - at
        row.body_size = parts.body_size
        row.topic_start = parts.topic - at
        row.topic_size = parts.topic_size
        row.properties_start = parts.properties - at
        row.properties_size = parts.properties_size
        row.inner_base = -1
        row.inner_num = -1

        # Find the topic: usually that of the record before.
        topic = segment + parts.topic
        number = last_topic
        if (
            number < 0
            or topics[2 * number + 1] != parts.topic_size
            or not same_bytes(segment + topics[2 * number], topic, parts.topic_size)
        ):
            mixed = 1469598103934665603U
            for index in range(parts.topic_size):
                mixed = (mixed ^ topic[index]) * 1099511628211U
            slot = (mixed ^ (mixed >> 32)) & mask
            while True:
                number = table[slot]
                if number < 0:
                    number = known
                    table[slot] = number
                    topics[2 * number] = parts.topic
                    topics[2 * number + 1] = parts.topic_size
                    known += 1
                    break
                if topics[2 * number + 1] == parts.topic_size and same_bytes(
                    segment + topics[2 * number], topic, parts.topic_size
                ):
                    break
                slot = (slot + 1) & mask
            last_topic = number
        row.topic = number

        # Properties: the last pair of a name counts.
        stop = parts.properties + parts.properties_size
        position = next_pair(segment, size, parts.properties, stop, &pair)
        while position >= 0:
            take_pair(row, segment, at, &pair)
            position = next_pair(segment, size, position, stop, &pair)
        if row.tags_size > 0:
            row.tags_code = <int32_t>hash_from(segment, at + row.tags_start, at + row.tags_start + row.tags_size, 0)
        at += parts.total
        count += 1
    out[0] = count
    out[1] = known
    out[2] = at
    out[3] = reason
    return result


def walk(segment, int64_t start, int64_t limit, int64_t base_offset, rows, topics, table, out):
    """Fill ``rows`` with the records of ``segment[start:limit]``; reads no bodies and checks no CRCs (spec 7, step 4).

    ``topics[k]`` becomes (position in the segment, size) of the k-th different topic; ``table`` is scratch for finding
    topics: a power of two of -1, at least twice as long as ``rows``. ``out`` becomes (rows filled, topics found,
    position reached, reason). Returns one of WALK_*.
    """
    cdef const uint8_t *segment_data = bytes_in(segment)
    cdef int64_t segment_size = length(segment)
    cdef Row *rows_data = rows_out(rows)
    cdef int64_t rows_size = length(rows)
    cdef int64_t *topics_data = table_out(topics)
    cdef int32_t *table_data = words_out(table)
    cdef int64_t table_size = length(table)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t result
    with nogil:
        result = walk_log(
            segment_data, segment_size, start, limit, base_offset, rows_data, rows_size, topics_data, table_data,
            table_size - 1, out_data,
        )
    return result


cdef int64_t walk_timers(
    const uint8_t *data, int64_t size, int64_t base, int64_t position, int64_t stop, int64_t slot_ms, int64_t *positions,
    int64_t room
) noexcept nogil:
    # A unit: its size (4 bytes), the position before it (8), magic (4), the time of the write (8), the delay (4), and more.
    cdef int64_t count = 2
    cdef int64_t result = 0
    cdef int64_t magic, due, previous
    cdef const uint8_t *unit
    while position >= stop and position >= base and count < room:
        unit = data + position - base
        if position - base + TIMER_UNIT_BYTES > size or load4(unit) != TIMER_UNIT_BYTES:
            result = 1
            break
        previous = load8(unit + 4)
        magic = load4(unit + 12)
        due = load8(unit + 16) + load4(unit + 24)
        if (
            magic & 1 == 0 or magic < 0 or magic > 15 or previous >= position
            or floor_division(due, 1000) != floor_division(slot_ms, 1000)
        ):
            result = 1
            break
        positions[count] = position
        count += 1
        position = previous
    positions[0] = count - 2
    positions[1] = position
    return result


def walk_timer_chain(data, int64_t base, int64_t position, int64_t stop, int64_t slot_ms, positions):
    """Walk the timer log (spec 12.2) backwards from ``position`` through one file, ``data``, which begins at ``base`` of
    the log: each unit names the position of the one before it in its slot.

    Fills ``positions``, whose element 0 becomes the number of units and element 1 the position at which the walk goes on:
    below ``stop`` (or -1) at the chain's end, in another file, or of the next unit when ``positions`` is full. Returns 0;
    1 where no unit of the slot ``slot_ms`` lies.
    """
    cdef const uint8_t *data_data = bytes_in(data)
    cdef int64_t data_size = length(data)
    cdef int64_t *positions_data = numbers_out(positions)
    cdef int64_t positions_size = length(positions)
    cdef int64_t result
    with nogil:
        result = walk_timers(
            data_data, data_size, base, position, stop, slot_ms, positions_data, positions_size
        )
    return result
