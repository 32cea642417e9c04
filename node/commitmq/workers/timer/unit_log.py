"""The timer log on disk: units are appended, and the chain of a slot is read (spec 12.2; :mod:`commitmq.format.timer_log`).

The files have holes where no unit was written yet. They are written by system calls, which say when there is no room. They are
read through maps, but never in a hole: on a tmpfs that is full a look at one ends the process by SIGBUS.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.holes import data_extents, nonzero_chunks
from commitmq.files.write_all import write_all
from commitmq.format.constants import MAGIC_FILLER
from commitmq.format.file_names import segment_name
from commitmq.format.timer_arrays import UNIT
from commitmq.format.timer_log import (
    FILLER_BYTES,
    MAGIC_DEFAULT,
    MAGIC_DELETE,
    UNIT_BYTES,
    encode_filler,
    last_unit_offset,
)
from commitmq.format.timer_wheel import NO_POSITION
from commitmq.kernels.compiled import walk_timer_chain

Integers = NDArray[np.int64]
Units = NDArray[np.void]

_WALK: Final = 65_536


class DamagedTimerLogError(StoreError):
    """The units are not as the wheel says: both must be made again from the timer topic."""


class UnitLog:
    """The files below ``timerlog/``. ``end`` is where the next unit goes, unless it does not fit into the file."""

    def __init__(self, folder: Path, file_bytes: int, end: int) -> None:
        """``file_bytes``: for a log without files. Raises DamagedTimerLogError for files of different sizes, OSError."""
        self._folder = folder
        self.end = end
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._whole_bytes: dict[int, int] = {}
        """How far each mapped file has no hole."""
        self._unsynced: set[int] = set()
        folder.mkdir(mode=0o750, exist_ok=True)
        sizes = {int(path.name): path.stat().st_size for path in folder.iterdir() if path.name.isdigit()}
        if len(set(sizes.values())) > 1:
            raise DamagedTimerLogError("the files of the timer log have different sizes", path=folder)
        self.file_bytes = next(iter(sizes.values()), file_bytes)
        if self.file_bytes < UNIT_BYTES + FILLER_BYTES or any(base % self.file_bytes for base in sizes):
            raise DamagedTimerLogError("the files of the timer log do not follow each other", path=folder)
        self._bases = sorted(sizes)

    # ------------------------------------------------------------ appending

    def append(self, units: Units, positions: Integers) -> None:
        """Write ``units`` at ``positions`` (of :meth:`places`). They are not durable before :meth:`flush`.

        Raises OSError; then none of them counts, and the same call may be repeated.
        """
        bases = positions - positions % self.file_bytes
        end = self.end
        for base in np.unique(bases).tolist():
            mine = np.flatnonzero(bases == base)
            start = int(positions[mine[0]])
            if start == base and end < base:
                self._fill(base - self.file_bytes, end)
            data = units[mine].tobytes()
            with self._opened(base) as fd:
                write_all(fd, data, start - base, place="timerlog.write")
            self._unsynced.add(base)
            end = start + len(data)
            if base in self._maps:
                self._whole_bytes[base] = end - base
        self.end = end

    def places(self, count: int) -> Integers:
        """Where the next ``count`` units go."""
        found: list[Integers] = []
        at = self.end
        while count:
            base = at - at % self.file_bytes
            room = max(0, (self.file_bytes - (at - base) - FILLER_BYTES) // UNIT_BYTES)
            taken = min(count, room)
            if taken:
                found.append(at + UNIT_BYTES * np.arange(taken, dtype=np.int64))
            count -= taken
            at = base + self.file_bytes
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def flush(self) -> None:
        """Make everything appended durable. Raises OSError."""
        for base in sorted(self._unsynced):
            with self._opened(base) as fd:
                disk.sync(fd, "timerlog")
        self._unsynced.clear()

    def _fill(self, base: int, end: int) -> None:
        """End the file at ``base`` with a filler at ``end``, where a reader expects a unit."""
        at = end - base
        if base in self._bases and at + FILLER_BYTES <= self.file_bytes:
            with self._opened(base) as fd:
                write_all(fd, encode_filler(self.file_bytes - at), at, place="timerlog.write")
            self._unsynced.add(base)

    def _opened(self, base: int) -> AbstractContextManager[int]:
        path = self._folder / segment_name(base)
        if base not in self._bases:
            with disk.opened(path, os.O_RDWR | os.O_CREAT, "timerlog") as fd:
                disk.resize(fd, self.file_bytes, "timerlog")
            disk.sync_folder(self._folder, "timerlog")
            self._bases = sorted({*self._bases, base})
        return disk.opened(path, os.O_RDWR, "timerlog")

    # ------------------------------------------------------------ reading

    def chain(self, position: int, slot_ms: int, stop: int = 0) -> Integers:
        """Positions of the units of a slot from the newest one, at ``position``, back to the first that is below ``stop``.

        Raises DamagedTimerLogError where a unit is not the slot's. A chain ends where its older files are deleted.
        """
        found: list[Integers] = []
        buffer: Integers = np.empty(_WALK, np.int64)
        while position >= stop and position != NO_POSITION:
            data = self._mapped(position - position % self.file_bytes)
            if data is None:
                if self._bases and position < self._bases[0]:
                    break
                raise self._damaged(position)
            base = position - position % self.file_bytes
            wrong = walk_timer_chain(data, base, position, max(stop, 0), slot_ms, buffer)
            if wrong:
                raise self._damaged(int(buffer[1]))
            found.append(buffer[2 : 2 + buffer[0]].copy())
            position = int(buffer[1])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def units(self, positions: Integers) -> Units:
        """The units at ``positions``."""
        out: Units = np.zeros(len(positions), UNIT)
        bases = positions - positions % self.file_bytes
        for base in np.unique(bases).tolist():
            data = self._mapped(base)
            if data is None:
                raise self._damaged(base)
            mine = bases == base
            whole = data[: len(data) // UNIT_BYTES * UNIT_BYTES].view(UNIT)
            numbers = (positions[mine] - base) // UNIT_BYTES
            if int(numbers.max()) >= len(whole):
                raise self._damaged(int(positions[mine].max()))
            out[mine] = whole[numbers]
        return out

    def waiting(self, from_ms: int) -> Units:
        """All units of slots from ``from_ms`` on, of the whole log."""
        return np.concatenate([np.empty(0, UNIT), *(units for _, units in self._waiting(from_ms))])

    def newest(self, from_ms: int) -> tuple[Integers, Integers]:
        """The slots (ms) from ``from_ms`` on that have units in the log, and the position of the newest unit of each."""
        slots_ms, positions = np.empty(0, np.int64), np.empty(0, np.int64)
        for at, units in self._waiting(from_ms):
            slots_ms = np.concatenate([slots_ms, units["write_ms"] + units["delay_ms"]])
            positions = np.concatenate([positions, at])
        found, last = np.unique(slots_ms[::-1], return_index=True)
        return found, positions[::-1][last]

    def _waiting(self, from_ms: int) -> Iterator[tuple[Integers, Units]]:
        """The units of slots from ``from_ms`` on, a file at a time, and their positions, which ascend.

        Raises DamagedTimerLogError where a file has no unit before its end.
        """
        for base in self._bases:
            data = self._mapped(base)
            assert data is not None
            size = max(0, min(len(data), self.end - base)) // UNIT_BYTES * UNIT_BYTES
            units = data[:size].view(UNIT)
            good = (units["size"] == UNIT_BYTES) & (units["magic"] & MAGIC_DEFAULT != 0)
            holes = np.flatnonzero(~good)
            # Only a filler may stand in the last place of a file.
            if len(holes) and (holes[0] < len(units) - 1 or units["magic"][-1] != MAGIC_FILLER):
                raise self._damaged(base + UNIT_BYTES * int(holes[0]))
            good &= units["write_ms"] + units["delay_ms"] >= from_ms
            yield base + UNIT_BYTES * np.flatnonzero(good), units[good]

    def check(self, positions: Integers, slots_ms: Integers) -> None:
        """Raise DamagedTimerLogError unless a unit of the slot ``slots_ms[i]`` lies at each of ``positions``."""
        known = positions >= (self._bases[0] if self._bases else 0)
        units = self.units(positions[known])
        good = (units["size"] == UNIT_BYTES) & (units["magic"] & MAGIC_DEFAULT != 0)
        good &= units["write_ms"] + units["delay_ms"] == slots_ms[known]
        if not good.all():
            raise self._damaged(int(positions[known][np.argmin(good)]))

    def _mapped(self, base: int) -> NDArray[np.uint8] | None:
        """The bytes of the file at ``base`` before its first hole; None without the file."""
        if base not in self._maps:
            if base not in self._bases:
                return None
            with disk.opened(self._folder / segment_name(base), os.O_RDWR, "timerlog") as fd:
                extents = data_extents(fd, 0, self.file_bytes)
                mapping: mmap.mmap = disk.map_file(fd, self.file_bytes, "timerlog", writable=False)
            self._maps[base] = np.frombuffer(mapping, np.uint8)
            self._whole_bytes[base] = extents[0][1] if extents and not extents[0][0] else 0
        return self._maps[base][: self._whole_bytes[base]]

    def _damaged(self, position: int) -> DamagedTimerLogError:
        error = DamagedTimerLogError("the timer log has no unit where its wheel says", path=self._folder)
        error.offset = position
        return error

    # ------------------------------------------------------------ cutting and deleting

    def cut(self) -> None:
        """Remove everything behind ``end``, durably: units there belong to a former end of the log."""
        for base in [base for base in self._bases if base >= self.end]:
            self._forget(base)
        if self._bases and self.end < self._bases[-1] + self.file_bytes:
            base = self._bases[-1]
            size = self.end - base
            with self._opened(base) as fd:
                if any(nonzero_chunks(fd, size, self.file_bytes)):
                    disk.resize(fd, size, "timerlog")
                    disk.resize(fd, self.file_bytes, "timerlog")
                    disk.sync(fd, "timerlog")
            if base in self._maps:
                self._whole_bytes[base] = min(size, self._whole_bytes[base])

    def clear(self) -> None:
        """Delete all files: the log begins at 0 again."""
        for base in list(self._bases):
            self._forget(base)
        self.end = 0

    def delete_expired(self, floor: int) -> None:
        """Delete the files before the last one whose messages all lie below ``floor`` in the CommitLog (as RocketMQ)."""
        while len(self._bases) > 1 and self._bases[0] + self.file_bytes <= self.end:
            at = self._bases[0] + last_unit_offset(self.file_bytes)
            if int(self.units(np.array([at], np.int64))["physical_offset"][0]) >= floor:
                return
            self._forget(self._bases[0])

    def _forget(self, base: int) -> None:
        self._maps.pop(base, None)
        self._unsynced.discard(base)
        disk.unlink(self._folder / segment_name(base), "timerlog", missing_ok=True)
        self._bases.remove(base)

    @property
    def is_empty(self) -> bool:
        """Whether it has no files."""
        return not self._bases

    @staticmethod
    def steps(magic: Integers) -> Integers:
        """How each unit changes its slot's count: a cancellation lowers it."""
        return np.where(magic & MAGIC_DELETE, -1, 1).astype(np.int64)
