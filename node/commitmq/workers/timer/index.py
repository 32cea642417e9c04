"""Wheel and timer log together: where each waiting message is, by the time at which it is due.

Both only index the queue of the timer topic. They are opened as the positions on disk say: units that came later are cut off,
and their messages are read from the queue again. Where they do not fit together, both are made again from the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.atomic_file import make_way
from commitmq.format.timer_arrays import UNIT
from commitmq.format.timer_log import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL, UNIT_BYTES
from commitmq.format.timer_wheel import NO_POSITION, SLOTS
from commitmq.store.layout import StoreLayout
from commitmq.workers.timer.incoming import PRECISION_MS, Incoming
from commitmq.workers.timer.progress import Progress
from commitmq.workers.timer.unit_log import UnitLog
from commitmq.workers.timer.wheel import Wheel

Integers = NDArray[np.int64]


class TimerIndex:
    """See the module."""

    def __init__(self, wheel: Wheel, log: UnitLog) -> None:
        self.wheel, self.log = wheel, log
        self.on_add: Callable[[Integers, Integers], None] = lambda _hashes, _steps: None
        """Told the topics of new units, and their steps."""

    @classmethod
    def open(cls, layout: StoreLayout, file_bytes: int, progress: Progress) -> TimerIndex:
        """As ``progress`` says. Raises StoreError where wheel and log do not fit together, OSError."""
        index = cls(Wheel(layout.root / "timerwheel"), UnitLog(layout.root / "timerlog", file_bytes, progress.log_end))
        index._cut_off(progress.log_end)
        slots = index.wheel.slots
        waiting = slots[slots["time"] >= progress.read_ms // PRECISION_MS]
        index.log.check(waiting["last"].astype(np.int64), waiting["time"].astype(np.int64) * PRECISION_MS)
        # A wheel that was zeroed, or is an older copy, has no slot that is wrong. It lacks units, whose messages would wait
        # for ever.
        slots_ms, newest = index.log.newest(progress.read_ms)
        known = slots[slots_ms // PRECISION_MS % SLOTS]
        if not ((known["time"] == slots_ms // PRECISION_MS) & (known["last"] == newest)).all():
            raise StoreError("the timer wheel lacks units of the timer log", path=layout.root / "timerwheel")
        return index

    @classmethod
    def make_empty(cls, layout: StoreLayout, file_bytes: int) -> TimerIndex:
        """Without a message; what the files hold is lost. Raises OSError."""
        path, folder = layout.root / "timerwheel", layout.root / "timerlog"
        make_way(path)
        disk.unlink(path, "timerwheel", missing_ok=True)
        if folder.is_dir():
            sizes = {one.stat().st_size for one in folder.iterdir() if one.name.isdigit()}
            file_bytes = sizes.pop() if len(sizes) == 1 and min(sizes) >= 2 * UNIT_BYTES else file_bytes
            for one in filter(Path.is_file, [*folder.iterdir()]):
                disk.unlink(one, "timerlog")
        return cls(Wheel(path), UnitLog(folder, file_bytes, 0))

    def _cut_off(self, end: int) -> None:
        """Take the units behind ``end`` out of their slots, and cut the log there."""
        slots = self.wheel.slots
        for at in np.flatnonzero((slots["last"] >= end) & (slots["time"] > 0)).tolist():
            number, first, last, messages, _ = slots[at].tolist()
            later = self.log.chain(last, number * PRECISION_MS, stop=end)
            units = self.log.units(later)
            steps = self.log.steps(units["magic"].astype(np.int64))
            self.wheel.set(number, first, int(units["previous"][-1]), messages - int(steps.sum()))
        self.wheel.flush()
        self.log.cut()

    def add(self, incoming: Incoming, slots_ms: Integers, rolls: NDArray[np.bool_], write_ms: int) -> None:
        """Put the messages of ``incoming`` into the slots ``slots_ms``.

        Raises OSError; then nothing counts, and the same call may be repeated.
        """
        units = np.zeros(len(incoming), UNIT)
        positions = self.log.places(len(incoming))
        magic = np.full(len(incoming), MAGIC_DEFAULT, np.int64)
        magic |= np.where(rolls, MAGIC_ROLL, 0) | np.where(incoming.cancels, MAGIC_DELETE, 0)
        units["size"] = UNIT_BYTES
        units["magic"] = magic
        units["write_ms"] = write_ms
        units["delay_ms"] = slots_ms - write_ms
        units["physical_offset"], units["record_bytes"] = incoming.physical, incoming.sizes
        units["topic_hash"] = incoming.topic_hash
        steps = self.log.steps(magic)
        units["previous"], change_slots = self.wheel.put(slots_ms // PRECISION_MS, positions, steps)
        self.log.append(units, positions)
        change_slots()
        self.on_add(incoming.topic_hash, steps)

    def newest(self, slot_ms: int) -> int:
        """The position of the newest unit of a slot; NO_POSITION without one."""
        return self.wheel.last(slot_ms // PRECISION_MS)

    def next_slot_ms(self, from_ms: int, end_ms: int) -> int | None:
        """The first slot from ``from_ms`` on, before ``end_ms``, that has units."""
        found = self.wheel.next_used(from_ms // PRECISION_MS, end_ms // PRECISION_MS)
        return None if found is None else found * PRECISION_MS

    def flush(self) -> None:
        """Make both durable, the log first. Raises OSError."""
        self.log.flush()
        self.wheel.flush()


__all__ = ["NO_POSITION", "TimerIndex"]
