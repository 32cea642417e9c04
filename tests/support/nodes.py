"""Real nodes for this project's own tests, on top of what :mod:`commitmq.testing` gives to everybody.

:func:`start_node` is the short way: a node that is ready, on free ports, and whose log becomes part of the failure of
the test that used it. :class:`Node` is what it gives, and what tests of starting and stopping use by themselves.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from commitmq import Admin
from commitmq.supervision.exit_codes import CliExit
from commitmq.testing import node_process
from commitmq.testing.node_process import DEADLINE_S, SEGMENT_BYTES, NodeProcess, alive, eventually, run_commitmq

__all__ = [
    "DEADLINE_S",
    "LIFECYCLE",
    "SEGMENT_BYTES",
    "WORKERS",
    "Node",
    "alive",
    "commitmq",
    "environment",
    "eventually",
    "free_port",
    "free_ports",
    "start_node",
    "started",
    "wait_until_dispatched",
]

_given_ports: set[int] = set()
LIFECYCLE = Path(__file__).parents[1] / "contract" / "lifecycle"
WORKERS = (
    "coordinator",
    "dispatcher-consume_queue",
    "dispatcher-index",
    "reput",
    "flush",
    "allocate",
    "dispatcher-memory",
    "reader-0",
    "writer",
    "cleanup",
)
"""The processes that a node has from its start on; a mover comes when it is needed first."""


def environment(**extra: str) -> dict[str, str]:
    """Ours, with what this process can import importable in the node's processes too."""
    return node_process.environment(LIFECYCLE, **extra)


def commitmq(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the command with ``extra`` environment variables; output and exit code are in the result."""
    return run_commitmq(*arguments, env=environment(**extra))


class Node(NodeProcess):
    """A node that can also run the workers of ``contract/lifecycle``."""

    @classmethod
    def bare(cls, store: Path, *settings: str) -> Node:
        """One that is given ``settings`` and nothing else, so that sizes are the store's or the profile's."""
        node = cls(store)
        node.settings = list(settings)
        return node

    def environment(self, **extra: str) -> dict[str, str]:
        return environment(**extra)

    def is_ready(self) -> bool:
        """True when the node and every process of it are."""
        report = self.report()
        states = {row["role"]: row["state"] for row in report["processes"]}
        return report["node"].get("state") == "ready" and all(
            states.get(role) == "ready" for role in (*WORKERS, "forkserver", "supervisor")
        )


@contextlib.contextmanager
def halted(pid: int) -> Iterator[None]:
    """The process stands still meanwhile (SIGSTOP)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def start_node(folder: Path, *settings: str, **extra: str) -> Iterator[Node]:
    """A node that is ready, on the store ``folder/store``. At the end it is stopped, which must succeed.

    ``extra`` are environment variables of the node (failpoints). A test that fails gets the end of ``node.log`` added
    to its message. A test may stop or kill the node itself.
    """
    with started(Node(folder / "store", *settings), **extra) as node:
        yield node


@contextlib.contextmanager
def started(node: Node, **extra: str) -> Iterator[Node]:
    """:func:`start_node` with a node that is made already."""
    try:
        ended = node.start(**extra)
        assert ended.returncode == 0, ended.stderr
        yield node
        if node.is_started:
            ended = node.stop()
            assert ended.returncode in (CliExit.OK, CliExit.NODE_UNAVAILABLE), ended.stderr
    except BaseException as error:
        error.add_note(f"--- the end of node.log ---\n{node.log_tail()}")
        raise
    finally:
        node.end()


def wait_until_dispatched(node: str) -> None:
    """Wait until the queues of ``node`` (its address) lead to all messages that it has acknowledged before this call."""
    with Admin(node) as admin:
        end = admin.status()["positions"]["written"]
        eventually(lambda: admin.status()["positions"]["dispatched"] >= end, f"the log is dispatched up to {end}")


def free_port() -> int:
    """One that :func:`free_ports` finds, and that this function has not returned before."""
    while (port := free_ports(1)) in _given_ports:
        pass
    _given_ports.add(port)
    return port


def free_ports(count: int = 40) -> int:
    """The first of ``count`` neighbouring ports that are free, for a node that must find its ports again. By default as
    many as a node may take: its own, its readers', its dispatchers' and cleanup's.

    Below the range that the system itself hands out: there, another program (even a client that tries to connect to the
    absent node) may sit on a port by the time it is wanted again. Tests that run at the same time draw from ranges of
    their own: between the look and the node's start another one could take a port.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or "1")
    number = int((os.environ.get("PYTEST_XDIST_WORKER") or "gw0").removeprefix("gw"))
    span = (32_000 - 12_000) // workers
    while True:
        first = random.randrange(12_000 + number * span, 12_000 + (number + 1) * span - count)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
