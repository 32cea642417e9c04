"""The asyncio producer: a :class:`commitmq.Producer` that never blocks the event loop.

A send that would block stands in a line (:mod:`commitmq.client.aio_lines`). Batches, ``flush`` and ``close`` run in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from commitmq.client import checks
from commitmq.client.aio_lines import Lines, PendingSend, QueuedSend, TopicUnknownError
from commitmq.client.message import Message, check_topic
from commitmq.client.producer import Producer
from commitmq.client.producer_transactions import content_for_listener
from commitmq.client.requesting.exchange import Content, reply_message, request_message
from commitmq.client.requesting.reply_reader import no_reply
from commitmq.client.results import BatchResult, SendResult
from commitmq.client.sending.arguments import shard
from commitmq.client.sending.options import (
    BatchOptions,
    HalfOptions,
    MessageOptions,
    OnDelivery,
    ProducerOptions,
    RequestOptions,
    former_delivery,
    tell_delivery,
)
from commitmq.client.sending.outbox import NoRoom
from commitmq.errors import CommitMQError
from commitmq.protocol.node_address import several_addresses

if TYPE_CHECKING:
    from commitmq.client.transactions.half_message import TransactionResult
    from commitmq.client.transactions.transaction import AsyncTransaction

_R = TypeVar("_R")


class AsyncProducer:
    """:class:`commitmq.Producer` for asyncio; same arguments, same errors.

    ``send`` waits for its ack; many tasks that send at the same time share runs. ``submit`` returns a future at once.
    No call blocks the loop. A send beyond ``max_pending``, or to a topic with unknown queues, waits for its turn. It fails
    when its ``timeout_s`` is over. (``max_pending`` bounds the messages in the producer. The sends that wait for their turn
    have no bound: a program that submits without awaiting keeps them in memory.)
    ``linger_ms`` is 0 by default: the producer cannot see whether a task awaits the future.

    A producer serves one loop at a time, that of the last call. Sends that wait in another loop then fail as not stored.
    """

    def __init__(
        self,
        node: str | Iterable[str] | None = None,
        *,
        idempotent: bool = False,
        producer_id: str | None = None,
        producer_epoch: int = 0,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """Arguments as of :class:`commitmq.Producer`."""
        if idempotent or producer_id is not None or producer_epoch:
            given = settings.get("delivery")
            settings["delivery"] = former_delivery(given, idempotent, producer_id, producer_epoch)
        settings.setdefault("linger_ms", 0.0)
        addresses = several_addresses(node)
        if addresses is not None:
            from commitmq.client.producing.aio_several_nodes import become_several

            become_several(self, AsyncProducer, addresses, settings)
            return
        self._producer = Producer(node, **settings)
        self._producer._lanes.waiters.room = self._has_room
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-producer")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-routes")
        self._lines: Lines | None = None
        self._batches: set[asyncio.Task[BatchResult]] = set()
        self._closing = False
        self._is_closed = False

    async def send(
        self,
        topic: str,
        body: bytes | Message,
        *,
        multi_dispatch: Iterable[str] | None = None,
        **fields: Unpack[MessageOptions],
    ) -> SendResult:
        """Send one message and wait for its ack; ``fields`` as in :meth:`commitmq.Producer.send`."""
        if multi_dispatch is not None:
            return await self._run(partial(self._producer.send, topic, body, multi_dispatch=multi_dispatch, **fields))
        return await self.send_async(topic, body, **fields)

    def send_async(
        self,
        topic: str,
        body: bytes | Message,
        *,
        on_delivery: OnDelivery | None = None,
        **fields: Unpack[MessageOptions],
    ) -> asyncio.Future[SendResult]:
        """Send one message; the future gets its result. The loop must be running. (:meth:`submit` is the same.)

        Arguments as of :meth:`commitmq.Producer.send_async`; ``on_delivery`` is called in the loop. A message that cannot be
        sent raises InvalidMessageError here, or in the future if the send had to wait for its turn.
        """
        loop = asyncio.get_running_loop()
        lines = self._lines
        if lines is None or lines.loop is not loop:
            lines = self._settle_in(loop)
        if self._closing:
            raise CommitMQError("the producer is closed")
        if on_delivery is not None:
            checks.callback("on_delivery", on_delivery)
        pending = PendingSend(loop=loop)
        pending.arrivals = lines.arrivals
        if on_delivery is not None:
            pending.add_done_callback(partial(tell_delivery, on_delivery))
        if topic not in lines.by_topic:
            try:
                self._hand_over(pending, topic, body, fields)
                return pending
            except (NoRoom, TopicUnknownError):
                pass  # it waits for its turn
        deadline = time.monotonic() + self._producer._limit(fields.get("timeout_s"))
        lines.add(topic, QueuedSend(pending, body, fields, deadline))
        return pending

    submit = send_async

    async def cancel(self, receipt: SendResult | str, *, timeout_s: float | None = None) -> None:
        """As :meth:`commitmq.Producer.cancel`."""
        await self._run(partial(self._producer.cancel, receipt, timeout_s=timeout_s))

    async def request(self, topic: str, body: bytes | Message, **fields: Unpack[RequestOptions]) -> Message:
        """Send one message and wait for its reply; see :meth:`commitmq.Producer.request`. Many tasks may wait at a time."""
        producer = self._producer
        self._settle_in(asyncio.get_running_loop())
        limit = producer._limit(fields.get("timeout_s"))
        queue, ack = fields.get("queue"), fields.get("ack")
        content = Content(
            body,
            fields.get("tags"),
            fields.get("keys"),
            fields.get("properties"),
            fields.get("sharding_key"),
            fields.get("key"),
            fields.get("flag", 0),
        )
        deadline = time.monotonic() + limit
        if not producer._replies.is_started:
            starting = self._asking.submit(producer._replies.start, deadline)
            await asyncio.shield(asyncio.wrap_future(starting))
        waiting = producer._replies.open(limit)
        try:
            message = request_message(content, waiting.marks)
            left_s = max(deadline - time.monotonic(), 0.001)
            await self.send_async(topic, message, queue=queue, ack=ack, timeout_s=left_s)
            left_s = max(deadline - time.monotonic(), 0)
            return await asyncio.wait_for(asyncio.wrap_future(waiting.reply), left_s)
        except TimeoutError:
            raise no_reply(topic, waiting, limit) from None
        finally:
            producer._replies.drop(waiting)

    async def reply(
        self,
        message: Message,
        body: bytes | Message,
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> SendResult:
        """Reply to a request; see :meth:`commitmq.Producer.reply`. In a handler ``message.reply_async(body)`` does it too."""
        made = reply_message(message, body, properties)
        queue = made.queue
        if queue is None:
            deadline = time.monotonic() + self._producer._limit(timeout_s)
            queue = shard(made.client_id, await asyncio.wrap_future(self._ask(check_topic(made.topic), deadline)))
        return await self.send_async(made.topic, made.message, queue=queue, timeout_s=timeout_s, ack=ack)

    @property
    def late_replies(self) -> int:
        """See :attr:`commitmq.Producer.late_replies`."""
        return self._producer.late_replies

    def transaction(self, topic: str, body: bytes | Message, **fields: Unpack[MessageOptions]) -> AsyncTransaction:
        """``async with producer.transaction(topic, body)``; see :meth:`commitmq.Producer.transaction`."""
        from commitmq.client.transactions.transaction import AsyncTransaction

        group = self._producer._transaction_group()
        limit = self._producer._limit(fields.get("timeout_s"))
        return AsyncTransaction(
            group, limit, partial(self._send_half, topic, body, fields), partial(content_for_listener, body, fields)
        )

    async def send_in_transaction(
        self, topic: str, body: bytes | Message, argument: Any = None, **fields: Unpack[MessageOptions]
    ) -> TransactionResult:
        """See :meth:`commitmq.Producer.send_in_transaction`. ``execute`` may be a coroutine function."""
        from commitmq.client.transactions.half_message import TransactionResult, TransactionState

        group = self._producer._transaction_group()
        group.check_executes()
        async with self.transaction(topic, body, **fields) as transaction:
            try:
                state = await group.execute_async(transaction.half, *content_for_listener(body, fields), argument)
            except BaseException:
                transaction.unknown()
                raise
            if state is TransactionState.COMMIT:
                await transaction.commit()
            elif state is TransactionState.ROLLBACK:
                await transaction.rollback()
            else:
                transaction.unknown()
        return TransactionResult(transaction.half, state, transaction.committed)

    def _send_half(self, topic: str, body: bytes | Message, fields: MessageOptions) -> asyncio.Future[SendResult]:
        half = self._producer._half_options(fields)
        return self.send_async(topic, body, **cast(MessageOptions, half))

    async def send_batch(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> BatchResult:
        """Send many messages; see :meth:`commitmq.Producer.send_batch`. A cancelled batch goes on in its thread."""
        return await self._run(partial(self._producer.send_batch, topic, messages, **fields))

    def send_batch_async(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> asyncio.Future[BatchResult]:
        """Send many messages; the future gets their result. The loop must be running.

        See :meth:`commitmq.Producer.send_batch_async`: batches are stored in the order of the calls. The future raises the
        errors of that method.
        """
        self._settle_in(asyncio.get_running_loop())
        if self._closing:
            raise CommitMQError("the producer is closed")
        # Here and not in the first turn of the task: a flush or a close that comes next must find the batch.
        taken = self._thread.submit(self._producer.send_batch_async, topic, messages, **fields)
        batch = asyncio.ensure_future(self._batch(taken))
        self._batches.add(batch)
        batch.add_done_callback(self._batches.discard)
        return batch

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every submitted send is done. Raises TimeoutError as :meth:`commitmq.Producer.flush`."""
        lines = self._settle_in(asyncio.get_running_loop())
        limit = self._producer._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        if not await lines.wait_until_empty(deadline):
            waiting = len(lines) + self._producer._lanes.all_in_flight()
            raise TimeoutError(f"{waiting} messages are still pending after {limit} s")
        await self._run(partial(self._producer.flush, max(deadline - time.monotonic(), 0)))
        if self._batches:
            await asyncio.wait(self._batches, timeout=max(deadline - time.monotonic(), 0))

    async def close(self, timeout_s: float | None = None) -> None:
        """Send the pending messages, then close everything. Closing twice is allowed."""
        if self._is_closed:
            return
        lines = self._settle_in(asyncio.get_running_loop())
        self._closing = True
        deadline = time.monotonic() + (self._producer._timeout_s if timeout_s is None else timeout_s)
        try:
            if not await lines.wait_until_empty(deadline):
                await lines.turn_away()
            await self._run(partial(self._producer.close, max(deadline - time.monotonic(), 0)))
        finally:
            if not self._is_closed:
                self._thread.submit(self._producer.close, 0)  # nothing is left to do, unless this was interrupted
            self._is_closed = True
            lines.cancel()
            self._asking.shutdown(wait=False)
            self._thread.shutdown(wait=False)

    @property
    def is_closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ steps

    def _settle_in(self, loop: asyncio.AbstractEventLoop) -> Lines:
        """Serve ``loop``. The sends that wait in the loop before it fail: that loop may never run again."""
        former = self._lines
        if former is not None and former.loop is loop:
            return former
        self._batches = set()
        now = self._lines = Lines(loop, self._hand_over, self._ask)
        if former is not None:
            former.give_up()
        return now

    def _hand_over(self, pending: PendingSend, topic: str, body: bytes | Message, fields: MessageOptions) -> None:
        """Raises NoRoom or TopicUnknownError instead of waiting; else as :meth:`commitmq.Producer.send_async`."""
        if self._producer._would_ask(check_topic(topic), body, fields):
            raise TopicUnknownError
        if "half" in fields:
            pending.sent = self._producer._submit_half(topic, body, cast(HalfOptions, fields))
        else:
            pending.sent = self._producer.send_async(topic, body, **fields)
        pending.sent.add_done_callback(pending.arrived)

    def _ask(self, topic: str, deadline: float) -> Future[int]:
        return self._asking.submit(self._producer._lanes.routes.queues, topic, deadline)

    def _has_room(self) -> None:
        """Called in any thread, with the producer's lock."""
        if self._lines is not None:
            self._lines.note_room()

    async def _batch(self, taken: Future[Future[BatchResult]]) -> BatchResult:
        submitting: asyncio.Future[Future[BatchResult]] = asyncio.wrap_future(taken)
        return await asyncio.wrap_future(await asyncio.shield(submitting))

    async def _run(self, work: Callable[[], _R]) -> _R:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
