"""Runs: many messages of one topic and queue, encoded here as CommitLog records (ARCHITECTURE section 4).

A record of a run is an ordinary record (see :mod:`commitmq.format.record`) with zeros in the fields of the node: queueOffset,
physicalOffset, both hosts, storeTimestamp. With ``properties_crc`` its properties end with an empty ``__CRC32#`` slot of 20
bytes. An idempotent producer puts its mark before that slot (:mod:`commitmq.format.producer_mark`).

Two encoders make the same bytes:

* :func:`encode_messages` encodes the runs of asynchronous sends, with messages of any kind side by side. It packs the heads
  one by one and joins them with shared pieces. It does not use numpy, so a producer of single messages does not load it.
* :func:`encode_run` encodes the runs of batches with numpy. If the messages of a run share their properties, all stretches
  between two bodies (the tail of one record and the head of the next) have one length. So they are an array of fixed-size
  pieces, filled column by column, and the run is a join of pieces and bodies: no Python code runs for each message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from commitmq.errors import InvalidMessageError
from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    BODY_OFFSET,
    BODY_SIZE_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    CRC_PROPERTY_PREFIX,
    FLAG_OFFSET,
    HOST_BYTES,
    HOST_V6_BYTES,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    MIN_RECORD_BYTES,
    QUEUE_ID_OFFSET,
    SIZE_OFFSET,
    SYS_FLAG_OFFSET,
    V1_TOPIC_UNITS,
    Property,
    SysFlag,
)
from commitmq.format.message_id import MAX_BLOCK, UniqueIds
from commitmq.format.producer_mark import MARK_DIGITS, mark_of
from commitmq.format.properties import encode_properties
from commitmq.format.record import crc32

if TYPE_CHECKING:
    import numpy as np

    from commitmq.client.results import RunAck

CRC_SLOT: Final = CRC_PROPERTY_PREFIX + b"0" * 10 + b"\x02"
UNIQUE_PREFIX: Final = Property.UNIQUE_KEY.encode() + b"\x01"
UNIQUE_BYTES: Final = len(UNIQUE_PREFIX) + 32 + 1
MAX_RUN_MESSAGES: Final = MAX_BLOCK
_SHORT: Final = struct.Struct(">h")


@dataclass(slots=True)
class EncodedRun:
    """An encoded run, with the values that make results of its answer. ``sizes``: bytes of each record."""

    topic: str
    queue: int
    data: bytes
    sizes: Sequence[int]
    unique: tuple[str, int] | list[str]

    @property
    def count(self) -> int:
        return len(self.sizes)

    def acknowledged(self, ack: str, answer: dict[str, Any]) -> RunAck:
        """The results of the run, made of the node's ``answer``."""
        from commitmq.client.results import RunAck

        return RunAck(self.topic, self.queue, ack, self.sizes, self.unique, answer)


class RunLayout:
    """The layout of records of one topic for one node, as the node's ``hello`` says.

    ``head`` packs everything before the body: see :func:`encode_messages`.
    """

    __slots__ = (
        "crc_slot",
        "end_bytes",
        "fixed_bytes",
        "head",
        "magic",
        "mark",
        "sys_flag",
        "tail",
        "topic",
        "topic_bytes",
        "v6_bytes",
    )

    def __init__(self, topic: str, *, born_v6: bool, store_v6: bool, properties_crc: bool, mark: bytes = b"") -> None:
        """``mark`` is the mark of an idempotent producer without the sequence, else empty."""
        name = topic.encode()
        wide = len(topic) > V1_TOPIC_UNITS
        self.topic = topic
        self.topic_bytes = name
        self.magic = MAGIC_V2 if wide else MAGIC_V1
        self.sys_flag = (SysFlag.BORN_HOST_V6 if born_v6 else 0) | (SysFlag.STORE_HOST_V6 if store_v6 else 0)
        born, store = (HOST_V6_BYTES if born_v6 else HOST_BYTES), (HOST_V6_BYTES if store_v6 else HOST_BYTES)
        self.v6_bytes = born + store - 2 * HOST_BYTES
        # size, magic, crc, queue id, flag, [queue offset, physical offset], sysFlag, born, [born host, store time,
        # store host], reconsume times, [prepared offset], body length; the bracketed are zeros.
        self.head = struct.Struct(f">iiiii16xiq{born + 8 + store}xi8xi")
        self.tail = (_SHORT.pack(len(name)) if wide else bytes((len(name),))) + name
        self.crc_slot = CRC_SLOT if properties_crc else b""
        self.mark = mark
        # The end of every record's properties: the unique id, the mark, the slot.
        self.end_bytes = UNIQUE_BYTES + (len(mark) + MARK_DIGITS + 1 if mark else 0) + len(self.crc_slot)
        # Everything but the body and the properties.
        self.fixed_bytes = MIN_RECORD_BYTES + wide + self.v6_bytes + len(name)

    def record_bytes(self, body_bytes: int, properties_bytes: int) -> int:
        """Size of a record whose properties (without unique id and slot) take ``properties_bytes``."""
        return self.fixed_bytes + body_bytes + properties_bytes + self.end_bytes


