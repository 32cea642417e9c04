"""The sizes of a store's files, as the store itself shows them; the sizes have the configuration's names.

    commit_log.segment_bytes          length of the segments; their names must be one length apart
    consume_queue.file_bytes          length of most of the examined files, because one of them may be damaged
    consume_queue.batch_file_bytes    the same, of BatchCQ topics
    consume_queue.ext_file_bytes      the same, of extensions
    index.hash_slots, max_items       by the positions of items

RocketMQ makes every file at its full size (spec 1.3), so a file's length is its size, and a file of 0 bytes is just
being made. Only for the index do the files override the sizes in ``commitmq/store.json``, where their items show other
ones: the index is derived, and RocketMQ or an administrator may have rebuilt it. Index files that show nothing are
torn, and the node makes them again. A CommitLog or queues of other sizes than ``store.json`` has are
another store's files, or were cut short.

No field of an index file states its numbers of hash slots and of items. A file has 40 + 4 slots + 20 items bytes (spec
4.1), which many pairs of numbers give. The positions of the items tell which pair it is: item ``n`` is at 40 + 4 slots
+ 20 n, and slot ``keyHash % slots`` holds an item of the same chain, ``n`` or a newer one. A wrong pair meets zeros or
chains of other keys within a few items. The newest item is searched by its physical offset, which the header has too;
and because all pairs of one length differ by 5 slots for each item, it is on a known grid of 20 bytes.

A power cut may leave a header whose items never reached the device. So a store that remembers its own shape
(``commitmq/store.json``) keeps it unless items show another one: its torn files are rebuilt.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.files.mapped_file import list_sizes
from commitmq.format.constants import BATCH_UNIT_BYTES, UNIT_BYTES
from commitmq.format.index import (
    HEADER_BYTES,
    ITEM_BYTES,
    ITEM_STRUCT,
    SLOT_BYTES,
    IndexHeader,
    IndexShape,
    header_of,
    list_index_files,
)
from commitmq.store.access import refusals_told
from commitmq.store.layout import StoreLayout
from commitmq.store.store_file import StoreFile

_SAMPLES: Final = 256
_OFFSET: Final = struct.Struct(">q")
_OFFSET_AT: Final = 4  # in an item, behind its hash
_SLOT: Final = struct.Struct(">i")
_SLOTS_A_ITEM: Final = ITEM_BYTES // SLOT_BYTES
_NOT_ZERO: Final = re.compile(rb"[^\0]")
_MOST_CANDIDATES: Final = 10_000
# RocketMQ's proportion, for files without items.
_ITEMS_A_SLOT: Final = 4


@dataclass(frozen=True, slots=True)
class FoundShape:
    """``shape`` is None without files, or if it cannot be told; ``file`` has that shape. ``problem``: why some do not.
    ``is_shown``: items of ``file`` show the shape. Else it is only one of the shapes of that length.
    """

    shape: IndexShape | None = None
    file: str = ""
    problem: str = ""
    is_shown: bool = False


def find_shape(folder: Path, likely: Iterable[IndexShape]) -> FoundShape:
    """The shape of the index files in ``folder``, or of most of them if they differ. Shapes in ``likely`` are tried
    before a search. Changes nothing.
    """
    try:
        sizes = {name: (folder / name).stat().st_size for name in list_index_files(folder)}
        # A power cut leaves a file of 0 bytes when the file was being made; the index deletes it.
        sizes = {name: size for name, size in sizes.items() if size}
        if not sizes:
            return FoundShape()
        lengths = Counter(sizes.values())
        length = lengths.most_common(1)[0][0]
        each = ", ".join(f"{count} of {size} bytes" for size, count in lengths.most_common())
        problem = f"the files in {folder} differ in size ({each})" if len(lengths) > 1 else ""
        names = [name for name, size in sizes.items() if size == length]
        shape, name, is_shown = _shape_of_some(folder, names, length, likely)
        if shape is None:
            problem = (
                problem or f"hash slots and items of the files in {folder}, of {length} bytes each, cannot be told"
            )
        return FoundShape(shape, name, problem, is_shown)
    except OSError as error:
        return FoundShape(problem=f"the files in {folder} cannot be read: {error.strerror}")


def _shape_of_some(
    folder: Path, names: list[str], length: int, likely: Iterable[IndexShape]
) -> tuple[IndexShape | None, str, bool]:
    """The shape that one of the files ``names`` shows, its name, and True; if all are empty, any shape that fits."""
    candidates = [shape for shape in dict.fromkeys(likely) if shape.file_bytes == length]
    empty = True
    for name in names:
        with open(folder / name, "rb") as file:
            header = _header(file.fileno())
            empty = empty and header.is_empty
            shape = None if header.is_empty else _shape_of(file.fileno(), length, header, candidates)
        if shape is not None:
            return shape, name, True
    return (next(iter(candidates), None) or _by_proportion(length) if empty else None), names[0], False


def _shape_of(fd: int, length: int, header: IndexHeader, candidates: list[IndexShape]) -> IndexShape | None:
    """The shape that the items of one file show; None where no shape fits."""
    for shape in candidates:
        if fits(fd, shape, header):
            return shape
    words = (length - HEADER_BYTES) // SLOT_BYTES
    odd = words % _SLOTS_A_ITEM  # slots are so many more than a multiple of five
    start = HEADER_BYTES + SLOT_BYTES * odd
    rows = (length - start) // ITEM_BYTES
    if length < start + 2 * ITEM_BYTES or (length - HEADER_BYTES) % SLOT_BYTES:
        return None
    with mmap.mmap(fd, length, access=mmap.ACCESS_READ) as data:
        for at, row in enumerate(_rows_of_offset(data, header.end_offset, start)):
            if at >= _MOST_CANDIDATES:
                break
            # A writer that was killed between an item and the header's end may be one item ahead.
            for number in (header.count - 1, header.count, header.count - 2):
                before = row - number  # rows that are slots
                shape = IndexShape(odd + before * _SLOTS_A_ITEM, rows - before)
                if number >= 1 and shape.hash_slots >= 1 and fits(fd, shape, header):
                    return shape
    return None


def _rows_of_offset(data: mmap.mmap, offset: int, start: int) -> Iterator[int]:
    """Rows of 20 bytes from ``start`` on that may be items of the record at ``offset``, ascending."""
    if offset <= 0:
        # The record at the log's very begin: its items are zeros except for their hashes and the previous items in a
        # chain.
        rows = ((found.start() - start) // ITEM_BYTES for found in _NOT_ZERO.finditer(data, start))
        yield from dict.fromkeys(rows)
        return
    wanted = _OFFSET.pack(offset)
    at = data.find(wanted, start + _OFFSET_AT)
    while at >= 0:
        row, beside = divmod(at - _OFFSET_AT - start, ITEM_BYTES)
        if not beside:
            yield row
        at = data.find(wanted, at + 1)


def fits(fd: int, shape: IndexShape, header: IndexHeader) -> bool:
    """Whether a sample of the items that the header counts are valid items under this shape; False for a file without."""
    newest = header.count - 1
    if newest < 1 or newest >= shape.max_items or header.slots_used > shape.hash_slots:
        return False
    before = -1
    for number in sorted({1 + at * (newest - 1) // _SAMPLES for at in range(_SAMPLES + 1)}):
        data = os.pread(fd, ITEM_BYTES, shape.item_position(number))
        if len(data) < ITEM_BYTES:
            return False
        hashed, offset, _, previous = ITEM_STRUCT.unpack(data)
        if hashed < 0 or not before <= offset or not 0 <= previous < number:
            return False
        slot = os.pread(fd, SLOT_BYTES, HEADER_BYTES + SLOT_BYTES * (hashed % shape.hash_slots))
        if len(slot) < SLOT_BYTES or not number <= _SLOT.unpack(slot)[0] < shape.max_items:
            return False
        before = offset
    return True


def _by_proportion(length: int) -> IndexShape | None:
    """A shape of this length with about four items for each slot; None when no shape has this length."""
    most = (length - HEADER_BYTES) // (SLOT_BYTES + _ITEMS_A_SLOT * ITEM_BYTES)
    for slots in range(most, max(0, most - _SLOTS_A_ITEM), -1):
        shape = IndexShape(slots, (length - HEADER_BYTES - SLOT_BYTES * slots) // ITEM_BYTES)
        if shape.file_bytes == length:
            return shape
    return None


def _header(fd: int) -> IndexHeader:
    return header_of(memoryview(os.pread(fd, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")).cast("q"))


SEGMENT: Final = "commit_log.segment_bytes"
QUEUE_FILE: Final = "consume_queue.file_bytes"
BATCH_FILE: Final = "consume_queue.batch_file_bytes"
EXT_FILE: Final = "consume_queue.ext_file_bytes"
HASH_SLOTS: Final = "index.hash_slots"
MAX_ITEMS: Final = "index.max_items"
INDEX: Final = (HASH_SLOTS, MAX_ITEMS)
SIZES: Final = (SEGMENT, QUEUE_FILE, BATCH_FILE, EXT_FILE, *INDEX)

_UNIT_BYTES: Final = {QUEUE_FILE: UNIT_BYTES, BATCH_FILE: BATCH_UNIT_BYTES, EXT_FILE: 1}
_MOST_FILES: Final = 1_000  # of each kind of queue: examining 100,000 would take too long
_ROCKETMQ_SHAPE: Final = IndexShape(5_000_000, 20_000_000)


@dataclass(frozen=True, slots=True)
class Geometry:
    """``found``: the sizes that the files show; ``shown_by``: one such file for each. ``remembered``: the sizes in
    store.json.

    ``forgotten`` says why ``remembered`` is missing although there is a store; "" when all is well or the store is new.
    ``index_problem`` says why the index files cannot be used.
    """

    found: Mapping[str, int]
    shown_by: Mapping[str, str]
    remembered: StoreFile | None
    forgotten: str = ""
    index_problem: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the store: remembered, else found. A size known from neither is missing."""
        remembered = {} if self.remembered is None else dict(self.remembered.sizes)
        return {**self.found, **remembered, **{key: self.found[key] for key in INDEX if key in self.found}}

    def disagreements(self, confirmed: Collection[str] = ()) -> list[str]:
        """Clauses of a message: files whose size differs from the remembered one, except those of ``confirmed``, and
        those that the node makes up for.
        """
        if self.remembered is None:
            return []
        return [
            f"the store remembers {key}={size}, but {self.shown_by[key]} has {self.found[key]} bytes"
            for key, size in self.remembered.sizes.items()
            if key not in (*INDEX, EXT_FILE) and key not in confirmed and self.found.get(key, size) != size
        ]


