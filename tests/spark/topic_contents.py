"""What a topic holds, for tests that compare all of it."""

from __future__ import annotations

from collections import Counter

from commitmq import Message, Reader
from commitmq.testing.node import CommitMQNode


def stored(node: CommitMQNode, topic: str) -> list[Message]:
    """All messages of a topic, by queue and offset."""
    node.wait_until_dispatched("consume_queue")
    ends = {queue: end for queue, _, end, _ in node.admin.offsets(topic)}
    found: list[Message] = []
    with Reader(topic, node=node.address, start="earliest") as consumer:
        while len(found) < sum(ends.values()):
            batch = list(consumer.poll(timeout_s=10))
            assert batch, f"{len(found)} of {sum(ends.values())} messages can be read"
            found += batch
    return sorted(found, key=lambda one: (one.queue_id, one.queue_offset))


def bodies(node: CommitMQNode, topic: str) -> Counter[bytes]:
    """How often each body is in a topic."""
    return Counter(one.body for one in stored(node, topic))
