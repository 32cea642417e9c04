"""The servers of plugins at a node's start: it waits for them, but not for long, and says where they serve.

A server that fails does not keep a node from starting: the start says so, and why. One of RocketMQ's whose port is taken does
keep it (:func:`.ports.require_free`): its clients would meet somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from commitmq.supervision.worker_process import Phase, WorkerProcess
from commitmq.workers.runtime.context import monotonic_ms


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
