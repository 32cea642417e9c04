"""asyncio twins of the clients. They add no behaviour: what blocks runs in a thread of the twin's own.

Cancelling a task that waits here never loses or repeats anything silently: a cancelled ``send`` is withdrawn if it was
not handed to the connection (else it goes on, and only its result is dropped); what a cancelled ``poll`` fetched is
returned by the next one; a cancelled request of the admin goes on in its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from commitmq.client.admin import Admin
from commitmq.client.assignment import Gap, Queue
from commitmq.client.consumer import Consumer
from commitmq.client.message import Message
from commitmq.client.producer import Producer
from commitmq.client.results import BatchResult, SendResult

if TYPE_CHECKING:
    from commitmq.client.batch import MessageBatch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Pending(asyncio.Future[SendResult]):
    """What a task waits for; cancelling it withdraws the message where that is still possible."""

    sent: Future[SendResult]
    arrivals: _Arrivals

    def cancel(self, msg: Any | None = None) -> bool:
        if not self.done():
            self.sent.cancel()
        return super().cancel(msg)

    def arrived(self, _sent: Future[SendResult]) -> None:
        """In the producer's thread, or where the message was cancelled."""
        self.arrivals.add(self)


class _Arrivals:
    """Results on their way from the producer's thread to one loop: one call of the loop for all of a run.

    ``asyncio.wrap_future`` makes one for each message, and a system call that wakes the loop with each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[_Pending] = deque()
        self._is_called = False

    def add(self, pending: _Pending) -> None:
        """In any thread."""
        self._done.append(pending)
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._land)

    def _land(self) -> None:
        self._is_called = False  # before the look: what comes behind it calls again
        while self._done:
            pending = self._done.popleft()
            if pending.done():
                continue
            sent = pending.sent
            if sent.cancelled():
                pending.cancel()
            elif error := sent.exception(0):
                pending.set_exception(error)
            else:
                pending.set_result(sent.result(0))


class AsyncProducer:
    """:class:`commitmq.Producer` for asyncio; same arguments, same errors.

    ``send`` waits for its ack; many tasks that send at the same time share runs. ``submit`` returns a future at once.
    ``linger_ms`` is 0 unless it is given: who awaits a future cannot be told from who does not.
    """

    def __init__(self, node: str | None = None, **settings: Any) -> None:
        self._producer = Producer(node, **{"linger_ms": 0.0, **settings})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-producer")
        self._arrivals: _Arrivals | None = None

    async def send(self, topic: str, body: bytes | Message, **fields: Any) -> SendResult:
        """Send one message and wait for its ack; ``fields`` as in :meth:`commitmq.Producer.send`."""
        return await self.submit(topic, body, **fields)

    def submit(self, topic: str, body: bytes | Message, **fields: Any) -> asyncio.Future[SendResult]:
        """Send one message; the future gets its result. The loop must be running.

        Blocks the loop while the producer's ``max_pending`` messages are pending, and for a look-up of the topic at the
        first send with a ``sharding_key``.
        """
        loop = asyncio.get_running_loop()
        arrivals = self._arrivals
        if arrivals is None or arrivals.loop is not loop:
            arrivals = self._arrivals = _Arrivals(loop)
        sent = self._producer.send_async(topic, body, **fields)
        pending = _Pending(loop=loop)
        pending.sent, pending.arrivals = sent, arrivals
        sent.add_done_callback(pending.arrived)
        return pending

    async def send_batch(self, topic: str, messages: Sequence[bytes | Message], **fields: Any) -> BatchResult:
        """Send many messages; see :meth:`commitmq.Producer.send_batch`. A cancelled one goes on in its thread."""
        return await self._run(partial(self._producer.send_batch, topic, messages, **fields))

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every submitted send is done."""
        await self._run(partial(self._producer.flush, timeout_s))

    async def close(self, timeout_s: float | None = None) -> None:
        """Send what is pending, close everything."""
        try:
            await self._run(partial(self._producer.close, timeout_s))
        finally:
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, work: Callable[[], _R]) -> _R:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))


