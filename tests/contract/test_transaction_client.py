"""Goal: a program that uses transactions has RocketMQ's promises: all or nothing, also when it dies in between.

Method: real nodes and real producers, synchronous and asyncio; programs that are killed; the topic as a whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from commitmq import (
    Admin,
    AsyncProducer,
    CommitMQError,
    ExactlyOnce,
    HalfMessage,
    InvalidMessageError,
    Message,
    Producer,
    SendError,
    TransactionState,
)
from commitmq.client.sending.options import MessageOptions
from delays import everything
from nodes import Node, environment, eventually, start_node
from transactions import QUICK

pytestmark = pytest.mark.timeout(120)
TOPIC = "ledger"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("client"), *QUICK, "transaction.session_timeout_ms=1000") as made:
        with Admin(made.address) as admin:
            admin.topic_create(TOPIC, 2)
        yield made


def bodies(node: Node) -> list[bytes]:
    return [one.body for one in everything(node, TOPIC)]


def has(node: Node, body: bytes) -> None:
    eventually(lambda: body in bodies(node), f"{body!r} is there")
    assert bodies(node).count(body) == 1


def test_the_end_of_the_block_commits(node: Node) -> None:
    with Producer(node.address, group="block") as producer:
        with producer.transaction(TOPIC, b"block", keys="k1", queue=1) as transaction:
            assert transaction.half.stored_topic == "RMQ_SYS_TRANS_HALF_TOPIC"
            assert b"block" not in bodies(node)
        assert transaction.state is TransactionState.COMMIT
        assert transaction.committed is not None
        assert (transaction.committed.topic, transaction.committed.queue) == (TOPIC, 1)
    has(node, b"block")


def test_a_block_that_raises_rolls_back(node: Node) -> None:
    with Producer(node.address, group="raises") as producer:
        with pytest.raises(ZeroDivisionError), producer.transaction(TOPIC, b"raised") as transaction:
            raise ZeroDivisionError
        assert transaction.state is TransactionState.ROLLBACK
        with producer.transaction(TOPIC, b"behind it"):
            pass
    has(node, b"behind it")
    assert b"raised" not in bodies(node)


def test_the_first_decision_counts(node: Node) -> None:
    with Producer(node.address, group="decides") as producer:
        with producer.transaction(TOPIC, b"decided against") as transaction:
            transaction.rollback()
            with pytest.raises(CommitMQError, match="ended already: rollback"):
                transaction.commit()
        with producer.transaction(TOPIC, Message(b"decided for", tags="T")) as transaction:
            assert transaction.commit().topic == TOPIC
    has(node, b"decided for")
    assert b"decided against" not in bodies(node)


class Books:
    """A listener that knows the accounts."""

    def __init__(self, outcome: TransactionState) -> None:
        self.outcome = outcome
        self.executed: list[tuple[HalfMessage, Any]] = []
        self.checked: list[HalfMessage] = []

    def execute(self, message: HalfMessage, argument: Any) -> TransactionState:
        self.executed.append((message, argument))
        return self.outcome

    def check(self, message: HalfMessage) -> TransactionState:
        self.checked.append(message)
        return TransactionState.COMMIT


@pytest.mark.parametrize("outcome", list(TransactionState))
def test_a_listener_decides(node: Node, outcome: TransactionState) -> None:
    body = f"listener {outcome}".encode()
    books = Books(outcome)
    with Producer(node.address, group=f"listener-{outcome}", transaction_listener=books) as producer:
        result = producer.send_in_transaction(TOPIC, body, {"account": 7}, tags="T")
        assert result.state is outcome
        ((message, argument),) = books.executed
        assert (message.body, message.tags, message.unique_id) == (body, "T", result.half.unique_id)
        assert argument == {"account": 7}
        if outcome is TransactionState.ROLLBACK:
            assert body not in bodies(node)
            return
        has(node, body)  # an unknown one: the node asks, and the listener says commit
        if outcome is TransactionState.UNKNOWN:
            assert [one.unique_id for one in books.checked] == [result.half.unique_id]
            assert (books.checked[0].body, books.checked[0].topic, books.checked[0].tags) == (body, TOPIC, "T")


@pytest.mark.parametrize("is_async", [False, True])
def test_what_execute_must_return(node: Node, is_async: bool) -> None:
    books = Books(None)  # type: ignore[arg-type]
    body = b"no return %d" % is_async
    wanted = r"execute of the transaction listener must return TransactionState.COMMIT, ROLLBACK or UNKNOWN, not None"

    async def work() -> None:
        async with AsyncProducer(node.address, group="no-return-aio", transaction_listener=books) as producer:
            with pytest.raises(ValueError, match=wanted):
                await producer.send_in_transaction(TOPIC, body, 7)
            await asyncio.to_thread(has, node, body)

    if is_async:
        asyncio.run(work())
    else:
        with Producer(node.address, group="no-return", transaction_listener=books) as producer:
            with pytest.raises(ValueError, match=wanted):
                producer.send_in_transaction(TOPIC, body, 7)
            has(node, body)  # it stays open, and the check says commit
    assert len(books.checked) == 1


def test_what_cannot_be_in_a_transaction(node: Node) -> None:
    with Producer(node.address) as producer, pytest.raises(InvalidMessageError, match="group"):
        producer.transaction(TOPIC, b"x")
    with pytest.raises(ValueError, match="group"):
        Producer(node.address, transaction_listener=lambda message: TransactionState.COMMIT)
    numbered = Producer(node.address, group="g", delivery=ExactlyOnce())
    with numbered, pytest.raises(InvalidMessageError, match="idempotent"):
        numbered.transaction(TOPIC, b"x")
    with Producer(node.address, group="g") as producer, pytest.raises(InvalidMessageError, match="execute"):
        producer.send_in_transaction(TOPIC, b"x")
    with Admin(node.address) as admin:
        admin.topic_create("in-memory", 1, attributes={"storage.type": "memory"})
    with (
        Producer(node.address, group="g") as producer,
        pytest.raises(SendError, match="memory"),
        producer.transaction("in-memory", b"x"),
    ):
        pytest.fail("the block began")


def test_many_threads_share_a_producer(node: Node) -> None:
    def work(producer: Producer, name: int) -> None:
        for number in range(20):
            try:
                with producer.transaction(TOPIC, b"thread-%d-%d" % (name, number)):
                    if number % 5 == 0:
                        raise KeyError
            except KeyError:
                pass

    with Producer(node.address, group="threads") as producer:
        threads = [threading.Thread(target=work, args=(producer, name)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wanted = sorted(b"thread-%d-%d" % (name, number) for name in range(8) for number in range(20) if number % 5)
    eventually(lambda: len([one for one in bodies(node) if one.startswith(b"thread-")]) >= len(wanted), "all are there")
    assert sorted(one for one in bodies(node) if one.startswith(b"thread-")) == wanted


def test_asyncio(node: Node) -> None:
    class Listener:
        async def execute(self, message: HalfMessage, argument: Any) -> TransactionState:
            await asyncio.sleep(0)
            return TransactionState.COMMIT if argument else TransactionState.ROLLBACK

        def check(self, message: HalfMessage) -> TransactionState:
            return TransactionState.UNKNOWN

    async def work() -> None:
        async with AsyncProducer(node.address, group="aio", transaction_listener=Listener()) as producer:  # type: ignore[arg-type]

            async def one(number: int) -> None:
                async with producer.transaction(TOPIC, b"aio-%d" % number) as transaction:
                    if number % 3 == 0:
                        await transaction.rollback()

            await asyncio.gather(*map(one, range(30)))
            with pytest.raises(RuntimeError):
                async with producer.transaction(TOPIC, b"aio-raised"):
                    raise RuntimeError
            result = await producer.send_in_transaction(TOPIC, b"aio-listener", True)
            assert result.committed is not None
            assert (await producer.send_in_transaction(TOPIC, b"aio-no", False)).state is TransactionState.ROLLBACK

    asyncio.run(work())
    wanted = sorted([*(b"aio-%d" % number for number in range(30) if number % 3), b"aio-listener"])
    eventually(lambda: len([one for one in bodies(node) if one.startswith(b"aio-")]) >= len(wanted), "all are there")
    assert sorted(one for one in bodies(node) if one.startswith(b"aio-")) == wanted


PROGRAM = """
import sys, time
from commitmq import Producer
with Producer(sys.argv[1], group="mortal") as producer:
    with producer.transaction("ledger", sys.argv[2].encode(), keys=sys.argv[2]) as transaction:
        print("begun", flush=True)
        time.sleep(100)
