"""The process that starts, watches, restarts and stops all others, and that alone may call a store closed in order.

Owns the store's ``lock`` and ``abort`` files, ``run/node.json``, the admin socket, and the epoch and restart words of
the control block. Reads the workers' heartbeats. It must stay small: no numpy, no numba.

Start: take ``lock``; wait until no process of a former node holds a role lock (an orphan gets five seconds, then
SIGKILL); empty ``run/``; make the control block anew; write ``abort``; start the forkserver, run recovery, start the
workers one after the other, each when the one before is ready. Stop: the reverse, each worker draining; ``abort`` is
removed only if every worker ended with exit code 0 and everything written is flushed and dispatched.

Who dies, and what happens then:

* a worker: its pidfd wakes us; it is forked again after a back-off. A worker whose heartbeat stops is killed first.
* the forkserver: workers are our own children (see :mod:`commitmq.forkserver`) and go on; a new one is started.
* we: every lifeline closes, so every worker and the forkserver exit; the keeper starts a new supervisor.
* the keeper: in the foreground the node stops in order, because whoever killed ``commitmq start`` meant the node; in
  the background it goes on and says so, but nothing would start a killed supervisor again.
* all at once: the role and store locks are gone with their holders; the next start finds ``abort`` and recovers.

One loop (:meth:`Supervisor._turn`) handles everything; start and stop are written as plain sequences that turn it
while they wait. It wakes at every event, and ``supervisor.poll_interval_ms`` after the last one at the latest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from commitmq import failpoints, node_files, node_report, status
from commitmq import log as log_module
from commitmq.admin_socket import AddressInUseError, AdminSocket, exposure_warning, is_loopback
from commitmq.cli.exit_codes import CliExit
from commitmq.client import wire
from commitmq.config import NodeConfig, from_mapping
from commitmq.control import ControlBlock, DispatcherWord, Word, WorkerState, WorkerWord
from commitmq.crew import CPU_SAMPLE_MS, Crew, EventLoop, StartFailed, port_of, tcp_port
from commitmq.errors import CommitMQError, ProtocolError, StoreError, StoreLockedError
from commitmq.processes import become_subreaper, free_locks, set_process_name, start_time_ticks
from commitmq.roster import Roster, own_role, start_order
from commitmq.store import abort_file, transient_pool
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.sidecar import Sidecar
from commitmq.store.store_lock import StoreLock
from commitmq.worker_process import Phase, WorkerProcess
from commitmq.workers.runtime import monotonic_ms, role_slot

ORPHAN_PATIENCE_S = 5.0
_PORT_PATIENCE_MS = 500

Report = Callable[[dict[str, Any]], None]


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
        """``report`` is told how the start goes; ``modules`` (role to module, in start order) is for tests."""
        self._layout = StoreLayout(store.absolute())
        self._config = config
        self._timing = config.supervisor
        self._keeper_pid = keeper_pid
        self._background = background
        self._report = report
        self._log = log_module.get_log("supervisor")
        self._roles = [own_role(name, module) for name, module in (modules or start_order(config)).items()]
        if modules is None:
            self._roles.insert(0, own_role("discovery", "commitmq.workers.discovery"))
        self._roster = Roster()
        self._loop = EventLoop()
        self._stop_asked = False
        self._starting = True
        self._stop_peers: list[tuple[bytes, int]] = []
        self._failure: StartFailed | None = None
        self._ports: dict[str, int] = {}
        self._sampled_ms = 0
        self._cpu = {"supervisor": status.CpuMeter(), "keeper": status.CpuMeter()}
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
            sentence = "the node was stopped while it started"
            self._report({"event": "failed", "error": sentence, "code": int(CliExit.INTERRUPTED)})
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
        try:
            self._open_locked()
        except BaseException:
            # What we wrote into run/ describes a node that never was.
            layout.node_file.unlink(missing_ok=True)
            self._lock.release()
            raise

    def _open_locked(self) -> None:
        layout = self._layout
        try:
            killed = free_locks(layout.run.glob("*.lock"), ORPHAN_PATIENCE_S)
        except BlockingIOError as error:
            raise StoreError(f"a worker of a former node cannot be ended: {error}", path=layout.run) from error
        for name, pid in killed:
            self._log.warning("killed a worker of a former node", lock=name, pid=pid)
        if self._config.network.port == 0:
            remembered = node_files.read_node_file(layout).get("ports")
            self._ports = {str(role): int(port) for role, port in remembered.items()} if remembered else {}
        node_files.empty_run_folder(layout)
        self._epoch = node_files.next_epoch(layout)
        self._control = ControlBlock(layout.control, create=True)
        self._admin = self._bind_admin()
        self._control.put(Word.EPOCH, self._epoch)
        self._slot = role_slot("supervisor")
        self._control.put_worker(self._slot, WorkerWord.PID, os.getpid())
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STARTING)
        self._loop.watch(self._admin.socket, self._admin.serve)
        self._token = secrets.token_hex(16)
        node_files.write_atomically(layout.run / "token", self._token.encode())
        self._write_node_file()
        become_subreaper()
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_abort")
        self._was_clean = not abort_file.exists(layout.abort)
        for role in self._roles:
            if role.name == "recovery":
                role.params["previous_pid"] = abort_file.read_pid(layout.abort)
        if self._was_clean:
            abort_file.create(layout.abort, os.getpid())
        if not is_loopback(self._config.network.host):
            self._log.warning(exposure_warning(self._config.network.host, self._ports["admin"]))
        self._crew = Crew(
            layout,
            self._config,
            self._control,
            self._roles,
            loop=self._loop,
            ports=self._ports,
            was_clean=self._was_clean,
            on_new_port=self._write_node_file,
            on_news=lambda sentence: self._report({"event": "info", "message": sentence}),
            log=self._log,
        )

    def _bind_admin(self) -> AdminSocket:
        handlers = {"metadata": self._metadata, "status": self._status, "stop": self._stop_requested}
        port = port_of("admin", self._config, self._ports)
        deadline_ms = monotonic_ms() + (_PORT_PATIENCE_MS if self._config.network.port else 0)
        try:
            while True:
                try:
                    admin = AdminSocket(self._config, self._layout.ipc("admin"), port, handlers, self._log)
                    break
                except AddressInUseError:
                    if monotonic_ms() >= deadline_ms:
                        raise
                    time.sleep(0.02)  # the node before us has stopped and is just saying so
        except AddressInUseError:
            if self._config.network.port:
                raise
            # The free port of the node's former life was taken meanwhile: any other will do.
            admin = AdminSocket(self._config, self._layout.ipc("admin"), 0, handlers, self._log)
        self._ports["admin"] = tcp_port(admin.endpoints) or port
        return admin

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
        """Bring all workers up in order. Returns early when asked to stop; raises StartFailed.

        The node is ready when everything essential is: nobody waits for a plugin, or for an index that is behind.
        """
        crew = self._crew
        for role in self._roles:
            if not self._bring_up(crew.workers[role.name]):
                return
            if role.name == "recovery" and not self._was_clean:
                # Not before: if we end while it runs, the next one must still see whose crash it is that it finds.
                abort_file.create(self._layout.abort, os.getpid())
            if role.name == "discovery":
                self._enlist(Roster(crew.workers["discovery"].info))
        for role in [worker.spec for worker in crew.workers.values() if worker.phase is Phase.IDLE]:
            self._bring_up(crew.workers[role.name])
        self._starting = self._crew.judging = False
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.READY)
        self._log.info("node is ready", admin=self._admin.endpoints[0], store=self._layout.root, epoch=self._epoch)
        self._report({"event": "ready", "admin": self._admin.endpoints, "pid": os.getpid(), "epoch": self._epoch})

    def _bring_up(self, worker: WorkerProcess) -> bool:
        """Have ``worker`` started, and wait until it is ready if it is essential; False when the node is to stop."""
        worker.wanted = True
        worker.phase = Phase.WAITING
        worker.start_at_ms = 0
        while worker.spec.essential and worker.phase not in (Phase.READY, Phase.DONE):
            if self._stop_asked:
                return False
            self._turn()
        return True

    def _enlist(self, roster: Roster) -> None:
        """Take in what plugins add: dispatchers before reput, which feeds them; workers behind all of the node's own."""
        self._roster = roster
        if roster.config_errors:
            raise StartFailed("; ".join(roster.config_errors), CliExit.CONFIG_ERROR)
        dispatchers, workers = roster.plugin_roles()
        for report in roster.reports:
            if report["failure"]:
                why = report["failure"].strip().splitlines()[-1]
                self._log.error("a plugin failed", plugin=report["name"], where=report["failed_in"], why=why)
        self._crew.filters = roster.filters
        for role in (*dispatchers, *workers):
            self._crew.add(role)

    # ------------------------------------------------------------ stop

    def _stop(self) -> bool:
        """Drain and end everything; returns whether the store was closed in order (``abort`` is gone then)."""
        self._stop_asked = True
        self._crew.judging = False
        self._log.info("stopping")
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.DRAINING)
        for worker in self._stop_order():
            self._stop_worker(worker)
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_abort_removed")
        clean = self._may_remove_abort()
        self._remove_pool()
        if clean:
            self._confirm_queues()
            abort_file.remove(self._layout.abort)
        self._crew.end_forkserver()
        # Whoever is told that the node is stopped may start it again at once: nothing but our port is in its way by then,
        # and that for a moment only (see _bind_admin).
        for name in (self._layout.node_file, self._layout.run / "token"):
            name.unlink(missing_ok=True)
        node_files.remove_socket_folder(self._layout)
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STOPPED)
        self._control.close()
        self._lock.release()
        for peer, identity in self._stop_peers:
            self._admin.send(peer, wire.ok(identity, clean=clean))
        self._admin.close(last_word=bool(self._stop_peers))
        self._stop_peers.clear()
        if clean:
            self._log.info("stopped; everything written is flushed and dispatched")
        else:
            self._log.warning("stopped, but not in order: the abort file stays and the next start recovers")
        return clean

    def _remove_pool(self) -> None:
        """Give the memory of the transient store pool back, unless it holds what is not in the log's files."""
        control = self._control
        if control.get(Word.POOL_BUFFERS) and control.get(Word.COMMITTED) == control.get(Word.WRITTEN):
            try:
                transient_pool.remove(self._layout)
            except (OSError, StoreError) as error:
                self._log.warning("cannot remove the transient store pool", error=str(error))

    def _stop_order(self) -> list[WorkerProcess]:
        """Plugins' workers first, which may be clients; their dispatchers last, when nothing more comes."""
        workers = list(self._crew.workers.values())
        own = [worker for worker in workers if not worker.spec.plugin]
        dispatchers = [worker for worker in workers if worker.spec.plugin and worker.spec.dispatcher]
        others = [worker for worker in workers if worker.spec.plugin and not worker.spec.dispatcher]
        return [*reversed(others), *reversed(own), *reversed(dispatchers)]

    def _confirm_queues(self) -> None:
        """Let the checkpoint say what of ConsumeQueues and index is durable; flush wrote it last before their final flush.

        All workers have ended, so there is no other writer of the file. Without this RocketMQ and our own recovery would
        begin further back than they must after a later crash.
        """
        control = self._control
        queues, index = (control.dispatcher(slot, DispatcherWord.DURABLE_TIMESTAMP) for slot in (0, 1))
        try:
            checkpoint = Checkpoint.load(self._layout.checkpoint)
            checkpoint.logics_msg_timestamp = max(checkpoint.logics_msg_timestamp, queues)
            checkpoint.index_msg_timestamp = index or checkpoint.index_msg_timestamp
            Sidecar(
                control.get(Word.FLUSHED),
                control.get(Word.WRITTEN_TIMESTAMP),
                control.dispatcher(0, DispatcherWord.DURABLE),
                control.get(Word.CRC_FROM),
                self._config.commit_log.segment_bytes,
                os.getpid(),
            ).save_with(self._layout.sidecar, checkpoint, self._layout.checkpoint)
        except (OSError, StoreError) as error:
            self._log.warning("cannot write the final checkpoint", error=str(error))

    def _stop_worker(self, worker: WorkerProcess) -> None:
        """Ask ``worker`` to drain and wait for its end; one that does not listen is killed when its time is over."""
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
        if self._starting:
            # Nothing was served. Only a store that nothing has touched goes back to how it was found.
            refused = self._failure is not None and self._failure.code is CliExit.STORE_UNUSABLE
            untouched = {"discovery", "recovery"} if refused else {"discovery"}
            return self._was_clean and self._crew.started() <= untouched
        # A plugin that does not end in order harms nothing but itself.
        unclean = [worker.role for worker in self._crew.workers.values() if worker.unclean and not worker.spec.plugin]
        written, flushed = self._control.get(Word.WRITTEN), self._control.get(Word.FLUSHED)
        # Not what is dispatched only: after a failed sync the units may be in the page cache and nowhere else.
        dispatched = self._control.dispatcher(0, DispatcherWord.DISPATCHED)
        dispatched = min(dispatched, self._control.dispatcher(0, DispatcherWord.DURABLE))
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

    # ------------------------------------------------------------ the loop

    def _turn(self, max_wait_ms: float = float("inf")) -> None:
        """Wait for an event or the poll interval, handle what happened, do what is due. May raise StartFailed."""
        self._loop.wait(min(max_wait_ms, self._timing.poll_interval_ms, self._crew.due_in_ms(monotonic_ms())))
        now_ms = monotonic_ms()
        self._control.put_worker(self._slot, WorkerWord.HEARTBEAT_MS, now_ms)
        self._crew.tick(now_ms)
        if now_ms - self._sampled_ms >= CPU_SAMPLE_MS:
            self._sample(now_ms)
        if self._keeper_pid and not self._keeper_gone and os.getppid() != self._keeper_pid:
            self._keeper_gone = True
            if self._background:
                self._log.warning("the keeper is gone: nothing would start this supervisor again if it were killed")
            else:
                self._ask_stop("the keeper is gone")

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
        self._loop.watch(self._wakeup.fileno(), self._drain_wakeups)

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
        self._crew.sample(now_ms)
        self._cpu["supervisor"].sample(os.getpid(), now_ms)
        self._cpu["keeper"].sample(0 if self._keeper_gone else self._keeper_pid, now_ms)

    # ------------------------------------------------------------ admin socket

    def _metadata(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        if self._starting or self._stop_asked:
            doing = "stops" if self._stop_asked else "starts"
            raise ProtocolError("SERVICE_NOT_AVAILABLE", f"the node {doing}", retry_after_ms=200)
        return wire.ok(
            header["id"],
            node=f"{os.uname().nodename}:{os.getpid()}",
            token=self._token,
            epoch=self._epoch,
            store=str(self._layout.root),
            endpoints=node_report.endpoints(self._crew),
            **node_report.settings(self._config),
        )

    def _status(self, _peer: bytes, header: dict[str, Any]) -> bytes:
        now_ms = monotonic_ms()
        if now_ms - self._sampled_ms > CPU_SAMPLE_MS // 2:
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
                "progress": node_report.progress(self._crew),
                "keeper": "gone" if self._keeper_gone else "none" if not self._keeper_pid else "running",
            },
            processes=self._process_rows(state),
            positions=status.positions(self._control),
            disk_flags=status.disk_flags(self._control),
            dispatchers=node_report.dispatcher_rows(self._crew, self._control, self._config),
            plugins=self._roster.reports,
        )

    def _process_rows(self, state: str) -> list[dict[str, Any]]:
        store = self._layout.root
        rows = []
        if self._keeper_pid and not self._keeper_gone:
            rows.append(status.process_row("keeper", self._keeper_pid, "ready", 0, self._cpu["keeper"], store))
        rows.append(status.process_row("supervisor", os.getpid(), state, 0, self._cpu["supervisor"], store))
        return rows + node_report.worker_rows(self._crew, self._control, self._config, store)

    def _stop_requested(self, peer: bytes, header: dict[str, Any]) -> None:
        """Answered at the very end, with whether the store was closed in order."""
        self._stop_peers.append((peer, header["id"]))
        self._ask_stop("request")
        if self._keeper_pid and not self._keeper_gone:
            # The keeper must know too: should we be killed while we drain, it would start the node again.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._keeper_pid, signal.SIGTERM)


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