class Outgoing(Protocol):
    """A message of a run. ``encoded_extras``: encoded properties, flag, compression bits; None for a message without any."""

    body: bytes
    encoded_extras: tuple[bytes, int, int] | None
    born: int


_TWO_DIGITS: Final = [b"%02X" % number for number in range(256)]


def _in_steps(pieces: Iterable[bytes], counter: int, count: int) -> list[bytes]:
    """``count`` of ``pieces``, the next one wherever a counter that begins at ``counter`` comes to a multiple of 256."""
    steps: list[bytes] = []
    at = counter
    for piece in pieces:
        steps += [piece] * min(256 - (at & 0xFF), counter + count - at)
        at += 256 - (at & 0xFF)
    return steps


def encode_messages(
    layout: RunLayout, queue: int, messages: Sequence[Outgoing], unique: tuple[bytes, int], sequence: int = 0
) -> tuple[list[int], bytes]:
    """``(size of each record, all records)`` of a run. ``unique``: of :meth:`UniqueIds.block`.

    ``sequence``: of the first record, where the layout has a mark.
    """
    count = len(messages)
    prefix, counter = unique
    pack, magic, layout_flags = layout.head.pack, layout.magic, layout.sys_flag
    fixed = layout.fixed_bytes + layout.end_bytes
    bodies = [one.body for one in messages]
    sizes = [fixed + len(body) for body in bodies]
    # The bytes between the body and the last two digits of the unique id. In messages without properties they are the same
    # for up to 256 messages.
    before = layout.tail + _SHORT.pack(layout.end_bytes) + UNIQUE_PREFIX + prefix
    highs = [_TWO_DIGITS[at & 0xFF] for at in range(counter >> 8, (counter + count - 1 >> 8) + 1)]
    tails = _in_steps([before + high for high in highs], counter, count)
    heads = [
        pack(size, magic, crc32(body) & 0x7FFFFFFF, queue, 0, layout_flags, one.born, 0, len(body))
        for one, size, body in zip(messages, sizes, bodies, strict=True)
    ]
    for index, one in enumerate(messages):
        if one.encoded_extras is not None:
            properties, flag, sys_flag = one.encoded_extras
            body = bodies[index]
            size = sizes[index] = sizes[index] + len(properties)
            heads[index] = pack(
                size, magic, crc32(body) & 0x7FFFFFFF, queue, flag, layout_flags | sys_flag, one.born, 0, len(body)
            )
            tails[index] = b"%b%b%b%b%b%b" % (
                layout.tail,
                _SHORT.pack(layout.end_bytes + len(properties)),
                properties,
                UNIQUE_PREFIX,
                prefix,
                _TWO_DIGITS[counter + index >> 8 & 0xFF],
            )
    parts = [b""] * (5 * count)
    parts[0::5] = heads
    parts[1::5] = bodies
    parts[2::5] = tails
    parts[3::5] = (_TWO_DIGITS * ((count >> 8) + 2))[counter & 0xFF : (counter & 0xFF) + count]
    if layout.mark:
        parts[4::5] = [b"\x02" + mark_of(layout.mark, at) + layout.crc_slot for at in range(sequence, sequence + count)]
    else:
        parts[4::5] = [b"\x02" + layout.crc_slot] * count
    return sizes, b"".join(parts)


_HEX = b"0123456789ABCDEF"
_head_types: dict[int, np.dtype[np.void]] = {}


def _head_type(v6_bytes: int) -> np.dtype[np.void]:
    """numpy's view of the bytes before the body. IPv6 hosts add ``v6_bytes``. Fields that stay zero have no name."""
    import numpy as np

    if v6_bytes not in _head_types:
        hosts_bytes = 2 * HOST_BYTES + v6_bytes
        _head_types[v6_bytes] = np.dtype(
            {
                "names": ["size", "magic", "crc", "queue", "flag", "sys_flag", "born", "body"],
                "formats": [">i4", ">i4", ">i4", ">i4", ">i4", ">i4", ">i8", ">i4"],
                "offsets": [
                    SIZE_OFFSET,
                    MAGIC_OFFSET,
                    BODY_CRC_OFFSET,
                    QUEUE_ID_OFFSET,
                    FLAG_OFFSET,
                    SYS_FLAG_OFFSET,
                    BORN_TIMESTAMP_OFFSET,
                    BODY_SIZE_OFFSET + hosts_bytes,
                ],
                "itemsize": BODY_OFFSET + hosts_bytes,
            }
        )
    return _head_types[v6_bytes]


