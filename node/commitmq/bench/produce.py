"""Measures the messages a second of one producer; the clock stops when a consumer could read the last one."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle, islice

from commitmq.bench.figures import Clock, Progress, no_progress
from commitmq.bench.target import BenchTopic
from commitmq.client.producer import Producer
from commitmq.client.results import SendResult

MODES = ("batch", "async", "sync")
_DISTINCT_BODIES = 1000
_PROGRESS_EVERY = 1000
_WARM_MESSAGES = 1000


@dataclass(frozen=True, slots=True)
class ProduceResult:
    """One run. ``seconds``: until all messages were visible to consumers, ``acked_seconds``: until the last ack."""

    mode: str
    ack: str
    body_bytes: int
    batch: int
    messages: int
    seconds: float
    acked_seconds: float
    messages_per_s: float
    mib_per_s: float
    cut_short: bool


def make_bodies(body_bytes: int, count: int = _DISTINCT_BODIES) -> list[bytes]:
    """``count`` bodies of noise, the same bodies in every run."""
    noise = random.Random(count)
    return [noise.randbytes(body_bytes) for _ in range(count)]


def measure_produce(
    topic: BenchTopic,
    *,
    mode: str = "batch",
    ack: str = "flushed",
    body_bytes: int = 1024,
    messages: int = 200_000,
    batch: int = 1000,
    limit_s: float = 60.0,
    progress: Progress = no_progress,
) -> ProduceResult:
    """Send ``messages`` from one producer in one thread: batches, pipelined single sends, or one at a time.

    Raises SendError when any message was not acknowledged, CommitMQError when acknowledged messages do not become
    visible. After ``limit_s`` seconds it sends no more; the figures are then of fewer messages.
    """
    if mode != "batch" and len(topic.names) > 1:
        raise ValueError("only batches are sent to more than one topic")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if messages < 1 or batch < 1:
        raise ValueError("messages and batch must be at least 1")
    bodies = make_bodies(body_bytes, max(_DISTINCT_BODIES, batch) if mode == "batch" else _DISTINCT_BODIES)
    if len(topic.names) > 1:
        return _measure_spread(topic, ack, bodies[:batch], messages, limit_s, progress)
    send = {"batch": _send_batches, "async": _send_async, "sync": _send_sync}[mode]
    with Producer(topic.node, ack=ack, timeout_s=max(limit_s, 10.0)) as producer:
        # Connecting, looking up the route and importing modules are not part of the measurement.
        warm = min(_WARM_MESSAGES, messages)
        before = topic.visible()
        before += send(producer, topic.name, bodies, warm, min(batch, warm), Clock(limit_s), no_progress)
        # Otherwise the clock would stop when some of these messages became visible instead of the last one.
        topic.wait_visible(before)
        started = time.perf_counter()
        sent = send(producer, topic.name, bodies, messages, batch, Clock(limit_s), progress)
        acked = time.perf_counter()
        topic.wait_visible(before + sent)
        ended = time.perf_counter()
    return _result(mode, ack, body_bytes, batch if mode == "batch" else 1, sent, started, acked, ended, sent < messages)


def _measure_spread(
    topic: BenchTopic, ack: str, bodies: list[bytes], messages: int, limit_s: float, progress: Progress
) -> ProduceResult:
    """Batches to all queues of all topics in turn, one batch per queue. Each queue has a message before the clock
    starts.
    """
    turns = [(name, queue) for queue in range(topic.queues) for name in topic.names]
    with Producer(topic.node, ack=ack, timeout_s=max(limit_s, 10.0)) as producer:
        for name, queue in turns:
            warm = producer.send_batch(name, bodies[:1], queue=queue)
        topic.wait_sent(warm[0])
        clock = Clock(limit_s)
        sent = 0
        started = time.perf_counter()
        for name, queue in cycle(turns):
            done = producer.send_batch(name, bodies, queue=queue)
            sent += len(bodies)
            progress(len(bodies))
            if sent >= messages or clock.over():
                break
        acked = time.perf_counter()
        topic.wait_sent(done[len(bodies) - 1])
        ended = time.perf_counter()
    return _result("batch", ack, len(bodies[0]), len(bodies), sent, started, acked, ended, sent < messages)


def _result(
    mode: str,
    ack: str,
    body_bytes: int,
    batch: int,
    sent: int,
    started: float,
    acked: float,
    ended: float,
    cut_short: bool,
) -> ProduceResult:
    seconds = ended - started
    return ProduceResult(
        mode=mode,
        ack=ack,
        body_bytes=body_bytes,
        batch=batch,
        messages=sent,
        seconds=round(seconds, 6),
        acked_seconds=round(acked - started, 6),
        messages_per_s=round(sent / seconds, 1),
        mib_per_s=round(sent * body_bytes / seconds / (1 << 20), 1),
        cut_short=cut_short,
    )


def _send_batches(
    producer: Producer, topic: str, bodies: list[bytes], messages: int, batch: int, clock: Clock, progress: Progress
) -> int:
    sent = 0
    full = bodies[:batch]
    while sent < messages and not clock.over():
        count = min(batch, messages - sent)
        producer.send_batch(topic, full if count == batch else full[:count])
        sent += count
        progress(count)
    return sent


def _send_async(
    producer: Producer, topic: str, bodies: list[bytes], messages: int, _batch: int, clock: Clock, progress: Progress
) -> int:
    futures: list[Future[SendResult]] = []
    supply = cycle(bodies)
    while len(futures) < messages and not clock.over():
        count = min(_PROGRESS_EVERY, messages - len(futures))
        futures += [producer.send_async(topic, body) for body in islice(supply, count)]
        progress(count)
    producer.flush(clock.left_s(10.0))
    # All futures are done; a failed send must not count as sent.
    for future in futures:
        if (error := future.exception()) is not None:
            raise error
    return len(futures)


def _send_sync(
    producer: Producer, topic: str, bodies: list[bytes], messages: int, _batch: int, clock: Clock, progress: Progress
) -> int:
    sent = 0
    supply = cycle(bodies)
    while sent < messages and not clock.over():
        count = min(100, messages - sent)
        for body in islice(supply, count):
            producer.send(topic, body)
        sent += count
        progress(count)
    return sent
