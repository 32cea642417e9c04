"""DispatchBatch: a stretch of the log as columns, made once by reput and passed to every dispatcher.

A batch has a range ``[start, end)`` of physical offsets. The range may be longer than its rows (the filler at a
segment's end has no row), and batches of one walker follow each other without a gap. So a dispatcher that knows its own
position can trim records it already has, and can see which it missed.

On the wire (ZeroMQ, reput -> dispatcher) a batch is three frames: an orjson header, the rows as raw bytes of ``ROW``,
an orjson list of topics. Both ends are processes of one node, forked from one image, so the host's byte order is fine.

A record that names further queues gets a unit in each of them too (multi-dispatch, spec 3.10). The writer stored the
names (``INNER_MULTI_DISPATCH``) and the assigned queue offsets (``INNER_MULTI_QUEUE_OFFSET``) in the record. So the log
alone says where every unit belongs, and dispatching it again, in any process, gives the same queues. For the same
reason the records decide, not the present value of ``consume_queue.enable_multi_dispatch``: a record that was stored
while it was on has used up an offset, and without its unit the queue would have a hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from commitmq.errors import CommitMQError, CorruptRecordError
from commitmq.format.constants import LMQ_PREFIX, MIN_RECORD_BYTES, MULTI_DISPATCH_SEPARATOR, RETRY_PREFIX, UNIT_BYTES
from commitmq.format.units import UNIT_STRUCT
from commitmq.kernels import codes, compiled
from commitmq.semantics.delay import DELAY_LEVELS_MS, SCHEDULE_TOPIC
from commitmq.store.log.commit_log import CommitLog

ROW = codes.ROW
TRANSACTION_PREPARED = 0x4
_UNKNOWN_LEVEL_MS = 1000

Rows = np.ndarray[Any, np.dtype[np.void]]


class NoBatchError(CommitMQError):
    """What came to a dispatcher is not what reput sends."""


@dataclass(slots=True)
class DispatchBatch:
    """Records of ``[start, end)`` as ``rows`` (dtype ROW, one row a record, in log order). ``topics[row["topic"]]`` is
    a row's topic. Spans in a row are (start, size) bytes from the record's first byte.
    """

    start: int
    end: int
    rows: Rows
    topics: list[str]
    log: CommitLog | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> memoryview:
        """The bytes of record ``index``, without a copy; the segment stays mapped while the view is held."""
        if self.log is None:
            raise ValueError("this batch is not attached to a log")
        return self.log.read(int(self.rows["physical_offset"][index]), int(self.rows["size"][index]))

    def text(self, index: int, part: str) -> str:
        """One part of record ``index`` as text: ``keys``, ``uniq``, ``tags`` or ``topic``; empty when absent."""
        row = self.rows[index]
        start, size = int(row[f"{part}_start"]), int(row[f"{part}_size"])
        return bytes(self.record(index)[start : start + size]).decode("utf-8", "replace")

    def after(self, position: int) -> DispatchBatch:
        """The part of this batch at or behind ``position``: earlier rows are trimmed."""
        if position <= self.start:
            return self
        keep = int(np.searchsorted(self.rows["physical_offset"], position, side="left"))
        return DispatchBatch(min(position, self.end), self.end, self.rows[keep:], self.topics, self.log)

    def to_frames(self) -> list[Any]:
        """Frames for the wire; the rows frame is a view of this batch's memory."""
        header = orjson.dumps({"start": self.start, "end": self.end})
        return [header, np.ascontiguousarray(self.rows).view(np.uint8).data, orjson.dumps(self.topics)]

    @classmethod
    def from_frames(cls, frames: Sequence[Any], log: CommitLog | None = None) -> DispatchBatch:
        """The batch that :meth:`to_frames` packed; its rows are a view of the frame's memory. Raises NoBatchError."""
        try:
            header = orjson.loads(frames[0])
            rows = np.frombuffer(frames[1], ROW)
            return cls(int(header["start"]), int(header["end"]), rows, orjson.loads(frames[2]), log)
        except (ValueError, LookupError, TypeError) as error:
            raise NoBatchError(f"these {len(frames)} frames are no batch: {error!r:.200}") from error


