"""What is new since a position in every queue of several stores, cut into partitions for Spark."""

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
from commitmq_plugins.spark.jobs.manifest import Positions
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.origins import open_origins
from commitmq_plugins.spark.plan import FilePartition, Partition
from commitmq_plugins.spark.reading import read_partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RANGE: Final = "id"


@dataclass(slots=True)
class News:
    """Partitions of what is new, in the order of each store's log; ``gaps`` is what is missing of it.

    ``passed``: where queues begin behind a gap, for those that have one. ``bounds``: store -> the physical offset below
    which its messages were looked at, where that is known.
    """

    partitions: list[Partition] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    passed: Positions = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)


def split_sources(sources: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``(folders, addresses)`` of what a user wrote; folders become absolute. Raises ConfigError for nothing."""
    if not sources:
        raise ConfigError("say what to read: a store's folder or a node's address")
    folders = tuple(os.path.abspath(one) for one in sources if "://" not in one)
    return folders, tuple(one for one in sources if "://" in one)


def news(
    options: SourceOptions,
    wants: Callable[[str], bool],
    positions: Positions,
    bounds: Mapping[str, int],
    *,
    least: int,
    max_bytes: int,
) -> News:
    """All messages behind ``positions``, from the first that is there of queues without one.

    A queue that was made anew because its topic was deleted is read from its beginning, and a gap says so. It is known by its
    end, or by its records: all of them lie behind ``bounds``, though it begins before its position. (Of a node whose files
    are out of sight only the end tells.)
    """
    found = News()
    origins = open_origins(options)
    try:
        for origin in origins:
            slices = []
            for one in origin.slices(wants):
                key = (origin.name, one.topic, one.queue_id)
                at = positions.get(key)
                if at is None or at == one.first:
                    slices.append(one)
                    continue
                anew = at > one.end or (at > one.first and one.floor >= bounds.get(origin.name, one.floor + 1))
                if at > one.first and not anew:
                    slices.append(replace(one, first=at))
                    continue
                if anew:
                    found.gaps.append(Gap(*key, one.first, at, "the queue was made anew"))
                else:
                    found.gaps.append(Gap(*key, at, one.first, "expired"))
                found.passed[key] = one.first
                slices.append(one)
            found.gaps += origin.lost(wants)
            parts = origin.partitions(slices, least=-(-least // len(origins)), max_bytes=max_bytes)
            found.bounds.update({one.name: one.bound for one in parts if isinstance(one, FilePartition)})
            found.partitions += parts
    finally:
        for origin in origins:
            origin.close()
    found.gaps = coalesced(found.gaps)
    if found.gaps and options.fail_on_data_loss:
        raise DataLossError(found.gaps)
    return found


def behind(partitions: Sequence[Partition]) -> Positions:
    """The positions once ``partitions`` are read, those of each queue in order."""
    return {(partition.name, one.topic, one.queue_id): one.end for partition in partitions for one in partition.slices}


def schema_of(names: Sequence[str]) -> tuple[str, pa.Schema]:
    """Columns of the source as Spark's DDL and as Arrow's schema."""
    ddl = ", ".join(f"{name} {columns.COLUMNS[name][0]}" for name in names)
    return ddl, pa.schema([(name, columns.COLUMNS[name][1]) for name in names])


def frame_of(
    spark: SparkSession, partitions: Sequence[Partition], names: Sequence[str], options: SourceOptions
) -> DataFrame:
    """The messages of ``partitions``, each of which becomes a partition of the frame."""
    ddl, schema = schema_of(names)
    return over(spark, partitions, lambda one: read_partition(one, schema, options), ddl)


def over(
    spark: SparkSession,
    partitions: Sequence[Partition],
    work: Callable[[Partition], Iterator[pa.RecordBatch]],
    ddl: str,
) -> DataFrame:
    """What ``work`` makes of each of ``partitions``, in tasks of their own."""
    several = list(partitions)

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(_RANGE).to_pylist():
                yield from work(several[number])

    return map_in_arrow(spark.range(0, len(several), 1, max(1, len(several))), each, ddl)
