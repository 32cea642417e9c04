"""Goal: what a message costs does not grow unnoticed, on machines that are too noisy to judge by a clock.

Method: one real node and one client go through every hot path while their work is counted: system calls and bytes that pass
the kernel (ptrace, see :mod:`ptrace`), bytes copied by the C library (a preloaded shim), calls made by Python code (a profile
function). Each part is done twice and the lesser count is judged: what a busy machine adds are wake-ups that others would have
shared, and it does not add them every time, whereas a call that somebody has put on the path is always there.

A count below half of what was measured fails, too: either a path became cheaper, and its figures are to be lowered, or the
counters miss something. A part of known work says which.

A limit is what was measured and about a tenth to a fifth more; where a count depends on how much two processes happen to share
a wake-up, it is what comes out when they share none. Whoever has reduced a count lowers its limit in the same commit; whoever
raises one says why here.

Bytes copied: every byte of a batch is received (1) and stored into the mapped log by a kernel (1). The rest of the node's
copies are rows of dispatch batches: 144 bytes a message out of reput and into each of two dispatchers. Stores of the index
into its mapped file (20 bytes a key) are not counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ptrace
import pytest
from workload import CLIENT, KNOWN, KNOWN_BYTES, Part, Work, load

from commitmq.client.admin import Admin
from nodes import environment, start_node

# What a process does by the clock (heartbeats, ticks) is shared by fewer messages where others run beside it.
pytestmark = [pytest.mark.slow, pytest.mark.alone]
HERE = Path(__file__).parent
SHIM = HERE / "count_shim"
SEGMENT_BYTES = 256 << 20
TOPIC = "counted"
TIMEOUT_S = 90
# What ZeroMQ does around every message and every wait of its own.
WAITING = {"getpid", "poll", "read", "write", "epoll_wait", "futex"}
HOT = ("writer", "flush", "reput", "dispatcher-consume_queue", "dispatcher-index")


def skip_or_fail(reason: str) -> None:
    """Without a tracer nothing is guarded, which must not go unnoticed where everything is built."""
    if os.environ.get("COMMITMQ_CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def shims(folder: Path) -> dict[str, str]:
    """Environment of processes whose Python calls and copies are counted into ``folder``; copies only with a compiler."""
    extra = {"COMMITMQ_COUNT": str(folder), "PYTHONPATH": f"{SHIM}:{HERE}:{environment()['PYTHONPATH']}"}
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler:
        library = folder / "copies.so"
        options = ("-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fno-builtin", "-pthread")
        subprocess.run([compiler, *options, "-o", library, SHIM / "copies.c", "-ldl"], check=True, timeout=60)
        extra["LD_PRELOAD"] = str(library)
    return extra


class Counts:
    """What was counted. ``seen_copies``: whether the C library's copies were, too."""

    def __init__(self, parts: dict[str, list[Part]], seen_copies: bool) -> None:
        self.parts = parts
        self.seen_copies = seen_copies

    def least(self, part: str, figure: Callable[[Part], float]) -> float:
        """The least ``figure`` of the part's rounds, for one message."""
        return min(figure(one) / one.messages for one in self.parts[part])

    def work(self, part: str, role: str, figure: Callable[[Work], float]) -> float:
        """The same of one role."""
        return self.least(part, lambda one: figure(one.roles[role]))


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    if reason := ptrace.why_not():
        skip_or_fail(reason)
    folder = tmp_path_factory.mktemp("counted")
    found = folder / "counts"
    found.mkdir()
    extra = shims(found)
    with start_node(folder, f"commit_log.segment_bytes={SEGMENT_BYTES}", "reader.count=1", **extra) as node:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 1)
        pids = [f"{role}={pid}" for role, pid in node.pids().items()]
        ended = subprocess.run(
            [sys.executable, HERE / "workload.py", node.address, TOPIC, found, *pids],
            env=environment(**extra),
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
    return Counts(load(found), "LD_PRELOAD" in extra)


def node_work(part: Part, figure: Callable[[Work], float]) -> float:
    """Sum of ``figure`` over the node's processes."""
    return sum(figure(work) for role, work in part.roles.items() if role != CLIENT)


def others(calls: dict[str, int]) -> int:
    """System calls that are not ZeroMQ's."""
    return sum(count for name, count in calls.items() if name not in WAITING)


# System calls of a role's own threads for one message. Single sends take the writer's local socket: to send and to receive on
# either side, and the writer's wait. (Over ZeroMQ they were 10.7 and 13.3, and 15 more of its I/O threads.)
SINGLE_CALLS = {
    # part, role: (measured, limit)
    ("single, memory", CLIENT): (2.03, 2.5),
    ("single, flushed", CLIENT): (2.03, 2.5),
    ("single, memory", "writer"): (3.0, 4.0),
    ("single, flushed", "writer"): (4.15, 8.0),  # 7.0 when flush rings for each of them
}
# Of those, the ones that are not waits. Where somebody waits for the flush, the writer's are its doorbell too: to ring flush,
# and two recvfrom for a ring, which it gets of that flush.
SINGLE_OTHER_CALLS = {
    ("single, memory", CLIENT): (2.01, 2.2),
    ("single, flushed", CLIENT): (2.01, 2.2),
    ("single, memory", "writer"): (2.01, 2.4),
    ("single, flushed", "writer"): (3.1, 5.4),
}
# System calls of all the node's processes for one message: (measured, limit). For single sends the processes behind the
# writer have a turn every 10 ms (dispatch.unawaited_coalesce_us), so a slower machine has more turns in as many messages; 88
# and 142 is when each message wakes each of them.
NODE_CALLS = {
    "single, memory": (11, 170),
    "single, flushed": (20, 170),
    "pipelined": (0.22, 0.8),
    "batches of 1000": (0.25, 0.4),
    "batches of 2000": (0.15, 0.25),
    "read, mapped": (0.018, 0.06),
    "read, sent": (0.054, 0.09),
}
CLIENT_CALLS = {
    "pipelined": (0.075, 0.4),
    "batches of 1000": (0.045, 0.08),
    "batches of 2000": (0.03, 0.05),
    "read, mapped": (0.009, 0.02),
    "read, sent": (0.036, 0.055),
}
# Measured and limit: heartbeats, and each process's look at what may have been missed.
IDLE_CALLS_A_SECOND = (300, 450)
# Calls that Python code makes for one message more in a batch. What is left above zero is that a larger batch is more runs
# (commit_log.max_run_bytes) and more dispatch batches.
BATCH_PYTHON_CALLS = {CLIENT: 0.3, **dict.fromkeys(HOT, 0.3)}
LEAST_PYTHON_CALLS = 50  # for a batch of 1000; measured 110 to 330
PYTHON_CALLS = {
    ("single, memory", CLIENT): (23.4, 25.5),
    ("single, memory", "writer"): (137, 147),
    ("single, flushed", "writer"): (170, 187),
    ("pipelined", CLIENT): (23.6, 26),
    ("pipelined", "writer"): (0.3, 0.8),
    # One call of the CRC for each message, and in what was sent the slices that it is computed of.
    ("read, mapped", CLIENT): (1.04, 2.2),
    ("read, sent", CLIENT): (3.58, 4.0),
}
# Bytes that a role receives, sends and copies for each byte that the log grows by.
COPIED = {
    ("batches of 1000", "writer"): (2.007, 2.05),
    ("pipelined", "writer"): (2.01, 2.05),
    ("single, memory", "writer"): (4.05, 4.3),  # the record is put together, made changeable, and stored: three copies
    ("batches of 1000", CLIENT): (2.87, 3.0),  # joined, handed to ZeroMQ, sent; the record's smaller pieces do not show
}
NODE_COPIED = {
    "batches of 1000": (2.54, 2.7),  # the writer's 2.01, and rows
    "single, memory": (5.3, 6.0),
}
# For each byte of the records read: bytes that the reader receives, sends and copies.
READER_COPIED = {"read, mapped": (0.064, 0.2), "read, sent": (1.16, 1.25)}


def check(got: float, figures: tuple[float, float], about: str) -> None:
    """Between half of what was measured and the limit."""
    measured, limit = figures
    assert got <= limit, f"{got:.3f} is above the limit {limit}: {about}"
    assert got >= measured / 2, f"{got:.3f} is not half of the {measured} that were measured: {about}"


def test_known_work_is_counted(counts: Counts) -> None:
    """Each counter sees all of the work that is known, and hardly more: no other count means anything without that."""
    rounds = counts.parts["known"]
    assert len(rounds) == 2
    for one in rounds:
        client = one.roles[CLIENT]
        assert KNOWN <= client.main.get("write", 0) <= KNOWN * 1.1
        assert KNOWN * KNOWN_BYTES <= client.bytes_out <= KNOWN * KNOWN_BYTES * 1.1
        assert KNOWN <= client.python_calls <= KNOWN * 2.2  # os.write and bytes(), as Python's version counts them


def test_known_copies_are_counted(counts: Counts) -> None:
    need_copies(counts)
    for one in counts.parts["known"]:
        assert KNOWN * KNOWN_BYTES <= one.roles[CLIENT].copied_bytes <= KNOWN * KNOWN_BYTES * 1.1


@pytest.mark.parametrize("role", [*HOT, "reader-0"])
def test_every_process_is_traced(counts: Counts, role: str) -> None:
    part = "read, sent" if role == "reader-0" else "single, flushed"
    for one in counts.parts[part]:
        assert sum(one.roles[role].main.values()) > 0, "its system calls are not counted"
        assert one.roles[role].python_calls > 0, "its Python calls are not counted"


@pytest.mark.parametrize(("part", "role"), SINGLE_CALLS)
def test_system_calls_of_a_single_send(counts: Counts, part: str, role: str) -> None:
    got = counts.work(part, role, lambda work: sum(work.main.values()))
    check(got, SINGLE_CALLS[part, role], told(counts, part, role))
    got = counts.work(part, role, lambda work: others(work.main))
    check(got, SINGLE_OTHER_CALLS[part, role], told(counts, part, role))


@pytest.mark.parametrize("part", NODE_CALLS)
def test_system_calls_of_the_node(counts: Counts, part: str) -> None:
    got = counts.least(part, lambda one: node_work(one, lambda work: work.system_calls))
    check(got, NODE_CALLS[part], told(counts, part, *HOT, "reader-0"))


@pytest.mark.parametrize("part", CLIENT_CALLS)
def test_system_calls_of_the_client(counts: Counts, part: str) -> None:
    got = counts.work(part, CLIENT, lambda work: work.system_calls)
    check(got, CLIENT_CALLS[part], told(counts, part, CLIENT))


def test_an_idle_node_makes_few_system_calls(counts: Counts) -> None:
    got = min(node_work(one, lambda work: work.system_calls) / one.seconds for one in counts.parts["idle"])
    check(got, IDLE_CALLS_A_SECOND, told(counts, "idle", *counts.parts["idle"][0].roles))


@pytest.mark.parametrize("role", BATCH_PYTHON_CALLS)
def test_a_batch_costs_no_python_for_each_of_its_messages(counts: Counts, role: str) -> None:
    small, large = (
        counts.work(part, role, lambda work: work.python_calls) * size
        for part, size in (("batches of 1000", 1000), ("batches of 2000", 2000))
    )
    assert small >= LEAST_PYTHON_CALLS, f"{role}: {small:.0f} calls for 1000"
    assert (large - small) / 1000 <= BATCH_PYTHON_CALLS[role], (
        f"{role}: {small:.0f} calls for 1000, {large:.0f} for 2000"
    )


@pytest.mark.parametrize(("part", "role"), PYTHON_CALLS)
def test_calls_of_python_code(counts: Counts, part: str, role: str) -> None:
    got = counts.work(part, role, lambda work: work.python_calls)
    check(got, PYTHON_CALLS[part, role], f"{part}, {role}: calls a message")


@pytest.mark.parametrize(("part", "role"), COPIED)
def test_bytes_copied_for_a_byte_stored(counts: Counts, part: str, role: str) -> None:
    need_copies(counts)
    got = min(moved(one.roles[role]) / one.stored_bytes for one in counts.parts[part])
    check(got, COPIED[part, role], f"{part}, {role}: bytes for a byte stored")


@pytest.mark.parametrize("part", NODE_COPIED)
def test_bytes_copied_by_the_node_for_a_byte_stored(counts: Counts, part: str) -> None:
    need_copies(counts)
    got = min(node_work(one, moved) / one.stored_bytes for one in counts.parts[part])
    check(got, NODE_COPIED[part], f"{part}: bytes for a byte stored")


@pytest.mark.parametrize("part", READER_COPIED)
def test_bytes_copied_for_a_byte_read(counts: Counts, part: str) -> None:
    need_copies(counts)
    written = counts.parts["batches of 1000"][0]
    record_bytes = written.stored_bytes / written.messages
    got = counts.work(part, "reader-0", moved) / record_bytes
    check(got, READER_COPIED[part], f"{part}: bytes for a byte read")


def moved(work: Work) -> int:
    return work.bytes_in + work.bytes_out + work.copied_bytes


def need_copies(counts: Counts) -> None:
    if not counts.seen_copies:
        skip_or_fail("no C compiler (cc or gcc): what the C library copies cannot be counted")


def told(counts: Counts, part: str, *roles: str) -> str:
    """The system calls of each of ``roles`` in each round of ``part``, for a failure's message."""
    lines = [f"{part}: system calls a message (own threads | ZeroMQ's)"]
    for number, one in enumerate(counts.parts[part], 1):
        for role in roles:
            own, io = (
                ", ".join(f"{name} {count / one.messages:.3f}" for name, count in sorted(calls.items()))
                for calls in (one.roles[role].main, one.roles[role].io)
            )
            lines.append(f"  round {number}, {role}: {own} | {io}")
    return "\n".join(lines)
