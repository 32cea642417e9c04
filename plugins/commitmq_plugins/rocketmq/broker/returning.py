"""Groups that may come back with offsets from before a cut of the log.

RocketMQ's clients know no generation of the log (:mod:`commitmq.store.recovery.cut_history`). A consumer that lived through
the cut pulls at the offset that it had reached, and messages may be there again by then. So the first pull of each queue of a
group with offsets is judged as if it came from a generation before a cut. A consumer whose offset lies behind the queue's end
of then is sent back to it (PULL_OFFSET_MOVED), which RocketMQ's clients obey. Commits before that pull are judged as if they
came from the generation in which the node served before.

A consumer may stay away for longer than one start lasts. So the cuts of the last AWAY_MS count, the oldest first. A start
lowers what a group has committed to the end at the cut. A group that has more now has come back since: the next cut counts.
"""

from __future__ import annotations

import time
from typing import Any, Final

from commitmq.control import WorkerWord
from commitmq.plugin import WorkerContext
from commitmq.store.recovery.cut_history import CutHistory
from commitmq_plugins.rocketmq.broker.node import Node

AWAY_MS: Final = 3_600_000


class Returning:
    """Used by pulls and offsets."""

    def __init__(self, context: WorkerContext, node: Node) -> None:
        """Raises OSError."""
        history, now_ms = CutHistory.load(context.layout), time.time_ns() // 1_000_000
        is_first = not context.control.worker(context.slot, WorkerWord.RESTARTS)
        self._node = node
        self._served = history.served if history.served < history.generation and is_first else -1
        before = [0, *(cut.generation for cut in history.cuts)]
        self._generations = [
            one for one, cut in zip(before, history.cuts, strict=False) if abs(now_ms - cut.time_ms) < AWAY_MS
        ]
        self._awaited: dict[tuple[str, str, int], tuple[int, list[int]]] = {}
        """By queue: what the group has committed, and the generations that are left to judge by."""

    async def learn(self) -> None:
        """Ask which groups have offsets, before any of them is served. Raises ProtocolError."""
        after: list[Any] | None = None
        while self._generations:
            answer = await self._node.ask("coordinator", "group.positions", after=after)
            for group, topic, queue, offset in answer["positions"]:
                self._awaited[group, topic, queue] = offset, self._generations
            if (after := answer["next"]) is None:
                break

    def of_pull(self, group: str, topic: str, queue: int) -> int | None:
        """The generation by which a pull is judged; None when one of this queue was answered."""
        found = self._awaited.get((group, topic, queue)) if self._awaited else None
        return None if found is None else found[1][0]

    def of_commit(self, group: str, topic: str, queue: int) -> int:
        """The generation by which a commit is judged; -1 for none."""
        return self._served if (group, topic, queue) in self._awaited else -1

    def is_again(self, group: str, topic: str, queue: int, answer: dict[str, Any]) -> bool:
        """Whether the pull of the queue that is answered by ``answer`` is to be asked again: its group came back since the cut
        by which it was judged.
        """
        found = self._awaited.pop((group, topic, queue), None) if self._awaited else None
        if found is None or answer.get("status") != "OFFSET_OVERFLOW_BADLY" or int(answer["next_offset"]) >= found[0]:
            return False
        if found[1][1:]:
            self._awaited[group, topic, queue] = found[0], found[1][1:]
        return True
