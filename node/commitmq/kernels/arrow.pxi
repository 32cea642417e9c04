# Records as Arrow columns: fields, bodies, texts and property maps of many records, without an object for any of them.
#
# All functions take a stretch of the log as bytes and arrays of positions in it. The arrays they fill have Arrow's
# layout: values one after the other, and 32-bit offsets, one for the beginning of each value and one for the end of the
# last.

def heads(log, positions, sizes, physical_offsets, int64_t crc_from, bint check_body, fields, why):
    """Fill ``fields[FIELDS, n]`` from the n records at ``positions``; returns how many were records.

    ``why[i]`` becomes OK, or the reason (:mod:`commitmq.kernels.codes`) why there is no record of ``sizes[i]`` bytes
    whose physicalOffset is ``physical_offsets[i]``. With ``check_body`` the body must match its bodyCRC. Unless
    ``crc_from`` is UNCHECKED, the record must match its ``__CRC32#``, and must have one if it is at or behind
    ``crc_from``. The fields of an invalid record keep their values.
    """
    cdef const uint8_t *buf = bytes_in(log)
    cdef int64_t size = length(log)
    cdef const int64_t *positions_data = numbers_in(positions)
    cdef int64_t positions_size = length(positions)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef const int64_t *physical_offsets_data = numbers_in(physical_offsets)
    cdef int64_t *fields_data = table_out(fields)
    cdef Py_ssize_t fields_width = width(fields)
    cdef int64_t *why_data = numbers_out(why)
    cdef const uint8_t *record
    cdef int64_t good = 0
    cdef int64_t index, at, reason
    cdef Parts parts
    with nogil:
        for index in range(positions_size):
            at = positions_data[index]
            if at < 0 or at > size:
                why_data[index] = REASON_SHORT
                continue
            record = buf + at
            reason = layout(buf, at, size, &parts)
            if reason == OK and parts.total != sizes_data[index]:
                reason = REASON_SHORT
            if reason == OK and load8(record + PHYSICAL_OFFSET_OFFSET) != physical_offsets_data[index]:
                reason = REASON_PHYSICAL_OFFSET
            if reason == OK and crc_from != UNCHECKED:
                if has_crc_slot(buf, parts.properties, parts.properties_size):
                    reason = record_crc_reason(buf, at, parts.total)
                elif crc_from <= physical_offsets_data[index]:
                    reason = REASON_RECORD_CRC_MISSING
            if reason == OK and check_body:
                if stored_crc(buf + parts.body, parts.body_size) != load4(record + BODY_CRC_OFFSET):
                    reason = REASON_BODY_CRC
            why_data[index] = reason
            if reason != OK:
                continue
            good += 1
            fields_data[FIELD_QUEUE_ID * fields_width + index] = load4(record + QUEUE_ID_OFFSET)
            fields_data[FIELD_FLAG * fields_width + index] = load4(record + FLAG_OFFSET)
            fields_data[FIELD_QUEUE_OFFSET * fields_width + index] = load8(record + QUEUE_OFFSET_OFFSET)
            fields_data[FIELD_SYS_FLAG * fields_width + index] = load4(record + SYS_FLAG_OFFSET)
            fields_data[FIELD_BORN_TIMESTAMP * fields_width + index] = load8(record + BORN_TIMESTAMP_OFFSET)
            fields_data[FIELD_STORE_TIMESTAMP * fields_width + index] = load8(record + STORE_TIMESTAMP_OFFSET + parts.born)
            fields_data[FIELD_STORE_HOST * fields_width + index] = at + STORE_HOST_OFFSET + parts.born
            fields_data[FIELD_STORE_HOST_SIZE * fields_width + index] = parts.host
            fields_data[FIELD_RECONSUME_TIMES * fields_width + index] = load4(record + RECONSUME_TIMES_OFFSET + parts.born + parts.host)
            fields_data[FIELD_BODY * fields_width + index] = parts.body
            fields_data[FIELD_BODY_SIZE * fields_width + index] = parts.body_size
            fields_data[FIELD_TOPIC * fields_width + index] = parts.topic
            fields_data[FIELD_TOPIC_SIZE * fields_width + index] = parts.topic_size
            fields_data[FIELD_PROPERTIES * fields_width + index] = parts.properties
            fields_data[FIELD_PROPERTIES_SIZE * fields_width + index] = parts.properties_size
    return good


