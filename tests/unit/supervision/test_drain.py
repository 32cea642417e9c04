"""Goal: a stop is unclean because of a worker that died before it could drain, and not of one that never ran.

Method: the real drain over a table of workers without processes, in each state that a stop can find them in.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from commitmq.log import get_log
from commitmq.supervision.process_table import ProcessTable
from commitmq.supervision.roster import ProcessSpec
from commitmq.supervision.supervisor import Drain
from commitmq.supervision.worker_process import Phase, WorkerProcess


class Table:
    """What the drain reads of a process table."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.workers = {worker.role: worker}


def drained(worker: WorkerProcess) -> WorkerProcess:
    def turn(_ms: float) -> None:
        raise AssertionError("there is no process to wait for")

    Drain(cast(ProcessTable, cast(Any, Table(worker))), 10, turn, get_log("test")).run()
    return worker


@pytest.mark.parametrize(
    ("essential", "started_ms", "unclean"), [(False, 0, False), (False, 5, True), (True, 0, True), (True, 5, True)]
)
def test_a_worker_that_waits_for_its_start(essential: bool, started_ms: int, unclean: bool) -> None:
    worker = WorkerProcess(ProcessSpec("schedule", "commitmq.workers.schedule.process", 10, essential=essential))
    worker.wanted, worker.phase, worker.started_ms = True, Phase.WAITING, started_ms
    drained(worker)
    assert (worker.unclean, worker.phase, worker.wanted) == (unclean, Phase.IDLE, False)


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.DONE])
def test_a_worker_that_ended_stays_as_it_is(phase: Phase) -> None:
    worker = WorkerProcess(ProcessSpec("schedule", "commitmq.workers.schedule.process", 10))
    worker.phase = phase
    drained(worker)
    assert (worker.unclean, worker.phase) == (False, phase)
