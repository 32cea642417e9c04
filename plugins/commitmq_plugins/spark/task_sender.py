"""The producer of one Spark task: sends the rows of a partition, and compares a repeated attempt with the first one."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from commitmq.client.admin import Admin
from commitmq.client.producer import Producer
from commitmq.client.results import BatchResult
from commitmq.client.sending.options import ExactlyOnce
from commitmq.errors import CommitMQError, InvalidMessageError
from commitmq.format.java import java_string_hash
from commitmq_plugins.spark.delays import by_time
from commitmq_plugins.spark.row_messages import SINK_COLUMNS, row_messages
from commitmq_plugins.spark.sink_options import SinkOptions

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
        """Like :meth:`commitmq.format.unique_ids.UniqueIds.block`."""
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
    """The number of queues of ``topic``; the node creates the topic first if it does so automatically. Raises
    CommitMQError.
    """
    with Admin(node) as admin:
        if all(one.name != topic for one in admin.topics()):
            admin.topic_create(topic)
        return admin.topic(topic).write_queues
