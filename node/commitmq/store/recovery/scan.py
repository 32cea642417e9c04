"""Scans the log from a place on, record by record, up to its end, and says why it ends there: for a recovery, and for a writer
that was restarted alone.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from commitmq import failpoints
from commitmq.errors import CorruptRecordError, StoreError
from commitmq.files import disk
from commitmq.files.disk import write_all
from commitmq.files.unshare import data_extents, nonzero_chunks
from commitmq.format.file_names import segment_name
from commitmq.kernels import codes, compiled
from commitmq.kernels.codes import WALK_BLANK, WALK_LIMIT
from commitmq.store.log.commit_log import CommitLog

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called repeatedly with the current phase, its finished bytes and all of its bytes, in bytes of the log."""

_SCAN_BYTES = 16 << 20  # checked between two reports
REASONS = {
    codes.REASON_SHORT: "a record ends behind the segment, or is cut",
    codes.REASON_MAGIC: "no record's magic",
    codes.REASON_LENGTHS: "the sizes of its parts do not add up",
    codes.REASON_BODY_CRC: "the body does not match its CRC",
    codes.REASON_RECORD_CRC_MISSING: "the record has no __CRC32#, and every record here has one",
    codes.REASON_RECORD_CRC: "the record does not match its __CRC32#",
    codes.REASON_PHYSICAL_OFFSET: "a record that belongs elsewhere",
    codes.REASON_PROPERTIES: "the topic, or a whole sector of the properties, holds zeros: it never reached the disk",
}


@dataclass(frozen=True, slots=True)
class ScanEnd:
    """Where a scan stopped. ``torn`` is None at a clean end of log, else why the bytes there are not a record."""

    end: int
    last_timestamp: int
    records: int
    torn: str | None


def no_progress(_phase: str, _done: int, _total: int) -> None:
    """The progress callback of callers that show none."""


def scan_to_end(
    commit_log: CommitLog,
    start: int,
    *,
    crc_from: int = -1,
    start_is_flushed: bool = False,
    progress: Progress = no_progress,
) -> ScanEnd:
    """Check every record from ``start``, a record's boundary, to the end of the log. Changes nothing.

    Records from ``crc_from`` on must have a ``__CRC32#``, unless it is negative. Never written parts behind the end of
    the log are not read: a segment is a gigabyte, and the kernel knows its holes.

    Raises CorruptRecordError when invalid bytes are followed by records in a later segment, unless the sidecar says
    that the bytes behind ``start`` need not be complete (``start_is_flushed``).
    """
    bases = [base for base in commit_log.segments() if base + commit_log.segment_bytes > start]
    total = max(0, _written_end(commit_log, bases) - start)
    end, stamp, records = start, 0, 0
    for number, base in enumerate(bases):
        segment = np.frombuffer(commit_log.read(base, commit_log.segment_bytes), np.uint8)
        first = max(start - base, 0)
        must_have_crc = 0 <= crc_from <= base + first

        def checked(position: int, base: int = base) -> None:
            done = base + position - start
            progress("checking the log", done, max(done, total))

        result, found, good_end, last_stamp, reason = _scan_segment(segment, first, base, must_have_crc, checked)
        records += found
        stamp = max(stamp, last_stamp)
        if found:
            end = base + good_end
        if result == WALK_BLANK:
            if number + 1 == len(bases):
                # The next segment was lost in the crash, or a clean stop removed it unused.
                end = base + commit_log.segment_bytes
            continue
        empty = not segment[good_end : good_end + 8].any() and _is_empty_behind(commit_log, base, good_end)
        later = [one for one in bases[number + 1 :] if any(commit_log.read(one, 8))]
        if later and not start_is_flushed:
            raise CorruptRecordError(
                f"corruption in the middle of the log: {REASONS.get(reason, reason)}, and records follow in segment "
                f"{segment_name(later[0])}. Nothing was changed. Put back a copy of this segment, or use `store repair`",
                path=commit_log.folder / segment_name(base),
                offset=good_end,
            )
        return ScanEnd(
            end if found or number == 0 else base, stamp, records, None if empty else REASONS.get(reason, str(reason))
        )
    return ScanEnd(end, stamp, records, None)


