"""``spark.readStream.format("commitmq")``: micro-batches from one set of queue offsets to the next.

An offset (:mod:`commitmq_plugins.spark.stream_offset`) has the next position of each queue. Spark stores it before a
micro-batch runs and reads the same range again after a crash, so the source loses and repeats nothing. Where a stream
begins is decided once, with the end of its first micro-batch. New queues and topics are read from their first message; a
topic that was deleted and created again is another topic. Only flushed messages count, so an offset never has to go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from commitmq.client.admin import Admin
from commitmq.errors import CommitMQError, ConfigError, ProtocolError
from commitmq.log import get_log
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.gaps import Gap, GapPolicy
from commitmq_plugins.spark.options import FAIL, IGNORE, SourceOptions
from commitmq_plugins.spark.origins import (
    Origin,
    cut_off,
    existing,
    open_origins,
    position,
    remaining,
    require_topics,
    resumed,
    unknown_queues,
)
from commitmq_plugins.spark.plan import least_partitions
from commitmq_plugins.spark.stores import Slice
from commitmq_plugins.spark.stream_offset import Positions, StreamOffset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_Found = TypeVar("_Found")

# A micro-batch below this many messages is one task: a task costs more than reading them.
_FEW_MESSAGES: Final = 20_000
_ADVICE: Final = ". With missingTopics=wait, the default of a stream, the query waits for it"
_log = get_log("spark")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a Python worker beside the driver for as long as the query runs; ``read`` runs in the executors' workers."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Raises ConfigError for unusable options and columns."""
        columns.check_schema(schema)
        if options.end.offsets or options.end.timestamp is not None or options.end.edge != "latest":
            raise ConfigError("a stream has no end: endingOffsets and endingTimestamp are for read")
        if options.group and options.stores:
            raise ConfigError("option group: the progress is kept by a node, so read it by option node")
        self._options = options
        self._schema = schema
        self._policy = GapPolicy(options.fail_on_data_loss, options.gap_report)
        self._target: StreamOffset | None = None
        self._committed: Positions = {}
        self._awaited: set[str] = set()
        self._is_looked = False

    # ------------------------------------------------------------ offsets

    def initialOffset(self) -> dict[str, Any]:
        """The offset of a stream that has not begun. It says nothing: Spark asks for it once to find the end of the first
        micro-batch, again to plan that, and again after a crash in it.
        """
        return StreamOffset(begun=False).to_json()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch, with the begin of a stream that has not begun. Everything before ``start`` was
        processed. Raises DataLossError.
        """
        self.commit(start)
        begin = StreamOffset.from_json(start)

        def look(origins: Sequence[Origin]) -> StreamOffset:
            self._look_for_topics(origins)
            gaps: list[Gap] = []
            wanted = [(origin, one) for origin in origins for one in self._ahead(origin, begin, gaps)]
            found = begin.ahead()
            for origin in origins:
                name = origin.name
                read = (one for at, one in wanted if at is origin)
                gone = cut_off(origin, name, read, begin.of(name), begin.generations.get(name, {}))
                for gap in gone:
                    found.forget(name, gap.topic, gap.queue_id)
                gaps += gone
            self._policy.take(gaps)
            cut: dict[str, list[Slice]] = {}
            for (origin, one), end in zip(wanted, _limited(wanted, limit), strict=True):
                found.read(origin.name, replace(one, end=end), origin.generation)
                cut.setdefault(origin.name, []).append(replace(one, end=end))
            if not begin.begun or found.positions != begin.positions or found.incarnations != begin.incarnations:
                found.parts = {one.name: self._parts(one, cut.get(one.name, []), len(origins)) for one in origins}
                return found
            return begin  # exactly the same: another offset would be another micro-batch

        found = self._looking(look)
        return dict(start) if found is begin else found.to_json()

    def _look_for_topics(self, origins: Sequence[Origin]) -> None:
        """Log each missing topic once while the query waits for it. Raises ConfigError for a memory topic in a folder,
        and with ``missingTopics=fail`` for a topic that does not exist when the query starts or resumes.
        """
        wanted = self._options.topics
        if not wanted:
            return
        there = existing(origins, wanted)
        if self._options.missing_topics == FAIL and not self._is_looked:
            require_topics(origins, wanted, advice=_ADVICE)
        self._is_looked = True
        require_topics(origins, there)
        missing = set(wanted).difference(there)
        if self._options.missing_topics != IGNORE:
            places = ", ".join(origin.name for origin in origins)
            for topic in sorted(missing - self._awaited):
                _log.warning("the topic does not exist; the query waits for it", topic=topic, places=places)
        self._awaited = missing

    def _ahead(self, origin: Origin, start: StreamOffset, gaps: list[Gap]) -> list[Slice]:
        """Each queue from its next position to its present end."""
        found = []
        generations = start.generations.get(origin.name, {})
        for one in origin.slices(self._options.wants):
            if start.begun:
                known = start.position(origin.name, one.topic, one.queue_id)
                was = start.incarnation(origin.name, one.topic)
                first = resumed(origin, origin.name, one, known, was, generations.get(one.topic, 0), gaps)
            else:
                first = position(origin, one, self._options.start, gaps)
            end = one.end
            if self._target is not None:
                end = min(end, self._target.position(origin.name, one.topic, one.queue_id, one.incarnation) or 0)
            found.append(replace(one, first=first, end=max(first, end)))
        if not start.begun:
            gaps += unknown_queues(origin, self._options.start, found)
        return found

    def _parts(self, origin: Origin, slices: Sequence[Slice], origins: int) -> int:
        """The number of partitions for the messages that a micro-batch reads of one store."""
        few = sum(one.count for one in slices) < _FEW_MESSAGES and not self._options.min_partitions
        least = 1 if few else least_partitions(self._options, origins)
        return origin.parts_of(slices, least=least, max_bytes=self._options.max_bytes_per_partition)

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit from maxOffsetsPerTrigger and maxBytesPerTrigger."""
        if self._options.max_offsets_per_trigger:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.max_bytes_per_trigger:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any]:
        """The end of every queue, for the query's progress."""
        return self._ends().to_json()

    def _ends(self) -> StreamOffset:
        def look(origins: Sequence[Origin]) -> StreamOffset:
            found = StreamOffset()
            for origin in origins:
                for one in origin.slices(self._options.wants):
                    found.read(origin.name, replace(one, first=one.end), origin.generation)
            found.begins.clear()
            return found

        return self._looking(look)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the stream: the present ends of the queues."""
        self._target = self._ends()

    # ------------------------------------------------------------ reading

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """The tasks of a micro-batch. Raises DataLossError for missing messages."""
        begin, stop = StreamOffset.from_json(start), StreamOffset.from_json(end)

        def look(origins: Sequence[Origin]) -> list[InputPartition]:
            gaps: list[Gap] = []
            found: list[InputPartition] = []
            for origin in origins:
                slices = self._between(origin, begin, stop, gaps)
                parts = stop.parts.get(origin.name)
                found += origin.partitions(
                    slices, self._parts(origin, slices, len(origins)) if parts is None else parts
                )
            self._policy.take(gaps)
            return found

        return self._looking(look)

    def _between(self, origin: Origin, start: StreamOffset, end: StreamOffset, gaps: list[Gap]) -> list[Slice]:
        found = {(one.topic, one.queue_id): one for one in origin.slices(self._options.wants)}
        generations = end.generations.get(origin.name, {})
        result = []
        for topic, queue_id, stop in end.of(origin.name):
            first = end.begin(origin.name, topic, queue_id, start)
            incarnation = end.incarnations[origin.name][topic]
            wanted = Slice(topic, queue_id, False, first, stop, incarnation=incarnation)
            one = remaining(origin, wanted, found, generations.get(topic, 0), gaps)
            if one is not None:
                result.append(one)
        return result

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The record batches of one partition."""
        from commitmq_plugins.spark.reading import record_batches  # what planning does not need

        return record_batches(partition, self._schema, self._options)

    # ------------------------------------------------------------ progress

    def commit(self, end: Mapping[str, Any]) -> None:
        """Everything before ``end`` was processed: commit that to the nodes, for the group of option ``group``."""
        if not self._options.group:
            return
        done = StreamOffset.from_json(end)
        for address in self._options.nodes:
            incarnations = {
                topic: int(one) for topic, one in done.incarnations.get(address, {}).items() if one.isdecimal()
            }
            offsets = [
                (topic, int(queue), offset)
                for topic, queues in done.positions.get(address, {}).items()
                for queue, offset in queues.items()
                if self._committed.get(address, {}).get(topic, {}).get(queue) != offset
            ]
            if not offsets:
                continue
            for topic, queue, offset in self._tell(address, offsets, incarnations):
                self._committed.setdefault(address, {}).setdefault(topic, {})[str(queue)] = offset

    def _tell(
        self, address: str, offsets: list[tuple[str, int, int]], incarnations: Mapping[str, int]
    ) -> list[tuple[str, int, int]]:
        """Commit ``offsets`` to a node; returns those that it took. A topic that was deleted meanwhile keeps no other back."""
        told: list[tuple[str, int, int]] = []
        try:
            with Admin(address) as admin:
                try:
                    admin.commit_offsets(self._options.group, offsets, incarnations=incarnations)
                    return offsets
                except ProtocolError as error:
                    refused: CommitMQError = error
                topics = {topic for topic, _, _ in offsets}
                for topic in topics if len(topics) > 1 else ():
                    part = [one for one in offsets if one[0] == topic]
                    try:
                        admin.commit_offsets(self._options.group, part, incarnations=incarnations)
                        told += part
                    except ProtocolError as error:
                        refused = error
        except CommitMQError as error:
            refused = error
        # Spark's checkpoint is the authority; the next commit repeats everything that the node does not have.
        _log.warning("the progress could not be told to the node", node=address, error=str(refused))
        return told

    def stop(self) -> None:
        """Do nothing: no resource is held between two calls."""

    def _looking(self, work: Callable[[Sequence[Origin]], _Found]) -> _Found:
        origins = open_origins(self._options)
        try:
            return work(origins)
        finally:
            for origin in origins:
                origin.close()


def _limited(wanted: Sequence[tuple[Origin, Slice]], limit: ReadLimit) -> list[int]:
    """The end of each slice, so that all slices together keep ``limit``; at least one message, if there is any."""
    total = sum(one.count for _, one in wanted)
    if isinstance(limit, ReadMaxRows) and total > limit.max_rows:
        # Shares are in proportion to the slices' messages; the first slices get the remainder of the rounding.
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
