"""Goal: after a death each message is in flight by its newest check point, however many were replaced before.

Method: check points and acks by hand, in the order of a log; as many replaced ones as a group may have messages in flight.
"""

from __future__ import annotations

import time

from commitmq.config import PopConfig
from commitmq.semantics.pop_revive import Ack, CheckPoint, CheckPointKey
from commitmq.workers.pop.points import CheckPoints
from commitmq.workers.pop.recovery import Reading

KEY = CheckPointKey("orders", "g", 2, 0, 1_000_000, "b")
QUEUE = ("g", "orders", 2)
NOW = 1_002_000


def popped(start: int, count: int, pop_time: int = 1_000_000) -> CheckPoint:
    return CheckPoint(KEY._replace(start_offset=start, pop_time=pop_time), 5_000, tuple(range(count)))


def test_a_message_is_in_flight_by_its_newest_check_point() -> None:
    points = CheckPoints(PopConfig())
    reading = Reading(points, lambda topic: 0, NOW)
    first, extended, again = popped(0, 4), popped(2, 1, 1_000_001), popped(2, 1, 1_000_002)
    for place, one in enumerate((first, extended, again)):
        reading.check_point(one, 3, place * 100)
    assert [points.by_key[one.key].check_point.left() for one in (first, extended, again)] == [[0, 1, 3], [], [2]]
    reading.ack(Ack(extended.key, 2))
    reading.ack(Ack(first.key, offsets=(0, 3)))
    assert points.open == 2
    reading.ack(Ack(again.key, 2))
    reading.check_point(popped(2, 1, 1_000_002), 3, 300)
    assert points.open == 1, "the timer put a check point off that is done"
    assert reading.ends == {QUEUE: 4}


def test_many_replaced_check_points_cost_no_more_than_others() -> None:
    points = CheckPoints(PopConfig())
    reading = Reading(points, lambda topic: 0, NOW)
    began = time.process_time()
    count = 8_000
    for start in range(count):
        reading.check_point(popped(start, 1), 1, start)
    for start in range(count):
        reading.check_point(popped(start, 1, 1_000_001), 1, count + start)
    assert points.open == count
    assert time.process_time() - began < 10, "each looked at all others"


def test_check_points_of_a_deleted_topic_say_nothing_of_the_next_one_of_its_name() -> None:
    points = CheckPoints(PopConfig())
    reading = Reading(points, lambda topic: 200, NOW)
    reading.check_point(popped(0, 50), 1, 100)
    assert (points.open, reading.ends) == (0, {})
    reading.check_point(popped(0, 4, 1_000_001), 1, 200)
    assert (points.open, reading.ends) == (4, {QUEUE: 4})
