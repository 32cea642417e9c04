"""Counts the deaths of a plugin's dispatcher in the batch behind its position, and so finds poison messages.

The host counts a death in the control block before each batch and takes it back after the batch. So its successor finds
there how often the dispatcher died in the batch behind its position, for any cause of death. With each death the
batches of that range get smaller, down to single records. At ``dispatch.park_after`` deaths the single record is known,
and the dispatcher is parked. Counting begins at zero when the node starts, because the plugin may have been repaired
meanwhile. The node's own dispatchers are never parked.
"""

from __future__ import annotations

from commitmq.config import DispatchConfig
from commitmq.control import ControlBlock, DispatcherWord


class DeathCount:
    """The words ``DEATHS`` and ``SUSPECT_END`` of one dispatcher. ``number``: deaths of its predecessors."""

    def __init__(self, control: ControlBlock, slot: int, config: DispatchConfig, *, counts: bool) -> None:
        """``counts`` is false for the node's own dispatchers."""
        self._control, self._slot, self._config = control, slot, config
        self.number = control.dispatcher(slot, DispatcherWord.DEATHS) if counts else 0
        self._suspect_end = control.dispatcher(slot, DispatcherWord.SUSPECT_END)

    @property
    def is_too_high(self) -> bool:
        """True when the host must park the dispatcher."""
        return self.number >= self._config.park_after

    def suspicious_rows(self) -> int:
        """Rows in a batch, fewer with each death: all of them at no death, one at the last chance before parking."""
        share = 1 - self.number / (self._config.park_after - 1)
        return max(1, int(self._config.batch_messages ** max(0.0, share)))

    def begin(self, end: int) -> None:
        """A batch that ends at ``end`` is about to be dispatched."""
        self._suspect_end = max(self._suspect_end, end)
        self._control.put_dispatcher(self._slot, DispatcherWord.SUSPECT_END, self._suspect_end)
        self._control.put_dispatcher(self._slot, DispatcherWord.DEATHS, self.number + 1)

    def survive(self, position: int) -> None:
        """The batch is dispatched, up to ``position``."""
        if position >= self._suspect_end:
            self.number = self._suspect_end = 0
        self._control.put_dispatcher(self._slot, DispatcherWord.DEATHS, self.number)

    def forgive(self) -> None:
        """Count deaths from zero again."""
        self.number = 0
        self._control.put_dispatcher(self._slot, DispatcherWord.DEATHS, 0)
        self._control.put_dispatcher(self._slot, DispatcherWord.SUSPECT_END, 0)
