"""Batches of received messages: columns first, objects when asked for.

A batch refers to the bytes where they are: in the node's own segments (mapped read-only, same host) or in the frames
that came over the wire. Headers are gathered into numpy arrays in one step for the whole batch; bodies are only looked
at when somebody asks. As long as a batch, or a view of one of its bodies, lives, so does the memory behind it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from commitmq.client.message import Message, decode_body, received
from commitmq.client.receiving.segments import SegmentMaps
from commitmq.errors import CommitMQError, CorruptRecordError, UndecodableBodyError
from commitmq.format.constants import LMQ_PREFIX, MAGIC_V1, MAGIC_V2, MIN_RECORD_BYTES, UNIT_BYTES, SysFlag

if TYPE_CHECKING:
    import pyarrow

Array = np.ndarray[Any, np.dtype[Any]]

_HEAD_BYTES: Final = 88
# The bytes before the body of a record with two IPv4 hosts (spec 2.1).
_HEAD: Final = np.dtype({
    "names": [
        "size", "magic", "crc", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag", "born_timestamp",
        "store_timestamp", "store_host", "reconsume_times", "body_size",
    ],
    "formats": [">i4", ">i4", ">i4", ">i4", ">i4", ">i8", ">i8", ">i4", ">i8", ">i8", "V8", ">i4", ">i4"],
    "offsets": [0, 4, 8, 12, 16, 20, 28, 36, 40, 56, 64, 72, 84],
    "itemsize": _HEAD_BYTES,
})  # fmt: skip
_UNIT: Final = np.dtype(
    {
        "names": ["physical_offset", "size", "tags_code"],
        "formats": [">i8", ">i4", ">i8"],
        "offsets": [0, 8, 12],
        "itemsize": UNIT_BYTES,
    }
)
_SIZE: Final = struct.Struct(">i")
_V6: Final = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6


@dataclass(slots=True)
class Part:
    """Records of one queue in one buffer. ``positions`` are their starts in ``data``; all arrays have one entry each.

    Messages of an inner batch, and those read through an LMQ, do not lie as records of their queue do; the last three
    members before ``decoded`` say how: where the properties begin, the store hosts, and the topics they were sent to.
    ``decoded`` has what is known of compressed bodies, by position; pieces of a part share it.
    """

    topic: str
    queue_id: int
    data: mmap.mmap | memoryview
    positions: Array
    heads: Array
    body_offsets: Array
    v6: bool  # some record has an IPv6 host, so its store host is not where ``heads`` says
    property_starts: Array | None = None
    hosts: list[bytes] | None = None
    origins: list[str] | None = None
    decoded: dict[int, bytes | UndecodableBodyError] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def cut(self, start: int, stop: int) -> Part:
        """Records ``start`` to ``stop`` of this part; the same memory."""
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
        """The body of a record that is stored compressed, or why it cannot be decoded."""
        known = None if self.decoded is None else self.decoded.get(int(self.positions[index]))
        if known is not None:
            return known
        start = int(self.body_offsets[index])
        body = bytes(memoryview(self.data)[start : start + int(self.heads["body_size"][index])])
        return decode_body(body, int(self.heads["sys_flag"][index]))

    def store_hosts(self) -> list[bytes]:
        """Each record's store host as stored: 8 or 20 bytes."""
        if self.hosts is not None:
            return self.hosts
        if not self.v6:
            hosts: list[bytes] = self.heads["store_host"].tolist()
            return hosts
        view = memoryview(self.data)
        result = []
        for position, flags in zip(self.positions.tolist(), self.heads["sys_flag"].tolist(), strict=True):
            start = position + 56 + (20 if flags & SysFlag.BORN_HOST_V6 else 8)
            result.append(bytes(view[start : start + (20 if flags & SysFlag.STORE_HOST_V6 else 8)]))
        return result


