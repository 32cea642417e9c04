"""Compares a store's ConsumeQueues with its log: every record has its unit, and every unit its record.

:class:`QueueCheck` compares the records of one piece of the log with their units. It also returns each queue's begin
and end in the piece (:data:`BOUNDS`), because a queue continues in the next piece. :class:`QueueOrder` compares these
for all pieces, and then knows which units remain to be checked (:func:`check_rest`).

The queue offset gives a plain queue's unit its place. The 46-byte units of batch queues are consecutive, whatever their
queue offsets: the place of the first one is searched by its record's physical offset, and returned too; if it differs
from the place that the pieces before imply, the piece is checked again with the right one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.files.fd_cache import FdCache, affordable_files
from commitmq.format.constants import LMQ_PREFIX, PREBLANK_SIZE
from commitmq.format.file_names import segment_name
from commitmq.offline.findings import LOG, QUEUES, Faults, Finding, Single, UnitRun
from commitmq.offline.store_view import StoreView
from commitmq.store.log import multi_dispatch
from commitmq.store.log.dispatch_batch import DispatchBatch, by_queue, consumable
from commitmq.store.queues.batch_consume_queue import BATCH_UNIT, BATCH_UNIT_BYTES, make_units

_UNIT: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_MOST_BLANKS: Final = 1_000_000
_MOST_ORDERS: Final = 100  # of one queue in one batch: everything behind them is disorder too
_FAR: Final = 1024  # units between two records of a batch that are not worth reading
# Below every hash of a tag is an address in a queue's extension (spec 3.8).
_FIRST_ADDRESS: Final = -(1 << 31) - 1

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
_PLAIN_ROW: Final = np.dtype(
    [
        ("topic", np.int32),
        ("queue_id", np.int32),
        ("queue_offset", np.int64),
        ("physical_offset", np.int64),
        ("tags_code", np.int64),
        ("size", np.int32),
    ]
)


def narrow(rows: NDArray[np.void]) -> NDArray[np.void]:
    """The columns of ``rows`` that plain queues need: a quarter of the bytes to be sorted."""
    result = np.empty(len(rows), _PLAIN_ROW)
    for name in _PLAIN_ROW.names or ():
        result[name] = rows[name]
    return result


Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Names of topics, and rows of :data:`BOUNDS` for each queue and kind."""

    names: tuple[str, ...] = ()
    table: NDArray[np.void] = field(default_factory=lambda: np.empty(0, BOUNDS))


@dataclass(slots=True)
class _Seen:
    kind: int
    first: int
    next: int
    physical_offset: int
    size: int
    count: int = 0
    place: int = -1


class QueueUnits:
    """Reads units of the queues under one folder; zeros where no file exists."""

    def __init__(self, root: Path, kind: np.dtype[Any], file_bytes: int, fds: FdCache) -> None:
        self.root = root
        self._kind = kind
        self._file_bytes = file_bytes
        self._fds = fds

    def read(self, queue: Queue, number: int, count: int) -> NDArray[np.void]:
        """``count`` units from number ``number`` of ``queue`` on."""
        data = bytearray(count * self._kind.itemsize)
        at, end = number * self._kind.itemsize, (number + count) * self._kind.itemsize
        begun = at
        folder = f"{self.root}/{queue[0]}/{queue[1]}"
        while at < end:
            base = at - at % self._file_bytes
            wanted = min(end, base + self._file_bytes) - at
            try:
                part = os.pread(self._fds.read_fd(f"{folder}/{segment_name(base)}"), wanted, at - base)
            except OSError:
                part = b""
            data[at - begun : at - begun + len(part)] = part
            at += wanted
        return np.frombuffer(data, self._kind)


