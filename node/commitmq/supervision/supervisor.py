"""The process that starts, watches, restarts and stops all others; only it may call a store closed in order.

Owns the store's ``lock`` and ``abort`` files, ``run/node.json``, the admin socket, and the epoch and restart words of
the control block. Reads the workers' heartbeats. It uses neither numpy nor kernels. The keeper forks it
(:mod:`commitmq.supervision.keeper`).

Start: take ``lock``; wait until no process of an earlier node holds a role lock (an orphan gets five seconds, then
SIGKILL); empty ``run/``; create the control block again; fork the forkserver, run discovery and recovery; write
``abort``; start the workers one after the other, each when the one before is ready. Stop: the reverse, each worker
draining; ``abort`` is removed only if every worker ended with exit code 0 and everything written is flushed and
dispatched.

Until recovery has ended well the store still belongs to its previous user (:mod:`commitmq.supervision.node_store`).

After the death of a process:

* a worker: its pidfd wakes the supervisor, which forks it again after a back-off. A worker whose heartbeat stops is
  killed first.
* the forkserver: workers are the supervisor's own children (see :mod:`commitmq.supervision.forkserver`) and continue; a
  new forkserver is forked, from the supervisor as it is then, without its descriptors.
* the supervisor: every lifeline closes, so every worker and the forkserver exit; the keeper forks a new supervisor.
* the keeper: in the foreground the node stops in order, because an operator who killed ``commitmq start`` meant the
  node. In the background the forkserver forks another keeper. That keeper is the supervisor's child, so it learns of
  its end by a pipe that only the supervisor holds open: when the pipe closes without a last word, the supervisor was
  killed, and the keeper starts one again. The death of both at one moment is the next case.
* all at once: the role and store locks end with their holders; the next start finds ``abort`` and recovers.

One loop (:meth:`Supervisor._turn`) handles everything; start and stop are plain sequences that turn it while they wait.
It wakes at every event, and ``supervisor.poll_interval_ms`` after the last one at the latest.

The drain of a node that stops: its workers end one after the other, from the beginning of the pipeline.

Rotation of ``commitmq/node.log`` by its size: node.log, node.log.1 (the newest before it), up to node.log.N.

One process rotates, the supervisor; all others only follow (:mod:`commitmq.log`): a process that is about to write a
line and finds that the file's name belongs to another file opens that one. So no line is lost or cut, and no process
waits for another. A process that writes without the log, such as a library that aborts, still writes into the file it
has, which is node.log.1 by then.

The file that is deleted is emptied first: a process that did not write for long may have it open, and its space is free
at once. A death between two steps leaves a number out, which the next rotation closes; nothing is overwritten, because
a file takes only a name that was freed before.

Starts movers when they are needed (:mod:`commitmq.semantics.movers`). A mover that was started once is kept alive.

The servers of plugins at a node's start: it waits for them, but not for long, and says where they serve.

A server that fails does not keep a node from starting: the start says so, and why. One of RocketMQ's whose port is
taken does keep it (:func:`.ports.require_free`): its clients would meet somebody else.

What the supervisor tells a service manager: systemd's notification protocol (sd_notify(3)), without its library.

    READY=1        the node accepts messages: recovery is done, all essential processes are ready. Sent again by the
    next
                   supervisor when one was killed.
    STATUS=…       what the start is busy with, and how it ended; ``systemctl status`` shows it
    STOPPING=1     the node drains
    WATCHDOG=1     the supervisor's loop turns; twice in each interval of ``WATCHDOG_USEC``

Each is one datagram to the socket that ``NOTIFY_SOCKET`` names; without that variable nothing is sent. The main process
of the service is the keeper, and the supervisor its child, so the unit needs ``NotifyAccess=all``. The variables are
taken out of the environment: no other process of the node, and no plugin, speaks for it.

A datagram that the manager cannot take at the moment waits for the next turn of the loop; the supervisor never waits
for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from commitmq import failpoints
from commitmq import log as log_module
from commitmq.config import NodeConfig
from commitmq.config.schema import LogConfig
from commitmq.control import ControlBlock, Word, WorkerState, WorkerWord, role_slot
from commitmq.errors import CommitMQError, ProtocolError, StoreError, StoreLockedError
from commitmq.files.disk_space import tells_of_no_space
from commitmq.log import Log
from commitmq.network import ports
from commitmq.protocol import wire
from commitmq.semantics.movers import MOVERS
from commitmq.supervision.admin_answers import AdminAnswers
from commitmq.supervision.admin_socket import AddressInUseError, Handler, bind_admin
from commitmq.supervision.console import Report
from commitmq.supervision.event_loop import EventLoop
from commitmq.supervision.exit_codes import CliExit, StartFailed, with_a_way_out
from commitmq.supervision.exposure import Exposure
from commitmq.supervision.forkserver import NextKeeper
from commitmq.supervision.forkserver_watch import ForkServerWatch
from commitmq.supervision.keeper_watch import KeeperWatch
from commitmq.supervision.live_settings import LiveSettings, SettingsOperations
from commitmq.supervision.node_store import NodeStore
from commitmq.supervision.process_table import ProcessTable
from commitmq.supervision.processes import become_subreaper
from commitmq.supervision.roster import ProcessSpec, Roster, own_role, start_order
from commitmq.supervision.worker_process import Phase, WorkerProcess
from commitmq.workers.runtime.context import monotonic_ms
from commitmq.workers.runtime.set_aside import listed


class Drain:
    """Ends the workers of ``table``. ``turn``: one turn of the supervisor's loop, of this many ms at most."""

    def __init__(self, table: ProcessTable, timeout_s: int, turn: Callable[[float], None], log: Log) -> None:
        self._table, self._timeout_s, self._turn, self._log = table, timeout_s, turn, log

    def run(self) -> None:
        """Returns when no worker lives any more."""
        for worker in self._order():
            self._stop_worker(worker)

    def _order(self) -> list[WorkerProcess]:
        """Plugins' workers first, which may be clients; their dispatchers last, when no more records come."""
        workers = list(self._table.workers.values())
        own = [worker for worker in workers if not worker.spec.plugin]
        dispatchers = [worker for worker in workers if worker.spec.plugin and worker.spec.dispatcher]
        others = [worker for worker in workers if worker.spec.plugin and not worker.spec.dispatcher]
        return [*reversed(others), *reversed(own), *reversed(dispatchers)]

    def _stop_worker(self, worker: WorkerProcess) -> None:
        """Ask ``worker`` to drain and wait for its end. A worker that does not listen is killed when its time is over."""
        worker.wanted = False
        if not worker.pid:
            # It died a moment ago and will not be restarted to drain. A process that the node can do without, and that was
            # not started yet, has nothing to drain.
            may_have_work = worker.spec.essential or worker.started_ms > 0
            worker.unclean = worker.unclean or (worker.phase is Phase.WAITING and may_have_work)
            worker.phase = Phase.DONE if worker.phase is Phase.DONE else Phase.IDLE
            return
        # A recovery that is still running has promised nothing yet: the next one begins again.
        patience_ms = 2_000 if worker.one_shot else self._timeout_s * 1000
        deadline_ms = monotonic_ms() + patience_ms
        worker.ask_to_stop()
        while worker.pid:
            self._turn(deadline_ms - monotonic_ms())
            if worker.pid and not worker.killed_because and monotonic_ms() >= deadline_ms:
                self._log.error("worker does not stop, killing it", role=worker.role, pid=worker.pid)
                worker.kill(f"it did not stop within {patience_ms / 1000:g} s")


