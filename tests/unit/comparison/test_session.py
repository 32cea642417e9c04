"""Goal: one failing workload, driver or server is a named gap, and never the end of the run or a process left behind; and
what a server's processes take is counted when they have ended too.

Method: real processes: a server of one idle shell and drivers of a few lines of Python.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import page_cache
from bench.measurement import run_command
from bench.processes import ProcessTree
from bench.results import Results, Row
from bench.session import Session
from bench.system import BenchError, Command, Durability, Server
from bench.workloads import Workload

# Answers by the topic, which is the workload's name.
DRIVER = """
import json, os, sys, time
job = json.loads(sys.argv[1])
if job["topic"] == "hangs": time.sleep(60)
if job["topic"] == "raises": raise SystemExit("no such luck")
if job["topic"] == "babbles": print("half a"); raise SystemExit
if job["topic"] == "kills": os.kill(int(job["address"]), 9)
print("chatter")
print(json.dumps({"rate": job["seconds"], "latency_us": {}, "seen": job}))
"""


class IdleServer(Server):
    """Its address is the number of its only process."""

    ready_within_s = 5.0

    @property
    def address(self) -> str:
        return str(self.pids()[0])

    def commands(self) -> list[Command]:
        return [Command("idle", ["/bin/sh", "-c", "echo started; exec sleep 60"])]

    def is_ready(self) -> bool:
        return "started" in self.log_tail()

    def driver(self) -> list[str]:
        return [sys.executable, "-c", DRIVER]


class EndingServer(IdleServer):
    def commands(self) -> list[Command]:
        return [Command("ends", ["/bin/sh", "-c", "echo no room; exit 3"])]

    def is_ready(self) -> bool:
        return False


class Idle:
    """A system without a purpose."""

    name = "Idle"
    version = "1"
    works = frozenset({"send"})
    server: type[Server] = IdleServer

    def __init__(self) -> None:
        self.started: list[Server] = []

    def missing(self) -> str | None:
        return None

    def install(self) -> None:
        pass

    def settings(self, durability: Durability) -> dict[str, str]:
        return {}

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        self.started.append(self.server(folder))
        return self.started[-1].launch()


class Ending(Idle):
    server = EndingServer


def run_session(system: Idle, tmp_path: Path, *workloads: Workload) -> tuple[Results, list[str]]:
    results = Results.new(tmp_path / "results")
    said: list[str] = []
    Session(
        results,
        system,
        "memory",
        workloads,
        size="tiny",
        round_number=1,
        part="main",
        folder=tmp_path / "server",
        tell=said.append,
    ).run()
    return results, said


def row(name: str) -> Row:
    return Row(name, "memory", "Idle")


def test_every_kind_of_failure_is_a_gap_and_the_next_workload_is_measured(tmp_path: Path) -> None:
    names = ["raises", "babbles", "hangs", "kills", "works"]
    system = Idle()
    limited = [Workload(name, name, "send", limit_s=2.0) for name in names]
    results, said = run_session(system, tmp_path, *limited, Workload("other", "", "query"))
    errors = {one.workload: texts[0] for one, texts in results.errors().items()}
    assert set(errors) == {"raises", "babbles", "hangs"}
    assert "no such luck" in errors["raises"]
    assert "half a" in errors["babbles"]
    assert "longer than 2 s" in errors["hangs"]
    # The one that killed the server gave a result; the next one got a new server.
    assert results.rows()[row("works")] == {1: {"rate": 0.2}}
    assert row("other") not in results.rows()  # this system has no such work
    assert results.is_done({"round": 1, "part": "main", "durability": "memory", "system": "Idle"})
    assert not (tmp_path / "server").exists()
    assert system.started[0].pids() == []
    assert any("hangs: FAILED" in line for line in said)


def test_an_interruption_while_a_process_is_being_started_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        """Ctrl-C when the process is there and its starter has not heard of it."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            began.append(self)
            raise KeyboardInterrupt

    other = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_session(Idle(), tmp_path, Workload("works", "", "send"))
        assert len(began) == 1
        assert began[0].wait(5) == -signal.SIGKILL
        assert other.poll() is None  # it was there before
    finally:
        other.kill()
        other.wait()
    assert not (tmp_path / "server").exists()


def test_a_server_that_does_not_start_is_a_gap_of_all_its_workloads_with_the_end_of_its_log(tmp_path: Path) -> None:
    results, _ = run_session(Ending(), tmp_path, Workload("a", "", "send"), Workload("b", "", "send"))
    errors = results.errors()
    assert set(errors) == {row("a"), row("b")}
    assert "code 3" in errors[row("a")][0]
    assert "no room" in errors[row("a")][0]


def test_a_job_has_the_sizes_of_its_run_and_a_reading_one_what_the_other_stored(tmp_path: Path) -> None:
    reading = Workload("b", "", "send", reads="a", job={"queues": 9})
    lost = Workload("c", "", "send", reads="nobody")
    results, _ = run_session(
        Idle(), tmp_path, Workload("a", "", "send", job={"messages": 5, "queues": 7}), reading, lost
    )
    jobs: list[dict[str, Any]] = [one["result"]["seen"] for one in results.measurements if "result" in one]
    assert [(job["topic"], job["messages"], job["queues"]) for job in jobs] == [("a", 5, 7), ("a", 5, 7)]
    assert jobs[0]["warmup_s"] == 0.05
    assert jobs[0]["ack"] == "memory"
    assert results.errors() == {row("c"): ["nobody stored nothing to read"]}


def test_a_driver_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"sleep 60 & echo $! > {pid_file}; wait"
    with pytest.raises(BenchError, match="longer"):
        run_command(["/bin/sh", "-c", code], limit_s=1.0)
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processor_time_of_children_that_ended_still_counts() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}]); print('done', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        tree = ProcessTree(process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert tree.cpu_seconds() >= 0.29
        tree.kill()
        assert process.wait(10) == -9
    assert tree.wait(1.0)


def test_descendants_whose_parent_ended_are_still_killed() -> None:
    # The shell starts another one that starts a sleep, and both shells are gone when the tree is killed.
    code = "/bin/sh -c '(sleep 60; echo never) & echo $!; read line' ; read line"
    with subprocess.Popen(["/bin/sh", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        tree = ProcessTree(process.pid)
        assert orphan in {one.pid for one in tree.members()}
        process.stdin.write(b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + 10
        while psutil.Process(orphan).ppid() in {one.pid for one in tree.members()} - {process.pid}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tree.kill()
        assert tree.wait(5.0)


def test_a_dropped_file_is_not_in_the_page_cache_any_more(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(os.urandom(1 << 20))
    with open(path, "rb") as file:
        assert page_cache.resident_bytes(file.fileno(), 1 << 20) == 1 << 20
        share = page_cache.drop([path])
        if share == 1.0:
            pytest.skip("this file system keeps its files in memory")
        assert share < 0.1
        file.read()
        assert page_cache.resident_bytes(file.fileno(), 1 << 20) == 1 << 20
