"""A record batch: records of one queue in one buffer, as columns; made of a reader's answer, and taken apart into messages.

The buffer is a segment of the node, mapped read-only on the same host, or a frame of an answer. numpy gathers the heads of
all records in one step. A body is decompressed when its message is made, not before; one that cannot be decompressed
raises when the consumer asks for it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from commitmq.client.message import Message
from commitmq.errors import CommitMQError, CorruptRecordError, SegmentSizeError, UndecodableBodyError
from commitmq.format.compression import decompress
from commitmq.format.constants import (
    BODY_CRC_OFFSET,
    BODY_OFFSET,
    BODY_SIZE_OFFSET,
    BORN_TIMESTAMP_OFFSET,
    FLAG_OFFSET,
    HOST_BYTES,
    HOST_V6_BYTES,
    LMQ_PREFIX,
    MAGIC_OFFSET,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    PHYSICAL_OFFSET_OFFSET,
    QUEUE_ID_OFFSET,
    QUEUE_OFFSET_OFFSET,
    RECONSUME_TIMES_OFFSET,
    SIZE_OFFSET,
    STORE_HOST_OFFSET,
    STORE_TIMESTAMP_OFFSET,
    SYS_FLAG_OFFSET,
    SysFlag,
)
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT
from commitmq.store.layout import StoreLayout


class SegmentMaps:
    """Read-only mappings of the node's segments, for consumers on the same host.

    At most ``max_mapped`` mappings; the least recently used one goes first. Not thread-safe.

    The mappings belong to one store and one epoch of its node.

    This class only forgets a mapping. Batches from it keep it alive, and it is unmapped when the last of them goes. The same
    holds when the node deletes a segment: the pages of the file live on in the mapping.
    """

    def __init__(self, store: Path, segment_bytes: int, *, max_mapped: int = 16) -> None:
        self._folder = StoreLayout(store).commit_log
        self._segment_bytes = segment_bytes
        self._max_mapped = max_mapped
        self._maps: OrderedDict[int, tuple[mmap.mmap, tuple[int, int]]] = (
            OrderedDict()
        )  # with the file's device and inode

    @property
    def segment_bytes(self) -> int:
        return self._segment_bytes

    def map(self, base_offset: int) -> mmap.mmap:
        """The mapping of the segment that starts at ``base_offset``.

        Raises OSError when the segment cannot be opened (deleted, no permission), SegmentSizeError when it does not have the
        size that the node gives.
        """
        found = self._maps.get(base_offset)
        if found is not None:
            self._maps.move_to_end(base_offset)
            return found[0]
        path = self._folder / segment_name(base_offset)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            size = status.st_size
            if size != self._segment_bytes:
                raise SegmentSizeError(f"the segment has {size} bytes, the node says {self._segment_bytes}", path=path)
            made = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.drop_deleted()
        self._maps[base_offset] = made, (status.st_dev, status.st_ino)
        while len(self._maps) > self._max_mapped:
            self._maps.popitem(last=False)
        return made

    def drop_deleted(self) -> None:
        """Forget the mappings of deleted segments, and of segments whose name belongs to another file by now.

        Such a mapping keeps disk space of the node in use, and its bytes are not the node's segment any more.
        """
        for base_offset, (_, identity) in list(self._maps.items()):
            try:
                status = os.stat(self._folder / segment_name(base_offset))
            except OSError:
                del self._maps[base_offset]
                continue
            if (status.st_dev, status.st_ino) != identity:
                del self._maps[base_offset]

    def close(self) -> None:
        """Forget all mappings. A mapping in use lives as long as its batches."""
        self._maps.clear()


class _UndecodableMessage(Message):
    """A received message whose body cannot be decompressed as its sysFlag says."""

    __slots__ = ("_damage", "_raw_body")

    _damage: str
    _raw_body: bytes

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For pickle and copy, which would otherwise read ``body``, and that raises."""
        names = [*Message.__slots__, *_UndecodableMessage.__slots__]
        return None, {name: getattr(self, name) for name in names if name != "body" and hasattr(self, name)}

    @property
    def body(self) -> bytes:  # type: ignore[override]
        place = f"{self.topic}/{self.queue_id}@{self.queue_offset}"
        raise UndecodableBodyError(f"message {place} has a body that cannot be decoded: {self._damage}; see raw_body")

    @property
    def damage(self) -> str:
        return self._damage

    @property
    def raw_body(self) -> bytes:
        return self._raw_body