class LogWalker:
    """Turns stretches of a CommitLog into batches (spec section 7)."""

    def __init__(self, log: CommitLog, *, max_rows: int, max_bytes: int) -> None:
        self.log = log
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self._out = np.zeros(4, np.int64)
        self._cached_base = -1
        self._segment = np.empty(0, np.uint8)

    def walk(self, start: int, limit: int) -> DispatchBatch:
        """The next batch from ``start``, not beyond ``limit``, both physical offsets at record boundaries.

        A batch stays inside one segment. If the walk meets the filler, the batch ends at the next segment's base and
        may be empty. Raises CorruptRecordError when there is no record where one must be.
        """
        segment_bytes = self.log.segment_bytes
        base = start - start % segment_bytes
        stop = min(limit - base, segment_bytes, start - base + self.max_bytes)
        most = min(self.max_rows, max(1, (stop - (start - base)) // MIN_RECORD_BYTES + 1))
        rows = np.zeros(most, ROW)
        topics = np.zeros((most, 2), np.int64)
        table = np.full(1 << (2 * most - 1).bit_length(), -1, np.int32)
        segment = self._segment_array(base)
        result = compiled.walk(segment, start - base, stop, base, rows, topics, table, self._out)
        count, known, reached, reason = (int(value) for value in self._out)
        end = base + reached
        if result == codes.WALK_BLANK:
            end = base + segment_bytes
        elif result == codes.WALK_BAD and count == 0:
            if stop < min(limit - base, segment_bytes):
                return self._wider(start, limit)  # the record is merely larger than this batch may be
            raise CorruptRecordError(
                f"no valid record below the end of the log (reason {reason})",
                path=self.log.folder / f"{base:020d}",
                offset=reached,
            )
        # A bad record behind good ones ends this batch; the next walk begins with it.
        names = [
            segment[int(at) : int(at) + int(size)].tobytes().decode("utf-8", "replace") for at, size in topics[:known]
        ]
        batch = DispatchBatch(start, end, rows[:count], names, self.log)
        if SCHEDULE_TOPIC in names:
            _delivery_times(batch)
        return batch

    def _wider(self, start: int, limit: int) -> DispatchBatch:
        """A single record larger than ``max_bytes`` is taken alone."""
        whole = LogWalker(self.log, max_rows=1, max_bytes=self.log.segment_bytes)
        return whole.walk(start, limit)

    def _segment_array(self, base: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if base != self._cached_base:
            self._segment = np.frombuffer(self.log.read(base, self.log.segment_bytes), np.uint8)
            self._cached_base = base
        return self._segment

    def release_below(self, offset: int) -> None:
        """Release the segment's mapping if the segment ends at or below ``offset``."""
        if self._cached_base + self.log.segment_bytes <= offset:
            self.release()

    def release(self) -> None:
        self._segment = np.empty(0, np.uint8)
        self._cached_base = -1


def boundary_before(log: CommitLog, place: int, end: int) -> int:
    """``place`` if a record of the log, which ends at ``end``, begins there; else the beginning of its segment. For a place
    behind the log it is ``end``. A place that was written down for another log is no reason to stop.
    """
    if place >= end:
        return end
    try:
        LogWalker(log, max_rows=1, max_bytes=log.segment_bytes).walk(place, end)
    except CorruptRecordError:
        return place - place % log.segment_bytes
    return place


def _delivery_times(batch: DispatchBatch) -> None:
    """Set the tags code of records in the schedule topic: their delivery time instead of a tag's hash (spec 3.2 rule 3)."""
    number = batch.topics.index(SCHEDULE_TOPIC)
    rows = batch.rows
    waiting = (rows["topic"] == number) & (rows["delay_level"] > 0)
    levels = rows["delay_level"][waiting]
    table = np.array([_UNKNOWN_LEVEL_MS, *DELAY_LEVELS_MS], np.int64)
    rows["tags_code"][waiting] = rows["store_timestamp"][waiting] + table[np.minimum(levels, len(DELAY_LEVELS_MS))]


def by_queue(rows: Rows) -> tuple[Rows, list[int]]:
    """``rows`` sorted by queue, those of one queue in their order; and where each queue begins, with the end at last."""
    if len(rows) < 2:
        # The usual batch of a slow stream; numpy's calls would take longer than writing its unit.
        return rows, [0, len(rows)]
    topics, queues = rows["topic"], rows["queue_id"]
    boundaries = (topics[1:] != topics[:-1]) | (queues[1:] != queues[:-1])
    if boundaries.any():
        # Stable, so records of one queue stay in log order.
        rows = rows[np.lexsort((queues, topics))]
        topics, queues = rows["topic"], rows["queue_id"]
        boundaries = (topics[1:] != topics[:-1]) | (queues[1:] != queues[:-1])
    return rows, [0, *(np.flatnonzero(boundaries) + 1).tolist(), len(rows)]


def consecutive(numbers: np.ndarray[Any, np.dtype[np.int64]], start: int, stop: int) -> list[tuple[int, int]]:
    """``numbers[start:stop]`` cut wherever a number does not follow the one before: ``(start, stop)`` of each stretch.
    There is nearly always one: only records that a repair took out of the log leave a gap between queue offsets.
    """
    if int(numbers[stop - 1]) - int(numbers[start]) == stop - start - 1:
        return [(start, stop)]
    cuts = (np.flatnonzero(np.diff(numbers[start:stop]) != 1) + start + 1).tolist()
    return list(pairwise([start, *cuts, stop]))


def consumable(rows: Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows get a ConsumeQueue unit: transaction types none and commit (spec 5.2)."""
    # Of the type's two bits, the lower one is set in the other two: prepared (0x4) and rolled back (0xC).
    result: np.ndarray[Any, np.dtype[np.bool_]] = (rows["sys_flag"] & TRANSACTION_PREPARED) == 0
    return result


_MAX_NAME_BYTES = 255
_MAX_OFFSET_DIGITS = 18
_EXCEPT = (RETRY_PREFIX, "rmq_sys_")

Run = tuple[tuple[str, int], int, bytearray]
"""Queue, queue offset of the first unit, consecutive units."""


def runs(batch: DispatchBatch, rows: Rows) -> list[Run]:
    """Units for the further queues that ``rows`` (of ``batch``, in log order) name, in the log's order for each queue.

    Skipped, as in RocketMQ, are retry, system and schedule topics, lists of unequal length, names with a path
    separator, and offsets that are not numbers.
    """
    found: list[Run] = []
    last: dict[tuple[str, int], int] = {}  # the newest run of each queue
    assert batch.log is not None
    for row in rows[np.flatnonzero((rows["multi_size"] > 0) & (rows["multi_offsets_size"] > 0))]:
        topic = batch.topics[int(row["topic"])]
        if topic.startswith(_EXCEPT) or topic == SCHEDULE_TOPIC:
            continue
        record = batch.log.read(int(row["physical_offset"]), int(row["size"]))
        names = _list(record, int(row["multi_start"]), int(row["multi_size"]))
        offsets = _list(record, int(row["multi_offsets_start"]), int(row["multi_offsets_size"]))
        if len(names) != len(offsets):
            continue
        unit = UNIT_STRUCT.pack(int(row["physical_offset"]), int(row["size"]), int(row["tags_code"]))
        for name, text in zip(names, offsets, strict=True):
            if not _is_folder(name) or not text.isascii() or not text.isdigit() or len(text) > _MAX_OFFSET_DIGITS:
                continue
            offset = int(text)
            key = (name, 0 if name.startswith(LMQ_PREFIX) else int(row["queue_id"]))
            run = found[last[key]] if key in last else None
            if run is not None and run[1] + len(run[2]) // UNIT_BYTES == offset:
                run[2].extend(unit)
            else:
                last[key] = len(found)
                found.append((key, offset, bytearray(unit)))
    return found


def _list(record: memoryview, start: int, size: int) -> list[str]:
    return str(record[start : start + size], "utf-8", "replace").split(MULTI_DISPATCH_SEPARATOR)


def _is_folder(name: str) -> bool:
    """Whether ``name`` can be a folder's name; a name that leads elsewhere gets no queue."""
    return bool(name) and name not in (".", "..") and not {"/", "\0"} & set(name) and _fits(name)


def _fits(name: str) -> bool:
    return len(name.encode("utf-8", "replace")) <= _MAX_NAME_BYTES
