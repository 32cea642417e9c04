"""The interface of a compared system, and the base of its servers: start, wait until ready, count, stop, kill."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from bench.processes import ProcessTree

Durability = Literal["memory", "flushed"]
"""The promise of an ack: the message is in the server's memory (or the page cache), or it is on the device."""

CACHE = Path(__file__).resolve().parent / ".cache"
"""The folder of built and fetched programs; not part of the project."""

HOST = "127.0.0.1"
_READY_POLL_S = 0.02
_KILLED_WITHIN_S = 30.0
_LOG_LINES = 30

_given_ports: set[int] = set()


class BenchError(Exception):
    """A measurement failed; the text has the reason. The run continues with the next one."""


class System(Protocol):
    """One of the systems that are compared."""

    name: str
    """The name in the tables, e.g. ``RocketMQ``."""

    works: frozenset[str]
    """The works of :mod:`bench.workloads` that its driver can do. Workloads with other works leave this system out."""

    @property
    def version(self) -> str:
        """The versions of server and client; called after :meth:`install`."""

    def missing(self) -> str | None:
        """The reason why this system cannot run here (``no JDK: …``), None when it can. Never raises."""

    def install(self) -> None:
        """Build or fetch the programs into :data:`CACHE`; does nothing when they are there. Raises BenchError."""

    def settings(self, durability: Durability) -> dict[str, str]:
        """Every setting of server and client with another value than the default, exactly as they get it."""

    def start(self, folder: Path, durability: Durability, **hints: str) -> Server:
        """A server that is ready and keeps everything in the new ``folder``. Raises BenchError."""


@dataclass(frozen=True)
class Command:
    """One process of a server. ``name`` is that of its log file; ``stop`` ends it in order."""

    name: str
    arguments: Sequence[str | os.PathLike[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    stop: signal.Signals = signal.SIGTERM


class Server(ABC):
    """A running server; a ``with`` block ends it for good. Subclasses say which processes it has and when it is ready."""

    ready_within_s: float = 60.0
    stopped_within_s: float = 60.0

    def __init__(self, folder: Path) -> None:
        """Starts nothing: :meth:`launch` does."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._running: list[tuple[Command, subprocess.Popen[bytes], ProcessTree]] = []
        self._spent_before_s = 0.0

    # ------------------------------------------------------------ of each system

    @property
    @abstractmethod
    def address(self) -> str:
        """The address for clients, in the form of its driver."""

    @abstractmethod
    def commands(self) -> list[Command]:
        """The processes, in the order of their start."""

    @abstractmethod
    def is_ready(self) -> bool:
        """True when clients are served. Called often, so it must be cheap; an OSError counts as False."""

    @abstractmethod
    def driver(self) -> list[str]:
        """Command line of the client, to which one JSON argument is appended."""

    @property
    def broker_port(self) -> int:
        """Where clients of RocketMQ's remoting protocol connect; only of servers that speak it."""
        raise BenchError("this server has no clients of RocketMQ")

    def store_files(self) -> Iterator[Path]:
        """The files that hold messages: by default all of the folder but logs."""
        for root, _, names in os.walk(self.folder):
            for name in names:
                path = Path(root) / name
                if path.suffix != ".log" or path.parent != self.folder:
                    yield path

    # ------------------------------------------------------------ the same for all

    def launch(self) -> Self:
        """Start all processes and wait until ready; raises BenchError with the end of the logs when that fails."""
        try:
            for command in self.commands():
                self._running.append(self._spawn(command))
            self._wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """End the processes in order, the last started first; a process that does not end in time is killed. Stopping
        twice is allowed.
        """
        for command, process, tree in reversed(self._running):
            tree.send_signal(command.stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.stopped_within_s)
            tree.wait(self.stopped_within_s / 10)
        self.kill()

    def kill(self) -> None:
        """SIGKILL every process, and wait until all are gone."""
        self._spent_before_s = self.cpu_seconds()
        for _, _, tree in self._running:
            tree.kill()
        for _, process, tree in self._running:
            process.wait(_KILLED_WITHIN_S)
            tree.wait(_KILLED_WITHIN_S)
        self._running.clear()

    def discard(self) -> None:
        """End a server whose folder is not needed any more; an orderly stop would write files that are removed next."""
        self.kill()

    def restart(self) -> None:
        """Start again on the same folder and at the same address, after :meth:`kill` or :meth:`stop`."""
        self.launch()

    def pids(self) -> list[int]:
        """The memory of all living processes."""
        return [one.pid for _, _, tree in self._running for one in tree.members()]

    def cpu_seconds(self) -> float:
        """User and system time of all processes so far, those that ended included."""
        return self._spent_before_s + sum(tree.cpu_seconds() for _, _, tree in self._running)

    def memory_bytes(self) -> int:
        """Proportional memory (PSS) of all processes, without the store's files that they map."""
        return sum(tree.memory_bytes(without=self.folder) for _, _, tree in self._running)

    def log_tail(self) -> str:
        """The last lines of each process's output."""
        tails = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def _spawn(self, command: Command) -> tuple[Command, subprocess.Popen[bytes], ProcessTree]:
        with open(self.folder / f"{command.name}.log", "ab") as log:
            try:
                process = subprocess.Popen(
                    list(command.arguments),
                    env={**os.environ, **command.env},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C reaches the benchmark only, which then ends its servers in order.
                    start_new_session=True,
                )
            except OSError as error:
                raise BenchError(f"{command.name} could not be started: {error}") from error
        return command, process, ProcessTree(process.pid)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.ready_within_s
        while True:
            with contextlib.suppress(OSError):
                if self.is_ready():
                    return
            for command, process, _ in self._running:
                if (code := process.poll()) is not None:
                    raise BenchError(f"{command.name} ended with code {code} instead of serving\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise BenchError(f"not ready after {self.ready_within_s:.0f} s\n{self.log_tail()}")
            time.sleep(_READY_POLL_S)


def free_port() -> int:
    """A free TCP port of the loopback interface that this function has not returned before."""
    while (port := free_ports(1)) in _given_ports:
        continue
    _given_ports.add(port)
    return port


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring free ports, below the range from which the kernel assigns ports.

    A port of that range may belong to a connection when a server is started again on its old port.
    """
    while True:
        first = random.randrange(12_000, 32_000 - count)
        try:
            with contextlib.ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind((HOST, port))
        except OSError:
            continue
        return first


def accepts(port: int) -> bool:
    """True when something listens on ``port`` of the loopback interface: the simplest :meth:`Server.is_ready`."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
        return True
    return False
