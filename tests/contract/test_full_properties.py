"""Goal: a message whose properties fill its record is handled as any other one: it is tried again or becomes a dead letter;
no process, no group and no queue stops at it. One of which not even a dead letter fits is set aside and listed.

Method: one node; for each way in which messages come back, messages whose properties end at the limit and up to 450 bytes
before it, among good ones, with a short and the longest name of a group. Then a node whose log has CRCs all of a sudden, for
which a full message has no room.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import (
    Admin,
    Consumer,
    ConsumeResult,
    HalfMessage,
    Message,
    Producer,
    Reader,
    ShareConsumer,
    TransactionState,
)
from commitmq.errors import CommitMQError
from delays import Peer
from nodes import Node, commitmq, eventually, start_node, started
from transactions import send_half

pytestmark = pytest.mark.timeout(120)
LONG_GROUP = "g" * 120
GOOD = 60


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("full"),
        "topics.default_queues=1",
        "groups.heartbeat_interval_ms=200",
        "transaction.timeout_ms=1000",
        "transaction.check_interval_ms=500",
    ) as made:
        yield made
        report = json.loads(commitmq("status", "--store", str(made.store), "--json").stdout)
        assert {one["role"]: one["restarts"] for one in report["processes"] if one["restarts"]} == {}
        log = (made.store / "commitmq" / "node.log").read_text()
        assert "Traceback" not in log


def fill(node: Node, topic: str, step: int = 30) -> set[bytes]:
    """Messages at the limit among good ones, in one queue; returns the bodies of the former."""
    large = set()
    with Producer(node.address) as producer:
        limit = next(size for size in range(32_767, 32_000, -1) if takes(producer, topic, size))
        large.add(b"%d" % limit)
        for number, size in enumerate(range(limit - 1, limit - 450, -step)):
            assert takes(producer, topic, size)
            large.add(b"%d" % size)
            producer.send(topic, b"good %d" % number, queue=0)
        producer.send_batch(topic, [b"good"] * GOOD, queue=0)
    return large


def takes(producer: Producer, topic: str, size: int) -> bool:
    try:
        producer.send(topic, b"%d" % size, queue=0, properties={"a": "x" * size})
    except CommitMQError:
        return False
    return True


def dead_letters(node: Node, group: str, count: int) -> set[bytes]:
    found: set[bytes] = set()
    with Reader(f"%DLQ%{group}", node=node.address, start="earliest") as reader:
        deadline = time.monotonic() + 40
        while len(found) < count and time.monotonic() < deadline:
            for message in reader.poll(0.5):
                assert message.properties["a"] == "x" * int(message.body)
                found.add(bytes(message.body))
    return found


@pytest.mark.parametrize("group", ["kitchen", LONG_GROUP])
def test_a_handler_that_always_fails_holds_up_no_queue(node: Node, group: str) -> None:
    topic = f"handled-{len(group)}"
    large = fill(node, topic)
    good = 0
    lock = threading.Lock()

    def handle(message: Message) -> ConsumeResult | None:
        nonlocal good
        if not message.body.startswith(b"good"):
            assert message.topic == topic
            raise ValueError("it fails")
        with lock:
            good += 1
        return None

    with Consumer(topic, group=group, node=node.address) as consumer:
        runner = threading.Thread(target=lambda: consumer.run(handle, backoff=1, max_retries=1))
        runner.start()
        try:
            assert dead_letters(node, group, len(large)) == large
            with Admin(node.address) as admin:
                end = sum(one.max for one in admin.offsets(topic))
                eventually(
                    lambda: [offset for name, _, offset in admin.group(group)["offsets"] if name == topic] == [end],
                    "the group has handled all",
                )
        finally:
            consumer.close()
            runner.join()
    assert good == GOOD + len(large) - 1


@pytest.mark.parametrize("group", ["shop", LONG_GROUP])
def test_messages_that_nobody_acknowledges_come_back(node: Node, group: str) -> None:
    """And another group goes on meanwhile."""
    topic = f"shared-{len(group)}"
    large = fill(node, topic)
    came: set[bytes] = set()
    with ShareConsumer(topic, group=group, node=node.address, invisible_s=2) as consumer:
        first = [message for _ in range(8) for message in consumer.receive(wait_s=0.2)]
        for message in first:
            if message.body.startswith(b"good"):
                message.ack()
        with ShareConsumer(topic, group=f"n{len(group)}", node=node.address) as neighbour:
            assert neighbour.receive(1, 5)
        deadline = time.monotonic() + 20
        while came != large and time.monotonic() < deadline:
            for message in consumer.receive(wait_s=1):
                came.add(bytes(message.body))
                message.ack()
            came |= dead_letters_now(node, group)
    assert came == large


def dead_letters_now(node: Node, group: str) -> set[bytes]:
    try:
        with Reader(f"%DLQ%{group}", node=node.address, start="earliest") as reader:
            return {bytes(one.body) for one in reader.poll(0.2)}
    except CommitMQError:
        return set()


@pytest.mark.parametrize("ordered", [False, True])
def test_they_become_dead_letters_when_a_program_says_so(node: Node, ordered: bool) -> None:
    topic, group = f"dead-{ordered}", f"g-{ordered}"
    large = fill(node, topic)
    good = 0
    with ShareConsumer(topic, group=group, node=node.address, invisible_s=30, ordered=ordered) as consumer:
        deadline = time.monotonic() + 30
        while good < GOOD + len(large) - 1 and time.monotonic() < deadline:
            for message in consumer.receive(wait_s=1):
                if message.body.startswith(b"good"):
                    good += message.ack()
                else:
                    assert not consumer.nack(message, dead=True)
    assert good == GOOD + len(large) - 1
    assert dead_letters(node, group, len(large)) == large
    if ordered:
        return
    with Admin(node.address) as admin:  # (what names their origin is dropped where it has no room)
        result = admin.dlq_resend(group)
    assert (result.sent + result.failed, result.sent_before) == (len(large), 0)
    assert result.failed < 5
    assert all("properties" in one.reason or "RETRY_TOPIC" in one.reason for one in result.failures)


@pytest.mark.parametrize("name", ["CHECK_IMMUNITY_TIME_IN_SECONDS", "TRANSACTION_CHECK_TIMES"])
def test_a_half_message_with_a_number_that_nobody_can_read_ends_no_check(node: Node, name: str) -> None:
    """Python reads no number of thousands of digits. The checks of others go on."""
    asked: list[bytes] = []

    def listen(half: HalfMessage) -> TransactionState:
        asked.append(bytes(half.body))
        return TransactionState.COMMIT

    with Peer(node) as peer, Producer(node.address, group="g", transaction_listener=listen) as producer:
        number: dict[str, Any] = {name: "9" * 5_000}
        send_half(peer, "halves", b"bad", group="g", **number)
        with producer.transaction("halves", b"good") as transaction:
            transaction.unknown()
        eventually(lambda: b"good" in asked, "the other one is asked about")


def test_a_message_of_which_no_copy_fits_is_set_aside_and_listed(tmp_path: Path) -> None:
    """By each mover, once, with its place; what comes behind it goes on."""
    full = {"a": "x" * (32_767 - 3 - 42), "UNIQ_KEY": "7F" * 16}  # (with UNIQ_KEY 42 bytes)
    node = Node(tmp_path / "store", "topics.default_queues=1", "commit_log.append_properties_crc=false")
    with started(node), Peer(node) as peer, Producer(node.address) as producer:
        for topic in ("handled", "shared", "ordered"):
            assert peer.ask(b"full", op="send", topic=topic, queue=0, properties=full)["ok"]
            producer.send(topic, b"good", queue=0)
        waiting = full | {"a": "x" * (32_767 - 3 - 42 - len("DELAY 3 REAL_TOPIC delayed REAL_QID 0 ")), "DELAY": "3"}
        assert peer.ask(b"full", op="send", topic="delayed", queue=0, properties=waiting)["ok"]
        producer.send("delayed", b"good", queue=0, delay_level=3)
    node.settings[-1] = "commit_log.append_properties_crc=true"
    with started(node), Admin(node.address) as admin:
        good: list[bytes] = []

        def handle(message: Message) -> None:
            if message.body == b"full":
                raise ValueError("it fails")
            good.append(message.body)
            consumer.close()

        with Consumer("handled", group="g", node=node.address) as consumer:
            consumer.run(handle, backoff=1)
        with ShareConsumer("shared", group="s", node=node.address, invisible_s=2) as sharer:
            found = sharer.receive(2, 10)
            good += [message.body for message in found if message.body == b"good" and message.ack()]
        with ShareConsumer("ordered", group="o", node=node.address, ordered=True) as sharer:
            while len(good) < 3:
                for message in sharer.receive(2, 10):
                    good += [message.body] if message.body == b"good" else []
                    assert message.ack() if message.body == b"good" else not sharer.nack(message, dead=True)
        with Reader("delayed", node=node.address, start="earliest") as reader:
            assert [one.body for one in reader.poll(30)] == [b"good"]
        eventually(lambda: len(admin.set_aside()) == 4, "all four are listed")
        places = sorted((one["process"], one["topic"], one.get("group", "")) for one in admin.set_aside())
        expected = [("pop", "ordered", "o"), ("pop", "shared", "s"), ("schedule", "SCHEDULE_TOPIC_XXXX", "")]
        assert places == [*expected, ("writer", "handled", "g")]
        assert {one["queue_offset"] for one in admin.set_aside()} == {0}
        rows = {one["role"]: one for one in admin.status()["processes"]}
        assert [rows[role]["info"]["set_aside"] for role in ("pop", "schedule", "writer")] == [2, 1, 1]
        assert not any(one["restarts"] for one in rows.values())
    with started(node):  # it is listed on, and not a second time
        listed = json.loads(commitmq("dlq", "stuck", "--json", "--node", node.address).stdout)["messages"]
        assert len(listed) == 4
        assert "handled" in commitmq("dlq", "stuck", "g", "--node", node.address).stdout