class AsyncConsumer:
    """:class:`commitmq.Consumer` for asyncio; same arguments, same errors.

    Use it as an async context manager (or await :meth:`start`): connecting takes place there. Iterating yields batches
    that are not empty.
    """

    def __init__(self, group: str | None, topics: str | Iterable[str] = (), **settings: Any) -> None:
        self._make = partial(Consumer, group, topics, **settings)
        self._consumer: Consumer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-consumer")
        self._poll: Future[MessageBatch] | None = None

    async def start(self) -> Self:
        """Connect and join the group. After a failure make a new consumer."""
        if self._consumer is None:
            making = self._thread.submit(self._make)
            try:
                self._consumer = await asyncio.shield(asyncio.wrap_future(making))
            except asyncio.CancelledError:
                making.add_done_callback(_close_unwanted)
                raise
            finally:
                if self._consumer is None:
                    self._thread.shutdown(wait=False)
        return self

    async def poll(self, timeout_s: float = 1.0, max_messages: int = 10_000) -> MessageBatch:
        """The next batch. If an earlier poll was cancelled while it waited, its batch comes first."""
        if self._poll is None:
            self._poll = self._thread.submit(self._started.poll, timeout_s, max_messages)
        # Shielded: a cancelled task stops waiting, but what the thread fetched stays here for the next poll.
        batch = await asyncio.shield(asyncio.wrap_future(self._poll))
        self._poll = None
        return batch

    async def commit(self, offsets: Mapping[Queue, int] | None = None) -> dict[Queue, int]:
        """Commit; see :meth:`commitmq.Consumer.commit`. Waits for a poll that is still under way."""
        return await self._run(partial(self._started.commit, offsets))

    async def seek(self, topic: str, queue: int, offset: int) -> None:
        """Read a queue from ``offset`` on."""
        await self._run(partial(self._started.seek, topic, queue, offset))

    @property
    def assignment(self) -> list[Queue]:
        """The queues this consumer reads now."""
        return self._started.assignment

    @property
    def positions(self) -> dict[Queue, int]:
        """For each assigned queue, the offset behind what was polled."""
        return self._started.positions

    @property
    def gaps(self) -> list[Gap]:
        """Where reading could not go on and jumped."""
        return self._started.gaps

    async def close(self, *, commit: bool = True) -> None:
        """Commit (automatic commits), leave the group, close everything. A batch nobody took is not committed."""
        unclaimed, self._poll = self._poll, None
        try:
            if self._consumer is not None:
                await self._run(partial(self._consumer.close, commit=commit and unclaimed is None))
        finally:
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(commit=error is None)

    async def __aiter__(self) -> AsyncIterator[MessageBatch]:
        while True:
            batch = await self.poll()
            if batch:
                yield batch

    @property
    def _started(self) -> Consumer:
        if self._consumer is None:
            raise RuntimeError("the consumer is not started: use `async with`, or await start()")
        return self._consumer

    async def _run(self, work: Callable[[], _R]) -> _R:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))


def _close_unwanted(making: Future[Consumer]) -> None:
    """A consumer that came to be after nobody wanted it any more."""
    if not making.cancelled() and making.exception() is None:
        making.result().close(commit=False)


def _in_thread(
    method: Callable[Concatenate[Admin, _P], _R],
) -> Callable[Concatenate[AsyncAdmin, _P], asyncio.Future[_R]]:
    """The asynchronous twin of one of Admin's methods."""

    def call(self: AsyncAdmin, /, *arguments: _P.args, **named: _P.kwargs) -> asyncio.Future[_R]:
        work = partial(method, self._admin, *arguments, **named)
        return asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    call.__name__ = method.__name__
    call.__qualname__ = f"AsyncAdmin.{method.__name__}"
    call.__doc__ = method.__doc__
    return call


class AsyncAdmin:
    """:class:`commitmq.Admin` for asyncio: every method returns an awaitable."""

    def __init__(self, node: str | None = None, *, timeout_s: float = 10.0) -> None:
        self._admin = Admin(node, timeout_s=timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-admin")

    metadata = _in_thread(Admin.metadata)
    status = _in_thread(Admin.status)
    stop = _in_thread(Admin.stop)
    topic_create = _in_thread(Admin.topic_create)
    topics = _in_thread(Admin.topics)
    topic = _in_thread(Admin.topic)
    topic_delete = _in_thread(Admin.topic_delete)
    memory_use = _in_thread(Admin.memory_use)
    offsets = _in_thread(Admin.offsets)
    view = _in_thread(Admin.view)
    message = _in_thread(Admin.message)
    query = _in_thread(Admin.query)
    groups = _in_thread(Admin.groups)
    group = _in_thread(Admin.group)
    group_lag = _in_thread(Admin.group_lag)
    reset_offsets = _in_thread(Admin.reset_offsets)
    dispatchers = _in_thread(Admin.dispatchers)
    dispatcher_query = _in_thread(Admin.dispatcher_query)
    dispatcher_retry = _in_thread(Admin.dispatcher_retry)
    dispatcher_skip = _in_thread(Admin.dispatcher_skip)
    dispatcher_reset = _in_thread(Admin.dispatcher_reset)

    async def close(self) -> None:
        """Close every connection."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._admin.close)
        finally:
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