_LOOK_MS: Final = 1_000


class LogRotation:
    """Looks at the size once a second."""

    def __init__(self, path: Path, log: Log) -> None:
        self._path, self._log = path, log
        self._next_ms = 0
        self._complained = False

    def tick(self, now_ms: int, config: LogConfig) -> None:
        """Rotate when it is time. An error, as of a full disk, is logged once, and tried again."""
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + _LOOK_MS
        try:
            if self._path.stat().st_size < config.max_bytes or not log_module.is_followed():
                return
            rotate(self._path, config.files)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._log.error("the log cannot be rotated and grows", error=str(error))
        else:
            self._complained = False
            self._log.info("a new log file begins", the_last=f"{self._path.name}.1")


def rotate(path: Path, files: int) -> None:
    """Give ``path`` the number 1, and each older file one more; ``files``, at least 2, stay. Raises OSError."""
    numbers = _numbers(path)
    free = next((number for number in range(1, files) if number not in numbers), files - 1)
    for number in {one for one in numbers if one >= files} | ({free} & numbers):
        with contextlib.suppress(OSError):
            os.truncate(_numbered(path, number), 0)
        _numbered(path, number).unlink()
    for number in range(free - 1, 0, -1):
        _numbered(path, number).rename(_numbered(path, number + 1))
    path.rename(_numbered(path, 1))


