"""The asyncio producer: a :class:`commitmq.Producer` that never blocks the event loop.

A send that would block stands in a line (:mod:`commitmq.client.aio_producer`). Batches, ``flush`` and ``close`` run in
a thread.

Sends of an asyncio producer that wait for their turn, and results on their way back to the event loop.

A send waits where the producer would block: for the queues of its topic, or for room among the pending messages. It stands in
the line of its topic, and later sends to the topic stand behind it. So the producer gets messages in the order of the calls. A
task of the loop empties each line.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.aio_base import AsyncClosing
from commitmq.client.message import Message, check_topic
from commitmq.client.producer import Producer, TopicUnknownError, content_for_listener
from commitmq.client.requesting.reply_reader import no_reply, reply_message, request_message
from commitmq.client.results import BatchResult, SendResult
from commitmq.client.routes import not_stored
from commitmq.client.sending.options import (
    BatchOptions,
    MessageOptions,
    OnDelivery,
    ProducerOptions,
    RequestOptions,
    shard,
    tell_delivery,
)
from commitmq.client.sending.outbox import NoRoom
from commitmq.errors import CommitMQError, SendError

if TYPE_CHECKING:
    from commitmq.client.transactions.half_message import TransactionResult
    from commitmq.client.transactions.transaction import AsyncTransaction


# Sends and results between two turns of the loop.
_STEP: Final = 256
# The longest wait for one look-up or for room. After it the sends that are out of time fail, and other topics have their turn.
_LONGEST_WAIT_S: Final = 1.0


class PendingSend(asyncio.Future[SendResult]):
    """The future that the program awaits. Cancelling it withdraws the message if the connection does not have it yet."""

    sent: Future[SendResult] | None = None
    arrivals: Arrivals

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done() and self.sent is not None:
            self.sent.cancel()
        return super().cancel(msg)

    def arrived(self, _sent: Future[SendResult]) -> None:
        """The message has its outcome. Called in the producer's thread, or in the thread that cancels."""
        self.arrivals.add(self)


