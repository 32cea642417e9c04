"""Goal: the asyncio twins do what the clients do, and a cancelled task loses and repeats nothing silently.

Method: a real node; tasks are cancelled while they wait, and loops are closed while clients are open.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from commitmq import (
    AsyncAdmin,
    AsyncConsumer,
    AsyncProducer,
    AsyncReader,
    InvalidMessageError,
    MessageBatch,
    NodeUnavailableError,
    Outcome,
    ProtocolError,
    SendError,
)
from nodes import Node, start_node

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("aio"), "topics.default_queues=2") as made:
        yield made


def run(main: Callable[[], Awaitable[Any]]) -> None:
    """Run ``main`` and check that it left no thread and no descriptor."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())  # type: ignore[arg-type]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    for thread in threading.enumerate():
        if thread.name.startswith("commitmq"):
            thread.join(5)
            assert not thread.is_alive(), thread.name


async def drain(consumer: AsyncConsumer | AsyncReader, count: int) -> list[bytes]:
    bodies: list[bytes] = []
    async with asyncio.timeout(20):
        while len(bodies) < count:
            bodies += [one.body for one in await consumer.poll(0.5)]
    return bodies


def test_sending_and_receiving(node: Node) -> None:
    async def main() -> None:
        async with (
            AsyncProducer(node.address) as producer,
            AsyncConsumer("aio", group="aio", node=node.address) as consumer,
            AsyncAdmin(node.address) as admin,
        ):
            results = await asyncio.gather(*(producer.send("aio", b"%d" % n, tags="T") for n in range(500)))
            assert len({(one.queue, one.queue_offset) for one in results}) == 500
            future = producer.submit("aio", b"submitted")
            await producer.flush()
            assert (await future).topic == "aio"
            assert len(await producer.send_batch("aio", [b"batch"] * 10)) == 10
            bodies = await drain(consumer, 511)
            assert sorted(bodies) == sorted([*(b"%d" % n for n in range(500)), b"submitted", *[b"batch"] * 10])
            assert sum((await consumer.commit()).values()) <= 511
            assert sum(row.lag for row in await admin.group_lag("aio")) == 0
            assert consumer.assignment == [("aio", 0), ("aio", 1)]
            assert sum(consumer.positions.values()) == 511
            await consumer.seek("aio", 0, 0)
            assert await drain(consumer, 1)

    run(main)


def test_iterating_yields_batches(node: Node) -> None:
    async def main() -> None:
        async with (
            AsyncProducer(node.address) as producer,
            AsyncReader("iterated", node=node.address) as consumer,
        ):
            await producer.send_batch("iterated", [b"x"] * 20)
            seen = 0
            async for batch in consumer:
                seen += len(batch)
                if seen >= 20:
                    break
            assert seen == 20

    run(main)


def test_a_cancelled_poll_loses_nothing(node: Node) -> None:
    async def main() -> None:
        async with (
            AsyncProducer(node.address) as producer,
            AsyncReader("cancelled", node=node.address) as consumer,
        ):
            await producer.send("cancelled", b"0")
            assert await drain(consumer, 1) == [b"0"]
            for number in range(1, 6):
                task = asyncio.create_task(consumer.poll(10))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await producer.send("cancelled", b"%d" % number)
                await asyncio.sleep(0.1)
                batch: MessageBatch = await consumer.poll(5)
                assert [one.body for one in batch] == [b"%d" % number]

    run(main)


def test_a_batch_nobody_took_is_not_committed(node: Node) -> None:
    async def main() -> None:
        async with AsyncProducer(node.address) as producer, AsyncAdmin(node.address) as admin:
            await producer.send_batch("untaken", [b"x"] * 10, queue=0)
            async with AsyncConsumer("untaken", group="untaken", node=node.address) as consumer:
                task = asyncio.create_task(consumer.poll(5))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.sleep(0.5)
            assert sum(row.lag for row in await admin.group_lag("untaken")) == 10

    run(main)


