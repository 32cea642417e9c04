"""What all movers have in common: the loop, the end of the log, and the rule that no message ends a mover.

A mover takes messages from one place of the log to another. :meth:`Mover.serve` is its loop: it waits for the writer, looks
into the log for what was moved (``resume``), and then takes one turn after the other, until the writer is lost.

No message ends it: records are made from records by :func:`commitmq.workers.runtime.run_mover.isolated`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from commitmq.control import DispatcherWord, Word
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.run_mover import RunMover, WriterLost
from commitmq.workers.runtime.set_aside import SetAside

_LOOK_MS: Final = 5


class Mover(ABC):
    """The loop of a mover. ``aside``: what it has set aside."""

    def __init__(self, context: WorkerContext, way: RunMover, aside: SetAside) -> None:
        """``way``: its connection to the writer."""
        self._context, self._control = context, context.control
        self._way_to_writer, self.aside = way, aside

    @abstractmethod
    def resume(self) -> None:
        """Find what was moved before, and begin behind it. The writer serves; this process may be asked to stop in the
        meantime. Raises WriterLost.
        """

    @abstractmethod
    def turn(self) -> None:
        """Do what is to be done now, and wait until more is. Raises WriterLost."""

    def lost(self) -> None:
        """The writer was lost: whether the last runs are stored is open until the next :meth:`resume`."""
        self._context.log.warning("the writer was lost, looking into the log for what was moved")

    def cope(self, error: Exception) -> bool | None:
        """Handle another exception of a turn: True resumes again, False continues, None ends the process."""
        del error
        return None

    @abstractmethod
    def close(self, *, lost: bool) -> None:
        """Write down the positions. ``lost``: the state is not that of the log."""

    def serve(self) -> None:
        """The loop, until the process shall stop."""
        context, lost = self._context, True
        while not context.stopping:
            try:
                if lost:
                    if not self.writer_serves():
                        break
                    self.resume()
                    lost = context.stopping  # it may not have seen the whole log then
                    continue
                self.turn()
                self.aside.write_down()
            except WriterLost:
                self.lost()
                lost = True
            except Exception as error:
                anew = self.cope(error)
                if anew is None:
                    raise
                lost = lost or anew
        self.aside.write_down(at_once=True)
        self.close(lost=lost)

    # ------------------------------------------------------------ writer and log

    def writer_serves(self) -> bool:
        """Wait for the writer. False when this process shall stop first."""
        return self._way_to_writer.wait_for_writer()

    def _bounds(self) -> tuple[int, int]:
        """``(end of what is in the ConsumeQueues, beginning of the log)``."""
        return self._control.dispatcher(0, DispatcherWord.DISPATCHED), self._control.get(Word.MIN_OFFSET)

    def _log_end(self) -> int:
        """The end of what can be read of the log, which has everything that this process has appended."""
        written = self._control.get(Word.WRITTEN)
        while self._control.committed() < written and not self._context.stopping:
            self._context.wait(_LOOK_MS)  # with the transient store pool the flush process copies it into the files
        return self._control.committed()
