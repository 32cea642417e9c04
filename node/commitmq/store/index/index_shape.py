"""Finds the number of hash slots and of items of index files from the files themselves: no field in them states it.

A file has 40 + 4 slots + 20 items bytes (spec 4.1), which many pairs of numbers give. The positions of the items tell
which pair it is: item ``n`` is at 40 + 4 slots + 20 n, and slot ``keyHash % slots`` holds an item of the same chain,
``n`` or a newer one. A wrong pair meets zeros or chains of other keys within a few items. The newest item is searched
by its physical offset, which the header has too; and because all pairs of one length differ by 5 slots for each item,
it is on a known grid of 20 bytes.

A power cut may leave a header whose items never reached the device. So a store that remembers its own shape
(``commitmq/store.json``) keeps it unless items show another one: its torn files are made again.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.format.index_header import (
    HEADER_BYTES,
    ITEM_BYTES,
    SLOT_BYTES,
    IndexHeader,
    IndexShape,
    header_of,
    list_index_files,
)
from commitmq.format.index_item import ITEM_STRUCT

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
