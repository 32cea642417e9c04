"""Goal: ``store verify`` and ``store snapshot`` say of a store that it is sound, whatever its node has written.

Method: one node does everything that leaves a file of its own: each mover, each kind of topic, groups in order, filters,
idempotent producers, changes of settings, deletions. The table of file owners says which files there can be.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from commitmq import Admin, Consumer, ExactlyOnce, Message, Producer, ShareConsumer, Sql
from commitmq.ownership import FILES
from delays import Peer
from nodes import Node, commitmq, eventually, free_port, start_node
from transactions import QUICK, EndPeer, send_half

pytestmark = pytest.mark.timeout(240)
NOT_HERE = {
    "commitmq/transient_pool.json",  # of a node with a transient store pool
    "commitmq/sockets.json",  # of a store with a long path
    "commitmq/deleting_topics.json",  # there while a deletion is not finished
}


def fill(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("plain", 2)
        admin.topic_create("7", 1)
        admin.topic_create("batches", 1, attributes={"queue.type": "BatchCQ"})
        admin.topic_create("quick", 1, attributes={"storage.type": "memory"})
        admin.topic_create("gone", 1)
        with Producer(node.address) as producer:
            for topic in ("plain", "7", "gone"):
                producer.send_batch(
                    topic, [Message(b"x", tags="red", keys="k", properties={"price": "7"})] * 20, queue=0
                )
            producer.send_batch("batches", [b"a", b"b"], queue=0)
            producer.send("quick", b"m")
            producer.send("plain", b"light", queue=0, multi_dispatch=["%LMQ%a"])
            for level in (1, 2, 18):
                producer.send("plain", b"by level", delay_level=level)
            producer.send("plain", b"by time", delay=timedelta(seconds=2))
            producer.send("plain", b"much later", delay=timedelta(hours=1))
        with Peer(node) as peer, EndPeer(node) as ends:
            assert ends.end(send_half(peer, "plain", b"decided"), "commit")["ok"]
            assert send_half(peer, "plain", b"undecided")["ok"]
        with Consumer("plain", group="sql", node=node.address, filter=Sql("price = 7"), start="earliest") as consumer:
            assert consumer.poll(10)
            consumer.commit()
        for group, is_ordered, topic in (("1", False, "plain"), ("ordered", True, "7")):
            with ShareConsumer(topic, group=group, node=node.address, ordered=is_ordered, start="earliest") as sharer:
                first = sharer.receive(2, 10)
                assert first
                sharer.ack(first[0])
        admin.topic_delete("gone")
    with Producer(node.address, delivery=ExactlyOnce("named")) as producer:
        producer.send("plain", b"once", queue=0)
    done = commitmq("config", "set", "log.level", "DEBUG", "--store", str(node.store))
    assert done.returncode == 0, done.stderr


def own_files() -> set[str]:
    """The files of state below commitmq/ that are JSON, by the table of owners."""
    return {
        one.pattern.removesuffix("*")
        for one in FILES
        if one.pattern.startswith("commitmq/") and ".json*" in one.pattern
    }


def is_sound(store: Path) -> None:
    told = commitmq("store", "verify", str(store), "--json")
    report = json.loads(told.stdout)
    assert (told.returncode, report["findings"]) == (0, []), told.stdout + told.stderr


def test_a_store_with_every_file_of_a_node_is_sound(tmp_path: Path) -> None:
    settings = (
        *QUICK,
        "consume_queue.enable_lmq=true",
        "consume_queue.enable_multi_dispatch=true",
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
        f"plugins.rocketmq.namesrv_port={free_port()}",
        f"network.store_port={free_port()}",
    )
    with start_node(tmp_path, *settings) as node:
        fill(node)
        wanted = {one for one in own_files() - NOT_HERE if "/audit/" not in one}
        eventually(lambda: all((node.store / one).exists() for one in wanted), "every file is there", 60)
        taken = commitmq("store", "snapshot", str(node.store), "--to", str(tmp_path / "copy"), "--json")
        assert taken.returncode == 0, taken.stderr
        assert json.loads(taken.stdout)["verified"] is True
        assert node.stop().returncode == 0
    is_sound(node.store)
    is_sound(tmp_path / "copy")
