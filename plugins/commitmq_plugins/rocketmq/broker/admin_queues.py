"""What administration needs to know of queues: their bounds and the times of their messages."""

from __future__ import annotations

import asyncio

from commitmq.errors import ProtocolError
from commitmq_plugins.rocketmq.broker.node import Node
from commitmq_plugins.rocketmq.broker.offsets import Offsets

Bounds = dict[int, tuple[int, int]]
"""Smallest offset and end of each queue."""


class Queues:
    """See the module."""

    def __init__(self, node: Node, offsets: Offsets) -> None:
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
