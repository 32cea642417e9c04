"""Finds the messages of a pop: from the retry topic and from all queues of a topic, in RocketMQ's order (remoting 5.2).

The rates of ``[flow]`` for receives of messages that a group shares: those of pulls, counted by this process.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from commitmq.control import ControlBlock, Word
from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError, ProtocolError
from commitmq.format.constants import LMQ_PREFIX, QUEUE_OFFSET_OFFSET, Property
from commitmq.security.audit import Actor
from commitmq.semantics.pop import MAX_MESSAGES, USUAL_NAMES, OrderState, RetryNames
from commitmq.semantics.retry import is_retry_topic
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.metadata.topic_config import MESSAGE_TYPE, MESSAGE_TYPE_PRIORITY
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.queues.record_filter import PullResult, PullStatus
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.points import CheckPoints
from commitmq.workers.pop.requests import PopRequest
from commitmq.workers.pop.shares import SHARE, QueueKey, Share, Shares
from commitmq.workers.reader.places import ReadableTopic, ReadableTopics
from commitmq.workers.reader.pulls import AnswerSocket
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.flow import Flow, FlowRefusedError
from commitmq.workers.runtime.topic_view import TopicView

_LONG: Final = struct.Struct(">q")
_LOTS: Final = 100
_RETRY_FIRST: Final = 20
_RETRY_FIRST_BY_PRIORITY: Final = 0
"""Of so many lots these look into the retry topic first: popFromRetryProbability and popFromRetryProbabilityForPriority."""
_MOST_READS: Final = 256
MOST_MS: Final = 50
MOVES_ON: Final = (
    PullStatus.NO_MATCHED_MESSAGE,
    PullStatus.OFFSET_TOO_SMALL,
    PullStatus.OFFSET_OVERFLOW_BADLY,
    PullStatus.MESSAGE_WAS_REMOVING,
)


@dataclass(slots=True)
class PoppedMessages:
    """Messages of one queue that are delivered together: those of one check point."""

    popped: str
    """The topic that the consumer asked for."""
    topic: str
    """The topic of the store that has them."""
    queue: int
    start: int
    """Where the queue was read from."""
    offsets: tuple[int, ...]
    next_offset: int
    frames: list[Any]
    floor: int = 0
    """Below it the log has nothing of the topic."""


@dataclass(slots=True)
class PopResult:
    """``moved``: the offsets of the share before, by queue, to take the pop back."""

    share: Share
    portions: list[PoppedMessages] = field(default_factory=list)
    moved: dict[QueueKey, int] = field(default_factory=dict)
    count: int = 0
    size: int = 0
    reads: int = 0
    """Reads of queues: bounded, for a filter may pass over many messages."""
    until_ms: int = 0
    is_cut: bool = False
    """Whether reads or time were over before all queues were looked into."""
    rest: int = 0
    """Messages left in the queues that the pop came to, when it asks for that: RocketMQ's restNum."""
    ends: dict[QueueKey, int] = field(default_factory=dict)
    """Where those queues end that were read, for ``rest``."""


