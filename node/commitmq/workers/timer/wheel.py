"""The wheel and the timer log: where each waiting message is, by the time at which it is due (spec 12.2).

:class:`TimerIndex` keeps the two together; :class:`MakingAgain` makes them again from the queue of the timer topic. The bytes
are in :mod:`commitmq.format.timer`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.atomic_file import make_way
from commitmq.files.disk import write_all
from commitmq.files.unshare import data_extents, nonzero_chunks
from commitmq.format.constants import MAGIC_FILLER
from commitmq.format.file_names import segment_name
from commitmq.format.timer import (
    FILLER_BYTES,
    MAGIC_DEFAULT,
    MAGIC_DELETE,
    MAGIC_ROLL,
    NO_POSITION,
    SLOT_BYTES,
    SLOTS,
    UNIT_BYTES,
    WHEEL_BYTES,
    encode_filler,
    last_unit_offset,
)
from commitmq.format.timer_arrays import SLOT, UNIT
from commitmq.kernels.compiled import walk_timer_chain
from commitmq.store.layout import StoreLayout
from commitmq.workers.timer.incoming import (
    NO_DELAY,
    PRECISION_MS,
    Incoming,
    Integers,
    RollKey,
    TimerQueue,
    delete_keys,
    message_key,
)
from commitmq.workers.timer.progress import TimerProgress

_PAGE_BYTES: Final = 4096
_PAGE_SLOTS: Final = _PAGE_BYTES // SLOT_BYTES
_LOOK_SLOTS: Final = 8_192


class Wheel:
    """The wheel in memory, and its file ``timerwheel`` (spec 12.2; the bytes of a slot: :mod:`commitmq.format.timer`).

    The file changes only in :meth:`Wheel.flush`, after the timer log is on the device. So a slot of the file never names a
    unit that a power cut could take.

    All slots. A slot's number is its time divided by the precision.
    """

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


Units = NDArray[np.void]

_WALK: Final = 65_536


class DamagedTimerLogError(StoreError):
    """The units are not as the wheel says: both must be rebuilt from the timer topic."""


class UnitLog:
    """The timer log on disk: units are appended, and the chain of a slot is read (spec 12.2; :mod:`commitmq.format.timer`).

    The files have holes where no unit was written yet. They are written by system calls, which say when there is no room.
    They are read through maps, but never in a hole: on a tmpfs that is full a look at one ends the process by SIGBUS.

    The files below ``timerlog/``. ``end`` is where the next unit goes, unless it does not fit into the file.
    """

    def __init__(self, folder: Path, file_bytes: int, end: int) -> None:
        """``file_bytes``: for a log without files. Raises DamagedTimerLogError for files of different sizes, OSError."""
        self._folder = folder
        self.end = end
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._whole_bytes: dict[int, int] = {}
        """How far each mapped file has no hole."""
        self._unsynced: set[int] = set()
        folder.mkdir(mode=0o750, exist_ok=True)
        sizes = {int(path.name): path.stat().st_size for path in folder.iterdir() if path.name.isdigit()}
        if len(set(sizes.values())) > 1:
            raise DamagedTimerLogError("the files of the timer log have different sizes", path=folder)
        self.file_bytes = next(iter(sizes.values()), file_bytes)
        if self.file_bytes < UNIT_BYTES + FILLER_BYTES or any(base % self.file_bytes for base in sizes):
            raise DamagedTimerLogError("the files of the timer log do not follow each other", path=folder)
        self._bases = sorted(sizes)

    # ------------------------------------------------------------ appending

    def append(self, units: Units, positions: Integers) -> None:
        """Write ``units`` at ``positions`` (of :meth:`places`). They are not durable before :meth:`flush`. Raises
        OSError; then none of them counts, and the same call may be repeated.
        """
        bases = positions - positions % self.file_bytes
        end = self.end
        for base in np.unique(bases).tolist():
            mine = np.flatnonzero(bases == base)
            start = int(positions[mine[0]])
            if start == base and end < base:
                self._fill(base - self.file_bytes, end)
            data = units[mine].tobytes()
            with self._opened(base) as fd:
                write_all(fd, data, start - base, place="timerlog.write")
            self._unsynced.add(base)
            end = start + len(data)
            if base in self._maps:
                self._whole_bytes[base] = end - base
        self.end = end

    def places(self, count: int) -> Integers:
        """Where the next ``count`` units go."""
        found: list[Integers] = []
        at = self.end
        while count:
            base = at - at % self.file_bytes
            room = max(0, (self.file_bytes - (at - base) - FILLER_BYTES) // UNIT_BYTES)
            taken = min(count, room)
            if taken:
                found.append(at + UNIT_BYTES * np.arange(taken, dtype=np.int64))
            count -= taken
            at = base + self.file_bytes
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def flush(self) -> None:
        """Make everything appended durable. Raises OSError."""
        for base in sorted(self._unsynced):
            with self._opened(base) as fd:
                disk.sync(fd, "timerlog")
        self._unsynced.clear()

    def _fill(self, base: int, end: int) -> None:
        """End the file at ``base`` with a filler at ``end``, where a reader expects a unit."""
        at = end - base
        if base in self._bases and at + FILLER_BYTES <= self.file_bytes:
            with self._opened(base) as fd:
                write_all(fd, encode_filler(self.file_bytes - at), at, place="timerlog.write")
            self._unsynced.add(base)

    def _opened(self, base: int) -> AbstractContextManager[int]:
        path = self._folder / segment_name(base)
        if base not in self._bases:
            with disk.opened(path, os.O_RDWR | os.O_CREAT, "timerlog") as fd:
                disk.resize(fd, self.file_bytes, "timerlog")
            disk.sync_folder(self._folder, "timerlog")
            self._bases = sorted({*self._bases, base})
        return disk.opened(path, os.O_RDWR, "timerlog")

    # ------------------------------------------------------------ reading

    def chain(self, position: int, slot_ms: int, stop: int = 0) -> Integers:
        """Positions of the units of a slot from the newest one, at ``position``, back to the first that is below ``stop``.

        Raises DamagedTimerLogError where a unit is not the slot's. A chain ends where its older files are deleted.
        """
        found: list[Integers] = []
        buffer: Integers = np.empty(_WALK, np.int64)
        while position >= stop and position != NO_POSITION:
            data = self._mapped(position - position % self.file_bytes)
            if data is None:
                if self._bases and position < self._bases[0]:
                    break
                raise self._damaged(position)
            base = position - position % self.file_bytes
            wrong = walk_timer_chain(data, base, position, max(stop, 0), slot_ms, buffer)
            if wrong:
                raise self._damaged(int(buffer[1]))
            found.append(buffer[2 : 2 + buffer[0]].copy())
            position = int(buffer[1])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def units(self, positions: Integers) -> Units:
        """The units at ``positions``."""
        out: Units = np.zeros(len(positions), UNIT)
        bases = positions - positions % self.file_bytes
        for base in np.unique(bases).tolist():
            data = self._mapped(base)
            if data is None:
                raise self._damaged(base)
            mine = bases == base
            whole = data[: len(data) // UNIT_BYTES * UNIT_BYTES].view(UNIT)
            numbers = (positions[mine] - base) // UNIT_BYTES
            if int(numbers.max()) >= len(whole):
                raise self._damaged(int(positions[mine].max()))
            out[mine] = whole[numbers]
        return out

    def waiting(self, from_ms: int) -> Units:
        """All units of slots from ``from_ms`` on, of the whole log."""
        return np.concatenate([np.empty(0, UNIT), *(units for _, units in self._waiting(from_ms))])

    def newest(self, from_ms: int) -> tuple[Integers, Integers]:
        """The slots (ms) from ``from_ms`` on that have units in the log, and the position of the newest unit of each."""
        slots_ms, positions = np.empty(0, np.int64), np.empty(0, np.int64)
        for at, units in self._waiting(from_ms):
            slots_ms = np.concatenate([slots_ms, units["write_ms"] + units["delay_ms"]])
            positions = np.concatenate([positions, at])
        found, last = np.unique(slots_ms[::-1], return_index=True)
        return found, positions[::-1][last]

    def _waiting(self, from_ms: int) -> Iterator[tuple[Integers, Units]]:
        """The units of slots from ``from_ms`` on, a file at a time, and their positions, which ascend. Raises
        DamagedTimerLogError where a file has no unit before its end.
        """
        for base in self._bases:
            data = self._mapped(base)
            assert data is not None
            size = max(0, min(len(data), self.end - base)) // UNIT_BYTES * UNIT_BYTES
            units = data[:size].view(UNIT)
            good = (units["size"] == UNIT_BYTES) & (units["magic"] & MAGIC_DEFAULT != 0)
            holes = np.flatnonzero(~good)
            # Only a filler may stand in the last place of a file.
            if len(holes) and (holes[0] < len(units) - 1 or units["magic"][-1] != MAGIC_FILLER):
                raise self._damaged(base + UNIT_BYTES * int(holes[0]))
            good &= units["write_ms"] + units["delay_ms"] >= from_ms
            yield base + UNIT_BYTES * np.flatnonzero(good), units[good]

    def check(self, positions: Integers, slots_ms: Integers) -> None:
        """Raise DamagedTimerLogError unless a unit of the slot ``slots_ms[i]`` lies at each of ``positions``."""
        known = positions >= (self._bases[0] if self._bases else 0)
        units = self.units(positions[known])
        good = (units["size"] == UNIT_BYTES) & (units["magic"] & MAGIC_DEFAULT != 0)
        good &= units["write_ms"] + units["delay_ms"] == slots_ms[known]
        if not good.all():
            raise self._damaged(int(positions[known][np.argmin(good)]))

    def _mapped(self, base: int) -> NDArray[np.uint8] | None:
        """The bytes of the file at ``base`` before its first hole; None without the file."""
        if base not in self._maps:
            if base not in self._bases:
                return None
            with disk.opened(self._folder / segment_name(base), os.O_RDWR, "timerlog") as fd:
                extents = data_extents(fd, 0, self.file_bytes)
                mapping: mmap.mmap = disk.map_file(fd, self.file_bytes, "timerlog", writable=False)
            self._maps[base] = np.frombuffer(mapping, np.uint8)
            self._whole_bytes[base] = extents[0][1] if extents and not extents[0][0] else 0
        return self._maps[base][: self._whole_bytes[base]]

    def _damaged(self, position: int) -> DamagedTimerLogError:
        error = DamagedTimerLogError("the timer log has no unit where its wheel says", path=self._folder)
        error.offset = position
        return error

    # ------------------------------------------------------------ cutting and deleting

    def cut(self) -> None:
        """Remove everything behind ``end``, durably: units there belong to an earlier end of the log."""
        for base in [base for base in self._bases if base >= self.end]:
            self._forget(base)
        if self._bases and self.end < self._bases[-1] + self.file_bytes:
            base = self._bases[-1]
            size = self.end - base
            with self._opened(base) as fd:
                if any(nonzero_chunks(fd, size, self.file_bytes)):
                    disk.resize(fd, size, "timerlog")
                    disk.resize(fd, self.file_bytes, "timerlog")
                    disk.sync(fd, "timerlog")
            if base in self._maps:
                self._whole_bytes[base] = min(size, self._whole_bytes[base])

    def clear(self) -> None:
        """Delete all files: the log begins at 0 again."""
        for base in list(self._bases):
            self._forget(base)
        self.end = 0

    def delete_expired(self, floor: int) -> None:
        """Delete the files before the last one whose messages all lie below ``floor`` in the CommitLog (as RocketMQ)."""
        while len(self._bases) > 1 and self._bases[0] + self.file_bytes <= self.end:
            at = self._bases[0] + last_unit_offset(self.file_bytes)
            if int(self.units(np.array([at], np.int64))["physical_offset"][0]) >= floor:
                return
            self._forget(self._bases[0])

    def _forget(self, base: int) -> None:
        self._maps.pop(base, None)
        self._unsynced.discard(base)
        disk.unlink(self._folder / segment_name(base), "timerlog", missing_ok=True)
        self._bases.remove(base)

    @property
    def is_empty(self) -> bool:
        return not self._bases

    @staticmethod
    def steps(magic: Integers) -> Integers:
        """How each unit changes its slot's count: a cancellation lowers it."""
        return np.where(magic & MAGIC_DELETE, -1, 1).astype(np.int64)


