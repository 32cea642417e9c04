"""Groups that may come back with offsets from before a cut of the log.

RocketMQ's clients know no generation of the log (:mod:`commitmq.store.recovery.cut_history`). A consumer that lived through
the cut pulls at the offset that it had reached, and messages may be there again by then. So the first pull and the commits of
each queue of a group with offsets are judged as if they came from the generation in which the node served before. A consumer
whose offset lies behind the queue's end of then is sent back to it (PULL_OFFSET_MOVED), which RocketMQ's clients obey.

A process that was started again while the node ran does not know who has come back, and takes every offset as it is.
"""

from __future__ import annotations

from typing import Any

from commitmq.control import WorkerWord
from commitmq.plugin import WorkerContext
from commitmq.store.recovery.cut_history import CutHistory
from commitmq_plugins.rocketmq.broker.node import Node


class Returning:
    """Used by pulls and offsets."""

    def __init__(self, context: WorkerContext, node: Node) -> None:
        """Raises OSError."""
        history = CutHistory.load(context.layout)
        was_cut = history.served < history.generation
        self._node, self.generation = node, history.served
        self._is_needed = was_cut and not context.control.worker(context.slot, WorkerWord.RESTARTS)
        self._awaited: set[tuple[str, str, int]] = set()

    async def learn(self) -> None:
        """Ask which groups have offsets, before any of them is served. Raises ProtocolError."""
        after: list[Any] | None = None
        while self._is_needed:
            answer = await self._node.ask("coordinator", "group.positions", after=after)
            self._awaited.update((group, topic, queue) for group, topic, queue, _ in answer["positions"])
            if (after := answer["next"]) is None:
                break

    def is_awaited(self, group: str, topic: str, queue: int) -> bool:
        """Whether no pull of this queue was answered yet."""
        return bool(self._awaited) and (group, topic, queue) in self._awaited

    def came(self, group: str, topic: str, queue: int) -> None:
        """A pull of the queue was answered."""
        if self._awaited:
            self._awaited.discard((group, topic, queue))
