# CRC-32, the layout of one record (spec 2.1), and the scan of records with bodies and CRCs.
#
# CRC-32 is ISA-L's, taken from the ``isal`` wheel by symbol, because a Python call for each record costs more than the CRC
# itself: 1 KiB takes about 0.06 us in ISA-L, 0.4 us in zlib and in the table loop below. Builds of isal that hide the
# symbol fall back to that table loop (slicing by 16), which gives the same values.

ctypedef uint32_t (*CrcFunction)(uint32_t seed, const uint8_t *buf, uint64_t size) noexcept nogil

cdef uint32_t[16][256] crc_tables


cdef void fill_crc_tables() noexcept nogil:
    cdef uint32_t value
    cdef int byte, number
    for byte in range(256):
        value = byte
        for number in range(8):
            value = (value >> 1) ^ (0xEDB88320U if value & 1 else 0U)
        crc_tables[0][byte] = value
    for number in range(1, 16):
        for byte in range(256):
            value = crc_tables[number - 1][byte]
            crc_tables[number][byte] = (value >> 8) ^ crc_tables[0][value & 255]


cdef uint32_t crc_by_tables(uint32_t seed, const uint8_t *buf, uint64_t size) noexcept nogil:
    cdef uint32_t crc = ~seed
    cdef uint32_t folded
    cdef int index
    while size >= 16:
        folded = 0
        for index in range(16):
            folded ^= crc_tables[15 - index][buf[index] ^ ((crc >> (8 * index)) & 255 if index < 4 else 0)]
        crc = folded
        buf += 16
        size -= 16
    while size:
        crc = crc_tables[0][(crc ^ buf[0]) & 255] ^ (crc >> 8)
        buf += 1
        size -= 1
    return ~crc


cdef size_t isal_address() except? 0:
    try:
        function = getattr(ctypes.CDLL(isal_zlib.__file__), "crc32_gzip_refl")
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value


fill_crc_tables()
cdef CrcFunction crc_function = <CrcFunction>isal_address()
if crc_function == NULL:
    crc_function = crc_by_tables


cdef inline uint32_t crc_of(const uint8_t *buf, int64_t size, uint32_t seed) noexcept nogil:
    return crc_function(seed, buf, size)


cdef inline int64_t stored_crc(const uint8_t *buf, int64_t size) noexcept nogil:
    """The CRC-32 as a record has it: without its highest bit, and 0 for no bytes."""
    return crc_function(0, buf, size) & 0x7FFFFFFF if size else 0


def crc32_tables(buf, int64_t start, int64_t size, uint32_t seed):
    """CRC-32 of ``buf[start:start+size]`` continuing from ``seed``, by sixteen tables."""
    cdef const uint8_t *buf_data = bytes_in(buf)
    return crc_by_tables(seed, buf_data + start, size)


def crc32(buf, int64_t start, int64_t size, uint32_t seed):
    """CRC-32 of ``buf[start:start+size]`` continuing from ``seed`` (0 to begin), as ``zlib.crc32``."""
    cdef const uint8_t *buf_data = bytes_in(buf)
    cdef uint32_t crc
    with nogil:
        crc = crc_function(seed, buf_data + start, size)
    return crc


def sum_of_crcs(buffer, offsets, sizes):
    """Sum of the CRC-32 of each ``buffer[offsets[i] : offsets[i] + sizes[i]]``; it does not depend on their order."""
    cdef const uint8_t *data = bytes_in(buffer)
    cdef const int64_t *places = numbers_in(offsets)
    cdef const int32_t *lengths = words_in(sizes)
    cdef int64_t count = length(offsets)
    cdef int64_t total = 0
    cdef int64_t index
    with nogil:
        for index in range(count):
            total += crc_function(0, data + places[index], lengths[index])
    return total


# The parts of a record; starts are positions in the buffer, sizes bytes.
cdef struct Parts:
    int64_t total
    int64_t born  # bytes of the born host
    int64_t host  # bytes of the store host
    int64_t body
    int64_t body_size
    int64_t topic
    int64_t topic_size
    int64_t properties
    int64_t properties_size


