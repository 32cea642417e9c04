"""Appends to the CommitLog: the tail, its segment, and an order of stores that makes a killed writer harmless.

Invariants
    * ``position`` is the end of the last complete record (or of a filler: then the base of the next segment).
    * A record is complete only when its first 8 bytes (size, magic) are stored, and they are stored last. A writer
      killed before that leaves zeros where a reader looks for the next record.
    * Everything behind ``position`` in the last segment is zero: recovery and :meth:`CommitLogAppender.open` ensure
      that. Otherwise a stale record behind a cut could follow a new one of matching length.
    * A record never straddles segments: before a record that does not fit (``size + 8 > rest``, spec 2.11) an 8-byte
      filler is stored, and only after the next segment exists: a full disk therefore leaves the log as it was.
    * A run may be split at a segment's end; its parts are in order and nothing comes between them.

This module has no sockets, queue offsets or acks, and makes no segment files: the caller supplies ``open_segment``.

Splits a run at the ends of segments, because a record never straddles two of them (spec 2.11).

Values of properties as numbers, many at once.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from commitmq.errors import StoreError
from commitmq.format.constants import CRC_PROPERTY_BYTES, MAGIC_FILLER, QUEUE_OFFSET_OFFSET, STORE_TIMESTAMP_OFFSET
from commitmq.kernels.compiled import store_run
from commitmq.store.log.run_check import CheckedRun, MessageIllegalError, RunCheck

FILLER_BYTES: Final = 8


@dataclass(slots=True)
class RunPart:
    """Adjacent records of one run: ``count`` records from ``physical_offset`` on, ``size_bytes`` together."""

    count: int
    physical_offset: int
    size_bytes: int


class RunPiece(NamedTuple):
    """Records [first, behind) of a run: its bytes [start, stop), to be stored at ``at`` of the segment at ``base``."""

    base: int
    at: int
    start: int
    stop: int
    first: int
    behind: int

    @property
    def part(self) -> RunPart:
        return RunPart(self.behind - self.first, self.base + self.at, self.stop - self.start)


def split_run(run: CheckedRun, position: int, segment_bytes: int) -> list[RunPiece]:
    """The pieces of a run that begins at ``position``. Raises MessageIllegalError."""
    pieces: list[RunPiece] = []
    ends, done, start = run.ends, 0, 0
    at = position % segment_bytes
    base = position - at
    if run.count and at + (size := int(ends[-1])) + FILLER_BYTES <= segment_bytes:
        return [
            RunPiece(base, at, 0, size, 0, run.count)
        ]  # the usual case, which the search below costs more than the rest
    while done < run.count:
        first = int(ends[done]) - start
        if first + FILLER_BYTES > segment_bytes:
            raise too_long(first, segment_bytes)
        if at + first + FILLER_BYTES > segment_bytes:
            base, at = base + segment_bytes, 0
        fits = int(np.searchsorted(ends, start + segment_bytes - at - FILLER_BYTES, side="right"))
        stop = int(ends[fits - 1])
        pieces.append(RunPiece(base, at, start, stop, done, fits))
        at, start, done = at + stop - start, stop, fits
    return pieces


def too_long(size: int, segment_bytes: int) -> MessageIllegalError:
    """No segment can hold a record of ``size`` bytes."""
    return MessageIllegalError(
        f"the record has {size} bytes and cannot fit a segment of {segment_bytes} (commit_log.segment_bytes)"
    )


_MOST_DIGITS = 18  # each number of so many digits fits 64 bits
_MOST = 1 << 63


def longs(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """``(numbers, good)`` of the texts ``data[starts[i]:starts[i] + lengths[i]]``: Java's Long.parseLong of each.
    ``good`` is False, and the number 0, for an empty text, one that is no number, and one that 64 bits do not hold.
    """
    numbers: NDArray[np.int64] = np.zeros(len(starts), np.int64)
    good: NDArray[np.bool_] = np.zeros(len(starts), np.bool_)
    plain = (lengths > 0) & (lengths <= _MOST_DIGITS)
    which = np.flatnonzero(plain)
    if len(which):
        ends, sizes = starts[which] + lengths[which], lengths[which]
        values: NDArray[np.int64] = np.zeros(len(which), np.int64)
        right: NDArray[np.bool_] = np.ones(len(which), np.bool_)
        for column in range(int(sizes.max()), 0, -1):  # one pass a digit: fewer bytes move than by a matrix
            inside = sizes >= column
            digits = np.where(inside, data[np.where(inside, ends - column, 0)] - np.uint8(48), 0)
            right &= digits <= 9
            values = values * 10 + digits
        numbers[which] = np.where(right, values, 0)
        good[which] = right
    for index in np.flatnonzero((lengths > 0) & ~good).tolist():  # signs, very long numbers, and what is none
        text = data[starts[index] : starts[index] + lengths[index]].tobytes()
        digits_only = text[1:] if text[:1] in (b"+", b"-") else text
        if digits_only.isdigit() and -_MOST <= int(text) < _MOST:
            numbers[index], good[index] = int(text), True
    return numbers, good


_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it yet
_POPULATE_CHUNK_BYTES = 256 * 1024
_UNMAP_CHUNK_BYTES = 2 * 1024 * 1024

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class SegmentUnavailableError(StoreError):
    """The segment at ``base`` does not exist (yet); nothing was stored."""

    def __init__(self, base: int) -> None:
        super().__init__(f"the segment at {base} has not been allocated")
        self.base = base


class BrokenTailError(BaseException):
    """The log's end holds part of a run that could not be zeroed again: nothing may be appended behind it.

    It is not an Exception, so that no handler of a failed request catches it: the process must end, and its successor
    scans the tail.
    """


class PoolFullError(SegmentUnavailableError):
    """No buffer of the transient store pool is free, because the commits to the file lag; nothing was stored."""

    def __init__(self, base: int) -> None:
        super().__init__(base)
        self.args = ("every buffer of the transient store pool waits to be committed",)


@dataclass(slots=True)
class Appended:
    """Result of an append. Offsets in bytes of the log, time in ms, ``end`` is the offset behind the last record."""

    parts: list[RunPart]
    end: int
    store_timestamp: int

    @property
    def physical_offset(self) -> int:
        return self.parts[0].physical_offset


class CommitLogAppender(RunCheck):
    """The only writer of a CommitLog's tail. It checks the bytes that it appends (:mod:`commitmq.store.log.run_check`)."""

    def __init__(
        self,
        position: int,
        *,
        segment_bytes: int,
        open_segment: Callable[[int], mmap.mmap | None],
        close_segment: Callable[[mmap.mmap], None] | None = None,
        store_host: bytes,
        max_message_bytes: int,
        properties_crc: bool,
        last_timestamp: int = 0,
        max_clock_lead_ms: int = 1 << 62,
        populate_window_bytes: int = 0,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """``position``: the log's end. ``store_host``: 4 or 16 address bytes and a 4-byte port, big-endian.

        ``open_segment(base)`` returns a writable mapping of the segment at ``base``, None while it does not exist.
        ``close_segment`` gets the mapping back, if this object must not unmap it. The mapping need not be the segment's
        file: the caller ensures that its bytes reach the file. ``last_timestamp``: store timestamp of the newest
        record. No new timestamp is lower even if the clock goes back, unless it goes back by more than
        ``max_clock_lead_ms``.
        """
        super().__init__(store_host=store_host, max_message_bytes=max_message_bytes, properties_crc=properties_crc)
        self.position = position
        self.segment_bytes = segment_bytes
        self._store_host_array = np.frombuffer(store_host, np.uint8)
        self._open_segment = open_segment
        self._close_segment = close_segment or mmap.mmap.close
        self._keeps_left = close_segment is None
        self._clock = clock
        self._max_clock_lead_ms = max_clock_lead_ms
        self.last_timestamp = last_timestamp
        self._map: mmap.mmap | None = None
        self._left: mmap.mmap | None = None  # the mapping of the previous segment, unmapped in pieces
        self._left_bytes = 0
        self._following: mmap.mmap | None = None  # the mapping of the next segment, if it is already prepared
        self._following_populated = 0
        self._look_for_following_at = 0
        self._array = np.empty(0, np.uint8)
        self._base = -1
        self._populate_window_bytes = populate_window_bytes
        self._populated = 0

    # ------------------------------------------------------------ appends

    def append_record(self, record: bytearray, queue_offset: int, born_host_bytes: int) -> Appended:
        """Append one record of :meth:`encode` as queue offset ``queue_offset``. Raises SegmentUnavailableError; then
        nothing was stored.
        """
        size = len(record)
        at = self._room_for(size)
        stamp = self._timestamp()
        offset = self._base + at
        struct.pack_into(">qq", record, QUEUE_OFFSET_OFFSET, queue_offset, offset)
        struct.pack_into(">q", record, STORE_TIMESTAMP_OFFSET + born_host_bytes, stamp)
        if self.properties_crc:
            value = isal_zlib.crc32(memoryview(record)[: size - CRC_PROPERTY_BYTES]) & 0x7FFFFFFF
            record[-11:-1] = b"%010d" % value
            record[-11:-1] = record[-2:-12:-1]
        target = self._map
        assert target is not None
        target[at + 8 : at + size] = memoryview(record)[8:]
        target[at : at + 8] = record[:8]
        self.position = offset + size
        return Appended([RunPart(1, offset, size)], self.position, stamp)

    def append_run(self, run: CheckedRun, queue_offset: int, born_host: bytes) -> Appended:
        """Append a checked run; its records get ``queue_offset`` and the following offsets.

        All or nothing, with every exception: a record that no segment can hold (MessageIllegalError) and a segment that
        is missing (SegmentUnavailableError) or cannot be opened are detected before the first byte; after any later
        failure the stored part is zeroed again. No reader has seen it, because the caller publishes the position
        afterwards.
        """
        pieces = split_run(run, self.position, self.segment_bytes)
        maps = self._mappings(pieces)
        before = self.position
        stamp = self._timestamp()
        host = np.frombuffer(born_host, np.uint8)
        try:
            at = before
            for piece in pieces:
                if at and piece.base != at - at % self.segment_bytes:
                    self._store_filler(maps[at - at % self.segment_bytes], at % self.segment_bytes)
                self._store_piece(run, piece, maps[piece.base], queue_offset, stamp, host)
                at = piece.base + piece.at + piece.stop - piece.start
            for base, mapping in maps.items():
                if base != self._base:
                    self._adopt(mapping, base)
        except BaseException as error:
            self._undo(before, pieces, maps, error)
            raise
        self.position = at
        return Appended([piece.part for piece in pieces], at, stamp)

    def _mappings(self, pieces: list[RunPiece]) -> dict[int, mmap.mmap]:
        """The segments that ``pieces`` need, and the one left behind, by base, in order. Raises as opening does."""
        first = self.position - self.position % self.segment_bytes
        if first == self._base and self._map is not None and len(pieces) == 1 and pieces[0].base == first:
            return {first: self._map}
        maps: dict[int, mmap.mmap] = {}
        try:
            for base in (first, *(piece.base for piece in pieces)):
                if base not in maps:
                    maps[base] = self._known(base) or self._open(base)
        except BaseException:
            self._close_unused(maps)
            raise
        return maps

    def _known(self, base: int) -> mmap.mmap | None:
        """The mapping of a segment that is already open."""
        if base == self._base:
            return self._map
        return self._following if base == self._base + self.segment_bytes else None

    def _close_unused(self, maps: dict[int, mmap.mmap]) -> None:
        for mapping in maps.values():
            if mapping not in (self._map, self._following, self._left):
                self._close_segment(mapping)

    def _store_filler(self, mapping: mmap.mmap, at: int) -> None:
        # Size and magic in one store: a reader must never see half a filler.
        mapping[at : at + FILLER_BYTES] = struct.pack(">ii", self.segment_bytes - at, MAGIC_FILLER)

    def _store_piece(
        self, run: CheckedRun, piece: RunPiece, mapping: mmap.mmap, queue_offset: int, stamp: int, host: _Bytes
    ) -> None:
        store_run(
            run.data,
            piece.start,
            piece.stop,
            self._array if mapping is self._map else np.frombuffer(mapping, np.uint8),
            piece.at,
            piece.base,
            queue_offset + piece.first,
            stamp,
            host,
            run.moved,
            self._store_host_array,
            self.properties_crc,
        )
        mapping[piece.at : piece.at + 8] = run.data[piece.start : piece.start + 8].tobytes()

    def _undo(self, before: int, pieces: list[RunPiece], maps: dict[int, mmap.mmap], error: BaseException) -> None:
        """Zero everything that ``pieces`` and the fillers before them occupy, the last first. Raises BrokenTailError."""
        try:
            for piece in reversed(pieces):
                size = min(piece.stop - piece.start + FILLER_BYTES, self.segment_bytes - piece.at)
                maps[piece.base][piece.at : piece.at + size] = bytes(size)
            at = before % self.segment_bytes
            maps[before - at][at : at + FILLER_BYTES] = bytes(min(FILLER_BYTES, self.segment_bytes - at))
            self.position = before
            # It is uncertain which mappings are current; those that no other object has are unmapped with
            # their last reference.
            self._array = np.empty(0, np.uint8)
            self._map = self._left = self._following = None
            self._base, self._following_populated = -1, 0
        except BaseException as second:
            raise BrokenTailError(
                f"a run was stored in part ({error!r}) and cannot be taken back: {second!r}"
            ) from error

    def populate_ahead(self) -> bool:
        """Make the kernel map a piece of pages ahead of the tail, so that a store does not fault page by page.

        Returns True when it did: call it again while there is nothing else to do. It stays within the window, because
        populating marks pages dirty, and dirty pages must be flushed. The window reaches into the next segment as soon
        as that exists, so rolling to it costs no more than any other append; for the same reason the segment left
        behind is taken out of the page table a piece at a time.
        """
        window = self._populate_window_bytes
        if self._map is None or not window:
            return False
        least = min(_POPULATE_CHUNK_BYTES, window)
        at = self.position - self._base
        start = max(self._populated, at & ~4095)
        size = min(_POPULATE_CHUNK_BYTES, at + window - start, self.segment_bytes - start) & ~4095
        if size >= least:
            if not self._populate(self._map, start, size):
                return False
            self._populated = start + size
        elif self.segment_bytes - start >= least or not self._populate_following(
            at + window - self.segment_bytes, least
        ):
            return False
        if self._left is not None:
            self._let_go_of_left(_UNMAP_CHUNK_BYTES)
        return True

    def _populate_following(self, window_bytes: int, least_bytes: int) -> bool:
        """The same for the next segment, up to ``window_bytes`` of it."""
        size = min(_POPULATE_CHUNK_BYTES, window_bytes - self._following_populated, self.segment_bytes) & ~4095
        if size < least_bytes or self._following_populated + size > self.segment_bytes:
            return False
        if self._following is None:
            if self.position < self._look_for_following_at:
                return False
            self._look_for_following_at = self.position + _POPULATE_CHUNK_BYTES
            with contextlib.suppress(StoreError):  # the append that needs the segment will raise it
                self._following = self._open_segment(self._base + self.segment_bytes)
            if self._following is None:
                return False
        if not self._populate(self._following, self._following_populated, size):
            return False
        self._following_populated += size
        return True

    def _populate(self, mapping: mmap.mmap, start: int, size: int) -> bool:
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError:
            self._populate_window_bytes = 0  # an older kernel: stores fault one by one instead
            return False
        return True

    def close(self) -> None:
        """Drop the mapping of the last segment."""
        self._array = np.empty(0, np.uint8)
        for mapping in (self._map, self._left, self._following):
            if mapping is not None:
                self._close_segment(mapping)
        self._map = self._left = self._following = None
        self._base = -1

    def _let_go_of_left(self, limit_bytes: int) -> None:
        """Unmap up to ``limit_bytes`` of the segment left behind, its last pages first, and finally all of it."""
        assert self._left is not None
        if self._left_bytes > limit_bytes:
            # The pages stay in the page cache, dirty ones too; only this process no longer maps them.
            self._left_bytes -= limit_bytes
            self._left.madvise(mmap.MADV_DONTNEED, self._left_bytes, limit_bytes)
            return
        self._close_segment(self._left)
        self._left = None

    def _timestamp(self) -> int:
        # Not below the newest record's timestamp: the clock may be set back, but store timestamps in the log must not
        # go back (spec 5.1). However, a clock that was wrong by more than ``max_clock_lead_ms`` must not fix the
        # timestamps of later records for as long.
        now = self._clock()
        if now > self.last_timestamp or now < self.last_timestamp - self._max_clock_lead_ms:
            self.last_timestamp = now
        return self.last_timestamp

    def _room_for(self, size: int) -> int:
        """Position in the mapped segment where ``size`` bytes fit, after rolling to the next segment if necessary."""
        at = self.position - self._base
        if self._map is not None and at + size + FILLER_BYTES <= self.segment_bytes:
            return at
        if size + FILLER_BYTES > self.segment_bytes:
            raise too_long(size, self.segment_bytes)
        base = self.position - self.position % self.segment_bytes
        at = self.position - base
        if at + size + FILLER_BYTES <= self.segment_bytes:
            self._switch(base)
            return at
        prepared = self._following if base == self._base else None
        following = prepared or self._open(base + self.segment_bytes)
        if base != self._base:
            self._switch(base)
        assert self._map is not None
        self._store_filler(self._map, at)
        self._adopt(following, base + self.segment_bytes)
        self.position = self._base
        return 0

    def _switch(self, base: int) -> None:
        self._adopt(self._open(base), base)

    def _open(self, base: int) -> mmap.mmap:
        mapping = self._open_segment(base)
        if mapping is None:
            raise SegmentUnavailableError(base)
        return mapping

    def _adopt(self, mapping: mmap.mmap, base: int) -> None:
        if self._left is not None:
            self._close_segment(self._left)
        self._left = self._map if self._keeps_left else None
        self._left_bytes = self.segment_bytes - self.segment_bytes % _UNMAP_CHUNK_BYTES
        self._populated = 0
        if mapping is self._following:
            self._populated = self._following_populated
        elif self._following is not None:
            self._close_segment(self._following)
        self._following = None
        self._following_populated = self._look_for_following_at = 0
        self._map = mapping
        self._array = np.frombuffer(mapping, np.uint8)
        self._base = base
