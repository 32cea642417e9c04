"""The positions of a mover: when it writes them down, the files that hold them, and earlier ones for a log that is cut.

Everything that positions speak of must be durable first. A mover notes each change. When its interval is over it takes
its positions, with the end of the log at the last change. They are stored once the log is flushed as far. So no
position speaks of a message, or of a copy, that a power cut takes.

A position says what is done; done means that copies, acks or ends are in the log. Where the log is cut in front of
them, the position is too new, although the messages that it passed are still there: they would be lost. So each file of
positions keeps earlier ones, each with the end of the log at that time, everything below which was durable. After a cut
the newest that did not need more of the log counts, and what it has not passed is looked at again.

Entries become rarer the further the log has gone on since: at any place of the log there is one that is at most about
twice as far from the newest as that place is. A power cut takes nothing that a position speaks of, so only an operator
who cuts flushed messages off, or an older copy of the log beside newer positions, needs any of this.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from commitmq.control import Word
from commitmq.errors import StoreError
from commitmq.files.disk import DamagedFileError, set_aside
from commitmq.log import Log
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion
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
T = TypeVar("T")

UNKNOWN: Final = -1
"""No position in the log is written down."""
MOST_OFFSET: Final = (1 << 63) - 1


class ProgressPair(ABC, Generic[P, T]):
    """Positions in two files: RocketMQ's, read as ``T``, and the node's own beside it. One process uses them.

    The node's file has all positions, and the data versions of RocketMQ's before and after it was written. Another
    version means that RocketMQ used the store in the meantime: its positions count then. The node's file is written
    first; it is durable before RocketMQ's changes. A damaged file is set aside: then its previous generation counts, or
    else the other file.
    """

    def __init__(self, theirs: Path, ours: Path, what: str, log: Log, flushed: Callable[[], int]) -> None:
        """``what`` the files hold, in a sentence. ``flushed``: everything in the CommitLog below it is durable now."""
        self._theirs, self._ours, self._what = theirs, ours, what
        self._log, self._flushed = log, flushed
        self._trail = Trail()
        self._version = DataVersion()
        self._next: DataVersion | None = None
        """What a call that failed may have left in RocketMQ's file."""

    @abstractmethod
    def _read_theirs(self) -> tuple[DataVersion, T] | None:
        """RocketMQ's file; None without one. Raises DamagedFileError, StoreError or OSError."""

    @abstractmethod
    def _decode(self, theirs: T | None, ours: dict[Any, Any], *, ours_counts: bool) -> P:
        """The positions that count. An error of the shape of ``ours`` is one of a damaged file."""

    def load(self) -> P:
        """What the files say. Raises StoreError or OSError for a file that cannot be read now, or not be set aside."""
        while True:
            try:
                return self._read()
            except DamagedFileError as error:
                aside = set_aside(error.damaged)
                self._log.error(f"{self._what} are damaged", error=str(error), kept_as=str(aside))

    def _read(self) -> P:
        found = self._read_theirs()
        version, theirs = (DataVersion(), None) if found is None else found
        self._version, self._next = version, None
        ours = json_config.load_table(self._ours) or {}
        with shape_of(self._ours):
            counts = (bool(ours) and found is None) or _as_list(version) in ours.get("versions", ())
            progress = self._decode(theirs, ours, ours_counts=counts)
            self._trail = Trail.from_json(ours.get("trail")) if counts else Trail()
        return progress

    def _write(self, ours: dict[str, Any], entry: Any, theirs: Callable[[DataVersion], None]) -> None:
        """Write the node's file with ``entry`` in its trail, then RocketMQ's by ``theirs``. Raises StoreError or OSError; the
        same call may be repeated.
        """
        if self._next is None:
            self._next = replace(self._version)
            self._next.advance()
        self._trail.note(self._flushed(), entry)
        versions = [_as_list(self._version), _as_list(self._next)]
        json_config.persist(self._ours, {**ours, "versions": versions, "trail": self._trail.to_json()})
        theirs(self._next)
        self._version, self._next = self._next, None

    def _is_too_new(self, place: int, log: int, is_there: Callable[[], bool]) -> bool:
        """Whether positions with ``log`` need more of the log than is left below ``place``. ``is_there``: whether the messages
        before them are still in their queues. It counts for those of RocketMQ, which tell of no deliveries.
        """
        if self._trail.entries:
            return max(self._trail.end, log) > place
        return log > place or not is_there()


@contextlib.contextmanager
def shape_of(path: Path) -> Iterator[None]:
    """Raises DamagedFileError where the content of ``path`` has another shape."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise DamagedFileError(
            f"it has another shape than positions have: {error!r}", path=json_config.loaded_path(path)
        ) from error


def _as_list(version: DataVersion) -> list[int]:
    return list(version.to_json().values())


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
            # Nothing is lost: the previous positions count, and more is looked at again after a death.
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