cdef inline int64_t layout(const uint8_t *buf, int64_t at, int64_t end, Parts *parts) noexcept nogil:
    """Find the parts of the record at ``at``, if all of it is below ``end``; returns the reason if it is none.

    Only the length chain and magic are checked. Parts behind the one that is wrong are not set.
    """
    if at + MIN_RECORD_BYTES > end:
        return REASON_SHORT
    cdef int64_t total = load4(buf + at)
    cdef int64_t magic = load4(buf + at + MAGIC_OFFSET)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        return REASON_MAGIC
    if total < MIN_RECORD_BYTES or at + total > end:
        return REASON_SHORT
    cdef int64_t stop = at + total
    cdef int64_t flags = load4(buf + at + SYS_FLAG_OFFSET)
    parts.total = total
    parts.born = HOST_V6_BYTES if flags & SYS_FLAG_BORN_HOST_V6 else HOST_BYTES
    parts.host = HOST_V6_BYTES if flags & SYS_FLAG_STORE_HOST_V6 else HOST_BYTES
    cdef int64_t body = at + BODY_OFFSET + parts.born + parts.host
    if body + 3 > stop:
        # With IPv6 hosts the fields before the body need more than the bytes checked so far; the buffer may end behind
        # them, and a mapping with it.
        return REASON_LENGTHS
    cdef int64_t body_size = load4(buf + body - 4)
    cdef int64_t after = body + body_size
    if body_size < 0 or after + 3 > stop:
        return REASON_LENGTHS
    cdef int64_t topic_size
    cdef int64_t topic
    if magic == MAGIC_V1:
        topic_size = <int8_t>buf[after]
        topic = after + 1
    else:
        topic_size = load2(buf + after)
        topic = after + 2
    after = topic + topic_size
    if topic_size <= 0 or after + 2 > stop:
        return REASON_LENGTHS
    cdef int64_t properties_size = load2(buf + after)
    if properties_size < 0 or after + 2 + properties_size != stop:
        return REASON_LENGTHS
    parts.body = body
    parts.body_size = body_size
    parts.topic = topic
    parts.topic_size = topic_size
    parts.properties = after + 2
    parts.properties_size = properties_size
    return OK


cdef inline bint has_crc_slot(const uint8_t *buf, int64_t properties, int64_t properties_size) noexcept nogil:
    """True when the properties end with ``__CRC32#`` 0x01, ten bytes, 0x02 (spec 2.9)."""
    if properties_size < CRC_PROPERTY_BYTES:
        return False
    buf += properties + properties_size - CRC_PROPERTY_BYTES
    return same_bytes(buf, b"__CRC32#", 8) and buf[8] == 1 and buf[CRC_PROPERTY_BYTES - 1] == 2


cdef inline int64_t crc_slot_value(const uint8_t *slot) noexcept nogil:
    """The value of the ten digits, least significant first; -1 when one is not a digit."""
    cdef int64_t value = 0
    cdef int index
    for index in range(18, 8, -1):
        if slot[index] < 48 or slot[index] > 57:
            return -1
        value = value * 10 + slot[index] - 48
    return value


cdef inline int64_t record_crc_reason(const uint8_t *buf, int64_t at, int64_t total) noexcept nogil:
    """OK, or the reason why the record, which has a ``__CRC32#``, does not match it."""
    cdef int64_t covered = total - CRC_PROPERTY_BYTES
    return OK if stored_crc(buf + at, covered) == crc_slot_value(buf + at + covered) else REASON_RECORD_CRC


# ---------------------------------------------------------------- scan

cdef bint lacks_sector(const uint8_t *segment, int64_t start, int64_t stop, int64_t base_offset) noexcept nogil:
    """Whether all bytes that some sector has in ``segment[start:stop]`` are zeros; segments begin at a sector's start."""
    cdef int64_t at = start
    cdef int64_t end, index
    while at < stop:
        end = min(stop, at + SECTOR_BYTES - (base_offset + at) % SECTOR_BYTES)
        index = at
        while index < end and segment[index] == 0:
            index += 1
        if index == end:
            return True
        at = end
    return False