def decode_body(body: bytes, sys_flag: int) -> bytes | UndecodableBodyError:
    """The decompressed ``body``, or the error that says why it cannot be decompressed."""
    try:
        return decompress(body, sys_flag)
    except CommitMQError as error:
        return UndecodableBodyError(str(error))


def received(
    topic: str,
    queue_id: int,
    queue_offset: int,
    physical_offset: int,
    store_timestamp: int,
    born_timestamp: int,
    sys_flag: int,
    flag: int,
    reconsume_times: int,
    store_host: bytes,
    raw_properties: bytes,
    body: bytes,
    decoded: bytes | UndecodableBodyError | None = None,
) -> Message:
    """A received message.

    ``body`` has the stored bytes. ``decoded`` is the result of :func:`decode_body` if a caller has it already. ``store_host``
    has 8 or 20 bytes.
    """
    if not sys_flag & SysFlag.COMPRESSED:
        message = _new(Message)
        message.body = body
    else:
        message = _compressed(body, decode_body(body, sys_flag) if decoded is None else decoded)
    message.topic = topic
    message.queue_id = queue_id
    message.queue_offset = queue_offset
    message.physical_offset = physical_offset
    message.store_timestamp = store_timestamp
    message.born_timestamp = born_timestamp
    message.sys_flag = sys_flag
    message.flag = flag
    message.reconsume_times = reconsume_times
    message._store_host = store_host
    message._raw_properties = raw_properties
    message._properties = None
    return message


def _compressed(body: bytes, decoded: bytes | UndecodableBodyError) -> Message:
    if isinstance(decoded, bytes):
        message = _new(Message)
        message.body = decoded
        return message
    damaged = _UndecodableMessage.__new__(_UndecodableMessage)
    damaged._damage, damaged._raw_body = str(decoded), body
    return damaged


_new = Message.__new__


Array = np.ndarray[Any, np.dtype[Any]]

_HOSTS_BYTES: Final = 2 * HOST_BYTES
_HEAD_BYTES: Final = BODY_OFFSET + _HOSTS_BYTES
HEAD: Final = np.dtype({
    "names": [
        "size", "magic", "crc", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag", "born_timestamp",
        "store_timestamp", "store_host", "reconsume_times", "body_size",
    ],
    "formats": [">i4", ">i4", ">i4", ">i4", ">i4", ">i8", ">i8", ">i4", ">i8", ">i8", "V8", ">i4", ">i4"],
    "offsets": [
        SIZE_OFFSET, MAGIC_OFFSET, BODY_CRC_OFFSET, QUEUE_ID_OFFSET, FLAG_OFFSET, QUEUE_OFFSET_OFFSET, PHYSICAL_OFFSET_OFFSET,
        SYS_FLAG_OFFSET, BORN_TIMESTAMP_OFFSET, STORE_TIMESTAMP_OFFSET + HOST_BYTES, STORE_HOST_OFFSET + HOST_BYTES,
        RECONSUME_TIMES_OFFSET + _HOSTS_BYTES, BODY_SIZE_OFFSET + _HOSTS_BYTES,
    ],
    "itemsize": _HEAD_BYTES,
})  # fmt: skip
"""The bytes before the body of a record with two IPv4 hosts (spec 2.1)."""
_SIZE: Final = struct.Struct(">i")
_MANY_FRAMES: Final = 8
_V6: Final = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6


