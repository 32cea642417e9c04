"""Measures how long a node takes to serve again after all its processes were killed, beside a node with hardly any log.

A real node with real sends first writes the log: so many bytes over so many queues, and behind them a tail that was
acknowledged from memory while the flush process was halted, so that it was never flushed. Then every process gets
SIGKILL at one moment. The page cache stays, as after any death of processes; with ``cold`` it is written back and
dropped, so that the recovery reads from the device, as after a boot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commitmq.bench.sends import make_bodies
from commitmq.bench.target import Progress, no_progress
from commitmq.client.admin import Admin
from commitmq.client.producer import Producer
from commitmq.client.results import SendResult
from commitmq.errors import CommitMQError
from commitmq.store.layout import StoreLayout
from commitmq.testing.node_process import NodeProcess

_BATCH = 1000
_POLL_S = 0.002
_READABLE_WITHIN_S = 600.0
_READ_BYTES = 1 << 20
# A node's default sizes: the small files of tests would give other figures.
_SETTINGS = (
    "profile=server",
    f"commit_log.segment_bytes={1 << 30}",
    "index.hash_slots=5000000",
    "index.max_items=20000000",
    "retention.delete_when=",
)


@dataclass(frozen=True, slots=True)
class Restart:
    """One start after ``kill -9``. Seconds count from the command's start. ``steps`` are the seconds between one
    process being ready and the next, by role; ``recovery`` is the recovery process's report of its work.
    """

    name: str
    log_bytes: int
    queues: int
    tail_bytes: int
    cold: bool
    ready_s: float
    acked_s: float
    readable_s: float
    messages: int
    plain_read_s: float
    steps: dict[str, float] = field(default_factory=dict)
    recovery: dict[str, Any] = field(default_factory=dict)


def measure_restart(
    folder: Path | None,
    *,
    log_bytes: int,
    topics: int,
    queues: int,
    tail_bytes: int,
    body_bytes: int = 1024,
    cold: bool = False,
    repeat: int = 1,
    settings: tuple[str, ...] = (),
    begin: Callable[[str, int], Progress] = lambda _name, _total: no_progress,
) -> list[Restart]:
    """``repeat`` restarts of a store of about ``log_bytes`` with ``topics`` x ``queues`` queues, each after one with
    hardly any log. Both stores are created in a new folder under ``folder`` (default: the system's for temporary files)
    and removed.

    Raises CommitMQError when a node does not start again, or when an acknowledged message is missing.
    """
    found = []
    bodies = make_bodies(body_bytes, _BATCH)
    with (
        tempfile.TemporaryDirectory(prefix="commitmq-restart-", dir=folder) as place,
        _Store(Path(place) / "base", settings) as base,
        _Store(Path(place) / "full", settings) as full,
    ):
        base.fill(bodies[:1], 1, 1, 0, no_progress)
        full.fill(bodies, topics, queues, log_bytes - tail_bytes, begin("writing the log", log_bytes - tail_bytes))
        for turn in range(repeat):
            found.append(base.restart("base", bodies[:1], 0, cold, no_progress))
            found.append(full.restart("full", bodies, tail_bytes, cold, begin(f"restart {turn + 1}", tail_bytes)))
    return found


class _Store:
    """One store with its node; acknowledged messages are counted by queue."""

    def __init__(self, folder: Path, settings: tuple[str, ...]) -> None:
        self._folder = folder
        self._node = NodeProcess(folder / "store", *_SETTINGS, *settings)
        self._sent: dict[tuple[str, int], int] = {}
        self._turns: list[tuple[str, int]] = []
        self._next = 0

    def __enter__(self) -> _Store:
        self._folder.mkdir(parents=True)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._node.end()

    def fill(self, bodies: list[bytes], topics: int, queues: int, log_bytes: int, progress: Progress) -> None:
        """Start the node, create the topics, send each queue a batch and write ``log_bytes``."""
        self._start()
        names = [f"restart-{number}" for number in range(topics)]
        with Admin(self._node.address, timeout_s=60.0) as admin:
            for name in names:
                admin.topic_create(name, queues)
        self._turns = [(name, queue) for queue in range(queues) for name in names]
        share = bodies[: max(1, len(bodies) // 100)]
        with Producer(self._node.address, timeout_s=60.0) as producer:
            for _ in self._turns:
                self._send(producer, share)
        self._send_bytes(bodies, log_bytes, progress)

    def restart(self, name: str, bodies: list[bytes], tail_bytes: int, cold: bool, progress: Progress) -> Restart:
        """Write the tail that is not flushed, kill the node, start it, and wait until all messages are readable again."""
        halted = self._node.pids()["flush"]
        os.kill(halted, signal.SIGSTOP)
        last = self._send_bytes(bodies, tail_bytes, progress)
        with Admin(self._node.address) as admin:
            written = admin.status()["positions"]["written"]
        self._node.kill_all()
        layout = StoreLayout(self._node.store)
        if cold:
            self._drop_cache()
        began = time.perf_counter()
        self._start()
        ready = time.perf_counter()
        topic, queue = self._turns[0]
        with Producer(self._node.address, timeout_s=60.0) as producer:
            self._count(producer.send(topic, bodies[0], queue=queue))
        acked = time.perf_counter()
        with Admin(self._node.address, timeout_s=60.0) as admin:
            if last is not None:
                while admin.offsets(last.topic)[last.queue][2] <= last.queue_offset:
                    if time.perf_counter() - ready > _READABLE_WITHIN_S:
                        raise CommitMQError(f"not readable after {_READABLE_WITHIN_S:.0f} s: {last}")
                    time.sleep(_POLL_S)
            readable = time.perf_counter()
            status = admin.status()
            self._check(admin)
        rows = {row["role"]: row for row in status["processes"]}
        return Restart(
            name=name,
            log_bytes=written,
            queues=len(self._turns),
            tail_bytes=tail_bytes,
            cold=cold,
            ready_s=round(ready - began, 3),
            acked_s=round(acked - began, 3),
            readable_s=round(readable - began, 3),
            messages=sum(self._sent.values()),
            plain_read_s=round(_time_to_read(layout, written - tail_bytes, written, cold=cold), 3),
            steps=_steps(rows),
            recovery=rows["recovery"]["info"].get("recovered") or {},
        )

    def _start(self) -> None:
        ended = self._node.start()
        if ended.returncode:
            raise CommitMQError(f"the node does not start: {ended.stderr.strip()}")

    def _send_bytes(self, bodies: list[bytes], wanted: int, progress: Progress) -> SendResult | None:
        last = None
        with Producer(self._node.address, ack="memory", timeout_s=60.0) as producer:
            sent = 0
            while sent < wanted:
                last = self._send(producer, bodies)
                done = len(bodies) * len(bodies[0])
                sent += done
                progress(done)
        return last

    def _send(self, producer: Producer, bodies: list[bytes]) -> SendResult:
        topic, queue = self._turns[self._next % len(self._turns)]
        self._next += 1
        result = producer.send_batch(topic, bodies, queue=queue)
        self._sent[topic, queue] = self._sent.get((topic, queue), 0) + len(bodies)
        return result[len(bodies) - 1]

    def _count(self, result: SendResult) -> None:
        key = (result.topic, result.queue)
        if result.queue_offset != self._sent.get(key, 0):
            raise CommitMQError(
                f"after the restart {key} continues at {result.queue_offset}, not at {self._sent.get(key)}"
            )
        self._sent[key] = self._sent.get(key, 0) + 1

    def _check(self, admin: Admin) -> None:
        """Every queue must end where the acknowledged sends left it."""
        for name in dict.fromkeys(name for name, _ in self._turns):
            deadline = time.monotonic() + 10.0
            while True:
                ends = {(name, queue): high for queue, _, high, _ in admin.offsets(name)}
                wrong = {key: high for key, high in ends.items() if high != self._sent.get(key, 0)}
                if not wrong:
                    break
                if time.monotonic() > deadline:
                    raise CommitMQError(f"queues end elsewhere than the acknowledged sends: {wrong}")
                time.sleep(_POLL_S)

    def _drop_cache(self) -> None:
        for path in _files(self._node.store):
            fd = os.open(path, os.O_RDONLY)
            try:
                with contextlib.suppress(OSError):
                    os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if path.is_file():
                yield path


def _steps(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds from one process being ready to the next, by the role of the later one, in order of time, up to the writer:
    what starts after it keeps no sender waiting.
    """
    ready = sorted((row["ready_after_ms"], role) for role, row in rows.items() if row.get("ready_after_ms"))
    steps, before = {}, 0
    for at_ms, role in ready:
        steps[role] = round((at_ms - before) / 1000, 3)
        before = at_ms
        if role == "writer":
            break
    return steps


def _time_to_read(layout: StoreLayout, start: int, end: int, *, cold: bool) -> float:
    """Seconds to read [start, end) of the log with plain reads: no recovery can be faster."""
    seconds = 0.0
    for path in sorted(layout.commit_log.iterdir()):
        base, size = int(path.name), path.stat().st_size
        low, high = max(start, base) - base, min(end, base + size) - base
        if low >= high:
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            if cold:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while low < high:
                low += len(os.pread(fd, min(_READ_BYTES, high - low), low)) or high
            seconds += time.perf_counter() - began
        finally:
            os.close(fd)
    return seconds
