"""The batch of messages that a poll returns: columns first, Message objects when a program asks for them.

A batch refers to the bytes where they are; see :mod:`commitmq.client.receiving.part`. The memory behind a batch lives as long
as the batch or a view of one of its bodies.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from commitmq.client.message import Message
from commitmq.client.receiving.part import HEAD, Array, RecordBatch, cut_parts, received
from commitmq.errors import CommitMQError, UndecodableBodyError
from commitmq.format.constants import MAGIC_V2, SysFlag

if TYPE_CHECKING:
    import pyarrow


class MessageBatch(Sequence[Message]):
    """Received messages in the order of their queue, one queue behind the other. An empty batch is false.

    The columns are numpy arrays with one entry a message: ``queue_id``, ``queue_offset``, ``physical_offset``,
    ``store_timestamp`` and ``born_timestamp`` (milliseconds), ``sys_flag``, ``flag``, ``reconsume_times``, ``body_size`` (as
    stored) and ``total_size``. Messages of an inner batch share its physical offset, times and flags, but each has a size of
    its own. ``topic`` is a list of names. ``bodies`` are views without a copy. An index and a loop make Message objects, each
    with a copy of its body.
    """

    __slots__ = ("_columns", "_length", "_parts")

    def __init__(self, parts: Sequence[RecordBatch] = ()) -> None:
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
            kind = HEAD[name].newbyteorder("=")
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
        """int32: the number of the message's queue in its topic."""
        return self._column("queue_id")

    @property
    def queue_offset(self) -> Array:
        """int64: the ordinal of the message in its queue, from 0 on."""
        return self._column("queue_offset")

    @property
    def physical_offset(self) -> Array:
        """int64: the record's place in the CommitLog, in bytes from the beginning."""
        return self._column("physical_offset")

    @property
    def store_timestamp(self) -> Array:
        """int64: when the node stored the message, in milliseconds."""
        return self._column("store_timestamp")

    @property
    def born_timestamp(self) -> Array:
        """int64: when the producer made the message, in milliseconds."""
        return self._column("born_timestamp")

    @property
    def sys_flag(self) -> Array:
        """int32: RocketMQ's flags of a record (spec 2.3)."""
        return self._column("sys_flag")

    @property
    def flag(self) -> Array:
        """int32: the application's own number."""
        return self._column("flag")

    @property
    def reconsume_times(self) -> Array:
        """int32: how often RocketMQ delivered the message again."""
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
        """For vectorised work: (buffer, body offsets, body sizes) for each buffer behind the batch.

        The offsets are int64 positions in the buffer, the sizes are int32. The bodies are as stored.
        """
        return [
            (memoryview(part.data), part.body_offsets, part.heads["body_size"].astype(np.int32)) for part in self._parts
        ]

    @property
    def bodies(self) -> list[memoryview]:
        """The body of each message: a view without a copy, or the decompressed body of a compressed message.

        Raises UndecodableBodyError for a body that cannot be decoded. A poll returns such a message in a batch of its own.
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
        """Message ``index``; for a slice a batch of the same memory, or a list if the slice has a step."""
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
        """An Arrow table with the columns, ``topic``, ``tags``, ``keys``, ``properties`` and ``body``.

        Bodies are decompressed; a body that cannot be decoded is null. Raises CommitMQError when pyarrow is not installed.
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


def _messages_of_others(part: RecordBatch, topics: list[str]) -> Iterator[Message]:
    """The messages of an LMQ, which were sent to ``topics``."""
    for message, topic in zip(_messages(part), topics, strict=True):
        message._origin_topic = topic
        yield message


def _messages(part: RecordBatch) -> Iterator[Message]:
    topic, queue_id, data = part.topic, part.queue_id, part.data
    heads = part.heads
    # A slice of a mapping is a bytes object already. A slice of a frame's view must be made one.
    whole = data if isinstance(data, mmap.mmap) else bytes(data) if len(data) < 1 << 16 else None
    view = memoryview(data)
    wide = heads["magic"] == MAGIC_V2
    properties = part.property_starts
    if properties is None:
        # The topic's length, the topic, and the properties' length stand between a body and its properties.
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