def test_a_cancelled_send_is_told_apart(node: Node) -> None:
    """A cancelled send was either withdrawn, or is stored; with the node gone it is certainly withdrawn."""

    async def main() -> None:
        producer = AsyncProducer("tcp://127.0.0.1:9", timeout_s=30)
        future = producer.submit("t", b"x")
        await asyncio.sleep(0.05)
        future.cancel()
        await asyncio.sleep(0.05)
        assert future.cancelled()
        # Withdrawn and not merely forgotten: nothing is left that a flush would have to wait for.
        await asyncio.wait_for(producer.flush(1), 5)
        await producer.close(0)

    run(main)


def test_errors_arrive_where_they_belong(node: Node) -> None:
    async def main() -> None:
        async with AsyncProducer(node.address) as producer, AsyncAdmin(node.address) as admin:
            with pytest.raises(InvalidMessageError):
                await producer.send("t", b"")
            with pytest.raises(ProtocolError, match="TOPIC_NOT_EXIST"):
                await admin.topic("nothing-here")
        with pytest.raises(NodeUnavailableError):
            await AsyncConsumer("t", group="g", node="tcp://127.0.0.1:9", timeout_s=0.3).start()
        with pytest.raises(RuntimeError, match="not started"):
            await AsyncConsumer("t", group="g").poll()

    run(main)


def test_the_loop_goes_on_while_a_poll_waits(node: Node) -> None:
    async def main() -> None:
        async with AsyncReader("idle", node=node.address) as consumer:
            task = asyncio.create_task(consumer.poll(1.0))
            turns = 0
            while not task.done():
                await asyncio.sleep(0.01)
                turns += 1
            assert turns > 30
            assert len(await task) == 0

    run(main)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_second_loop_begins_anew(node: Node, is_closed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What stood in a line of a loop that runs no more fails as not stored; the topic is sent to all the same."""
    topic = f"second-loop-{is_closed}"
    producer = AsyncProducer(node.address, timeout_s=3)

    async def submit() -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
        waited_for = producer.submit(topic, b"b", key="k")
        waited_for.add_done_callback(lambda _: None)
        return producer.submit(topic, b"a", key="k"), waited_for

    loop = asyncio.new_event_loop()
    lost = loop.run_until_complete(submit())
    if is_closed:
        loop.close()

    async def go_on() -> None:
        before = time.monotonic()
        assert (await asyncio.wait_for(producer.send(topic, b"c", key="k"), 20)).topic == topic
        assert time.monotonic() - before < 10
        await producer.flush()

    with caplog.at_level(logging.DEBUG, "asyncio"):
        asyncio.run(go_on())
        asyncio.run(producer.close())
        if not is_closed:
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        for future in lost:
            error = future.exception()
            assert isinstance(error, SendError)
            assert (error.code, error.outcome) == ("CLIENT_CLOSED", Outcome.NOT_STORED)
        del future, lost, error
        gc.collect()
    assert [one.message for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_a_producer_is_closed_in_another_loop_than_it_was_used_in(node: Node) -> None:
    producer = AsyncProducer("tcp://127.0.0.1:9", timeout_s=3)

    async def submit() -> asyncio.Future[Any]:
        return producer.submit("t", b"x", key="k")

    loop = asyncio.new_event_loop()
    lost = loop.run_until_complete(submit())
    loop.close()
    before = time.monotonic()
    asyncio.run(producer.close())
    assert time.monotonic() - before < 3
    assert isinstance(lost.exception(), SendError)


def test_a_loop_that_is_closed_while_a_line_waits_for_room_leaves_nothing_behind(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    producer = AsyncProducer("tcp://127.0.0.1:9", timeout_s=3, max_pending=1)

    async def submit() -> list[asyncio.Future[Any]]:
        futures = [producer.submit("t", b"x", queue=0) for _ in range(3)]
        await asyncio.sleep(0.1)
        return futures

    loop = asyncio.new_event_loop()
    futures = loop.run_until_complete(submit())
    loop.close()
    with caplog.at_level(logging.DEBUG, "asyncio"):
        asyncio.run(producer.close(0))
        assert [isinstance(one.exception(), SendError) for one in futures[1:]] == [True, True]
        del futures
        gc.collect()
    assert [one.message for one in caplog.records if one.levelno >= logging.WARNING] == []
