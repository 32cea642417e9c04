"""The columns of the source, and the conversion of records to Arrow arrays.

Kernels do everything on the mapped log: no object is created for a record. Columns that need only a ConsumeQueue's
units (:data:`OF_UNITS`) do not read the log at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from commitmq.errors import CommitMQError, ConfigError, CorruptRecordError
from commitmq.format.compression import decompress
from commitmq.format.constants import ELEMENT_BYTES, Property, SysFlag
from commitmq.kernels import codes, compiled
from commitmq.kernels.codes import EQUALS
from commitmq.kernels.compiled import text_tests
from commitmq.log import get_log
from commitmq.store.queues.tag_filter import TagFilter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_log = get_log("spark")

TIMESTAMP: Final = pa.timestamp("us", "UTC")
MAP: Final = pa.map_(pa.string(), pa.string())

# Name -> Spark's type, Arrow's type. The order is that of the default schema.
COLUMNS: Final[dict[str, tuple[str, pa.DataType]]] = {
    "store": ("string", pa.string()),
    "topic": ("string", pa.string()),
    "queue_id": ("int", pa.int32()),
    "queue_offset": ("bigint", pa.int64()),
    "physical_offset": ("bigint", pa.int64()),
    "store_timestamp": ("timestamp", TIMESTAMP),
    "born_timestamp": ("timestamp", TIMESTAMP),
    "tags": ("string", pa.string()),
    "keys": ("string", pa.string()),
    "properties": ("map<string,string>", MAP),
    "body": ("binary", pa.binary()),
    "body_size": ("int", pa.int32()),
    "total_size": ("int", pa.int32()),
    "flag": ("int", pa.int32()),
    "sys_flag": ("int", pa.int32()),
    "reconsume_times": ("int", pa.int32()),
    "msg_id": ("string", pa.string()),
    "unique_id": ("string", pa.string()),
}
STATE_COLUMNS: Final[dict[str, tuple[str, pa.DataType]]] = {
    "state": ("string", pa.string()),
    "real_topic": ("string", pa.string()),
}
"""Columns of the option ``state``: see :mod:`commitmq_plugins.spark.reading`."""
_ALL: Final = COLUMNS | STATE_COLUMNS
OF_UNITS: Final = frozenset({"store", "topic", "queue_id", "queue_offset", "physical_offset", "total_size", "state"})
_OPTIONAL: Final = frozenset({"store", "properties", "body_size", "total_size"})
_NUMBERS: Final = {
    "flag": codes.FIELD_FLAG,
    "sys_flag": codes.FIELD_SYS_FLAG,
    "reconsume_times": codes.FIELD_RECONSUME_TIMES,
    "body_size": codes.FIELD_BODY_SIZE,
}
_TIMES: Final = {"store_timestamp": codes.FIELD_STORE_TIMESTAMP, "born_timestamp": codes.FIELD_BORN_TIMESTAMP}
_PROPERTIES: Final = {"tags": Property.TAGS, "keys": Property.KEYS, "unique_id": Property.UNIQUE_KEY}


_INNER: Final = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
_COMPRESSION: Final = SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK


def default_schema(*, several_stores: bool, properties: bool, state: bool = False) -> str:
    """The DDL of a read without a schema: all columns but sizes; ``store`` when there are several."""
    wanted = {"store": several_stores, "properties": properties}
    names = [name for name in COLUMNS if wanted.get(name, name not in _OPTIONAL)]
    return ", ".join(f"{name} {_ALL[name][0]}" for name in (*names, *(STATE_COLUMNS if state else ())))


def check_schema(schema: StructType) -> list[str]:
    """The names of a user's schema. Raises ConfigError for columns that the source does not have."""
    names = []
    for field in schema.fields:
        if field.name not in _ALL:
            raise ConfigError(f"there is no column {field.name!r}; columns are {', '.join(_ALL)}")
        expected = _ALL[field.name][0]
        if field.dataType.simpleString() != expected:
            raise ConfigError(f"the column {field.name} is {expected}, not {field.dataType.simpleString()}")
        names.append(field.name)
    return names


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, _ALL[name][1]) for name in names])


