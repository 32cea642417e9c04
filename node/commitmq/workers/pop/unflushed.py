"""What the pop process has stored and the device does not have yet, where the node flushes asynchronously.

Receives and acks then wait for the log only, as RocketMQ's do. Committed offsets must not: they are durable at once, and after
a power cut an offset behind a check point that is lost would pass over its messages. So a commit waits until everything
that was stored before it is flushed. The append before a commit asks for that.
"""

from __future__ import annotations

from typing import Final

from commitmq.control import Word
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

_PATIENCE_MS: Final = 1_500
_LOOK_MS: Final = 5


class Unflushed:
    """See the module."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._control = context, context.control
        self._sync_flush = context.config.sync_flush
        self._end = 0
        self._wants_flush = False

    def ack(self) -> str:
        """The ack for the next append."""
        return "flushed" if self._sync_flush or self._wants_flush else "memory"

    def stored(self, ack: str) -> None:
        """An append has come back with ``ack``."""
        if ack == "memory":
            self._end = self._control.get(Word.WRITTEN)
        else:
            self._end, self._wants_flush = 0, False

    def is_nothing(self) -> bool:
        """Whether the device has everything. If not, the next append waits for it."""
        if self._end and self._control.get(Word.FLUSHED) >= self._end:
            self._end = 0
        self._wants_flush = self._end > 0
        return not self._end

    def wait(self) -> bool:
        """Wait a moment for the device; whether it has everything then."""
        deadline = monotonic_ms() + _PATIENCE_MS
        while not self.is_nothing() and monotonic_ms() < deadline and not self._context.stopping:
            self._context.wait(_LOOK_MS, nap=True)
        return self.is_nothing()
