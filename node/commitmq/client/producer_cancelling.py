"""The method of a producer that cancels messages which wait for their time."""

from __future__ import annotations

import time

from commitmq.client.producer_base import ProducerBase
from commitmq.client.results import SendResult


class CancellingProducer(ProducerBase):
    """A part of :class:`commitmq.Producer`."""

    def cancel(self, receipt: SendResult | str, *, timeout_s: float | None = None) -> None:
        """Cancel a message that waits for its time: no consumer will get it.

        ``receipt`` is the result of its send with ``delay`` or ``deliver_at``, or RocketMQ's recall handle. That is possible
        until half a second before the second in which it is due. Later the node refuses (SendError with the code
        ILLEGAL_OPERATION). A cancellation of unknown outcome may be repeated. Raises InvalidMessageError for a message that
        does not wait for a time of its own.
        """
        from commitmq.client.sending.cancelling import cancel_fields
        from commitmq.client.sending.lone import LoneMessage

        self._check_usable()
        self._check_may_wait()
        fields = cancel_fields(receipt)
        deadline = time.monotonic() + self._limit(timeout_s)
        lone = LoneMessage(self._lanes.writer, fields, b"0", deadline)
        self._lanes.writer.send_waiting(lone)
        lone.wait()
