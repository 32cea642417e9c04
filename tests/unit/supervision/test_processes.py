"""Goal: locks, pids and signals are handled so that no innocent process is hit. Method: real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commitmq.supervision import processes

_HOLDER = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def holder(path: Path, seconds: float = 60) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_holder_of_a_lock_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert processes.lock_holder(path) is None
    with holder(path) as process:
        assert processes.lock_holder(path) == process.pid
    assert processes.lock_holder(path) is None
    assert path.exists()


def test_only_the_holder_is_killed(tmp_path: Path) -> None:
    held, free = tmp_path / "held.lock", tmp_path / "free.lock"
    free.touch()
    with holder(held) as process, holder(tmp_path / "other.lock") as other:
        assert processes.kill_lock_holder(free) is None
        assert processes.kill_lock_holder(held) == process.pid
        assert process.wait(10) == -9
        assert other.poll() is None


def test_a_holder_that_leaves_in_time_is_not_killed(tmp_path: Path) -> None:
    with holder(tmp_path / "a.lock", seconds=0.5) as process:
        assert processes.free_locks([tmp_path / "a.lock", tmp_path / "none.lock"], patience_s=20) == []
        assert process.wait(10) == 0


def test_a_holder_that_stays_is_killed_after_the_patience(tmp_path: Path) -> None:
    with holder(tmp_path / "a.lock") as process:
        started = time.monotonic()
        assert processes.free_locks([tmp_path / "a.lock"], patience_s=0.3) == [("a.lock", process.pid)]
        assert time.monotonic() - started >= 0.3


def test_a_process_is_recognised_by_its_start_time_too() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        ticks = processes.start_time_ticks(process.pid)
        assert ticks is not None
        pidfd = processes.open_process(process.pid, ticks)
        assert pidfd is not None
        assert not processes.wait_for_exit(pidfd, 0)
        assert processes.open_process(process.pid, ticks + 1) is None, "the same pid, but another process"
        process.kill()
        assert processes.wait_for_exit(pidfd, 10)
        os.close(pidfd)
        assert processes.open_process(process.pid, ticks) is None, "ended, though nobody has waited for it"
        process.wait()
    assert processes.open_process(process.pid, ticks) is None
    assert processes.open_process(0, None) is None


def test_the_process_name_is_set_and_cut(tmp_path: Path) -> None:
    code = (
        "from commitmq.supervision.processes import set_process_name; set_process_name('cmq-dispatcher-consume_queue');"
        "print(open('/proc/self/comm').read())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "cmq-dispatcher-"


@pytest.mark.parametrize("count", [1, 3])
def test_a_subreaper_becomes_the_parent_of_orphans(count: int) -> None:
    # In a process of its own: being a subreaper cannot be undone by the test run.
    code = f"""
import os, time
from commitmq.supervision.processes import become_subreaper
become_subreaper()
for n in range({count}):
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            os._exit(40 + n)
        os._exit(0)
    os.waitpid(between, 0)
print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range({count})))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str([40 + n for n in range(count)])
