"""Jobs that send stored messages to a topic again: :func:`replay`, :func:`import_export` and :func:`compact`.

A job decides when it begins which messages to send, and stores them in its state
(:mod:`commitmq_plugins.spark.jobs.positions`) as steps: an interrupted run continues at the step it was in, and stores
nothing twice. A replay's steps are ranges of each store's log, one after the other, so messages of a queue keep their order;
an import's are the commits of the export's manifest, so importing again adds the messages exported since.

When a job is repeated, its rows must come to the same tasks in the same order. So they are shuffled by target queue
into a number of partitions that the job's state keeps, and sorted there by their origin: two reads of the same messages
give the same partitions, on any cluster. A queue's messages keep their order, and the messages of one store come before
those of the next.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from commitmq.client.admin import Admin
from commitmq.errors import ConfigError, InvalidMessageError
from commitmq_plugins.spark.jobs.export import Form, exported
from commitmq_plugins.spark.jobs.manifest import FOLDER, ExportError, Manifest
from commitmq_plugins.spark.jobs.positions import frame_of, map_in_arrow, opened, split_sources
from commitmq_plugins.spark.options import (
    EARLIEST,
    LATEST,
    Bound,
    DataLossError,
    GapPolicy,
    SourceOptions,
    UnreadableRange,
    coalesced,
)
from commitmq_plugins.spark.origins import Origin, chosen, open_origins, queues_of, remaining, require_topics
from commitmq_plugins.spark.plan import Partition
from commitmq_plugins.spark.sinks import SinkOptions, send_partition
from commitmq_plugins.spark.stores import Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SENT_COLUMNS: Final = ("store", "topic", "queue_id", "queue_offset", "tags", "keys", "properties", "flag", "body")
"""The columns that are needed to send a message again."""
_REPORT: Final = "messages bigint, repeated bigint, empty bigint"
_LEAST_RATE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """The counts of a run. ``repeated`` of these messages had been stored by an earlier attempt. ``empty`` rows had
    neither a body nor a key, or a body that cannot be decoded, and were omitted.
    """

    messages: int = 0
    repeated: int = 0
    empty: int = 0

    def __add__(self, other: ReplayCounts) -> ReplayCounts:
        return ReplayCounts(self.messages + other.messages, self.repeated + other.repeated, self.empty + other.empty)


def ensure_topic(node: str | None, topic: str, queues: int) -> int:
    """Create ``topic`` with ``queues`` queues unless it exists. Returns the number of its queues. Raises CommitMQError."""
    with Admin(node) as admin:
        if all(one.name != topic for one in admin.topics()):
            admin.topic_create(topic, queues)
        return admin.topic(topic).write_queues


def by_queue(frame: DataFrame, queues: int, partitions: int) -> DataFrame:
    """``frame`` (with :data:`SENT_COLUMNS`) with its target queue in ``queue_id``, cut and sorted as the module says. A
    queue number beyond the target's queues is mapped to one of them.
    """
    from pyspark.sql import functions as sql

    target = sql.pmod(sql.col("queue_id"), sql.lit(queues)).cast("int")
    return (
        frame.withColumn("_from", sql.col("queue_id"))
        .withColumn("queue_id", target)
        .repartition(partitions, "queue_id")
        .sortWithinPartitions("queue_id", "store", "topic", "_from", "queue_offset")
        .select("queue_id", "tags", "keys", "properties", "flag", "body")
    )


def shares(spark: SparkSession, messages: Mapping[int, int], queues: int, partitions: int) -> list[float]:
    """The share of ``messages`` (source queue to count) in each partition of :func:`by_queue`; the sum is 1."""
    from pyspark.sql import functions as sql

    frame = spark.createDataFrame([(queue % queues, count) for queue, count in messages.items()], "queue int, n bigint")
    # Like repartition() with a column: Spark's hash of the column, modulo the partitions.
    rows = frame.groupBy(sql.pmod(sql.hash("queue"), sql.lit(partitions)).alias("part")).agg(sql.sum("n").alias("n"))
    counts = {int(row["part"]): int(row["n"]) for row in rows.collect()}
    total = max(1, sum(counts.values()))
    return [counts.get(number, 0) / total for number in range(partitions)]


def send(
    frame: DataFrame,
    options: SinkOptions,
    sink_id: str,
    epoch: int,
    per_second: float | None = None,
    parts: Sequence[float] = (),
) -> ReplayCounts:
    """Send the rows of ``frame``, each of its partitions by one task. All tasks together send at most ``per_second``
    messages a second; each may take its share from ``parts``.
    """

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        each = None
        if per_second is not None:
            context = TaskContext.get()
            assert context is not None
            each = max(_LEAST_RATE, per_second * parts[context.partitionId()])
        pace = None if each is None else _ReplayPace(each)
        pieces = batches if each is None else _small(batches, max(1, int(each / 10)))
        stored = send_partition(pieces, options, sink_id, epoch, pace=pace, as_stored=True)
        report = {"messages": stored.messages, "repeated": stored.repeated, "empty": stored.empty}
        yield pa.RecordBatch.from_pylist([report])

    rows = map_in_arrow(frame, work, _REPORT).collect()
    return ReplayCounts(*(sum(row[name] for row in rows) for name in ("messages", "repeated", "empty")))


class _ReplayPace:
    """Slows a task down to a rate, from its first row on."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._began: float | None = None
        self._passed = 0

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        due = self._began + self._passed / self._per_second
        if due > now:
            time.sleep(due - now)
        self._passed += count


