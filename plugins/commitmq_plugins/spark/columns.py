"""The columns of the source, and how records become Arrow arrays of them.

Everything is done by kernels on the mapped log: no object is made for a record. Columns that only a ConsumeQueue's units
are needed for (:data:`OF_UNITS`) cost no look into the log at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from commitmq.errors import CorruptRecordError
from commitmq.kernels import arrow as kernel
from commitmq.kernels import columns as property_kernel
from commitmq.store.format import Property
from commitmq.store.recovery import REASONS

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
OF_UNITS: Final = frozenset({"store", "topic", "queue_id", "queue_offset", "physical_offset", "total_size"})
_OPTIONAL: Final = frozenset({"store", "properties", "body_size", "total_size"})
_NUMBERS: Final = {
    "flag": kernel.FLAG,
    "sys_flag": kernel.SYS_FLAG,
    "reconsume_times": kernel.RECONSUME_TIMES,
    "body_size": kernel.BODY_SIZE,
}
_TIMES: Final = {"store_timestamp": kernel.STORE_TIMESTAMP, "born_timestamp": kernel.BORN_TIMESTAMP}
_PROPERTIES: Final = {"tags": Property.TAGS, "keys": Property.KEYS, "unique_id": Property.UNIQUE_KEY}


def default_schema(*, several_stores: bool, properties: bool) -> str:
    """The DDL of what is read without a schema: all columns but sizes; ``store`` when there are several."""
    wanted = {"store": several_stores, "properties": properties}
    return ", ".join(f"{name} {ddl}" for name, (ddl, _) in COLUMNS.items() if wanted.get(name, name not in _OPTIONAL))


def check_schema(schema: StructType) -> list[str]:
    """The names of a schema that somebody asked for. Raises ValueError for columns that the source does not have."""
    names = []
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise ValueError(f"there is no column {field.name!r}; columns are {', '.join(COLUMNS)}")
        expected = COLUMNS[field.name][0]
        if field.dataType.simpleString() != expected:
            raise ValueError(f"the column {field.name} is {expected}, not {field.dataType.simpleString()}")
        names.append(field.name)
    return names


class Rows:
    """Records of one segment, ready to become columns.

    ``log`` is the segment, which begins at physical offset ``base``; ``positions`` and ``sizes`` are the records in it.
    Raises CorruptRecordError when what lies there is not what was promised; ``path`` is for its sentence.
    """

    __slots__ = ("_fields", "_log", "_physical_offsets", "_positions", "_sizes")

    def __init__(
        self,
        log: NDArray[np.uint8],
        base: int,
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        path: Path,
    ) -> None:
        self._log = log
        self._physical_offsets = physical_offsets
        self._positions = physical_offsets - base
        self._sizes = sizes
        self._fields = np.empty((kernel.FIELDS, len(sizes)), np.int64)
        why = np.zeros(1, np.int64)
        good = kernel.heads(log, base, self._positions, sizes, self._fields, why)
        if good < len(sizes):
            raise CorruptRecordError(
                f"no record of {int(sizes[good])} bytes lies where its queue says: {REASONS.get(int(why[0]), why[0])}",
                path=path,
                offset=int(self._positions[good]),
            )

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def body_sizes(self) -> NDArray[np.int64]:
        """Bytes of each body as stored."""
        sizes: NDArray[np.int64] = self._fields[kernel.BODY_SIZE]
        return sizes

    @property
    def sys_flags(self) -> NDArray[np.int64]:
        """Each record's sysFlag (spec 2.3)."""
        flags: NDArray[np.int64] = self._fields[kernel.SYS_FLAG]
        return flags

    def columns(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """The columns of ``names`` that only the records tell; the others are left out."""
        found = self._property_columns(names)
        for name in names:
            if name in _NUMBERS:
                found[name] = pa.array(self._fields[_NUMBERS[name]].astype(np.int32))
            elif name in _TIMES:
                found[name] = times(self._fields[_TIMES[name]])
            elif name == "body":
                found[name] = gathered(self._log, self._fields[kernel.BODY], self.body_sizes, pa.binary())
            elif name == "properties":
                found[name] = self._properties()
            elif name == "msg_id":
                found[name] = self._message_ids()
        return found

    def body(self, index: int) -> bytes:
        """The body of one record as stored."""
        start = int(self._fields[kernel.BODY, index])
        return self._log[start : start + int(self.body_sizes[index])].tobytes()

    def _property_columns(self, names: Sequence[str]) -> dict[str, pa.Array]:
        """Columns that are one property each, found in one pass; null where a record has none."""
        wanted = [name for name in names if name in _PROPERTIES]
        if not wanted:
            return {}
        encoded = [_PROPERTIES[name].encode() for name in wanted]
        count = len(self)
        starts = np.empty((len(wanted), count), np.int64)
        lengths = np.empty((len(wanted), count), np.int64)
        property_kernel.find_properties(
            self._log,
            self._positions,
            self._sizes,
            np.frombuffer(b"".join(encoded), np.uint8),
            np.cumsum([0, *map(len, encoded)], dtype=np.int64),
            starts,
            lengths,
            np.empty(count, np.bool_),
        )
        return {
            name: gathered(self._log, starts[number], lengths[number], pa.string(), absent=lengths[number] == 0)
            for number, name in enumerate(wanted)
        }

    def _properties(self) -> pa.Array:
        starts, sizes = self._fields[kernel.PROPERTIES], self._fields[kernel.PROPERTIES_SIZE]
        offsets = np.empty(len(self) + 1, np.int32)
        totals = np.zeros(3, np.int64)
        kernel.measure_properties(self._log, starts, sizes, offsets, totals)
        pairs, name_bytes, value_bytes = (int(total) for total in totals)
        name_offsets, value_offsets = np.empty(pairs + 1, np.int32), np.empty(pairs + 1, np.int32)
        names, values = np.empty(name_bytes, np.uint8), np.empty(value_bytes, np.uint8)
        kernel.take_properties(self._log, starts, sizes, name_offsets, names, value_offsets, values)
        return pa.MapArray.from_arrays(
            pa.array(offsets),
            _variable(name_offsets, names, pa.string()),
            _variable(value_offsets, values, pa.string()),
        )

    def _message_ids(self) -> pa.Array:
        hosts, host_sizes = self._fields[kernel.STORE_HOST], self._fields[kernel.STORE_HOST_SIZE]
        offsets = _offsets(host_sizes * 2 + 16)
        out = np.empty(int(offsets[-1]), np.uint8)
        kernel.message_ids(self._log, hosts, host_sizes, self._physical_offsets, out)
        return _variable(offsets, out, pa.string())


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
    """Stretches of the log as one array of ``kind`` (binary or string), null where ``absent``; one copy."""
    offsets = _offsets(sizes)
    out = np.empty(int(offsets[-1]), np.uint8)
    kernel.gather(log, np.ascontiguousarray(starts), np.ascontiguousarray(sizes), out)
    return _variable(offsets, out, kind, absent)


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    """Arrow's offsets of values of these sizes. What is gathered at a time stays far below 2 GiB."""
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
    """``array`` of strings with everything that is no UTF-8 replaced, as every decoder of RocketMQ does; mostly as it is."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.view(pa.binary())
        texts = [None if one is None else one.decode("utf-8", "replace") for one in raw.to_pylist()]
        return pa.array(texts, pa.string())
    return array