@dataclass(slots=True)
class _Finds:
    sizes: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def note(self, key: str, size: int, file: str) -> None:
        self.sizes[key], self.files[key] = size, file


def look(layout: StoreLayout, *, index: bool = True, likely: Iterable[IndexShape] = ()) -> Geometry:
    """Read the store's sizes from its files. Changes nothing and does not raise for damage: opening the files does
    that.

    ``index``: whether to examine the index. ``likely``: shapes that its files may have, tried first. Raises StoreError
    where this account lacks permission.
    """
    with refusals_told(layout.root):
        return _look(layout, index, likely)


def _look(layout: StoreLayout, index: bool, likely: Iterable[IndexShape]) -> Geometry:
    remembered, forgotten = None, ""
    try:
        remembered = StoreFile.load(layout.store_file)
    except ValueError as error:
        forgotten = f"{layout.store_file} is damaged ({error})"
    finds = _Finds()
    _look_at_log(layout.commit_log, finds)
    for key, folder in (
        (QUEUE_FILE, layout.consume_queue),
        (BATCH_FILE, layout.batch_consume_queue),
        (EXT_FILE, layout.consume_queue_ext),
    ):
        _look_at_queues(folder, key, finds, None if remembered is None else remembered.sizes.get(key))
    problem = ""
    if index:
        known = {} if remembered is None else remembered.sizes
        own = [IndexShape(known[HASH_SLOTS], known[MAX_ITEMS])] if all(key in known for key in INDEX) else []
        shape = find_shape(layout.index, [*own, *likely, _ROCKETMQ_SHAPE])
        # The node's own files are rebuilt where they are torn; only files of an unknown shape are left to an operator.
        problem = "" if own else shape.problem
        if shape.shape is not None and (shape.is_shown or not own or shape.shape in own):
            finds.note(HASH_SLOTS, shape.shape.hash_slots, f"{layout.index / shape.file}")
            finds.note(MAX_ITEMS, shape.shape.max_items, f"{layout.index / shape.file}")
    if remembered is None and not forgotten and SEGMENT in finds.sizes:
        forgotten = f"there is no {layout.store_file}"
    return Geometry(finds.sizes, finds.files, remembered, forgotten, problem)


