"""Fixed-size files of one offset space, mapped on demand: the segments of the CommitLog (spec 1.2, 1.3).

A segment's name is the offset of its first byte, so the folder listing is the whole directory of the log. A segment is
mapped at its first access, and the least recently used map is given up first, so the number of maps is bounded for a
log of any size.

A map that is still read is never unmapped. The map itself counts its readers: every ``memoryview`` into it (including
one held by an unfinished ZeroMQ send) exports its buffer, and ``mmap.close`` raises BufferError while there is one.
Such a map is retired: it keeps serving, is reused when its segment is asked for, and a later try closes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Final

from commitmq.errors import OffsetOutOfRangeError, SegmentSizeError, StoreError
from commitmq.files import disk
from commitmq.format.file_names import segment_name

_LOOKS: Final = 3
_SEGMENT_NAME: Final = re.compile(r"\d{20}", re.ASCII)


class MappedFile:
    """One segment: ``size`` bytes that begin at ``base_offset`` of the offset space."""

    __slots__ = ("_map", "base_offset", "path", "size", "writable")

    def __init__(self, path: Path, base_offset: int, size: int, *, writable: bool = False) -> None:
        """Map ``path``. A writable map needs allocated blocks: a write into a hole on a full disk is SIGBUS. Raises
        SegmentSizeError when the file's size is not ``size``, StoreError when it cannot be opened.
        """
        self.path = path
        self.base_offset = base_offset
        self.size = size
        self.writable = writable
        try:
            fd = disk.open_file(path, os.O_RDWR if writable else os.O_RDONLY, "segment")
        except FileNotFoundError as error:
            raise OffsetOutOfRangeError("the segment is gone", path=path) from error
        except OSError as error:
            raise StoreError(f"cannot open the segment: {error.strerror}", path=path) from error
        try:
            check_size(path, os.fstat(fd).st_size, size)
            self._map = disk.map_file(fd, size, "segment", writable=writable)
        except OSError as error:
            raise StoreError(f"cannot map the segment: {error.strerror}", path=path) from error
        finally:
            os.close(fd)

    @property
    def end_offset(self) -> int:
        """Offset behind the segment's last byte."""
        return self.base_offset + self.size

    def view(self, position: int = 0, size: int | None = None) -> memoryview:
        """``size`` bytes (default: the rest) from ``position`` within the segment, without a copy. The segment stays
        mapped while the view, or anything made from it, lives.
        """
        end = self.size if size is None else position + size
        if not 0 <= position <= end <= self.size:
            raise OffsetOutOfRangeError(
                f"{end - position} bytes at {position} are not inside a segment of {self.size} bytes", path=self.path
            )
        return memoryview(self._map)[position:end]

    def advise(self, option: int, position: int = 0, size: int | None = None) -> None:
        """``madvise`` on a page-aligned part of the map."""
        self._map.madvise(option, position, self.size - position if size is None else size)

    def try_close(self) -> bool:
        """Unmap unless a view exists; True when it is unmapped."""
        try:
            self._map.close()
        except BufferError:
            return False
        return True


