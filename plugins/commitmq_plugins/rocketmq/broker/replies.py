"""Replies to requests: SEND_REPLY_MESSAGE, and what is pushed to the client that waits (remoting 3.10).

A requester of RocketMQ gets its reply over its connection. A requester of the node reads the reply topic, where its id names a
queue: a reply for one is stored there with the id as its tag, and nothing is pushed.

RocketMQ stores a reply in any topic that the request names, and asks for no right. Here that is so for the cluster's reply
topic alone; another one is sent to, under the rules of a send (:mod:`.rights`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final

from commitmq.errors import CorruptRecordError, InvalidMessageError, ProtocolError
from commitmq.format.constants import RETRY_PREFIX, Property
from commitmq.format.properties import decode_properties, encode_properties
from commitmq.format.record import Record, decode_record
from commitmq.log import Log
from commitmq.semantics.reply import PUSH_REPLY_TIME, REPLY_TYPE, pushed, queue_of_requester, reply_topic
from commitmq.store.metadata.topic_config import is_send_forbidden
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.node import SEND_FIELDS, NodeClient, SendRefusal, refusal_of
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.popping import records_of
from commitmq_plugins.rocketmq.broker.sending import SendMessageProcessor
from commitmq_plugins.rocketmq.broker.topics import DEFAULT_TOPIC, TopicConfigManager
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, RemotingError, request
from commitmq_plugins.rocketmq.remoting.headers import (
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
    decode_send,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

_MOST_TTL_S: Final = 300.0
_USUAL_TTL_S: Final = 3.0
_MARGIN_S: Final = 1.0
_WAIT_S: Final = 1.0
_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 10.0
_MOST_PUSHES: Final = 1_000


class StoredReplies:
    """Replies of the node's own consumers to requesters of RocketMQ: they are stored in the reply topic, and pushed
    from there.

    The reply topic is read only while a request of one of this server's clients may still get its reply, by the
    request's own time to live. Replies that came through this server have the mark of their push, and are skipped.
    A death of the server loses the pushes of that moment: the requester's time ends, and the reply stays stored.
    """

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        offsets: Offsets,
        loop: asyncio.AbstractEventLoop,
        log: Log,
    ) -> None:
        self._node, self._topics, self._clients, self._offsets = node, topics, clients, offsets
        self._loop, self._log = loop, log
        network = node.config.network
        self._topic = reply_topic(network.cluster_name)
        self._store_host = f"{network.store_host}:{network.store_port}"
        self._until = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def expect(self, connection: RemotingConnection, properties: dict[str, str]) -> None:
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
            self._log.warning("a damaged reply is skipped", error=str(error))
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


_Push = tuple[int, str | None]


class ReplyMessageProcessor:
    """The replies to requests. ``store`` is RocketMQ's ``storeReplyMessageEnable``, of replies that are pushed."""

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        sends: SendMessageProcessor,
        *,
        store: bool,
    ) -> None:
        self._node, self._topics, self._clients, self._sends, self._store = node, topics, clients, sends, store
        network = node.config.network
        self._topic = reply_topic(network.cluster_name)
        self._store_host = f"{network.store_host}:{network.store_port}"
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.SEND_REPLY_MESSAGE: self.reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.reply,
        }

    async def reply(self, connection: RemotingConnection, command: Command) -> Command:
        """Requests 324 and 325."""
        header = decode_send(command.ext_fields)
        body = bytes(command.body)
        properties = decode_properties((header.properties or "").encode("utf-8", "replace"))
        to = properties.get(Property.REPLY_TO_CLIENT)
        try:
            if is_send_forbidden(header.topic) or header.topic.startswith(RETRY_PREFIX):
                raise SendRefusal(ResponseCode.NO_PERMISSION, f"Sending message to topic[{header.topic}] is forbidden.")
            if header.topic == self._topic and self._topics.get(self._topic) is None:
                await self._node.ask("coordinator", "topic.reply")
            topic = self._topics.must_get(header.topic)
            queue = None if to is None else queue_of_requester(to)
            if queue is not None and to is not None:
                header.queue_id, properties[Property.TAGS] = queue, to
                self._set(header, properties)
                return await self._sends.stored(connection, command, header, topic, body)
            if not 0 <= header.queue_id < topic.write_queues:
                header.queue_id = 0
            pushed = await self._push(connection, header, properties, to, body)
            if not self._store:
                fields = {**SEND_FIELDS, "msgId": "0", "queueId": str(header.queue_id), "queueOffset": "0"}
                return command.answer(*pushed, ext_fields=fields)
            answer = await self._sends.stored(connection, command, header, topic, body)
        except SendRefusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        except ProtocolError as error:
            return command.answer(*refusal_of(error), ext_fields=dict(SEND_FIELDS))
        answer.code, answer.remark = pushed  # how it was stored never changes that (remoting 3.10)
        for name, value in (("msgId", "0"), ("queueId", str(header.queue_id)), ("queueOffset", "0")):
            answer.ext_fields.setdefault(name, value)
        answer.ext_fields.pop("transactionId", None)
        return answer

    @staticmethod
    def _set(header: SendMessageRequestHeader, properties: dict[str, str]) -> None:
        """Raises SendRefusal."""
        try:
            header.properties = encode_properties(properties).decode()
        except InvalidMessageError as error:
            raise SendRefusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error

    async def _push(
        self,
        connection: RemotingConnection,
        header: SendMessageRequestHeader,
        properties: dict[str, str],
        to: str | None,
        body: bytes,
    ) -> _Push:
        """Code and remark. Raises SendRefusal."""
        if to is None:
            return ResponseCode.SYSTEM_ERROR, "reply message properties[REPLY_TO_CLIENT] is null"
        link = self._clients.requesters.link_of(properties)
        if link is None:
            return ResponseCode.SYSTEM_ERROR, f"push reply message fail, channel of <{to}> not found."
        now_ms = time.time_ns() // 1_000_000
        try:
            properties |= pushed(properties, now_ms, SEND_FIELDS)
        except InvalidMessageError as error:
            raise SendRefusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        self._set(header, properties)
        pushing = ReplyMessageRequestHeader(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            born_host=connection.name,
            store_host=self._store_host,
            store_timestamp=now_ms,
            properties=header.properties,
            reconsume_times=header.reconsume_times or 0,
            unit_mode=header.unit_mode,
        )
        message = request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushing.encode(), body)
        try:
            answer = await asyncio.wait_for(link.request(message, _PATIENCE_S), _PATIENCE_S + 1)
        except (RemotingError, TimeoutError):
            return ResponseCode.SYSTEM_ERROR, f"push reply message to <{to}>fail."
        if answer.code != ResponseCode.SUCCESS:
            return ResponseCode.SYSTEM_ERROR, f"push reply message to <{to}>fail."
        return ResponseCode.SUCCESS, None
