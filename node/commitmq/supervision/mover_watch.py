"""Starts movers when they are needed (:mod:`commitmq.semantics.movers`). A mover that was started once is kept alive."""

from __future__ import annotations

from commitmq.control import ControlBlock, Word
from commitmq.errors import ProtocolError
from commitmq.log import Log
from commitmq.semantics.movers import MOVERS
from commitmq.supervision.process_table import ProcessTable
from commitmq.supervision.worker_process import Phase


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
