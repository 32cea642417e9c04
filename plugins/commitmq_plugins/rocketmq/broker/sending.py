"""Sends: SEND_MESSAGE, SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE (remoting 3.1 to 3.6).

All messages that were read from the sockets in one turn of the loop, and belong to the same queue, go to the writer as one
run. A message that waits somewhere first (a delay, a timer, a half message) is a run of its own, because it may have a
place of its own. A priority is a queue (remoting 5.2): a pop of a topic of the type PRIORITY looks into the highest queue
first; a message with a priority may be in any topic.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from commitmq.errors import InvalidMessageError, ProtocolError
from commitmq.format.constants import Host, Property
from commitmq.format.message_id import UniqueIds, pack_host
from commitmq.format.properties import decode_properties, encode_properties
from commitmq.format.record import Record, decode_record
from commitmq.security.native_rights import SUB
from commitmq.semantics.delay import MAX_LEVEL
from commitmq.semantics.retry import TO_DEAD_LETTERS, is_last_try, topics_of
from commitmq.semantics.timer import RECALL_BODY, RecallHandle
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, MessageIllegalError, RunCheck
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq_plugins.rocketmq.broker.assignment import QueueLocks
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.counting import Counting, counted_topics
from commitmq_plugins.rocketmq.broker.node import (
    FAQ,
    SEND_FIELDS,
    NodeClient,
    SendRefusal,
    check_name,
    refusal_of,
    topic_text,
)
from commitmq_plugins.rocketmq.broker.rights import Access, Allowances
from commitmq_plugins.rocketmq.broker.runs import (
    CLIENTS,
    DROPPED,
    USERS,
    WAITED,
    AppendLanes,
    CompletedProperties,
    PendingRequest,
    PlainProperties,
    RunKey,
    Runs,
    SendTarget,
    SendTargets,
    count_of,
    is_batch,
)
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.codes import V3_4_9, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import MAX_NAME_CHARACTERS
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.headers import (
    ConsumerSendMsgBackRequestHeader,
    RecallMessageRequestHeader,
    SendMessageRequestHeader,
    decode_send,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,10}")
_MOST: Final = (1 << 31) - 1
_OTHER_KINDS: Final = (
    Property.DELAY,
    Property.TIMER_DELIVER_MS,
    Property.TIMER_DELAY_SECONDS,
    Property.TIMER_DELAY_MS,
    Property.SHARDING_KEY,
)


def priority_of(properties: Mapping[str, str]) -> int:
    """The priority that a message names, from 0; -1 for one that names none, or no number."""
    text = properties.get(Property.PRIORITY, "")
    priority = int(text) if _INTEGER.fullmatch(text) else -1
    return priority if 0 <= priority <= _MOST else -1


def counts(properties: Mapping[str, str]) -> bool:
    """Whether a priority counts: not for a message that is delayed, ordered or part of a transaction. There a broker takes the
    property away.
    """
    is_half = properties.get(Property.TRANSACTION_PREPARED, "").lower() == "true"
    return not is_half and not any(name in properties for name in _OTHER_KINDS)


def queue_of(priority: int, write_queues: int) -> int:
    """The priority itself, or the last of ``write_queues``."""
    return max(0, min(priority, write_queues - 1))


async def stored_record(node: NodeClient, physical_offset: int) -> Record | None:
    """The record at ``physical_offset``, or None. Raises ProtocolError when it cannot be read now."""
    try:
        _, frames = await node.exchange(node.line("reader-0"), "view", {"physical_offset": physical_offset})
    except ProtocolError as error:
        if error.code in ("INVALID_PARAMETER", "TOPIC_NOT_EXIST"):
            return None
        raise
    return decode_record(b"".join(frames), check_crc=False)


_RETRY: Final = "%RETRY%"
_DEAD: Final = "%DLQ%"
_SETTINGS_S: Final = 5.0
_MOST_TRIES: Final = 1 << 30  # of a request to the writer; consumers in order send 2^31 - 1


class Retries:
    """Failed messages of RocketMQ's consumers: CONSUMER_SEND_MSG_BACK, and plain sends to retry topics (remoting 3.6, 3.7).

    Settings of groups are asked for every few seconds.
    """

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        locks: QueueLocks,
        counting: Counting,
        access: Access,
    ) -> None:
        self._node, self._topics, self._clients, self._locks, self._counting = node, topics, clients, locks, counting
        self._access = access
        self._ids = UniqueIds()
        self._settings: dict[str, tuple[float, dict[str, Any]]] = {}
        self.handlers: dict[RequestCode, Handler] = {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def unique_id(self) -> str:
        """The unique key of a message whose client gave it none."""
        return self._ids.next()

    def forget(self, group: str) -> None:
        """The settings of ``group`` changed."""
        self._settings.pop(group, None)

    async def settings(self, group: str) -> dict[str, Any]:
        """The settings of ``group`` under RocketMQ's names. Raises ProtocolError."""
        now = time.monotonic()
        at, known = self._settings.get(group, (0.0, {}))
        if now - at > _SETTINGS_S or not known:
            if len(self._settings) > 10_000:
                self._settings.clear()
            answer = await self._node.ask("coordinator", "group.config", group=group)
            known = {name: value for name, value in answer.items() if name not in ("v", "id", "ok")}
            self._settings[group] = now, known.get("config", known)
            known = self._settings[group][1]
        return known

    async def place(
        self, connection: RemotingConnection, header: SendMessageRequestHeader, version: int
    ) -> TopicConfig:
        """The topic for a consumer's own send to its retry topic; changes ``header`` for a dead letter.

        Raises ProtocolError.
        """
        group = header.topic.removeprefix(_RETRY)
        self._clients.charge(connection, group)
        await self._topics.retry_topics(group, user=connection.user)
        most = int((await self.settings(group)).get("retryMaxTimes", 16))
        if header.max_reconsume_times is not None and version >= V3_4_9:
            most = header.max_reconsume_times
        is_ordered = self._locks.is_held(group, time.monotonic_ns() // 1_000_000)
        if (header.reconsume_times or 0) > most or is_ordered:
            await self._topics.retry_topics(group, dead=True)
            header.topic, header.queue_id = _DEAD + group, 0
            header.properties = f"{header.properties or ''}\x02DELAY\x01-1\x02"
        return self._topics.must_get(header.topic)

    async def send_back(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 36: a consumer could not handle a message.

        As in RocketMQ a level above the last is the last, each one below 0 ends the tries, and so does a limit below 0.
        """
        header = ConsumerSendMsgBackRequestHeader.decode(command.ext_fields)
        try:
            self._clients.charge(connection, header.group)
            await self._topics.retry_topics(header.group, user=connection.user)
            settings = await self.settings(header.group)
            if int(settings.get("retryQueueNums", 1)) <= 0:  # it was more when its retry topic was made (spec 12.4)
                return command.answer()
            record = await stored_record(self._node, header.offset)
            if header.max_reconsume_times is not None and command.version >= V3_4_9:
                most = header.max_reconsume_times
            else:
                most = int(settings.get("retryMaxTimes", 16))
            if record is None:
                return command.answer(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}")
            topics = topics_of(record.topic, record.properties)
            if (refused := self._access.lacks(connection, command, topics, SUB)) is not None:
                return refused
            if is_last_try(record, header.delay_level, most):
                await self._topics.retry_topics(header.group, dead=True)
            fields = {
                "group": header.group,
                "topic": record.topic,
                "queue": record.queue_id,
                "queue_offset": record.queue_offset,
                "physical_offset": header.offset,
                "delay_level": max(TO_DEAD_LETTERS, min(header.delay_level, MAX_LEVEL)),
                "max_retries": max(0, min(most, _MOST_TRIES)),
            }
            try:
                answer, _ = await self._node.exchange(self._node.line("writer"), "send_back", fields, (b"",))
            except ProtocolError as error:
                if error.code != "TOPIC_NOT_EXIST":
                    raise
                # A message that has no room for another try becomes a dead letter before its last one.
                await self._topics.retry_topics(header.group, dead=True)
                answer, _ = await self._node.exchange(self._node.line("writer"), "send_back", fields, (b"",))
            topic = record.properties.get(Property.RETRY_TOPIC, record.topic)
            dead_of = (header.origin_topic or "null")[:MAX_NAME_CHARACTERS] if answer.get("dead") else None
            self._counting.sent_back(header.group, topic, record.total_size, dead_of)
        except ProtocolError as error:
            if error.code == "NO_PERMISSION" and await self._keeps_none(header.group):
                return command.answer()
            raise
        return command.answer()

    async def _keeps_none(self, group: str) -> bool:
        """Whether the group keeps no failed messages. Any other refusal must reach the client: it would drop the message."""
        try:
            answer = await self._node.ask("coordinator", "group.config", group=group)  # the present ones
            return int(answer["config"].get("retryQueueNums", 1)) <= 0
        except ProtocolError:
            return False


_TIMEOUT_S: Final = 10.0
_REGION: Final = {"MSG_REGION": "DefaultRegion"}
_ILLEGAL: Final = ResponseCode.ILLEGAL_OPERATION


class RecallMessageProcessor:
    """RECALL_MESSAGE: a message that waits for its time shall not come (remoting 3.8).

    ``enable`` is RocketMQ's ``recallMessageEnable``.
    """

    def __init__(self, node: NodeClient, topics: TopicConfigManager, *, enable: bool) -> None:
        self._node, self._topics, self._enable = node, topics, enable
        self._most_ms = node.config.timer.max_delay_ms
        self.handlers: dict[RequestCode, Handler] = {RequestCode.RECALL_MESSAGE: self.recall}

    async def recall(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 370."""
        header = RecallMessageRequestHeader.decode(command.ext_fields)
        code, remark, unique = await self._recall(header)
        fields = dict(_REGION)
        if unique:
            fields["msgId"] = unique
        return command.answer(code, remark, ext_fields=fields)

    async def _recall(self, header: RecallMessageRequestHeader) -> tuple[int, str | None, str]:
        """Code and remark, and with SUCCESS the unique key of the message. In RocketMQ's order."""
        if not self._enable:
            return ResponseCode.NO_PERMISSION, "recall failed, operation is forbidden", ""
        if self._topics.get(header.topic) is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{header.topic}] not exist", ""
        try:
            handle = RecallHandle.decode(header.recall_handle)
        except InvalidMessageError:
            return _ILLEGAL, "recall handle is invalid", ""
        if handle.topic != header.topic:
            return _ILLEGAL, "recall failed, topic not match", ""
        if handle.broker_name != self._node.config.network.broker_name:
            return _ILLEGAL, "recall failed, broker service not available", ""
        left_ms = handle.deliver_ms - time.time_ns() // 1_000_000
        if not 0 < left_ms < self._most_ms:
            return _ILLEGAL, "recall failed, timestamp invalid", ""
        fields = {"topic": header.topic, "handle": header.recall_handle}
        if header.producer_group:
            fields["group"] = header.producer_group
        line = self._node.line("writer")
        try:
            await self._node.exchange(line, "recall", fields, (RECALL_BODY,), timeout_s=_TIMEOUT_S)
        except ProtocolError as error:
            if error.code == "ILLEGAL_OPERATION":  # too late for the timer to see it in time
                return _ILLEGAL, "recall failed, timestamp invalid", ""
            return *refusal_of(error), ""
        return ResponseCode.SUCCESS, None, handle.unique_key


_SPECIAL: Final = frozenset(SPECIAL_PROPERTIES)
_PRIORITY: Final = re.compile(f"(?:^|(?<=\x02)){Property.PRIORITY}\x01[^\x02]*(?:\x02|$)")


class SendMessageProcessor:
    """The send requests."""

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
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
        self.expects_reply: Callable[[RemotingConnection, dict[str, str]], None] = lambda connection, properties: None
        """Is called with connection and properties of each request whose sender waits for a reply."""
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.SEND_MESSAGE: self.handle,
            RequestCode.SEND_MESSAGE_V2: self.handle,
            RequestCode.SEND_BATCH_MESSAGE: self.handle,
        }

    # ------------------------------------------------------------ requests

    def handle(self, connection: RemotingConnection, command: Command) -> Command | Awaitable[Command | None] | None:
        """Take one send. Its answer is sent when the messages are stored."""
        self._topics.sync()
        known = self._targets.known(connection, command, self._topics.version)
        if known is None:
            return self._handle_new(connection, command)
        try:
            self._put(connection, command, *known)
        except SendRefusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        return None

    def _handle_new(
        self, connection: RemotingConnection, command: Command
    ) -> Command | Awaitable[Command | None] | None:
        """A send that is not like an earlier one."""
        header = decode_send(command.ext_fields)
        topic = self._topics.get(header.topic)
        if topic is None or header.topic.startswith(_RETRY):
            return self._handle_slowly(connection, command, header, topic)
        try:
            self._take(connection, command, header, topic, is_usual=True)
        except SendRefusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        return None

    async def _handle_slowly(
        self,
        connection: RemotingConnection,
        command: Command,
        header: SendMessageRequestHeader,
        topic: TopicConfig | None,
    ) -> Command | None:
        """A send to a topic that has to be made first, or to a retry topic."""
        try:
            if header.topic.startswith(_RETRY):
                if is_batch(command.code, header):
                    raise SendRefusal(
                        ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {header.topic}"
                    )
                topic = await self._retries.place(connection, header, command.version)
            elif topic is None:
                topic = await self._created(connection, header)
            self._take(connection, command, header, topic)
        except SendRefusal as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=dict(SEND_FIELDS))
        except ProtocolError as error:
            return command.answer(*refusal_of(error), ext_fields=dict(SEND_FIELDS))
        return None

    async def _created(self, connection: RemotingConnection, header: SendMessageRequestHeader) -> TopicConfig:
        """The topic of a send, made if its template lets sends make topics. Raises SendRefusal, ProtocolError."""
        check_name(header.topic)
        template = self._topics.template(header.default_topic)
        if template is None:
            raise SendRefusal(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please!{FAQ}"
            )
        self._allowances.topic(connection, header.topic)
        most, perm = template
        is_own = header.topic in self._topics.own_names
        queues = 1 if is_own else max(1, min(header.default_topic_queue_nums, most))
        return await self._topics.create(header.topic, queues, perm=perm, user=connection.user)

    async def stored(
        self,
        connection: RemotingConnection,
        command: Command,
        header: SendMessageRequestHeader,
        topic: TopicConfig,
        body: bytes,
    ) -> Command:
        """Store one message; its answer. Raises SendRefusal."""
        answer: asyncio.Future[Command] = self._loop.create_future()
        one = replace(command, body=body, code=int(RequestCode.SEND_MESSAGE))
        self._take(connection, one, header, topic, answer)
        return await answer

    # ------------------------------------------------------------ runs

    def _take(
        self,
        connection: RemotingConnection,
        command: Command,
        header: SendMessageRequestHeader,
        topic: TopicConfig,
        answer: asyncio.Future[Command] | None = None,
        *,
        is_usual: bool = False,
    ) -> None:
        """Store the messages of a request whose fields are decoded. ``is_usual``: the next ones with these fields may go the
        same way, without a look at them. Raises SendRefusal.
        """
        queue = header.queue_id
        if queue >= max(topic.write_queues, topic.read_queues):
            peer = f"{connection.peer[0]}:{connection.peer[1]}"
            remark = f"request queueId[{queue}] is illegal, {topic_text(topic)} Producer: {peer}"
            raise SendRefusal(ResponseCode.INVALID_PARAMETER, remark)
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
        connection: RemotingConnection,
        command: Command,
        target: SendTarget,
        born_ms: int,
        text: str,
        answer: asyncio.Future[Command] | None = None,
    ) -> None:
        """Put the messages of a request into a run. Raises SendRefusal."""
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
        waiting = PendingRequest(connection, command, done.unique, len(record), answer, counted=counted)
        if counted:
            self._runs.add_alone(key, record, waiting)
        else:
            self._runs.add(key, record, waiting)

    def _completed(
        self, connection: RemotingConnection, text: str, topic: str
    ) -> tuple[CompletedProperties, tuple[str, ...]]:
        """The properties of any single message with what a broker adds (spec 5.4). If it waits somewhere first: the topics in
        whose statistics it counts. Raises SendRefusal.
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
            raise SendRefusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        return CompletedProperties(encoded, properties[Property.UNIQUE_KEY], waits), counted

    def _illegal(self, error: MessageIllegalError) -> SendRefusal:
        return SendRefusal(
            ResponseCode.MESSAGE_ILLEGAL,
            "the message is illegal, maybe msg body or properties length not matched. msg body length limit "
            f"{self._check.max_message_bytes}B, msg properties length limit 32KB. {error}",
        )

    def _put_batch(
        self,
        connection: RemotingConnection,
        command: Command,
        target: SendTarget,
        born_ms: int,
        text: str,
        answer: asyncio.Future[Command] | None,
    ) -> None:
        """A batch: one run of a record for each message, or one record. Raises SendRefusal."""
        properties = _decoded(text, target.topic)
        key = target.memory if properties.get("WAIT") == "false" else target.flushed
        unique = properties.get(Property.UNIQUE_KEY)
        if target.is_inner:
            self._send_inner_batch(connection, command, key, properties, born_ms)
            return
        try:
            run, sizes = target.form.batch(command.body, born_ms)
        except MessageIllegalError as error:
            raise SendRefusal(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        self._runs.add(key, run, PendingRequest(connection, command, unique, sizes, answer))

    def _send_inner_batch(
        self, connection: RemotingConnection, command: Command, key: RunKey, properties: dict[str, str], born_ms: int
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
        waiting = PendingRequest(connection, command, properties.get(Property.UNIQUE_KEY), 0, is_inner_batch=True)
        self._runs.send_batch(key, fields, command.body, waiting)


def _rates(node: NodeClient) -> int:
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
