"""Runs: checks a run that a client sent, and copies it into the log (ARCHITECTURE section 4).

A run is CommitLog records of one topic and queue, encoded by the client; fields that only the writer knows are zeros.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    BORN_HOST_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    CRC_PROPERTY_BYTES,
    ELEMENT_BODY_SIZE_OFFSET,
    ELEMENT_BYTES,
    ELEMENT_CRC_OFFSET,
    ELEMENT_MAGIC_OFFSET,
    PHYSICAL_OFFSET_OFFSET,
    PREPARED_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
    SysFlag,
)
from commitmq.kernels.raw import (
    OK,
    REASON_BODY_CRC,
    REASON_BODY_SIZE,
    REASON_CRC_SLOT,
    REASON_FORBIDDEN_PROPERTY,
    REASON_LENGTHS,
    REASON_PROPERTIES,
    REASON_QUEUE,
    REASON_RECORD_SIZE,
    REASON_RESERVED_FIELD,
    REASON_SEQUENCE,
    REASON_SHORT,
    REASON_SYS_FLAG,
    REASON_TOPIC,
    REASON_UTF8,
    REASON_ZEROS,
    SECTOR_BYTES,
    crc32,
    has_crc_slot,
    layout,
)
from commitmq.kernels.words import copy_bytes, is_ascii, load2, load4, load8, same_bytes, store8, until_low

MARK_DIGITS = 12  # of the sequence at the end of a producer's mark, see commitmq.format.producer_mark

# sysFlag bits that a client may set: compressed, and the compression type.
CLIENT_SYS_FLAGS = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK
MOVER_SYS_FLAGS = CLIENT_SYS_FLAGS | SysFlag.TRANSACTION_MASK
_V6_FLAGS = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
_COMPRESSION_MASK = SysFlag.COMPRESSION_MASK
_COMPRESSION_LZ4 = SysFlag.COMPRESSION_LZ4
_COMPRESSION_LAST = SysFlag.COMPRESSION_ZLIB


@njit("int64(Array(uint8, 1, 'C', readonly=True), int64, int64)", cache=True, nogil=True)
def utf8_error(buf, start, end):  # type: ignore[no-untyped-def]
    """Position of the first byte that is not UTF-8 (RFC 3629: no overlong forms, no surrogates); -1 when all is valid."""
    at = start
    while at < end:
        if at + 8 <= end and is_ascii(buf, at, at + 8):
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


@njit(inline="always")
def mark_number(buf, at):  # type: ignore[no-untyped-def]
    """The number in the MARK_DIGITS digits at ``at``; -1 when one is not a digit."""
    value = np.int64(0)
    for index in range(MARK_DIGITS):
        digit = np.int64(buf[at + index]) - 48
        if digit < 0 or digit > 9:
            return np.int64(-1)
        value = value * 10 + digit
    return value


@njit(inline="always")
def _sieve_bit(size, first):  # type: ignore[no-untyped-def]
    """The bit of a sieve for names of ``size`` bytes that begin with the byte ``first``."""
    return np.uint64(1) << np.uint64((size * 5 + np.int64(first)) & 63)


@njit("uint64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True))", cache=True, nogil=True)
def names_sieve(names, name_ends):  # type: ignore[no-untyped-def]
    """A word with a bit for each of ``names``: it excludes most other names without a comparison."""
    sieve = np.uint64(0)
    begin = np.int64(0)
    for index in range(name_ends.size):
        stop = name_ends[index]
        if stop > begin:
            sieve |= _sieve_bit(stop - begin, names[begin])
        begin = stop
    return sieve


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(uint8, 1, 'C', readonly=True),"
    " Array(int64, 1, 'C', readonly=True), uint64, int64, Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def _pairs_reason(buf, start, end, names, name_ends, sieve, special_from, out):  # type: ignore[no-untyped-def]
    """Like :func:`properties_reason`; ``sieve`` is that of ``names``. The names from number ``special_from`` on are
    allowed, and each that is there sets its bit in ``out[2]``.
    """
    at = start
    while at < end:
        name = at
        at = until_low(buf, at, end)
        if at >= end or buf[at] != 1 or at == name:
            return REASON_PROPERTIES
        size = at - name
        if sieve & _sieve_bit(size, buf[name]):
            begin = np.int64(0)
            for index in range(name_ends.size):
                stop = name_ends[index]
                if stop - begin == size and same_bytes(names, begin, buf, name, size):
                    if index < special_from:
                        return REASON_FORBIDDEN_PROPERTY
                    out[2] |= np.int64(1) << np.int64(index - special_from)
                begin = stop
        value = at + 1
        at = until_low(buf, value, end)
        while at < end and buf[at] == 0:  # a value may have zeros if a recovery can tell them from a lost sector
            zeros = at
            while at < end and buf[at] == 0:
                at += 1
            if at - zeros >= SECTOR_BYTES:
                return REASON_ZEROS
            at = until_low(buf, at, end)
        if at >= end or buf[at] != 2 or at == value:
            return REASON_PROPERTIES
        at += 1
    if not is_ascii(buf, start, end) and utf8_error(buf, start, end) >= 0:
        return REASON_UTF8
    return OK


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(uint8, 1, 'C', readonly=True),"
    " Array(int64, 1, 'C', readonly=True))",
    cache=True,
    nogil=True,
)
def properties_reason(buf, start, end, names, name_ends):  # type: ignore[no-untyped-def]
    """Whether ``buf[start:end]`` is well-formed properties (``name 1 value 2`` repeated) without a forbidden name.

    ``names`` are the forbidden names, one after the other; ``name_ends`` their ends. Returns a reason, OK when valid.
    """
    sieve = names_sieve(names, name_ends)
    return _pairs_reason(buf, start, end, names, name_ends, sieve, name_ends.size, np.zeros(3, np.int64))


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, int64, int64, int64,"
    " boolean, Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), int64, boolean,"
    " Array(uint8, 1, 'C', readonly=True), int64, Array(int64, 1, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def check_run(  # type: ignore[no-untyped-def]
    buf, topic, queue_id, max_body, max_record, v6_flags, crc_slot, names, name_ends, special_from, moved, mark,
    sequence, ends, out
):  # fmt: skip
    """Check every record of the run ``buf``. The input is untrusted.

    ``ends[i]`` becomes the end of record i in the run (int64, at least ``buf.size // MIN_RECORD_BYTES + 1`` long),
    ``out[0]`` the number of good records, ``out[1]`` the position of the first bad one, ``out[2]`` a bit for each name
    from number ``special_from`` on that a record carries; the names before it are forbidden. ``v6_flags`` are the
    sysFlag bits 0x30 that the layout must have; ``crc_slot`` says whether each record must end with an empty
    ``__CRC32#`` slot. ``moved``: the records come from a mover of this node, which may set the born host, the
    transaction bits, the number of tries and the prepared offset. Unless ``mark`` is empty, record i must carry it,
    with the number ``sequence`` + i, as its last property (before that slot). Returns OK or the reason.
    """
    at = np.int64(0)
    count = 0
    size = buf.size
    sieve = names_sieve(names, name_ends)
    allowed = (MOVER_SYS_FLAGS if moved else CLIENT_SYS_FLAGS) | _V6_FLAGS
    out[2] = 0
    while at < size:
        out[0] = count
        out[1] = at
        (reason, total, born, host, body, body_size, topic_at, topic_size, properties, properties_size) = layout(
            buf, at, size
        )
        if reason != OK:
            return reason
        if total > max_record:
            return REASON_RECORD_SIZE
        if body_size > max_body:
            return REASON_BODY_SIZE
        if topic_size != topic.size or not same_bytes(buf, topic_at, topic, 0, topic_size):
            return REASON_TOPIC
        if load4(buf, at + QUEUE_ID_OFFSET) != queue_id:
            return REASON_QUEUE
        flags = load4(buf, at + SYS_FLAG_OFFSET)
        if (
            flags & ~allowed
            or (flags & _COMPRESSION_MASK) > _COMPRESSION_LAST
            or (flags & CLIENT_SYS_FLAGS) == _COMPRESSION_LZ4  # the type of a compression, and no compression
        ):
            return REASON_SYS_FLAG
        if (flags & _V6_FLAGS) != v6_flags:
            return REASON_SYS_FLAG
        if (
            load8(buf, at + QUEUE_OFFSET_OFFSET) != 0
            or load8(buf, at + PHYSICAL_OFFSET_OFFSET) != 0
            or load8(buf, at + STORE_TIMESTAMP_OFFSET + born) != 0
            or (load8(buf, at + PREPARED_OFFSET_OFFSET + born + host) != 0 and not moved)
        ):
            return REASON_RESERVED_FIELD
        if load4(buf, at + RECONSUME_TIMES_OFFSET + born + host) < 0 or load8(buf, at + BORN_TIMESTAMP_OFFSET) < 0:
            return REASON_RESERVED_FIELD
        stop = properties + properties_size
        if crc_slot:
            if not has_crc_slot(buf, properties, properties_size):
                return REASON_CRC_SLOT
            stop -= CRC_PROPERTY_BYTES
        if mark.size:
            stop -= mark.size + MARK_DIGITS + 1
            if stop < properties or not same_bytes(buf, stop, mark, 0, mark.size):
                return REASON_SEQUENCE
            if buf[stop + mark.size + MARK_DIGITS] != 2 or mark_number(buf, stop + mark.size) != sequence + count:
                return REASON_SEQUENCE
        reason = _pairs_reason(buf, properties, stop, names, name_ends, sieve, special_from, out)
        if reason != OK:
            return reason
        expected = np.int64(crc32(buf, body, body_size, np.uint32(0))) & 0x7FFFFFFF if body_size else np.int64(0)
        if load4(buf, at + BODY_CRC_OFFSET) != expected:
            return REASON_BODY_CRC
        at += total
        ends[count] = at
        count += 1
    out[0] = count
    out[1] = at
    if count == 0:
        return REASON_LENGTHS
    return OK


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True),"
    " Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def check_batch(buf, names, name_ends, out):  # type: ignore[no-untyped-def]
    """Check every message of the client batch ``buf`` (spec 2.8). The input is untrusted.

    ``names`` and ``name_ends``: the forbidden properties, as for :func:`properties_reason`. ``out[0]`` becomes the
    number of good messages, ``out[1]`` the position of the first bad one. Returns OK or the reason.
    """
    at = np.int64(0)
    count = 0
    size = buf.size
    sieve = names_sieve(names, name_ends)
    while at < size:
        out[0] = count
        out[1] = at
        if size - at < ELEMENT_BYTES:
            return REASON_SHORT
        total = load4(buf, at)
        if total < ELEMENT_BYTES or total > size - at:
            return REASON_SHORT
        if load4(buf, at + ELEMENT_MAGIC_OFFSET) != 0 or load4(buf, at + ELEMENT_CRC_OFFSET) != 0:
            return REASON_RESERVED_FIELD
        body_size = load4(buf, at + ELEMENT_BODY_SIZE_OFFSET)
        if body_size < 0 or body_size > total - ELEMENT_BYTES:
            return REASON_LENGTHS
        properties = at + ELEMENT_BYTES + body_size
        properties_size = load2(buf, properties - 2)
        if properties_size < 0 or properties + properties_size != at + total:
            return REASON_LENGTHS
        reason = _pairs_reason(
            buf, properties, properties + properties_size, names, name_ends, sieve, name_ends.size, out
        )
        if reason != OK:
            return reason
        at += total
        count += 1
    out[0] = count
    out[1] = at
    if count == 0:
        return REASON_LENGTHS
    return OK


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(uint8, 1, 'C'), int64, int64, int64, int64,"
    " Array(uint8, 1, 'C', readonly=True), boolean, Array(uint8, 1, 'C', readonly=True), boolean)",
    cache=True,
    nogil=True,
)
def store_run(  # type: ignore[no-untyped-def]
    run, start, end, segment, at, base_offset, queue_offset, store_timestamp, born_host, keep_born, store_host, crc_slot
):
    """Copy the checked records ``run[start:end]`` to ``segment[at:]`` and fill in the fields that only the writer
    knows.

    The first record's size and magic (8 bytes) stay zero in the segment: the caller stores them last, so that a writer
    killed anywhere in here leaves nothing that a reader takes for a record. Fills queueOffset, physicalOffset
    (``base_offset`` + position in the segment), storeTimestamp, hosts and the digits of ``__CRC32#``. ``keep_born``: the
    born hosts of the run stay, and ``born_host`` only says how long they are.
    """
    size = end - start
    copy_bytes(segment, at + 8, run, start + 8, size - 8)
    source = start
    target = at
    number = queue_offset
    while source < end:
        total = load4(run, source)
        store8(segment, target + QUEUE_OFFSET_OFFSET, number)
        store8(segment, target + PHYSICAL_OFFSET_OFFSET, base_offset + target)
        if not keep_born:
            copy_bytes(segment, target + BORN_HOST_OFFSET, born_host, 0, born_host.size)
        stamp = target + STORE_TIMESTAMP_OFFSET + born_host.size
        store8(segment, stamp, store_timestamp)
        copy_bytes(segment, stamp + 8, store_host, 0, store_host.size)
        if crc_slot:
            # The CRC covers size and magic, which for the first record are so far only in the run.
            head = crc32(run, source, 8, np.uint32(0))
            value = np.int64(crc32(segment, target + 8, total - CRC_PROPERTY_BYTES - 8, head)) & 0x7FFFFFFF
            slot = target + total - CRC_PROPERTY_BYTES + 9
            for index in range(10):
                segment[slot + index] = np.uint8(48 + value % 10)
                value //= 10
        source += total
        target += total
        number += 1
