"""Reading a partition: the units of its slices in the order of the log, a segment at a time, as Arrow record batches.

Memory is bounded: units are read a little ahead of each slice, records stay in the mapped segment, and a batch ends at
:data:`MAX_ROWS` rows or :data:`MAX_BATCH_BYTES` of bodies and properties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.store.compression import decompress
from commitmq.store.format import SysFlag
from commitmq.store.layout import segment_name
from commitmq.store.queue_reader import PullStatus
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.plan import Slice, StorePartition
from commitmq_plugins.spark.stores import OpenStore

MAX_ROWS: Final = 32_768
MAX_BATCH_BYTES: Final = 16 * 1024 * 1024
# Units held of all slices together, and of each at least: 20 bytes on disk, some 40 here.
_UNITS_AHEAD: Final = 262_144
_LEAST_AHEAD: Final = 64
_NO_LIMIT: Final = 1 << 62


@dataclass(slots=True)
class _Cursor:
    """How far a slice was read. The arrays are units that were read and not yet handed out."""

    slice: Slice
    number: int
    next_offset: int
    physical: NDArray[np.int64]
    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]


@dataclass(slots=True)
class Units:
    """Units of several slices in the order of the log; ``numbers`` says which slice each is of."""

    physical: NDArray[np.int64]
    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.physical)

    def part(self, start: int, end: int) -> Units:
        """Those from ``start`` to ``end``."""
        return Units(self.physical[start:end], self.sizes[start:end], self.offsets[start:end], self.numbers[start:end])


class PartitionReader:
    """Reads one partition. Raises StoreError for what cannot be read."""

    def __init__(self, partition: StorePartition, schema: pa.Schema, *, decompress: bool = False) -> None:
        self._partition = partition
        self._schema = schema
        self._names: list[str] = schema.names
        self._decompress = decompress
        self._store = OpenStore(Path(partition.store), partition.sizes)
        self._needs_log = not columns.OF_UNITS.issuperset(self._names)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All messages, in the order of the log."""
        try:
            for units in self._units():
                yield from self._of_units(units)
        finally:
            self._store.close()

    # ------------------------------------------------------------ units

    def _units(self) -> Iterator[Units]:
        """Units of all slices merged. What was read ahead of one slice is held until the others have come as far."""
        slices = self._partition.slices
        empty = np.empty(0, np.int64)
        cursors = [_Cursor(one, number, one.first, empty, empty, empty) for number, one in enumerate(slices)]
        ahead = max(_LEAST_AHEAD, min(MAX_ROWS, _UNITS_AHEAD // max(1, len(slices))))
        while cursors:
            for cursor in cursors:
                if not len(cursor.physical) and cursor.next_offset < cursor.slice.end:
                    self._read_ahead(cursor, ahead)
            cursors = [one for one in cursors if len(one.physical) or one.next_offset < one.slice.end]
            # Up to here all units are known: the least end of what was read of a slice that has more.
            horizon = min(
                (int(one.physical[-1]) for one in cursors if one.next_offset < one.slice.end), default=_NO_LIMIT
            )
            taken: list[Units] = []
            for one in cursors:
                count = int(np.searchsorted(one.physical, horizon, side="right"))
                if count:
                    numbers = np.full(count, one.number, np.int64)
                    taken.append(Units(one.physical[:count], one.sizes[:count], one.offsets[:count], numbers))
                    one.physical, one.sizes = one.physical[count:], one.sizes[count:]
                    one.offsets = one.offsets[count:]
            if taken:
                yield _merged(taken)

    def _read_ahead(self, cursor: _Cursor, count: int) -> None:
        one = cursor.slice
        reader = self._store.batches if one.is_batch else self._store.queues
        result = reader.read(
            one.topic,
            one.queue_id,
            cursor.next_offset,
            bound=self._partition.bound,
            floor=one.floor,
            max_messages=min(count, one.end - cursor.next_offset),
            max_bytes=_NO_LIMIT,
        )
        if result.status not in (PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE, PullStatus.MESSAGE_WAS_REMOVING):
            raise StoreError(
                f"queue {one.queue_id} of {one.topic!r} has no message {cursor.next_offset} any more: {result.status}",
                path=self._store.layout.root,
            )
        cursor.physical = result.units["physical_offset"].astype(np.int64)
        cursor.sizes = result.units["size"].astype(np.int64)
        cursor.offsets = cursor.next_offset + np.arange(len(result.units), dtype=np.int64)
        if len(result.units) != result.next_offset - cursor.next_offset:
            raise StoreError(
                f"queue {one.queue_id} of {one.topic!r} lacks messages between {cursor.next_offset} and"
                f" {result.next_offset}",
                path=self._store.layout.root,
            )
        cursor.next_offset = min(result.next_offset, one.end)

    # ------------------------------------------------------------ batches

    def _of_units(self, units: Units) -> Iterator[pa.RecordBatch]:
        if not self._needs_log:
            for start in range(0, len(units), MAX_ROWS):
                yield self._batch(units.part(start, start + MAX_ROWS), {})
            return
        segment_bytes = self._store.sizes.segment
        segments = units.physical // segment_bytes
        start = 0
        while start < len(units):
            base = int(segments[start]) * segment_bytes
            end = start + int(np.searchsorted(segments[start : start + MAX_ROWS], segments[start], side="right"))
            # At least one record, however large.
            fitting = int(np.searchsorted(np.cumsum(units.sizes[start:end]), MAX_BATCH_BYTES, side="right"))
            end = start + max(1, min(fitting, end - start))
            part = units.part(start, end)
            log = np.frombuffer(self._store.log.read(base, segment_bytes), np.uint8)
            path = self._store.layout.commit_log / segment_name(base)
            rows = columns.Rows(log, base, part.physical, part.sizes, path)
            found = rows.columns(self._names)
            if self._decompress and "body" in found:
                found["body"] = _decompressed(rows, found["body"])
            yield self._batch(part, found)
            start = end

    def _batch(self, units: Units, found: dict[str, pa.Array]) -> pa.RecordBatch:
        """The record batch of ``units``; columns that are not in ``found`` come from the units."""
        arrays = []
        for name in self._names:
            if name not in found:
                found[name] = self._of_unit(name, units)
            arrays.append(found[name])
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _of_unit(self, name: str, units: Units) -> pa.Array:
        slices = self._partition.slices
        if name == "store":
            return columns.constant(self._partition.store, len(units))
        if name == "topic":
            topics = [one.topic for one in slices]
            if len(set(topics)) == 1:
                return columns.constant(topics[0], len(units))
            return pa.array(topics, pa.string()).take(pa.array(units.numbers))
        if name == "queue_id":
            return pa.array(np.array([one.queue_id for one in slices], np.int32)[units.numbers])
        if name == "queue_offset":
            return pa.array(units.offsets)
        if name == "physical_offset":
            return pa.array(units.physical)
        return pa.array(units.sizes.astype(np.int32))


def _merged(parts: Sequence[Units]) -> Units:
    if len(parts) == 1:
        return parts[0]
    physical = np.concatenate([one.physical for one in parts])
    order = np.argsort(physical, kind="stable")
    return Units(
        physical[order],
        np.concatenate([one.sizes for one in parts])[order],
        np.concatenate([one.offsets for one in parts])[order],
        np.concatenate([one.numbers for one in parts])[order],
    )


def _decompressed(rows: columns.Rows, bodies: pa.Array) -> pa.Array:
    """``bodies`` with those decompressed that are stored compressed; mostly there is none."""
    flags = rows.sys_flags
    packed = np.flatnonzero(flags & SysFlag.COMPRESSED)
    if not len(packed):
        return bodies
    values: list[Any] = [decompress(rows.body(index), int(flags[index])) for index in packed.tolist()]
    chosen = np.full(len(rows), -1, np.int64)
    chosen[packed] = np.arange(len(packed))
    mask = pa.array(chosen >= 0)
    return pc.replace_with_mask(bodies, mask, pa.array(values, pa.binary()))
