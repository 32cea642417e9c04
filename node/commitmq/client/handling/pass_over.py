"""What becomes of a failed message of a broadcasting consumer: it counts as done (RocketMQ's rule; remoting 6.4)."""

from __future__ import annotations

from commitmq.client.handling.send_back import Answer, Request
from commitmq.log import get_log

_log = get_log("consumer")


class PassOver:
    """Takes the place of :class:`~commitmq.client.handling.send_back.SendBack`: there is no retry topic."""

    def exchange(self, requests: list[Request]) -> list[Answer]:
        for one in requests:
            _log.warning(
                "a failed message is passed over, because the consumer broadcasts",
                topic=one.topic, queue=one.queue, offset=one.queue_offset,
            )  # fmt: skip
        return [Answer()] * len(requests)

    def close(self) -> None:
        """Nothing is open."""
