"""``df.write.format("commitmq")`` and ``writeStream``: rows become messages of a topic, each stored once.

Columns: ``body`` (binary or string), and optionally ``topic`` (else the option), ``tags``, ``keys`` (a string, or an
array of several), ``properties``, ``flag``, ``queue_id`` and ``sharding_key``. Columns of the source that describe a
message's place are ignored. A row goes to its ``queue_id``, else to the queue chosen by the hash of its sharding key or
keys, else to the next queue in turn.

**Once.** Each task is an idempotent producer of its own: its id is the sink's id and the partition's number, its epoch
the micro-batch's number (a batch write has one). A repeated attempt, by Spark's retries and speculation or by a driver
that starts again, sends the same rows in the same order, and the node stores only messages that it does not have yet. A
driver that was believed dead and still sends is refused because of its old epoch.

**Never lost.** That holds while a repeated micro-batch is cut into the same partitions. Spark ensures it for the same
plan and checkpoint; but a person may change the plan between a crash and the restart. So the ids of messages are
derived from their content. When the node answers that a number is stored already, the stored message's id must be the
expected one. Otherwise the task fails, with a message, before any row is skipped. Continuing then takes a new
``sinkId``, which stores the micro-batch again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from commitmq.errors import ConfigError
from commitmq_plugins.spark.row_messages import check_columns, sendable
from commitmq_plugins.spark.sink_options import SinkOptions
from commitmq_plugins.spark.task_sender import SinkError, TaskSender

_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True)
class Stored(WriterCommitMessage):
    """The result of one task: an earlier attempt had stored ``repeated`` messages, ``empty`` rows were left out."""

    messages: int
    repeated: int
    empty: int = 0


class BatchSink(DataSourceArrowWriter):
    """For ``df.write``. With a given ``sinkId`` another program can repeat the same write; ``epoch`` distinguishes
    writes of one sink, and must grow.
    """

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Raises ConfigError for columns that a message does not have."""
        check_columns(schema, options)
        self._options = options
        self._sink_id = options.sink_id or f"batch-{secrets.token_hex(12)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send one partition."""
        return send_partition(iterator, self._options, self._sink_id, self._options.epoch)


class StreamSink(DataSourceStreamArrowWriter):
    """For ``writeStream``. The sink's id is the query's, which its checkpoint keeps, unless ``sinkId`` is given."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Raises ConfigError for columns that a message does not have."""
        check_columns(schema, options)
        if options.epoch:
            raise ConfigError("option epoch is for df.write; a stream's epochs are its micro-batches")
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send one partition of a micro-batch."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        batch, query = context.getLocalProperty(_BATCH_ID), context.getLocalProperty(_QUERY_ID)
        if batch is None or query is None:
            raise SinkError("Spark does not say which micro-batch this is, so it could not be repeated")
        return send_partition(iterator, self._options, self._options.sink_id or query, int(batch))


def send_partition(
    batches: Iterator[pa.RecordBatch],
    options: SinkOptions,
    sink_id: str,
    epoch: int,
    *,
    pace: Callable[[int], None] | None = None,
    as_stored: bool = False,
) -> Stored:
    """Send all rows of one partition, in their order, in the calling task. ``pace(n)`` is called before n rows are
    sent. ``as_stored``: the rows are messages of a store, so one with an empty body and a key is a tombstone, and one
    without either, or with a body that cannot be decoded, is left out. Otherwise these are errors: a message needs at
    least one byte.

    Raises InvalidMessageError, SendError, or SinkError.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    sender = TaskSender(options, sink_id, epoch, partition)
    try:
        for batch in batches:
            if as_stored:
                rows_before, batch = batch.num_rows, batch.filter(sendable(batch))
                sender.empty += rows_before - batch.num_rows
            for topic, queue, rows in sender.groups(batch):
                if pace is not None:
                    pace(rows.num_rows)
                sender.send(topic, queue, rows, tombstones=as_stored)
        sender.check_end()
        return Stored(sender.messages, sender.repeated, sender.empty)
    finally:
        sender.close()