@dataclass(slots=True)
class RecordBatch:
    """Records of one queue in one buffer, ``data``. Every array has one entry a record; ``positions`` are where they begin.

    The messages of an inner batch and the messages of an LMQ do not lie as other records of a queue do. For them
    ``property_starts`` says where the properties begin, ``hosts`` has the store hosts, and ``origins`` has the topics that the
    messages were sent to. ``decoded`` has the compressed bodies that were decoded already, by position. The pieces of a part
    share it.
    """

    topic: str
    queue_id: int
    data: mmap.mmap | memoryview
    positions: Array
    heads: Array
    body_offsets: Array
    v6: bool  # a record has an IPv6 host, so its store host is not where ``heads`` has it
    property_starts: Array | None = None
    hosts: list[bytes] | None = None
    origins: list[str] | None = None
    decoded: dict[int, bytes | UndecodableBodyError] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def cut(self, start: int, stop: int) -> RecordBatch:
        """Records ``start`` to ``stop`` of this part, in the same memory."""
        span = slice(start, stop)
        return replace(
            self,
            positions=self.positions[span],
            heads=self.heads[span],
            body_offsets=self.body_offsets[span],
            property_starts=None if self.property_starts is None else self.property_starts[span],
            hosts=None if self.hosts is None else self.hosts[span],
            origins=None if self.origins is None else self.origins[span],
        )

    def body_of(self, index: int) -> bytes | UndecodableBodyError:
        """The body of a compressed record, or the error that says why it cannot be decoded."""
        known = None if self.decoded is None else self.decoded.get(int(self.positions[index]))
        if known is not None:
            return known
        start = int(self.body_offsets[index])
        body = bytes(memoryview(self.data)[start : start + int(self.heads["body_size"][index])])
        return decode_body(body, int(self.heads["sys_flag"][index]))

    def store_hosts(self) -> list[bytes]:
        """The store host of each record, as its 8 or 20 stored bytes."""
        if self.hosts is not None:
            return self.hosts
        if not self.v6:
            hosts: list[bytes] = self.heads["store_host"].tolist()
            return hosts
        view = memoryview(self.data)
        result = []
        for position, flags in zip(self.positions.tolist(), self.heads["sys_flag"].tolist(), strict=True):
            start = position + STORE_HOST_OFFSET + (HOST_V6_BYTES if flags & SysFlag.BORN_HOST_V6 else HOST_BYTES)
            result.append(bytes(view[start : start + (HOST_V6_BYTES if flags & SysFlag.STORE_HOST_V6 else HOST_BYTES)]))
        return result


def decode_part(
    topic: str, queue_id: int, data: mmap.mmap | memoryview, positions: Array, sizes: Array | None
) -> RecordBatch:
    """Gather the heads of the records at ``positions`` (int64) of ``data`` and check them.

    ``sizes`` are the records' sizes in the ConsumeQueue, or None where only the records themselves tell their sizes. The
    records of an LMQ may have any queue id. Raises CorruptRecordError when ``data`` has another thing at one of the positions.
    """
    length = len(data)
    if int(positions.min()) < 0 or int(positions.max()) > length - MIN_RECORD_BYTES:
        raise CorruptRecordError(f"a record of {topic}/{queue_id} is said to lie outside its {length} bytes of log")
    # This array has an item of 88 bytes at every byte, so one indexing copies all heads, aligned or not.
    everywhere: Array = np.ndarray((length - _HEAD_BYTES + 1,), f"V{_HEAD_BYTES}", data, 0, (1,))
    heads: Array = everywhere[positions].view(HEAD)
    flags = heads["sys_flag"]
    v6 = bool((flags & _V6).any())
    body_offsets = positions + _HEAD_BYTES
    if v6:
        body_offsets = _widen(data, positions, heads)
    wrong = (heads["magic"] != MAGIC_V1) & (heads["magic"] != MAGIC_V2)
    if not topic.startswith(LMQ_PREFIX):
        wrong |= heads["queue_id"] != queue_id
    wrong |= heads["body_size"] < 0
    wrong |= body_offsets + heads["body_size"] > positions + heads["size"]
    wrong |= positions + heads["size"] > length
    if sizes is not None:
        wrong |= heads["size"] != sizes
    if wrong.any():
        index = int(wrong.argmax())
        raise CorruptRecordError(
            f"queue {queue_id} of {topic!r} leads to a place without its record; the bytes there give"
            f" {int(heads['physical_offset'][index])} as their physical offset",
            offset=int(positions[index]),
        )
    return RecordBatch(topic, queue_id, data, positions, heads, body_offsets, v6)


