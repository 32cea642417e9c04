# Records for another topic and queue, made from records: what delay, retry and transactions do with a message.
#
# The writer makes the record that waits from the record that a client sent; a mover makes the record that is delivered
# from the one that waited. Body, flag, times and the born host stay; the fields that only the writer knows become zero.

# A pair of properties whose order changes. ``origin`` is the buffer that has it, ``latest`` the number of the pair that
# has the value, ``following`` that of the next pair of its bucket.
cdef struct OrderedPair:
    const uint8_t *origin
    int64_t name
    int64_t value
    int64_t end
    int64_t spread
    int64_t latest
    int64_t following


cdef int64_t collect_pairs(
    const uint8_t *buf, int64_t size, int64_t start, int64_t end, OrderedPair *pairs, int64_t count
) noexcept nogil:
    """Put the pairs of ``buf[start:end]`` behind the first ``count`` of ``pairs``.

    Returns the new count; -1 for malformed properties, -2 for more than fit.
    """
    cdef int64_t at = start
    cdef int64_t name, value
    cdef uint32_t hashed
    while at < end:
        name = at
        at = until_mark(buf, size, at, end)
        if at >= end or buf[at] != 1:
            return -1
        value = at + 1
        at = until_two(buf, size, value, end)
        if at >= end:
            return -1
        at += 1
        if at == value + 1:
            continue  # RocketMQ's decoder drops an empty value (spec 2.5)
        if count >= MAX_PAIRS:
            return -2
        hashed = hash_from(buf, name, value - 1, 0)
        pairs[count] = [buf, name, value, at, hashed ^ (hashed >> 16), count, -1]
        count += 1
    return count


cdef int64_t chain_pairs(
    OrderedPair *pairs, int64_t count, int64_t *heads, int64_t *tails, int64_t buckets
) noexcept nogil:
    """Chain ``count`` pairs in a table of ``buckets``. A name that comes again takes the place of the former one, whose
    ``latest`` says which pair has the value. Returns how many names there are.
    """
    cdef int64_t names = 0
    cdef int64_t index, place, size, at
    cdef OrderedPair *pair
    for index in range(buckets):
        heads[index] = -1
    for index in range(count):
        pair = pairs + index
        pair.latest = index
        place = pair.spread & (buckets - 1)
        size = pair.value - pair.name
        at = heads[place]
        while at >= 0:
            if (
                pairs[at].spread == pair.spread
                and pairs[at].value - pairs[at].name == size
                and same_bytes(pairs[at].origin + pairs[at].name, pair.origin + pair.name, size)
            ):
                break
            at = pairs[at].following
        if at >= 0:
            pairs[at].latest = index
            continue
        names += 1
        pair.following = -1
        if heads[place] < 0:
            heads[place] = index
        else:
            pairs[tails[place]].following = index
        tails[place] = index
    return names


cdef int64_t put_ordered(
    OrderedPair *pairs, int64_t count, uint8_t *out, int64_t at, int64_t room
) noexcept nogil:
    """Write the pairs to ``out[at:room]`` as a Java HashMap of capacity 128 iterates them. Returns the end in ``out``;
    -3 when there is no room.
    """
    cdef int64_t[2 * MAX_PAIRS] heads
    cdef int64_t[2 * MAX_PAIRS] tails
    cdef int64_t buckets = 128
    cdef int64_t place, index, size, rest
    cdef OrderedPair *named
    cdef OrderedPair *valued
    while count * 4 > buckets * 3:
        buckets *= 2
    # Some names may come twice, and need fewer buckets.
    while chain_pairs(pairs, count, heads, tails, buckets) * 4 <= buckets // 2 * 3 and buckets > 128:
        buckets = buckets // 2
    for place in range(buckets):
        index = heads[place]
        while index >= 0:
            named = pairs + index
            valued = pairs + named.latest
            size = named.value - named.name
            rest = valued.end - valued.value
            if at + size + rest > room:
                return -3
            memcpy(out + at, named.origin + named.name, size)
            memcpy(out + at + size, valued.origin + valued.value, rest)
            at += size + rest
            index = named.following
    return at


