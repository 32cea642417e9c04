"""Administration of topics: requests 17, 18, 21, 202, 215, 305 and 351 (remoting 1.8)."""

from __future__ import annotations

import time
from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.format.constants import RETRY_PREFIX
from commitmq.semantics.retry import pop_retry_topic
from commitmq.store.metadata.topic_name import is_send_forbidden
from commitmq_plugins.rocketmq.broker.admin_queues import Queues
from commitmq_plugins.rocketmq.broker.codes import refusal_of
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.names import topic_refusal
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.registration import Registration, remoting_config
from commitmq_plugins.rocketmq.broker.system_topics import SYSTEM_PREFIX, SYSTEM_TOPICS
from commitmq_plugins.rocketmq.broker.topic_attributes import AttributesError, merged, parse
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.bodies.data_version import DataVersion
from commitmq_plugins.rocketmq.remoting.bodies.routes import topic_list
from commitmq_plugins.rocketmq.remoting.bodies.stats import TopicOffset, topic_stats_table
from commitmq_plugins.rocketmq.remoting.bodies.topic_config import TopicConfig, TopicConfigSerializeWrapper
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue, as_list, dumps, load_object
from commitmq_plugins.rocketmq.remoting.headers.topics import CreateTopicRequestHeader, TopicRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_DELETE_S: Final = 30.0


