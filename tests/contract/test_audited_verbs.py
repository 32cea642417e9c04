"""Goal: each verb that changes something leaves a line in the audit log with its own name, its values, and who it was.

Method: one node without keys; the verbs over its tcp port, as somebody at the machine uses them, and the log after each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import orjson
import pytest

from commitmq import Admin, Producer
from delays import Peer
from nodes import Node, eventually, start_node

ME = f"uid {os.getuid()}@local"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("verbs"), "topics.default_queues=1", "groups.auto_create=true") as made:
        with Admin(made.address) as admin, Producer(made.address) as producer:
            admin.topic_create("orders", 1)
            for number in range(3):
                producer.send("orders", b"%d" % number)
            eventually(lambda: admin.offsets("orders")[0].max == 3, "all three can be read")
            admin.commit_offsets("kitchen", [("orders", 0, 2)])
        yield made


def ran(node: Node, *words: str) -> list[str]:
    """Run a verb. Returns the lines that the audit log has of it, without their time: process, who, decision, …"""
    before = len(text(node))
    ended = node.run(*words, "--node", node.address)
    assert ended.returncode == 0, ended.stderr
    return [line.partition("  ")[2] for line in text(node)[before:]]


def text(node: Node) -> list[str]:
    ended = node.run("audit", "--store", str(node.store), "--last", "0")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def bury(node: Node, count: int) -> None:
    """Dead letters of the group kitchen."""
    with Admin(node.address) as admin, Producer(node.address) as producer, Peer(node) as peer:
        for name in ("%DLQ%kitchen", "%RETRY%kitchen"):
            admin.topic_create(name, 1)
        assert peer.hello()["ok"]
        for _ in range(count):
            sent = producer.send("orders", b"bad")
            answer = peer.ask(
                b"", op="send_back", group="kitchen", topic="orders", queue=sent.queue, queue_offset=sent.queue_offset,
                physical_offset=sent.physical_offset, delay_level=-1,
            )  # fmt: skip
            place = answer["queue_offset"]
        eventually(lambda: admin.offsets("%DLQ%kitchen")[0].max > place, "the last one can be read")


def test_topics_groups_and_settings(node: Node) -> None:
    (updated,) = ran(node, "topic", "update", "orders", "--queues", "2")
    assert (
        updated == f"coordinator  {ME}  allowed  topic.update  Topic:orders  [read_queues 1 -> 2, write_queues 1 -> 2]"
    )
    (reset,) = ran(node, "group", "reset", "kitchen", "orders", "--to", "earliest", "--queue", "0")
    assert reset == f"coordinator  {ME}  allowed  group.reset  Group:kitchen  [orders/0 2 -> 0]"
    (cloned,) = ran(node, "group", "clone", "kitchen", "bakers")
    assert cloned == f"coordinator  {ME}  allowed  group.clone  Group:bakers  [from kitchen, orders/0 - -> 0]"
    (copied,) = ran(node, "group", "reset", "other", "--copy-from", "kitchen")
    assert copied == f"coordinator  {ME}  allowed  group.reset  Group:other  [from kitchen, orders/0 - -> 0]"
    assert ran(node, "group", "reset", "kitchen", "orders", "--to", "latest", "--dry-run") == []
    (setting,) = ran(node, "config", "set", "log.level", "DEBUG")
    assert setting == f"supervisor  {ME}  allowed  config.set  Setting:log.level  [value INFO -> DEBUG]"


def test_dead_letters(node: Node) -> None:
    bury(node, 3)
    assert ran(node, "dlq", "resend", "kitchen", "--dry-run") == []
    (resent,) = ran(node, "dlq", "resend", "kitchen", "--max", "1")
    assert resent == f"coordinator  {ME}  allowed  dlq.resend  Group:kitchen"
    assert ran(node, "dlq", "purge", "kitchen", "--dry-run") == []
    (purged,) = ran(node, "dlq", "purge", "kitchen", "--yes")
    assert purged == f"coordinator  {ME}  allowed  dlq.purge  Group:kitchen  [%DLQ%kitchen/0 1 -> 3]"


def test_a_waiting_message(node: Node) -> None:
    with Producer(node.address) as producer:
        sent = producer.send("orders", b"later", delay=3_600)
    listed = orjson.loads(node.run("delayed", "list", "--json", "--node", node.address).stdout)
    (recalled,) = ran(node, "delayed", "recall", listed["messages"][0]["unique_id"])
    begin = f"writer  {ME}  allowed  recall  Topic:orders  [unique_id {sent.unique_id}, due_ms "
    assert recalled.startswith(begin)
