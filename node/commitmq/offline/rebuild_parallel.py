"""A rebuild in tasks that a :class:`~commitmq.offline.held_store.Runner` may run in parallel; the files are ``store
rebuild``'s.

First, a survey of all pieces of the log (:mod:`commitmq.offline.rebuild_pieces`) finds the log's end as a recovery
does, and counts. Then each piece writes its units, and each index file is made, all at their own places in a folder of
this job. When the result is durable, it replaces the old files as in :mod:`commitmq.offline.rebuild`, or goes to a
given empty folder. If tasks or this process die earlier, that folder stays, and the next job removes it.

The store is verified afterwards, because a rebuild that reports nothing must have left a sound store. A log may hold records
that no queue can show: two records of one queue with the same queue offset, or damage between records.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np

from commitmq.errors import StoreError
from commitmq.files.disk import sync_folder
from commitmq.format.index import IndexHeader, IndexShape
from commitmq.kernels import codes, compiled
from commitmq.offline.extents import BATCH, PIECE_BYTES, Job, Queue, pieces_of, prove
from commitmq.offline.held_store import HeldStore, Progress, Runner, StoreView, run_here, silent
from commitmq.offline.log_damage import refuse_damage, trusted_ends
from commitmq.offline.rebuild import (
    KINDS,
    Rebuilt,
    exchange,
    keep_ends,
    refuse_without_index,
    staged_folders,
)
from commitmq.offline.rebuild_pieces import (
    LOCK_NAME,
    FillTask,
    IrregularTask,
    Survey,
    SurveyTask,
    fill,
    make_irregular,
    survey,
    writing,
)
from commitmq.offline.verify import verify
from commitmq.store.index.index_file import create, file_name, new_state
from commitmq.store.index.index_files import SavedState
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import Rows
from commitmq.store.queues.consume_queue import MAX_GAP_UNITS
from commitmq.store.recovery.scan import scan_to_end


@dataclass(frozen=True, slots=True)
class IndexTask:
    """The task of a parallel rebuild that makes one index file; its items are known once the items of the log are counted.

    The items of all files are numbered from 0 in the log's order, and a file has as many as fit (spec 4.2): so the numbers
    of items in the pieces of the log tell where each file begins. The node's own code makes the file, from a record before
    it on, because the first item's seconds count from that record's time.

    Make file ``name``, whose items begin with number ``first_item``, from the log up to ``end``.

    ``start`` is the position of a record with ``items_before`` items before it; the last item of the file before,
    number ``first_item - 1``, belongs to a record at or behind it.
    """

    staging: Path
    name: str
    first_item: int
    start: int
    items_before: int
    end: int


def make_index_file(view: StoreView, task: IndexTask) -> int:
    """See :class:`IndexTask`; returns the physical offset at which the file ends. Raises StoreError, DiskFullError."""
    shape = IndexShape(view.config.index.hash_slots, view.config.index.max_items)
    log = view.open_log()
    walker = view.walker(log)
    seen, position = task.items_before, task.start
    file = None
    state = new_state()
    with writing(task.staging):
        own = task.staging / f"index-{uuid.uuid4().hex}"
        own.mkdir()
        while position < task.end:
            base = position - position % view.segment_bytes
            batch = walker.walk(position, task.end)
            segment = np.frombuffer(log.read(base, view.segment_bytes), np.uint8)
            rows: Rows = np.require(batch.rows, requirements=["C", "ALIGNED"])
            position = batch.end
            if file is None:
                counts = np.zeros(len(rows), np.int64)
                compiled.count_items(segment, base, rows, counts)
                sums = seen + np.cumsum(counts)
                if not len(rows) or (task.first_item and int(sums[-1]) < task.first_item):
                    seen = int(sums[-1]) if len(rows) else seen
                    continue
                before = None
                if task.first_item:
                    row = int(np.searchsorted(sums, task.first_item))
                    stamp, offset = int(rows["store_timestamp"][row]), int(rows["physical_offset"][row])
                    before = IndexHeader(stamp, stamp, offset, offset, 0, 1)
                    state[codes.STATE_LAST_OFFSET] = offset
                    state[codes.STATE_LAST_ITEMS] = task.first_item - int(sums[row] - counts[row])
                    rows = rows[row:]
                file = create(own / task.name, own / "new", shape, before)
                file.load(state)
            state[codes.STATE_ROW] = 0
            if not file.insert(segment, base, rows, state):
                break
        if file is None:
            raise StoreError("the log has changed since its items were counted", path=view.root)
        end = file.header.end_offset
        file.sync()
        file.close()
        walker.release()
        (own / task.name).rename(StoreLayout(task.staging).index / task.name)
        own.rmdir()
    return end


_PIECES_AT_ONCE: Final = 512
_STAGING: Final = "rebuild-"

Task = FillTask | IrregularTask | IndexTask


def rebuild_parallel(
    store: HeldStore,
    kinds: tuple[str, ...] = KINDS,
    progress: Progress = silent,
    *,
    runner: Runner = run_here,
    into: Path | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Rebuilt:
    """Rebuild ``kinds`` (of :data:`KINDS`): in place, or ``into`` an empty folder, with the store unchanged. Raises
    StoreError; CorruptRecordError when the log itself is damaged.
    """
    begun = time.perf_counter()
    refuse_without_index(store, kinds)
    log = CommitLog(store.layout.commit_log, store.config.commit_log.segment_bytes)
    bases = tuple(log.segments())
    view = StoreView.of(store, bases)
    with _staging(into if into is not None else store.layout.own, is_new=into is not None) as beside:
        plan = _RebuildPlan(view, beside.root, kinds)
        _survey(plan, log, progress, runner, piece_bytes)
        refuse_damage(store, log)
        plan.settle()
        for folder in plan.folders(beside):
            folder.mkdir(parents=True, exist_ok=True)
        for result in runner(_do, view, plan.tasks(beside, datetime.now()), silent):
            plan.index_end = max(plan.index_end, result)
        if "index" in kinds:
            plan.save_index_state(beside)
        if "queues" in kinds:
            keep_ends(store, beside, plan.start, trusted_ends(store))
        _sync(beside.root)
        _close(beside.root)
        if into is None:
            kept = exchange(store.layout, beside, kinds)
        else:
            kept = into
            for name in staged_folders(kinds):
                if (beside.root / name).exists():
                    (beside.root / name).rename(into / name)
            sync_folder(into)
    log.close()
    progress(plan.end - plan.start, plan.end - plan.start)
    return Rebuilt(plan.start, plan.end, plan.records, time.perf_counter() - begun, kept)


def _do(view: StoreView, task: Task) -> int:
    """Run a task that writes; returns the end of an index file, else -1."""
    if isinstance(task, IndexTask):
        return make_index_file(view, task)
    if isinstance(task, IrregularTask):
        make_irregular(view, task)
    else:
        fill(view, task)
    return -1


# ---------------------------------------------------------------- the job's folder


@contextmanager
def _staging(parent: Path, *, is_new: bool) -> Iterator[StoreLayout]:
    """A folder for this job under ``parent``; leftovers of other jobs are removed. Raises StoreError."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{_STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)
    if is_new and any(parent.iterdir()):
        raise StoreError("the folder to rebuild into is not empty", path=parent)
    beside = StoreLayout(parent / f"{_STAGING}{uuid.uuid4().hex}")
    beside.run.mkdir(parents=True)
    (beside.root / LOCK_NAME).touch()
    try:
        yield beside
    finally:
        _close(beside.root)
        shutil.rmtree(beside.root, ignore_errors=True)


