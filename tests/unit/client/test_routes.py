"""Goal: each topic's messages go round all its queues, whatever else a producer sends in between.

Method: routes that know their topics already, so that nobody is asked.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from commitmq.client.routes import Routes

DEADLINE = time.monotonic() + 3600


def knowing(**topics: int) -> Routes:
    routes = Routes("tcp://127.0.0.1:1")
    for topic, queues in topics.items():
        routes._known[topic] = (queues, DEADLINE, False)
    return routes


def test_topics_sent_to_in_turn_use_all_their_queues() -> None:
    routes = knowing(a=2, b=4)
    found = Counter((topic, routes.next_queue(topic, DEADLINE)) for _ in range(8) for topic in "ab")
    assert found == {("a", 0): 4, ("a", 1): 4, **{("b", queue): 2 for queue in range(4)}}


def test_many_producers_of_one_message_use_all_queues() -> None:
    assert {knowing(a=4).next_queue("a", DEADLINE) for _ in range(200)} == {0, 1, 2, 3}


def test_turns_of_topics_without_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commitmq.client.routes._MAX_TOPICS", 10)
    routes = knowing(**{f"t{number}": 3 for number in range(100)})
    for number in range(100):
        routes.next_queue(f"t{number}", DEADLINE)
    assert len(routes._turns) <= 10
