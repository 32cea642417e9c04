"""Watches the forkserver, and forks another one when it has died. Workers continue in the meantime."""

from __future__ import annotations

from collections.abc import Callable

from commitmq.config import NodeConfig
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.supervision.event_loop import EventLoop
from commitmq.supervision.exit_codes import START_ATTEMPTS, CliExit, StartFailed
from commitmq.supervision.forkserver import ForkServer, ForkServerDied, NextKeeper
from commitmq.supervision.processes import CpuMeter
from commitmq.supervision.worker_process import describe_exit
from commitmq.workers.runtime.context import monotonic_ms

_FORKSERVER_EXIT_S = 2.0


class ForkServerWatch:
    """One supervisor's forkserver, and its successors. ``server`` is None while no forkserver runs."""

    def __init__(
        self,
        layout: StoreLayout,
        config: NodeConfig,
        loop: EventLoop,
        log: Log,
        *,
        is_judging: Callable[[], bool],
        next_keeper: NextKeeper | None,
    ) -> None:
        """Fork the first one; raises OSError. ``is_judging``: whether deaths again and again raise StartFailed."""
        self._layout, self._config, self._loop, self._log = layout, config, loop, log
        self._timing = config.supervisor
        self._is_judging, self._next_keeper = is_judging, next_keeper
        self.server: ForkServer | None = None
        self.deaths = 0
        self.cpu = CpuMeter()
        self._backoff_ms = 0
        self._at_ms = 0  # when it was forked, or will be forked next
        self._fork(monotonic_ms())

    def configure(self, config: NodeConfig) -> None:
        """The next forkserver starts with ``config``; a worker gets the live settings with its own start."""
        self._config, self._timing = config, config.supervisor

    @property
    def pid(self) -> int:
        """0 when there is none."""
        return self.server.pid if self.server else 0

    def due_in_ms(self, now_ms: int) -> int:
        """Milliseconds until the next forkserver may be forked."""
        return max(0, self._at_ms - now_ms)

    def look(self, now_ms: int) -> None:
        """Fork one when it is due."""
        if self.server is None and now_ms >= self._at_ms:
            try:
                self._fork(now_ms)
            except OSError as error:  # no memory or no process slot
                self._log.error("cannot fork a forkserver", error=str(error))
                self._wait_longer(now_ms)

    def fork_keeper(self, life: str, word_fd: int) -> int:
        """See :meth:`ForkServer.fork_keeper`."""
        if self.server is None:
            raise ForkServerDied("no forkserver runs")
        return self.server.fork_keeper(life, word_fd)

    def _fork(self, now_ms: int) -> None:
        self._at_ms = now_ms
        self.server = ForkServer(self._layout, self._config, self._next_keeper)
        self._loop.watch(self.server.pidfd, self._ended)

    def _wait_longer(self, now_ms: int) -> None:
        well = now_ms - self._at_ms >= self._timing.restart_window_s * 1000
        doubled = min(self._backoff_ms * 2, self._timing.restart_backoff_max_ms)
        self._backoff_ms = self._timing.restart_backoff_ms if well or not doubled else doubled
        self._at_ms = now_ms + self._backoff_ms

    def _ended(self) -> None:
        forkserver = self.server
        if forkserver is None or (code := forkserver.reap()) is None:
            return
        self._loop.unwatch(forkserver.pidfd)
        forkserver.close()
        self.server = None
        self._wait_longer(monotonic_ms())
        self.deaths += 1
        why = describe_exit(code)
        self._log.error(
            "forkserver died; workers continue", pid=forkserver.pid, why=why, restart_in_ms=self._backoff_ms
        )
        if self._is_judging() and self.deaths >= START_ATTEMPTS:
            raise StartFailed(f"the forkserver ends again and again: {why}; its log says more", CliExit.START_FAILED)

    def end(self) -> None:
        """End the forkserver; no worker can be started after this."""
        forkserver = self.server
        if forkserver is None:
            return
        self._loop.unwatch(forkserver.pidfd)
        forkserver.end(_FORKSERVER_EXIT_S)
        self.server = None
