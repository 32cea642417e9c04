"""Sends the newest message of each key to a new topic.

The rules are those of RocketMQ's compaction topics (spec 12.12): a key is the whole of ``KEYS``; each queue is
compacted by itself; an empty body deletes its key. RocketMQ drops a message without a key; this job drops it too,
unless it is told to keep or refuse it. The job decides when it begins which messages count, and stores that in its
state; a run that died is repeated, and stores nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commitmq.errors import ConfigError, InvalidMessageError
from commitmq_plugins.spark.gaps import DataLossError, Gap, coalesced
from commitmq_plugins.spark.jobs.positions import frame_of, opened, split_sources
from commitmq_plugins.spark.jobs.sending import SENT_COLUMNS, Sent, by_queue, ensure_topic, send
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.origins import chosen, open_origins, queues_of, require_topics
from commitmq_plugins.spark.plan import Partition
from commitmq_plugins.spark.sinks import SinkOptions
from commitmq_plugins.spark.stores import Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WITHOUT_KEY: Final = ("drop", "keep", "refuse")
_MOST_TASKS: Final = 32
_NARROW: Final = ("store", "queue_id", "queue_offset", "store_timestamp", "keys", "body_size")


@dataclass(frozen=True, slots=True)
class Compacted:
    """The counts of a run: ``read`` messages were read; of ``keys`` keys the newest were sent; ``deleted`` keys had an
    empty body last; ``without_key`` messages had no key. All 0 but ``sent`` when the job had been finished before.
    """

    sent: Sent
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
    with opened(state, what, lambda: _plan(options, target, node)) as found:
        if found.done:
            return Compacted(Sent())
        partitions = _partitions(spark, options, found.plan["slices"])
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
    return Compacted(Sent(), row["read"] or 0, row["keys"], row["deleted"], row["without_key"] or 0)


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


def _plan(options: SourceOptions, target: str, node: str | None) -> dict[str, Any]:
    gaps: list[Gap] = []
    slices: dict[str, list[dict[str, Any]]] = {}
    most_queues = 1
    origins = open_origins(options)
    try:
        require_topics(origins, options.topics)
        for origin in origins:
            most_queues = max(most_queues, *queues_of(origin, options.topics))
            slices[origin.name] = [asdict(one) for one in chosen(origin, options, gaps) if one.count]
    finally:
        for origin in origins:
            origin.close()
    if gaps and options.fail_on_data_loss:
        raise DataLossError(coalesced(gaps))
    return {"queues": ensure_topic(node, target, most_queues), "slices": slices}


def _partitions(
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
