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
plan and checkpoint; but an operator may change the plan between a crash and the restart. So the ids of messages are
derived from their content. When the node answers that a number is stored already, the stored message's id must be the
expected one. Otherwise the task fails, with a message, before any row is skipped. Continuing then takes a new
``sinkId``, which stores the micro-batch again.

The columns ``delay_ms`` and ``deliver_at`` of a row: when consumers shall get its message.

The options of ``df.write.format("commitmq")`` and ``writeStream``, checked.

Messages of rows: the columns that a sink takes, and the message of each row.

The producer of one Spark task: sends the rows of a partition, and compares a repeated attempt with the first one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from commitmq.client.admin import Admin
from commitmq.client.message import Message, Tombstone
from commitmq.client.producer import Producer
from commitmq.client.results import BatchResult
from commitmq.client.sending.asked import LEAST_DELIVER_MS
from commitmq.client.sending.options import ExactlyOnce
from commitmq.errors import CommitMQError, ConfigError, InvalidMessageError
from commitmq.format.constants import Property
from commitmq.format.java import java_string_hash
from commitmq.format.producer_mark import is_producer_id
from commitmq_plugins.spark.columns import COLUMNS, STATE_COLUMNS

TIME_COLUMNS: Final = ("delay_ms", "deliver_at")
_NONE: Final = -1


