"""Failed messages of RocketMQ's consumers: CONSUMER_SEND_MSG_BACK, and plain sends to retry topics (remoting 3.6, 3.7)."""

from __future__ import annotations

import time
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.format.constants import Property
from commitmq.format.unique_ids import UniqueIds
from commitmq.security.needs import SUB
from commitmq.semantics.delay import MAX_LEVEL
from commitmq.semantics.retry import TO_DEAD_LETTERS, is_last_try
from commitmq.semantics.stored_topics import topics_of
from commitmq.store.metadata.topic_config import TopicConfig
from commitmq_plugins.rocketmq.broker.access import Access
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.locks import QueueLocks
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.stored_record import stored_record
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.codes import V3_4_9, RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import MAX_NAME_CHARACTERS
from commitmq_plugins.rocketmq.remoting.headers.sending import (
    ConsumerSendMsgBackRequestHeader,
    SendMessageRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_RETRY: Final = "%RETRY%"
_DEAD: Final = "%DLQ%"
_SETTINGS_S: Final = 5.0
_MOST_TRIES: Final = 1 << 30  # of a request to the writer; consumers in order send 2^31 - 1


class Retries:
    """See the module. Settings of groups are asked for every few seconds."""

    def __init__(
        self, node: Node, topics: Topics, clients: Clients, locks: QueueLocks, counting: Counting, access: Access
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

    async def place(self, connection: Connection, header: SendMessageRequestHeader, version: int) -> TopicConfig:
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

    async def send_back(self, connection: Connection, command: Command) -> Command:
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
