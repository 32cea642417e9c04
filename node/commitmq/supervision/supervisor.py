"""The process that starts, watches, restarts and stops all others; only it may call a store closed in order.

Owns the store's ``lock`` and ``abort`` files, ``run/node.json``, the admin socket, and the epoch and restart words of
the control block. Reads the workers' heartbeats. It must stay small: no numpy, no numba.

Start: take ``lock``; wait until no process of a former node holds a role lock (an orphan gets five seconds, then
SIGKILL); empty ``run/``; create the control block anew; start the forkserver, run discovery and recovery; write
``abort``; start the workers one after the other, each when the one before is ready. Stop: the reverse, each worker
draining; ``abort`` is removed only if every worker ended with exit code 0 and everything written is flushed and
dispatched.

Until recovery has ended well the store still belongs to its former user: a start that fails or is interrupted before
that, in whatever way, leaves ``abort``, checkpoint and sidecar as it found them. Then :meth:`Supervisor._claim` makes
``abort`` with a token of this node. Only from there on does a process of this node write files that a later recovery
trusts.

What happens when a process dies:

* a worker: its pidfd wakes the supervisor, which forks it again after a back-off. A worker whose heartbeat stops is
  killed first.
* the forkserver: workers are the supervisor's own children (see :mod:`commitmq.supervision.forkserver`) and go on; a
  new forkserver is started.
* the supervisor: every lifeline closes, so every worker and the forkserver exit; the keeper starts a new supervisor.
* the keeper: in the foreground the node stops in order, because a person who killed ``commitmq start`` meant the node.
  In the background the supervisor starts another keeper. That keeper is its child, so it learns of the supervisor's end
  by a pipe that only the supervisor holds open: when the pipe closes without a last word, the supervisor was killed,
  and the keeper starts one again. The death of both at one moment is the next case.
* all at once: the role and store locks end with their holders; the next start finds ``abort`` and recovers.

One loop (:meth:`Supervisor._turn`) handles everything; start and stop are plain sequences that turn it while they wait.
It wakes at every event, and ``supervisor.poll_interval_ms`` after the last one at the latest.
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

from commitmq import config as node_config
from commitmq import failpoints
from commitmq import log as log_module
from commitmq.config import NodeConfig
from commitmq.config.fitting import fit
from commitmq.control import ControlBlock, DispatcherWord, Word, WorkerState, WorkerWord
from commitmq.errors import CommitMQError, ProtocolError, StoreError, StoreLockedError
from commitmq.files.no_space import tells_of_no_space
from commitmq.network import ports
from commitmq.protocol import wire
from commitmq.store.access import keep_private, open_folders
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log import transient_pool
from commitmq.store.memory import shared_memory
from commitmq.store.recovery import abort_file
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.store_lock import StoreLock
from commitmq.supervision import node_files, node_report, status
from commitmq.supervision.admin_socket import AddressInUseError, AdminSocket, exposure_warning, is_loopback
from commitmq.supervision.console import console_report
from commitmq.supervision.exit_codes import CliExit
from commitmq.supervision.keeper_watch import KeeperWatch
from commitmq.supervision.process_table import CPU_SAMPLE_MS, EventLoop, ProcessTable, StartFailed
from commitmq.supervision.processes import become_subreaper, free_locks, set_process_name, start_time_ticks
from commitmq.supervision.roster import Roster, own_role, start_order
from commitmq.supervision.worker_process import Phase, WorkerProcess
from commitmq.workers.runtime.context import monotonic_ms, role_slot

ORPHAN_PATIENCE_S = 5.0
_BEFORE_CLAIM = ("discovery", "recovery")
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
        config_fd: int = -1,
        life: str = "",
    ) -> None:
        """``report`` gets the progress of the start. ``modules`` (role to module, in start order) is for tests.

        ``config_fd`` and ``life`` (see :func:`commitmq.supervision.node_files.node_life`) are for a new keeper; without
        ``config_fd`` no keeper is started.
        """
        self._layout = StoreLayout(store.absolute())
        self._config = config
        self._timing = config.supervisor
        self._background = background
        self._keeper = KeeperWatch(self._layout, keeper_pid, config_fd if background else -1, life)
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
        self._memory = status.MemoryGauge(self._layout.root, config.supervisor.status_age_ms)
        self._cpu = {"supervisor": status.CpuMeter(), "keeper": status.CpuMeter()}
        self._owner = abort_file.new_token()
        self._claimed = False
        # All supervisors of a life use the same name, so that clients find the socket again. Each life uses another
        # one: libzmq removes the file of a socket when it closes, and must not remove the file of the next node.
        self._admin_name = f"admin-{self._keeper.life.replace('/', '-') or os.getpid()}"
        self._run_is_ours = False  # no process of a former node uses the files in run/ any more

    # ------------------------------------------------------------ life

    def run(self) -> int:
        """Start, serve until asked to stop, stop. Returns the exit code (:class:`CliExit`)."""
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

    def last_word(self, code: int) -> None:
        """Report the exit code to a keeper that this supervisor started: it is not the parent."""
        self._keeper.last_word(code)

    def _refuse(self, sentence: str, code: CliExit) -> int:
        sentence = _with_a_way_out(sentence, self._layout)
        if self._failure is None:
            self._log.error("cannot start", error=sentence)
        self._report({"event": "failed", "error": sentence, "code": int(code)})
        return code

    def _open(self) -> None:
        """Do everything up to the first child. Raises StoreError and CommitMQError; then nothing is left locked."""
        layout = self._layout
        node_files.make_folders(layout)
        self._lock = StoreLock(layout.lock)
        self._lock.acquire()
        try:
            self._open_locked()
        except BaseException:
            # The files written into run/ describe a node that never ran.
            self._leave()
            self._lock.release()
            raise

    def _open_locked(self) -> None:
        layout = self._layout
        self._fit()
        try:
            killed = free_locks(layout.run.glob("*.lock"), ORPHAN_PATIENCE_S)
        except BlockingIOError as error:
            raise StoreError(f"a worker of a former node cannot be ended: {error}", path=layout.run) from error
        for name, pid in killed:
            self._log.warning("killed a worker of a former node", lock=name, pid=pid)
        if self._config.network.port == 0:
            remembered = node_files.read_node_file(layout).get("ports")
            self._ports = {str(role): int(port) for role, port in remembered.items()} if remembered else {}
        self._run_is_ours = True
        node_files.empty_run_folder(layout)
        if self._config.memory.enable:
            shared_memory.claim(layout, self._config.memory.folder)
        self._epoch = node_files.next_epoch(layout)
        self._control = ControlBlock(layout.control, create=True)
        self._check_ports()
        self._admin = self._bind_admin()
        self._control.put(Word.EPOCH, self._epoch)
        self._slot = role_slot("supervisor")
        self._control.put_worker(self._slot, WorkerWord.PID, os.getpid())
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STARTING)
        self._loop.watch(self._admin.socket, self._admin.serve, last=True)
        self._token = secrets.token_hex(16)
        node_files.write_atomically(layout.run / "token", self._token.encode(), mode=0o640)
        self._write_node_file()
        become_subreaper()
        previous = abort_file.read_token(layout.abort)
        self._was_clean = previous is None
        for role in self._roles:
            if role.name in ("recovery", "flush"):
                role.params["owner"] = self._owner
            if role.name == "recovery":
                role.params["previous"] = previous
        if readable := open_folders(layout):
            self._log.warning(
                "other accounts can read this store, as it was made by RocketMQ or an earlier version",
                folders=", ".join(folder.name for folder in readable),
                advice=f"chmod -R go-rwx {layout.root}",
            )
        if not is_loopback(self._config.network.host):
            self._log.warning(exposure_warning(self._config.network.host, self._ports["admin"]))
        self._table = ProcessTable(
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
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.opened")

    def _fit(self) -> None:
        """Take the store's sizes. Raises StoreError, before any change, when the configuration asks for others."""
        self._fitted = fit(self._layout, self._config)
        self._config = self._fitted.config
        if not self._config.index.enable:
            self._roles = [role for role in self._roles if role.name != "dispatcher-index"]
        for note in self._fitted.notes:
            self._log.warning(note)
            self._report({"event": "info", "message": note})

    def _remember_sizes(self) -> None:
        """Store the sizes after recovery: they are proven right, and the next start need not look for them."""
        try:
            self._fitted.remember(self._layout)
        except StoreError as error:
            self._log.warning("the sizes of the store's files are looked for again at the next start", why=str(error))

    def _check_ports(self) -> None:
        """Raises AddressInUseError when another program has a port that a process of the node will need."""
        wanted = [("admin", -1), *((role.name, role.dispatcher_slot) for role in self._roles)]
        if sentence := ports.first_in_use(wanted, self._config):
            raise AddressInUseError(sentence)

    def _bind_admin(self) -> AdminSocket:
        handlers = {"metadata": self._metadata, "status": self._status, "stop": self._stop_requested}
        port = ports.port_of("admin", self._config, self._ports)
        deadline_ms = monotonic_ms() + (_PORT_PATIENCE_MS if self._config.network.port else 0)
        try:
            while True:
                try:
                    admin = AdminSocket(self._config, self._layout.ipc(self._admin_name), port, handlers, self._log)
                    break
                except AddressInUseError:
                    if monotonic_ms() >= deadline_ms:
                        raise
                    time.sleep(0.02)  # the former node has stopped and is just reporting that
        except AddressInUseError:
            if self._config.network.port:
                raise
            # Another program took the free port of the node's former life meanwhile: any other port will do.
            admin = AdminSocket(self._config, self._layout.ipc(self._admin_name), 0, handlers, self._log)
        self._ports["admin"] = ports.tcp_port(admin.endpoints) or port
        return admin

    def _write_node_file(self) -> None:
        node_files.write_atomically(
            self._layout.node_file,
            orjson.dumps(
                {
                    "pid": os.getpid(),
                    "started_ticks": start_time_ticks(os.getpid()),
                    "keeper_pid": self._keeper.pid,
                    "keeper_started_ticks": start_time_ticks(self._keeper.pid) if self._keeper.pid else None,
                    "life": self._keeper.life,
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

        The node is ready when all essential workers are: the start waits neither for a plugin nor for an index that is
        behind.
        """
        table = self._table
        for role in self._roles:
            if not self._claimed and role.name not in _BEFORE_CLAIM:
                self._claim()
            if not self._bring_up(table.workers[role.name]):
                return
            if role.name == "recovery":
                self._remember_sizes()
            if role.name == "discovery":
                self._enlist(Roster(table.workers["discovery"].info))
        for role in [worker.spec for worker in table.workers.values() if worker.phase is Phase.IDLE]:
            self._bring_up(table.workers[role.name])
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_ready")
        self._starting = self._table.judging = False
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.READY)
        self._log.info("node is ready", admin=self._admin.endpoints[0], store=self._layout.root, epoch=self._epoch)
        warnings = node_report.disk_warnings(self._control, self._config, self._layout)
        if cut := self._recovered().get("cut_now"):
            warnings.append(f"this start cut the log. {cut}")
        for warning in warnings:
            self._log.warning(warning)
        self._report(
            {
                "event": "ready",
                "admin": self._admin.endpoints,
                "pid": os.getpid(),
                "epoch": self._epoch,
                "store": str(self._layout.root),
                "warnings": warnings,
            }
        )

    def _claim(self) -> None:
        """Write ``abort`` with this node's token: the store is recovered, and from now on this node changes it. Raises
        StartFailed.
        """
        try:
            if failpoints.ACTIVE:
                failpoints.hit("supervisor.before_abort")
            abort_file.create(self._layout.abort, os.getpid(), self._owner)
        except OSError as error:
            raise StartFailed(f"cannot make {self._layout.abort}: {error.strerror}", CliExit.START_FAILED) from error
        self._claimed = True

    def _recovered(self) -> dict[str, Any]:
        """Recovery's report of its work; empty before."""
        worker = self._table.workers.get("recovery")
        return {} if worker is None else worker.info

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
        self._roster = roster
        if roster.config_errors:
            raise StartFailed("; ".join(roster.config_errors), CliExit.CONFIG_ERROR)
        dispatchers, workers = roster.plugin_roles()
        for report in roster.reports:
            if report["failure"]:
                why = report["failure"].strip().splitlines()[-1]
                self._log.error("a plugin failed", plugin=report["name"], where=report["failed_in"], why=why)
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
        for worker in self._stop_order():
            self._stop_worker(worker)
        if failpoints.ACTIVE:
            failpoints.hit("supervisor.before_abort_removed")
        clean = self._is_closed_in_order() if self._claimed else self._was_clean
        self._remove_pool()
        if clean and self._claimed:
            self._confirm_queues()
            if failpoints.ACTIVE:
                failpoints.hit("supervisor.before_abort_unlink")
            abort_file.remove(self._layout.abort)
        self._table.end_forkserver()
        # A program that learns of the stop may start the node again at once: by then only this process's port is in its
        # way, and that for a moment only (see _bind_admin).
        self._control.put_worker(self._slot, WorkerWord.STATE, WorkerState.STOPPED)
        self._control.close()
        self._leave()
        self._lock.release()
        for peer, identity in self._stop_peers:
            self._admin.send(peer, wire.ok(identity, clean=clean))
        self._admin.close(last_word=bool(self._stop_peers))
        self._stop_peers.clear()
        if not self._starting:  # a failed start reports the reason itself
            self._report({"event": "stopped", "clean": clean})
        if not self._claimed:
            self._log.info("stopped before the store was opened, which is as it was found")
        elif clean:
            self._log.info("stopped; everything written is flushed and dispatched")
        else:
            self._log.warning("stopped, but not in order: the abort file stays and the next start recovers")
        return clean

    def _leave(self) -> None:
        """Remove everything except the store's own files, however the node ended. No other process of the node lives by
        now.
        """
        if not self._run_is_ours:
            return
        try:
            node_files.clear_run_folder(self._layout)
            shared_memory.release(self._layout)
        except OSError as error:
            self._log.warning("something of the node could not be removed", error=str(error))

    def _remove_pool(self) -> None:
        """Free the memory of the transient store pool, unless it holds records that are not in the log's files."""
        control = self._control
        if control.get(Word.POOL_BUFFERS) and control.get(Word.COMMITTED) == control.get(Word.WRITTEN):
            try:
                transient_pool.remove(self._layout)
            except (OSError, StoreError) as error:
                self._log.warning("cannot remove the transient store pool", error=str(error))

    def _stop_order(self) -> list[WorkerProcess]:
        """Plugins' workers first, which may be clients; their dispatchers last, when no more records come."""
        workers = list(self._table.workers.values())
        own = [worker for worker in workers if not worker.spec.plugin]
        dispatchers = [worker for worker in workers if worker.spec.plugin and worker.spec.dispatcher]
        others = [worker for worker in workers if worker.spec.plugin and not worker.spec.dispatcher]
        return [*reversed(others), *reversed(own), *reversed(dispatchers)]

    def _confirm_queues(self) -> None:
        """Bring the checkpoint up to the durable positions of ConsumeQueues and index; flush wrote it last before their
        final flush.

        All workers have ended, so the file has no other writer. Without this RocketMQ and CommitMQ's recovery would
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
                self._owner,
            ).save_with(self._layout.sidecar, checkpoint, self._layout.checkpoint)
        except (OSError, StoreError) as error:
            self._log.warning("cannot write the final checkpoint", error=str(error))

    def _stop_worker(self, worker: WorkerProcess) -> None:
        """Ask ``worker`` to drain and wait for its end. A worker that does not listen is killed when its time is over."""
        worker.wanted = False
        if not worker.pid:
            # It died a moment ago and will not be restarted to drain.
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

    def _is_closed_in_order(self) -> bool:
        """Whether all records that this node wrote, or found when it recovered, are flushed and dispatched."""
        # A plugin that does not end in order harms only itself.
        unclean = [worker.role for worker in self._table.workers.values() if worker.unclean and not worker.spec.plugin]
        written, flushed = self._control.get(Word.WRITTEN), self._control.get(Word.FLUSHED)
        # The dispatched position alone is not enough: after a failed sync the units may be only in the page cache.
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
        """Wait for an event or the poll interval, handle the events, do what is due. May raise StartFailed."""
        self._admin.look()
        self._loop.wait(min(max_wait_ms, self._timing.poll_interval_ms, self._table.due_in_ms(monotonic_ms())))
        now_ms = monotonic_ms()
        self._control.put_worker(self._slot, WorkerWord.HEARTBEAT_MS, now_ms)
        self._table.tick(now_ms)
        if now_ms - self._sampled_ms >= CPU_SAMPLE_MS:
            self._sample(now_ms)
        self._keep_keeper(now_ms)

    def _keep_keeper(self, now_ms: int) -> None:
        keeper = self._keeper
        if keeper.has_ended():
            if not self._background:
                self._ask_stop("the keeper is gone")
            elif not keeper.can_start:
                self._log.warning("the keeper is gone: nothing would start this supervisor again if it were killed")
            else:
                self._log.warning("the keeper is gone, starting another one")
        if keeper.is_due(now_ms) and not self._stop_asked:
            try:
                keeper.start(now_ms)
            except OSError as error:
                self._log.error("cannot start a keeper", error=str(error))
            else:
                self._log.info("keeper started", pid=keeper.pid, restarts=keeper.restarts)
                self._write_node_file()

    def _catch_signals(self) -> None:
        self._wakeup, wakeup_writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: self._ask_stop(signal.Signals(received).name))
        # A closed terminal is the keeper's business, and writing to one must not stop a node behind it.
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
        self._table.sample(now_ms)
        self._cpu["supervisor"].sample(os.getpid(), now_ms)
        self._cpu["keeper"].sample(self._keeper.live_pid, now_ms)

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
            store_id=self._fitted.store_id,
            endpoints=node_report.endpoints(self._table, self._config),
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
                "store_id": self._fitted.store_id,
                "index_problem": self._fitted.index_problem,
                "token": self._token,
                "epoch": self._epoch,
                "admin": self._admin.endpoints,
                "flush_mode": self._config.commit_log.flush_mode,
                "progress": node_report.progress(self._table),
                "kernels": self._table.kernels,
                "keeper": self._keeper.state,
                "cuts": self._recovered().get("cuts", []),
                "cuts_kept": self._recovered().get("cuts_kept", 0),
            },
            processes=self._process_rows(state),
            positions=status.positions(self._control),
            disk_flags=status.disk_flags(self._control),
            disk_warnings=node_report.disk_warnings(self._control, self._config, self._layout),
            dispatchers=node_report.dispatcher_rows(self._table, self._control, self._config),
            plugins=self._roster.reports,
        )

    def _process_rows(self, state: str) -> list[dict[str, Any]]:
        memory = self._memory
        rows = []
        if self._keeper.live_pid:
            restarts = self._keeper.restarts
            rows.append(status.process_row("keeper", self._keeper.pid, "ready", restarts, self._cpu["keeper"], memory))
        rows.append(status.process_row("supervisor", os.getpid(), state, 0, self._cpu["supervisor"], memory))
        return rows + node_report.worker_rows(self._table, self._control, self._config, memory)

    def _stop_requested(self, peer: bytes, header: dict[str, Any]) -> None:
        """The answer comes at the very end, with whether the store was closed in order."""
        self._stop_peers.append((peer, header["id"]))
        self._ask_stop("request")
        # Tell the keeper first: if the supervisor is killed while it drains, the keeper would start the node again.
        self._keeper.tell_stop()


def _with_a_way_out(sentence: str, layout: StoreLayout) -> str:
    """``sentence``; when it reports a full disk, also how to free space without a node."""
    if "store expire" in sentence or not tells_of_no_space(sentence):
        return sentence
    return (
        f"{sentence}. The disk of the store has no space left for what a start must write, and nothing is lost. Free some: "
        f"`commitmq store expire {layout.root} --keep-bytes N` deletes the oldest segments without a node (--dry-run says "
        "which)"
    )


def read_config(fd: int) -> NodeConfig:
    """The configuration in memory file ``fd``, which stays open for the next supervisor."""
    return node_config.loads(os.pread(fd, os.fstat(fd).st_size, 0))


def pipe_report(fd: int) -> Report:
    """Reports as JSON lines to ``fd`` (-1: nowhere). A reader that has gone is ignored."""

    def report(message: dict[str, Any]) -> None:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.write(fd, orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    return report


def main(arguments: list[str]) -> int:
    """``python -m commitmq.supervision.supervisor STORE CONFIG_FD READY_FD MODE KEEPER_PID LIFE``: the keeper's command."""
    store, config_fd, ready_fd, mode, keeper_pid, life = arguments
    log_module.configure()
    set_process_name("cmq-supervisor")
    failpoints.play("supervisor")
    for fd in (int(config_fd), int(ready_fd)):
        if fd >= 0:
            os.set_inheritable(fd, False)
    report = (pipe_report if mode == "background" else console_report)(int(ready_fd))
    keep_private(Path(store))
    supervisor: Supervisor | None = None
    try:
        supervisor = Supervisor(
            Path(store),
            read_config(int(config_fd)),
            keeper_pid=int(keeper_pid),
            background=mode == "background",
            report=report,
            config_fd=int(config_fd),
            life=life,
        )
        code = int(supervisor.run())
    except Exception as error:  # the exit code must be right after any failure, and the workers end with the lifelines
        log_module.get_log("supervisor").exception("supervisor crashed", error=repr(error))
        report({"event": "failed", "error": f"the supervisor crashed: {error!r}", "code": int(CliExit.CRASHED)})
        code = int(CliExit.CRASHED)
    if supervisor is not None:
        supervisor.last_word(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
