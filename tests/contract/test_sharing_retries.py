"""Goal: a failed message comes back to the consumers that share queues not before the delay that was asked for, and in an
ordered queue no message counts as tried that no handler had.

Method: real nodes, also one with a longer shortest delay and one that is killed; consumers by hand, with handlers, and for
asyncio.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, AsyncShareConsumer, Message, Producer, ShareConsumer
from delays import everything
from nodes import Node, eventually, start_node, started

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


def tries(many: list[Message]) -> list[tuple[int, int]]:
    return [(int(one.body), one.reconsume_times) for one in many]


def test_a_message_behind_one_that_fails_keeps_its_tries(node: Node) -> None:
    """The second message fails once by itself, and must not be a dead letter then."""
    fill(node, "behind", 3)
    seen: list[tuple[int, int]] = []
    with Admin(node.address) as admin:
        admin.group_config("of-behind", {"retryMaxTimes": 3})
    with sharer(node, "behind", ordered=True) as consumer:

        def handle(message: Message) -> bool:
            number, times = int(message.body), message.reconsume_times
            seen.append((number, times))
            if number == 2:
                threading.Thread(target=consumer.close).start()
            return number == 2 or (number == 1 and times == 1)

        consumer.run(handle, backoff=0)
        assert consumer.handler_counts.dead == 1
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0)]
    assert [one.body for one in everything(node, "%DLQ%of-behind")] == [b"0"]


def test_what_comes_back_untried_counts_for_no_consumer_and_over_a_kill(tmp_path: Path) -> None:
    with started(Node(tmp_path / "store")) as node:
        fill(node, "untried", 3)
        with Admin(node.address) as admin:
            admin.group_config("of-untried", {"retryMaxTimes": 1})
        with sharer(node, "untried", ordered=True) as consumer:
            first, *rest = consumer.receive(3, 10)
            assert consumer.nack(rest, untried=True) == []
            assert first.nack()
        node.kill_all()
        assert node.start().returncode == 0
        with sharer(node, "untried", ordered=True) as consumer:
            many = consumer.receive(3, 10)
            assert tries(many) == [(0, 1), (1, 0), (2, 0)]
            assert consumer.nack(many, untried=True) == []
            many = consumer.receive(3, 10)
            assert tries(many) == [(0, 1), (1, 0), (2, 0)], "and the last try stays the last one"
            assert consumer.nack(many) == []
            many = consumer.receive(3, 10)
            assert tries(many) == [(1, 1), (2, 1)]
            assert consumer.ack(many) == []
        assert [one.body for one in everything(node, "%DLQ%of-untried")] == [b"0"]


def test_a_close_gives_back_untried_what_no_handler_had(node: Node) -> None:
    fill(node, "closed", 4)
    for _ in range(2):
        with sharer(node, "closed", ordered=True) as consumer:

            def handle(message: Message, consumer: ShareConsumer = consumer) -> None:
                consumer.close()

            consumer.run(handle)

    async def main() -> None:
        async with AsyncShareConsumer("closed", group="of-closed", node=node.address, ordered=True) as consumer:

            async def handle(message: Message) -> None:
                await consumer.close()

            await consumer.run(handle)

    asyncio.run(main())
    with sharer(node, "closed", ordered=True) as consumer:
        many = consumer.receive(4, 10)
        assert tries(many) == [(3, 0)]
        assert consumer.ack(many) == []


def test_untried_is_for_ordered_consumers_alone(node: Node) -> None:
    fill(node, "alone", 1)
    with sharer(node, "alone", ordered=False) as consumer:
        (message,) = consumer.receive(1, 10)
        with pytest.raises(ValueError, match="untried"):
            consumer.nack(message, untried=True)
        assert message.ack()
    with sharer(node, "alone", ordered=True) as consumer:
        with pytest.raises(ValueError, match="untried"):
            consumer.nack([], 5, untried=True)
        with pytest.raises(ValueError, match="untried"):
            consumer.nack([], dead=True, untried=True)
