# Runs: checks a run that a client sent, and copies it into the log (ARCHITECTURE section 4). Client batches (spec 2.8):
# checks them, and makes records of their messages.
#
# A run is CommitLog records of one topic and queue, encoded by the client; fields that only the writer knows are zeros.

cdef int64_t utf8_error_in(const uint8_t *buf, int64_t at, int64_t end) noexcept nogil:
    """Position of the first byte that is not UTF-8 (RFC 3629: no overlong forms, no surrogates); -1 when all is valid."""
    cdef uint8_t first, second
    cdef int64_t more, index
    while at < end:
        if at + 8 <= end and not word8(buf + at) & HIGH_BITS:
            at += 8
            continue
        first = buf[at]
        if first < 0x80:
            at += 1
            continue
        if 0xC2 <= first <= 0xDF:
            more = 1
        elif 0xE0 <= first <= 0xEF:
            more = 2
        elif 0xF0 <= first <= 0xF4:
            more = 3
        else:
            return at
        if at + more >= end:
            return at
        second = buf[at + 1]
        if (
            (first == 0xE0 and second < 0xA0)
            or (first == 0xED and second > 0x9F)
            or (first == 0xF0 and second < 0x90)
            or (first == 0xF4 and second > 0x8F)
        ):
            return at
        for index in range(1, more + 1):
            if buf[at + index] & 0xC0 != 0x80:
                return at
        at += more + 1
    return -1


cdef inline int64_t mark_number(const uint8_t *digits) noexcept nogil:
    """The number in the MARK_DIGITS digits; -1 when one is not a digit."""
    cdef int64_t value = 0
    cdef int index
    for index in range(MARK_DIGITS):
        if digits[index] < 48 or digits[index] > 57:
            return -1
        value = value * 10 + digits[index] - 48
    return value


# Names of properties, one after the other in ``text``, and their ends.
cdef struct Names:
    const uint8_t *text
    const int64_t *ends
    int64_t count
    uint64_t sieve  # a word with a bit for each name: it excludes most other names without a comparison
    int64_t special_from  # the names from this number on are allowed


cdef inline uint64_t sieve_bit(int64_t size, uint8_t first) noexcept nogil:
    """The bit of a sieve for names of ``size`` bytes that begin with the byte ``first``."""
    return <uint64_t>1 << ((size * 5 + first) & 63)


cdef inline void fill_sieve(Names *names) noexcept nogil:
    cdef int64_t begin = 0
    cdef int64_t index
    names.sieve = 0
    for index in range(names.count):
        if names.ends[index] > begin:
            names.sieve |= sieve_bit(names.ends[index] - begin, names.text[begin])
        begin = names.ends[index]


cdef int64_t pairs_reason(
    const uint8_t *buf, int64_t whole, int64_t start, int64_t end, const Names *names, int64_t *specials
) noexcept nogil:
    """Why ``buf[start:end]`` is no well-formed properties without a forbidden name. Each special name that is there sets
    its bit in ``specials``. ``whole``: the size of the buffer.
    """
    cdef int64_t at = start
    cdef int64_t name, size, begin, index, value, zeros
    while at < end:
        name = at
        at = until_low(buf, whole, at, end)
        if at >= end or buf[at] != 1 or at == name:
            return REASON_PROPERTIES
        size = at - name
        if names.sieve & sieve_bit(size, buf[name]):
            begin = 0
            for index in range(names.count):
                if names.ends[index] - begin == size and same_bytes(names.text + begin, buf + name, size):
                    if index < names.special_from:
                        return REASON_FORBIDDEN_PROPERTY
                    specials[0] |= <int64_t>1 << (index - names.special_from)
                begin = names.ends[index]
        value = at + 1
        at = until_low(buf, whole, value, end)
        while at < end and buf[at] == 0:  # a value may have zeros if a recovery can tell them from a lost sector
            zeros = at
            while at < end and buf[at] == 0:
                at += 1
            if at - zeros >= SECTOR_BYTES:
                return REASON_ZEROS
            at = until_low(buf, whole, at, end)
        if at >= end or buf[at] != 2 or at == value:
            return REASON_PROPERTIES
        at += 1
    if not is_ascii(buf, start, end) and utf8_error_in(buf, start, end) >= 0:
        return REASON_UTF8
    return OK


