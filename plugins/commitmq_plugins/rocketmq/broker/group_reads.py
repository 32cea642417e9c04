"""What groups may read, as every pull asks: kept here, and learned anew when the coordinator has changed it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from commitmq.control import Word
from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq.store.metadata.topic_name import is_system_group
from commitmq_plugins.rocketmq.broker.node import Node

READ: Final = 1 << 2
"""The bit of forbiddenTable that takes the right to read."""
_GROUP_READS: Final = int(Word.GROUP_READS)  # a plain int for speed: each pull looks
_PAUSE_S: Final = 0.2
_WAIT_S: Final = 1.0
_FOUND_S: Final = 5.0
_MOST_FOUND: Final = 10_000


class GroupReads:
    """Whoever asks first finds out whether the coordinator has changed anything (:attr:`is_current`), and waits for it."""

    def __init__(self, node: Node, log: Log) -> None:
        self._node, self._log = node, log
        self._version = -1
        self._learning = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._again_s = 0.0
        self._disabled: frozenset[str] = frozenset()
        self._forbidden: dict[str, frozenset[str]] = {}
        self._found: dict[str, float] = {}

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since it was learned."""
        return self._version == self._node.control.get(_GROUP_READS)

    async def refresh(self) -> None:
        """Learn what has changed. After ``_WAIT_S`` what was known holds: a coordinator that is away stops no consumer."""
        if self._task is None and not self.is_current and time.monotonic() >= self._again_s:
            self._task = asyncio.create_task(self._follow())
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_WAIT_S)

    def when_current(self, work: Callable[[], None]) -> None:
        """Call ``work`` after :meth:`refresh`."""
        task = asyncio.create_task(self.refresh())
        self._waiting.add(task)

        def done(_: object) -> None:
            self._waiting.discard(task)
            work()

        task.add_done_callback(done)

    def may_be_missing(self, group: str) -> bool:
        """Whether :meth:`is_missing` has to be asked. Where groups are made by themselves none is missing, and RocketMQ's own
        never are (spec 1.5).
        """
        if self._node.config.groups.auto_create or is_system_group(group):
            return False
        return time.monotonic() - self._found.get(group, -_FOUND_S) >= _FOUND_S

    async def is_missing(self, group: str) -> bool:
        """Whether there is no such group. One that was found counts as there for some seconds (spec 9.4), and as long as the
        coordinator is away. Raises ProtocolError when nobody knows.
        """
        try:
            await self._node.ask("coordinator", "group.config", group=group)
        except ProtocolError as error:
            if error.code in ("GROUP_NOT_EXIST", "INVALID_PARAMETER"):
                self.forget(group)
                return True
            if group not in self._found:
                raise
        if len(self._found) >= _MOST_FOUND:
            self._found.clear()
        self._found[group] = time.monotonic()
        return False

    def forget(self, group: str) -> None:
        """The settings of ``group`` were changed or deleted."""
        self._found.pop(group, None)

    def may_consume(self, group: str) -> bool:
        """Whether the group's consumeEnable is on."""
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
        except ProtocolError as error:
            self._again_s = time.monotonic() + _PAUSE_S
            self._log.warning("what groups may read is not known anew", why=str(error))
        finally:
            self._task = None

    async def close(self) -> None:
        """End the questions that are under way."""
        tasks = [*self._waiting] if self._task is None else [self._task, *self._waiting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
