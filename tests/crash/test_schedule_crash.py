"""Goal: whatever dies while delayed messages are delivered, each of them is delivered once.

Method: delayed messages in several queues and levels, sent in runs; the schedule process, the writer and the whole node
die at named places (failpoints) around a delivery and around the writing of positions; then the topic is read as a
whole. The last case forgets the node's own positions, so that only RocketMQ's file is left, as after RocketMQ.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from commitmq import Admin
from delays import Peer, everything
from nodes import Node, eventually, started

pytestmark = pytest.mark.timeout(240)
TOPIC, QUEUES, EACH, RUNS = "parcels", 2, 40, 3
SETTINGS = ("schedule.persist_interval_ms=50", "schedule.batch_messages=25", "supervisor.restart_backoff_max_ms=300")
FIRST = ("schedule.after_put=kill@2", "schedule.between_files=kill_node@2", "writer.after_append=kill@9")
PLACES = (
    "schedule.begin=kill@1",
    "schedule.before_put=kill@2",
    "schedule.between_files=kill@1",
    "schedule/disk.replace.json:before=kill@1",
    "schedule/disk.replace.json:after=kill@2",
    "writer.before_append=kill@9",
    "writer.after_append=kill@11",
    "writer.after_publish=kill@10",
    "flush.before_fdatasync=kill@4",
    "dispatcher.consume_queue.before_dispatch=kill@6",
    "schedule.before_put=kill_node@3",
    "schedule.after_put=kill_node@2",
    "writer.after_append=kill_node@10",
    "schedule.after_put=stop@2",
)


def send_all(node: Node) -> list[bytes]:
    """Delayed messages in every queue, in runs of the levels 1 and 2."""
    sent = []
    with Peer(node) as peer:
        for number in range(RUNS):
            for queue in range(QUEUES):
                bodies = [b"%d-%d-%d" % (number, queue, index) for index in range(EACH)]
                answer = peer.append(TOPIC, bodies, [1 + number % 2] * EACH, queue)
                assert answer["ok"], answer
                sent += bodies
    return sent


def check(node: Node, sent: list[bytes]) -> None:
    def found() -> Counter[bytes]:
        return Counter(one.body for one in everything(node, TOPIC))

    eventually(lambda: len(found()) == len(sent), "every message is delivered", timeout_s=90)
    with Admin(node.address) as admin:
        status = {row["role"]: row for row in admin.status()["processes"]}["schedule"]
    assert "left_out" not in status["info"], status
    twice = {body: times for body, times in found().items() if times > 1}
    assert not twice
    for queue in range(QUEUES):
        for level in (1, 2):
            mine = [one.body for one in everything(node, TOPIC) if one.queue == queue]
            order = [body for body in mine if 1 + int(body.split(b"-")[0]) % 2 == level]
            assert order == [body for body in sent if body in set(order)], "the order of a level"


@pytest.mark.parametrize(
    "place",
    [
        FIRST[0],
        *(pytest.param(place, marks=pytest.mark.slow) for place in (*FIRST[1:], *PLACES[:3])),
        *(pytest.param(place, marks=pytest.mark.long) for place in PLACES[3:]),
    ],
)
def test_each_message_is_delivered_once(tmp_path: Path, place: str) -> None:
    fired = tmp_path / "fired"
    fired.mkdir()
    extra = {"COMMITMQ_FAILPOINTS": place, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with started(Node(tmp_path / "store", *SETTINGS), **extra) as node:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, QUEUES)
        sent = send_all(node)
        eventually(lambda: any(fired.iterdir()), f"{place} fires", timeout_s=60)
        eventually(node.is_ready, "the node is whole again", timeout_s=60)
        check(node, sent)


def test_rocketmqs_file_alone_is_enough(tmp_path: Path) -> None:
    node = Node(tmp_path / "store", *SETTINGS)
    with started(node):
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, QUEUES)
        sent = send_all(node)
        check(node, sent)
        assert node.stop().returncode == 0
        for name in ("commitmq/schedule.json", "config/delayOffset.json"):
            for path in (node.store / name, node.store / f"{name}.bak"):
                path.unlink(missing_ok=True)
        assert node.start().returncode == 0
        check(node, sent)
        assert "looks for deliveries before it" in node.log()
