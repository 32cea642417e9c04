"""Finds the messages of an ordered pop: of queues that are not blocked, from the group's offset on (remoting 5.2, 5.7)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

from commitmq.control import ControlBlock, Word
from commitmq.errors import OffsetOutOfRangeError, ProtocolError
from commitmq.semantics.pop import MAX_MESSAGES
from commitmq.semantics.pop_order import OrderState
from commitmq.store.queues.pull_result import PullResult
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.pop.finder import MOST_MS, MOVES_ON, Finder, Portion, queue_offset
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.parked_pops import Pop
from commitmq.workers.pop.shares import QueueKey, Share, Shares
from commitmq.workers.reader.places import Place, Places
from commitmq.workers.runtime.context import monotonic_ms
from commitmq.workers.runtime.topic_view import TopicView

_MOST_READS: Final = 256
Begin = Callable[[], dict[QueueKey, int]]
"""Where a group begins in the queues that it does not know yet."""


class Taken(NamedTuple):
    """What a pop has found. ``is_cut``: time or reads were over before all queues were looked into.

    The group's offsets in ``share`` are those of the first messages.
    """

    share: Share
    portions: list[Portion]
    is_cut: bool
    rest: int = 0
    """Messages left in the queues that hand out any, when the pop asks for that: those of blocked queues do not count."""


class OrderedFinder:
    """See the module. One instance for one process."""

    def __init__(self, control: ControlBlock, places: Places, shares: Shares, orders: Orders, max_bytes: int) -> None:
        self._control = control
        self._places, self._shares, self._orders = places, shares, orders
        self._max_bytes = max_bytes
        self._random = random.Random()
        self._reads = self._until_ms = 0
        self._is_cut = False
        self._rest = 0

    def find(self, pop: Pop) -> Taken:
        """The messages for ``pop``: at most MAX_MESSAGES of one queue. An offset moves over what the filter does not want.

        Raises ProtocolError, or what a read or a filter raises.
        """
        share = self._shares.of(pop.group, pop.topics, ordered=True)
        if share.problem:
            raise ProtocolError("NO_PERMISSION", share.problem)
        self._reads, self._until_ms, self._is_cut, self._rest = 0, monotonic_ms() + MOST_MS, False, 0
        portions: list[Portion] = []
        topics = list(pop.topics)
        self._random.shuffle(topics)
        for name in topics:
            self._of_topic(pop, share, name, portions)
        return Taken(share, portions, self._is_cut, self._rest)

    def _of_topic(self, pop: Pop, share: Share, name: str, portions: list[Portion]) -> None:
        topic = self._places.topics.get(name)
        if topic is None or not self._places.topics.is_cleared(name):
            return
        place = self._places.place(name, topic)
        if not isinstance(place.queues, QueueReader):
            return
        numbers = range(topic.read_queues) if pop.queue < 0 else [pop.queue]
        queues = [(name, queue) for queue in numbers]
        self._take_up(share, name, topic, queues, lambda: Finder.begin(pop, share, place, queues))
        first = self._random.randrange(len(queues)) if queues else 0
        for key in queues[first:] + queues[:first]:
            found = self._of_queue(pop, share, key, place, portions)
            if found is not None:
                portions.append(found)
            if pop.counts_rest:
                self._rest += self._left(pop, share, key, place, found)

    def state(self, key: OrderKey) -> OrderState | None:
        """The state of a queue as its topic is now; None when it has none, or the topic is gone. Raises ProtocolError."""
        topic = self._places.topics.get(key.topic)
        if topic is None or self._orders.get(key) is None:
            return None
        queue = key.topic, key.queue
        share = self._shares.of(key.group, [key.topic], ordered=True)
        self._take_up(share, key.topic, topic, [queue], lambda: {queue: 0})
        return self._orders.get(key)

    def _take_up(self, share: Share, name: str, topic: TopicView, queues: list[QueueKey], begin: Begin) -> None:
        """Learn where ``share`` goes on in ``queues``, in new ones at ``begin``; drop the states of a deleted topic of the
        name.
        """
        self._shares.see(share, name, topic.incarnation)
        self._orders.see(name, topic.incarnation)
        new = [key for key in queues if key not in share.next]
        self._shares.load(share, queues, begin())
        for key in new:
            if share.committed.get(key, -1) < 0 and self._places.topics.tombstone(name):
                self._orders.drop(OrderKey(name, share.group, key[1]))

    def _left(self, pop: Pop, share: Share, key: QueueKey, place: Place, found: Portion | None) -> int:
        """How many messages of a queue are left for the next pop (remoting 5.2)."""
        order = OrderKey(key[0], pop.group, key[1])
        state, now = self._orders.get(order), self._orders.time_of(order)
        if state is not None and state.acked_below(share.next[key]).is_blocked(now, pop.attempt):
            return 0
        end = (place.queues.bounds(*key, bound=place.bound, floor=place.floor) or (0, 0))[1]
        return max(0, end - (share.next[key] if found is None else found.next_offset))

    def _of_queue(self, pop: Pop, share: Share, key: QueueKey, place: Place, portions: list[Portion]) -> Portion | None:
        order = OrderKey(key[0], pop.group, key[1])
        state = self._orders.get(order)
        state = None if state is None else state.acked_below(share.next[key])
        size = sum(len(frame) for one in portions for frame in one.frames)
        most = min(MAX_MESSAGES, pop.max_messages - sum(len(one.offsets) for one in portions))
        if most < 1 or (size >= self._max_bytes and portions):
            return None
        if state is not None and state.is_blocked(self._orders.time_of(order), pop.attempt):
            return None
        at = share.next[key]
        while self._reads < _MOST_READS and (not self._reads or monotonic_ms() < self._until_ms):
            self._reads += 1
            assert isinstance(place.queues, QueueReader)
            result = place.queues.read(
                *key,
                at,
                bound=place.bound,
                floor=place.floor,
                max_messages=most,
                max_bytes=max(self._max_bytes - size, 1),
                wanted=pop.wanted,
            )
            if not result.count and not self._moves_on(result, at, place):
                return None
            try:
                offsets = [queue_offset(self._places.log, one) for one in result.units["physical_offset"].tolist()]
                if at == share.next[key]:
                    share.next[key] = _first(state, at, offsets[0] if offsets else result.next_offset)
                kept = _handed_out(None if pop.repeats_acked else state, share.next[key], offsets)
                frames = place.queues.frames(result.units[kept]) if kept else []
            except OffsetOutOfRangeError:
                return None  # the segment was deleted just now
            if kept:
                if portions and size + sum(len(frame) for frame in frames) > self._max_bytes:
                    return None
                taken = tuple(offsets[number] for number in kept)
                return Portion(key[0], *key, at, taken, result.next_offset, frames, place.floor)
            if offsets and state is not None and offsets[-1] > state.offsets[-1]:
                return None  # more messages than can wait behind the first one
            at = max(result.next_offset, share.next[key])
        self._is_cut = True
        return None

    def _moves_on(self, result: PullResult, at: int, place: Place) -> bool:
        # After a crash the dispatcher catches up with the log, and the queue seems to end early.
        catches_up = at > result.max_offset and place.bound < self._control.get(Word.RECOVERED_END)
        return result.status in MOVES_ON and result.next_offset != at and not catches_up


def _first(state: OrderState | None, start: int, found: int) -> int:
    """The group's offset when ``found`` is the first message from ``start`` on that is there and wanted."""
    if found <= start or state is None or not state.follows(start):
        return found
    return max(found, state.acked_below(found).next_offset())


def _handed_out(state: OrderState | None, start: int, offsets: list[int]) -> list[int]:
    """The indexes of those of ``offsets`` that are handed out: not what was acked behind the first one, and only as many new
    ones as the state has room for.
    """
    if state is None or not state.follows(start):
        return list(range(len(offsets)))
    room = state.room(start)
    known = [index for index, offset in enumerate(offsets) if offset <= state.offsets[-1]]
    kept = [index for index in known if not state.passes_over(offsets[index], start)]
    return kept + list(range(len(known), len(offsets)))[:room]