cdef int64_t scan_records(
    const uint8_t *segment, int64_t start, int64_t stop, int64_t end, int64_t base_offset, bint require_crc, int64_t *out
) noexcept nogil:
    cdef int64_t at = start
    cdef int64_t index, reason
    cdef Parts parts
    out[0] = 0
    out[1] = start
    out[2] = -1
    out[3] = 0
    out[4] = OK
    while at < stop:
        if at + FILLER_BYTES <= end and load4(segment + at + MAGIC_OFFSET) == MAGIC_FILLER:
            return WALK_BLANK
        reason = layout(segment, at, end, &parts)
        if reason == OK and load8(segment + at + PHYSICAL_OFFSET_OFFSET) != base_offset + at:
            reason = REASON_PHYSICAL_OFFSET
        if reason == OK and stored_crc(segment + parts.body, parts.body_size) != load4(segment + at + BODY_CRC_OFFSET):
            reason = REASON_BODY_CRC
        if reason == OK:
            if has_crc_slot(segment, parts.properties, parts.properties_size):
                reason = record_crc_reason(segment, at, parts.total)
            elif require_crc:
                reason = REASON_RECORD_CRC_MISSING
            else:
                # Without that CRC a sector that never reached the disk still shows: it reads as zeros. No topic
                # contains zeros; a property's value may, but not in all bytes that a sector has of the properties.
                for index in range(parts.topic, parts.topic + parts.topic_size):
                    if segment[index] == 0:
                        reason = REASON_PROPERTIES
                if lacks_sector(segment, parts.properties, parts.properties + parts.properties_size, base_offset):
                    reason = REASON_PROPERTIES
        if reason != OK:
            out[4] = reason
            return WALK_BAD
        out[0] += 1
        out[2] = at
        out[3] = load8(segment + at + STORE_TIMESTAMP_OFFSET + parts.born)
        at += parts.total
        out[1] = at
    out[4] = REASON_SHORT
    return WALK_LIMIT


def scan_until(segment, int64_t start, int64_t stop, int64_t end, int64_t base_offset, bint require_crc, out):
    """Like :func:`scan`, for the records that begin in ``segment[start:stop]``; the last one may extend to ``end``."""
    cdef const uint8_t *segment_data = bytes_in(segment)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t result
    with nogil:
        result = scan_records(segment_data, start, stop, end, base_offset, require_crc, out_data)
    return result


def scan(segment, int64_t start, int64_t end, int64_t base_offset, bint require_crc, out):
    """Check records of ``segment[start:end]`` one by one, bodies and CRCs included, as a recovery does (spec 8.3).

    A record is good when its length chain, magic, physical offset and body CRC are right, and its ``__CRC32#`` too if
    it has one; with ``require_crc`` it must have one. ``out`` becomes (records, end of the last good one, its start,
    its store timestamp, reason of the stop). Returns WALK_LIMIT, WALK_BLANK or WALK_BAD.
    """
    cdef const uint8_t *segment_data = bytes_in(segment)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t result
    with nogil:
        result = scan_records(segment_data, start, end, end, base_offset, require_crc, out_data)
    return result


cdef int64_t find_record_in(
    const uint8_t *segment, int64_t size, int64_t start, int64_t stop, int64_t base_offset, int64_t budget, int64_t *out
) noexcept nogil:
    cdef int64_t at
    cdef uint8_t first = (MAGIC_V1 >> 24) & 255
    cdef uint8_t second = (MAGIC_V1 >> 16) & 255
    cdef uint8_t third = (MAGIC_V1 >> 8) & 255  # both magics begin with these bytes
    for at in range(start, min(stop, size - MIN_RECORD_BYTES + 1)):
        if segment[at + 4] != first or segment[at + 5] != second or segment[at + 6] != third:
            continue
        if load8(segment + at + PHYSICAL_OFFSET_OFFSET) != base_offset + at:
            continue
        scan_records(segment, at, at + 1, size, base_offset, False, out)
        if out[0] == 1:
            return at
        if out[4] == REASON_BODY_CRC or out[4] == REASON_RECORD_CRC or out[4] == REASON_PROPERTIES:
            budget -= load4(segment + at)
            if budget < 0:
                return -2
    return -1


def find_record(segment, int64_t start, int64_t stop, int64_t base_offset, int64_t budget, out):
    """Position of the first complete record that begins in ``segment[start:stop]``; -1 if there is none.

    A body may hold anything, even bytes that look like a record: only a record with its own physical offset and right
    CRCs counts. Checking CRCs of false candidates may cost ``budget`` bytes; -2 when they are used up. ``out`` is
    scratch, as of scan.
    """
    cdef const uint8_t *segment_data = bytes_in(segment)
    cdef int64_t segment_size = length(segment)
    cdef int64_t *out_data = numbers_out(out)
    cdef int64_t result
    with nogil:
        result = find_record_in(segment_data, segment_size, start, stop, base_offset, budget, out_data)
    return result


def lacks_a_sector(segment, int64_t start, int64_t stop, int64_t base_offset):
    """For tests: ``lacks_sector``."""
    cdef const uint8_t *segment_data = bytes_in(segment)
    return bool(lacks_sector(segment_data, start, stop, base_offset))
