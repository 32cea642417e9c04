"""The threads that call a handler."""

from __future__ import annotations

import threading
import time
from typing import Any

from commitmq.client.handling.chain import Handler, OnError
from commitmq.client.handling.consume_result import Verdict, Work, of_error, of_value
from commitmq.client.message import Message
from commitmq.client.requesting.handler_producer import HandlerProducer
from commitmq.client.requesting.replier import set_current
from commitmq.log import get_log

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

    def _handle(self, entry: Any) -> Verdict:
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
