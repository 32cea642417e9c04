"""Replies of the node's own consumers to requesters of RocketMQ: they are stored in the reply topic, and pushed from there.

The reply topic is read only while a request of one of this server's clients may still get its reply, by the request's own time
to live. Replies that came through this server have the mark of their push, and are passed over. A death of the server loses
the pushes of that moment: the requester's time ends, and the reply stays stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final

from commitmq.errors import CorruptRecordError, ProtocolError
from commitmq.format.constants import Property
from commitmq.format.properties import encode_properties
from commitmq.format.record import Record, decode_record
from commitmq.log import Log
from commitmq.semantics.reply import PUSH_REPLY_TIME, REPLY_TYPE, pushed, queue_of_requester, reply_topic
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.popped import records_of
from commitmq_plugins.rocketmq.broker.topics import DEFAULT_TOPIC, Topics
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.command import request
from commitmq_plugins.rocketmq.remoting.errors import RemotingError
from commitmq_plugins.rocketmq.remoting.headers.sending import ReplyMessageRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection

_MOST_TTL_S: Final = 300.0
_USUAL_TTL_S: Final = 3.0
_MARGIN_S: Final = 1.0
_WAIT_S: Final = 1.0
_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 10.0
_MOST_PUSHES: Final = 1_000


class StoredReplies:
    """See the module."""

    def __init__(
        self, node: Node, topics: Topics, clients: Clients, offsets: Offsets, loop: asyncio.AbstractEventLoop, log: Log
    ) -> None:
        self._node, self._topics, self._clients, self._offsets = node, topics, clients, offsets
        self._loop, self._log = loop, log
        network = node.config.network
        self._topic = reply_topic(network.cluster_name)
        self._store_host = f"{network.store_host}:{network.store_port}"
        self._until = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def expect(self, connection: Connection, properties: dict[str, str]) -> None:
        """A client sends a message with these properties; the property REPLY_TO_CLIENT is among them."""
        to = properties[Property.REPLY_TO_CLIENT]
        if properties.get(Property.MESSAGE_TYPE) == REPLY_TYPE:  # it goes the other way
            return
        if queue_of_requester(to) is not None:
            return
        self._clients.requesters.sent(connection, properties)
        if self._clients.requesters.link_of(properties) is None:
            return
        text = properties.get(Property.TTL, "")
        ttl_s = int(text) / 1_000 if text.isascii() and text.isdigit() and len(text) < 10 else _USUAL_TTL_S
        self._until = max(self._until, self._loop.time() + min(ttl_s, _MOST_TTL_S) + _MARGIN_S)
        if self._watching is None:
            self._watching = self._spawn(self._watch())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch(self) -> None:
        """Read all queues of the reply topic from now on, until nobody waits any more."""
        try:
            while self._is_awaited:
                began_ms = int((time.time() - _MARGIN_S) * 1_000)
                topic = self._topics.get(self._topic)
                if topic is not None:
                    await asyncio.gather(*(self._read(queue, began_ms) for queue in range(topic.read_queues)))
                else:  # the first reply makes it
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._watching = None

    @property
    def _is_awaited(self) -> bool:
        return self._loop.time() < self._until

    async def _read(self, queue: int, began_ms: int) -> None:
        """Push the replies of one queue that were stored since ``began_ms``."""
        line = self._node.reader_of(self._topic, queue)
        offset = -1
        while self._is_awaited:
            try:
                if offset < 0:
                    _, end, by_time = await self._offsets.bounds(self._topic, queue, timestamp=began_ms)
                    offset = end if by_time is None else by_time
                wait_s = max(0.0, min(_WAIT_S, self._until - self._loop.time()))
                fields = {"topic": self._topic, "queue": queue, "offset": offset, "wait_ms": int(wait_s * 1_000)}
                answer, frames = await self._node.exchange(line, "pull", fields)
            except ProtocolError as error:
                self._log.debug("replies cannot be read", queue=queue, code=error.code, error=error.message)
                await asyncio.sleep(_PAUSE_S)
                continue
            offset = int(answer["next_offset"])
            for frame in frames:
                for record in records_of(frame):
                    self._take(record)

    def _take(self, data: memoryview) -> None:
        try:
            record = decode_record(data)
        except CorruptRecordError as error:
            self._log.warning("a damaged reply is passed over", error=str(error))
            return
        to = record.properties.get(Property.REPLY_TO_CLIENT)
        is_ours = to is not None and PUSH_REPLY_TIME not in record.properties and queue_of_requester(to) is None
        if to is not None and is_ours and len(self._tasks) < _MOST_PUSHES:
            self._spawn(self._push(to, record))

    async def _push(self, to: str, record: Record) -> None:
        link = self._clients.requesters.link_of(record.properties)
        if link is None:
            return
        properties = pushed(record.properties, time.time_ns() // 1_000_000)
        header = ReplyMessageRequestHeader(
            producer_group=properties.get(Property.PRODUCER_GROUP, ""),
            topic=record.topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=1,
            queue_id=record.queue_id,
            sys_flag=record.sys_flag,
            born_timestamp=record.born_timestamp,
            flag=record.flag,
            born_host=f"{record.born_host.ip}:{record.born_host.port}",
            store_host=self._store_host,
            store_timestamp=record.store_timestamp,
            properties=encode_properties(properties).decode(),
            reconsume_times=record.reconsume_times,
        )
        message = request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header.encode(), record.body)
        try:
            await link.request(message, _PATIENCE_S)
        except RemotingError as error:
            self._log.debug("a reply is not taken", client=to, error=str(error))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
