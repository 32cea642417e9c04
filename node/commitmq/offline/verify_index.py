"""Compares a store's index files with its log: every key of a record has its item, and the chains are complete.

The items of all files, one after the other, are the keys of all indexed records in the log's order (spec 4.2): their
physical offsets never fall. So each file is examined first: its header, its chains, and its *strays*, the fewest items
whose removal restores that order. The items of a piece of the log are then those between two places
(:meth:`Items.place`), and the strays with offsets there. The kernel that writes the files also makes the expected
items, and the two are compared. RocketMQ indexes the record at which a rebuild began twice; such doubles are skipped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import CommitMQError
from commitmq.format.index import HEADER_BYTES, ITEM_BYTES, ITEM_FIELDS, SLOT_BYTES, IndexShape, list_index_files
from commitmq.kernels import codes, compiled
from commitmq.kernels.compiled import check_chains, find_strays
from commitmq.offline.extents import runs
from commitmq.offline.findings import CHAINS, Faults, ItemRun, Single, StoreFinding
from commitmq.offline.held_store import StoreView
from commitmq.store.index.index_reader import MappedIndex
from commitmq.store.log.dispatch_batch import DispatchBatch

_ITEM: Final = np.dtype(ITEM_FIELDS)
_KEY: Final = np.dtype([("hash", np.int64), ("offset", np.int64)])
_SCRATCH_ITEMS: Final = 1 << 16
_MOST_CHAIN_FAULTS: Final = 100  # of a file
_MOST_STRAYS: Final = 100_000  # of a file: with more it is not an index
_DOUBLES: Final = 4096  # items searched backwards: no record has more keys


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file: its number of items, and its strays by number from 0. ``why`` is not empty when it cannot be read.

    ``least``, ``middle`` and ``most`` are physical offsets of the first, the middle and the last item that is not a
    stray.
    """

    name: str
    count: int = 0
    strays: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    least: int = 0
    middle: int = 0
    most: int = 0
    faults: Faults = field(default_factory=Faults)
    why: str = ""


