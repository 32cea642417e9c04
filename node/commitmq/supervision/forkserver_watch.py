"""Watches the forkserver, and starts another one when it has died. Workers continue meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from commitmq.config import NodeConfig
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.supervision.event_loop import EventLoop
from commitmq.supervision.exit_codes import START_ATTEMPTS, CliExit, StartFailed
from commitmq.supervision.forkserver import ForkServer
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
    ) -> None:
        """``is_judging``: whether a death that a restart cannot cure raises StartFailed."""
        self._layout, self._config, self._loop, self._log = layout, config, loop, log
        self._timing = config.supervisor
        self._is_judging = is_judging
        self.server: ForkServer | None = None
        self.deaths = 0
        self.cpu = CpuMeter()
        self._backoff_ms = 0
        self._at_ms = 0  # when it was started, or will be started next

    def configure(self, config: NodeConfig) -> None:
        """The next forkserver starts with ``config``; a worker gets the live settings with its own start."""
        self._config, self._timing = config, config.supervisor

    @property
    def pid(self) -> int:
        """0 when there is none."""
        return self.server.pid if self.server else 0

    def due_in_ms(self, now_ms: int) -> int:
        """Milliseconds until the next forkserver may be started."""
        return max(0, self._at_ms - now_ms)

    def check(self, now_ms: int) -> None:
        """Kill a forkserver that does not get ready."""
        server = self.server
        if server is None or server.ready:
            return
        if now_ms - self._at_ms > self._timing.start_timeout_s * 1000:
            server.kill()

    def is_due(self, now_ms: int) -> bool:
        """Whether no forkserver runs, and the next one may be started."""
        return self.server is None and now_ms >= self._at_ms

    def start(self, now_ms: int, modules: Iterable[str]) -> None:
        """Start a forkserver that preloads ``modules``."""
        self._at_ms = now_ms
        self.server = started = ForkServer(self._layout, self._config, modules)
        self._loop.watch(started.socket.fileno(), self._hear)
        self._loop.watch(started.pidfd, self._ended)

    def _hear(self) -> None:
        if self.server is None:
            return
        for event in self.server.read_events():
            if event.get("event") == "ready":
                self._log.info("the forkserver is ready", seconds=event.get("preload_s"))
        if self.server.ended:
            # The forkserver's socket is closed and its pidfd follows. Polling a closed socket would return at once,
            # every time.
            self._loop.unwatch(self.server.socket.fileno())

    def _ended(self) -> None:
        forkserver = self.server
        if forkserver is None or (code := forkserver.reap()) is None:
            return
        self._loop.unwatch(forkserver.pidfd)
        self._loop.unwatch(forkserver.socket.fileno())
        was_ready = forkserver.ready
        forkserver.close()
        self.server = None
        now_ms = monotonic_ms()
        well = was_ready and now_ms - self._at_ms >= self._timing.restart_window_s * 1000
        doubled = min(self._backoff_ms * 2, self._timing.restart_backoff_max_ms)
        self._backoff_ms = self._timing.restart_backoff_ms if well or not doubled else doubled
        self._at_ms = now_ms + self._backoff_ms
        self.deaths += 1
        self._log.error(
            "forkserver died; workers continue",
            pid=forkserver.pid,
            why=describe_exit(code),
            restart_in_ms=self._backoff_ms,
        )
        if self._is_judging() and not was_ready and self.deaths >= START_ATTEMPTS:
            raise StartFailed(
                f"the forkserver ended with {describe_exit(code)} while it loaded its modules; its log says why",
                CliExit.START_FAILED,
            )

    def end(self) -> None:
        """End the forkserver; no worker can be started after this."""
        forkserver = self.server
        if forkserver is None:
            return
        self._loop.unwatch(forkserver.pidfd)
        self._loop.unwatch(forkserver.socket.fileno())
        forkserver.end(_FORKSERVER_EXIT_S)
        self.server = None
