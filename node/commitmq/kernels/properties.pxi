# Properties of many records: compares them with tags and keys, finds producers' marks, and takes values as columns,
# without decoding any.
#
# A column is two arrays: the position of each record's value in the buffer, and its size in bytes; size 0 means that the
# record has no such property (an empty value cannot be stored, spec 2.5).

cdef inline void find_value(
    const uint8_t *buf, int64_t size, const Parts *parts, const char *name, int64_t name_size, Pair *found
) noexcept nogil:
    """The value of the last pair of this name; size 0 when there is none."""
    cdef Pair pair
    cdef int64_t stop = parts.properties + parts.properties_size
    cdef int64_t position = next_pair(buf, size, parts.properties, stop, &pair)
    found.value = 0
    found.value_size = 0
    while position >= 0:
        if pair.name_size == name_size and same_bytes(buf + pair.name, <const uint8_t *>name, name_size):
            found[0] = pair
        position = next_pair(buf, size, position, stop, &pair)


# ---------------------------------------------------------------- tags

cdef int64_t match_tags_in(
    const uint8_t *log, int64_t size, const int64_t *positions, const int64_t *sizes, int64_t count, const uint8_t *wanted,
    const int64_t *bounds, int64_t tags, uint8_t *verdicts
) noexcept nogil:
    cdef int64_t matched = 0
    cdef int64_t index, tag, at
    cdef Parts parts
    cdef Pair found
    for index in range(count):
        at = positions[index]
        verdicts[index] = NO_RECORD
        if at < 0 or at > size or layout(log, at, size, &parts) != OK or parts.total != sizes[index]:
            continue
        verdicts[index] = NO_MATCH
        find_value(log, size, &parts, b"TAGS", 4, &found)
        if found.value_size == 0:
            continue
        for tag in range(tags):
            if bounds[tag + 1] - bounds[tag] == found.value_size and same_bytes(
                log + found.value, wanted + bounds[tag], found.value_size
            ):
                verdicts[index] = MATCH
                matched += 1
                break
    return matched


def match_tags(log, positions, sizes, wanted, bounds, verdicts):
    """Compare the records at ``positions`` of ``log`` with the wanted tags; returns how many match.

    This is the exact half of a tag filter: a ConsumeQueue unit holds only a 32-bit hash of the tag (spec 3.2), so two
    tags can share a hash. ``log`` is part of a mapped segment, ``positions`` and ``sizes`` are bytes in it (equal
    length). Wanted tag ``k`` is ``wanted[bounds[k]:bounds[k + 1]]``; none may be empty. ``verdicts[i]`` becomes NO_MATCH,
    MATCH or NO_RECORD. A record without TAGS, or with an empty one, matches nothing; of several TAGS the last one counts
    (spec 2.5).
    """
    cdef const uint8_t *log_data = bytes_in(log)
    cdef int64_t log_size = length(log)
    cdef const int64_t *positions_data = numbers_in(positions)
    cdef int64_t positions_size = length(positions)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef const uint8_t *wanted_data = bytes_in(wanted)
    cdef const int64_t *bounds_data = numbers_in(bounds)
    cdef int64_t bounds_size = length(bounds)
    cdef uint8_t *verdicts_data = bytes_out(verdicts)
    cdef int64_t matched
    with nogil:
        matched = match_tags_in(
            log_data, log_size, positions_data, sizes_data, positions_size, wanted_data, bounds_data,
            bounds_size - 1, verdicts_data,
        )
    return matched


def tags_codes(run, ends, codes):
    """``codes[i]`` becomes the tags code of record i, which ends at ``run[ends[i]]``: the hash of its TAGS, or 0. It is
    for the ConsumeQueue units of a run, without reading the log.

    As in the walk of the log, the last pair of a name counts and a pair needs a value (spec 2.5, 3.2). Returns the
    number of good records; those behind the first bad one are not examined.
    """
    cdef const uint8_t *buf = bytes_in(run)
    cdef int64_t run_size = length(run)
    cdef const int64_t *ends_data = numbers_in(ends)
    cdef int64_t count = length(ends)
    cdef int64_t *codes_data = numbers_out(codes)
    cdef int64_t at = 0
    cdef int64_t index
    cdef Parts parts
    cdef Pair found
    with nogil:
        for index in range(count):
            if layout(buf, at, ends_data[index], &parts) != OK:
                count = index
                break
            find_value(buf, run_size, &parts, b"TAGS", 4, &found)
            codes_data[index] = 0
            if found.value_size:
                codes_data[index] = <int32_t>hash_from(buf, found.value, found.value + found.value_size, 0)
            at = ends_data[index]
    return count


