"""Reads a partition: its messages as Arrow record batches, a bounded number of rows and bytes at a time.

A partition of a folder is read in the order of the log: the units of all its slices are merged, and records are read
from the mapped files. A partition of a node on another host is pulled, queue by queue. From there on both are the same:
every place without a valid record counts as missing, inner batches are unwrapped, filters applied, columns built.

The columns ``state`` and ``real_topic``, which a read has with ``option("state", "true")`` or when its schema names them,
say what a message is: RocketMQ keeps delayed, half, retried and dead messages in topics of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from commitmq.client.admin import Admin
from commitmq.errors import StoreError
from commitmq.format.constants import DLQ_PREFIX, LMQ_PREFIX, PREBLANK_SIZE, RETRY_PREFIX, Property
from commitmq.kernels.codes import NO_CRC_NEEDED, UNCHECKED
from commitmq.semantics.delay import SCHEDULE_TOPIC
from commitmq.semantics.pop_revive import REVIVE_TOPIC_PREFIX
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.trace import TRACE_TOPIC
from commitmq.semantics.transaction import DISCARD_TOPIC, HALF_TOPIC, OP_TOPIC
from commitmq.store.queues.record_filter import PullStatus
from commitmq.store.queues.tag_filter import TagFilter
from commitmq.store.recovery.cut_history import NO_CUT
from commitmq.store.recovery.scan import REASONS
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.columns import Bytes, Flags, Numbers, Rows
from commitmq_plugins.spark.options import GapPolicy, SourceOptions, UnreadableRange
from commitmq_plugins.spark.origins import PATIENCE_S, RecordPuller, cuts_of, is_here
from commitmq_plugins.spark.plan import FilePartition, Partition, PullPartition
from commitmq_plugins.spark.stores import OpenStore, Slice, check_generation

NORMAL: Final = "normal"
_TOPICS: Final = {
    SCHEDULE_TOPIC: "delayed",
    TIMER_TOPIC: "timer",
    HALF_TOPIC: "half",
    OP_TOPIC: "op",
    DISCARD_TOPIC: "discarded_half",
    TRACE_TOPIC: "trace",
}
_PREFIXES: Final = {RETRY_PREFIX: "retry", DLQ_PREFIX: "dead_letter", REVIVE_TOPIC_PREFIX: "pop"}
STATES: Final = (NORMAL, *_TOPICS.values(), *_PREFIXES.values())
"""Every value of the column."""
_HAVE_REAL_TOPIC: Final = {
    "delayed": Property.REAL_TOPIC,
    "timer": Property.REAL_TOPIC,
    "half": Property.REAL_TOPIC,
    "discarded_half": Property.REAL_TOPIC,
    "retry": Property.RETRY_TOPIC,
    "dead_letter": Property.RETRY_TOPIC,
}


def state_of(topic: str) -> str:
    """What the messages of ``topic`` are."""
    if topic in _TOPICS:
        return _TOPICS[topic]
    return next((state for prefix, state in _PREFIXES.items() if topic.startswith(prefix)), NORMAL)


def real_topic_property(topic: str) -> str | None:
    """The property of a message of ``topic`` that names its real topic: where it is to be delivered, or where it was sent
    first. None where ``topic`` is the real one.
    """
    return _HAVE_REAL_TOPIC.get(state_of(topic))


def real_topics(rows: Rows, topics: Sequence[str], numbers: Numbers, own: pa.Array) -> pa.Array:
    """The real topic of each row. Row i is of topic ``topics[numbers[i]]``, which is ``own[i]`` too; a message that names
    no other topic keeps that.
    """
    of_topic = np.array([real_topic_property(one) or "" for one in topics])
    wanted = of_topic[numbers]
    for name in sorted(set(of_topic.tolist()) - {""}):
        named = rows.properties_named([name])[0]
        own = pc.if_else(pa.array(wanted == name), pc.coalesce(named, own), own)
    return own


MAX_ROWS: Final = 131_072
MAX_BATCH_BYTES: Final = 16 * 1024 * 1024
# Units held for all slices together, and for each at least: 20 bytes on disk, some 40 here.
_UNITS_AHEAD: Final = 262_144
_LEAST_AHEAD: Final = 64
_NO_LIMIT: Final = 1 << 62
_FAR: Final = np.iinfo(np.int64).max
_FOREIGN: Final = -1
_REASONS: Final = {**REASONS, _FOREIGN: "the record there is of another topic, queue or queue offset"}


@dataclass(slots=True)
class Units:
    """The units of messages: physical offset, size, queue offset, and the slice of each."""

    physical: Numbers
    sizes: Numbers
    offsets: Numbers
    numbers: Numbers
    codes: Numbers

    def __len__(self) -> int:
        return len(self.physical)

    def take(self, chosen: slice | Flags | Numbers) -> Units:
        """The units selected by an index, a mask or a slice."""
        return Units(
            self.physical[chosen], self.sizes[chosen], self.offsets[chosen], self.numbers[chosen], self.codes[chosen]
        )


def _joined(parts: Sequence[Units]) -> Units:
    """Units of several slices in the order of the log."""
    if len(parts) == 1:
        return parts[0]
    whole = Units(
        np.concatenate([one.physical for one in parts]),
        np.concatenate([one.sizes for one in parts]),
        np.concatenate([one.offsets for one in parts]),
        np.concatenate([one.numbers for one in parts]),
        np.concatenate([one.codes for one in parts]),
    )
    return whole.take(np.argsort(whole.physical, kind="stable"))


class PartitionReader:
    """Reads one partition; see :meth:`batches`."""

    def __init__(self, partition: Partition, schema: pa.Schema, options: SourceOptions) -> None:
        self._partition: Partition = partition
        if isinstance(partition, FilePartition) and partition.node:
            here = options.transfer == "files" or is_here(Path(partition.root), partition.token)
            if not here:
                self._partition = PullPartition(partition.name, partition.slices, partition.node, partition.generation)
        self._schema = schema
        self._names: list[str] = schema.names
        self._options = options
        self._slices = partition.slices
        self._tags = options.tag_filter
        self._policy = GapPolicy(options.fail_on_data_loss, options.gap_report)
        self._gaps: list[UnreadableRange] = []
        self._ends = np.array([one.end for one in self._slices], np.int64)
        self._firsts = np.array([one.first for one in self._slices], np.int64)
        self._in_batches = np.array([one.is_batch for one in self._slices], np.bool_)
        crc_from = self._partition.crc_from if isinstance(self._partition, FilePartition) else NO_CRC_NEEDED
        self._crc_from = crc_from if options.check_crc else UNCHECKED
        self._check_body = options.check_crc and "body" in self._names
        self._needs_records = bool(
            not columns.OF_UNITS.issuperset(self._names) or self._in_batches.any() or self._tags or options.keys
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All messages of the partition. Raises DataLossError for missing ones; with gaps allowed they are reported."""
        if isinstance(self._partition, FilePartition):
            with closing(_FileReader(self._partition, self._policy, self._gaps, self._tags)) as reader:
                for units in reader.units():
                    if self._needs_records:
                        for log, part in reader.stretches(units):
                            yield from self._of_records(log, part.physical % reader.segment_bytes, part)
                    else:
                        yield from self._of_units(units)
                reader.check()
        else:
            with closing(RecordPuller(self._partition.node, self._options.tags)) as puller:
                for number, one in enumerate(self._slices):
                    for frame, positions, sizes, physical, missing in puller.records(one):
                        self._gaps += [self._gap(one, first, end, "not in the log any more") for first, end in missing]
                        self._settle()
                        count = len(sizes)
                        unknown = np.full(count, -1, np.int64)
                        yield from self._of_records(
                            frame, positions, Units(physical, sizes, unknown, np.full(count, number), unknown)
                        )
            with Admin(self._partition.node, timeout_s=PATIENCE_S) as admin:
                if cuts_of(admin).end_since(self._partition.generation) != NO_CUT:
                    raise StoreError(
                        f"the log of the node {self._partition.node} was cut while it was read: read it again"
                    )
        self._settle(at_end=True)

    def _settle(self, *, at_end: bool = False) -> None:
        if self._gaps and (at_end or self._policy.fail):
            gaps, self._gaps = self._gaps, []
            self._policy.take(gaps)

    def _gap(self, one: Slice, first: int, end: int, reason: str) -> UnreadableRange:
        return UnreadableRange(self._partition.name, one.topic, one.queue_id, first, end, reason)

    # ------------------------------------------------------------ rows

    def _of_units(self, units: Units) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(units), MAX_ROWS):
            yield self._batch(units.take(slice(start, start + MAX_ROWS)), {})

    def _of_records(self, log: Bytes, positions: Numbers, units: Units) -> Iterator[pa.RecordBatch]:
        """The batches of records at ``positions`` of ``log``, few enough for one batch."""
        rows, why = columns.rows_at(
            log,
            positions,
            units.sizes,
            units.physical,
            crc_from=self._crc_from,
            check_body=self._check_body,
        )
        if why.any():
            self._note_bad(units, why)
            rows, units = rows.take(why == 0), units.take(why == 0)
        belongs = self._belong(rows, units)
        if not belongs.all():
            self._note_bad(units, np.where(belongs, 0, _FOREIGN))
            rows, units = rows.take(belongs), units.take(belongs)
        if self._in_batches.any() or (units.offsets < 0).any():
            units = Units(units.physical, units.sizes, rows.queue_offsets, units.numbers, units.codes)
            inner = rows.is_inner_batch & self._in_batches[units.numbers]
            edges = [0, *(np.flatnonzero(np.diff(inner)) + 1).tolist(), len(rows)]
            for start, end in pairwise(edges):
                part, piece = rows.take(slice(start, end)), units.take(slice(start, end))
                if start < end and inner[start]:
                    part, owners = part.messages_inside()
                    piece = piece.take(owners)
                    piece.offsets, piece.sizes = part.queue_offsets, part.total_sizes
                # An inner batch may begin before the slice, or end behind it.
                wanted = (piece.offsets >= self._firsts[piece.numbers]) & (piece.offsets < self._ends[piece.numbers])
                if not wanted.all():
                    part, piece = part.take(wanted), piece.take(wanted)
                yield from self._filtered(part, piece)
        else:
            yield from self._filtered(rows, units)

    def _belong(self, rows: Rows, units: Units) -> Flags:
        """Which records are those that their queue's units refer to: of the queue's topic, its number and their queue
        offset. In a light message queue the records are of another topic and have another queue offset.
        """
        plain = (units.offsets >= 0) & ~self._in_batches[units.numbers]
        belong: Flags = ~plain | (rows.queue_offsets == units.offsets)
        for number in np.unique(units.numbers).tolist():
            one = self._slices[number]
            chosen = units.numbers == number
            if one.topic.startswith(LMQ_PREFIX):
                belong[chosen] = True
            elif chosen.all():
                belong &= rows.are_of(one.topic, one.queue_id)
            else:
                belong[chosen] &= rows.take(chosen).are_of(one.topic, one.queue_id)
        return belong

    def _filtered(self, rows: Rows, units: Units) -> Iterator[pa.RecordBatch]:
        wanted: Flags | None = None
        if self._tags is not None:
            wanted = rows.has_tag(self._tags)
        if self._options.keys and len(rows):
            keyed = rows.has_key(self._options.keys)
            wanted = keyed if wanted is None else wanted & keyed
        if wanted is not None and not wanted.all():
            rows, units = rows.take(wanted), units.take(wanted)
        if len(rows):
            found = rows.columns(self._names, inflate=self._options.decompress)
            if "real_topic" in self._names:
                topics = [one.topic for one in self._slices]
                found["real_topic"] = real_topics(rows, topics, units.numbers, self._of_unit("topic", units))
            yield self._batch(units, found)

    def _note_bad(self, units: Units, why: Numbers) -> None:
        for index in np.flatnonzero(why).tolist():
            one = self._slices[int(units.numbers[index])]
            offset = int(units.offsets[index])
            reason = _REASONS.get(int(why[index]), f"reason {int(why[index])}")
            place = f"no sound record at physical offset {int(units.physical[index])}: {reason}"
            self._gaps.append(self._gap(one, offset, offset + 1, place))
        self._settle()

    def _batch(self, units: Units, found: dict[str, pa.Array]) -> pa.RecordBatch:
        """The record batch of ``units``; columns that are not in ``found`` come from the units."""
        arrays = [found[name] if name in found else self._of_unit(name, units) for name in self._names]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _of_unit(self, name: str, units: Units) -> pa.Array:
        if name == "store":
            return columns.constant(self._partition.name, len(units))
        if name in ("topic", "state"):
            topics = [one.topic if name == "topic" else state_of(one.topic) for one in self._slices]
            if len(set(topics)) == 1:
                return columns.constant(topics[0], len(units))
            return pa.array(topics, pa.string()).take(pa.array(units.numbers))
        if name == "queue_id":
            return pa.array(np.array([one.queue_id for one in self._slices], np.int32)[units.numbers])
        if name == "queue_offset":
            return pa.array(units.offsets)
        if name == "physical_offset":
            return pa.array(units.physical)
        return pa.array(units.sizes.astype(np.int32))


