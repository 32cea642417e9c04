"""The read side of the CommitLog: one offset space of records in segments of equal size (spec 2).

Records never straddle segments; every segment except the last ends with a filler (spec 2.11). A walk ends in one of
three ways:

    end of log        zeros where the next record would start, and nothing behind them
    torn tail         something invalid in the last segment that was written to: a crash cut the last append
    corruption        something invalid with valid records in a later segment behind it

The end of the log is silent; a torn tail raises TornTailError, corruption raises its base CorruptRecordError.

Splits a CommitLog for readers that work side by side, also within a segment.

Only the end of the record before it identifies a record; every mark of its beginning can be copied. A body may hold
whole records with right CRCs, even with the physical offsets of the very places where they are, and the last of them
may share the topic and properties of the surrounding record, so that the false chain leads into the true one. No
examination of the bytes from a place on, however long, tells such a record from a true one. This much can be proven: a
segment begins with a record, and where a walk from there arrives, a record begins.

So a segment is cut into *pieces* of equal size. Each reader begins at the first bytes in its piece that look like a
whole record (:func:`find_start`) and continues until it reaches or passes the corresponding start of the next piece.
The caller compares the results (:func:`prove`): a piece is right when it begins where the piece before it arrived. A
piece that does not is read again from there. This is hardly ever necessary.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError, StoreError
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
from commitmq.kernels.compiled import find_record

PIECE_BYTES: Final = 64 << 20
NO_START: Final = -1
_BUDGET_BYTES: Final = 256 << 20  # of CRCs of false records, in one search: about 0.1 s

Segment = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """The records that begin in ``[begin, stop)`` of the segment at ``base``; physical offsets."""

    base: int
    begin: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether the piece begins its segment, so that nothing needs to be proven."""
        return self.begin == self.base


class Walked(Protocol):
    """A reader's result for its piece: the record it began at (:data:`NO_START` if none begins there) and where it
    arrived.

    The reader of a segment's last piece arrives at the segment's end.
    """

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


W = TypeVar("W", bound=Walked)
Job = tuple[Piece, int]
"""A piece and the place to begin at; with :data:`NO_START` the reader must search for it."""


def pieces_of(bases: Sequence[int], segment_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of the segments at ``bases``, in order."""
    return [
        Piece(base, base + at, base + min(at + piece_bytes, segment_bytes))
        for base in bases
        for at in range(0, segment_bytes, piece_bytes)
    ]


def find_start(segment: Segment, piece: Piece) -> int:
    """Physical offset of the first bytes in the piece that look like a whole record; :data:`NO_START` without one.

    ``segment`` is all of the segment's bytes. The first piece begins with the segment, with any bytes there.
    """
    if piece.is_first:
        return piece.base
    found = int(
        find_record(
            segment, piece.begin - piece.base, piece.stop - piece.base, piece.base, _BUDGET_BYTES, np.zeros(5, np.int64)
        )
    )
    return piece.base + found if found >= 0 else NO_START


def find_stop(segment: Segment, piece: Piece) -> int:
    """Where the reader of ``piece`` may stop: the start of the next piece that has one, or the segment's end."""
    size = piece.stop - piece.begin
    end = piece.base + segment.size
    begin = piece.stop
    while begin < end:
        following = Piece(piece.base, begin, min(begin + size, end))
        start = find_start(segment, following)
        if start != NO_START:
            return start
        begin = following.stop
    return end


def prove(pieces: Sequence[Piece], run: Callable[[list[Job]], Iterable[W]]) -> list[W]:
    """The results of ``run`` for all ``pieces`` (whole segments in order), each begun where the one before it arrived.

    ``run`` does jobs in any order, side by side, and returns their results in the given order. Every round proves at
    least one more piece of each segment. Raises StoreError if a reader does not begin where it was told to.
    """
    results = list(run([(piece, piece.base if piece.is_first else NO_START) for piece in pieces]))
    while True:
        wrong = _wrong(pieces, results)
        if not wrong:
            return results
        jobs = [(pieces[index], position) for index, position in wrong]
        for (index, position), result in zip(wrong, run(jobs), strict=True):
            if result.start != position:
                raise StoreError(f"a reader began at {result.start} instead of {position}")
            results[index] = result


def _wrong(pieces: Sequence[Piece], results: Sequence[W]) -> list[tuple[int, int]]:
    """Pieces, by number, that must be read again, and where each has to begin.

    Where the piece before is itself wrong, its arrival is still the best guess: usually it has found the true chain.
    """
    wrong = []
    position = 0
    for index, (piece, result) in enumerate(zip(pieces, results, strict=True)):
        if piece.is_first:
            position = piece.base
        if result.start == NO_START:
            continue
        if result.start != position:
            wrong.append((index, position))
        position = max(position, result.end)
    return wrong


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
        """``size`` bytes at physical ``offset``, without a copy; they must be in one segment.

        The segment stays mapped while the view lives. Raises OffsetOutOfRangeError.
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