@dataclass(frozen=True, slots=True)
class IndexList:
    """The readable files of an index, oldest first; ``starts`` number the items of all of them from 0, the sum last.
    ``strays`` are such numbers, in order.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    strays: NDArray[np.int64]

    @property
    def total(self) -> int:
        return self.starts[-1]

    @classmethod
    def of(cls, files: Iterable[FileReport]) -> IndexList:
        """The readable ones of ``files``, oldest first."""
        known = [one for one in files if not one.why]
        starts = list(accumulate((one.count for one in known), initial=0))
        strays = [one.strays + start for one, start in zip(known, starts, strict=False)]
        return cls(tuple(one.name for one in known), tuple(starts), np.concatenate([np.empty(0, np.int64), *strays]))


@dataclass(frozen=True, slots=True)
class FileTask:
    """A file, and the range of the log that its items may point to: ``[floor, end)``."""

    name: str
    floor: int
    end: int


def second_looks(files: Sequence[FileReport], end: int) -> dict[int, FileTask]:
    """The files that must be examined again, by number: the order must also be right from file to file. Where it is
    not, items at one file's edge are strays, which the middles of its neighbours reveal.
    """
    known = [number for number, one in enumerate(files) if one.count > len(one.strays)]
    tasks = {}
    for left, right in pairwise(known):
        if files[left].most > files[right].least:
            for number in (left, right):
                at = known.index(number)
                floor = files[known[at - 1]].middle if at else 0
                behind = files[known[at + 1]].middle + 1 if at + 1 < len(known) else end
                tasks[number] = FileTask(files[number].name, floor, behind)
    return tasks


def index_names(view: StoreView) -> list[str] | None:
    """The files to compare; None when there is no index, or it is switched off."""
    names = list_index_files(view.layout.index) if view.config.index.enable and view.layout.index.is_dir() else []
    return names or None


def _shape(view: StoreView) -> IndexShape:
    return IndexShape(view.config.index.hash_slots, view.config.index.max_items)


def check_file(view: StoreView, task: FileTask) -> FileReport:
    """Check the header, the chains and the order of one file."""
    shape = _shape(view)
    faults = Faults()
    name = task.name
    try:
        mapped = MappedIndex(view.layout.index / name, shape)
    except (CommitMQError, OSError) as error:
        return FileReport(name, faults=_unreadable(name, str(error)), why=str(error))
    count = max(1, min(mapped.header.count, shape.max_items))
    _check_chains(mapped, shape, name, count, faults)
    is_stray = np.zeros(count - 1, np.uint8)
    found = find_strays(mapped.words, shape.hash_slots, count, task.floor, task.end, is_stray)
    if found > _MOST_STRAYS:
        why = f"{found} of its {count - 1} items are out of order"
        return FileReport(name, faults=_unreadable(name, why), why=why)
    good = np.flatnonzero(is_stray == 0)
    if not len(good):
        return FileReport(name, count - 1, np.flatnonzero(is_stray), faults=faults)
    offsets = np.frombuffer(mapped.map, _ITEM, count - 1, shape.item_position(1))["offset"]
    least, middle, most = (int(offsets[one]) for one in (good[0], good[len(good) // 2], good[-1]))
    return FileReport(name, count - 1, np.flatnonzero(is_stray), least, middle, most, faults)


def _unreadable(name: str, why: str) -> Faults:
    return Faults([Single((CHAINS, name, "", 0), StoreFinding("file.unreadable", f"index/{name}", 0, 0, why))])


def _check_chains(mapped: MappedIndex, shape: IndexShape, name: str, count: int, faults: Faults) -> None:
    def tell(kind: str, offset: int, extent: int, detail: str) -> None:
        faults.add(Single((CHAINS, name, kind, offset), StoreFinding(kind, f"index/{name}", offset, extent, detail)))

    wrong_items, wrong_slots = (np.zeros((_MOST_CHAIN_FAULTS, 3), np.int64) for _ in range(2))
    out = np.zeros(3, np.int64)
    heads = np.zeros(shape.hash_slots, np.int32)
    check_chains(mapped.words, shape.hash_slots, count, heads, wrong_items, wrong_slots, out)
    header = mapped.header
    used = int(out[2])
    if header.slots_used != used:
        tell("index.header", 32, 4, f"the header counts {header.slots_used} slots in use, {used} are")
    if header.count > shape.max_items or header.count < 1:
        tell("index.header", 36, 4, f"the header counts {header.count} items")
    row: Any
    for row in wrong_items[: int(out[0])].tolist():
        detail = f"item {row[0]} leads to {row[1]}, its slot's item before it is {row[2]}"
        tell("index.chain", shape.item_position(row[0]), ITEM_BYTES, detail)
    for row in wrong_slots[: int(out[1])].tolist():
        detail = f"slot {row[0]} leads to item {row[1]}, its newest is {row[2]}"
        tell("index.chain", HEADER_BYTES + SLOT_BYTES * row[0], SLOT_BYTES, detail)


class Items:
    """The items of all files as one sequence. Raises StoreError or OSError when a file changed or has gone."""

    def __init__(self, view: StoreView, files: IndexList) -> None:
        self._folder = view.layout.index
        self._shape = _shape(view)
        self._files = files
        self._mapped: dict[int, NDArray[np.void]] = {}
        # The number of non-strays before each stray.
        self._before = files.strays - np.arange(len(files.strays))

    def _file_of(self, at: int) -> int:
        return max(0, min(bisect_right(self._files.starts, at), len(self._files.names)) - 1)

    def _of_file(self, file: int) -> NDArray[np.void]:
        items = self._mapped.get(file)
        if items is None:
            mapped = MappedIndex(self._folder / self._files.names[file], self._shape)
            count = self._files.starts[file + 1] - self._files.starts[file]
            items = np.frombuffer(mapped.map, _ITEM, count, self._shape.item_position(1))
            self._mapped[file] = items
        return items

    def _offset(self, at: int) -> int:
        file = self._file_of(at)
        return int(self._of_file(file)["offset"][at - self._files.starts[file]])

    def place(self, physical_offset: int) -> int:
        """Number of the first non-stray item at or behind ``physical_offset``; the sum if there is none. Greater
        offsets never give a smaller number.
        """
        low, high = 0, self._files.total - len(self._files.strays)
        most = high
        while low < high:
            middle = (low + high) // 2
            if self._offset(self._number(middle)) < physical_offset:
                low = middle + 1
            else:
                high = middle
        return self._number(low) if low < most else self._files.total

    def _number(self, nth: int) -> int:
        """Number of the ``nth`` non-stray item."""
        return nth + int(np.searchsorted(self._before, nth, side="right"))

    def keys(self, start: int, stop: int) -> NDArray[np.void]:
        """Items ``start`` to ``stop`` as keys."""
        parts = [np.empty(0, _KEY)]
        while start < stop:
            file = self._file_of(start)
            begin = self._files.starts[file]
            end = min(stop, self._files.starts[file + 1])
            items = self._of_file(file)[start - begin : end - begin]
            part = np.empty(len(items), _KEY)
            part["hash"], part["offset"] = items["hash"], items["offset"]
            parts.append(part)
            start = end
        return np.concatenate(parts)

    def between(self, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """Numbers and keys of the items with offsets in ``[start, end)`` of the log, including strays."""
        first, stop = self.place(start), self.place(end)
        numbers, keys = np.arange(first, stop), self.keys(first, stop)
        strays = self._files.strays
        if not len(strays):
            return numbers, keys
        is_good = ~np.isin(numbers, strays)
        stray_keys = np.concatenate([np.empty(0, _KEY), *(self.keys(one, one + 1) for one in strays.tolist())])
        is_mine = (stray_keys["offset"] >= start) & (stray_keys["offset"] < end)
        numbers = np.concatenate((numbers[is_good], strays[is_mine]))
        keys = np.concatenate((keys[is_good], stray_keys[is_mine]))
        order = np.argsort(numbers, kind="stable")
        return numbers[order], keys[order]

    def is_double(self, at: int, physical_offset: int) -> bool:
        """Whether item ``at``, equal to another one, is a double: its record's items are just before, or a file begins."""
        file = self._file_of(at)
        number = at - self._files.starts[file]
        items = self._of_file(file)["offset"]
        earlier = items[max(0, number - _DOUBLES) : number]
        return number == 0 or bool((earlier == physical_offset).any()) or int(items[0]) == physical_offset