@dataclass(slots=True)
class _FileCursor:
    """The position reached in a slice, and the units that were read and not yet returned."""

    slice: Slice
    number: int
    next_offset: int
    units: Units


class _FileReader:
    """The units of a partition's slices, and the mapped segments of their records."""

    def __init__(
        self, partition: FilePartition, policy: GapPolicy, gaps: list[UnreadableRange], tags: TagFilter | None
    ) -> None:
        self._partition = partition
        self._store = OpenStore(Path(partition.root), partition.sizes)
        self._policy = policy
        self._gaps = gaps
        self._tags = tags
        self.segment_bytes = self._store.sizes.segment

    def close(self) -> None:
        self._store.close()

    def check(self) -> None:
        """Raise StoreError if the log was cut in the meantime."""
        check_generation(self._store, self._partition.generation, self._partition.bound)

    def units(self) -> Iterator[Units]:
        """Units of all slices merged. Units read ahead of one slice are held until the others have come as far."""
        slices = self._partition.slices
        none = np.empty(0, np.int64)
        empty = Units(none, none, none, none, none)
        cursors = [_FileCursor(one, number, one.first, empty) for number, one in enumerate(slices)]
        ahead = max(_LEAST_AHEAD, min(MAX_ROWS, _UNITS_AHEAD // max(1, len(slices))))
        while cursors:
            for cursor in cursors:
                while not len(cursor.units) and cursor.next_offset < cursor.slice.end:
                    if cursor.slice.is_batch:
                        self._read_batches(cursor, ahead)
                    else:
                        self._read_plain(cursor, ahead)
            self._settle()
            cursors = [one for one in cursors if len(one.units)]
            # Up to here all units are known: the least end of the units read, of all slices that have more.
            horizon = min(
                (int(one.units.physical[-1]) for one in cursors if one.next_offset < one.slice.end), default=_FAR
            )
            taken: list[Units] = []
            for one in cursors:
                count = int(np.searchsorted(one.units.physical, horizon, side="right"))
                if count:
                    taken.append(one.units.take(slice(0, count)))
                    one.units = one.units.take(slice(count, None))
            if taken:
                yield self._possible(_joined(taken))

    def _possible(self, units: Units) -> Units:
        """The units that can have a wanted tag. Inner batches have code 0 when their messages have tags."""
        if self._tags is None:
            return units
        passed = self._tags.may_match(units, units.codes, None)
        in_batches = np.array([one.is_batch for one in self._partition.slices], np.bool_)
        return units.take(passed | (in_batches[units.numbers] & (units.codes == 0)))

    def _read_plain(self, cursor: _FileCursor, count: int) -> None:
        one = cursor.slice
        at, units = self._store.queues.units(
            one.topic,
            one.queue_id,
            cursor.next_offset,
            min(count, one.end - cursor.next_offset),
            bound=self._partition.bound,
            floor=one.floor,
        )
        at = min(at, one.end)
        self._miss(one, cursor.next_offset, at, "not in the queue any more")
        if not len(units) or at >= one.end:
            self._miss(one, at, one.end, "not in the queue any more")
            cursor.next_offset = one.end
            return
        units = units[: one.end - at]
        physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        offsets = np.arange(at, at + len(units), dtype=np.int64)
        # A pre-blank unit is a place that was never meant to have a message.
        real = sizes != PREBLANK_SIZE
        readable = real & (sizes > 0) & (physical >= one.floor) & (physical + sizes <= self._partition.bound)
        for missing in offsets[real & ~readable].tolist():
            self._miss(one, missing, missing + 1, "its place in the queue is empty, or its record expired")
        # The merge needs ascending physical offsets. A unit that does not ascend is stale, and refers to no record of
        # this queue.
        codes = units["tags_code"].astype(np.int64)
        found = Units(physical, sizes, offsets, np.full(len(units), cursor.number, np.int64), codes).take(readable)
        rising = found.physical >= np.maximum.accumulate(found.physical) if len(found) else readable[:0]
        for stale in found.offsets[~rising].tolist():
            self._miss(one, stale, stale + 1, "its place in the queue points back")
        cursor.units = found.take(rising)
        cursor.next_offset = at + len(units)

    def _read_batches(self, cursor: _FileCursor, count: int) -> None:
        one = cursor.slice
        result = self._store.batches.read(
            one.topic,
            one.queue_id,
            cursor.next_offset,
            bound=self._partition.bound,
            floor=one.floor,
            max_messages=min(count, one.end - cursor.next_offset),
            max_bytes=_NO_LIMIT,
        )
        if result.status == PullStatus.FOUND:
            physical, sizes = result.units["physical_offset"].astype(np.int64), result.units["size"].astype(np.int64)
            unknown = np.full(len(physical), -1, np.int64)
            number = np.full(len(physical), cursor.number, np.int64)
            codes = result.units["tags_code"].astype(np.int64)
            cursor.units = Units(physical, sizes, unknown, number, codes)
            cursor.next_offset = result.next_offset
            return
        behind = one.end if result.next_offset <= cursor.next_offset else min(result.next_offset, one.end)
        self._miss(one, cursor.next_offset, behind, "not in the queue any more")
        cursor.next_offset = behind

    def stretches(self, units: Units) -> Iterator[tuple[Bytes, Units]]:
        """``units`` cut to the size of one batch, each part with the one segment that holds it."""
        segments = units.physical // self.segment_bytes
        start = 0
        while start < len(units):
            base = int(segments[start]) * self.segment_bytes
            end = start + int(np.searchsorted(segments[start : start + MAX_ROWS], segments[start], side="right"))
            # At least one record, however large.
            fitting = int(np.searchsorted(np.cumsum(units.sizes[start:end]), MAX_BATCH_BYTES, side="right"))
            end = start + max(1, min(fitting, end - start))
            part = units.take(slice(start, end))
            try:
                log = np.frombuffer(self._store.log.read(base, self.segment_bytes), np.uint8)
            except StoreError as error:
                for number, offset in zip(part.numbers.tolist(), part.offsets.tolist(), strict=True):
                    one = self._partition.slices[number]
                    self._miss(one, offset, offset + 1, f"its segment cannot be read: {error}")
                self._settle()
            else:
                yield log, part
            start = end

    def _miss(self, one: Slice, first: int, end: int, reason: str) -> None:
        if first < end:
            self._gaps.append(UnreadableRange(self._partition.name, one.topic, one.queue_id, first, end, reason))

    def _settle(self) -> None:
        if self._gaps and self._policy.fail:
            self._policy.take(self._gaps)


def read_partition(partition: Partition, schema: pa.Schema, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """The record batches of one partition; see :class:`PartitionReader`."""
    yield from PartitionReader(partition, schema, options).batches()


def record_batches(
    partition: InputPartition | None, schema: StructType, options: SourceOptions
) -> Iterator[pa.RecordBatch]:
    """Read one partition. Spark passes None when there was no partition at all."""
    if not isinstance(partition, FilePartition | PullPartition):
        return
    wanted: Partition = partition
    yield from PartitionReader(wanted, to_arrow_schema(schema, timezone="UTC"), options).batches()
