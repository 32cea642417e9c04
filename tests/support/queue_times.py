"""Searches a ConsumeQueue by store time exactly as RocketMQ does: file by file (spec 3.7)."""

from __future__ import annotations

from typing import Protocol

from commitmq.format.constants import PREBLANK_SIZE, UNIT_BYTES
from commitmq.store.queues.consume_queue import ConsumeQueue


class StoreTimes(Protocol):
    """The part of the CommitLog that a look-up by time needs."""

    @property
    def min_offset(self) -> int: ...

    def store_timestamp(self, offset: int, size: int) -> int:
        """Store time (ms) of a record, -1 when it cannot be read."""
        ...


def offset_by_time(queue: ConsumeQueue, timestamp: int, boundary: str, commit_log: StoreTimes) -> int:
    """The offset in ``queue`` for store time ``timestamp`` (ms): the first with time >= it, or with ``boundary`` "upper"
    the last with time <= it; clamped into [min, max] (spec 3.7).
    """
    upper = boundary.lower() == "upper"
    return max(queue.min_offset, min(queue.max_offset, _offset_by_time(queue, timestamp, upper, commit_log)))


def _offset_by_time(queue: ConsumeQueue, timestamp: int, upper: bool, log: StoreTimes) -> int:
    first, end = queue.min_offset, queue.max_offset
    if first >= end:
        return 0
    file_units = queue.file_bytes // UNIT_BYTES
    low, high = _range_of_file(queue, timestamp, upper, log, first, end, file_units)
    if _time(queue, high, log) < timestamp:
        return high if upper else high + 1
    if _time(queue, low, log) > timestamp:
        return 0 if upper else low - low % file_units
    floor, ceiling = low, high
    left, right, found = -1, -1, -1
    while low <= high:
        middle = (low + high) // 2
        unit = queue.unit(middle)
        if unit is None:
            return 0
        if unit[0] < log.min_offset or unit[1] == PREBLANK_SIZE:
            low = left = middle + 1
            continue
        time = log.store_timestamp(unit[0], unit[1])
        if time < 0:
            return 0
        if time == timestamp:
            found = middle
            break
        if time > timestamp:
            high, right = middle - 1, middle
        else:
            low, left = middle + 1, middle
    if found < 0:
        return left if upper else right
    step, stop = (1, ceiling) if upper else (-1, floor)
    while found != stop and _time(queue, found + step, log) == timestamp:
        found += step
    return found


def _range_of_file(
    queue: ConsumeQueue, timestamp: int, upper: bool, log: StoreTimes, first: int, end: int, file_units: int
) -> tuple[int, int]:
    """First and last queue offset of the file that a look-up by time searches (steps 1 and 2)."""
    starts = list(range(first - first % file_units, end, file_units))
    ranges = [(max(first, start), min(end, start + file_units) - 1) for start in starts]
    if upper:
        return next((one for one in reversed(ranges) if _time(queue, one[0], log) <= timestamp), ranges[0])
    return next((one for one in ranges if _time(queue, one[1], log) >= timestamp), ranges[-1])


def _time(queue: ConsumeQueue, queue_offset: int, log: StoreTimes) -> int:
    unit = queue.unit(queue_offset)
    return -1 if unit is None else log.store_timestamp(unit[0], unit[1])
