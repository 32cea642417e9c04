"""The goals: ratios of our figure to a peer's, or to a bare echo, within one run; and bounds of our own figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from bench.results import Results, Row, Spread
from bench.workloads import BEFORE, BOTH, OURS, REMOTING

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
class Bound:
    """Our figure must be at least, or at most, ``value``, in ``unit``; with ``always`` in every round, else the median."""

    title: str
    ours: Place
    relation: Literal["at least", "at most"]
    value: float
    unit: str
    always: bool = False


@dataclass(frozen=True)
class BoundOutcome:
    """``met`` is None when the figure was not measured."""

    bound: Bound
    ours: Spread | None
    met: bool | None


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


def _remoting(
    title: str,
    workload: str,
    durability: str,
    figure: str,
    relation: Literal["at least", "at most"],
    factor: float,
) -> Goal:
    """Our node to RocketMQ's broker, both with RocketMQ's clients."""
    ours = Row(workload, durability, REMOTING), figure
    peers = _peers(workload, durability, figure, "RocketMQ")
    return Goal(f"RocketMQ's clients: {title}", ours, peers, relation, factor)


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
    *(
        Goal(
            f"transactions committed a second, 16 clients, ack {durability}",
            _ours("transactions-16", durability, "rate"),
            _peers("transactions-16", durability, "rate", "RocketMQ"),
            "at least",
            1.0,
        )
        for durability in BOTH
    ),
    *(
        Goal(
            f"shared queues (POP): receive and ack of batches of 32, ack {durability}",
            _ours("share-32", durability, "rate"),
            _peers("share-32", durability, "rate", "RocketMQ"),
            "at least",
            1.0,
        )
        for durability in BOTH
    ),
    _remoting("single send, ack memory, p50", "send-1", "memory", "p50", "at most", 1.3),
    _remoting("single send, ack flushed, p50", "send-1", "flushed", "p50", "at most", 1.3),
    _remoting("64 threads that wait for each send, ack flushed", "send-64", "flushed", "rate", "at least", 1.5),
    _remoting("batches of 1000 x 1024 B, 1 client", "batch-1024-1", "memory", "rate", "at least", 0.8),
    _remoting("catch-up read of 1 KiB, warm", "read-1024-warm", "memory", "rate", "at least", 1.0),
    _remoting("push consumer at 10,000 a second, p99", "push-10000", "memory", "p99", "at most", 1.0),
    Goal(
        "retry after a second: p50 beyond the second",
        _ours("retry", "memory", "over_p50"),
        _peers("retry", "memory", "over_p50", "RocketMQ"),
        "at most",
        1.0,
    ),
)

_SAME: Final = 0.97
UNCHANGED: Final = tuple(
    Goal(
        f"unchanged: {title}, ack {durability}",
        _ours(name, durability, "rate"),
        _peers(name, durability, "rate", BEFORE),
        "at least",
        _SAME,
    )
    for name, title, durabilities in (
        ("send-1", "single sends", BOTH),
        ("send-16", "16 clients that wait for each send", BOTH),
        ("send-64", "64 clients that wait for each send", BOTH),
        ("pipeline", "pipelined single sends", BOTH),
        ("batch-100-1", "batches of 1000 x 100 B", BOTH),
        ("batch-1024-1", "batches of 1000 x 1024 B", BOTH),
    )
    for durability in durabilities
)
"""Told only of a run that has the other checkout."""

BOUNDS: Final = (
    *(
        bound
        for name, title in (("burst", "all due within one second"), ("steady", "1,000 due a second"))
        for bound in (
            Bound(
                f"delayed messages, {title}: p99 lateness",
                _ours(f"delayed-{name}", "memory", "p99"),
                "at most",
                100_000,
                "µs",
            ),
            Bound(
                f"delayed messages, {title}: the earliest one",
                _ours(f"delayed-{name}", "memory", "earliest"),
                "at least",
                0,
                "µs",
                always=True,
            ),
        )
    ),
    Bound(
        "2,000 idle producers of RocketMQ: memory for them",
        (Row("connections", "memory", REMOTING), "cost_mb"),
        "at most",
        200,
        "MB",
    ),
    Bound("waiting timers: memory for them", _ours("timers", "memory", "cost_mb"), "at most", 300, "MB"),
    Bound("waiting timers: ready after kill -9", _ours("timers", "memory", "seconds"), "at most", 5, "s"),
)


def judge(results: Results) -> list[Outcome]:
    """Each goal with each of its peers."""
    goals = (*GOALS, *UNCHANGED) if BEFORE in results.document["systems"] else GOALS
    return [_judge(results, goal, peer) for goal in goals for peer in goal.peers]


def judge_bounds(results: Results) -> list[BoundOutcome]:
    """Each bound."""
    return [_judge_bound(results, bound) for bound in BOUNDS]


def _judge_bound(results: Results, bound: Bound) -> BoundOutcome:
    ours = results.spread(*bound.ours)
    if ours is None:
        return BoundOutcome(bound, None, None)
    if bound.relation == "at most":
        met = (ours.high if bound.always else ours.median) <= bound.value
    else:
        met = (ours.low if bound.always else ours.median) >= bound.value
    return BoundOutcome(bound, ours, met)


def _judge(results: Results, goal: Goal, peer: Place) -> Outcome:
    ratio = results.ratio(goal.ours, peer)
    met = None
    if ratio is not None:
        met = ratio.median <= goal.factor if goal.relation == "at most" else ratio.median >= goal.factor
    return Outcome(goal, peer, results.spread(*goal.ours), results.spread(*peer), ratio, met)
