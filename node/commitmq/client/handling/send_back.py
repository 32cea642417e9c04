"""The writer's operation ``send_back``: a failed message goes to the retry topic of its group, or to its dead letters.

The only place of the clients that knows the operation's header; see protocol/PROTOCOL.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from commitmq.client.message import Message
from commitmq.errors import NodeUnavailableError, RequestError
from commitmq.log import get_log
from commitmq.protocol import wire
from commitmq.protocol.channel import Channel
from commitmq.protocol.directory import Directory

DEAD_LEVEL: Final = -1
"""The delay level that means: to the dead letters, now (RocketMQ's)."""
NODE_LEVEL: Final = 0
"""The delay level that means: the node decides, 3 + how often the message was retried (RocketMQ's)."""


class SendBackRequest(NamedTuple):
    """One message to send back. ``delay_s`` None: by ``delay_level``. ``max_retries`` None: the node's default.

    ``reconsume_times``: how often it was tried again, if that is more than its record says.
    """

    topic: str
    queue: int
    queue_offset: int
    physical_offset: int
    delay_level: int = NODE_LEVEL
    delay_s: float | None = None
    max_retries: int | None = None
    reconsume_times: int = 0


def request_of(message: Message, *, dead: bool, delay_s: float | None, max_retries: int | None) -> SendBackRequest:
    """The request for ``message``, which was read from its ``stored_topic``."""
    place = (message.stored_topic, message.queue_id, message.queue_offset, message.physical_offset)
    if dead:
        return SendBackRequest(*place, delay_level=DEAD_LEVEL, reconsume_times=message.reconsume_times)
    return SendBackRequest(*place, delay_s=delay_s, max_retries=max_retries)


class SendBackResult(NamedTuple):
    """What became of one request: ``is_dead`` when it went to the dead letters; ``error`` when it was not acknowledged."""

    is_dead: bool = False
    error: Exception | None = None


class SendBack:
    """The connection to the writer. Used by one thread."""

    def __init__(self, node: str | None, group: str, *, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._directory = Directory(node)
        self._channel: Channel | None = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._directory.close()

    def exchange(self, requests: Sequence[SendBackRequest]) -> list[SendBackResult]:
        """Send all of ``requests`` back, and wait for their answers together: they share the flushes of the log.

        An answer that is missing at the end of the time, or with the connection, is an error: the message may have been sent
        back all the same.
        """
        deadline = time.monotonic() + self._timeout_s
        answers: dict[int, SendBackResult] = {}
        places: dict[int, int] = {}  # id of a request -> its place in `requests`
        try:
            channel = self._connected(deadline)
            for place, one in enumerate(requests):
                identity = channel.next_id()
                channel.put([orjson.dumps(self._header(one, identity)), b""], deadline)
                places[identity] = place
            while len(answers) < len(places):
                answer = wire.parse_answer(channel.wait(deadline))
                channel.rest()
                found = places.get(answer.get("id", -1))
                if found is not None:
                    answers[found] = SendBackResult(bool(answer.get("dead"))) if answer["ok"] else _refused(answer)
        except RequestError as error:
            self._drop_channel()
            missing = SendBackResult(error=error)
            return [answers.get(place, missing) for place in range(len(requests))]
        return [answers[place] for place in range(len(requests))]

    def _header(self, one: SendBackRequest, identity: int) -> dict[str, Any]:
        header: dict[str, Any] = {
            "v": wire.PROTOCOL_VERSION,
            "op": "send_back",
            "id": identity,
            "group": self._group,
            "topic": one.topic,
            "queue": one.queue,
            "queue_offset": one.queue_offset,
            "physical_offset": one.physical_offset,
            "ack": "flushed",
        }
        if one.delay_s is None:
            header["delay_level"] = one.delay_level
        else:
            header["delay_ms"] = round(one.delay_s * 1000)
        if one.max_retries is not None:
            header["max_retries"] = one.max_retries
        if one.reconsume_times:
            header["reconsume_times"] = one.reconsume_times
        return header

    def _connected(self, deadline: float) -> Channel:
        if self._channel is None or self._channel.lost():
            self._drop_channel()
            self._channel, _ = self._directory.connect("writer", deadline)
        return self._channel

    def _drop_channel(self) -> None:
        """Answers to what was asked over this channel will not be read any more."""
        if self._channel is not None:
            with contextlib.suppress(NodeUnavailableError):
                self._channel.close()
            self._channel = None


def _refused(answer: dict[str, Any]) -> SendBackResult:
    return SendBackResult(error=wire.refusal(answer))


_log = get_log("consumer")


class PassOver:
    """What becomes of a failed message of a broadcasting consumer: it counts as done (RocketMQ's rule; remoting 6.4).

    Takes the place of :class:`~commitmq.client.handling.send_back.SendBack`: there is no retry topic.
    """

    def exchange(self, requests: list[SendBackRequest]) -> list[SendBackResult]:
        for one in requests:
            _log.warning(
                "a failed message is skipped, because the consumer broadcasts",
                topic=one.topic, queue=one.queue, offset=one.queue_offset,
            )  # fmt: skip
        return [SendBackResult()] * len(requests)

    def close(self) -> None:
        """Nothing is open."""
