"""``store verify``: reads a whole store and compares the log with itself, and its ConsumeQueues, index, timer wheel and
timer log with the log.

Nothing is changed. The result is a list of :class:`StoreFinding` s: the kind, the file, place and extent, and a sentence.

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

The log is cut into pieces (:mod:`commitmq.offline.extents`). Each is a task that reads its part of the log once and
compares the records with their units and items; further tasks check the remaining units and files, for some queues or
an index file each. So a :class:`~commitmq.offline.held_store.Runner` may run them in parallel, with the same report.
Memory: two numbers for each queue, and the results of the running pieces.

Compares the timer wheel and the timer log with each other, and with the queue of the timer topic.

Both only index that queue, as far as ``commitmq/timer.json`` and ``config/timercheck`` say: slots from ``read_ms`` on wait,
and messages before ``queue_offset`` are in the wheel, with units below ``log_end``. What lies behind these positions is cut
off by the timer, so it is not looked at. Where the positions are unknown, or say that the two do not fit, the timer makes
both again, and only a note is made of it.

    units       from the first file to ``log_end`` one unit follows the other, up to a filler at a file's end
    chains      each waiting unit names the one before it in its slot; the slot names the newest
    records     each waiting unit names a record of its size, and each message that waits has a unit
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import CommitMQError, CorruptRecordError, OffsetOutOfRangeError, StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import MAGIC_FILLER, PREBLANK_SIZE, Property
from commitmq.format.file_names import segment_name
from commitmq.format.index import IndexShape
from commitmq.format.record import decode_record
from commitmq.format.timer import (
    FILLER_BYTES,
    MAGIC_DEFAULT,
    NO_POSITION,
    SLOT_BYTES,
    SLOTS,
    UNIT_BYTES,
    WHEEL_BYTES,
    decode_check,
)
from commitmq.format.timer_arrays import SLOT, UNIT
from commitmq.format.units import UNIT as QUEUE_UNIT
from commitmq.offline import verify_index
from commitmq.offline.extents import PIECE_BYTES, Job, LogRange, Queue, pieces_of, prove, runs
from commitmq.offline.findings import LOG, SMALL_FILES, TIMER, Faults, Report, Single, StoreFinding, VerifyTotals
from commitmq.offline.held_store import HeldStore, Progress, Runner, StoreView, run_here, silent
from commitmq.offline.log_damage import missing_beginning, missing_end, open_whole
from commitmq.offline.verify_index import IndexList
from commitmq.offline.verify_queues import PieceReport, PieceTask, QueueOrder, QueueTail, check_piece, check_rest
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.log.append import longs
from commitmq.store.log.readdressing import find
from commitmq.store.metadata import group_config, journal, json_config, topic_files
from commitmq.store.metadata.journal import OffsetsJournal
from commitmq.store.producers import ProducerSnapshot
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.recovery.store_recovery import refuse_orphaned_queues
from commitmq.store.store_file import read_epoch

_PRECISION_MS: Final = 1_000
_MOST: Final = 100
_CHUNK: Final = 32_768
_FEW_FILES: Final = 4

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Positions:
    read_ms: int
    queue_offset: int
    log_end: int
    begin: int


def check_timer(view: StoreView, log_end: int) -> Faults:
    """What is wrong; ``log_end`` is the end of the last whole record."""
    check = _TimerVerifier(view, log_end)
    try:
        check.run()
    except (CommitMQError, OSError) as error:
        check.tell("timer.log", "timerlog", 0, 0, str(error))
    return check.faults


class _TimerVerifier:
    def __init__(self, view: StoreView, log_end: int) -> None:
        self._view = view
        self._layout = view.layout
        self._log_end = log_end
        self._places: Integers = np.empty(0, np.int64)
        """The positions of all units."""
        self._units: NDArray[np.void] = np.empty(0, UNIT)
        self._first = 0
        self.faults = Faults()

    def tell(self, kind: str, file: str, offset: int, extent: int, detail: str, *, is_note: bool = False) -> None:
        """The store may have been left open: then the timer's next start makes both again."""
        note = is_note or self._view.was_open
        self.faults.add(Single((TIMER, kind, file, offset), StoreFinding(kind, file, offset, extent, detail, note)))

    def run(self) -> None:
        if not any((self._layout.root / name).exists() for name in ("timerwheel", "timerlog")):
            return
        positions = self._positions()
        if positions is None:
            why = "its positions are not known, or do not fit to it: the timer makes wheel and timer log again"
            self.tell("timer.log", "timerlog", 0, 0, why, is_note=True)
            return
        if not self._read_log(positions.log_end):
            return
        wheel = self._wheel()
        if wheel is not None:
            self._compare(wheel, positions)
        self._compare_records(positions)

    def _positions(self) -> _Positions | None:
        try:
            check = decode_check((self._layout.config / "timercheck").read_bytes())
            ours: Any = json_config.load_table(self._layout.own / "timer.json") or {}
            version = json_config.DataVersion(check.counter, check.state_version, check.timestamp)
            if list(version.to_json().values()) not in ours["versions"] or not ours["is_whole"]:
                return None
            begin = max((int(one[0]) for one in ours.get("set_backs", ())), default=0)
            return _Positions(int(ours["read_ms"]), int(ours["queue_offset"]), int(ours["log_end"]), begin)
        except (OSError, CommitMQError, KeyError, TypeError, ValueError):
            return None  # a damaged file is a finding of its own

    # ------------------------------------------------------------ the timer log alone

    def _read_log(self, end: int) -> bool:
        """Read the units below ``end``; False when the files cannot be a log."""
        folder = self._layout.root / "timerlog"
        files = sorted(path for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []
        sizes = [path.stat().st_size for path in files]
        bases = [int(path.name) for path in files]
        if len(set(sizes)) > 1 or any(base % sizes[0] for base in bases):
            self.tell("timer.log", "timerlog", 0, 0, "its files have different sizes, or do not follow each other")
            return False
        wanted = range(bases[0], end, sizes[0]) if bases else range(0, end, max(1, end))
        if lost := [base for base in wanted if base not in bases]:
            self.tell("timer.log", f"timerlog/{segment_name(lost[0])}", 0, 0, f"{len(lost)} files are missing")
            return False
        self._first = bases[0] if bases else 0
        found = [self._units_of(path, min(size, end - int(path.name))) for path, size in zip(files, sizes, strict=True)]
        self._places = np.concatenate([np.empty(0, np.int64), *(at for at, _ in found)])
        self._units = np.concatenate([np.empty(0, UNIT), *(units for _, units in found)])
        return True

    def _units_of(self, path: Path, used: int) -> tuple[Integers, NDArray[np.void]]:
        base, count = int(path.name), max(0, used) // UNIT_BYTES
        if not count:
            return np.empty(0, np.int64), np.empty(0, UNIT)
        units = np.fromfile(path, UNIT, count)  # a map of a hole takes space on tmpfs
        good = (units["size"] == UNIT_BYTES) & (units["magic"] & MAGIC_DEFAULT != 0)
        left = path.stat().st_size - UNIT_BYTES * (count - 1)
        if units["magic"][-1] == MAGIC_FILLER and FILLER_BYTES <= units["size"][-1] == left:
            count -= 1  # the file's end
        for start, stop in runs(~good[:count]):
            self.tell(
                "timer.log", f"timerlog/{path.name}", start * UNIT_BYTES, (stop - start) * UNIT_BYTES,
                f"{stop - start} units are not there",
            )  # fmt: skip
        rows = np.flatnonzero(good[:count])
        return base + UNIT_BYTES * rows, units[rows].copy()

    # ------------------------------------------------------------ wheel and timer log

    def _wheel(self) -> NDArray[np.void] | None:
        path = self._layout.root / "timerwheel"
        size = path.stat().st_size if path.exists() else -1
        if size != WHEEL_BYTES:
            self.tell("timer.wheel", "timerwheel", 0, 0, f"it has {max(size, 0)} bytes, not {WHEEL_BYTES}")
            return None
        return np.fromfile(path, SLOT)

    def _compare(self, wheel: NDArray[np.void], positions: _Positions) -> None:
        numbers = (self._units["write_ms"] + self._units["delay_ms"]).astype(np.int64) // _PRECISION_MS
        rows = np.flatnonzero(numbers >= positions.read_ms // _PRECISION_MS)
        rows = rows[np.argsort(numbers[rows], kind="stable")]
        numbers, places, units = numbers[rows], self._places[rows], self._units[rows]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = numbers[1:] != numbers[:-1]
        before = np.concatenate(([NO_POSITION], places[:-1]))
        previous = units["previous"].astype(np.int64)
        # The files with the oldest units of a slot may be deleted.
        wrong = np.where(is_first, (previous != NO_POSITION) & (previous >= self._first), previous != before)
        for row in np.flatnonzero(wrong)[:_MOST].tolist():
            self._tell_unit(int(places[row]), f"it leads to {previous[row]}, not to the unit before it in its slot")
        heads = np.flatnonzero(is_first)
        tails = np.append(heads[1:], len(rows))[: len(heads)] - 1
        slots = wheel[numbers[heads] % SLOTS] if len(rows) else wheel[:0]
        last = slots["last"].astype(np.int64)
        # A slot that leads behind the end is written before the end is, and the timer cuts it off.
        known = (slots["time"] == numbers[heads]) & ((last == places[tails]) | (last >= positions.log_end))
        for row in np.flatnonzero(~known)[:_MOST].tolist():
            number = int(numbers[heads[row]])
            self._tell_slot(number % SLOTS, f"it does not lead to the newest unit of its slot, at {places[tails[row]]}")
        waiting = wheel["time"] >= positions.read_ms // _PRECISION_MS
        waiting &= (wheel["last"] < positions.log_end) & (wheel["last"] >= self._first)
        waiting[numbers[heads] % SLOTS] = False
        for index in np.flatnonzero(waiting)[:_MOST].tolist():
            self._tell_slot(index, f"it leads to {wheel['last'][index]}, where no unit of its slot lies")

    def _tell_unit(self, place: int, detail: str) -> None:
        bases = [int(path.name) for path in (self._layout.root / "timerlog").iterdir() if path.name.isdigit()]
        base = max(one for one in bases if one <= place)
        self.tell("timer.log", f"timerlog/{segment_name(base)}", place - base, UNIT_BYTES, detail)

    def _tell_slot(self, index: int, detail: str) -> None:
        self.tell("timer.wheel", "timerwheel", index * SLOT_BYTES, SLOT_BYTES, detail)

    # ------------------------------------------------------------ the queue

    def _compare_records(self, positions: _Positions) -> None:
        """Each message that waits has a unit, unless a copy of it that rolled stands for it, or it was cancelled. The times of
        those that came before the clock was last set back do not tell which wait.
        """
        folder = self._layout.consume_queue / TIMER_TOPIC / "0"
        if not folder.is_dir():
            return
        have = np.unique(self._units["physical_offset"].astype(np.int64))
        lost: list[tuple[int, int]] = []
        rolled: set[tuple[bytes, ...]] = set()
        for data, starts, places, sizes in self._records(folder, positions.begin, positions.queue_offset):
            found = find(data, starts, sizes, _NAMES)
            out_ms, good = longs(data, found.starts[0], found.lengths[0])
            waits = good & found.whole & (out_ms >= positions.read_ms) & ~np.isin(places, have)
            lost += zip(places[waits].tolist(), sizes[waits].tolist(), strict=True)
            for index in np.flatnonzero(found.lengths[1] > 0).tolist():
                rolled.add(tuple(found.value(name, index) for name in (0, 2, 3)))
        lost = [one for one in lost if not self._is_replaced(one, rolled)]
        if lost:
            why = f"{len(lost)} messages that wait have no unit; the record of the first is at {lost[0][0]}"
            self.tell("timer.log", "timerlog", 0, 0, why)

    def _records(
        self, folder: Path, begin: int, end: int
    ) -> Iterator[tuple[NDArray[np.uint8], Integers, Integers, Integers]]:
        """The records of the timer topic from queue offset ``begin`` to ``end``, by segment: bytes, where, places, sizes."""
        fds = FdCache(_FEW_FILES)
        queue = ConsumeQueue(folder, self._view.config.consume_queue.file_bytes, fds)
        log = self._view.open_log()
        try:
            queue.refresh()
            at = max(queue.min_offset, begin)
            while at < min(end, queue.max_offset):
                units = np.frombuffer(queue.read_units(at, min(_CHUNK, end - at)), QUEUE_UNIT)
                if not len(units):
                    break
                at += len(units)
                places, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
                real = (sizes > 0) & (sizes != PREBLANK_SIZE) & (places >= self._view.bases[0])
                real &= places + sizes <= self._log_end
                bases = places - places % log.segment_bytes
                for base in np.unique(bases[real]).tolist():
                    mine = real & (bases == base)
                    data = np.frombuffer(log.read(base, log.segment_bytes), np.uint8)
                    yield data, places[mine] - base, places[mine], sizes[mine]
        except (StoreError, OffsetOutOfRangeError):
            return  # damage of the queue or of the log is a finding of its own
        finally:
            fds.close()
            log.close()

    def _is_replaced(self, one: tuple[int, int], rolled: set[tuple[bytes, ...]]) -> bool:
        if not rolled:
            return False
        log = self._view.open_log()
        try:
            properties = decode_record(bytes(log.read(*one)), with_body=False).properties
        except (CorruptRecordError, OffsetOutOfRangeError, ValueError):
            return True
        finally:
            log.close()
        names = (_NAMES[0], _NAMES[2], _NAMES[3])
        return tuple(properties.get(name, "").encode() for name in names) in rolled


_NAMES: Final = (Property.TIMER_OUT_MS, Property.TIMER_ROLL_TIMES, Property.UNIQUE_KEY, Property.REAL_TOPIC)


__all__ = ["Progress", "Report", "StoreFinding", "verify"]

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
        outcome = VerifyTotals(config.consume_queue.file_bytes, config.consume_queue.batch_file_bytes, view.was_open)
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
                self._tell(LOG, base, StoreFinding("log.segment", f"commitlog/{path.name}", 0, size, why))
                return bases, False
            if bases and base != bases[-1] + self._segment_bytes:
                missing = (base - bases[-1]) // self._segment_bytes - 1
                why = f"{missing} segment(s) before this one are missing"
                self._tell(LOG, base, StoreFinding("log.segment", f"commitlog/{path.name}", 0, 0, why))
                return bases, False
            bases.append(base)
        if lost := missing_beginning(self._store, bases):
            self._tell(LOG, bases[0], StoreFinding("log.segment", f"commitlog/{segment_name(bases[0])}", 0, 0, lost))
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
                finding = StoreFinding("log.end", file, one.start - base, one.end - one.start, str(one.damage))
                self._tell(LOG, one.start, finding)
        except StoreError as error:
            self._tell(LOG, 0, StoreFinding("log.end", "commitlog", 0, 0, str(error)))
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

        pieces: list[LogRange] = pieces_of(bases, self._segment_bytes, self._piece_bytes)
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
            QueueTail(topic, queue_id, is_batch, ends.get((topic, queue_id), -1))
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

    def _tell(self, group: int, place: int | str, finding: StoreFinding) -> None:
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
            checks.append((journal.journal_path(self._layout), journal.OrdersJournal.read))
        # A start makes these again from the log.
        remade: list[tuple[Path, Callable[[Path], object]]] = [(self._layout.producers, ProducerSnapshot.load)]
        if self._layout.queue_ends.exists():
            remade.append((self._layout.queue_ends, _load_queue_ends))
        for path, load in (*checks, *remade):
            try:
                load(path)
            except (CommitMQError, ValueError, OSError) as error:
                file = path.relative_to(self._layout.root).as_posix()
                is_note = (path, load) in remade
                self._tell(SMALL_FILES, file, StoreFinding("file.unreadable", file, 0, 0, str(error), is_note))

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
    """Some are in RocketMQ's dialect of JSON. A start says no remedy for most, so none is given here."""
    return json_config.loads(path.read_text())


def _some(rests: Sequence[QueueTail], count: int) -> Iterator[tuple[QueueTail, ...]]:
    for start in range(0, len(rests), count):
        yield tuple(rests[start : start + count])
