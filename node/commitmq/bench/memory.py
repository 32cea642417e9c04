"""Compares a memory topic with a durable one, by single sends and batches.

Both take turns, so that other work of the machine slows both alike.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Final

from commitmq.bench.figures import Clock, Percentiles, Progress, Spread, no_progress
from commitmq.bench.produce import ProduceResult, measure_produce
from commitmq.bench.target import BenchTopic
from commitmq.client.producer import Producer

_ROUND_SAMPLES: Final = 200
_WARM_SAMPLES: Final = 20
IN_MEMORY: Final = {"storage.type": "memory"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One side of the comparison: a topic of the log with one ack level, or a memory topic."""

    name: str
    in_memory: bool
    ack: str


KINDS: Final = (
    Kind("durable, ack flushed", False, "flushed"),
    Kind("durable, ack memory", False, "memory"),
    Kind("memory topic", True, "memory"),
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
            wanted = min(_ROUND_SAMPLES, count - done)
            for kind in KINDS:
                samples[kind.name] += _time(producer, topics[kind.name].name, body, kind.ack, wanted)
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


def _time(producer: Producer, topic: str, body: bytes, ack: str, samples: int) -> list[int]:
    """Durations of single sends in nanoseconds, after some warm-up sends that do not count."""
    now = time.perf_counter_ns
    for _ in range(_WARM_SAMPLES):
        producer.send(topic, body, ack=ack)
    durations = []
    for _ in range(samples):
        started = now()
        producer.send(topic, body, ack=ack)
        durations.append(now() - started)
    return durations
