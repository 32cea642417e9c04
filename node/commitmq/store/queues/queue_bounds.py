"""Finds the units of queues that a reader may show: bounds, and places in queues, while another process appends.

Two physical offsets, passed with every call, decide which units may be shown: ``bound`` (a unit counts when its record
ends at or below it) and ``floor`` (a unit counts when its record begins at or above it: the log's minimum, or the place
from which on a topic's records are not those of a deleted topic of the same name). Both are monotone along a queue, so
the visible part is an interval, which is found by bisection and from then on only extended.

A queue costs one small object here: an FdCache bounds the descriptors, the CommitLog the maps. The first file of a
queue may begin with a hole (``holes``), pages of zeros that its writer gave back: units there pointed below the floor.
A hole only grows, from the front on, so an existing unit proves that all units behind it exist. Nothing here writes;
the minimum of spec 3.6 is a number in memory. Pre-blank units are skipped.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT, UNIT_STRUCT
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.pull_result import NO_UNITS, Units

_CHUNK_UNITS: Final = 8_192
_TAIL_UNITS: Final = 128


class QueueState:
    """The known state of one queue. ``first``/``last``: bytes at which its files begin; ``min``/``max``: queue offsets;
    ``mark``: physical offset in the unit before ``max``, by which a recreated queue is detected. With holes ``first``
    is where the first existing unit begins, and ``mark`` begins as that unit's physical offset.
    """

    __slots__ = ("bound", "first", "floor", "folder", "last", "mark", "max", "min")

    def __init__(self, folder: str, first: int, last: int) -> None:
        self.folder = folder
        self.first = first
        self.last = last
        self.min = self.max = first // UNIT_BYTES
        self.bound = self.floor = self.mark = -1


class QueueBounds:
    """The known states of all queues under one ``consumequeue/`` folder. Not thread-safe."""

    def __init__(
        self,
        commit_log: CommitLog,
        folder: Path,
        file_bytes: int,
        *,
        max_queues: int,
        fds: FdCache,
        holes: bool,
    ) -> None:
        """See :class:`commitmq.store.queues.queue_reader.QueueReader`."""
        self.commit_log = commit_log
        self.folder = os.fspath(folder)
        self.file_bytes = file_bytes
        self.max_queues = max_queues
        self._holes = holes
        self._fds = fds
        self._queues: OrderedDict[tuple[str, int], QueueState] = OrderedDict()

    # ------------------------------------------------------------ bounds

    def bounds(self, topic: str, queue: int, *, bound: int, floor: int = 0) -> tuple[int, int] | None:
        """``(min offset, max offset)`` of the readable messages; max is the next offset. None without a file."""
        found = self._synced(topic, queue, bound, floor)
        return None if found is None else (found.min, found.max)

    def forget(self, topic: str) -> None:
        """Forget the state of a topic that was deleted or recreated."""
        for key in [key for key in self._queues if key[0] == topic]:
            del self._queues[key]

    def drop_deleted_files(self) -> None:
        """Close the descriptors of deleted files, so that their space is freed."""
        self._fds.drop_deleted()

    def __len__(self) -> int:
        """Number of remembered queues."""
        return len(self._queues)

    def close(self) -> None:
        self._fds.close()

    def _synced(self, topic: str, queue: int, bound: int, floor: int) -> QueueState | None:
        key = (topic, queue)
        state = self._queues.get(key)
        if state is not None:
            self._queues.move_to_end(key)
            if state.bound == bound and state.floor == floor:
                return state
            if not self._extend(state, bound) or floor < state.floor:
                del self._queues[key]  # its files were replaced: start again from the folder
                state = None
        if state is None:
            state = self._opened(topic, queue)
            if state is None:
                return None
            while not self._extend(state, bound) and self._holes:
                state = self._opened(topic, queue)  # a hole grew meanwhile
                if state is None:
                    return None
            if self._holes and state.mark < 0:
                return state  # no unit yet: a hole made before the next read could not be told from this one
            self._queues[key] = state
            if len(self._queues) > self.max_queues:
                self._queues.popitem(last=False)
        if state.floor != floor:
            self._raise_min(state, floor)
        return state

    def _opened(self, topic: str, queue: int) -> QueueState | None:
        folder = f"{self.folder}/{topic}/{queue}"
        try:
            names = [entry.name for entry in os.scandir(folder)]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot list the queue: {error.strerror}", path=folder) from error
        bases = [int(name) for name in names if len(name) == 20 and name.isascii() and name.isdigit()]
        bases = [base for base in bases if base % self.file_bytes == 0]
        if not bases:
            return None
        state = QueueState(folder, min(bases), max(bases))
        if self._holes and not self._pass_hole(state):
            return self._opened(topic, queue)
        return state

    def _pass_hole(self, state: QueueState) -> bool:
        """Begin a just opened queue with the first existing unit of its first file; False when that file was deleted
        since the folder was listed.
        """
        data = self._pread(state, state.min, self.file_bytes // UNIT_BYTES)
        if not data and not os.path.exists(f"{state.folder}/{segment_name(state.first)}"):
            return False
        units = np.frombuffer(data, UNIT)
        there = np.flatnonzero(units["size"] > 0)
        if len(there):
            state.min = state.max = state.min + int(there[0])
            state.first = state.min * UNIT_BYTES
            state.mark = int(units["physical_offset"][there[0]])
        return True

    def _extend(self, state: QueueState, bound: int) -> bool:
        """Move ``state.max`` to the end of the units below ``bound``; False when the known files are gone."""
        if state.bound == bound:
            return True
        was_empty = state.min == state.max
        known = state.max
        start = max(known - 1, state.first // UNIT_BYTES)
        tail, mark = self._tail(state, start, bound)
        # The last known unit is read again: if it differs, the folder was deleted and recreated.
        if (known > start or state.mark >= 0) and mark != state.mark:
            return False
        state.max = max(known, start + tail)
        # A unit that is not below the bound ends the queue, unless there is a later file: then the unit is damaged.
        at_border = bool(tail) and (start + tail) * UNIT_BYTES % self.file_bytes == 0
        if tail == _TAIL_UNITS or at_border or (start + tail) * UNIT_BYTES < state.last:
            while os.path.exists(f"{state.folder}/{segment_name(state.last + self.file_bytes)}"):
                state.last += self.file_bytes
            state.max = self._end(state, state.max, bound)
        if self._holes and tail:
            unit = self._unit(state, start)
            if unit is None or not unit[1] or unit[0] != mark:
                return False
        if state.max > known:
            unit = self._unit(state, state.max - 1)
            state.mark = -1 if unit is None or not unit[1] else unit[0]
        state.bound = bound
        if was_empty and state.max > state.min:
            state.floor = -1  # the unit that min points at did not exist before
        return True

    def _tail(self, state: QueueState, start: int, bound: int) -> tuple[int, int]:
        """How many of the units from ``start`` on, within one file and _TAIL_UNITS, are below ``bound``; and the
        physical offset in the first of them, -1 when it does not exist.
        """
        data = self._pread(state, start, _TAIL_UNITS)
        count = 0
        for physical, size, _ in UNIT_STRUCT.iter_unpack(data):
            if not _is_below(physical, size, bound):
                break
            count += 1
        physical, size, _ = UNIT_STRUCT.unpack_from(data) if data else (-1, 0, 0)
        return count, physical if size else -1

    def _end(self, state: QueueState, known: int, bound: int) -> int:
        """First queue offset at or after ``known`` that is not below ``bound``; all before ``known`` are."""
        base = state.last
        while base // UNIT_BYTES > known and not self._unit_is_below(state, base // UNIT_BYTES, bound):
            base -= self.file_bytes
        low = max(known, base // UNIT_BYTES)
        high = (base + self.file_bytes) // UNIT_BYTES
        return _bisect(low, high, lambda offset: not self._unit_is_below(state, offset, bound))

    def _unit_is_below(self, state: QueueState, offset: int, bound: int) -> bool:
        unit = self._unit(state, offset)
        return unit is not None and _is_below(unit[0], unit[1], bound)

    def _raise_min(self, state: QueueState, floor: int) -> None:
        """Move ``state.min`` to the first real unit from ``floor`` on (spec 3.6); a missing file counts as below."""

        def is_above(offset: int) -> bool:
            unit = self._unit(state, self._next_real(state, offset))
            return unit is not None and unit[0] >= floor

        first = self._unit(state, state.min) if state.min < state.max else None
        if first is None or first[1] == PREBLANK_SIZE or first[0] < floor:
            found = _bisect(state.min, state.max, is_above)
            state.min = self._next_real(state, found) if found < state.max else found
        state.floor = floor

    def _next_real(self, state: QueueState, offset: int) -> int:
        """The first unit from ``offset`` on that is not pre-blank; ``state.max`` if there is none."""
        while offset < state.max:
            data = self._pread(state, offset, min(_CHUNK_UNITS if offset % _TAIL_UNITS == 0 else 1, state.max - offset))
            if not data:
                return offset  # the file expired
            sizes = np.frombuffer(data, UNIT)["size"]
            real = np.flatnonzero(sizes != PREBLANK_SIZE)
            if len(real):
                return offset + int(real[0])
            offset += len(sizes)
        return offset

    # ------------------------------------------------------------ units

    def _pread(self, state: QueueState, offset: int, count: int) -> bytes:
        """Up to ``count`` units from ``offset`` of the one file that holds it; empty when the file does not exist."""
        at = offset * UNIT_BYTES
        base = at - at % self.file_bytes
        try:
            fd = self._fds.read_fd(f"{state.folder}/{segment_name(base)}")
            data = os.pread(fd, min(count * UNIT_BYTES, base + self.file_bytes - at), at - base)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreError(f"cannot read the queue: {error.strerror}", path=state.folder, offset=at) from error
        return data if len(data) % UNIT_BYTES == 0 else data[: len(data) // UNIT_BYTES * UNIT_BYTES]

    def _unit(self, state: QueueState, offset: int) -> tuple[int, int, int] | None:
        data = self._pread(state, offset, 1)
        return UNIT_STRUCT.unpack(data) if data else None

    def _units(self, state: QueueState, offset: int, count: int) -> Units:
        """Up to ``count`` units from ``offset`` on, across file borders; fewer when a file is missing."""
        data = self._pread(state, offset, count)
        while 0 < len(data) < count * UNIT_BYTES:
            more = self._pread(state, offset + len(data) // UNIT_BYTES, count - len(data) // UNIT_BYTES)
            if not more:
                break
            data += more
        return np.frombuffer(data, UNIT)

    def _gap(self, state: QueueState, offset: int) -> int:
        """The offset to continue at behind a missing file, if the queue continues behind it."""
        file_units = self.file_bytes // UNIT_BYTES
        return min(offset + file_units - offset % file_units, state.max)

    def units(
        self, topic: str, queue: int, offset: int, count: int, *, bound: int, floor: int = 0
    ) -> tuple[int, Units]:
        """Up to ``count`` units as they are on disk, and the queue offset of the first: ``offset``, or the first one
        behind a gap there. Some may be pre-blank, empty or of records that may not be shown; none at the queue's end.
        """
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return offset, NO_UNITS
        at = max(offset, state.min)
        while at < state.max:
            units = self._units(state, at, min(count, state.max - at))
            if len(units):
                return at, units
            at = self._gap(state, at)
        return at, NO_UNITS

    # ------------------------------------------------------------ place and time

    def offset_at(self, topic: str, queue: int, physical: int, *, bound: int, floor: int = 0) -> int | None:
        """First queue offset whose record begins at or behind ``physical``, clamped to [min, max]; None without a file."""
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return None

        def is_behind(offset: int) -> bool:
            unit = self._unit(state, self._next_real(state, offset))
            return unit is not None and unit[0] >= physical

        return _bisect(state.min, state.max, is_behind)

    def offset_by_time(
        self, topic: str, queue: int, timestamp: int, *, upper: bool = False, bound: int, floor: int = 0
    ) -> int | None:
        """First queue offset stored at ``timestamp`` (ms) or later, with ``upper`` the last one stored then or earlier;
        clamped into [min, max] (spec 3.7). None when the queue has no file.

        Store times do not decrease along a queue, so one bisection over the whole queue finds the same unit as the rule
        does file by file. A record that cannot be read counts as earlier than all others.
        """
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return None
        limit = timestamp + 1 if upper else timestamp

        def is_later(offset: int) -> bool:
            unit = self._unit(state, self._next_real(state, offset))
            return unit is not None and self.commit_log.store_timestamp(unit[0], unit[1]) >= limit

        found = _bisect(state.min, state.max, is_later)
        return max(state.min, found - 1) if upper else found


def _is_below(physical: int, size: int, bound: int) -> bool:
    """Whether a unit is written and its record, unless it is pre-blank, ends at or below ``bound``."""
    if size == PREBLANK_SIZE:
        return True
    return size > 0 and physical >= 0 and physical + size <= bound


def _bisect(low: int, high: int, is_true: Callable[[int], Any]) -> int:
    """First number in [low, high) with a true ``is_true`` (it stays true from there on); ``high`` without one."""
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low
