"""Goal: whatever dies while delayed messages are delivered, each of them is delivered once.

Method: delayed messages in several queues and levels, sent in runs; the schedule process, the writer and the whole node
die at named places (failpoints) around a delivery and around the writing of positions; then the topic is read as a
whole. The last case loses all positions, or damages them: what was delivered is found in the log.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from delays import Peer
from mover_crashes import QUEUES, TOPIC, check_each_once, dying_node, make_topic, places, wait_for_death
from nodes import Node, started

pytestmark = pytest.mark.timeout(240)
EACH, RUNS = 40, 3
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
    stored = check_each_once(node, "schedule", sent)
    for queue in range(QUEUES):
        for level in (1, 2):
            mine = [one.body for one in stored if one.queue == queue]
            order = [body for body in mine if 1 + int(body.split(b"-")[0]) % 2 == level]
            assert order == [body for body in sent if body in set(order)], "the order of a level"


@pytest.mark.parametrize("place", places(FIRST[:2], PLACES[:1], (*FIRST[2:], *PLACES[1:])))
def test_each_message_is_delivered_once(tmp_path: Path, place: str) -> None:
    with dying_node(tmp_path, SETTINGS, place) as node:
        sent = send_all(node)
        wait_for_death(node, tmp_path, place)
        check(node, sent)


@pytest.mark.parametrize("loss", ["gone", "damaged"])
def test_the_log_alone_is_enough(tmp_path: Path, loss: str) -> None:
    node = Node(tmp_path / "store", *SETTINGS)
    with started(node):
        make_topic(node)
        sent = send_all(node)
        check(node, sent)
        assert node.stop().returncode == 0
        for name in ("commitmq/schedule.json", "config/delayOffset.json"):
            for path in (node.store / name, node.store / f"{name}.bak"):
                if loss == "gone":
                    path.unlink(missing_ok=True)
                elif path.exists():
                    path.write_bytes(b'{"offsetTable":{1:')
        assert node.start().returncode == 0
        check(node, sent)
        assert re.search(r"looks for deliveries before it found=\d+ bytes=[1-9]", node.log())
        asides = list(node.store.glob("*/*.damaged"))
        assert (len(asides) >= 2) == (loss == "damaged")
