"""Reads units of ConsumeQueue files as they are, whether or not a queue of them could be opened.

Compares the bounds of a ConsumeQueue in all pieces of the log: its queue offsets must be consecutive.

The places of batch units are known only when the pieces before are, so :meth:`QueueOrder.misplaced` tells which pieces
must be checked again.

Searches a ConsumeQueue behind its last record: units that stand for no record, and files of a wrong size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.files.fd_cache import FdCache, affordable_files
from commitmq.format.constants import BATCH_UNIT_BYTES, PREBLANK_SIZE
from commitmq.format.file_names import segment_name
from commitmq.format.units import BATCH_UNIT, UNIT
from commitmq.offline.extents import BATCH, LIGHT, Bounds, Queue
from commitmq.offline.findings import LOG, QUEUES, Faults, Finding, Single
from commitmq.offline.store_view import StoreView


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


def locate(root: Path, queue: Queue, physical_offset: int) -> int:
    """Number of a batch queue's unit that points at ``physical_offset``; -1 if there is none."""
    for path in sorted((root / queue[0] / str(queue[1])).glob("[0-9]" * 20)):
        for position, units in written_units(path, 0, BATCH_UNIT):
            hits = np.flatnonzero(units["physical_offset"] == physical_offset)
            if len(hits):
                return (int(path.name) + position) // BATCH_UNIT_BYTES + int(hits[0])
    return -1


def written_units(path: Path, position: int, kind: np.dtype[Any]) -> Iterable[tuple[int, NDArray[np.void]]]:
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


def show(unit: Any) -> str:
    return f"(offset {unit['physical_offset']}, size {unit['size']}, tags code {unit['tags_code']})"


_MOST_BLANKS: Final = 1_000_000


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
        self._plain = QueueUnits(view.layout.consume_queue, UNIT, config.file_bytes, self._fds)
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
    kind = BATCH_UNIT if rest.is_batch else UNIT
    base, size = int(path.name), path.stat().st_size
    order = (QUEUES, rest.is_batch, rest.topic, rest.queue_id, 1)
    file = os.path.relpath(path, view.root)
    if size not in (0, file_bytes):
        detail = f"it has {size} bytes, not {file_bytes}"
        faults.add(Single((*order, "file.unreadable", base), Finding("file.unreadable", file, 0, size, detail)))
        return
    if rest.is_batch and rest.end < 0:
        return  # all records of the queue expired
    first = max(0, max(0, rest.end) * kind.itemsize - base) // kind.itemsize
    for position, units in written_units(path, first * kind.itemsize, kind):
        # Pre-blank units occupy the places before a queue's first unit (spec 3.3).
        is_blank = (units["size"] == PREBLANK_SIZE) & (units["physical_offset"] == 0) & (not rest.is_batch)
        for start, stop in runs((units["size"] > 0) & ~is_blank):
            at = position + start * kind.itemsize
            detail = (
                f"{stop - start} unit(s) of {rest.topic} queue {rest.queue_id} stand for no record, "
                f"first {show(units[start])}"
            )
            is_note = view.was_open or rest.end < 0
            finding = Finding("queue.extra", file, at, (stop - start) * kind.itemsize, detail, is_note)
            faults.add(Single((*order, "queue.extra", base + at), finding))
