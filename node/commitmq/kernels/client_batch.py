"""Client batches (spec 2.8): makes the records of a run of their messages, for a gateway whose clients send batches.

The records differ in their sizes, CRCs, flags, bodies and properties; everything else is copied from a template.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    ELEMENT_BODY_OFFSET,
    ELEMENT_BODY_SIZE_OFFSET,
    ELEMENT_BYTES,
    ELEMENT_FLAG_OFFSET,
    FLAG_OFFSET,
    SIZE_OFFSET,
)
from commitmq.kernels.raw import (
    OK,
    REASON_BODY_SIZE,
    REASON_LENGTHS,
    REASON_PROPERTIES_SIZE,
    REASON_SHORT,
    crc32,
)
from commitmq.kernels.words import copy_bytes, load2, load4, store2, store4

_CLOSED = 2  # the byte behind each property


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), int64, int64, int64, Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def measure_batch(buf, max_body, max_properties, empty_record, out):  # type: ignore[no-untyped-def]
    """Check the sizes of all messages of the client batch ``buf``. The input is untrusted; magic and CRC are ignored, as
    RocketMQ does.

    ``empty_record``: bytes of a record without body and properties. ``out[0]`` becomes the number of good messages,
    ``out[1]`` the position of the first bad one, ``out[2]`` the bytes of their records. Returns OK or the reason.
    """
    at = np.int64(0)
    count = 0
    size = buf.size
    out[2] = 0
    while at < size:
        out[0] = count
        out[1] = at
        if size - at < ELEMENT_BYTES:
            return REASON_SHORT
        total = load4(buf, at)
        if total < ELEMENT_BYTES or total > size - at:
            return REASON_SHORT
        body_size = load4(buf, at + ELEMENT_BODY_SIZE_OFFSET)
        if body_size < 0 or body_size > total - ELEMENT_BYTES:
            return REASON_LENGTHS
        if body_size > max_body:
            return REASON_BODY_SIZE
        properties = at + ELEMENT_BYTES + body_size
        properties_size = load2(buf, properties - 2)
        if properties_size < 0 or properties + properties_size != at + total:
            return REASON_LENGTHS
        if properties_size and buf[at + total - 1] != _CLOSED:
            properties_size += 1
        if properties_size > max_properties:
            return REASON_PROPERTIES_SIZE
        out[2] += empty_record + body_size + properties_size
        at += total
        count += 1
    out[0] = count
    out[1] = at
    if count == 0:
        return REASON_LENGTHS
    return OK


@njit(
    "void(Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C', readonly=True),"
    " Array(uint8, 1, 'C', readonly=True), Array(uint8, 1, 'C'), Array(int64, 1, 'C'))",
    cache=True,
    nogil=True,
)
def encode_batch(buf, head, topic, slot, run, sizes):  # type: ignore[no-untyped-def]
    """Make the records of the messages in ``buf``, which :func:`measure_batch` has measured.

    ``head``: a record up to its body; ``topic``: the topic with its length; ``slot``: what ends the properties.
    ``run`` has the measured size, ``sizes`` gets the size of each record.
    """
    at = np.int64(0)
    target = np.int64(0)
    count = 0
    while at < buf.size:
        total = load4(buf, at)
        body_size = load4(buf, at + ELEMENT_BODY_SIZE_OFFSET)
        properties_size = total - ELEMENT_BYTES - body_size
        closing = 1 if properties_size and buf[at + total - 1] != _CLOSED else 0
        stored = properties_size + closing + slot.size
        record = head.size + body_size + topic.size + 2 + stored
        copy_bytes(run, target, head, 0, head.size)
        store4(run, target + SIZE_OFFSET, record)
        if body_size:
            crc = np.int64(crc32(buf, at + ELEMENT_BODY_OFFSET, body_size, np.uint32(0))) & 0x7FFFFFFF
            store4(run, target + BODY_CRC_OFFSET, crc)
        copy_bytes(run, target + FLAG_OFFSET, buf, at + ELEMENT_FLAG_OFFSET, 4)
        place = target + head.size
        store4(run, place - 4, body_size)
        copy_bytes(run, place, buf, at + ELEMENT_BODY_OFFSET, body_size)
        place += body_size
        copy_bytes(run, place, topic, 0, topic.size)
        place += topic.size
        store2(run, place, stored)
        place += 2
        copy_bytes(run, place, buf, at + total - properties_size, properties_size)
        place += properties_size
        if closing:
            run[place] = _CLOSED
            place += 1
        copy_bytes(run, place, slot, 0, slot.size)
        sizes[count] = record
        target += record
        at += total
        count += 1
