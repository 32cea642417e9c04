"""Goal: a priority is a queue exactly where RocketMQ takes it for one.

Method: a table of properties. What RocketMQ itself does is compared in tests/interop (the scenario send_priority).
"""

from __future__ import annotations

import pytest

from commitmq_plugins.rocketmq.broker.sending import counts, priority_of, queue_of

PRIORITY = "_SYS_MSG_PRIORITY_"


@pytest.mark.parametrize(
    ("text", "priority"),
    [("0", 0), ("2", 2), ("2147483647", 2_147_483_647), ("+1", 1), ("01", 1)]
    + [(text, -1) for text in ("", "-1", "2147483648", "99999999999", "x", "1.0", " 1", "1 ", "\u0661")],
)
def test_a_priority_is_an_integer_of_java(text: str, priority: int) -> None:
    assert priority_of({PRIORITY: text}) == priority
    assert priority_of({"KEYS": text}) == -1


def test_the_priority_is_the_queue_or_the_last_one() -> None:
    assert [queue_of(priority, 3) for priority in (0, 1, 2, 3, 2_147_483_647)] == [0, 1, 2, 2, 2]
    assert queue_of(5, 0) == 0


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "__SHARDINGKEY"])
def test_it_does_not_count_for_other_kinds_of_messages(name: str) -> None:
    assert counts({PRIORITY: "1", "KEYS": "k"})
    assert not counts({PRIORITY: "1", name: "1"})


def test_it_does_not_count_in_a_transaction() -> None:
    assert not counts({PRIORITY: "1", "TRAN_MSG": "true"})
    assert counts({PRIORITY: "1", "TRAN_MSG": "false"})
