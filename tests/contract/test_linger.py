"""Goal: asynchronous sends gather for ``linger_ms``, and nobody who waits, and nothing that is enough, waits for that.

Method: a real node and producers whose linger is so long that a message that waited for it could not be overlooked; the runs
are counted where the producer's thread sends them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, ExactlyOnce, Producer
from commitmq.client.sending.outbox import FULL_RUN_BYTES
from commitmq.client.sending.run import SendRun
from nodes import Node, start_node

pytestmark = pytest.mark.timeout(120)
LONG_MS = 1_000.0
AT_ONCE_S = 0.6  # well below LONG_MS, and above what a busy machine takes for a send
QUEUES = 16


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("linger"), f"topics.default_queues={QUEUES}") as made:
        yield made


@pytest.fixture(params=[False, True], ids=["plain", "idempotent"])
def slow(node: Node, request: pytest.FixtureRequest) -> Iterator[Producer]:
    """A producer that has just sent something and lingers from now on."""
    with Producer(
        node.address, ack="memory", linger_ms=LONG_MS, delivery=ExactlyOnce() if request.param else None
    ) as producer:
        producer.send_async("warm", b"connects").result(30)
        producer.send_async("linger", b"makes the topic known").result(30)
        time.sleep(LONG_MS / 1000)
        first = producer.send_async("linger", b"goes at once")
        assert done_within(first) < AT_ONCE_S, "nothing came before it"
        yield producer


def done_within(*futures: Future[Any]) -> float:
    """Seconds until all are done, without being one who waits for a result."""
    began = time.monotonic()
    left = threading.Semaphore(0)
    for one in futures:
        one.add_done_callback(lambda _: left.release())
    for _ in futures:
        assert left.acquire(timeout=30)
    assert all(one.exception(0) is None for one in futures)
    return time.monotonic() - began


def runs_of(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Messages in each run that ``producer`` sends from now on."""
    counts: list[int] = []
    lane = producer._lanes.writer.lane
    real = lane.send

    def counting(channel: Any, run: SendRun) -> bool:
        counts.append(run.count)
        return real(channel, run)

    monkeypatch.setattr(lane, "send", counting)
    return counts


