"""One CommitLog record: its layout, its encoding and its decoding (spec 2.1, 2.2).

    offset        field                       why it is there
    0             totalSize i4                length of everything, this field included: the step to the next record
    4             magic i4                    v1 / v2 (wide topic length); tells a record from a filler and from nothing
    8             bodyCRC i4                  of the stored body; recovery ends the log where it is false
    12            queueId i4
    16            flag i4                     the application's, opaque
    20            queueOffset i8              ordinal in the queue
    28            physicalOffset i8           own place: exposes a copied or stale record
    36            sysFlag i4                  compression, transaction state, widths of the two hosts
    40            bornTimestamp i8            the producer's clock, ms
    48            bornHost 8 or 20 (B)        address + port i4
    48+B          storeTimestamp i8           the node's clock, ms, non-decreasing along the log
    56+B          storeHost 8 or 20 (S)
    56+B+S        reconsumeTimes i4
    60+B+S        preparedTransactionOffset i8
    68+B+S        bodyLength i4, body
    …             topicLength i1 (v1) or i2 (v2), topic
    …             propertiesLength i2, properties; the last 20 bytes may be the CRC of all before them (spec 2.9)

CRC-32 is that of the IEEE polynomial, masked to 31 bits (spec 0.1, 2.4, 2.9). This module is plain struct code, because a
client that sends single messages must not load numpy for it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from commitmq.errors import CorruptRecordError, InvalidMessageError
from commitmq.format.constants import (
    CRC_PROPERTY_BYTES,
    CRC_PROPERTY_PREFIX,
    MAGIC_FILLER,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    MIN_RECORD_BYTES,
    V1_TOPIC_UNITS,
    Host,
    Property,
    SysFlag,
)
from commitmq.format.java import utf16_units
from commitmq.format.message_id import offset_message_id, pack_host, unpack_host
from commitmq.format.properties import BROKER_BUCKETS, decode_properties, encode_properties

try:
    from isal.isal_zlib import crc32 as crc32
except ModuleNotFoundError:  # a client without the extra `node`: zlib gives the same numbers, somewhat slower
    from zlib import crc32 as crc32


_MASK = 0x7FFFFFFF


def body_crc(data: bytes | bytearray | memoryview) -> int:
    """CRC of ``data`` with the sign bit cleared; 0 for no data. isal is 2–4 times as fast as zlib at 1 KiB."""
    return crc32(data) & _MASK


def crc_digits(value: int) -> bytes:
    """The ten digits of the ``__CRC32#`` property: least significant first, padded with zeros (1234 → 4321000000)."""
    return (b"%010d" % value)[::-1]


def parse_crc_digits(digits: bytes) -> int | None:
    """Inverse of :func:`crc_digits`; None unless ``digits`` are ten ASCII digits."""
    return int(digits[::-1]) if len(digits) == 10 and digits.isdigit() else None


_HEAD = struct.Struct(">iiiiiqqiq")  # totalSize … bornTimestamp: the first 48 bytes
_LONG = struct.Struct(">q")
_MIDDLE = struct.Struct(">iqi")  # reconsumeTimes, preparedTransactionOffset, bodyLength
_SHORT = struct.Struct(">h")
_PEEK = struct.Struct(">ii")
_EMPTY_HOST = Host("0.0.0.0", 0)