class AdminTopics:
    """See the module. Name servers know a new or changed topic before the answer goes."""

    def __init__(
        self, node: Node, topics: Topics, queues: Queues, registration: Registration, counting: Counting
    ) -> None:
        self._node, self._topics, self._queues, self._registration = node, topics, queues, registration
        self._counting = counting
        network = node.config.network
        self._broker_name, self._cluster_name = network.broker_name, network.cluster_name
        self._started_ms = time.time_ns() // 1_000_000
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.update,
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: self.update_list,
            RequestCode.GET_ALL_TOPIC_CONFIG: self.all,
            RequestCode.GET_TOPIC_STATS_INFO: self.stats,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.delete,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.system,
            RequestCode.GET_TOPIC_CONFIG: self.one,
        }

    # ------------------------------------------------------------ changes

    async def update(self, connection: Connection, command: Command) -> Command:
        """Request 17."""
        header = CreateTopicRequestHeader.decode(command.ext_fields)
        topic = TopicConfig(
            header.topic,
            header.read_queue_nums,
            header.write_queue_nums,
            header.perm,
            header.topic_filter_type,
            header.topic_sys_flag,
            header.order,
        )
        try:
            refused = self._refused(header.topic)
            if refused is not None:
                return command.answer(ResponseCode.INVALID_PARAMETER, refused)
            topic.attributes = parse(header.attributes)
            if topic.attributes.get("+message.type") == "MIXED":
                return command.answer(ResponseCode.INVALID_PARAMETER, "MIXED message type is not supported.")
            await self._put(connection, topic)
        except (ProtocolError, AttributesError) as error:
            return self._failed(command, error)
        await self._registration.settle()
        return command.answer()

    async def update_list(self, connection: Connection, command: Command) -> Command:
        """Request 18. The first topic that is wrong refuses all of them."""
        wanted = as_list(load_object(command.body).get("topicConfigList"), "topicConfigList")
        topics = [TopicConfig.from_json(one) for one in wanted]
        for topic in topics:
            refused = self._refused(topic.topic_name)
            if refused is not None:
                return command.answer(ResponseCode.INVALID_PARAMETER, refused)
            if topic.attributes.get("+message.type") == "MIXED":
                return command.answer(ResponseCode.INVALID_PARAMETER, "MIXED message type is not supported.")
        try:
            for topic in topics:
                await self._put(connection, topic)
        except (ProtocolError, AttributesError) as error:
            return self._failed(command, error)
        await self._registration.settle()
        return command.answer()

    @staticmethod
    def _failed(command: Command, error: ProtocolError | AttributesError) -> Command:
        """RocketMQ answers what it does not take of a topic's settings with SYSTEM_ERROR."""
        if isinstance(error, ProtocolError) and error.code != "INVALID_PARAMETER":
            return command.answer(*refusal_of(error))
        return command.answer(ResponseCode.SYSTEM_ERROR, str(error))

    def _refused(self, name: str) -> str | None:
        """Why no topic of this name can be made or changed."""
        return topic_refusal(name) or self._conflict(name)

    def _conflict(self, name: str) -> str | None:
        """Why a topic of the broker itself stays as it is."""
        if is_send_forbidden(name) or name.startswith(SYSTEM_PREFIX) or name in self._system_topics():
            return f"The topic[{name}] is conflict with system topic."
        return None

    async def _put(self, connection: Connection, topic: TopicConfig) -> None:
        """Make the topic, or give it these settings. Raises ProtocolError, AttributesError."""
        known = self._topics.get(topic.topic_name)
        fields: dict[str, Any] = {
            "topic": topic.topic_name,
            "read_queues": topic.read_queue_nums,
            "write_queues": topic.write_queue_nums,
            "perm": topic.perm,
            "filter_type": topic.topic_filter_type,
            "sys_flag": topic.topic_sys_flag,
            "order": topic.order,
            "attributes": merged(None if known is None else known.settings, topic.attributes),
            "update": True,
        }
        more = self._node.on_behalf_of("topic.create", connection.user, connection.peer[0])
        await self._node.ask("coordinator", "topic.create", **fields, **more)

    async def delete(self, connection: Connection, command: Command) -> Command:
        """Request 215: with the topic go the retry topics of the groups that shared its queues."""
        name = command.ext_fields.get("topic", "")
        refused = self._conflict(name) if name.strip() else "The specified topic is blank."
        if refused is not None:
            return command.answer(ResponseCode.INVALID_PARAMETER, refused)
        try:
            described = await self._node.ask("coordinator", "topic.describe", topic=name)
            names = [name]
            for group in described["topic"]["groups"]:
                names += [pop_retry_topic(name, group, v2=True)]
                if not await self._is_group(f"{group}_{name}"):  # whose own retry topic has the name of the other form
                    names += [pop_retry_topic(name, group)]
            for one in names:
                if self._topics.get(one) is not None:
                    await self._node.ask("coordinator", "topic.delete", topic=one, timeout_s=_DELETE_S)
        except ProtocolError as error:
            if error.code not in ("TOPIC_NOT_EXIST", "INVALID_PARAMETER"):  # (no topic has a name that is wrong)
                raise
        await self._registration.settle()
        return command.answer()

    async def _is_group(self, name: str) -> bool:
        """Raises ProtocolError."""
        if self._topics.get(RETRY_PREFIX + name) is None:
            return False
        try:
            await self._node.ask("coordinator", "group.config", group=name)
        except ProtocolError as error:
            if error.code != "GROUP_NOT_EXIST":
                raise
            return False
        return True

    # ------------------------------------------------------------ questions

    def all(self, connection: Connection, command: Command) -> Command:
        """Request 21. All topics and their number: a client that asks for pages then has them all with the first."""
        topics = self._registration.topics()
        body = dumps(TopicConfigSerializeWrapper(topics, self._version()).to_json())
        return command.answer(ext_fields={"totalTopicNum": str(len(topics))}, body=body)

    def _version(self) -> DataVersion:
        return DataVersion(self._started_ms, self._topics.version)

    def config(self, name: str) -> TopicConfig | None:
        """A topic, or one of those that only name servers have."""
        found = self._topics.get(name)
        if found is not None:
            return remoting_config(found)
        return self._registration.topics().get(name) if name in self._system_topics() else None

    def one(self, connection: Connection, command: Command) -> Command:
        """Request 351."""
        header = TopicRequestHeader.decode(command.ext_fields)
        found = self.config(header.topic)
        if found is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {header.topic}")
        return command.answer(body=dumps(found.to_json()))

    async def stats(self, connection: Connection, command: Command) -> Command:
        """Request 202: the bounds of each queue, and when its last message was stored."""
        header = TopicRequestHeader.decode(command.ext_fields)
        found = self.config(header.topic)
        if found is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
        count = max(found.read_queue_nums, found.write_queue_nums)
        bounds = await self._queues.bounds(header.topic, count)
        last = await self._queues.times(header.topic, {queue: end - 1 for queue, (_, end) in bounds.items() if end})
        table = {
            MessageQueue(header.topic, self._broker_name, queue): TopicOffset(least, end, last.get(queue, 0))
            for queue, (least, end) in bounds.items()
        }
        rate = self._counting.rate("TOPIC_PUT_NUMS", header.topic)
        return command.answer(body=topic_stats_table(table, rate))

    def _system_topics(self) -> list[str]:
        cluster = self._cluster_name
        return [*SYSTEM_TOPICS, cluster, self._broker_name, f"{cluster}_REPLY_TOPIC", f"rmq_sys_REVIVE_LOG_{cluster}",
                f"rmq_sys_SYNC_BROKER_MEMBER_{self._broker_name}"]  # fmt: skip

    def system(self, connection: Connection, command: Command) -> Command:
        """Request 305."""
        return command.answer(body=topic_list(self._system_topics()))
