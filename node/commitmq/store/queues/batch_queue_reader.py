"""Reads queues of BatchCQ topics; the answers have the form of the plain queues' reader.

The reader of plain queues is :class:`commitmq.store.queues.queue_reader.QueueReader`. Here too another process appends;
``bound`` and ``floor`` limit the visible units, and both are monotone along a queue. A unit stands for a batch, so a
pull may begin inside one: the whole record is returned, and the client drops the messages below the offset it asked
for. Units are returned in the form of plain ones, because a client needs no more.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import ProtocolError
from commitmq.files.fd_cache import FdCache
from commitmq.format.units import UNIT
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue, BatchUnits
from commitmq.store.queues.pull_result import PullResult, PullStatus, Units
from commitmq.store.queues.record_filter import RecordFilter
from commitmq.store.queues.tag_filter import TagFilter

SCAN_UNITS: Final = 8_192
"""Units examined by one filtered read, so that no pull delays the others."""

_NOTHING: Final = np.empty(0, UNIT)


class _Queue:
    """One queue as of ``bound`` and ``floor``: units ``low`` to ``high`` may be shown."""

    __slots__ = ("bound", "floor", "high", "low", "queue")

    def __init__(self, queue: BatchConsumeQueue) -> None:
        self.queue = queue
        self.low = self.high = 0
        self.bound = self.floor = -1


class BatchQueueReader:
    """Reads of all queues under one ``batchconsumequeue/`` folder. Not thread-safe."""

    def __init__(self, folder: Path, file_bytes: int, *, max_open_files: int = 512, max_queues: int = 65_536) -> None:
        self.folder = folder
        self.file_bytes = file_bytes
        self.max_queues = max_queues
        self._fds = FdCache(max_open_files)
        self._queues: OrderedDict[tuple[str, int], _Queue] = OrderedDict()

    def bounds(self, topic: str, queue: int, *, bound: int, floor: int = 0) -> tuple[int, int] | None:
        """``(min offset, max offset)`` of the readable messages; max is the next message's offset. None without a unit."""
        state = self._synced(topic, queue, bound, floor)
        return None if state is None else self._bounds(state)

    def forget(self, topic: str) -> None:
        """Forget the state of a topic that was deleted or recreated."""
        for key in [key for key in self._queues if key[0] == topic]:
            del self._queues[key]

    def drop_deleted_files(self) -> None:
        """Close the descriptors of deleted files, so that their space is freed."""
        self._fds.drop_deleted()

    def close(self) -> None:
        self._fds.close()

    def _synced(self, topic: str, queue: int, bound: int, floor: int) -> _Queue | None:
        """The readable part now; None when the queue never had a unit."""
        key = (topic, queue)
        state = self._queues.get(key)
        if state is None:
            state = _Queue(BatchConsumeQueue(self.folder / topic / str(queue), self.file_bytes, self._fds))
            self._queues[key] = state
            if len(self._queues) > self.max_queues:
                self._queues.popitem(last=False)
        else:
            self._queues.move_to_end(key)
        if state.bound != bound or state.floor != floor:
            units = state.queue
            units.refresh()
            units.correct_min_offset(floor)
            state.low, state.high = units.min_index, units.end_index
            if units.max_physical_offset > bound:
                state.high = units.first_index(lambda unit: int(unit["physical_offset"]) + int(unit["size"]) > bound)
            state.bound, state.floor = bound, floor
        if not state.queue.has_files:
            del self._queues[key]
            return None
        return state

    def _bounds(self, state: _Queue) -> tuple[int, int]:
        units = state.queue
        if state.low < state.high:
            last = units.unit(state.high - 1)
            return int(units.unit(state.low)["base_offset"]), int(last["base_offset"]) + int(last["count"])
        # Everything expired, or nothing is readable yet.
        behind = units.max_offset if state.low >= units.end_index else int(units.unit(state.low)["base_offset"])
        return behind, behind

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
        """The records whose batches end behind queue offset ``offset``, at least one, within the limits (spec 9.1).

        ``wanted`` skips batches whose own tag is another one, as a whole. A batch without a tag of its own passes: its
        messages may have any tag, and the client checks them. Raises ProtocolError for another kind of filter, which
        would have to evaluate the messages inside.
        """
        if wanted is not None and not isinstance(wanted, TagFilter):
            raise ProtocolError("INVALID_PARAMETER", "a topic with queue.type=BatchCQ can be filtered by tags only")
        for is_second in (False, True):
            result = self._read(topic, queue, offset, bound, floor, max_messages, max_bytes, wanted, is_second)
            if result is not None:
                return result
            # As with plain queues: a unit is not as expected, and a second try tells whether it is damaged.
            self._queues.pop((topic, queue), None)
        raise AssertionError("the second look has an answer")

    def _read(
        self,
        topic: str,
        queue: int,
        offset: int,
        bound: int,
        floor: int,
        max_messages: int,
        max_bytes: int,
        tags: TagFilter | None,
        is_second: bool,
    ) -> PullResult | None:
        """One try; None when it is the first and the unit at ``offset`` is not as expected."""
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return PullResult(PullStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, _NOTHING)
        low, high = self._bounds(state)
        if high == 0:
            return PullResult(PullStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0, _NOTHING)
        if offset < low:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, low, low, high, _NOTHING)
        if offset >= high:
            if offset == high:
                return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, offset, low, high, _NOTHING)
            return PullResult(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high, _NOTHING)
        index = state.queue.index_of(offset, state.high)
        # A batch has at least one message, so without a filter at most as many units as messages are needed.
        count = min(state.high - index, SCAN_UNITS if tags is not None else max_messages, SCAN_UNITS)
        units = state.queue.units(index, count)
        whole = _whole(units, offset, bound)
        if len(units) and not whole[0]:
            if not is_second:
                return None
            there = np.flatnonzero(whole)
            following = int(units["base_offset"][there[0]]) if len(there) else high
            return PullResult(PullStatus.MESSAGE_WAS_REMOVING, max(following, offset + 1), low, high, _NOTHING)
        if not whole.all():
            units = units[: int(np.argmin(whole))]
        units, following = self._matching(state, units, offset, max_messages, max_bytes, tags)
        return PullResult(
            PullStatus.FOUND if len(units) else PullStatus.NO_MATCHED_MESSAGE, following, low, high, _plain(units)
        )

    def _matching(
        self,
        state: _Queue,
        units: BatchUnits,
        offset: int,
        max_messages: int,
        max_bytes: int,
        tags: TagFilter | None,
    ) -> tuple[BatchUnits, int]:
        """The units to return, and the offset to continue at."""
        if not len(units):
            return units, self._bounds(state)[1]
        passed = np.ones(len(units), np.bool_)
        if tags is not None:
            codes = units["tags_code"].astype(np.int64)
            passed = tags.may_match(units, codes, None) | (codes == 0)
        places = np.flatnonzero(passed)
        counts = units["count"][places].astype(np.int64)
        if len(places):
            # Messages of the first batch below the offset are not wanted and do not count.
            counts[0] -= max(0, offset - int(units["base_offset"][places[0]]))
        messages = np.searchsorted(np.cumsum(counts), max_messages, side="right")
        size = np.searchsorted(np.cumsum(units["size"][places].astype(np.int64)), max_bytes, side="right")
        taken = places[: max(1, int(min(messages, size)))]
        last = units[-1] if len(taken) == len(places) else units[taken[-1]]
        return units[taken], int(last["base_offset"]) + int(last["count"])

    # ------------------------------------------------------------ place and time

    def offset_at(self, topic: str, queue: int, physical: int, *, bound: int, floor: int = 0) -> int | None:
        """Queue offset at which the first batch begins whose record is at or behind ``physical``, clamped into [min,
        max]. None when the queue has no unit.
        """
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return None
        index = state.queue.first_index(lambda unit: int(unit["physical_offset"]) >= physical, state.high, state.low)
        return int(state.queue.unit(index)["base_offset"]) if index < state.high else self._bounds(state)[1]

    def offset_by_time(
        self, topic: str, queue: int, timestamp: int, *, upper: bool = False, bound: int, floor: int = 0
    ) -> int | None:
        """First queue offset stored at ``timestamp`` (ms) or later, with ``upper`` the last one stored then or earlier;
        clamped into [min, max]. None when the queue has no unit.
        """
        state = self._synced(topic, queue, bound, floor)
        if state is None:
            return None
        if state.low >= state.high:
            return self._bounds(state)[1]
        return state.queue.offset_by_time(timestamp, "upper" if upper else "lower", state.high)


def _whole(units: BatchUnits, offset: int, bound: int) -> NDArray[np.bool_]:
    """Which of ``units`` are valid: a batch below ``bound`` each, the first one containing ``offset``."""
    physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
    counts = units["count"].astype(np.int64)
    ends = units["base_offset"].astype(np.int64) + counts
    return (sizes > 0) & (counts > 0) & (physical >= 0) & (physical + sizes <= bound) & (ends > offset)


def _plain(units: BatchUnits) -> Units:
    """``units`` in the form of a plain queue's."""
    result = np.empty(len(units), UNIT)
    for name in ("physical_offset", "size", "tags_code"):
        result[name] = units[name]
    return result
