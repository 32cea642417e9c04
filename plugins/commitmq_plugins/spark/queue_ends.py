"""Finds where a queue of a closed store begins and ends, even when one of its units is damaged.

A reader finds the ends of a queue by bisection, because physical offsets ascend along it. One flipped bit in a unit may
make the bisection end there, and all units beyond it would silently be left out. So the units next to the ends are
examined: a unit that the log proves to be of this queue belongs to it, and so do all units between. Reading them then
reports the damage. The log proves none of the relics that RocketMQ left behind a queue's end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT
from commitmq.store.queues.queue_bytes import Proof

_LOOK: Final = 64
_NEXT: Final = 2


class RawUnits:
    """The units of one ConsumeQueue as stored in its files."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes

    def at(self, offset: int, count: int) -> NDArray[np.void]:
        """Up to ``count`` units from queue ``offset`` on, of one file; none when there is no file."""
        base, within = divmod(offset * UNIT_BYTES, self._file_bytes)
        try:
            with (self._folder / segment_name(base * self._file_bytes)).open("rb") as file:
                data = os.pread(file.fileno(), min(count * UNIT_BYTES, self._file_bytes - within), within)
        except FileNotFoundError:
            data = b""
        return np.frombuffer(data[: len(data) - len(data) % UNIT_BYTES], UNIT)


def whole_span(
    units: RawUnits, first: int, end: int, *, bound: int, floor: int, proof: Proof, is_clean: bool
) -> tuple[int, int]:
    """``(first, end)`` of a queue, moved outwards over units that the log proves to be its own.

    ``is_clean``: a node closed the store in order, which leaves nothing behind a queue's end; then every non-zero unit
    there is a unit of the queue, or was one.
    """

    def proven(offset: int, unit: np.void) -> bool:
        physical, size = int(unit["physical_offset"]), int(unit["size"])
        whole = 0 < size < PREBLANK_SIZE and physical >= floor and physical + size <= bound
        return whole and proof(offset, physical, size)

    for offset, unit in _from(units, max(0, first - _NEXT), first):
        if proven(offset, unit):
            first = offset
            break
    last = end
    for offset, unit in _from(units, end, None):
        if not any(unit.tobytes()):
            # One whole unit of zeros may be damage too, if a proven unit follows.
            if any(proven(at, one) for at, one in _from(units, offset + 1, offset + _NEXT)):
                continue
            break
        if proven(offset, unit) or is_clean:
            last = offset + 1
        elif offset >= last + _LOOK:
            break
    return first, last


def _from(units: RawUnits, offset: int, end: int | None) -> Iterator[tuple[int, np.void]]:
    """Units with their queue offsets, from ``offset`` up to ``end``, or up to a missing file."""
    while end is None or offset < end:
        found = units.at(offset, _LOOK if end is None else end - offset)
        if not len(found):
            return
        for unit in found:
            yield offset, unit
            offset += 1
