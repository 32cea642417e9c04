"""Look-ups of single messages: by key, by physical offset, and units of a queue (remoting 1.7)."""

from __future__ import annotations

from typing import Any, Final

from commitmq.errors import ProtocolError
from commitmq.format.record import decode_record
from commitmq.format.units import UNIT_STRUCT
from commitmq.security.needs import SUB_GET
from commitmq.semantics.stored_topics import topics_of
from commitmq_plugins.rocketmq.broker.access import Access
from commitmq_plugins.rocketmq.broker.clients import Clients
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.topics import Topics
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.command import Command
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, without_none
from commitmq_plugins.rocketmq.remoting.headers.reading import (
    QueryConsumeQueueRequestHeader,
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    ViewMessageRequestHeader,
)
from commitmq_plugins.rocketmq.remoting.server import Connection, Handler

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


class Queries:
    """See the module."""

    def __init__(self, node: Node, topics: Topics, clients: Clients, access: Access) -> None:
        self._node, self._topics, self._clients, self._access = node, topics, clients, access
        self.handlers: dict[RequestCode, Handler] = {
            RequestCode.QUERY_MESSAGE: self.query,
            RequestCode.VIEW_MESSAGE_BY_ID: self.view,
            RequestCode.QUERY_CONSUME_QUEUE: self.units,
        }

    async def query(self, connection: Connection, command: Command) -> Command:
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

    async def view(self, connection: Connection, command: Command) -> Command:
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

    async def units(self, connection: Connection, command: Command) -> Command:
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