def _scan_segment(
    segment: np.ndarray[Any, np.dtype[np.uint8]],
    first: int,
    base: int,
    must_have_crc: bool,
    checked: Callable[[int], None],
) -> tuple[int, int, int, int, int]:
    """``(how it ended, records, end of the last good one, its time, reason)`` of the records from ``first`` on; see
    :func:`commitmq.kernels.compiled.scan`. Scans piece by piece, and tells ``checked`` the position behind each.
    """
    out = np.zeros(5, np.int64)
    at, records, stamp, piece = first, 0, 0, _SCAN_BYTES
    while True:
        stop = min(at + piece, segment.size)
        result = compiled.scan(segment, at, stop, base, must_have_crc, out)
        found, good_end, _last, last_stamp, reason = (int(value) for value in out)
        records += found
        stamp = max(stamp, last_stamp)
        checked(good_end)
        if failpoints.ACTIVE:
            failpoints.hit("recovery.inside_scan")
        goes_on = result == WALK_LIMIT or reason == codes.REASON_SHORT
        if result == WALK_BLANK or stop == segment.size or not goes_on:
            return result, records, good_end, stamp, reason
        if good_end == at:
            piece = segment.size  # longer than a piece, or no record at all: the whole segment tells which
        at = good_end


def _written_end(commit_log: CommitLog, bases: list[int]) -> int:
    """End of the log's last written byte, by the kernel's account of holes; for showing progress only."""
    for base in reversed(bases):
        with disk.opened(commit_log.folder / segment_name(base), os.O_RDONLY, "segment") as fd:
            extents = data_extents(fd, 0, commit_log.segment_bytes)
        if extents:
            return base + extents[-1][1]
    return 0


def _is_empty_behind(commit_log: CommitLog, base: int, position: int) -> bool:
    """Whether a segment holds only zeros from ``position`` on."""
    with disk.opened(commit_log.folder / segment_name(base), os.O_RDONLY, "segment") as fd:
        return next(nonzero_chunks(fd, position, commit_log.segment_bytes), None) is None


def writer_tail(commit_log: CommitLog, segment_bytes: int, *, start: int, published: int) -> tuple[int, int]:
    """End of the log for a writer that was restarted alone, and its last store timestamp (0 when nothing was scanned).

    ``start`` is a record boundary at or below ``published``, the dead writer's published end. Records that were
    complete but not published are taken over; the log never ends below ``published``. Raises StoreError if it would.
    """
    out = np.zeros(5, np.int64)
    position, stamp = start, 0
    while True:
        base = position - position % segment_bytes
        commit_log.refresh()
        if base not in commit_log.segments():
            break
        segment = np.frombuffer(commit_log.read(base, segment_bytes), np.uint8)
        result = compiled.scan(segment, position - base, segment.size, base, False, out)
        position = base + int(out[1])
        stamp = max(stamp, int(out[3]))
        if result != WALK_BLANK:
            break
        following = base + segment_bytes
        if following not in commit_log.segments():
            break  # the filler was stored, the move to the next segment was not: the next append stores it again
        position = following
    if position < published:
        raise StoreError(
            f"the log is valid up to {position} only, but {published} was published: "
            "the segment was damaged while the node ran",
            path=commit_log.folder / segment_name(position - position % segment_bytes),
            offset=position % segment_bytes,
        )
    return position, stamp


def zero_behind(path: Path, position: int) -> int:
    """Zero the nonzero bytes behind ``position`` in a segment, without a copy; returns the number of bytes examined.
    For a restarted writer: those bytes were never published, acknowledged or seen.
    """
    with disk.opened(path, os.O_RDWR, "segment") as fd:
        zeroed = 0
        for at, chunk in nonzero_chunks(fd, position, os.fstat(fd).st_size):
            write_all(fd, bytes(len(chunk)), at)
            zeroed += len(chunk)
        return zeroed


def map_segment(path: Path, segment_bytes: int) -> mmap.mmap | None:
    """A writable mapping of a segment; None while the file does not exist. Raises StoreError for a wrong size."""
    try:
        fd = disk.open_file(path, os.O_RDWR, "segment")
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size != segment_bytes:
            raise StoreError(f"the segment has {size} bytes, the configuration says {segment_bytes}", path=path)
        return disk.map_file(fd, segment_bytes, "segment")
    finally:
        os.close(fd)
