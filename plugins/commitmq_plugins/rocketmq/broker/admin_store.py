"""Administration of what is stored: topics, queues, groups and offsets.

Changes of a topic's attributes as RocketMQ's tools write them: ``+name=value,-name`` (remoting 1.8). Pure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from commitmq.errors import CommitMQError, ProtocolError
from commitmq.format.constants import RETRY_PREFIX
from commitmq.security.native_rights import SUB_GET, SUB_UPDATE
from commitmq.semantics.retry import pop_retry_topic
from commitmq.store.metadata.topic_config import is_send_forbidden
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.counting import SYSTEM_PREFIX, SYSTEM_TOPICS, Counting
from commitmq_plugins.rocketmq.broker.name_servers import RegistrationService, remoting_config
from commitmq_plugins.rocketmq.broker.node import NodeClient, group_refusal, refusal_of, topic_refusal
from commitmq_plugins.rocketmq.broker.offsets import READ, GroupReads, Offsets, all_settings
from commitmq_plugins.rocketmq.broker.pulling import PullMessageProcessor
from commitmq_plugins.rocketmq.broker.rights import Access
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.bodies import (
    ConsumeStats,
    OffsetWrapper,
    RemotingDataVersion,
    RemotingTopicConfig,
    TopicConfigSerializeWrapper,
    TopicOffset,
    reset_offset_body,
    topic_list,
    topic_stats_table,
)
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import RemotingMessageQueue, as_list, as_object, dumps, load_object
from commitmq_plugins.rocketmq.remoting.frame import BodyError, Command
from commitmq_plugins.rocketmq.remoting.headers import (
    CloneGroupOffsetRequestHeader,
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetConsumeStatsInBrokerHeader,
    GetConsumeStatsRequestHeader,
    GroupRequestHeader,
    GroupTopicRequestHeader,
    ResetOffsetRequestHeader,
    TopicRequestHeader,
    UpdateGroupForbiddenRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

Bounds = dict[int, tuple[int, int]]
"""Smallest offset and end of each queue."""


class Queues:
    """What administration needs to know of queues: their bounds and the times of their messages."""

    def __init__(self, node: NodeClient, offsets: Offsets) -> None:
        self._node, self._offsets = node, offsets

    async def bounds(self, topic: str, count: int) -> Bounds:
        """Of queues 0 to ``count`` - 1; zeros for what was never written. Raises ProtocolError."""
        found = dict.fromkeys(range(count), (0, 0))
        try:
            answer, _ = await self._node.exchange(self._node.line("reader-0"), "offsets", {"topic": topic})
        except ProtocolError as error:
            if error.code == "SERVICE_NOT_AVAILABLE":
                raise
            return found
        found.update({int(queue): (int(least), int(end)) for queue, least, end, _ in answer["queues"] if queue < count})
        return found

    async def times(self, topic: str, offsets: dict[int, int]) -> dict[int, int]:
        """When the message at an offset of each queue was stored, in ms; -1 where there is none."""
        found = await asyncio.gather(*(self._time(topic, queue, offset) for queue, offset in offsets.items()))
        return dict(zip(offsets, found, strict=True))

    async def _time(self, topic: str, queue: int, offset: int) -> int:
        return -1 if offset < 0 else await self._offsets.store_time(topic, queue, offset)

    async def by_time(self, topic: str, count: int, timestamp: int) -> dict[int, int]:
        """The offset of each queue for a time; its end for a time below 0. Raises ProtocolError."""
        if timestamp < 0:
            return {queue: end for queue, (_, end) in (await self.bounds(topic, count)).items()}
        answer, _ = await self._node.exchange(
            self._node.line("reader-0"), "offsets", {"topic": topic, "timestamp": timestamp}
        )
        found = dict.fromkeys(range(count), 0)
        found.update({int(queue): int(at or 0) for queue, _, _, at in answer["queues"] if queue < count})
        return found


class AdminOffsets:
    """Administration of offsets: requests 43, 208, 222, 303, 314 and 317 (remoting 1.9, 1.10)."""

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        clients: ClientManager,
        offsets: Offsets,
        pulls: PullMessageProcessor,
        queues: Queues,
        counting: Counting,
        access: Access,
        address: str,
    ) -> None:
        self._node, self._topics, self._clients, self._offsets = node, topics, clients, offsets
        self._pulls, self._queues, self._counting = pulls, queues, counting
        self._access, self._address = access, address
        self._broker_name = node.config.network.broker_name
        self._stats: dict[bool, asyncio.Future[bytes]] = {}
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.all,
            RequestCode.GET_CONSUME_STATS: self.stats,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self.time_span,
            RequestCode.CLONE_GROUP_OFFSET: self.clone,
            RequestCode.GET_BROKER_CONSUME_STATS: self.broker_stats,
        }

    def _queue(self, topic: str, queue: int) -> RemotingMessageQueue:
        return RemotingMessageQueue(topic, self._broker_name, queue)

    def _subscribes(self, group: str, topic: str) -> bool:
        """Whether the topic counts for the group: its clients subscribe to it, or to nothing."""
        found = self._clients.registry.groups.get(group)
        return found is None or not found.subscriptions or topic in found.subscriptions

    async def _progress(self, group: str, topic: str, count: int) -> ConsumeStats:
        """The progress of a group in queues 0 to ``count`` - 1 of a topic. Raises ProtocolError."""
        bounds = await self._queues.bounds(topic, count)
        committed = await self._offsets.fetch(group, [(topic, queue) for queue in bounds])
        at = {queue: max(0, committed.get((topic, queue), -1)) for queue in bounds}
        times = await self._queues.times(topic, {queue: offset - 1 for queue, offset in at.items() if offset})
        return ConsumeStats(
            {
                self._queue(topic, queue): OffsetWrapper(
                    end,
                    at[queue],
                    max(at[queue], self._pulls.pulled.get((group, topic, queue), 0)),
                    max(0, times.get(queue, 0)),
                )
                for queue, (_, end) in bounds.items()
            },
            self._counting.rate("GROUP_GET_NUMS", f"{topic}@{group}"),
        )

    async def stats(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 208."""
        header = GetConsumeStatsRequestHeader.decode(command.ext_fields)
        group = header.consumer_group
        found = ConsumeStats()
        wanted = [one for one in (header.topic_list or "").split(";") if one.strip()]
        if not wanted:
            named = (header.topic or "").strip()
            await self._offsets.settle(group)
            wanted = [named] if named else await topics_of_group(self._node, group)
            wanted = [topic for topic in wanted if self._subscribes(group, topic)]
        for topic in dict.fromkeys(wanted):
            config = self._topics.get(topic)
            if config is not None and self._may_see(connection, group, topic):
                progress = await self._progress(group, topic, config.read_queues)
                found.offset_table |= progress.offset_table
                found.consume_tps += progress.consume_tps
        return command.answer(body=found.encode())

    def _may_see(self, connection: RemotingConnection, group: str, topic: str) -> bool:
        """Whether a user that may see ``group`` may see where it is in ``topic``; the group's own retries belong to it."""
        return topic == RETRY_PREFIX + group or self._access.may(connection, topic, SUB_GET)

    async def broker_stats(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 317: the progress of all groups. All who ask in the meantime get one answer: it has a question for
        each group.
        """
        only_ordered = GetConsumeStatsInBrokerHeader.decode(command.ext_fields).is_order
        task = self._stats.get(only_ordered)
        if task is None:
            task = self._stats[only_ordered] = asyncio.ensure_future(self._all_progress(only_ordered=only_ordered))
            task.add_done_callback(lambda _: self._stats.pop(only_ordered))
        return command.answer(body=await asyncio.shield(task))

    async def _all_progress(self, *, only_ordered: bool) -> bytes:
        rows: list[dict[str, Any]] = []
        total = inflight = 0
        for group in sorted((await all_settings(self._node))[0]):
            found = []
            for topic in await topics_of_group(self._node, group):
                config = self._topics.get(topic)
                if config is None or (only_ordered and not config.order) or not self._subscribes(group, topic):
                    continue
                progress = await self._progress(group, topic, config.write_queues)
                for one in progress.offset_table.values():
                    total += one.broker_offset - one.consumer_offset
                    inflight += max(0, one.pull_offset - one.consumer_offset)
                found.append(progress.to_json())
            rows.append({group: found})
        return dumps({"brokerAddr": self._address, "consumeStatsList": rows, "totalDiff": total,
                      "totalInflightDiff": inflight})  # fmt: skip

    async def reset(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 222: committed offsets are set at once, and clients are sent there by their next pull or pop."""
        header = ResetOffsetRequestHeader.decode(command.ext_fields)
        topic, group = self._topics.get(header.topic), header.group
        if topic is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} does not exist")
        try:
            await self._node.ask("coordinator", "group.config", group=group)
            count = max(topic.read_queues, topic.write_queues)
            if header.queue_id >= 0 and header.offset not in (None, -1):
                offset = int(header.offset or 0)
                least, end = (await self._queues.bounds(header.topic, count)).get(header.queue_id, (0, 0))
                if not least <= offset <= end + 1:
                    remark = f"Target offset {offset} not in consume queue range [{least}-{end}]"
                    return command.answer(ResponseCode.SYSTEM_ERROR, remark)
                wanted = {header.queue_id: offset}
            else:
                found = await self._queues.by_time(header.topic, count, header.timestamp)
                queues = [header.queue_id] if header.queue_id >= 0 else range(topic.read_queues)
                wanted = {queue: found.get(queue, 0) for queue in queues}
            await self._store(group, header.topic, wanted)
        except ProtocolError as error:
            if error.code == "GROUP_NOT_EXIST":
                return command.answer(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} does not exist")
            raise
        return command.answer(
            body=reset_offset_body({self._queue(header.topic, one): at for one, at in wanted.items()})
        )

    async def _store(self, group: str, topic: str, wanted: dict[int, int]) -> None:
        """First the commits of clients are held, then the coordinator has the new offsets. Raises ProtocolError."""
        for queue, offset in wanted.items():
            self._offsets.set_reset(group, topic, queue, offset)
        entries = [[topic, queue, offset] for queue, offset in wanted.items()]
        try:
            await self._node.ask("coordinator", "offset.commit", group=group, offsets=entries, reset=True, running=True)
        except ProtocolError:
            for queue in wanted:
                self._offsets.take_reset(group, topic, queue)
            raise

    async def time_span(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 303: times of the first, the last and the last consumed message of each queue."""
        header = GroupTopicRequestHeader.decode(command.ext_fields)
        topic = self._topics.get(header.topic)
        if topic is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
        rows = []
        bounds = await self._queues.bounds(header.topic, topic.write_queues)
        committed = await self._offsets.fetch(header.group, [(header.topic, queue) for queue in bounds])
        for queue, (least, end) in bounds.items():
            at = committed[header.topic, queue]
            wanted = {0: least if end else -1, 1: end - 1, 2: at - 1, 3: at if at < end else -1}
            first, last, consumed, following = (await self._queues.times(header.topic, wanted)).values()
            row = {
                "consumeTimeStamp": consumed if at > 0 else first,
                "maxTimeStamp": last,
                "messageQueue": self._queue(header.topic, queue).to_json(),
                "minTimeStamp": first,
                "delayTime": 0,
            }
            if at < end:
                row["delayTime"] = time.time_ns() // 1_000_000 - following
            rows.append(row)
        return command.answer(body=dumps({"consumeTimeSpanSet": rows}))

    async def clone(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 314: a group gets the offsets of another."""
        header = CloneGroupOffsetRequestHeader.decode(command.ext_fields)
        only = (header.topic or "").strip()
        await self._offsets.settle(header.src_group)
        entries: list[tuple[str, int, int]] = []
        for topic, queue, offset in await offsets_of_group(self._node, header.src_group):
            if (only and topic != only) or self._topics.get(topic) is None:
                continue
            if header.offline or self._subscribes(header.src_group, topic):
                entries.append((topic, queue, offset))
        topics = dict.fromkeys(topic for topic, _, _ in entries)
        if (refused := self._access.lacks(connection, command, topics, SUB_UPDATE)) is not None:
            return refused
        if entries:
            await self._node.ask("coordinator", "offset.commit", group=header.dest_group, offsets=entries,
                                 reset=True, running=True, partial=True)  # fmt: skip
        return command.answer()

    async def all(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 43: all offsets as ``consumerOffset.json`` has them."""
        table: dict[str, dict[str, int]] = {}
        after: list[Any] | None = None
        while True:
            answer = await self._node.ask("coordinator", "group.positions", after=after)
            for group, topic, queue, offset in answer["positions"]:
                table.setdefault(f"{topic}@{group}", {})[str(queue)] = offset
            if (after := answer["next"]) is None:
                break
        return command.answer(body=dumps({"offsetTable": table}))


async def offsets_of_group(node: NodeClient, group: str) -> list[tuple[str, int, int]]:
    """Topic, queue and committed offset of a group, by topic and queue; empty for an unknown group.

    Raises ProtocolError.
    """
    found: list[tuple[str, int, int]] = []
    after: list[Any] | None = None
    while True:
        try:
            answer = await node.ask("coordinator", "group.describe", group=group, after=after)
        except ProtocolError as error:
            if error.code == "GROUP_NOT_EXIST":
                return []
            raise
        found += [(topic, queue, offset) for topic, queue, offset in answer["group"]["offsets"]]
        if (after := answer["next"]) is None:
            return found


async def topics_of_group(node: NodeClient, group: str) -> list[str]:
    """The topics in which a group has offsets. Raises ProtocolError."""
    return list(dict.fromkeys(topic for topic, _, _ in await offsets_of_group(node, group)))


_DEFAULTS: Final[dict[str, Any]] = {
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "consumeBroadcastEnable": True,
    "consumeMessageOrderly": False,
    "retryQueueNums": 1,
    "retryMaxTimes": 16,
    "brokerId": 0,
    "whichBrokerWhenConsumeSlowly": 1,
    "notifyConsumerIdsChangedEnable": True,
    "groupSysFlag": 0,
    "consumeTimeoutMinute": 15,
    "groupRetryPolicy": {"type": "CUSTOMIZED"},
}
"""What a group gets for members that a request leaves out."""


class AdminGroups:
    """Administration of groups: requests 200, 201, 207, 225, 352 and 353 (remoting 1.9)."""

    def __init__(self, node: NodeClient, offsets: Offsets, reads: GroupReads) -> None:
        self._node, self._offsets, self._reads = node, offsets, reads
        self.offsets_gone: list[Callable[[str], None]] = []
        """Hear of a group whose offsets were deleted."""
        self.settings_changed: list[Callable[[str], None]] = [reads.forget]
        """Hear of a group whose settings changed, or which was deleted."""
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.update_list,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.one,
            RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: self.forbid,
        }

    async def update(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 200."""
        return (
            await self._update(connection, command, [load_object(command.body)]) if command.body else command.answer()
        )

    async def update_list(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 225."""
        wanted = as_list(load_object(command.body).get("groupConfigList"), "groupConfigList")
        return await self._update(connection, command, [as_object(one, "a group") for one in wanted])

    async def _update(self, connection: RemotingConnection, command: Command, groups: list[dict[str, Any]]) -> Command:
        for group in groups:
            name = group.get("groupName")
            refused = group_refusal(name if isinstance(name, str) else "")
            if refused is not None:
                return command.answer(ResponseCode.INVALID_PARAMETER, refused)
        try:
            for group in groups:
                await self._put(connection, group)
            await self._reads.sync()
        except BodyError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        await self._node.expect("pop")
        return command.answer()

    async def _put(self, connection: RemotingConnection, group: dict[str, Any]) -> None:
        """Raises ProtocolError, BodyError."""
        wanted = {name: group.get(name, default) for name, default in _DEFAULTS.items()}
        wanted = {name: _DEFAULTS[name] if value is None else value for name, value in wanted.items()}
        changes = as_object(group.get("attributes") or {}, "attributes")
        if changes:
            known: dict[str, Any] = {}
            try:
                known = (await self._node.ask("coordinator", "group.config", group=group["groupName"]))["config"]
            except ProtocolError as error:
                if error.code != "GROUP_NOT_EXIST":
                    raise
            wanted["attributes"] = _edited(known.get("attributes") or {}, changes)
        most = self._node.config.groups.max_group_settings_bytes
        if (size := len(dumps(wanted))) > most + len(dumps(_DEFAULTS)):  # not even worth a request to the coordinator
            raise BodyError(f"the settings of a group have {size} bytes (groups.max_group_settings_bytes: {most})")
        more = self._node.on_behalf_of("group.config", connection.user, connection.peer[0])
        await self._node.ask("coordinator", "group.config", group=group["groupName"], set=wanted, **more)
        for hear in self.settings_changed:
            hear(group["groupName"])

    async def all(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 201. All groups and their number: a client that asks for pages then has them all with the first."""
        groups, forbidden, version = await all_settings(self._node)
        body = {"dataVersion": version, "forbiddenTable": forbidden, "subscriptionGroupTable": groups}
        return command.answer(ext_fields={"totalGroupNum": str(len(groups))}, body=dumps(body))

    async def one(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 352. Where groups are made by themselves, an unknown one is made."""
        group = GroupRequestHeader.decode(command.ext_fields).group
        fields: dict[str, Any] = {}
        if self._node.config.groups.auto_create:
            fields = {"set": {}, **self._node.on_behalf_of("group.config", connection.user, connection.peer[0])}
        try:
            answer = await self._node.ask("coordinator", "group.config", group=group, **fields)
        except ProtocolError as error:
            if error.code == "GROUP_NOT_EXIST":
                return command.answer(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
            raise
        return command.answer(body=dumps(answer["config"]))

    async def delete(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 207: the settings of a group, and its offsets if asked."""
        header = DeleteSubscriptionGroupRequestHeader.decode(command.ext_fields)
        await self._node.ask("coordinator", "group.delete", group=header.group_name)
        await self._reads.sync()
        for hear in self.settings_changed:
            hear(header.group_name)
        if header.clean_offset:
            await self._offsets.settle(header.group_name)
            await self._node.ask("coordinator", "offset.forget", group=header.group_name)
            for hear in self.offsets_gone:
                hear(header.group_name)
        return command.answer()

    async def forbid(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 353: whether a group may read a topic; without ``readable`` only the answer."""
        header = UpdateGroupForbiddenRequestHeader.decode(command.ext_fields)
        fields: dict[str, Any] = {} if header.readable is None else {"readable": header.readable}
        answer = await self._node.ask("coordinator", "group.forbid", group=header.group, topic=header.topic, **fields)
        await self._reads.sync()
        readable = not int(answer["forbidden"]) & READ
        return command.answer(body=dumps({"group": header.group, "readable": readable, "topic": header.topic}))


def _edited(known: dict[str, Any], changes: dict[str, Any]) -> dict[str, str]:
    """The attributes after changes whose names have a sign in front; one without a sign is added."""
    found = {str(name): str(value) for name, value in known.items()}
    for name, value in changes.items():
        if name.startswith("-"):
            found.pop(name[1:], None)
        else:
            found[name.removeprefix("+")] = str(value)
    return found


_KNOWN: Final = ("queue.type", "cleanup.policy", "message.type", "reserve.time")
_FIXED: Final = ("queue.type", "cleanup.policy")


class AttributesError(CommitMQError):
    """A change that RocketMQ refuses, in its words."""


def parse(text: str | None) -> dict[str, str]:
    """The changes by name, each with its sign; an empty text for a removal. Raises AttributesError."""
    changes: dict[str, str] = {}
    for part in (text or "").split(","):
        if not part:
            continue
        name, equals, value = part.partition("=")
        if equals:
            if not name.startswith("+"):
                raise AttributesError(f"add/alter attribute format is wrong: {name}")
            if not value or "=" in value:
                raise AttributesError("kv string format wrong.")
        elif not name.startswith("-"):
            raise AttributesError(f"delete attribute format is wrong: {name}")
        if name in changes:
            raise AttributesError(f"key duplication: {name}")
        changes[name] = value
    return changes


def merged(known: Mapping[str, str] | None, changes: Mapping[str, str]) -> dict[str, str]:
    """The attributes of a topic after ``changes``; ``known`` is None for a new topic. Raises AttributesError."""
    found = dict(known or {})
    names: set[str] = set()
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        if name in names:
            raise AttributesError(f"alter duplication key. key: {name}")
        names.add(name)
        if sign not in ("+", "-"):
            raise AttributesError(f"wrong format key: {signed}")
        if name not in _KNOWN:
            raise AttributesError(f"unsupported key: {name}")
        if known is None and sign == "-":
            raise AttributesError(f"only add attribute is supported while creating topic. key: {name}")
        if known is not None and name in _FIXED:
            raise AttributesError(f"attempt to update an unchangeable attribute. key: {name}")
        if sign == "+":
            found[name] = value
        elif name not in found:
            raise AttributesError(f"attempt to delete a nonexistent key: {name}")
        else:
            del found[name]
    return found


_DELETE_S: Final = 30.0


class AdminTopics:
    """Administration of topics: requests 17, 18, 21, 202, 215, 305 and 351 (remoting 1.8).

    Name servers know a new or changed topic before the answer goes.
    """

    def __init__(
        self,
        node: NodeClient,
        topics: TopicConfigManager,
        queues: Queues,
        registration: RegistrationService,
        counting: Counting,
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

    async def update(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 17."""
        header = CreateTopicRequestHeader.decode(command.ext_fields)
        topic = RemotingTopicConfig(
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

    async def update_list(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 18. The first topic that is wrong refuses all of them."""
        wanted = as_list(load_object(command.body).get("topicConfigList"), "topicConfigList")
        topics = [RemotingTopicConfig.from_json(one) for one in wanted]
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

    async def _put(self, connection: RemotingConnection, topic: RemotingTopicConfig) -> None:
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

    async def delete(self, connection: RemotingConnection, command: Command) -> Command:
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

    def all(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 21. All topics and their number: a client that asks for pages then has them all with the first."""
        topics = self._registration.topics()
        body = dumps(TopicConfigSerializeWrapper(topics, self._version()).to_json())
        return command.answer(ext_fields={"totalTopicNum": str(len(topics))}, body=body)

    def _version(self) -> RemotingDataVersion:
        return RemotingDataVersion(self._started_ms, self._topics.version)

    def config(self, name: str) -> RemotingTopicConfig | None:
        """A topic, or one of those that only name servers have."""
        found = self._topics.get(name)
        if found is not None:
            return remoting_config(found)
        return self._registration.topics().get(name) if name in self._system_topics() else None

    def one(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 351."""
        header = TopicRequestHeader.decode(command.ext_fields)
        found = self.config(header.topic)
        if found is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {header.topic}")
        return command.answer(body=dumps(found.to_json()))

    async def stats(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 202: the bounds of each queue, and when its last message was stored."""
        header = TopicRequestHeader.decode(command.ext_fields)
        found = self.config(header.topic)
        if found is None:
            return command.answer(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
        count = max(found.read_queue_nums, found.write_queue_nums)
        bounds = await self._queues.bounds(header.topic, count)
        last = await self._queues.times(header.topic, {queue: end - 1 for queue, (_, end) in bounds.items() if end})
        table = {
            RemotingMessageQueue(header.topic, self._broker_name, queue): TopicOffset(least, end, last.get(queue, 0))
            for queue, (least, end) in bounds.items()
        }
        rate = self._counting.rate("TOPIC_PUT_NUMS", header.topic)
        return command.answer(body=topic_stats_table(table, rate))

    def _system_topics(self) -> list[str]:
        cluster = self._cluster_name
        return [*SYSTEM_TOPICS, cluster, self._broker_name, f"{cluster}_REPLY_TOPIC", f"rmq_sys_REVIVE_LOG_{cluster}",
                f"rmq_sys_SYNC_BROKER_MEMBER_{self._broker_name}"]  # fmt: skip

    def system(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 305."""
        return command.answer(body=topic_list(self._system_topics()))
