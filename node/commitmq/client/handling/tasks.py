"""The tasks of an event loop that call a coroutine handler."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from contextvars import ContextVar, copy_context
from typing import Any

from commitmq.client.handling.chain import AsyncHandler, AsyncOnError
from commitmq.client.handling.consume_result import Work, of_error, of_value
from commitmq.client.handling.threads import log_error
from commitmq.client.message import Message
from commitmq.client.requesting.handler_producer import HandlerProducer
from commitmq.client.requesting.replier import set_current
from commitmq.log import get_log

_log = get_log("consumer")

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