# ---------------------------------------------------------------- keys

cdef int64_t match_keys_in(
    const uint8_t *log, int64_t size, int64_t base, int64_t limit, const int64_t *offsets, int64_t count,
    const uint8_t *topic, int64_t topic_size, const uint8_t *key, int64_t key_size, int64_t kind, int64_t begin,
    int64_t end, int64_t *sizes, uint8_t *verdicts
) noexcept nogil:
    cdef int64_t matched = 0
    cdef int64_t index, at, stamp, value, value_end, token
    cdef Parts parts
    cdef Pair found
    for index in range(count):
        sizes[index] = 0
        verdicts[index] = NO_RECORD
        at = offsets[index] - base
        if at < 0 or at >= limit:
            continue
        if layout(log, at, limit, &parts) != OK or load8(log + at + PHYSICAL_OFFSET_OFFSET) != offsets[index]:
            continue
        sizes[index] = parts.total
        verdicts[index] = NO_MATCH
        stamp = load8(log + at + STORE_TIMESTAMP_OFFSET + parts.born)
        if stamp < begin or stamp > end:
            continue
        if parts.topic_size != topic_size or not same_bytes(log + parts.topic, topic, topic_size):
            continue
        if kind == BY_KEY:
            find_value(log, size, &parts, b"KEYS", 4, &found)
        elif kind == BY_UNIQUE_KEY:
            find_value(log, size, &parts, b"UNIQ_KEY", 8, &found)
        else:
            find_value(log, size, &parts, b"TAGS", 4, &found)
        value = found.value
        value_end = value + found.value_size
        while value < value_end:
            token = value_end
            if kind == BY_KEY:
                token = value
                while token < value_end and log[token] != 32:  # keys stand between spaces
                    token += 1
            if token - value == key_size and same_bytes(log + value, key, key_size):
                verdicts[index] = MATCH
                matched += 1
                break
            value = token + 1
    return matched


def match_keys(
    log, int64_t base, int64_t limit, offsets, topic, key, int64_t kind, int64_t begin, int64_t end, sizes, verdicts,
):
    """Compare the records at physical ``offsets``, all in the segment ``log`` that begins at ``base``; returns matches.

    A record matches when it is below position ``limit`` of the segment, its topic is ``topic``, its store time is in
    [``begin``, ``end``], and ``key`` is one of its KEYS, its UNIQ_KEY or its TAGS, as ``kind`` (BY_*) says.
    ``sizes[i]`` and ``verdicts[i]`` (NO_MATCH, MATCH, NO_RECORD) are set for each.
    """
    cdef const uint8_t *log_data = bytes_in(log)
    cdef int64_t log_size = length(log)
    cdef const int64_t *offsets_data = numbers_in(offsets)
    cdef int64_t offsets_size = length(offsets)
    cdef const uint8_t *topic_data = bytes_in(topic)
    cdef int64_t topic_size = length(topic)
    cdef const uint8_t *key_data = bytes_in(key)
    cdef int64_t key_size = length(key)
    cdef int64_t *sizes_data = numbers_out(sizes)
    cdef uint8_t *verdicts_data = bytes_out(verdicts)
    cdef int64_t matched
    with nogil:
        matched = match_keys_in(
            log_data, log_size, base, limit, offsets_data, offsets_size, topic_data, topic_size, key_data,
            key_size, kind, begin, end, sizes_data, verdicts_data,
        )
    return matched


# ---------------------------------------------------------------- marks of idempotent producers

