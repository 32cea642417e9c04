"""Look-ups of single messages: by key, by physical offset, and units of a queue (remoting 1.7)."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any, Final

from commitmq.control import DispatcherWord
from commitmq.errors import ProtocolError
from commitmq.format.record import decode_record
from commitmq.format.units import UNIT_STRUCT
from commitmq.security.native_rights import SUB_GET
from commitmq.semantics.pop import RetryNames, retry_flag
from commitmq.semantics.retry import topics_of
from commitmq_plugins.rocketmq.broker.clients import ClientManager
from commitmq_plugins.rocketmq.broker.node import NodeClient, refusal_of
from commitmq_plugins.rocketmq.broker.offsets import Offsets
from commitmq_plugins.rocketmq.broker.popping import PopMessageProcessor, Popped, PopRefused
from commitmq_plugins.rocketmq.broker.rights import Access
from commitmq_plugins.rocketmq.broker.topics import TopicConfigManager
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, without_none
from commitmq_plugins.rocketmq.remoting.frame import Command
from commitmq_plugins.rocketmq.remoting.headers import (
    NotificationRequestHeader,
    NotificationResponseHeader,
    PeekMessageRequestHeader,
    QueryConsumeQueueRequestHeader,
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Handler, RemotingConnection

_LOOK_S: Final = 1.0
_LOOK_IN_ORDER_S: Final = 0.25
"""A request that waits looks so often, because a block in a queue may have ended, and soon after a dispatch."""
_GLANCE_S: Final = 0.03
_SHARE_S: Final = 0.002
"""All that wait look at most once in this time."""
_MOST_QUEUES: Final = 1_024
_MOST_WAITING: Final = 1_024
_MOST_OF_ONE: Final = 256
"""Of one connection."""
_MOST_MESSAGES: Final = 32
_MOST_LOOKED_BYTES: Final = 256 * 1024

Queue = tuple[str, int]


class PeekMessageProcessor:
    """PEEK_MESSAGE and NOTIFICATION: whether there are messages to pop, without taking them (remoting 5.6).

    Where the group continues is what the node has committed, which lies a moment behind the pops.
    """

    def __init__(
        self, node: NodeClient, topics: TopicConfigManager, offsets: Offsets, pops: PopMessageProcessor
    ) -> None:
        self._node, self._topics, self._offsets, self._pops = node, topics, offsets, pops
        self._broker = node.config.network.broker_name
        self._waiting: Counter[RemotingConnection] = Counter()
        self._names = RetryNames.of(node.config.pop)
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.PEEK_MESSAGE: self.peek,
            RequestCode.NOTIFICATION: self.notify,
        }

    async def peek(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 200052."""
        header = PeekMessageRequestHeader.decode(command.ext_fields)
        fields = {"popTime": str(time.time_ns() // 1_000_000), "invisibleTime": "0", "reviveQid": "0", "restNum": "0"}
        if header.max_msg_nums > _MOST_MESSAGES:
            return command.answer(
                ResponseCode.INVALID_PARAMETER, "peek message's num is greater than 32", ext_fields=fields
            )
        try:
            names = (self._names.written(header.topic, header.consumer_group),)
            queues = self._queues(connection, header.topic, header.queue_id, names)
            parts, frames, rest = await self._read(header, queues)
        except PopRefused as refusal:
            return command.answer(refusal.code, refusal.remark, ext_fields=fields)
        except ProtocolError as error:
            return command.answer(*refusal_of(error), ext_fields=fields)
        fields["restNum"] = str(rest)
        if not parts:
            return command.answer(ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE", ext_fields=fields)
        answer = {"parts": parts, "pop_time": int(fields["popTime"]), "invisible_ms": 0, "revive_queue": 0,
                  "broker": self._broker}  # fmt: skip
        popped = Popped(answer, frames)
        return command.answer(remark="FOUND", ext_fields={**fields, **popped.texts()}, body=b"".join(popped.body))

    async def _read(
        self, header: PeekMessageRequestHeader, queues: list[Queue]
    ) -> tuple[list[dict[str, Any]], list[bytes], int]:
        """Parts as those of a pop, their frames, and how many messages there are beside. Raises ProtocolError."""
        begins = await self._offsets.fetch(header.consumer_group, queues)
        parts: list[dict[str, Any]] = []
        frames: list[bytes] = []
        wanted, rest = header.max_msg_nums, 0
        for name, queue in queues:
            least, end, _ = await self._offsets.bounds(name, queue)
            begin = max(begins.get((name, queue), -1), least)
            count = 0
            if wanted > 0 and begin < end:
                fields = {"topic": name, "queue": queue, "offset": begin, "max_messages": wanted,
                          "max_bytes": _MOST_LOOKED_BYTES, "mode": "bytes"}  # fmt: skip
                answer, found = await self._node.exchange(self._node.reader_of(name, queue), "pull", fields)
                if answer["status"] == "FOUND":
                    count = int(answer["count"])
                    parts.append({"topic": header.topic, "stored": name, "queue": queue, "start_offset": begin,
                                  "flag": retry_flag(name), "frames": len(found), "count": count})  # fmt: skip
                    frames += found
            wanted -= count
            rest += max(0, end - begin - count)
        return parts, frames, rest

    async def notify(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 200054: whether a pop would find messages; waits for them."""
        header = NotificationRequestHeader.decode(command.ext_fields)
        until = time.monotonic() + self._pops.wait_ms(header.poll_time, header.born_time) / 1_000
        if self._waiting.total() >= _MOST_WAITING or self._waiting[connection] >= _MOST_OF_ONE:
            return command.answer(ext_fields=NotificationResponseHeader(has_msg=False, polling_full=True).encode())
        self._waiting[connection] += 1
        try:
            names = self._names.read(header.topic, header.consumer_group)
            queues = self._queues(connection, header.topic, header.queue_id, names)
            seen = self._dispatched()
            found = await self._has_some(header, queues)
            while not found and not connection.is_closed and (left := until - time.monotonic()) > 0:
                await self._news(seen, min(left, _LOOK_IN_ORDER_S if header.order else _LOOK_S))
                seen = self._dispatched()
                found = await self._has_some(header, queues)
        except PopRefused as refusal:
            return command.answer(refusal.code, refusal.remark)
        finally:
            self._waiting[connection] -= 1
            if not self._waiting[connection]:
                del self._waiting[connection]
        return command.answer(ext_fields=NotificationResponseHeader(has_msg=found).encode())

    async def _news(self, seen: int, most_s: float) -> None:
        """Wait a moment, and on until anything is dispatched behind ``seen``, at most ``most_s``."""
        end = time.monotonic() + most_s
        while (rest := end - time.monotonic()) > 0:
            await asyncio.sleep(min(rest, max(_GLANCE_S, self._waiting.total() * _SHARE_S)))
            if self._dispatched() != seen:
                return

    def _dispatched(self) -> int:
        return self._node.control.dispatcher(0, DispatcherWord.DISPATCHED)

    async def _has_some(self, header: NotificationRequestHeader, queues: list[Queue]) -> bool:
        begins = await self._offsets.fetch(header.consumer_group, queues)
        found: list[Queue] = []
        for queue in queues:
            least, end, _ = await self._offsets.bounds(*queue)
            if end > max(begins.get(queue, -1), least):
                if not header.order:
                    return True
                found.append(queue)
        own = [[queue, max(0, begins.get((name, queue), -1))] for name, queue in found if name == header.topic]
        if len(own) < len(found) or not own:
            return bool(found)
        return len(await self._blocked(header, own)) < len(own)

    async def _blocked(self, header: NotificationRequestHeader, queues: list[list[int]]) -> list[int]:
        """Those of ``queues`` whose messages are out in order, so that this attempt gets none. Raises ProtocolError."""
        fields: dict[str, Any] = {
            "group": header.consumer_group,
            "topic": header.topic,
            "queues": queues[:_MOST_QUEUES],
        }
        if header.attempt_id:
            fields["attempt"] = header.attempt_id
        answer, _ = await self._node.mover("pop", "blocked", **fields)
        return list(answer["blocked"])

    def _queues(self, connection: RemotingConnection, name: str, queue: int, retries: tuple[str, ...]) -> list[Queue]:
        """The queues of a request, those of the group's retry topics last. Raises PopRefused."""
        topic = self._pops.check_queue(name, queue, connection.name)
        numbers = list(range(topic.read_queues)) if queue < 0 else [queue]
        first = random.randrange(len(numbers)) if numbers else 0
        queues = [(name, one) for one in numbers[first:] + numbers[:first]]
        found = [one for one in map(self._topics.get, retries) if one is not None]
        return queues + [(retry.name, one) for retry in found for one in range(retry.read_queues)]


_KEY_MESSAGES: Final = 64
"""RocketMQ's maxMsgsNumBatch: what an answer has at most, whatever was asked for."""
_UNIQUE_MESSAGES: Final = 32
"""RocketMQ's defaultQueryMaxNum: what a query by unique key finds at most."""
_MOST_UNITS: Final = 4_096
_MOST_PAGES: Final = 64
_MOST_MS: Final = (1 << 53) - 1
_MOST_BYTES: Final = 16 << 20
_NO_BYTES: Final = 1 << 30
_KINDS: Final = {"K": "key", "U": "unique", "T": "tag"}


class QueryMessageProcessor:
    """The look-ups of single messages."""

    def __init__(self, node: NodeClient, topics: TopicConfigManager, clients: ClientManager, access: Access) -> None:
        self._node, self._topics, self._clients, self._access = node, topics, clients, access
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.QUERY_MESSAGE: self.query,
            RequestCode.VIEW_MESSAGE_BY_ID: self.view,
            RequestCode.QUERY_CONSUME_QUEUE: self.units,
        }

    async def query(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 12."""
        header = QueryMessageRequestHeader.decode(command.ext_fields)
        kind, most = _KINDS.get(header.index_type or "K", "key"), min(header.max_num, _KEY_MESSAGES)
        if command.ext_fields.get("_UNIQUE_KEY_QUERY", "").lower() == "true":
            kind, most = "unique", _UNIQUE_MESSAGES
        fields: dict[str, Any] = {
            "topic": header.topic,
            "key": header.key,
            "type": kind,
            "begin": min(max(0, header.begin_timestamp), _MOST_MS),
            "end": min(max(0, header.end_timestamp), _MOST_MS),
        }
        try:
            records, last = await self._pages(fields, max(1, most))
        except ProtocolError as error:
            if error.code not in ("INVALID_PARAMETER", "TOPIC_NOT_EXIST"):
                raise
            records, last = b"", {}
        ext_fields = QueryMessageResponseHeader(
            int(last.get("last_timestamp") or 0), int(last.get("indexed_to") or 0)
        ).encode()
        if not records:
            remark = "can not find message, maybe time range not correct"
            return command.answer(ResponseCode.QUERY_NOT_FOUND, remark, ext_fields=ext_fields)
        return command.answer(ext_fields=ext_fields, body=records)

    async def _pages(self, fields: dict[str, Any], most: int) -> tuple[bytes, dict[str, Any]]:
        """The newest records, at most ``most``, by rising offset, and the first answer. Raises ProtocolError."""
        pages: list[bytes] = []
        first: dict[str, Any] = {}
        size = 0
        line = self._node.line("reader-0")
        for _ in range(_MOST_PAGES):
            answer, frames = await self._node.exchange(line, "query", {**fields, "max": most})
            first = first or answer
            pages.append(b"".join(frames))
            size += len(pages[-1])
            most -= int(answer["count"])
            if answer["next"] is None or most <= 0 or size >= _MOST_BYTES:
                break
            fields = {**fields, "next": answer["next"]}
        return b"".join(reversed(pages)), first

    async def view(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 33."""
        header = ViewMessageRequestHeader.decode(command.ext_fields)
        try:
            fields = {"physical_offset": max(0, header.offset)}
            _, frames = await self._node.exchange(self._node.line("reader-0"), "view", fields)
        except ProtocolError as error:
            if error.code not in ("INVALID_PARAMETER", "TOPIC_NOT_EXIST"):
                raise
            remark = f"can not find message by the offset, {header.offset}"
            return command.answer(ResponseCode.SYSTEM_ERROR, remark)
        data = b"".join(frames)
        if self._access.asks(connection):
            stored = decode_record(data, check_crc=False)
            topics = topics_of(stored.topic, stored.properties)
            if (refused := self._access.lacks(connection, command, topics, SUB_GET)) is not None:
                return refused
        return command.answer(body=data)

    async def units(self, connection: RemotingConnection, command: Command) -> Command:
        """Request 321: units of a ConsumeQueue."""
        header = QueryConsumeQueueRequestHeader.decode(command.ext_fields)
        name, queue = header.topic, header.queue_id
        topic = self._topics.get(name)
        if topic is None or not 0 <= queue < max(topic.read_queues, topic.write_queues):
            return command.answer(ResponseCode.SYSTEM_ERROR, f"{queue}@{name} is not exist!")
        units: list[dict[str, Any]] = []
        offset, wanted = header.index, max(0, min(header.count, _MOST_UNITS))
        bounds: dict[str, Any] = {}
        while not bounds or len(units) < wanted:
            fields = {"topic": name, "queue": queue, "offset": max(0, offset), "mode": "ranges",
                      "max_messages": max(1, min(1_024, wanted - len(units))), "max_bytes": _NO_BYTES}  # fmt: skip
            answer, frames = await self._node.exchange(self._node.reader_of(name, queue), "pull", fields)
            bounds = bounds or answer
            if answer["status"] != "FOUND" or answer.get("mode") == "bytes" or offset < 0:
                break
            for place, size, tag in UNIT_STRUCT.iter_unpack(frames[0]):
                units.append({"eval": False, "physicOffset": place, "physicSize": size, "tagsCode": tag})
            offset = int(answer["next_offset"])
        least, end = int(bounds["min_offset"]), int(bounds["max_offset"])
        if not units:
            return command.answer(remark=f"Index {header.index} of {queue}@{name} is not exist!")
        body = {"maxQueueIndex": end, "minQueueIndex": least, "queueData": units[:wanted]}
        return command.answer(body=dumps(without_none({**body, **self._filter(header.consumer_group, name)})))

    def _filter(self, group: str | None, topic: str) -> dict[str, Any]:
        """What an answer to 321 says of the group that was named: its subscription, or that it has none."""
        if group is None:
            return {}
        known = self._clients.registry.groups.get(group)
        subscription = None if known is None else known.subscriptions.get(topic)
        if subscription is None:
            return {"filterData": f"{group}@{topic} is not online!"}
        # The node keeps no compiled filter here; "null" is what RocketMQ shows of a group that filters by tags.
        return {"filterData": "null", "subscriptionData": subscription.to_json()}
