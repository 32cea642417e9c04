"""Goal: whatever dies while consumers share a queue, each message is handled, and comes back once each time.

Method: consumers acknowledge some messages, give others back, and leave some to their time; the process pop, the writer, the
coordinator and the whole node die at named places (failpoints) around check points, acks and copies. Then the group is
drained, and the retry topic is read as a whole: it has no message twice with the same number of tries.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from commitmq import Admin, CommitMQError, Producer, Reader, ShareConsumer
from nodes import Node, eventually, started

pytestmark = pytest.mark.timeout(240)
TOPIC, GROUP, COUNT = "parcels", "carriers", 120
SETTINGS = ("supervisor.restart_backoff_max_ms=300", "pop.persist_interval_ms=50", "pop.commit_interval_ms=50")
FIRST = ("pop.after_copy=kill@2", "pop.after_put=kill_node@5")
PLACES = (
    "pop.after_put=kill@3",
    "pop.after_copy=kill_node@1",
    "pop.begin=kill@1",
    "pop.before_put=kill@2",
    "pop.before_put=kill_node@4",
    "pop.after_put=kill@8",
    "pop.before_copy=kill@1",
    "pop/disk.replace.json:before=kill@1",
    "pop/disk.replace.json:after=kill@1",
    "writer.before_append=kill@9",
    "writer.after_append=kill@10",
    "writer.after_append=kill@13",
    "writer.after_publish=kill@12",
    "writer.after_append=kill_node@14",
    "flush.before_fdatasync=kill@2",
    "dispatcher.consume_queue.before_dispatch=kill@7",
    "coordinator.begin=kill@1",
)


def work(node: Node, done: set[bytes], seen: Counter[bytes], *, until_empty: bool, give_back: bool) -> None:
    """Receive and settle. With ``give_back`` a third comes back at once, and a third when its time is over."""
    quiet = 0
    while quiet < (5 if until_empty else 1):
        try:
            with ShareConsumer(TOPIC, group=GROUP, node=node.address, invisible_s=2) as consumer:
                while many := consumer.receive(7, 1.0):
                    quiet = 0
                    for one in many:
                        seen[one.body] += 1
                    ways = [int(one.body) % 3 if give_back and not one.reconsume_times else 0 for one in many]
                    acked = [one for one, way in zip(many, ways, strict=True) if way == 0]
                    if acked:
                        late = {one.body for one in consumer.ack(acked)}
                        done |= {one.body for one in acked} - late
                    if back := [one for one, way in zip(many, ways, strict=True) if way == 1]:
                        consumer.nack(back)
            quiet += 1
        except CommitMQError:
            time.sleep(0.2)


@pytest.mark.parametrize(
    "place",
    [
        FIRST[0],
        *(pytest.param(place, marks=pytest.mark.slow) for place in (*FIRST[1:], *PLACES[:1])),
        *(pytest.param(place, marks=pytest.mark.long) for place in PLACES[1:]),
    ],
)
def test_each_message_comes_back_once(tmp_path: Path, place: str) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    extra = {"COMMITMQ_FAILPOINTS": place, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with started(Node(tmp_path / "store", *SETTINGS), **extra) as node:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 2)
        bodies = [b"%d" % number for number in range(COUNT)]
        with Producer(node.address) as producer:
            producer.send_batch(TOPIC, bodies)
        done: set[bytes] = set()
        seen: Counter[bytes] = Counter()
        work(node, done, seen, until_empty=False, give_back=True)
        eventually(lambda: any(fired.iterdir()), f"{place} fires", timeout_s=30)
        eventually(node.is_ready, "the node is whole again", timeout_s=60)
        work(node, done, seen, until_empty=True, give_back=True)
        assert set(seen) == set(bodies), "a message was lost"
        back = Counter(retries(node))
        assert not {one: times for one, times in back.items() if times > 1}, "a message came back twice"
        assert max(seen.values()) <= 4


def retries(node: Node) -> list[tuple[bytes, int]]:
    """Body and tries of everything that came back."""
    found: list[tuple[bytes, int]] = []
    with Reader(f"%RETRY%{GROUP}_{TOPIC}", node=node.address, start="earliest") as reader:
        while batch := reader.poll(1.0):
            found += [(one.body, one.reconsume_times) for one in batch]
    return found
