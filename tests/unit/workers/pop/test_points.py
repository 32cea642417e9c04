"""Goal: what is in flight is counted and bounded, comes due in its time, and is forgotten only when it is done.

Method: check points by hand; a random sequence of steps beside a model that counts anew.
"""

from __future__ import annotations

import random
from dataclasses import replace

from commitmq.config import PopConfig
from commitmq.semantics.pop_revive import CheckPoint, CheckPointKey
from commitmq.workers.pop import points as module
from commitmq.workers.pop.points import OVERDUE_MS, CheckPoints, OpenCheckPoint
from commitmq.workers.pop.recovery import Reading

KEY = CheckPointKey("orders", "g", 2, 40, 1_000_000, "b")
LIMITS = PopConfig(max_in_flight=50, max_in_flight_of_group=40, max_in_flight_of_queue=20, max_in_flight_of_client=18)


def point(
    start: int = 40, count: int = 3, *, group: str = "g", client: bytes = b"c", invisible_ms: int = 5_000
) -> OpenCheckPoint:
    key = KEY._replace(start_offset=start, group=group)
    return OpenCheckPoint(CheckPoint(key, invisible_ms, tuple(range(count))), 1, client, start * 100)


def room(points: CheckPoints, group: str = "g", queue: int = 2, client: bytes = b"c", taken: int = 0) -> int:
    return points.room(group, "orders", queue, client, taken=taken, of_queue=taken)


def test_each_limit_bounds_what_is_in_flight() -> None:
    points = CheckPoints(LIMITS)
    assert room(points) == 18
    points.add(point(count=6))
    assert room(points) == 12, "of the client"
    assert room(points, taken=3) == 9, "what this receive has got counts"
    assert room(points, client=b"d") == 14, "of the queue"
    assert room(points, client=b"d", queue=3) == 18, "of the client"
    for number in range(7):
        points.add(point(100 + number * 10, 5, client=b"%d" % number))
    assert room(points, client=b"new", queue=3) == 0, "of the group"
    assert room(points, group="other", queue=2, client=b"new") == 9, "of the node"


def test_a_settled_message_counts_no_more() -> None:
    points = CheckPoints(LIMITS)
    one = point()
    points.add(one)
    assert points.has(one.check_point.key, 41) is one
    points.settle(one, 41)
    points.settle(one, 41)
    assert (points.open, one.check_point.left()) == (2, [40, 42])
    assert points.has(one.check_point.key, 41) is None
    points.settle(one, 40)
    points.settle(one, 42)
    assert points.open == points.in_flight_of("g") == 0
    assert one.check_point.key in points.by_key, "it is known until its copy in the revive topic was met"
    points.drop(one)
    assert not points.by_key
    assert points.log() is None


def test_messages_settled_together_count_each_once() -> None:
    points = CheckPoints(LIMITS)
    one = point(count=4)
    points.add(one)
    points.settle(one, 41)
    points.settle(one, 40, 41, 42, 42, 99)
    assert (points.open, one.check_point.left()) == (1, [43])
    points.settle(one, 43)
    assert points.open == 0


def test_what_is_due_comes_in_its_time_and_not_when_it_is_done() -> None:
    points = CheckPoints(LIMITS)
    late, early, done = (
        point(1, 1, invisible_ms=3_000),
        point(2, 1, invisible_ms=1_000),
        point(3, 1, invisible_ms=1_000),
    )
    for one in (late, early, done):
        points.add(one)
    points.settle(done, 3)
    assert points.due(1_000_999, 10) == []
    assert points.due(1_001_000, 10) == [early]
    points.again(early, 1_002_000)
    assert points.due(1_001_999, 10) == []
    assert points.due(1_010_000, 1) == [early]
    assert points.due(1_010_000, 10) == [late]
    points.again(late, 1_020_000)
    points.again(late, 1_020_500)
    assert points.due(1_030_000, 10) == [late], "once, however often it was tried"


def test_the_log_is_needed_from_the_oldest_one_on() -> None:
    points = CheckPoints(LIMITS)
    first, second = point(1), point(2)
    points.add(first)
    points.add(second)
    assert points.log() == 100
    for offset in (1, 2, 3):
        points.settle(first, offset)
    points.forget_old(first.check_point.revive_ms + OVERDUE_MS - 1)
    assert points.log() == 100
    points.forget_old(first.check_point.revive_ms + OVERDUE_MS)
    assert points.log() == 200
    points.forget_old(1 << 62)
    assert points.log() == 200, "what is not done is never forgotten"


def test_too_many_done_ones_are_forgotten_oldest_first(monkeypatch: object) -> None:
    saved, module.MAX_DONE = module.MAX_DONE, 3  # type: ignore[misc]
    try:
        points = CheckPoints(replace(LIMITS, max_in_flight=1_000, max_in_flight_of_group=1_000))
        waiting = point(0, 1)
        points.add(waiting)
        for start in range(1, 7):
            one = point(start, 1)
            points.add(one)
            points.settle(one, start)
        assert [key.start_offset for key in points.by_key] == [0, 4, 5, 6]
    finally:
        module.MAX_DONE = saved  # type: ignore[misc]


def test_the_counts_are_those_of_a_model() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        points = CheckPoints(LIMITS)
        alive: list[OpenCheckPoint] = []
        for step in range(200):
            if not alive or chance.random() < 0.3:
                one = point(
                    step * 10, chance.randint(1, 5), group=chance.choice("gh"), client=chance.choice([b"c", b"d"])
                )
                points.add(one)
                alive.append(one)
            elif chance.random() < 0.1:
                one = alive.pop(chance.randrange(len(alive)))
                points.drop(one)
                points.drop(one)
            else:
                one = chance.choice(alive)
                start = one.check_point.key.start_offset
                points.settle(one, start + chance.randint(0, 5))
            left = sum(len(one.check_point.left()) for one in alive)
            assert points.open == left, seed
            for group in "gh":
                mine = [one for one in alive if one.check_point.key.group == group]
                assert points.in_flight_of(group) == sum(len(one.check_point.left()) for one in mine), seed


def test_an_invisible_time_is_as_long_as_it_was_asked_for() -> None:
    """The clock is set four days forward, and back."""
    points, days_ms = CheckPoints(LIMITS), 4 * 86_400_000
    before, during = point(1, 1, invisible_ms=5_000), point(20, 1, invisible_ms=5_000)
    during.check_point = replace(during.check_point, key=during.check_point.key._replace(pop_time=1_001_000 + days_ms))
    points.add(before)
    points.shift(days_ms)
    points.add(during)
    assert points.due(1_004_999 + days_ms, 9) == []
    points.shift(-days_ms)
    assert points.due(1_004_999, 9) == []
    assert points.due(1_005_000, 9) == [before]
    assert points.due(1_005_999, 9) == []
    assert points.due(1_006_000, 9) == [during]


def test_check_points_of_a_clock_that_was_ahead_wait_once_more_after_a_death() -> None:
    points, days_ms = CheckPoints(LIMITS), 4 * 86_400_000
    reading = Reading(points, lambda topic: 0, 1_000_000)
    for number, ahead_ms in enumerate((-3_000, 0, days_ms)):
        key = KEY._replace(start_offset=100 * number, pop_time=1_000_000 + ahead_ms)
        reading.check_point(CheckPoint(key, 5_000, (0,)), 1, number)
    assert [one.check_point.key.start_offset for one in points.due(1_002_000, 9)] == [0]
    assert [one.check_point.key.start_offset for one in points.due(1_005_000, 9)] == [100, 200]
