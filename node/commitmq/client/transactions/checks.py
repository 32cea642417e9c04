"""Answers the node's questions: from what this producer knows, else by the program's listener, in a few threads."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from commitmq.client.transactions.half_message import HalfMessage, TransactionState, state_of
from commitmq.log import get_log

_log = get_log("producer")
_THREADS: Final = 2
_MOST_WAITING: Final = 2_000  # as RocketMQ's producer; a question that finds no room comes again
_MOST_DECISIONS: Final = 10_000

Check = Callable[[HalfMessage], object]


@dataclass(frozen=True, slots=True)
class Question:
    """A half message, and the place that an answer must name."""

    message: HalfMessage
    queue_offset: int
    physical_offset: int


Reply = Callable[[Question, TransactionState], None]


class Checks:
    """``listener`` may be None: then only transactions that this producer ended itself are answered."""

    def __init__(self, listener: Check | None, reply: Reply) -> None:
        self._listener, self._reply = listener, reply
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._decisions: OrderedDict[str, TransactionState] = OrderedDict()
        self._waiting: queue.Queue[Question | None] = queue.Queue(_MOST_WAITING)
        self._threads = 0

    def begin(self, unique_id: str) -> None:
        """The program is at work on this transaction: a question has to wait."""
        with self._lock:
            self._running.add(unique_id)

    def decide(self, unique_id: str, state: TransactionState) -> None:
        """The program has decided. The node may not know it yet. UNKNOWN: it has not, and is done with it."""
        with self._lock:
            self._running.discard(unique_id)
            if state is not TransactionState.UNKNOWN:
                self._decisions[unique_id] = state
                if len(self._decisions) > _MOST_DECISIONS:
                    self._decisions.popitem(last=False)

    def settle(self, unique_id: str) -> None:
        """The node knows."""
        with self._lock:
            self._decisions.pop(unique_id, None)

    def ask(self, question: Question) -> None:
        """Answer now, later in a thread, or not at all. Does not wait."""
        unique_id = question.message.unique_id
        with self._lock:
            if unique_id in self._running:
                return
            state = self._decisions.get(unique_id)
        if state is not None:
            self._reply(question, state)
            return
        if self._listener is None:
            return
        try:
            self._waiting.put_nowait(question)
        except queue.Full:
            return
        if self._threads < _THREADS:
            self._threads += 1
            name = f"commitmq-transaction-check-{self._threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        """Ask the listener no more. A call under way goes on."""
        self._listener = None
        for _ in range(self._threads):
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                return  # the threads see that there is no listener

    def _work(self) -> None:
        while (question := self._waiting.get()) is not None and (listener := self._listener) is not None:
            try:
                found = listener(question.message)
                if inspect.isawaitable(found):
                    found = asyncio.run(_awaited(found))
                state = state_of("check", found)
            except Exception:
                _log.exception("the check of a transaction failed", unique_id=question.message.unique_id)
                continue
            if state is not TransactionState.UNKNOWN:
                self._reply(question, state)


async def _awaited(found: Awaitable[object]) -> object:
    return await found
