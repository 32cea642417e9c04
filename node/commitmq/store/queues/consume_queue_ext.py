"""Extension units of a queue: the data that does not fit a ConsumeQueue unit (spec 3.8).

    0    size i2               of the whole unit, 20 to 32,767
    2    tags code i8          the value that the ConsumeQueue unit would have without the extension
    10   store timestamp i8    ms; tells whether a bit map is younger than a subscription
    18   bit map size i2       bytes that follow
    20   bit map               a Bloom filter of the subscriptions that match the message (see commitmq.format.bloom)

Files are under ``consumequeue_ext/<topic>/<queue>``. Units never cross a file's end: where the next unit and 4 more
bytes do not fit, an i2 of -1 ends the file. The ConsumeQueue unit's tags code then holds the extension unit's
*address*: its logical byte with the sign bit set. Every value below the range of 32-bit hashes is an address.

The extension is only a hint: an address that leads nowhere means "read the record". Extension units that no
ConsumeQueue unit points to (a crash came between the two) are skipped. One ConsumeQueue may mix both kinds of units,
when the extension was switched on or off in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import SegmentSizeError, StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.files.mapped_file import list_sizes
from commitmq.format.bloom import BITMAP_BYTES
from commitmq.format.file_names import segment_name
from commitmq.store.queues.queue_files import QueueFiles

HEAD: Final = np.dtype([("size", ">i2"), ("tags_code", ">i8"), ("store_timestamp", ">i8"), ("bitmap_size", ">i2")])
HEAD_BYTES: Final = HEAD.itemsize
MAX_UNIT_BYTES: Final = 32_767
END_BYTES: Final = 4
MAX_ADDRESS: Final = -(1 << 31) - 1
"""The greatest value that is an address: hashes of tags occupy the range above."""

_SIGN: Final = np.int64(-(1 << 63))
_END_MARK: Final = b"\xff\xff"
_SCAN_BYTES: Final = 1 << 18
# Addresses further apart than this are read one by one: at most one unit is between neighbours.
_NEAR_BYTES: Final = 1 << 16


def is_address(code: int) -> bool:
    """Whether a ConsumeQueue unit's tags code points to an extension unit."""
    return code <= MAX_ADDRESS


def offset_of(address: int) -> int:
    """The logical byte of the extension unit that ``address`` names."""
    return address + (1 << 63)


def address_of(offset: int) -> int:
    """The address of the extension unit at logical byte ``offset``."""
    return offset - (1 << 63)


class ConsumeQueueExt(QueueFiles):
    """Extension units of one queue, as the writer sees them. Call :meth:`recover` before use."""

    __slots__ = ()

    unit_bytes: ClassVar[int] = 1
    place: ClassVar[str] = "queue_ext"

    def __init__(self, folder: Path | str, file_bytes: int, fds: FdCache | None = None) -> None:
        """``file_bytes`` must hold the largest unit that CommitMQ writes."""
        super().__init__(folder, file_bytes, fds)
        if file_bytes < HEAD_BYTES + BITMAP_BYTES + END_BYTES:
            raise ValueError(f"an extension file of {file_bytes} bytes cannot hold a unit")

    @property
    def end(self) -> int:
        """Logical byte of the next unit, unless the unit does not fit into its file."""
        return self._end

    def _list_files(self, *, repair: bool, limit: int | None = None) -> list[int]:
        """As every queue's; with ``repair`` the files go when one of them has another size: they are hints."""
        try:
            return super()._list_files(repair=repair, limit=limit)
        except SegmentSizeError:
            if not repair:
                raise
            for base, _ in reversed(list_sizes(self.folder, self.file_bytes)):
                self._delete(base)
            return []

    def recover(self) -> None:
        """Find the end of the valid units, and clear away everything behind it. Units behind a missing file are
        useless: no unit of the queue points behind an extension unit that was not synced.
        """
        bases = self._list_files(repair=True, limit=0)
        self._first, self._end = (bases[0], bases[-1]) if bases else (-1, 0)
        if bases:
            self._end = self._valid_until(bases[-1])
            if self._end == bases[-1] and len(bases) > 1:
                bases.remove(self._end)  # made for a unit that was never written
                self._delete(self._end)
            self._cut(bases)

    def _valid_until(self, base: int) -> int:
        """Logical byte behind the last valid unit of one file; the next file's begin if this file was ended."""
        position = 0
        buffer, begin = b"", 0
        while position + 2 <= self.file_bytes:
            if position + 2 - begin > len(buffer):
                begin, buffer = position, self._pread(base, position, min(_SCAN_BYTES, self.file_bytes - position))
            mark = buffer[position - begin : position - begin + 2]
            if mark == _END_MARK:
                return base + self.file_bytes
            size = int.from_bytes(mark, "big", signed=True)
            if size < HEAD_BYTES or position + size > self.file_bytes - END_BYTES:
                break
            position += size
        return base + position

    def truncate_behind(self, address: int) -> bool:
        """Remove everything behind the unit at ``address``, the last one that a ConsumeQueue unit points to; durably.

        If that unit is missing, the extension units are lost. Then everything is deleted, and the next unit begins a
        file behind ``address``: an old address must never lead to a new message's unit. Returns whether it was there.
        """
        at = offset_of(address)
        base = at - at % self.file_bytes
        mark = self._pread(base, at - base, 2) if self._first >= 0 and self._first <= at < self._end else b""
        size = int.from_bytes(mark, "big", signed=True)
        bases = self._list_files(repair=True, limit=0)
        if size < HEAD_BYTES:
            self._forget(bases)
            self._end = base + self.file_bytes
            return False
        self._end = at + size
        self._cut(bases)
        return True

    def delete_below(self, address: int) -> int:
        """Delete the files, never the last one, that are wholly below the unit at ``address``; returns their number."""
        deleted = 0
        while 0 <= self._first < self._end - self.file_bytes and self._first + self.file_bytes <= offset_of(address):
            self._delete(self._first)
            self._first += self.file_bytes
            deleted += 1
        return deleted

    def append(
        self,
        tags_codes: NDArray[np.int64],
        store_timestamps: NDArray[np.int64],
        bitmaps: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.int64]:
        """Append one unit for each of ``tags_codes``; returns their addresses.

        ``bitmaps`` has one row of bytes for each unit. Not durable before :meth:`flush`, which must come before the
        flush of the ConsumeQueue that gets the addresses. Raises DiskFullError or StoreError.
        """
        count = len(tags_codes)
        size = HEAD_BYTES + (0 if bitmaps is None else bitmaps.shape[1])
        if size > MAX_UNIT_BYTES or size + END_BYTES > self.file_bytes:
            raise StoreError(f"an extension unit of {size} bytes is too large", path=self.folder)
        units = np.zeros((count, size), np.uint8)
        heads = np.empty(count, HEAD)
        heads["size"], heads["bitmap_size"] = size, size - HEAD_BYTES
        heads["tags_code"], heads["store_timestamp"] = tags_codes, store_timestamps
        units[:, :HEAD_BYTES] = heads.view(np.uint8).reshape(count, HEAD_BYTES)
        if bitmaps is not None:
            units[:, HEAD_BYTES:] = bitmaps
        addresses = np.empty(count, np.int64)
        done = 0
        while done < count:
            position = self._end % self.file_bytes
            fitting = (self.file_bytes - position - END_BYTES) // size
            if fitting <= 0:
                self._write_at(self._end, _END_MARK)
                self._end += self.file_bytes - position
                continue
            taken = min(fitting, count - done)
            self._write_at(self._end, units[done : done + taken].data.cast("B"))
            if self._first < 0:
                self._first = self._end
            addresses[done : done + taken] = (self._end + size * np.arange(taken)) ^ _SIGN
            self._end += taken * size
            done += taken
        return addresses


