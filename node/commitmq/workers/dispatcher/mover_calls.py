"""The ConsumeQueue dispatcher calls for the movers whose topics it sees (:mod:`commitmq.semantics.movers`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from commitmq.control import Word
from commitmq.semantics import movers
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.doorbell import Ringer


class MoverCalls:
    """Puts the word MOVERS_WANTED, when ``is_caller``, and wakes a mover whose topics have new messages."""

    def __init__(self, context: WorkerContext, *, is_caller: bool) -> None:
        self._context, self._is_caller = context, is_caller
        self._control = context.control
        self._ringers: dict[int, Ringer] = {}

    def see_folders(self, queues: Path) -> None:
        """The dispatcher opened the queues of the folder ``queues``."""
        if self._is_caller:
            self._call(movers.wanted_by_folders(queues))

    def see_topics(self, topics: Iterable[str]) -> None:
        """Messages of ``topics`` are in their queues."""
        if self._is_caller and (bits := movers.wanted_by(topics)):
            self._call(bits)
            for mover in movers.MOVERS:
                if bits & mover.bit:
                    if mover.bit not in self._ringers:
                        self._ringers[mover.bit] = self._context.ringer(mover.role)
                    self._ringers[mover.bit].ring(urgent=False)

    def close(self) -> None:
        """Wake nobody any more."""
        for ringer in self._ringers.values():
            ringer.close()

    def _call(self, bits: int) -> None:
        called = self._control.get(Word.MOVERS_WANTED)
        if bits & ~called:
            self._control.put(Word.MOVERS_WANTED, called | bits)
