"""Goal: a wall clock that is set wrong and right again refuses nothing afterwards, and holds no message back.

Method: the clock of a node is wrong for two seconds, by seconds, an hour or four days, forward or back; before, meanwhile and
afterwards timers, delays of levels, transactions without an end and receives without an ack are on their way. The processes
live on, or die while the clock is wrong, or when it is right again. Everything must be there within seconds, and once.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from calamities import WrongClock

from commitmq import Admin, Producer, ShareConsumer, TransactionState
from delays import everything
from nodes import Node, eventually, started
from transactions import QUICK

pytestmark = pytest.mark.timeout(240)
HOUR_S, DAYS_S = 3_600, 4 * 86_400
MOVERS = ("timer", "schedule", "pop", "transaction")
TIMED, SHARED, ORDERED = "timed", "shared", "in_line"
EACH = 5
LATEST_S = 20
"""Delays are 3 s and 5 s, invisible times 3 s, and the machine is busy."""
SETTINGS = (*QUICK, "timer.persist_interval_ms=100", "schedule.persist_interval_ms=100")


class Life:
    """What is sent and received around the jumps."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.sent: dict[bytes, float] = {}
        """The earliest time (monotonic) of each message, 0 for any."""
        self.seen: Counter[bytes] = Counter()
        self.shareable: set[tuple[str, bytes]] = set()
        commits = lambda _: TransactionState.COMMIT  # noqa: E731
        self.producer = Producer(node.address, group="clocks", transaction_listener=commits, timeout_s=20)
        self.shared = ShareConsumer(SHARED, group="s", node=node.address, invisible_s=3)
        self.ordered = ShareConsumer(ORDERED, group="o", node=node.address, invisible_s=3, ordered=True)

    def burst(self, name: str, *, may_be_early: bool) -> None:
        """A few messages of each kind are on their way."""
        for number in range(EACH):
            for kind, delay_s in (("timer", 3), ("level", 5)):
                body = f"{name} {kind} {number}".encode()
                self.sent[body] = 0.0 if may_be_early else time.monotonic() + delay_s
                if kind == "timer":
                    self.producer.send(TIMED, body, delay=delay_s)
                else:
                    self.producer.send(TIMED, body, delay_level=2)
            body = f"{name} open {number}".encode()
            with self.producer.transaction(TIMED, body) as transaction:
                transaction.unknown()
            self.sent[body] = 0.0
            for topic in (SHARED, ORDERED):
                self.producer.send(topic, f"{name} {number}".encode())
                self.shareable.add((topic, f"{name} {number}".encode()))
        for consumer in (self.shared, self.ordered):
            consumer.receive(EACH, 2.0)  # and not acknowledged

    def check(self, since: float) -> None:
        """Everything is there in time."""

        def missing() -> set[bytes]:
            bodies = Counter(one.body for one in everything(self.node, TIMED))
            now = time.monotonic()
            for body in bodies.keys() - self.seen.keys():
                assert now >= self.sent[body], f"{body!r} came early"
            self.seen = bodies
            return self.sent.keys() - bodies.keys()

        eventually(lambda: not missing(), "all delays are over", timeout_s=since + LATEST_S - time.monotonic())
        assert [body for body, times in self.seen.items() if times > 1] == []
        left = set(self.shareable)
        while left:
            assert time.monotonic() < since + LATEST_S + 10, f"not received again: {sorted(left)}"
            for consumer in (self.shared, self.ordered):
                messages = consumer.receive(32, 0.5)
                if messages:
                    late = {id(one) for one in consumer.ack(messages)}
                    left -= {(one.topic, one.body) for one in messages if id(one) not in late}

    def close(self) -> None:
        for one in (self.producer, self.shared, self.ordered):
            one.close()


def kill(node: Node, roles: tuple[str, ...]) -> None:
    pids = node.pids()
    for role in roles:
        os.kill(pids[role], signal.SIGKILL)
    for role in roles:
        eventually(lambda role=role: node.healed(role, pids[role]), f"{role} is back", timeout_s=30)  # type: ignore[misc]


CASES = [
    pytest.param(DAYS_S, "nobody", id="4 days ahead"),
    *(
        pytest.param(seconds, dies, id=f"{seconds} s, {dies}", marks=pytest.mark.slow if is_slow else pytest.mark.long)
        for seconds, dies, is_slow in (
            (DAYS_S, "movers while wrong and when right", True),
            (-DAYS_S, "nobody", True),
            (DAYS_S, "node", False),
            (HOUR_S, "nobody", False),
            (HOUR_S, "movers while wrong and when right", False),
            (2, "nobody", False),
            (2, "movers while wrong and when right", False),
            (-2, "nobody", False),
            (-HOUR_S, "nobody", False),
            (-HOUR_S, "movers while wrong and when right", False),
            (-DAYS_S, "movers while wrong and when right", False),
            (-DAYS_S, "node", False),
        )
    ),
]


@pytest.mark.parametrize(("seconds", "dies"), CASES)
def test_a_clock_that_was_wrong_holds_nothing_back(tmp_path: Path, seconds: int, dies: str) -> None:
    clock = WrongClock(tmp_path / "clock")
    node = Node(tmp_path / "store", *SETTINGS)
    with started(node, **clock.environment):
        with Admin(node.address) as admin:
            for topic in (TIMED, SHARED, ORDERED):
                admin.topic_create(topic, 2)
        life = Life(node)
        try:
            life.burst("before", may_be_early=seconds > 0)
            clock.set(seconds)
            life.burst("meanwhile", may_be_early=seconds < 0)
            if "movers" in dies:
                kill(node, MOVERS)
            time.sleep(1)
            clock.right()
            since = time.monotonic()
            if "movers" in dies:
                kill(node, MOVERS)
            elif dies == "node":
                node.kill_all()
                ended = node.start(**clock.environment)
                assert ended.returncode == 0, ended.stderr
            since = max(since, time.monotonic() - 10)
            life.burst("afterwards", may_be_early=False)
            life.check(since)
        finally:
            life.close()
        assert "worker crashed" not in node.log()