def _close(staging: Path) -> None:
    """Wait until no task writes any more, and prevent further ones."""
    try:
        fd = os.open(staging / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        (staging / LOCK_NAME).unlink()
    finally:
        os.close(fd)


def _sync(root: Path) -> None:
    """Make all files and names under ``root`` durable, the deepest first. Raises StoreError."""
    try:
        for folder, _, names in os.walk(root, topdown=False):
            for name in names:
                fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            sync_folder(Path(folder))
    except OSError as error:
        raise StoreError(f"cannot make the rebuilt files durable: {error.strerror}", path=root) from error


# ---------------------------------------------------------------- the plan


@dataclass(slots=True)
class _PlannedPiece:
    start: int
    end: int
    items: int
    ends: dict[Queue, int] = field(default_factory=dict)
    places: dict[Queue, int] = field(default_factory=dict)


class _RebuildPlan:
    """Derives the tasks from the surveys, taken in the log's order. Memory: a few numbers for each queue and piece."""

    def __init__(self, view: StoreView, staging: Path, kinds: tuple[str, ...]) -> None:
        self.view = view
        self.kinds = kinds
        self.start = self.end = view.bases[0] if view.bases else 0
        self.records = 0
        self.index_end = 0
        self._staging = staging
        self._pieces: list[_PlannedPiece] = []
        self._ends: dict[Queue, int] = {}
        self._batch_ends: dict[Queue, int] = {}
        self._kinds: dict[Queue, int] = {}
        self._irregular: set[Queue] = set()
        self._last_record = self._last_with_items = -1
        self._names: list[str] = []

    def take(self, found: Survey) -> None:
        """Take the next piece of the log."""
        if found.records:
            piece = _PlannedPiece(found.start, found.records_end, found.items)
            for queue, span in found.queues.items():
                if self._kinds.setdefault(queue, span.kind) != span.kind or not span.is_regular:
                    self._irregular.add(queue)
                if span.kind == BATCH:
                    piece.places[queue] = self._batch_ends.get(queue, 0)
                    self._batch_ends[queue] = piece.places[queue] + span.count
                    continue
                end = self._ends.get(queue, -1)
                if end != span.first:
                    piece.ends[queue] = end
                    if end >= 0 and not 0 <= span.first - end <= MAX_GAP_UNITS:
                        self._irregular.add(queue)
                self._ends[queue] = span.next
            self._pieces.append(piece)
        self.records += found.records
        self._last_record = max(self._last_record, found.last_record)
        self._last_with_items = max(self._last_with_items, found.last_with_items)

    def settle(self) -> None:
        """Decide which queues are irregular, after all pieces. A batch queue never is: its units are always consecutive."""
        self._irregular = {queue for queue in self._irregular if queue in self._ends}

    def folders(self, beside: StoreLayout) -> Iterator[Path]:
        """The folders that tasks write into; those of irregular queues are moved there."""
        if "index" in self.kinds:
            yield beside.index
        if "queues" in self.kinds:
            yield beside.consume_queue
            for topic, queue_id in self._ends:
                folder = beside.consume_queue / topic
                yield folder if (topic, queue_id) in self._irregular else folder / str(queue_id)
            for topic, queue_id in self._batch_ends:
                yield beside.batch_consume_queue / topic / str(queue_id)

    def tasks(self, beside: StoreLayout, now: datetime) -> list[Task]:
        """The tasks that write, the longest first."""
        tasks: list[Task] = []
        if "index" in self.kinds:
            tasks += self._index_tasks(now)
        if "queues" in self.kinds:
            if self._irregular:
                tasks.append(IrregularTask(self._staging, self.start, self.end, frozenset(self._irregular)))
            tasks += [
                FillTask(self._staging, one.start, one.end, one.ends, one.places, frozenset(self._irregular))
                for one in self._pieces
            ]
        return tasks

    def _index_tasks(self, now: datetime) -> Iterable[IndexTask]:
        total = sum(piece.items for piece in self._pieces)
        room = self.view.config.index.max_items - 1
        files = -(-total // room)
        if total % room == 0 and self._last_record > self._last_with_items:
            files += 1  # the next file is made for the record behind the one that filled the last, even without keys
        before, piece = 0, 0
        for number in range(files):
            first = number * room
            while first and before + self._pieces[piece].items < first:
                before += self._pieces[piece].items
                piece += 1
            self._names.append(file_name(now, self._names[-1] if self._names else None))
            start = self._pieces[piece].start
            yield IndexTask(self._staging, self._names[-1], first, start, before, self.end)

    def save_index_state(self, beside: StoreLayout) -> None:
        """Save the state that the index dispatcher leaves beside its files at an orderly stop."""
        durable = self._names[-2] if len(self._names) > 1 else ""
        newest = self._names[-1] if self._names else ""
        state = SavedState(durable, True, self.end, newest, self.index_end)
        state.save(beside.own / "dispatchers" / "index" / "files.json")


def _survey(plan: _RebuildPlan, log: CommitLog, progress: Progress, runner: Runner, piece_bytes: int) -> None:
    """Survey the log's pieces up to its end. Raises CorruptRecordError for damage before the end."""
    view = plan.view
    segment_bytes = view.segment_bytes
    at_once = max(1, _PIECES_AT_ONCE * piece_bytes // segment_bytes)
    total = len(view.bases) * segment_bytes
    for first in range(0, len(view.bases), at_once):
        bases = view.bases[first : first + at_once]
        for found in _surveys(
            plan, bases, piece_bytes, runner, _counting(progress, first, segment_bytes, piece_bytes, total)
        ):
            plan.take(found)
            if found.broken_at >= 0:
                # No data may follow in later segments: the scan of a recovery confirms that, or raises.
                base = found.broken_at - found.broken_at % segment_bytes
                plan.end = scan_to_end(log, base).end
                return
        plan.end = bases[-1] + segment_bytes


def _counting(
    progress: Progress, first: int, segment_bytes: int, piece_bytes: int, total: int
) -> Callable[[int], None]:
    size = min(piece_bytes, segment_bytes)
    return lambda pieces: progress(min(total, first * segment_bytes + pieces * size), total)


def _surveys(
    plan: _RebuildPlan, bases: Sequence[int], piece_bytes: int, runner: Runner, finished: Callable[[int], None]
) -> list[Survey]:
    pieces = pieces_of(bases, plan.view.segment_bytes, piece_bytes)

    def run(jobs: list[Job]) -> Iterable[Survey]:
        tasks = [SurveyTask(piece, start, "queues" in plan.kinds, "index" in plan.kinds) for piece, start in jobs]
        return runner(survey, plan.view, tasks, finished if len(tasks) == len(pieces) else silent)

    return prove(pieces, run)


_PREFIXES = {"queues": "queue.", "index": "index."}


def checked(
    store: HeldStore,
    done: Rebuilt,
    kinds: tuple[str, ...] = KINDS,
    progress: Progress = silent,
    *,
    runner: Runner = run_here,
) -> Rebuilt:
    """``done`` with the findings of ``store verify`` for the log and the rebuilt ``kinds``. Raises StoreError."""
    report = verify(store, progress, runner=runner)
    others = tuple(prefix for kind, prefix in _PREFIXES.items() if kind not in kinds)
    left = [one for one in report.findings if not one.is_note and not (others and one.kind.startswith(others))]
    lines = [f"{one.kind}: {one.file} at {one.offset}: {one.detail}" for one in left]
    return replace(done, left=(*lines, *([f"and {report.untold} more"] if report.untold else [])))
