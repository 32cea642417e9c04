"""Shared by the jobs that send messages: the target topic, the assignment of rows to queues, and the sending.

When a job is repeated, its rows must come to the same tasks in the same order. So they are shuffled by target queue
into a number of partitions that the job's state keeps, and sorted there by their origin: two reads of the same messages
give the same partitions, on any cluster. A queue's messages keep their order, and the messages of one store come before
those of the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from commitmq.client.admin import Admin
from commitmq_plugins.spark.jobs.positions import map_in_arrow
from commitmq_plugins.spark.sinks import SinkOptions, send_partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SENT_COLUMNS: Final = ("store", "topic", "queue_id", "queue_offset", "tags", "keys", "properties", "flag", "body")
"""The columns that are needed to send a message again."""
_REPORT: Final = "messages bigint, repeated bigint, empty bigint"
_LEAST_RATE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Sent:
    """The counts of a run. ``repeated`` of these messages had been stored by an earlier attempt. ``empty`` rows had
    neither a body nor a key, or a body that cannot be decoded, and were left out.
    """

    messages: int = 0
    repeated: int = 0
    empty: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.repeated + other.repeated, self.empty + other.empty)


def ensure_topic(node: str | None, topic: str, queues: int) -> int:
    """Create ``topic`` with ``queues`` queues unless it exists. Returns the number of its queues. Raises CommitMQError."""
    with Admin(node) as admin:
        if all(one.name != topic for one in admin.topics()):
            admin.topic_create(topic, queues)
        return admin.topic(topic).write_queues


def by_queue(frame: DataFrame, queues: int, partitions: int) -> DataFrame:
    """``frame`` (with :data:`SENT_COLUMNS`) with its target queue in ``queue_id``, cut and sorted as the module says.

    A queue number beyond the target's queues is mapped to one of them.
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
) -> Sent:
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
        pace = None if each is None else _Pace(each)
        pieces = batches if each is None else _small(batches, max(1, int(each / 10)))
        stored = send_partition(pieces, options, sink_id, epoch, pace=pace, as_stored=True)
        report = {"messages": stored.messages, "repeated": stored.repeated, "empty": stored.empty}
        yield pa.RecordBatch.from_pylist([report])

    rows = map_in_arrow(frame, work, _REPORT).collect()
    return Sent(*(sum(row[name] for row in rows) for name in ("messages", "repeated", "empty")))


class _Pace:
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
