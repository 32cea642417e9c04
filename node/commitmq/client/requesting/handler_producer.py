"""The producer by which a handler replies: made at the first reply, one for all handlers of a consumer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from commitmq.errors import CommitMQError

if TYPE_CHECKING:
    from commitmq.client.aio_producer import AsyncProducer
    from commitmq.client.message import Message
    from commitmq.client.producer import Producer
    from commitmq.client.results import SendResult


class HandlerProducer:
    """``is_async``: for handlers that are coroutine functions; their producer is an AsyncProducer."""

    def __init__(self, node: str | None, *, is_async: bool = False) -> None:
        self._node = node
        self._is_async = is_async
        self._lock = threading.Lock()
        self._made: Producer | None = None
        self._made_async: AsyncProducer | None = None
        self._is_closed = False

    def reply(self, message: Message, body: bytes | Message, properties: Mapping[str, str] | None) -> SendResult:
        """See :meth:`commitmq.Message.reply`."""
        return self._get().reply(message, body, properties=properties)

    async def reply_async(
        self, message: Message, body: bytes | Message, properties: Mapping[str, str] | None
    ) -> SendResult:
        """See :meth:`commitmq.Message.reply_async`."""
        return await self._get_async().reply(message, body, properties=properties)

    def _get(self) -> Producer:
        """Raises CommitMQError in a coroutine, which it would block, and after the end of the run."""
        if self._is_async:
            raise CommitMQError("reply() would block the event loop: await message.reply_async(…)")
        with self._lock:
            self._check_open()
            if self._made is None:
                from commitmq.client.producer import Producer

                self._made = Producer(self._node)
            return self._made

    def _get_async(self) -> AsyncProducer:
        """Called in the loop."""
        if not self._is_async:
            raise CommitMQError("reply_async() is for handlers that are coroutine functions: call message.reply(…)")
        self._check_open()
        if self._made_async is None:
            from commitmq.client.aio_producer import AsyncProducer

            self._made_async = AsyncProducer(self._node)
        return self._made_async

    def _check_open(self) -> None:
        if self._is_closed:
            raise CommitMQError("run() has ended, so its handlers cannot reply any more")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            made, self._made = self._made, None
        if made is not None:
            made.close()

    async def close_async(self) -> None:
        self._is_closed = True
        made, self._made_async = self._made_async, None
        if made is not None:
            await made.close()
