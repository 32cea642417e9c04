"""The methods of a producer for batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from commitmq.client.message import Message, check_topic
from commitmq.client.producer_base import ProducerBase
from commitmq.client.properties import Keys
from commitmq.client.results import BatchResult, BatchSendError
from commitmq.client.routes import not_stored
from commitmq.client.sending.arguments import (
    check_ack,
    check_queue,
    has_sharding_keys,
    keys_of_batch,
    needs_queue,
    nothing_stored,
)
from commitmq.errors import InvalidMessageError, SendError

if TYPE_CHECKING:
    from commitmq.client.sending.batch import Batch
    from commitmq.client.sending.batch_plan import BatchPlan

_MAX_CORRECTIONS: Final = 4


class BatchProducer(ProducerBase):
    """A part of :class:`commitmq.Producer`."""

    def send_batch(
        self,
        topic: str,
        messages: Sequence[bytes | Message],
        *,
        tags: str | Sequence[str | None] | None = None,
        keys: Sequence[Keys | None] | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_keys: Sequence[str | None] | None = None,
        key: str | Sequence[str | None] | None = None,
        queue: int | None = None,
        delay: float | timedelta | None = None,
        delay_level: int | None = None,
        deliver_at: datetime | int | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> BatchResult:
        """Send many messages and wait for all acks. The fastest way in: the messages are encoded and stored as runs.

        ``tags`` is one tag for all messages or a list; ``keys`` and ``sharding_keys`` are lists; a list has one entry a
        message. ``key``, one for all messages or a list, sets keys and sharding keys. ``properties`` apply to all messages.
        Message objects have all of these themselves. A run goes to one queue: ``queue``, or the queue of the sharding key,
        else the next in turn. To a topic with ``queue.type=BatchCQ`` the messages go as inner batches without compression;
        the node keeps each inner batch as one record. ``delay``, ``delay_level`` and ``deliver_at`` are for all messages; see
        :meth:`send`.
        ``timeout_s`` bounds the wait for each answer of the node.
        Raises InvalidMessageError before anything is sent, BatchSendError when a message was not acknowledged.
        """
        self._check_usable()
        limit = self._limit(timeout_s)
        if not messages:
            return BatchResult([])
        if queue is not None:
            queue = check_queue(queue)
        keys, sharding_keys = keys_of_batch(key, keys, sharding_keys, messages)
        options: dict[str, Any] = {"tags": tags, "keys": keys, "properties": properties, "sharding_keys": sharding_keys}
        if delay is not None or delay_level is not None or deliver_at is not None:
            options["asked"] = self._asked(delay, delay_level, deliver_at)
        self._check_may_wait()
        ack = self._ack if ack is None else check_ack(ack)
        deadline = time.monotonic() + limit
        try:
            self._flush_before(messages, queue, sharding_keys, deadline)
            corrections = 0
            while True:
                plan, inner = self._plan(topic, messages, options, queue, deadline)
                batch = self._submit_batch(plan, inner, queue, limit, ack, deadline)
                try:
                    return batch.wait()
                except BatchSendError as error:
                    # The topic is of another kind than the producer knew, and nothing is stored: send it all the other way.
                    corrections += 1
                    if corrections > _MAX_CORRECTIONS or not (
                        self._lanes.routes.guessed_wrong(topic, error, deadline)
                        or self._lanes.corrected(topic, error, batch.pump)
                    ):
                        raise
        except BatchSendError:
            raise
        except SendError as error:
            raise nothing_stored(error, len(messages)) from error

    def send_batch_async(
        self,
        topic: str,
        messages: Sequence[bytes | Message],
        *,
        tags: str | Sequence[str | None] | None = None,
        keys: Sequence[Keys | None] | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_keys: Sequence[str | None] | None = None,
        key: str | Sequence[str | None] | None = None,
        queue: int | None = None,
        delay: float | timedelta | None = None,
        delay_level: int | None = None,
        deliver_at: datetime | int | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> Future[BatchResult]:
        """As :meth:`send_batch`, without waiting: the next batch is encoded and sent while the node stores this one.

        The future gets a BatchResult or a BatchSendError (InvalidMessageError for a body larger than the node allows).
        Batches are stored in the order of the calls, unless one fails. Between batches and single sends there is no order
        without a :meth:`flush`. Raises InvalidMessageError at once for a batch that no node takes. Blocks while
        ``max_pending`` messages are pending. A batch of an idempotent producer also waits for earlier single messages.
        """
        self._check_usable()
        limit = self._limit(timeout_s)
        deadline = time.monotonic() + limit
        ack = self._ack if ack is None else check_ack(ack)
        if messages:
            keys, sharding_keys = keys_of_batch(key, keys, sharding_keys, messages)
        options: dict[str, Any] = {"tags": tags, "keys": keys, "properties": properties, "sharding_keys": sharding_keys}
        if delay is not None or delay_level is not None or deliver_at is not None:
            options["asked"] = self._asked(delay, delay_level, deliver_at)
        if not messages:
            done: Future[BatchResult] = Future()
            done.set_result(BatchResult([]))
            return done
        if queue is not None:
            queue = check_queue(queue)
        if self._sequences is not None:
            # Numbers count in the order of the calls.
            self._flush_before(messages, queue, sharding_keys, deadline)
        # This asks for the topic's queues here, so that the producer's thread does not wait for the coordinator.
        plan, inner = self._plan(topic, messages, options, queue, deadline)
        if self._lanes.routes.is_guess(topic):
            # The kind of topic is a guess, and no thread could correct a wrong one later: ask, or fail.
            try:
                self._lanes.routes.queues(topic, deadline)
            except SendError as error:
                failed: Future[BatchResult] = Future()
                failed.set_exception(nothing_stored(error, len(messages)))
                return failed
            plan, inner = self._plan(topic, messages, options, queue, deadline)
        return self._submit_batch(plan, inner, queue, limit, ack, deadline, is_async=True).future

    def _flush_before(
        self,
        messages: Sequence[bytes | Message],
        queue: int | None,
        sharding_keys: Sequence[str | None] | None,
        deadline: float,
    ) -> None:
        """Wait for the messages that were sent before a batch, if the batch names its queues: they come first there.

        Raises SendError.
        """
        if (
            self._lanes.all_in_flight()
            and (queue is not None or sharding_keys is not None or has_sharding_keys(messages))
            and not self._lanes.flush(deadline)
        ):
            raise not_stored("CLIENT_BUSY", "messages that were sent before the batch are still pending")

    def _plan(
        self,
        topic: str,
        messages: Sequence[bytes | Message],
        options: dict[str, Any],
        queue: int | None,
        deadline: float,
    ) -> tuple[BatchPlan, bool]:
        """The batch with its properties, and whether it goes as inner batches. Raises InvalidMessageError.

        ``options``: tags, keys, properties and sharding_keys, as :meth:`send_batch` takes them, and what the messages ask for.
        """
        # Only batches need numpy: a producer of single messages starts without it.
        from commitmq.client.sending.batch_plan import plan_batch

        inner = self._lanes.routes.takes_inner_batches(check_topic(topic), deadline)
        if inner and self._sequences is not None:
            raise InvalidMessageError(f"topic {topic!r} has queue.type=BatchCQ, which takes no idempotent sends")
        if inner and "asked" in options:
            raise InvalidMessageError(f"topic {topic!r} has queue.type=BatchCQ, whose inner batches cannot be delayed")
        compressed = None if self._compress is None or inner else self._compressed
        plan = plan_batch(topic, messages, **options, compressed=compressed)
        if (
            queue is None
            and self._sequences is not None
            and not self._sequences.is_own
            and (plan.sharding_keys is None or not all(plan.sharding_keys))
        ):
            raise needs_queue()
        return plan, inner

    def _submit_batch(
        self,
        plan: BatchPlan,
        inner: bool,
        queue: int | None,
        limit: float,
        ack: str,
        deadline: float,
        *,
        is_async: bool = False,
    ) -> Batch:
        """Send a batch, or give it to the pump. Raises SendError (not stored) while too much is pending, and for an
        idempotent producer that cannot go on.
        """
        from commitmq.client.sending.batch import Batch

        if self._sequences is not None:
            self._sequences.check()
            self._check_takes_numbers(plan.topic, min(deadline, time.monotonic() + 1.0))
        pump = self._lanes.of(plan.topic, deadline)
        batch = Batch(pump, plan, ack=ack, limit_s=limit, inner=inner, queue=queue, is_async=is_async)
        if is_async:
            pump.outbox.submit_batch(batch)
        else:
            pump.send_waiting(batch)
        return batch
