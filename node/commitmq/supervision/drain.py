"""The drain of a node that stops: its workers end one after the other, from the beginning of the pipeline."""

from __future__ import annotations

from collections.abc import Callable

from commitmq.log import Log
from commitmq.supervision.process_table import ProcessTable
from commitmq.supervision.worker_process import Phase, WorkerProcess
from commitmq.workers.runtime.context import monotonic_ms


class Drain:
    """Ends the workers of ``table``. ``turn`` is one turn of the supervisor's loop, which waits for so many ms at most."""

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