def _decimal_digits(first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """MARK_DIGITS decimal digits, in ASCII, of each of ``count`` numbers: one row a number."""
    import numpy as np

    numbers = np.arange(first, first + count, dtype=np.int64)
    powers = 10 ** np.arange(MARK_DIGITS - 1, -1, -1, dtype=np.int64)
    return (numbers[:, None] // powers % 10 + 48).astype(np.uint8)


def encode_run(
    layout: RunLayout,
    queue: int,
    bodies: Sequence[bytes],
    properties: bytes | Sequence[bytes],
    unique_ids: UniqueIds,
    *,
    born: int,
    flags: int | Sequence[int] = 0,
    sys_flags: int | Sequence[int] = 0,
    body_sizes: np.ndarray[Any, np.dtype[np.int64]] | None = None,
    sequence: int = 0,
) -> EncodedRun:
    """Encode ``bodies`` (1 to MAX_RUN_MESSAGES) as one run.

    ``properties`` are encoded, without the unique id: one for all messages, or one a message. ``sys_flags`` are
    compression bits. ``sequence`` is the number of the first record, where the layout has a mark. The caller checks the
    sizes. Properties beyond 32,767 bytes raise InvalidMessageError.
    """
    import numpy as np

    count = len(bodies)
    sizes_of_bodies = np.fromiter(map(len, bodies), np.int64, count) if body_sizes is None else body_sizes
    prefix, counter = unique_ids.block(count)
    if isinstance(properties, bytes):
        properties_bytes: Any = len(properties) + layout.end_bytes
        longest = properties_bytes
    else:
        properties_bytes = np.fromiter(map(len, properties), np.int64, count) + layout.end_bytes
        longest = int(properties_bytes.max())
    if longest > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(f"the properties take {longest} bytes, at most {MAX_PROPERTIES_BYTES} are allowed")
    sizes = sizes_of_bodies + (layout.fixed_bytes + properties_bytes)

    before = UNIQUE_PREFIX + prefix
    if isinstance(properties, bytes):
        before = layout.tail + _SHORT.pack(longest) + properties + before
    tail = before + b"0000\x02" + mark_of(layout.mark, sequence) + layout.crc_slot
    tail_bytes = len(tail)
    head_type = _head_type(layout.v6_bytes)
    # Piece i is the tail of message i-1 followed by the head of message i; the first has no tail, the last no head.
    pieces = np.zeros((count + 1, tail_bytes + head_type.itemsize), np.uint8)
    _fill_tails(pieces[1:, :tail_bytes], tail, len(before), counter, len(layout.mark), sequence)
    heads = np.ndarray((count,), head_type, pieces, tail_bytes, (pieces.strides[0],))
    heads["size"] = sizes
    heads["magic"] = layout.magic
    heads["crc"] = np.fromiter(map(crc32, bodies), np.uint32, count) & 0x7FFFFFFF
    heads["queue"] = queue
    heads["flag"] = flags
    heads["sys_flag"] = np.asarray(sys_flags) | layout.sys_flag
    heads["born"] = born
    heads["body"] = sizes_of_bodies

    glue: list[bytes] = pieces.view(f"V{pieces.shape[1]}").ravel().tolist()
    glue[0] = glue[0][tail_bytes:]
    glue[-1] = glue[-1][:tail_bytes]
    own = None if isinstance(properties, bytes) else _own_pieces(layout, properties, properties_bytes.tolist())
    return EncodedRun(layout.topic, queue, _join(glue, bodies, own), sizes, (prefix.decode(), counter))


def _fill_tails(
    tails: np.ndarray[Any, np.dtype[np.uint8]],
    tail: bytes,
    unique_at: int,
    counter: int,
    mark_bytes: int,
    sequence: int,
) -> None:
    """Write the tails of records, one row a record: ``tail`` with the record's own unique id, and its sequence in the mark.

    The last four digits of the unique id are at ``unique_at``. ``counter`` and ``sequence`` are the first record's.
    """
    import numpy as np

    count = len(tails)
    numbers = (np.arange(counter, counter + count, dtype=np.uint32) & 0xFFFF).astype(np.uint16)
    digits = np.frombuffer(_HEX, np.uint8)[(numbers[:, None] >> np.array([12, 8, 4, 0], np.uint16)) & 0xF]
    tails[:] = np.frombuffer(tail, np.uint8)
    tails[:, unique_at : unique_at + 4] = digits
    if mark_bytes:
        at = unique_at + 5 + mark_bytes
        tails[:, at : at + MARK_DIGITS] = _decimal_digits(sequence, count)


def _own_pieces(layout: RunLayout, properties: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
    """The piece behind each body, where messages differ in length and bytes of their properties."""
    topic, pack = layout.tail, _SHORT.pack
    return [topic + pack(length) + encoded for length, encoded in zip(lengths, properties, strict=True)]


def _join(glue: list[bytes], bodies: Sequence[bytes], own: list[bytes] | None) -> bytes:
    """The run: a piece of ``glue``, a body, a piece of ``own`` if there are any, and so on; a piece of ``glue`` ends it."""
    step = 2 if own is None else 3
    parts = [b""] * (step * len(bodies) + 1)
    parts[0::step] = glue
    parts[1::step] = bodies
    if own is not None:
        parts[2::step] = own
    return b"".join(parts)


def encode_user_properties(properties: dict[str, str]) -> bytes:
    """The properties of a message without its unique id, as a run holds them (insertion order)."""
    return encode_properties(properties, buckets=None) if properties else b""
