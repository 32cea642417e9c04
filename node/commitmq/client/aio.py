"""The admin client, the consumer and the reader for asyncio: each runs the blocking calls of its synchronous twin in a thread.

The cancellation of a waiting task neither loses nor repeats a message silently: the next ``poll`` returns the batch that
a cancelled ``poll`` fetched, and a cancelled request of the admin client continues in its thread.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.admin import Admin
from commitmq.client.aio_base import AsyncClosing, AsyncStarted
from commitmq.client.aio_producer import AsyncProducer
from commitmq.client.consumer import Consumer, GroupOptions, Reader, ReadOptions
from commitmq.client.handling.settings import (
    AsyncHandler,
    AsyncMiddleware,
    AsyncOnError,
    HandlerCounts,
    RunOptions,
    Settings,
    chained,
)
from commitmq.client.receiving.assignment import Gap, Queue, TakenBatch
from commitmq.client.receiving.base_consumer import BaseConsumer
from commitmq.errors import CommitMQError

if TYPE_CHECKING:
    from commitmq.client.handling.pools import TaskPool
    from commitmq.client.receiving.batch import MessageBatch


_P = ParamSpec("_P")
_R = TypeVar("_R")
_Consumer = TypeVar("_Consumer", bound=BaseConsumer)


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
    call.__wrapped__ = method  # type: ignore[attr-defined]  # its arguments, for help() and the reference
    return call


class AsyncAdmin(AsyncClosing):
    """:class:`commitmq.Admin` for asyncio: every method returns an awaitable."""

    def __init__(self, node: str | None = None, *, timeout_s: float = 10.0) -> None:
        self._admin = Admin(node, timeout_s=timeout_s)
        self.is_closed = False
        """True once :meth:`close` was called."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-admin")

    metadata = _in_thread(Admin.metadata)
    status = _in_thread(Admin.status)
    set_aside = _in_thread(Admin.set_aside)
    stop = _in_thread(Admin.stop)
    expire = _in_thread(Admin.expire)
    topic_create = _in_thread(Admin.topic_create)
    topic_update = _in_thread(Admin.topic_update)
    topics = _in_thread(Admin.topics)
    topic = _in_thread(Admin.topic)
    topic_delete = _in_thread(Admin.topic_delete)
    topics_idle = _in_thread(Admin.topics_idle)
    topic_delete_idle = _in_thread(Admin.topic_delete_idle)
    memory_use = _in_thread(Admin.memory_use)
    offsets = _in_thread(Admin.offsets)
    hidden_queues = _in_thread(Admin.hidden_queues)
    view = _in_thread(Admin.view)
    message = _in_thread(Admin.message)
    message_at = _in_thread(Admin.message_at)
    query = _in_thread(Admin.query)
    groups = _in_thread(Admin.groups)
    group = _in_thread(Admin.group)
    group_config = _in_thread(Admin.group_config)
    group_create = _in_thread(Admin.group_create)
    group_delete = _in_thread(Admin.group_delete)
    group_plan = _in_thread(Admin.group_plan)
    group_in_flight = _in_thread(Admin.group_in_flight)
    clients = _in_thread(Admin.clients)
    export_config = _in_thread(Admin.export_config)
    import_config = _in_thread(Admin.import_config)
    group_lag = _in_thread(Admin.group_lag)
    commit_offsets = _in_thread(Admin.commit_offsets)
    reset_offsets = _in_thread(Admin.reset_offsets)
    set_offsets = _in_thread(Admin.set_offsets)
    dlq_groups = _in_thread(Admin.dlq_groups)
    dlq_list = _in_thread(Admin.dlq_list)
    dlq_show = _in_thread(Admin.dlq_show)
    dlq_resend = _in_thread(Admin.dlq_resend)
    dlq_purge = _in_thread(Admin.dlq_purge)
    dispatchers = _in_thread(Admin.dispatchers)
    dispatcher_query = _in_thread(Admin.dispatcher_query)
    dispatcher_retry = _in_thread(Admin.dispatcher_retry)
    dispatcher_restart = _in_thread(Admin.dispatcher_restart)
    dispatcher_skip = _in_thread(Admin.dispatcher_skip)
    dispatcher_reset = _in_thread(Admin.dispatcher_reset)

    delayed = _in_thread(Admin.delayed)
    delayed_recall = _in_thread(Admin.delayed_recall)
    transactions = _in_thread(Admin.transactions)
    transaction_resolve = _in_thread(Admin.transaction_resolve)

    async def close(self) -> None:
        """Close every connection."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._admin.close)
        finally:
            self._thread.shutdown(wait=False)


__all__ = ["AsyncAdmin", "AsyncConsumer", "AsyncProducer", "AsyncReader"]

_LOOP_LOOK_S = 1.0

# Set in on_assign and on_revoke: the consumer's thread waits for them, so they must not wait for it.
_telling: ContextVar[bool] = ContextVar("commitmq_telling", default=False)


AsyncTold = Callable[[list[Queue]], Awaitable[object] | object]
"""``on_assign`` and ``on_revoke`` of an AsyncConsumer: functions or coroutine functions, which run in the loop."""


class AsyncBaseConsumer(AsyncStarted[_Consumer]):
    """The common part of :class:`AsyncConsumer` and :class:`AsyncReader`.

    Use it as an async context manager, or await :meth:`start`: this connects. An iteration yields the batches that are not
    empty. ``on_assign`` and ``on_revoke`` may be coroutine functions. They run in the loop that polls, and may await anything
    but :meth:`poll`.

    Several tasks may poll, and each batch goes to one of them. A poll declares all batches before it as done, so tasks that
    work at the same time need ``auto_commit=False`` and commits of their own. A cancelled poll returns nothing: its batch
    comes with the next poll, and is not committed before.
    """

    def __init__(
        self, make: Callable[..., _Consumer], on_assign: AsyncTold | None, on_revoke: AsyncTold | None
    ) -> None:
        """``make`` makes the synchronous consumer; it is called with the callbacks."""
        told = {"on_assign": on_assign, "on_revoke": on_revoke}
        callbacks = {name: partial(self._tell, one) for name, one in told.items() if one is not None}
        super().__init__(partial(make, **callbacks), "commitmq-aio-consumer")
        self._poll: Future[TakenBatch] | None = None  # fetches a batch that no task has yet
        self._polling = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: TaskPool | None = None  # the handlers of run()
        self._running: Future[None] | None = None  # run() itself, in the thread
        self._requests: SimpleQueue[Callable[[], object] | None] | None = (
            None  # of a callback, to the thread that waits for it
        )

    async def start(self) -> Self:
        """Connect and join the group. After a failure a program must make a new consumer."""
        if self._consumer is None:
            self._loop = asyncio.get_running_loop()
        return await super().start()

    async def poll(self, timeout_s: float = 1.0, max_messages: int = 10_000) -> MessageBatch:
        """The next batch. The batch of a cancelled poll comes first."""
        consumer = self._started
        self._check_no_run()
        async with self._polling:
            if self._poll is None:
                self._poll = self._thread.submit(consumer._next, timeout_s, max_messages)
            fetching = self._poll
            try:
                # Shielded: a cancelled task stops waiting, but the batch that the thread fetches stays for the next poll.
                taken = await asyncio.shield(asyncio.wrap_future(fetching))
            except asyncio.CancelledError:
                if fetching.cancelled():
                    self._poll = None
                raise
            except BaseException:
                self._poll = None  # the error comes once, and the next poll fetches again
                raise
            # There is no await from here to the return, so the task gets the batch. Only now the batch counts as returned.
            self._poll = None
            consumer._assignment.returned = taken
        return taken.batch

    async def seek(self, topic: str, queue: int, offset: int) -> None:
        """Read a queue from ``offset`` on; see :meth:`commitmq.Consumer.seek`."""
        self._check_no_run()
        await self._run(partial(self._seek, topic, queue, offset))

    def _seek(self, topic: str, queue: int, offset: int) -> None:
        fetched = self._poll
        self._started.seek(topic, queue, offset)
        if fetched is not None and fetched.done():
            # The batch of a cancelled poll may have messages of this queue. The next poll fetches again, from the new
            # position.
            self._poll = None

    def pause(self, queues: Iterable[Queue] | None = None) -> None:
        """Poll no messages of these queues until :meth:`resume`; see :meth:`commitmq.Consumer.pause`."""
        self._started.pause(queues)

    def resume(self, queues: Iterable[Queue] | None = None) -> None:
        """End a :meth:`pause`."""
        self._started.resume(queues)

    @property
    def paused(self) -> list[Queue]:
        """The assigned queues that are paused."""
        return self._started.paused

    @property
    def assignment(self) -> list[Queue]:
        """The queues that this consumer reads now."""
        return self._started.assignment

    @property
    def positions(self) -> dict[Queue, int]:
        """For each assigned queue, the offset behind the last polled message."""
        return self._started.positions

    @property
    def gaps(self) -> list[Gap]:
        """The places where the consumer could not continue and jumped."""
        return self._started.gaps

    async def close(self, *, commit: bool | None = None, timeout_s: float | None = None) -> None:
        """Commit, leave the group and close every connection; see :meth:`commitmq.Consumer.close`.

        A batch that no task has got is not committed. A poll under way returns an empty batch. Closing twice is allowed.
        """
        if self._is_closed:
            return
        if commit is None:
            commit = sys.exception() is None  # (in the thread of the consumer there is no such exception)
        try:
            if self._consumer is not None:
                self._consumer._stop_waiting()
                if self._running is not None:
                    await self._wait_for_run()
                else:
                    await self._run(partial(self._consumer.close, commit=commit, timeout_s=timeout_s))
        finally:
            self._is_closed = True
            self._poll = None
            self._thread.shutdown(wait=False)

    async def _wait_for_run(self) -> None:
        """Until run() has closed the consumer; a handler and a callback do not wait for themselves."""
        assert self._running is not None
        if not _telling.get() and not (self._pool is not None and self._pool.is_inside()):
            await asyncio.wait([asyncio.wrap_future(self._running)])

    def _check_no_run(self) -> None:
        """A callback of the run may continue: on_assign may seek."""
        if self._running is not None and not _telling.get():
            self._started._check_no_run()

    async def __aexit__(self, *error: object) -> None:
        await self.close(commit=error[0] is None)

    async def __aiter__(self) -> AsyncIterator[MessageBatch]:
        while not self._started.is_closed:
            batch = await self.poll()
            if batch:
                yield batch

    async def _run(self, work: Callable[[], _R]) -> _R:
        requests = self._requests
        if requests is None:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
        # A callback calls this, and the thread waits for that callback. In the meantime it does the callback's
        # requests.
        done: Future[_R] = Future()

        def answer() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        requests.put(answer)
        return await asyncio.shield(asyncio.wrap_future(done))

    def _tell(self, told: AsyncTold, queues: list[Queue]) -> None:
        """Run the callback ``told`` in the loop, and do its requests until it is done. Called in the consumer's thread."""
        loop = self._loop
        assert loop is not None
        requests: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

        async def call() -> None:
            self._requests = requests
            _telling.set(True)
            try:
                result = told(queues)
                if inspect.isawaitable(result):
                    await result
            finally:
                self._requests = None  # in the loop, like all requests: so none comes behind the end
                requests.put(None)

        running = asyncio.run_coroutine_threadsafe(call(), loop)
        while True:
            try:
                request = requests.get(timeout=_LOOP_LOOK_S)
            except Empty:
                if loop.is_closed():
                    raise CommitMQError(
                        "the event loop ended before it ran the callback on_assign or on_revoke"
                    ) from None
                continue
            if request is None:
                break
            request()
        running.result()


