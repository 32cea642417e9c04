"""Goal: a priority is a queue exactly where RocketMQ takes it for one.

Method: a table of properties. What RocketMQ itself does is compared in tests/interop (the scenario send_priority).
"""

from __future__ import annotations

import pytest

from commitmq.semantics.priority import queue_of

PRIORITY = "_SYS_MSG_PRIORITY_"


@pytest.mark.parametrize(
    ("text", "queue"),
    [("0", 0), ("2", 2), ("3", 2), ("2147483647", 2), ("+1", 1), ("01", 1)]
    + [(text, None) for text in ("", "-1", "2147483648", "99999999999", "x", "1.0", " 1", "1 ", "\u0661")],
)
def test_the_priority_is_the_queue_or_the_last_one(text: str, queue: int | None) -> None:
    assert queue_of({PRIORITY: text}, 3) == queue


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "__SHARDINGKEY"])
def test_it_does_not_count_for_other_kinds_of_messages(name: str) -> None:
    assert queue_of({PRIORITY: "1", name: "1"}, 3) is None


def test_it_does_not_count_in_a_transaction() -> None:
    assert queue_of({PRIORITY: "1", "TRAN_MSG": "true"}, 3) is None
    assert queue_of({PRIORITY: "1", "TRAN_MSG": "false"}, 3) == 1


def test_a_message_without_one_keeps_its_queue() -> None:
    assert queue_of({"KEYS": "k"}, 3) is None
