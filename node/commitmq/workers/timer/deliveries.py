"""Appends due messages to their own topics, and those that roll to the timer topic, each once.

A slot of the wheel whose time has come: its messages in the order of their times, its rolls and its cancellations.

The keys by which the timer finds what it has appended already (:mod:`commitmq.workers.runtime.run_mover`).

A delivered message has two properties more than its source, the times of its enqueuing and dequeuing, and a message that
rolled has another number of rolls. All else is as it was, in another order.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.format.constants import Property
from commitmq.format.record import parts_of
from commitmq.format.timer import MAGIC_DELETE, MAGIC_ROLL, NO_POSITION
from commitmq.semantics.retry import UNDELIVERED_TOPIC
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.store.log.append import longs
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch
from commitmq.store.log.readdressing import find
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.run_making import Delivery, RunMaker, few_enough
from commitmq.workers.runtime.run_mover import Key, MovedBefore, MovedRun, key_of
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.runtime.topic_view import DeletedTopics
from commitmq.workers.timer.incoming import PRECISION_MS, Incoming, delete_keys, due_of, message_key
from commitmq.workers.timer.wheel import UnitLog

Integers = NDArray[np.int64]
Rows = NDArray[np.void]

ROW: Final = np.dtype(
    [("due_ms", np.int64), ("physical", np.int64), ("size", np.int64), ("write_ms", np.int64), ("rolls", np.bool_)]
)
"""One message of a slot."""


class DueSlot:
    """Slot ``slot_ms``. ``log``: where the CommitLog ended when it was opened, so its deliveries lie behind."""

    def __init__(self, slot_ms: int, log: int) -> None:
        self.slot_ms = slot_ms
        self.log = log
        self.cancelled = 0
        self._newest = NO_POSITION
        self.topics: list[tuple[Integers, Integers]] = []
        """The hashes of the topics of its units, and the steps of these, as they were taken in."""
        self._rows: Rows = np.empty(0, ROW)
        self._keys: set[bytes] = set()

    @property
    def end_ms(self) -> int:
        """From then on no message can be late for this slot."""
        return self.slot_ms + PRECISION_MS

    @property
    def next_due_ms(self) -> int | None:
        """When the next of its messages is due; None without one."""
        return int(self._rows["due_ms"][0]) if len(self._rows) else None

    def take_in(self, last: int, units: UnitLog, records: RunMaker) -> None:
        """Take in the units that came to the slot; ``last`` is its newest one. Raises DamagedTimerLogError."""
        if last in (self._newest, NO_POSITION):
            return
        positions = units.chain(last, self.slot_ms, stop=self._newest + 1)[::-1]
        self._newest = last
        found = units.units(positions)
        magic = found["magic"].astype(np.int64)
        self.topics.append((found["topic_hash"].astype(np.int64), units.steps(magic)))
        rolls = (magic & MAGIC_ROLL) != 0
        rows = np.zeros(len(found), ROW)
        rows["physical"], rows["size"] = found["physical_offset"], found["record_bytes"]
        rows["write_ms"], rows["rolls"] = found["write_ms"], rolls
        cancels = ((magic & MAGIC_DELETE) != 0) & ~rolls
        self._keys |= _delete_keys(rows[cancels], records)
        rows = rows[~cancels]
        rows["due_ms"] = np.where(rows["rolls"], self.slot_ms, self._due_times(rows, records))
        rows = np.concatenate((self._rows, rows))
        self._rows = rows[np.argsort(rows["due_ms"], kind="stable")]

    def _due_times(self, rows: Rows, records: RunMaker) -> Integers:
        due = np.full(len(rows), self.end_ms, np.int64)
        for base, data, which in records.by_segment(rows["physical"], silent=True):
            out = np.full(len(which), self.slot_ms, np.int64)
            due[which] = due_of(data, rows["physical"][which] - base, rows["size"][which], out)
        return due

    def take(self, now_ms: int, count: int, records: RunMaker) -> Rows:
        """Up to ``count`` messages that are due, and not too many bytes; cancelled ones are omitted and counted."""
        ready = min(count, int(np.searchsorted(self._rows["due_ms"], now_ms, side="right")))
        ready = few_enough(self._rows["size"][:ready])
        taken, self._rows = self._rows[:ready], self._rows[ready:]
        if self._keys and len(taken):
            gone = self._cancelled(taken, records)
            self.cancelled += int(gone.sum())
            taken = taken[~gone]
        return taken

    def _cancelled(self, rows: Rows, records: RunMaker) -> NDArray[np.bool_]:
        gone: NDArray[np.bool_] = np.zeros(len(rows), np.bool_)
        names = [Property.UNIQUE_KEY, Property.REAL_TOPIC]
        for base, data, which in records.by_segment(rows["physical"], silent=True):
            found = find(data, rows["physical"][which] - base, np.ascontiguousarray(rows["size"][which]), names)
            for place, index in enumerate(which.tolist()):
                unique = found.value(0, place)
                key = message_key(found.value(1, place), unique)
                gone[index] = bool(unique) and not rows["rolls"][index] and key in self._keys
        return gone


def _delete_keys(rows: Rows, records: RunMaker) -> set[bytes]:
    keys: set[bytes] = set()
    for base, data, which in records.by_segment(rows["physical"], silent=True):
        found = find(
            data,
            rows["physical"][which] - base,
            np.ascontiguousarray(rows["size"][which]),
            [Property.TIMER_DELETE_KEY, Property.REAL_TOPIC],
        )
        for place in range(len(which)):
            keys |= delete_keys(found.value(0, place), found.value(1, place))
    return keys


def added_properties(write_ms: Integers, dequeue_ms: int, roll_times: Integers | None = None) -> list[bytes]:
    """The encoded properties that each message gets when it leaves the wheel; ``roll_times`` of those that go round again."""
    written, numbers = np.unique(write_ms, return_inverse=True)
    times = [f"{Property.TIMER_ENQUEUE_MS}\x01{one}\x02" for one in written.tolist()]
    end = f"{Property.TIMER_DEQUEUE_MS}\x01{dequeue_ms}\x02"
    if roll_times is None:
        whole = [(one + end).encode() for one in times]
        return [whole[number] for number in numbers.tolist()]
    return [
        f"{times[number]}{Property.TIMER_ROLL_TIMES}\x01{rolls}\x02{end}".encode()
        for number, rolls in zip(numbers.tolist(), roll_times.tolist(), strict=True)
    ]


_TIMES: Final = (Property.TIMER_ENQUEUE_MS.encode() + b"\x01", Property.TIMER_DEQUEUE_MS.encode() + b"\x01")
_ROLLS: Final = Property.TIMER_ROLL_TIMES.encode() + b"\x01"
_ROLLED: Final = b"rolled"


def _normal(record: bytes | memoryview, mark: bytes, *, rolls: int = 0) -> Key:
    kept, text = key_of(record)
    pairs = [pair for pair in text.split(b"\x02") if pair and not pair.startswith(_TIMES)]
    if rolls:
        texts = [pair[len(_ROLLS) :] for pair in pairs if pair.startswith(_ROLLS)]
        times = [int(text) for text in texts if text.isdigit() and len(text) < 10]  # (it may be a client's own text)
        pairs = [pair for pair in pairs if not pair.startswith(_ROLLS)]
        pairs.append(_ROLLS + b"%d" % (sum(times) + rolls))
    return mark + kept, b"\x02".join(sorted(pairs))


def delivered_key(record: bytes | memoryview) -> Key:
    """Of a message that is to be delivered."""
    return _normal(record, b"")


def rolled_key(record: bytes | memoryview) -> Key:
    """Of a message that is to go round again."""
    return _normal(record, _ROLLED, rolls=1)


def copy_key(record: bytes | memoryview) -> Key:
    """Of a delivered message, or of one that rolled: its topic tells."""
    data = bytes(record)
    return _normal(data, _ROLLED if _topic(data) == TIMER_TOPIC.encode() else b"")


def _topic(record: bytes) -> bytes:
    parts = parts_of(record)
    return record[parts.topic : parts.topic + parts.topic_bytes]


def moved_by_timer(batch: DispatchBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which records of a batch may be the timer's: those with the time of a dequeuing, and dead letters."""
    if not len(batch) or batch.log is None:
        return np.zeros(len(batch), np.bool_)
    places = batch.rows["physical_offset"].astype(np.int64)
    base = int(places[0]) - int(places[0]) % batch.log.segment_bytes
    data = np.frombuffer(batch.log.read(base, batch.log.segment_bytes), np.uint8)
    found = find(data, places - base, batch.rows["size"].astype(np.int64), [Property.TIMER_DEQUEUE_MS])
    dead = batch.topics.index(UNDELIVERED_TOPIC) if UNDELIVERED_TOPIC in batch.topics else -1
    moved: np.ndarray[Any, np.dtype[np.bool_]] = (found.lengths[0] > 0) | (batch.rows["topic"] == dead)
    return moved


