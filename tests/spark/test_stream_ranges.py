"""Goal: a stream gives each message behind its begin once, whatever happens to topics between any two calls of Spark, and
however often its driver dies. Nothing from before its begin ever comes.

Method: hypothesis plays producers, retention, administrators and Spark's calls of the source, in any order, on a store that
is numbers only. The count of what must come is independent: it knows nothing of offsets that were stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from commitmq_plugins.spark import streaming
from commitmq_plugins.spark.gaps import Gap
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.stores import Slice
from commitmq_plugins.spark.streaming import StreamReader

STORE = "a store"
SCHEMA = StructType([StructField("topic", StringType())])
TOPICS = st.sampled_from(("a", "b"))
QUEUES = st.integers(0, 2)

Place = tuple[str, int, int, int]  # topic, incarnation, queue, queue offset


@dataclass
class Queue:
    """The messages of a queue: the store time of each, and how many expired."""

    times: list[int] = field(default_factory=list)
    low: int = 0


@dataclass
class Topic:
    incarnation: int
    queues: list[Queue]


class Numbers:
    """An origin without files: what the source asks, answered from ``topics``."""

    name = identity = STORE

    def __init__(self, topics: dict[str, Topic]) -> None:
        self._topics = topics

    def slices(self, wants: Callable[[str], bool]) -> list[Slice]:
        return [
            Slice(name, number, False, queue.low, len(queue.times), incarnation=str(topic.incarnation))
            for name, topic in sorted(self._topics.items())
            if wants(name)
            for number, queue in enumerate(topic.queues)
        ]

    def offset_by_time(self, one: Slice, timestamp: int) -> int:
        times = self._topics[one.topic].queues[one.queue_id].times
        return next((at for at in range(one.first, one.end) if times[at] >= timestamp), one.end)

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
        self.gaps: list[Gap] = []

    def take(self, gaps: Iterable[Gap]) -> None:
        self.gaps += [gap for gap in gaps if gap.first < gap.end]


class Stream(RuleBasedStateMachine):
    """The world, Spark's log of offsets and commits, and a sink that keeps one set of rows for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.topics: dict[str, Topic] = {}
        self.now = 0
        self.made = 0
        self.everything: set[Place] = set()
        self.offsets: list[dict[str, Any]] = []  # durable before a micro-batch runs
        self.commits = 0
        self.rows: list[set[Place]] = []
        self.expected_from: dict[tuple[str, int, int], int] = {}
        self.expired: set[Place] = set()
        self.noted = Noted()
        self.patch = mock.patch.object(streaming, "open_origins", return_value=[Numbers(self.topics)])
        self.patch.start()

    def teardown(self) -> None:
        try:
            self.catch_up()
        finally:
            self.patch.stop()

    @initialize(start=st.sampled_from(("earliest", "latest", "time")), moment=st.integers(0, 12))
    def begin(self, start: str, moment: int) -> None:
        given = {"startingTimestamp": str(moment)} if start == "time" else {"startingOffsets": start}
        self.start, self.moment = start, moment
        self.options = SourceOptions.parse({"store": STORE, "topicsPattern": ".*", **given})
        self.die()

    # ------------------------------------------------------------ the world

    @rule(topic=TOPICS, queues=st.integers(1, 3))
    def make(self, topic: str, queues: int) -> None:
        if topic not in self.topics:
            self.made += 1
            self.topics[topic] = Topic(self.made, [Queue() for _ in range(queues)])

    @rule(topic=TOPICS)
    def grow(self, topic: str) -> None:
        if topic in self.topics:
            self.topics[topic].queues.append(Queue())

    @rule(topic=TOPICS)
    def delete(self, topic: str) -> None:
        self.topics.pop(topic, None)

    @rule(topic=TOPICS, queue=QUEUES, count=st.integers(1, 5))
    def send(self, topic: str, queue: int, count: int) -> None:
        if topic in self.topics:
            found = self.topics[topic]
            number = queue % len(found.queues)
            for _ in range(count):
                times = found.queues[number].times
                self.everything.add((topic, found.incarnation, number, len(times)))
                self.now += 1
                times.append(self.now)

    @rule(topic=TOPICS, queue=QUEUES, count=st.integers(1, 5))
    def expire(self, topic: str, queue: int, count: int) -> None:
        if topic in self.topics:
            found = self.topics[topic]
            number = queue % len(found.queues)
            one = found.queues[number]
            for _ in range(min(count, len(one.times) - one.low)):
                self.expired.add((topic, found.incarnation, number, one.low))
                one.low += 1

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
            for name, topic in self.topics.items():
                for number, queue in enumerate(topic.queues):
                    first = {
                        "earliest": queue.low,
                        "latest": len(queue.times),
                        "time": next(
                            (at for at in range(queue.low, len(queue.times)) if queue.times[at] >= self.moment),
                            len(queue.times),
                        ),
                    }[self.start]
                    self.expected_from[name, topic.incarnation, number] = first
        elif end == start:
            return  # nothing new is no micro-batch
        self.offsets.append(end)
        self.rows.append(set())

    @precondition(lambda self: len(self.offsets) > self.commits)
    @rule(dies=st.booleans())
    def run(self, dies: bool) -> None:
        """The micro-batch runs; the driver ``dies`` before it notes that."""
        slices: list[Any] = list(self.reader.partitions(self._start(), self.offsets[self.commits]))
        rows = [
            (one.topic, int(one.incarnation), one.queue_id, offset)
            for one in slices
            for offset in range(one.first, one.end)
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
        alive = {(name, topic.incarnation) for name, topic in self.topics.items()}
        given = set().union(*self.rows) if self.rows else set()
        missing = {place for place in self.everything if self.must_come(place) and place not in given}
        gone = {place for place in missing if place[:2] not in alive}
        told = {(gap.topic, gap.queue_id, offset) for gap in self.noted.gaps for offset in range(gap.first, gap.end)}
        assert missing - gone <= self.expired
        assert {(topic, queue, offset) for topic, _, queue, offset in missing - gone} <= told

    def must_come(self, place: Place) -> bool:
        return place[3] >= self.expected_from.get(place[:3], 0)

    @invariant()
    def nothing_comes_twice_or_from_before(self) -> None:
        given = [place for rows in self.rows for place in rows]
        assert len(set(given)) == len(given)
        assert all(map(self.must_come, given))
        assert set(given) <= self.everything


Stream.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestStream = Stream.TestCase
