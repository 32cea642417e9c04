"""Goal: the comparison with other systems runs as a command with the real node: every measurement gives its figures, an
interrupted run goes on, and no process is left behind.

Method: CommitMQ alone, in the smallest sizes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.results import Results
from bench.session import takes
from bench.systems.commitmq import CommitMQ
from bench.workloads import MEMORY, RESTART, workloads
from nodes import environment

COMMAND = [sys.executable, str(Path(__file__).resolve().parents[2] / "scripts" / "bench")]
OPTIONS = ["--tiny", "--rounds", "1", "--systems", "commitmq", "--no-plots"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments, "--dir", str(folder)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_below(folder: Path) -> list[str]:
    """Command lines of all processes that name ``folder``."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        line = " ".join(one.info["cmdline"] or [])
        if str(folder) in line and one.pid != os.getpid():
            found.append(line)
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_interrupted_comparison_goes_on_and_has_every_figure(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    stores.mkdir()
    out = tmp_path / "out"
    with start(stores, *OPTIONS, "--out", str(out)) as process:
        deadline = time.monotonic() + 300
        while not document(out).get("sessions"):  # the first is over; the next one has begun
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "--resume" in said
    assert not processes_below(stores)
    kept = measurements(out, "memory")
    assert kept

    with start(stores, "--resume", str(out), "--no-plots") as process:
        output, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert output.splitlines() == [str(out / "README.md")]
    assert not processes_below(stores)
    assert not list(stores.iterdir())

    results = Results.load(out)
    assert results.errors() == {}
    assert results.measurements[: len(kept)] == kept  # the complete session was not measured again
    expected = {
        (one.name, durability)
        for one in workloads("tiny")
        for durability in one.durabilities
        if takes(CommitMQ(), one, durability)
    }
    expected |= {(RESTART.name, durability) for durability in MEMORY}
    rows = results.rows()
    assert {(row.workload, row.durability) for row in rows} == expected
    for row, rounds in rows.items():
        assert set(rounds) == {1}, row
        # What so few messages take of the processor may drown in what the start of a client takes.
        assert all(rounds.values()) or row.workload == "cpu", row
    report = (out / "README.md").read_text()
    assert "| CommitMQ (columns, tcp) |" in report
    assert "| waiting timers: memory for them | 1,000 |" in report
    assert "unchanged" not in report


@pytest.mark.long
@pytest.mark.timeout(300)
def test_another_checkout_is_compared_with_its_own_node(tmp_path: Path) -> None:
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".venv" / "bin" / "python").exists():
        pytest.skip("this checkout has no .venv")
    out = tmp_path / "out"
    with start(tmp_path, *OPTIONS, "--only", "send-1", "--before", str(checkout), "--out", str(out)) as process:
        _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    results = Results.load(out)
    assert results.errors() == {}
    assert {row.system for row in results.rows()} == {"CommitMQ", "CommitMQ before"}
    assert "| unchanged: single sends, ack flushed | CommitMQ before |" in (out / "README.md").read_text()


def document(out: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((out / "results.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def measurements(out: Path, durability: str) -> list[dict[str, Any]]:
    return [one for one in document(out).get("measurements", ()) if one["durability"] == durability]
