"""Goal: a pop looks where RocketMQ's would (remoting 5.2): restNum, both forms of retry topics, and priority.factor.

Method: the finder with queues of a few lines, whose messages have the numbers 0, 1, 2, …; chance is the test's.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from commitmq.config import PopConfig
from commitmq.semantics.pop import RetryNames
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.queues.record_filter import PullStatus
from commitmq.workers.pop import finder as finder_module
from commitmq.workers.pop.finder import Finder, PopResult
from commitmq.workers.pop.points import CheckPoints
from commitmq.workers.pop.requests import PopRequest
from commitmq.workers.pop.shares import Share
from commitmq.workers.runtime.topic_view import TopicView

V1, V2 = "%RETRY%g_orders", "%RETRY%g+orders"
MOST = 64
RECORD = 100


class Queues(QueueReader):
    """So many messages by topic and queue; a filter passes over those of ``unwanted``."""

    def __init__(self, counts: dict[tuple[str, int], int]) -> None:
        self.counts, self.unwanted = counts, 0

    def bounds(self, topic: str, queue: int, **_: Any) -> Any:
        return 0, self.counts.get((topic, queue), 0)

    def read(self, topic: str, queue: int, offset: int, *, max_messages: int, **_: Any) -> Any:
        end = self.counts.get((topic, queue), 0)
        if offset >= end:
            return SimpleNamespace(count=0, status=PullStatus.OFFSET_OVERFLOW_ONE, next_offset=offset, max_offset=end)
        if offset < self.unwanted:
            status, behind = PullStatus.NO_MATCHED_MESSAGE, min(self.unwanted, end)
            return SimpleNamespace(count=0, status=status, next_offset=behind, max_offset=end)
        found = range(offset, min(end, offset + max_messages))
        units = np.array([(one * RECORD, RECORD) for one in found], [("physical_offset", "<i8"), ("size", "<i4")])
        return SimpleNamespace(count=len(found), units=units, next_offset=found.stop, max_offset=end)

    def frames(self, units: Any) -> list[Any]:
        return [b"x" * RECORD] * len(units)


class World:
    """A node with these messages."""

    def __init__(self, counts: dict[tuple[str, int], int], **attributes: str) -> None:
        self.queues, self.share = Queues(counts), Share("g")
        self._wide = Counter(topic for topic, _ in counts)
        self._attributes = tuple((name.replace("_", "."), value) for name, value in attributes.items())
        data = b"".join(bytes(20) + number.to_bytes(8, "big") + bytes(RECORD - 28) for number in range(MOST))
        record = SimpleNamespace(properties={})
        self.log = SimpleNamespace(
            segment_bytes=len(data),
            read=lambda place, size: data[place : place + size],
            record=lambda place, check_crc: record,
        )
        self.topics = SimpleNamespace(get=self._topic, is_cleared=lambda name: True, tombstone=lambda name: 0)
        self.clock_ms = self.load_ms = 0

    def _topic(self, name: str) -> TopicView | None:
        count = self._wide[name]
        return TopicView(count, count, 6, self._attributes if name == "orders" else ()) if count else None

    def place(self, name: str, topic: Any) -> Any:
        return SimpleNamespace(queues=self.queues, bound=1 << 40, floor=0)

    def find(
        self, most: int = 32, seed: int = 1, names: RetryNames | None = None, **more: Any
    ) -> tuple[PopResult, PopRequest]:
        """One pop; what it finds is handed out."""
        shares = MagicMock(of=lambda group, topics: self.share)

        def load(share: Share, queues: list[Any], begin: dict[Any, int]) -> None:
            self.clock_ms += self.load_ms
            for key in queues:
                share.next.setdefault(key, 0)

        shares.load = load
        pop = PopRequest(b"c", 1, "g", ["orders"], most, 5_000, 0, None, "earliest", **{"counts_rest": True, **more})
        points = CheckPoints(PopConfig())
        finder = Finder(MagicMock(), self, shares, points, 1 << 20, seed, names or RetryNames())  # type: ignore[arg-type]
        return finder.find(pop), pop


def places(found: PopResult) -> list[tuple[str, int]]:
    return [(one.topic, one.queue) for one in found.portions]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still cuts no pop short here."""
    monkeypatch.setattr(finder_module, "MOST_MS", 60_000)


@pytest.mark.parametrize("seed", range(1, 12))
def test_rest_num_of_all_queues_does_not_depend_on_chance(seed: int) -> None:
    world = World({("orders", 0): 5, ("orders", 1): 3, ("orders", 2): 0})
    rests = [world.find(2, seed + number)[0].rest for number in range(5)]
    assert rests == [6, 4, 2, 0, 0]


