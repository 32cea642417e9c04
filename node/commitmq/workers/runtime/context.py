"""The common part of every worker process: its context, its lifeline to the supervisor, and one way to wait.

A worker module has ``ROLE`` and ``run(context)``, which returns when it has drained after ``context.stopping`` became true.
:func:`main`, which the forkserver calls, holds the role's lock and maps every end of a worker to an exit code.

The lifeline is one end of a Unix socket pair; the supervisor holds the other. ``stop`` on it asks the worker to drain.
End of file means the supervisor is dead: the worker then exits at once, because a new one may wait for its lock.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import zmq

from commitmq import failpoints
from commitmq.config import NodeConfig
from commitmq.config.loading import with_live_values
from commitmq.control import ControlBlock, WorkerState, WorkerWord, role_slot
from commitmq.counting import CountTable
from commitmq.errors import StoreError
from commitmq.files.disk_space import DiskRoom, StoppedWithoutRoom, is_no_space
from commitmq.log import Log, configure, get_log
from commitmq.network import ports
from commitmq.network.guard import UserBounds, audit_log, make_guard
from commitmq.network.router import Router, open_router
from commitmq.protocol import wire
from commitmq.security.access_file import UserQuotas
from commitmq.security.native_rights import Vouching
from commitmq.store.layout import StoreLayout
from commitmq.supervision.exit_codes import progress_sentence
from commitmq.supervision.node_files import read_node_file
from commitmq.workers.runtime.doorbell import NAPPING, SLEEPING, Doorbell, Ringer
from commitmq.workers.runtime.role_lock import RoleTaken, acquire_role_lock


def has_ended(lifeline: socket.socket) -> bool:
    """True if the supervisor died before this worker had its lock.

    A new supervisor waits for the locks that it finds, and may have looked before this one was taken. If the old
    supervisor is alive now, with the lock held, then every later one will see the lock.
    """
    try:
        return lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def last_words(lifeline: socket.socket, error: str) -> None:
    """Tell the supervisor why this worker ends, if it still listens."""
    with contextlib.suppress(OSError):
        lifeline.send(wire.dumps({"event": "error", "error": error[:4096]}))


# The context has a property named zmq, which would hide the module in annotations.
Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


class ExitCode(IntEnum):
    """Why a worker ended; shown by ``status`` and documented for service managers."""

    CLEAN = 0
    CRASHED = 70  # an unexpected exception; its traceback is in the log
    ADDRESS_IN_USE = 72  # another program listens on the port of this worker
    STORE_UNUSABLE = 74  # the store's files are unusable as they are; restarting will not help
    SUPERVISOR_GONE = 75
    ROLE_TAKEN = 76  # another process of this role still holds its lock
    FAILPOINT = 77
    NO_ROOM = 78  # the disk has no room for what this worker needs; it runs again in a moment
    RESTART = 79  # the worker asks for a new process: an operator changed something that only a new process sees


# Plain ints: every message uses them, and an enum's operators are slow.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_HEARTBEAT, _ASLEEP = int(WorkerWord.HEARTBEAT_MS), int(WorkerWord.ASLEEP)
_POLL_MS, _IDLE_POLL_MS, _IDLE_AFTER_MS = 100, 500, 1000
_NAP_MS = 5  # waits up to this long are naps, which only urgent rings end; a caller may declare a longer wait a nap


class PortInUse(Exception):
    """Another program has the port of this worker; the message says which program, and what to do."""


class SupervisorGone(Exception):
    """The lifeline closed."""


class RestartWanted(Exception):
    """The worker has closed its files in order and asks to run again in a new process."""


def monotonic_ms() -> int:
    """Clock for heartbeats and time-outs: never set back, the same in all processes of the machine."""
    return time.monotonic_ns() // 1_000_000


class Refusals:
    """Counts what a process refused; its predecessor's refusals count too."""

    def __init__(self, control: ControlBlock, slot: int) -> None:
        self._control, self._slot = control, slot

    def count(self) -> None:
        refused = self._control.worker(self._slot, WorkerWord.REFUSED)
        self._control.put_worker(self._slot, WorkerWord.REFUSED, refused + 1)