class QueueCheck:
    """See the module's text. ``places`` are the numbers of the first units of batch queues, where known."""

    def __init__(self, view: StoreView, faults: Faults, places: Mapping[Queue, int]) -> None:
        self._view = view
        self._faults = faults
        self._places = places
        config = view.config.consume_queue
        self._fds = FdCache(affordable_files(config.max_open_files))
        self._plain = QueueUnits(view.layout.consume_queue, _UNIT, config.file_bytes, self._fds)
        batches = view.layout.batch_consume_queue
        self._batches = QueueUnits(batches, BATCH_UNIT, config.batch_file_bytes, self._fds)
        self._seen: dict[tuple[Queue, int], _Seen] = {}
        self.units = 0

    def take(self, batch: DispatchBatch) -> None:
        """Compare the units of the batch's records."""
        wanted = consumable(batch.rows)
        rows = batch.rows if wanted.all() else batch.rows[wanted]
        if not len(rows):
            return
        if rows["multi_size"].any():
            self._take_light(batch, rows)
        in_batches = self._view.in_batch_queues(batch.topics, rows)
        if in_batches.any():
            self._take_kind(batch, rows[in_batches], BATCH)
            rows = rows[~in_batches]
        if len(rows):
            self._take_kind(batch, narrow(rows), PLAIN)

    def _take_kind(self, batch: DispatchBatch, rows: NDArray[np.void], kind: int) -> None:
        rows, starts = by_queue(rows)
        topics, queues = rows["topic"], rows["queue_id"]
        for start, stop in pairwise(starts):
            name = batch.topics[int(topics[start])]
            mine = rows[start:stop]
            gone_below = self._view.deleted.get(name, -1)
            if gone_below > 0:
                mine = mine[mine["physical_offset"] >= gone_below]
            if not len(mine):
                continue
            if kind == BATCH:
                self._compare_batches((name, int(queues[start])), mine)
            else:
                self._compare((name, int(queues[start])), mine)

    # ------------------------------------------------------------ batch queues

    def _compare_batches(self, queue: Queue, rows: NDArray[np.void]) -> None:
        seen = self._seen.get((queue, BATCH))
        if seen is None:
            first = int(rows["physical_offset"][0])
            place = self._places[queue] if queue in self._places else locate(self._batches.root, queue, first)
            seen = self._seen[queue, BATCH] = _Seen(BATCH, 0, 0, first, int(rows["size"][0]), place=place)
        at = seen.place + seen.count
        seen.count += len(rows)
        self.units += len(rows)
        if seen.place < 0:
            return  # the pieces before will tell the place
        # A record that is a plain message counts as a batch of one.
        inner = (rows["inner_num"] > 0) & (rows["inner_base"] >= 0)
        wanted = make_units(
            rows["physical_offset"], rows["size"], rows["tags_code"], rows["store_timestamp"],
            np.where(inner, rows["inner_base"], rows["queue_offset"]), np.where(inner, rows["inner_num"], 1),
        )  # fmt: skip
        found = self._batches.read(queue, at, len(wanted))
        is_missing = (found != wanted) & (found["size"] == 0)
        for kind, wrong in (("queue.missing", is_missing), ("queue.wrong", (found != wanted) & ~is_missing)):
            for start, stop in runs(wrong):
                self._tell(kind, queue, at + start, stop - start, wanted[start], found[start], is_batch=True)

    # ------------------------------------------------------------ plain queues

    def _take_light(self, batch: DispatchBatch, rows: NDArray[np.void]) -> None:
        """Compare units in the LMQs that records name. The records tell their places, so their order is not checked."""
        for queue, number, units in multi_dispatch.runs(batch, rows):
            if queue[0].startswith(LMQ_PREFIX):
                expected = np.frombuffer(units, _UNIT)
                seen = self._seen.get((queue, LIGHT))
                if seen is None:
                    place = int(expected["physical_offset"][0])
                    seen = self._seen[queue, LIGHT] = _Seen(LIGHT, number, number, place, int(expected["size"][0]))
                seen.next = max(seen.next, number + len(expected))
                seen.count += len(expected)
                self._compare_units(queue, np.arange(number, number + len(expected)), expected)

    def _compare(self, queue: Queue, rows: NDArray[np.void]) -> None:
        numbers = rows["queue_offset"]
        seen = self._seen.get((queue, PLAIN))
        if seen is None:
            first = int(numbers[0])
            place, size = int(rows["physical_offset"][0]), int(rows["size"][0])
            seen = self._seen[queue, PLAIN] = _Seen(PLAIN, first, first, place, size)
        follow = np.concatenate(([seen.next], numbers[:-1] + 1))
        for index in np.flatnonzero(numbers != follow)[:_MOST_ORDERS].tolist():
            place, size = int(rows["physical_offset"][index]), int(rows["size"][index])
            self._faults.add(disorder(self._plain, queue, int(follow[index]), int(numbers[index]), place, size))
        seen.next = int(numbers[-1]) + 1
        seen.count += len(rows)
        expected = np.empty(len(rows), _UNIT)
        for name in ("physical_offset", "size", "tags_code"):
            expected[name] = rows[name]
        # Nearly always one stretch. Where offsets leap, the units between are not read.
        cuts = (np.flatnonzero(np.abs(np.diff(numbers)) > _FAR) + 1).tolist()
        for start, stop in pairwise([0, *cuts, len(rows)]):
            self._compare_units(queue, numbers[start:stop], expected[start:stop])

    def _compare_units(self, queue: Queue, numbers: NDArray[np.int64], expected: NDArray[np.void]) -> None:
        first, last = int(numbers.min()), int(numbers.max())
        found = self._plain.read(queue, first, last - first + 1)
        if len(found) != len(numbers) or int(numbers[0]) != first or int(numbers[-1]) != last:
            found = found[numbers - first]
        self.units += len(expected)
        is_same = found["physical_offset"] == expected["physical_offset"]
        is_same &= found["size"] == expected["size"]
        is_same &= (found["tags_code"] == expected["tags_code"]) | (found["tags_code"] <= _FIRST_ADDRESS)
        if is_same.all():
            return
        is_missing = ~is_same & (found["size"] == 0) & (found["physical_offset"] == 0)
        for kind, wrong in (("queue.missing", is_missing), ("queue.wrong", ~is_same & ~is_missing)):
            for start, stop in runs(wrong):
                self._tell(kind, queue, int(numbers[start]), stop - start, expected[start], found[start])

    def _tell(
        self, kind: str, queue: Queue, number: int, count: int, expected: Any, found: Any, *, is_batch: bool = False
    ) -> None:
        place = int(expected["physical_offset"])
        self._faults.add(UnitRun(kind, is_batch, *queue, number, count, place, _show(expected), _show(found)))

    # ------------------------------------------------------------ results

    def bounds(self) -> Bounds:
        """Begin and end of each queue in this piece."""
        names: dict[str, int] = {}
        rows = [
            (
                names.setdefault(queue[0], len(names)), queue[1], kind, seen.first, seen.next,
                seen.physical_offset, seen.size, seen.count, seen.place,
            )
            for (queue, kind), seen in self._seen.items()
        ]  # fmt: skip
        table = np.array(rows, BOUNDS)
        return Bounds(tuple(names), table)

    def close(self) -> None:
        self._fds.close()


