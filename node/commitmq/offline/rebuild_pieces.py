"""The tasks of a parallel rebuild for pieces of the log: first a survey, then the units of the ConsumeQueues.

A unit's place is known before any unit is written: in a plain queue by its queue offset, in a batch queue by the number
of records the queue has before. So after the survey each piece can write its units independently, in any order and more
than once: the same bytes go to the same places. This is true for queues whose offsets grow along the log. A queue whose
offsets do not, or leap too far, is *irregular*: the place of its units depends on earlier ones, so one task makes it
from the whole log, with the node's own code.

Tasks write into the job's folder and make no folders there except their own, and each holds the job's lock, shared,
while it writes: so a stale copy of a task can neither bring a folder back nor write into files that now belong to the
store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.files.disk import write_all
from commitmq.files.disk_space import kind_of
from commitmq.files.fd_cache import FdCache, affordable_files
from commitmq.format.constants import BATCH_UNIT_BYTES, PREBLANK_SIZE, UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import UNIT
from commitmq.kernels.codes import WALK_BAD, WALK_LIMIT
from commitmq.kernels.compiled import count_items, scan_until
from commitmq.offline.extents import BATCH, LIGHT, PLAIN, LogRange, Queue, find_part
from commitmq.offline.held_store import StoreView
from commitmq.offline.verify_queues import narrow
from commitmq.store.layout import StoreLayout
from commitmq.store.log import dispatch_batch
from commitmq.store.log.dispatch_batch import DispatchBatch, Rows, by_queue, consecutive, consumable
from commitmq.store.queues.batch_consume_queue import make_units
from commitmq.store.queues.consume_queue import MAX_GAP_UNITS, ConsumeQueue

LOCK_NAME: Final = "job.lock"
_BLANK: Final = np.array([(0, PREBLANK_SIZE, 0)], UNIT).tobytes()

Units = tuple[Queue, int, int, Any]
"""Queue, kind, queue offset of the first unit (-1 in a batch queue), the units' bytes; the units are consecutive."""


# ---------------------------------------------------------------- survey


@dataclass(frozen=True, slots=True)
class SurveyTask:
    """A piece, and where to begin (with :data:`NO_START` the task must search for it)."""

    piece: LogRange
    start: int
    with_queues: bool
    with_index: bool


@dataclass(slots=True)
class QueueSpan:
    """A queue in a piece: queue offsets ``[first, next)``, ``count`` records, whether the offsets grow as they must."""

    kind: int
    first: int
    next: int
    count: int = 0
    is_regular: bool = True
    last: int = -1
    """Physical offset of the last record."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Result for ``[start, end)``. ``records_end`` is behind the last whole record; ``broken_at`` is where the walk met
    bytes that are not a record, else -1. ``items`` of the index, and the last record, of all and of those with items.
    """

    start: int
    end: int
    records_end: int = -1
    broken_at: int = -1
    records: int = 0
    items: int = 0
    last_record: int = -1
    last_with_items: int = -1
    queues: Mapping[Queue, QueueSpan] = field(default_factory=dict)


def survey(view: StoreView, task: SurveyTask) -> Survey:
    """Check the records of a piece as a recovery does, and count their units and items. Raises StoreError."""
    log = view.open_log()
    base = task.piece.base
    segment = np.frombuffer(log.read(base, view.segment_bytes), np.uint8)
    start, stop = find_part(segment, task.piece, task.start)
    if start >= stop:
        return Survey(start, start)
    out = np.zeros(5, np.int64)
    result = scan_until(segment, start - base, stop - base, segment.size, base, False, out)
    records_end = base + int(out[1])
    broken_at = records_end if result == WALK_BAD else -1
    end = records_end if result == WALK_LIMIT else base + segment.size
    queues: dict[Queue, QueueSpan] = {}
    items, last_with_items = 0, -1
    for batch in _batches(view, start, records_end):
        if task.with_queues:
            for queue, kind, number, units in units_of(view, batch):
                _note(queues, queue, kind, number, np.frombuffer(units, UNIT) if kind != BATCH else units)
        if task.with_index:
            counts = np.zeros(len(batch), np.int64)
            count_items(segment, base, np.require(batch.rows, requirements=["C", "ALIGNED"]), counts)
            items += int(counts.sum())
            rows = np.flatnonzero(counts)
            if len(rows):
                last_with_items = int(batch.rows["physical_offset"][rows[-1]])
    last_record = base + int(out[2]) if int(out[2]) >= 0 else -1
    return Survey(start, end, records_end, broken_at, int(out[0]), items, last_record, last_with_items, queues)


