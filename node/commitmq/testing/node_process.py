"""Runs the command in real processes on one store, and cleans up completely: the base of every test with a node.

:class:`NodeProcess` starts, watches and kills; it judges nothing and returns the command's result. Plugin authors use
:class:`commitmq.testing.CommitMQNode`, which does judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from commitmq.client.admin import Admin
from commitmq.errors import NodeUnavailableError
from commitmq.store.layout import StoreLayout
from commitmq.store.shared_memory import recorded_folder
from commitmq.supervision.node_files import remove_socket_folder

SEGMENT_BYTES = 1 << 20
# Index files of the default size take 24 MB of disk each, from the first message on.
SMALL_INDEX = ("index.hash_slots=1000", "index.max_items=20000")
DEADLINE_S = 30.0
_COMMAND_TIMEOUT_S = 60.0
_LOG_LINES = 60


def environment(*paths: str | Path, **extra: str) -> dict[str, str]:
    """This process's environment, with ``paths`` and all that it can import importable in the node too."""
    importable = [*map(str, paths), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(importable), **extra}


def run_commitmq(
    *arguments: str,
    env: dict[str, str],
    python: str = sys.executable,
    timeout_s: float = _COMMAND_TIMEOUT_S,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``commitmq`` of ``python`` with ``arguments`` and ``stdin``; output and exit code are in the result."""
    return subprocess.run(
        [python, "-m", "commitmq.cli.main", *arguments],
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def alive(pid: int) -> bool:
    """True for a process that exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """The first true value of ``condition``; raises AssertionError naming ``what`` when no value is true in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


class NodeProcess:
    """A node on one store, driven by the command; it remembers every pid so that no process is left behind."""

    python: str = sys.executable
    """The Python interpreter in whose environment the node runs."""
    command_timeout_s: float = _COMMAND_TIMEOUT_S
    """The time limit of a command."""

    def __init__(self, store: Path, *settings: str) -> None:
        """``settings`` are ``section.key=value``, laid over free ports, small segments and small index files."""
        self.store = store
        self.foreground_log = store.parent / "foreground.log"
        self.seen: set[int] = set()
        self.keeper: subprocess.Popen[bytes] | None = None
        self.settings = ["network.port=0", f"commit_log.segment_bytes={SEGMENT_BYTES}", *SMALL_INDEX, *settings]

    def environment(self, **extra: str) -> dict[str, str]:
        return environment(**extra)

    def run(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return run_commitmq(
            *arguments, env=self.environment(**extra), python=self.python, timeout_s=self.command_timeout_s
        )

    def arguments(self, *more: str) -> list[str]:
        """The arguments of ``commitmq`` that start this node; ``more`` are further settings."""
        pairs = [part for setting in (*self.settings, *more) for part in ("--set", setting)]
        return ["start", "--store", str(self.store), *pairs]

    def start(self, *more: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Start in the background and wait until ready; ``extra`` are environment variables."""
        ended = self.run(*self.arguments(*more), "--background", **extra)
        if ended.returncode == 0:
            self.pids()
        return ended

    def start_in_foreground(self) -> subprocess.Popen[bytes]:
        """Start as a child of this process and wait until ready."""
        with open(self.foreground_log, "wb") as log:
            keeper = subprocess.Popen(
                [self.python, "-m", "commitmq.cli.main", *self.arguments()],
                env=self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.keeper = keeper
        self.seen.add(keeper.pid)
        eventually(lambda: self.report()["node"].get("state") == "ready", "the node is ready")
        self.pids()
        return keeper

    def stop(self) -> subprocess.CompletedProcess[str]:
        """Stop in order."""
        return self.run("stop", "--store", str(self.store))

    @property
    def is_started(self) -> bool:
        """True while there is a node, or one that died: only an orderly stop removes its node file."""
        return (self.store / "run" / "node.json").exists()

    def report(self) -> dict[str, Any]:
        """What ``status --json`` reports; an empty one without a node. It is asked of the node itself: a run of the command
        costs half a second of processor time, and most tests ask several times.
        """
        found: dict[str, Any] = {"node": {}, "processes": []}
        with contextlib.suppress(OSError, NodeUnavailableError):
            if alive(self.supervisor_pid):
                with Admin(str(self._node_file()["admin"][1])) as admin:
                    found = admin.status()
        self.note(found)
        return found

    def note(self, report: dict[str, Any]) -> None:
        """Remember the pids in ``report``."""
        self.seen |= {row["pid"] for row in report["processes"] if row["pid"]}

    def pids(self) -> dict[str, int]:
        return {row["role"]: row["pid"] for row in self.report()["processes"] if row["pid"]}

    def row(self, role: str) -> dict[str, Any]:
        """The ``status`` row of one process; empty when there is none of that role."""
        return next((row for row in self.report()["processes"] if row["role"] == role), {})

    def healed(self, role: str, old_pid: int) -> bool:
        """True when another process than ``old_pid`` serves as ``role``."""
        row = self.row(role)
        return row.get("state") == "ready" and row["pid"] not in (None, old_pid)

    @property
    def address(self) -> str:
        """The admin address (tcp)."""
        return str(self._node_file()["admin"][0])

    def endpoints(self) -> dict[str, str]:
        """The tcp address of every socket: admin, writer, coordinator, reader-0."""
        return {role: f"tcp://127.0.0.1:{port}" for role, port in self._node_file()["ports"].items()}

    @property
    def keeper_pid(self) -> int:
        """The process that restarts a killed supervisor."""
        return int(self._node_file()["keeper_pid"])

    @property
    def supervisor_pid(self) -> int:
        """The parent of all other processes."""
        return int(self._node_file()["pid"])

    def _node_file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.store / "run" / "node.json").read_bytes())
        return content

    def log(self) -> str:
        """All of ``node.log``."""
        return (self.store / "commitmq" / "node.log").read_text()

    def log_tail(self) -> str:
        """The end of the log, for failures."""
        try:
            return "\n".join(self.log().splitlines()[-_LOG_LINES:])
        except OSError:
            return "(no node.log)"

    def kill_all(self, *, known: bool = False) -> None:
        """SIGKILL every process at one moment: all are halted first, so that none sees another one die. ``known`` takes
        the pids seen so far, for when the node cannot answer now.
        """
        pids = [pid for pid in self.seen if alive(pid) and self.is_ours(pid)] if known else list(self.pids().values())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        # Children first: the kernel wakes halted processes (SIGCONT) when the death of a parent orphans their process
        # group.
        for pid in sorted(pids, key=_generation, reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not [pid for pid in pids if alive(pid)], "every process is gone")

    def end(self) -> None:
        """Clean up after a failed test: by pid, the keeper first (it would restart others)."""
        if self.is_started:
            self.stop()
        for pid in sorted(self.seen):
            if alive(pid) and self.is_ours(pid):
                os.kill(pid, signal.SIGKILL)
        if self.keeper is not None:
            self.keeper.wait(DEADLINE_S)
        if self.store.exists():
            # A killed node's files in shared memory wait for its next start, which a test's store does not have.
            layout = StoreLayout(self.store)
            folder = recorded_folder(layout)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            remove_socket_folder(layout)

    def is_ours(self, pid: int) -> bool:
        """Whether ``pid`` still is a process of this node, and not another program with the same number."""
        try:
            return any("commitmq" in word for word in psutil.Process(pid).cmdline())
        except psutil.Error:
            return False


def _generation(pid: int) -> int:
    """How many ancestors a process has; 0 when it is gone."""
    with contextlib.suppress(psutil.Error):
        return len(psutil.Process(pid).parents())
    return 0