@dataclass(frozen=True, slots=True)
class Extensions:
    """The extension's data for some ConsumeQueue units, one row each. ``codes`` are the units' real tags codes, or
    still the address if it led nowhere. ``bitmaps`` is valid where ``has_bitmap`` is set.
    """

    codes: NDArray[np.int64]
    bitmaps: NDArray[np.uint8]
    has_bitmap: NDArray[np.bool_]


class ExtensionReader:
    """Looks up addresses; owns nothing. ``folder`` is ``consumequeue_ext/``."""

    def __init__(self, folder: Path, file_bytes: int, fds: FdCache) -> None:
        self._folder = os.fspath(folder)
        self._file_bytes = file_bytes
        self._fds = fds

    def resolve(self, queue: str, codes: NDArray[np.int64]) -> Extensions | None:
        """The extension units of ``queue`` (``topic/number``) that ``codes`` point to; None when no code does. Raises
        StoreError when a file cannot be read.
        """
        rows = np.flatnonzero(codes <= MAX_ADDRESS)
        if not len(rows):
            return None
        found = codes.copy()
        bitmaps = np.zeros((len(codes), BITMAP_BYTES), np.uint8)
        has_bitmap = np.zeros(len(codes), np.bool_)
        offsets = codes[rows] ^ _SIGN
        for part in self._runs(offsets):
            at = offsets[part]
            first = int(at[0])
            data = self._pread(queue, first, int(at[-1]) - first + HEAD_BYTES + BITMAP_BYTES)
            starts = at - first
            inside = starts + HEAD_BYTES <= len(data)
            starts, places = starts[inside], rows[part][inside]
            if not len(starts):
                continue
            heads: Any = data[starts[:, None] + np.arange(HEAD_BYTES)].view(HEAD)[:, 0]
            sizes = heads["bitmap_size"].astype(np.int64)
            good = (sizes >= 0) & (heads["size"] == HEAD_BYTES + sizes)
            found[places[good]] = heads["tags_code"][good]
            mapped = good & (sizes == BITMAP_BYTES) & (starts + HEAD_BYTES + BITMAP_BYTES <= len(data))
            bitmaps[places[mapped]] = data[starts[mapped][:, None] + np.arange(HEAD_BYTES, HEAD_BYTES + BITMAP_BYTES)]
            has_bitmap[places[mapped]] = True
        return Extensions(found, bitmaps, has_bitmap)

    def _runs(self, offsets: NDArray[np.int64]) -> Iterator[slice]:
        """Slices of offsets that increase in small steps within one file."""
        files = offsets // self._file_bytes
        steps = np.diff(offsets)
        breaks = np.flatnonzero((files[1:] != files[:-1]) | (steps < 0) | (steps > _NEAR_BYTES)) + 1
        edges = [0, *breaks.tolist(), len(offsets)]
        for start, stop in pairwise(edges):
            yield slice(start, stop)

    def _pread(self, queue: str, at: int, size: int) -> NDArray[np.uint8]:
        base = at - at % self._file_bytes
        try:
            fd = self._fds.read_fd(f"{self._folder}/{queue}/{segment_name(base)}")
            data = os.pread(fd, min(size, base + self._file_bytes - at), at - base)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise StoreError(f"cannot read the queue's extension: {error.strerror}", path=queue, offset=at) from error
        return np.frombuffer(data, np.uint8)