class IndexCheck:
    """Compares the keys of one piece of the log with their items."""

    def __init__(self, view: StoreView, files: IndexList, faults: Faults) -> None:
        self._items = Items(view, files)
        self._faults = faults
        # One slot, because the chains of the scratch file are not used.
        self._scratch = np.zeros(HEADER_BYTES // 4 + 1 + 5 * _SCRATCH_ITEMS, np.int32)
        self._wanted: list[NDArray[np.void]] = [np.empty(0, _KEY)]

    def take(self, batch: DispatchBatch, segment: NDArray[np.uint8], base: int) -> None:
        """Remember the keys of the batch's records, which are in ``segment``."""
        rows = np.ascontiguousarray(batch.rows)
        rows.flags.writeable = False
        state = np.zeros(codes.STATE_WORDS, np.int64)
        state[codes.STATE_LAST_OFFSET] = -1
        result = codes.INSERT_FULL
        while result != codes.INSERT_DONE:
            state[codes.STATE_COUNT] = 1
            result = compiled.insert(self._scratch, 1, _SCRATCH_ITEMS, _SCRATCH_ITEMS, segment, base, rows, state)
            items = self._scratch[HEADER_BYTES // 4 + 1 :].view(_ITEM)[1 : int(state[codes.STATE_COUNT])]
            keys = np.empty(len(items), _KEY)
            keys["hash"], keys["offset"] = items["hash"], items["offset"]
            self._wanted.append(keys)

    def finish(self, start: int, end: int) -> None:
        """Compare them with the items of ``[start, end)`` of the log, regardless of order, which was checked before."""
        wanted = np.concatenate(self._wanted)
        numbers, have = self._items.between(start, end)
        self._wanted.clear()
        if len(wanted) == len(have) and bool((wanted == have).all()):
            return
        lacks, surplus, repeats = _difference(wanted, have, start)
        place = self._items.place
        for begin, stop in runs(lacks):
            # Missing keys are one fault as long as no item is between them.
            cuts = np.unique(np.searchsorted(wanted["offset"][begin:stop], have["offset"]))
            edges = [0, *(cut for cut in cuts.tolist() if 0 < cut < stop - begin), stop - begin]
            for low, high in pairwise(edges):
                first, last = int(wanted["offset"][begin + low]), int(wanted["offset"][begin + high - 1])
                self._faults.add(ItemRun("index.missing", place(first + 1), high - low, first, last))
        for index in np.flatnonzero(surplus & repeats).tolist():
            surplus[index] = not self._items.is_double(int(numbers[index]), int(have["offset"][index]))
        for low, high in _rows(numbers, np.flatnonzero(surplus)):
            first, last = int(have["offset"][low]), int(have["offset"][high - 1])
            self._faults.add(ItemRun("index.wrong", int(numbers[low]), high - low, first, last))


def _difference(
    wanted: NDArray[np.void], have: NDArray[np.void], start: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which keys have no item, which items no key, and which items equal one; among equals the first ones are paired."""
    codes = [((keys["offset"] - start) << 32) | (keys["hash"] & 0xFFFFFFFF) for keys in (wanted, have)]
    ranked = []
    for code in codes:
        order = np.argsort(code, kind="stable")
        in_order = code[order]
        first = np.searchsorted(in_order, in_order)  # index of its first equal
        pairs = np.empty(len(code), np.dtype([("code", np.int64), ("rank", np.int64)]))
        pairs["code"][order], pairs["rank"][order] = in_order, np.arange(len(code)) - first
        ranked.append(pairs)
    lacks, surplus = ~_contained(ranked[0], ranked[1]), ~_contained(ranked[1], ranked[0])
    return lacks, surplus, np.isin(codes[1], codes[0])


def _contained(some: NDArray[np.void], others: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of ``some`` are among ``others``; both have no duplicates."""
    both = np.concatenate((some, others))
    order = np.lexsort((both["rank"], both["code"]))
    is_equal = both[order][1:] == both[order][:-1]
    found = np.zeros(len(both), np.bool_)
    found[order[1:]] |= is_equal
    found[order[:-1]] |= is_equal
    return found[: len(some)]


def _rows(numbers: NDArray[np.int64], chosen: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """``chosen`` places in ``numbers`` as ``(start, stop)`` of stretches of consecutive numbers."""
    if len(chosen):
        cuts = np.flatnonzero((np.diff(chosen) != 1) | (np.diff(numbers[chosen]) != 1)) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(chosen)]):
            yield int(chosen[low]), int(chosen[high - 1]) + 1


def outside(view: StoreView, files: IndexList, end: int) -> Faults:
    """The items that belong to no piece: strays that point outside of the log, and all items that point behind its end."""
    items, faults = Items(view, files), Faults()
    behind = np.setdiff1d(np.arange(items.place(end), files.total), files.strays)
    offsets = [int(items.keys(at, at + 1)["offset"][0]) for at in files.strays.tolist()]
    far = [not view.bases[0] <= offset < end for offset in offsets]
    numbers = np.union1d(behind, files.strays[np.array(far, np.bool_)])
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    edges = np.union1d(cuts, np.searchsorted(numbers, files.starts))
    for low, high in pairwise([0, *(cut for cut in edges.tolist() if 0 < cut < len(numbers)), len(numbers)]):
        if low < high:
            first, last = (int(items.keys(at, at + 1)["offset"][0]) for at in (numbers[low], numbers[high - 1]))
            faults.add(ItemRun("index.wrong", int(numbers[low]), high - low, first, last))
    return faults
