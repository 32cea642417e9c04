"""The read side of the CommitLog: one offset space of records in segments of equal size (spec 2).

Records never straddle segments; every segment except the last ends with a filler (spec 2.11). A walk ends in one of
three ways:

    end of log        zeros where the next record would start, and nothing behind them
    torn tail         something invalid in the last segment that was written to: a crash cut the last append
    corruption        something invalid with valid records in a later segment behind it

The end of the log is silent; a torn tail raises TornTailError, corruption raises its base CorruptRecordError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError
from commitmq.files.mapped_file import MappedFile, MappedFileQueue
from commitmq.format.constants import (
    FILLER_BYTES,
    MAGIC_FILLER,
    MAGIC_V1,
    MAGIC_V2,
    MIN_RECORD_BYTES,
    SYS_FLAG_OFFSET,
    SysFlag,
)
from commitmq.format.record import Record, decode_record, peek

_LONG: Final = struct.Struct(">q")
_INT: Final = struct.Struct(">i")


class TornTailError(CorruptRecordError):
    """The log ends in an incomplete record; everything before it is whole."""


class CommitLog:
    """The log in ``folder``. Reads only; the writer appends through its own maps. Not thread-safe."""

    def __init__(
        self, folder: Path, segment_bytes: int, max_mapped: int = 64, *, files: MappedFileQueue | None = None
    ) -> None:
        """Raises SegmentSizeError when a segment's size is not ``segment_bytes``, StoreError for a missing segment.
        ``files``: the segments, where something other than the folder's listing determines which exist.
        """
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.files = MappedFileQueue(folder, segment_bytes, max_mapped=max_mapped) if files is None else files

    @property
    def min_offset(self) -> int:
        """Smallest physical offset whose segment exists; 0 for an empty log."""
        return self.files.min_offset

    @property
    def end_offset(self) -> int:
        """Offset behind the last segment file: a bound, not the end of what was written."""
        return self.files.end_offset

    def segments(self) -> list[int]:
        """Physical offsets at which the segments begin, ascending, as of the last listing of the folder."""
        return self.files.bases

    def refresh(self) -> None:
        """List the folder again. Reads beyond the known segments do that by themselves."""
        self.files.refresh()

    def release_below(self, offset: int) -> int:
        """Unmap segments that end at or below ``offset``, the new minimum; see :meth:`MappedFileQueue.release_below`."""
        return self.files.release_below(offset)

    def segment(self, offset: int) -> MappedFile:
        """The mapped segment that holds ``offset``. Raises OffsetOutOfRangeError."""
        return self.files.mapped(offset)

    def read(self, offset: int, size: int) -> memoryview:
        """``size`` bytes at physical ``offset``, without a copy; they must be in one segment. The segment stays mapped
        while the view lives. Raises OffsetOutOfRangeError.
        """
        segment = self.files.mapped(offset)
        return segment.view(offset - segment.base_offset, size)

    def record(self, offset: int, *, check_crc: bool = True) -> Record:
        """The record at ``offset``. Raises OffsetOutOfRangeError or CorruptRecordError (with segment and position)."""
        segment = self.files.mapped(offset)
        return _decode(segment, offset - segment.base_offset, check_crc)

    def store_timestamp(self, offset: int, size: int) -> int:
        """Store time (ms) of the record at ``offset`` that has ``size`` bytes according to its ConsumeQueue unit; -1
        when no such record can be read (spec 3.7).
        """
        if size < MIN_RECORD_BYTES:
            return -1
        try:
            view = self.read(offset, size)
        except OffsetOutOfRangeError:
            return -1
        found_size, magic = peek(view)
        if found_size != size or magic not in (MAGIC_V1, MAGIC_V2):
            return -1
        sys_flag = _INT.unpack_from(view, SYS_FLAG_OFFSET)[0]
        return int(_LONG.unpack_from(view, 68 if sys_flag & SysFlag.BORN_HOST_V6 else 56)[0])

    def iter_spans(self, start: int | None = None, end: int | None = None) -> Iterator[tuple[int, int]]:
        """``(physical offset, total size)`` of each record in ``[start, end)``; fillers are skipped.

        ``start`` (default: the log's minimum) must be the start of a record or filler. Without ``end`` the walk stops
        at the end of the log; with it, everything below must exist. Only size and magic are checked. Raises
        TornTailError or CorruptRecordError.
        """
        for segment, position, size in self._walk(start, end):
            yield segment.base_offset + position, size

    def iter_records(
        self, start: int | None = None, end: int | None = None, *, check_crc: bool = True
    ) -> Iterator[Record]:
        """Each record of :meth:`iter_spans`, decoded and checked (including its own physical offset)."""
        for segment, position, _ in self._walk(start, end):
            try:
                yield _decode(segment, position, check_crc)
            except CorruptRecordError as error:
                raise self._classified(segment, position, error) from None

    def close(self) -> None:
        """Unmap every segment that is not in use."""
        self.files.close()

    def _walk(self, start: int | None, end: int | None) -> Iterator[tuple[MappedFile, int, int]]:
        offset = self.min_offset if start is None else start
        limit = self.end_offset if end is None else end
        while offset < limit:
            segment = self.files.mapped(offset)
            position = offset - segment.base_offset
            while position < segment.size and segment.base_offset + position < limit:
                if segment.size - position < FILLER_BYTES:
                    raise self._broken(segment, position, f"{segment.size - position} bytes left without a filler")
                size, magic = peek(segment.view(position, FILLER_BYTES))
                if magic == MAGIC_FILLER:
                    if size != segment.size - position:
                        left = segment.size - position
                        raise self._broken(segment, position, f"a filler of {size} bytes with {left} left")
                    position = segment.size
                    break
                if magic not in (MAGIC_V1, MAGIC_V2):
                    if end is None and size == 0 and magic == 0 and not self._written_behind(segment):
                        return
                    raise self._broken(segment, position, f"no record starts here: magic {magic & 0xFFFFFFFF:#010x}")
                if not MIN_RECORD_BYTES <= size <= segment.size - position:
                    raise self._broken(
                        segment, position, f"the record claims {size} bytes, {segment.size - position} are left"
                    )
                yield segment, position, size
                position += size
            offset = segment.base_offset + position

    def _broken(self, segment: MappedFile, position: int, reason: str) -> CorruptRecordError:
        return self._classified(segment, position, CorruptRecordError(reason, path=segment.path, offset=position))

    def _classified(self, segment: MappedFile, position: int, error: CorruptRecordError) -> CorruptRecordError:
        if self._written_behind(segment):
            return error
        torn = TornTailError("the log ends in a torn record: " + str(error))
        torn.path, torn.offset = segment.path, position
        return torn

    def _written_behind(self, segment: MappedFile) -> bool:
        """Whether any later segment was written to: a prepared segment is all zeros."""
        return any(any(self.read(base, FILLER_BYTES)) for base in self.files.bases if base > segment.base_offset)


def _decode(segment: MappedFile, position: int, check_crc: bool) -> Record:
    try:
        return decode_record(
            segment.view(), position, check_crc=check_crc, expected_physical_offset=segment.base_offset + position
        )
    except CorruptRecordError as error:
        raise CorruptRecordError(str(error), path=segment.path, offset=position) from None
