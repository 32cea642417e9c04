"""Goal: handlers get every message of a real node, commits stay behind what is done, and a run ends from anywhere.

Method: a real node. Messages that are sent back go through a stand-in for the writer's operation: it stores them in the
retry topic, or the dead letters, by a plain send.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

from commitmq import (
    Admin,
    AsyncConsumer,
    CommitMQError,
    Consumer,
    ConsumeResult,
    Message,
    NodeUnavailableError,
    Producer,
    Reader,
    RetryLater,
    Sql,
)
from commitmq.client.handling.send_back import DEAD_LEVEL, SendBack, SendBackRequest, SendBackResult
from nodes import Node, eventually, start_node, wait_until_dispatched

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("handlers"),
        "groups.heartbeat_interval_ms=200",
        "groups.session_timeout_ms=2000",
        "topics.default_queues=2",
    ) as made:
        yield made


class StandIn:
    """Sends back by plain sends, which keep neither tags nor the number of tries nor the delay; requests are noted."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.requests: list[SendBackRequest] = []
        self.refusals = 0  # so many of the next requests fail

    def exchange(self, sender: SendBack, requests: Sequence[SendBackRequest]) -> list[SendBackResult]:
        return [self._one(sender._group, one) for one in requests]

    def _one(self, group: str, one: SendBackRequest) -> SendBackResult:
        self.requests.append(one)
        if self.refusals:
            self.refusals -= 1
            return SendBackResult(error=NodeUnavailableError("refused"))
        dead = one.delay_level == DEAD_LEVEL
        with Admin(self._node.address) as admin, Producer(self._node.address) as producer:
            stored = admin.view(one.physical_offset)
            assert (stored.topic, stored.queue_id, stored.queue_offset) == (one.topic, one.queue, one.queue_offset)
            topic = f"%DLQ%{group}" if dead else f"%RETRY%{group}"
            first = stored.properties.get("RETRY_TOPIC", one.topic)
            producer.send(topic, stored.body, properties={"RETRY_TOPIC": first})
        return SendBackResult(dead)


