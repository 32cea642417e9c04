"""Goal: a request gets the reply of the consumer that handled it, over the death of any process; nobody waits for ever.

Method: a real node; handlers of all kinds that reply; kill -9 of the writer, of the reader and of the coordinator while a
request waits; requesters that are too early, too many, or closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from commitmq import (
    Admin,
    AsyncConsumer,
    AsyncProducer,
    CommitMQError,
    Consumer,
    InvalidMessageError,
    Message,
    Producer,
    Reader,
    RequestTimeoutError,
    SendError,
    ShareConsumer,
)
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)
REPLIES = "lab_REPLY_TOPIC"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("requests"),
        "network.cluster_name=lab",
        "topics.default_queues=2",
        "topics.reply_queues=3",
    ) as made:
        yield made


def doubled(message: Message) -> None:
    message.reply(message.body * 2)


@contextmanager
def served(
    node: Node, topic: str, handler: Callable[[Message], object] = doubled, kind: type = Consumer
) -> Iterator[Consumer]:
    """A consumer of the new topic that runs ``handler`` meanwhile."""
    with Admin(node.address) as admin:
        admin.topic_create(topic)
    with kind(topic, group=f"servers-of-{topic}", node=node.address, start="earliest") as consumer:
        errors: list[BaseException] = []
        running = threading.Thread(
            target=consumer.run, args=(handler,), kwargs={"on_error": lambda _, error: errors.append(error)}
        )
        running.start()
        try:
            yield consumer
        finally:
            consumer.close()
            running.join(30)
    assert errors == []


@pytest.mark.parametrize("kind", [Consumer, ShareConsumer])
def test_a_request_gets_its_reply(node: Node, kind: type) -> None:
    topic = f"doubling-{kind.__name__}"
    with Producer(node.address) as producer, served(node, topic, kind=kind):
        reply = producer.request(topic, b"ab", tags="x", keys="k", properties={"mine": "1"}, timeout_s=30)
        assert reply.body == b"abab"
        assert reply.topic == REPLIES
        properties = reply.properties
        assert properties["MSG_TYPE"] == "reply"
        assert properties["ARRIVE_TIME"].isdigit()
        assert 0 < int(properties["TTL"]) <= 30_000
        with Reader(topic, node=node.address) as reader:
            request = next(iter(reader)).messages()[0]
        assert request.properties["CLUSTER"] == "lab"
        assert request.properties["CORRELATION_ID"] == properties["CORRELATION_ID"]
        assert request.properties["REPLY_TO_CLIENT"] == properties["REPLY_TO_CLIENT"]
        assert request.user_properties == {"mine": "1"}
        assert request.tags == "x"


def test_many_requests_of_many_producers_get_their_own_replies(node: Node) -> None:
    with served(node, "many"), ThreadPoolExecutor(16) as threads:
        producers = [Producer(node.address) for _ in range(4)]
        bodies = [b"%d," % number for number in range(200)]
        replies = list(
            threads.map(lambda pair: pair[1].request("many", pair[0]), zip(bodies, producers * 50, strict=True))
        )
        assert [reply.body for reply in replies] == [body * 2 for body in bodies]
        for producer in producers:
            assert producer.late_replies == 0
            producer.close()
    with Admin(node.address) as admin:
        assert next(one for one in admin.topics() if one.name == REPLIES).read_queues == 3


def test_asyncio(node: Node) -> None:
    async def answer(message: Message) -> None:
        await message.reply_async(Message(message.body.upper(), properties={"from": "loop"}))

    async def exchange() -> None:
        async with (
            AsyncProducer(node.address) as producer,
            AsyncConsumer("shouts", group="shouters", node=node.address) as consumer,
        ):
            running = asyncio.create_task(consumer.run(answer))
            replies = await asyncio.gather(*(producer.request("shouts", b"a%d" % one) for one in range(50)))
            assert [reply.body for reply in replies] == [b"A%d" % one for one in range(50)]
            assert replies[0].user_properties == {"from": "loop"}
            await consumer.close()
            await running
            with pytest.raises(RequestTimeoutError):
                await producer.request("shouts", b"late", timeout_s=0.3)
            assert producer.late_replies == 0

    asyncio.run(exchange())


def test_a_program_that_polls_replies_by_its_producer(node: Node) -> None:
    with (
        Producer(node.address) as asker,
        Producer(node.address) as answerer,
        Reader("polled", node=node.address) as reader,
        ThreadPoolExecutor(1) as threads,
    ):
        asking = threads.submit(asker.request, "polled", Message(b"?", key="k"), timeout_s=30)
        request = next(iter(reader)).messages()[0]
        assert request.keys == ["k"]
        with pytest.raises(CommitMQError, match=r"producer\.reply"):
            request.reply(b"!")
        answerer.reply(request, b"!", properties={"more": "yes"})
        answerer.reply(request, b"second")
        reply = asking.result(30)
        assert (reply.body, reply.user_properties) == (b"!", {"more": "yes"})
        with pytest.raises(InvalidMessageError, match="CLUSTER"):
            answerer.reply(Message(b"no request"), b"!")


def test_a_late_reply_is_dropped_and_counted(node: Node) -> None:
    with Producer(node.address) as asker, Reader("slow", node=node.address) as reader:
        with pytest.raises(RequestTimeoutError, match="'slow'") as found:
            asker.request("slow", b"?", timeout_s=0.3)
        request = next(iter(reader)).messages()[0]
        assert found.value.correlation_id == request.properties["CORRELATION_ID"]
        asker.reply(request, b"too late")
        with served(node, "quick"):
            assert asker.request("quick", b"a").body == b"aa"
        eventually(lambda: asker.late_replies == 1, "the late reply is counted")


def test_waiting_requests_are_bounded_and_end_with_the_producer(node: Node) -> None:
    with Producer(node.address, max_requests=2) as producer, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(producer.request, "silence", b"?", timeout_s=60) for _ in range(2)]
        eventually(lambda: len(producer._replies._waiting) == 2, "both requests wait")
        with pytest.raises(SendError, match="max_requests") as refused:
            producer.request("silence", b"?")
        assert refused.value.retryable
        producer.close()
        for one in waiting:
            with pytest.raises(CommitMQError, match="closed"):
                one.result(10)


def test_a_handler_that_is_no_coroutine_must_not_block_the_loop(node: Node) -> None:
    seen: list[str] = []

    async def wrong(message: Message) -> None:
        try:
            message.reply(b"!")
        except CommitMQError as error:
            seen.append(str(error))

    async def run() -> None:
        async with AsyncConsumer("loops", group="loops", node=node.address) as consumer:
            running = asyncio.create_task(consumer.run(wrong))
            with Producer(node.address) as producer:
                await asyncio.to_thread(producer.send, "loops", b"x")
            while not seen:
                await asyncio.sleep(0.01)
            await consumer.close()
            await running

    asyncio.run(asyncio.wait_for(run(), 60))
    assert "reply_async" in seen[0]


@pytest.mark.parametrize("role", ["reader-0", "writer", "coordinator"])
def test_a_process_dies_while_a_request_waits(node: Node, role: str) -> None:
    """The handler replies only after the process was killed and has come back."""
    began, may_reply = threading.Event(), threading.Event()

    def answer(message: Message) -> None:
        began.set()
        may_reply.wait(60)
        while True:
            try:
                message.reply(b"at last")
                return
            except SendError:
                time.sleep(0.1)

    topic = f"killed-{role}"
    with (
        Producer(node.address, timeout_s=60) as producer,
        served(node, topic, answer),
        ThreadPoolExecutor(1) as threads,
    ):
        asking = threads.submit(producer.request, topic, b"?")
        assert began.wait(60)
        os.kill(node.pids()[role], signal.SIGKILL)
        may_reply.set()
        assert asking.result(60).body == b"at last"


def test_the_consumer_that_had_the_request_dies(node: Node) -> None:
    """The message was not committed, so the next consumer gets it and replies."""
    with Producer(node.address, timeout_s=60) as producer, ThreadPoolExecutor(1) as threads:
        first = Consumer("orphans", group="orphans", node=node.address)
        asking = threads.submit(producer.request, "orphans", b"ab")
        while not first.poll(1.0):
            pass
        first.close(commit=False)
        with Consumer("orphans", group="orphans", node=node.address) as second:
            running = threading.Thread(target=second.run, args=(doubled,))
            running.start()
            assert asking.result(60).body == b"abab"
            second.close()
            running.join(30)


def test_an_idle_requester_asks_nothing(node: Node) -> None:
    with served(node, "idle"), Producer(node.address) as producer:
        producer.request("idle", b"x")
        thread = producer._replies._thread
        assert thread is not None
        polls: list[float] = []
        reader = producer._replies._reader
        assert reader is not None
        poll = reader.poll

        def noted(timeout_s: float) -> Any:
            polls.append(time.monotonic())
            return poll(timeout_s)

        reader.poll = noted  # type: ignore[method-assign, assignment]
        time.sleep(1.5)
        assert polls == []
        assert producer.request("idle", b"y").body == b"yy"
        assert polls != []
