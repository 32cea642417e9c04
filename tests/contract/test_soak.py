"""Goal: a node that works for an hour is as it was after ten minutes: in memory, descriptors, processes and answer times.

Method: a real node with metrics and a limit for its store, so that files expire all the time; ten groups read what one
producer sends at half of the rate that they all can follow; /metrics is scraped each second. Memory, descriptors and ages of
messages are looked at all the while; the first sixth of the time does not count. The short version shows that the test itself
works: in its time caches still fill.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq.client.admin import Admin
from nodes import Node, environment, eventually, start_node

SCRIPT = Path(__file__).parents[1] / "support" / "soak_clients.py"
TOPIC, GROUPS = "soak", 10
SETTINGS = (
    "metrics.enable=true",
    "metrics.port=0",
    "commit_log.segment_bytes=8388608",
    "consume_queue.file_bytes=600000",
    "index.hash_slots=20000",
    "index.max_items=80000",
    "retention.store_bytes=268435456",
    "retention.check_interval_ms=1000",
)
TOP_S, LOOK_S = 10.0, 5.0


class Client:
    """A running program of soak_clients; ``last`` is its last line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.last: dict[str, Any] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # it was closed
            for line in self._process.stdout:
                self.last = json.loads(line)
                self.lines.put(self.last)


@contextlib.contextmanager
def running(*words: str) -> Iterator[Client]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *words], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        yield Client(process)
        assert process.poll() is None, f"{words[0]} ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def scraped(url: str) -> Iterator[list[str]]:
    """``/metrics`` is read each second; the faults."""
    faults: list[str] = []
    end = threading.Event()

    def scrape() -> None:
        while not end.wait(1.0):
            try:
                with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                    answer.read()
            except OSError as error:
                faults.append(repr(error))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield faults
    finally:
        end.set()
        thread.join()


def private_bytes(pid: int) -> float:
    """Memory of a process that is its own."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * 4_096


def descriptors(pid: int) -> float:
    return len(os.listdir(f"/proc/{pid}/fd"))


def growth(values: list[float]) -> float:
    """By how much the line through ``values`` rises from the first to the last."""
    times = list(range(len(values)))
    return statistics.linear_regression(times, values).slope * (len(values) - 1)


def watch(node: Node, readers: Client, seconds: float) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """``memory`` and ``descriptors`` of each process, and the ages of messages, all of the last five sixths of the time."""
    kinds: dict[str, Callable[[int], float]] = {"memory": private_bytes, "descriptors": descriptors}
    pids = node.pids()
    found: dict[str, dict[str, list[float]]] = {kind: {role: [] for role in pids} for kind in kinds}
    ages: list[float] = []
    while not readers.lines.empty():
        readers.lines.get()
    end, counts_from = time.monotonic() + seconds, time.monotonic() + seconds / 6
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        while not readers.lines.empty():
            line = readers.lines.get()
            if time.monotonic() >= counts_from and line["p99_ms"] is not None:
                ages.append(line["p99_ms"])
        if time.monotonic() >= counts_from:
            for kind, look in kinds.items():
                for role, pid in pids.items():
                    found[kind][role].append(look(pid))
    return found, ages


@pytest.mark.parametrize(
    ("seconds", "growth_bytes", "more_descriptors"),
    [
        pytest.param(30, 30_000_000, 64, marks=[pytest.mark.long, pytest.mark.timeout(300)]),
        pytest.param(3_600, 6_000_000, 4, marks=[pytest.mark.long, pytest.mark.timeout(4_500)]),
    ],
)
def test_a_node_stays_as_it_is(tmp_path: Path, seconds: int, growth_bytes: int, more_descriptors: int) -> None:
    """``growth_bytes``: pages that a collection frees at other times."""
    with start_node(tmp_path, *SETTINGS) as node, running("groups", node.address, TOPIC, str(GROUPS)) as readers:
        with Admin(node.address) as admin:
            admin.topic_create(TOPIC, 4)
        [url] = eventually(lambda: node.row("worker-metrics").get("endpoints"), "metrics are served")
        with running("producer", node.address, TOPIC, "0"):
            eventually(lambda: min(readers.last.get("counts", [0])) > 0, "all groups read", 60)
            before, began = readers.last["counts"], time.monotonic()
            time.sleep(TOP_S)
            after, took_s = readers.last["counts"], time.monotonic() - began
        top = min(b - a for a, b in zip(before, after, strict=True)) / took_s
        eventually(lambda: quiet(readers), "the groups have caught up", 120)
        pids = node.pids()
        with scraped(url) as faults, running("producer", node.address, TOPIC, str(top / 2)) as sender:
            found, ages = watch(node, readers, seconds)
            sent = sender.last["sent"]
        assert node.pids() == pids, "a process was started anew"
        assert not faults
        with Admin(node.address) as admin:
            assert admin.status()["positions"]["min_offset"] > 0, "nothing expired"
        sys.stdout.write(f"{sent / seconds:.0f} messages a second, p99 {statistics.median(ages):.1f} ms\n")
        for kind, roles in found.items():
            for role, values in sorted(roles.items()):
                sys.stdout.write(f"{kind} {role}: {values[0]:.0f} to {values[-1]:.0f}, line {growth(values):+.0f}\n")
    check(found, growth_bytes, more_descriptors)
    third = len(ages) // 3
    first, last = statistics.median(ages[:third]), statistics.median(ages[-third:])
    assert last <= max(1.5 * first, first + (5 if seconds > 600 else 500)), (
        f"messages take {last} ms, before {first} ms"
    )


def quiet(readers: Client) -> bool:
    """No group has read anything for a while."""
    before = readers.last["counts"]
    time.sleep(2 * LOOK_S + 1)
    return bool(readers.last["counts"] == before)


def check(found: dict[str, dict[str, list[float]]], growth_bytes: int, more_descriptors: int) -> None:
    grown = {
        role: growth(values)
        for role, values in found["memory"].items()
        if growth(values) > max(growth_bytes, 0.1 * statistics.mean(values))
    }
    assert not grown, "memory grows"
    opened = {
        role: growth(values) for role, values in found["descriptors"].items() if growth(values) > more_descriptors
    }
    assert not opened, "descriptors are left open"