@dataclass
class WorkerContext:
    """Everything that a worker gets from outside."""

    role: str
    layout: StoreLayout
    config: NodeConfig
    control: ControlBlock
    lifeline: socket.socket
    doorbell: Doorbell
    log: Log
    params: dict[str, Any] = field(default_factory=dict)  # from the supervisor: ports to bind, slots, plugin names
    stopping: bool = False
    _zmq: Context | None = None
    _counts: CountTable | None = None
    _has_no_counts: bool = False
    _epoll: select.epoll = field(default_factory=select.epoll)
    _sources: dict[int, Socket | int] = field(default_factory=dict)
    _watched: list[Socket] = field(default_factory=list)
    _asked_routers: list[Router] = field(default_factory=list)  # those among the watched sockets
    _commands: list[dict[str, Any]] = field(default_factory=list)
    _routers: list[Router] = field(default_factory=list)
    _on_settings: list[Callable[[NodeConfig], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slot = int(self.params["slot"]) if "slot" in self.params else role_slot(self.role)
        self.node_key = str(self.params.get("node_key", ""))
        self.vouching = Vouching(str(self.params.pop("vouching", "")))
        self.audit = audit_log(self.layout.audit, self.role, self.config, self.log, lambda why: self.tell(audit=why))
        self.quotas = UserQuotas(self.layout.root, self.config.flow, self.log)
        self.room = DiskRoom(self.log, self.tell, self.pause)
        self._lifeline_fd, self._doorbell_fd, self._woken_ms = (
            self.lifeline.fileno(),
            self.doorbell.fileno(),
            monotonic_ms(),
        )
        self.register(self._lifeline_fd)
        self.register(self._doorbell_fd)

    @property
    def zmq(self) -> Context:
        """The process's ZeroMQ context, created at first use (never before the fork)."""
        self._zmq = self._zmq or zmq.Context(io_threads=1)
        return self._zmq

    @property
    def has_keys(self) -> bool:
        """Whether the node's ports ask for keys."""
        return bool(self.node_key)

    @property
    def counts(self) -> CountTable | None:
        """This process's counters, gauges and histograms, which ``/metrics`` shows; None where ``metrics.enable`` is off, and
        where there is no space for them.
        """
        if self._counts is None and self.config.metrics.enable and not self._has_no_counts:
            try:
                self._counts = CountTable(self.layout.counts(self.role), self.config.metrics.max_counts)
            except StoreError as error:
                self._has_no_counts = True
                self.log.warning("this process counts nothing", why=str(error))
        return self._counts

    @property
    def address(self) -> str:
        """The node's admin address, as clients take it: ``Producer(context.address)``. With keys that for its own account."""
        return str(read_node_file(self.layout)["admin"][int(self.has_keys)])

    @property
    def folder(self) -> Path:
        """``commitmq/workers/NAME`` under the store, for files of a plugin's worker; it creates the folder at first use."""
        return self.layout.own / "workers" / self.role.removeprefix("worker-")

    @property
    def admin_ipc(self) -> str:
        """The same for processes of this host."""
        return str(read_node_file(self.layout)["admin"][1])

    def slot_of(self, role: str) -> int:
        """The worker slot of one of the node's own roles (``writer``, ``reader-0``) in the control block."""
        return role_slot(role)

    def ringer(self, role: str) -> Ringer:
        """A Ringer that wakes the worker of ``role``."""
        return Ringer(self.layout.doorbell(role), self.control, role_slot(role))

    def bind_router(
        self, name: str, *, takes_payload: bool = False, only_answers: bool = False
    ) -> tuple[Router, list[str]]:
        """A guarded ROUTER bound to ``ipc`` and ``tcp`` as the supervisor asked. Returns it and its endpoints.
        ``params["port"]`` is the tcp port: 0 takes a free one, which the supervisor passes to every later incarnation.
        """
        config, store, log = self.config, self.layout.root, self.log
        guard = make_guard(self.zmq, config, store, self.role, log, node_key=self.node_key, audit=self.audit)
        kind: dict[str, Any] = {"takes_payload": takes_payload, "only_answers": only_answers, "guard": guard}
        if guard is not None:
            kind["users"] = UserBounds(self.quotas, Refusals(self.control, self.slot).count)
        place = self.zmq, config.network, log, self.layout.ipc(name), int(self.params.get("port", 0))
        try:
            router, endpoints = open_router(*place, vouching=self.vouching, **kind)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(ports.in_use(place[-1], self.role, config)) from error
            raise
        self._routers.append(router)
        return router, endpoints

    def register(self, sock: Socket | int, *, quiet: bool = False) -> None:
        """Let :meth:`wait` also return when ``sock`` (or a plain file descriptor) can be read.

        A ZeroMQ socket's descriptor (ZMQ_FD) is edge-triggered, and any call on the socket may consume the event. So
        before it sleeps, ``wait`` asks each socket (about 1.5 us). ``quiet`` leaves that out. It is for sockets that
        are read until Again whenever they are reported, and are not sent on (or whose sender looks by itself).
        """
        if isinstance(sock, int):
            fd = sock
        else:
            fd = int(sock.getsockopt(zmq.FD))
            if not quiet:
                self._watched.append(sock)
                if isinstance(sock, Router):
                    self._asked_routers.append(sock)
        self._sources[fd] = sock
        self._epoll.register(fd, select.EPOLLIN)

    def unregister(self, sock: Socket | int) -> None:
        """Undo :meth:`register`; before the socket is closed."""
        fd = sock if isinstance(sock, int) else int(sock.getsockopt(zmq.FD))
        del self._sources[fd]
        self._epoll.unregister(fd)
        self._watched = [one for one in self._watched if one is not sock]
        self._asked_routers = [one for one in self._asked_routers if one is not sock]

    def ready(self, **info: Any) -> None:
        """Report that this worker serves. ``info`` (endpoints …) becomes part of its status."""
        self.control.put_worker(self.slot, WorkerWord.STATE, WorkerState.READY)
        self._tell({"event": "ready", **info})

    def tell(self, **info: Any) -> None:
        """Report information for ``status`` to the supervisor (a reason, a state, a gap)."""
        self._tell({"event": "info", **info})

    def tell_item(self, name: str, item: dict[str, Any] | str) -> None:
        """Report one item of the list ``name``; for lists that may be too long for one message."""
        self._tell({"event": "item", "list": name, "item": item})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self.lifeline.send(wire.dumps(message))
        except OSError as error:
            raise SupervisorGone from error

    def heartbeat(self) -> None:
        """Show the supervisor that this loop turns, as :meth:`wait` does."""
        self.control.put_worker(self.slot, WorkerWord.HEARTBEAT_MS, monotonic_ms())

    @property
    def poll_ms(self) -> int:
        """How long an idle loop may sleep at most, which bounds the cost of a lost ring; longer when nothing has woken it for
        a second: a look takes 200 us with cold caches.
        """
        return _IDLE_POLL_MS if monotonic_ms() - self._woken_ms >= _IDLE_AFTER_MS else _POLL_MS

    def wait(self, timeout_ms: float, unless: Callable[[], bool] | None = None, *, nap: bool = False) -> set[Any]:
        """Sleep until a registered socket, the doorbell or the lifeline has something, or ``timeout_ms`` is over.

        ``unless`` is evaluated after this worker has published ASLEEP: true means there is work already, and the wait
        becomes a look. That closes the race with a peer that moved a position but saw this worker awake. ``nap``: only
        urgent rings end this wait, however long it is. Returns the sockets (and descriptors) to look at; one may turn
        out to have nothing, so read with NOBLOCK. Raises SupervisorGone at the lifeline's end.
        """
        control = self.control
        control.put_worker(self.slot, _HEARTBEAT, monotonic_ms())
        for router in self._routers:
            if router.line.began_ns:
                router.line.settle()
            if router.line.waiting:
                timeout_ms = min(timeout_ms, math.ceil(router.line.wait_ms()))
        if timeout_ms > 0:
            control.put_worker(self.slot, _ASLEEP, SLEEPING if timeout_ms > _NAP_MS and not nap else NAPPING)
            if unless is not None and unless():
                timeout_ms = 0
                self._woken_ms = monotonic_ms()
        readable: set[Any] = {sock for sock in self._watched if int(sock.getsockopt(_EVENTS)) & _POLLIN}
        for router in self._asked_routers:
            if router not in readable:
                # The worker may have ended its turn at a limit, just after it took the last request.
                router.gate.found_nothing()
        for fd, _ in self._epoll.poll(0 if readable else timeout_ms / 1000):
            readable.add(self._sources[fd])
        for router in self._routers:
            if router.line.waiting and not router.line.wait_ms():
                readable.add(router)
        control.put_worker(self.slot, _ASLEEP, 0)
        if readable:
            self._woken_ms = monotonic_ms()
        if self._doorbell_fd in readable:
            self.doorbell.clear()
        if self._lifeline_fd in readable:
            self._read_lifeline()
        return readable

    def pause(self, pause_ms: int) -> bool:
        """Wait for ``pause_ms``, whatever comes, or until this worker shall stop: then False."""
        end = monotonic_ms() + pause_ms
        while not self.stopping and (left := end - monotonic_ms()) > 0:
            self.wait(left)
        return not self.stopping

    def fileno(self) -> int:
        """A descriptor that can be read when :meth:`wait` would return something: for a loop of another kind."""
        return self._epoll.fileno()

    def on_settings(self, take: Callable[[NodeConfig], None]) -> None:
        """Let :meth:`wait` call ``take`` with :attr:`config` after it has changed, and after users' quotas have."""
        self._on_settings.append(take)

    def _take_settings(self, message: dict[str, Any]) -> None:
        try:
            self.config = with_live_values(self.config, message["values"])
            configure(self.config.log.level, self.config.log.format)
            self.quotas.look(self.config.flow)
            for take in self._on_settings:
                take(self.config)
        except Exception as error:  # a plugin's, perhaps
            self.log.exception("changed settings were not taken", error=repr(error))
            return
        self._tell({"event": "settings", "version": message["version"]})

    def command(self) -> dict[str, Any] | None:
        """The oldest command of the supervisor, other than ``stop``, that was not taken yet."""
        return self._commands.pop(0) if self._commands else None

    def _read_lifeline(self) -> None:
        try:
            data = self.lifeline.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise SupervisorGone from error
        if not data:
            raise SupervisorGone
        message = orjson.loads(data)
        if message["command"] == "stop":
            self.stopping = True
            self.control.put_worker(self.slot, WorkerWord.STATE, WorkerState.DRAINING)
        elif message["command"] == "settings":
            self._take_settings(message)
        else:
            self._commands.append(message)

    def close(self) -> None:
        for router in self._routers:
            router.close()
        if self._zmq is not None:
            self._zmq.destroy(linger=500)
        self.audit.close()
        self.doorbell.close()
        self._epoll.close()


def main(
    role: str,
    run: Callable[[WorkerContext], None],
    store: Path,
    config: NodeConfig,
    lifeline: socket.socket,
    params: dict[str, Any],
) -> int:
    """Run one worker from lock to exit code. Called in the forked child; never raises."""
    # Ctrl-C and a service manager's SIGTERM go to the whole group. Only the supervisor acts on them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log = get_log(role)
    layout = StoreLayout(store)
    context: WorkerContext | None = None
    try:
        acquire_role_lock(layout.role_lock(role))
        if has_ended(lifeline):
            raise SupervisorGone
        control = ControlBlock(layout.control)
        doorbell = Doorbell(layout.doorbell(role))
        context = WorkerContext(role, layout, config, control, lifeline, doorbell, log, dict(params))
        control.put_worker(context.slot, WorkerWord.PID, os.getpid())
        control.put_worker(context.slot, WorkerWord.STATE, WorkerState.STARTING)
        context.heartbeat()
        if failpoints.ACTIVE:
            failpoints.hit(f"{role}.begin")
        try:
            run(context)
        except StoppedWithoutRoom as error:
            log.warning("stops while it waits for room on the disk", why=str(error))
        control.put_worker(context.slot, WorkerWord.STATE, WorkerState.STOPPED)
        context.close()
    except SupervisorGone:
        log.warning("supervisor is gone, exiting")
        return ExitCode.SUPERVISOR_GONE
    except RestartWanted:
        return ExitCode.RESTART
    except RoleTaken as error:
        log.error("role is taken", error=str(error))
        return ExitCode.ROLE_TAKEN
    except BaseException as error:
        return _ended_by(error, log, lifeline)
    finally:
        gc.enable()
    return ExitCode.CLEAN


def _ended_by(error: BaseException, log: Log, lifeline: socket.socket) -> ExitCode:
    """The exit code of a worker that an exception ends, after its last words."""
    if is_no_space(error):  # the supervisor logs it, once for all tries
        last_words(lifeline, str(error))
        return ExitCode.NO_ROOM
    if isinstance(error, StoreError):
        log.error("store is unusable", error=str(error))
        last_words(lifeline, str(error))
        return ExitCode.STORE_UNUSABLE
    if isinstance(error, PortInUse):  # the supervisor logs it
        last_words(lifeline, str(error))
        return ExitCode.ADDRESS_IN_USE
    # (The representation of an OSError lacks the path.)
    words = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else repr(error)
    log.exception("worker crashed", error=words)
    last_words(lifeline, words)
    return ExitCode.CRASHED


_TELL_MS = 200
_LOG_MS = 2_000


class StartProgress:
    """Reports a worker's progress before it is ready, and with what it makes again beside its work.

    The supervisor gets the reports and shows them in ``status``, the previous also to the program that waits for the
    start; the log gets them when it takes long.

    Called again and again with the progress. A report also shows that this worker lives.
    """

    def __init__(self, context: WorkerContext, name: str = "progress") -> None:
        """``name`` of the report: ``progress``, or ``remaking``: damaged files are rebuilt while the worker serves."""
        self._context = context
        self._name = name
        self._phase = ""
        self._next_tell_ms = 0
        self._next_log_ms = monotonic_ms() + _LOG_MS

    def __call__(self, phase: str, done: int, total: int, unit: str = "bytes") -> None:
        """``done`` of ``total`` in ``unit`` (``bytes`` of the log, ``queues``); a total of 0 is unknown."""
        now = monotonic_ms()
        if phase == self._phase and now < self._next_tell_ms:
            return
        self._phase, self._next_tell_ms = phase, now + _TELL_MS
        self._context.heartbeat()
        progress = {"phase": phase, "done": done, "total": total, "unit": unit}
        self._context.tell(**{self._name: progress})
        if now >= self._next_log_ms:
            self._next_log_ms = now + _LOG_MS
            what = "starting: " if self._name == "progress" else ""
            self._context.log.info(f"{what}{progress_sentence(progress)}", done=done, total=total, unit=unit)

    def over(self) -> None:
        """Report that the work is finished."""
        if self._phase:
            self._phase = ""
            self._context.tell(**{self._name: None})
