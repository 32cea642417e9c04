"""Goal: the shipped unit runs a node: systemd takes it, its hardening forbids nothing that a node needs, and the node tells
systemd the truth.

Method: systemd-analyze judges the unit. No systemd runs here as the first process, so a socket of the test's own takes its
place, and the unit's filter of system calls and address families is put on a real node by libseccomp, as systemd does it.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from system_call_filter import system_calls

from commitmq import config
from commitmq.supervision.exit_codes import CliExit
from debian_programs import program
from nodes import DEADLINE_S, Node, eventually, free_ports, started

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "commitmq@.service"
LAUNCHER = str(Path(__file__).with_name("system_call_filter.py"))


def analyze() -> str:
    return program("systemd-analyze", "systemd", "libsystemd-shared")


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, delimiters=["="], strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


# ---------------------------------------------------------------- the unit


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    command = shutil.which("true")
    text = UNIT.read_text().replace("/opt/commitmq/bin/commitmq", str(command))
    (tmp_path / "commitmq@.service").write_text(text)
    (tmp_path / "commitmq@main.service").symlink_to("commitmq@.service")
    done = subprocess.run(
        [analyze(), "verify", str(tmp_path / "commitmq@main.service")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_is_hardened() -> None:
    command = [analyze(), "security", "--offline=true", "--threshold=20", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout


def test_a_unit_without_the_hardening_would_be_seen(tmp_path: Path) -> None:
    bare = UNIT.read_text().partition("\n# Hardening.")[0]
    (tmp_path / UNIT.name).write_text(bare)
    command = [analyze(), "security", "--offline=true", "--threshold=20", str(tmp_path / UNIT.name)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_the_unit_knows_the_exit_codes_and_the_time_limits(unit: configparser.SectionProxy) -> None:
    wrong = {CliExit.USAGE, CliExit.STORE_UNUSABLE, CliExit.CONFIG_ERROR, CliExit.INSECURE_LISTENER}
    assert {int(code) for code in unit["RestartPreventExitStatus"].split()} == wrong
    assert int(unit["TimeoutStopSec"]) > config.NodeConfig().supervisor.stop_timeout_s
    assert (unit["Type"], unit["NotifyAccess"]) == ("notify", "all")
    assert int(unit["LimitNOFILE"]) >= 4096


# ---------------------------------------------------------------- a node under it


class Manager:
    """In place of systemd: hears what the node says, from the first word on."""

    def __init__(self, address: str) -> None:
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(65536):
                self.said += data.decode().split("\n")

    def count(self, line: str) -> int:
        return self.said.count(line)


class ServiceNode(Node):
    """A node in the foreground, as the unit starts it."""

    notify = ""
    plugins: Path

    def environment(self, **extra: str) -> dict[str, str]:
        variables = (
            {"NOTIFY_SOCKET": self.notify, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"} if self.notify else {}
        )
        found = super().environment(**variables, **extra, COMMITMQ_PLUGINS="curious=curious")
        return found | {"PYTHONPATH": f"{self.plugins}:{found['PYTHONPATH']}"}


def test_a_node_tells_when_it_is_ready_alive_and_stopping(tmp_path: Path) -> None:
    node = ServiceNode(tmp_path / "store")
    node.notify = str(tmp_path / "notify")
    node.plugins = tmp_path
    seen = tmp_path / "seen"
    (tmp_path / "curious.py").write_text(f"import os\nopen({str(seen)!r}, 'w').write(' '.join(os.environ))\n")
    manager = Manager(node.notify)
    try:
        keeper = node.start_in_foreground()
        pids = node.pids()
        eventually(lambda: manager.count("READY=1") == 1, "it said that it is ready")
        eventually(lambda: manager.count("WATCHDOG=1") >= 4, "it is alive")
        assert any(line.startswith("STATUS=ready at tcp://127.0.0.1:") for line in manager.said)
        names = seen.read_text().split()
        assert "COMMITMQ_PLUGINS" in names
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(names), "a worker does not speak for the node"
        os.kill(pids["supervisor"], signal.SIGKILL)
        eventually(lambda: manager.count("READY=1") == 2, "so did the next supervisor")
        assert manager.count("STOPPING=1") == 0
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(DEADLINE_S) == 0
        eventually(lambda: "STATUS=stopped; everything written is flushed" in manager.said, "the end was told")
        assert manager.count("STOPPING=1") == 1
    finally:
        node.end()


@pytest.fixture
def confined(tmp_path: Path, unit: configparser.SectionProxy) -> list[str]:
    """The words in front of a command that put the unit's filter on it."""
    listing = tmp_path / "allowed"
    listing.write_text(
        "\n".join([*system_calls(analyze(), unit["SystemCallFilter"]), *unit["RestrictAddressFamilies"].split()])
    )
    return [sys.executable, LAUNCHER, str(listing)]


def test_the_filter_forbids(confined: list[str]) -> None:
    code = (
        "import ctypes, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mount(None, None, None, 0, None), os.strerror(ctypes.get_errno()))\n"
        "socket.socket(socket.AF_UNIX).close()\n"
        "try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\n"
        "except PermissionError as error: print(error.strerror)\n"
    )
    done = subprocess.run([*confined, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-1 Operation not permitted", "Operation not permitted"]


@pytest.mark.slow
def test_a_node_needs_nothing_that_the_unit_forbids(confined: list[str], tmp_path: Path) -> None:
    first = free_ports(4)
    servers = (
        "metrics.enable=true",
        "metrics.port=0",
        "plugins.rocketmq.enable=true",
        "plugins.rocketmq.vip_port=false",
    )
    ports = (f"network.store_port={first + 2}", f"plugins.rocketmq.namesrv_port={first}")
    node = Node(tmp_path / "store", *servers, *ports)
    node.python = str(tmp_path / "python")
    Path(node.python).write_text("#!/bin/sh\nexec " + " ".join([*confined, sys.executable]) + ' "$@"\n')
    Path(node.python).chmod(0o755)
    with started(node):
        status = Path(f"/proc/{node.pids()['writer']}/status").read_text()
        assert "Seccomp:\t2" in status, "the filter is on"
        assert "NoNewPrivs:\t1" in status
        at = ("--node", node.address)
        for topic in ("orders", "invoices"):
            assert node.run("topic", "create", topic, *at).returncode == 0
        (tmp_path / "lines").write_text("".join(f"message {number}\n" for number in range(5_000)))
        assert node.run("produce", "orders", "--file", str(tmp_path / "lines"), *at).returncode == 0
        consumed = node.run("consume", "orders", "--group", "kitchen", "--from", "earliest", *at)
        assert (consumed.stderr, len(consumed.stdout.splitlines())) == ("", 5_000)
        assert node.run("topic", "delete", "invoices", "--yes", *at).returncode == 0
        log = node.log()
    assert "not permitted" not in log.lower()
    assert "Errno 1]" not in log
