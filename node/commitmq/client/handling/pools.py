"""Where handlers run, threads or tasks of a loop, and the producer by which they reply."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from commitmq.client.handling.consume_result import HandlerResult, Work, of_error, of_value
from commitmq.client.handling.settings import AsyncHandler, AsyncOnError, Handler, OnError
from commitmq.client.message import Message
from commitmq.client.requesting.replier import set_current
from commitmq.errors import CommitMQError
from commitmq.log import get_log

if TYPE_CHECKING:
    from commitmq.client.aio_producer import AsyncProducer
    from commitmq.client.producer import Producer
    from commitmq.client.results import SendResult


class HandlerProducer:
    """Made at the first reply, one for all handlers of a consumer. ``is_async``: for handlers that are coroutine functions;
    their producer is an AsyncProducer.
    """

    def __init__(self, node: str | None, *, is_async: bool = False) -> None:
        self._node = node
        self._is_async = is_async
        self._lock = threading.Lock()
        self._made: Producer | None = None
        self._made_async: AsyncProducer | None = None
        self._is_closed = False

    def reply(self, message: Message, body: bytes | Message, properties: Mapping[str, str] | None) -> SendResult:
        """See :meth:`commitmq.Message.reply`."""
        return self._get().reply(message, body, properties=properties)

    async def reply_async(
        self, message: Message, body: bytes | Message, properties: Mapping[str, str] | None
    ) -> SendResult:
        """See :meth:`commitmq.Message.reply_async`."""
        return await self._get_async().reply(message, body, properties=properties)

    def _get(self) -> Producer:
        """Raises CommitMQError in a coroutine, which it would block, and after the end of the run."""
        if self._is_async:
            raise CommitMQError("reply() would block the event loop: await message.reply_async(…)")
        with self._lock:
            self._check_open()
            if self._made is None:
                from commitmq.client.producer import Producer

                self._made = Producer(self._node)
            return self._made

    def _get_async(self) -> AsyncProducer:
        """Called in the loop."""
        if not self._is_async:
            raise CommitMQError("reply_async() is for handlers that are coroutine functions: call message.reply(…)")
        self._check_open()
        if self._made_async is None:
            from commitmq.client.aio_producer import AsyncProducer

            self._made_async = AsyncProducer(self._node)
        return self._made_async

    def _check_open(self) -> None:
        if self._is_closed:
            raise CommitMQError("run() has ended, so its handlers cannot reply any more")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            made, self._made = self._made, None
        if made is not None:
            made.close()

    async def close_async(self) -> None:
        self._is_closed = True
        made, self._made_async = self._made_async, None
        if made is not None:
            await made.close()


_log = get_log("consumer")


class ThreadPool:
    """``settings.workers`` threads. They are daemons: a handler that never ends does not keep the program from ending."""

    def __init__(
        self,
        engine: Work,
        handler: Handler,
        on_error: OnError | None,
        *,
        name: str,
        node: str | None = None,
        longest_delay_s: float | None = None,
    ) -> None:
        """``handler`` with its middleware. ``node``: where handlers reply. ``longest_delay_s``: of a RetryLater."""
        self._replies = HandlerProducer(node)
        self._engine = engine
        self._handler = handler
        self._on_error = on_error
        self._longest_s = longest_delay_s
        self._work = threading.Condition(engine.lock)
        self._threads = [
            threading.Thread(target=self._run, name=f"commitmq-handler-{name}-{number}", daemon=True)
            for number in range(engine.settings.workers)
        ]
        self._idents: set[int] = set()
        engine.wake = self._work.notify

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def is_inside(self) -> bool:
        """Whether the caller is a handler."""
        return threading.get_ident() in self._idents

    def report(self, message: Message | None, error: BaseException) -> None:
        """Tell the program, or the log, of an error."""
        if self._on_error is None:
            log_error(message, error)
            return
        try:
            self._on_error(message, error)
        except Exception:
            _log.exception("on_error failed")

    def end(self, deadline: float) -> None:
        """After ``engine.stop()``: wait for the threads until ``deadline`` (``time.monotonic()``)."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0))
        self._replies.close()

    def _run(self) -> None:
        ident = threading.get_ident()
        self._idents.add(ident)
        set_current(self._replies)
        try:
            while (entry := self._next()) is not None:
                self._engine.judge(entry, self._handle(entry))
        finally:
            self._idents.discard(ident)

    def _next(self) -> Any:
        """Wait for something to do; None at the end."""
        with self._work:
            while not self._engine.is_stopping:
                entry = self._engine.take()
                if entry is not None:
                    return entry
                self._work.wait()
            return None

    def _handle(self, entry: Any) -> HandlerResult:
        message = entry.message
        try:
            verdict = of_value(self._handler(message))
        except (
            BaseException
        ) as error:  # SystemExit too: a thread of ours must not end, and the message must not be lost
            verdict = of_error(error, self._longest_s)
        if verdict.error is not None:
            self.report(message, verdict.error)
        return verdict


