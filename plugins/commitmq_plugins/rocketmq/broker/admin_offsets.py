"""Administration of offsets: requests 43, 208, 222, 303, 314 and 317 (remoting 1.9, 1.10)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from commitmq.errors import ProtocolError
from commitmq.format.constants import RETRY_PREFIX
from commitmq.security.needs import SUB_GET, SUB_UPDATE
from commitmq_plugins.rocketmq.broker.access import Access
from commitmq_plugins.rocketmq.broker.admin_queues import Queues
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.counting import Counting
from commitmq_plugins.rocketmq.broker.group_reads import all_settings
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.pulling import Pulls
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.bodies.stats import ConsumeStats, OffsetWrapper, reset_offset_body
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import MessageQueue, dumps
from commitmq_plugins.rocketmq.remoting.headers.groups import GetConsumeStatsRequestHeader, GroupTopicRequestHeader
from commitmq_plugins.rocketmq.remoting.headers.reading import CloneGroupOffsetRequestHeader, ResetOffsetRequestHeader
from commitmq_plugins.rocketmq.remoting.headers.topics import GetConsumeStatsInBrokerHeader
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler


class AdminOffsets:
    """See the module."""

    def __init__(
        self, node: Node, topics: Topics, clients: Clients, offsets: Offsets, pulls: Pulls, queues: Queues,
        counting: Counting, access: Access, address: str
    ) -> None:  # fmt: skip
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

    def _queue(self, topic: str, queue: int) -> MessageQueue:
        return MessageQueue(topic, self._broker_name, queue)

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

    async def stats(self, connection: Connection, command: Command) -> Command:
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

    def _may_see(self, connection: Connection, group: str, topic: str) -> bool:
        """Whether a user that may see ``group`` may see where it is in ``topic``; the group's own retries belong to it."""
        return topic == RETRY_PREFIX + group or self._access.may(connection, topic, SUB_GET)

    async def broker_stats(self, connection: Connection, command: Command) -> Command:
        """Request 317: the progress of all groups. All who ask meanwhile get one answer: it has a question for each group."""
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

    async def reset(self, connection: Connection, command: Command) -> Command:
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

    async def time_span(self, connection: Connection, command: Command) -> Command:
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

    async def clone(self, connection: Connection, command: Command) -> Command:
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

    async def all(self, connection: Connection, command: Command) -> Command:
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


async def offsets_of_group(node: Node, group: str) -> list[tuple[str, int, int]]:
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


async def topics_of_group(node: Node, group: str) -> list[str]:
    """The topics in which a group has offsets. Raises ProtocolError."""
    return list(dict.fromkeys(topic for topic, _, _ in await offsets_of_group(node, group)))