"""


def test_another_producer_of_the_group_is_asked_when_one_dies(node: Node) -> None:
    asked: list[str] = []

    def check(message: HalfMessage) -> TransactionState:
        asked.extend(message.keys)
        return TransactionState.COMMIT if message.keys == ["commit-me"] else TransactionState.ROLLBACK

    with Producer(node.address, group="mortal", transaction_listener=check):
        for name in ("commit-me", "forget-me"):
            program = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, node.address, name], stdout=subprocess.PIPE, env=environment()
            )
            assert program.stdout is not None
            assert program.stdout.readline() == b"begun\n"
            os.kill(program.pid, signal.SIGKILL)
            program.wait()
            program.stdout.close()
        has(node, b"commit-me")
        eventually(lambda: "forget-me" in asked, "the other one is asked about")
        time.sleep(0.5)
    assert b"forget-me" not in bodies(node)


def test_the_node_waits_while_the_block_runs(node: Node) -> None:
    asked: list[HalfMessage] = []

    def check(message: HalfMessage) -> TransactionState:
        asked.append(message)
        return TransactionState.ROLLBACK

    slow = Producer(node.address, group="slow", transaction_listener=check)
    with slow, slow.transaction(TOPIC, b"slow block"):
        time.sleep(1.5)  # the time-out is 0.3 s
    has(node, b"slow block")
    assert not asked


def test_a_listener_that_hangs_or_raises_harms_nobody(node: Node) -> None:
    release = threading.Event()

    def check(message: HalfMessage) -> TransactionState:
        if message.keys == ["raise"]:
            raise ValueError
        release.wait(30)
        return TransactionState.COMMIT

    with Producer(node.address, group="hangs", transaction_listener=check) as producer:
        for key in ("raise", "hang", "hang"):
            with producer.transaction(TOPIC, b"left open", keys=key) as transaction:
                transaction.unknown()
        time.sleep(1)
        with producer.transaction(TOPIC, b"beside a listener that hangs"):
            pass
        has(node, b"beside a listener that hangs")
        names = [thread.name for thread in threading.enumerate() if "transaction-check" in thread.name]
        assert len(names) <= 2
        release.set()


@pytest.mark.parametrize(
    ("later", "where"), [({"delay_level": 1}, "SCHEDULE_TOPIC_XXXX"), ({"delay": 1}, "rmq_sys_wheel_timer")]
)
def test_a_delay_begins_with_the_commit(node: Node, later: MessageOptions, where: str) -> None:
    with Producer(node.address, group="delays") as producer:
        with producer.transaction(TOPIC, where.encode(), **later) as transaction:
            pass
        assert transaction.committed is not None
        assert transaction.committed.stored_topic == where
    has(node, where.encode())