@dataclass(slots=True)
class Record:
    """A decoded record. Offsets and sizes are bytes, time stamps ms; ``body`` is as stored (possibly compressed).

    ``total_size`` and ``body_crc`` are the values that :func:`decode_record` found; :func:`encode_record` computes its
    own. ``properties`` never holds ``__CRC32#``, which protects the bytes and is no property of the message:
    ``has_properties_crc`` says whether the stored record had one. ``version`` is 1 or 2; with 0 the topic's length
    decides.
    """

    topic: str
    queue_id: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    total_size: int = 0
    sys_flag: int = 0
    flag: int = 0
    born_timestamp: int = 0
    store_timestamp: int = 0
    body_crc: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    born_host: Host = _EMPTY_HOST
    store_host: Host = _EMPTY_HOST
    has_properties_crc: bool = field(default=False, compare=False)
    version: int = field(default=0, compare=False)

    @property
    def offset_msg_id(self) -> str:
        """The offset message id of this record (spec 2.10)."""
        return offset_message_id(self.store_host.ip, self.store_host.port, self.physical_offset)

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, under the names and in the order of ``store dump``."""
        return {
            "topic": self.topic,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "physical_offset": self.physical_offset,
            "total_size": self.total_size,
            "sys_flag": self.sys_flag,
            "flag": self.flag,
            "born_timestamp": self.born_timestamp,
            "store_timestamp": self.store_timestamp,
            "body_crc": self.body_crc,
            "reconsume_times": self.reconsume_times,
            "prepared_transaction_offset": self.prepared_transaction_offset,
            "offset_msg_id": self.offset_msg_id,
            "properties": dict(sorted(self.properties.items())),
            "body_hex": self.body.hex(),
        }


def peek(buf: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int]:
    """``(total size, magic)`` at ``offset`` of ``buf``, unchecked. Raises struct.error with fewer than 8 bytes left."""
    return _PEEK.unpack_from(buf, offset)


def encode_filler(blank_bytes: int) -> bytes:
    """The 8 bytes that end a segment with ``blank_bytes`` left (spec 2.11)."""
    return _PEEK.pack(blank_bytes, MAGIC_FILLER)


class RecordParts(NamedTuple):
    """Where the parts of a record lie, in bytes from its first one."""

    born_bytes: int
    store_bytes: int
    topic: int
    topic_bytes: int
    properties: int
    properties_bytes: int


def parts_of(record: bytes) -> RecordParts:
    """The parts of a whole ``record``, which was checked before."""
    flags = record[39]
    born = 20 if flags & SysFlag.BORN_HOST_V6 else 8
    store = 20 if flags & SysFlag.STORE_HOST_V6 else 8
    body = 72 + born + store
    at = body + int.from_bytes(record[body - 4 : body], "big")
    width = 2 if peek(record)[1] == MAGIC_V2 else 1
    topic_bytes = int.from_bytes(record[at : at + width], "big")
    topic = at + width
    properties = topic + topic_bytes + 2
    return RecordParts(
        born, store, topic, topic_bytes, properties, int.from_bytes(record[properties - 2 : properties], "big")
    )


def body_bytes_of(record: bytes | memoryview) -> int:
    """Bytes of the body of a whole ``record``, which was checked before."""
    flags = record[39]
    hosts = sum(20 if flags & wide else 8 for wide in (SysFlag.BORN_HOST_V6, SysFlag.STORE_HOST_V6))
    return int.from_bytes(record[68 + hosts : 72 + hosts], "big")


def record_size(
    body_bytes: int, topic_bytes: int, properties_bytes: int, *, v2: bool = False, v6_hosts: int = 0
) -> int:
    """Bytes of a record with these parts and ``v6_hosts`` (0..2) IPv6 hosts."""
    return MIN_RECORD_BYTES + v2 + 12 * v6_hosts + body_bytes + topic_bytes + properties_bytes


def encode_record(
    record: Record,
    *,
    properties_crc: bool = False,
    buckets: int | None = BROKER_BUCKETS,
    empty_values: bool = False,
) -> bytes:
    """The bytes of ``record``. Its size, body CRC and the two sysFlag bits for the hosts' widths are computed here.

    ``properties_crc`` appends the CRC of the whole record (spec 2.9); ``buckets`` is the order of the properties and
    ``empty_values`` lets empty ones pass, see :func:`encode_properties`. Raises InvalidMessageError for values that the format
    cannot hold.
    """
    try:
        topic = record.topic.encode()
        born_host = pack_host(record.born_host)
        store_host = pack_host(record.store_host)
    except UnicodeEncodeError as error:
        raise InvalidMessageError(f"the topic is no valid Unicode: {error}") from error
    except OSError as error:
        raise InvalidMessageError(
            f"a host of the record is no IP address: {record.born_host}, {record.store_host}"
        ) from error
    wide = record.version == 2 or (record.version == 0 and utf16_units(record.topic) > V1_TOPIC_UNITS)
    if len(topic) > (0x7FFF if wide else 0x7F):
        raise InvalidMessageError(f"the topic takes {len(topic)} bytes, more than its length field can hold")
    properties = record.properties
    if properties_crc and Property.CRC32 in properties:
        properties = {name: value for name, value in properties.items() if name != Property.CRC32}
    encoded = encode_properties(properties, buckets=buckets, empty_values=empty_values)
    properties_bytes = len(encoded) + (CRC_PROPERTY_BYTES if properties_crc else 0)
    if properties_bytes > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(
            f"the properties and the record's CRC take {properties_bytes} bytes, {MAX_PROPERTIES_BYTES} are allowed"
        )
    body = record.body
    sys_flag = record.sys_flag & ~(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)
    if len(born_host) == 20:
        sys_flag |= SysFlag.BORN_HOST_V6
    if len(store_host) == 20:
        sys_flag |= SysFlag.STORE_HOST_V6
    v6_hosts = (len(born_host) + len(store_host) - 16) // 12
    total = record_size(len(body), len(topic), properties_bytes, v2=wide, v6_hosts=v6_hosts)
    head = _HEAD.pack(
        total,
        MAGIC_V2 if wide else MAGIC_V1,
        body_crc(body),
        record.queue_id,
        record.flag,
        record.queue_offset,
        record.physical_offset,
        sys_flag,
        record.born_timestamp,
    )
    middle = _MIDDLE.pack(record.reconsume_times, record.prepared_transaction_offset, len(body))
    topic_length = _SHORT.pack(len(topic)) if wide else bytes((len(topic),))
    data = b"".join((
        head, born_host, _LONG.pack(record.store_timestamp), store_host, middle, body,
        topic_length, topic, _SHORT.pack(properties_bytes), encoded,
    ))  # fmt: skip
    if properties_crc:
        data += CRC_PROPERTY_PREFIX + crc_digits(body_crc(data)) + b"\x02"
    return data


def decode_record(
    buf: bytes | bytearray | memoryview,
    offset: int = 0,
    *,
    check_crc: bool = True,
    with_body: bool = True,
    expected_physical_offset: int | None = None,
) -> Record:
    """The record at ``offset`` of ``buf``. Without ``with_body`` its body is empty, and nothing of the body is read.

    Checks the magic, every length against the bytes left, and the sum of the parts. With ``check_crc`` it checks the
    body's CRC and, where the record carries one, the CRC of the whole; with ``expected_physical_offset``, the record's
    physicalOffset field. Raises CorruptRecordError with the reason and, as its ``offset``, the place in ``buf``.
    """
    view = memoryview(buf)
    left = len(view) - offset
    if left < MIN_RECORD_BYTES:
        if left >= 8 and peek(view, offset)[1] not in (MAGIC_V1, MAGIC_V2):
            raise _corrupt(offset, f"no record starts here: magic {peek(view, offset)[1] & 0xFFFFFFFF:#010x}")
        raise _corrupt(offset, f"{max(left, 0)} bytes are left, the smallest record has {MIN_RECORD_BYTES}")
    (
        total, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp,
    ) = _HEAD.unpack_from(view, offset)  # fmt: skip
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        what = "the filler of a segment's end is" if magic == MAGIC_FILLER else "no record starts"
        raise _corrupt(offset, f"{what} here: magic {magic & 0xFFFFFFFF:#010x}")
    if not MIN_RECORD_BYTES <= total <= left:
        raise _corrupt(offset, f"the record claims {total} bytes, {left} are left")
    end = offset + total
    at = offset + 48
    born_bytes = 20 if sys_flag & SysFlag.BORN_HOST_V6 else 8
    store_bytes = 20 if sys_flag & SysFlag.STORE_HOST_V6 else 8
    wide = magic == MAGIC_V2
    # The smallest record with these widths must fit before anything behind the hosts may be read.
    if total < MIN_RECORD_BYTES + wide + born_bytes + store_bytes - 16:
        raise _corrupt(offset, f"the record claims {total} bytes, too few for the hosts its sysFlag names")
    born_host = unpack_host(bytes(view[at : at + born_bytes]))
    at += born_bytes
    store_timestamp = _LONG.unpack_from(view, at)[0]
    at += 8
    store_host = unpack_host(bytes(view[at : at + store_bytes]))
    at += store_bytes
    reconsume_times, prepared, body_bytes = _MIDDLE.unpack_from(view, at)
    at += 16
    tail_bytes = 4 if wide else 3  # the two length fields behind the body
    if not 0 <= body_bytes <= end - at - tail_bytes:
        raise _corrupt(offset, f"the body claims {body_bytes} bytes of a record of {total}")
    body = bytes(view[at : at + body_bytes]) if with_body else b""
    at += body_bytes
    topic_bytes = _SHORT.unpack_from(view, at)[0] if wide else view[at]
    at += 2 if wide else 1
    # The v1 length is a signed byte in Java: 128 and more are negative lengths, not long topics.
    if topic_bytes < 0 or (not wide and topic_bytes > 127) or topic_bytes > end - at - 2:
        raise _corrupt(offset, f"the topic claims {topic_bytes} bytes")
    topic = str(view[at : at + topic_bytes], "utf-8", "replace")
    at += topic_bytes
    properties_bytes = _SHORT.unpack_from(view, at)[0]
    at += 2
    if properties_bytes != end - at:
        raise _corrupt(offset, f"the properties claim {properties_bytes} bytes, {end - at} are left of the record")
    if expected_physical_offset is not None and physical_offset != expected_physical_offset:
        raise _corrupt(
            offset, f"the record says it lies at {physical_offset}, it was found at {expected_physical_offset}"
        )
    if check_crc and with_body:
        found = body_crc(body)
        if found != crc:
            raise _corrupt(offset, f"the body's CRC is {found:#010x}, the record says {crc:#010x}")
    properties = decode_properties(view[at:end])
    has_crc = properties_bytes >= CRC_PROPERTY_BYTES and _check_properties_crc(
        view, offset, end, check_crc and with_body
    )
    if has_crc:
        properties.pop(Property.CRC32, None)
    return Record(
        topic, queue_id, queue_offset, physical_offset, total, sys_flag, flag, born_timestamp, store_timestamp, crc,
        reconsume_times, prepared, properties, body, born_host, store_host, has_crc, 2 if wide else 1,
    )  # fmt: skip


def _check_properties_crc(view: memoryview, offset: int, end: int, check_crc: bool) -> bool:
    """True when the record ends with the CRC of the whole; with ``check_crc`` the CRC is verified.

    The last 20 bytes decide, not the decoded properties: damage to the separator before them must not hide the CRC. A
    property of that name elsewhere is a producer's own text (RocketMQ stores it when its CRC feature is off).
    """
    slot = bytes(view[end - CRC_PROPERTY_BYTES : end])
    if not slot.startswith(CRC_PROPERTY_PREFIX) or slot[19] != 2:
        return False
    if check_crc:
        stored = parse_crc_digits(slot[9:19])
        if stored is None:
            raise _corrupt(offset, f"the value of {Property.CRC32}, {slot[9:19]!r}, is not ten digits")
        found = body_crc(view[offset : end - CRC_PROPERTY_BYTES])
        if found != stored:
            raise _corrupt(offset, f"the CRC of the whole record is {found:#010x}, its property says {stored:#010x}")
    return True


def _corrupt(offset: int, reason: str) -> CorruptRecordError:
    error = CorruptRecordError(reason)
    error.offset = offset
    return error
