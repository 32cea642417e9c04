"""Replies to requests: SEND_REPLY_MESSAGE, and what is pushed to the client that waits (remoting 3.10).

A requester of RocketMQ gets its reply over its connection. A requester of the node reads the reply topic, where its id names a
queue: a reply for one is stored there with the id as its tag, and nothing is pushed.

RocketMQ stores a reply in any topic that the request names, and asks for no right. Here that is so for the cluster's reply
topic alone; another one is sent to, under the rules of a send (:mod:`.rights`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import RETRY_PREFIX, Property
from commitmq.format.properties import decode_properties, encode_properties
from commitmq.semantics.reply import pushed, queue_of_requester, reply_topic
from commitmq.store.metadata.topic_name import is_send_forbidden
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.codes import refusal_of
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.send_refusal import SEND_FIELDS, Refusal
from commitmq_plugins.rocketmq.broker.sending import Sends
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command, request
from commitmq_plugins.rocketmq.remoting.errors import RemotingError
from commitmq_plugins.rocketmq.remoting.headers.sending import (
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
    decode_send,
)
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_PATIENCE_S: Final = 10.0
_Push = tuple[int, str | None]


class Replies:
    """See the module. ``store`` is RocketMQ's ``storeReplyMessageEnable``, of replies that are pushed."""

    def __init__(self, node: Node, topics: Topics, clients: Clients, sends: Sends, *, store: bool) -> None:
        self._node, self._topics, self._clients, self._sends, self._store = node, topics, clients, sends, store
        network = node.config.network
        self._topic = reply_topic(network.cluster_name)
        self._store_host = f"{network.store_host}:{network.store_port}"
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.SEND_REPLY_MESSAGE: self.reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.reply,
        }

    async def reply(self, connection: Connection, command: Command) -> Command:
        """Requests 324 and 325."""
        header = decode_send(command.ext_fields)
        body = bytes(command.body)
        properties = decode_properties((header.properties or "").encode("utf-8", "replace"))
        to = properties.get(Property.REPLY_TO_CLIENT)
        try:
            if is_send_forbidden(header.topic) or header.topic.startswith(RETRY_PREFIX):
                raise Refusal(ResponseCode.NO_PERMISSION, f"Sending message to topic[{header.topic}] is forbidden.")
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
        except Refusal as refusal:
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
        """Raises Refusal."""
        try:
            header.properties = encode_properties(properties).decode()
        except InvalidMessageError as error:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error

    async def _push(
        self,
        connection: Connection,
        header: SendMessageRequestHeader,
        properties: dict[str, str],
        to: str | None,
        body: bytes,
    ) -> _Push:
        """Code and remark. Raises Refusal."""
        if to is None:
            return ResponseCode.SYSTEM_ERROR, "reply message properties[REPLY_TO_CLIENT] is null"
        link = self._clients.requesters.link_of(properties)
        if link is None:
            return ResponseCode.SYSTEM_ERROR, f"push reply message fail, channel of <{to}> not found."
        now_ms = time.time_ns() // 1_000_000
        try:
            properties |= pushed(properties, now_ms, SEND_FIELDS)
        except InvalidMessageError as error:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
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
