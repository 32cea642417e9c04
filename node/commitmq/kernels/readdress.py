"""Records for another topic and queue, made from records: what delay, retry and transactions do with a message.

The writer makes the record that waits from the record that a client sent; a mover makes the record that is delivered
from the one that waited. Body, flag, times and the born host stay; the fields that only the writer knows become zero.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.format.constants import (
    BODY_OFFSET,
    BORN_HOST_OFFSET,
    CRC_PROPERTY_BYTES,
    HOST_BYTES,
    HOST_V6_BYTES,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    PHYSICAL_OFFSET_OFFSET,
    PREPARED_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
    SysFlag,
)
from commitmq.kernels.java_hash import hash_on
from commitmq.kernels.raw import OK, REASON_PROPERTIES, crc32, has_crc_slot, layout
from commitmq.kernels.words import copy_bytes, load4, same_bytes, store8, until_mark, until_two

MAX_PAIRS = 512  # of a record whose properties are put into another order; bounds the work for a hostile record
REASON_TOO_MANY_PAIRS = 30
REASON_PROPERTIES_SIZE = 31

_LONG_TOPIC = 127  # bytes; a topic with more has two bytes of length
_STORE_HOST_V6 = SysFlag.STORE_HOST_V6
_FIRST_BUCKETS = 128
_SLOT = np.frombuffer(b"__CRC32#\x01" + b"0" * 10 + b"\x02", np.uint8)


@njit(inline="always")
def _store4(buf, at, value):  # type: ignore[no-untyped-def]
    for index in range(4):
        buf[at + index] = np.uint8((value >> (24 - 8 * index)) & 255)


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(int64, 2, 'C'), int64)",
    cache=True,
    nogil=True,
)
def _collect(buf, start, end, pairs, count):  # type: ignore[no-untyped-def]
    """Put the pairs of ``buf[start:end]`` behind the first ``count`` of ``pairs`` (start, value start, end, hash, source).

    Returns the new count; -1 for malformed properties, -2 for more than fit.
    """
    at = start
    while at < end:
        name = at
        at = until_mark(buf, at, end)
        if at >= end or buf[at] != 1:
            return -1
        value = at + 1
        at = until_two(buf, value, end)
        if at >= end:
            return -1
        at += 1
        if at == value + 1:
            continue  # RocketMQ's decoder drops an empty value (spec 2.5)
        if count >= pairs.shape[0]:
            return -2
        spread = hash_on(buf, name, value - 1, np.uint32(0))
        pairs[count, 0], pairs[count, 1], pairs[count, 2] = name, value, at
        pairs[count, 3] = np.int64(spread ^ (spread >> np.uint32(16)))
        count += 1
    return count


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), int64, int64, Array(int64, 2, 'C'),"
    " Array(int64, 1, 'C'), Array(int64, 1, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def _chain(buf, more, own, count, pairs, heads, tails, following):  # type: ignore[no-untyped-def]
    """Chain ``count`` pairs (the first ``own`` in ``buf``, the others in ``more``) in a table of ``heads.size`` buckets.

    A name that comes again takes the place of the former one (its column 4 says which pair has the value). Returns how
    many names there are.
    """
    heads[:] = -1
    mask = heads.size - 1
    names = 0
    for index in range(count):
        pairs[index, 4] = index
        place = pairs[index, 3] & mask
        size = pairs[index, 1] - pairs[index, 0]
        source = buf if index < own else more
        at = heads[place]
        while at >= 0:
            other = buf if at < own else more
            if (
                pairs[at, 3] == pairs[index, 3]
                and pairs[at, 1] - pairs[at, 0] == size
                and same_bytes(other, pairs[at, 0], source, pairs[index, 0], size)
            ):
                break
            at = following[at]
        if at >= 0:
            pairs[at, 4] = index
            continue
        names += 1
        following[index] = -1
        if heads[place] < 0:
            heads[place] = index
        else:
            following[tails[place]] = index
        tails[place] = index
    return names


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, Array(uint8, 1, 'C', readonly=True), int64, int64,"
    " Array(uint8, 1, 'C'), int64, Array(int64, 2, 'C'))",
    cache=True,
    nogil=True,
)
def _ordered(buf, start, end, more, more_start, more_end, out, at, pairs):  # type: ignore[no-untyped-def]
    """Write the properties ``buf[start:end]``, with those of ``more`` put behind, to ``out[at:]`` as a Java HashMap of
    capacity 128 iterates them. Returns the end in ``out``; -1 and -2 as :func:`_collect`, -3 when there is no room.
    """
    own = _collect(buf, start, end, pairs, np.int64(0))
    if own < 0:
        return own
    count = _collect(more, more_start, more_end, pairs, own)
    if count < 0:
        return count
    buckets = np.int64(_FIRST_BUCKETS)
    while count * 4 > buckets * 3:
        buckets *= 2
    following = np.empty(max(count, 1), np.int64)
    while True:
        heads = np.empty(buckets, np.int64)
        tails = np.empty(buckets, np.int64)
        names = _chain(buf, more, own, count, pairs, heads, tails, following)
        if buckets == _FIRST_BUCKETS or names * 4 > buckets // 2 * 3:
            break
        buckets //= 2  # some names came twice
    for place in range(buckets):
        index = heads[place]
        while index >= 0:
            named = buf if index < own else more
            size = pairs[index, 1] - pairs[index, 0]
            source = pairs[index, 4]
            valued = buf if source < own else more
            rest = pairs[source, 2] - pairs[source, 1]
            if at + size + rest > out.size:
                return np.int64(-3)
            copy_bytes(out, at, named, pairs[index, 0], size)
            copy_bytes(out, at + size, valued, pairs[source, 1], rest)
            at += size + rest
            index = following[index]
    return at


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True),"
    " Array(uint8, 1, 'C', readonly=True), int64, boolean, Array(uint8, 1, 'C', readonly=True),"
    " Array(int64, 1, 'C', readonly=True), boolean, boolean, Array(uint8, 1, 'C'), Array(int64, 1, 'C'),"
    " Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def readdress(buf, starts, topic, queue_id, store_v6, more, more_ends, reorder, crc_slot, out, ends, result):  # type: ignore[no-untyped-def]
    """Make a run for ``topic`` and ``queue_id`` in ``out`` from the records of ``buf`` that begin at ``starts``.

    ``reorder``: the properties are put into a Java HashMap, with those of record i in ``more[more_ends[i - 1]:
    more_ends[i]]`` (of all records, when there is one end only) put behind. Without it they stay as they are.
    ``crc_slot``: each record ends with an empty ``__CRC32#`` slot; a former one is left out in any case. ``store_v6``:
    the store hosts of the new records have IPv6 layout. Fills ``ends``; ``result[0]`` becomes the number of records made,
    ``result[1]`` the end of the last one. Returns OK, or the reason why the next record cannot be made.
    """
    at = np.int64(0)
    host = np.int64(HOST_V6_BYTES) if store_v6 else np.int64(HOST_BYTES)
    pairs = np.empty((MAX_PAIRS, 5), np.int64)
    long_topic = topic.size > _LONG_TOPIC
    for number in range(starts.size):
        result[0], result[1] = number, at
        start = starts[number]
        (reason, _total, born, old_host, body, body_size, _topic_at, _topic_size, properties, size) = layout(
            buf, start, buf.size
        )
        if reason != OK:
            return reason
        if has_crc_slot(buf, properties, size):
            size -= CRC_PROPERTY_BYTES
        copy_bytes(out, at, buf, start, np.int64(BORN_HOST_OFFSET) + born)
        _store4(out, at + MAGIC_OFFSET, np.int64(MAGIC_V2 if long_topic else MAGIC_V1))
        _store4(out, at + QUEUE_ID_OFFSET, queue_id)
        store8(out, at + QUEUE_OFFSET_OFFSET, np.int64(0))
        store8(out, at + PHYSICAL_OFFSET_OFFSET, np.int64(0))
        flags = load4(buf, start + SYS_FLAG_OFFSET)
        _store4(
            out,
            at + SYS_FLAG_OFFSET,
            (flags | np.int64(_STORE_HOST_V6)) if store_v6 else (flags & ~np.int64(_STORE_HOST_V6)),
        )
        tries = at + RECONSUME_TIMES_OFFSET + born + host
        out[at + STORE_TIMESTAMP_OFFSET + born : tries] = 0
        copy_bytes(out, tries, buf, start + RECONSUME_TIMES_OFFSET + born + old_host, np.int64(4))
        store8(out, at + PREPARED_OFFSET_OFFSET + born + host, np.int64(0))
        place = at + BODY_OFFSET + born + host
        copy_bytes(out, place - 4, buf, body - 4, body_size + 4)
        place += body_size
        if long_topic:
            out[place] = np.uint8(topic.size >> 8)
            out[place + 1] = np.uint8(topic.size & 255)
            place += 2
        else:
            out[place] = np.uint8(topic.size)
            place += 1
        copy_bytes(out, place, topic, np.int64(0), np.int64(topic.size))
        place += topic.size
        text = place + 2
        if reorder:
            one = np.int64(0) if more_ends.size == 1 else np.int64(number)
            begin = more_ends[one - 1] if one > 0 else np.int64(0)
            end = _ordered(buf, properties, properties + size, more, begin, more_ends[one], out, text, pairs)
            if end == -1:
                return REASON_PROPERTIES
            if end < 0:
                return REASON_TOO_MANY_PAIRS if end == -2 else REASON_PROPERTIES_SIZE
        else:
            copy_bytes(out, text, buf, properties, size)
            end = text + size
        if crc_slot:
            copy_bytes(out, end, _SLOT, np.int64(0), np.int64(CRC_PROPERTY_BYTES))
            end += CRC_PROPERTY_BYTES
        if end - text > MAX_PROPERTIES_BYTES:
            return REASON_PROPERTIES_SIZE
        out[place] = np.uint8((end - text) >> 8)
        out[place + 1] = np.uint8((end - text) & 255)
        _store4(out, at, end - at)
        at = end
        ends[number] = at
    result[0], result[1] = starts.size, at
    return OK


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 2, 'C'), Array(int64, 2, 'C'), Array(int64, 1, 'C'),"
    " Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def number_alike(buf, starts, lengths, numbers, firsts):  # type: ignore[no-untyped-def]
    """Give records that agree in all columns the same number, counted from 0 in the order of their first ones.

    Column k of record i is ``buf[starts[k, i]:starts[k, i] + lengths[k, i]]``. ``numbers[i]`` becomes the number of
    record i, ``firsts[n]`` the first record with number n. Returns how many numbers there are.
    """
    records = numbers.size
    size = np.int64(16)
    while size < 2 * records:
        size *= 2
    table = np.full(size, -1, np.int64)
    count = 0
    for record in range(records):
        key = np.uint32(0)
        for column in range(starts.shape[0]):
            key = crc32(buf, starts[column, record], lengths[column, record], key + np.uint32(column))
        at = np.int64(key) & (size - 1)
        while table[at] >= 0:
            other = firsts[table[at]]
            same = True
            for column in range(starts.shape[0]):
                length = lengths[column, record]
                if lengths[column, other] != length or not same_bytes(
                    buf, starts[column, other], buf, starts[column, record], length
                ):
                    same = False
                    break
            if same:
                break
            at = (at + 1) & (size - 1)
        if table[at] < 0:
            table[at] = count
            firsts[count] = record
            count += 1
        numbers[record] = table[at]
    return count
