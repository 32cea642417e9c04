"""Splits a run at the ends of segments, because a record never straddles two of them (spec 2.11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commitmq.store.log.run_check import CheckedRun, MessageIllegalError

FILLER_BYTES: Final = 8


@dataclass(slots=True)
class Part:
    """Adjacent records of one run: ``count`` records from ``physical_offset`` on, ``size_bytes`` together."""

    count: int
    physical_offset: int
    size_bytes: int


class Piece(NamedTuple):
    """Records [first, behind) of a run: its bytes [start, stop), to be stored at ``at`` of the segment at ``base``."""

    base: int
    at: int
    start: int
    stop: int
    first: int
    behind: int

    @property
    def part(self) -> Part:
        return Part(self.behind - self.first, self.base + self.at, self.stop - self.start)


def split_run(run: CheckedRun, position: int, segment_bytes: int) -> list[Piece]:
    """The pieces of a run that begins at ``position``. Raises MessageIllegalError."""
    pieces: list[Piece] = []
    ends, done, start = run.ends, 0, 0
    at = position % segment_bytes
    base = position - at
    if run.count and at + (size := int(ends[-1])) + FILLER_BYTES <= segment_bytes:
        return [
            Piece(base, at, 0, size, 0, run.count)
        ]  # the usual case, which the search below costs more than the rest
    while done < run.count:
        first = int(ends[done]) - start
        if first + FILLER_BYTES > segment_bytes:
            raise too_long(first, segment_bytes)
        if at + first + FILLER_BYTES > segment_bytes:
            base, at = base + segment_bytes, 0
        fits = int(np.searchsorted(ends, start + segment_bytes - at - FILLER_BYTES, side="right"))
        stop = int(ends[fits - 1])
        pieces.append(Piece(base, at, start, stop, done, fits))
        at, start, done = at + stop - start, stop, fits
    return pieces


def too_long(size: int, segment_bytes: int) -> MessageIllegalError:
    """No segment can hold a record of ``size`` bytes."""
    return MessageIllegalError(
        f"the record has {size} bytes and cannot fit a segment of {segment_bytes} (commit_log.segment_bytes)"
    )