def split(frame, positions, sizes, physical_offsets):
    """Split ``frame`` into its records, which lie one after the other: their positions, sizes and physicalOffsets.
    Returns their number; -1 when the frame is anything else. Examines no more records than the arrays hold.
    """
    cdef const uint8_t *buf = bytes_in(frame)
    cdef int64_t frame_size = length(frame)
    cdef int64_t *positions_data = numbers_out(positions)
    cdef int64_t positions_size = length(positions)
    cdef int64_t *sizes_data = numbers_out(sizes)
    cdef int64_t *physical_offsets_data = numbers_out(physical_offsets)
    cdef int64_t at = 0
    cdef int64_t count = 0
    cdef int64_t size
    with nogil:
        while at < frame_size and count < positions_size:
            if at + MIN_RECORD_BYTES > frame_size:
                count = -1
                break
            size = load4(buf + at)
            if size < MIN_RECORD_BYTES or at + size > frame_size:
                count = -1
                break
            positions_data[count] = at
            sizes_data[count] = size
            physical_offsets_data[count] = load8(buf + at + PHYSICAL_OFFSET_OFFSET)
            count += 1
            at += size
    return count


def elements(data, starts, sizes, int64_t room, fields, owners):
    """Find the messages in the inner batches at ``starts`` of ``data``; returns their number.

    With ``room`` 0 it only counts them. Otherwise it fills FIELD_FLAG, FIELD_BODY, FIELD_BODY_SIZE, FIELD_PROPERTIES,
    FIELD_PROPERTIES_SIZE and FIELD_QUEUE_OFFSET (the message's number in the batch) of ``fields``, and ``owners`` (its
    batch). -1 - i when batch i is invalid.
    """
    cdef const uint8_t *buf = bytes_in(data)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef int64_t *fields_data = table_out(fields)
    cdef Py_ssize_t fields_width = width(fields)
    cdef int64_t *owners_data = numbers_out(owners)
    cdef int64_t count = 0
    cdef int64_t owner, at, end, number
    cdef bint is_valid = True
    cdef Element element
    with nogil:
        for owner in range(starts_size):
            at = starts_data[owner]
            end = at + sizes_data[owner]
            number = 0
            while at < end:
                if element_at(buf, at, end, &element) != OK:
                    is_valid = False
                    break
                if count < room:
                    owners_data[count] = owner
                    fields_data[FIELD_FLAG * fields_width + count] = load4(buf + at + ELEMENT_FLAG_OFFSET)
                    fields_data[FIELD_QUEUE_OFFSET * fields_width + count] = number
                    fields_data[FIELD_BODY * fields_width + count] = at + ELEMENT_BODY_OFFSET
                    fields_data[FIELD_BODY_SIZE * fields_width + count] = element.body_size
                    fields_data[FIELD_PROPERTIES * fields_width + count] = at + ELEMENT_BYTES + element.body_size
                    fields_data[FIELD_PROPERTIES_SIZE * fields_width + count] = element.properties_size
                count += 1
                number += 1
                at += element.total
            if not is_valid:
                count = -1 - owner
                break
    return count


def gather(log, starts, sizes, out):
    """Copy each ``log[starts[i]:starts[i] + sizes[i]]`` to ``out``, one after the other; they must fill it exactly."""
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef uint8_t *target = bytes_out(out)
    cdef int64_t index
    with nogil:
        for index in range(starts_size):
            memcpy(target, log_data + starts_data[index], sizes_data[index])
            target += sizes_data[index]


