"""``spark.readStream.format("commitmq")``: micro-batches from one set of queue offsets to the next.

An offset is ``{store: {topic: {queue: next queue offset}}}``. Spark writes it down before a micro-batch runs and reads the
same range again after a crash, so nothing is lost or doubled on this side. Queues and topics that appear are read from
their first message. Only flushed messages count, so an offset never has to go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from commitmq.client.admin import Admin
from commitmq.errors import CommitMQError, ConfigError
from commitmq.log import get_log
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.gaps import Gap, GapPolicy
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.origins import Origin, open_origins
from commitmq_plugins.spark.ranges import position, unknown_queues
from commitmq_plugins.spark.source import least_partitions, record_batches
from commitmq_plugins.spark.stores import Slice

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

Offset = dict[str, dict[str, dict[str, int]]]
_Found = TypeVar("_Found")

# Below this many messages a micro-batch is one task: a task costs more than reading them.
_FEW_MESSAGES: Final = 20_000
_log = get_log("spark")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a Python worker beside the driver for as long as the query runs; ``read`` runs in the executors'."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Raises ConfigError or ValueError for options and columns that cannot be used."""
        columns.check_schema(schema)
        if options.end.offsets or options.end.timestamp is not None or options.end.edge != "latest":
            raise ConfigError("a stream has no end: endingOffsets and endingTimestamp are for read")
        if options.group and options.stores:
            raise ConfigError("option group: the progress is kept by a node, so read it by option node")
        self._options = options
        self._schema = schema
        self._policy = GapPolicy(options.fail_on_data_loss, options.gap_report)
        self._target: Offset | None = None
        self._committed: Offset = {}

    # ------------------------------------------------------------ offsets

    def initialOffset(self) -> Offset:
        """Where a query without a checkpoint begins. Raises DataLossError."""

        def look(origins: Sequence[Origin]) -> Offset:
            gaps: list[Gap] = []
            found: Offset = {}
            for origin in origins:
                slices = origin.slices(self._options.wants)
                for one in slices:
                    _put(found, origin, one, position(origin, one, self._options.start, gaps))
                gaps += unknown_queues(origin, self._options.start, slices)
            self._policy.take(gaps)
            return found

        return self._looking(look)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """How far the next micro-batch goes. Everything before ``start`` was processed."""
        self.commit(start)

        def look(origins: Sequence[Origin]) -> Offset:
            wanted = [
                (origin, replace(one, first=first, end=max(first, end)))
                for origin in origins
                for one, first, end in self._ahead(origin, start)
            ]
            found = _copy(start)
            for (origin, one), end in zip(wanted, _limited(wanted, limit), strict=True):
                _put(found, origin, one, end)
            return found

        return self._looking(look)

    def _ahead(self, origin: Origin, start: Offset) -> Iterator[tuple[Slice, int, int]]:
        """Each queue with where reading goes on and where it ends now."""
        for one in origin.slices(self._options.wants):
            known = _get(start, origin, one)
            first = one.first if known is None else known
            end = one.end
            if self._target is not None:
                end = min(end, _get(self._target, origin, one) or 0)
            if one.end < first:
                # The topic was deleted and made anew, or the store is another one: offsets began again.
                reason = "the queue ends before what was read of it"
                self._policy.take([Gap(origin.name, one.topic, one.queue_id, one.end, first, reason)])
                first = one.first
            yield one, first, end

    def getDefaultReadLimit(self) -> ReadLimit:
        """From maxOffsetsPerTrigger and maxBytesPerTrigger."""
        if self._options.max_offsets_per_trigger:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.max_bytes_per_trigger:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset:
        """The end of every queue, for the query's progress."""

        def look(origins: Sequence[Origin]) -> Offset:
            found: Offset = {}
            for origin in origins:
                for one in origin.slices(self._options.wants):
                    _put(found, origin, one, one.end)
            return found

        return self._looking(look)

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on the stream ends where the queues end now."""
        self._target = self.reportLatestOffset()

    # ------------------------------------------------------------ reading

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The tasks of a micro-batch. Raises DataLossError for what is missing."""

        def look(origins: Sequence[Origin]) -> list[InputPartition]:
            gaps: list[Gap] = []
            found: list[InputPartition] = []
            for origin in origins:
                slices = self._between(origin, start, end, gaps)
                few = sum(one.count for one in slices) < _FEW_MESSAGES and not self._options.min_partitions
                least = 1 if few else least_partitions(self._options, len(origins))
                found += origin.partitions(slices, least=least, max_bytes=self._options.max_bytes_per_partition)
            self._policy.take(gaps)
            return found

        return self._looking(look)

    def _between(self, origin: Origin, start: Offset, end: Offset, gaps: list[Gap]) -> list[Slice]:
        known = {(one.topic, one.queue_id): one for one in origin.slices(self._options.wants)}
        result = []
        for topic, queues in end.get(origin.name, {}).items():
            for number, stop in queues.items():
                one = known.get((topic, int(number)))
                first = start.get(origin.name, {}).get(topic, {}).get(number)
                if one is None:
                    if first is None or first < stop:
                        gaps.append(Gap(origin.name, topic, int(number), first or 0, stop, "the queue is gone"))
                    continue
                if first is None or first > stop:
                    first = one.first
                if first < one.first:
                    gaps.append(Gap(origin.name, topic, one.queue_id, first, min(one.first, stop), "expired"))
                if stop > one.end:
                    gaps.append(
                        Gap(origin.name, topic, one.queue_id, max(first, one.end), stop, "the queue ends before")
                    )
                first, stop = max(first, one.first), min(stop, one.end)
                if first < stop:
                    result.append(replace(one, first=first, end=stop))
        return result

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition."""
        return record_batches(partition, self._schema, self._options)

    # ------------------------------------------------------------ progress

    def commit(self, end: Offset) -> None:
        """Everything before ``end`` was processed: tell the nodes, for the group of option ``group``."""
        if not self._options.group:
            return
        for address in self._options.nodes:
            offsets = [
                (topic, int(queue), offset)
                for topic, queues in end.get(address, {}).items()
                for queue, offset in queues.items()
                if self._committed.get(address, {}).get(topic, {}).get(queue) != offset
            ]
            if not offsets:
                continue
            try:
                with Admin(address) as admin:
                    admin.commit_offsets(self._options.group, offsets)
            except CommitMQError as error:
                # Spark's checkpoint is what counts; the next commit tells it all again.
                _log.warning("the progress could not be told to the node", node=address, error=str(error))
                continue
            for topic, queue, offset in offsets:
                self._committed.setdefault(address, {}).setdefault(topic, {})[str(queue)] = offset

    def stop(self) -> None:
        """Nothing is held between two calls."""

    def _looking(self, work: Callable[[Sequence[Origin]], _Found]) -> _Found:
        origins = open_origins(self._options)
        try:
            return work(origins)
        finally:
            for origin in origins:
                origin.close()


def _limited(wanted: Sequence[tuple[Origin, Slice]], limit: ReadLimit) -> list[int]:
    """For each slice where it ends so that together they keep ``limit``; at least one message, if there is any."""
    total = sum(one.count for _, one in wanted)
    if isinstance(limit, ReadMaxRows) and total > limit.max_rows:
        # In proportion to what each has, what rounding leaves going to the first ones.
        shares = [one.count * limit.max_rows // total for _, one in wanted]
        left = limit.max_rows - sum(shares)
        for index, (_, one) in enumerate(wanted):
            more = min(left, one.count - shares[index], 1)
            shares[index] += more
            left -= more
        return [one.first + share for (_, one), share in zip(wanted, shares, strict=True)]
    if isinstance(limit, ReadMaxBytes) and total:
        ends = [
            origin.within_bytes(one, limit.max_bytes * one.count // total) if one.count else one.end
            for origin, one in wanted
        ]
        if all(end == one.first for (_, one), end in zip(wanted, ends, strict=True)):
            # A message larger than the limit comes alone.
            index = next(number for number, (_, one) in enumerate(wanted) if one.count)
            ends[index] = wanted[index][1].first + 1
        return ends
    return [one.end for _, one in wanted]


def _get(offset: Offset, origin: Origin, one: Slice) -> int | None:
    return offset.get(origin.name, {}).get(one.topic, {}).get(str(one.queue_id))


def _put(offset: Offset, origin: Origin, one: Slice, value: int) -> None:
    offset.setdefault(origin.name, {}).setdefault(one.topic, {})[str(one.queue_id)] = value


def _copy(offset: Offset) -> Offset:
    return {store: {topic: dict(queues) for topic, queues in topics.items()} for store, topics in offset.items()}