@pytest.fixture
def stand_in(node: Node, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(node)
    monkeypatch.setattr(SendBack, "exchange", lambda self, requests: made.exchange(self, requests))
    return made


def fill(node: Node, topic: str, count: int, **options: Any) -> list[bytes]:
    bodies = [b"%06d" % number for number in range(count)]
    with Producer(node.address) as producer:
        producer.send_batch(topic, bodies, **options)
    wait_until_dispatched(node.address)  # a group that begins at the end, or asks for its lag, would not know of them
    return bodies


def lag(node: Node, group: str) -> int:
    with Admin(node.address) as admin:
        return sum(row.lag or 0 for row in admin.group_lag(group) if not row.topic.startswith("%"))


class Running:
    """A consumer whose ``run`` runs in a thread. Leaving it closes the consumer; what run raised is raised."""

    def __init__(self, node: Node, topic: str, group: str, handler: Callable[[Message], Any], **options: Any) -> None:
        names = ("filter", "start", "on_revoke", "member", "rebalance_timeout_s")
        of_consumer = {name: options.pop(name) for name in names if name in options}
        self.consumer = Consumer(topic, group=group, node=node.address, **of_consumer)
        self._threads = ThreadPoolExecutor(1)
        self.ended = self._threads.submit(self.consumer.run, handler, **options)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()
        self.ended.result(60)
        self._threads.shutdown()


def test_every_message_is_handled_and_committed(node: Node, stand_in: StandIn) -> None:
    bodies = fill(node, "all", 5_000, tags="a")
    seen: Counter[bytes] = Counter()
    with Running(node, "all", "all", lambda message: seen.update([message.body]), workers=8) as running:
        eventually(lambda: sum(seen.values()) >= len(bodies), "all are handled")
    assert seen == Counter(bodies)
    assert running.consumer.is_closed
    assert running.consumer.handler_counts == (5_000, 0, 0, 0, 0)
    assert lag(node, "all") == 0


def test_handlers_run_at_the_same_time(node: Node, stand_in: StandIn) -> None:
    fill(node, "parallel", 4, queue=0)
    together = threading.Barrier(4)

    def handle(message: Message) -> None:
        together.wait(20)

    with Running(node, "parallel", "parallel", handle, workers=4) as running:
        eventually(lambda: running.consumer.handler_counts.handled == 4, "all met")


def test_a_commit_never_passes_a_handler_that_runs(node: Node, stand_in: StandIn) -> None:
    fill(node, "slow", 100, queue=0)
    go_on = threading.Event()

    def handle(message: Message) -> None:
        if message.queue_offset == 40:
            go_on.wait(60)

    with Running(node, "slow", "slow", handle) as running:
        eventually(lambda: running.consumer.handler_counts.handled == 99, "the others are done")
        eventually(lambda: lag(node, "slow") == 60, "all below it is committed")
        time.sleep(1.5)
        assert lag(node, "slow") == 60
        go_on.set()
        eventually(lambda: lag(node, "slow") == 0, "all is committed")


def test_a_failed_message_comes_from_the_retry_topic(node: Node, stand_in: StandIn) -> None:
    fill(node, "failing", 10, tags="a")
    seen: list[tuple[str, str, bytes]] = []
    errors: list[tuple[bytes, str]] = []

    def handle(message: Message) -> None:
        seen.append((message.topic, message.stored_topic, message.body))
        if message.body == b"000003" and message.stored_topic == "failing":
            raise ValueError("not now")
        if message.body == b"000004" and message.stored_topic == "failing":
            message.retry_later(0.25)
        if message.body == b"000005" and message.stored_topic == "failing":
            message.retry_later(timedelta(hours=3))

    def on_error(message: Message | None, error: BaseException) -> None:
        assert message is not None
        errors.append((message.body, str(error)))

    # A filter that the retried messages would not pass does not keep them away, as in RocketMQ.
    with Running(
        node, "failing", "failing", handle, filter=Sql("TAGS = 'a'"), start="latest", on_error=on_error, backoff=[1, 2]
    ) as running:
        eventually(lambda: running.consumer.assignment != [], "it has queues")
        fill(node, "failing", 10, tags="a")
        eventually(lambda: len(seen) == 13, "ten and three again")
        assert set(seen[:10]) == {("failing", "failing", b"%06d" % number) for number in range(10)}
        assert sorted(seen[10:]) == [("failing", "%RETRY%failing", b"00000%d" % number) for number in (3, 4, 5)]
        eventually(lambda: running.consumer.handler_counts[:3] == (10, 3, 0), "three failed, ten were handled")
    too_long = "the delay of RetryLater must be at most 7200 seconds (2 hours, RocketMQ's last level), not 10800.0"
    assert sorted(errors) == [(b"000003", "not now"), (b"000005", too_long)]
    assert sorted(one.delay_s for one in stand_in.requests if one.delay_s is not None) == [0.25, 1, 1]
    assert all(one.max_retries == 16 and one.topic == "failing" for one in stand_in.requests)


def test_what_cannot_be_sent_back_is_tried_again_here(
    node: Node, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commitmq.client.handling.engine.SEND_BACK_PAUSE_S", 0.3)
    stand_in.refusals = 2
    fill(node, "again", 5, queue=1)
    tries: list[int] = []

    def handle(message: Message) -> ConsumeResult | None:
        if message.queue_offset == 2 and message.stored_topic == "again":
            tries.append(message.reconsume_times)
            return ConsumeResult.RETRY
        return None

    with Running(node, "again", "again", handle) as running:
        eventually(lambda: len(tries) >= 2, "it is tried again")
        assert lag(node, "again") >= 3
        eventually(lambda: lag(node, "again") == 0, "it was sent back at last")
        eventually(lambda: running.consumer.handler_counts.handled == 5, "and handled")
    assert tries == [0, 1, 2]
    assert len(stand_in.requests) == 3


def test_dead_letters(node: Node, stand_in: StandIn) -> None:
    fill(node, "dead", 3, queue=0)
    with Running(
        node, "dead", "dead", lambda message: ConsumeResult.DEAD if message.queue_offset == 1 else True
    ) as running:
        eventually(lambda: running.consumer.handler_counts[:3] == (2, 1, 1), "one is dead")
        eventually(lambda: lag(node, "dead") == 0, "and passed")
    with Reader("%DLQ%dead", node=node.address) as reader:
        assert [message.body for message in reader.poll(10)] == [b"000001"]


def test_ordered_mode_keeps_the_order_of_each_queue(node: Node, stand_in: StandIn) -> None:
    for queue in (0, 1):
        fill(node, "ordered", 60, queue=queue)
    seen: dict[int, list[int]] = {0: [], 1: []}
    done: dict[int, list[int]] = {0: [], 1: []}
    inside: Counter[int] = Counter()
    worst: Counter[int] = Counter()

    def handle(message: Message) -> bool:
        queue = message.queue_id
        inside[queue] += 1
        worst[queue] = max(worst[queue], inside[queue])
        time.sleep(0.001)
        seen[queue].append(message.queue_offset)
        inside[queue] -= 1
        if message.queue_offset == 30 and queue == 0 and message.reconsume_times < 3:
            raise ValueError("not yet")
        if message.queue_offset == 50 and queue == 1:
            return False
        done[queue].append(message.queue_offset)
        return True

    with Running(
        node, "ordered", "ordered", handle, ordered=True, max_retries=4, backoff=0.02, on_error=lambda *_: None
    ) as running:
        eventually(lambda: lag(node, "ordered") == 0, "all is done")
        assert running.consumer.handler_counts.dead == 1
    assert max(worst.values()) == 1
    assert done == {0: list(range(60)), 1: [number for number in range(60) if number != 50]}
    assert seen[0] == sorted(seen[0])
    assert Counter(seen[0])[30] == 4
    assert Counter(seen[1])[50] == 5, "the first try and four retries"
    assert [one.delay_level for one in stand_in.requests] == [DEAD_LEVEL]


def test_a_full_queue_does_not_keep_the_others_waiting(node: Node, stand_in: StandIn) -> None:
    fill(node, "full", 500, queue=0)
    fill(node, "full", 500, queue=1)
    go_on = threading.Event()
    seen: Counter[int] = Counter()

    def handle(message: Message) -> None:
        if message.queue_id == 0:
            go_on.wait(60)
        seen[message.queue_id] += 1

    with Running(node, "full", "full", handle, workers=12, max_unfinished=10) as running:
        eventually(lambda: seen[1] == 500, "the other queue is handled")
        assert seen[0] == 0
        assert running.consumer.handler_counts.unfinished == 10
        go_on.set()
        eventually(lambda: seen[0] == 500, "the full one goes on")


def test_the_span_is_limited(node: Node, stand_in: StandIn) -> None:
    fill(node, "span", 500, queue=0)
    go_on = threading.Event()
    highest = [0]

    def handle(message: Message) -> None:
        if message.queue_offset == 0:
            go_on.wait(60)
        highest[0] = max(highest[0], message.queue_offset)

    with Running(node, "span", "span", handle, max_unfinished_span=100) as running:
        eventually(lambda: running.consumer.handler_counts.handled == 100, "all within the span are done")
        time.sleep(0.6)
        assert highest[0] == 100
        go_on.set()
        eventually(lambda: lag(node, "span") == 0, "it goes on")


def test_a_handler_closes_the_consumer(node: Node, stand_in: StandIn) -> None:
    fill(node, "close", 50, queue=0)
    with Consumer("close", group="close", node=node.address) as consumer:

        def handle(message: Message) -> None:
            if message.queue_offset == 20:
                consumer.close()

        consumer.run(handle, workers=1)
        assert consumer.is_closed
        with pytest.raises(CommitMQError, match="closed"):
            consumer.run(handle)
    assert lag(node, "close") == 50 - 21


def test_a_signal_handler_closes_the_consumer_and_ctrl_c_does_too(node: Node, stand_in: StandIn) -> None:
    fill(node, "signal", 10, queue=0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Consumer("signal", group="signal", node=node.address) as consumer:
        before = signal.signal(signal.SIGALRM, lambda *_: consumer.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 1.5)
            consumer.run(lambda message: None)
            assert consumer.is_closed
        finally:
            signal.signal(signal.SIGALRM, before)
    with Consumer("signal", group="signal2", node=node.address) as consumer:
        before = signal.signal(signal.SIGALRM, interrupted)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1.5)
            with pytest.raises(KeyboardInterrupt):
                consumer.run(lambda message: None)
            assert consumer.is_closed
        finally:
            signal.signal(signal.SIGALRM, before)
    assert lag(node, "signal") == lag(node, "signal2") == 0


def test_close_waits_for_the_handlers_that_run(node: Node, stand_in: StandIn) -> None:
    fill(node, "stop", 10, queue=0)
    began = threading.Barrier(3)

    def handle(message: Message) -> None:
        began.wait(20)
        time.sleep(1.0)

    with Running(node, "stop", "stop", handle, workers=2) as running:
        began.wait(20)
    assert running.consumer.handler_counts[:4] == (2, 0, 0, 0)
    assert lag(node, "stop") == 8


def test_close_does_not_wait_longer_than_it_may(node: Node, stand_in: StandIn) -> None:
    fill(node, "hanging", 1, queue=0)
    began, go_on = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        began.set()
        go_on.wait(60)

    start = 0.0
    with Running(node, "hanging", "hanging", handle, stop_timeout_s=0.5):
        assert began.wait(20)
        start = time.monotonic()
    assert 0.4 < time.monotonic() - start < 15
    assert lag(node, "hanging") == 1
    go_on.set()


def test_a_long_handler_keeps_its_membership(node: Node, stand_in: StandIn) -> None:
    fill(node, "long", 2, queue=0)
    lost: list[object] = []
    with Running(node, "long", "long", lambda message: time.sleep(4), workers=1, on_revoke=lost.append) as running:
        eventually(lambda: running.consumer.handler_counts.running == 1, "it runs")
        time.sleep(3.0)  # longer than a session
        assert lost == []
        eventually(lambda: lag(node, "long") == 0, "both are done", 30)


def test_two_consumers_share_the_work(node: Node, stand_in: StandIn) -> None:
    bodies = fill(node, "shared", 400, queue=0) + fill(node, "shared", 400, queue=1)
    seen: Counter[tuple[int, bytes]] = Counter()

    def handle(message: Message) -> None:
        time.sleep(0.01)
        seen[message.queue_id, message.body] += 1

    with Running(node, "shared", "shared", handle, workers=2, member="a") as first:
        eventually(lambda: len(first.consumer.assignment) == 3, "it has both queues and the retry topic's")
        with Running(node, "shared", "shared", handle, workers=2, member="b") as second:
            eventually(lambda: second.consumer.handler_counts.handled > 20, "the second one works too")
            assert len(first.consumer.assignment) < 3
        eventually(lambda: lag(node, "shared") == 0, "all is done", 60)
    assert len(seen) == len(bodies)
    # What was handled and not committed before a queue changed hands is handled again: here nothing is, because the
    # first one waits for its running handlers and commits.
    assert sum(seen.values()) == len(bodies)


PROGRAM = """
import os, sys, time
from commitmq import Consumer

def handle(message):
    time.sleep(0.01)
    os.write(1, message.body + b"\\n")  # a line at once: four threads write

with Consumer("killed", group="killed", node=sys.argv[1]) as consumer:
    consumer.run(handle, workers=4)
"""


def test_a_killed_consumer_loses_nothing(node: Node, stand_in: StandIn) -> None:
    bodies = fill(node, "killed", 600)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, node.address], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        first = [program.stdout.readline().strip() for _ in range(200)]
        program.kill()
        first += program.stdout.read().split()
    seen: Counter[bytes] = Counter()
    with Running(node, "killed", "killed", lambda message: seen.update([message.body])):
        eventually(lambda: lag(node, "killed") == 0, "the rest is done", 60)
    assert {*first, *seen} == set(bodies)
    assert max(seen.values()) == 1


def test_a_handler_may_outlive_its_queue(node: Node, stand_in: StandIn) -> None:
    fill(node, "outlived", 40, queue=0)
    fill(node, "outlived", 40, queue=1)
    go_on = threading.Event()
    seen: Counter[tuple[str, int, int]] = Counter()

    def handler(name: str) -> Callable[[Message], None]:
        def handle(message: Message) -> None:
            if name == "a" and message.queue_offset == 3:
                go_on.wait(60)
            seen[name, message.queue_id, message.queue_offset] += 1

        return handle

    with Running(node, "outlived", "outlived", handler("a"), member="a", rebalance_timeout_s=0.5) as first:
        eventually(lambda: sum(seen.values()) == 78, "all but the two that wait are done")
        with Running(node, "outlived", "outlived", handler("b"), member="b") as second:
            # One queue goes to the second one although its handler still runs: its message is handled there again.
            eventually(lambda: any(name == "b" and offset == 3 for name, _, offset in seen), "it is handled again", 60)
            go_on.set()
            eventually(lambda: lag(node, "outlived") == 0, "all is committed", 60)
            eventually(lambda: first.consumer.handler_counts.running == 0, "the handlers have ended")
        assert second.consumer.handler_counts.failed == 0
    assert {(queue, offset) for _, queue, offset in seen} == {
        (queue, offset) for queue in (0, 1) for offset in range(40)
    }


def test_middleware_and_what_only_run_may_do(node: Node, stand_in: StandIn) -> None:
    fill(node, "chain", 1, queue=0)
    steps: list[str] = []

    def outer(message: Message, following: Callable[[Message], Any]) -> Any:
        steps.append("outer")
        result = following(message)
        steps.append(f"outer {result}")
        return None

    def inner(message: Message, following: Callable[[Message], Any]) -> Any:
        steps.append("inner")
        return following(message)

    with Running(node, "chain", "chain", lambda message: False, middleware=[outer, inner]) as running:
        eventually(lambda: lag(node, "chain") == 0, "it is done")
        for forbidden in (running.consumer.poll, running.consumer.commit, lambda: running.consumer.seek("chain", 0, 0)):
            with pytest.raises(CommitMQError, match="run"):
                forbidden()
        running.consumer.pause([("chain", 0)])
    assert steps == ["outer", "inner", "outer False"]


def test_settings_are_checked(node: Node) -> None:
    def handle(message: Message) -> None:
        """Never called."""

    with Consumer("settings", group="settings", node=node.address) as consumer:
        mistakes: list[Any] = [
            {"workers": 0}, {"backoff": "x"}, {"backoff": []}, {"max_retries": -1}, {"stop_timeout_s": -1}
        ]  # fmt: skip
        for wrong in mistakes:
            with pytest.raises(ValueError, match=next(iter(wrong))):
                consumer.run(handle, **wrong)
        with pytest.raises(ValueError, match="handler"):
            consumer.run(None)  # type: ignore[arg-type]
        assert not consumer.is_closed
    with (
        Consumer("settings", group="settings", node=node.address, auto_commit=False) as consumer,
        pytest.raises(ValueError, match="auto_commit"),
    ):
        consumer.run(handle)


def test_asyncio(node: Node, stand_in: StandIn) -> None:
    bodies = fill(node, "aio", 300)
    seen: Counter[bytes] = Counter()
    running = most = 0
    errors: list[BaseException] = []

    async def around(message: Message, following: Callable[[Message], Any]) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await following(message)
        finally:
            running -= 1

    async def on_error(message: Message | None, error: BaseException) -> None:
        errors.append(error)

    async def main() -> None:
        async with AsyncConsumer("aio", group="aio", node=node.address) as consumer:

            async def handle(message: Message) -> None:
                await asyncio.sleep(0.001)
                if message.body == b"000007" and message.stored_topic == "aio":
                    raise ValueError("not now")
                if message.body == b"000008" and message.stored_topic == "aio":
                    raise RetryLater(0)
                if message.body == b"000009" and message.stored_topic == "aio":
                    raise RetryLater(7_201)
                seen[message.body] += 1
                if len(seen) == len(bodies):
                    await consumer.close()

            await consumer.run(handle, workers=5, middleware=[around], on_error=on_error)
            assert consumer.is_closed
            assert consumer.handler_counts[:3] == (300, 3, 0)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert seen == Counter(bodies)
    assert most == 5
    assert [str(error)[:42] for error in errors] == ["not now", "the delay of RetryLater must be at most 72"]
    assert lag(node, "aio") == 0


def test_a_cancelled_run_cancels_its_handlers(node: Node, stand_in: StandIn) -> None:
    fill(node, "cancelled", 5, queue=0)
    ends: list[str] = []

    async def main() -> None:
        async with AsyncConsumer("cancelled", group="cancelled", node=node.address) as consumer:
            began = asyncio.Event()

            async def handle(message: Message) -> None:
                if message.queue_offset < 2:
                    return
                began.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    ends.append("cancelled")
                    raise

            task = asyncio.create_task(consumer.run(handle, workers=1))
            await asyncio.wait_for(began.wait(), 20)
            with pytest.raises(CommitMQError, match="run"):
                await consumer.poll()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert consumer.is_closed

    asyncio.run(main())
    assert ends == ["cancelled"]
    assert lag(node, "cancelled") == 3


def test_on_assign_may_seek_and_handlers_see_the_program_s_variables(node: Node, stand_in: StandIn) -> None:
    fill(node, "seek", 10, queue=0)
    variable: ContextVar[str] = ContextVar("variable", default="none")
    seen: list[tuple[int, str]] = []

    async def main() -> None:
        async def assigned(queues: list[tuple[str, int]]) -> None:
            if ("seek", 0) in queues:
                await consumer.seek("seek", 0, 6)

        consumer = AsyncConsumer("seek", group="seek", node=node.address, on_assign=assigned)
        async with consumer:

            async def handle(message: Message) -> None:
                seen.append((message.queue_offset, variable.get()))
                if message.queue_offset == 9:
                    await consumer.close()

            variable.set("ours")
            await consumer.run(handle, ordered=True)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert seen == [(offset, "ours") for offset in range(6, 10)]
    assert lag(node, "seek") == 0


def test_another_task_closes_a_run(node: Node, stand_in: StandIn) -> None:
    async def main() -> None:
        async with AsyncConsumer("other", group="other", node=node.address) as consumer:

            async def handle(message: Message) -> None:
                """Never called."""

            running = asyncio.create_task(consumer.run(handle))
            await asyncio.sleep(0.5)
            await consumer.close()
            await asyncio.wait_for(running, 10)

    asyncio.run(main())
