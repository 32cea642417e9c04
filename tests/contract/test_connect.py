"""Goal: one connection object makes every client of a node and closes them; what a program says in the words of former
versions still works and warns; ``on_delivery`` hears of every message.

Method: a real node, and for a program that gives up a socket that never answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import commitmq
from commitmq import (
    Admin,
    AsyncProducer,
    AsyncReader,
    CommitMQError,
    Consumer,
    ExactlyOnce,
    GroupNotFoundError,
    NodeUnavailableError,
    Producer,
    Reader,
    SendError,
    SendResult,
    TopicNotFoundError,
)
from nodes import Node, eventually, start_node

NOBODY = "tcp://127.0.0.1:1"
GIVES_UP = """
import asyncio, sys
import commitmq

async def main():
    try:
        async with asyncio.timeout(0.3):
            async with commitmq.connect_async(sys.argv[1], timeout_s=100):
                pass
    except TimeoutError:
        print("gave up")

asyncio.run(main())
"""
Told = tuple[BaseException | None, SendResult | None]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("connect"), "network.port=0") as node:
        yield node


def test_a_program_that_gives_up_connecting_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-c", GIVES_UP, f"tcp://127.0.0.1:{silent.getsockname()[1]}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gave up\n", "")


def test_a_connection_makes_every_client_and_closes_those_that_are_open(node: Node) -> None:
    with commitmq.connect(node.address, timeout_s=20) as connection:
        producer = connection.producer(ack="memory")
        producer.send_async("made", b"one", queue=0)  # close sends what is pending
        with connection.admin() as admin:
            assert "store" in admin.metadata()
        reader = connection.reader(queues=[("made", 0)])
        consumer = connection.consumer("made", group="makers")
        while not (batch := consumer.poll(5)):
            continue
        assert [one.body for one in batch] == [b"one"]
        assert [one.body for one in reader.poll(5)] == [b"one"]
    assert consumer.is_closed
    assert reader.is_closed
    with pytest.raises(CommitMQError, match="closed"):
        producer.send("made", b"two")
    with pytest.raises(CommitMQError, match="the connection is closed"):
        connection.producer()
    connection.close()
    with Admin(node.address) as admin:  # the consumer committed when it was closed
        assert [row.committed for row in admin.group_lag("makers") if row.queue == 0] == [1]


def test_a_block_that_raises_commits_nothing(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send("raised", b"x", queue=0)

    def block() -> None:
        with commitmq.connect(node.address) as connection:
            consumer = connection.consumer("raised", group="raisers")
            while not consumer.poll(5):
                continue
            raise KeyError("a fault of the program")

    with pytest.raises(KeyError):
        block()
    with Admin(node.address) as admin:
        assert [row.committed for row in admin.group_lag("raisers") if row.queue == 0] in ([None], [0])


def test_one_client_that_cannot_be_closed_does_not_keep_the_others_open(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = commitmq.connect(node.address)
    first, second = connection.admin(), connection.admin()

    def fail(_self: Admin) -> None:
        close(second)
        raise OSError("no such luck")

    close = Admin.close
    monkeypatch.setattr(second, "close", fail.__get__(second))
    with pytest.raises(OSError, match="no such luck"):
        connection.close()
    with pytest.raises(CommitMQError, match="closed"):
        first.metadata()


def test_no_node_is_an_error_at_once_and_leaves_nothing() -> None:
    began = time.monotonic()
    with pytest.raises(NodeUnavailableError):
        commitmq.connect(NOBODY, timeout_s=0.3)
    assert time.monotonic() - began < 5

    async def main() -> None:
        async with commitmq.connect_async(NOBODY, timeout_s=0.3):
            pytest.fail("there is no node")

    with pytest.raises(NodeUnavailableError):
        asyncio.run(main())
    with pytest.raises(ValueError, match="timeout_s"):
        commitmq.connect(timeout_s=0)


def test_the_asynchronous_connection(node: Node) -> None:
    async def main() -> None:
        async with commitmq.connect_async(node.address) as connection:
            producer = connection.producer()
            sent = [await producer.send("loop", b"1", queue=0)]
            sent += list(await producer.send_batch_async("loop", [b"2", b"3"], queue=0))
            assert [one.queue_offset for one in sent] == [0, 1, 2]
            async with connection.reader("loop") as reader:
                bodies: list[bytes] = []
                while len(bodies) < 3:
                    bodies += [one.body for one in await reader.poll(5)]
            assert bodies == [b"1", b"2", b"3"]
            consumer = await connection.consumer("loop", group="loopers").start()
            while not await consumer.poll(5):
                continue
            assert sum((await consumer.commit()).values()) == 3
            admin = connection.admin()
            assert [one.name for one in await admin.topics() if one.name == "loop"]
        assert producer.is_closed
        assert consumer.is_closed
        assert admin.is_closed
        await producer.close()
        await consumer.close()
        with pytest.raises(CommitMQError, match="closed"):
            connection.producer()

    asyncio.run(main())


def test_what_a_loop_has_given_is_sent_before_a_flush_or_a_close_returns(node: Node) -> None:
    async def main() -> None:
        async with AsyncProducer(node.address) as producer:
            first = producer.send_batch_async("unawaited", [b"1", b"2"], queue=0)
            await producer.flush()
            assert first.done()
            last = producer.send_batch_async("unawaited", [b"3"], queue=0)
        assert [one.queue_offset for one in await last] == [2]
        with pytest.raises(CommitMQError, match="closed"):
            producer.send_batch_async("unawaited", [b"4"])

    asyncio.run(main())


def test_a_batch_of_a_loop_that_ended_keeps_no_other_loop(node: Node) -> None:
    producer = AsyncProducer(node.address)

    async def leave() -> None:
        producer.send_batch_async("two-loops", [b"1"], queue=0)

    async def go_on() -> int:
        sent = await producer.send_batch_async("two-loops", [b"2"], queue=0)
        await producer.flush()
        await producer.close()
        return sent[0].queue_offset

    first = asyncio.new_event_loop()
    first.run_until_complete(leave())
    began = time.monotonic()
    assert asyncio.run(go_on()) == 1
    assert time.monotonic() - began < 5, "flush has waited for what nobody can finish"
    first.run_until_complete(asyncio.sleep(0.1))  # what it left behind has its outcome
    first.close()


def test_a_close_that_was_given_up_still_closes_the_sockets(node: Node) -> None:
    async def main() -> Producer:
        producer = AsyncProducer(NOBODY, timeout_s=30)
        waiting = asyncio.ensure_future(producer.send("t", b"x"))
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(producer.close(), 0.2)
        waiting.cancel()
        await producer.close()
        return producer._producer

    inner = asyncio.run(main())
    eventually(lambda: inner._closed, "the producer is closed")


def test_a_consumer_that_is_closed_while_it_connects_is_nobodys(node: Node) -> None:
    async def main() -> None:
        consumer = commitmq.AsyncConsumer("slow-start", group="slow-starters", node=node.address)
        starting = asyncio.ensure_future(consumer.start())
        await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(CommitMQError, match="closed"):
            await starting
        with pytest.raises(CommitMQError, match="closed"):
            await consumer.start()

    asyncio.run(main())
    with Admin(node.address) as admin:
        eventually(lambda: not admin.group("slow-starters")["members"], "nobody is a member")


def test_many_threads_may_close_a_connection_in_which_one_makes_clients(node: Node) -> None:
    for _ in range(5):
        connection = commitmq.connect(node.address)
        made: list[Reader] = []

        def make(connection: commitmq.Connection = connection, made: list[Reader] = made) -> None:
            with contextlib.suppress(CommitMQError):
                while True:
                    made.append(connection.reader("closing"))

        threads = [threading.Thread(target=make)]
        threads += [threading.Thread(target=connection.close) for _ in range(3)]
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join(20)
        assert all(one.is_closed for one in made)


def test_batches_that_a_loop_does_not_wait_for_are_stored_in_the_order_of_the_calls(node: Node) -> None:
    async def main() -> list[int]:
        async with AsyncProducer(node.address) as producer:
            batches = [producer.send_batch_async("in-order", [b"%d" % number], queue=0) for number in range(20)]
            return [(await one)[0].queue_offset for one in batches]

    assert asyncio.run(main()) == list(range(20))


def test_on_delivery_hears_of_each_message_once(node: Node) -> None:
    told: list[Told] = []
    with Producer(node.address) as producer:
        for number in range(50):
            producer.send_async("told", b"%d" % number, queue=0, on_delivery=lambda *said: told.append(said))
        producer.flush(20)
    assert [error for error, _ in told] == [None] * 50
    assert [result.queue_offset for _, result in told if result is not None] == list(range(50))
    told.clear()
    with Producer(NOBODY, timeout_s=0.2) as producer:
        producer.send_async("told", b"x", on_delivery=lambda *said: told.append(said))
    ((error, result),) = told
    assert isinstance(error, SendError)
    assert result is None
    with Producer(node.address) as producer, pytest.raises(ValueError, match="on_delivery"):
        producer.send_async("told", b"x", on_delivery=3)  # type: ignore[arg-type]

    async def main() -> None:
        told.clear()
        async with AsyncProducer(node.address) as producer:
            await producer.send_async("told", b"x", on_delivery=lambda *said: told.append(said))
            await asyncio.sleep(0)

    asyncio.run(main())
    assert [error for error, _ in told] == [None]


def test_what_makes_no_sense_is_refused(node: Node) -> None:
    with pytest.raises(TypeError, match="group"):
        Consumer("orders", node=node.address)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Consumer("orders", "bills", group="g", node=node.address)  # type: ignore[misc]
    with pytest.raises(TypeError, match="group"):
        commitmq.AsyncConsumer("orders")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="producer_id"):
        ExactlyOnce(epoch=3)


def test_what_does_not_exist_has_a_class(node: Node) -> None:
    with Admin(node.address) as admin:
        with pytest.raises(TopicNotFoundError):
            admin.topic("never-made")
        with pytest.raises(GroupNotFoundError):
            admin.group("never-made")
    with Reader("never-made", node=node.address) as reader:
        assert not reader.poll(0.1)

    async def main() -> None:
        async with AsyncReader("never-made", node=node.address) as reader:
            assert not await reader.poll(0.1)

    asyncio.run(main())


@pytest.mark.slow
def test_a_node_on_an_address_of_ipv6_is_reached_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has an address of IPv4 too, on which nobody listens."""
    look_up = socket.getaddrinfo

    def both(host: Any, *rest: Any, **options: Any) -> Any:
        hosts = ["127.0.0.1", "::1"] if host == "node" else [host]
        return [one for each in hosts for one in look_up(each, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with start_node(tmp_path, "network.host=::1") as node:
        address = f"tcp://node:{node.address.rpartition(':')[2]}"
        with commitmq.Admin(address) as admin, commitmq.Producer(address) as producer:
            assert admin.topic_create("named", 1).created
            producer.send("named", b"x")
            with commitmq.Consumer("named", group="g", node=address, start="earliest") as consumer:
                assert [one.body for one in consumer.poll(10)] == [b"x"]
