"""Administration of connected clients: requests 203, 204, 223, 300, 307, 309, 328, 343 and 345 (remoting 1.9).

307 and 309 are passed on to the client, and its answer is passed back unread.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from commitmq.errors import ProtocolError
from commitmq.format.message_id import parse_offset_message_id
from commitmq.format.record import decode_record
from commitmq.security.needs import SUB
from commitmq.semantics.stored_topics import topics_of
from commitmq_plugins.rocketmq.broker.access import Access
from commitmq_plugins.rocketmq.broker.admin_offsets import topics_of_group
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.registry import Member
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.bodies.connections import (
    ClientConnection,
    ConsumerConnection,
    producer_connection,
    producer_table,
)
from commitmq_plugins.rocketmq.remoting.bodies.routes import topic_list
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command, request
from commitmq_plugins.rocketmq.remoting.errors import PeerGoneError, PeerSilentError, RemotingError
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, load_object, queue_map, without_none
from commitmq_plugins.rocketmq.remoting.headers.groups import (
    ConsumeMessageDirectlyResultRequestHeader,
    ConsumerGroupRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GroupRequestHeader,
    GroupTopicRequestHeader,
    ProducerGroupRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.headers.header import Header
from commitmq_plugins.rocketmq.remoting.headers.reading import GetConsumerStatusRequestHeader
from commitmq_plugins.rocketmq.remoting.headers.topics import TopicRequestHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

_RELAY_S: Final = 10.0
_STATUS_S: Final = 5.0


class AdminClients:
    """See the module."""

    def __init__(self, node: Node, topics: Topics, clients: Clients, access: Access, address: str) -> None:
        self._node, self._topics, self._clients, self._address = node, topics, clients, address
        self._access = access
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self.all_producers,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    # ------------------------------------------------------------ lists

    def consumers(self, connection: Connection, command: Command) -> Command:
        """Request 203."""
        name = ConsumerGroupRequestHeader.decode(command.ext_fields).consumer_group
        group = self._clients.registry.groups.get(name)
        if group is None:
            return command.answer(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        body = ConsumerConnection(
            [_client(link, member) for link, member in group.members.items()],
            dict(group.subscriptions),
            group.consume_type,
            group.message_model,
            group.consume_from_where,
        )
        return command.answer(body=body.encode())

    def producers(self, connection: Connection, command: Command) -> Command:
        """Request 204."""
        name = ProducerGroupRequestHeader.decode(command.ext_fields).producer_group
        members = self._clients.registry.producers.get(name)
        if not members:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return command.answer(body=producer_connection(_client(link, one) for link, one in members.items()))

    def all_producers(self, connection: Connection, command: Command) -> Command:
        """Request 328."""
        table = {
            group: [_client(link, one) for link, one in members.items()]
            for group, members in self._clients.registry.producers.items()
        }
        return command.answer(body=producer_table(table))

    async def groups_of_topic(self, connection: Connection, command: Command) -> Command:
        """Request 300: groups that subscribe to a topic, or have offsets in it."""
        topic = TopicRequestHeader.decode(command.ext_fields).topic
        found = {name for name, group in self._clients.registry.groups.items() if topic in group.subscriptions}
        try:
            found.update((await self._node.ask("coordinator", "topic.describe", topic=topic))["topic"]["groups"])
        except ProtocolError as error:
            if error.code != "TOPIC_NOT_EXIST":
                raise
        return command.answer(body=dumps({"groupList": sorted(found)}))

    async def topics_of_group(self, connection: Connection, command: Command) -> Command:
        """Request 343."""
        group = GroupRequestHeader.decode(command.ext_fields).group
        found = await topics_of_group(self._node, group)
        return command.answer(body=topic_list(found, self._address))

    def subscription(self, connection: Connection, command: Command) -> Command:
        """Request 345."""
        header = GroupTopicRequestHeader.decode(command.ext_fields)
        group = self._clients.registry.groups.get(header.group)
        found = None if group is None else group.subscriptions.get(header.topic)
        body = {
            "group": header.group,
            "subscriptionData": None if found is None else found.to_json(),
            "topic": header.topic,
        }
        return command.answer(body=dumps(without_none(body)))

    # ------------------------------------------------------------ questions to clients

    async def status(self, connection: Connection, command: Command) -> Command:
        """Request 223: asks each client of a group where it is in the queues of a topic."""
        header = GetConsumerStatusRequestHeader.decode(command.ext_fields)
        group = self._clients.registry.groups.get(header.group)
        if group is None:
            remark = f"No Any Consumer online in the consumer group: [{header.group}]"
            return command.answer(ResponseCode.SYSTEM_ERROR, remark)
        members = [
            (link, one) for link, one in group.members.items() if header.client_addr in (None, "", one.client_id)
        ]
        fields = {"topic": header.topic, "group": header.group}
        asked = [
            link.request(request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, fields), _STATUS_S) for link, _ in members
        ]
        table = {}
        for (_, member), answer in zip(members, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, Command) and answer.code == ResponseCode.SUCCESS:
                offsets = load_object(answer.body).get("messageQueueTable") or {}
                table[member.client_id] = queue_map(offsets)
            elif isinstance(answer, BaseException) and not isinstance(answer, RemotingError):
                raise answer
        return command.answer(body=dumps({"consumerTable": table, "messageQueueTable": {}}))

    async def running_info(self, connection: Connection, command: Command) -> Command:
        """Request 307."""
        header = GetConsumerRunningInfoRequestHeader.decode(command.ext_fields)
        return await self._relay(command, header.consumer_group, header.client_id, header, b"")

    async def consume_directly(self, connection: Connection, command: Command) -> Command:
        """Request 309: a client handles one message now."""
        header = ConsumeMessageDirectlyResultRequestHeader.decode(command.ext_fields)
        header.broker_name = self._node.config.network.broker_name
        topic = self._topics.get(header.topic) if header.topic else None
        if topic is not None:
            header.topic_sys_flag = topic.sys_flag
        try:
            answer = await self._node.ask("coordinator", "group.config", group=header.consumer_group)
            header.group_sys_flag = int(answer["config"].get("groupSysFlag", 0))
            _, offset = parse_offset_message_id(header.msg_id or "")
            line = self._node.line("reader-0")
            _, frames = await self._node.exchange(line, "view", {"physical_offset": offset})
            stored = decode_record(b"".join(frames), check_crc=False)
            topics = topics_of(stored.topic, stored.properties)
            if (refused := self._access.lacks(connection, command, topics, SUB)) is not None:
                return refused
        except ValueError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"the message id is wrong: {error}")
        except ProtocolError as error:
            if error.code != "GROUP_NOT_EXIST":
                return command.answer(ResponseCode.SYSTEM_ERROR, error.message)
            frames = []
        return await self._relay(command, header.consumer_group, header.client_id or "", header, b"".join(frames))

    async def _relay(self, command: Command, group: str, client_id: str, header: Header, body: bytes) -> Command:
        """Ask the client, with the fields of ``header`` and no other field of the request: with its signature the client could
        act as the one who asks. (RocketMQ's broker passes all of them on.)
        """
        link = self._clients.registry.member(group, client_id)
        if link is None:
            return command.answer(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        try:
            answer = await link.request(request(RequestCode(command.code), header.encode(), body), _RELAY_S)
        except (PeerGoneError, PeerSilentError) as error:
            remark = f"consumer <{group}> <{client_id}> Timeout: {error}"
            return command.answer(ResponseCode.CONSUME_MSG_TIMEOUT, remark)
        return command.answer(answer.code, answer.remark, ext_fields=dict(answer.ext_fields), body=answer.body)


def _client(link: Connection, member: Member) -> ClientConnection:
    ago_ms = time.monotonic_ns() // 1_000_000 - member.heard_ms
    heard_ms = time.time_ns() // 1_000_000 - ago_ms
    return ClientConnection(member.client_id, link.name, member.language, member.version, heard_ms)
