"""The wheel in memory, and its file ``timerwheel`` (spec 12.2; the bytes of a slot: :mod:`commitmq.format.timer_wheel`).

The file changes only in :meth:`Wheel.flush`, after the timer log is on the device. So a slot of the file never names a unit
that a power cut could take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.holes import data_extents
from commitmq.files.write_all import write_all
from commitmq.format.timer_arrays import SLOT
from commitmq.format.timer_wheel import NO_POSITION, SLOT_BYTES, SLOTS, WHEEL_BYTES

Integers = NDArray[np.int64]

_PAGE_BYTES: Final = 4096
_PAGE_SLOTS: Final = _PAGE_BYTES // SLOT_BYTES
_LOOK_SLOTS: Final = 8_192


class Wheel:
    """All slots. A slot's number is its time divided by the precision."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises StoreError when it has another size than RocketMQ's, OSError."""
        self._path = path
        self.slots = np.zeros(SLOTS, SLOT)
        self._dirty = np.zeros(WHEEL_BYTES // _PAGE_BYTES, np.bool_)
        try:
            with disk.opened(path, os.O_RDONLY, "timerwheel") as fd:
                size = os.fstat(fd).st_size
                if size != WHEEL_BYTES:
                    raise StoreError(f"the timer wheel has {size} bytes, not {WHEEL_BYTES}", path=path)
                raw = self.slots.view(np.uint8)
                for start, stop in data_extents(fd, 0, size):
                    for at in range(start, stop, 1 << 20):
                        data = os.pread(fd, min(1 << 20, stop - at), at)
                        raw[at : at + len(data)] = np.frombuffer(data, np.uint8)
        except FileNotFoundError:
            self.is_new = True
        else:
            self.is_new = False

    def put(self, numbers: Integers, positions: Integers, steps: Integers) -> tuple[Integers, Callable[[], None]]:
        """Put the units at ``positions`` of the timer log into the slots ``numbers``; ``steps`` change their counts.

        Returns the position of the unit before each one in its slot, and what changes the slots: to be called when the units
        are written. ``positions`` ascend.
        """
        index = numbers % SLOTS
        order = np.argsort(index, kind="stable")
        index, numbers, sorted_positions = index[order], numbers[order], positions[order]
        first_of_slot = np.empty(len(index), np.bool_)
        first_of_slot[0] = True
        first_of_slot[1:] = index[1:] != index[:-1]
        heads = np.flatnonzero(first_of_slot)
        tails = np.append(heads[1:], len(index)) - 1
        rows = self.slots[index[heads]]
        is_fresh = rows["time"] != numbers[heads]
        before = np.empty(len(index), np.int64)
        before[1:] = sorted_positions[:-1]
        before[heads] = np.where(is_fresh, NO_POSITION, rows["last"])
        rows["first"] = np.where(is_fresh, sorted_positions[heads], rows["first"])
        rows["last"] = sorted_positions[tails]
        rows["messages"] = np.where(is_fresh, 0, rows["messages"]) + np.add.reduceat(steps[order], heads)
        rows["magic"] = np.where(is_fresh, 0, rows["magic"])
        rows["time"] = numbers[heads]
        previous = np.empty(len(index), np.int64)
        previous[order] = before

        def change() -> None:
            self.slots[index[heads]] = rows
            self._dirty[index[heads] // _PAGE_SLOTS] = True

        return previous, change

    def last(self, number: int) -> int:
        """The position of the newest unit of slot ``number``; NO_POSITION when it has none."""
        row = self.slots[number % SLOTS]
        return int(row["last"]) if row["time"] == number else NO_POSITION

    def set(self, number: int, first: int, last: int, messages: int) -> None:
        """Change slot ``number``, when it is the one that is there now; ``last`` NO_POSITION empties it."""
        at = number % SLOTS
        self.slots[at] = (number, first, last, messages, 0) if last != NO_POSITION else (0, 0, 0, 0, 0)
        self._dirty[at // _PAGE_SLOTS] = True

    def next_used(self, number: int, end: int) -> int | None:
        """The first slot from ``number`` on, below ``end``, that has units."""
        at = number
        while at < end:
            stop = min(at + _LOOK_SLOTS, end, at + SLOTS - at % SLOTS)
            times = self.slots["time"][at % SLOTS : at % SLOTS + stop - at]
            used = np.flatnonzero(times == np.arange(at, stop))
            if len(used):
                return at + int(used[0])
            at = stop
        return None

    def count(self, number: int) -> int:
        """How many messages the slots from ``number`` on hold."""
        return int(self.slots["messages"][self.slots["time"] >= number].sum())

    def clear(self) -> None:
        """Make every slot unused."""
        used = self.slots["time"] != 0
        self._dirty |= used.reshape(-1, _PAGE_SLOTS).any(axis=1)
        self.slots[used] = 0

    def flush(self) -> None:
        """Write the changed slots to the file, and make them durable. Raises OSError; the same call may be repeated."""
        pages = np.flatnonzero(self._dirty)
        if not len(pages) and not self.is_new:
            return
        raw = self.slots.view(np.uint8)
        with disk.opened(self._path, os.O_RDWR | os.O_CREAT, "timerwheel") as fd:
            if os.fstat(fd).st_size != WHEEL_BYTES:
                disk.resize(fd, WHEEL_BYTES, "timerwheel")
            breaks = np.flatnonzero(np.diff(pages) != 1) + 1
            for part in np.split(pages, breaks) if len(pages) else ():
                start, stop = int(part[0]) * _PAGE_BYTES, (int(part[-1]) + 1) * _PAGE_BYTES
                write_all(fd, raw[start:stop].data, start, place="timerwheel.write")
            disk.sync(fd, "timerwheel")
        if self.is_new:
            disk.sync_folder(self._path.parent, "timerwheel")
        self.is_new = False
        self._dirty[:] = False
