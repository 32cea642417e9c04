"""CRC-32, and the layout of one record (spec 2.1): the base of all other kernels.

CRC-32 is ISA-L's, taken from the ``isal`` wheel by symbol, because a Python call for each record costs more than the
CRC itself: 1 KiB takes about 0.06 us in ISA-L, 0.4 us in zlib, 0.4 us in the table loop below. Builds of isal that hide
the symbol fall back to that table loop (slicing by 16), which gives the same values.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from isal import isal_zlib
from numba import njit, types

from commitmq.format.constants import (
    BODY_OFFSET,
    CRC_PROPERTY_BYTES,
    CRC_PROPERTY_PREFIX,
    HOST_BYTES,
    HOST_V6_BYTES,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    SYS_FLAG_OFFSET,
    SysFlag,
)
from commitmq.kernels.words import address_of, load2, load4, load8

_SYMBOL = "crc32_gzip_refl"


def _isal_address() -> int | None:
    try:
        function = getattr(ctypes.CDLL(isal_zlib.__file__), _SYMBOL)
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _slicing_tables() -> np.ndarray[Any, np.dtype[np.uint32]]:
    tables = np.zeros((16, 256), np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
        tables[0, byte] = value
    for k in range(1, 16):
        previous = tables[k - 1]
        tables[k] = (previous >> np.uint32(8)) ^ tables[0, previous & np.uint32(255)]
    return tables


_TABLES = _slicing_tables()


@njit("uint32(Array(uint8, 1, 'C', readonly=True), int64, int64, uint32)", cache=True, nogil=True)
def crc32_tables(buf, start, size, seed):  # type: ignore[no-untyped-def]
    """CRC-32 of ``buf[start:start+size]`` continuing from ``seed``, by sixteen tables."""
    crc = np.uint32(seed ^ np.uint32(0xFFFFFFFF))
    position = start
    end = start + size
    while position + 16 <= end:
        b = buf[position : position + 16]
        crc = (
            _TABLES[15, b[0] ^ (crc & np.uint32(255))]
            ^ _TABLES[14, b[1] ^ ((crc >> np.uint32(8)) & np.uint32(255))]
            ^ _TABLES[13, b[2] ^ ((crc >> np.uint32(16)) & np.uint32(255))]
            ^ _TABLES[12, b[3] ^ (crc >> np.uint32(24))]
            ^ _TABLES[11, b[4]]
            ^ _TABLES[10, b[5]]
            ^ _TABLES[9, b[6]]
            ^ _TABLES[8, b[7]]
            ^ _TABLES[7, b[8]]
            ^ _TABLES[6, b[9]]
            ^ _TABLES[5, b[10]]
            ^ _TABLES[4, b[11]]
            ^ _TABLES[3, b[12]]
            ^ _TABLES[2, b[13]]
            ^ _TABLES[1, b[14]]
            ^ _TABLES[0, b[15]]
        )
        position += 16
    while position < end:
        crc = _TABLES[0, (crc ^ np.uint32(buf[position])) & np.uint32(255)] ^ (crc >> np.uint32(8))
        position += 1
    return np.uint32(crc ^ np.uint32(0xFFFFFFFF))


_ADDRESS = _isal_address()
if _ADDRESS is not None:
    # Compiled code refers to the symbol by name, so the cached machine code stays valid when the library moves.
    llvm.add_symbol("commitmq_crc32", _ADDRESS)
    _external = types.ExternalFunction("commitmq_crc32", types.uint32(types.uint32, types.uint64, types.uint64))

    @njit("uint32(Array(uint8, 1, 'C', readonly=True), int64, int64, uint32)", cache=True, nogil=True)
    def crc32(buf, start, size, seed):  # type: ignore[no-untyped-def]
        """CRC-32 of ``buf[start:start+size]`` continuing from ``seed`` (0 to begin), as ``zlib.crc32``."""
        return _external(seed, np.uint64(address_of(buf) + start), np.uint64(size))  # type: ignore[call-overload]

else:
    crc32 = crc32_tables

# numba sees numbers of a module, and not those of a class.
_BORN_HOST_V6 = SysFlag.BORN_HOST_V6
_STORE_HOST_V6 = SysFlag.STORE_HOST_V6

# Reasons, shared by all kernels that check records; store.log.run_check and store.recovery.scan have the sentences.
OK = 0
REASON_SHORT = 1
REASON_MAGIC = 2
REASON_LENGTHS = 3
REASON_BODY_CRC = 4
REASON_RECORD_CRC = 5
REASON_PHYSICAL_OFFSET = 6
REASON_PROPERTIES = 7
REASON_RECORD_CRC_MISSING = 8
REASON_TOPIC = 9
REASON_QUEUE = 10
REASON_SYS_FLAG = 11
REASON_RESERVED_FIELD = 12
REASON_RECORD_SIZE = 13
REASON_BODY_SIZE = 14
REASON_FORBIDDEN_PROPERTY = 15
REASON_CRC_SLOT = 16
REASON_COUNT = 17
REASON_UTF8 = 18
REASON_SEQUENCE = 19
REASON_ZEROS = 20
REASON_PROPERTIES_SIZE = 21

SECTOR_BYTES = 512  # sectors lost in a power cut read as zeros of this alignment; most devices lose 4096 bytes at once


@njit(inline="always")
def layout(buf, at, end):  # type: ignore[no-untyped-def]
    """The parts of the record at ``at``, if all of it is below ``end``.

    Returns (reason, total size, born host bytes, store host bytes, body start, body size, topic start, topic size,
    properties start, properties size); starts are positions in ``buf``. Only the length chain and magic are checked.
    """
    zero = np.int64(0)
    if at + MIN_RECORD_BYTES > end:
        return (REASON_SHORT, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    total = load4(buf, at)
    magic = load4(buf, at + MAGIC_OFFSET)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        return (REASON_MAGIC, total, zero, zero, zero, zero, zero, zero, zero, zero)
    if total < MIN_RECORD_BYTES or at + total > end:
        return (REASON_SHORT, total, zero, zero, zero, zero, zero, zero, zero, zero)
    stop = at + total
    flags = load4(buf, at + SYS_FLAG_OFFSET)
    born = np.int64(HOST_V6_BYTES) if flags & _BORN_HOST_V6 else np.int64(HOST_BYTES)
    host = np.int64(HOST_V6_BYTES) if flags & _STORE_HOST_V6 else np.int64(HOST_BYTES)
    body = at + BODY_OFFSET + born + host
    if body + 3 > stop:
        # With IPv6 hosts the fields before the body need more than the bytes checked so far; the buffer may end behind
        # them, and a mapping with it.
        return (REASON_LENGTHS, total, born, host, body, zero, zero, zero, zero, zero)
    body_size = load4(buf, body - 4)
    after = body + body_size
    if body_size < 0 or after + 3 > stop:
        return (REASON_LENGTHS, total, born, host, body, zero, zero, zero, zero, zero)
    if magic == MAGIC_V1:
        topic_size = np.int64(np.int8(buf[after]))
        topic = after + 1
    else:
        topic_size = load2(buf, after)
        topic = after + 2
    after = topic + topic_size
    if topic_size <= 0 or after + 2 > stop:
        return (REASON_LENGTHS, total, born, host, body, body_size, topic, zero, zero, zero)
    properties_size = load2(buf, after)
    properties = after + 2
    if properties_size < 0 or properties + properties_size != stop:
        return (REASON_LENGTHS, total, born, host, body, body_size, topic, topic_size, properties, zero)
    return (OK, total, born, host, body, body_size, topic, topic_size, properties, properties_size)


_SLOT_NAME = int.from_bytes(CRC_PROPERTY_PREFIX[:8], "big")


@njit(inline="always")
def has_crc_slot(buf, properties, properties_size):  # type: ignore[no-untyped-def]
    """True when the properties end with ``__CRC32#`` 0x01, ten bytes, 0x02 (spec 2.9)."""
    if properties_size < CRC_PROPERTY_BYTES:
        return False
    at = properties + properties_size - CRC_PROPERTY_BYTES
    return load8(buf, at) == _SLOT_NAME and buf[at + 8] == 1 and buf[at + CRC_PROPERTY_BYTES - 1] == 2


@njit(inline="always")
def crc_slot_value(buf, slot):  # type: ignore[no-untyped-def]
    """The value of the ten digits, least significant first; -1 when one is not a digit."""
    value = np.int64(0)
    for index in range(9, -1, -1):
        digit = np.int64(buf[slot + 9 + index]) - 48
        if digit < 0 or digit > 9:
            return np.int64(-1)
        value = value * 10 + digit
    return value