def test_rest_num_of_one_queue_is_that_of_this_queue() -> None:
    world = World({("orders", 0): 5, ("orders", 1): 3})
    assert [world.find(2, queue=0)[0].rest for _ in range(4)] == [3, 1, 0, 0]
    assert world.find(1, queue=1)[0].rest == 2


def test_what_a_filter_passes_over_is_no_rest() -> None:
    world = World({("orders", 0): 5})
    world.queues.unwanted = 4
    assert world.find(32)[0].rest == 0
    assert world.share.next == {("orders", 0): 5}


def test_a_full_pop_counts_the_retry_topic_only_when_it_looked_into_it() -> None:
    """RocketMQ's rule: a retry topic that comes last is not visited any more."""
    seen = set()
    for seed in range(1, 60):
        world = World({("orders", 0): 5, (V1, 0): 4})
        found, _ = world.find(2, seed)
        seen.add((places(found)[0][0], found.rest))
    assert seen == {("orders", 3), (V1, 2 + 5)}


def test_20_of_100_lots_look_into_the_retry_topic_first_and_all_others_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """popFromRetryProbability (spec 12.6)."""
    first = []
    for lot in range(100):
        monkeypatch.setattr(random.Random, "randrange", lambda _, most, lot=lot: lot if most == 100 else 0)
        found, _ = World({("orders", 0): 1, (V1, 0): 1}).find(2)
        assert sorted(places(found)) == [(V1, 0), ("orders", 0)], "both in the end"
        first += [lot] if places(found)[0] == (V1, 0) else []
    assert first == list(range(20))


def test_a_slow_coordinator_cuts_no_pop_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive without a wait would get nothing, though there are messages."""
    world = World({("orders", 0): 3, (V1, 0): 0})
    world.load_ms = 10 * finder_module.MOST_MS
    monkeypatch.setattr(finder_module, "monotonic_ms", lambda: world.clock_ms)
    monkeypatch.setattr(random.Random, "randrange", lambda *_: 0)  # the retry topic comes first
    found, _ = world.find()
    assert (found.count, found.is_cut) == (3, False)


def test_who_does_not_ask_pays_nothing() -> None:
    world = World({("orders", 0): 5, ("orders", 1): 3})
    world.queues.bounds = MagicMock(side_effect=AssertionError)  # type: ignore[method-assign]
    world.share.next = {("orders", 0): 0, ("orders", 1): 0}
    found, _ = world.find(2, counts_rest=False)
    assert (found.count, found.rest, found.ends) == (2, 0, {})


@pytest.mark.parametrize(
    ("names", "topics"),
    [
        (RetryNames(), {V1}),
        (RetryNames(v2=True), {V1, V2}),
        (RetryNames(v2=True, reads_v1=False), {V2}),
    ],
)
def test_retry_topics_of_both_forms_are_read_but_one_at_a_time(names: RetryNames, topics: set[str]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(1, 60):
        found, _ = World({("orders", 0): 1, (V1, 0): 1, (V2, 0): 1}).find(32, seed, names)
        retries = [topic for topic, _ in places(found) if topic != "orders"]
        assert len(retries) == 1
        seen.update(retries)
    assert seen.keys() == topics
    assert min(seen.values()) > 15, "each by half of the lots"


def test_the_other_form_is_read_when_one_has_nothing() -> None:
    for seed in range(1, 20):
        found, _ = World({("orders", 0): 0, (V1, 0): 2, (V2, 0): 0}).find(32, seed, RetryNames(v2=True))
        assert places(found) == [(V1, 0)], "a receive that waits would not be woken again for it"


def first_queues(factor: int) -> Counter[int]:
    seen: Counter[int] = Counter()
    for seed in range(1, 200):
        world = World({("orders", queue): 4 for queue in range(4)} | {(V1, 0): 1}, message_type="PRIORITY")
        world.share.priority_factor = factor
        found, _ = world.find(1, seed)
        seen[-1 if places(found)[0][0] == V1 else places(found)[0][1]] += 1
    return seen


def test_priority_factor_says_how_many_pops_begin_with_the_highest_queue() -> None:
    assert first_queues(100) == {3: 199}, "the default: always, and retries never come first"
    none = first_queues(0)
    assert none.keys() == {-1, 0, 1, 2, 3}
    assert none[-1] > 15, "retries come first as in any topic"
    half = first_queues(50)
    assert none[3] < half[3]
    assert half[3] >= 90


def test_priority_factor_means_nothing_in_another_topic() -> None:
    seen = set()
    for seed in range(1, 100):
        seen.add(places(World({("orders", queue): 4 for queue in range(4)}).find(1, seed)[0])[0][1])
    assert seen == {0, 1, 2, 3}
