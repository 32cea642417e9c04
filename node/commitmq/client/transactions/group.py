"""A producer as a member of its group: its link to the transaction process, and its answers to questions."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from commitmq.client.results import SendResult
from commitmq.client.sending.asked import Asked
from commitmq.client.transactions.checks import Check, Checks, Question
from commitmq.client.transactions.half_message import HalfMessage, Listener, TransactionState, state_of
from commitmq.client.transactions.link import TransactionLink
from commitmq.errors import InvalidMessageError
from commitmq.format.constants import Property
from commitmq.protocol.channel import check_fork
from commitmq.store.metadata.topic_config import validate_group

if TYPE_CHECKING:
    from commitmq.client.tracing import Tracer


Content = Callable[[], tuple[bytes, Mapping[str, str]]]
"""Body and properties of a transaction's message."""


class TransactionGroup:
    """``listener`` answers for transactions of the group; with one the producer registers at once. ``tracer``: tells of
    ends.
    """

    def __init__(self, node: str | None, group: str, listener: Listener | None, tracer: Tracer | None = None) -> None:
        """Raises InvalidMessageError for a bad name, TypeError for a listener that cannot check."""
        validate_group(group)
        self.group = group
        self._tracer = tracer
        self.listener = listener
        self.checks = Checks(_check_of(listener), self._reply)
        self._link = TransactionLink(node, group, self.checks.ask)
        self._pid = os.getpid()
        if listener is not None:
            self._link.start()

    def check_process(self) -> None:
        """Raise CommitMQError in a forked child, whose parent has the threads and their locks."""
        check_fork(self._pid, "producer")

    def asked(self, delay: Asked | None) -> Asked:
        """What a half message asks of the node; ``delay``: what comes into effect at the commit."""
        mine = Asked.of("transaction", {Property.TRANSACTION_PREPARED: "true", Property.PRODUCER_GROUP: self.group})
        if delay is None:
            return mine
        return Asked(f"{mine.key} {delay.key}", mine.encoded + delay.encoded, mine.json + delay.json)

    def end(self, half: SendResult, state: TransactionState, deadline: float) -> Future[dict[str, Any]]:
        """Tell the node how the transaction of ``half`` ends."""
        return self._end(half.queue_offset, half.physical_offset, state, deadline, ack=half.ack)

    def trace_end(self, half: SendResult, content: Content, state: TransactionState) -> None:
        """The transaction of ``half`` has ended so: a record of the trace, if there is one."""
        if self._tracer is not None:
            _, properties = content()
            self._tracer.ended(self.group, half.topic, half.unique_id, properties, state.value, msg_id=half.msg_id)

    def check_executes(self) -> None:
        """Raise InvalidMessageError unless the listener has ``execute``."""
        if not callable(getattr(self.listener, "execute", None)):
            raise InvalidMessageError("send_in_transaction needs a producer whose transaction_listener has execute")

    def execute(self, half: SendResult, body: bytes, properties: Mapping[str, str], argument: Any) -> TransactionState:
        """Run the listener's local transaction. Raises what it raises, and ValueError for what is no state."""
        message = HalfMessage(half.topic, half.queue, body, half.unique_id, dict(properties))
        return state_of("execute", self.listener.execute(message, argument))  # type: ignore[union-attr]

    async def execute_async(
        self, half: SendResult, body: bytes, properties: Mapping[str, str], argument: Any
    ) -> TransactionState:
        """As :meth:`execute`, for a listener whose ``execute`` may be a coroutine function."""
        message = HalfMessage(half.topic, half.queue, body, half.unique_id, dict(properties))
        state = self.listener.execute(message, argument)  # type: ignore[union-attr]
        return state_of("execute", await state if inspect.isawaitable(state) else state)

    def close(self, timeout_s: float) -> None:
        """End the threads."""
        self.checks.close()
        self._link.close(timeout_s)

    def _reply(self, question: Question, state: TransactionState) -> None:
        deadline = time.monotonic() + 3.0  # a later question comes anyway
        sent = self._end(question.queue_offset, question.physical_offset, state, deadline, from_check=True)
        sent.add_done_callback(lambda done: None if done.exception() else self._replied(question, state))

    def _replied(self, question: Question, state: TransactionState) -> None:
        message = question.message
        self.checks.settle(message.unique_id)
        if self._tracer is not None:
            self._tracer.ended(
                self.group, message.topic, message.unique_id, message.properties, state.value, from_check=True
            )

    def _end(
        self, queue_offset: int, physical_offset: int, state: TransactionState, deadline: float, **more: Any
    ) -> Future[dict[str, Any]]:
        fields = {
            "group": self.group,
            "queue_offset": queue_offset,
            "physical_offset": physical_offset,
            "decision": state.value,
            **more,
        }
        return self._link.end(fields, deadline)


def _check_of(listener: Listener | None) -> Check | None:
    if listener is None:
        return None
    check = getattr(listener, "check", listener)
    if not callable(check):
        raise TypeError(f"transaction_listener must be a function or have check, not {type(listener).__name__}")
    found: Check = check
    return found