def properties_reason(buf, int64_t start, int64_t end, names, name_ends):
    """Whether ``buf[start:end]`` is well-formed properties (``name 1 value 2`` repeated) without a forbidden name.

    ``names`` are the forbidden names, one after the other; ``name_ends`` their ends. Returns a reason, OK when valid.
    """
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef int64_t buf_size = length(buf)
    cdef const uint8_t *names_data = bytes_in(names)
    cdef const int64_t *name_ends_data = numbers_in(name_ends)
    cdef int64_t name_ends_size = length(name_ends)
    cdef int64_t reason, specials = 0
    cdef Names forbidden = [names_data, name_ends_data, name_ends_size, 0, name_ends_size]
    with nogil:
        fill_sieve(&forbidden)
        reason = pairs_reason(buf_data, buf_size, start, end, &forbidden, &specials)
    return reason


# What every record of a run must have.
cdef struct Rules:
    const uint8_t *topic
    int64_t topic_size
    int64_t queue_id
    int64_t max_body
    int64_t max_record
    int64_t v6_flags
    bint crc_slot
    bint moved
    const uint8_t *mark
    int64_t mark_size
    int64_t sequence


cdef int64_t check_records(
    const uint8_t *buf, int64_t size, const Rules *rules, const Names *names, int64_t *ends, int64_t *out
) noexcept nogil:
    cdef int64_t at = 0
    cdef int64_t count = 0
    cdef int64_t client_flags = SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_MASK
    cdef int64_t v6 = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
    cdef int64_t allowed = client_flags | v6
    cdef int64_t flags, reason, stop
    cdef const uint8_t *record
    cdef Parts parts
    if rules.moved:
        allowed |= SYS_FLAG_TRANSACTION_MASK
    out[2] = 0
    while at < size:
        out[0] = count
        out[1] = at
        reason = layout(buf, at, size, &parts)
        if reason != OK:
            return reason
        if parts.total > rules.max_record:
            return REASON_RECORD_SIZE
        if parts.body_size > rules.max_body:
            return REASON_BODY_SIZE
        if parts.topic_size != rules.topic_size or not same_bytes(buf + parts.topic, rules.topic, parts.topic_size):
            return REASON_TOPIC
        record = buf + at
        if load4(record + QUEUE_ID_OFFSET) != rules.queue_id:
            return REASON_QUEUE
        flags = load4(record + SYS_FLAG_OFFSET)
        if (
            flags & ~allowed
            or (flags & SYS_FLAG_COMPRESSION_MASK) > SYS_FLAG_COMPRESSION_ZLIB
            or (flags & client_flags) == SYS_FLAG_COMPRESSION_LZ4  # the type of a compression, and no compression
            or (flags & v6) != rules.v6_flags
        ):
            return REASON_SYS_FLAG
        if (
            load8(record + QUEUE_OFFSET_OFFSET) != 0
            or load8(record + PHYSICAL_OFFSET_OFFSET) != 0
            or load8(record + STORE_TIMESTAMP_OFFSET + parts.born) != 0
            or (load8(record + PREPARED_OFFSET_OFFSET + parts.born + parts.host) != 0 and not rules.moved)
            or load4(record + RECONSUME_TIMES_OFFSET + parts.born + parts.host) < 0
            or load8(record + BORN_TIMESTAMP_OFFSET) < 0
        ):
            return REASON_RESERVED_FIELD
        stop = parts.properties + parts.properties_size
        if rules.crc_slot:
            if not has_crc_slot(buf, parts.properties, parts.properties_size):
                return REASON_CRC_SLOT
            stop -= CRC_PROPERTY_BYTES
        if rules.mark_size:
            stop -= rules.mark_size + MARK_DIGITS + 1
            if (
                stop < parts.properties
                or not same_bytes(buf + stop, rules.mark, rules.mark_size)
                or buf[stop + rules.mark_size + MARK_DIGITS] != 2
                or mark_number(buf + stop + rules.mark_size) != rules.sequence + count
            ):
                return REASON_SEQUENCE
        reason = pairs_reason(buf, size, parts.properties, stop, names, out + 2)
        if reason != OK:
            return reason
        if load4(record + BODY_CRC_OFFSET) != stored_crc(buf + parts.body, parts.body_size):
            return REASON_BODY_CRC
        at += parts.total
        ends[count] = at
        count += 1
    out[0] = count
    out[1] = at
    return OK if count else REASON_LENGTHS