def _small(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """``batches`` in pieces of at most ``rows``, so that a rate is kept within a second too."""
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


DEFAULT_STEP_BYTES: Final = 64 * 1024 * 1024
_MOST_TASKS: Final = 32


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a run: its messages, and its number of ``steps``; ``begun_at`` were done before."""

    sent: ReplayCounts
    steps: int
    begun_at: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.sent), "steps": self.steps, "begun_at": self.begun_at}


def replay(
    spark: SparkSession,
    sources: Sequence[str],
    topic: str,
    target: str,
    state: Path,
    *,
    node: str | None = None,
    start_ms: int | None = None,
    end_ms: int | None = None,
    tags: str = "",
    keys: Sequence[str] = (),
    per_second: float | None = None,
    step_bytes: int = DEFAULT_STEP_BYTES,
    fail_on_data_loss: bool = True,
) -> Replayed:
    """Send the messages of ``topic`` in ``sources`` to the topic ``target`` of ``node``, each to the queue of the same
    number.

    Selected are messages stored from ``start_ms`` on and before ``end_ms`` (milliseconds since 1970), with a tag of
    ``tags`` (``a || b``) and one of ``keys``. ``target`` is created with as many queues if it does not exist. Repeating
    the job with the same ``state`` sends the missing messages; when all are sent, nothing. Raises StateError,
    DataLossError, SendError or SinkError.
    """
    if per_second is not None and per_second <= 0:
        raise ConfigError(f"a rate is above 0 messages a second, not {per_second}")
    folders, nodes = split_sources(sources)
    options = SourceOptions(
        stores=folders,
        nodes=nodes,
        topics=(topic,),
        start=Bound(EARLIEST, timestamp=start_ms),
        end=Bound(LATEST, timestamp=end_ms),
        tags=tags,
        keys=tuple(keys),
        fail_on_data_loss=fail_on_data_loss,
        decompress=True,
    )
    what = {
        "job": "replay", "sources": [*folders, *nodes], "topic": topic, "target": target, "node": node,
        "start_ms": start_ms, "end_ms": end_ms, "tags": tags, "keys": list(keys),
    }  # fmt: skip
    sent = ReplayCounts()
    with opened(state, what, lambda: _plan(options, target, node, step_bytes)) as found:
        begun_at = found.done
        queues = int(found.plan["queues"])
        tasks = min(queues, _MOST_TASKS)
        steps: list[dict[str, Any]] = found.plan["steps"]
        for number in range(found.done, len(steps)):
            partitions = _partitions(spark, options, steps[number])
            frame = by_queue(frame_of(spark, partitions, SENT_COLUMNS, options), queues, tasks)
            sink = SinkOptions(node=node, topic=target)
            counts: Counter[int] = Counter()
            for partition in partitions:
                for one in partition.slices:
                    counts[one.queue_id] += one.count
            parts = shares(spark, counts, queues, tasks) if per_second is not None else ()
            sent += send(frame, sink, found.sink_id, number, per_second, parts)
            found.finish_step()
    return Replayed(sent, len(steps), begun_at)


def _plan(options: SourceOptions, target: str, node: str | None, step_bytes: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []

    def take(origin: Origin, found: list[Slice]) -> None:
        for partition in origin.partitions(found, origin.parts_of(found, least=1, max_bytes=step_bytes)):
            slices = [asdict(one) for one in partition.slices]
            steps.append({"store": origin.name, "generation": origin.generation, "slices": slices})

    return {"queues": _planned(options, target, node, take), "steps": steps}


def _planned(options: SourceOptions, target: str, node: str | None, take: Callable[[Origin, list[Slice]], None]) -> int:
    """``take`` gets the messages that each store has now. Returns the number of queues of the topic ``target``, which is made
    if it does not exist. Raises DataLossError.
    """
    gaps: list[UnreadableRange] = []
    most_queues = 1
    origins = open_origins(options)
    try:
        require_topics(origins, options.topics)
        for origin in origins:
            take(origin, chosen(origin, options, gaps))
            most_queues = max(most_queues, *queues_of(origin, options.topics))
    finally:
        for origin in origins:
            origin.close()
    if gaps and options.fail_on_data_loss:
        raise DataLossError(coalesced(gaps))
    return ensure_topic(node, target, most_queues)


def _partitions(spark: SparkSession, options: SourceOptions, step: dict[str, Any]) -> list[Partition]:
    """The messages of one step, in the store's present state. Raises DataLossError for those that it has no more."""
    name = str(step["store"])
    only = (
        replace(options, stores=(name,), nodes=())
        if name in options.stores
        else replace(options, stores=(), nodes=(name,))
    )
    (origin,) = open_origins(only)
    try:
        cores = spark.sparkContext.defaultParallelism
        gaps: list[UnreadableRange] = []
        present = {(one.topic, one.queue_id): one for one in origin.slices(options.wants)}
        wanted = [remaining(origin, Slice(**one), present, step["generation"], gaps) for one in step["slices"]]
        GapPolicy(options.fail_on_data_loss, options.gap_report).take(gaps)
        slices = [one for one in wanted if one is not None]
        parts = origin.parts_of(slices, least=cores, max_bytes=options.max_bytes_per_partition)
        return origin.partitions(slices, parts)
    finally:
        origin.close()


def import_export(
    spark: SparkSession,
    root: Path,
    topic: str,
    *,
    target: str = "",
    node: str | None = None,
    state: Path | None = None,
) -> Replayed:
    """Send the messages of ``topic`` in ``root`` to the topic ``target`` (default: the same name) of ``node``.

    Queues keep their numbers and their order; ``target`` is created with as many queues if it does not exist. Messages
    without a body are omitted and counted. A state file beside the manifest, or at the caller's path, records the
    imported steps. Raises ExportError when bodies were not kept; StateError, SendError,
    SinkError.
    """
    root = root.absolute()
    target = target or topic
    manifest = Manifest(root)
    if manifest.form is None:
        raise ExportError(f"{root} holds no export: it has no commit")
    form = Form(**manifest.form)
    if form.body != "raw" and not form.keep_body:
        raise ExportError(f"{root} has no bodies to import: it was exported with parsed ones, without --keep-body")
    what = {"job": "import", "root": str(root), "topic": topic, "target": target, "node": node}
    name = hashlib.blake2b(f"{topic}\n{target}\n{node}".encode(), digest_size=8).hexdigest()

    def plan() -> dict[str, Any]:
        used = max((queue + 1 for _, of, queue in manifest.positions if of == topic), default=1)
        queues = max(used, manifest.facts.queues.get(topic, 1))
        return {"queues": ensure_topic(node, target, queues)}

    sent = ReplayCounts()
    with opened(state or root / FOLDER / "imports" / f"{name}.json", what, plan) as found:
        begun_at = found.done
        queues = int(found.plan["queues"])
        tasks = min(queues, _MOST_TASKS)
        for commit in manifest.commits[begun_at:]:
            if any(file.topic == topic for file in commit.files):
                frame = exported(spark, root, topics=[topic], commits=[commit.number]).select(*SENT_COLUMNS)
                sink = SinkOptions(node=node, topic=target)
                sent += send(by_queue(frame, queues, tasks), sink, found.sink_id, commit.number)
            found.finish_step()
    return Replayed(sent, len(manifest.commits), begun_at)


def topics_of(root: Path) -> Sequence[str]:
    """The topics of an export, by name."""
    return sorted({file.topic for file in Manifest(root.absolute()).files})


WITHOUT_KEY: Final = ("drop", "keep", "refuse")
_NARROW: Final = ("store", "queue_id", "queue_offset", "store_timestamp", "keys", "body_size")


@dataclass(frozen=True, slots=True)
class Compacted:
    """The counts of a run: ``read`` messages were read; of ``keys`` keys the newest were sent; ``deleted`` keys had an
    empty body last; ``without_key`` messages had no key. All 0 but ``sent`` when the job had been finished before.
    """

    sent: ReplayCounts
    read: int = 0
    keys: int = 0
    deleted: int = 0
    without_key: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compact(
    spark: SparkSession,
    sources: Sequence[str],
    topic: str,
    target: str,
    state: Path,
    *,
    node: str | None = None,
    across_queues: bool = False,
    without_key: str = "drop",
    fail_on_data_loss: bool = True,
) -> Compacted:
    """Send the newest message of each key of ``topic`` in ``sources`` to the topic ``target`` of ``node``.

    The rules are those of RocketMQ's compaction topics (spec 12.12): a key is the whole of ``KEYS``; each queue is
    compacted by itself; an empty body deletes its key. RocketMQ drops a message without a key; this job drops it too,
    unless it is told to keep or refuse it (``without_key``).

    Newest means the highest queue offset; of the same queue in several stores, the one stored last. ``across_queues``:
    one message of a key in the whole topic, the one stored last. Raises StateError, InvalidMessageError, SendError,
    SinkError.
    """
    if without_key not in WITHOUT_KEY:
        raise ConfigError(f"messages without a key: {', '.join(WITHOUT_KEY)}, not {without_key!r}")
    folders, nodes = split_sources(sources)
    options = SourceOptions(
        stores=folders, nodes=nodes, topics=(topic,), fail_on_data_loss=fail_on_data_loss, decompress=True
    )
    what = {
        "job": "compact", "sources": [*folders, *nodes], "topic": topic, "target": target, "node": node,
        "across_queues": across_queues, "without_key": without_key,
    }  # fmt: skip
    with opened(state, what, lambda: _compact_plan(options, target, node)) as found:
        if found.done:
            return Compacted(ReplayCounts())
        partitions = _compact_partitions(spark, options, found.plan["slices"])
        by_time = across_queues or options.several
        newest = _newest(frame_of(spark, partitions, _NARROW, options), by_time, across_queues).cache()
        try:
            counts = _counts(newest)
            if counts.without_key and without_key == "refuse":
                raise InvalidMessageError(f"{counts.without_key} messages of {topic!r} have no key")
            frame = frame_of(spark, partitions, SENT_COLUMNS, options)
            rows = _kept(frame, newest, keep_keyless=without_key == "keep")
            queues = int(found.plan["queues"])
            tasks = min(queues, _MOST_TASKS)
            sink = SinkOptions(node=node, topic=target)
            sent = send(by_queue(rows, queues, tasks), sink, found.sink_id, 0)
        finally:
            newest.unpersist()
        found.finish_step()
    return replace(counts, sent=sent)


def _newest(frame: DataFrame, by_time: bool, across_queues: bool) -> DataFrame:
    """For each key (null: messages without one) the number of its messages, and the newest of them."""
    from pyspark.sql import functions as sql

    key = sql.when(sql.length(sql.trim("keys")) > 0, sql.col("keys"))
    order = ["store_timestamp", "store", "queue_id", "queue_offset"] if by_time else ["queue_offset"]
    groups = ["key"] if across_queues else ["queue_id", "key"]
    place = sql.struct("store", "queue_id", "queue_offset", "body_size")
    return (
        frame.withColumn("key", key)
        .groupBy(*groups)
        .agg(sql.count("*").alias("messages"), sql.max_by(place, sql.struct(*order)).alias("newest"))
        .select("key", "messages", "newest.*")
    )


def _counts(newest: DataFrame) -> Compacted:
    from pyspark.sql import functions as sql

    has_key = sql.col("key").isNotNull()
    row = newest.agg(
        sql.sum("messages").alias("read"),
        sql.count_if(has_key).alias("keys"),
        sql.count_if(has_key & (sql.col("body_size") == 0)).alias("deleted"),
        sql.sum(sql.when(~has_key, sql.col("messages"))).alias("without_key"),
    ).first()
    assert row is not None
    return Compacted(ReplayCounts(), row["read"] or 0, row["keys"], row["deleted"], row["without_key"] or 0)


def _kept(frame: DataFrame, newest: DataFrame, *, keep_keyless: bool) -> DataFrame:
    """The rows of ``frame`` in ``newest``, without those that delete."""
    from pyspark.sql import functions as sql

    wanted = newest.where(sql.col("key").isNotNull() & (sql.col("body_size") > 0))
    place = ["store", "queue_id", "queue_offset"]
    kept = frame.join(wanted.select(*place), place, "left_semi").select(*frame.columns)
    if keep_keyless:
        blank = sql.col("keys").isNull() | (sql.length(sql.trim("keys")) == 0)
        kept = kept.unionByName(frame.where(blank))
    return kept


def _compact_plan(options: SourceOptions, target: str, node: str | None) -> dict[str, Any]:
    slices: dict[str, list[dict[str, Any]]] = {}

    def take(origin: Origin, found: list[Slice]) -> None:
        slices[origin.name] = [asdict(one) for one in found if one.count]

    return {"queues": _planned(options, target, node, take), "slices": slices}


def _compact_partitions(
    spark: SparkSession, options: SourceOptions, slices: dict[str, list[dict[str, Any]]]
) -> list[Partition]:
    found: list[Partition] = []
    origins = open_origins(options)
    try:
        for origin in origins:
            wanted = [Slice(**one) for one in slices.get(origin.name, ())]
            cores = spark.sparkContext.defaultParallelism
            parts = origin.parts_of(wanted, least=cores, max_bytes=options.max_bytes_per_partition)
            found += origin.partitions(wanted, parts)
    finally:
        for origin in origins:
            origin.close()
    return found
