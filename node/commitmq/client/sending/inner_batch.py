"""Inner batches in the client: several messages that the node keeps as one record (spec 2.8).

:func:`encode_batch` encodes messages to be sent as RocketMQ's client batch, which becomes the record's body.
:func:`expand` replaces the inner batches that were read by their messages, which look like all others from then on.

Messages read through a light message queue (LMQ, spec 3.10): records of other topics, numbered again.

A record names its LMQs and its offset in each of them in ``INNER_MULTI_DISPATCH`` and ``INNER_MULTI_QUEUE_OFFSET``. A
reader of an LMQ sees the name of the LMQ as topic, queue 0 and the offset there, so that positions, commits and seeks
work as everywhere. ``Message.origin_topic`` is the topic to which the message was sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from commitmq.client.receiving.part import Array, RecordBatch
from commitmq.client.sending.run_encoder import UNIQUE_BYTES, UNIQUE_PREFIX
from commitmq.errors import CommitMQError, CorruptRecordError, InvalidMessageError
from commitmq.format.compression import decompress
from commitmq.format.constants import (
    ELEMENT_BODY_OFFSET,
    ELEMENT_BYTES,
    LMQ_PREFIX,
    MAGIC_V2,
    MAX_PROPERTIES_BYTES,
    MULTI_DISPATCH_SEPARATOR,
    Property,
    SysFlag,
)
from commitmq.format.message_id import UniqueIds
from commitmq.format.properties import decode_properties

MAX_MESSAGES: Final = 32_767

_INNER: Final = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
_COMPRESSION: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK
_ELEMENT: Final = struct.Struct(">iiiii")
_SHORT: Final = struct.Struct(">h")
_HEX: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_HEAD: Final = np.dtype([("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body", ">i4")])


def message_bytes(body_bytes: Any, properties_bytes: Any) -> Any:
    """Bytes of a message in an inner batch; ``properties_bytes`` without the unique id."""
    return ELEMENT_BYTES + UNIQUE_BYTES + body_bytes + properties_bytes


def encode_batch(
    bodies: Sequence[bytes],
    properties: bytes | Sequence[bytes],
    unique_ids: UniqueIds,
    *,
    body_sizes: Array,
    flags: int | Sequence[int] = 0,
) -> tuple[bytes, tuple[str, int]]:
    """``bodies`` (1 to MAX_MESSAGES) as a client batch, and the block of their unique ids.

    ``properties`` are encoded, without the unique id: one for all messages, or one a message. Raises InvalidMessageError for
    properties beyond 32,767 bytes. As in a run, the bytes between two bodies are made in columns, not message by message.
    """
    count = len(bodies)
    prefix, counter = unique_ids.block(count)
    numbers = (np.arange(counter, counter + count, dtype=np.uint32) & 0xFFFF).astype(np.uint16)
    digits = _HEX[(numbers[:, None] >> np.array([12, 8, 4, 0], np.uint16)) & 0xF]
    shared = isinstance(properties, bytes)
    if isinstance(properties, bytes):
        properties_bytes: Any = len(properties) + UNIQUE_BYTES
        longest = properties_bytes
    else:
        properties_bytes = np.fromiter(map(len, properties), np.int64, count) + UNIQUE_BYTES
        longest = int(properties_bytes.max())
    if longest > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(f"the properties take {longest} bytes, at most {MAX_PROPERTIES_BYTES} are allowed")

    # Piece i is the tail of message i-1 (its properties' end) followed by the head of message i.
    before = UNIQUE_PREFIX + prefix
    if isinstance(properties, bytes):
        before = _SHORT.pack(longest) + properties + before
    tail_bytes = len(before) + 5
    pieces = np.zeros((count + 1, tail_bytes + _HEAD.itemsize), np.uint8)
    pieces[1:, :tail_bytes] = np.frombuffer(before + b"0000\x02", np.uint8)
    pieces[1:, len(before) : len(before) + 4] = digits
    heads = np.ndarray((count,), _HEAD, pieces, tail_bytes, (pieces.strides[0],))
    heads["size"] = body_sizes + (ELEMENT_BYTES + properties_bytes)
    heads["flag"] = flags
    heads["body"] = body_sizes
    glue: list[bytes] = pieces.view(f"V{tail_bytes + _HEAD.itemsize}").ravel().tolist()
    glue[0] = glue[0][tail_bytes:]
    glue[-1] = glue[-1][:tail_bytes]
    step = 2 if shared else 3
    parts: list[bytes] = [b""] * (step * count + 1)
    parts[0::step] = glue
    parts[1::step] = bodies
    if not isinstance(properties, bytes):
        parts[2::3] = [
            _SHORT.pack(length) + own for length, own in zip(properties_bytes.tolist(), properties, strict=True)
        ]
    return b"".join(parts), (prefix.decode(), counter)


def expand(parts: list[RecordBatch], asked: int, tags: frozenset[str] | None = None) -> list[RecordBatch]:
    """``parts`` with the messages of inner batches in the place of their records.

    Messages below queue offset ``asked`` are dropped, because a pull may begin inside an inner batch. Messages of inner
    batches without one of ``tags`` are dropped too. Raises CorruptRecordError for a record that holds no valid batch.
    """
    result: list[RecordBatch] = []
    for part in parts:
        inner = (part.heads["sys_flag"] & _INNER) == _INNER
        if not inner.any():
            result.append(part)
            continue
        edges = np.flatnonzero(np.diff(inner)) + 1
        for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(part)], strict=True):
            piece = part.cut(start, stop)
            if inner[start]:
                result += _messages_inside(piece, asked, tags)
            else:
                result.append(piece)
    return [part for part in result if len(part)]


def _messages_inside(part: RecordBatch, asked: int, tags: frozenset[str] | None) -> list[RecordBatch]:
    """The messages in the inner batches of ``part``. It has no other records."""
    compressed = (part.heads["sys_flag"] & SysFlag.COMPRESSED) != 0
    if not compressed.any():
        return [_elements(part, part.data, part.body_offsets.tolist(), asked, tags)]
    # RocketMQ's producers do not compress batches, but its consumers would decompress them.
    result = []
    for index in range(len(part)):
        one = part.cut(index, index + 1)
        start, size = int(one.body_offsets[0]), int(one.heads["body_size"][0])
        body = bytes(memoryview(one.data)[start : start + size])
        if compressed[index]:
            try:
                body = decompress(body, int(one.heads["sys_flag"][0]))
            except CommitMQError as error:
                raise _corrupt(one, 0, str(error)) from error
            one = replace(one, heads=one.heads.copy())
            one.heads["sys_flag"] &= ~_COMPRESSION
            one.heads["body_size"] = len(body)
        result.append(_elements(one, memoryview(body), [0], asked, tags))
    return result


def _elements(part: RecordBatch, data: Any, starts: list[int], asked: int, tags: frozenset[str] | None) -> RecordBatch:
    """One part with the messages of all batches of ``part``, whose bodies begin at ``starts`` of ``data``."""
    view = memoryview(data)
    positions: list[int] = []
    sizes: list[int] = []
    flags: list[int] = []
    bodies: list[int] = []
    owners: list[int] = []
    offsets: list[int] = []
    unpack = _ELEMENT.unpack_from
    rows = zip(starts, part.heads["body_size"].tolist(), part.heads["queue_offset"].tolist(), strict=True)
    for owner, (at, length, offset) in enumerate(rows):
        end = at + length
        while at < end:
            if end - at < ELEMENT_BYTES:
                raise _corrupt(part, owner, "it ends inside a message")
            size, _, _, flag, body = unpack(view, at)
            if not (ELEMENT_BYTES <= size <= end - at and 0 <= body <= size - ELEMENT_BYTES):
                raise _corrupt(part, owner, f"a message of {size} bytes with a body of {body} does not fit")
            if ELEMENT_BYTES + body + _SHORT.unpack_from(view, at + ELEMENT_BODY_OFFSET + body)[0] != size:
                raise _corrupt(part, owner, "the sizes of a message's parts do not add up")
            if offset >= asked and (tags is None or _has_tag(view, at + ELEMENT_BYTES + body, at + size, tags)):
                positions.append(at)
                sizes.append(size)
                flags.append(flag)
                bodies.append(body)
                owners.append(owner)
                offsets.append(offset)
            at += size
            offset += 1
    heads = part.heads[owners]
    heads["size"] = sizes
    heads["flag"] = flags
    heads["queue_offset"] = offsets
    heads["body_size"] = bodies
    places = np.array(positions, np.int64)
    body_offsets = places + ELEMENT_BODY_OFFSET
    hosts = None
    if part.v6:
        known = part.store_hosts()
        hosts = [known[owner] for owner in owners]
    return RecordBatch(
        part.topic,
        part.queue_id,
        data,
        places,
        heads,
        body_offsets,
        part.v6,
        property_starts=body_offsets + np.array(bodies, np.int64) + 2,
        hosts=hosts,
    )


def _has_tag(view: memoryview, start: int, end: int, tags: frozenset[str]) -> bool:
    return decode_properties(view[start:end]).get(Property.TAGS) in tags


def _corrupt(part: RecordBatch, owner: int, reason: str) -> CorruptRecordError:
    physical = int(part.heads["physical_offset"][owner])
    error = CorruptRecordError(f"the batch in the record at physical offset {physical}: {reason}")
    error.offset = physical
    return error


def is_light(topic: str) -> bool:
    """True for an LMQ's name."""
    return topic.startswith(LMQ_PREFIX)