def locate(root: Path, queue: Queue, physical_offset: int) -> int:
    """Number of a batch queue's unit that points at ``physical_offset``; -1 if there is none."""
    for path in sorted((root / queue[0] / str(queue[1])).glob("[0-9]" * 20)):
        for position, units in _written_units(path, 0, BATCH_UNIT):
            hits = np.flatnonzero(units["physical_offset"] == physical_offset)
            if len(hits):
                return (int(path.name) + position) // BATCH_UNIT_BYTES + int(hits[0])
    return -1


def disorder(units: QueueUnits, queue: Queue, wanted: int, number: int, physical_offset: int, size: int) -> Single:
    """A record whose queue offset is not consecutive; a note where a repair left pre-blank units of lost records."""
    is_repaired = False
    if wanted < number <= wanted + _MOST_BLANKS:
        found = units.read(queue, wanted, number - wanted)
        is_repaired = bool(((found["size"] == PREBLANK_SIZE) & (found["physical_offset"] == 0)).all())
    detail = f"{queue[0]} queue {queue[1]}: queue offset {number} comes where {wanted} must"
    finding = Finding("log.order", "commitlog", physical_offset, size, detail, is_repaired)
    return Single((LOG, physical_offset, 1), finding)


class QueueOrder:
    """Combines the bounds of all pieces, which come in the log's order. Memory: two numbers for each queue."""

    def __init__(self, view: StoreView, faults: Faults) -> None:
        config = view.config.consume_queue
        self._fds = FdCache(affordable_files(config.max_open_files))
        self._plain = QueueUnits(view.layout.consume_queue, _UNIT, config.file_bytes, self._fds)
        self._batch_root = view.layout.batch_consume_queue
        self._faults = faults
        self.ends: dict[Queue, int] = {}
        """Behind the last unit that has a record."""
        self.batch_ends: dict[Queue, int] = {}

    def misplaced(self, pieces: Iterable[Bounds]) -> dict[int, dict[Queue, int]]:
        """The pieces, by number, whose batch units were searched at wrong places, with the right places."""
        wrong: dict[int, dict[Queue, int]] = {}
        ends = dict(self.batch_ends)
        for index, bounds in enumerate(pieces):
            places = {}
            for row in bounds.table[bounds.table["kind"] == BATCH]:
                queue = (bounds.names[int(row["topic"])], int(row["queue_id"]))
                if queue not in ends:
                    # Units before it belong to expired records.
                    ends[queue] = max(0, locate(self._batch_root, queue, int(row["physical_offset"])))
                places[queue] = ends[queue]
                if int(row["place"]) != ends[queue]:
                    wrong[index] = places
                ends[queue] += int(row["count"])
        return wrong

    def take(self, bounds: Bounds) -> None:
        """Take the next piece: report queue offsets that are not consecutive."""
        for topic, queue_id, kind, first, following, place, size, count, at in bounds.table.tolist():
            queue = (bounds.names[topic], queue_id)
            if kind == BATCH:
                self.batch_ends[queue] = at + count
            elif kind == LIGHT:
                self.ends[queue] = max(self.ends.get(queue, 0), following)
            else:
                wanted = self.ends.get(queue, first)
                if wanted != first:
                    self._faults.add(disorder(self._plain, queue, wanted, first, place, size))
                self.ends[queue] = following

    def close(self) -> None:
        self._fds.close()


