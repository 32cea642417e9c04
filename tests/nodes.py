"""Real nodes for tests: the command in real processes on a temporary store, and nothing left behind.

:func:`start_node` is the short way: a node that is ready, on free ports, and whose log becomes part of the failure of
the test that used it. :class:`Node` is what it gives, and what tests of starting and stopping use by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commitmq.cli.exit_codes import CliExit

LIFECYCLE = Path(__file__).parent / "contract" / "lifecycle"
SEGMENT_BYTES = 1 << 20
WORKERS = (
    "coordinator",
    "dispatcher-consume_queue",
    "dispatcher-index",
    "reput",
    "flush",
    "allocate",
    "reader-0",
    "writer",
)
DEADLINE_S = 30.0
_LOG_LINES = 60


def environment(**extra: str) -> dict[str, str]:
    """Ours, with what this process can import importable in the node's processes too."""
    paths = [str(LIFECYCLE), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


def commitmq(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the command with ``extra`` environment variables; output and exit code are in the result."""
    return subprocess.run(
        [sys.executable, "-m", "commitmq.cli.main", *arguments],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def alive(pid: int) -> bool:
    """True for a process that exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :][:1] != b"Z"


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """The first true value of ``condition``; fails naming ``what`` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


class Node:
    """A node on one store, driven by the command; remembers every pid it saw so that none is left behind."""

    def __init__(self, store: Path, *settings: str) -> None:
        """``settings`` are ``section.key=value``, laid over free ports and small segments."""
        self.store = store
        self.foreground_log = store.parent / "foreground.log"
        self.seen: set[int] = set()
        self.keeper: subprocess.Popen[bytes] | None = None
        self.settings = ["network.port=0", f"commit_log.segment_bytes={SEGMENT_BYTES}", *settings]

    def arguments(self, *more: str) -> list[str]:
        pairs = [part for setting in (*self.settings, *more) for part in ("--set", setting)]
        return ["start", "--store", str(self.store), *pairs]

    def start(self, *more: str, **extra: str) -> subprocess.CompletedProcess[str]:
        ended = commitmq(*self.arguments(*more), "--background", **extra)
        if ended.returncode == 0:
            self.pids()
        return ended

    def start_in_foreground(self) -> subprocess.Popen[bytes]:
        with open(self.foreground_log, "wb") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "commitmq.cli.main", *self.arguments()],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self.keeper = keeper
        self.seen.add(keeper.pid)
        eventually(lambda: self.report()["node"].get("state") == "ready", "the node is ready")
        self.pids()
        return keeper

    def stop(self) -> subprocess.CompletedProcess[str]:
        return commitmq("stop", "--store", str(self.store))

    def report(self) -> dict[str, Any]:
        """What ``status --json`` says; without a node an empty one."""
        ended = commitmq("status", "--store", str(self.store), "--json")
        found: dict[str, Any] = json.loads(ended.stdout) if ended.returncode == 0 else {"node": {}, "processes": []}
        self.seen |= {row["pid"] for row in found["processes"] if row["pid"]}
        return found

    def pids(self) -> dict[str, int]:
        """The pid of each process that lives, by role."""
        return {row["role"]: row["pid"] for row in self.report()["processes"] if row["pid"]}

    def row(self, role: str) -> dict[str, Any]:
        return next((row for row in self.report()["processes"] if row["role"] == role), {})

    def healed(self, role: str, old_pid: int) -> bool:
        row = self.row(role)
        return row.get("state") == "ready" and row["pid"] not in (None, old_pid)

    def is_ready(self) -> bool:
        """True when the node and every process of it are."""
        report = self.report()
        states = {row["role"]: row["state"] for row in report["processes"]}
        return report["node"].get("state") == "ready" and all(
            states.get(role) == "ready" for role in (*WORKERS, "forkserver", "supervisor")
        )

    @property
    def address(self) -> str:
        """The admin address (tcp)."""
        return str(self._node_file()["admin"][0])

    def endpoints(self) -> dict[str, str]:
        """The tcp address of every socket: admin, writer, coordinator, reader-0."""
        return {role: f"tcp://127.0.0.1:{port}" for role, port in self._node_file()["ports"].items()}

    @property
    def keeper_pid(self) -> int:
        """The process that starts the supervisor again when it was killed."""
        return int(self._node_file()["keeper_pid"])

    def _node_file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.store / "run" / "node.json").read_bytes())
        return content

    def log(self) -> str:
        return (self.store / "commitmq" / "node.log").read_text()

    def log_tail(self) -> str:
        """The end of the log, for failures."""
        try:
            return "\n".join(self.log().splitlines()[-_LOG_LINES:])
        except OSError:
            return "(no node.log)"

    def kill_all(self) -> None:
        """SIGKILL every process at one moment: all are halted first, so that none sees another one go."""
        pids = list(self.pids().values())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        eventually(lambda: not [pid for pid in pids if alive(pid)], "every process is gone")

    def end(self) -> None:
        """Whatever a failed test left: by pid, the keeper first (it would start others again)."""
        if (self.store / "run" / "node.json").exists():
            self.stop()
        for pid in sorted(self.seen):
            if alive(pid) and self.is_ours(pid):
                os.kill(pid, signal.SIGKILL)
        if self.keeper is not None:
            self.keeper.wait(DEADLINE_S)

    def is_ours(self, pid: int) -> bool:
        """Whether ``pid`` still is one of this node's, and no other program that got its number."""
        try:
            return b"commitmq" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


@contextlib.contextmanager
def start_node(folder: Path, *settings: str, **extra: str) -> Iterator[Node]:
    """A node that is ready, on the store ``folder/store``. At the end it is stopped, which must succeed.

    ``extra`` are environment variables of the node (failpoints). A test that fails gets the end of ``node.log`` added
    to its message. A test may stop or kill the node itself.
    """
    node = Node(folder / "store", *settings)
    try:
        ended = node.start(**extra)
        assert ended.returncode == 0, ended.stderr
        yield node
        if (node.store / "run" / "node.json").exists():
            ended = node.stop()
            assert ended.returncode in (CliExit.OK, CliExit.NODE_UNAVAILABLE), ended.stderr
    except BaseException as error:
        error.add_note(f"--- the end of node.log ---\n{node.log_tail()}")
        raise
    finally:
        node.end()


def free_ports(count: int = 4) -> int:
    """The first of ``count`` neighbouring ports that are free, for a node that must find its ports again.

    Below the range that the system itself hands out: there, another program (even a client that tries to connect to the
    absent node) may sit on a port by the time it is wanted again.
    """
    while True:
        first = random.randrange(12_000, 32_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