def _widen(data: mmap.mmap | memoryview, positions: Array, heads: Array) -> Array:
    """Correct the fields that IPv6 hosts push back. Returns where the bodies begin."""
    flags = heads["sys_flag"]
    born = np.where(flags & SysFlag.BORN_HOST_V6, HOST_V6_BYTES, HOST_BYTES)
    store = np.where(flags & SysFlag.STORE_HOST_V6, HOST_V6_BYTES, HOST_BYTES)
    raw: Array = np.frombuffer(data, np.uint8)
    for name, offset in (
        ("store_timestamp", STORE_TIMESTAMP_OFFSET + born),
        ("reconsume_times", RECONSUME_TIMES_OFFSET + born + store),
        ("body_size", BODY_SIZE_OFFSET + born + store),
    ):
        kind = HEAD[name]
        columns = np.arange(kind.itemsize)
        # A record may be too short for its own flags. The clip keeps the read inside; the checks refuse the record then.
        places = np.minimum((positions + offset)[:, None] + columns, len(raw) - 1)
        heads[name] = raw[places].view(kind).ravel()
    body_offsets: Array = positions + 72 + born + store
    return body_offsets


def parts_of_units(topic: str, queue_id: int, frame: memoryview, segments: SegmentMaps) -> list[RecordBatch]:
    """Decode an answer of mode ``ranges``: ConsumeQueue units whose records lie in the mapped segments.

    Raises OSError when a segment cannot be mapped, CorruptRecordError when a unit and its record do not fit.
    """
    units: Array = np.frombuffer(frame, UNIT)
    offsets = units["physical_offset"].astype(np.int64)
    sizes = units["size"].astype(np.int32)
    bases = offsets - offsets % segments.segment_bytes
    parts = []
    # Units of one queue are in the order of the log, so the units of one segment stand side by side.
    edges = np.flatnonzero(np.diff(bases)) + 1
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(units)], strict=True):
        base = int(bases[start])
        data = segments.map(base)
        part = decode_part(topic, queue_id, data, offsets[start:stop] - base, sizes[start:stop])
        if not np.array_equal(part.heads["physical_offset"], offsets[start:stop]):
            raise CorruptRecordError(
                f"records of {topic}/{queue_id} give another physical offset than theirs", offset=base
            )
        parts.append(part)
    return parts


def parts_of_records(topic: str, queue_id: int, frames: Sequence[memoryview]) -> list[RecordBatch]:
    """Decode an answer of mode ``bytes``: whole records, one behind the other. Raises CorruptRecordError."""
    if len(frames) > _MANY_FRAMES:
        # Scattered records come in a frame each. One copy of all is cheaper than many arrays of a few entries.
        frames = [memoryview(b"".join(frames))]
    parts = []
    for data in frames:
        positions = []
        at, length = 0, len(data)
        while at < length:
            if length - at < MIN_RECORD_BYTES:
                raise CorruptRecordError("the answer ends inside a record", offset=at)
            positions.append(at)
            size = _SIZE.unpack_from(data, at)[0]
            if size < MIN_RECORD_BYTES:
                raise CorruptRecordError(f"the answer holds a record of {size} bytes", offset=at)
            at += size
        if positions:
            parts.append(decode_part(topic, queue_id, data, np.array(positions, np.int64), None))
    return parts


def cut_parts(parts: Sequence[RecordBatch], start: int, stop: int) -> list[RecordBatch]:
    """Messages ``start`` to ``stop`` of all parts together."""
    result = []
    for part in parts:
        if stop <= 0:
            break
        if start < len(part):
            result.append(part.cut(max(start, 0), min(stop, len(part))))
        start -= len(part)
        stop -= len(part)
    return result
