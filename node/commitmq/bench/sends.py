"""Measures sends: the messages a second of one producer, where the clock stops when a consumer could read the last one; the
times of single synchronous sends; and a memory topic beside a durable one.

What is compared takes turns in short rounds, so that other work of the machine slows all of it alike.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final

from commitmq.bench.target import (
    ROUND_SAMPLES,
    BenchTopic,
    Clock,
    Percentiles,
    Progress,
    Spread,
    no_progress,
    time_calls,
)
from commitmq.client.producer import Producer
from commitmq.client.results import SendResult

MODES = ("batch", "async", "sync")
_DISTINCT_BODIES = 1000
_PROGRESS_EVERY = 1000
_WARM_MESSAGES = 1000
IN_MEMORY: Final = {"storage.type": "memory"}


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
    """Batches to all queues of all topics in turn. Each queue has a message before the clock starts."""
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


@dataclass(frozen=True, slots=True)
class SendLatency:
    """Single sends with one ack level."""

    ack: str
    send: Percentiles


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """One run of single sends with bodies of ``body_bytes``."""

    body_bytes: int
    sends: tuple[SendLatency, ...]
    cut_short: bool


def measure_latency(
    topic: BenchTopic,
    *,
    body_bytes: int = 1024,
    count: int = 4000,
    acks: Sequence[str] = ("memory", "flushed"),
    limit_s: float = 60.0,
    progress: Progress = no_progress,
) -> LatencyResult:
    """Time ``count`` sends of each ack level, one at a time. Raises SendError when a send fails. After ``limit_s``
    seconds it stops early, after at least one round.
    """
    if count < 1:
        raise ValueError("count must be at least 1")
    body = os.urandom(body_bytes)
    samples: dict[str, list[int]] = {ack: [] for ack in acks}
    clock = Clock(limit_s)
    done = 0
    with Producer(topic.node) as producer:
        while done < count and not (done and clock.over()):
            wanted = min(ROUND_SAMPLES, count - done)
            for ack in acks:
                samples[ack] += _time_sends(producer, topic.name, body, ack, wanted)
            done += wanted
            progress(wanted)
    sends = tuple(SendLatency(ack, Percentiles.of(times)) for ack, times in samples.items())
    return LatencyResult(body_bytes, sends, cut_short=done < count)


def _time_sends(producer: Producer, topic: str, body: bytes, ack: str, samples: int) -> list[int]:
    return time_calls(lambda: producer.send(topic, body, ack=ack), samples)


@dataclass(frozen=True, slots=True)
class SendKind:
    """One side of the comparison: a topic of the log with one ack level, or a memory topic."""

    name: str
    in_memory: bool
    ack: str


KINDS: Final = (
    SendKind("durable, ack flushed", False, "flushed"),
    SendKind("durable, ack memory", False, "memory"),
    SendKind("memory topic", True, "memory"),
)


@dataclass(frozen=True, slots=True)
class KindResult:
    """``batches``: one run of send_batch per round. ``single``: all single sends."""

    name: str
    messages_per_s: Spread
    single: Percentiles
    batches: tuple[ProduceResult, ...]


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """One comparison; ratios are of the memory topic to the durable topic with ack flushed."""

    body_bytes: int
    kinds: tuple[KindResult, ...]
    rate_ratio: float
    p50_ratio: float
    cut_short: bool


def measure_memory(
    node: str | None,
    *,
    body_bytes: int = 1024,
    messages: int = 100_000,
    batch: int = 1000,
    count: int = 2000,
    repeat: int = 3,
    limit_s: float = 60.0,
    progress: Progress = no_progress,
) -> MemoryResult:
    """``repeat`` rounds of ``messages`` in batches for each kind, then ``count`` single sends of each in short turns.
    Raises SendError when a send fails. ``limit_s`` bounds each run of batches, and all single sends together.
    """
    if count < 1 or repeat < 1:
        raise ValueError("count and repeat must be at least 1")
    runs: dict[str, list[ProduceResult]] = {kind.name: [] for kind in KINDS}
    samples: dict[str, list[int]] = {kind.name: [] for kind in KINDS}
    with contextlib.ExitStack() as stack:
        durable = stack.enter_context(BenchTopic(node))
        in_memory = stack.enter_context(BenchTopic(node, attributes=IN_MEMORY))
        topics = {kind.name: in_memory if kind.in_memory else durable for kind in KINDS}
        for _ in range(repeat):
            for kind in KINDS:
                runs[kind.name].append(
                    measure_produce(
                        topics[kind.name],
                        ack=kind.ack,
                        body_bytes=body_bytes,
                        messages=messages,
                        batch=batch,
                        limit_s=limit_s,
                        progress=progress,
                    )
                )
        producer = stack.enter_context(Producer(node))
        body = os.urandom(body_bytes)
        clock = Clock(limit_s)
        done = 0
        while done < count and not (done and clock.over()):
            wanted = min(ROUND_SAMPLES, count - done)
            for kind in KINDS:
                samples[kind.name] += _time_sends(producer, topics[kind.name].name, body, kind.ack, wanted)
            done += wanted
            progress(wanted)
    kinds = tuple(
        KindResult(
            kind.name,
            Spread.of([run.messages_per_s for run in runs[kind.name]]),
            Percentiles.of(samples[kind.name]),
            tuple(runs[kind.name]),
        )
        for kind in KINDS
    )
    first, last = kinds[0], kinds[-1]
    return MemoryResult(
        body_bytes=body_bytes,
        kinds=kinds,
        rate_ratio=round(last.messages_per_s.median / first.messages_per_s.median, 2),
        p50_ratio=round(last.single.p50_us / first.single.p50_us, 2),
        cut_short=done < count or any(run.cut_short for kind in kinds for run in kind.batches),
    )