def check_run(
    buf, topic, int64_t queue_id, int64_t max_body, int64_t max_record, int64_t v6_flags, bint crc_slot, names,
    name_ends, int64_t special_from, bint moved, mark, int64_t sequence, ends, out,
):
    """Check every record of the run ``buf``. The input is untrusted.

    ``ends[i]`` becomes the end of record i in the run (int64, at least ``buf.size // MIN_RECORD_BYTES + 1`` long),
    ``out[0]`` the number of good records, ``out[1]`` the position of the first bad one, ``out[2]`` a bit for each name
    from number ``special_from`` on that a record carries; the names before it are forbidden. ``v6_flags`` are the
    sysFlag bits 0x30 that the layout must have; ``crc_slot`` says whether each record must end with an empty
    ``__CRC32#`` slot. ``moved``: the records come from a mover of this node, which may set the born host, the
    transaction bits, the number of tries and the prepared offset. Unless ``mark`` is empty, record i must carry it,
    with the number ``sequence`` + i, as its last property (before that slot). Returns OK or the reason.
    """
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef int64_t buf_size = length(buf)
    cdef const uint8_t *topic_data = bytes_in(topic)
    cdef int64_t topic_size = length(topic)
    cdef const uint8_t *names_data = bytes_in(names)
    cdef const int64_t *name_ends_data = numbers_in(name_ends)
    cdef int64_t name_ends_size = length(name_ends)
    cdef const uint8_t *mark_data = bytes_in(mark)
    cdef int64_t mark_size = length(mark)
    cdef int64_t *ends_data = numbers_out(ends)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t reason
    cdef Names known = [names_data, name_ends_data, name_ends_size, 0, special_from]
    cdef Rules rules = [
        topic_data, topic_size, queue_id, max_body, max_record, v6_flags, crc_slot, moved, mark_data, mark_size,
        sequence,
    ]
    with nogil:
        fill_sieve(&known)
        reason = check_records(buf_data, buf_size, &rules, &known, ends_data, out_data)
    return reason


cdef void store_records(
    const uint8_t *source, int64_t size, uint8_t *target, int64_t position, int64_t queue_offset, int64_t store_timestamp,
    const uint8_t *born_host, int64_t born_size, bint keep_born, const uint8_t *store_host, int64_t store_size,
    bint crc_slot
) noexcept nogil:
    """``position``: the physical offset of ``target``."""
    cdef int64_t at = 0
    cdef int64_t total, value, index
    cdef uint8_t *record
    cdef uint8_t *stamp
    cdef uint8_t *slot
    memcpy(target + 8, source + 8, size - 8)
    while at < size:
        total = load4(source + at)
        record = target + at
        store8(record + QUEUE_OFFSET_OFFSET, queue_offset)
        store8(record + PHYSICAL_OFFSET_OFFSET, position + at)
        if not keep_born:
            memcpy(record + BORN_HOST_OFFSET, born_host, born_size)
        stamp = record + STORE_TIMESTAMP_OFFSET + born_size
        store8(stamp, store_timestamp)
        memcpy(stamp + 8, store_host, store_size)
        if crc_slot:
            # The CRC covers size and magic, which for the first record are so far only in the run.
            value = crc_of(record + 8, total - CRC_PROPERTY_BYTES - 8, crc_of(source + at, 8, 0)) & 0x7FFFFFFF
            slot = record + total - CRC_PROPERTY_BYTES + 9
            for index in range(10):
                slot[index] = 48 + value % 10
                value = value // 10
        at += total
        queue_offset += 1


