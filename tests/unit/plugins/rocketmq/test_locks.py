"""Goal: a lock of an ordered queue lasts 60 s after its last renewal, to the millisecond, and only its owner ends it
(spec 12.5).

Method: the table of locks with a clock of the test's; and the request, whose clock is set.
"""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from commitmq_plugins.rocketmq.broker.assignment import LockRequests, QueueLocks
from commitmq_plugins.rocketmq.remoting.codes import RequestCode
from commitmq_plugins.rocketmq.remoting.fastjson import dumps, load_object
from commitmq_plugins.rocketmq.remoting.frame import request

A, B = ("orders", 0), ("orders", 1)


def test_another_client_gets_a_queue_60_seconds_after_the_last_renewal_and_not_before() -> None:
    locks = QueueLocks()
    assert locks.lock("g", ("", "one"), [A, B], 0) == [A, B]
    assert locks.lock("g", ("", "two"), [A], 60_000) == []
    assert locks.lock("g", ("", "one"), [A], 60_000) == [A], "a renewal"
    assert locks.lock("g", ("", "two"), [A, B], 60_001) == [B], "this one was not renewed"
    assert locks.lock("g", ("", "two"), [A], 120_000) == []
    assert locks.lock("g", ("", "two"), [A], 120_001) == [A]
    assert locks.lock("g", ("", "one"), [A, B], 120_001) == [], "they are the other one's now"


def test_a_lock_holds_for_its_group_alone_and_only_its_owner_ends_it() -> None:
    locks = QueueLocks()
    assert locks.lock("g", ("", "one"), [A], 0) == [A]
    assert locks.lock("another", ("", "two"), [A], 0) == [A]
    locks.unlock("g", ("", "two"), [A])
    assert locks.lock("g", ("", "two"), [A], 1) == []
    locks.unlock("g", ("", "one"), [A])
    assert locks.lock("g", ("", "two"), [A], 1) == [A]


def test_the_id_of_another_users_client_ends_no_lock() -> None:
    locks = QueueLocks()
    assert locks.lock("g", ("ann", "one"), [A], 0) == [A]
    locks.unlock("g", ("bob", "one"), [A])
    assert locks.lock("g", ("bob", "one"), [A], 1) == []
    assert locks.lock("g", ("ann", "one"), [A], 1) == [A]


def test_a_group_is_ordered_until_its_last_lock_is_over() -> None:
    locks = QueueLocks()
    locks.lock("g", ("", "one"), [A], 0)
    locks.lock("g", ("", "one"), [B], 30_000)
    assert [locks.is_held("g", at) for at in (60_000, 60_001, 90_000, 90_001)] == [True, True, True, False]
    assert not locks.is_held("another", 0)


def test_the_requests_use_the_clock_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    requests = LockRequests(QueueLocks(), "broker")

    def lock(client: str, user: str = "") -> list[Any]:
        queues = [{"topic": "orders", "brokerName": "broker", "queueId": 0}]
        body = dumps({"consumerGroup": "g", "clientId": client, "mqSet": queues})
        connection = cast("Any", type("Connection", (), {"peer": ("127.0.0.1", 1), "user": user})())
        answer = requests.lock(connection, request(RequestCode.LOCK_BATCH_MQ, body=body))
        return [one["queueId"] for one in load_object(answer.body)["lockOKMQSet"]]

    assert lock("one") == [0]
    assert lock("one", "another user") == []
    now_s += 60
    assert lock("two") == []
    now_s += 0.001
    assert lock("two") == [0]