cdef bint find_mark(const uint8_t *log, int64_t start, int64_t stop, int64_t *mark) noexcept nogil:
    """Fill the row ``mark`` from the mark that ends the properties ``log[start:stop]``, if there is one."""
    # Parsed from its end: 0x02, the digits of the sequence, a colon, the epoch, a colon, the id, the name before 0x01.
    cdef int64_t at = stop - 1 - MARK_DIGITS
    cdef int64_t sequence, end, name
    cdef int64_t epoch = 0
    cdef int64_t scale = 1
    cdef int64_t digits = 0
    if at - 10 < start or log[stop - 1] != 2 or log[at - 1] != 58:
        return False
    sequence = mark_number(log + at)
    if sequence < 0:
        return False
    at -= 2
    while at >= start and 48 <= log[at] <= 57 and digits < 18:
        epoch += (log[at] - 48) * scale
        scale *= 10
        digits += 1
        at -= 1
    if digits == 0 or at < start or log[at] != 58:
        return False
    end = at
    while at > start and log[at - 1] != 1 and log[at - 1] != 2:
        at -= 1
    name = at - 9
    if at == end or name < start or not same_bytes(log + name, b"__PSEQ__\x01", 9):
        return False
    if name > start and log[name - 1] != 2:
        return False
    mark[MARK_ID_START] = at
    mark[MARK_ID_SIZE] = end - at
    mark[MARK_EPOCH] = epoch
    mark[MARK_SEQUENCE] = sequence
    return True


def find_marks(log, properties, sizes, marks):
    """Find the mark (:mod:`commitmq.format.producer_mark`) of each record whose properties are
    ``log[properties[i]:properties[i] + sizes[i]]``.

    ``marks[i]`` becomes (position of the producer's id in ``log``, its bytes, epoch, sequence, whether the record
    before has the same id and epoch and the preceding sequence); sequence -1 where there is no mark. Returns the number
    of marks.
    """
    cdef const uint8_t *buf = bytes_in(log)
    cdef const int64_t *properties_data = numbers_in(properties)
    cdef int64_t properties_size = length(properties)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef int64_t *marks_data = table_out(marks)
    cdef Py_ssize_t marks_width = width(marks)
    cdef int64_t found = 0
    cdef int64_t index, stop
    cdef int64_t *mark
    cdef int64_t *before
    with nogil:
        for index in range(properties_size):
            mark = marks_data + index * marks_width + 0
            mark[MARK_ID_SIZE] = 0
            mark[MARK_SEQUENCE] = -1
            mark[MARK_FOLLOWS] = 0
            stop = properties_data[index] + sizes_data[index]
            if has_crc_slot(buf, properties_data[index], sizes_data[index]):
                stop -= CRC_PROPERTY_BYTES
            if not find_mark(buf, properties_data[index], stop, mark):
                continue
            found += 1
            if index == 0:
                continue
            before = mark - marks_width
            mark[MARK_FOLLOWS] = (
                mark[MARK_SEQUENCE] > 0
                and before[MARK_SEQUENCE] == mark[MARK_SEQUENCE] - 1
                and before[MARK_EPOCH] == mark[MARK_EPOCH]
                and before[MARK_ID_SIZE] == mark[MARK_ID_SIZE]
                and same_bytes(buf + before[MARK_ID_START], buf + mark[MARK_ID_START], mark[MARK_ID_SIZE])
            )
    return found


# ---------------------------------------------------------------- columns

