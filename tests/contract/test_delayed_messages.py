"""Goal: a message with a delay level is delivered once, at its time and not before it, to the queue that it was sent to.

Method: real nodes, requests at the level of the protocol, and reads of whole topics; RocketMQ's own store with delayed
messages that are overdue by now.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import orjson
import pytest

from commitmq import Admin, Producer
from commitmq.store.metadata import json_config
from delays import Peer, everything
from golden_stores import unpack
from nodes import Node, eventually, start_node, started

pytestmark = pytest.mark.timeout(120)
TOPIC, QUEUES = "parcels", 3


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("delays"), f"topics.default_queues={QUEUES}") as made:
        with Admin(made.address) as admin:
            admin.topic_create(TOPIC, QUEUES)
        yield made


def bodies(node: Node, topic: str = TOPIC) -> list[bytes]:
    return [one.body for one in everything(node, topic)]


def has(node: Node, topic: str, count: int) -> bool:
    return len(bodies(node, topic)) >= count


def test_a_message_comes_at_its_time_and_not_before(node: Node) -> None:
    with Peer(node) as peer:
        answer = peer.send(TOPIC, b"one second", 1, queue=2)
    assert answer["ok"], answer
    assert (answer["stored_topic"], answer["stored_queue"]) == ("SCHEDULE_TOPIC_XXXX", 0)
    assert answer["queue"] == 2
    eventually(lambda: b"one second" in bodies(node), "it is delivered")
    (stored,) = [one for one in everything(node, TOPIC) if one.body == b"one second"]
    assert stored.queue == 2
    assert stored.store_timestamp >= answer["store_timestamp"] + 1_000, "it came too early"


def test_a_run_of_delayed_messages_keeps_its_order(node: Node) -> None:
    many = [b"run-%d" % number for number in range(500)]
    with Peer(node) as peer:
        answer = peer.append(TOPIC, many, [1] * len(many), queue=1)
        assert answer["ok"], answer
        assert answer["count"] == len(many)
    eventually(lambda: many[-1] in bodies(node), "the last one is delivered")
    mine = [one.body for one in everything(node, TOPIC) if one.queue == 1 and one.body.startswith(b"run-")]
    assert mine == many


def test_a_run_has_one_destination(node: Node) -> None:
    with Peer(node) as peer:
        answer = peer.append(TOPIC, [b"a", b"b"], [1, 2])
    assert (answer["ok"], answer["code"], answer["outcome"]) == (False, "MESSAGE_ILLEGAL", "not_stored")
    assert "the same property DELAY" in answer["error"]


@pytest.mark.parametrize("level", ["soon", "1.5", "", "1 ", "９", str(1 << 40)])
def test_a_level_is_an_integer(node: Node, level: str) -> None:
    with Peer(node) as peer:
        answer = peer.send(TOPIC, b"never", level)
    if level == "":  # an empty value is no property
        assert answer["ok"]
        return
    assert (answer["ok"], answer["code"]) == (False, "MESSAGE_ILLEGAL")
    assert "delay level" in answer["error"]


@pytest.mark.parametrize("level", [0, -1])
def test_no_level_is_no_delay(node: Node, level: int) -> None:
    with Peer(node) as peer:
        answer = peer.send(TOPIC, b"at once %d" % level, level)
    assert answer["ok"]
    assert "stored_topic" not in answer
    eventually(lambda: b"at once %d" % level in bodies(node), "it is there")


def test_a_level_above_the_last_is_the_last(node: Node) -> None:
    with Peer(node) as peer:
        answer = peer.send(TOPIC, b"in two hours", 25)
    assert answer["stored_queue"] == 17


def test_what_cannot_be_delayed_is_refused(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("in-memory", 1, attributes={"storage.type": "memory"})
    with Peer(node) as peer:
        numbered = peer.send(TOPIC, b"x", 1, producer_id="p", producer_epoch=0, sequence=0)
        assert (numbered["code"], "idempotent" in numbered["error"]) == ("MESSAGE_ILLEGAL", True), numbered
        further = peer.ask(
            b"x",
            op="send",
            topic=TOPIC,
            queue=0,
            properties={"DELAY": "1", "INNER_MULTI_DISPATCH": "%LMQ%a"},
        )
        assert not further["ok"]
        forged = peer.ask(b"x", op="send", topic=TOPIC, queue=0, properties={"TIMER_OUT_MS": "1"})
        assert forged["code"] == "MESSAGE_ILLEGAL"


def test_only_the_node_moves_messages(node: Node) -> None:
    with Peer(node) as peer:  # over tcp
        answer = peer.ask(b"x" * 200, op="append", topic=TOPIC, queue=0, count=1, moved=4)
    assert (answer["ok"], answer["code"]) == (False, "NO_PERMISSION")


def test_messages_wait_while_the_node_is_down(tmp_path: Path) -> None:
    node = Node(tmp_path / "store")
    with started(node):
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 1)
        with Peer(node) as peer:
            assert peer.send(TOPIC, b"while down", 1)["ok"]
            assert peer.send(TOPIC, b"later", 2)["ok"]
        assert node.stop().returncode == 0
        time.sleep(1.2)
        assert node.start().returncode == 0
        eventually(lambda: bodies(node) == [b"while down", b"later"], "both are delivered, each once")
        assert node.stop().returncode == 0
    table = json_config.load(tmp_path / "store" / "config" / "delayOffset.json")
    assert table is not None
    assert table["offsetTable"] == {1: 1, 2: 1}


def test_a_node_without_the_process_refuses(tmp_path: Path) -> None:
    with start_node(tmp_path, "schedule.enable=false") as node:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 1)
        with Peer(node) as peer:
            answer = peer.send(TOPIC, b"x", 1)
        assert (answer["code"], answer["outcome"]) == ("MESSAGE_ILLEGAL", "not_stored")
        assert "schedule.enable" in answer["error"]


def info(admin: Admin, role: str) -> dict[str, object]:
    found: dict[str, object] = {row["role"]: row for row in admin.status()["processes"]}[role]["info"]
    return found


def test_messages_of_a_deleted_topic_do_not_come_to_the_next_one_of_its_name(tmp_path: Path) -> None:
    with start_node(tmp_path) as node, Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create(TOPIC, 1)
        with Peer(node) as peer:
            assert peer.send(TOPIC, b"of the old one, with a level", 2)["ok"]
        producer.send(TOPIC, b"of the old one, with a time", delay=5)
        producer.send("other", b"of another one", delay=5)
        admin.topic_delete(TOPIC)
        admin.topic_create(TOPIC, 1)
        with Peer(node) as peer:
            assert peer.send(TOPIC, b"with a level", 2)["ok"]
        producer.send(TOPIC, b"with a time", delay=5)
        eventually(lambda: has(node, TOPIC, 2) and has(node, "other", 1), "those of the new topic are delivered")
        eventually(lambda: info(admin, "schedule").get("dropped") == 1, "the level counts what it drops")
        eventually(lambda: info(admin, "timer").get("dropped") == 1, "the timer counts what it drops")
        assert sorted(bodies(node)) == [b"with a level", b"with a time"]
        assert "dead_letters" not in info(admin, "schedule") | info(admin, "timer")


def test_a_topic_that_takes_nothing_holds_up_no_other_message(tmp_path: Path) -> None:
    with start_node(tmp_path, "topics.auto_create=false") as node, Admin(node.address) as admin, Peer(node) as peer:
        for name in ("gone", TOPIC):
            admin.topic_create(name, 1)
        assert peer.send("gone", b"nowhere to go", 1)["ok"]
        assert peer.send(TOPIC, b"behind it", 1)["ok"]
        admin.topic_update("gone", perm=4)
        eventually(lambda: bodies(node) == [b"behind it"], "the other message is delivered")
        eventually(lambda: info(admin, "schedule").get("dead_letters") == 1, "the other one is kept")
        assert "NO_PERMISSION" in node.log_tail()
        (letter,) = admin.dlq_list("CMQ_UNDELIVERED")
        assert (letter.topic, letter.message.body) == ("gone", b"nowhere to go")
        admin.topic_update("gone", perm=6)
        assert admin.dlq_resend("CMQ_UNDELIVERED").sent == 1
        eventually(lambda: bodies(node, "gone") == [b"nowhere to go"], "it comes at once, without its delay")
        assert admin.dlq_list("CMQ_UNDELIVERED") == []


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "killed"])
def test_what_rocketmq_left_pending_is_delivered_once(tmp_path: Path, stopped: bool) -> None:
    golden = unpack("semantics", tmp_path)
    expected = orjson.loads((tmp_path / "expected.json").read_bytes())
    if not stopped:
        # A killed RocketMQ leaves ``abort``, and its offsets of delay levels are some seconds behind.
        (golden.root / "abort").write_text("1")
        table = golden.root / "config" / "delayOffset.json"
        table.write_text(table.read_text().replace("1:17", "1:12").replace("3:3", "3:1"))
        (golden.root / "config" / "delayOffset.json.bak").unlink(missing_ok=True)
    pending = [one for one in expected["messages"] if one["kind"] in ("delayed-level", "delayed-delivered")]
    wanted: dict[str, list[str]] = {}
    for one in pending:
        wanted.setdefault(one["topic"], []).append(one["body_hex"])
    node = Node.bare(golden.root, "network.port=0")
    with started(node):
        for topic, hexes in wanted.items():
            eventually(partial(has, node, topic, len(hexes)), f"all of {topic}")
            time.sleep(0.5)
            assert sorted(body.hex() for body in bodies(node, topic)) == sorted(hexes)
        if not stopped:
            shutil.copy(node.store / "commitmq" / "node.log", tmp_path / "node.log")
