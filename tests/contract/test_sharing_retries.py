"""Goal: a failed message comes back to the consumers that share queues not before the delay that was asked for.

Method: real nodes, also one with a longer shortest delay; consumers by hand, with handlers, and for asyncio.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from commitmq import Admin, AsyncShareConsumer, Message, Producer, ShareConsumer
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)
SHORTEST_S = 2.0
OTHER_SHORTEST_S = 3.5


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("retries")) as made:
        yield made


def fill(node: Node, topic: str, count: int) -> None:
    with Admin(node.address) as admin:
        admin.topic_create(topic, 1)
        with Producer(node.address) as producer:
            producer.send_batch(topic, [b"%d" % number for number in range(count)])
        eventually(lambda: sum(one.max for one in admin.offsets(topic)) == count, "all can be read")


def sharer(node: Node, topic: str, *, ordered: bool) -> ShareConsumer:
    return ShareConsumer(topic, group=f"of-{topic}", node=node.address, ordered=ordered)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_short_delay_is_rounded_up(node: Node, ordered: bool) -> None:
    topic = f"short-{ordered}"
    fill(node, topic, 1)
    with sharer(node, topic, ordered=ordered) as consumer:
        for delay in (0.0004, 1.9):
            (message,) = consumer.receive(1, 10)
            began = time.monotonic()
            assert message.nack(delay)
            assert consumer.receive(1, SHORTEST_S - 0.3) == []
            (message,) = consumer.receive(1, 10)
            assert time.monotonic() - began >= SHORTEST_S - 0.1
            began = time.monotonic()
            assert message.nack(0)
            (message,) = consumer.receive(1, 10)
            assert time.monotonic() - began < SHORTEST_S - 0.3, "0 is at once"
            assert message.nack()
        assert consumer.receive(1, 10)[0].ack()


def test_the_shortest_delay_is_the_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    shortest = f"pop.min_invisible_ms={int(OTHER_SHORTEST_S * 1000)}"
    with start_node(tmp_path_factory.mktemp("longer"), shortest) as node:
        fill(node, "longer", 1)
        with sharer(node, "longer", ordered=False) as consumer:
            (message,) = consumer.receive(1, 10)
            began = time.monotonic()
            assert message.nack(2.5)
            (message,) = consumer.receive(1, 10)
            assert time.monotonic() - began >= OTHER_SHORTEST_S - 0.1
            assert message.ack()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_short_backoff_is_rounded_up(node: Node, ordered: bool) -> None:
    topic = f"backoff-{ordered}"
    fill(node, topic, 1)
    times: list[float] = []
    with sharer(node, topic, ordered=ordered) as consumer:

        def handle(message: Message) -> bool:
            times.append(time.monotonic())
            if message.reconsume_times == 2:
                threading.Thread(target=consumer.close).start()
            return message.reconsume_times == 2

        consumer.run(handle, backoff=0.5)
    assert len(times) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= SHORTEST_S - 0.1


def test_the_twin_for_asyncio_rounds_up_too(node: Node) -> None:
    fill(node, "looped", 1)

    async def main() -> float:
        async with AsyncShareConsumer("looped", group="of-looped", node=node.address) as consumer:
            (message,) = await consumer.receive(1, 10)
            began = time.monotonic()
            assert await consumer.nack(message, 0.5) == []
            (message,) = await consumer.receive(1, 10)
            assert await consumer.ack(message) == []
            return time.monotonic() - began

    assert asyncio.run(main()) >= SHORTEST_S - 0.1
