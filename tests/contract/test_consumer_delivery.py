"""Goal: a batch is delivered or it is not, whatever interrupts a poll, and a group commits nothing but what its program got.

Method: a real node. Exceptions are raised inside of polls at every place the interpreter may raise one of its own, as
Ctrl-C and signal handlers do, and by what a poll calls; what follows must bring every message.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import (
    Admin,
    AsyncConsumer,
    CommitMQError,
    Consumer,
    FencedError,
    MessageBatch,
    Producer,
    ProtocolError,
    Reader,
)
from commitmq.errors import RequestError
from commitmq.protocol.channel import Channel
from interrupts import logging_survives
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("delivery"), "groups.heartbeat_interval_ms=200") as made:
        yield made


def fill(node: Node, topic: str, count: int, queue: int = 0) -> list[bytes]:
    bodies = [b"%06d" % number for number in range(count)]
    with Producer(node.address) as producer, Admin(node.address) as admin:
        producer.send_batch(topic, bodies, queue=queue)
        eventually(lambda: sum(row[2] for row in admin.offsets(topic)) >= count, "all of it can be read")
    return bodies


def committed(node: Node, group: str) -> int:
    with Admin(node.address) as admin:
        return sum(row.committed or 0 for row in admin.group_lag(group))


class Interrupted(BaseException):
    """What a signal handler raises."""


def interrupt(*_: object) -> Any:
    raise Interrupted


class Interruptions:
    """An alarm that comes at a random moment, and whose handler raises, as Ctrl-C does; while ``is_armed`` only."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.is_armed = False

    def __enter__(self) -> Interruptions:
        self._before = signal.signal(signal.SIGALRM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        self.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def soon(self) -> None:
        self.is_armed = True
        signal.setitimer(signal.ITIMER_REAL, 10 ** self._random.uniform(-4.5, -2.3))

    def _raise(self, _signal: int, _frame: object) -> None:
        if self.is_armed:
            self.is_armed = False
            raise Interrupted


# Who is interrupted while it opens a connection leaves the socket to the garbage collector, which complains.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["ranges", "bytes"])
def test_an_exception_anywhere_in_a_poll_loses_nothing(node: Node, way: str) -> None:
    """Goal: polls that are interrupted at any moment deliver everything once and in order, and commit what they delivered."""
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    topic = group = f"interrupted-{way}"
    bodies = fill(node, topic, 4_000)
    got: list[bytes] = []
    interrupted = 0
    with (
        Consumer(topic, group=group, node=node.address, mode=way, auto_commit_interval_s=0) as consumer,
        logging_survives(),
        Interruptions(seed) as alarm,
    ):
        deadline = time.monotonic() + 40
        while len(got) < len(bodies) and time.monotonic() < deadline:
            try:
                alarm.soon()
                batch = consumer.poll(0.2, max_messages=29)
                alarm.is_armed = False  # nothing comes between the two lines: they are stores
            except Interrupted:
                interrupted += 1
                assert consumer.positions.get((topic, 0), 0) == len(got)
                continue
            got += [one.body for one in batch]
    gc.collect()
    assert got == bodies
    assert interrupted > 10
    assert committed(node, group) == len(bodies)


def test_what_an_interrupted_poll_took_is_not_committed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was seen: a batch is taken, the next is asked for, and that raises."""
    fill(node, "asked", 500)
    with Consumer("asked", group="asked", node=node.address, auto_commit_interval_s=0) as consumer:
        with monkeypatch.context() as patched:
            deadline = time.monotonic() + 20
            raised = False
            original = Consumer._ask_ahead

            def ask_ahead(one: Consumer) -> None:
                nonlocal raised
                if one._assignment.making is not None and one._assignment.making.portions:
                    raised = True
                    raise Interrupted
                original(one)

            patched.setattr(Consumer, "_ask_ahead", ask_ahead)
            while not raised and time.monotonic() < deadline:
                with contextlib.suppress(Interrupted):
                    assert not consumer.poll(0.2, max_messages=100)
        assert consumer.commit() == {}
        assert len(consumer.poll(5, max_messages=100)) == 100
        assert sum(consumer.commit().values()) == 100


def test_no_descriptors_are_no_reason_to_lose_a_batch(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be opened is a node that is away for a while."""
    fill(node, "descriptors", 200)
    with Reader("descriptors", node=node.address) as consumer:
        first = consumer.poll(5, max_messages=50)
        with monkeypatch.context() as patched:

            def refuse(*_: object) -> None:
                import zmq

                raise zmq.ZMQError(24)

            patched.setattr(Channel, "_connect", refuse)
            for index in list(consumer._puller._readers.links):
                consumer._puller._drop_link(index)
            seen = len(first)
            for _ in range(10):
                seen += len(consumer.poll(0.1, max_messages=50))
            with pytest.raises(RequestError, match="may open no more files"):
                Channel("tcp://127.0.0.1:1")
        deadline = time.monotonic() + 20
        while seen < 200 and time.monotonic() < deadline:
            seen += len(consumer.poll(1))
        assert seen == 200


def test_an_interrupted_answer_does_not_stall_the_queue(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an answer was read: the other half is nobody's answer, and what was asked is asked again at once."""
    fill(node, "half", 100)
    with Reader("half", node=node.address, mode="bytes") as consumer:
        with monkeypatch.context() as patched:
            patched.setattr(Channel, "rest", interrupt)
            with pytest.raises(Interrupted):
                consumer.poll(5)
        started = time.monotonic()
        assert len(consumer.poll(10)) == 100
        assert time.monotonic() - started < 5


def test_iterating_is_polling(node: Node) -> None:
    bodies = fill(node, "iterated", 300)
    got: list[bytes] = []
    with Consumer("iterated", group="iterated", node=node.address) as consumer:
        for batch in consumer:
            got += [one.body for one in batch]
            if len(got) == 300:
                break
        assert got == bodies
        threading.Timer(0.3, consumer.close).start()
        assert [len(batch) for batch in consumer] == [], "closing ends the loop"
    assert committed(node, "iterated") == 300


# ---------------------------------------------------------------- closing


def test_a_close_in_a_finally_leaves_out_the_batch_that_raised(node: Node) -> None:
    fill(node, "finally", 100)
    consumer = Consumer("finally", group="finally", node=node.address, auto_commit_interval_s=0)
    with pytest.raises(ZeroDivisionError):
        try:
            assert len(consumer.poll(10, max_messages=30)) == 30
            assert len(consumer.poll(10, max_messages=30)) == 30
            raise ZeroDivisionError
        finally:
            consumer.close()
    assert committed(node, "finally") == 30
    # An exception that was handled before the consumer polled has nothing to do with it.
    try:
        raise KeyError
    except KeyError:
        other = Consumer("finally", group="finally", node=node.address)
        assert len(other.poll(10, max_messages=30)) == 30
        other.close()
    assert committed(node, "finally") == 60


def test_closing_from_another_thread_ends_a_poll_and_nothing_else(node: Node) -> None:
    fill(node, "elsewhere", 10)
    for _ in range(5):
        consumer = Consumer("elsewhere", group="elsewhere", node=node.address, auto_commit_interval_s=0)
        threading.Timer(random.random() * 0.5, consumer.close).start()
        started = time.monotonic()
        with pytest.raises(CommitMQError, match="closed"):
            while True:
                consumer.poll(30)
        assert time.monotonic() - started < 10


def test_closing_in_a_signal_handler(node: Node) -> None:
    """The handler runs inside of the poll, whose sockets it must not take away."""
    fill(node, "handler", 50)
    consumer = Consumer("handler", group="handler", node=node.address)
    assert len(consumer.poll(10)) == 50
    previous = signal.signal(signal.SIGALRM, lambda *_: consumer.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        assert not consumer.poll(30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(CommitMQError, match="closed"):
        consumer.poll(0)
    assert committed(node, "handler") == 50


def test_a_node_that_is_away_keeps_neither_poll_nor_close(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        fill(node, "away", 100)
        consumer = Consumer("away", group="away", node=node.address, auto_commit_interval_s=0)
        assert len(consumer.poll(10)) == 100
        assert node.stop().returncode == 0
        longest = 0.0
        for _ in range(12):
            started = time.monotonic()
            consumer.poll(0.1)
            longest = max(longest, time.monotonic() - started)
        assert longest < 2.5, "it took 10.7 s"
        started = time.monotonic()
        consumer.close()
        assert time.monotonic() - started < 7, "it took 10 s"


# ---------------------------------------------------------------- asyncio


def test_a_failed_poll_is_not_the_last_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(node, "failed", 20)

    async def main() -> None:
        async with AsyncConsumer("failed", group="failed", node=node.address) as consumer:
            with monkeypatch.context() as patched:
                patched.setattr(
                    Consumer, "_keep_house", lambda *_: (_ for _ in ()).throw(ProtocolError("SYSTEM_ERROR", "no"))
                )
                with pytest.raises(ProtocolError, match="SYSTEM_ERROR"):
                    await consumer.poll(1)
            assert len(await consumer.poll(10)) == 20

    asyncio.run(main())


def test_what_a_cancelled_poll_fetched_is_nobodys_until_it_is_returned(node: Node) -> None:
    fill(node, "cancelled", 40)

    async def main() -> None:
        async with AsyncConsumer("cancelled", group="cancelled", node=node.address, auto_commit=False) as consumer:
            task = asyncio.create_task(consumer.poll(5))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.5)  # the batch is there by now
            assert await consumer.commit() == {}
            assert sum(consumer.positions.values()) == 0
            assert len(await consumer.poll(5)) == 40
            assert sum((await consumer.commit()).values()) == 40

    asyncio.run(main())
    assert committed(node, "cancelled") == 40


def test_tasks_that_poll_share_the_messages(node: Node) -> None:
    bodies = fill(node, "tasks", 400)

    async def main() -> None:
        got: Counter[bytes] = Counter()

        async def work(consumer: AsyncConsumer) -> None:
            while sum(got.values()) < 400:
                batch: MessageBatch = await consumer.poll(0.3, max_messages=7)
                await asyncio.sleep(0)
                got.update(one.body for one in batch)

        async with AsyncConsumer("tasks", group="tasks", node=node.address, auto_commit=False) as consumer:
            async with asyncio.timeout(30):
                await asyncio.gather(*(work(consumer) for _ in range(4)))
        assert got == Counter(bodies)

    asyncio.run(main())


def test_an_async_close_in_a_finally_leaves_out_the_batch_that_raised(node: Node) -> None:
    fill(node, "async-finally", 60)

    async def main() -> None:
        consumer = await AsyncConsumer("async-finally", group="async-finally", node=node.address).start()
        with pytest.raises(ZeroDivisionError):
            try:
                assert len(await consumer.poll(10, max_messages=30)) == 30
                raise ZeroDivisionError
            finally:
                await consumer.close()

    asyncio.run(main())
    assert committed(node, "async-finally") == 0


def test_a_second_consumer_of_a_members_name_takes_its_place(node: Node) -> None:
    fill(node, "names", 100)
    with Consumer("names", group="names", node=node.address, member="one", auto_commit=False) as first:
        assert len(first.poll(10)) == 100
        with Consumer("names", group="names", node=node.address, member="one") as second:
            with pytest.raises(FencedError):
                first.commit()
            assert len(second.poll(10)) == 100, "it begins where the group is"
            with pytest.raises(FencedError, match="another consumer"):
                for _ in range(100):
                    first.poll(0.1)
            second.commit()
            first.close()
            time.sleep(0.5)
            assert len(second.assignment) > 0, "the first one's end is not its end"
    assert committed(node, "names") == 100
