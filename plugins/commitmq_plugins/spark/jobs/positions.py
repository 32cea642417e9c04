"""Finds the messages behind a position in every queue of several stores, and cuts them into partitions for Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from commitmq.errors import ConfigError
from commitmq_plugins.spark import columns
from commitmq_plugins.spark.gaps import DataLossError, Gap, coalesced
from commitmq_plugins.spark.jobs.arrow_map import map_in_arrow
from commitmq_plugins.spark.jobs.manifest import Positions, StoreFacts
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.origins import open_origins, require_topics
from commitmq_plugins.spark.plan import Partition
from commitmq_plugins.spark.ranges import ANEW, cut_off, resumed
from commitmq_plugins.spark.reading import read_partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RANGE: Final = "id"


@dataclass(slots=True)
class News:
    """Partitions of new messages, in the order of each store's log; ``gaps`` lists the missing ones.

    ``passed``: where queues begin behind a gap, for queues that have one.
    """

    partitions: list[Partition] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
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
                    # No position of the former topic counts, also not those of queues that the new topic does not have
                    # (yet).
                    for other, position in positions.items():
                        if other[:2] == key[:2] and other not in found.passed:
                            found.gaps.append(Gap(*other, max(position - 1, 0), max(position, 1), ANEW))
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