def message_ids(log, hosts, host_sizes, physical_offsets, out):
    """Write offset message ids (spec 2.10) one after the other: the store host and the physical offset in hexadecimal."""
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const int64_t *hosts_data = numbers_in(hosts)
    cdef int64_t hosts_size = length(hosts)
    cdef const int64_t *host_sizes_data = numbers_in(host_sizes)
    cdef const int64_t *physical_offsets_data = numbers_in(physical_offsets)
    cdef uint8_t *target = bytes_out(out)
    cdef const char *digits = b"0123456789ABCDEF"
    cdef int64_t index, byte, nibble
    cdef uint8_t value
    with nogil:
        for index in range(hosts_size):
            for byte in range(host_sizes_data[index]):
                value = log_data[hosts_data[index] + byte]
                target[0] = digits[value >> 4]
                target[1] = digits[value & 15]
                target += 2
            for nibble in range(16):
                target[nibble] = digits[(physical_offsets_data[index] >> (60 - 4 * nibble)) & 15]
            target += 16


cdef inline int64_t next_property(const uint8_t *log, int64_t size, int64_t at, int64_t stop, Pair *pair) noexcept nogil:
    """:func:`next_pair`, without the record's own CRC."""
    while True:
        at = next_pair(log, size, at, stop, pair)
        if at < 0 or pair.name_size != 8 or not same_bytes(log + pair.name, b"__CRC32#", 8):
            return at


cdef inline int64_t last_property(const uint8_t *log, int64_t size, int64_t at, int64_t stop, Pair *pair) noexcept nogil:
    """:func:`next_property`, without those whose name comes again: the later one counts (spec 2.5)."""
    cdef int64_t position
    cdef Pair other
    while True:
        at = next_property(log, size, at, stop, pair)
        if at < 0:
            return at
        position = next_property(log, size, at, stop, &other)
        while position >= 0:
            if other.name_size == pair.name_size and same_bytes(log + pair.name, log + other.name, pair.name_size):
                break
            position = next_property(log, size, position, stop, &other)
        if position < 0:
            return at