def _numbers(path: Path) -> set[int]:
    ends = [one.name.removeprefix(f"{path.name}.") for one in path.parent.glob(f"{path.name}.*")]
    return {int(end) for end in ends if end.isdecimal() and end.isascii() and int(end) > 0}


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


class MoverWatch:
    """The movers among the workers of ``table``."""

    def __init__(self, table: ProcessTable, control: ControlBlock, log: Log) -> None:
        self._table, self._control, self._log = table, control, log
        self._seen = 0

    def look(self) -> None:
        """Start the movers that the ConsumeQueue dispatcher calls for. Costs a look at one word when it calls for no other."""
        wanted = self._control.get(Word.MOVERS_WANTED)
        if wanted == self._seen:
            return
        self._seen = wanted
        for mover in MOVERS:
            if wanted & mover.bit:
                self._start(mover.role)

    def ask(self, role: str) -> None:
        """Start ``role`` for a client. Raises ProtocolError for another word, and for one that the configuration turns off."""
        if role not in {mover.role for mover in MOVERS}:
            names = ", ".join(mover.role for mover in MOVERS)
            raise ProtocolError("INVALID_PARAMETER", f"there is no mover {role!r:.80}: the movers are {names}")
        if role not in self._table.workers:
            raise ProtocolError("SERVICE_NOT_AVAILABLE", f"this node runs no {role} process ({role}.enable is false)")
        self._start(role)

    def _start(self, role: str) -> None:
        worker = self._table.workers.get(role)
        if worker is not None and not worker.wanted:
            self._log.info("a mover is needed", role=role)
            worker.wanted, worker.phase, worker.start_at_ms = True, Phase.WAITING, 0


class Servers:
    """Those among ``workers`` that clients wait for."""

    def __init__(self, workers: Iterable[WorkerProcess]) -> None:
        self._workers = [worker for worker in workers if worker.spec.listens]

    def wait(self, timeout_s: float, turn: Callable[[float], None], is_stopping: Callable[[], bool]) -> bool:
        """Call ``turn`` with the milliseconds that are left, until each serves or has died once, or the time is over. False
        when the node is to stop.
        """
        end_ms = monotonic_ms() + timeout_s * 1_000
        while any(map(_comes, self._workers)) and (left_ms := end_ms - monotonic_ms()) > 0 and not is_stopping():
            turn(left_ms)
        return not is_stopping()

    def addresses(self) -> dict[str, str]:
        """By name of the server: where it serves."""
        return {_name(one): one.endpoints[0] for one in self._workers if one.phase is Phase.READY and one.endpoints}

    def warnings(self) -> list[str]:
        """A sentence for each that does not serve."""
        return [
            f"the server {_name(worker)} does not serve{_because(worker)}; `commitmq status` shows it"
            for worker in self._workers
            if worker.phase is not Phase.READY
        ]


def _comes(worker: WorkerProcess) -> bool:
    return worker.phase is Phase.STARTING or (worker.phase is Phase.WAITING and not worker.started_ms)


def _because(worker: WorkerProcess) -> str:
    return f" and is tried again: {worker.last_error}" if worker.last_error else " yet"


def _name(worker: WorkerProcess) -> str:
    return worker.role.removeprefix("worker-")


_LONGEST_STATUS: Final = 300


