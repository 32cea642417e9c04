"""What groups may read, as every pull asks: kept here, and learned anew when the coordinator has changed it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from commitmq.control import Word
from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq_plugins.rocketmq.broker.node import Node

READ: Final = 1 << 2
"""The bit of forbiddenTable that takes the right to read."""
_GROUP_READS: Final = int(Word.GROUP_READS)  # a plain int for speed: each pull looks
_PAUSE_S: Final = 1.0
_SYSTEM_PREFIX: Final = "CID_RMQ_SYS_"
_SYSTEM_GROUPS: Final = frozenset(
    ("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PULL",
     "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER")
)  # fmt: skip
_FOUND_S: Final = 5.0
_MOST_FOUND: Final = 10_000


class GroupReads:
    """A change by a tool of RocketMQ's holds with the tool's answer, any other one a few milliseconds later."""

    def __init__(self, node: Node, log: Log) -> None:
        self._node, self._log = node, log
        self._version = -1
        self._learning = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._disabled: frozenset[str] = frozenset()
        self._forbidden: dict[str, frozenset[str]] = {}
        self._found: dict[str, float] = {}

    def may_be_missing(self, group: str) -> bool:
        """Whether :meth:`is_missing` has to be asked. Where groups are made by themselves none is missing, and RocketMQ's own
        never are (spec 1.5).
        """
        if self._node.config.groups.auto_create or group in _SYSTEM_GROUPS or group.startswith(_SYSTEM_PREFIX):
            return False
        return time.monotonic() - self._found.get(group, -_FOUND_S) >= _FOUND_S

    async def is_missing(self, group: str) -> bool:
        """Whether there is no such group. One that was found counts as there for some seconds (spec 9.4)."""
        try:
            await self._node.ask("coordinator", "group.config", group=group)
        except ProtocolError as error:
            return error.code in ("GROUP_NOT_EXIST", "INVALID_PARAMETER")
        if len(self._found) >= _MOST_FOUND:
            self._found.clear()
        self._found[group] = time.monotonic()
        return False

    def forget(self, group: str) -> None:
        """The settings of ``group`` were changed or deleted."""
        self._found.pop(group, None)

    def may_consume(self, group: str) -> bool:
        """Whether the group's consumeEnable is on."""
        if self._version != self._node.control.get(_GROUP_READS) and self._task is None:
            self._task = asyncio.create_task(self._follow())
        return group not in self._disabled

    def may_read(self, group: str, topic: str) -> bool:
        """Whether the group is not forbidden to read ``topic`` (request 353)."""
        return topic not in self._forbidden.get(group, ())

    async def sync(self) -> None:
        """Learn what has changed, if anything has. Raises ProtocolError."""
        async with self._learning:
            version = self._node.control.get(_GROUP_READS)
            if version != self._version:
                groups, forbidden, _ = await all_settings(self._node, unreadable=True)
                self._disabled = frozenset(name for name, one in groups.items() if one.get("consumeEnable") is False)
                self._forbidden = {
                    group: frozenset(topic for topic, bits in topics.items() if bits & READ)
                    for group, topics in forbidden.items()
                }
                self._version = version

    async def _follow(self) -> None:
        try:
            await self.sync()
        except ProtocolError as error:  # the next pull asks again
            self._log.warning("what groups may read is not known anew", why=str(error))
            await asyncio.sleep(_PAUSE_S)
        finally:
            self._task = None

    async def close(self) -> None:
        """End the question that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def all_settings(
    node: Node, *, unreadable: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Settings of all groups by name, what they must not read, and the version of both; with ``unreadable`` of those that
    must not read everything. Raises ProtocolError.
    """
    groups: dict[str, dict[str, Any]] = {}
    forbidden: dict[str, Any] = {}
    after: str | None = None
    while True:
        answer = await node.ask("coordinator", "group.configs", after=after, unreadable=unreadable)
        groups |= {one["groupName"]: one for one in answer["configs"]}
        forbidden |= answer["forbidden"]
        if answer["next"] is None:
            return groups, forbidden, answer["version"]
        after = str(answer["next"])
