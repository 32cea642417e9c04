"""Divides the log into whole records and damage: the one module that decides where damage begins and ends.

A damaged stretch ends where the next record begins that has its own physical offset and right CRCs. A stretch of the
last written segment, with nothing whole behind it, is a *torn end*: a crash leaves it, and a recovery cuts it.

Begin and end of each ConsumeQueue in a piece of the log, as the check of one piece tells them to that of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