def test_a_thin_stream_travels_in_few_runs(slow: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = runs_of(slow, monkeypatch)
    futures = []
    for _ in range(40):
        futures.append(slow.send_async("linger", b"x", queue=0))
        time.sleep(0.002)
    took = done_within(*futures)
    assert sum(counts) == 40
    assert len(counts) <= 3, "one, or more where the machine was elsewhere for a second"
    assert took < 2 * LONG_MS / 1000


def test_without_linger_each_goes_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(node.address, ack="memory", linger_ms=0) as producer:
        producer.send_async("linger", b"connects").result(30)
        counts = runs_of(producer, monkeypatch)
        for _ in range(5):
            assert done_within(producer.send_async("linger", b"x")) < AT_ONCE_S
        assert counts == [1] * 5


def test_after_a_pause_a_message_goes_at_once(slow: Producer) -> None:
    time.sleep(LONG_MS / 1000)
    assert done_within(slow.send_async("linger", b"x")) < AT_ONCE_S


def test_who_waits_for_a_result_does_not_linger(slow: Producer) -> None:
    began = time.monotonic()
    for _ in range(5):
        slow.send_async("linger", b"x").result(30)
    assert time.monotonic() - began < AT_ONCE_S
    assert not slow._outbox.result_waiters
    late = slow.send_async("linger", b"x")
    threading.Timer(0.05, lambda: late.result(30)).start()
    assert done_within(late) < AT_ONCE_S, "the wait began while the pump lingered"


def test_a_wait_that_is_over_hurries_nobody(slow: Producer) -> None:
    future = slow.send_async("linger", b"x")
    with contextlib.suppress(TimeoutError):
        future.result(0)
    assert not slow._outbox.result_waiters
    assert done_within(future) < 2 * LONG_MS / 1000


def test_a_flush_does_not_linger(slow: Producer) -> None:
    future = slow.send_async("linger", b"x")
    began = time.monotonic()
    slow.flush(30)
    assert time.monotonic() - began < AT_ONCE_S
    assert future.done()


def test_closing_does_not_linger_and_loses_nothing(node: Node) -> None:
    producer = Producer(node.address, ack="memory", linger_ms=LONG_MS)
    producer.send_async("linger", b"connects").result(30)
    future = producer.send_async("linger", b"x")
    began = time.monotonic()
    producer.close()
    assert time.monotonic() - began < AT_ONCE_S
    assert future.result(0).queue_offset >= 0


def test_a_full_run_does_not_linger(slow: Producer) -> None:
    body = bytes(FULL_RUN_BYTES // 8)
    first = slow.send_async("linger", body)
    time.sleep(0.05)
    assert not first.done(), "one is not enough"
    assert done_within(first, *[slow.send_async("linger", body) for _ in range(7)]) < AT_ONCE_S


def test_who_waits_for_space_does_not_linger(node: Node) -> None:
    with Producer(node.address, ack="memory", linger_ms=LONG_MS, max_pending=4) as producer:
        producer.send_async("linger", b"connects").result(30)
        began = time.monotonic()
        futures = [producer.send_async("linger", b"x") for _ in range(20)]
        assert time.monotonic() - began < AT_ONCE_S
        wait(futures, 30)


def test_many_queues_leave_together(slow: Producer) -> None:
    """What has gathered for many queues is as many runs, and lingers once."""
    futures = [slow.send_async("linger", b"x", queue=queue) for queue in range(QUEUES)]
    assert done_within(*futures) < 2 * LONG_MS / 1000


def test_a_cancelled_message_is_not_sent_and_the_next_one_is(slow: Producer) -> None:
    future = slow.send_async("linger", b"never")
    assert future.cancel()
    assert done_within(slow.send_async("linger", b"x")) < 2 * LONG_MS / 1000
    assert slow._outbox.outstanding == slow._outbox.pending_bytes == 0


def test_a_flush_ends_the_linger_of_memory_topics_too(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("linger-memory", 1, attributes={"storage.type": "memory"})
    with Producer(node.address, ack="memory", linger_ms=LONG_MS) as producer:
        for _ in range(2):
            producer.send_async("linger-memory", b"connects").result(30)
        future = producer.send_async("linger-memory", b"x")
        time.sleep(0.05)
        assert not future.done()
        began = time.monotonic()
        producer.flush(30)
        assert time.monotonic() - began < AT_ONCE_S


def test_a_message_beside_a_batch_in_flight_does_not_linger(tmp_path: Path) -> None:
    """The pump waits for the batch's answer then, and would not look when the time is over."""
    slow_device = {"COMMITMQ_FAILPOINTS": "flush.before_fdatasync=delay:2000ms"}
    with (
        start_node(tmp_path, "commit_log.writer_sync_bytes=0", **slow_device) as node,
        Producer(node.address, ack="memory", linger_ms=LONG_MS) as producer,
    ):
        producer.send_async("linger", b"connects").result(30)
        time.sleep(LONG_MS / 1000)
        assert done_within(producer.send_async("linger", b"goes at once")) < AT_ONCE_S
        batch = producer.send_batch_async("linger", [b"y"], ack="flushed")
        assert done_within(producer.send_async("linger", b"x")) < AT_ONCE_S
        assert not batch.done()
        batch.result(30)


def test_a_batch_does_not_linger(slow: Producer) -> None:
    slow.send_async("linger", b"x")
    assert done_within(slow.send_batch_async("linger", [b"y"])) < AT_ONCE_S


@pytest.mark.parametrize("linger_ms", [-1, 1_001, float("nan")])
def test_a_linger_out_of_range_is_refused(linger_ms: float) -> None:
    with pytest.raises(ValueError, match="linger_ms must be between 0 and 1000"):
        Producer(linger_ms=linger_ms)