class Finder:
    """Finds the messages of a pop."""

    def __init__(
        self,
        control: ControlBlock,
        places: ReadableTopics,
        shares: Shares,
        points: CheckPoints,
        max_bytes: int,
        seed: int = 0,
        names: RetryNames = USUAL_NAMES,
    ) -> None:
        self._control, self._names = control, names
        self._places, self.shares, self._points = places, shares, points
        self._max_bytes = max_bytes
        self._random = random.Random(seed or None)

    def check(self, pop: PopRequest) -> None:
        """Raises ProtocolError for a topic that cannot be shared. Missing ones are taken out of a pop that waits for them."""
        for name in list(pop.topics):
            try:
                topic = self._places.topic(name)
            except ProtocolError as error:
                if pop.late is None or error.code != "TOPIC_NOT_EXIST":
                    raise
                pop.topics.remove(name)
                pop.missing.append(name)
                continue
            if not topic.is_readable:
                raise ProtocolError("NO_PERMISSION", f"topic {name!r} may not be read")
            if is_retry_topic(name) or name.startswith(LMQ_PREFIX):
                raise ProtocolError("INVALID_PARAMETER", f"the queues of {name!r} cannot be shared: name a plain topic")
            if topic.is_memory or topic.is_batch:
                kind = "is kept in memory" if topic.is_memory else "has queue.type=BatchCQ"
                raise ProtocolError("INVALID_PARAMETER", f"topic {name!r} {kind}, so its queues cannot be shared")
            if pop.queue >= 0:
                self._places.check_queue(name, topic, pop.queue)

    def find(self, pop: PopRequest) -> PopResult:
        """The messages for ``pop``, at most as many as it wants and its limits allow. Raises ProtocolError, or what a
        read or a filter raises; then no queue has moved.
        """
        share = self.shares.of(pop.group, pop.topics)
        if share.problem:
            raise ProtocolError("NO_PERMISSION", share.problem)
        found = PopResult(share, until_ms=monotonic_ms() + MOST_MS)
        topics = list(pop.topics)
        self._random.shuffle(topics)
        lot = self._random.randrange(_LOTS)
        try:
            for popped in topics:
                is_ranked = lot < share.priority_factor and self._is_ranked(popped)
                retry_first = lot < (_RETRY_FIRST_BY_PRIORITY if is_ranked else _RETRY_FIRST)
                if retry_first:
                    self._of_retries(pop, found, popped, lot)
                self._of_topic(pop, found, popped, popped, is_ranked=is_ranked)
                if not retry_first:
                    self._of_retries(pop, found, popped, lot)
        except BaseException:
            take_back(found)  # nobody gets the messages found so far
            raise
        return found

    def _of_retries(self, pop: PopRequest, found: PopResult, popped: str, lot: int) -> None:
        """Of one retry topic at most: an answer's texts cannot tell two apart, says RocketMQ."""
        before = len(found.portions)
        for name in self._names.in_turn(popped, pop.group, lot):
            if len(found.portions) == before and found.count < pop.max_messages:
                self._of_topic(pop, found, popped, name, is_ranked=False)

    def _of_topic(self, pop: PopRequest, found: PopResult, popped: str, name: str, *, is_ranked: bool) -> None:
        """Messages of all queues of ``name``, with ``is_ranked`` from the highest one on. A full pop continues to the
        queues of its own topic only to say how many messages are left.
        """
        topic = self._places.topics.get(name)
        if topic is None or not self._places.topics.is_cleared(name):
            return
        if found.count >= pop.max_messages and not pop.counts_rest:
            return
        place = self._places.place(name, topic)
        if not isinstance(place.queues, QueueReader):
            return
        if name != popped and (end := self._places.topics.tombstone(popped)) > place.floor:
            place = place._replace(floor=end)  # what came back of a deleted topic went with it
        # (A retry topic is looked into as a whole.)
        numbers = range(topic.read_queues) if pop.queue < 0 or is_retry_topic(name) else [pop.queue]
        queues = [(name, queue) for queue in numbers]
        self.shares.see(found.share, name, topic.incarnation)
        asked_ms = monotonic_ms()
        self.shares.load(found.share, queues, self.begin(pop, found.share, place, queues))
        found.until_ms += monotonic_ms() - asked_ms  # the coordinator's time is none of the reads
        if is_ranked:
            queues.reverse()  # (commitmq_plugins.rocketmq.broker.sending)
        else:
            first = self._random.randrange(len(queues)) if queues else 0
            queues = queues[first:] + queues[:first]
        for key in queues:
            while found.count < pop.max_messages and self._of_queue(pop, found, popped, key, place):
                pass
            if pop.counts_rest:
                found.rest += self._rest(found, key, place)

    @staticmethod
    def _rest(found: PopResult, key: QueueKey, place: ReadableTopic) -> int:
        """How many messages the queue has behind where the group continues."""
        end = found.ends.get(key)
        if end is None:
            end = (place.queues.bounds(*key, bound=place.bound, floor=place.floor) or (0, 0))[1]
        return max(0, end - found.share.next[key])

    def _is_ranked(self, name: str) -> bool:
        """Whether the queues of a topic are priorities."""
        topic = self._places.topics.get(name)
        return topic is not None and topic.attribute(MESSAGE_TYPE, "") == MESSAGE_TYPE_PRIORITY

    @staticmethod
    def begin(pop: PopRequest, share: Share, place: ReadableTopic, queues: list[QueueKey]) -> dict[QueueKey, int]:
        """Where ``share`` begins in those of ``queues`` that it does not know, when it has no offset there."""
        begin = {}
        for key in queues:
            if key not in share.next:
                bounds = place.queues.bounds(*key, bound=place.bound, floor=place.floor) or (0, 0)
                is_new = is_retry_topic(key[0]) or key[0] in (pop.late or ())
                begin[key] = bounds[0] if is_new else _begin(pop.start, *bounds)
        return begin

    def _of_queue(self, pop: PopRequest, found: PopResult, popped: str, key: QueueKey, place: ReadableTopic) -> bool:
        """Take messages of one queue. True when the queue may have more for this pop."""
        share, (name, queue) = found.share, key
        of_queue = sum(len(one.offsets) for one in found.portions if (one.topic, one.queue) == key)
        limit = self._points.room(pop.group, name, queue, pop.client, taken=found.count, of_queue=of_queue)
        most = min(MAX_MESSAGES, pop.max_messages - found.count, limit)
        room = self._max_bytes - found.size
        if most < 1 or (room < 1 and found.count):
            return False
        if found.reads >= _MOST_READS or (found.reads and monotonic_ms() >= found.until_ms):
            found.is_cut = True
            return False
        found.reads += 1
        start = share.next[key]
        wanted = None if is_retry_topic(name) else pop.wanted
        result = place.queues.read(
            name,
            queue,
            start,
            bound=place.bound,
            floor=place.floor,
            max_messages=most,
            max_bytes=max(room, 1),
            wanted=wanted,
        )
        if pop.counts_rest:
            found.ends[key] = result.max_offset
        if not result.count:
            # After a crash the dispatcher catches up with the log, and the queue seems to end early.
            catches_up = start > result.max_offset and place.bound < self._control.get(Word.RECOVERED_END)
            if result.status not in MOVES_ON or result.next_offset == start or catches_up:
                return False
            found.moved.setdefault(key, start)
            share.next[key] = result.next_offset
            return True
        units = result.units if not is_retry_topic(name) else self._own(result.units, pop.group)
        if not len(units):
            found.moved.setdefault(key, start)
            share.next[key] = result.next_offset
            return True
        size = int(units["size"].sum())
        if found.count and size > room:
            return False
        assert isinstance(place.queues, QueueReader)
        try:
            frames = place.queues.frames(units)
            offsets = tuple(self._offsets(units))
        except OffsetOutOfRangeError:
            return False  # the segment was deleted just now
        found.moved.setdefault(key, start)
        share.next[key] = result.next_offset
        found.portions.append(
            PoppedMessages(popped, name, queue, start, offsets, result.next_offset, frames, place.floor)
        )
        found.count += len(units)
        found.size += size
        return True

    def _own(self, units: Any, group: str) -> Any:
        """The messages of a retry topic that are of ``group``. Group ``a`` with topic ``b_c`` and group ``a_b`` with
        topic ``c`` have the same retry topic in RocketMQ.
        """
        mine = []
        for place in units["physical_offset"].tolist():
            try:
                owner = self._places.log.record(place, check_crc=False).properties.get(Property.ORIGIN_GROUP, group)
            except (CorruptRecordError, OffsetOutOfRangeError):
                owner = group  # the consumer reports it
            mine.append(owner == group)
        return units[mine]

    def _offsets(self, units: Any) -> Iterator[int]:
        log = self._places.log
        base = end = 0
        for place in units["physical_offset"].tolist():
            if not base <= place < end:
                base = place - place % log.segment_bytes
                end = base + log.segment_bytes
                segment = log.read(base, log.segment_bytes)
            yield _LONG.unpack_from(segment, place - base + QUEUE_OFFSET_OFFSET)[0]


