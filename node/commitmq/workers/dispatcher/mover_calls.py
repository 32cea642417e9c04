"""The ConsumeQueue dispatcher calls for the movers whose topics it sees (:mod:`commitmq.semantics.movers`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from commitmq.control import ControlBlock, Word
from commitmq.semantics import movers


class MoverCalls:
    """Puts the word MOVERS_WANTED, when ``is_caller``. A called mover looks for its messages by itself."""

    def __init__(self, control: ControlBlock, *, is_caller: bool) -> None:
        self._control, self._is_caller = control, is_caller

    def see_folders(self, queues: Path) -> None:
        """The dispatcher opened the queues of the folder ``queues``."""
        if self._is_caller:
            self._call(movers.wanted_by_folders(queues))

    def see_topics(self, topics: Iterable[str]) -> None:
        """Messages of ``topics`` are in their queues."""
        if self._is_caller and (bits := movers.wanted_by(topics)):
            self._call(bits)

    def _call(self, bits: int) -> None:
        called = self._control.get(Word.MOVERS_WANTED)
        if bits & ~called:
            self._control.put(Word.MOVERS_WANTED, called | bits)
