"""``store verify``: reads a whole store and compares the log with itself, and its ConsumeQueues, index, timer wheel and
timer log with the log.

Nothing is changed. The result is a list of :class:`Finding` s: the kind, the file, place and extent, and a sentence.

    log.segment      a segment is missing, or has another size
    log.record       bytes that are not a record where one must be, up to the next record
    log.order        queue offsets of a queue do not follow each other
    log.end          the log ends before a place that it must reach, so that a start refuses it
    queue.missing    a record without its unit; queue.wrong: a unit that differs from its record
    queue.extra      units without a record in the log; queue.extension: lost extension units, of which only a note is made
    index.missing    a key of a record without its item; index.wrong: an item without a record's key
    index.chain      an item or a slot that does not point to its predecessor; index.header: wrong counts
    timer.wheel      a slot that does not lead to its newest unit; timer.log: a missing unit, or one that leads elsewhere
    file.unreadable  a file that cannot be parsed

A store that was not closed orderly (``abort`` exists) may lack units and items of its last records, and may have a torn
end: a recovery handles these. They are reported as notes, not as damage.

The log is cut into pieces (:mod:`commitmq.store.log.commit_log`). Each is a task that reads its part of the log once and
compares the records with their units and items; further tasks check the remaining units and files, for some queues or
an index file each. So a :class:`~commitmq.offline.runner.Runner` may run them in parallel, with the same report.
Memory: two numbers for each queue, and the results of the running pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from commitmq.errors import CommitMQError, StoreError
from commitmq.format.file_names import segment_name
from commitmq.format.index_header import IndexShape
from commitmq.offline import verify_index
from commitmq.offline.findings import LOG, SMALL_FILES, Faults, Finding, Outcome, Report, Single
from commitmq.offline.held_store import HeldStore
from commitmq.offline.log_beginning import missing_beginning
from commitmq.offline.log_damage import missing_end, open_whole
from commitmq.offline.piece_bounds import Queue
from commitmq.offline.queue_order import QueueOrder
from commitmq.offline.queue_rest import Rest, check_rest
from commitmq.offline.runner import Progress, Runner, run_here, silent
from commitmq.offline.store_view import StoreView
from commitmq.offline.verify_index import IndexList
from commitmq.offline.verify_piece import PieceReport, PieceTask, check_piece
from commitmq.offline.verify_timer import check_timer
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.log.commit_log import PIECE_BYTES, Job, Piece, pieces_of, prove
from commitmq.store.metadata import group_config, json_config, orders_journal, topic_files
from commitmq.store.metadata.epoch import read_epoch
from commitmq.store.metadata.offsets_journal import OffsetsJournal
from commitmq.store.producers import ProducerSnapshot
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.recovery.store_recovery import refuse_orphaned_queues

__all__ = ["Finding", "Progress", "Report", "verify"]

_BESIDE_A_JOURNAL: Final = {
    "consumerOffset.json": group_config.load_snapshot,
    "topics.json": topic_files.load_snapshot,
}
_PIECES_AT_ONCE: Final = 512
_QUEUES_AT_ONCE: Final = 64


def verify(
    store: HeldStore,
    progress: Progress = silent,
    *,
    runner: Runner = run_here,
    piece_bytes: int = PIECE_BYTES,
) -> Report:
    """Read all of ``store``. Raises StoreError only when the folder of the log cannot be read at all."""
    begun = time.perf_counter()
    report = _Verifier(store, progress, runner, piece_bytes).run()
    report.seconds = time.perf_counter() - begun
    return report


class _Verifier:
    def __init__(self, store: HeldStore, progress: Progress, runner: Runner, piece_bytes: int) -> None:
        self._store = store
        self._layout = store.layout
        self._progress = progress
        self._runner = runner
        self._piece_bytes = piece_bytes
        self._segment_bytes = store.config.commit_log.segment_bytes
        self._faults = Faults()
        self._report = Report()

    def run(self) -> Report:
        report, faults = self._report, self._faults
        self._small_files()
        bases, is_whole = self._segments()
        view = StoreView.of(self._store, tuple(bases))
        config = view.config
        outcome = Outcome(config.consume_queue.file_bytes, config.consume_queue.batch_file_bytes, view.was_open)
        if bases and is_whole:  # without all of the log nothing else can be verified
            report.segments, report.log_bytes = len(bases), len(bases) * self._segment_bytes
            index = self._index(view)
            queues = QueueOrder(view, faults)
            log_end = self._log(view, index, queues)
            self._rest(view, queues)
            outcome = replace(outcome, log_end=log_end)
            if index is not None:
                faults.take(verify_index.outside(view, index, bases[-1] + self._segment_bytes))
                report.index_items = index.total
                first_item = IndexShape(config.index.hash_slots, config.index.max_items).item_position(1)
                outcome = replace(outcome, index_names=index.names, index_starts=index.starts, item_position=first_item)
            faults.take(check_timer(view, log_end))
        if is_whole:
            self._end()
        report.findings = faults.findings(outcome)
        report.untold = faults.untold
        return report

    # ------------------------------------------------------------ the log

    def _segments(self) -> tuple[list[int], bool]:
        """Bases of the segments, and whether these are all; a gap or a wrong size is reported, and ends the list."""
        bases: list[int] = []
        for path in sorted(self._layout.commit_log.iterdir()):
            if len(path.name) != 20 or not path.name.isdecimal():
                continue
            size, base = path.stat().st_size, int(path.name)
            if size != self._segment_bytes:
                why = f"it has {size} bytes, the others {self._segment_bytes}"
                self._tell(LOG, base, Finding("log.segment", f"commitlog/{path.name}", 0, size, why))
                return bases, False
            if bases and base != bases[-1] + self._segment_bytes:
                missing = (base - bases[-1]) // self._segment_bytes - 1
                why = f"{missing} segment(s) before this one are missing"
                self._tell(LOG, base, Finding("log.segment", f"commitlog/{path.name}", 0, 0, why))
                return bases, False
            bases.append(base)
        if lost := missing_beginning(self._store, bases):
            self._tell(LOG, bases[0], Finding("log.segment", f"commitlog/{segment_name(bases[0])}", 0, 0, lost))
        return bases, True

    def _log(self, view: StoreView, index: IndexList | None, queues: QueueOrder) -> int:
        """Check all of the log, some segments at a time; returns the end of the last whole record."""
        total = len(view.bases) * self._segment_bytes
        log_end = view.bases[0]
        at_once = max(1, _PIECES_AT_ONCE * self._piece_bytes // self._segment_bytes)
        for first in range(0, len(view.bases), at_once):
            bases = view.bases[first : first + at_once]
            done = first * self._segment_bytes

            def finished(pieces: int, done: int = done) -> None:
                self._progress(min(total, done + pieces * min(self._piece_bytes, self._segment_bytes)), total)

            for piece in self._pieces(view, index, queues, bases, finished):
                queues.take(piece.bounds)
                self._faults.take(piece.faults)
                self._report.records += piece.records
                self._report.units += piece.units
                log_end = max(log_end, piece.records_end)
        queues.close()
        self._progress(total, total)
        return log_end

    def _end(self) -> None:
        """Report an end of the log that a start refuses; other damage of the log says enough of itself."""
        told = [one.finding for one in self._faults.faults if isinstance(one, Single)]
        if any(one.kind.startswith("log.") and not one.is_note for one in told):
            return
        log = open_whole(self._store)
        try:
            if not log.segments():
                refuse_orphaned_queues(self._layout)
            for one in missing_end(self._store, log):
                base = one.start - one.start % self._segment_bytes
                file = f"commitlog/{segment_name(base)}"
                finding = Finding("log.end", file, one.start - base, one.end - one.start, str(one.damage))
                self._tell(LOG, one.start, finding)
        except StoreError as error:
            self._tell(LOG, 0, Finding("log.end", "commitlog", 0, 0, str(error)))
        finally:
            log.close()

    def _pieces(
        self,
        view: StoreView,
        index: IndexList | None,
        queues: QueueOrder,
        bases: Sequence[int],
        finished: Callable[[int], None],
    ) -> list[PieceReport]:
        """The pieces of some segments, each begun at a record and with its batch units where they must be."""

        def run(jobs: list[Job]) -> Iterable[PieceReport]:
            return check([PieceTask(piece, start, index) for piece, start in jobs])

        def check(tasks: list[PieceTask]) -> Iterable[PieceReport]:
            # Repeated work is no progress.
            return self._runner(check_piece, view, tasks, finished if len(tasks) == len(pieces) else silent)

        pieces: list[Piece] = pieces_of(bases, self._segment_bytes, self._piece_bytes)
        reports = prove(pieces, run)
        wrong: Mapping[int, Mapping[Queue, int]] = queues.misplaced(report.bounds for report in reports)
        again = [PieceTask(pieces[number], reports[number].start, index, places) for number, places in wrong.items()]
        for number, report in zip(wrong, check(again), strict=True):
            reports[number] = report
        return reports

    def _index(self, view: StoreView) -> IndexList | None:
        """Check each file of the index; None without an index to compare."""
        names = verify_index.index_names(view)
        if names is None:
            return None
        end = view.bases[-1] + self._segment_bytes
        tasks = [verify_index.FileTask(name, 0, end) for name in names]
        files = list(self._runner(verify_index.check_file, view, tasks, silent))
        again = verify_index.second_looks(files, end)
        for number, file in zip(
            again, self._runner(verify_index.check_file, view, list(again.values()), silent), strict=True
        ):
            files[number] = file
        for file in files:
            self._faults.take(file.faults)
        self._report.index_files = len(files)
        return IndexList.of(files)

    def _rest(self, view: StoreView, queues: QueueOrder) -> None:
        """Search for units without a record."""
        rests = [
            Rest(topic, queue_id, is_batch, ends.get((topic, queue_id), -1))
            for is_batch, root, ends in (
                (True, self._layout.batch_consume_queue, queues.batch_ends),
                (False, self._layout.consume_queue, queues.ends),
            )
            for topic, queue_id, _ in list_queues(root)
        ]
        self._report.queues = len(rests)
        for faults in self._runner(check_rest, view, list(_some(rests, _QUEUES_AT_ONCE)), silent):
            self._faults.take(faults)

    # ------------------------------------------------------------ other files

    def _tell(self, group: int, place: int | str, finding: Finding) -> None:
        self._faults.add(Single((group, place, 0), finding))

    def _small_files(self) -> None:
        checks: list[tuple[Path, Callable[[Path], object]]] = []
        if self._layout.config.is_dir():
            checks += [(path, self._load_config) for path in sorted(self._layout.config.glob("*.json"))]
        checks.append((self._layout.checkpoint, Checkpoint.load))
        if self._layout.own.is_dir():
            for pattern in ("*.json", "dispatchers/*.json", "dispatchers/*/*.json"):
                checks += [(path, _load_own) for path in sorted(self._layout.own.glob(pattern))]
            if self._layout.sidecar.exists():
                checks.append((self._layout.sidecar, _load_sidecar))
            checks.append((self._layout.epoch, read_epoch))
            checks.append((group_config.journal_path(self._layout), OffsetsJournal.read))
            checks.append((topic_files.journal_path(self._layout), topic_files.TopicsJournal.read))
            checks.append((orders_journal.journal_path(self._layout), orders_journal.OrdersJournal.read))
        # A start makes these anew from the log.
        remade: list[tuple[Path, Callable[[Path], object]]] = [(self._layout.producers, ProducerSnapshot.load)]
        if self._layout.queue_ends.exists():
            remade.append((self._layout.queue_ends, _load_queue_ends))
        for path, load in (*checks, *remade):
            try:
                load(path)
            except (CommitMQError, ValueError, OSError) as error:
                file = path.relative_to(self._layout.root).as_posix()
                is_note = (path, load) in remade
                self._tell(SMALL_FILES, file, Finding("file.unreadable", file, 0, 0, str(error), is_note))

    def _load_config(self, path: Path) -> object:
        """Load it as a start does, so that the reported remedy is the same."""
        return _BESIDE_A_JOURNAL[path.name](self._layout) if path.name in _BESIDE_A_JOURNAL else json_config.load(path)


def _load_sidecar(path: Path) -> None:
    if Sidecar.load(path) is None:
        raise StoreError("its checksum is false: a start goes by RocketMQ's rules", path=path)


def _load_queue_ends(path: Path) -> None:
    if QueueEnds.load(path) is None:
        raise StoreError("its checksum is false: a start compares samples of the log with the queues", path=path)


def _load_own(path: Path) -> object:
    """Some of them are written as RocketMQ's files are, whose dialect includes standard JSON. A start says no remedy for
    most, so none is given here.
    """
    return json_config.loads(path.read_text())


def _some(rests: Sequence[Rest], count: int) -> Iterator[tuple[Rest, ...]]:
    for start in range(0, len(rests), count):
        yield tuple(rests[start : start + count])
