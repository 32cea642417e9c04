"""Finds the messages behind a position in every queue of several stores, and cuts them into partitions for Spark.

``DataFrame.mapInArrow`` without pandas, which PySpark requires there and does not use.

The input of a job: the messages of several stores as one frame.

The state of a job that sends messages, as one JSON file: the job can be interrupted anywhere and run again.

    what     the request; another request with the same file is refused
    sink_id  the id of its producers: the same in every run, so that the node recognises stored messages
    plan     the decision at the beginning: the messages to send, cut into steps
    done     how many steps are finished

The file is replaced as a whole and synced before a step begins, so a run that dies repeats at most the step it was in;
the node stores no message of that step twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from commitmq import failpoints
from commitmq.errors import CommitMQError, ConfigError
from commitmq.files import atomic_file
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.jobs.manifest import Positions, StoreFacts, make_folder
from commitmq_plugins.spark.options import DataLossError, SourceOptions, UnreadableRange, coalesced
from commitmq_plugins.spark.origins import ANEW, cut_off, open_origins, require_topics, resumed
from commitmq_plugins.spark.plan import Partition
from commitmq_plugins.spark.reading import read_partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def map_in_arrow(
    frame: DataFrame, work: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], ddl: str
) -> DataFrame:
    """``frame`` with each partition mapped by ``work``, from Arrow batches to Arrow batches with the columns ``ddl``."""
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    # The same steps as pyspark.sql.pandas.map_ops, without its check for pandas.
    function = UserDefinedFunction(work, StructType.fromDDL(ddl), evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    columns = function(*(frame[name] for name in frame.columns))
    return DataFrame(frame._jdf.mapInArrow(columns._jc, False, None), frame.sparkSession)


def messages(
    spark: SparkSession,
    sources: Sequence[str],
    names: Sequence[str],
    *,
    topics: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The columns ``names`` of the messages of all ``sources``; ``topics``: only these; ``options``: further options of
    the format. Raises ConfigError without a source.
    """
    folders = [one for one in sources if "://" not in one]
    nodes = [one for one in sources if "://" in one]
    if not sources:
        raise ConfigError("name a source: a store's folder or a node's address")
    schema = ", ".join(f"{name} {columns.COLUMNS[name][0]}" for name in names)
    found = None
    for option, places in (("store", folders), ("node", nodes)):
        if not places:
            continue
        reader = (
            spark.read.format("commitmq").schema(schema).option(option, ",".join(places)).options(**(options or {}))
        )
        if topics:
            reader = reader.option("topics", ",".join(topics))
        part = reader.load()
        found = part if found is None else found.unionByName(part)
    assert found is not None
    return found


class StateError(CommitMQError):
    """A job's state belongs to another job, is in use or cannot be read."""


class JobState:
    """The state of one job; created by :func:`opened`."""

    def __init__(self, path: Path, what: dict[str, Any], sink_id: str, plan: dict[str, Any], done: int) -> None:
        self.path = path
        self.what = what
        self.sink_id = sink_id
        self.plan = plan
        self.done = done

    def save(self) -> None:
        """Make the present state durable."""
        members = {"what": self.what, "sink_id": self.sink_id, "plan": self.plan, "done": self.done}
        atomic_file.replace(self.path, json.dumps(members, separators=(",", ":")).encode(), "job_state", mode=0o666)

    def finish_step(self) -> None:
        """Count one more step as done."""
        if failpoints.ACTIVE:
            failpoints.hit("job.before_step_done")
        self.done += 1
        self.save()


@contextlib.contextmanager
def opened(path: Path, what: dict[str, Any], plan: Callable[[], dict[str, Any]]) -> Iterator[JobState]:
    """The state in ``path``; a new one with ``plan()`` if the file does not exist. No other process can have it in the
    meantime. Raises StateError when it belongs to another request than ``what``.
    """
    path = path.absolute()
    make_folder(path.parent)
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(f"another run of this job has {path}") from error
        if path.exists():
            try:
                members = json.loads(path.read_text(encoding="utf-8"))
                found = JobState(path, members["what"], members["sink_id"], members["plan"], members["done"])
            except (ValueError, KeyError, TypeError) as error:
                raise StateError(f"{path} is no state of a job: {error}") from error
            if found.what != what:
                raise StateError(f"{path} belongs to another job, {found.what}, not to {what}: use another file")
        else:
            found = JobState(path, what, f"job-{secrets.token_hex(10)}", plan(), 0)
            found.save()
        yield found
    finally:
        os.close(descriptor)


_RANGE: Final = "id"