class ServiceManager:
    """A service manager, or none."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes its variables out of ``environment``."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self._interval_ms = _interval_ms(environment.pop("WATCHDOG_USEC", ""))
        environment.pop("WATCHDOG_PID", None)  # of the keeper, which this process speaks for
        self._unsent: dict[str, str] = {}
        self._is_stopping = False
        self._sign_of_life_ms = 0

    def listening_to(self, report: Report) -> Report:
        """``report`` that the service manager hears too."""
        if not self._address:
            return report

        def both(message: dict[str, Any]) -> None:
            report(message)
            self._hear(message)

        return both

    def turn(self, now_ms: int, *, stopping: bool) -> None:
        """Called at each turn of the supervisor's loop, which ``now_ms`` (monotonic) is the time of."""
        if not self._address:
            return
        if stopping and not self._is_stopping:
            self._is_stopping = True
            self._unsent.update({"STOPPING": "1", "STATUS": "stopping"})
        if self._interval_ms and now_ms - self._sign_of_life_ms >= self._interval_ms // 2:
            self._sign_of_life_ms = now_ms
            self._unsent["WATCHDOG"] = "1"
        self._send()

    def _hear(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "ready":
            self._unsent.update({"READY": "1", "STATUS": f"ready at {message['admin'][0]}"})
        elif event == "info":
            self._unsent["STATUS"] = str(message["message"])
        elif event == "failed":
            self._unsent["STATUS"] = str(message["error"])
        elif event == "stopped":
            in_order = "everything written is flushed" if message["clean"] else "not in order, the next start recovers"
            self._unsent["STATUS"] = f"stopped; {in_order}"
        self._send()

    def _send(self) -> None:
        if not self._unsent:
            return
        lines = [f"{name}={' '.join(value.split())[:_LONGEST_STATUS]}" for name, value in self._unsent.items()]
        # A leading @ stands for the NUL of an abstract address.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notify:
                notify.sendto("\n".join(lines).encode(), address)
        except OSError:
            return  # a full socket, or a manager that starts again: the next turn tries again
        self._unsent.clear()


def _interval_ms(text: str) -> int:
    """``WATCHDOG_USEC`` in milliseconds; 0 without a watchdog."""
    return int(text) // 1000 if text.isascii() and text.isdigit() else 0


_BEFORE_CLAIM = ("discovery", "recovery")


class Supervisor:
    """One node, from taking the store's lock to releasing it."""

    def __init__(
        self,
        store: Path,
        config: NodeConfig,
        *,
        keeper_pid: int = 0,
        next_keeper: NextKeeper | None = None,
        report: Report = lambda _message: None,
        modules: Mapping[str, str] | None = None,
        life: str = "",
    ) -> None:
        """``report`` gets the progress of the start. ``modules`` (role to module, in start order) is for tests.

        ``next_keeper`` runs another keeper of ``life`` (see :func:`commitmq.supervision.node_files.node_life`) when this one
        has died; without it, as in the foreground, the node stops then.
        """
        self._log = log_module.get_log("supervisor")
        self._store = NodeStore(store, self._log)
        self._layout = self._store.layout
        self._config = config
        self._timing = config.supervisor
        self._rotation = LogRotation(self._layout.log, self._log)
        self._next_keeper = next_keeper
        self._forkserver: ForkServerWatch | None = None
        self._keeper = KeeperWatch(keeper_pid, life, can_start=next_keeper is not None)
        self._manager = ServiceManager(os.environ)
        self._report = self._manager.listening_to(report)
        self._roles = [own_role(name, module) for name, module in (modules or start_order(config)).items()]
        if modules is None:
            self._roles.insert(0, own_role("discovery", "commitmq.workers.discovery"))
        self._loop = EventLoop()
        self._stop_asked = False
        self._starting = True
        self._stop_peers: list[tuple[bytes, int]] = []
        self._failure: StartFailed | None = None
        self._ports: dict[str, int] = {}
        self._node_file_is_old = False

    # ------------------------------------------------------------ life

    def run(self) -> int:
        """Start, serve until asked to stop, stop. Returns the exit code (:class:`CliExit`)."""
        self._loop.catch_signals(self._ask_stop)
        try:
            self._open()
        except StoreLockedError as error:
            return self._refuse(str(error), CliExit.STORE_LOCKED)
        except StoreError as error:
            return self._refuse(str(error), CliExit.STORE_UNUSABLE)
        except StartFailed as error:
            return self._refuse(str(error), error.code)
        except (CommitMQError, OSError) as error:
            return self._refuse(str(error), CliExit.START_FAILED)
        try:
            self._start()
            while not self._stop_asked:
                self._turn()
        except StartFailed as error:
            self._failure = error
            self._log.error("cannot start", error=str(error))
        clean = self._stop()
        if self._failure is not None:
            return self._refuse(str(self._failure), self._failure.code)
        if self._starting:
            sentence = "the node was stopped while it started"
            self._report({"event": "failed", "error": sentence, "code": int(CliExit.INTERRUPTED)})
        return CliExit.OK if clean else CliExit.UNCLEAN_STOP

    def last_word(self, code: int) -> None:
        """Report the exit code to a keeper that this supervisor started: it is not the parent."""
        self._keeper.last_word(code)

    def _refuse(self, sentence: str, code: CliExit) -> int:
        if tells_of_no_space(sentence):
            code = CliExit.NO_ROOM
        sentence = with_a_way_out(sentence, self._layout)
        if self._failure is None:
            self._log.error("cannot start", error=sentence)
        self._report({"event": "failed", "error": sentence, "code": int(code)})
        return code

    def _open(self) -> None:
        """Do everything up to the first child. Raises StoreError and CommitMQError; then nothing is left locked."""
        store = self._store
        store.lock()
        try:
            self._open_locked()
        except BaseException:
            # The files written into run/ describe a node that never ran.
            if self._forkserver is not None:
                self._forkserver.end()
            store.leave()
            store.release()
            raise

    def _open_locked(self) -> None:
        store, layout = self._store, self._layout
        live = LiveSettings(layout.settings, self._config, self._keeper.life or f"supervisor {os.getpid()}")
        live.fitted(store.fit(live.config))
        self._take_settings(live.config)
        if not self._config.index.enable:
            self._roles = [role for role in self._roles if role.name != "dispatcher-index"]
        for note in (*store.fitted.notes, *live.notes):
            self._log.warning(note)
            self._report({"event": "info", "message": note})
        self._ports, self._control = store.take_over(), store.control
        become_subreaper()
        store.look_back()
        # Forked before this process has a ZeroMQ context and threads.
        self._forkserver = forkserver = ForkServerWatch(
            layout,
            self._config,
            self._loop,
            self._log,
            is_judging=lambda: self._table.judging,
            next_keeper=self._next_keeper,
        )
        self._exposure = Exposure.of_node(self._config, layout.root)
        self._check_ports()
        self._settings = SettingsOperations(live, self._exposure.users, self._check_serves, self._log)
        handlers: dict[str, Handler] = {"metadata": self._metadata, "status": self._status, **self._settings.handlers}
        handlers["set_aside"] = self._set_aside
        handlers |= {"stop": self._stop_requested, "mover.start": self._mover_wanted}
        # All supervisors of a life use the same name, so that clients find the socket again. Each life uses another
        # one: libzmq removes the file of a socket when it closes, and must not remove the file of the next node.
        name = f"admin-{self._keeper.life.replace('/', '-') or os.getpid()}"
        self._admin = bind_admin(self._config, layout.ipc(name), self._ports, handlers, self._log, self._exposure)
        self._control.put(Word.EPOCH, store.epoch)
        self._slot = role_slot("supervisor")
        self._control.put_worker(self._slot, WorkerWord.PID, os.getpid())
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STARTING)
        self._loop.watch(self._admin.socket, self._serve_admin, last=True)
        store.write_token()
        self._write_node_file()
        for role in self._roles:
            if role.name in ("recovery", "flush"):
                role.params["owner"] = store.owner
            if role.name == "recovery":
                role.params["previous"] = store.previous
                role.params["shown"] = store.shown
        self._table = ProcessTable(
            layout,
            self._config,
            self._control,
            self._roles,
            forkserver=forkserver,
            loop=self._loop,
            ports=self._ports,
            was_clean=store.was_clean,
            on_new_port=self._renew_node_file,
            on_news=lambda sentence: self._report({"event": "info", "message": sentence}),
            log=self._log,
        )
        self._table.node_key = self._exposure.node_key
        self._table.vouching_key = self._exposure.vouching_key
        self._movers = MoverWatch(self._table, self._control, self._log)
        self._answers = AdminAnswers(store, self._table, self._keeper, self._admin, self._exposure)
        self._settings.attach(self._table, self._admin, [self._take_settings, self._answers.configure])
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.opened")

    def _take_settings(self, config: NodeConfig) -> None:
        self._config, self._timing = config, config.supervisor
        log_module.configure(config.log.level, config.log.format)

    def _check_ports(self) -> None:
        """Raises AddressInUseError when another program has a port that a process of the node will need."""
        if sentence := ports.first_in_use(self._sockets(self._roles), self._config):
            raise AddressInUseError(sentence)

    @staticmethod
    def _sockets(roles: Iterable[ProcessSpec]) -> list[tuple[str, int]]:
        return [("admin", -1), *((role.name, role.dispatcher_slot) for role in roles)]

    def _write_node_file(self) -> None:
        self._store.write_node_file(self._keeper, self._admin.endpoints, self._ports)

    def _renew_node_file(self) -> None:
        """Write the file again under a running node. An error, as of a full disk, is logged, and the next turn tries again."""
        try:
            self._write_node_file()
        except OSError as error:
            if not self._node_file_is_old:
                self._log.error("run/node.json could not be written", error=str(error))
            self._node_file_is_old = True
        else:
            self._node_file_is_old = False

    # ------------------------------------------------------------ start

    def _start(self) -> None:
        """Bring all workers up in order. Returns early when asked to stop; raises StartFailed.

        The node is ready when all essential workers are: it waits for no index that is behind, and for servers not long.
        """
        table = self._table
        for role in self._roles:
            if not self._store.claimed and role.name not in _BEFORE_CLAIM:
                self._store.claim()
            if not role.on_demand and not self._bring_up(table.workers[role.name]):
                return
            if role.name == "recovery":
                self._store.remember_sizes()
            if role.name == "discovery":
                self._enlist(Roster(table.workers["discovery"].info))
        for worker in [one for one in table.workers.values() if one.phase is Phase.IDLE and not one.spec.on_demand]:
            self._bring_up(worker)
        servers = Servers(table.workers.values())
        if not servers.wait(self._timing.server_wait_s, self._turn, lambda: self._stop_asked):
            return
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_ready")
        self._starting = self._table.judging = False
        self._movers.look()
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.READY)
        self._log.info(
            "node is ready", admin=self._admin.endpoints[0], store=self._layout.root, epoch=self._store.epoch
        )
        warnings = [*self._answers.start_warnings(), *servers.warnings(), *self._answers.roster.failures()]
        for warning in warnings:
            self._log.warning(warning)
        about = {"admin": self._admin.endpoints, "servers": servers.addresses(), "store": str(self._layout.root)}
        self._report({"event": "ready", "pid": os.getpid(), "epoch": self._store.epoch, "warnings": warnings, **about})

    def _bring_up(self, worker: WorkerProcess) -> bool:
        """Start ``worker``, and wait until it is ready if it is essential. False when the node is to stop."""
        worker.wanted = True
        worker.phase = Phase.WAITING
        worker.start_at_ms = 0
        while worker.spec.essential and worker.phase not in (Phase.READY, Phase.DONE):
            if self._stop_asked:
                return False
            self._turn()
        return True

    def _enlist(self, roster: Roster) -> None:
        """Add the roles of plugins: dispatchers before reput, which feeds them; workers behind all of the node's own."""
        self._answers.roster = roster
        if roster.config_errors:
            raise StartFailed("; ".join(roster.config_errors), CliExit.CONFIG_ERROR)
        self._exposure.check(roster.listeners)
        for role in self._roles:
            if role.dispatcher:
                role.params["factory"] = roster.factory_of(role.dispatcher)
        dispatchers, workers = roster.plugin_roles()
        if sentence := ports.clash(roster.listeners, self._sockets([*self._roles, *dispatchers]), self._config):
            raise StartFailed(sentence, CliExit.CONFIG_ERROR)
        if sentence := ports.require_free(roster.listeners):
            raise StartFailed(sentence, CliExit.ADDRESS_IN_USE)
        roster.log_failures(self._log)
        self._table.filters = roster.filters
        for role in (*dispatchers, *workers):
            self._table.add(role)

    # ------------------------------------------------------------ stop

    def _stop(self) -> bool:
        """Drain and end everything. Returns whether the store was closed in order (``abort`` is gone then)."""
        self._stop_asked = True
        self._table.judging = False
        self._log.info("stopping")
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.DRAINING)
        Drain(self._table, self._timing.stop_timeout_s, self._turn, self._log).run()
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_abort_removed")
        store = self._store
        clean = store.is_closed_in_order(self._table.workers.values()) if store.claimed else store.was_clean
        store.remove_pool()
        if clean and store.claimed:
            store.confirm_queues()
            store.unclaim()
        self._table.forkserver.end()
        # A program that learns of the stop may start the node again at once: by then only this process's port is in its
        # way, and that for a moment only (see bind_admin).
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STOPPED)
        self._control.close()
        self._exposure.audit.close()  # the next node writes on
        store.leave()
        store.release()
        for peer, identity in self._stop_peers:
            self._admin.send(peer, wire.ok(identity, clean=clean))
        self._admin.close(last_word=bool(self._stop_peers))
        self._stop_peers.clear()
        if not self._starting:  # a failed start reports the reason itself
            self._report({"event": "stopped", "clean": clean})
        if not store.claimed:
            self._log.info("stopped before the store was opened, which is as it was found")
        elif clean:
            self._log.info("stopped; everything written is flushed and dispatched")
        else:
            self._log.warning("stopped, but not in order: the abort file stays and the next start recovers")
        return clean

    # ------------------------------------------------------------ the loop

    def _turn(self, max_wait_ms: float = float("inf")) -> None:
        """Wait for an event or the poll interval, handle the events, do the due work. May raise StartFailed."""
        self._admin.look()
        self._loop.wait(min(max_wait_ms, self._timing.poll_interval_ms, self._table.due_in_ms(monotonic_ms())))
        now_ms = monotonic_ms()
        self._control.put_worker(self._slot, WorkerWord.HEARTBEAT_MS, now_ms)
        self._manager.turn(now_ms, stopping=self._stop_asked)
        if not (self._starting or self._stop_asked):
            self._movers.look()
        self._table.tick(now_ms)
        self._answers.tick(now_ms)
        self._settings.tick(now_ms)
        self._rotation.tick(now_ms, self._config.log)
        if not self._stop_asked:
            stop = self._ask_stop if self._next_keeper is None else None
            fork = self._table.forkserver.fork_keeper
            self._keeper.look_after(now_ms, fork=fork, stop=stop, renew=self._renew_node_file, log=self._log)
        if self._node_file_is_old:
            self._renew_node_file()

    def _serve_admin(self) -> None:
        rest_s = self._admin.serve()
        if rest_s:
            self._loop.rest(self._admin.socket, rest_s)

    def _ask_stop(self, reason: str) -> None:
        if not self._stop_asked:
            self._stop_asked = True
            self._log.info("asked to stop", reason=reason)

    # ------------------------------------------------------------ admin socket

    def _metadata(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        self._check_serves()
        return self._answers.metadata(header)

    def _check_serves(self) -> None:
        if self._starting or self._stop_asked:
            doing = "stops" if self._stop_asked else "starts"
            raise ProtocolError("SERVICE_NOT_AVAILABLE", f"the node {doing}", retry_after_ms=200)

    def _mover_wanted(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        self._check_serves()
        self._movers.ask(str(header.get("role", "")))
        return wire.ok(header["id"])

    def _status(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        state = "stopping" if self._stop_asked else "starting" if self._starting else "ready"
        return self._answers.status(header, state)

    def _set_aside(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        return wire.ok(header["id"], messages=listed(self._layout.set_aside))

    def _stop_requested(self, peer: bytes, header: dict[str, Any]) -> None:
        """The answer comes at the very end, with whether the store was closed in order."""
        self._stop_peers.append((peer, header["id"]))
        self._ask_stop("request")
        # Tell the keeper first: if the supervisor is killed while it drains, the keeper would start the node again.
        self._keeper.tell_stop()
