"""The processes under the supervisor: starts, watches and restarts the workers.

The supervisor decides which workers are wanted and when to stop. This module does the rest: it forks wanted workers
that are absent, listens to lifelines, waits for ends, spaces restarts, and kills workers that hang. It never blocks
longer than one fork takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from commitmq.config import NodeConfig
from commitmq.config.loading import live_values
from commitmq.control import ControlBlock, WorkerWord
from commitmq.files.disk_space import AGAIN_MS
from commitmq.log import Log
from commitmq.network import ports
from commitmq.store.layout import StoreLayout
from commitmq.supervision.event_loop import EventLoop
from commitmq.supervision.exit_codes import START_ATTEMPTS, CliExit, StartFailed, progress_sentence
from commitmq.supervision.forkserver import ForkServerDied
from commitmq.supervision.forkserver_watch import ForkServerWatch
from commitmq.supervision.processes import kill_lock_holder
from commitmq.supervision.roster import ProcessSpec
from commitmq.supervision.worker_process import Phase, WorkerProcess
from commitmq.workers.runtime.context import ExitCode, monotonic_ms

_CLOSED_LIFELINE_MS = 5_000
_SILENT_MS = 2_000  # silence at a start before the first sentence about it, and between two sentences


def _is_ours(plugin: object) -> bool:
    """True for a built-in plugin, by name: where one loads slowly the machine is slow, so it is never omitted."""
    return isinstance(plugin, str) and plugin.startswith(("commitmq_dispatchers.", "commitmq_plugins."))


class ProcessTable:
    """All processes that the supervisor starts. The supervisor reads their state, and sets ``judging``, ``node_key``,
    ``vouching_key`` and a worker's ``wanted``.
    """

    def __init__(
        self,
        layout: StoreLayout,
        config: NodeConfig,
        control: ControlBlock,
        roles: Iterable[ProcessSpec],
        *,
        forkserver: ForkServerWatch,
        loop: EventLoop,
        ports: dict[str, int],
        was_clean: bool,
        on_new_port: Callable[[], None],
        on_news: Callable[[str], None],
        log: Log,
    ) -> None:
        """``roles`` come in start order. ``ports`` is shared with the caller and kept current.

        ``on_new_port`` is called after a change of ``ports``. ``on_news`` is called with a sentence when the start
        takes long: about a worker's progress. ``was_clean`` is passed to workers: true
        when no ``abort`` file existed before.
        """
        self._layout, self._config, self._control, self._log = layout, config, control, log
        self._timing = config.supervisor
        self._loop = loop
        self._ports = ports
        self._was_clean = was_clean
        self._on_new_port = on_new_port
        self._on_news = on_news
        self._next_news_ms = 0
        self.began_ms = monotonic_ms()  # of the node's start; the start times of its processes count from here
        self.workers: dict[str, WorkerProcess] = {}
        for role in roles:
            self.add(role)
        self.settings = 0  # the version of the live settings: how often they were changed
        self.filters: list[dict[str, Any]] = []  # the plugins' filters, for the readers
        self.vouching_key = ""
        self.node_key = ""  # the public key with which the node's ports ask for keys
        self.left_out: dict[str, str] = {}  # plugins that ended the discovery process, and how it ended
        self.judging = True  # while the node starts: a death that a restart cannot cure raises StartFailed
        self.forkserver = forkserver
        self._last_tick_ms = 0
        self._hang_floor_ms = 0

    def add(self, role: ProcessSpec) -> WorkerProcess:
        """Add one more role behind the others."""
        worker = WorkerProcess(role)
        self.workers[role.name] = worker
        return worker

    def configure(self, config: NodeConfig) -> None:
        """Give the live settings of ``config`` to all processes, those that start from now on too."""
        self._config, self._timing = config, config.supervisor
        self.settings += 1
        self.forkserver.configure(config)
        live = live_values(config)
        for worker in self.workers.values():
            worker.take_settings(self.settings, live)

    def without_settings(self) -> list[str]:
        """Roles of processes that do not have the present live settings yet."""
        return [
            worker.role
            for worker in self.workers.values()
            if worker.pid and not worker.one_shot and worker.settings < self.settings
        ]

    def started(self) -> set[str]:
        """Roles of which a process was started at least once."""
        return {worker.role for worker in self.workers.values() if worker.started_ms}

    def due_in_ms(self, now_ms: int) -> float:
        """Milliseconds until a worker is due to start; infinite when none waits only for its time."""
        forkserver = self.forkserver.server
        if forkserver is None:
            return self.forkserver.due_in_ms(now_ms) if self._any_wanted() else float("inf")
        waits = [
            worker.start_at_ms - now_ms
            for worker in self.workers.values()
            if worker.wanted and worker.phase is Phase.WAITING
        ]
        return min(waits, default=float("inf"))

    def _any_wanted(self) -> bool:
        return any(worker.wanted for worker in self.workers.values())

    def tick(self, now_ms: int) -> None:
        """Start the workers that are due and kill those that hang. Raises StartFailed while ``judging``."""
        if self._last_tick_ms and now_ms - self._last_tick_ms > 5 * self._timing.poll_interval_ms + 1_000:
            # This process was stopped itself (a paused machine, SIGSTOP), probably together with its workers:
            # heartbeats count from here on.
            self._hang_floor_ms = now_ms
        self._last_tick_ms = now_ms
        if self._any_wanted():
            self.forkserver.look(now_ms)
        for worker in self.workers.values():
            if worker.pid:
                self._check_alive(worker, now_ms)
            elif worker.wanted and worker.phase is Phase.WAITING and now_ms >= worker.start_at_ms:
                self._launch(worker, now_ms)

    def sample(self, now_ms: int) -> None:
        """Measure CPU use since the last sample, and wait for unknown orphans."""
        for worker in self.workers.values():
            worker.cpu.sample(worker.pid, now_ms)
            if worker.cpu.percent > 0:
                worker.active_ms = now_ms
        self.forkserver.cpu.sample(self.forkserver.pid, now_ms)
        self._reap_strays()

    def _reap_strays(self) -> None:
        """Wait for unknown orphans that became children of this process, one at a time: they would stay zombies."""
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        known = {worker.pid for worker in self.workers.values()} | {self.forkserver.pid}
        if ended is not None and ended.si_pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _launch(self, worker: WorkerProcess, now_ms: int) -> None:
        forkserver = self.forkserver.server
        if forkserver is None:
            return
        # The last child of this role is dead and waited for, so the holder of the lock is a stray of a lost fork
        # request.
        stray = kill_lock_holder(self._layout.role_lock(worker.role))
        if stray is not None:
            self._log.warning("killed a stray worker", role=worker.role, pid=stray)
        port = ports.port_of(worker.role, self._config, self._ports, worker.spec.dispatcher_slot)
        params: dict[str, Any] = {**worker.spec.params, "port": port, "slot": worker.slot, "clean": self._was_clean}
        params["node_key"], params["vouching"] = self.node_key, self.vouching_key
        if worker.role == "reput":
            params["dispatchers"] = [one.spec.dispatcher for one in self.workers.values() if one.spec.takes_batches]
        elif worker.role == "cleanup":
            params |= self._who_needs_the_log()
        elif worker.role == "discovery":
            params["leave_out"] = self.left_out
        elif worker.role.startswith("reader-"):
            params["filters"] = self.filters
        elif worker.role in ("dispatcher-consume_queue", "pop"):
            # Third-party code must not run in a process that there is only one of, for all consumers.
            params["filters"] = [one for one in self.filters if one["built_in"]]
        try:
            worker.fork(forkserver, params, live_values(self._config), now_ms)
            worker.settings = self.settings
        except ForkServerDied as error:
            self._log.error("cannot fork a worker", role=worker.role, error=str(error))
            worker.start_at_ms = now_ms + self._timing.restart_backoff_ms
            forkserver.kill()
            return
        assert worker.lifeline is not None
        self._loop.watch(worker.lifeline.fileno(), lambda: self._hear(worker))
        self._loop.watch(worker.pidfd, lambda: self._worker_ended(worker))
        self._log.info("worker started", role=worker.role, pid=worker.pid, restarts=worker.restarts)

    def _who_needs_the_log(self) -> dict[str, Any]:
        """For cleanup: slots of the workers that map segments, and of the node's own dispatchers after the first."""
        workers = self.workers.values()
        mapping = [
            one
            for one in workers
            if one.spec.takes_batches or one.spec.on_demand or one.role.startswith(("reader-", "reput"))
        ]
        behind = [one.spec for one in workers if one.spec.takes_batches and not one.spec.plugin]
        return {
            "holders": {one.role: one.slot for one in mapping},
            "dispatchers": {one.dispatcher: one.dispatcher_slot for one in behind if one.dispatcher_slot},
        }

    def _hear(self, worker: WorkerProcess) -> None:
        if worker.lifeline is None:
            return
        now_ms = monotonic_ms()
        for message in worker.read_lifeline(now_ms):
            event = message.pop("event", None)
            if event == "ready":
                self._worker_is_ready(worker, message, now_ms)
            elif event == "settings":
                worker.settings = max(worker.settings, int(message.get("version", 0)))
            elif event == "error":
                worker.last_error = str(message.get("error", ""))
            elif event == "item":
                worker.info.setdefault(str(message.get("list")), []).append(message.get("item"))
            else:
                worker.info.update(message)
                if self.judging and message.get("progress"):
                    self._pass_on(worker, now_ms)
                if self.judging and worker.spec.essential and not worker.ready_ms and (why := message.get("no_room")):
                    raise StartFailed(next(iter(why.values())), CliExit.STORE_UNUSABLE)
        if worker.lifeline_ended_ms:
            self._loop.unwatch(worker.lifeline.fileno())

    def _pass_on(self, worker: WorkerProcess, now_ms: int) -> None:
        """Report a slow start to the program that waits for it."""
        if now_ms >= max(self._next_news_ms, worker.started_ms + _SILENT_MS):
            self._next_news_ms = now_ms + _SILENT_MS
            self._on_news(f"{worker.role}: {progress_sentence(worker.info.get('progress'))}")

    def _worker_is_ready(self, worker: WorkerProcess, message: dict[str, Any], now_ms: int) -> None:
        if worker.phase is Phase.STARTING and not worker.one_shot:
            worker.phase = Phase.READY
        worker.ready_ms, worker.no_room = now_ms, ""
        endpoints = message.pop("endpoints", None)
        worker.info.update(message)
        if endpoints:
            worker.endpoints = [str(endpoint) for endpoint in endpoints]
            port = ports.tcp_port(worker.endpoints)
            if port and self._ports.get(worker.role) != port:
                self._ports[worker.role] = port
                self._on_new_port()
        self._log.info("worker is ready", role=worker.role, pid=worker.pid, after_ms=now_ms - worker.started_ms)

    def _worker_ended(self, worker: WorkerProcess) -> None:
        if not worker.pid:
            return
        self._hear(worker)  # its last messages arrived before its end
        fds = [worker.pidfd, worker.lifeline.fileno() if worker.lifeline else -1]
        pid = worker.pid
        code = worker.reap()
        if code is None:
            return
        for fd in fds:
            self._loop.unwatch(fd)
        # No process writes a dead worker's words any more, and peers must not take it for asleep or alive.
        for word in (WorkerWord.PID, WorkerWord.STATE, WorkerWord.ASLEEP):
            self._control.put_worker(worker.slot, word, 0)
        # A plugin may end the discovery with exit code 0 as well, so only a process that reported its result counts as
        # done.
        if worker.one_shot and code == 0 and (worker.ready_ms or worker.role != "discovery"):
            worker.phase, worker.wanted = Phase.DONE, False
            return
        if worker.role == "discovery" and worker.wanted and self._without_culprit(worker):
            return
        if not worker.wanted:
            worker.phase = Phase.IDLE
            worker.unclean = worker.unclean or code != 0
            if code != 0:
                self._log.error("worker did not end in order", role=worker.role, pid=pid, why=worker.last_exit)
            return
        self._restart_later(worker, pid, code)

    def _without_culprit(self, worker: WorkerProcess) -> bool:
        """Ask again at once, without the plugin that ended the discovery process. False when no plugin is to blame."""
        culprit = str(worker.info.get("loading", ""))
        if not culprit or culprit in self.left_out or _is_ours(culprit):
            return False
        self.left_out[culprit] = f"the process that imported it ended: {worker.last_exit}"
        self._log.error("a plugin is omitted", plugin=culprit, why=worker.last_exit)
        worker.info.clear()
        worker.phase, worker.start_at_ms = Phase.WAITING, 0
        return True

    def _restart_later(self, worker: WorkerProcess, pid: int, code: int) -> None:
        if code == ExitCode.RESTART:
            worker.phase, worker.start_at_ms, worker.backoff_ms = Phase.WAITING, 0, 0
            worker.last_exit = worker.last_error = ""
            worker.info.clear()
            return
        if self.judging and worker.spec.essential:
            self._judge_start(worker, code)
        now_ms = monotonic_ms()
        if code == ExitCode.NO_ROOM:
            self._wait_for_room(worker, now_ms)
            return
        timing = self._timing
        pause_ms = worker.next_backoff(
            now_ms, timing.restart_backoff_ms, timing.restart_backoff_max_ms, timing.restart_window_s * 1000
        )
        if self._config.network.port == 0 and code == ExitCode.ADDRESS_IN_USE and worker.restarts:
            self._ports.pop(worker.role, None)  # another program took its free port: the worker gets another one
        worker.phase = Phase.WAITING
        worker.start_at_ms = now_ms + pause_ms
        worker.restarts += 1
        worker.info.clear()
        self._control.put_worker(worker.slot, WorkerWord.RESTARTS, worker.restarts)
        self._log.error(
            "worker died", role=worker.role, pid=pid, why=worker.last_exit, error=worker.last_error or "-",
            restart_in_ms=pause_ms,
        )  # fmt: skip

    def _wait_for_room(self, worker: WorkerProcess, now_ms: int) -> None:
        """The disk had no room for what ``worker`` needs, and it could not wait itself: it runs again in a moment."""
        if not worker.no_room:
            self._log.error("waits for room on the disk", role=worker.role, why=worker.last_error)
        worker.no_room = worker.last_error
        worker.phase, worker.start_at_ms = Phase.WAITING, now_ms + AGAIN_MS
        worker.info.clear()

    def _judge_start(self, worker: WorkerProcess, code: int) -> None:
        """Raise StartFailed when another try during the node's start is useless."""
        reason = worker.last_error or worker.last_exit
        if code in (ExitCode.STORE_UNUSABLE, ExitCode.NO_ROOM):
            raise StartFailed(reason, CliExit.STORE_UNUSABLE)
        worker.deaths_before_ready += not worker.ready_ms
        if worker.deaths_before_ready >= START_ATTEMPTS:
            if code == ExitCode.ADDRESS_IN_USE:
                raise StartFailed(reason, CliExit.ADDRESS_IN_USE)
            raise StartFailed(f"the {worker.role} process cannot start: {reason}", CliExit.START_FAILED)

    def _check_alive(self, worker: WorkerProcess, now_ms: int) -> None:
        """Kill a worker that hangs. Its pidfd then reports the end, and it is restarted."""
        if worker.killed_because:
            return
        heartbeat_ms = 0
        if self._control.worker(worker.slot, WorkerWord.PID) == worker.pid:
            heartbeat_ms = self._control.worker(worker.slot, WorkerWord.HEARTBEAT_MS)
        if worker.one_shot and worker.role != "discovery":
            # A recovery is one long scan without a loop that could beat, so its CPU use counts as a heartbeat.
            heartbeat_ms = max(heartbeat_ms, worker.active_ms)
        silent_ms = now_ms - max(heartbeat_ms, worker.started_ms, self._hang_floor_ms)
        because = ""
        load_timeout_s = self._timing.plugin_load_timeout_s
        if (
            worker.role == "discovery"
            and silent_ms > load_timeout_s * 1000
            and not _is_ours(worker.info.get("loading"))
        ):
            because = f"the plugin {worker.info.get('loading') or '?'} took longer than {load_timeout_s} s to load"
        elif silent_ms > self._timing.hang_timeout_s * 1000:
            because = f"no heartbeat for {silent_ms // 1000} s"
        elif worker.lifeline_ended_ms and now_ms - worker.lifeline_ended_ms > _CLOSED_LIFELINE_MS:
            because = "it closed its lifeline but lives"
        elif (
            worker.phase is Phase.STARTING
            and not worker.one_shot  # a recovery may take any time
            and not worker.info.get("no_room")
            and now_ms - max(worker.started_ms, self._hang_floor_ms) > self._timing.start_timeout_s * 1000
        ):
            because = f"not ready after {self._timing.start_timeout_s} s"
        if because:
            self._log.error("killing a worker", role=worker.role, pid=worker.pid, why=because)
            worker.kill(because)
