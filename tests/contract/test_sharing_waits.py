"""Goal: consumers that share queues may start before their topics exist.

Method: a real node; receives and handlers before the first send, with and without order; the log of the consumer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from commitmq import Admin, Message, Producer, ShareConsumer
from nodes import Node, start_node

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("waits")) as made:
        yield made


def send(node: Node, topic: str, body: bytes) -> None:
    with Producer(node.address) as producer:
        producer.send(topic, body)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_receive_waits_for_a_topic(node: Node, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    topic, there = f"new-{ordered}", f"there-{ordered}"
    monkeypatch.setattr(
        "commitmq.client.sharing.share_consumer._log.warning", lambda text, **more: warned.append(more["topic"])
    )
    with Admin(node.address) as admin:
        admin.topic_create(there, 1)
    group = f"of-{topic}"
    with ShareConsumer(topic, group=group, node=node.address, ordered=ordered, start="latest") as consumer:
        began = time.monotonic()
        assert consumer.receive(1, 1.5) == []
        assert 1.4 <= time.monotonic() - began < 10
        assert consumer.receive(1, 0) == []
        assert warned == [topic]
        send(node, topic, b"first")
        (message,) = consumer.receive(1, 20)
        assert message.body == b"first", "a topic that is newer than the consumer begins at its first message"
        assert message.ack()
    with ShareConsumer([there, "never"], group=f"{group}-2", node=node.address, ordered=ordered) as consumer:
        send(node, there, b"other")
        (message,) = consumer.receive(1, 20)
        assert (message.body, warned) == (b"other", [topic, "never"])
        assert message.ack()


@pytest.mark.parametrize("ordered", [False, True])
def test_handlers_wait_for_a_topic(node: Node, ordered: bool) -> None:
    topic = f"handled-{ordered}"
    seen: list[bytes] = []
    with ShareConsumer(topic, group=f"of-{topic}", node=node.address, ordered=ordered) as consumer:

        def handle(message: Message) -> None:
            seen.append(message.body)
            consumer.close()

        timer = threading.Timer(1.5, send, (node, topic, b"late"))
        timer.start()
        consumer.run(handle)
        timer.join()
    assert seen == [b"late"]
