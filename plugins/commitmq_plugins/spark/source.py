"""``format("commitmq")`` of ``spark.read`` and ``spark.readStream``: the data source that Spark calls.

Spark creates these objects in Python workers of its own: :class:`CommitMQSource` and the planning of partitions run in
one beside the driver, ``read`` in one of each executor. They travel pickled, so they hold plain values only.

A stream goes in micro-batches from one set of queue offsets to the next. Spark stores an offset (:class:`StreamOffset`)
before a micro-batch runs and reads the same range again after a crash, so the source loses and repeats nothing. Where a
stream begins is decided once, with the end of its first micro-batch. New queues and topics are read from their first message;
a topic that was deleted and created again is another topic. Only flushed messages count, so an offset never has to go back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from commitmq.client.admin import Admin
from commitmq.errors import CommitMQError, ConfigError, ProtocolError
from commitmq.log import get_log
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.options import FAIL, IGNORE, WAIT, GapPolicy, SourceOptions, UnreadableRange
from commitmq_plugins.spark.origins import (
    Origin,
    chosen,
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
from commitmq_plugins.spark.quiet import quiet_daemon
from commitmq_plugins.spark.stores import Slice

if TYPE_CHECKING:
    import pyarrow as pa


FORMAT: Final = "commitmq"
_log = get_log("spark")
_READ_ADVICE: Final = ". With missingTopics=ignore it counts as empty"
# For every process that imports this module to plan a read.
quiet_daemon()
_STREAM_ONLY: Final = (
    ("maxOffsetsPerTrigger", "max_offsets_per_trigger"),
    ("maxBytesPerTrigger", "max_bytes_per_trigger"),
    ("group", "group"),
)


class CommitMQSource(DataSource):
    """The format ``commitmq``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        """All columns; see :mod:`commitmq_plugins.spark.columns`."""
        options = SourceOptions.parse(self.options)
        return columns.default_schema(
            several_stores=options.several, properties=options.include_properties, state=options.state
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``. Raises ConfigError for options that have no meaning there."""
        options = SourceOptions.parse(self.options)
        for name, attribute in _STREAM_ONLY:
            if getattr(options, attribute):
                raise ConfigError(f"option {name} is for readStream")
        if options.missing_topics == WAIT:
            raise ConfigError("option missingTopics: wait is for readStream; of read it is fail or ignore")
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""

        return StreamReader(SourceOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For ``df.write``. Raises ConfigError for an overwrite: a log can only be appended to."""
        from commitmq_plugins.spark.sinks import BatchSink, SinkOptions

        if overwrite:
            raise ConfigError("a topic cannot be overwritten: write with mode append")
        return BatchSink(SinkOptions.parse(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For ``writeStream``, in the output mode append or update."""
        from commitmq_plugins.spark.sinks import SinkOptions, StreamSink

        del overwrite
        return StreamSink(SinkOptions.parse(self.options), schema)


class BatchReader(DataSourceReader):
    """Plans and reads the messages that exist when it plans.

    It has no ``pushFilters``. Spark plans the partitions of a frame once and uses them for every query on that frame. A
    plan that one query's filters had cut would answer the next query wrongly. (Spark also refuses a reader with that
    method while push-down is off, which is its default.)
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Raises ConfigError for options and columns that do not exist."""
        columns.check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Ranges of the log (see ``spark.plan``). Raises DataLossError, and ConfigError for a missing topic."""
        options = self._options
        gaps: list[UnreadableRange] = []
        found: list[InputPartition] = []
        origins = open_origins(options)
        try:
            topics = existing(origins, options.topics) if options.missing_topics == IGNORE else options.topics
            require_topics(origins, topics, advice=_READ_ADVICE)
            if options.topics_pattern and not any(map(options.wants, {one for at in origins for one in at.topics()})):
                places = ", ".join(origin.name for origin in origins)
                _log.warning("no topic matches topicsPattern", pattern=options.topics_pattern, places=places)
            for origin in origins:
                slices = chosen(origin, options, gaps)
                least = least_partitions(options, len(origins))
                parts = origin.parts_of(slices, least=least, max_bytes=options.max_bytes_per_partition)
                found += origin.partitions(slices, parts)
        finally:
            for origin in origins:
                origin.close()
        GapPolicy(options.fail_on_data_loss, options.gap_report).take(gaps)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from commitmq_plugins.spark.reading import record_batches  # what planning does not need

        return record_batches(partition, self._schema, self._options)


VERSION: Final = 3
_VERSION: Final = "version"

Positions = dict[str, dict[str, dict[str, int]]]
Incarnations = dict[str, dict[str, str]]
Generations = dict[str, dict[str, int]]


@dataclass(slots=True)
class StreamOffset:
    """The offset of a stream: Spark writes it into its checkpoint before a micro-batch, and reads it again after a crash.

        {"version": 3,
         "begun": whether the stream has begun,
         "positions": {STORE: {TOPIC: {QUEUE: the next queue offset}}},
         "begins": {STORE: {TOPIC: {QUEUE: the queue offset at which the micro-batch that ends here begins}}},
         "incarnations": {STORE: {TOPIC: which topic of that name}},
         "generations": {STORE: {TOPIC: the store's generation when these positions were found}},
         "parts": {STORE: how many partitions the micro-batch that ends here is cut into}}

    ``begun``: Spark keeps no offset for the begin of a stream; it asks for it again when it plans the first micro-batch, and
    after a crash in it. So that offset says nothing, and the end of the first micro-batch says where that one began.
    ``begins``: only queues of which the offset before has no position, or another one: all queues of the first micro-batch,
    later new ones. ``incarnations``: a topic that is deleted and created again has queue offsets that begin at 0 again, so an
    offset means nothing without its topic's incarnation. ``generations``: the log can end earlier than it did, after a power
    cut or a repair, and then get other messages at the same offsets. Each time is a new generation of the store
    (:mod:`commitmq.store.recovery.cut_history`), which says how far the positions of an older one are right. ``parts``: a
    repeated attempt is cut like the first one, also when the program was restarted with other settings or on other machines
    in between; the sink identifies stored rows by task and order.

    One offset; see the module.
    """

    begun: bool = True
    positions: Positions = field(default_factory=dict)
    begins: Positions = field(default_factory=dict)
    incarnations: Incarnations = field(default_factory=dict)
    generations: Generations = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamOffset:
        """Raises ConfigError for an offset of another version."""
        if data.get(_VERSION) != VERSION:
            raise ConfigError(
                f"the checkpoint has offsets of version {data.get(_VERSION, 1)}; this program knows {VERSION}: use "
                "the program that wrote it, or a new checkpoint"
            )
        return cls(
            bool(data["begun"]),
            _copied(data["positions"]),
            _copied(data["begins"]),
            {store: dict(topics) for store, topics in data["incarnations"].items()},
            {store: dict(topics) for store, topics in data["generations"].items()},
            dict(data["parts"]),
        )

    def to_json(self) -> dict[str, Any]:
        return {_VERSION: VERSION, **asdict(self)}

    def position(self, store: str, topic: str, queue_id: int, incarnation: str | None = None) -> int | None:
        """The next queue offset of a queue; None for a queue that was not seen yet, and with ``incarnation`` also for one
        of another topic of that name.
        """
        if incarnation not in (None, self.incarnation(store, topic)):
            return None
        return self.positions.get(store, {}).get(topic, {}).get(str(queue_id))

    def of(self, store: str) -> Iterator[tuple[str, int, int]]:
        """Topic, queue and position of each queue of a store."""
        for topic, queues in self.positions.get(store, {}).items():
            for queue, reached in queues.items():
                yield topic, int(queue), reached

    def incarnation(self, store: str, topic: str) -> str | None:
        """The incarnation of the topic that the positions belong to; None when it is unknown."""
        return self.incarnations.get(store, {}).get(topic)

    def begin(self, store: str, topic: str, queue_id: int, before: StreamOffset) -> int:
        """Where the micro-batch that ends here begins; ``before`` is the offset before this one. Raises ConfigError."""
        found = self.begins.get(store, {}).get(topic, {}).get(str(queue_id))
        if found is None:
            found = before.position(store, topic, queue_id, self.incarnations[store][topic])
        if found is None:
            raise ConfigError(f"the checkpoint does not say where queue {queue_id} of {topic!r} in {store} begins")
        return found

    def forget(self, store: str, topic: str, queue_id: int) -> None:
        """Have no position of a queue."""
        del self.positions[store][topic][str(queue_id)]

    def read(self, store: str, one: Slice, generation: int) -> None:
        """Count ``one`` as read, from its first message to its end, in this ``generation`` of the store. Queues of another
        incarnation of its topic are dropped.
        """
        self.generations.setdefault(store, {})[one.topic] = generation
        queue = str(one.queue_id)
        if self.incarnations.setdefault(store, {}).setdefault(one.topic, one.incarnation) != one.incarnation:
            self.incarnations[store][one.topic] = one.incarnation
            self.positions.get(store, {}).pop(one.topic, None)
        queues = self.positions.setdefault(store, {}).setdefault(one.topic, {})
        if queues.get(queue) != one.first:
            self.begins.setdefault(store, {}).setdefault(one.topic, {})[queue] = one.first
        queues[queue] = one.end

    def ahead(self) -> StreamOffset:
        """A copy to move forward, for a micro-batch that is not cut yet."""
        found = deepcopy(self)
        return replace(found, begun=True, begins={}, parts={})


def _copied(positions: Mapping[str, Any]) -> Positions:
    return {store: {topic: dict(queues) for topic, queues in topics.items()} for store, topics in positions.items()}


_Found = TypeVar("_Found")

# A micro-batch below this many messages is one task: a task costs more than reading them.
_FEW_MESSAGES: Final = 20_000
_STREAM_ADVICE: Final = ". With missingTopics=wait, the default of a stream, the query waits for it"


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
            gaps: list[UnreadableRange] = []
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
            require_topics(origins, wanted, advice=_STREAM_ADVICE)
        self._is_looked = True
        require_topics(origins, there)
        missing = set(wanted).difference(there)
        if self._options.missing_topics != IGNORE:
            places = ", ".join(origin.name for origin in origins)
            for topic in sorted(missing - self._awaited):
                _log.warning("the topic does not exist; the query waits for it", topic=topic, places=places)
        self._awaited = missing

    def _ahead(self, origin: Origin, start: StreamOffset, gaps: list[UnreadableRange]) -> list[Slice]:
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
            gaps: list[UnreadableRange] = []
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

    def _between(
        self, origin: Origin, start: StreamOffset, end: StreamOffset, gaps: list[UnreadableRange]
    ) -> list[Slice]:
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
        """Commit ``offsets`` to a node; returns those it took. A topic that was deleted keeps no other back."""
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