def _batches(view: StoreView, start: int, end: int) -> Iterator[DispatchBatch]:
    walker = view.walker(view.open_log())
    position = start
    while position < end:
        batch = walker.walk(position, end)
        yield batch
        position = batch.end
    walker.release()


def _note(queues: dict[Queue, QueueSpan], queue: Queue, kind: int, number: int, units: NDArray[np.void]) -> None:
    first, last = int(units["physical_offset"][0]), int(units["physical_offset"][-1])
    span = queues.get(queue)
    if span is None:
        span = queues[queue] = QueueSpan(kind, number, number, is_regular=number >= 0 or kind == BATCH)
    elif kind != span.kind or (kind != BATCH and not 0 <= number - span.next <= MAX_GAP_UNITS) or first <= span.last:
        span.is_regular = False
    span.next = number + len(units)
    span.count += len(units)
    span.last = last


def units_of(view: StoreView, batch: DispatchBatch) -> Iterator[Units]:
    """The units of a batch's records, queue by queue, as the node's dispatcher makes them; batch units as an array."""
    wanted = consumable(batch.rows)
    rows = batch.rows if wanted.all() else batch.rows[wanted]
    if not len(rows):
        return
    in_batches = view.in_batch_queues(batch.topics, rows)
    plain = rows[~in_batches] if in_batches.any() else rows
    yield from _plain_units(view, batch, plain)
    if in_batches.any():
        yield from _batch_units(view, batch, rows[in_batches])
    if plain["multi_size"].any():
        for queue, number, units in dispatch_batch.runs(batch, plain):
            yield queue, LIGHT, number, units


def _grouped(view: StoreView, batch: DispatchBatch, rows: Rows) -> Iterator[tuple[Queue, Rows]]:
    if not len(rows):
        return
    rows, starts = by_queue(rows)
    for start, stop in pairwise(starts):
        topic = batch.topics[int(rows["topic"][start])]
        mine = rows[start:stop]
        # Records from before the topic was deleted get no units.
        gone_below = view.deleted.get(topic, -1)
        if gone_below > 0:
            mine = mine[int(np.searchsorted(mine["physical_offset"], gone_below)) :]
        if len(mine):
            yield (topic, int(mine["queue_id"][0])), mine


def _plain_units(view: StoreView, batch: DispatchBatch, rows: Rows) -> Iterator[Units]:
    for queue, mine in _grouped(view, batch, narrow(rows)):
        units = np.empty(len(mine), UNIT)
        for name in ("physical_offset", "size", "tags_code"):
            units[name] = mine[name]
        data = units.view(np.uint8).data
        numbers = mine["queue_offset"]
        for first, last in consecutive(numbers, 0, len(mine)):
            yield queue, PLAIN, int(numbers[first]), data[first * UNIT_BYTES : last * UNIT_BYTES]


def _batch_units(view: StoreView, batch: DispatchBatch, rows: Rows) -> Iterator[Units]:
    for queue, mine in _grouped(view, batch, rows):
        inner = (mine["inner_num"] > 0) & (mine["inner_base"] >= 0)
        units = make_units(
            mine["physical_offset"], mine["size"], mine["tags_code"], mine["store_timestamp"],
            np.where(inner, mine["inner_base"], mine["queue_offset"]), np.where(inner, mine["inner_num"], 1),
        )  # fmt: skip
        yield queue, BATCH, -1, units


# ---------------------------------------------------------------- units


@dataclass(frozen=True, slots=True)
class FillTask:
    """Write the units of ``[start, end)`` of the log under ``staging``, except those of ``irregular`` queues.

    ``ends`` gives a queue's previous end, for queues that begin here (-1) or whose offsets leap at the boundary;
    ``places`` gives the number of the first unit of each batch queue.
    """

    staging: Path
    start: int
    end: int
    ends: Mapping[Queue, int]
    places: Mapping[Queue, int]
    irregular: frozenset[Queue]


@dataclass(frozen=True, slots=True)
class IrregularTask:
    """Make the ``queues`` from ``[start, end)`` of the log, one unit after the other."""

    staging: Path
    start: int
    end: int
    queues: frozenset[Queue]