def queue_offset(log: CommitLog, place: int) -> int:
    """The queue offset in the record at ``place``."""
    return int.from_bytes(log.read(place + QUEUE_OFFSET_OFFSET, 8), "big")


def _begin(start: str, least: int, end: int) -> int:
    """Where a group begins between ``least`` and ``end``; with ``last`` as RocketMQ's consumers do (remoting 5.2)."""
    if start == "last":
        return max(least, end - 1) if least > 0 else 0
    return end if start == "latest" else least


def take_back(found: PopResult, stored: int = 0) -> None:
    """Undo a pop of whose check points only the first ``stored`` are stored."""
    kept = {(one.topic, one.queue): one.next_offset for one in found.portions[:stored]}
    for key, offset in {**found.moved, **kept}.items():
        if found.share.next.get(key, -1) > offset:
            found.share.next[key] = offset


class PopRates:
    """``flow`` is None while all rates are off. While ``is_on`` is false, nothing is to be asked."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.flow: Flow | None = None
        self.is_on = False
        self._take_settings()
        context.on_settings(lambda _config: self._take_settings())

    def _take_settings(self) -> None:
        self.flow = Flow.of_pulls(self._context, self.flow)
        self.is_on = self.flow is not None or self._context.quotas.bounds_names

    def admit(self, pop: PopRequest, header: dict[str, Any], answers: AnswerSocket) -> None:
        """Learn whose rates hold. Raise ProtocolError SYSTEM_BUSY when the client, a topic, the group or the user is over its
        rate.

        A receive that waits for messages passes now; what it gets is taken from its rates when it gets it.
        """
        told = header.get("client")
        pop.owner = told if type(told) is str and answers.is_local(pop.client) else pop.client
        pop.user = answers.user_of(header)
        flow = self.flow
        if flow is None:
            return
        try:
            flow.admit(pop.owner, pop.topics[0], pop.group, pop.user)
            for topic in pop.topics[1:]:
                flow.admit(None, topic, None, None)
        except FlowRefusedError as refusal:
            raise ProtocolError(refusal.code, refusal.sentence, retry_after_ms=refusal.retry_after_ms) from refusal

    def on_behalf_of(self, pop: PopRequest) -> dict[str, Any]:
        """What a request to the coordinator carries, for which a group may be made by the receive."""
        return self._context.vouching.fields(SHARE, Actor(pop.user)) if pop.user else {}

    def take(self, flow: Flow, pop: PopRequest, portions: list[PoppedMessages]) -> None:
        """Take the cost of the messages that were delivered."""
        for one in portions:
            size_bytes = sum(map(len, one.frames))
            flow.take(len(one.offsets), size_bytes, pop.owner or pop.client, one.popped, pop.group, pop.user)


Begin = Callable[[], dict[QueueKey, int]]
"""Where a group begins in the queues that it does not know yet."""


class OrderedPopResult(NamedTuple):
    """What a pop has found. ``is_cut``: time or reads were over before all queues were looked into. The group's offsets
    in ``share`` are those of the first messages.
    """

    share: Share
    portions: list[PoppedMessages]
    is_cut: bool
    rest: int = 0
    """Messages left in the queues that hand out any, when the pop asks for that: those of blocked queues do not count."""


class OrderedFinder:
    """Finds the messages of an ordered pop: of queues that are not blocked, from the group's offset on (remoting 5.2,
    5.7). One instance for one process.
    """

    def __init__(
        self, control: ControlBlock, places: ReadableTopics, shares: Shares, orders: Orders, max_bytes: int
    ) -> None:
        self._control = control
        self._places, self._shares, self._orders = places, shares, orders
        self._max_bytes = max_bytes
        self._random = random.Random()
        self._reads = self._until_ms = 0
        self._is_cut = False
        self._rest = 0

    def find(self, pop: PopRequest) -> OrderedPopResult:
        """The messages for ``pop``: at most MAX_MESSAGES of one queue. An offset moves over what the filter does not
        want. Raises ProtocolError, or what a read or a filter raises.
        """
        share = self._shares.of(pop.group, pop.topics, ordered=True)
        if share.problem:
            raise ProtocolError("NO_PERMISSION", share.problem)
        self._reads, self._until_ms, self._is_cut, self._rest = 0, monotonic_ms() + MOST_MS, False, 0
        portions: list[PoppedMessages] = []
        topics = list(pop.topics)
        self._random.shuffle(topics)
        for name in topics:
            self._of_topic(pop, share, name, portions)
        return OrderedPopResult(share, portions, self._is_cut, self._rest)

    def _of_topic(self, pop: PopRequest, share: Share, name: str, portions: list[PoppedMessages]) -> None:
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
        """Learn where ``share`` continues in ``queues``, new ones at ``begin``; drop the states of a deleted topic."""
        self._shares.see(share, name, topic.incarnation)
        self._orders.see(name, topic.incarnation)
        new = [key for key in queues if key not in share.next]
        self._shares.load(share, queues, begin())
        for key in new:
            if share.committed.get(key, -1) < 0 and self._places.topics.tombstone(name):
                self._orders.drop(OrderKey(name, share.group, key[1]))

    def _left(
        self, pop: PopRequest, share: Share, key: QueueKey, place: ReadableTopic, found: PoppedMessages | None
    ) -> int:
        """How many messages of a queue are left for the next pop (remoting 5.2)."""
        order = OrderKey(key[0], pop.group, key[1])
        state, now = self._orders.get(order), self._orders.time_of(order)
        if state is not None and state.acked_below(share.next[key]).is_blocked(now, pop.attempt):
            return 0
        end = (place.queues.bounds(*key, bound=place.bound, floor=place.floor) or (0, 0))[1]
        return max(0, end - (share.next[key] if found is None else found.next_offset))

    def _of_queue(
        self, pop: PopRequest, share: Share, key: QueueKey, place: ReadableTopic, portions: list[PoppedMessages]
    ) -> PoppedMessages | None:
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
                return PoppedMessages(key[0], *key, at, taken, result.next_offset, frames, place.floor)
            if offsets and state is not None and offsets[-1] > state.offsets[-1]:
                return None  # more messages than can wait behind the first one
            at = max(result.next_offset, share.next[key])
        self._is_cut = True
        return None

    def _moves_on(self, result: PullResult, at: int, place: ReadableTopic) -> bool:
        # After a crash the dispatcher catches up with the log, and the queue seems to end early.
        catches_up = at > result.max_offset and place.bound < self._control.get(Word.RECOVERED_END)
        return result.status in MOVES_ON and result.next_offset != at and not catches_up


def _first(state: OrderState | None, start: int, found: int) -> int:
    """The group's offset when ``found`` is the first message from ``start`` on that is there and wanted."""
    if found <= start or state is None or not state.follows(start):
        return found
    return max(found, state.acked_below(found).next_offset())


def _handed_out(state: OrderState | None, start: int, offsets: list[int]) -> list[int]:
    """The indexes of those of ``offsets`` that are delivered: not what was acked behind the first one, and only as many
    new ones as the state has room for.
    """
    if state is None or not state.follows(start):
        return list(range(len(offsets)))
    room = state.room(start)
    known = [index for index, offset in enumerate(offsets) if offset <= state.offsets[-1]]
    kept = [index for index in known if not state.passes_over(offsets[index], start)]
    return kept + list(range(len(known), len(offsets)))[:room]
