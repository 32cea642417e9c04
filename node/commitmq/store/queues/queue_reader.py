"""Reads queues by offset and time, as RocketMQ's getMessage does (spec 3.4 - 3.7, 9.1), without owning a file.

Another process appends to the ConsumeQueues; this one only reads. :mod:`commitmq.store.queues.queue_reader` finds the
units that may be shown.

Finds the units of queues that a reader may show: bounds, and places in queues, while another process appends.

Two physical offsets, passed with every call, decide which units may be shown: ``bound`` (a unit counts when its record
ends at or below it) and ``floor`` (a unit counts when its record begins at or above it: the log's minimum, or the place
from which on a topic's records are not those of a deleted topic of the same name). Both are monotone along a queue, so
the visible part is an interval, which is found by bisection and from then on only extended.

A queue costs one small object here: an FdCache bounds the descriptors, the CommitLog the maps. The first file of a
queue may begin with a hole (``holes``), pages of zeros that its writer gave back: units there pointed below the floor.
A hole only grows, from the front on, so an existing unit proves that all units behind it exist. Nothing here writes;
the minimum of spec 3.6 is a number in memory. Pre-blank units are skipped.

Which queues a topic has on the disk, whatever its settings say.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT, UNIT_STRUCT
from commitmq.kernels.codes import MATCH, NO_RECORD
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.consume_queue_ext import ExtensionReader
from commitmq.store.queues.record_filter import (
    JUDGED_BYTES,
    NO_UNITS,
    PullResult,
    PullStatus,
    RecordFilter,
    Units,
    affordable,
    cost_of,
)

_CHUNK_UNITS: Final = 8_192
_TAIL_UNITS: Final = 128


class ConsumeQueueState:
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


S = TypeVar("S")


class QueueStates(Generic[S]):
    """The known states of at most ``max_queues`` queues, the one read last being the newest."""

    def __init__(self, max_queues: int, fds: FdCache) -> None:
        self.max_queues = max_queues
        self._fds = fds
        self._queues: OrderedDict[tuple[str, int], S] = OrderedDict()

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


class ConsumeQueueStates(QueueStates[ConsumeQueueState]):
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
        super().__init__(max_queues, fds)
        self.commit_log = commit_log
        self.folder = os.fspath(folder)
        self.file_bytes = file_bytes
        self._holes = holes

    # ------------------------------------------------------------ bounds

    def bounds(self, topic: str, queue: int, *, bound: int, floor: int = 0) -> tuple[int, int] | None:
        """``(min offset, max offset)`` of the readable messages; max is the next offset. None without a file."""
        found = self._synced(topic, queue, bound, floor)
        return None if found is None else (found.min, found.max)

    def _synced(self, topic: str, queue: int, bound: int, floor: int) -> ConsumeQueueState | None:
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
                state = self._opened(topic, queue)  # a hole grew in the meantime
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

    def _opened(self, topic: str, queue: int) -> ConsumeQueueState | None:
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
        state = ConsumeQueueState(folder, min(bases), max(bases))
        if self._holes and not self._pass_hole(state):
            return self._opened(topic, queue)
        return state

    def _pass_hole(self, state: ConsumeQueueState) -> bool:
        """Begin a just opened queue with the first unit of its first file; False when that was deleted meanwhile."""
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

    def _extend(self, state: ConsumeQueueState, bound: int) -> bool:
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

    def _tail(self, state: ConsumeQueueState, start: int, bound: int) -> tuple[int, int]:
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

    def _end(self, state: ConsumeQueueState, known: int, bound: int) -> int:
        """First queue offset at or after ``known`` that is not below ``bound``; all before ``known`` are."""
        base = state.last
        while base // UNIT_BYTES > known and not self._unit_is_below(state, base // UNIT_BYTES, bound):
            base -= self.file_bytes
        low = max(known, base // UNIT_BYTES)
        high = (base + self.file_bytes) // UNIT_BYTES
        return _bisect(low, high, lambda offset: not self._unit_is_below(state, offset, bound))

    def _unit_is_below(self, state: ConsumeQueueState, offset: int, bound: int) -> bool:
        unit = self._unit(state, offset)
        return unit is not None and _is_below(unit[0], unit[1], bound)

    def _raise_min(self, state: ConsumeQueueState, floor: int) -> None:
        """Move ``state.min`` to the first real unit from ``floor`` on (spec 3.6); a missing file counts as below."""

        def is_above(offset: int) -> bool:
            unit = self._unit(state, self._next_real(state, offset))
            return unit is not None and unit[0] >= floor

        first = self._unit(state, state.min) if state.min < state.max else None
        if first is None or first[1] == PREBLANK_SIZE or first[0] < floor:
            found = _bisect(state.min, state.max, is_above)
            state.min = self._next_real(state, found) if found < state.max else found
        state.floor = floor

    def _next_real(self, state: ConsumeQueueState, offset: int) -> int:
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

    def _pread(self, state: ConsumeQueueState, offset: int, count: int) -> bytes:
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

    def _unit(self, state: ConsumeQueueState, offset: int) -> tuple[int, int, int] | None:
        data = self._pread(state, offset, 1)
        return UNIT_STRUCT.unpack(data) if data else None

    def _units(self, state: ConsumeQueueState, offset: int, count: int) -> Units:
        """Up to ``count`` units from ``offset`` on, across file borders; fewer when a file is missing."""
        data = self._pread(state, offset, count)
        while 0 < len(data) < count * UNIT_BYTES:
            more = self._pread(state, offset + len(data) // UNIT_BYTES, count - len(data) // UNIT_BYTES)
            if not more:
                break
            data += more
        return np.frombuffer(data, UNIT)

    def _gap(self, state: ConsumeQueueState, offset: int) -> int:
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


def queues_on_disk(folder: str | os.PathLike[str], topic: str) -> list[int]:
    """The ids of the queues with a folder under ``folder``/``topic``, sorted. Raises StoreError when it cannot be listed."""
    path = os.path.join(folder, topic)
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"cannot list the queues: {error.strerror}", path=path) from error
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


# Units examined by one filtered read: 1.3 MB of index, about a millisecond, so that no pull delays the others.
SCAN_UNITS: Final = 65_536
# Records examined by one filtered read, for a filter that units can hardly decide: a few milliseconds.
SCAN_RECORDS: Final = 16_384
MAX_CACHED_QUEUES: Final = 65_536
# Sending a view of the mapping costs a hand-over between threads in pyzmq (about 100 us); below this size a copy is
# cheaper. Gathered records are cut into parts of this size: malloc serves them without fresh pages each time.
VIEW_BYTES: Final = 256 * 1024
GATHER_BYTES: Final = 128 * 1024
MAX_FRAMES: Final = 64


@dataclass(slots=True)
class _Looks:
    """The parameters of one read; a second try skips a unit that is still not as expected."""

    bound: int
    floor: int
    max_messages: int
    max_bytes: int
    wanted: RecordFilter | None
    is_second: bool = False

    @staticmethod
    def passed_over(offset: int, readable: NDArray[np.bool_], units: Units) -> tuple[Units, int, bool]:
        """An empty result up to the first readable unit behind ``offset``: the consumer is told of a gap."""
        there = np.flatnonzero(readable)
        return NO_UNITS, offset + (int(there[0]) if len(there) else len(units)), True


class QueueReader(ConsumeQueueStates):
    """Reads of all queues under one ``consumequeue/`` folder. Not thread-safe."""

    def __init__(
        self,
        commit_log: CommitLog,
        folder: Path,
        file_bytes: int,
        *,
        ext_file_bytes: int = 50_331_648,
        max_open_files: int = 512,
        max_queues: int = MAX_CACHED_QUEUES,
        fds: FdCache | None = None,
        holes: bool = False,
    ) -> None:
        """``fds``: descriptors shared with other readers of this process, instead of its own ``max_open_files``.
        ``holes``: the first file of a queue may begin with one; such files should be small.
        """
        shared = FdCache(max_open_files) if fds is None else fds
        super().__init__(commit_log, folder, file_bytes, max_queues=max_queues, fds=shared, holes=holes)
        self._extensions = ExtensionReader(folder.with_name("consumequeue_ext"), ext_file_bytes, self._fds)

    # ------------------------------------------------------------ pulls

    def read(
        self,
        topic: str,
        queue: int,
        offset: int,
        *,
        bound: int,
        floor: int = 0,
        max_messages: int,
        max_bytes: int,
        wanted: RecordFilter | None = None,
    ) -> PullResult:
        """The messages from queue offset ``offset`` on, at least one however large, within the limits (spec 9.1).

        With ``wanted``, other messages are examined and skipped, at most SCAN_UNITS units and SCAN_RECORDS records in
        one call. Raises FilterError when the filter fails.
        """
        looks = _Looks(bound, floor, max_messages, max_bytes, wanted)
        result = self._read(topic, queue, offset, looks)
        if result is None:
            # An expected unit is missing. Either it was being written at that moment (a read during a write may show
            # half of it), or the queue's end was cut and is being rewritten: a second read shows the case. Or it is
            # damaged, and stays so.
            self._queues.pop((topic, queue), None)
            looks.is_second = True
            result = self._read(topic, queue, offset, looks)
            assert result is not None
        return result

    def _read(self, topic: str, queue: int, offset: int, looks: _Looks) -> PullResult | None:
        """One try; None when it is the first and the unit at ``offset`` is not as expected."""
        bound, floor = looks.bound, looks.floor
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return PullResult(PullStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, NO_UNITS)
        low, high = state.min, state.max
        if high == 0:
            return PullResult(PullStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0, NO_UNITS)
        if offset < low:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, low, low, high, NO_UNITS)
        if offset >= high:
            if offset == high:
                return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, offset, low, high, NO_UNITS)
            return PullResult(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high, NO_UNITS)
        if looks.wanted is None:
            found = self._read_all(state, offset, looks)
        else:
            found = self._read_wanted(state, offset, looks, looks.wanted)
        if found is None:
            return None
        units, following, missing = found
        if len(units):
            status = PullStatus.FOUND
        else:
            status = PullStatus.MESSAGE_WAS_REMOVING if missing else PullStatus.NO_MATCHED_MESSAGE
        return PullResult(status, following, low, high, units)

    def _read_all(self, state: ConsumeQueueState, offset: int, looks: _Looks) -> tuple[Units, int, bool] | None:
        count = min(looks.max_messages, state.max - offset)
        # Half a kilobyte for a message is a guess that keeps a pull of few large messages from reading a long index.
        guess = min(count, max(64, looks.max_bytes // 512))
        units = self._units(state, offset, guess)
        if not len(units):
            return NO_UNITS, self._gap(state, offset), True
        readable, sizes, whole = _readable(units, looks.bound, looks.floor)
        if not whole:
            return looks.passed_over(offset, readable, units) if looks.is_second else None
        if whole < len(units):
            units, readable, sizes = units[:whole], readable[:whole], sizes[:whole]
        if not readable.all():
            kept = np.flatnonzero(readable)
            if not len(kept):
                return NO_UNITS, offset + len(units), True
            taken = _fitting(sizes[kept], looks.max_bytes)
            following = offset + (len(units) if taken == len(kept) else int(kept[taken]))
            return units[kept[:taken]], following, False
        taken = _fitting(sizes, looks.max_bytes)
        return units[:taken], offset + taken, False

    def _read_wanted(
        self, state: ConsumeQueueState, offset: int, looks: _Looks, wanted: RecordFilter
    ) -> tuple[Units, int, bool] | None:
        max_messages, max_bytes = looks.max_messages, looks.max_bytes
        found: list[Units] = []
        count = total = looked_at = 0
        missing = True  # no unit so far leads to a record
        at = offset
        stop = min(state.max, offset + SCAN_UNITS)
        # Records are examined slice by slice: a pull of ten messages must not touch eight thousand records, unless it
        # turns out that few match.
        slice_units = min(_CHUNK_UNITS, max(64, 2 * max_messages))
        work = JUDGED_BYTES
        while at < stop and count < max_messages and total < max_bytes and looked_at < SCAN_RECORDS:
            units = self._units(state, at, min(_CHUNK_UNITS, stop - at))
            if not len(units):
                return (np.concatenate(found, dtype=UNIT) if found else NO_UNITS), self._gap(state, at), True
            readable, _, whole = _readable(units, looks.bound, looks.floor)
            if not whole:
                if at > offset:
                    break  # return the records found first; the next read begins here
                return looks.passed_over(offset, readable, units) if looks.is_second else None
            if whole < len(units):
                units, readable = units[:whole], readable[:whole]
            codes = units["tags_code"].astype(np.int64)
            extensions = self._extensions.resolve(state.folder[len(self.folder) + 1 :], codes)
            if extensions is not None:
                codes = extensions.codes
            may_match = wanted.may_match(units, codes, extensions)
            candidates = np.flatnonzero(readable & may_match)
            missing = missing and not (readable & ~may_match).any()
            first = 0
            while first < len(candidates):
                part = candidates[first : first + slice_units]
                most = affordable(units["size"][part], wanted.terms, work)
                if not most and looked_at:
                    # Let other consumers have their turn; the next read begins here.
                    return (
                        np.concatenate(found, dtype=UNIT) if found else NO_UNITS,
                        at + int(candidates[first]),
                        missing,
                    )
                part = part[: max(1, most)]
                work -= cost_of(units["size"][part], wanted.terms)
                first += len(part)
                verdicts = self._verdicts(units[part], wanted)
                looked_at += len(part)
                missing = missing and bool((verdicts == NO_RECORD).all())
                matched = part[verdicts == MATCH]
                if not len(matched):
                    slice_units = min(_CHUNK_UNITS, 2 * slice_units)
                    continue
                sizes = units["size"][matched].astype(np.int64)
                taken = min(_fitting(sizes, max_bytes - total, at_least=not count), max_messages - count)
                found.append(units[matched[:taken]])
                count += taken
                total += int(sizes[:taken].sum())
                if taken < len(matched):
                    return np.concatenate(found, dtype=UNIT), at + int(matched[taken]), missing
                if count >= max_messages or total >= max_bytes:
                    return np.concatenate(found, dtype=UNIT), at + int(matched[-1]) + 1, missing
            at += len(units)
        return (np.concatenate(found, dtype=UNIT) if found else NO_UNITS), at, missing

    def _verdicts(self, units: Units, wanted: RecordFilter) -> NDArray[np.uint8]:
        """For each unit: MATCH, NO_MATCH or NO_RECORD, from the records themselves."""
        verdicts = np.full(len(units), NO_RECORD, np.uint8)
        physical = units["physical_offset"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        for first, end, base, segment in self._by_segment(physical, sizes):
            # The slice of verdicts is filled in place.
            wanted.judge(
                np.frombuffer(segment, np.uint8), physical[first:end] - base, sizes[first:end], verdicts[first:end]
            )
        return verdicts

    def _by_segment(
        self, physical: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, int, memoryview]]:
        """``(first, end, physical offset of the view, view)`` for each stretch of records in one existing segment."""
        numbers = physical // self.commit_log.segment_bytes
        first = 0
        while first < len(numbers):
            end = first + int(np.searchsorted(numbers[first:], numbers[first], side="right"))
            base = int(physical[first])
            try:
                view = self.commit_log.read(base, int(physical[end - 1] + sizes[end - 1]) - base)
            except StoreError:
                first = end  # expired since the unit was read, or the unit is wrong
                continue
            yield first, end, base, view
            first = end

    # ------------------------------------------------------------ bytes

    def frames(self, units: Units) -> list[memoryview | bytes]:
        """The records of ``units`` in queue order, as few buffers.

        Records adjacent in the log become one buffer. Large buffers are views (no copy; the segment stays mapped while
        they live), smaller records are gathered into ``bytes``. At most MAX_FRAMES. Raises OffsetOutOfRangeError when a
        record no longer exists.
        """
        physical = units["physical_offset"].astype(np.int64)
        ends = physical + units["size"].astype(np.int64)
        breaks = np.flatnonzero(physical[1:] != ends[:-1]) + 1
        starts: list[int] = physical[np.concatenate(([0], breaks))].tolist()
        stops: list[int] = ends[np.concatenate((breaks - 1, [-1]))].tolist()
        total = sum(stops) - sum(starts)
        read = self.commit_log.read
        if len(starts) == 1 or (len(starts) <= MAX_FRAMES and total >= len(starts) * VIEW_BYTES):
            return [read(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
        frames: list[memoryview | bytes] = []
        part_bytes = max(GATHER_BYTES, -(-total // (MAX_FRAMES // 2)))
        part: list[memoryview] = []
        size = 0
        base = end = 0
        segment = memoryview(b"")
        for start, stop in zip(starts, stops, strict=True):
            if not base <= start < end:
                base = start - start % self.commit_log.segment_bytes
                end = base + self.commit_log.segment_bytes
                segment = read(base, end - base)
            part.append(segment[start - base : stop - base])
            size += stop - start
            if size >= part_bytes:
                frames.append(b"".join(part))
                part, size = [], 0
        if part:
            frames.append(b"".join(part))
        return frames


def _readable(units: Units, bound: int, floor: int) -> tuple[NDArray[np.bool_], NDArray[np.int64], int]:
    """Which units may be shown, all sizes, and the number of units before the first one that is neither readable nor
    pre-blank: such a unit must not be skipped silently.
    """
    physical = units["physical_offset"].astype(np.int64)
    sizes = units["size"].astype(np.int64)
    blank = sizes == PREBLANK_SIZE
    readable = (sizes > 0) & ~blank & (physical >= floor) & (physical + sizes <= bound)
    if readable.all():
        return readable, sizes, len(units)
    wrong = np.flatnonzero(~(readable | blank))
    return readable, sizes, int(wrong[0]) if len(wrong) else len(units)


def _fitting(sizes: NDArray[np.int64], max_bytes: int, at_least: bool = True) -> int:
    """How many of the first ``sizes`` fit into ``max_bytes``; with ``at_least`` at least one."""
    return max(int(sizes.cumsum().searchsorted(max_bytes, side="right")), 1 if at_least else 0)