def find_properties(log, positions, sizes, names, bounds, starts, lengths, whole):
    """Find the values of some properties in the records at ``positions`` of ``log``; returns how many records are whole.

    Name ``k`` is ``names[bounds[k]:bounds[k + 1]]``; its value in record ``i`` becomes
    ``log[starts[k, i]:starts[k, i] + lengths[k, i]]``, the last one when there are several (spec 2.5). ``whole[i]``
    (bool) says whether a record of ``sizes[i]`` bytes lies there at all.
    """
    cdef const uint8_t *buf = bytes_in(log)
    cdef int64_t size = length(log)
    cdef const int64_t *positions_data = numbers_in(positions)
    cdef int64_t positions_size = length(positions)
    cdef const int64_t *sizes_data = numbers_in(sizes)
    cdef const uint8_t *names_data = bytes_in(names)
    cdef const int64_t *bounds_data = numbers_in(bounds)
    cdef int64_t bounds_size = length(bounds)
    cdef int64_t *starts_data = table_out(starts)
    cdef Py_ssize_t starts_width = width(starts)
    cdef int64_t *lengths_data = table_out(lengths)
    cdef Py_ssize_t lengths_width = width(lengths)
    cdef uint8_t *is_whole = bools_out(whole)
    cdef int64_t wanted = bounds_size - 1
    cdef int64_t good = 0
    cdef int64_t index, number, at, position, stop
    cdef Parts parts
    cdef Pair pair
    with nogil:
        for index in range(positions_size):
            at = positions_data[index]
            is_whole[index] = False
            for number in range(wanted):
                starts_data[number * starts_width + index] = 0
                lengths_data[number * lengths_width + index] = 0
            if at < 0 or at > size or layout(buf, at, size, &parts) != OK or parts.total != sizes_data[index]:
                continue
            is_whole[index] = True
            good += 1
            stop = parts.properties + parts.properties_size
            position = next_pair(buf, size, parts.properties, stop, &pair)
            while position >= 0:
                for number in range(wanted):
                    if bounds_data[number + 1] - bounds_data[number] == pair.name_size and same_bytes(
                        buf + pair.name, names_data + bounds_data[number], pair.name_size
                    ):
                        starts_data[number * starts_width + index] = pair.value
                        lengths_data[number * lengths_width + index] = pair.value_size
                        break
                position = next_pair(buf, size, position, stop, &pair)
    return good


cdef bint text_matches(
    const uint8_t *text, int64_t size, const uint8_t *needle, int64_t needle_size, int64_t how
) noexcept nogil:
    cdef int64_t shift
    if needle_size > size:
        return False
    if how == EQUALS:
        return needle_size == size and same_bytes(text, needle, size)
    if how == STARTS_WITH:
        return same_bytes(text, needle, needle_size)
    if how == ENDS_WITH:
        return same_bytes(text + size - needle_size, needle, needle_size)
    for shift in range(size - needle_size + 1):
        if same_bytes(text + shift, needle, needle_size):
            return True
    return False


def text_tests(log, starts, lengths, needles, bounds, int64_t how, found):
    """Whether each value equals, contains, begins or ends with one of ``needles`` (by ``how``); absent ones never do."""
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *lengths_data = numbers_in(lengths)
    cdef const uint8_t *needles_data = bytes_in(needles)
    cdef const int64_t *bounds_data = numbers_in(bounds)
    cdef int64_t bounds_size = length(bounds)
    cdef uint8_t *hits = bools_out(found)
    cdef int64_t index, number
    with nogil:
        for index in range(starts_size):
            hits[index] = False
            if lengths_data[index] == 0:
                continue
            for number in range(bounds_size - 1):
                if text_matches(
                    log_data + starts_data[index], lengths_data[index], needles_data + bounds_data[number],
                    bounds_data[number + 1] - bounds_data[number], how,
                ):
                    hits[index] = True
                    break


def same_text(log, starts, lengths, other_starts, other_lengths, found):
    """Whether the values of two columns are both present and equal."""
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *lengths_data = numbers_in(lengths)
    cdef const int64_t *other_starts_data = numbers_in(other_starts)
    cdef const int64_t *other_lengths_data = numbers_in(other_lengths)
    cdef uint8_t *hits = bools_out(found)
    cdef int64_t index, size
    with nogil:
        for index in range(starts_size):
            size = lengths_data[index]
            hits[index] = (
                size > 0
                and size == other_lengths_data[index]
                and same_bytes(log_data + starts_data[index], log_data + other_starts_data[index], size)
            )


