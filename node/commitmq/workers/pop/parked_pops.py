"""Pops that wait for messages, in the order of their arrival: by topic for wake-ups, by deadline, counted by client."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from commitmq.semantics.pop import USUAL_NAMES, RetryNames
from commitmq.store.queues.record_filter import RecordFilter

STARTS: Final = ("earliest", "latest", "last")
CLIENT_SHARE: Final = 4
"""One client may park this share of all."""


@dataclass(slots=True, eq=False)
class Pop:
    """A request for messages. ``start``, one of STARTS, is for queues without an offset."""

    client: bytes
    request: int
    group: str
    topics: list[str]
    max_messages: int
    invisible_ms: int
    wait_ms: int
    wanted: RecordFilter | None
    start: str
    deadline_ms: int = 0
    done: bool = False
    ordered: bool = False
    attempt: str | None = None
    """A repeated ordered receive has the same, and gets the same messages."""
    queue: int = -1
    """The only queue to look into, of the only topic; -1: all."""
    repeats_acked: bool = False
    """Whether an ordered receive has the messages again that were acked behind one that was not: RocketMQ's rule."""
    is_cut: bool = False
    """Whether the last look for its messages ended before all queues were looked into."""
    owner: bytes | str = b""
    user: str | None = None
    """Whose rates hold: the client, or that of a gateway of this node; and the user. Known only while there are rates."""
    counts_rest: bool = False
    """Whether the answer says how many messages are left in the queues that were looked into."""
    rest: int = 0
    """How many were left at the last look."""
    late: list[str] | None = None
    """Topics that begin at their first message, because they are newer than the consumer. None: it waits for no topic."""
    missing: list[str] = field(default_factory=list)
    """Topics that do not exist, for a consumer that waits for them."""


def rest_of(pop: Pop) -> dict[str, Any]:
    """The fields of an answer that say how many messages are left and which topics are missing, for who asked for them."""
    return {**({"rest": pop.rest} if pop.counts_rest else {}), **({} if pop.late is None else {"missing": pop.missing})}


@dataclass(slots=True)
class ParkedPops:
    """At most ``limit``."""

    limit: int
    names: RetryNames = USUAL_NAMES
    _waiting: dict[str, dict[str, dict[Pop, None]]] = field(default_factory=dict)  # topic -> group -> pops in order
    _heap: list[tuple[int, int, Pop]] = field(default_factory=list)
    _clients: Counter[bytes] = field(default_factory=Counter)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _woken: dict[tuple[str, str], list[Pop] | None] = field(default_factory=dict)  # by topic and group; None: all
    _last: tuple[str, str] = ("", "")

    def __len__(self) -> int:
        return self._clients.total()

    def has_room(self, client: bytes) -> bool:
        return len(self) < self.limit and self._clients[client] < max(1, self.limit // CLIENT_SHARE)

    def add(self, pop: Pop, now_ms: int) -> None:
        pop.deadline_ms = now_ms + pop.wait_ms
        self._clients[pop.client] += 1
        for topic in self._places(pop):
            self._waiting.setdefault(topic, {}).setdefault(pop.group, {})[pop] = None
        heapq.heappush(self._heap, (pop.deadline_ms, next(self._numbers), pop))

    def _places(self, pop: Pop) -> list[str]:
        """The topics of the store whose growth may end its wait."""
        return [*pop.topics, *(one for topic in pop.topics for one in self.names.read(topic, pop.group))]

    def remove(self, pop: Pop) -> None:
        pop.done = True
        self._clients[pop.client] -= 1
        if not self._clients[pop.client]:
            del self._clients[pop.client]
        for topic in self._places(pop):
            groups = self._waiting.get(topic, {})
            groups.get(pop.group, {}).pop(pop, None)
            if not groups.get(pop.group, True):
                del groups[pop.group]
            if not groups:
                self._waiting.pop(topic, None)
        if len(self._heap) > 2 * len(self) + 1_024:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)

    def wake(self, topic: str) -> None:
        """``topic`` has grown."""
        for group in self._waiting.get(topic, ()):
            self._woken[topic, group] = None

    def wake_retries(self, topic: str, group: str) -> None:
        """A message of ``topic`` came back to ``group``."""
        for name in self.names.read(topic, group):
            self.wake(name)

    def wake_group(self, topic: str, group: str) -> None:
        """``topic`` may have more messages for ``group``."""
        if group in self._waiting.get(topic, ()):
            self._woken[topic, group] = None

    def wake_these(self, topics: set[str]) -> None:
        """These topics have changed."""
        for topic in topics:
            self.wake(topic)

    def wake_all(self) -> None:
        for topic in self._waiting:
            self.wake(topic)

    @property
    def has_woken(self) -> bool:
        return bool(self._woken)

    def next_woken(self) -> list[Pop]:
        """The pops of one group that wait for a topic that has grown, first come first."""
        topic, group = self._last = next(iter(self._woken))
        rest = self._woken.pop(self._last)
        if rest is None:
            return list(self._waiting.get(topic, {}).get(group, ()))
        return [pop for pop in rest if not pop.done]

    def look_later(self, rest: list[Pop]) -> None:
        """Wake these again: the rest of the last :meth:`next_woken`."""
        if rest:
            self._woken.setdefault(self._last, rest)

    def next_deadline_ms(self) -> int | None:
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[Pop]:
        """Remove and give those whose time is up."""
        found = []
        while (deadline := self.next_deadline_ms()) is not None and deadline <= now_ms:
            pop = self._heap[0][2]
            self.remove(pop)
            found.append(pop)
        return found

    def all(self) -> list[Pop]:
        return [entry[2] for entry in self._heap if not entry[2].done]