class Arrivals:
    """Results on their way from the producer's thread to one loop. One call of the loop takes all results of a run.

    ``asyncio.wrap_future`` makes one call for each message, and each call wakes the loop by a system call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[PendingSend] = deque()
        self._is_called = False

    def add(self, pending: PendingSend) -> None:
        """Hand over one result, in any thread."""
        self._done.append(pending)
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._land)

    def _land(self) -> None:
        self._is_called = False  # before the look: a result that comes after it calls again
        for _ in range(_STEP):
            if not self._done:
                return
            pending = self._done.popleft()
            sent = pending.sent
            if pending.done() or sent is None:
                continue
            if sent.cancelled():
                pending.cancel()
            elif error := sent.exception(0):
                pending.set_exception(error)
            else:
                pending.set_result(sent.result(0))
        self._is_called = True
        self.loop.call_soon(self._land)  # the loop has a turn for other tasks before the rest


class QueuedSend:
    """A send that stands in a line, on its way to ``producer``. ``deadline`` is in monotonic seconds."""

    __slots__ = ("body", "deadline", "fields", "pending", "producer")

    def __init__(
        self, producer: Producer, pending: PendingSend, body: bytes | Message, fields: MessageOptions, deadline: float
    ) -> None:
        self.producer = producer
        self.pending = pending
        self.body = body
        self.fields = fields
        self.deadline = deadline

    def fail(self, code: str, sentence: str) -> None:
        """The message is not stored. A send that has its outcome keeps it."""
        if not self.pending.done():
            self.pending.set_exception(not_stored(code, sentence))


class Lines:
    """The lines of one event loop, by topic. All methods but :meth:`note_room` and :meth:`give_up` are called in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, asking: ThreadPoolExecutor) -> None:
        """The threads of ``asking`` ask for what a producer does not know of a topic."""
        self.loop = loop
        self.arrivals = Arrivals(loop)
        self.by_topic: dict[str, deque[QueuedSend]] = {}
        """A topic is here while a send to it has to stand in its line."""
        self._asking = asking
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        """Sends that stand in a line."""
        return sum(map(len, self.by_topic.values()))

    def add(self, topic: str, send: QueuedSend) -> None:
        """Put ``send`` at the end of the line of ``topic``."""
        line = self.by_topic.get(topic)
        if line is None:
            line = self.by_topic[topic] = deque()
            task = self.loop.create_task(self._empty(topic, line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        line.append(send)

    def note_room(self) -> None:
        """There is room for another message, or was a moment ago. Called in any thread, with the producer's lock."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._room.set)

    # ------------------------------------------------------------ the end

    async def wait_until_empty(self, deadline: float) -> bool:
        """Wait until nothing stands in a line; False when ``deadline`` passed before that."""
        while self._tasks:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.wait(set(self._tasks), timeout=left_s)
        return True

    async def turn_away(self) -> None:
        """Fail every send that stands in a line: the producer is closed."""
        for line in list(self.by_topic.values()):
            for at, one in enumerate(list(line)):
                if at % _STEP == _STEP - 1:
                    await asyncio.sleep(0)
                one.fail("CLIENT_CLOSED", "the producer was closed before the message was sent")

    def cancel(self) -> None:
        """End the tasks. Each cancels the sends of its line."""
        for task in self._tasks:
            task.cancel()

    def give_up(self) -> None:
        """Fail every send that stands in a line: the producer serves another loop from now on. Called in that other loop."""
        lines, self.by_topic = list(self.by_topic.values()), {}
        tasks, self._tasks = self._tasks, set()
        if not (lines or tasks):
            return
        try:
            self.loop.call_soon_threadsafe(_fail_lines, lines, tasks)
        except RuntimeError:  # the loop is closed
            _fail_lines_of_a_closed_loop(lines, tasks)

    # ------------------------------------------------------------ the task of one line

    async def _empty(self, topic: str, line: deque[QueuedSend]) -> None:
        """Hand over the sends of ``line``, in their order, until none is left."""
        try:
            done = 0
            while line:
                done += 1
                if done % _STEP == 0:
                    await asyncio.sleep(0)
                first = line[0]
                if not first.pending.done():
                    problem = await self._try(topic, first)
                    if problem is not None:
                        await self._fail_late(line, problem)
                        continue
                line.popleft()
        finally:
            if self.by_topic.get(topic) is line:
                del self.by_topic[topic]
            for one in line:  # this task was cancelled: nobody else would send them
                one.pending.cancel()

    async def _try(self, topic: str, first: QueuedSend) -> SendError | None:
        """Hand over ``first``, or fail it; else wait a while, and return the problem that it waits for."""
        left_s = first.deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise not_stored("TIMEOUT", "not sent in time")
            hand_over(first.producer, first.pending, topic, first.body, {**first.fields, "timeout_s": left_s})
        except NoRoom as error:
            await self._wait_for_room(left_s)
            return not_stored("CLIENT_BUFFER_FULL", f"{error.pending} messages of this producer are still pending")
        except TopicUnknownError:
            refusal = await self._look_up(topic, first, min(left_s, _LONGEST_WAIT_S))
            if refusal is None or refusal.code == "NODE_UNAVAILABLE":
                return refusal or not_stored("TIMEOUT", "not sent in time")
            if not first.pending.done():
                first.pending.set_exception(refusal)
        except Exception as error:
            first.pending.set_exception(error)
        return None

    async def _wait_for_room(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(longest_s, _LONGEST_WAIT_S)):
                await self._room.wait()
        self._room.clear()

    async def _look_up(self, topic: str, first: QueuedSend, longest_s: float) -> SendError | None:
        """Ask in a thread for what the producer does not know; returns the error of a look-up that failed."""
        loop = self.loop
        answered = asyncio.Event()

        def tell(_asked: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(answered.set)

        deadline = time.monotonic() + longest_s
        asked = self._asking.submit(first.producer._look_up, topic, first.body, first.fields, deadline)
        asked.add_done_callback(tell)
        await answered.wait()
        try:
            asked.result()
        except SendError as error:
            return error
        return None

    async def _fail_late(self, line: deque[QueuedSend], problem: SendError) -> None:
        """Fail the sends in ``line`` that timed out, in any place of it."""
        now = time.monotonic()
        for at, one in enumerate(list(line)):
            if at % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            if one.deadline <= now:
                one.fail(problem.code, problem.message)


def hand_over(
    producer: Producer, pending: PendingSend, topic: str, body: bytes | Message, fields: MessageOptions
) -> None:
    """Give a send to ``producer``. Raises NoRoom or TopicUnknownError where that would block, else as its ``send_async``."""
    pending.sent = producer._send_at_once(topic, body, fields)
    pending.sent.add_done_callback(pending.arrived)


def _fail_lines(lines: Iterable[deque[QueuedSend]], tasks: Iterable[asyncio.Task[None]]) -> None:
    """Fail the sends of ``lines``. Called in their own loop."""
    for line in lines:
        for one in line:
            one.fail("CLIENT_CLOSED", "the producer continued in another event loop before the message was sent")
    for task in tasks:
        task.cancel()


def _fail_lines_of_a_closed_loop(lines: Iterable[deque[QueuedSend]], tasks: Iterable[asyncio.Task[None]]) -> None:
    """As :func:`_fail_lines`. A closed loop takes no calls, so this wakes none of the tasks that wait there."""
    for line in lines:
        for one in line:
            with contextlib.suppress(RuntimeError):
                one.fail("CLIENT_CLOSED", "the event loop was closed before the message was sent")
        line.clear()
    for task in tasks:
        coroutine = task.get_coro()
        if coroutine is not None:
            with contextlib.suppress(RuntimeError):
                coroutine.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own word for: nobody need be told


_R = TypeVar("_R")


class AsyncProducer(AsyncClosing):
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
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """Arguments as of :class:`commitmq.Producer`."""
        settings.setdefault("linger_ms", 0.0)
        self._producer = Producer(node, **settings)
        self._producer._never_wait_for_room(self._has_room)
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
        return self._send_at(self._producer, topic, body, fields, on_delivery)

    submit = send_async

    def _send_at(
        self,
        producer: Producer,
        topic: str,
        body: bytes | Message,
        fields: MessageOptions,
        on_delivery: OnDelivery | None = None,
    ) -> PendingSend:
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
                hand_over(producer, pending, topic, body, fields)
                return pending
            except (NoRoom, TopicUnknownError):
                pass  # it waits for its turn
        deadline = time.monotonic() + self._producer._limit(fields.get("timeout_s"))
        lines.add(topic, QueuedSend(producer, pending, body, fields, deadline))
        return pending

    async def cancel(self, receipt: SendResult | str, *, timeout_s: float | None = None) -> None:
        """As :meth:`commitmq.Producer.cancel`."""
        await self._run(partial(self._producer.cancel, receipt, timeout_s=timeout_s))

    async def request(self, topic: str, body: bytes | Message, **fields: Unpack[RequestOptions]) -> Message:
        """Send one message and wait for its reply; see :meth:`commitmq.Producer.request`. Many tasks may wait at a time."""
        producer = self._producer._one(topic, body, fields)
        self._settle_in(asyncio.get_running_loop())
        limit = self._producer._limit(fields.get("timeout_s"))
        deadline = time.monotonic() + limit
        if not producer._replies.is_started:
            starting = self._asking.submit(producer._replies.start, deadline)
            await asyncio.shield(asyncio.wrap_future(starting))
        waiting = producer._replies.open(limit)
        try:
            message = request_message(body, fields, waiting.marks)
            left_s = max(deadline - time.monotonic(), 0.001)
            own: MessageOptions = {"queue": fields.get("queue"), "ack": fields.get("ack"), "timeout_s": left_s}
            await self._send_at(producer, topic, message, own)
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
        self._producer._check_replies()
        made = reply_message(message, body, properties)
        queue = made.queue
        if queue is None:
            deadline = time.monotonic() + self._producer._limit(timeout_s)
            asked = self._asking.submit(self._producer._lanes.routes.queues, check_topic(made.topic), deadline)
            queue = shard(made.client_id, await asyncio.wrap_future(asked))
        return await self.send_async(made.topic, made.message, queue=queue, timeout_s=timeout_s, ack=ack)

    @property
    def late_replies(self) -> int:
        """See :attr:`commitmq.Producer.late_replies`."""
        return self._producer.late_replies

    def transaction(self, topic: str, body: bytes | Message, **fields: Unpack[MessageOptions]) -> AsyncTransaction:
        """``async with producer.transaction(topic, body)``; see :meth:`commitmq.Producer.transaction`."""
        from commitmq.client.transactions.transaction import AsyncTransaction

        producer = self._producer._one(topic, body, fields)
        group, limit = producer._transaction_group(), self._producer._limit(fields.get("timeout_s"))

        def send_half() -> asyncio.Future[SendResult]:
            return self._send_at(producer, topic, body, producer._half_options(fields))

        return AsyncTransaction(group, limit, send_half, partial(content_for_listener, body, fields))

    async def send_in_transaction(
        self, topic: str, body: bytes | Message, argument: Any = None, **fields: Unpack[MessageOptions]
    ) -> TransactionResult:
        """See :meth:`commitmq.Producer.send_in_transaction`. ``execute`` may be a coroutine function."""
        from commitmq.client.transactions.half_message import TransactionResult, TransactionState

        made = self.transaction(topic, body, **fields)
        group = made._group
        group.check_executes()
        async with made as transaction:
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

    async def send_batch(
        self, topic: str, messages: Sequence[bytes | Message], **fields: Unpack[BatchOptions]
    ) -> BatchResult:
        """Send many messages; see :meth:`commitmq.Producer.send_batch`. A cancelled batch continues in its thread."""
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
            waiting = len(lines) + self._producer._pending()
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

    # ------------------------------------------------------------ steps

    def _settle_in(self, loop: asyncio.AbstractEventLoop) -> Lines:
        """Serve ``loop``. The sends that wait in the loop before it fail: that loop may never run again."""
        former = self._lines
        if former is not None and former.loop is loop:
            return former
        self._batches = set()
        now = self._lines = Lines(loop, self._asking)
        if former is not None:
            former.give_up()
        return now

    def _has_room(self) -> None:
        """Called in any thread, with the producer's lock."""
        if self._lines is not None:
            self._lines.note_room()

    async def _batch(self, taken: Future[Future[BatchResult]]) -> BatchResult:
        submitting: asyncio.Future[Future[BatchResult]] = asyncio.wrap_future(taken)
        return await asyncio.wrap_future(await asyncio.shield(submitting))

    async def _run(self, work: Callable[[], _R]) -> _R:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
