"""Compares the timer wheel and the timer log with each other, and with the queue of the timer topic.

Both only index that queue, as far as ``commitmq/timer.json`` and ``config/timercheck`` say: slots from ``read_ms`` on wait,
and messages before ``queue_offset`` are in the wheel, with units below ``log_end``. What lies behind these positions is cut
off by the timer, so it is not looked at. Where the positions are unknown, or say that the two do not fit, the timer makes
both again, and only a note is made of it.

    units       from the first file to ``log_end`` one unit follows the other, up to a filler at a file's end
    chains      each waiting unit names the one before it in its slot; the slot names the newest
    records     each waiting unit names a record of its size, and each message that waits has a unit
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import CommitMQError, CorruptRecordError, OffsetOutOfRangeError, StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import MAGIC_FILLER, PREBLANK_SIZE, Property
from commitmq.format.file_names import segment_name
from commitmq.format.record import decode_record
from commitmq.format.timer_arrays import SLOT, UNIT
from commitmq.format.timer_check import decode_check
from commitmq.format.timer_log import FILLER_BYTES, MAGIC_DEFAULT, UNIT_BYTES
from commitmq.format.timer_wheel import NO_POSITION, SLOT_BYTES, SLOTS, WHEEL_BYTES
from commitmq.format.units import UNIT as QUEUE_UNIT
from commitmq.offline.findings import TIMER, Faults, Finding, Single
from commitmq.offline.queue_units import runs
from commitmq.offline.store_view import StoreView
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.log.append import longs
from commitmq.store.log.readdressing import find
from commitmq.store.metadata import json_config
from commitmq.store.queues.consume_queue import ConsumeQueue

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
    check = _Check(view, log_end)
    try:
        check.run()
    except (CommitMQError, OSError) as error:
        check.tell("timer.log", "timerlog", 0, 0, str(error))
    return check.faults


class _Check:
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
        self.faults.add(Single((TIMER, kind, file, offset), Finding(kind, file, offset, extent, detail, note)))

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
            if [check.state_version, check.timestamp, check.counter] not in ours["versions"] or not ours["is_whole"]:
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