def renumber(part: RecordBatch) -> RecordBatch:
    """``part``, read through the LMQ ``part.topic``, with the LMQ's numbers. Raises CorruptRecordError."""
    view = memoryview(part.data)
    heads = part.heads.copy()
    body_ends: Array = part.body_offsets + part.heads["body_size"]
    starts: list[int] = []
    topics: list[str] = []
    offsets: list[int] = []
    rows = zip(
        body_ends.tolist(),
        (part.positions + part.heads["size"]).tolist(),
        (part.heads["magic"] == MAGIC_V2).tolist(),
        strict=True,
    )
    for at, end, wide in rows:
        size = int.from_bytes(view[at : at + 1 + wide])
        at += 1 + wide
        topics.append(str(view[at : at + size], "utf-8", "replace"))
        at += size + 2
        starts.append(at)
        offsets.append(_offset_in(part.topic, decode_properties(view[at:end])))
    heads["queue_offset"] = offsets
    heads["queue_id"] = part.queue_id
    return replace(part, heads=heads, property_starts=np.array(starts, np.int64), origins=topics)


def _offset_in(name: str, properties: dict[str, str]) -> int:
    names = properties.get(Property.INNER_MULTI_DISPATCH, "").split(MULTI_DISPATCH_SEPARATOR)
    offsets = properties.get(Property.INNER_MULTI_QUEUE_OFFSET, "").split(MULTI_DISPATCH_SEPARATOR)
    try:
        return int(offsets[names.index(name)])
    except (ValueError, IndexError):
        raise CorruptRecordError(f"a record in {name} does not say that it is there") from None