class TimerIndex:
    """Wheel and timer log together: where each waiting message is, by the time at which it is due.

    Both only index the queue of the timer topic. They are opened as the positions on disk say: units that came later
    are cut off, and their messages are read from the queue again. Where they do not fit together, both are rebuilt from
    the queue.
    """

    def __init__(self, wheel: Wheel, log: UnitLog) -> None:
        self.wheel, self.log = wheel, log
        self.on_add: Callable[[Integers, Integers], None] = lambda _hashes, _steps: None
        """Told the topics of new units, and their steps."""

    @classmethod
    def open(cls, layout: StoreLayout, file_bytes: int, progress: TimerProgress) -> TimerIndex:
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
        """Put the messages of ``incoming`` into the slots ``slots_ms``. Raises OSError; then nothing counts, and the
        same call may be repeated.
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


_CHUNK = 32_768
_SOON_MS = 60_000


class MakingAgain:
    """Makes wheel and timer log again from the queue of the timer topic: which of its messages still wait.

    A message does not wait any more when its slot was delivered, or when it rolled: then a copy of it, with the same unique
    id and time and one roll more, stands for it (spec 18). After more days than the wheel holds, the oldest slots are not
    opened any more: what waits for them is delivered at once, unless it was cancelled.

    After the clock was set back, slots come a second time. Which of their messages were delivered the first time, the progress
    says, and messages whose delay was added to a clock that was ahead move to earlier slots.

    Reads the queue once, up to its end ``until``, before the timer takes its messages a second time: first those that are
    due soon, then the others, from ``at`` on, beside its usual work.
    """

    def __init__(self, progress: TimerProgress) -> None:
        self._progress = progress
        self._replaced: set[RollKey] = set()
        self._cancelled: set[tuple[int, bytes]] = set()
        """(slot, key) of the cancellations of slots that are not opened any more; of all, when messages leave their slots."""
        self._replaced_ms = self._cancelled_slots = np.empty(0, np.int64)
        self.soon_ms = 0
        """Messages whose slots are no later go into the wheel first: until all are there, no slot behind it is opened."""
        self._soon = np.empty(0, np.int64)  # their queue offsets
        self._next_soon = self.at = self.until = 0
        self.first_overdue: int | None = None
        """The physical offset of the first message that may have been delivered, though nobody wrote it down."""

    def survey(
        self, queue: TimerQueue, bound: int, floor: int, now_ms: int, opens_ms: int, beat: Callable[[], None]
    ) -> None:
        """Look at all messages. Slots before ``opens_ms`` will not be opened."""

        def cancels(messages: Incoming) -> NDArray[np.bool_]:
            is_wanted = messages.out_ms < opens_ms if not self._progress.set_backs else np.True_
            return messages.cancels & is_wanted

        at, self.until = queue.bounds(bound, floor)
        self.at, self.soon_ms, soon = at, now_ms + _SOON_MS, [np.empty(0, np.int64)]
        while at < self.until:
            messages = queue.take(
                at, _CHUNK, bound=bound, floor=floor, with_keys=lambda one: (one.rolled > 0) | cancels(one)
            )
            if messages is None:
                break
            for key in messages.roll_keys(np.flatnonzero(messages.rolled > 0)):
                self._replaced.add(key._replace(rolled=key.rolled - 1))
            for index in np.flatnonzero(cancels(messages)).tolist():
                slot, keys = _slot(messages, index), messages.keys[index]
                self._cancelled.update((slot, key) for key in delete_keys(keys.deletes, keys.topic))
            is_open, out_ms, _ = self._open(messages)
            soon.append(messages.offsets[is_open & (out_ms <= self.soon_ms)])
            overdue = is_open & (messages.out_ms <= now_ms)
            if overdue.any() and self.first_overdue is None:
                self.first_overdue = int(messages.physical[np.argmax(overdue)])
            at = messages.behind
            beat()
        self._soon = np.concatenate(soon)
        self._replaced_ms = np.array([*{key.out_ms for key in self._replaced}], np.int64)
        self._cancelled_slots = np.array([*{slot for slot, _ in self._cancelled}], np.int64)

    def asks(self, messages: Incoming) -> NDArray[np.bool_]:
        """Of which of ``messages`` :meth:`keep_waiting` needs the keys: most are alone with their time."""
        found = np.isin(messages.out_ms, self._replaced_ms)
        found |= np.isin(messages.out_ms // PRECISION_MS, self._cancelled_slots) & ~messages.cancels
        return found

    def _open(self, messages: Incoming) -> tuple[NDArray[np.bool_], Integers, Integers]:
        """Which of ``messages`` were not delivered, and the slot and the very time of each now."""
        progress = self._progress
        out_ms, due_ms = messages.out_ms, messages.due_ms
        closed = np.zeros(len(messages), np.bool_)
        for one in progress.set_backs:
            before = messages.offsets < one.queue_offset
            closed |= before & (out_ms < np.where(due_ms <= one.due_ms, one.read_ms + PRECISION_MS, one.read_ms))
            latest_ms = one.clock_ms + messages.delay_ms
            sooner = before & (messages.delay_ms != NO_DELAY) & (latest_ms < due_ms)
            due_ms = np.where(sooner, latest_ms, due_ms)
            out_ms = np.where(sooner, latest_ms - latest_ms % PRECISION_MS, out_ms)
        return ~closed & ((messages.offsets >= progress.queue_offset) | (out_ms >= progress.read_ms)), out_ms, due_ms

    def soon(self, queue: TimerQueue, count: int, bound: int, floor: int) -> Incoming | None:
        """Of the next ``count`` messages those that wait and are due soon; None when there are no more."""
        if self._next_soon == len(self._soon):
            return None
        at = int(self._soon[self._next_soon])
        messages = queue.take(at, count, bound=bound, floor=floor, with_keys=self.asks)
        if messages is None:
            self._next_soon = len(self._soon)
            return None
        self._next_soon = int(np.searchsorted(self._soon, messages.behind))
        return self._part(messages, soon=True)

    def others(self, queue: TimerQueue, count: int, bound: int, floor: int) -> Incoming | None:
        """The same of those that are due later."""
        if self.at >= self.until:
            return None
        messages = queue.take(self.at, count, bound=bound, floor=floor, with_keys=self.asks)
        if messages is None:
            return None
        self.at = messages.behind
        return self._part(messages, soon=False)

    def _part(self, messages: Incoming, *, soon: bool) -> Incoming:
        messages.keep(messages.offsets < self.until)
        self.keep_waiting(messages)
        messages.keep((messages.out_ms <= self.soon_ms) == soon)
        return messages

    def keep_waiting(self, messages: Incoming) -> None:
        """Drop those of ``messages`` (taken with the keys that :meth:`asks` names) that do not wait any more; the others get
        their slots of now.
        """
        waiting, out_ms, due_ms = self._open(messages)
        asked = np.flatnonzero(self.asks(messages))
        for index, key in zip(asked.tolist(), messages.roll_keys(asked), strict=True):
            waiting[index] &= key not in self._replaced and not self._is_cancelled(messages, index)
        messages.out_ms, messages.due_ms = out_ms, due_ms
        messages.keep(waiting)

    def _is_cancelled(self, messages: Incoming, index: int) -> bool:
        unique, topic, _ = messages.keys[index]
        key = _slot(messages, index), message_key(topic, unique)
        return bool(unique) and not messages.cancels[index] and key in self._cancelled


def _slot(messages: Incoming, index: int) -> int:
    return int(messages.out_ms[index]) // PRECISION_MS
