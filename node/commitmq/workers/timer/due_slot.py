"""A slot of the wheel whose time has come: its messages in the order of their times, its rolls and its cancellations."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.format.constants import Property
from commitmq.format.timer_log import MAGIC_DELETE, MAGIC_ROLL
from commitmq.format.timer_wheel import NO_POSITION
from commitmq.store.log.readdressing import find
from commitmq.workers.runtime.run_making import RunMaker, few_enough
from commitmq.workers.timer.incoming import PRECISION_MS, delete_keys, due_of, message_key
from commitmq.workers.timer.unit_log import UnitLog

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
        """Up to ``count`` messages that are due, and not too many bytes; cancelled ones are left out and counted."""
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
