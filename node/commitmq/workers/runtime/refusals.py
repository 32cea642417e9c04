"""How many requests ``[flow]`` refused."""

from __future__ import annotations

from commitmq.control import ControlBlock, WorkerWord


class Refusals:
    """Counts what a process refused; its predecessor's refusals count too."""

    def __init__(self, control: ControlBlock, slot: int) -> None:
        self._control, self._slot = control, slot

    def count(self) -> None:
        """One more."""
        refused = self._control.worker(self._slot, WorkerWord.REFUSED)
        self._control.put_worker(self._slot, WorkerWord.REFUSED, refused + 1)