def _look_at_log(folder: Path, finds: _Finds) -> None:
    files = [(base, size) for base, size in list_sizes(folder, 1) if size]
    if not files:
        return
    size = Counter(size for _, size in files).most_common(1)[0][0]
    if len(files) > 1:
        # Of two lengths, take the distance of the names: a segment may have been cut short, but its name is right.
        apart = min(after - before for (before, _), (after, _) in itertools.pairwise(files))
        if any(one == apart for _, one in files):
            size = apart
    base = next(base for base, one in files if one == size)
    finds.note(SEGMENT, size, str(folder / f"{base:020d}"))


def _look_at_queues(folder: Path, key: str, finds: _Finds, wanted: int | None) -> None:
    """The most frequent length that holds whole units; of two equally frequent ones, ``wanted``."""
    lengths: Counter[int] = Counter()
    files: dict[int, str] = {}
    for number, (path, size) in enumerate(_queue_files(folder)):
        if number >= _MOST_FILES:
            break
        if size and size % _UNIT_BYTES[key] == 0:
            lengths[size] += 1
            files.setdefault(size, path)
    if lengths:
        size = max(lengths, key=lambda one: (lengths[one], one == wanted))
        finds.note(key, size, files[size])


def _queue_files(folder: Path) -> Iterator[tuple[str, int]]:
    """``(path, size)`` of files ``topic/queue/20 digits`` below ``folder``."""
    for topic in _scan(folder):
        for queue in _scan(topic.path):
            for file in _scan(queue.path):
                if len(file.name) == 20 and file.name.isascii() and file.name.isdigit():
                    try:
                        yield file.path, file.stat().st_size
                    except FileNotFoundError:
                        continue  # expired in the meantime, in a store with a running node


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