def by_time(rows: pa.RecordBatch) -> Iterator[tuple[dict[str, Any], pa.RecordBatch]]:
    """The rows of each time, in their order, with the arguments of ``send_batch`` for it; rows without one come first.
    Raises InvalidMessageError for a row with both columns, and for a negative delay. A delay of 0 is none.
    """
    if all(name not in rows.schema.names or rows.column(name).null_count == rows.num_rows for name in TIME_COLUMNS):
        yield {}, rows
        return
    delays, times = _delays(rows), _times(rows)
    if bool(np.any((delays != _NONE) & (times != _NONE))):
        raise InvalidMessageError("a row has both delay_ms and deliver_at; a message has one time")
    delays[delays == 0] = _NONE
    found, which = np.unique(np.stack((delays, times), axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(np.bincount(which, minlength=len(found)))
    for (delay, time), mine in zip(found.tolist(), np.split(order, ends[:-1]), strict=True):
        part = rows if len(mine) == rows.num_rows else rows.take(pa.array(mine))
        if delay != _NONE:
            yield {"delay": timedelta(milliseconds=delay)}, part
        elif time != _NONE:
            yield {"deliver_at": time}, part
        else:
            yield {}, part


def _delays(rows: pa.RecordBatch) -> NDArray[np.int64]:
    if "delay_ms" not in rows.schema.names:
        return np.full(rows.num_rows, _NONE, np.int64)
    column = rows.column("delay_ms").cast(pa.int64())
    least = pc.min(column).as_py()
    if least is not None and least < 0:
        raise InvalidMessageError(f"a row has the delay_ms {least}; a delay is 0 or more")
    return np.array(column.fill_null(_NONE), np.int64)


def _times(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """In ms since 1970, rounded up: a message never comes early. Times before LEAST_DELIVER_MS have passed as well as it."""
    if "deliver_at" not in rows.schema.names:
        return np.full(rows.num_rows, _NONE, np.int64)
    column = rows.column("deliver_at")
    micros = np.array(column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64()).fill_null(0), np.int64)
    given = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    return np.where(given, np.maximum(-(-micros // 1000), LEAST_DELIVER_MS), _NONE)


_NAMES: Final = ("node", "topic", "sinkId", "epoch", "ack", "timeoutSeconds", "idempotent")
_ALSO_GIVEN: Final = ("path", "checkpointlocation")  # Spark's own
_MAX_SINK_ID: Final = 56
_DEFAULT_TIMEOUT_S: Final = 120


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of ``write`` and ``writeStream``, checked. ``sink_id`` is empty when it is absent."""

    node: str | None = None
    topic: str = ""
    sink_id: str = ""
    epoch: int = 0
    ack: str = "flushed"
    timeout_s: int = _DEFAULT_TIMEOUT_S
    idempotent: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Raises ConfigError with the option's name and its possible values."""
        values = {name.lower(): value for name, value in options.items()}
        unknown = sorted(set(values) - {name.lower() for name in _NAMES} - set(_ALSO_GIVEN))
        if unknown:
            raise ConfigError(f"there is no option {unknown[0]!r} for writing; options are {', '.join(_NAMES)}")
        sink_id = values.get("sinkid", "")
        if sink_id and (not is_producer_id(sink_id) or len(sink_id) > _MAX_SINK_ID):
            raise ConfigError(f"option sinkId: it is 1 to {_MAX_SINK_ID} letters, digits and ._-/@+=, not {sink_id!r}")
        if (ack := values.get("ack", "flushed")) not in ("flushed", "memory"):
            raise ConfigError(f"option ack: it is flushed or memory, not {ack!r}")
        if (once := values.get("idempotent", "true").strip().lower()) not in ("true", "false"):
            raise ConfigError(f"option idempotent: it is true or false, not {once!r}")
        return cls(
            values.get("node") or values.get("path") or None,
            values.get("topic", ""),
            sink_id,
            _number("epoch", values, 0),
            ack,
            max(1, _number("timeoutSeconds", values, _DEFAULT_TIMEOUT_S)),
            once == "true",
        )


def _number(name: str, values: Mapping[str, str], default: int) -> int:
    text = values.get(name.lower(), str(default)).strip()
    if not text.isdecimal():
        raise ConfigError(f"option {name}: it is a number from 0 on, not {text!r}")
    return int(text)


SINK_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "flag": ("int",),
    "queue_id": ("int",),
    "sharding_key": ("string",),
    "delay_ms": ("bigint", "int"),
    "deliver_at": ("timestamp",),
}
"""The columns of a row, with the types that each may have."""

NOT_CARRIED: Final = frozenset(
    (
        Property.UNIQUE_KEY, Property.CRC32, Property.PRODUCER_SEQUENCE, Property.WAIT, Property.CLUSTER, Property.REGION,
        Property.TRACE_ON, Property.DELAY, Property.RETRY_TOPIC, Property.REAL_TOPIC, Property.REAL_QUEUE_ID,
        Property.TRANSACTION_PREPARED, Property.PRODUCER_GROUP, Property.INNER_NUM, Property.INNER_BASE,
        Property.TIMER_DELAY_SECONDS, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS, "TIMER_OUT_MS",
        "TIMER_DEL_UNIQKEY", Property.INNER_MULTI_DISPATCH, Property.INNER_MULTI_QUEUE_OFFSET,
    )
)  # fmt: skip
"""Properties that describe how a message was sent, stored or delivered: a message that is sent again does not get them.
"""


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Raise ConfigError for columns that have no meaning here, or that are missing."""
    names = schema.fieldNames()
    if "body" not in names:
        raise ConfigError("there is no column body: it has the body of a message")
    if not options.topic and "topic" not in names:
        raise ConfigError("say where the messages go: option topic, or a column topic")
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name in SINK_COLUMNS:
            if kind not in SINK_COLUMNS[field.name]:
                raise ConfigError(f"the column {field.name} is {' or '.join(SINK_COLUMNS[field.name])}, not {kind}")
            if field.name in TIME_COLUMNS and options.idempotent:
                raise ConfigError(
                    f"the column {field.name} delays messages, and an idempotent producer's messages cannot be delayed: say"
                    " idempotent=false (a task that Spark repeats may then store its messages again)"
                )
        elif field.name not in COLUMNS and field.name not in STATE_COLUMNS:
            raise ConfigError(f"a message has no {field.name!r}; columns are {', '.join(SINK_COLUMNS)}")


def sendable(batch: pa.RecordBatch) -> pa.Array:
    """For each row of a store, whether it has a body, or a key whose value it deletes."""
    size = pc.binary_length(batch.column("body"))
    has_key = pc.greater(pc.binary_length(batch.column("keys")).fill_null(0), 0)
    return pc.if_else(pc.equal(size, 0).fill_null(False), has_key, pc.is_valid(size))


def row_messages(rows: pa.RecordBatch, tombstones: bool) -> tuple[Sequence[bytes | Message], dict[str, Any]]:
    """The messages of ``rows``, and arguments of ``send_batch``. ``tombstones``: an empty body is no mistake."""
    names = rows.schema.names
    body = rows.column("body")
    if body.null_count:
        raise InvalidMessageError("a row has no body")
    bodies: list[bytes] = (body.cast(pa.binary()) if body.type != pa.binary() else body).to_pylist()
    columns: dict[str, list[Any]] = {
        name: rows.column(name).to_pylist()
        for name in ("tags", "keys", "sharding_key")
        if name in names and rows.column(name).null_count < rows.num_rows
    }
    has_flags = "flag" in names and bool(np.any(np.asarray(rows.column("flag").fill_null(0))))
    tombstones = tombstones and not all(bodies)
    if not (has_flags or tombstones) and ("properties" not in names or not _pairs(rows.column("properties"))):
        if "sharding_key" in columns:
            columns["sharding_keys"] = columns.pop("sharding_key")
        return bodies, columns
    nothing = [None] * rows.num_rows
    own = rows.column("properties").to_pylist() if "properties" in names else nothing
    flags = rows.column("flag").fill_null(0).to_pylist() if has_flags else [0] * rows.num_rows
    messages: list[bytes | Message] = []
    for index, pairs in enumerate(own):
        properties = {name: value for name, value in pairs or () if name not in NOT_CARRIED}
        tags, keys, sharding_key = (columns.get(name, nothing)[index] for name in ("tags", "keys", "sharding_key"))
        tags = tags or properties.pop(Property.TAGS, None)
        keys = keys or properties.pop(Property.KEYS, None)
        sharding_key = sharding_key or properties.pop(Property.SHARDING_KEY, None)
        for name in (Property.TAGS, Property.KEYS, Property.SHARDING_KEY):
            properties.pop(name, None)
        fields: dict[str, Any] = {
            "tags": tags,
            "keys": keys,
            "properties": properties,
            "sharding_key": sharding_key,
            "flag": flags[index],
        }
        text = bodies[index]
        try:
            messages.append(Tombstone(**fields) if tombstones and not text else Message(text, **fields))
        except InvalidMessageError as error:
            raise InvalidMessageError(f"row {index}: {error}") from error
    return messages, {}


def _pairs(properties: pa.MapArray) -> int:
    """The number of pairs in all maps together."""
    offsets = properties.offsets
    return int(offsets[-1].as_py()) - int(offsets[0].as_py())


_PREFIX_BYTES: Final = 14
_MOST_PENDING: Final = 32


class SinkError(CommitMQError):
    """A task would have taken other rows for stored ones; no row was skipped."""


class _ContentIds:
    """Unique ids that a repetition produces again, in place of a producer's own."""

    def __init__(self) -> None:
        self._prefix = ""
        self._counter = 0

    def begin(self, prefix: str) -> None:
        """The ids of the following messages begin with ``prefix``, and count from 0."""
        self._prefix, self._counter = prefix, 0

    def block(self, count: int) -> tuple[bytes, int]:
        """Like :meth:`commitmq.format.message_id.UniqueIds.block`."""
        first = self._counter
        self._counter += count
        return self._prefix.encode(), first


class TaskSender:
    """One task's producer."""

    def __init__(self, options: SinkOptions, sink_id: str, epoch: int, partition: int) -> None:
        self.messages = self.repeated = self.empty = 0
        self._options = options
        self._partition = partition
        self._identity = f"{sink_id}/{partition}"
        self._epoch = epoch
        self._turn = partition
        self._queue_counts: dict[str, int] = {}
        self._sent: dict[tuple[str, int], int] = {}
        # Queues whose last message was stored before; the value: whether it is known to be the same message.
        self._before: dict[tuple[str, int], bool] = {}
        delivery = ExactlyOnce(self._identity, epoch) if options.idempotent else None
        self._producer = Producer(options.node, ack=options.ack, timeout_s=options.timeout_s, delivery=delivery)
        self._ids = _ContentIds()
        if options.idempotent:
            self._producer._lanes.writer.lane.ids = self._ids  # type: ignore[assignment]

    def close(self) -> None:
        self._producer.close()

    def groups(self, batch: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """The rows of ``batch`` by topic and queue, in the batch's order."""
        count = batch.num_rows
        if not count:
            return
        names = batch.schema.names
        if self._options.topic:
            topics, codes = [self._options.topic], np.zeros(count, np.int64)
        else:
            encoded = batch.column("topic").dictionary_encode()
            if encoded.indices.null_count:
                raise InvalidMessageError("a row has no topic")
            topics, codes = encoded.dictionary.to_pylist(), np.asarray(encoded.indices).astype(np.int64)
        queues = np.full(count, -1, np.int64)
        if "queue_id" in names:
            queues = np.asarray(batch.column("queue_id").fill_null(-1)).astype(np.int64)
        for code in np.unique(codes[queues < 0]).tolist():
            chosen = np.flatnonzero((codes == code) & (queues < 0))
            queues[chosen] = self._picked(topics[code], batch, chosen)
        keys = codes * (1 << 32) + queues
        for key in np.unique(keys).tolist():
            rows = np.flatnonzero(keys == key)
            part = batch if len(rows) == count else batch.take(pa.array(rows))
            yield topics[key >> 32], key & 0xFFFFFFFF, part

    def _picked(self, topic: str, batch: pa.RecordBatch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Queues of rows without a ``queue_id``."""
        count = self._queue_count(topic)
        texts: list[Any] = [None] * len(rows)
        for name in ("keys", "sharding_key"):  # the later column wins
            if name in batch.schema.names:
                found = batch.column(name).take(pa.array(rows)).to_pylist()
                texts = [one or before for one, before in zip(found, texts, strict=True)]
        turn = self._turn % count
        self._turn += 1
        hashes: dict[str, int] = {}
        result = np.empty(len(rows), np.int64)
        for index, text in enumerate(texts):
            if not text:
                result[index] = turn
                continue
            text = text if isinstance(text, str) else " ".join(text)
            queue = hashes.get(text)
            if queue is None:
                queue = hashes[text] = abs(java_string_hash(text)) % count
            result[index] = queue
        return result

    def _queue_count(self, topic: str) -> int:
        if topic not in self._queue_counts:
            self._queue_counts[topic] = queue_count(self._options.node, topic)
        return self._queue_counts[topic]

    def send(self, topic: str, queue: int, rows: pa.RecordBatch, *, tombstones: bool = False) -> None:
        """Send rows to a queue and wait until they are stored. ``tombstones``: rows with a key may have an empty body."""
        if not self._options.idempotent:
            self._send_unnumbered(topic, queue, rows, tombstones)
            return
        messages, fields = row_messages(rows, tombstones)
        first = self._sent.get((topic, queue), 0)
        self._ids.begin(self._content(topic, queue, first, rows))
        result = self._producer.send_batch(topic, messages, queue=queue, **fields)
        self.messages += len(messages)
        self._sent[topic, queue] = first + len(messages)
        self._check(topic, queue, result)

    def _send_unnumbered(self, topic: str, queue: int, rows: pa.RecordBatch, tombstones: bool) -> None:
        """A batch for each time of delivery; some are under way together, for each row may have a time of its own."""
        pending: deque[Future[BatchResult]] = deque()
        parts = list(by_time(rows))
        for when, part in parts:
            messages, fields = row_messages(part, tombstones)
            if len(parts) == 1:
                self._producer.send_batch(topic, messages, queue=queue, **fields, **when)
                self.messages += len(messages)
                return
            pending.append(self._producer.send_batch_async(topic, messages, queue=queue, **fields, **when))
            if len(pending) > _MOST_PENDING:
                pending.popleft().result()
            self.messages += len(messages)
        for one in pending:
            one.result()

    def _content(self, topic: str, queue: int, first: int, rows: pa.RecordBatch) -> str:
        """The prefix of these messages' ids: the same only for the same rows at the same place."""
        digest = hashlib.blake2b(digest_size=_PREFIX_BYTES)
        digest.update(f"{self._identity}\n{self._epoch}\n{topic}\n{queue}\n{first}\n{rows.num_rows}\n".encode())
        taken = rows.select([name for name in SINK_COLUMNS if name in rows.schema.names])
        # A copy without offset, so that its buffers hold only these rows.
        packed = taken.take(pa.array(np.arange(rows.num_rows)))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, packed.schema.remove_metadata()) as stream:
            stream.write_batch(packed.replace_schema_metadata(None))
        digest.update(sink.getvalue())
        return digest.hexdigest().upper()

    def _check(self, topic: str, queue: int, result: BatchResult) -> None:
        """Compare the messages stored before with this attempt's rows. Raises SinkError."""
        key = (topic, queue)
        for ack in result.acks:
            before = len(ack.answer.get("stored_before") or ())
            if not before:
                self._settle(key)
                continue
            for index in (0, before - 1):
                known = ack.result(index).unique_id
                if known and known != ack._unique_id(index):
                    raise self._differs(key)
                self._before[key] = bool(known)
            self.repeated += before
            if before < ack.count:
                self._settle(key)

    def _settle(self, key: tuple[str, int]) -> None:
        """The next messages are new: the last stored one before them must be known to be the right one."""
        if not self._before.pop(key, True):
            raise self._differs(key)

    def check_end(self) -> None:
        """All rows are sent. Raises SinkError when the messages stored before cannot be shown to equal this attempt's."""
        for key in list(self._before):
            self._settle(key)

    def _differs(self, key: tuple[str, int]) -> SinkError:
        topic, queue = key
        return SinkError(
            f"queue {queue} of {topic!r} holds other messages of {self._identity!r}, epoch {self._epoch}, than this attempt"
            " sends, or it is not known any more: the rows were partitioned differently, or are others. A new sinkId stores"
            " all of this attempt's rows again"
        )


def queue_count(node: str | None, topic: str) -> int:
    """The number of queues of ``topic``, which may be made automatically first. Raises CommitMQError."""
    with Admin(node) as admin:
        if all(one.name != topic for one in admin.topics()):
            admin.topic_create(topic)
        return admin.topic(topic).write_queues


_BATCH_ID: Final = "streaming.sql.batchId"
_QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True)
class TaskCommit(WriterCommitMessage):
    """The result of one task: an earlier attempt had stored ``repeated`` messages, ``empty`` rows were omitted."""

    messages: int
    repeated: int
    empty: int = 0


class BatchSink(DataSourceArrowWriter):
    """For ``df.write``. ``sinkId`` names the write for a repetition; ``epoch`` grows with each write of a sink."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        """Raises ConfigError for columns that a message does not have."""
        check_columns(schema, options)
        self._options = options
        self._sink_id = options.sink_id or f"batch-{secrets.token_hex(12)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
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
) -> TaskCommit:
    """Send all rows of one partition, in their order, in the calling task. ``pace(n)`` is called before n rows are
    sent. ``as_stored``: the rows are messages of a store, so one with an empty body and a key is a tombstone, and one
    without either, or with a body that cannot be decoded, is omitted. Otherwise these are errors: a message needs at
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
        return TaskCommit(sender.messages, sender.repeated, sender.empty)
    finally:
        sender.close()
