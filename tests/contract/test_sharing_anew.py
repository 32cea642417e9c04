"""Goal: a group that shares queues goes on at the first message of a topic that was deleted and made again under its name.

Method: a real node; consumers that live on while the topic is deleted and made again. Each new message must be acknowledged
once, in a queue with an order in its order. A receipt of the deleted topic acknowledges nothing, also after the process that
hands out messages was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, CommitMQError, Producer, ShareConsumer
from nodes import Node, eventually, start_node, started

WAYS = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
NEW = [b"new %d" % number for number in range(8)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("anew")) as made:
        yield made


def deleted_and_made_again(address: str, topic: str, *, ordered: bool) -> list[bytes]:
    """The new messages in the order in which the consumer acknowledged them."""
    seen: list[bytes] = []

    def take(most: int) -> int:
        for message in consumer.receive(most, 0.2):
            assert message.ack()
            seen.append(bytes(message.body))
        return len(seen)

    with (
        Admin(address) as admin,
        Producer(address) as producer,
        ShareConsumer(
            topic, group=f"of-{topic}", node=address, invisible_s=30, start="earliest", ordered=ordered
        ) as consumer,
    ):
        admin.topic_create(topic, queues=1)
        for number in range(3):
            producer.send(topic, b"old %d" % number, queue=0)
        eventually(lambda: take(3) == 3, "the old messages")
        admin.topic_delete(topic)
        admin.topic_create(topic, queues=1)
        for body in NEW:
            producer.send(topic, body, queue=0)
        eventually(lambda: admin.offsets(topic)[0].max == len(NEW), "they can be read")
        seen.clear()
        eventually(lambda: take(2) >= len(NEW), "the new messages")
        for _ in range(3):
            take(2)  # the coordinator has told of the new topic by now
    return seen


@WAYS
def test_a_share_that_lives_on_begins_the_new_topic_at_its_beginning(node: Node, ordered: bool) -> None:
    # It went on at the offset of the old topic until the coordinator had told of the new one, and then began again.
    for number in range(4):
        seen = deleted_and_made_again(node.address, f"{'o' if ordered else 'u'}-{number}", ordered=ordered)
        assert (seen if ordered else sorted(seen)) == NEW


@pytest.mark.parametrize("way", ["restart", "death"])
def test_an_old_receipt_in_order_beside_a_new_offset(tmp_path: Path, way: str) -> None:
    # The group has an offset in the new topic: a person has set it, or a receive did, whose process died before it stored the
    # state of the queue. The old state counted then, and its receipts acknowledged messages that nobody had received.
    settings = {"COMMITMQ_FAILPOINTS": "pop.after_order_commit=kill@2", "COMMITMQ_FAILPOINTS_ONCE": str(tmp_path)}
    topic, group = "t", "g"
    with started(Node(tmp_path / "store"), **(settings if way == "death" else {})) as node:
        with (
            Admin(node.address) as admin,
            Producer(node.address) as producer,
            ShareConsumer(
                topic, group=group, node=node.address, invisible_s=6, start="earliest", ordered=True
            ) as consumer,
        ):
            admin.topic_create(topic, queues=1)
            for number in range(3):
                producer.send(topic, b"old %d" % number, queue=0)
            eventually(lambda: admin.offsets(topic)[0].max == 3, "they can be read")
            old = consumer.receive(3, 10)
            assert len(old) == 3
            admin.topic_delete(topic)
            admin.topic_create(topic, queues=1)
            for body in NEW:
                producer.send(topic, body, queue=0)
            eventually(lambda: admin.offsets(topic)[0].max == len(NEW), "they can be read")
            if way == "death":
                before = node.pids()["pop"]
                with contextlib.suppress(CommitMQError):
                    consumer.receive(len(NEW), 1)
                eventually(lambda: node.pids().get("pop", before) != before, "another process hands out messages")
            else:
                admin.reset_offsets(group, topic, "earliest", running=True)
        if way == "restart":
            assert node.stop().returncode == 0
            assert node.start().returncode == 0
        with ShareConsumer(topic, group=group, node=node.address, start="earliest", ordered=True) as consumer:
            assert consumer.ack(old) == old
            seen: list[bytes] = []

            def take() -> int:
                for message in consumer.receive(8, 0.5):
                    assert consumer.ack(message) == []
                    seen.append(bytes(message.body))
                return len(seen)

            eventually(lambda: take() >= len(NEW), "the new messages")
            assert seen == NEW


def test_what_came_back_of_the_deleted_topic_went_with_it(node: Node) -> None:
    # Its receipts lie in the group's retry topic, which is not deleted.
    topic = "came-back"
    with (
        Admin(node.address) as admin,
        Producer(node.address) as producer,
        ShareConsumer(topic, group="of-came-back", node=node.address, invisible_s=30, start="earliest") as consumer,
    ):
        admin.topic_create(topic, queues=1)
        for number in range(4):
            producer.send(topic, b"old %d" % number, queue=0)
        eventually(lambda: admin.offsets(topic)[0].max == 4, "they can be read")
        assert consumer.nack(consumer.receive(4, 10)) == []
        eventually(lambda: admin.offsets("%RETRY%of-came-back_came-back")[0].max == 4, "they came back")
        old = consumer.receive(2, 10)
        assert len(old) == 2
        assert all(bytes(one.body).startswith(b"old") for one in old)
        admin.topic_delete(topic)
        admin.topic_create(topic, queues=1)
        for body in NEW:
            producer.send(topic, body, queue=0)
        eventually(lambda: admin.offsets(topic)[0].max == len(NEW), "they can be read")
        assert consumer.ack(old[0]) == [old[0]], "it comes too late"
        assert consumer.nack(old[1]) == [old[1]], "it comes too late"
        seen: list[bytes] = []

        def take() -> int:
            for message in consumer.receive(8, 0.5):
                assert message.ack()
                seen.append(bytes(message.body))
            return len(seen)

        eventually(lambda: take() >= len(NEW), "the new messages")
        for _ in range(4):
            take()
        assert sorted(seen) == NEW, "two of the deleted topic were still to be received again"


@WAYS
@pytest.mark.parametrize("is_killed", [False, True], ids=["lives", "killed"])
def test_a_receipt_of_the_deleted_topic_acknowledges_nothing(node: Node, *, ordered: bool, is_killed: bool) -> None:
    # Each was answered True. In order, the group's offset in the new topic then passed messages that nobody had received.
    topic = f"receipts-{ordered}-{is_killed}"
    with (
        Admin(node.address) as admin,
        Producer(node.address) as producer,
        ShareConsumer(
            topic, group=f"of-{topic}", node=node.address, invisible_s=30, start="earliest", ordered=ordered
        ) as consumer,
    ):
        admin.topic_create(topic, queues=1)
        for number in range(3):
            producer.send(topic, b"old %d" % number, queue=0)
        eventually(lambda: admin.offsets(topic)[0].max == 3, "they can be read")
        old = consumer.receive(3, 10)
        assert len(old) == 3
        admin.topic_delete(topic)
        admin.topic_create(topic, queues=1)
        for body in NEW:
            producer.send(topic, body, queue=0)
        eventually(lambda: admin.offsets(topic)[0].max == len(NEW), "they can be read")
        if is_killed:
            before = node.pids()["pop"]
            os.kill(before, signal.SIGKILL)
            eventually(lambda: node.pids().get("pop", before) != before, "another process hands out messages")
        assert consumer.ack(old[0]) == [old[0]]
        assert consumer.extend(old[1], 20) == [old[1]]
        assert consumer.nack(old[2]) == [old[2]]
        assert [bytes(one.body) for one in consumer.receive(len(NEW), 10)] == NEW
