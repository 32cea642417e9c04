"""The loop of ``run``: it fetches, hands what it got to the engine, commits, gives queues back, and stops.

It runs in one thread, which holds the consumer's lock all the time, as a poll does for a moment. Everything that
touches the consumer's sockets is done there. The consumer asks its run what may be committed and returned; see
:mod:`commitmq.client.receiving.base_consumer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from commitmq.client.handling.engine import Engine, ProcessQueue
from commitmq.client.handling.settings import HandlerCounts
from commitmq.client.message import Message
from commitmq.client.receiving.assignment import Assignment, FetchLimit, Queue, QueueState, TakenBatch
from commitmq.client.receiving.batch import MessageBatch
from commitmq.errors import CorruptRecordError
from commitmq.format.constants import RETRY_PREFIX, Property
from commitmq.log import get_log

_FETCH_S: Final = 1.0
_STOP_LOOK_S: Final = 0.2

_log = get_log("consumer")


class Pool(Protocol):
    """Who calls the handler: :mod:`threads` or :mod:`tasks`."""

    def start(self) -> None: ...
    def is_inside(self) -> bool: ...
    def report(self, message: Message | None, error: BaseException) -> None: ...
    def end(self, deadline: float) -> None: ...


@dataclass(frozen=True, slots=True)
class HandlerSource:
    """The consumer, as far as a run uses it. ``fetch(deadline)`` returns the next messages, or none; ``wait(timeout_s)``
    returns when the assignment's bell rings, or at the end of the time.
    """

    assignment: Assignment
    fetch: Callable[[float], TakenBatch]
    wait: Callable[[float], None]
    is_closing: Callable[[], bool]


class HandlerRun:
    """One call of ``run``."""

    def __init__(self, engine: Engine, pool: Pool, source: HandlerSource) -> None:
        self.engine = engine
        self._pool = pool
        self._source = source
        self._assignment = source.assignment
        self._queues: dict[QueueState, ProcessQueue] = {}
        engine.ring = self._assignment.bell.ring

    # ------------------------------------------------------------ the loop

    def loop(self) -> None:
        """Until the consumer is to be closed. Raises what a poll raises, but for a damaged record, which is reported."""
        self._look_at_queues()
        while not self._source.is_closing():
            try:
                taken = self._source.fetch(time.monotonic() + _FETCH_S)
            except CorruptRecordError as error:
                # Its queue stands still until an operator has seen to it. The others continue.
                self._pool.report(None, error)
                continue
            self._hand_over(taken)
            # In this order: interrupted between the two, the offset stays below what a handler may have.
            self._assignment.returned = taken

    def stop(self) -> None:
        """Start nothing more, and wait for what runs."""
        self.engine.stop()
        deadline = time.monotonic() + self.engine.settings.stop_timeout_s
        self._assignment.is_polling = True  # nobody polls for so long because the consumer ends
        try:
            while not self.engine.is_quiet:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    _log.warning(
                        "handlers still run at the end of stop_timeout_s: their messages come again",
                        running=self.engine.counts.running,
                    )
                    return
                self._source.wait(min(remaining, _STOP_LOOK_S))
        finally:
            self._assignment.polled_at = time.monotonic()
            self._assignment.is_polling = False

    def _hand_over(self, taken: TakenBatch) -> None:
        states = {portion.state.key: portion.state for portion in taken.portions}
        for part in taken.batch._parts:
            state = states[part.topic, part.queue_id]
            queue = self._queues.get(state)
            if queue is None:  # it was assigned since the last look
                queue = self._queues[state] = self.engine.open()
            messages = MessageBatch([part]).messages()
            self.engine.add(queue, messages if not part.topic.startswith(RETRY_PREFIX) else as_first_sent(messages))

    # ------------------------------------------------------------ what the consumer asks

    def keep_house(self) -> None:
        """Between two waits of a fetch: follow the assignment, and say what may be fetched."""
        self._look_at_queues()

    def _look_at_queues(self) -> None:
        assignment, engine = self._assignment, self.engine
        limits = engine.settings
        with assignment.lock:
            assignment.room = FetchLimit(limits.max_unfinished, limits.max_unfinished_bytes)
            owned = list(assignment.owned.values())
        current = set(owned)
        for state in [state for state in self._queues if state not in current]:
            engine.drop(self._queues.pop(state))
        for state in owned:
            queue = self._queues.get(state)
            if queue is None:
                queue = self._queues[state] = engine.open()
            engine.revoke(queue, bool(state.revoked_at))
            state.room = FetchLimit(*engine.room(queue))

    def may_give_back(self, state: QueueState) -> bool:
        """Whether no handler has a message of the queue."""
        queue = self._queues.get(state)
        return queue is None or self.engine.is_idle(queue)

    def offsets(self, states: Iterable[QueueState]) -> dict[Queue, int]:
        """What may be committed of these queues and is not."""
        offsets = {}
        with self._assignment.lock:
            self._assignment.settle()
            for state in states:
                queue = self._queues.get(state)
                first = None if queue is None else self.engine.first_unfinished(queue)
                if first is None:
                    first = state.delivered if state.is_proven else state.confirmed
                if first != state.committed:
                    offsets[state.key] = first
        return offsets

    def start_nothing(self) -> None:
        """No handler starts from now on. A signal handler may call it, so it takes no lock."""
        self.engine.is_stopping = True

    def is_inside(self) -> bool:
        """Whether the caller is a handler: it cannot wait for itself."""
        return self._pool.is_inside()

    @property
    def counts(self) -> HandlerCounts:
        return self.engine.counts


def as_first_sent(messages: list[Message]) -> list[Message]:
    """Messages of a retry topic, under the topic that they were first sent to (RocketMQ's resetRetryAndNamespace)."""
    for message in messages:
        topic = message.properties.get(Property.RETRY_TOPIC)
        if topic:
            message._stored_topic, message.topic = message.topic, topic
    return messages
