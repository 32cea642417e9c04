"""The methods of a producer for requests and replies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError

from commitmq.client.message import Message, check_topic
from commitmq.client.producer_base import ProducerBase
from commitmq.client.properties import Keys
from commitmq.client.requesting.exchange import Content, reply_message, request_message
from commitmq.client.requesting.reply_reader import no_reply
from commitmq.client.results import SendResult
from commitmq.client.sending.arguments import shard


class RequestProducer(ProducerBase):
    """A part of :class:`commitmq.Producer`."""

    def request(
        self,
        topic: str,
        body: bytes | Message,
        *,
        tags: str | None = None,
        keys: Keys | None = None,
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        key: str | None = None,
        queue: int | None = None,
        flag: int = 0,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> Message:
        """Send one message, wait for the reply of the consumer that handles it, and return the reply.

        ``timeout_s`` (default: the producer's) is for both. Other arguments as of :meth:`send`. A request is a plain message
        with RocketMQ's marks: it may be handled although nobody waits any more, and each group of the topic may reply; the
        first reply counts.

        Raises RequestTimeoutError without a reply, SendError for a request that was not acknowledged or while
        ``max_requests`` wait.
        """
        self._check_usable()
        self._check_may_wait()
        limit = self._limit(timeout_s)
        deadline = time.monotonic() + limit
        self._replies.start(deadline)
        content = Content(body, tags, keys, properties, sharding_key, key, flag)
        waiting = self._replies.open(limit)
        try:
            message = request_message(content, waiting.marks)
            self.send(topic, message, queue=queue, timeout_s=max(deadline - time.monotonic(), 0.001), ack=ack)
            return waiting.reply.result(max(deadline - time.monotonic(), 0))
        except FutureTimeoutError:
            raise no_reply(topic, waiting, limit) from None
        finally:
            self._replies.drop(waiting)

    def reply(
        self,
        message: Message,
        body: bytes | Message,
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        ack: str | None = None,
    ) -> SendResult:
        """Reply to the request ``message``: its requester gets ``body``. Raises as :meth:`send`, and InvalidMessageError
        when ``message`` is no request. In a handler ``message.reply(body)`` does the same.
        """
        made = reply_message(message, body, properties)
        limit = self._limit(timeout_s)
        queue = made.queue
        if queue is None:
            queue = shard(made.client_id, self._lanes.routes.queues(check_topic(made.topic), time.monotonic() + limit))
        return self.send(made.topic, made.message, queue=queue, timeout_s=limit, ack=ack)

    @property
    def late_replies(self) -> int:
        """Replies that came when nobody waited for them any more. They are dropped."""
        return self._replies.late
