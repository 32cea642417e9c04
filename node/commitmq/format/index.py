"""The shape, the header and the items of an IndexFile (spec 4.1); :mod:`commitmq.store.index.index_file` has the diagram of
the file. This module imports nothing heavy, because the supervisor inspects stores too.

An item, for one item and for arrays of items:

    offset   field                why it is there
    0        keyHash i4           of topic and key; a look-up compares it before it reads the log
    4        physical offset i8   where the record begins in the log
    12       time difference i4   seconds since the file's begin timestamp
    16       previous item i4     number of the next older item of the same slot; 0 ends the chain

The fields have numpy's names of types, so this module needs no numpy: ``numpy.dtype(ITEM_FIELDS)``.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError

HEADER_BYTES: Final = 40
SLOT_BYTES: Final = 4
ITEM_BYTES: Final = 20
SLOTS_AND_COUNT: Final = 4  # the header's fifth 8-byte word
_MASK: Final = 0xFFFF_FFFF
_NAME: Final = re.compile(r"\d{17}", re.ASCII)


def list_index_files(folder: Path) -> list[str]:
    """Names of the index files in ``folder``, oldest first; other files are skipped."""
    try:
        return sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The two numbers that give every index file of a store its size."""

    hash_slots: int
    max_items: int

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + SLOT_BYTES * self.hash_slots + ITEM_BYTES * self.max_items

    def item_position(self, number: int) -> int:
        """Byte at which item ``number`` begins."""
        return HEADER_BYTES + SLOT_BYTES * self.hash_slots + ITEM_BYTES * number


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The header's fields; time stamps in ms, offsets in bytes of the CommitLog."""

    begin_timestamp: int
    end_timestamp: int
    begin_offset: int
    end_offset: int
    slots_used: int
    count: int

    @property
    def is_empty(self) -> bool:
        """True when the file has no item."""
        return self.count <= 1


def header_of(words: memoryview) -> IndexHeader:
    """The header in ``words``, 8-byte words in host order (``cast("q")``); the newest count is read first."""
    last = host_order(words[SLOTS_AND_COUNT]) & 0xFFFF_FFFF_FFFF_FFFF
    count = last & _MASK
    # RocketMQ stores a fresh file's indexCount only with its first item.
    count = 1 if count == 0 or count >> 31 else count
    fields = [host_order(words[index]) for index in range(4)]
    return IndexHeader(fields[0], fields[1], fields[2], fields[3], last >> 32, count)


def host_order(word: int) -> int:
    """A big-endian 8-byte integer that was loaded in host order, and vice versa."""
    if sys.byteorder == "big":
        return word
    return int.from_bytes((word & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little"), "big", signed=True)


def check_file_size(path: Path, found_bytes: int, shape: IndexShape) -> None:
    """Raise StoreError unless the file has the size that the configuration gives it."""
    if found_bytes != shape.file_bytes:
        raise StoreError(
            f"the index file has {found_bytes} bytes, but index.hash_slots={shape.hash_slots} and "
            f"index.max_items={shape.max_items} make {shape.file_bytes}; open the store with the values it was "
            "written with, or delete its folder index, which is then built again",
            path=path,
        )


ITEM_STRUCT: Final = struct.Struct(">iqii")
ITEM_FIELDS: Final = [("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
