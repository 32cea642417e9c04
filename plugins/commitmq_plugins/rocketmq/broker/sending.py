"""Sends: SEND_MESSAGE, SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE (remoting 3.1 to 3.6).

All messages that were read from the sockets in one turn of the loop, and belong to the same queue, go to the writer as one
run. A message that waits somewhere first (a delay, a timer, a half message) is a run of its own, because it may have a
place of its own.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import Host, Property
from commitmq.format.message_id import pack_host
from commitmq.format.properties import decode_properties, encode_properties
from commitmq.semantics.priority import counts, priority_of, queue_of
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, MessageIllegalError, RunCheck
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq_plugins.rocketmq.broker.allowances import Allowances
from commitmq_plugins.rocketmq.broker.append_lanes import AppendLanes
from commitmq_plugins.rocketmq.broker.codes import refusal_of
from commitmq_plugins.rocketmq.broker.counting import Counting, counted_topics
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.places import count_of
from commitmq_plugins.rocketmq.broker.plain_properties import DROPPED, WAITED, Completed, PlainProperties
from commitmq_plugins.rocketmq.broker.retries import Retries
from commitmq_plugins.rocketmq.broker.runs import Runs, Waiting
from commitmq_plugins.rocketmq.broker.send_refusal import FAQ, SEND_FIELDS, Refusal, check_name, topic_text
from commitmq_plugins.rocketmq.broker.send_targets import CLIENTS, USERS, RunKey, SendTargets, Target, is_batch
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.headers.sending import SendMessageRequestHeader, decode_send
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_SPECIAL: Final = frozenset(SPECIAL_PROPERTIES)
_RETRY: Final = "%RETRY%"
_PRIORITY: Final = re.compile(f"(?:^|(?<=\x02)){Property.PRIORITY}\x01[^\x02]*(?:\x02|$)")


class Sends:
    """See the module."""

    def __init__(
        self,
        node: Node,
        topics: Topics,
        retries: Retries,
        allowances: Allowances,
        loop: asyncio.AbstractEventLoop,
        counting: Counting,
    ) -> None:
        self._topics, self._retries, self._allowances, self._loop = topics, retries, allowances, loop
        config = node.config
        host = Host(config.network.store_host, config.network.store_port)
        self._check = RunCheck(
            store_host=pack_host(host),
            max_message_bytes=config.commit_log.max_message_bytes,
            properties_crc=config.commit_log.append_properties_crc,
        )
        self._marks = {"CLUSTER": config.network.cluster_name, **SEND_FIELDS}
        self._properties = PlainProperties(self._marks)
        self._targets = SendTargets(
            self._check,
            is_sync=config.commit_log.flush_mode == "sync",
            rates=lambda: _rates(node),
        )
        self._runs = Runs(config, AppendLanes(node), loop, counting, SEND_FIELDS)
        self.expects_reply: Callable[[Connection, dict[str, str]], None] = lambda connection, properties: None
        """Is called with connection and properties of each request whose sender waits for a reply."""
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.SEND_MESSAGE: self.handle,
            RequestCode.SEND_MESSAGE_V2: self.handle,
            RequestCode.SEND_BATCH_MESSAGE: self.handle,
        }

    # ------------------------------------------------------------ requests

    def handle(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """Take one send. Its answer is sent when the messages are stored."""
        self._topics.sync()
        known = self._targets.known(connection, command, self._topics.version)
        if known is None:
            return self._handle_new(connection, command)
        try:
            self._put(connection, command, *known)
        except Refusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        return None

    def _handle_new(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None] | None:
        """A send that is not like an earlier one."""
        header = decode_send(command.ext_fields)
        topic = self._topics.get(header.topic)
        if topic is None or header.topic.startswith(_RETRY):
            return self._handle_slowly(connection, command, header, topic)
        try:
            self._take(connection, command, header, topic, is_usual=True)
        except Refusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        return None

    async def _handle_slowly(
        self, connection: Connection, command: Command, header: SendMessageRequestHeader, topic: TopicConfig | None
    ) -> Command | None:
        """A send to a topic that has to be made first, or to a retry topic."""
        try:
            if header.topic.startswith(_RETRY):
                if is_batch(command.code, header):
                    raise Refusal(
                        ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {header.topic}"
                    )
                topic = await self._retries.place(connection, header, command.version)
            elif topic is None:
                topic = await self._created(connection, header)
            self._take(connection, command, header, topic)
        except Refusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        except ProtocolError as error:
            return command.answer(*refusal_of(error), ext_fields=dict(SEND_FIELDS))
        return None

    async def _created(self, connection: Connection, header: SendMessageRequestHeader) -> TopicConfig:
        """The topic of a send, made if its template lets sends make topics. Raises Refusal, ProtocolError."""
        check_name(header.topic)
        template = self._topics.template(header.default_topic)
        if template is None:
            raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please!{FAQ}")
        self._allowances.topic(connection, header.topic)
        most, perm = template
        is_own = header.topic in self._topics.own_names
        queues = 1 if is_own else max(1, min(header.default_topic_queue_nums, most))
        return await self._topics.create(header.topic, queues, perm=perm, user=connection.user)

    async def stored(
        self,
        connection: Connection,
        command: Command,
        header: SendMessageRequestHeader,
        topic: TopicConfig,
        body: bytes,
    ) -> Command:
        """Store one message; its answer. Raises Refusal."""
        answer: asyncio.Future[Command] = self._loop.create_future()
        one = replace(command, body=body, code=int(RequestCode.SEND_MESSAGE))
        self._take(connection, one, header, topic, answer)
        return await answer

    # ------------------------------------------------------------ runs

    def _take(
        self,
        connection: Connection,
        command: Command,
        header: SendMessageRequestHeader,
        topic: TopicConfig,
        answer: asyncio.Future[Command] | None = None,
        *,
        is_usual: bool = False,
    ) -> None:
        """Store the messages of a request whose fields are decoded. ``is_usual``: the next ones with these fields may go the
        same way, without a look at them. Raises Refusal.
        """
        queue = header.queue_id
        if queue >= max(topic.write_queues, topic.read_queues):
            peer = f"{connection.peer[0]}:{connection.peer[1]}"
            remark = f"request queueId[{queue}] is illegal, {topic_text(topic)} Producer: {peer}"
            raise Refusal(ResponseCode.INVALID_PARAMETER, remark)
        if is_any := queue < 0:
            queue = random.randrange(max(1, topic.write_queues))
        text = header.properties or ""
        if is_ranked := Property.PRIORITY in text and not is_batch(command.code, header):
            queue, text = _ranked(text, queue, topic)
        target = self._targets.find(connection, command.code, header, topic, queue, self._topics.version)
        if is_usual and not is_any and not is_ranked:
            self._targets.remember(connection, command, target)
        self._put(connection, command, target, max(0, header.born_timestamp), text, answer)

    def _put(
        self,
        connection: Connection,
        command: Command,
        target: Target,
        born_ms: int,
        text: str,
        answer: asyncio.Future[Command] | None = None,
    ) -> None:
        """Put the messages of a request into a run. Raises Refusal."""
        if target.is_batch:
            self._put_batch(connection, command, target, born_ms, text, answer)
            return
        done = self._properties.completed(text)
        counted: tuple[str, ...] = ()
        if done is None:
            done, counted = self._completed(connection, text, target.topic)
        try:
            record = target.form.record(command.body, done.encoded, born_ms)
        except MessageIllegalError as error:
            raise self._illegal(error) from error
        key = target.flushed if done.waits else target.memory
        waiting = Waiting(connection, command, done.unique, len(record), answer, counted=counted)
        if counted:
            self._runs.add_alone(key, record, waiting)
        else:
            self._runs.add(key, record, waiting)

    def _completed(self, connection: Connection, text: str, topic: str) -> tuple[Completed, tuple[str, ...]]:
        """The properties of any single message with what a broker adds (spec 5.4). If it waits somewhere first: the topics in
        whose statistics it counts. Raises Refusal.
        """
        properties = _decoded(text, topic)
        if Property.REPLY_TO_CLIENT in properties:
            self.expects_reply(connection, properties)
        counted = () if _SPECIAL.isdisjoint(properties) else counted_topics(topic, properties)
        waits = properties.get("WAIT") != "false"
        for name in DROPPED:
            properties.pop(name, None)
        if Property.UNIQUE_KEY not in properties:
            properties[Property.UNIQUE_KEY] = self._retries.unique_id()
        properties.update(self._marks)
        try:
            encoded = encode_properties(properties)
        except InvalidMessageError as error:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        return Completed(encoded, properties[Property.UNIQUE_KEY], waits), counted

    def _illegal(self, error: MessageIllegalError) -> Refusal:
        return Refusal(
            ResponseCode.MESSAGE_ILLEGAL,
            "the message is illegal, maybe msg body or properties length not matched. msg body length limit "
            f"{self._check.max_message_bytes}B, msg properties length limit 32KB. {error}",
        )

    def _put_batch(
        self,
        connection: Connection,
        command: Command,
        target: Target,
        born_ms: int,
        text: str,
        answer: asyncio.Future[Command] | None,
    ) -> None:
        """A batch: one run of a record for each message, or one record. Raises Refusal."""
        properties = _decoded(text, target.topic)
        key = target.memory if properties.get("WAIT") == "false" else target.flushed
        unique = properties.get(Property.UNIQUE_KEY)
        if target.is_inner:
            self._send_inner_batch(connection, command, key, properties, born_ms)
            return
        try:
            run, sizes = target.form.batch(command.body, born_ms)
        except MessageIllegalError as error:
            raise Refusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        self._runs.add(key, run, Waiting(connection, command, unique, sizes, answer))

    def _send_inner_batch(
        self, connection: Connection, command: Command, key: RunKey, properties: dict[str, str], born_ms: int
    ) -> None:
        """A batch that stays one record, for a topic of BatchCQ."""
        fields = {
            "topic": key.topic,
            "queue": key.queue,
            "count": count_of(command.body),
            "properties": {**properties, **self._marks},
            "born": born_ms,
            "ack": key.ack,
            "client": connection.name,
        }
        waiting = Waiting(connection, command, properties.get(Property.UNIQUE_KEY), 0, is_inner_batch=True)
        self._runs.send_batch(key, fields, command.body, waiting)


def _rates(node: Node) -> int:
    """Whether clients and users have rates: messages of several of them are several runs then."""
    flow = node.config.flow
    clients = CLIENTS if flow.client_send_messages_per_s or flow.client_send_bytes_per_s else 0
    return clients | USERS if node.quotas.bounds_sends else clients


def _ranked(text: str, queue: int, topic: TopicConfig) -> tuple[int, str]:
    """Queue and properties of a message that names a priority."""
    properties = decode_properties(text.encode("utf-8", "replace"))
    if (priority := priority_of(properties)) < 0:
        return queue, text
    if not counts(properties):
        return queue, _PRIORITY.sub("", text)
    return queue_of(priority, topic.write_queues), text


def _decoded(text: str, topic: str) -> dict[str, str]:
    """The properties of a send to ``topic``, without what a message has that waited somewhere before."""
    properties = decode_properties(text.encode("utf-8", "replace"))
    if "TIMER_OUT_MS" in properties or topic.startswith((_RETRY, "%DLQ%")):
        properties = {name: value for name, value in properties.items() if name not in WAITED}
    return properties