cdef uint8_t whole_number(
    const uint8_t *text, int64_t size, int64_t least, int64_t greatest, int64_t *value
) noexcept nogil:
    cdef bint negative = text[0] == 45
    cdef int64_t at = 1 if negative or text[0] == 43 else 0
    cdef int64_t number = 0  # counted downwards: the least integer has no positive counterpart
    cdef uint8_t state = NO_NUMBER if at == size else NUMBER
    cdef int64_t digit
    while at < size:
        if text[at] >= 128:
            state = UNDECIDED
            break
        digit = <int64_t>text[at] - 48
        if digit < 0 or digit > 9:
            # A character further on that is not ASCII changes nothing: this one is not a digit.
            state = NO_NUMBER
            break
        if number < INT64_MIN // 10 or (number == INT64_MIN // 10 and digit > 8):
            state = UNDECIDED
            break
        number = number * 10 - digit
        at += 1
    if state == NUMBER:
        if not negative:
            if number == INT64_MIN:
                state = NO_NUMBER
            else:
                number = -number
        if number < least or number > greatest:
            state = NO_NUMBER
    value[0] = number
    return state


def whole_numbers(log, starts, lengths, int64_t least, int64_t greatest, values, states):
    """Read values as integers in [least, greatest]: an optional sign and digits, nothing else, as Java's parsers do.

    ``states[i]`` becomes ABSENT, NUMBER (then ``values[i]`` holds it), NO_NUMBER or UNDECIDED.
    """
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *lengths_data = numbers_in(lengths)
    cdef int64_t *values_data = numbers_out(values)
    cdef uint8_t *states_data = bytes_out(states)
    cdef int64_t index
    with nogil:
        for index in range(starts_size):
            values_data[index] = 0
            states_data[index] = ABSENT
            if lengths_data[index]:
                states_data[index] = whole_number(log_data + starts_data[index], lengths_data[index], least, greatest, &values_data[index])


cdef double[23] TENS = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
]


cdef uint8_t decimal_number(const uint8_t *text, int64_t size, double *value) noexcept nogil:
    cdef bint negative = text[0] == 45
    cdef int64_t at = 1 if negative or text[0] == 43 else 0
    cdef int64_t exact = 1 << 53
    cdef int64_t mantissa = 0
    cdef int64_t digits = 0
    cdef int64_t scale = 0
    cdef int64_t exponent = 0
    cdef int64_t first
    cdef bint point = False
    cdef bint down
    cdef double number
    while at < size and mantissa < exact:
        if text[at] == 46 and not point:
            point = True
        elif 48 <= text[at] <= 57:
            mantissa = mantissa * 10 + text[at] - 48
            digits += 1
            scale -= point
        else:
            break
        at += 1
    if digits == 0 or mantissa >= exact:
        return UNDECIDED
    if at < size and (text[at] == 69 or text[at] == 101):
        at += 1
        down = at < size and text[at] == 45
        if at < size and (text[at] == 45 or text[at] == 43):
            at += 1
        first = at
        while at < size and 48 <= text[at] <= 57 and exponent < 1000:
            exponent = exponent * 10 + text[at] - 48
            at += 1
        if at == first:
            return UNDECIDED
        scale += -exponent if down else exponent
    if at < size or scale < -22 or scale > 22:
        return UNDECIDED
    number = <double>mantissa
    number = number * TENS[scale] if scale >= 0 else number / TENS[-scale]
    value[0] = -number if negative else number
    return NUMBER


def decimal_numbers(log, starts, lengths, values, states):
    """Read values as floating point numbers: digits with an optional sign, point and exponent.

    This function decides values that one exact multiplication or division gives correctly rounded: up to 2**53 of
    digits, powers of ten up to 22. All other values, and forms that only Java knows (``5d``, ``NaN``, surrounding
    blanks), are UNDECIDED.
    """
    cdef const uint8_t *log_data = bytes_in(log)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const int64_t *lengths_data = numbers_in(lengths)
    cdef double *values_data = floats_out(values)
    cdef uint8_t *states_data = bytes_out(states)
    cdef int64_t index
    with nogil:
        for index in range(starts_size):
            values_data[index] = 0.0
            states_data[index] = ABSENT
            if lengths_data[index]:
                states_data[index] = decimal_number(log_data + starts_data[index], lengths_data[index], &values_data[index])
