"""The measurements: each workload is a job for the drivers, or a step of its own, with a full and a quick size.

Rows that are compared have equal durability: ``memory`` (the server has the message; nothing waits for the device) or
``flushed`` (the message is on the device).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from bench.system import Durability

Size = Literal["full", "quick", "tiny"]
Part = Literal["main", "semantics", "connections", "timers", "restart"]
"""The session of a round. What a row leaves behind (delayed messages, processes) must not be with the rows of another one."""

BOTH: Final[tuple[Durability, ...]] = ("memory", "flushed")
MEMORY: Final[tuple[Durability, ...]] = ("memory",)
FLUSHED: Final[tuple[Durability, ...]] = ("flushed",)

OURS: Final = "CommitMQ"
# Another state of the project (``--before``).
BEFORE: Final = "CommitMQ before"
# CommitMQ's node behind its server for RocketMQ's clients, loaded by these.
REMOTING: Final = "CommitMQ (RocketMQ's clients)"
# Kafka's broker once more, with another client: workloads of the broker alone are not measured again.
KAFKA_PY: Final = "Kafka (Python)"
# For CommitMQ only: how its clients wait, or which way a reader takes.
_READS: Final = {
    OURS: {
        "columns": {"mode": "columns"},
        "messages": {"mode": "messages"},
        "columns, tcp": {"mode": "columns tcp"},
        "messages, tcp": {"mode": "messages tcp"},
    }
}
_TASKS: Final = {OURS: {"": {"mode": "tasks"}}}
_SEND_OVER_TCP: Final = {OURS: {"": {}, "tcp": {"mode": "tcp"}}}
# Seconds that a measurement should take, and how many messages each system does in one on a small machine: the faster
# ones get more, so that none is over before it has begun.
_SECONDS: Final[dict[Size, float]] = {"full": 2.0, "quick": 0.8, "tiny": 0.02}
_PER_SECOND: Final[dict[str, dict[str, int]]] = {
    "pipeline": {OURS: 60_000, "RocketMQ": 40_000, "Redis": 120_000, "NATS": 80_000, "": 100_000},
    "batch of 100 B": {OURS: 1_000_000, "RocketMQ": 300_000, "Redis": 250_000, "NATS": 200_000, "": 500_000},
    "batch of 1024 B": {OURS: 250_000, "RocketMQ": 120_000, "NATS": 55_000, "": 130_000},
    "batch of 4096 B": {OURS: 60_000, "NATS": 20_000, "": 40_000},
    "small batches": {OURS: 40_000, "RocketMQ": 30_000, "": 50_000},
    "shared": {OURS: 20_000, "": 20_000},
}
_RATED_AS: Final = {BEFORE: OURS, REMOTING: "RocketMQ"}
# With a server that waits for the device, these do so much less.
_FLUSHED_SHARE: Final = {"NATS": 0.1, "Redis": 0.4}


@dataclass(frozen=True)
class Workload:
    """One row of comparison.

    ``work`` is the driver's, or a step of :mod:`bench.session` (``idle``, ``restart``, ``cpu``). ``job`` are the driver's
    parameters, and ``sizes`` those of each size. ``part``: the session in which it is measured. ``per_second`` names the
    row of expected rates that gives the number of messages. ``variants`` are further ways to do it for the named systems,
    by their names in the tables. ``reads``: the workload whose messages are read. ``cold``: after the page cache was
    dropped. ``without``: systems for which it makes no sense.
    ``only_ours``: durabilities with which it is measured for CommitMQ alone.
    """

    name: str
    title: str
    work: str
    durabilities: tuple[Durability, ...] = MEMORY
    job: Mapping[str, Any] = field(default_factory=dict)
    per_second: str = ""
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    reads: str = ""
    cold: bool = False
    without: frozenset[str] = frozenset()
    only_ours: tuple[Durability, ...] = ()
    limit_s: float = 90.0
    sizes: Mapping[Size, Mapping[str, Any]] = field(default_factory=dict)
    part: Part = "main"

    def jobs(self, system: str, size: Size, durability: Durability = "memory") -> dict[str, dict[str, Any]]:
        """The job of each variant for ``system``, by the variant's name; most have one, without a name."""
        job = {**self.job, **self.sizes.get(size, {})}
        if self.per_second:
            rates = _PER_SECOND[self.per_second]
            wanted = rates.get(_RATED_AS.get(system, system), rates[""]) * _SECONDS[size]
            if durability == "flushed":
                wanted *= _FLUSHED_SHARE.get(system, 1.0)
            least = 1000 if self.work == "batch" else 100
            job["messages"] = max(int(wanted) // 1000 * 1000, least)
        variants = self.variants.get(OURS if system == BEFORE else system, {"": {}})
        return {name: {**job, **more} for name, more in variants.items()}


def _send(clients: int) -> Workload:
    return Workload(
        f"send-{clients}",
        f"single sends of 1 KiB, each waits for its ack, {clients} client{'s' if clients > 1 else ''}",
        "send",
        BOTH,
        {"clients": clients, "body_bytes": 1024},
        variants=_SEND_OVER_TCP if clients == 1 else _TASKS,
    )


def _batch(body_bytes: int, clients: int) -> Workload:
    return Workload(
        f"batch-{body_bytes}-{clients}",
        f"batches of 1000 x {body_bytes} B, {clients} client{'s' if clients > 1 else ''}",
        "batch",
        BOTH if body_bytes == 1024 or (body_bytes, clients) == (100, 1) else MEMORY,
        {"clients": clients, "body_bytes": body_bytes, "batch": 1000},
        f"batch of {body_bytes} B",
    )


def _read(body_bytes: int, *, cold: bool) -> Workload:
    return Workload(
        f"read-{body_bytes}-{'cold' if cold else 'warm'}",
        f"catch-up read of {body_bytes} B messages, page cache {'dropped' if cold else 'warm'}",
        "read",
        MEMORY,
        {"body_bytes": body_bytes},
        variants={OURS: {name: _READS[OURS][name] for name in ("columns", "messages")}} if cold else _READS,
        reads=f"batch-{body_bytes}-1",
        cold=cold,
        # Redis reads everything into its own memory when it starts.
        without=frozenset({"Redis", KAFKA_PY}) if cold else frozenset(),
    )


def _end_to_end(rate: int, durabilities: tuple[Durability, ...] = MEMORY) -> Workload:
    return Workload(
        f"end-to-end-{rate}",
        f"from the planned send to the consumer, 1 KiB at {rate:,} messages a second",
        "end_to_end",
        durabilities,
        {"rate": rate, "body_bytes": 1024},
    )


def _queues(queues: int) -> Workload:
    return Workload(
        f"queues-{queues}",
        f"batches of 20 x 1 KiB in turn over {queues:,} queue{'s' if queues > 1 else ''}",
        "batch",
        MEMORY,
        {"clients": 1, "body_bytes": 1024, "batch": 20, "queues": queues},
        "small batches",
        without=frozenset({KAFKA_PY}),
        limit_s=180.0,
    )


RESTART: Final = Workload(
    "restart",
    "ready after kill -9",
    "restart",
    MEMORY,
    {"body_bytes": 1024, "clients": 1},
    part="restart",
    # Redis is not meant for a store of its whole memory's size.
    without=frozenset({"Redis", KAFKA_PY}),
)
FLOOR: Final = Workload(
    "floor",
    "single send of 1 KiB beside a bare pyzmq echo and a bare fdatasync, taking turns",
    "floor",
    MEMORY,
    {"body_bytes": 1024},
)

DELAYED_BURST: Final = Workload(
    "delayed-burst",
    "delayed messages of 100 B, all due within one second: lateness",
    "delayed",
    MEMORY,
    {"body_bytes": 100, "seconds": 1.0},
    sizes={
        "full": {"rate": 100_000, "ahead_s": 20.0},
        "quick": {"rate": 100_000, "ahead_s": 12.0},
        "tiny": {"rate": 500, "ahead_s": 2.0},
    },
    part="semantics",
)
DELAYED_STEADY: Final = Workload(
    "delayed-steady",
    "delayed messages of 100 B, 1,000 due a second, sent 5 s before: lateness",
    "delayed",
    MEMORY,
    {"body_bytes": 100, "rate": 1_000, "ahead_s": 5.0},
    sizes={"full": {"seconds": 60.0}, "quick": {"seconds": 10.0}, "tiny": {"seconds": 0.5, "ahead_s": 2.0}},
    part="semantics",
    limit_s=120.0,
)
RETRY: Final = Workload(
    "retry",
    "a handler fails once, 100 messages of 1 KiB a second: until it has the message again, after the first delay level (1 s)",
    "retry",
    MEMORY,
    {"body_bytes": 1024, "rate": 100, "delay_ms": 1_000},
    sizes={"full": {"seconds": 10.0}, "quick": {"seconds": 3.0}, "tiny": {"seconds": 0.3}},
    part="semantics",
    limit_s=180.0,
)
TRANSACTIONS: Final = Workload(
    "transactions-16",
    "transactions of one 1 KiB message, committed, 16 clients",
    "transactions",
    BOTH,
    {"clients": 16, "body_bytes": 1024},
    part="semantics",
    variants=_TASKS,
)
SHARE: Final = Workload(
    "share-32",
    "shared queues (POP): receive and ack 32 messages of 1 KiB at a time, 1 client",
    "share",
    BOTH,
    {"batch": 32, "body_bytes": 1024},
    part="semantics",
    per_second="shared",
)
PUSH: Final = Workload(
    "push-10000",
    "from the planned send to the handler of a push consumer, 1 KiB at 10,000 messages a second",
    "push",
    MEMORY,
    {"rate": 10_000, "body_bytes": 1024},
)
CONNECTIONS: Final = Workload(
    "connections",
    "2,000 producers of RocketMQ that are connected and do nothing",
    "connections",
    MEMORY,
    {"connections": 2_000},
    part="connections",
    sizes={"tiny": {"connections": 50}},
)
TIMERS: Final = Workload(
    "timers",
    "messages that wait in the timer, due in one to two hours: memory for them, and ready after kill -9",
    "timers",
    MEMORY,
    {"body_bytes": 100, "batch": 250, "ahead_s": 3_600.0, "timeout_s": 300.0},
    sizes={"full": {"messages": 1_000_000}, "quick": {"messages": 100_000}, "tiny": {"messages": 1_000}},
    part="timers",
    limit_s=330.0,
)

FULL: Final = (
    Workload("idle", "idle: nothing connected, nothing stored", "idle", MEMORY, without=frozenset({KAFKA_PY})),
    FLOOR,
    _send(1),
    _send(16),
    _send(64),
    Workload(
        "pipeline",
        "single sends of 1 KiB, pipelined, 1 client",
        "pipeline",
        BOTH,
        {"body_bytes": 1024, "window": 10_000},
        "pipeline",
    ),
    *(_batch(body_bytes, clients) for body_bytes in (100, 1024, 4096) for clients in (1, 4)),
    _read(100, cold=False),
    _read(1024, cold=False),
    _end_to_end(1_000),
    _end_to_end(10_000, BOTH),
    _end_to_end(50_000),
    PUSH,
    Workload("mixed", "batches of 1000 x 1 KiB with a consumer behind", "mixed", MEMORY, {"batch": 1000}),
    Workload("query", "one message by its key", "query", MEMORY, {"messages": 50_000, "batch": 500, "count": 500}),
    Workload("cpu", "processor time to produce and consume 1 KiB messages, client and server", "cpu", MEMORY),
    _queues(1),
    _queues(100),
    _queues(10_000),
    _read(100, cold=True),
    _read(1024, cold=True),
    TRANSACTIONS,
    SHARE,
    RETRY,
    DELAYED_BURST,
    DELAYED_STEADY,
    CONNECTIONS,
    TIMERS,
)

_QUICK_NAMES: Final[dict[str, tuple[Durability, ...]]] = {
    "floor": MEMORY,
    "send-1": BOTH,
    "send-64": FLUSHED,
    "pipeline": BOTH,
    "batch-100-1": BOTH,
    "batch-1024-1": BOTH,
    "read-1024-warm": MEMORY,
    "end-to-end-10000": MEMORY,
    "push-10000": MEMORY,
    "transactions-16": MEMORY,
    "share-32": MEMORY,
    "retry": MEMORY,
    "delayed-burst": MEMORY,
    "delayed-steady": MEMORY,
    "connections": MEMORY,
    "timers": MEMORY,
}
# Together with those every work and step is done once.
_TINY_NAMES: Final[dict[str, tuple[Durability, ...]]] = dict.fromkeys(
    ("idle", "mixed", "query", "cpu", "queues-100", "read-1024-cold"), MEMORY
)
# The workloads in which the quick run waits for the device with CommitMQ only: peers do not wait there.
_QUICK_FLUSHED_OURS: Final = frozenset({"pipeline", "batch-100-1"})

# The values of each size for the parameters that every job gets.
COMMON: Final[dict[Size, dict[str, Any]]] = {
    "full": {"warmup_s": 1.0, "seconds": 2.5},
    "quick": {"warmup_s": 0.6, "seconds": 1.0},
    "tiny": {"warmup_s": 0.05, "seconds": 0.2},
}
# A Java program still compiles itself for some seconds after it serves.
SETTLE_S: Final[dict[Size, float]] = {"full": 5.0, "quick": 2.0, "tiny": 0.0}
IDLE_S: Final[dict[Size, float]] = {"full": 4.0, "quick": 1.5, "tiny": 0.2}
RESTART_BYTES: Final[dict[Size, int]] = {"full": 5 << 30, "quick": 64 << 20, "tiny": 1 << 20}
CPU_MESSAGES: Final[dict[Size, int]] = {"full": 300_000, "quick": 100_000, "tiny": 1_000}
FLOOR_COUNT: Final[dict[Size, int]] = {"full": 4_000, "quick": 1_000, "tiny": 200}


def workloads(size: Size) -> tuple[Workload, ...]:
    """The workloads of ``size`` in their order; those that read come behind those that write."""
    if size == "full":
        return FULL
    names = _QUICK_NAMES | (_TINY_NAMES if size == "tiny" else {})
    chosen = []
    for workload in FULL:
        if workload.name in names:
            ours = FLUSHED if workload.name in _QUICK_FLUSHED_OURS else ()
            chosen.append(replace(workload, durabilities=names[workload.name], only_ours=ours))
    return tuple(chosen)