class Rows:
    """Records, or messages of inner batches, ready to become columns; one entry each in all arrays.

    ``log`` is the memory that holds bodies and properties, ``fields`` the result of
    :func:`commitmq.kernels.compiled.heads` for it; ``hosts_log`` is the memory that holds the store hosts, if it is
    another.
    """

    __slots__ = ("_hosts_log", "_log", "fields", "physical_offsets", "total_sizes")

    def __init__(
        self,
        log: Bytes,
        fields: Numbers,
        physical_offsets: Numbers,
        total_sizes: Numbers,
        hosts_log: Bytes | None = None,
    ) -> None:
        self._log = log
        self._hosts_log = log if hosts_log is None else hosts_log
        self.fields = fields
        self.physical_offsets = physical_offsets
        self.total_sizes = total_sizes

    def __len__(self) -> int:
        return len(self.physical_offsets)

    @property
    def queue_offsets(self) -> Numbers:
        return self._field(codes.FIELD_QUEUE_OFFSET)

    @property
    def sys_flags(self) -> Numbers:
        """Each record's sysFlag (spec 2.3)."""
        return self._field(codes.FIELD_SYS_FLAG)

    @property
    def is_inner_batch(self) -> Flags:
        """Which records hold several messages (spec 2.8)."""
        inner: Flags = (self.sys_flags & _INNER) == _INNER
        return inner

    def _field(self, number: int) -> Numbers:
        field: Numbers = self.fields[number]
        return field

    def take(self, chosen: Any) -> Rows:
        """The rows selected by an index or a mask, in its order."""
        return Rows(
            self._log,
            np.ascontiguousarray(self.fields[:, chosen]),
            self.physical_offsets[chosen],
            self.total_sizes[chosen],
            self._hosts_log,
        )

    def messages_inside(self) -> tuple[Rows, Numbers]:
        """The messages in these rows, all of which are inner batches, and the row that each of them is from. Raises
        CorruptRecordError for a row that is no inner batch.
        """
        log, starts, sizes = self._log, self._field(codes.FIELD_BODY), self._field(codes.FIELD_BODY_SIZE)
        if (self.sys_flags & SysFlag.COMPRESSED).any():
            # RocketMQ's producers do not compress batches, but its consumers would inflate them.
            try:
                bodies = [self.body(index) for index in range(len(self))]
            except CommitMQError as error:
                raise CorruptRecordError(f"the body of an inner batch cannot be decoded: {error}") from error
            sizes = np.array([len(body) for body in bodies], np.int64)
            starts = np.cumsum(np.concatenate(([0], sizes[:-1])), dtype=np.int64)
            log = np.frombuffer(b"".join(bodies), np.uint8)
        starts, sizes = np.ascontiguousarray(starts), np.ascontiguousarray(sizes)
        count = compiled.elements(log, starts, sizes, 0, np.empty((codes.FIELDS, 0), np.int64), np.empty(0, np.int64))
        if count < 0:
            where = int(self.physical_offsets[-1 - count])
            raise CorruptRecordError(
                f"the inner batch at physical offset {where} is no batch of messages", offset=where
            )
        inside = np.empty((codes.FIELDS, count), np.int64)
        owners = np.empty(count, np.int64)
        compiled.elements(log, starts, sizes, count, inside, owners)
        fields = np.ascontiguousarray(self.fields[:, owners])
        for field in (
            codes.FIELD_FLAG,
            codes.FIELD_BODY,
            codes.FIELD_BODY_SIZE,
            codes.FIELD_PROPERTIES,
            codes.FIELD_PROPERTIES_SIZE,
        ):
            fields[field] = inside[field]
        fields[codes.FIELD_QUEUE_OFFSET] += inside[codes.FIELD_QUEUE_OFFSET]
        fields[codes.FIELD_SYS_FLAG] &= ~_COMPRESSION
        total = inside[codes.FIELD_BODY_SIZE] + inside[codes.FIELD_PROPERTIES_SIZE] + ELEMENT_BYTES
        return Rows(log, fields, self.physical_offsets[owners], total, self._hosts_log), owners

    def columns(self, names: Sequence[str], *, inflate: bool = False) -> dict[str, pa.Array]:
        """The columns of ``names`` that need the records. ``inflate``: compressed bodies are decompressed."""
        wanted = [name for name in names if name in _PROPERTIES]
        found = dict(zip(wanted, self.properties_named([_PROPERTIES[name] for name in wanted]), strict=True))
        for name in names:
            if name in _NUMBERS:
                found[name] = pa.array(self.fields[_NUMBERS[name]].astype(np.int32))
            elif name in _TIMES:
                found[name] = times(self.fields[_TIMES[name]])
            elif name == "body":
                found[name] = self._bodies(inflate)
            elif name == "properties":
                found[name] = self._properties()
            elif name == "msg_id":
                found[name] = self._message_ids()
        return found

    def body(self, index: int) -> bytes:
        """The body of one record, decompressed if it is stored compressed."""
        start = int(self.fields[codes.FIELD_BODY, index])
        body = self._log[start : start + int(self.fields[codes.FIELD_BODY_SIZE, index])].tobytes()
        flags = int(self.fields[codes.FIELD_SYS_FLAG, index])
        return decompress(body, flags) if flags & SysFlag.COMPRESSED else body

    def _bodies(self, inflate: bool) -> pa.Array:
        bodies = gathered(self._log, self.fields[codes.FIELD_BODY], self.fields[codes.FIELD_BODY_SIZE], pa.binary())
        packed = np.flatnonzero(self.sys_flags & SysFlag.COMPRESSED) if inflate else ()
        if not len(packed):
            return bodies
        mask = np.zeros(len(self), np.bool_)
        mask[packed] = True
        return pc.replace_with_mask(
            bodies, pa.array(mask), pa.array([self._inflated(int(one)) for one in packed], pa.binary())
        )

    def _inflated(self, index: int) -> bytes | None:
        """The body of one record; None when it does not match its sysFlag, so that other rows are not affected."""
        try:
            return self.body(index)
        except CommitMQError as error:
            where = int(self.physical_offsets[index])
            _log.warning(f"the body at physical offset {where} cannot be decoded and is null: {error}")
            return None

    def property_spans(self, names: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offset and size in bytes of the values of some properties: ``[len(names), rows]`` each."""
        encoded = [name.encode() for name in names]
        starts = np.empty((len(names), len(self)), np.int64)
        lengths = np.empty((len(names), len(self)), np.int64)
        compiled.property_values(
            self._log,
            self.fields[codes.FIELD_PROPERTIES],
            self.fields[codes.FIELD_PROPERTIES_SIZE],
            np.frombuffer(b"".join(encoded), np.uint8),
            np.cumsum([0, *map(len, encoded)], dtype=np.int64),
            starts,
            lengths,
        )
        return starts, lengths

    def properties_named(self, names: Sequence[str]) -> list[pa.Array]:
        """The values of some properties as text, found in one pass; null where a row has none."""
        if not names:
            return []
        starts, lengths = self.property_spans(names)
        return [
            gathered(self._log, start, length, pa.string(), absent=length == 0)
            for start, length in zip(starts, lengths, strict=True)
        ]

    def are_of(self, topic: str, queue_id: int) -> Flags:
        name = np.frombuffer(topic.encode(), np.uint8)
        found = np.empty(len(self), np.bool_)
        starts, sizes = (np.ascontiguousarray(self._field(one)) for one in (codes.FIELD_TOPIC, codes.FIELD_TOPIC_SIZE))
        text_tests(self._log, starts, sizes, name, np.array([0, len(name)], np.int64), EQUALS, found)
        flags: Flags = found & (self._field(codes.FIELD_QUEUE_ID) == queue_id)
        return flags

    def has_tag(self, tags: TagFilter) -> Flags:
        """Which rows carry one of the tags."""
        starts, lengths = self.property_spans([Property.TAGS])
        found = np.empty(len(self), np.bool_)
        text_tests(self._log, starts[0], lengths[0], *tags.texts, EQUALS, found)
        return found

    def has_key(self, keys: Sequence[str]) -> Flags:
        """Which rows carry one of the business keys, which are separated by blanks."""
        pattern = "(?:^| )(?:" + "|".join(map(re.escape, keys)) + ")(?: |$)"
        found = pc.match_substring_regex(self.properties_named([Property.KEYS])[0], pattern)
        flags: Flags = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
        return flags

    def _properties(self) -> pa.Array:
        starts, sizes = self.fields[codes.FIELD_PROPERTIES], self.fields[codes.FIELD_PROPERTIES_SIZE]
        offsets = np.empty(len(self) + 1, np.int32)
        totals = np.zeros(3, np.int64)
        compiled.measure_properties(self._log, starts, sizes, offsets, totals)
        pairs, name_bytes, value_bytes = (int(total) for total in totals)
        name_offsets, value_offsets = np.empty(pairs + 1, np.int32), np.empty(pairs + 1, np.int32)
        names, values = np.empty(name_bytes, np.uint8), np.empty(value_bytes, np.uint8)
        compiled.take_properties(self._log, starts, sizes, name_offsets, names, value_offsets, values)
        return pa.MapArray.from_arrays(
            pa.array(offsets),
            _variable(name_offsets, names, pa.string()),
            _variable(value_offsets, values, pa.string()),
        )

    def _message_ids(self) -> pa.Array:
        hosts, host_sizes = self.fields[codes.FIELD_STORE_HOST], self.fields[codes.FIELD_STORE_HOST_SIZE]
        offsets = _offsets(host_sizes * 2 + 16)
        out = np.empty(int(offsets[-1]), np.uint8)
        compiled.message_ids(self._hosts_log, hosts, host_sizes, self.physical_offsets, out)
        return _variable(offsets, out, pa.string())


def rows_at(
    log: Bytes,
    positions: Numbers,
    sizes: Numbers,
    physical_offsets: Numbers,
    *,
    crc_from: int = codes.UNCHECKED,
    check_body: bool,
) -> tuple[Rows, Numbers]:
    """The records at ``positions`` of ``log``, and for each 0 or the reason
    (:data:`commitmq.store.recovery.scan.REASONS`) why there is none. Rows with a reason have no content: take the
    others. ``check_body`` compares the body's CRC. ``crc_from``: the physical offset from which on each record must
    have a ``__CRC32#``; it is compared wherever a record has it.
    """
    fields = np.empty((codes.FIELDS, len(sizes)), np.int64)
    why = np.empty(len(sizes), np.int64)
    compiled.heads(log, positions, sizes, physical_offsets, crc_from, check_body, fields, why)
    return Rows(log, fields, physical_offsets, sizes), why


def times(milliseconds: NDArray[np.int64]) -> pa.Array:
    """Milliseconds since 1970 as timestamps."""
    return pa.array(milliseconds * 1000).view(TIMESTAMP)


def constant(text: str, count: int) -> pa.Array:
    """``count`` times the same text."""
    return pa.repeat(pa.scalar(text, pa.string()), count)


def gathered(
    log: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    kind: pa.DataType,
    *,
    absent: NDArray[np.bool_] | None = None,
) -> pa.Array:
    """Ranges of the log as one array of ``kind`` (binary or string), null where ``absent``; one copy."""
    offsets = _offsets(sizes)
    out = np.empty(int(offsets[-1]), np.uint8)
    compiled.gather(log, np.ascontiguousarray(starts), np.ascontiguousarray(sizes), out)
    return _variable(offsets, out, kind, absent)


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    """Arrow's offsets of values of these sizes. The bytes gathered at a time stay far below 2 GiB."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _variable(
    offsets: NDArray[np.int32], data: NDArray[np.uint8], kind: pa.DataType, absent: NDArray[np.bool_] | None = None
) -> pa.Array:
    nulls = 0 if absent is None else int(absent.sum())
    validity = pa.py_buffer(np.packbits(~absent, bitorder="little")) if absent is not None and nulls else None
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    found = pa.Array.from_buffers(kind, len(offsets) - 1, buffers, null_count=nulls)
    if kind == pa.string():
        return _as_text(found)
    return found


def _as_text(array: pa.Array) -> pa.Array:
    """``array`` of strings with invalid UTF-8 replaced, as every decoder of RocketMQ does; mostly unchanged."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.view(pa.binary())
        texts = [None if one is None else one.decode("utf-8", "replace") for one in raw.to_pylist()]
        return pa.array(texts, pa.string())
    return array