@contextmanager
def writing(staging: Path) -> Iterator[None]:
    """Held while a task writes into the job's folder. Raises StoreError when the job is over."""
    path = staging / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"the rebuild that this task belongs to has ended: {error.strerror}", path=path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if not path.exists():
            raise StoreError("the rebuild that this task belongs to has ended", path=path)
        yield
    finally:
        os.close(fd)


def fill(view: StoreView, task: FillTask) -> int:
    """See :class:`FillTask`; returns the number of units. Raises StoreError, DiskFullError."""
    written = 0
    ends, places = dict(task.ends), dict(task.places)
    layout, config = StoreLayout(task.staging), view.config.consume_queue
    with writing(task.staging):
        fds = FdCache(affordable_files(config.max_open_files))
        plain = _Files(layout.consume_queue, config.file_bytes, fds)
        batches = _Files(layout.batch_consume_queue, config.batch_file_bytes, fds)
        for batch in _batches(view, task.start, task.end):
            for queue, kind, number, units in units_of(view, batch):
                if kind == BATCH:
                    batches.put(queue, places[queue] * BATCH_UNIT_BYTES, units.view(np.uint8).data)
                    places[queue] += len(units)
                    written += len(units)
                    continue
                if queue in task.irregular:
                    continue
                end = ends.get(queue, number)
                if end < 0:
                    end = number - number % (config.file_bytes // UNIT_BYTES)
                    plain.make(queue, end * UNIT_BYTES)
                if end < number:
                    plain.put(queue, end * UNIT_BYTES, memoryview(_BLANK * (number - end)))
                plain.put(queue, number * UNIT_BYTES, memoryview(units))
                ends[queue] = number + len(units) // UNIT_BYTES
                written += len(units) // UNIT_BYTES
        fds.close()
    return written


class _Files:
    """Writes into files of queues whose folders exist; a file is made, sparse, at the first write to it."""

    def __init__(self, root: Path, file_bytes: int, fds: FdCache) -> None:
        self._root = root
        self._file_bytes = file_bytes
        self._fds = fds

    def put(self, queue: Queue, at: int, data: memoryview) -> None:
        """Write ``data`` at logical byte ``at``. Raises DiskFullError or StoreError."""
        while len(data):
            base = at - at % self._file_bytes
            piece = data[: base + self._file_bytes - at]
            path = self.make(queue, base)
            try:
                write_all(self._fds.write_fd(path), piece, at - base)
            except OSError as error:
                raise _error("cannot write units", error, path) from error
            at += len(piece)
            data = data[len(piece) :]

    def make(self, queue: Queue, base: int) -> str:
        """The path of the existing file that begins at logical byte ``base``."""
        path = f"{self._root}/{queue[0]}/{queue[1]}/{segment_name(base)}"
        try:
            try:
                self._fds.write_fd(path)
            except FileNotFoundError:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                # Another task may make it at the same time, with the same size.
                os.ftruncate(fd, self._file_bytes)
                os.close(fd)
        except OSError as error:
            raise _error("cannot make a file of a queue", error, path) from error
        return path


def _error(sentence: str, error: OSError, path: str) -> StoreError:
    kind = kind_of(error)
    return kind(f"{sentence}: {error.strerror}", path=path)


def make_irregular(view: StoreView, task: IrregularTask) -> int:
    """See :class:`IrregularTask`; returns the number of appended units. Raises StoreError, DiskFullError."""
    written = 0
    folder = StoreLayout(task.staging).consume_queue
    with writing(task.staging):
        own = task.staging / f"irregular-{uuid.uuid4().hex}"
        own.mkdir()
        fds = FdCache(affordable_files(view.config.consume_queue.max_open_files))
        made = {
            queue: ConsumeQueue(own / queue[0] / str(queue[1]), view.config.consume_queue.file_bytes, fds)
            for queue in task.queues
        }
        for batch in _batches(view, task.start, task.end):
            for queue, kind, number, units in units_of(view, batch):
                if kind != BATCH and queue in made:
                    written += made[queue].append_units(number, units)
        fds.close()
        for topic, queue_id in task.queues:
            # Another copy of this task may have finished first: then the same files exist.
            with suppress(OSError):
                (own / topic / str(queue_id)).rename(folder / topic / str(queue_id))
        shutil.rmtree(own)
    return written