def store_run(
    run, int64_t start, int64_t end, segment, int64_t at, int64_t base_offset, int64_t queue_offset,
    int64_t store_timestamp, born_host, bint keep_born, store_host, bint crc_slot,
):
    """Copy the checked records ``run[start:end]`` to ``segment[at:]`` and fill in the fields that only the writer
    knows.

    The first record's size and magic (8 bytes) stay zero in the segment: the caller stores them last, so that a writer
    killed anywhere in here leaves nothing that a reader takes for a record. Fills queueOffset, physicalOffset
    (``base_offset`` + position in the segment), storeTimestamp, hosts and the digits of ``__CRC32#``. ``keep_born``: the
    born hosts of the run stay, and ``born_host`` only says how long they are.
    """
    cdef const uint8_t *run_data = bytes_in(run)
    cdef uint8_t *segment_data = bytes_out(segment)
    cdef const uint8_t *born_host_data = bytes_in(born_host)
    cdef int64_t born_host_size = length(born_host)
    cdef const uint8_t *store_host_data = bytes_in(store_host)
    cdef int64_t store_host_size = length(store_host)
    with nogil:
        store_records(
            run_data + start, end - start, segment_data + at, base_offset + at, queue_offset, store_timestamp, born_host_data,
            born_host_size, keep_born, store_host_data, store_host_size, crc_slot,
        )


# ---------------------------------------------------------------- client batches

# One message in a client batch.
cdef struct Element:
    int64_t total
    int64_t body_size
    int64_t properties_size


cdef inline int64_t element_at(const uint8_t *buf, int64_t at, int64_t end, Element *element) noexcept nogil:
    """Find the sizes of the message at ``at`` of a batch that ends at ``end``; returns the reason if it is none."""
    if end - at < ELEMENT_BYTES:
        return REASON_SHORT
    element.total = load4(buf + at)
    if element.total < ELEMENT_BYTES or element.total > end - at:
        return REASON_SHORT
    element.body_size = load4(buf + at + ELEMENT_BODY_SIZE_OFFSET)
    if element.body_size < 0 or element.body_size > element.total - ELEMENT_BYTES:
        return REASON_LENGTHS
    element.properties_size = load2(buf + at + ELEMENT_BODY_OFFSET + element.body_size)
    if element.properties_size < 0 or ELEMENT_BYTES + element.body_size + element.properties_size != element.total:
        return REASON_LENGTHS
    return OK


cdef int64_t check_elements(const uint8_t *buf, int64_t size, const Names *names, int64_t *out) noexcept nogil:
    cdef int64_t at = 0
    cdef int64_t count = 0
    cdef int64_t reason, stop
    cdef Element element
    while at < size:
        out[0] = count
        out[1] = at
        reason = element_at(buf, at, size, &element)
        # The reserved fields are judged before the lengths.
        if reason != REASON_SHORT and (
            load4(buf + at + ELEMENT_MAGIC_OFFSET) != 0 or load4(buf + at + ELEMENT_CRC_OFFSET) != 0
        ):
            return REASON_RESERVED_FIELD
        if reason != OK:
            return reason
        stop = at + element.total
        reason = pairs_reason(buf, size, stop - element.properties_size, stop, names, out + 2)
        if reason != OK:
            return reason
        at = stop
        count += 1
    out[0] = count
    out[1] = at
    return OK if count else REASON_LENGTHS


def check_batch(buf, names, name_ends, out):
    """Check every message of the client batch ``buf`` (spec 2.8). The input is untrusted.

    ``names`` and ``name_ends``: the forbidden properties, as for :func:`properties_reason`. ``out[0]`` becomes the
    number of good messages, ``out[1]`` the position of the first bad one. Returns OK or the reason.
    """
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef int64_t buf_size = length(buf)
    cdef const uint8_t *names_data = bytes_in(names)
    cdef const int64_t *name_ends_data = numbers_in(name_ends)
    cdef int64_t name_ends_size = length(name_ends)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t reason
    cdef Names forbidden = [names_data, name_ends_data, name_ends_size, 0, name_ends_size]
    with nogil:
        fill_sieve(&forbidden)
        reason = check_elements(buf_data, buf_size, &forbidden, out_data)
    return reason


