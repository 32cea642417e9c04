"""Splits a CommitLog for readers that work side by side, also within a segment.

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
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.kernels.compiled import find_record

PIECE_BYTES: Final = 64 << 20
NO_START: Final = -1
_BUDGET_BYTES: Final = 256 << 20  # of CRCs of false records, in one search: about 0.1 s

Segment = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """The records that begin in ``[begin, stop)`` of the segment at ``base``; physical offsets."""

    base: int
    begin: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether the piece begins its segment, so that nothing needs to be proven."""
        return self.begin == self.base


class Walked(Protocol):
    """A reader's result for its piece: the record it began at (:data:`NO_START` if none begins there) and where it
    arrived.

    The reader of a segment's last piece arrives at the segment's end.
    """

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


W = TypeVar("W", bound=Walked)
Job = tuple[Piece, int]
"""A piece and the place to begin at; with :data:`NO_START` the reader must search for it."""


def pieces_of(bases: Sequence[int], segment_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of the segments at ``bases``, in order."""
    return [
        Piece(base, base + at, base + min(at + piece_bytes, segment_bytes))
        for base in bases
        for at in range(0, segment_bytes, piece_bytes)
    ]


def find_start(segment: Segment, piece: Piece) -> int:
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


def find_stop(segment: Segment, piece: Piece) -> int:
    """Where the reader of ``piece`` may stop: the start of the next piece that has one, or the segment's end."""
    size = piece.stop - piece.begin
    end = piece.base + segment.size
    begin = piece.stop
    while begin < end:
        following = Piece(piece.base, begin, min(begin + size, end))
        start = find_start(segment, following)
        if start != NO_START:
            return start
        begin = following.stop
    return end


def prove(pieces: Sequence[Piece], run: Callable[[list[Job]], Iterable[W]]) -> list[W]:
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


def _wrong(pieces: Sequence[Piece], results: Sequence[W]) -> list[tuple[int, int]]:
    """Pieces, by number, that must be read again, and where each has to begin.

    Where the piece before is itself wrong, its arrival is still the best guess: usually it has found the true chain.
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