# ---------------------------------------------------------------- the remaining units


@dataclass(frozen=True, slots=True)
class Rest:
    """A queue to be checked behind unit number ``end``; -1 when the log has no record of it."""

    topic: str
    queue_id: int
    is_batch: bool
    end: int


def check_rest(view: StoreView, rests: tuple[Rest, ...]) -> Faults:
    """Search for units without a record, and for files of a wrong size."""
    faults = Faults()
    for rest in rests:
        layout, config = view.layout, view.config.consume_queue
        root = layout.batch_consume_queue if rest.is_batch else layout.consume_queue
        file_bytes = config.batch_file_bytes if rest.is_batch else config.file_bytes
        for path in sorted((root / rest.topic / str(rest.queue_id)).glob("[0-9]" * 20)):
            _check_file(view, rest, path, file_bytes, faults)
    return faults


def _check_file(view: StoreView, rest: Rest, path: Path, file_bytes: int, faults: Faults) -> None:
    kind = BATCH_UNIT if rest.is_batch else _UNIT
    base, size = int(path.name), path.stat().st_size
    order = (QUEUES, rest.is_batch, rest.topic, rest.queue_id, 1)
    file = os.path.relpath(path, view.root)
    if size not in (0, file_bytes):
        detail = f"it has {size} bytes, not {file_bytes}"
        faults.add(Single((*order, "file.unreadable", base), Finding("file.unreadable", file, 0, size, detail)))
        return
    if rest.is_batch and rest.end < 0:
        return  # all of its records expired
    first = max(0, max(0, rest.end) * kind.itemsize - base) // kind.itemsize
    for position, units in _written_units(path, first * kind.itemsize, kind):
        # Pre-blank units occupy the places before a queue's first unit (spec 3.3).
        is_blank = (units["size"] == PREBLANK_SIZE) & (units["physical_offset"] == 0) & (not rest.is_batch)
        for start, stop in runs((units["size"] > 0) & ~is_blank):
            at = position + start * kind.itemsize
            detail = (
                f"{stop - start} unit(s) of {rest.topic} queue {rest.queue_id} stand for no record, "
                f"first {_show(units[start])}"
            )
            is_note = view.was_open or rest.end < 0
            finding = Finding("queue.extra", file, at, (stop - start) * kind.itemsize, detail, is_note)
            faults.add(Single((*order, "queue.extra", base + at), finding))


def _written_units(path: Path, position: int, kind: np.dtype[Any]) -> Iterable[tuple[int, NDArray[np.void]]]:
    """Complete units behind ``position`` of a sparse file, with their position; holes are not read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        while position < size:
            try:
                position = os.lseek(fd, position, os.SEEK_DATA)
                hole = os.lseek(fd, position, os.SEEK_HOLE)
            except OSError:
                return  # only a hole remains
            position -= position % kind.itemsize
            data = os.pread(fd, min(size, hole + kind.itemsize) - position, position)
            data = _whole_units(data, kind.itemsize)
            if not data:
                return
            yield position, np.frombuffer(data, kind)
            position += len(data)
    finally:
        os.close(fd)


def _whole_units(data: bytes, unit_bytes: int) -> bytes:
    return data[: len(data) - len(data) % unit_bytes]


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """``(start, stop)`` of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _show(unit: Any) -> str:
    return f"(offset {unit['physical_offset']}, size {unit['size']}, tags code {unit['tags_code']})"