class AsyncConsumer(AsyncBaseConsumer[Consumer]):
    """:class:`commitmq.Consumer` for asyncio; same arguments, same errors. See :class:`AsyncBaseConsumer`."""

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        group: str,
        node: str | None = None,
        on_assign: AsyncTold | None = None,
        on_revoke: AsyncTold | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        """The settings are checked when the consumer connects."""
        super().__init__(partial(Consumer, topics, group=group, node=node, **options), on_assign, on_revoke)

    async def commit(self, offsets: Mapping[Queue, int] | None = None) -> dict[Queue, int]:
        """Commit; see :meth:`commitmq.Consumer.commit`. A commit waits for a poll that is under way."""
        consumer = self._started
        if self._running is not None:
            consumer._check_no_run()
        return await self._run(partial(consumer.commit, offsets))

    async def run(
        self,
        handler: AsyncHandler,
        *,
        middleware: Sequence[AsyncMiddleware] = (),
        on_error: AsyncOnError | None = None,
        trace: bool = False,
        **options: Unpack[RunOptions],
    ) -> None:
        """Await ``handler(message)`` for every message, in ``workers`` tasks at a time; see :meth:`commitmq.Consumer.run`.

        ``handler`` and the middleware are coroutine functions, ``on_error`` is one or a function. A handler that still runs
        at the end of ``stop_timeout_s`` is cancelled. When the task that awaits this is cancelled, all handlers are, at
        once; what they had comes again.
        """
        consumer = self._started
        self._check_no_run()
        from commitmq.client.handling.pools import TaskPool
        from commitmq.client.producer import Producer
        from commitmq.client.tracing import Tracer, traced_async

        tracer = Tracer(partial(Producer, consumer._directory.address)) if trace else None
        group = str(consumer._settings.group)
        chain = chained(handler, middleware if tracer is None else [traced_async(tracer, group), *middleware])
        checks.callback("on_error", on_error)
        async with self._polling:
            self._poll = None  # what a cancelled poll fetched is fetched again
            engine = consumer._engine(Settings(**options))
            limit = engine.settings.longest_delay_s
            self._pool = TaskPool(engine, chain, on_error, node=consumer._directory.address, longest_delay_s=limit)
            self._running = self._thread.submit(consumer._serve, engine, self._pool)
            try:
                await asyncio.shield(asyncio.wrap_future(self._running))
            except asyncio.CancelledError:
                consumer._stop_waiting()
                raise
            finally:
                await self._pool.cancel()
                await asyncio.wait([asyncio.wrap_future(self._running)])
                if tracer is not None:
                    await asyncio.to_thread(tracer.close)
                if consumer.is_closed:
                    self._is_closed = True
                    self._thread.shutdown(wait=False)
                else:
                    self._running = None  # it did not begin

    @property
    def handler_counts(self) -> HandlerCounts:
        """What became of the messages of :meth:`run`."""
        return self._started.handler_counts


class AsyncReader(AsyncBaseConsumer[Reader]):
    """:class:`commitmq.Reader` for asyncio; same arguments, same errors. See :class:`AsyncBaseConsumer`."""

    def __init__(
        self,
        topics: str | Iterable[str] = (),
        *,
        queues: Iterable[Queue] | None = None,
        node: str | None = None,
        on_assign: AsyncTold | None = None,
        on_revoke: AsyncTold | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        """The settings are checked when the reader connects."""
        super().__init__(partial(Reader, topics, queues=queues, node=node, **options), on_assign, on_revoke)
