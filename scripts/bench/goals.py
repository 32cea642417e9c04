"""The goals: ratios of our figure to a peer's, or to a bare echo, within one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from bench.results import Results, Row, Spread
from bench.workloads import OURS

Place = tuple[Row, str]
"""A row and the name of one of its figures."""


@dataclass(frozen=True)
class Goal:
    """Our figure must be at least, or at most, ``factor`` times each peer's."""

    title: str
    ours: Place
    peers: tuple[Place, ...]
    relation: Literal["at least", "at most"]
    factor: float


@dataclass(frozen=True)
class Outcome:
    """The result of one goal with one peer. ``met`` is None when one of the two was not measured."""

    goal: Goal
    peer: Place
    ours: Spread | None
    theirs: Spread | None
    ratio: Spread | None
    met: bool | None


def _ours(workload: str, durability: str, figure: str, variant: str = "") -> Place:
    return Row(workload, durability, OURS, variant), figure


def _peers(workload: str, durability: str, figure: str, *systems: str) -> tuple[Place, ...]:
    return tuple((Row(workload, durability, system), figure) for system in systems)


def _batches(body_bytes: int, clients: int, *systems: str) -> Goal:
    name = f"batch-{body_bytes}-{clients}"
    return Goal(
        f"batches of 1000 x {body_bytes} B, {clients} client{'s' if clients > 1 else ''}:"
        f" ours flushed, theirs in memory",
        _ours(name, "flushed", "rate"),
        _peers(name, "memory", "rate", *systems),
        "at least",
        3.0,
    )


GOALS: Final = (
    Goal(
        "single send, ack memory, p50, to a bare echo",
        _ours("floor", "memory", "send_memory_p50"),
        ((Row("floor", "memory", OURS), "echo_p50"),),
        "at most",
        1.3,
    ),
    Goal(
        "single send, ack memory, p50",
        _ours("send-1", "memory", "p50"),
        _peers("send-1", "memory", "p50", "RocketMQ", "Kafka", "NATS"),
        "at most",
        1.0,
    ),
    Goal(
        "single send, ack flushed, p50",
        _ours("send-1", "flushed", "p50"),
        _peers("send-1", "flushed", "p50", "Redis"),
        "at most",
        1.0,
    ),
    Goal(
        "single send, ack flushed, p50",
        _ours("send-1", "flushed", "p50"),
        _peers("send-1", "flushed", "p50", "RocketMQ"),
        "at most",
        1 / 3,
    ),
    Goal(
        "64 clients that wait for each send, ack flushed",
        _ours("send-64", "flushed", "rate"),
        _peers("send-64", "flushed", "rate", "RocketMQ"),
        "at least",
        5.0,
    ),
    Goal(
        "pipelined single sends: ours flushed, theirs in memory",
        _ours("pipeline", "flushed", "rate"),
        _peers("pipeline", "memory", "rate", "Kafka"),
        "at least",
        2.0,
    ),
    _batches(1024, 1, "RocketMQ", "Kafka"),
    _batches(1024, 4, "RocketMQ", "Kafka"),
    _batches(100, 1, "Kafka"),
    Goal(
        "catch-up read of 1 KiB, warm, same host, columns",
        _ours("read-1024-warm", "memory", "rate", "columns"),
        _peers("read-1024-warm", "memory", "rate", "Kafka"),
        "at least",
        3.0,
    ),
    Goal(
        "catch-up read of 1 KiB, warm, tcp, columns",
        _ours("read-1024-warm", "memory", "rate", "columns, tcp"),
        _peers("read-1024-warm", "memory", "rate", "Kafka"),
        "at least",
        1.2,
    ),
    Goal(
        "end to end at 10,000 a second, p99",
        _ours("end-to-end-10000", "memory", "p99"),
        _peers("end-to-end-10000", "memory", "p99", "RocketMQ"),
        "at most",
        1 / 5,
    ),
    Goal(
        "end to end at 10,000 a second, p99",
        _ours("end-to-end-10000", "memory", "p99"),
        _peers("end-to-end-10000", "memory", "p99", "Kafka"),
        "at most",
        1.0,
    ),
    Goal(
        "restart after kill -9",
        _ours("restart", "memory", "seconds"),
        _peers("restart", "memory", "seconds", "RocketMQ"),
        "at most",
        1 / 4,
    ),
    Goal(
        "CPU seconds per million messages of 1 KiB, produced and consumed",
        _ours("cpu", "memory", "cpu_s"),
        _peers("cpu", "memory", "cpu_s", "RocketMQ", "Kafka"),
        "at most",
        1 / 2,
    ),
)


def judge(results: Results) -> list[Outcome]:
    """Each goal with each of its peers."""
    return [_judge(results, goal, peer) for goal in GOALS for peer in goal.peers]


def _judge(results: Results, goal: Goal, peer: Place) -> Outcome:
    ratio = results.ratio(goal.ours, peer)
    met = None
    if ratio is not None:
        met = ratio.median <= goal.factor if goal.relation == "at most" else ratio.median >= goal.factor
    return Outcome(goal, peer, results.spread(*goal.ours), results.spread(*peer), ratio, met)