def decode_part(topic: str, queue_id: int, data: mmap.mmap | memoryview, positions: Array, sizes: Array | None) -> Part:
    """Gather the headers of the records at ``positions`` (int64) of ``data`` and check them.

    Records read through an LMQ are those of any queue.
    ``sizes`` is what the ConsumeQueue says of each, None when the records follow each other by their own sizes.
    Raises CorruptRecordError when what lies there is not the record that was promised.
    """
    length = len(data)
    if int(positions.min()) < 0 or int(positions.max()) > length - MIN_RECORD_BYTES:
        raise CorruptRecordError(f"a record of {topic}/{queue_id} is said to lie outside its {length} bytes of log")
    # One item starts at every byte, so that taking some is one copy of 88 bytes each, aligned or not.
    everywhere: Array = np.ndarray((length - _HEAD_BYTES + 1,), f"V{_HEAD_BYTES}", data, 0, (1,))
    heads: Array = everywhere[positions].view(_HEAD)
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
            f"what lies at physical offset {int(heads['physical_offset'][index])} (as it says) is not the record that"
            f" queue {queue_id} of {topic!r} promises there",
            offset=int(positions[index]),
        )
    return Part(topic, queue_id, data, positions, heads, body_offsets, v6)


def _widen(data: mmap.mmap | memoryview, positions: Array, heads: Array) -> Array:
    """Correct the fields that IPv6 hosts push back; returns where the bodies start."""
    flags = heads["sys_flag"]
    born = np.where(flags & SysFlag.BORN_HOST_V6, 20, 8)
    store = np.where(flags & SysFlag.STORE_HOST_V6, 20, 8)
    raw: Array = np.frombuffer(data, np.uint8)
    for name, offset in (
        ("store_timestamp", 48 + born),
        ("reconsume_times", 56 + born + store),
        ("body_size", 68 + born + store),
    ):
        kind = _HEAD[name]
        columns = np.arange(kind.itemsize)
        # A record too short for its own flags would be read past the end; the clip makes it fail the checks instead.
        places = np.minimum((positions + offset)[:, None] + columns, len(raw) - 1)
        heads[name] = raw[places].view(kind).ravel()
    body_offsets: Array = positions + 72 + born + store
    return body_offsets


def parts_of_units(topic: str, queue_id: int, frame: memoryview, segments: SegmentMaps) -> list[Part]:
    """Decode an answer of mode ``ranges``: ConsumeQueue units of records that lie in the mapped segments.

    Raises OSError when a segment cannot be mapped, CorruptRecordError when a record is not what its unit says.
    """
    units: Array = np.frombuffer(frame, _UNIT)
    offsets = units["physical_offset"].astype(np.int64)
    sizes = units["size"].astype(np.int32)
    bases = offsets - offsets % segments.segment_bytes
    parts = []
    # Units of one queue are in the order of the log, so each segment is one stretch of them.
    edges = np.flatnonzero(np.diff(bases)) + 1
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(units)], strict=True):
        base = int(bases[start])
        data = segments.map(base)
        part = decode_part(topic, queue_id, data, offsets[start:stop] - base, sizes[start:stop])
        if not np.array_equal(part.heads["physical_offset"], offsets[start:stop]):
            raise CorruptRecordError(f"records of {topic}/{queue_id} say they lie elsewhere than they do", offset=base)
        parts.append(part)
    return parts


_MANY_FRAMES: Final = 8


def parts_of_records(topic: str, queue_id: int, frames: Sequence[memoryview]) -> list[Part]:
    """Decode an answer of mode ``bytes``: whole records, one after the other. Raises CorruptRecordError."""
    if len(frames) > _MANY_FRAMES:
        # Scattered records came one by one; one copy is cheaper than arrays of a few entries.
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