class Deliveries:
    """``left``: runs that the writer refused for now. ``way``: how runs are appended."""

    def __init__(self, context: WorkerContext, log: CommitLog, aside: SetAside) -> None:
        self._context = context
        self._log = log
        self._exactly_once = context.config.timer.exactly_once
        report = partial(aside.at, log)
        self.way = Delivery(context, "timer", report)
        self.records = RunMaker(log, context.config, report, DeletedTopics(context))
        self.left: list[MovedRun] = []
        self._start: int | None = None
        self._delivered = MovedBefore(copy_key, delivered_key)
        self._rolled = MovedBefore(copy_key, rolled_key)

    def begin(self, start: int, end: int) -> None:
        """Nothing is under way; what was delivered before lies from ``start`` to ``end`` in the log."""
        self.left = []
        self.forget()
        if not self._exactly_once:
            return
        beat = self._context.heartbeat
        self._delivered.scan(self._log, start, end, moved_by_timer, beat)
        if len(self._delivered):
            self._start = start
            self._rolled.scan(self._log, start, end, moved_by_timer, beat)
            self._context.log.info("looks for deliveries before it", found=len(self._delivered), bytes=end - start)

    def begins_at(self) -> list[int]:
        """Where deliveries lie that were found by :meth:`begin` and are not done; empty without one. A position that is
        written down must not pass it: their slot is opened again, behind them.
        """
        return [] if self._start is None else [self._start]

    def forget(self) -> None:
        """Every message that may have been delivered before is done."""
        self._start = None
        self._delivered.forget()
        self._rolled.forget()

    def put(self, rows: Rows) -> None:
        """Append the messages of ``rows``. Those that may succeed later stay in ``left``. Raises WriterLost."""
        runs: list[MovedRun] = []
        for is_roll in (True, False):
            mine = rows[rows["rolls"] == is_roll]
            if len(mine):
                runs += self._runs(mine, is_roll=is_roll)
        self._append(runs)

    def of_later(self, messages: Incoming, now_ms: int) -> NDArray[np.bool_]:
        """Which of ``messages`` were delivered before, though they are due after ``now_ms``: the clock was ahead of it.
        (Those that are due are skipped when they are delivered.)
        """
        found: NDArray[np.bool_] = np.zeros(len(messages), np.bool_)
        if len(self._delivered):
            later = np.flatnonzero((messages.due_ms > now_ms) & ~messages.cancels)
            for base, data, which in self.records.by_segment(messages.physical[later], silent=True):
                for index in later[which].tolist():
                    start = int(messages.physical[index]) - base
                    found[index] = self._delivered.pass_over(data[start : start + int(messages.sizes[index])].data)
        return found

    def try_again(self) -> bool:
        """Append what was refused, if it is time. True when nothing is left. Raises WriterLost."""
        if self.left and self.way.may_try_again:
            self._append(self.left)
        return not self.left

    def _runs(self, rows: Rows, *, is_roll: bool) -> list[MovedRun]:
        before = self._rolled if is_roll else self._delivered
        runs: list[MovedRun] = []
        for base, data, which in self.records.by_segment(rows["physical"]):
            mine = rows[which]
            positions, sizes = mine["physical"] - base, np.ascontiguousarray(mine["size"])
            if len(before):
                new = [not before.pass_over(data[p : p + s].data) for p, s in zip(positions, sizes, strict=True)]
                mine, positions, sizes = mine[new], positions[new], sizes[new]
            if not len(mine):
                continue
            times = None
            if is_roll:
                found = find(data, positions, sizes, [Property.TIMER_ROLL_TIMES])
                times = longs(data, found.starts[0], found.lengths[0])[0] + 1
            more = added_properties(mine["write_ms"], time.time_ns() // 1_000_000, times)
            to = (TIMER_TOPIC, 0) if is_roll else None
            runs += self.records.runs(base, data, positions, sizes, more=more, to=to)
        return runs

    def _append(self, runs: list[MovedRun]) -> None:
        self.left = self.way.append(runs)