@dataclass(slots=True)
class News:
    """Partitions of new messages, in the order of each store's log; ``gaps`` lists the missing ones. ``passed``: where
    queues begin behind a gap, for queues that have one.
    """

    partitions: list[Partition] = field(default_factory=list)
    gaps: list[UnreadableRange] = field(default_factory=list)
    passed: Positions = field(default_factory=dict)
    facts: StoreFacts = field(default_factory=StoreFacts)
    names: dict[str, str] = field(default_factory=dict)


def split_sources(sources: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``(folders, addresses)`` of a user's sources; folders become absolute. Raises ConfigError for an empty list."""
    if not sources:
        raise ConfigError("name a source: a store's folder or a node's address")
    folders = tuple(os.path.abspath(one) for one in sources if "://" not in one)
    return folders, tuple(one for one in sources if "://" in one)


def news(
    options: SourceOptions,
    wants: Callable[[str], bool],
    positions: Positions,
    known: StoreFacts,
    *,
    least: int,
    max_bytes: int,
) -> News:
    """All messages behind ``positions``; for queues without a position all messages from the first one.

    A queue whose topic was deleted and created again is read from its beginning, and a gap reports it; ``known`` has the
    incarnations of the topics that ``positions`` belong to.
    """
    found = News()
    origins = open_origins(options)
    try:
        require_topics(origins, options.topics)
        for origin in origins:
            slices = []
            store = known.stores.get(origin.identity, origin.name)
            found.names[origin.name] = store
            found.facts.stores[origin.identity] = store
            of = {name: one.queues for name, one in origin.topics().items() if wants(name)}
            found.facts.queues.update({name: max(count, found.facts.queues.get(name, 0)) for name, count in of.items()})
            incarnations, generations = known.incarnations.get(store, {}), known.generations.get(store, {})
            for one in origin.slices(wants):
                found.facts.incarnations.setdefault(store, {})[one.topic] = one.incarnation
                found.facts.generations.setdefault(store, {})[one.topic] = origin.generation
                key = (store, one.topic, one.queue_id)
                was = incarnations.get(one.topic)
                if was is not None and was != one.incarnation:
                    # No position of the previous topic counts, also not those of queues that the new topic does not
                    # have (yet).
                    for other, position in positions.items():
                        if other[:2] == key[:2] and other not in found.passed:
                            found.gaps.append(UnreadableRange(*other, max(position - 1, 0), max(position, 1), ANEW))
                            found.passed[other] = 0
                    found.passed[key] = one.first
                    slices.append(one)
                    continue
                at = positions.get(key)
                first = resumed(origin, store, one, at, was, generations.get(one.topic, 0), found.gaps)
                if at is not None and first != at:
                    found.passed[key] = first
                slices.append(replace(one, first=first))
            read = [
                (topic, queue, at) for (name, topic, queue), at in positions.items() if name == store and wants(topic)
            ]
            for gap in cut_off(origin, store, slices, read, generations):
                found.passed[store, gap.topic, gap.queue_id] = 0
                found.gaps.append(gap)
            found.gaps += origin.lost(wants)
            count = origin.parts_of(slices, least=-(-least // len(origins)), max_bytes=max_bytes)
            found.partitions += origin.partitions(slices, count)
    finally:
        for origin in origins:
            origin.close()
    found.gaps = coalesced(found.gaps)
    if found.gaps and options.fail_on_data_loss:
        raise DataLossError(found.gaps)
    return found


def behind(partitions: Sequence[Partition], names: Mapping[str, str]) -> Positions:
    """The positions after ``partitions`` are read, each queue's in order. ``names``: the stores' names in the export."""
    return {
        (names.get(partition.name, partition.name), one.topic, one.queue_id): one.end
        for partition in partitions
        for one in partition.slices
    }


def schema_of(names: Sequence[str]) -> tuple[str, pa.Schema]:
    """Columns of the source as Spark's DDL and as Arrow's schema."""
    ddl = ", ".join(f"{name} {columns.COLUMNS[name][0]}" for name in names)
    return ddl, pa.schema([(name, columns.COLUMNS[name][1]) for name in names])


def frame_of(
    spark: SparkSession, partitions: Sequence[Partition], names: Sequence[str], options: SourceOptions
) -> DataFrame:
    """The messages of ``partitions``; each one becomes a partition of the frame."""
    ddl, schema = schema_of(names)
    return over(spark, partitions, lambda one: read_partition(one, schema, options), ddl)


def over(
    spark: SparkSession,
    partitions: Sequence[Partition],
    work: Callable[[Partition], Iterator[pa.RecordBatch]],
    ddl: str,
) -> DataFrame:
    """The results of ``work`` for each of ``partitions``, in tasks of their own."""
    several = list(partitions)

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(_RANGE).to_pylist():
                yield from work(several[number])

    return map_in_arrow(spark.range(0, len(several), 1, max(1, len(several))), each, ddl)
