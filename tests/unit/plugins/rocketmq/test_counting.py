"""Goal: events count under RocketMQ's names and keys; its own topics count apart; each day begins with the counts of then.

Method: the counts themselves, with a loop that never comes to its timers.
"""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from commitmq_plugins.rocketmq.broker import counting
from commitmq_plugins.rocketmq.broker.counting import Counting, counted_topics


def test_events_count_under_rocketmqs_names() -> None:
    found = Counting("c", MagicMock())
    found.stored("t", 3, 30)
    found.stored("rmq_sys_wheel_timer", 1, 10)
    found.read("g", "t", 2, 20)
    found.popped("g", "t")
    found.acked("g", "t", 2)
    found.sent_back("g", "t", 40, None)
    found.sent_back("g", "t", 50, "t2")
    totals = {key: item.value for key, item in found.statistics._items.items()}
    assert totals == {
        ("TOPIC_PUT_NUMS", "t"): 3,
        ("TOPIC_PUT_SIZE", "t"): 30,
        ("TOPIC_PUT_NUMS", "rmq_sys_wheel_timer"): 1,
        ("TOPIC_PUT_SIZE", "rmq_sys_wheel_timer"): 10,
        ("BROKER_PUT_NUMS", "c"): 5,
        ("BROKER_PUT_SIZE", "c"): 80,
        ("BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC", "c"): 4,
        ("GROUP_GET_NUMS", "t@g"): 2,
        ("GROUP_GET_SIZE", "t@g"): 20,
        ("BROKER_GET_NUMS", "c"): 2,
        ("BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC", "c"): 2,
        ("GROUP_CK_NUMS", "t@g"): 1,
        ("BROKER_CK_NUMS", "c"): 1,
        ("GROUP_ACK_NUMS", "t@g"): 2,
        ("BROKER_ACK_NUMS", "c"): 2,
        ("SNDBCK_PUT_NUMS", "t@g"): 2,
        ("SNDBCK2DLQ_TIMES", "null@t2@g@SEND_BACK_TO_DLQ"): 1,
        ("TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX"): 1,
        ("TOPIC_PUT_SIZE", "SCHEDULE_TOPIC_XXXX"): 40,
        ("TOPIC_PUT_NUMS", "%RETRY%g"): 1,
        ("TOPIC_PUT_SIZE", "%RETRY%g"): 40,
    }
    assert found.rate("GROUP_ACK_NUMS", "t@g") > 0
    assert found.rate("GROUP_ACK_NUMS", "t@h") == 0


def test_a_day_begins_with_the_counts_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    days = iter(("Monday", "Monday", "Tuesday", "Wednesday"))
    monkeypatch.setattr(counting, "date", MagicMock(today=lambda: next(days)))
    found = Counting("c", MagicMock())
    found.stored("t", 3, 30)
    found._sample()
    assert (found.mornings(), found.now()) == (((0, 0), (0, 0)), (3, 0))
    found._sample()
    assert found.mornings() == ((0, 0), (3, 0))
    found.read("g", "t", 2, 20)
    found._sample()
    assert found.mornings() == ((3, 0), (3, 2))


@pytest.mark.parametrize(
    ("properties", "topics"),
    [
        ({"TRAN_MSG": "true"}, ("RMQ_SYS_TRANS_HALF_TOPIC",)),
        ({"DELAY": "3"}, ("t", "SCHEDULE_TOPIC_XXXX")),
        ({"TIMER_DELAY_SEC": "3"}, ("t", "rmq_sys_wheel_timer")),
    ],
)
def test_what_waits_first_counts_where_it_waits(properties: dict[str, str], topics: tuple[str, ...]) -> None:
    assert counted_topics("t", properties) == topics