cdef int64_t measure_elements(
    const uint8_t *buf, int64_t size, int64_t max_body, int64_t max_properties, int64_t empty_record, int64_t *out
) noexcept nogil:
    cdef int64_t at = 0
    cdef int64_t count = 0
    cdef int64_t reason
    cdef Element element
    out[2] = 0
    while at < size:
        out[0] = count
        out[1] = at
        reason = element_at(buf, at, size, &element)
        if reason == REASON_SHORT:
            return reason
        # A body that is too large is named even where the lengths are wrong behind it.
        if max_body < element.body_size <= element.total - ELEMENT_BYTES:
            return REASON_BODY_SIZE
        if reason != OK:
            return reason
        if element.properties_size and buf[at + element.total - 1] != 2:
            element.properties_size += 1  # for the byte that ends the last property
        if element.properties_size > max_properties:
            return REASON_PROPERTIES_SIZE
        out[2] += empty_record + element.body_size + element.properties_size
        at += element.total
        count += 1
    out[0] = count
    out[1] = at
    return OK if count else REASON_LENGTHS


def measure_batch(buf, int64_t max_body, int64_t max_properties, int64_t empty_record, out):
    """Check the sizes of all messages of the client batch ``buf``. The input is untrusted; magic and CRC are ignored, as
    RocketMQ does.

    ``empty_record``: bytes of a record without body and properties. ``out[0]`` becomes the number of good messages,
    ``out[1]`` the position of the first bad one, ``out[2]`` the bytes of their records. Returns OK or the reason.
    """
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef int64_t buf_size = length(buf)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t reason
    with nogil:
        reason = measure_elements(buf_data, buf_size, max_body, max_properties, empty_record, out_data)
    return reason


cdef void encode_elements(
    const uint8_t *buf, int64_t size, const uint8_t *head, int64_t head_size, const uint8_t *topic, int64_t topic_size,
    const uint8_t *slot, int64_t slot_size, uint8_t *run, int64_t *sizes
) noexcept nogil:
    cdef int64_t at = 0
    cdef int64_t count = 0
    cdef int64_t total, body_size, properties_size, stored
    cdef bint closing
    cdef uint8_t *place
    while at < size:
        total = load4(buf + at)
        body_size = load4(buf + at + ELEMENT_BODY_SIZE_OFFSET)
        properties_size = total - ELEMENT_BYTES - body_size
        closing = properties_size and buf[at + total - 1] != 2
        stored = properties_size + closing + slot_size
        sizes[count] = head_size + body_size + topic_size + 2 + stored
        memcpy(run, head, head_size)
        store4(run + SIZE_OFFSET, sizes[count])
        if body_size:
            store4(run + BODY_CRC_OFFSET, stored_crc(buf + at + ELEMENT_BODY_OFFSET, body_size))
        memcpy(run + FLAG_OFFSET, buf + at + ELEMENT_FLAG_OFFSET, 4)
        place = run + head_size
        store4(place - 4, body_size)
        memcpy(place, buf + at + ELEMENT_BODY_OFFSET, body_size)
        place += body_size
        memcpy(place, topic, topic_size)
        place += topic_size
        store2(place, stored)
        place += 2
        memcpy(place, buf + at + total - properties_size, properties_size)
        place += properties_size
        if closing:
            place[0] = 2
            place += 1
        memcpy(place, slot, slot_size)
        run += sizes[count]
        at += total
        count += 1


def encode_batch(buf, head, topic, slot, run, sizes):
    """Make the records of the messages in ``buf``, which :func:`measure_batch` has measured.

    ``head``: a record up to its body; ``topic``: the topic with its length; ``slot``: what ends the properties.
    ``run`` has the measured size, ``sizes`` gets the size of each record. The records differ in their sizes, CRCs,
    flags, bodies and properties; everything else is copied from ``head``.
    """
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef int64_t buf_size = length(buf)
    cdef const uint8_t *head_data = bytes_in(head)
    cdef int64_t head_size = length(head)
    cdef const uint8_t *topic_data = bytes_in(topic)
    cdef int64_t topic_size = length(topic)
    cdef const uint8_t *slot_data = bytes_in(slot)
    cdef int64_t slot_size = length(slot)
    cdef uint8_t *run_data = bytes_out(run)
    cdef int64_t *sizes_data = numbers_out(sizes)
    with nogil:
        encode_elements(
            buf_data, buf_size, head_data, head_size, topic_data, topic_size, slot_data, slot_size, run_data,
            sizes_data,
        )
