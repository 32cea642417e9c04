"""The loop of an ordered share consumer: one handler for each queue at a time, in the order of the queue.

The node hands out nothing more of a queue while messages of it are out. So a message that failed comes again before those
behind it, if these are given back unhandled, which counts as no try.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from commitmq.client.handling.consume_result import ConsumeResult, Verdict
from commitmq.client.sharing.settings import RunSettings
from commitmq.client.sharing.share_engine import Held, ShareEngine, SharePool, Source

if TYPE_CHECKING:
    from commitmq.client.message import Message

_Queue = tuple[str, int]


class OrderedShareEngine(ShareEngine):
    """See the module. Of each queue the first message is ready, or its handler runs; the others are behind it."""

    def __init__(self, consumer: Source, settings: RunSettings) -> None:
        super().__init__(consumer, settings)
        self._behind: dict[_Queue, deque[Held]] = {}

    def _add(self, messages: list[Message]) -> None:
        with self.lock:
            for message in messages:
                held = Held(message)
                self._held[held] = None
                behind = self._behind.get(_queue(held))
                if behind is None:
                    self._behind[_queue(held)] = deque()
                    self._ready.append(held)
                else:
                    behind.append(held)
            self.wake(len(messages))

    def judge(self, entry: Held, verdict: Verdict) -> None:
        is_last = entry.message.reconsume_times >= self._consumer.max_retries()
        if verdict.result is ConsumeResult.RETRY and is_last:
            verdict = verdict._replace(result=ConsumeResult.DEAD)
        super().judge(entry, verdict)
        self._go_on(entry, is_over=verdict.result is not ConsumeResult.RETRY)

    def abandon(self, entry: Held) -> None:
        super().abandon(entry)
        self._go_on(entry, is_over=False)

    def _go_on(self, entry: Held, *, is_over: bool) -> None:
        """The next message of the queue; without ``is_over`` they come again behind this one."""
        with self.lock:
            behind = self._behind.pop(_queue(entry), deque())
            if not is_over or self.is_stopping:
                self._give_back(behind)
            elif behind:
                self._ready.append(behind.popleft())
                self._behind[_queue(entry)] = behind
                self.wake(1)

    def _end(self, pool: SharePool) -> None:
        self.stop()
        with self.lock:
            for behind in self._behind.values():
                self._give_back(behind)
            self._behind.clear()
        super()._end(pool)


def _queue(held: Held) -> _Queue:
    return held.message.topic, held.message.queue_id