def measure_properties(log, starts, sizes, offsets, totals):
    """``offsets[i + 1]`` becomes the pairs of the first i + 1 records; ``totals`` (pairs, name bytes, value bytes)."""
    cdef const uint8_t *buf = bytes_in(log)
    cdef int64_t size = length(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef int32_t *offsets_data = words_out(offsets)
    cdef int64_t *totals_data = numbers_out(totals)
    cdef int64_t pairs = 0
    cdef int64_t names = 0
    cdef int64_t values = 0
    cdef int64_t index, position, stop
    cdef Pair pair
    with nogil:
        offsets_data[0] = 0
        for index in range(starts_size):
            stop = starts_data[index] + sizes_data[index]
            position = last_property(buf, size, starts_data[index], stop, &pair)
            while position >= 0:
                pairs += 1
                names += pair.name_size
                values += pair.value_size
                position = last_property(buf, size, position, stop, &pair)
            offsets_data[index + 1] = pairs
        totals_data[0] = pairs
        totals_data[1] = names
        totals_data[2] = values


def take_properties(log, starts, sizes, name_offsets, names, value_offsets, values):
    """Fill names and values of all pairs; ``measure_properties`` counted them before."""
    cdef const uint8_t *buf = bytes_in(log)
    cdef int64_t size = length(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef int32_t *name_offsets_data = words_out(name_offsets)
    cdef uint8_t *names_data = bytes_out(names)
    cdef int32_t *value_offsets_data = words_out(value_offsets)
    cdef uint8_t *values_data = bytes_out(values)
    cdef int64_t number = 0
    cdef int64_t name_at = 0
    cdef int64_t value_at = 0
    cdef int64_t index, position, stop
    cdef Pair pair
    with nogil:
        name_offsets_data[0] = 0
        value_offsets_data[0] = 0
        for index in range(starts_size):
            stop = starts_data[index] + sizes_data[index]
            position = last_property(buf, size, starts_data[index], stop, &pair)
            while position >= 0:
                memcpy(names_data + name_at, buf + pair.name, pair.name_size)
                memcpy(values_data + value_at, buf + pair.value, pair.value_size)
                name_at += pair.name_size
                value_at += pair.value_size
                number += 1
                name_offsets_data[number] = name_at
                value_offsets_data[number] = value_at
                position = last_property(buf, size, position, stop, &pair)


def property_values(log, starts, sizes, names, bounds, found, lengths):
    """Find the values of some properties in the encoded properties at ``starts``.

    Name ``k`` is ``names[bounds[k]:bounds[k + 1]]``; its value in record ``i`` becomes
    ``log[found[k, i]:found[k, i] + lengths[k, i]]``, the last one when there are several; 0 bytes when there is none.
    """
    cdef const uint8_t *buf = bytes_in(log)
    cdef int64_t size = length(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef const uint8_t *names_data = bytes_in(names)
    cdef const int64_t *bounds_data = numbers_in(bounds)
    cdef int64_t bounds_size = length(bounds)
    cdef int64_t *found_data = table_out(found)
    cdef Py_ssize_t found_width = width(found)
    cdef int64_t *lengths_data = table_out(lengths)
    cdef Py_ssize_t lengths_width = width(lengths)
    cdef int64_t wanted = bounds_size - 1
    cdef int64_t index, number, position, stop
    cdef Pair pair
    with nogil:
        for index in range(starts_size):
            for number in range(wanted):
                found_data[number * found_width + index] = 0
                lengths_data[number * lengths_width + index] = 0
            stop = starts_data[index] + sizes_data[index]
            position = next_property(buf, size, starts_data[index], stop, &pair)
            while position >= 0:
                for number in range(wanted):
                    if bounds_data[number + 1] - bounds_data[number] == pair.name_size and same_bytes(
                        buf + pair.name, names_data + bounds_data[number], pair.name_size
                    ):
                        found_data[number * found_width + index] = pair.value
                        lengths_data[number * lengths_width + index] = pair.value_size
                        break
                position = next_property(buf, size, position, stop, &pair)


cdef bint same_columns(
    const uint8_t *buf, const int64_t *starts, const int64_t *lengths, int64_t columns, int64_t stride, int64_t one,
    int64_t other
) noexcept nogil:
    cdef int64_t column, left, right
    for column in range(columns):
        left = column * stride + one
        right = column * stride + other
        if lengths[left] != lengths[right] or not same_bytes(buf + starts[left], buf + starts[right], lengths[left]):
            return False
    return True


def number_alike(buf, starts, lengths, numbers, firsts):
    """Give records that agree in all columns the same number, counted from 0 in the order of their first ones.

    Column k of record i is ``buf[starts[k, i]:starts[k, i] + lengths[k, i]]``. ``numbers[i]`` becomes the number of
    record i, ``firsts[n]`` the first record with number n. Returns how many numbers there are.
    """
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef const int64_t *starts_data = table_in(starts)
    cdef Py_ssize_t starts_width = width(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *lengths_data = table_in(lengths)
    cdef Py_ssize_t lengths_width = width(lengths)
    cdef int64_t *numbers_data = numbers_out(numbers)
    cdef int64_t numbers_size = length(numbers)
    cdef int64_t *firsts_data = numbers_out(firsts)
    cdef int64_t size = 16
    cdef int64_t count = 0
    cdef int64_t record, column, at
    cdef uint32_t key
    cdef int64_t *table
    while size < 2 * numbers_size:
        size *= 2
    table = <int64_t *>malloc(size * sizeof(int64_t))
    if table == NULL:
        raise MemoryError(f"a table for {numbers_size} records")
    with nogil:
        memset(table, 255, size * sizeof(int64_t))  # all -1
        for record in range(numbers_size):
            key = 0
            for column in range(starts_size):
                key = crc_of(buf_data + starts_data[column * starts_width + record], lengths_data[column * lengths_width + record], key + <uint32_t>column)
            at = key & (size - 1)
            while table[at] >= 0 and not same_columns(
                buf_data, starts_data, lengths_data, starts_size, starts_width, firsts_data[table[at]], record
            ):
                at = (at + 1) & (size - 1)
            if table[at] < 0:
                table[at] = count
                firsts_data[count] = record
                count += 1
            numbers_data[record] = table[at]
    free(table)
    return count
