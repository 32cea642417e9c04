"""A real node for the tests of a plugin: started by the command, used through the clients, killed with signals.

Nothing is simulated: the processes are those of any node, the store is a folder on disk. Small segments (a few hundred
KiB of records roll them), free ports, and a complete clean-up make it fit for tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from commitmq.client.admin import Admin
from commitmq.client.message import Message
from commitmq.client.producer import Producer
from commitmq.client.results import BatchResult, SendResult
from commitmq.errors import CommitMQError
from commitmq.plugin.loading import ENTRY_POINT_GROUP, PLUGINS_VARIABLE
from commitmq.supervision.exit_codes import CliExit
from commitmq.testing.node_process import DEADLINE_S, NodeProcess, alive, eventually

# A dispatcher that dies again and again is parked after one second, not after three.
_QUICK = ("supervisor.restart_backoff_max_ms=200",)

_live: list[CommitMQNode] = []


class CommandResult:
    """The result of one run of ``commitmq``: ``code``, ``output`` (standard output) and ``errors`` (standard error)."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code, self.output, self.errors = code, output, errors

    def __repr__(self) -> str:
        return f"CommandResult(code={self.code}, output={self.output!r}, errors={self.errors!r})"


class CommitMQNode:
    """One node on ``store``. Every method has finished its work on return, or raises AssertionError with the reason.

    Roles, as :meth:`kill` takes them, are those of ``commitmq status``: ``writer``, ``reader-0``, ``dispatcher-NAME``,
    ``worker-NAME``. The node restarts processes that die; :meth:`crash` and :meth:`stop` leave none.
    """

    def __init__(self, folder: Path, settings: Iterable[str] = (), plugins: Iterable[str] = ()) -> None:
        """``folder`` gets the store. ``settings`` are ``section.key=value``, ``plugins`` modules that need not be
        installed.

        The node knows a plugin by the name of its entry point if it is installed, else by its module's last part;
        ``name=module`` sets another name. The node can import every module that this process can import; AssertionError
        names a missing one.
        """
        self.store = folder / "store"
        self._process = NodeProcess(self.store, *_QUICK, *settings)
        self._variables = {}
        if named := ",".join(_named(one) for one in plugins):
            self._variables[PLUGINS_VARIABLE] = named
        self._producer: Producer | None = None
        self._admin: Admin | None = None

    # ------------------------------------------------------------ life

    def start(self) -> Self:
        """Start the node and wait until it is ready."""
        ended = self._process.start(**self._variables)
        if ended.returncode:
            raise AssertionError(f"the node does not start (exit code {ended.returncode}): {ended.stderr.strip()}")
        if self not in _live:
            _live.append(self)
        return self

    def stop(self) -> None:
        """Stop the node in order: everything written is flushed and dispatched, all processes have ended."""
        self._disconnect()
        ended = self._process.stop()
        # Another program may have stopped it a moment ago; then no node is found, and none may be left.
        if ended.returncode and (ended.returncode != CliExit.NODE_UNAVAILABLE or self.is_running):
            raise AssertionError(f"the node does not stop (exit code {ended.returncode}): {ended.stderr.strip()}")

    def crash(self) -> None:
        """SIGKILL all processes at one moment; nothing is flushed or closed. :meth:`restart` recovers."""
        self._process.kill_all()
        self._disconnect()

    def restart(self) -> None:
        """Start again on the same store; stops the node first if it runs. The address may be another one."""
        if self.is_running:
            self.stop()
        self.start()

    @property
    def is_running(self) -> bool:
        """True while the supervisor lives."""
        return self._process.is_started and alive(self._process.supervisor_pid)

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the process of ``role``; after SIGKILL it has ended on return. Returns its pid."""
        pid = self.pid(role)
        os.kill(pid, number)
        if number == signal.SIGKILL:
            eventually(lambda: not alive(pid), f"{role} (pid {pid}) is gone")
        return pid

    @contextlib.contextmanager
    def paused(self, role: str) -> Iterator[int]:
        """SIGSTOP the process of ``role`` for the length of the block, to simulate a very slow process. Gives its pid."""
        pid = self.kill(role, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """Clean up completely, in any state of the node."""
        self._disconnect()
        if self in _live:
            _live.remove(self)
        self._process.end()

    # ------------------------------------------------------------ messages

    def send(self, topic: str, body: bytes | str | Message, **options: Any) -> SendResult:
        """Send one message and wait until it is on the device; options are those of :meth:`commitmq.Producer.send`."""
        return self.producer.send(topic, body.encode() if isinstance(body, str) else body, **options)

    def send_many(self, topic: str, messages: Sequence[bytes | Message], **options: Any) -> BatchResult:
        """Send many messages as fast as possible; options are those of :meth:`commitmq.Producer.send_batch`."""
        return self.producer.send_batch(topic, messages, **options)

    @property
    def producer(self) -> Producer:
        """A producer for this node, created at first use; closed when the node stops or crashes."""
        if self._producer is None:
            self._producer = Producer(self.address)
        return self._producer

    @property
    def admin(self) -> Admin:
        """An :class:`commitmq.Admin` for this node, created at first use; closed when the node stops or crashes."""
        if self._admin is None:
            self._admin = Admin(self.address)
        return self._admin

    # ------------------------------------------------------------ dispatchers

    def dispatcher(self, name: str) -> dict[str, Any]:
        """The row of one dispatcher: ``state``, ``position``, ``lag_bytes``, ``parked``, ``last_error`` …"""
        rows: dict[str, dict[str, Any]] = {row["name"]: row for row in self.status()["dispatchers"]}
        if name not in rows:
            raise AssertionError(f"there is no dispatcher {name!r}; there are {', '.join(rows)}. {self._failures()}")
        return rows[name]

    def wait_until_dispatched(self, name: str, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until dispatcher ``name`` has seen all messages written before this call. Returns its row. A parked
        dispatcher fails at once, with the error that it died of.
        """
        end = self.status()["positions"]["written"]
        deadline = time.monotonic() + timeout_s
        while True:
            row = self.dispatcher(name)
            if row["state"] == "parked":
                raise AssertionError(f"dispatcher {name} is parked at {row['parked']}: {row['last_error']}")
            if row["state"] in ("running", "catching up") and row["position"] >= end:
                return row
            if time.monotonic() >= deadline:
                raise AssertionError(f"dispatcher {name} has not reached {end} within {timeout_s} s: {row}")
            time.sleep(0.02)

    def wait_until_parked(self, name: str, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until dispatcher ``name`` is parked. Returns its row; ``parked`` in it is the record."""

        def parked() -> dict[str, Any] | None:
            row = self.dispatcher(name)
            return row if row["state"] == "parked" and row["parked"] else None

        return dict(eventually(parked, f"dispatcher {name} is parked", timeout_s))

    def skip(self, name: str) -> dict[str, Any]:
        """Let the parked dispatcher ``name`` continue without the record it is parked at. Returns the record."""
        return self.admin.dispatcher_skip(name, self.wait_until_parked(name)["parked"]["physical_offset"])

    def retry(self, name: str) -> None:
        """Let the parked dispatcher ``name`` try its record again."""
        self.admin.dispatcher_retry(name)

    def query(self, name: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of dispatcher ``name`` to ``request``."""
        return self.admin.dispatcher_query(name, request or {})

    # ------------------------------------------------------------ status, log and command

    def status(self) -> dict[str, Any]:
        """The report of :meth:`commitmq.Admin.status`."""
        found = self.admin.status()
        self._process.note(found)
        return found

    def pid(self, role: str) -> int:
        """The pid of the process of ``role``; waits for a process that is being started."""

        def found() -> int | None:
            rows = {row["role"]: row["pid"] for row in self.status()["processes"]}
            if role not in rows:
                raise AssertionError(f"there is no process {role!r}; there are {', '.join(rows)}. {self._failures()}")
            return rows[role]  # type: ignore[no-any-return]

        return int(eventually(found, f"{role} runs"))

    @property
    def address(self) -> str:
        """The address that clients connect to; a value for ``COMMITMQ_NODE``."""
        return self._process.address

    def run(self, *arguments: str) -> CommandResult:
        """Run ``commitmq ARGUMENTS`` against this node."""
        variables = dict(self._variables)
        if self._process.is_started:
            variables["COMMITMQ_NODE"] = self.address
        ended = self._process.run(*arguments, **variables)
        return CommandResult(ended.returncode, ended.stdout, ended.stderr)

    @property
    def settings(self) -> list[str]:
        """All its settings, as ``section.key=value``."""
        return list(self._process.settings)

    def log(self) -> str:
        """All of ``node.log``."""
        return self._process.log()

    def log_tail(self) -> str:
        """The last lines of ``node.log``."""
        return self._process.log_tail()

    def _failures(self) -> str:
        broken = [row for row in self.status()["plugins"] if row["failure"]]
        return " ".join(f"Plugin {row['name']} failed in {row['failed_in']}: {row['failure']}" for row in broken)

    def _disconnect(self) -> None:
        for client in (self._producer, self._admin):
            if client is not None:
                with contextlib.suppress(CommitMQError, TimeoutError):
                    client.close()
        self._producer = self._admin = None


@contextlib.contextmanager
def start_node(folder: Path, settings: Iterable[str] = (), plugins: Iterable[str] = ()) -> Iterator[CommitMQNode]:
    """A ready node on a store in ``folder``; all its processes have ended after the block.

    For fixtures that share a node among tests: ``with start_node(tmp_path_factory.mktemp("node")) as node: yield
    node``. Arguments as for :class:`CommitMQNode`. A failing stop fails the test.
    """
    node = CommitMQNode(folder, settings, plugins)
    try:
        yield node.start()
        if node.is_running:
            node.stop()
    finally:
        node.end()


def live_nodes() -> list[CommitMQNode]:
    """Nodes of this process that were started and not yet ended."""
    return list(_live)


def _can_import(module: str) -> bool:
    """Whether the module exists; the node reports one that fails when it is imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:
        return not f"{module}.".startswith(f"{error.name}.")
    except Exception:
        return True


def _named(plugin: str) -> str:
    """``name=module`` for an argument that may be a module only."""
    name, equals, module = plugin.partition("=")
    if not equals:
        module = name
    if not _can_import(module.partition(":")[0]):
        raise AssertionError(f"there is no module {module!r} for the plugin {plugin!r}: this process cannot import it")
    if equals:
        return plugin
    installed = [point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.value == module]
    return f"{installed[0] if installed else module.rpartition('.')[2]}={module}"
