"""A message that travels alone, as a request ``send``: the writer makes its record, because a run cannot carry its properties.

A message for further queues (``INNER_MULTI_DISPATCH``, spec 3.10) is such a message. It waits in the outbox among the batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commitmq.client.results import SendResult
from commitmq.client.sending.line import Wait
from commitmq.client.sending.run import NEVER_S, MakeError, SendRun
from commitmq.errors import SendError
from commitmq.format.constants import Property

if TYPE_CHECKING:
    from commitmq.client.sending.pump import Pump


class LoneRun(SendRun):
    """The request of a lone message."""

    __slots__ = ("is_open", "message")

    def __init__(self, message: LoneMessage, fields: dict[str, Any], body: bytes) -> None:
        super().__init__(fields["topic"], fields["queue"], 1, fields, body)
        self.is_free = fields["queue"] < 0
        self.message = message
        self.is_open = True

    def stored(self, answer: dict[str, Any]) -> None:
        if self._close():
            self.message.end(answer, None)

    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        if self._close():
            self.message.end(None, make_error())

    def expire(self, now: float, make_error: MakeError) -> float:
        if self.is_open and self.message.deadline <= now:
            self.failed(make_error)
        return self.message.deadline if self.is_open else NEVER_S

    def give_back(self) -> None:
        if self._close():
            self.message.take_back()

    def _close(self) -> bool:
        was_open, self.is_open = self.is_open, False
        return was_open


class LoneMessage:
    """A message that travels alone, as a request ``send``. ``fields`` is the header of its request without the id.
    ``deadline`` is in monotonic seconds.
    """

    def __init__(self, pump: Pump, fields: dict[str, Any], body: bytes, deadline: float) -> None:
        self.is_counted = False
        self.size_bytes = len(body)
        self.deadline = deadline
        self.in_flight = 0
        self._lane = pump.lane
        self._outbox = pump.outbox
        self._fields = fields
        self._body = body
        self._is_sent = False
        self._is_told = False
        self._answer: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._wait: Wait[SendResult] = Wait(lambda: pump.outbox.settle_batch(self))

    def __len__(self) -> int:
        return 1

    @property
    def more(self) -> bool:
        """Whether the message is still to be sent."""
        return not self._is_sent and self._error is None

    @property
    def may_move(self) -> bool:
        """Whether another node may take it."""
        return not self._is_sent and self._fields["queue"] < 0

    def wait(self) -> SendResult:
        """Wait for its result. Raises SendError, or InvalidMessageError for a body that is larger than the node allows."""
        return self._wait.wait()

    def next_run(self, put_deadline: float, *, only: bool = False) -> LoneRun | None:
        """Its request, which is its only one; None when there is none to send."""
        from commitmq.client.sending.outbox import too_large

        if len(self._body) > self._lane.max_message_bytes:
            self._error = too_large(len(self._body), self._lane.max_message_bytes)
            return None
        self._is_sent = True
        if not self._wait.start():
            self._is_told = True
            self._outbox.settle_batch(self)
            return None
        self.in_flight = 1
        return LoneRun(self, self._fields, self._body)

    def take_back(self) -> None:
        """The connection did not take the message: it is the next one again."""
        self.in_flight = 0
        self._is_sent = False
        self._outbox.put_back_batch(self)

    def end(self, answer: dict[str, Any] | None, error: SendError | None) -> None:
        """The node has answered, or no answer will come."""
        self.in_flight = 0
        self._answer, self._error = answer, error
        self._outbox.finish_batch(self)

    def fail(self, error: SendError) -> None:
        """The message will not be sent."""
        self._error = self._error or error

    def finish(self) -> None:
        """Tell the outcome to the thread that waits."""
        if self._is_told:
            return
        self._is_told = True
        if self._answer is None:
            self._wait.done_with(None, self._error)
            return
        answer, fields = self._answer, self._fields
        result = SendResult(
            fields["topic"],
            answer["queue"],
            answer["queue_offset"],
            answer["physical_offset"],
            answer["store_timestamp"],
            answer["msg_id"],
            fields["properties"][Property.UNIQUE_KEY],
            answer["ack"],
        )
        self._wait.done_with(result, None)
