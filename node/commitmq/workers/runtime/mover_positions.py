"""When a mover writes its positions down: everything that they speak of must be durable first.

A mover notes each change. When its interval is over it takes its positions, with the end of the log at the last change. They
are stored once the log is flushed as far. So no position speaks of a message, or of a copy, that a power cut takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from commitmq.control import Word
from commitmq.errors import StoreError
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

_CLOSE_MS: Final = 2_000
_LOOK_MS: Final = 10

P = TypeVar("P")


class MoverPositions(Generic[P]):
    """``written``: what is on disk, as far as this process knows."""

    def __init__(
        self,
        context: WorkerContext,
        interval_ms: int,
        *,
        take: Callable[[], P | None],
        store: Callable[[P], None],
        start: P,
    ) -> None:
        """``take``: the positions now; None when they cannot be told now. ``store`` writes them, durably."""
        self._context = context
        self._control = context.control
        self._interval_ms = interval_ms
        self._take, self._store = take, store
        self.written = start
        self._changed = False
        self._change_at = 0
        self._captured: tuple[P, int] | None = None
        """What is to be stored, once the log is flushed up to the position."""
        self._store_at_ms = 0

    def begin(self, written: P, *, changed: bool = False) -> None:
        """A mover has taken up ``written``. ``changed``: it begins with other positions."""
        self.written, self._captured, self._changed = written, None, False
        if changed:
            self.note_change()

    def note_change(self) -> None:
        """The positions are others now. Call it when everything that they speak of is written to the log."""
        self._changed = True
        self._change_at = self._control.get(Word.WRITTEN)

    def write_down(self, *, at_once: bool = False) -> bool:
        """Store the positions when they are due and the log is flushed. True when that was done now."""
        now = monotonic_ms()
        if now < self._store_at_ms and not at_once:
            return False
        if self._captured is None:
            if not self._changed or (taken := self._take()) is None:
                return False
            self._captured, self._changed = (taken, self._change_at), False
        positions, needs = self._captured
        if self._control.get(Word.FLUSHED) < needs:
            return False
        self._store_at_ms = now + self._interval_ms
        try:
            if not self._context.room.try_to("positions", partial(self._store, positions)):
                return False
        except (OSError, StoreError) as error:
            # Nothing is lost: the former positions count, and more is looked at again after a death.
            self._context.log.error("the positions cannot be written", error=str(error))
            return False
        self.written, self._captured = positions, None
        return True

    def close(self) -> None:
        """Store the last positions. A log that is flushed from time to time only is not waited for."""
        self._changed |= self._captured is not None
        self._captured = None
        deadline = monotonic_ms() + (_CLOSE_MS if self._context.config.sync_flush else 0)
        while not self.write_down(at_once=True) and self._captured is not None and monotonic_ms() < deadline:
            self._context.wait(_LOOK_MS)