cdef int64_t readdress_records(
    const uint8_t *buf, int64_t buf_size, const int64_t *starts, int64_t count, const uint8_t *topic, int64_t topic_size,
    int64_t queue_id, bint store_v6, const uint8_t *more, int64_t more_size, const int64_t *more_ends, int64_t more_count,
    bint reorder, bint crc_slot, uint8_t *out, int64_t room, int64_t *ends, int64_t *result
) noexcept nogil:
    cdef OrderedPair[MAX_PAIRS] pairs
    cdef int64_t at = 0
    cdef int64_t host = HOST_V6_BYTES if store_v6 else HOST_BYTES
    cdef bint long_topic = topic_size > MAX_V1_TOPIC_BYTES
    cdef int64_t number, reason, size, flags, tries, place, text, end, begin, one, found
    cdef const uint8_t *record
    cdef Parts parts
    for number in range(count):
        result[0] = number
        result[1] = at
        record = buf + starts[number]
        reason = layout(buf, starts[number], buf_size, &parts)
        if reason != OK:
            return reason
        size = parts.properties_size
        if has_crc_slot(buf, parts.properties, size):
            size -= CRC_PROPERTY_BYTES
        memcpy(out + at, record, BORN_HOST_OFFSET + parts.born)
        store4(out + at + MAGIC_OFFSET, MAGIC_V2 if long_topic else MAGIC_V1)
        store4(out + at + QUEUE_ID_OFFSET, queue_id)
        store8(out + at + QUEUE_OFFSET_OFFSET, 0)
        store8(out + at + PHYSICAL_OFFSET_OFFSET, 0)
        flags = load4(record + SYS_FLAG_OFFSET) & ~<int64_t>SYS_FLAG_STORE_HOST_V6
        store4(out + at + SYS_FLAG_OFFSET, flags | SYS_FLAG_STORE_HOST_V6 if store_v6 else flags)
        tries = at + RECONSUME_TIMES_OFFSET + parts.born + host
        place = at + STORE_TIMESTAMP_OFFSET + parts.born
        memset(out + place, 0, tries - place)
        memcpy(out + tries, record + RECONSUME_TIMES_OFFSET + parts.born + parts.host, 4)
        store8(out + at + PREPARED_OFFSET_OFFSET + parts.born + host, 0)
        place = at + BODY_OFFSET + parts.born + host
        memcpy(out + place - 4, buf + parts.body - 4, parts.body_size + 4)
        place += parts.body_size
        if long_topic:
            store2(out + place, topic_size)
            place += 2
        else:
            out[place] = topic_size
            place += 1
        memcpy(out + place, topic, topic_size)
        place += topic_size
        text = place + 2
        if reorder:
            one = 0 if more_count == 1 else number
            begin = more_ends[one - 1] if one > 0 else 0
            found = collect_pairs(buf, buf_size, parts.properties, parts.properties + size, pairs, 0)
            if found >= 0:
                found = collect_pairs(more, more_size, begin, more_ends[one], pairs, found)
            if found < 0:
                return REASON_PROPERTIES if found == -1 else REASON_TOO_MANY_PAIRS
            end = put_ordered(pairs, found, out, text, room)
            if end < 0:
                return REASON_PROPERTIES_SIZE
        else:
            memcpy(out + text, buf + parts.properties, size)
            end = text + size
        if crc_slot:
            memcpy(out + end, <const char *>b"__CRC32#\x010000000000\x02", CRC_PROPERTY_BYTES)
            end += CRC_PROPERTY_BYTES
        if end - text > MAX_PROPERTIES_BYTES:
            return REASON_PROPERTIES_SIZE
        store2(out + place, end - text)
        store4(out + at, end - at)
        at = end
        ends[number] = at
    result[0] = count
    result[1] = at
    return OK


def readdress(
    buf, starts, topic, int64_t queue_id, bint store_v6, more, more_ends, bint reorder, bint crc_slot, out, ends,
    result,
):
    """Make a run for ``topic`` and ``queue_id`` in ``out`` from the records of ``buf`` that begin at ``starts``.

    ``reorder``: the properties are put into a Java HashMap, with those of record i in ``more[more_ends[i - 1]:
    more_ends[i]]`` (of all records, when there is one end only) put behind. Without it they stay as they are.
    ``crc_slot``: each record ends with an empty ``__CRC32#`` slot; a former one is left out in any case. ``store_v6``:
    the store hosts of the new records have IPv6 layout. Fills ``ends``; ``result[0]`` becomes the number of records made,
    ``result[1]`` the end of the last one. Returns OK, or the reason why the next record cannot be made.
    """
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef int64_t buf_size = length(buf)
    cdef const int64_t *starts_data = numbers_in(starts)
    cdef int64_t starts_size = length(starts)
    cdef const uint8_t *topic_data = bytes_in(topic)
    cdef int64_t topic_size = length(topic)
    cdef const uint8_t *more_data = bytes_in(more)
    cdef int64_t more_size = length(more)
    cdef const int64_t *more_ends_data = numbers_in(more_ends)
    cdef int64_t more_ends_size = length(more_ends)
    cdef uint8_t *out_data = bytes_out(out)
    cdef int64_t out_size = length(out)
    cdef int64_t *ends_data = numbers_out(ends)
    cdef int64_t *result_data = numbers_out(result)
    cdef int64_t reason
    with nogil:
        reason = readdress_records(
            buf_data, buf_size, starts_data, starts_size, topic_data, topic_size, queue_id, store_v6, more_data,
            more_size, more_ends_data, more_ends_size, reorder, crc_slot, out_data, out_size, ends_data,
            result_data,
        )
    return reason
