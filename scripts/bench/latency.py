"""Measures one synchronous send, beside a bare ZeroMQ echo of the same size in the same minute.

Echo and sends take turns in short rounds: other work of the machine then slows both, and their ratio stays. When sends
wait for a disk of this host, a bare fdatasync takes its turn too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.device import FILE_BYTES, Device
from bench.echo import EchoPeer
from commitmq.bench.target import (
    ROUND_SAMPLES,
    BenchTopic,
    Clock,
    Percentiles,
    Progress,
    no_progress,
    time_calls,
)
from commitmq.client.producer import Producer


@dataclass(frozen=True, slots=True)
class SendLatency:
    """Sends with one ack level. ``ratio_p50``: their p50 divided by the echo's; ``round_ratios``: the same within each
    round.
    """

    ack: str
    send: Percentiles
    ratio_p50: float
    round_ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """One run: the echo over ``transport`` and sends of the same ``body_bytes``.

    ``device``: one body stored and fdatasynced beside the store; None when that cannot be measured or does not matter.
    """

    transport: str
    body_bytes: int
    rounds: int
    echo: Percentiles
    sends: tuple[SendLatency, ...]
    device: Percentiles | None
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
    """Time ``count`` sends of each ack level and as many echoes, one at a time.

    Raises SendError when a send fails. After ``limit_s`` seconds it stops early, after at least one round.
    """
    if count < 1:
        raise ValueError("count must be at least 1")
    body = os.urandom(body_bytes)
    metadata = topic.metadata()
    # The producer's transport, so that the echo uses it too.
    transport = metadata.endpoint("writer").partition("://")[0]
    clock = Clock(limit_s)
    echoes: list[list[int]] = []
    sends: dict[str, list[list[int]]] = {ack: [] for ack in acks}
    syncs: list[list[int]] = []
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(EchoPeer(transport))
        producer = stack.enter_context(Producer(topic.node))
        put, get = peer.socket.send, peer.socket.recv

        def echo() -> None:
            put(body)
            get()

        def sender(ack: str) -> Callable[[], None]:
            def send() -> None:
                producer.send(topic.name, body, ack=ack)

            return send

        steps = [(echo, echoes), *((sender(ack), sends[ack]) for ack in acks)]
        if "flushed" in acks and metadata.same_host and body_bytes <= FILE_BYTES:
            with contextlib.suppress(OSError):  # this user may not write to the store
                device = stack.enter_context(Device(metadata.store))
                steps.append((lambda: device.store(body), syncs))
        done = 0
        while done < count and not (done and clock.over()):
            samples = min(ROUND_SAMPLES, count - done)
            for step, rounds in steps:
                rounds.append(time_calls(step, samples))
            done += samples
            progress(samples)
    return LatencyResult(
        transport=transport,
        body_bytes=body_bytes,
        rounds=len(echoes),
        echo=_percentiles(echoes),
        sends=tuple(_compare(ack, sends[ack], echoes) for ack in acks),
        device=_percentiles(syncs) if syncs else None,
        cut_short=done < count,
    )


def _percentiles(rounds: list[list[int]]) -> Percentiles:
    return Percentiles.of([sample for one in rounds for sample in one])


def _compare(ack: str, sends: list[list[int]], echoes: list[list[int]]) -> SendLatency:
    send, echo = _percentiles(sends), _percentiles(echoes)
    ratios = tuple(round(median(one) / median(other), 3) for one, other in zip(sends, echoes, strict=True))
    return SendLatency(ack, send, round(send.p50_us / echo.p50_us, 3), ratios)
