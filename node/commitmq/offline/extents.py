"""Divides the log: into whole records and damage, and into pieces for readers that work side by side, also within a segment.
This is the one module that decides where damage begins and ends.

A damaged stretch ends where the next record begins that has its own physical offset and right CRCs. A stretch of the
last written segment, with nothing whole behind it, is a *torn end*: a crash leaves it, and a recovery cuts it.

Only the end of the record before it identifies a record; every mark of its beginning can be copied. A body may hold
whole records with right CRCs, even with the physical offsets of the very places where they are, and the last of them
may share the topic and properties of the surrounding record, so that the false chain leads into the true one. No
examination of the bytes from a place on, however long, tells such a record from a true one. This much can be proven: a
segment begins with a record, and where a walk from there arrives, a record begins.

So a segment is cut into *pieces* of equal size. Each reader begins at the first bytes in its piece that look like a
whole record (:func:`find_start`) and continues until it reaches or passes the corresponding start of the next piece.
The caller compares the results (:func:`prove`): a piece is right when it begins where the piece before it arrived. A
piece that does not is read again from there. This is hardly ever necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.kernels.codes import WALK_BLANK, WALK_LIMIT
from commitmq.kernels.compiled import find_record, scan_until
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery.scan import REASONS

Queue = tuple[str, int]

PLAIN, LIGHT, BATCH = range(3)
BOUNDS: Final = np.dtype(
    [
        ("topic", np.int32),  # index into the names beside it
        ("queue_id", np.int32),
        ("kind", np.int8),  # PLAIN, LIGHT (a record of another queue names it) or BATCH
        ("first", np.int64),  # queue offset of the first record
        ("next", np.int64),  # behind that of the last one, for LIGHT the highest
        ("physical_offset", np.int64),  # of the first record
        ("size", np.int32),
        ("count", np.int64),
        ("place", np.int64),  # BATCH: number of the first one's unit, -1 when it was not found
    ]
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Names of topics, and rows of :data:`BOUNDS` for each queue and kind."""

    names: tuple[str, ...] = ()
    table: NDArray[np.void] = field(default_factory=lambda: np.empty(0, BOUNDS))


_WINDOW_BYTES: Final = 1 << 20
_NO_BUDGET: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Extent:
    """``[start, end)`` in physical offsets, within one segment. ``damage`` is empty for whole records, else the reason."""

    start: int
    end: int
    damage: str = ""
    is_torn_end: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """The extents of a segment's part that begins at ``start``; ``end`` is where the walk arrived (physical offsets)."""

    start: int
    end: int
    extents: tuple[Extent, ...]


def extents(log: CommitLog, base: int, bases: Sequence[int]) -> tuple[Extent, ...]:
    """The extents of the segment at ``base``, in order, without the zeros behind the end; ``bases`` are all segments."""
    segment = np.frombuffer(log.read(base, log.segment_bytes), np.uint8)
    return walk_extents(log, segment, base, bases, base, base + segment.size).extents


def walk_extents(
    log: CommitLog, segment: NDArray[np.uint8], base: int, bases: Sequence[int], start: int, stop: int
) -> Stretch:
    """The extents from ``start``, a record's start, up to the first end of a record or of damage that is not below
    ``stop``; ``segment`` is all of the segment. Where nothing follows, the walk arrives at the segment's end.
    """
    found: list[Extent] = []
    size = segment.size
    limit = stop - base
    out = np.zeros(5, np.int64)
    position = start - base
    while position < limit:
        result = scan_until(segment, position, limit, size, base, False, out)
        good_end, reason = int(out[1]), int(out[4])
        if good_end > position:
            found.append(Extent(base + position, base + good_end))
        if result == WALK_LIMIT:
            position = good_end
            break
        if result == WALK_BLANK:
            claimed = int.from_bytes(segment[good_end : good_end + 4].tobytes(), "big", signed=True)
            if claimed != size - good_end:
                why = f"a filler of {claimed} bytes with {size - good_end} left"
                found.append(Extent(base + good_end, base + size, why))
            position = size
            break
        damage = _damage(log, segment, base, bases, good_end, REASONS.get(reason, f"reason {reason}"))
        if damage is not None:
            found.append(damage)
        position = size if damage is None or damage.is_torn_end else damage.end - base
    return Stretch(start, base + position, tuple(found))


def _damage(
    log: CommitLog, segment: NDArray[np.uint8], base: int, bases: Sequence[int], position: int, why: str
) -> Extent | None:
    """The damage that begins at ``position`` of the segment, where no record is; None for zeros behind the log's end."""
    size = segment.size
    following = -1 if is_blank(segment, position) else _next_record(segment, position + 1, base)
    if following >= 0:
        return Extent(base + position, base + following, why)
    is_written_behind = any(any(log.read(later, 8)) for later in bases if later > base)
    last = _last_nonzero(segment[position:]) + position
    if is_written_behind:
        zeros = "zeros, and records follow in later segments"
        return Extent(base + position, base + size, zeros if last < position else why)
    if last < position:
        return None
    end = min(size, max(last + 1, position + 8))
    return Extent(base + position, base + end, f"a torn end of the log: {why}", is_torn_end=True)


