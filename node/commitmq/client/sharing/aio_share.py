"""The asyncio twin of :class:`commitmq.ShareConsumer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from commitmq.client import checks
from commitmq.client.aio_base import AsyncStarted
from commitmq.client.handling.settings import AsyncHandler, AsyncMiddleware, AsyncOnError, HandlerCounts, chained
from commitmq.client.sharing.share_consumer import ShareConsumer
from commitmq.client.sharing.share_engine import RunSettings, ShareOptions, ShareRunOptions

if TYPE_CHECKING:
    from datetime import timedelta

    from commitmq.client.handling.pools import TaskPool
    from commitmq.client.message import Message

_R = TypeVar("_R")


class AsyncShareConsumer(AsyncStarted[ShareConsumer]):
    """:class:`commitmq.ShareConsumer` for asyncio; same arguments, same errors.

    Use it as an async context manager, or await :meth:`start`: this connects. Acknowledge with ``await
    consumer.ack(message)``; ``message.ack()`` would block the loop, and raises. A cancelled ``receive`` loses nothing: what it
    would have got comes with the next one.
    """

    def __init__(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        node: str | None = None,
        **options: Unpack[ShareOptions],
    ) -> None:
        """The settings are checked when the consumer connects."""
        super().__init__(partial(ShareConsumer, topics, group=group, node=node, **options), "commitmq-aio-share")
        # Another thread acknowledges while that one receives.
        self._settler = ThreadPoolExecutor(1, thread_name_prefix="commitmq-aio-share-ack")
        self._fetch: Future[list[Message]] | None = None
        self._receiving = asyncio.Lock()
        self._pool: TaskPool | None = None
        self._running: Future[None] | None = None

    async def start(self) -> Self:
        """Connect."""
        await super().start()
        self._started._owner = None  # of the receipts: ``message.ack()`` would block the loop
        return self

    async def receive(self, max_messages: int = 32, wait_s: float = 1.0) -> list[Message]:
        """See :meth:`commitmq.ShareConsumer.receive`. The messages of a cancelled receive come first."""
        consumer = self._started
        async with self._receiving:
            if self._fetch is None:
                self._fetch = self._thread.submit(consumer.receive, max_messages, wait_s)
            try:
                messages = await asyncio.shield(asyncio.wrap_future(self._fetch))
            except asyncio.CancelledError:
                raise
            except BaseException:
                self._fetch = None
                raise
            self._fetch = None
        return messages

    async def ack(self, messages: Message | Sequence[Message]) -> list[Message]:
        """See :meth:`commitmq.ShareConsumer.ack`."""
        return await self._settle(partial(self._started.ack, messages))

    async def nack(
        self,
        messages: Message | Sequence[Message],
        delay: float | timedelta | None = None,
        *,
        dead: bool = False,
        untried: bool = False,
    ) -> list[Message]:
        """See :meth:`commitmq.ShareConsumer.nack`."""
        return await self._settle(partial(self._started.nack, messages, delay, dead=dead, untried=untried))

    async def extend(self, messages: Message | Sequence[Message], invisible_s: float | None = None) -> list[Message]:
        """See :meth:`commitmq.ShareConsumer.extend`."""
        return await self._settle(partial(self._started.extend, messages, invisible_s))

    async def _settle(self, work: Callable[[], _R]) -> _R:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._settler, work))

    async def run(
        self,
        handler: AsyncHandler,
        *,
        middleware: Sequence[AsyncMiddleware] = (),
        on_error: AsyncOnError | None = None,
        **options: Unpack[ShareRunOptions],
    ) -> None:
        """Await ``handler(message)`` for every message, in ``workers`` tasks; see :meth:`commitmq.ShareConsumer.run`.

        ``handler`` and the middleware are coroutine functions, ``on_error`` is one or a function. When the task that awaits
        this is cancelled, all handlers are, at once; what they had comes back to the group.
        """
        from commitmq.client.handling.pools import TaskPool

        consumer = self._started
        chain = chained(handler, middleware)
        checks.callback("on_error", on_error)
        engine = consumer._engine_of(RunSettings(**options))
        self._pool = TaskPool(engine, chain, on_error, node=consumer._node)
        self._running = self._thread.submit(consumer._serve, engine, self._pool)
        try:
            await asyncio.shield(asyncio.wrap_future(self._running))
        except asyncio.CancelledError:
            engine.stop()
            await self._pool.cancel()
            raise
        finally:
            await self._pool.cancel()
            await asyncio.wait([asyncio.wrap_future(self._running)])
            self._end()

    @property
    def handler_counts(self) -> HandlerCounts:
        """What became of the messages of :meth:`run`."""
        return self._started.handler_counts

    async def close(self) -> None:
        """See :meth:`commitmq.ShareConsumer.close`. Closing twice is allowed."""
        if self._is_closed:
            return
        consumer = self._consumer
        if consumer is not None:
            if self._running is not None and consumer._engine is not None:
                consumer._engine.stop()
                if self._pool is None or not self._pool.is_inside():
                    await asyncio.wait([asyncio.wrap_future(self._running)])
                return
            consumer._closed = True  # a receive that waits sees it
            await self._settle(consumer.close)
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._thread.shutdown(wait=False)
        self._settler.shutdown(wait=False)
