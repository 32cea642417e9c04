"""Goal: a stream gives each message behind its begin once, whatever happens to topics between any two calls of Spark, and
however often its driver dies. Nothing from before its begin ever comes, and a log that was cut hides nothing that came later.

Method: hypothesis plays producers, retention, administrators, cuts of the log and Spark's calls of the source, in any order,
on a store that is numbers only. The count of what must come is independent: it knows nothing of offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from commitmq.errors import FencedError
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory
from commitmq_plugins.spark import source
from commitmq_plugins.spark.options import SourceOptions, UnreadableRange
from commitmq_plugins.spark.source import StreamOffset, StreamReader
from commitmq_plugins.spark.stores import Slice

STORE = "a store"
SCHEMA = StructType([StructField("topic", StringType())])
TOPICS = st.sampled_from(("a", "b"))
QUEUES = st.integers(0, 2)


@dataclass(frozen=True)
class Sent:
    """A message: ``number`` is that of no other, ``physical`` may be."""

    number: int
    time: int
    physical: int


@dataclass
class Queue:
    """The messages of a queue, and how many of them expired."""

    messages: list[Sent] = field(default_factory=list)
    low: int = 0


@dataclass
class Topic:
    incarnation: int
    queues: list[Queue]


@dataclass
class World:
    """Topics, the end of the log, and its cuts. ``lists_all``: also queues that have nothing are listed."""

    topics: dict[str, Topic] = field(default_factory=dict)
    end: int = 0
    cuts: CutHistory = field(default_factory=CutHistory)
    lists_all: bool = True


class Numbers:
    """An origin without files: what the source asks, answered from the world."""

    name = identity = STORE

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def generation(self) -> int:
        return self._world.cuts.generation

    def is_cut_since(self, generation: int) -> bool:
        return self._world.cuts.end_since(generation) != NO_CUT

    def kept(self, one: Slice, generation: int) -> int:
        end = self._world.cuts.end_since(generation)
        if end == NO_CUT:
            return one.end
        messages = self._world.topics[one.topic].queues[one.queue_id].messages
        return next((at for at in range(one.first, one.end) if messages[at].physical >= end), one.end)

    def topics(self) -> Collection[str]:
        return self._world.topics

    def slices(self, wants: Callable[[str], bool]) -> list[Slice]:
        return [
            Slice(name, number, False, queue.low, len(queue.messages), incarnation=str(topic.incarnation))
            for name, topic in sorted(self._world.topics.items())
            if wants(name)
            for number, queue in enumerate(topic.queues)
            if self._world.lists_all or queue.messages
        ]

    def offset_by_time(self, one: Slice, timestamp: int) -> int:
        messages = self._world.topics[one.topic].queues[one.queue_id].messages
        return next((at for at in range(one.first, one.end) if messages[at].time >= timestamp), one.end)

    def parts_of(self, slices: Sequence[Slice], *, least: int, max_bytes: int) -> int:
        del max_bytes
        assert all(one.count >= 0 for one in slices)
        return least

    def partitions(self, slices: Sequence[Slice], parts: int) -> list[Slice]:
        del parts
        return list(slices)

    def close(self) -> None:
        pass


class Noted:
    """The policy of a stream that goes on: it keeps what is missing."""

    def __init__(self) -> None:
        self.gaps: list[UnreadableRange] = []

    def take(self, gaps: Iterable[UnreadableRange]) -> None:
        self.gaps += [gap for gap in gaps if gap.first < gap.end]


class Stream(RuleBasedStateMachine):
    """The world, Spark's log of offsets and commits, and a sink that keeps one set of rows for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.now = 0
        self.made = 0
        self.sent: dict[int, tuple[str, int, int, int]] = {}  # number: topic, incarnation, queue, queue offset
        self.before: set[int] = set()  # the stream begins behind these
        self.gone: set[int] = set()  # not in the log any more
        self.cut: set[int] = set()  # not in it since a cut
        self.owed: set[int] = set()  # expired from a queue of which the stream had a position
        self.offsets: list[dict[str, Any]] = []  # durable before a micro-batch runs
        self.commits = 0
        self.known: set[tuple[str, int, int]] = set()  # topic, incarnation, queue: what the stream has a position of
        self.rows: list[set[int]] = []
        self.noted = Noted()
        self.patch = mock.patch.object(source, "open_origins", return_value=[Numbers(self.world)])
        self.patch.start()

    def teardown(self) -> None:
        try:
            self.catch_up()
        finally:
            self.patch.stop()

    @initialize(
        start=st.sampled_from(("earliest", "latest", "time")), moment=st.integers(0, 12), lists_all=st.booleans()
    )
    def begin(self, start: str, moment: int, lists_all: bool) -> None:
        given = {"startingTimestamp": str(moment)} if start == "time" else {"startingOffsets": start}
        self.start, self.moment = start, moment
        self.world.lists_all = lists_all
        self.options = SourceOptions.parse({"store": STORE, "topicsPattern": ".*", **given})
        self.die()

    # ------------------------------------------------------------ the world

    @rule(topic=TOPICS, queues=st.integers(1, 3))
    def make(self, topic: str, queues: int) -> None:
        if topic not in self.world.topics:
            self.made += 1
            self.world.topics[topic] = Topic(self.made, [Queue() for _ in range(queues)])

    @rule(topic=TOPICS)
    def grow(self, topic: str) -> None:
        if topic in self.world.topics:
            self.world.topics[topic].queues.append(Queue())

    @rule(topic=TOPICS)
    def delete(self, topic: str) -> None:
        for queue in self.world.topics.pop(topic, Topic(0, [])).queues:
            self.gone.update(one.number for one in queue.messages[queue.low :])

    @rule(topic=TOPICS, queue=QUEUES, count=st.integers(1, 5))
    def send(self, topic: str, queue: int, count: int) -> None:
        if topic in self.world.topics:
            found = self.world.topics[topic]
            number = queue % len(found.queues)
            messages = found.queues[number].messages
            for _ in range(count):
                self.now += 1
                self.sent[self.now] = (topic, found.incarnation, number, len(messages))
                messages.append(Sent(self.now, self.now, self.world.end))
                self.world.end += 1

    @rule(topic=TOPICS, queue=QUEUES, count=st.integers(1, 5))
    def expire(self, topic: str, queue: int, count: int) -> None:
        if topic in self.world.topics:
            found = self.world.topics[topic]
            number = queue % len(found.queues)
            one = found.queues[number]
            low = min(one.low + count, len(one.messages))
            expired = {message.number for message in one.messages[one.low : low]}
            self.gone |= expired
            if (topic, found.incarnation, number) in self.known:
                self.owed |= expired
            one.low = low

    @rule(count=st.integers(0, 8))
    def cut_log(self, count: int) -> None:
        """A power cut or a repair: the last ``count`` messages are gone, and others will get their places."""
        self.world.end = max(0, self.world.end - count)
        self.world.cuts.add(self.world.end, "recovery")
        for topic in self.world.topics.values():
            for queue in topic.queues:
                lost = {one.number for one in queue.messages if one.physical >= self.world.end}
                queue.messages = [one for one in queue.messages if one.number not in lost]
                queue.low = min(queue.low, len(queue.messages))
                self.gone |= lost
                self.cut |= lost

    # ------------------------------------------------------------ Spark

    @rule()
    def die(self) -> None:
        """The driver dies, and another begins with what is durable."""
        self.reader = StreamReader(self.options, SCHEMA)
        self.reader._policy = self.noted  # type: ignore[assignment]

    def _start(self) -> dict[str, Any]:
        return self.offsets[self.commits - 1] if self.commits else self.reader.initialOffset()

    @precondition(lambda self: len(self.offsets) == self.commits)
    @rule(limit=st.sampled_from((ReadAllAvailable(), ReadMaxRows(1), ReadMaxRows(4))), dies=st.booleans())
    def look(self, limit: ReadLimit, dies: bool) -> None:
        """Spark asks for the end of the next micro-batch, and writes it down unless it ``dies`` before."""
        start = self._start()
        end = self.reader.latestOffset(start, limit)
        if dies:
            self.die()
            return
        if not self.offsets:
            self.before = {
                number
                for number in self.sent
                if self.start == "latest" or (self.start == "time" and number < self.moment) or number in self.gone
            }
        elif end == start:
            return  # nothing new is no micro-batch
        self.offsets.append(end)
        self.known.update(
            (one.topic, int(one.incarnation), one.queue_id) for one in Numbers(self.world).slices(lambda _: True)
        )
        self.rows.append(set())

    @precondition(lambda self: len(self.offsets) > self.commits)
    @rule(dies=st.booleans())
    def run(self, dies: bool) -> None:
        """The micro-batch runs; the driver ``dies`` before it notes that."""
        slices: list[Any] = list(self.reader.partitions(self._start(), self.offsets[self.commits]))
        rows = [
            message.number
            for one in slices
            for message in self.world.topics[one.topic].queues[one.queue_id].messages[one.first : one.end]
        ]
        assert len(set(rows)) == len(rows)
        self.rows[self.commits] = set(rows)  # as an idempotent sink does
        if dies:
            self.die()
        else:
            self.commits += 1

    def catch_up(self) -> None:
        if not hasattr(self, "reader"):
            return
        for _ in range(1000):
            while len(self.offsets) > self.commits:
                self.run(dies=False)
            before = len(self.offsets)
            self.look(ReadAllAvailable(), dies=False)
            if len(self.offsets) == before:
                break
        given = set().union(*self.rows)
        missing = set(self.sent) - self.before - given
        assert missing <= self.gone
        told = {(gap.topic, gap.queue_id, at) for gap in self.noted.gaps for at in range(gap.first, gap.end)}
        for number in ((missing & self.owed) - self.cut) | (given & self.cut):
            topic, incarnation, queue, offset = self.sent[number]
            if topic in self.world.topics and self.world.topics[topic].incarnation == incarnation:
                assert (topic, queue, offset) in told

    @invariant()
    def nothing_comes_twice_or_from_before(self) -> None:
        given = [number for rows in self.rows for number in rows]
        assert len(set(given)) == len(given)
        assert self.before.isdisjoint(given)


Stream.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestStream = Stream.TestCase


def test_a_topic_that_is_gone_keeps_no_progress_back() -> None:
    """What is told to the group of a stream: each topic alone, where a node refuses all together."""

    class Node:
        stored: ClassVar[set[tuple[str, int, int]]] = set()

        def commit_offsets(self, group: str, offsets: Iterable[tuple[str, int, int]], **_: object) -> None:
            if any(topic == "gone" for topic, _, _ in offsets):
                raise FencedError("topic gone is deleted")
            self.stored.update(offsets)

    stream = StreamReader(SourceOptions.parse({"node": STORE, "topics": "a,b,gone", "group": "g"}), SCHEMA)
    done = StreamOffset(positions={STORE: {"a": {"0": 3}, "gone": {"0": 5}, "b": {"1": 4}}})
    with mock.patch.object(source, "Admin", return_value=nullcontext(Node())):
        stream.commit(done.to_json())
        assert Node.stored == {("a", 0, 3), ("b", 1, 4)}
        assert stream._committed == {STORE: {"a": {"0": 3}, "b": {"1": 4}}}
