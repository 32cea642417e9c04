"""The log cut into what is whole and what is not: the one place that says where damage begins and ends.

A damaged stretch ends where the next record begins that says it belongs there and has right CRCs. A stretch of the last
segment that was written to, with nothing whole behind it, is a *torn end*: a crash leaves that, and a recovery cuts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.kernels import walk as kernel
from commitmq.store.commit_log import CommitLog
from commitmq.store.recovery import REASONS

_MAGIC: Final = re.compile(rb"\xda\xa3\x20[\xa7\xab]")
_WINDOW_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """``[start, end)`` in physical offsets, of one segment. ``damage`` is empty for whole records, else says why not."""

    start: int
    end: int
    damage: str = ""
    is_torn_end: bool = False


def extents(log: CommitLog, base: int, bases: Sequence[int]) -> Iterator[Extent]:
    """The extents of the segment at ``base``, in order; ``bases`` are all segments. Zeros behind the end are none."""
    size = log.segment_bytes
    segment = np.frombuffer(log.read(base, size), np.uint8)
    out = np.zeros(5, np.int64)
    position = 0
    while position < size:
        result = kernel.scan(segment, position, size, base, False, out)
        good_end, reason = int(out[1]), int(out[4])
        if good_end > position:
            yield Extent(base + position, base + good_end)
        if result == kernel.WALK_BLANK:
            claimed = int.from_bytes(segment[good_end : good_end + 4].tobytes(), "big", signed=True)
            if claimed != size - good_end:
                yield Extent(base + good_end, base + size, f"a filler of {claimed} bytes with {size - good_end} left")
            return
        if result != kernel.WALK_BAD:
            return
        is_written_behind = any(any(log.read(later, 8)) for later in bases if later > base)
        if not segment[good_end:].any():
            if is_written_behind:
                yield Extent(base + good_end, base + size, "zeros, and records follow in later segments")
            return
        why = REASONS.get(reason, f"reason {reason}")
        following = _next_record(segment, good_end + 1, base)
        if following < 0:
            if is_written_behind:
                yield Extent(base + good_end, base + size, why)
            else:
                end = min(size, max(_last_nonzero(segment) + 1, good_end + 8))
                yield Extent(base + good_end, base + end, f"a torn end of the log: {why}", is_torn_end=True)
            return
        yield Extent(base + good_end, base + following, why)
        position = following


def _next_record(segment: NDArray[np.uint8], start: int, base: int) -> int:
    """Position of the first whole record at or behind ``start`` that says it belongs there; -1 without one.

    A body may hold anything, also what looks like a record: only one with its own physical offset and right CRCs counts.
    """
    out = np.zeros(5, np.int64)
    for window in range(start, segment.size, _WINDOW_BYTES):
        data = segment[window : window + _WINDOW_BYTES + 8].tobytes()
        hits = sorted(hit.start() - 4 + window for hit in _MAGIC.finditer(data, 4))
        for position in hits:
            head = segment[position : position + 36].tobytes()
            size = int.from_bytes(head[:4], "big", signed=True)
            if int.from_bytes(head[28:36], "big", signed=True) != base + position:
                continue
            if 0 < size <= segment.size - position:
                kernel.scan(segment, position, position + size, base, False, out)
                if int(out[0]) == 1:
                    return position
    return -1


def _last_nonzero(segment: NDArray[np.uint8]) -> int:
    """Position of the last byte that is not zero; -1 without one. Looks from the end, a window at a time."""
    for stop in range(segment.size, 0, -_WINDOW_BYTES):
        start = max(0, stop - _WINDOW_BYTES)
        found = np.flatnonzero(segment[start:stop])
        if len(found):
            return start + int(found[-1])
    return -1
