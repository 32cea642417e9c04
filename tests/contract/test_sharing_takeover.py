"""Goal: what RocketMQ's POP left behind goes on: what was not acknowledged comes back once, what was does not.

Method: RocketMQ's own store with pending semantics, whose check points and acks are all overdue by now, mostly in its
timer; its ``expected.json`` says what must become of each message. The node is also killed before the groups are drained.
Check points of messages that cannot come back lie before one that can, in the same revive queue.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from commitmq import Admin, Producer, ShareConsumer
from commitmq.config import NodeConfig
from commitmq.format.constants import Host
from commitmq.format.record import encode_record
from commitmq.protocol.channel import Channel
from commitmq.semantics.pop_revive import CheckPoint, CheckPointKey, check_point_record, revive_topic
from commitmq.store.layout import StoreLayout
from golden_stores import unpack
from nodes import Node, eventually, start_node, started

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["started", "killed"])
def test_what_rocketmq_handed_out_comes_back_once(tmp_path: Path, killed: bool) -> None:
    golden = unpack("semantics", tmp_path)
    expected = orjson.loads((tmp_path / "expected.json").read_bytes())["messages"]
    shared = [one for one in expected if "pop" in one["kind"] and "order" not in one["kind"]]
    wanted: dict[tuple[str, str], Counter[str]] = {}
    for one in shared:
        counter = wanted.setdefault((one["group"], one["topic"]), Counter())
        if one["must"] in ("redeliver-at", "deliver-to-group"):
            counter[one["uniq_key"]] += 1
    assert sum(one.total() for one in wanted.values()) == 43
    with started(Node.bare(golden.root, "network.port=0")) as node:
        if killed:
            time.sleep(2.5)  # messages are coming back
            node.kill_all()
            assert node.start().returncode == 0
        for (group, topic), keys in wanted.items():
            found: Counter[str] = Counter()
            with ShareConsumer(topic, group=group, node=node.address, invisible_s=60) as consumer:
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline and (many := consumer.receive(32, 20 if found < keys else 3)):
                    found.update(str(one.unique_id) for one in many)
                    consumer.ack(many)
            assert found == keys, (group, topic)


def put_check_point(node: Node, point: CheckPoint) -> None:
    """Store a check point as the process ``pop`` does: the revive topic takes no sends of clients."""
    network = NodeConfig().network
    cluster, host = network.cluster_name, Host(network.store_host, network.store_port)
    record = check_point_record(point, cluster, 2, point.key.pop_time, host)
    writer = Channel(StoreLayout(node.store).ipc("writer"))
    try:
        fields = {"topic": revive_topic(cluster), "queue": 2, "count": 1, "moved": 4}
        writer.request("append", fields, (encode_record(record, buckets=None, properties_crc=True),), timeout_s=10)
    finally:
        writer.close()


@pytest.mark.slow
def test_check_points_whose_messages_cannot_come_back_hold_up_no_others(tmp_path: Path) -> None:
    popped_ms = time.time_ns() // 1_000_000 - 600_000
    with start_node(tmp_path) as node, Producer(node.address) as producer, Admin(node.address) as admin:
        admin.topic_create("here", 1)
        admin.group_config("closed", {"retryQueueNums": 0})
        producer.send("here", b"the first")
        with ShareConsumer("here", group="open", node=node.address) as consumer:
            (message,) = consumer.receive(1, 5)
            assert message.ack()
            keys = [
                CheckPointKey("nowhere", "open", 0, 0, popped_ms, "b"),
                CheckPointKey("here", "open", 7, 0, popped_ms, "b"),
                CheckPointKey("here", "open", 0, 99, popped_ms, "b"),
                CheckPointKey("here", "closed", 0, 0, popped_ms, "b"),
                CheckPointKey("here", "open", 0, 0, popped_ms, "b"),
            ]
            for key in keys:
                put_check_point(node, CheckPoint(key, 60_000, (0,)))
            (again,) = consumer.receive(1, 30)
            assert (again.body, again.reconsume_times) == (b"the first", 1)
            assert again.ack()
        eventually(lambda: node.row("pop")["info"].get("set_aside") == 3, "three are reported")
        assert node.row("pop")["info"]["put_off"] == 1
        admin.group_config("closed", {"retryQueueNums": 1})
        with ShareConsumer("here", group="closed", node=node.address, start="latest") as consumer:
            (again,) = consumer.receive(1, 40)
            assert (again.body, again.reconsume_times) == (b"the first", 1)
            assert again.ack()