def is_blank(segment: NDArray[np.uint8], position: int) -> bool:
    """Whether only zeros follow; reads no further than necessary."""
    for start in range(position, segment.size, _WINDOW_BYTES):
        if segment[start : start + _WINDOW_BYTES].any():
            return False
    return True


def _next_record(segment: NDArray[np.uint8], start: int, base: int) -> int:
    """Position of the first whole record at or behind ``start`` with its own physical offset; -1 if there is none.

    A body may hold anything, even bytes that look like a record: only one with its own physical offset and right CRCs
    counts.
    """
    return int(find_record(segment, start, segment.size, base, _NO_BUDGET, np.zeros(5, np.int64)))


def _last_nonzero(segment: NDArray[np.uint8]) -> int:
    """Position of the last nonzero byte; -1 if there is none. Searches from the end, window by window."""
    for stop in range(segment.size, 0, -_WINDOW_BYTES):
        start = max(0, stop - _WINDOW_BYTES)
        found = np.flatnonzero(segment[start:stop])
        if len(found):
            return start + int(found[-1])
    return -1


PIECE_BYTES: Final = 64 << 20
NO_START: Final = -1
_BUDGET_BYTES: Final = 256 << 20  # of CRCs of false records, in one search: about 0.1 s

Segment = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LogRange:
    """The records that begin in ``[begin, stop)`` of the segment at ``base``; physical offsets."""

    base: int
    begin: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether the piece begins its segment, so that nothing needs to be proven."""
        return self.begin == self.base


class WalkResult(Protocol):
    """A reader's result for its piece: the record it began at (:data:`NO_START` if none begins there) and where it
    arrived. The reader of a segment's last piece arrives at the segment's end.
    """

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


W = TypeVar("W", bound=WalkResult)
Job = tuple[LogRange, int]
"""A piece and the place to begin at; with :data:`NO_START` the reader must search for it."""


def pieces_of(bases: Sequence[int], segment_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[LogRange]:
    """The pieces of the segments at ``bases``, in order."""
    return [
        LogRange(base, base + at, base + min(at + piece_bytes, segment_bytes))
        for base in bases
        for at in range(0, segment_bytes, piece_bytes)
    ]


def find_start(segment: Segment, piece: LogRange) -> int:
    """Physical offset of the first bytes in the piece that look like a whole record; :data:`NO_START` without one.
    ``segment`` is all of the segment's bytes. The first piece begins with the segment, with any bytes there.
    """
    if piece.is_first:
        return piece.base
    found = int(
        find_record(
            segment, piece.begin - piece.base, piece.stop - piece.base, piece.base, _BUDGET_BYTES, np.zeros(5, np.int64)
        )
    )
    return piece.base + found if found >= 0 else NO_START


def find_part(segment: Segment, piece: LogRange, start: int) -> tuple[int, int]:
    """Where a task begins and stops; ``start`` is known, or NO_START. Nothing is to be done where the first is not less."""
    start = find_start(segment, piece) if start == NO_START else start
    return start, NO_START if start == NO_START else find_stop(segment, piece)


def find_stop(segment: Segment, piece: LogRange) -> int:
    """Where the reader of ``piece`` may stop: the start of the next piece that has one, or the segment's end."""
    size = piece.stop - piece.begin
    end = piece.base + segment.size
    begin = piece.stop
    while begin < end:
        following = LogRange(piece.base, begin, min(begin + size, end))
        start = find_start(segment, following)
        if start != NO_START:
            return start
        begin = following.stop
    return end


def prove(pieces: Sequence[LogRange], run: Callable[[list[Job]], Iterable[W]]) -> list[W]:
    """The results of ``run`` for all ``pieces`` (whole segments in order), each begun where the one before it arrived.

    ``run`` does jobs in any order, side by side, and returns their results in the given order. Every round proves at
    least one more piece of each segment. Raises StoreError if a reader does not begin where it was told to.
    """
    results = list(run([(piece, piece.base if piece.is_first else NO_START) for piece in pieces]))
    while True:
        wrong = _wrong(pieces, results)
        if not wrong:
            return results
        jobs = [(pieces[index], position) for index, position in wrong]
        for (index, position), result in zip(wrong, run(jobs), strict=True):
            if result.start != position:
                raise StoreError(f"a reader began at {result.start} instead of {position}")
            results[index] = result


def _wrong(pieces: Sequence[LogRange], results: Sequence[W]) -> list[tuple[int, int]]:
    """Pieces, by number, that must be read again, and where each has to begin. Where the piece before is itself wrong,
    its arrival is still the best guess: usually it has found the true chain.
    """
    wrong = []
    position = 0
    for index, (piece, result) in enumerate(zip(pieces, results, strict=True)):
        if piece.is_first:
            position = piece.base
        if result.start == NO_START:
            continue
        if result.start != position:
            wrong.append((index, position))
        position = max(position, result.end)
    return wrong


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """``(start, stop)`` of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