class MappedFileQueue:
    """The segments of one folder. Not thread-safe; every process has its own. ``max_mapped`` bounds the maps kept for
    later use; maps in use at the moment come on top and cannot be given up.
    """

    def __init__(self, folder: Path, file_bytes: int, *, max_mapped: int = 64, writable: bool = False) -> None:
        """List ``folder`` (which may be missing). Raises SegmentSizeError or StoreError, see :meth:`refresh`."""
        self.folder = folder
        self.file_bytes = file_bytes
        self.max_mapped = max_mapped
        self.writable = writable
        self._maps: OrderedDict[int, MappedFile] = OrderedDict()
        self._retired: dict[int, MappedFile] = {}
        self._bases: list[int] = []
        self._floor = 0
        self.refresh()

    def refresh(self) -> None:
        """List the folder again: segments appear while a node runs, and old ones are deleted.

        Raises SegmentSizeError for a file of another size than configured (a last file of 0 bytes was just being made
        and does not count) and StoreError for a missing segment between two others.
        """
        # A segment that is about to be deleted may still be there; it must not be mapped again.
        self._bases = [
            base for base in list_segments(self.folder, self.file_bytes) if base + self.file_bytes > self._floor
        ]
        present = set(self._bases)
        for base in [base for base in self._maps if base not in present]:
            self._retire(self._maps.pop(base))

    @property
    def bases(self) -> list[int]:
        """Offsets at which the segments begin, ascending."""
        return self._bases

    @property
    def min_offset(self) -> int:
        """Offset of the first byte of the first segment; 0 without one."""
        return self._bases[0] if self._bases else 0

    @property
    def end_offset(self) -> int:
        """Offset behind the last segment; 0 without one."""
        return self._bases[-1] + self.file_bytes if self._bases else 0

    @property
    def mapped_count(self) -> int:
        """Maps that exist, retired ones included."""
        return len(self._maps) + len(self._retired)

    def base_of(self, offset: int) -> int:
        """Base offset of the segment that holds ``offset``. Raises OffsetOutOfRangeError when there is none."""
        base = self._find(offset)
        if base is None:
            self._grow(offset)
            base = self._find(offset)
        if base is None:
            self.refresh()
            base = self._find(offset)
        if base is None:
            raise OffsetOutOfRangeError(
                f"offset {offset} is outside the log, which has [{self.min_offset}, {self.end_offset})",
                path=self.folder,
            )
        return base

    def mapped(self, offset: int) -> MappedFile:
        """The segment that holds ``offset``, mapped. Raises OffsetOutOfRangeError when there is none."""
        base = self.base_of(offset)
        found = self._maps.get(base)
        if found is not None:
            self._maps.move_to_end(base)
            return found
        found = self._retired.pop(base, None)
        if found is None:
            found = MappedFile(self.folder / segment_name(base), base, self.file_bytes, writable=self.writable)
        self._maps[base] = found
        self._give_up_surplus()
        return found

    def release_below(self, offset: int) -> int:
        """Unmap and forget every segment that ends at or below ``offset``: these are going to be deleted. Returns
        ``offset``, or the base offset of the first such segment that is still in use; then call it again.
        """
        self._floor = max(self._floor, offset)
        self._bases = [base for base in self._bases if base + self.file_bytes > offset]
        for base in [base for base in self._maps if base + self.file_bytes <= offset]:
            self._retire(self._maps.pop(base))
        self._close_retired()
        return min((base for base in self._retired if base < offset), default=offset)

    def close(self) -> None:
        """Unmap every map that is not in use; the others go with their last view."""
        for one in list(self._maps.values()) + list(self._retired.values()):
            one.try_close()
        self._maps.clear()
        self._retired.clear()

    def _grow(self, offset: int) -> None:
        """Look for the segments behind the last known one by name, up to the one that holds ``offset``.

        The cost grows with the new segments only; listing the folder costs as much as all of them. Anything irregular
        is left to :meth:`refresh`, which raises the error.
        """
        while self._bases and self.end_offset <= offset:
            if regular_size(self.folder / segment_name(self.end_offset)) != self.file_bytes:
                return
            self._bases.append(self.end_offset)

    def _find(self, offset: int) -> int | None:
        bases = self._bases
        if not bases or not bases[0] <= offset < bases[-1] + self.file_bytes:
            return None
        return bases[(offset - bases[0]) // self.file_bytes]

    def _close_retired(self) -> None:
        for base in [base for base, one in self._retired.items() if one.try_close()]:
            del self._retired[base]

    def _give_up_surplus(self) -> None:
        self._close_retired()
        while len(self._maps) > self.max_mapped:
            self._retire(self._maps.popitem(last=False)[1])

    def _retire(self, one: MappedFile) -> None:
        if not one.try_close():
            self._retired[one.base_offset] = one


def list_segments(folder: Path, file_bytes: int) -> list[int]:
    """Base offsets of the segments in ``folder``, ascending; sub-folders and other names are skipped. Raises
    SegmentSizeError and StoreError as :meth:`MappedFileQueue.refresh` says.
    """
    sizes = list_sizes(folder, file_bytes)
    if sizes and sizes[-1][1] == 0:
        sizes.pop()
    is_right_size = any(size == file_bytes for _, size in sizes)
    for index, (base, size) in enumerate(sizes):
        if size < file_bytes and is_right_size:
            raise SegmentSizeError(
                f"the segment was cut short: it has {size} bytes, the others {file_bytes}. Put back a copy of it, or "
                f"look at the report of `commitmq store repair {folder.parent}`",
                path=folder / segment_name(base),
            )
        check_size(folder / segment_name(base), size, file_bytes)
        if base != sizes[0][0] + index * file_bytes:
            expected = sizes[0][0] + index * file_bytes
            raise StoreError(f"segment {segment_name(expected)} is missing before {segment_name(base)}", path=folder)
    return [base for base, _ in sizes]


def list_sizes(folder: Path | str, file_bytes: int) -> list[tuple[int, int]]:
    """``(base offset, size)`` of each file in ``folder`` that is named like a segment, ascending; empty without the
    folder.

    Other processes make and delete files in the meantime, and a folder listing is no atomic snapshot: it may contain a
    file and lack one that was made before it. So a file missing between two others is looked for by name. If it does
    not exist, perhaps the oldest files were being deleted, and the folder is listed again.
    """
    sizes: list[tuple[int, int]] = []
    for _ in range(_LOOKS):
        found: dict[int, int] = {}
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _SEGMENT_NAME.fullmatch(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            if stat.S_ISREG(status.st_mode):
                                found[int(entry.name)] = status.st_size
        except FileNotFoundError:
            return []
        if not found:
            return []
        expected = range(min(found), max(found), file_bytes)
        if len(found) <= len(expected):
            for base in (base for base in expected if base not in found):
                size = regular_size(Path(folder) / segment_name(base))
                if size is None:
                    break  # missing, or being deleted; the other files need no check
                found[base] = size
        sizes = sorted(found.items())
        if len(sizes) == len(expected) + 1:
            break
    return sizes


def regular_size(path: Path) -> int | None:
    """Size of the regular file at ``path``; None when there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def check_size(path: Path, found_bytes: int, configured_bytes: int) -> None:
    """Raise SegmentSizeError with both sizes unless the file has the configured one."""
    if found_bytes != configured_bytes:
        raise SegmentSizeError(
            f"the file has {found_bytes} bytes, but {configured_bytes} bytes are configured for it; "
            "open the store with the size it was written with",
            path=path,
        )