def log_error(message: Message | None, error: BaseException) -> None:
    """What is told of an error when the program has no ``on_error``."""
    if message is None:
        _log.error("a queue cannot be read", error=str(error))
        return
    _log.warning(
        "a handler failed", topic=message.topic, queue=message.queue_id, offset=message.queue_offset,
        reconsume_times=message.reconsume_times, error=repr(error),
    )  # fmt: skip


# Set in the tasks of a pool, and so in those that a handler makes.
_inside: ContextVar[TaskPool | None] = ContextVar("commitmq_handler", default=None)


class TaskPool:
    """At most ``settings.workers`` tasks at a time. Everything but :meth:`wake` and :meth:`report` is called in the loop."""

    def __init__(
        self,
        engine: Work,
        handler: AsyncHandler,
        on_error: AsyncOnError | None,
        *,
        node: str | None = None,
        longest_delay_s: float | None = None,
    ) -> None:
        """``handler`` with its middleware. Made in the loop. ``node``: where handlers reply. ``longest_delay_s``: of a
        RetryLater.
        """
        self._replies = HandlerProducer(node, is_async=True)
        self._engine = engine
        self._handler = handler
        self._on_error = on_error
        self._longest_s = longest_delay_s
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # the program's variables: handlers are started by calls from other threads
        self._context.run(set_current, self._replies)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_woken = False
        self._is_cancelled = False
        engine.wake = self.wake

    def start(self) -> None:
        """Tasks are made as they are needed."""

    def end(self, deadline: float) -> None:
        """The handlers that run too long are cancelled by :meth:`cancel`, in the loop."""

    def is_inside(self) -> bool:
        """Whether the caller is a handler, or a task that one made."""
        return _inside.get() is self

    def wake(self, count: int) -> None:
        """Called with the engine's lock held, by any thread."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: whoever ran it did not wait
                self._loop.call_soon_threadsafe(self._start_some)

    def report(self, message: Message | None, error: BaseException) -> None:
        """For the fetching loop, which is in another thread: tell the program, or the log, of an error."""
        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(self._report(message, error), self._loop)

    async def cancel(self) -> None:
        """Cancel the handlers that run. Their messages stay unfinished."""
        self._is_cancelled = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._replies.close_async()

    def _start_some(self) -> None:
        self._is_woken = False
        while not self._is_cancelled and len(self._tasks) < self._engine.settings.workers:
            with self._engine.lock:
                entry = self._engine.take()
            if entry is None:
                return
            task = self._loop.create_task(self._work(entry), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_some()

    async def _work(self, entry: Any) -> None:
        _inside.set(self)
        message = entry.message
        try:
            verdict = of_value(await self._handler(message))
        except asyncio.CancelledError as error:
            if self._is_cancelled:
                self._engine.abandon(entry)
                raise
            # Not by us: what the handler waited for was cancelled, or somebody cancelled the handler.
            verdict = of_error(error, self._longest_s)
        except Exception as error:
            verdict = of_error(error, self._longest_s)
        except BaseException:
            self._engine.abandon(entry)
            raise  # Ctrl-C: it ends the loop
        if verdict.error is not None:
            await self._report(message, verdict.error)
        self._engine.judge(entry, verdict)

    async def _report(self, message: Message | None, error: BaseException) -> None:
        if self._on_error is None:
            log_error(message, error)
            return
        try:
            told = self._on_error(message, error)
            if inspect.isawaitable(told):
                await told
        except Exception:
            _log.exception("on_error failed")
