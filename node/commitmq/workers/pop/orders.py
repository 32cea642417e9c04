"""The state of ordered receives: which messages of a queue a group has, and until when the queue is blocked (remoting 5.7).

Owns ``config/consumerOrderInfo.json``, RocketMQ's file: it is read at the start and written before an answer leaves that
depends on it. So a death changes nothing, and RocketMQ goes on with what it finds. The group's offset is its committed one.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from commitmq.errors import InvalidMessageError, ProtocolError, StoreError
from commitmq.files import disk
from commitmq.log import Log
from commitmq.semantics.pop_order import FORGET_AFTER_MS, OrderState, file_content, table_from_json
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.workers.pop.clock import now_ms
from commitmq.workers.runtime.topic_view import TopicViews

_SPARE: Final = 1_024
_FORGET_MS: Final = 60_000


class OrderKey(NamedTuple):
    """A queue that a group receives in order."""

    topic: str
    group: str
    queue: int


@dataclass(frozen=True, slots=True)
class _States:
    """The states of one topic and group by queue, as the file has them."""

    by_queue: dict[int, OrderState]

    def to_json(self) -> dict[int, Any]:
        return {queue: state.to_json() for queue, state in self.by_queue.items()}


class Orders:
    """See the module. ``most``: how many queues may have a state."""

    def __init__(self, layout: StoreLayout, log: Log, most: int) -> None:
        self._path = layout.config / "consumerOrderInfo.json"
        self._log, self._most = log, most
        self._table: dict[tuple[str, str], _States] = {}
        self._texts = json_config.MemberTexts(1)
        self._count = 0
        self._ends: list[tuple[int, OrderKey]] = []
        """When blocks end; some were replaced since."""
        self.is_dirty = False
        self._forget_at_ms = 0

    def __len__(self) -> int:
        return self._count

    def load(self) -> None:
        """Read the file. A damaged one is set aside: without it messages may come again early, and none is lost."""
        try:
            content = json_config.load(self._path)
            table = {} if content is None else table_from_json(content)
        except (StoreError, InvalidMessageError) as error:
            aside = self._set_aside()
            self._log.error("the state of ordered receives is damaged", error=str(error), kept_as=str(aside))
            table = {}
        self._table = {names: _States(states) for names, states in table.items() if states}
        self._count = sum(len(one.by_queue) for one in self._table.values())
        self._find_ends()

    def _set_aside(self) -> Path:
        """Give the damaged file a name that is free, beside those of before."""
        for number in count():
            aside = self._path.with_name(f"{self._path.name}.damaged{f'-{number}' if number else ''}")
            with contextlib.suppress(FileExistsError):
                disk.rename(self._path, aside, "orders_aside")
                return aside
        raise AssertionError

    def _find_ends(self) -> None:
        self._ends = [(state.free_at(0), key) for key, state in self._all() if not state.is_done()]
        heapq.heapify(self._ends)

    def _all(self) -> Iterator[tuple[OrderKey, OrderState]]:
        for (topic, group), states in self._table.items():
            for queue, state in states.by_queue.items():
                yield OrderKey(topic, group, queue), state

    def get(self, key: OrderKey) -> OrderState | None:
        """The last receive of this queue by this group."""
        states = self._table.get((key.topic, key.group))
        return None if states is None else states.by_queue.get(key.queue)

    def put(self, key: OrderKey, state: OrderState | None) -> None:
        """Its new state; None for no state. Stored by :meth:`store`."""
        names = key.topic, key.group
        by_queue = dict(self._table[names].by_queue) if names in self._table else {}
        self._count -= len(by_queue)
        by_queue.pop(key.queue, None)
        if state is not None:
            by_queue[key.queue] = state
            heapq.heappush(self._ends, (state.free_at(0), key))  # at once, when all of it is acked
        self._count += len(by_queue)
        if by_queue:
            self._table[names] = _States(by_queue)
        else:
            self._table.pop(names, None)
        self.is_dirty = True
        if len(self._ends) > 2 * self._count + _SPARE:
            self._find_ends()

    def drop(self, key: OrderKey) -> None:
        """The group's offset was set back by a person, or the topic was deleted: nothing of the queue is out any more."""
        if self.get(key) is not None:
            self.put(key, None)

    def check_room(self, key: OrderKey, now_ms: int) -> None:
        """Raise ProtocolError LIMIT_EXCEEDED when ``key`` would be one too many."""
        if self._count < self._most or self.get(key) is not None:
            return
        done = [key for key, state in self._all() if state.is_done()]
        for one in done:
            self.put(one, None)
        if self._count >= self._most:
            sentence = f"{self._most} queues are received in order already (pop.max_ordered_queues)"
            raise ProtocolError("LIMIT_EXCEEDED", sentence, retry_after_ms=5_000)

    def is_out(self, group: str, topics: set[str], now_ms: int) -> bool:
        """Whether ``group`` has messages of ``topics`` whose time is not over."""
        return any(
            state.is_blocked(now_ms)
            for topic in topics
            if (states := self._table.get((topic, group))) is not None
            for state in states.by_queue.values()
        )

    def next_end_ms(self) -> int | None:
        """When a block ends; it may turn out to last."""
        return self._ends[0][0] if self._ends else None

    def ended(self, now_ms: int) -> set[OrderKey]:
        """The queues whose blocks may have ended by now; each is told once."""
        found = set()
        while self._ends and self._ends[0][0] <= now_ms:
            found.add(heapq.heappop(self._ends)[1])
        return found

    def look_after(self, monotonic_ms: int, topics: TopicViews) -> None:
        """Forget and write down what no request has changed, from time to time."""
        if monotonic_ms >= self._forget_at_ms and not topics.is_stale:
            self._forget_at_ms = monotonic_ms + _FORGET_MS
            views = topics.get
            self.forget_old(
                now_ms(), lambda name, queue: (view := views(name)) is not None and queue < view.read_queues
            )
        if self.is_dirty:
            with contextlib.suppress(StoreError):  # the file stays as it is: messages may come again
                self.store()

    def forget_old(self, now_ms: int, has_queue: Callable[[str, int], bool]) -> None:
        """Drop what RocketMQ drops when it writes the file: states of queues that ``has_queue(topic, queue)`` does not know,
        and of queues that were not received for a day. (One with a longer invisible time stays while that lasts.)
        """
        gone = [
            key
            for key, state in self._all()
            if not has_queue(key.topic, key.queue)
            or (now_ms - state.last_pop_ms > FORGET_AFTER_MS and not state.is_blocked(now_ms))
        ]
        for key in gone:
            self.put(key, None)

    def store(self) -> None:
        """Make all states durable. Raises StoreError, or DiskFullError; then the file has the states before."""
        if self.is_dirty:
            members = {f"{topic}@{group}": states for (topic, group), states in self._table.items()}
            json_config.replace_text(self._path, json_config.dumps(file_content(self._texts.join(members))))
            self.is_dirty = False
