"""Goal: while one of two nodes is stopped, killed or stands still, a producer of both goes on, and every acknowledged
message is found exactly once, on one of them; what was reported as not stored is found nowhere.

Method: two real nodes. Threads that send one by one, a stream of asynchronous sends, batches and an asyncio producer write a
ledger while the second node fails and comes back. Then both nodes are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from commitmq import (
    Admin,
    AsyncProducer,
    BatchSendError,
    Consumer,
    ExactlyOnce,
    FaultStrategy,
    InvalidMessageError,
    Message,
    Outcome,
    Producer,
    SendError,
)
from messages_stored import read_all
from nodes import Node, eventually, free_ports, start_node

pytestmark = pytest.mark.timeout(240)
TIMEOUT_S = 4.0
GOES_ON_S = 3.0
"""Within this time after the failure some message is acknowledged again. (The page says 1 s for a machine that is not
loaded.)"""
Nodes = tuple[Node, Node]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(start_node(tmp_path_factory.mktemp(name), f"network.port={free_ports()}"))
            for name in ("first", "second")
        ]
        yield made[0], made[1]


def addresses(nodes: Nodes) -> str:
    return ",".join(node.address for node in nodes)


class Senders:
    """Everything that sends at the same time. ``outcomes`` has one word for each number that was sent."""

    def __init__(self, nodes: Nodes, topic: str) -> None:
        self.topic = topic
        self.outcomes: dict[int, str] = {}
        self.acknowledged: list[float] = []
        self.places: dict[int, str | None] = {}
        self.trouble: list[BaseException] = []
        self._over = threading.Event()
        self._numbers = itertools.count()
        self._addresses = addresses(nodes)
        works: list[Callable[[Any], None]] = [self._single, self._single, self._stream, self._batches]
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._asyncio())))

    def __enter__(self) -> Senders:
        self._producer = Producer(self._addresses, timeout_s=TIMEOUT_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        self._producer.close()

    def note(self, number: int, error: BaseException | None, node: str | None = None) -> None:
        if error is None:
            self.outcomes[number] = "stored"
            self.places[number] = node
            self.acknowledged.append(time.monotonic())
        elif isinstance(error, SendError):
            whole = not isinstance(error, BatchSendError) or error.outcome is Outcome.NOT_STORED
            self.outcomes[number] = str(error.outcome) if whole else "unknown"
        else:
            self.trouble.append(error)

    def _run(self, work: Callable[[Producer], None]) -> None:
        try:
            while not self._over.is_set():
                work(self._producer)
        except BaseException as error:
            self.trouble.append(error)

    def _single(self, producer: Producer) -> None:
        number = next(self._numbers)
        try:
            self.note(number, None, producer.send(self.topic, b"%d" % number).node)
        except SendError as error:
            self.note(number, error)
        time.sleep(0.003)

    def _stream(self, producer: Producer) -> None:
        number = next(self._numbers)

        def told(error: BaseException | None, result: Any) -> None:
            self.note(number, error, None if result is None else result.node)

        producer.send_async(self.topic, b"%d" % number, on_delivery=told)
        time.sleep(0.003)

    def _batches(self, producer: Producer) -> None:
        numbers = [next(self._numbers) for _ in range(5)]
        try:
            result = producer.send_batch(self.topic, [b"%d" % number for number in numbers])
        except SendError as error:
            for number in numbers:
                self.note(number, error)
        else:
            for number, one in zip(numbers, result, strict=True):
                self.note(number, None, one.node)
        time.sleep(0.01)

    async def _asyncio(self) -> None:
        async with AsyncProducer(self._addresses, timeout_s=TIMEOUT_S) as producer:

            async def one_by_one() -> None:
                while not self._over.is_set():
                    number = next(self._numbers)
                    try:
                        self.note(number, None, (await producer.send(self.topic, b"%d" % number)).node)
                    except SendError as error:
                        self.note(number, error)
                    await asyncio.sleep(0.005)

            await asyncio.gather(one_by_one(), one_by_one(), one_by_one())


def stopped(node: Node) -> Callable[[], object]:
    assert node.stop().returncode == 0
    return lambda: node.start()


def killed(node: Node) -> Callable[[], object]:
    node.kill_all()
    return lambda: node.start()


def frozen(node: Node) -> Callable[[], object]:
    """Every process of the node stands still: connections stand, and nobody answers."""
    pids = list(node.pids().values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def thaw() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    return thaw


@pytest.mark.parametrize("fails", [stopped, killed, frozen])
def test_sends_go_on(nodes: Nodes, fails: Callable[[Node], Callable[[], object]]) -> None:
    topic = f"while-{fails.__name__}"
    _, second = nodes
    with Senders(nodes, topic) as senders:
        eventually(lambda: len({*senders.places.values()} - {None}) == 2, "both nodes take messages")
        began = time.monotonic()
        bring_back = fails(second)
        try:
            time.sleep(TIMEOUT_S + 2)
            after = [at for at in senders.acknowledged if at > began]
        finally:
            bring_back()
        assert after, "nothing was acknowledged any more"
        gaps = [later - earlier for earlier, later in itertools.pairwise(sorted([began, *after]))]
        assert max(gaps) < GOES_ON_S, f"{max(gaps)} s without an acknowledgement"
        back = time.monotonic()
        eventually(
            lambda: any(senders.places.get(number) == second.address for number in late(senders, back)),
            "the second node takes messages again",
        )
    assert senders.trouble == []
    check(senders, nodes, topic)


def late(senders: Senders, since: float) -> list[int]:
    """Numbers that were acknowledged last; at least those since ``since``."""
    count = sum(at > since for at in senders.acknowledged)
    return list(senders.places)[-count:] if count else []


def check(senders: Senders, nodes: Nodes, topic: str) -> None:
    """What must hold of every message."""
    found = {node.address: Counter(int(one.body) for one in read_all(node, topic)) for node in nodes}
    total = sum(found.values(), Counter())
    assert {number for number, count in total.items() if count > 1} == set(), "stored twice"
    for number, outcome in senders.outcomes.items():
        if outcome == "stored":
            place = senders.places[number]
            assert place is not None
            assert found[place][number] == 1, f"{number} is not where its result says"
        elif outcome == "not_stored":
            assert total[number] == 0, f"{number} is stored, and its sender was told that it is not"
    assert Counter(senders.outcomes.values())["stored"] > 300


def test_a_key_keeps_its_node_and_its_order(nodes: Nodes) -> None:
    with Producer(addresses(nodes)) as producer:
        keys = [f"key-{number}" for number in range(12)]
        sent = [
            (key, step, producer.send_async("keyed", f"{key}/{step}".encode(), sharding_key=key))
            for step in range(20)
            for key in keys
        ]
        homes: dict[str, set[str | None]] = {}
        for key, _, one in sent:
            homes.setdefault(key, set()).add(one.result(30).node)
        batch = producer.send_batch("keyed", [f"{key}/20".encode() for key in keys], sharding_keys=keys)
        for key, stored in zip(keys, batch, strict=True):
            homes[key].add(stored.node)
    assert all(len(places) == 1 for places in homes.values())
    assert len(set.union(*homes.values())) == 2, "both nodes have keys"
    for node in nodes:
        steps: dict[str, list[int]] = {}
        for message in sorted(read_all(node, "keyed"), key=lambda found: (found.queue_id, found.queue_offset)):
            key, _, number = message.body.decode().partition("/")
            steps.setdefault(key, []).append(int(number))
        assert all(found == list(range(21)) for found in steps.values())


def test_a_delayed_message_is_cancelled_by_its_result(nodes: Nodes) -> None:
    with Producer(addresses(nodes)) as producer:
        results = [producer.send("later", b"x", delay=3600) for _ in range(2)]
        assert {one.node for one in results} == {node.address for node in nodes}
        for one in results:
            producer.cancel(one)


def doubled(message: Message) -> None:
    message.reply(message.body * 2)


def test_transactions_requests_and_numbers_work_at_one_node(nodes: Nodes) -> None:
    with Producer(addresses(nodes), group="several") as producer:
        for number in range(2):
            with producer.transaction("paid", b"%d" % number):
                pass
        for node in nodes:
            eventually(partial(read_all, node, "paid"), "a committed message")
        with contextlib.ExitStack() as stack:
            for node in nodes:
                consumer = stack.enter_context(Consumer("asked", group="answers", node=node.address))
                thread = threading.Thread(target=consumer.run, args=(doubled,))
                thread.start()
                stack.callback(thread.join, 30)
                stack.callback(consumer.close)
            assert [producer.request("asked", b"ab", timeout_s=20).body for _ in range(2)] == [b"abab"] * 2
    with Producer(addresses(nodes), delivery=ExactlyOnce()) as producer:
        assert {producer.send("numbered", b"x").node for _ in range(2)} == {node.address for node in nodes}
    with (
        Producer(addresses(nodes), delivery=ExactlyOnce("several-1", 0)) as producer,
        pytest.raises(InvalidMessageError, match="needs queue"),
    ):
        producer.send("numbered", b"x")


def test_a_refusal_of_a_topic_moves_the_message(nodes: Nodes) -> None:
    for node, perm in zip(nodes, (4, 6), strict=True):
        with Admin(node.address) as admin:
            admin.topic_create("half-open", perm=perm)
    strategy = FaultStrategy(isolation_ms=5000)
    with Producer(addresses(nodes), fault_strategy=strategy) as producer:
        assert {producer.send("half-open", b"x").node for _ in range(6)} == {nodes[1].address}
        assert {producer.send("open", b"x").node for _ in range(6)} == {node.address for node in nodes}
