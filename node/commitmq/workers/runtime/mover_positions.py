"""When a mover writes its positions down: everything that they speak of must be durable first.

A mover notes each change. When its interval is over it takes its positions, with the end of the log at the last change. They
are stored once the log is flushed as far. So no position speaks of a message, or of a copy, that a power cut takes.

Earlier positions of a mover, for a log that is cut below what the newest ones speak of.

A position says what is done; done means that copies, acks or ends are in the log. Where the log is cut in front of them, the
position is too new, although the messages that it passed are still there: they would be lost. So each file of positions keeps
earlier ones, each with the end of the log at that time, everything below which was durable. After a cut the newest that did
not need more of the log counts, and what it has not passed is looked at again.

Entries become rarer the further the log has gone on since: at any place of the log there is one that is at most about twice as
far from the newest as that place is. A power cut takes nothing that a position speaks of, so only a person who cuts flushed
messages off, or an older copy of the log beside newer positions, needs any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Generic, TypeVar

from commitmq.control import Word
from commitmq.errors import StoreError
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

_NEAR_BYTES: Final = 65_536
"""Closer to the newest one entry is as good as another."""


class Trail:
    """``entries``: (end of the log, positions as JSON), both oldest first."""

    def __init__(self, entries: Iterable[tuple[int, Any]] = ()) -> None:
        self.entries = list(entries)

    @classmethod
    def from_json(cls, found: Any) -> Trail:
        """Raises TypeError or ValueError for anything else than :meth:`to_json` made."""
        return cls((int(end), positions) for end, positions in found or ())

    def to_json(self) -> list[list[Any]]:
        return [[end, positions] for end, positions in self.entries]

    @property
    def end(self) -> int:
        """What the newest positions need of the log; -1 without any."""
        return self.entries[-1][0] if self.entries else -1

    def note(self, end: int, positions: Any) -> None:
        """These are the newest ones; everything that they speak of lies below ``end`` and is durable."""
        self.cut(end - 1)
        kept: list[tuple[int, Any]] = [(end, positions)]
        for number in range(len(self.entries) - 1, -1, -1):
            behind, one = kept[-1][0], self.entries[number]
            older = self.entries[number - 1] if number else None
            if older is None or behind - older[0] >= max(end - behind, _NEAR_BYTES):
                kept.append(one)
        self.entries = kept[::-1]

    def cut(self, place: int) -> Any | None:
        """Forget what needs more than the log up to ``place``; the newest positions that are left, None without any."""
        while self.entries and self.entries[-1][0] > place:
            self.entries.pop()
        return self.entries[-1][1] if self.entries else None


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