class MessageBatch(Sequence[Message]):
    """Received messages: in the order of their queue, one queue after the other.

    Columns are numpy arrays with one entry a message: ``queue_id``, ``queue_offset``, ``physical_offset``,
    ``store_timestamp`` and ``born_timestamp`` (milliseconds), ``sys_flag``, ``flag``, ``reconsume_times``,
    ``body_size`` (as stored), ``total_size``. Messages of an inner batch share its physical offset, times and flags, and
    have a size of their own. ``topic`` is a list of names. ``bodies`` are views without a copy.
    Indexing and iterating make Message objects with bodies of their own. An empty batch is false.
    """

    __slots__ = ("_columns", "_length", "_parts")

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        self._parts = list(parts)
        self._length = sum(map(len, self._parts))
        self._columns: dict[str, Array] = {}

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"MessageBatch({self._length} messages)"

    # ------------------------------------------------------------ columns

    def _column(self, name: str) -> Array:
        column = self._columns.get(name)
        if column is None:
            kind = _HEAD[name].newbyteorder("=")
            if self._parts:
                column = np.concatenate([part.heads[name] for part in self._parts]).astype(kind)
            else:
                column = np.empty(0, kind)
            self._columns[name] = column
        return column

    @property
    def topic(self) -> list[str]:
        """The topic of each message."""
        return [name for part in self._parts for name in [part.topic] * len(part)]

    @property
    def queue_id(self) -> Array:
        """int32."""
        return self._column("queue_id")

    @property
    def queue_offset(self) -> Array:
        """int64: number of the message in its queue."""
        return self._column("queue_offset")

    @property
    def physical_offset(self) -> Array:
        """int64: bytes from the log's start."""
        return self._column("physical_offset")

    @property
    def store_timestamp(self) -> Array:
        """int64: the node's clock, milliseconds."""
        return self._column("store_timestamp")

    @property
    def born_timestamp(self) -> Array:
        """int64: the producer's clock, milliseconds."""
        return self._column("born_timestamp")

    @property
    def sys_flag(self) -> Array:
        """int32: see the specification's section 2.3."""
        return self._column("sys_flag")

    @property
    def flag(self) -> Array:
        """int32: the application's own."""
        return self._column("flag")

    @property
    def reconsume_times(self) -> Array:
        """int32."""
        return self._column("reconsume_times")

    @property
    def body_size(self) -> Array:
        """int32: bytes of the body as stored, compressed or not."""
        return self._column("body_size")

    @property
    def total_size(self) -> Array:
        """int32: bytes of the whole record, or of the message in its inner batch."""
        return self._column("size")

    @property
    def buffers(self) -> list[tuple[memoryview, Array, Array]]:
        """The bytes behind the batch, for vectorised work: (buffer, body offsets, body sizes) of each stretch.

        Offsets are int64 positions in the buffer, sizes int32. Bodies are as stored.
        """
        return [
            (memoryview(part.data), part.body_offsets, part.heads["body_size"].astype(np.int32)) for part in self._parts
        ]

    @property
    def bodies(self) -> list[memoryview]:
        """The body of each message, decompressed where it has to be, else without a copy.

        Raises UndecodableBodyError for one that cannot be decoded; a poll hands such a message out alone.
        """
        result: list[memoryview] = []
        for part in self._parts:
            view = memoryview(part.data)
            starts = part.body_offsets
            ends = starts + part.heads["body_size"]
            flags = part.heads["sys_flag"]
            bodies = [view[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
            for index in np.flatnonzero(flags & SysFlag.COMPRESSED).tolist():
                body = part.body_of(index)
                if isinstance(body, UndecodableBodyError):
                    raise body
                bodies[index] = memoryview(body)
            result += bodies
        return result

    # ------------------------------------------------------------ objects

    def messages(self) -> list[Message]:
        """All messages as objects."""
        return list(self)

    def __iter__(self) -> Iterator[Message]:
        for part in self._parts:
            yield from _messages(part) if part.origins is None else _messages_of_others(part, part.origins)

    def __getitem__(self, index: Any) -> Any:
        """Message ``index``, or for a slice a batch of the same memory."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return [self[one] for one in range(start, stop, step)]
            return MessageBatch(cut_parts(self._parts, start, stop))
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError("batch index out of range")
        return next(iter(MessageBatch(cut_parts(self._parts, index, index + 1))))

    def to_arrow(self) -> pyarrow.Table:
        """An Arrow table: the columns, ``topic``, ``body`` (decompressed; null where that is not possible), ``tags``, ``keys``
        and ``properties``.

        Raises CommitMQError when pyarrow is not installed.
        """
        try:
            import pyarrow as pa
        except ImportError:
            raise CommitMQError("to_arrow() needs the package pyarrow: pip install pyarrow") from None
        messages = self.messages()
        columns = {name: pa.array(getattr(self, name)) for name in _ARROW_COLUMNS}
        return pa.table(
            {
                "topic": pa.array(self.topic, pa.string()),
                **columns,
                "tags": pa.array([one.tags for one in messages], pa.string()),
                "keys": pa.array([one.keys for one in messages], pa.list_(pa.string())),
                "properties": pa.array(
                    [list(one.properties.items()) for one in messages], pa.map_(pa.string(), pa.string())
                ),
                "body": pa.array([None if one.damage else one.body for one in messages], pa.large_binary()),
            }
        )


_ARROW_COLUMNS: Final = (
    "queue_id",
    "queue_offset",
    "physical_offset",
    "store_timestamp",
    "born_timestamp",
    "sys_flag",
    "flag",
    "reconsume_times",
)


def cut_parts(parts: Sequence[Part], start: int, stop: int) -> list[Part]:
    """Messages ``start`` to ``stop`` of the parts taken together."""
    result = []
    for part in parts:
        if stop <= 0:
            break
        if start < len(part):
            result.append(part.cut(max(start, 0), min(stop, len(part))))
        start -= len(part)
        stop -= len(part)
    return result


def _messages_of_others(part: Part, topics: list[str]) -> Iterator[Message]:
    """Messages read through an LMQ, which were sent to ``topics``."""
    for message, topic in zip(_messages(part), topics, strict=True):
        message._origin_topic = topic
        yield message


def _messages(part: Part) -> Iterator[Message]:
    topic, queue_id, data = part.topic, part.queue_id, part.data
    heads = part.heads
    # A mapping cuts bytes objects by itself; a view of a frame needs one more step.
    whole = data if isinstance(data, mmap.mmap) else bytes(data) if len(data) < 1 << 16 else None
    view = memoryview(data)
    wide = heads["magic"] == MAGIC_V2
    properties = part.property_starts
    if properties is None:
        # What lies between a body's end and the properties: the topic's length and text, the properties' length.
        properties = part.body_offsets + heads["body_size"] + (len(topic.encode()) + 3 + wide)
    decoded = part.decoded
    rows = zip(
        part.positions.tolist(),
        heads["queue_offset"].tolist(),
        heads["physical_offset"].tolist(),
        heads["store_timestamp"].tolist(),
        heads["born_timestamp"].tolist(),
        heads["sys_flag"].tolist(),
        heads["flag"].tolist(),
        heads["reconsume_times"].tolist(),
        part.store_hosts(),
        part.body_offsets.tolist(),
        (part.body_offsets + heads["body_size"]).tolist(),
        properties.tolist(),
        (part.positions + heads["size"]).tolist(),
        strict=True,
    )
    for at, queue_offset, physical, stored, born, flags, flag, times, host, body, body_end, start, end in rows:
        yield received(
            topic,
            queue_id,
            queue_offset,
            physical,
            stored,
            born,
            flags,
            flag,
            times,
            host,
            whole[start:end] if whole is not None else bytes(view[start:end]),
            whole[body:body_end] if whole is not None else bytes(view[body:body_end]),
            None if decoded is None else decoded.get(at),
        )
