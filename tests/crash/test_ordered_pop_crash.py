"""Goal: whatever dies while a queue is received in order, its messages come in order, none is lost, and none that was
acknowledged comes again.

Method: one consumer receives a few messages at a time, acknowledges some and gives others back; the process pop, the
coordinator and the node die at named places (failpoints) around the state of the queue, its journal, its offset and the
answers. Each receive must begin with the first message that is not known as done.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from commitmq import Admin, CommitMQError, Producer, ShareConsumer
from nodes import Node, eventually, started

pytestmark = pytest.mark.timeout(240)
TOPIC, GROUP, COUNT = "steps", "walkers", 40
SETTINGS = ("supervisor.restart_backoff_max_ms=300", "pop.commit_interval_ms=50")
PLACES = (
    "pop.after_order=kill@5",
    "pop.after_order_commit=kill_node@4",
    "pop.before_order=kill_node@6",
    "pop.after_order=kill_node@9",
    "pop.after_order_commit=kill@7",
    "orders.append=kill@6",
    "orders.before_fdatasync=kill@6",
    "orders.after_fdatasync=kill_node@7",
    "orders.after_snapshot=kill@1",
    "pop/disk.replace.json:before=kill@1",
    "pop/disk.replace.journal:after=kill@1",
    "coordinator.begin=kill@1",
)


class Walk:
    """What one consumer knows. ``done``: up to here every message was acknowledged; ``open``: acks without an answer."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.acked: set[int] = set()
        self.open: set[int] = set()
        self.step = 0

    def go(self) -> None:
        """Receive and settle until nothing comes for a second, or the node is away."""
        with ShareConsumer(TOPIC, group=GROUP, node=self.node.address, invisible_s=2, ordered=True) as consumer:
            while many := consumer.receive(5, 3.0):
                numbers = [int(one.body) for one in many]
                self.check(numbers)
                self.step += 1
                kept = [one for number, one in enumerate(many) if (self.step + number) % 4]
                mine = {int(one.body) for one in kept}
                self.open |= mine
                late = {int(one.body) for one in consumer.ack(kept)} if kept else set()
                self.acked |= mine - late
                self.open -= mine - late
                if back := [one for one in many if one not in kept]:
                    consumer.nack(back)

    def check(self, numbers: list[int]) -> None:
        assert numbers == sorted(numbers)
        assert not self.acked & set(numbers), "a message that was acknowledged came again"
        missing = set(range(numbers[-1] + 1)) - set(numbers) - self.acked
        assert missing <= self.open, f"{missing} were passed over"

    def is_over(self) -> bool:
        return self.acked | self.open >= set(range(COUNT))


@pytest.mark.parametrize(
    "place",
    [
        PLACES[0],
        *(pytest.param(place, marks=pytest.mark.slow) for place in PLACES[1:2]),
        *(pytest.param(place, marks=pytest.mark.long) for place in PLACES[2:]),
    ],
)
def test_a_queue_stays_in_order(tmp_path: Path, place: str) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    extra = {"COMMITMQ_FAILPOINTS": place, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with started(Node(tmp_path / "store", *SETTINGS), **extra) as node:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 1)
        with Producer(node.address) as producer:
            producer.send_batch(TOPIC, [b"%d" % number for number in range(COUNT)])
        walk = Walk(node)
        deadline = time.monotonic() + 120
        while not walk.is_over() and time.monotonic() < deadline:
            try:
                walk.go()
            except CommitMQError:
                time.sleep(0.2)
        eventually(lambda: any(fired.iterdir()), f"{place} fires", timeout_s=10)
        walk.go()
        assert walk.is_over()
