"""The process that starts, watches, restarts and stops all others; the only one that may say a store was closed in order.

Owns the store's ``lock`` and ``abort`` files, ``run/node.json``, the admin socket, and the epoch and restart words of the
control block. Reads the workers' heartbeats. It must stay small: no numpy, no numba.

Start: take ``lock``; wait until no process of a former node holds a role lock (an orphan gets five seconds, then SIGKILL);
empty ``run/``; make the control block anew; write ``abort``; start the forkserver, run recovery, start the workers one
after the other, each when the one before is ready. Stop: the reverse, each worker draining; ``abort`` is removed only if
every worker ended with exit code 0 and everything written is flushed and dispatched.

Who dies, and what happens then:

* a worker: its pidfd wakes us; it is forked again after a back-off. A worker whose heartbeat stops is killed first.
* the forkserver: workers are our own children (see :mod:`commitmq.forkserver`) and go on; a new one is started.
* we: every lifeline closes, so every worker and the forkserver exit; the keeper starts a new supervisor.
* the keeper: in the foreground the node stops in order, because whoever killed ``commitmq start`` meant the node; in the
  background it goes on and says so, but nothing would start a killed supervisor again.
* all at once: the role and store locks are gone with their holders; the next start finds ``abort`` and recovers.

One loop (:meth:`Supervisor._turn`) handles everything; start and stop are written as plain sequences that turn it while they
wait. It wakes at every event, and ``supervisor.poll_interval_ms`` after the last one at the latest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import zmq

from commitmq import failpoints, node_files, status
from commitmq import log as log_module
from commitmq.admin_socket import AddressInUseError, AdminSocket, exposure_warning, is_loopback
from commitmq.cli.exit_codes import CliExit
from commitmq.client import wire
from commitmq.config import NodeConfig, from_mapping
from commitmq.control import ControlBlock, DispatcherWord, WorkerState, WorkerWord, Word
from commitmq.errors import CommitMQError, ProtocolError, StoreError, StoreLockedError
from commitmq.forkserver import ForkServer, ForkServerDied
from commitmq.processes import become_subreaper, free_locks, kill_lock_holder, set_process_name, start_time_ticks
from commitmq.store import abort_file
from commitmq.store.layout import StoreLayout
from commitmq.store.store_lock import StoreLock
from commitmq.worker_process import Phase, WorkerProcess, describe_exit
from commitmq.workers.runtime import ExitCode, monotonic_ms, role_slot

# A role that dies this often before it is ready, while the node starts, will not come up at the next try either.
START_ATTEMPTS = 3
ORPHAN_PATIENCE_S = 5.0
_CPU_SAMPLE_MS = 2_000
_SLOW_PRELOAD_MS = 8_000
_CLOSED_LIFELINE_MS = 5_000
_FORKSERVER_EXIT_S = 2.0

Report = Callable[[dict[str, Any]], None]


class StartFailed(CommitMQError):  # noqa: N818  (the end of a start, with the exit code that says why)
    """The node cannot start; the sentence and the exit code are for the person who started it."""

    def __init__(self, message: str, code: CliExit) -> None:
        super().__init__(message)
        self.code = code


def start_order(config: NodeConfig) -> dict[str, str]:
    """Module of each role, in the order in which they start; they stop in the reverse order."""
    return {
        "recovery": "commitmq.workers.recovery",
        "coordinator": "commitmq.workers.coordinator",
        "dispatcher-consume_queue": "commitmq.workers.dispatcher",
        "reput": "commitmq.workers.reput",
        "flush": "commitmq.workers.flush",
        "allocate": "commitmq.workers.allocate",
        **{f"reader-{number}": "commitmq.workers.reader" for number in range(config.reader.count)},
        "writer": "commitmq.workers.writer",
    }


def configured_port(role: str, config: NodeConfig) -> int:
    """The tcp port that the configuration gives ``role``; 0 for a free one, or for a role without a socket."""
    base = config.network.port
    if base == 0:
        return 0
    if role.startswith("reader-"):
        return base + 3 + int(role.removeprefix("reader-"))
    return {"admin": base, "writer": base + 1, "coordinator": base + 2}.get(role, 0)


class Supervisor:
    """One node, from taking the store's lock to releasing it."""

    def __init__(
        self,
        store: Path,
        config: NodeConfig,
        *,
        keeper_pid: int = 0,
        background: bool = False,
        report: Report = lambda _message: None,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """``report`` is told how the start goes; ``modules`` replaces :func:`start_order` (tests bring their own workers)."""
        self._layout = StoreLayout(store.absolute())
        self._config = config
        self._timing = config.supervisor
        self._keeper_pid = keeper_pid
        self._background = background
        self._report = report
        self._log = log_module.get_log("supervisor")
        self._modules = dict(modules or start_order(config))
        self._workers = {
            role: WorkerProcess(role, module, role_slot(role), one_shot=role == "recovery")
            for role, module in self._modules.items()
        }
        self._poller = zmq.Poller()
        self._on_readable: dict[Any, Callable[[], None]] = {}  # by descriptor, or the admin socket
        self._stop_asked = False
        self._starting = True
        self._served = False
        self._stop_peers: list[tuple[bytes, int]] = []
        self._failure: StartFailed | None = None
        self._ports: dict[str, int] = {}
        self._forkserver: ForkServer | None = None
        self._forkserver_deaths = 0
        self._forkserver_backoff_ms = 0
        self._forkserver_at_ms = 0
        self._said_compiling = False
        self._last_turn_ms = 0
        self._hang_floor_ms = 0
        self._sampled_ms = 0
        self._cpu = {"supervisor": status.CpuMeter(), "forkserver": status.CpuMeter(), "keeper": status.CpuMeter()}
        self._keeper_gone = False

    # ------------------------------------------------------------ life

    def run(self) -> int:
        """Start, serve until asked to stop, stop; returns the exit code (:class:`CliExit`)."""
        self._catch_signals()
        try:
            self._open()
        except StoreLockedError as error:
            return self._refuse(str(error), CliExit.STORE_LOCKED)
        except StoreError as error:
            return self._refuse(str(error), CliExit.STORE_UNUSABLE)
        except AddressInUseError as error:
            return self._refuse(str(error), CliExit.ADDRESS_IN_USE)
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
            self._report({"event": "failed", "error": "the node was stopped while it started", "code": CliExit.INTERRUPTED})
        return CliExit.OK if clean else CliExit.UNCLEAN_STOP

    def _refuse(self, sentence: str, code: CliExit) -> int:
        if self._failure is None:
            self._log.error("cannot start", error=sentence)
        self._report({"event": "failed", "error": sentence, "code": int(code)})
        return code

    def _open(self) -> None:
        """Everything up to the first child. Raises StoreError and CommitMQError; nothing is left locked then."""
        layout = self._layout
        node_files.make_folders(layout)
        self._lock = StoreLock(layout.lock)
        self._lock.acquire()
        killed = []
        try:
            killed = free_locks(layout.run.glob("*.lock"), ORPHAN_PATIENCE_S)
        except BlockingIOError as error:
            self._lock.release()
            raise StoreError(f"a worker of a former node cannot be ended: {error}", path=layout.run) from error
        for name, pid in killed:
            self._log.warning("killed a worker of a former node", lock=name, pid=pid)
        if self._config.network.port == 0:
            remembered = node_files.read_node_file(layout).get("ports")
            self._ports = {str(role): int(port) for role, port in remembered.items()} if remembered else {}
        try:
            node_files.empty_run_folder(layout)
            self._epoch = node_files.next_epoch(layout)
            self._control = ControlBlock(layout.control, create=True)
            self._admin = self._bind_admin()
        except BaseException:
            self._lock.release()
            raise
        self._control.put(Word.EPOCH, self._epoch)
        self._slot = role_slot("supervisor")
        self._control.put_worker(self._slot, WorkerWord.PID, os.getpid())
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STARTING)
        self._watch(self._admin.socket, self._admin.serve)
        self._token = secrets.token_hex(16)
        node_files.write_atomically(layout.run / "token", self._token.encode())
        self._write_node_file()
        become_subreaper()
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_abort")
        self._was_clean = not abort_file.exists(layout.abort)
        abort_file.create(layout.abort, os.getpid())
        if not is_loopback(self._config.network.host):
            self._log.warning(exposure_warning(self._config.network.host, self._port_of("admin")))

    def _bind_admin(self) -> AdminSocket:
        handlers = {"metadata": self._metadata, "status": self._status, "stop": self._stop_requested}
        port = self._port_of("admin")
        try:
            admin = AdminSocket(self._config, self._layout.ipc("admin"), port, handlers, self._log)
        except AddressInUseError:
            if self._config.network.port:
                raise
            # The free port of the node's former life was taken meanwhile: any other will do.
            admin = AdminSocket(self._config, self._layout.ipc("admin"), 0, handlers, self._log)
        self._ports["admin"] = _port_in(admin.endpoints) or port
        return admin

    def _port_of(self, role: str) -> int:
        return configured_port(role, self._config) or self._ports.get(role, 0)

    def _write_node_file(self) -> None:
        node_files.write_atomically(
            self._layout.node_file,
            orjson.dumps(
                {
                    "pid": os.getpid(),
                    "started_ticks": start_time_ticks(os.getpid()),
                    "keeper_pid": self._keeper_pid,
                    "keeper_started_ticks": start_time_ticks(self._keeper_pid) if self._keeper_pid else None,
                    "admin": self._admin.endpoints,
                    "token": self._token,
                    "epoch": self._epoch,
                    "ports": self._ports,
                }
            ),
        )

    # ------------------------------------------------------------ start

    def _start(self) -> None:
        """Bring all workers up in order. Returns early when asked to stop; raises StartFailed."""
        for worker in self._workers.values():
            worker.wanted = True
            worker.phase = Phase.WAITING
            worker.start_at_ms = 0
            while worker.phase not in (Phase.READY, Phase.DONE):
                if self._stop_asked:
                    return
                self._turn()
        self._starting = False
        self._served = True
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.READY)
        self._log.info("node is ready", admin=self._admin.endpoints[0], store=self._layout.root, epoch=self._epoch)
        self._report({"event": "ready", "admin": self._admin.endpoints, "pid": os.getpid(), "epoch": self._epoch})

    # ------------------------------------------------------------ stop

    def _stop(self) -> bool:
        """Drain and end everything; returns whether the store was closed in order (``abort`` is gone then)."""
        self._stop_asked = True
        self._log.info("stopping")
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.DRAINING)
        for worker in reversed(self._workers.values()):
            self._stop_worker(worker)
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_abort_removed")
        clean = self._may_remove_abort()
        if clean:
            abort_file.remove(self._layout.abort)
        self._end_forkserver()
        for peer, identity in self._stop_peers:
            self._admin.send(peer, wire.ok(identity, clean=clean))
        self._stop_peers.clear()
        self._admin.close()
        for name in (self._layout.node_file, self._layout.run / "token"):
            name.unlink(missing_ok=True)
        node_files.remove_socket_folder(self._layout)
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STOPPED)
        self._control.close()
        self._lock.release()
        if clean:
            self._log.info("stopped; everything written is flushed and dispatched")
        else:
            self._log.warning("stopped, but not in order: the abort file stays and the next start recovers")
        return clean

    def _stop_worker(self, worker: WorkerProcess) -> None:
        """Ask ``worker`` to drain and wait for its end; one that does not listen is killed after the configured time."""
        worker.wanted = False
        if not worker.pid:
            # It died a moment ago and nobody will drain for it now.
            worker.unclean = worker.unclean or worker.phase is Phase.WAITING
            worker.phase = Phase.DONE if worker.phase is Phase.DONE else Phase.IDLE
            return
        # A recovery that is still running has promised nothing yet: the next one begins again.
        patience_ms = 2_000 if worker.one_shot else self._timing.stop_timeout_s * 1000
        deadline_ms = monotonic_ms() + patience_ms
        worker.ask_to_stop()
        while worker.pid:
            self._turn(max_wait_ms=deadline_ms - monotonic_ms())
            if worker.pid and not worker.killed_because and monotonic_ms() >= deadline_ms:
                self._log.error("worker does not stop, killing it", role=worker.role, pid=worker.pid)
                worker.kill(f"it did not stop within {patience_ms / 1000:g} s")

    def _may_remove_abort(self) -> bool:
        if not self._served:
            # Nothing was served. Only a store that recovery refused untouched goes back to how it was found.
            refused = self._failure is not None and self._failure.code is CliExit.STORE_UNUSABLE
            return refused and self._was_clean and self._workers_started() <= {"recovery"}
        unclean = [worker.role for worker in self._workers.values() if worker.unclean]
        written, flushed = self._control.get(Word.WRITTEN), self._control.get(Word.FLUSHED)
        dispatched = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
        flush_errno = self._control.get(Word.FLUSH_ERRNO)
        if unclean or flush_errno or not written == flushed == dispatched:
            self._log.error(
                "the store is not closed in order",
                unclean_workers=",".join(unclean),
                written=written,
                flushed=flushed,
                dispatched=dispatched,
                flush_errno=flush_errno,
            )
            return False
        return True

    def _workers_started(self) -> set[str]:
        return {worker.role for worker in self._workers.values() if worker.started_ms}

    def _end_forkserver(self) -> None:
        forkserver = self._forkserver
        if forkserver is None:
            return
        self._unwatch(forkserver.pidfd)
        self._unwatch(forkserver.socket.fileno())
        forkserver.end(_FORKSERVER_EXIT_S)
        self._forkserver = None

    # ------------------------------------------------------------ the loop

    def _turn(self, max_wait_ms: float = 1e9) -> None:
        """Wait for the next event or the poll interval, handle what happened, and do what is due. May raise StartFailed."""
        now_ms = monotonic_ms()
        wait_ms = min(max_wait_ms, self._timing.poll_interval_ms)
        for worker in self._workers.values():
            if worker.wanted and worker.phase is Phase.WAITING and self._forkserver is not None and self._forkserver.ready:
                wait_ms = min(wait_ms, worker.start_at_ms - now_ms)
        for fd, _ in self._poller.poll(max(0, int(wait_ms))):
            handler = self._on_readable.get(fd)
            if handler is not None:  # an earlier handler of this turn may have closed it
                handler()
        self._tick()

    def _tick(self) -> None:
        now_ms = monotonic_ms()
        if self._last_turn_ms and now_ms - self._last_turn_ms > 5 * self._timing.poll_interval_ms + 1_000:
            # We were stopped ourselves (a paused machine, SIGSTOP), probably together with everybody: heartbeats count
            # from here on.
            self._hang_floor_ms = now_ms
        self._last_turn_ms = now_ms
        self._control.put_worker(self._slot, WorkerWord.HEARTBEAT_MS, now_ms)
        self._keep_forkserver(now_ms)
        for worker in self._workers.values():
            if worker.pid:
                self._check_alive(worker, now_ms)
            elif worker.wanted and worker.phase is Phase.WAITING and now_ms >= worker.start_at_ms:
                self._launch(worker, now_ms)
        if now_ms - self._sampled_ms >= _CPU_SAMPLE_MS:
            self._sample(now_ms)
        if self._keeper_pid and not self._keeper_gone and os.getppid() != self._keeper_pid:
            self._keeper_gone = True
            if self._background:
                self._log.warning("the keeper is gone: nothing would start this supervisor again if it were killed")
            else:
                self._ask_stop("the keeper is gone")

    def _watch(self, fd: Any, handler: Callable[[], None]) -> None:
        self._on_readable[fd] = handler
        self._poller.register(fd, zmq.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._on_readable.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def _catch_signals(self) -> None:
        self._wakeup, wakeup_writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: self._ask_stop(signal.Signals(received).name))
        # Not our business: a closed terminal is the keeper's, and writing to one must not stop a node behind it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._watch(self._wakeup.fileno(), self._drain_wakeups)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass

    def _ask_stop(self, reason: str) -> None:
        if not self._stop_asked:
            self._stop_asked = True
            self._log.info("asked to stop", reason=reason)

    def _sample(self, now_ms: int) -> None:
        self._sampled_ms = now_ms
        for worker in self._workers.values():
            worker.cpu.sample(worker.pid, now_ms)
            if worker.cpu.percent > 0:
                worker.active_ms = now_ms
        self._cpu["supervisor"].sample(os.getpid(), now_ms)
        self._cpu["forkserver"].sample(self._forkserver.pid if self._forkserver else 0, now_ms)
        self._cpu["keeper"].sample(0 if self._keeper_gone else self._keeper_pid, now_ms)
        self._reap_strays()

    def _reap_strays(self) -> None:
        """Wait for orphans that became our children and that nobody knows, one at a time: they would stay zombies."""
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        known = {worker.pid for worker in self._workers.values()} | {self._forkserver.pid if self._forkserver else 0}
        if ended is not None and ended.si_pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)

    # ------------------------------------------------------------ forkserver

    def _keep_forkserver(self, now_ms: int) -> None:
        forkserver = self._forkserver
        if forkserver is not None:
            slow = now_ms - self._forkserver_at_ms > _SLOW_PRELOAD_MS
            if not forkserver.ready and slow:
                self._say_compiling()
            if not forkserver.ready and now_ms - self._forkserver_at_ms > self._timing.start_timeout_s * 1000:
                forkserver.kill()
            return
        if now_ms < self._forkserver_at_ms or not any(worker.wanted for worker in self._workers.values()):
            return
        self._forkserver_at_ms = now_ms
        self._forkserver = started = ForkServer(self._layout, self._config, self._modules)
        self._watch(started.socket.fileno(), self._hear_forkserver)
        self._watch(started.pidfd, self._forkserver_ended)

    def _hear_forkserver(self) -> None:
        if self._forkserver is None:
            return
        for event in self._forkserver.read_events():
            if event.get("event") == "compiling":
                self._say_compiling()
            elif event.get("event") == "ready":
                self._log.debug("forkserver is ready", preload_s=event.get("preload_s"))
        if self._forkserver.ended:
            # Its socket is closed; its pidfd follows. Polling a closed socket would return at once, every time.
            self._unwatch(self._forkserver.socket.fileno())

    def _say_compiling(self) -> None:
        if not self._said_compiling:
            self._said_compiling = True
            sentence = "compiling kernels, which takes about ten seconds and is done once after installation"
            self._log.info(sentence)
            self._report({"event": "info", "message": sentence})

    def _forkserver_ended(self) -> None:
        forkserver = self._forkserver
        if forkserver is None or (code := forkserver.reap()) is None:
            return
        self._unwatch(forkserver.pidfd)
        self._unwatch(forkserver.socket.fileno())
        was_ready = forkserver.ready
        forkserver.close()
        self._forkserver = None
        now_ms = monotonic_ms()
        well = was_ready and now_ms - self._forkserver_at_ms >= self._timing.restart_window_s * 1000
        doubled = min(self._forkserver_backoff_ms * 2, self._timing.restart_backoff_max_ms)
        self._forkserver_backoff_ms = self._timing.restart_backoff_ms if well or not doubled else doubled
        self._forkserver_at_ms = now_ms + self._forkserver_backoff_ms
        self._forkserver_deaths += 1
        self._log.error(
            "forkserver died; workers go on",
            pid=forkserver.pid,
            why=describe_exit(code),
            restart_in_ms=self._forkserver_backoff_ms,
        )
        if self._starting and not self._stop_asked and not was_ready and self._forkserver_deaths >= START_ATTEMPTS:
            raise StartFailed(
                f"the forkserver ended with {describe_exit(code)} while it loaded its modules; its log says why",
                CliExit.START_FAILED,
            )

    # ------------------------------------------------------------ workers

    def _launch(self, worker: WorkerProcess, now_ms: int) -> None:
        forkserver = self._forkserver
        if forkserver is None or not forkserver.ready:
            return
        # Our own child of this role is dead and waited for, so whoever holds the lock is a stray of a lost fork request.
        stray = kill_lock_holder(self._layout.role_lock(worker.role))
        if stray is not None:
            self._log.warning("killed a stray worker", role=worker.role, pid=stray)
        params: dict[str, Any] = {"port": self._port_of(worker.role)}
        if worker.one_shot:
            params["clean"] = self._was_clean
        try:
            worker.fork(forkserver, params, now_ms)
        except ForkServerDied as error:
            self._log.error("cannot fork a worker", role=worker.role, error=str(error))
            worker.start_at_ms = now_ms + self._timing.restart_backoff_ms
            forkserver.kill()
            return
        assert worker.lifeline is not None
        self._watch(worker.lifeline.fileno(), lambda: self._hear(worker))
        self._watch(worker.pidfd, lambda: self._worker_ended(worker))
        self._log.info("worker started", role=worker.role, pid=worker.pid, restarts=worker.restarts)

    def _hear(self, worker: WorkerProcess) -> None:
        if worker.lifeline is None:
            return
        now_ms = monotonic_ms()
        for message in worker.read_lifeline(now_ms):
            event = message.pop("event", None)
            if event == "ready":
                self._worker_is_ready(worker, message, now_ms)
            elif event == "error":
                worker.last_error = str(message.get("error", ""))
            else:
                worker.info.update(message)
        if worker.lifeline_ended_ms:
            self._unwatch(worker.lifeline.fileno())

    def _worker_is_ready(self, worker: WorkerProcess, message: dict[str, Any], now_ms: int) -> None:
        if worker.phase is Phase.STARTING and not worker.one_shot:
            worker.phase = Phase.READY
        worker.ready_ms = now_ms
        endpoints = message.pop("endpoints", None)
        worker.info.update(message)
        if endpoints:
            worker.endpoints = [str(endpoint) for endpoint in endpoints]
            port = _port_in(worker.endpoints)
            if port and self._ports.get(worker.role) != port:
                self._ports[worker.role] = port
                self._write_node_file()
        self._log.info("worker is ready", role=worker.role, pid=worker.pid, after_ms=now_ms - worker.started_ms)

    def _worker_ended(self, worker: WorkerProcess) -> None:
        if not worker.pid:
            return
        self._hear(worker)  # its last words arrived before its end
        fds = [worker.pidfd, worker.lifeline.fileno() if worker.lifeline else -1]
        pid = worker.pid
        code = worker.reap()
        if code is None:
            return
        for fd in fds:
            self._unwatch(fd)
        # Nobody writes a dead worker's words any more, and peers must not take it for asleep or alive.
        for word in (WorkerWord.PID, WorkerWord.STATE, WorkerWord.ASLEEP):
            self._control.put_worker(worker.slot, word, 0)
        if worker.one_shot and code == 0:
            worker.phase, worker.wanted = Phase.DONE, False
            return
        if not worker.wanted:
            worker.phase = Phase.IDLE
            worker.unclean = worker.unclean or code != 0
            if code != 0:
                self._log.error("worker did not end in order", role=worker.role, pid=pid, why=worker.last_exit)
            return
        self._restart_later(worker, pid, code)

    def _restart_later(self, worker: WorkerProcess, pid: int, code: int) -> None:
        if self._starting and not self._stop_asked:
            self._judge_start(worker, code)
        now_ms = monotonic_ms()
        timing = self._timing
        pause_ms = worker.next_backoff(
            now_ms, timing.restart_backoff_ms, timing.restart_backoff_max_ms, timing.restart_window_s * 1000
        )
        if self._config.network.port == 0 and "Address already in use" in worker.last_error and worker.restarts:
            self._ports.pop(worker.role, None)  # somebody took the free port it had: it gets another
        worker.phase = Phase.WAITING
        worker.start_at_ms = now_ms + pause_ms
        worker.restarts += 1
        worker.info.clear()
        self._control.put_worker(worker.slot, WorkerWord.RESTARTS, worker.restarts)
        self._log.error(
            "worker died", role=worker.role, pid=pid, why=worker.last_exit, error=worker.last_error or "-",
            restart_in_ms=pause_ms,
        )  # fmt: skip

    def _judge_start(self, worker: WorkerProcess, code: int) -> None:
        """Raise StartFailed when trying again while the node starts is of no use."""
        reason = worker.last_error or worker.last_exit
        if code == ExitCode.STORE_UNUSABLE:
            raise StartFailed(reason, CliExit.STORE_UNUSABLE)
        worker.deaths_before_ready += not worker.ready_ms
        if worker.deaths_before_ready >= START_ATTEMPTS:
            in_use = "Address already in use" in reason and self._config.network.port
            if in_use:
                reason = f"another program listens on port {self._port_of(worker.role)} ({reason})"
            raise StartFailed(
                f"the {worker.role} process cannot start: {reason}",
                CliExit.ADDRESS_IN_USE if in_use else CliExit.START_FAILED,
            )

    def _check_alive(self, worker: WorkerProcess, now_ms: int) -> None:
        """Kill a worker that hangs; its end and restart follow through the pidfd."""
        if worker.killed_because:
            return
        heartbeat_ms = 0
        if self._control.worker(worker.slot, WorkerWord.PID) == worker.pid:
            heartbeat_ms = self._control.worker(worker.slot, WorkerWord.HEARTBEAT_MS)
        if worker.one_shot:
            # A recovery is one long scan without a loop that could beat: work it does counts as life.
            heartbeat_ms = max(heartbeat_ms, worker.active_ms)
        silent_ms = now_ms - max(heartbeat_ms, worker.started_ms, self._hang_floor_ms)
        because = ""
        if silent_ms > self._timing.hang_timeout_s * 1000:
            because = f"no heartbeat for {silent_ms // 1000} s"
        elif worker.lifeline_ended_ms and now_ms - worker.lifeline_ended_ms > _CLOSED_LIFELINE_MS:
            because = "it closed its lifeline but lives"
        elif (
            worker.phase is Phase.STARTING
            and not worker.one_shot  # a recovery takes as long as it takes
            and now_ms - max(worker.started_ms, self._hang_floor_ms) > self._timing.start_timeout_s * 1000
        ):
            because = f"not ready after {self._timing.start_timeout_s} s"
        if because:
            self._log.error("killing a worker", role=worker.role, pid=worker.pid, why=because)
            worker.kill(because)

    # ------------------------------------------------------------ admin socket

    def _metadata(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        if self._starting or self._stop_asked:
            doing = "stops" if self._stop_asked else "starts"
            raise ProtocolError("SERVICE_NOT_AVAILABLE", f"the node {doing}", retry_after_ms=200)
        config = self._config
        readers = [worker.endpoints for role, worker in self._workers.items() if role.startswith("reader-")]
        endpoints: dict[str, Any] = {
            role: self._workers[role].endpoints for role in ("writer", "coordinator") if role in self._workers
        }
        return wire.ok(
            header["id"],
            node=f"{os.uname().nodename}:{os.getpid()}",
            token=self._token,
            epoch=self._epoch,
            store=str(self._layout.root),
            segment_bytes=config.commit_log.segment_bytes,
            file_bytes=config.consume_queue.file_bytes,
            flush_mode=config.commit_log.flush_mode,
            properties_crc=config.commit_log.append_properties_crc,
            endpoints={**endpoints, "reader": readers},
            limits={
                "max_message_bytes": config.commit_log.max_message_bytes,
                "max_run_bytes": config.commit_log.max_run_bytes,
                "max_frame_bytes": config.network.max_frame_bytes,
                "max_pull_messages": config.reader.max_pull_messages,
                "max_pull_bytes": config.reader.max_pull_bytes,
                "max_wait_ms": config.reader.max_wait_ms,
            },
        )

    def _status(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        now_ms = monotonic_ms()
        if now_ms - self._sampled_ms > _CPU_SAMPLE_MS // 2:
            self._sample(now_ms)
        state = "stopping" if self._stop_asked else "starting" if self._starting else "ready"
        return wire.ok(
            header["id"],
            node={
                "state": state,
                "store": str(self._layout.root),
                "token": self._token,
                "epoch": self._epoch,
                "admin": self._admin.endpoints,
                "flush_mode": self._config.commit_log.flush_mode,
                "keeper": "gone" if self._keeper_gone else "none" if not self._keeper_pid else "running",
            },
            processes=list(self._process_rows(state)),
            positions=status.positions(self._control),
            disk_flags=status.disk_flags(self._control),
        )

    def _process_rows(self, state: str) -> list[dict[str, Any]]:
        store = self._layout.root
        rows = []
        if self._keeper_pid and not self._keeper_gone:
            rows.append(status.process_row("keeper", self._keeper_pid, "ready", 0, self._cpu["keeper"], store))
        rows.append(status.process_row("supervisor", os.getpid(), state, 0, self._cpu["supervisor"], store))
        if self._forkserver is not None:
            phase = "ready" if self._forkserver.ready else "starting"
            cpu = self._cpu["forkserver"]
            rows.append(
                status.process_row("forkserver", self._forkserver.pid, phase, self._forkserver_deaths, cpu, store)
            )
        for worker in self._workers.values():
            position, lag = status.position_and_lag(worker.role, self._control, self._config.sync_flush)
            rows.append(
                status.process_row(
                    worker.role,
                    worker.pid,
                    str(worker.phase),
                    worker.restarts,
                    worker.cpu,
                    store,
                    position=position,
                    lag_bytes=lag,
                    endpoints=worker.endpoints,
                    last_exit=worker.last_exit or None,
                    last_error=worker.last_error or None,
                    info=worker.info,
                )
            )
        return rows

    def _stop_requested(self, peer: bytes, header: dict[str, Any]) -> None:
        """Answered at the very end, with whether the store was closed in order."""
        self._stop_peers.append((peer, header["id"]))
        self._ask_stop("request")
        if self._keeper_pid and not self._keeper_gone:
            # The keeper must know too: should we be killed while we drain, it would start the node again.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._keeper_pid, signal.SIGTERM)


def _port_in(endpoints: list[str]) -> int:
    """The tcp port among ``endpoints``, 0 when there is none."""
    for endpoint in endpoints:
        _, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and port.isdecimal():
            return int(port)
    return 0


def read_config(fd: int) -> NodeConfig:
    """The configuration in memory file ``fd``, which stays open for the next supervisor."""
    return from_mapping(orjson.loads(os.pread(fd, os.fstat(fd).st_size, 0)))


def pipe_report(fd: int) -> Report:
    """Reports as JSON lines to ``fd`` (-1: nowhere); a reader that has gone is no trouble."""

    def report(message: dict[str, Any]) -> None:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.write(fd, orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    return report


def main(arguments: list[str]) -> int:
    """``python -m commitmq.supervisor STORE CONFIG_FD READY_FD MODE KEEPER_PID``: what the keeper starts."""
    store, config_fd, ready_fd, mode, keeper_pid = arguments
    log_module.configure()
    set_process_name("cmq-supervisor")
    for fd in (int(config_fd), int(ready_fd)):
        if fd >= 0:
            os.set_inheritable(fd, False)
    report = pipe_report(int(ready_fd))
    try:
        supervisor = Supervisor(
            Path(store),
            read_config(int(config_fd)),
            keeper_pid=int(keeper_pid),
            background=mode == "background",
            report=report,
        )
        return int(supervisor.run())
    except Exception as error:  # the exit code must be right whatever happened, and the workers end with our lifelines
        log_module.get_log("supervisor").exception("supervisor crashed", error=repr(error))
        report({"event": "failed", "error": f"the supervisor crashed: {error!r}", "code": int(CliExit.CRASHED)})
        return int(CliExit.CRASHED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
