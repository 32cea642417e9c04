"""Goal: what ``scripts/bench/node`` reports was really measured, adds up, and leaves neither a process nor a file.

Method: tiny runs, through the command and through its functions; figures are compared with each other and with what the
node says, never with how fast this machine should be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.device import Device
from bench.echo import EchoPeer
from bench.latency import measure_latency
from commitmq.bench.target import BenchTopic
from nodes import Node, alive, environment, eventually, start_node

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "node.py"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("bench")) as running:
        yield running


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_the_echo_answers_what_it_got_and_goes(transport: str) -> None:
    with EchoPeer(transport) as peer:
        pid = peer.pid
        for body in (b"", b"x" * 1024):
            peer.socket.send(body)
            assert peer.socket.recv() == body
        assert alive(pid)
    eventually(lambda: not alive(pid), "the echo process is gone")


def test_a_device_stores_round_and_round(tmp_path: Path) -> None:
    body = b"x" * 3_000_000
    with Device(tmp_path) as device:
        for _ in range(3):
            device.store(body)
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_latency_reports_every_send_beside_the_echo(node: Node) -> None:
    with BenchTopic(node.address) as topic:
        result = measure_latency(topic, body_bytes=300, count=250, limit_s=30)
        # Both ack levels, in two rounds, each with its uncounted sends first.
        assert topic.visible() >= 2 * 250
    assert result.transport == "ipc"
    assert (result.rounds, result.echo.count, result.cut_short) == (2, 250, False)
    assert [one.ack for one in result.sends] == ["memory", "flushed"]
    assert result.device is not None
    assert result.device.count == 250
    assert result.device.p50_us > 0
    for one in result.sends:
        figures = one.send
        assert figures.count == 250
        assert 0 < figures.p50_us <= figures.p90_us <= figures.p99_us <= figures.p999_us <= figures.max_us
        assert one.ratio_p50 == pytest.approx(figures.p50_us / result.echo.p50_us, rel=0.01)
        assert len(one.round_ratios) == result.rounds


def test_latency_as_a_command(node: Node) -> None:
    done = run("latency", "--node", node.address, "--count", "20", "--body", "100")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bench"] == "latency"
    assert report["machine"]["cores"] >= 1
    assert [one["send"]["count"] for one in report["result"]["sends"]] == [20, 20]


def test_the_command_says_what_it_cannot_measure(tmp_path: Path) -> None:
    refused = run("rolls", "--folder", str(tmp_path), "--segment-bytes", "65536")
    assert refused.returncode == 1
    assert "too small" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_restarts_as_a_command(tmp_path: Path) -> None:
    arguments = ("--gib", "0.02", "--topics", "3", "--queues", "2", "--tail-mib", "3", "--repeat", "1", "--cold")
    done = run("restart", *arguments, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    base, full = json.loads(done.stdout)["result"]
    assert (base["name"], full["name"], full["queues"], full["tail_bytes"]) == ("base", "full", 6, 3 << 20)
    assert full["log_bytes"] >= 20 << 20
    assert full["recovery"]["scanned_bytes"] >= 3 << 20
    for one in (base, full):
        assert 0 < one["ready_s"] <= one["acked_s"] <= one["readable_s"]
        assert list(one["steps"])[-1] == "writer"
        assert sum(one["steps"].values()) <= one["ready_s"]
    assert list(tmp_path.iterdir()) == []
