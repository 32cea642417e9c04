"""Finds the end of the log after a start, and makes the store agree with it (spec section 8).

What a recovery decides
    end             behind the last valid record; everything behind is cut (after a copy was kept)
    redispatch_from where dispatchers restart; everything below is in the ConsumeQueues and durable

Rules
    * Sidecar, checkpoint and ConsumeQueues tell where the scan begins, and what it must find
      (:mod:`commitmq.store.recovery.recovery_start`). Everything from there on is checked record by record (length
      chain, magic, physical offset, body CRC, ``__CRC32#`` when present) and dispatched again, which is idempotent.
    * An interrupted deletion of expired segments is finished first (see :mod:`commitmq.store.log.expiry`), and records
      that only a killed node's transient store pool has are taken over (see
      :mod:`commitmq.store.recovery.pool_recovery`).
    * Segments that are missing at the log's beginning must have expired
      (:func:`commitmq.store.queues.queue_ends.lost_beginning`).
    * Zeros end the log. Invalid bytes are a torn tail or damage; which of the two, and whether the log may end there,
      is decided before anything is changed (:mod:`commitmq.store.recovery.cut_judge`). A refused recovery changes
      nothing, so it is refused again until a person decides.
    * A topic's tombstone behind the end is lowered to it: records appended there later do not belong to a deleted
      topic.
    * After a failed sync the page cache may hold bytes that the device never got, and count them clean: it is dropped
      first.
    * A sync may also have failed without a report, when its process was killed during it. So after a crash every
      accepted byte behind the last place known as durable is rewritten before the sync: the kernel then counts it as
      dirty again.

The recovery itself is crash-safe: if it is killed anywhere, it is simply run again. It copies the bytes it cuts and
writes that down (:mod:`commitmq.store.recovery.cut_record`) before it zeroes them. It zeroes before it removes later
segments, the last one first and each durably, so that no segment can be missing between two others. It syncs all of
this before positions are published.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from commitmq import failpoints
from commitmq.errors import CorruptRecordError, DiskFullError, StoreError
from commitmq.files import disk
from commitmq.files.holes import data_extents, nonzero_chunks
from commitmq.files.mapped_file import check_size
from commitmq.files.no_space import is_no_space
from commitmq.files.write_all import write_all
from commitmq.files.writeback import start_writeback
from commitmq.format.file_names import segment_name
from commitmq.kernels import raw
from commitmq.kernels import scan as kernel
from commitmq.kernels.walk import WALK_BLANK, WALK_LIMIT
from commitmq.log import Log
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.expiry import finish_expiry
from commitmq.store.log.rewriting import write_anew
from commitmq.store.metadata.deleted_topics import lower_tombstones
from commitmq.store.queues.queue_ends import QueueEnds, lost_beginning
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.cut_judge import Behind, judge, look_behind
from commitmq.store.recovery.cut_record import Cut
from commitmq.store.recovery.pool_recovery import take_over
from commitmq.store.recovery.recovery_start import Begin, where_to_begin

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called repeatedly with the current phase, how much of it is done and how much there is, in bytes of the log."""

_SCAN_BYTES = 16 << 20  # checked between two reports
_FEW_QUEUES = 64
REASONS = {
    raw.REASON_SHORT: "a record ends behind the segment, or is cut",
    raw.REASON_MAGIC: "no record's magic",
    raw.REASON_LENGTHS: "the sizes of its parts do not add up",
    raw.REASON_BODY_CRC: "the body does not match its CRC",
    raw.REASON_RECORD_CRC_MISSING: "the record has no __CRC32#, and every record here has one",
    raw.REASON_RECORD_CRC: "the record does not match its __CRC32#",
    raw.REASON_PHYSICAL_OFFSET: "a record that belongs elsewhere",
    raw.REASON_PROPERTIES: "the topic, or a whole sector of the properties, holds zeros: it never reached the disk",
}


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of :func:`recover`: offsets in bytes of the log, ``last_timestamp`` in ms, ``scanned_bytes`` checked."""

    min_offset: int
    end: int
    redispatch_from: int
    last_timestamp: int
    records: int
    scanned_bytes: int
    cut_bytes: int
    crc_from: int = -1
    """Every record from here on has a ``__CRC32#``; -1 when that is not known."""
    by_sidecar: bool = False
    """Whether the sidecar told where to begin."""
    cut: Cut | None = None
    """The cut, as it was written down; None when nothing was cut."""
    allowed: bool = False
    """A person allowed the log to end below what was promised."""


@dataclass(frozen=True, slots=True)
class ScanEnd:
    """Where a scan stopped. ``torn`` is None at a clean end of log, else why the bytes there are not a record."""

    end: int
    last_timestamp: int
    records: int
    torn: str | None


def no_progress(_phase: str, _done: int, _total: int) -> None:
    """The progress callback of callers that show none."""


def recover(
    layout: StoreLayout,
    *,
    segment_bytes: int,
    consume_queue_bytes: int,
    batch_queue_bytes: int,
    clean: bool,
    log: Log,
    previous: int | None = None,
    allowed_end: int = -1,
    progress: Progress = no_progress,
) -> Recovered:
    """Run the recovery. No other process of the node may be alive. Raises StoreError when the store needs a person.

    The three sizes are those of a CommitLog segment and of the files of plain and of BatchCQ queues. ``previous`` is
    the token in ``abort`` when the node was started, None without that file. ``allowed_end`` is where a person allowed
    the log to end, -1 for nowhere. ``progress`` must be cheap.
    """
    _make_folders(layout)
    finish_expiry(layout, segment_bytes, forget=False)
    take_over(layout, segment_bytes, log)
    commit_log = CommitLog(layout.commit_log, segment_bytes)
    try:
        bases = commit_log.segments()
        first = bases[0] if bases else 0
        if not bases:
            _refuse_orphaned_queues(layout)
        _check_queue_files(layout.consume_queue, consume_queue_bytes)
        _check_queue_files(layout.batch_consume_queue, batch_queue_bytes)
        if any(note.exists() for note in layout.failed_syncs):
            _drop_page_cache(layout, log)
        begin = where_to_begin(
            layout,
            commit_log,
            Checkpoint.load_durable(layout.checkpoint),
            clean=clean,
            previous=previous,
            consume_queue_bytes=consume_queue_bytes,
            batch_queue_bytes=batch_queue_bytes,
        )
        if clean:
            # The device works while the records are checked: accepted records must be on it before any process hears of
            # them.
            _start_sync(layout, begin.start, segment_bytes)
        found = scan_to_end(
            commit_log,
            begin.start,
            crc_from=begin.must_have_crc_from,
            # Whether the log may end there is decided below; without a person's permission the damage is reported here.
            start_is_flushed=begin.by_sidecar or allowed_end >= 0,
            progress=progress,
        )
        newest = max(found.last_timestamp, begin.timestamp if begin.by_sidecar else 0)
        behind = look_behind(commit_log, found.end, newest) if bases else Behind()
        if bases:
            _judge_beginning(layout, begin, first, log)
        allowed = judge(layout, begin, found.end, newest, first, found.torn, behind, allowed_end)
    finally:
        commit_log.close()
    if failpoints.ACTIVE:
        failpoints.hit("recovery.after_scan")
    # From here on the store is changed.
    finish_expiry(layout, segment_bytes)
    if not bases and not allowed:
        return Recovered(0, 0, 0, 0, 0, 0, 0, crc_from=0)
    progress("cutting the tail", 0, 0)
    cut = _cut_tail(layout, found, segment_bytes, bases, behind, allowed, log)
    progress("syncing the log", 0, 0)
    if not clean:
        # A sync that failed without a report has left pages that are clean but not on the device.
        write_anew(layout, begin.start, found.end, segment_bytes)
        _confirm(layout, begin, found, segment_bytes)
    if failpoints.ACTIVE:
        failpoints.hit("recovery.before_sync")
    _sync_segments(layout, begin.start, found.end, segment_bytes)
    notes = [note for note in layout.failed_syncs if note.exists()]
    for note in notes:
        note.unlink(missing_ok=True)
    if notes:
        disk.sync_folder(layout.own)
    lowered = lower_tombstones(layout, found.end)
    if lowered:
        log.warning(
            "tombstones of deleted topics were lowered to the log's end",
            topics=len(lowered),
            first=lowered[0],
            log_end=found.end,
        )
    if clean and begin.durable < found.end:
        log.warning(
            "the stop was clean but the queues are behind the log, they catch up",
            queues=begin.durable,
            log_end=found.end,
        )
    return Recovered(
        first,
        found.end,
        max(first, min(found.end, begin.durable)),
        max(found.last_timestamp, begin.timestamp if begin.by_sidecar or found.records == 0 else 0),
        found.records,
        found.end - begin.start,
        0 if cut is None else cut.bytes,
        crc_from=_crc_from(begin, found),
        by_sidecar=begin.by_sidecar,
        cut=cut,
        allowed=allowed,
    )


def _judge_beginning(layout: StoreLayout, begin: Begin, first: int, log: Log) -> None:
    """Raise StoreError when segments before the ``first`` are missing, and no other program used the store since."""
    ends = QueueEnds.load(layout.queue_ends)
    lost = "" if ends is None else lost_beginning(layout, ends, first)
    if lost and begin.by_sidecar:
        raise StoreError(f"{lost}. Nothing was changed", path=layout.commit_log / segment_name(first))
    if lost:
        log.warning(
            "the log begins later than this node left it: somebody else has used the store since, or its files of positions "
            "are gone",
            begins_at=first,
        )


def _confirm(layout: StoreLayout, begin: Begin, found: ScanEnd, segment_bytes: int) -> None:
    """Scan the rewritten part once more: a clean page may have left the page cache between the scan and the rewrite,
    which would then have written back the device's version. From here on the pages are dirty, and stay.
    """
    commit_log = CommitLog(layout.commit_log, segment_bytes)
    try:
        again = scan_to_end(commit_log, begin.start, crc_from=begin.must_have_crc_from, start_is_flushed=True)
    finally:
        commit_log.close()
    if again.end != found.end:
        raise OSError(
            errno.EIO, f"the device does not have what the page cache had from {again.end} on", str(commit_log.folder)
        )


def _crc_from(begin: Begin, found: ScanEnd) -> int:
    """From where on every record has a ``__CRC32#``: records accepted without requiring one count as having none."""
    asked = begin.must_have_crc_from >= 0 or found.records == 0
    return begin.crc_from if begin.crc_from >= 0 and asked else found.end


def _check_queue_files(queues: Path, file_bytes: int) -> None:
    """Raise SegmentSizeError unless a file of the first queues has the configured size. All files of a store have one
    size; a single file of another size is damaged, and its queue is rebuilt (:mod:`commitmq.offline.queue_check`).
    """
    others: list[tuple[Path, int]] = []
    for _topic, _queue, folder in itertools.islice(list_queues(queues), _FEW_QUEUES):
        for path in sorted(folder.iterdir()):
            size = path.stat().st_size
            if path.name.isdecimal() and size == file_bytes:
                return
            if path.name.isdecimal() and size:
                others.append((path, size))
    if others:
        check_size(*others[0], file_bytes)


def _make_folders(layout: StoreLayout) -> None:
    """Make the store's own folders, and their names durable: a file synced in a folder whose name is lost is lost too.

    This is done at every start, because a killed start may have made a folder without reaching the sync.
    """
    for folder in (layout.commit_log, layout.consume_queue, layout.config, layout.own):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in (layout.commit_log, layout.config, layout.own, layout.root):
        disk.sync_folder(folder)


def _drop_page_cache(layout: StoreLayout, log: Log) -> None:
    """Make the kernel drop the log's clean pages: after a failed sync they may never have reached the device.

    No process of the node has a file mapped now. Dirty pages stay, and this recovery's syncs write them.
    """
    log.warning("a sync failed in the last run: the log is read from the device, not from the page cache")
    for path in sorted(layout.commit_log.iterdir()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


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
    :func:`commitmq.kernels.scan.scan`. Scans piece by piece, and tells ``checked`` the position behind each.
    """
    out = np.zeros(5, np.int64)
    at, records, stamp, piece = first, 0, 0, _SCAN_BYTES
    while True:
        stop = min(at + piece, segment.size)
        result = kernel.scan(segment, at, stop, base, must_have_crc, out)
        found, good_end, _last, last_stamp, reason = (int(value) for value in out)
        records += found
        stamp = max(stamp, last_stamp)
        checked(good_end)
        if failpoints.ACTIVE:
            failpoints.hit("recovery.inside_scan")
        goes_on = result == WALK_LIMIT or reason == raw.REASON_SHORT
        if result == WALK_BLANK or stop == segment.size or not goes_on:
            return result, records, good_end, stamp, reason
        if good_end == at:
            piece = segment.size  # longer than a piece, or no record at all: the whole segment tells which
        at = good_end


def _written_end(commit_log: CommitLog, bases: list[int]) -> int:
    """End of the log's last written byte, by the kernel's account of holes; for showing progress only."""
    for base in reversed(bases):
        fd = os.open(commit_log.folder / segment_name(base), os.O_RDONLY | os.O_CLOEXEC)
        try:
            extents = data_extents(fd, 0, commit_log.segment_bytes)
        finally:
            os.close(fd)
        if extents:
            return base + extents[-1][1]
    return 0


def _is_empty_behind(commit_log: CommitLog, base: int, position: int) -> bool:
    """Whether a segment holds only zeros from ``position`` on."""
    fd = os.open(commit_log.folder / segment_name(base), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return next(nonzero_chunks(fd, position, commit_log.segment_bytes), None) is None
    finally:
        os.close(fd)


def _refuse_orphaned_queues(layout: StoreLayout) -> None:
    for queues in (layout.consume_queue, layout.batch_consume_queue):
        if any(True for _ in list_queues(queues)):
            raise StoreError(
                "there are ConsumeQueues but no CommitLog: the log was moved or deleted. Put it back, or remove "
                f"{queues.name}/",
                path=layout.commit_log,
            )


def _cut_tail(
    layout: StoreLayout, found: ScanEnd, segment_bytes: int, bases: list[int], behind: Behind, allowed: bool, log: Log
) -> Cut | None:
    """Zero the bytes behind the end in its segment, remove later segments; returns the cut, None if nothing was cut.

    The order is: all copies, the line in the journal, the log.
    """
    paths = {base: layout.commit_log / segment_name(base) for base in bases if base + segment_bytes > found.end}
    cut = None
    if behind.bytes or allowed:
        try:
            cut = _write_down(layout, found, paths, behind, allowed)
        except OSError as error:
            if not is_no_space(error):
                raise
            raise DiskFullError(
                f"the disk has no space for a copy of the {behind.bytes} bytes that are to be cut from the log's end, so "
                f"nothing was cut. Free some: `commitmq store expire {layout.root} --keep-bytes N` deletes the oldest "
                "segments without a node",
                path=cut_record.cut_folder(layout),
            ) from error
        if failpoints.ACTIVE:
            failpoints.hit("recovery.before_cut")
    for base, path in sorted(paths.items(), reverse=True):
        _zero_tail(path, max(0, found.end - base))
        if base >= found.end:
            if failpoints.ACTIVE:
                failpoints.hit("recovery.before_remove")
            path.unlink()
            disk.sync_folder(layout.commit_log)
            log.info("removed a segment that holds no records", segment=str(path))
    if cut is None:
        # The last line of an interrupted cut was never written: the log no longer has any of it.
        begun = cut_record.unfinished(layout, "recovery", found.end)
        if begun is not None:
            cut_record.mark_done(layout, begun.id)
        return None
    cut_record.mark_done(layout, cut.id)
    log.warning("cut the end of the log", what=cut_record.sentence(layout, cut))
    return replace(cut, done=True)


def _write_down(layout: StoreLayout, found: ScanEnd, paths: dict[int, Path], behind: Behind, allowed: bool) -> Cut:
    """Copy the bytes behind the end, and record the cut, durably; an interrupted cut at this place is continued."""
    fds = {base: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for base, path in sorted(paths.items())}
    try:
        spans = [(fd, base, max(0, found.end - base), os.fstat(fd).st_size) for base, fd in fds.items()]
        begun = cut_record.unfinished(layout, "recovery", found.end)
        if begun is not None and begun.parts and cut_record.still_kept(layout, begun, spans):
            return begun
        number = cut_record.new_id(layout)
        parts = []
        for fd, base, start, stop in spans:
            part = cut_record.keep(layout, number, fd, base, start, stop)
            if part is not None:
                parts.append(replace(part, records=behind.records.get(base, 0)))
    finally:
        for fd in fds.values():
            os.close(fd)
    reason = found.torn or ("what was promised is missing" if allowed else "stale bytes")
    cut = Cut(number, time.time_ns() // 1_000_000, "recovery", reason, found.end, tuple(parts), allowed)
    cut_record.append(layout, cut)
    return cut


def _zero_tail(path: Path, start: int) -> None:
    """Zero a segment from ``start`` on, durably."""
    fd = os.open(path, os.O_RDWR)
    try:
        zeroed = False
        for position, chunk in nonzero_chunks(fd, start, os.fstat(fd).st_size):
            write_all(fd, bytes(len(chunk)), position, place="recovery.cut")
            zeroed = True
        if zeroed:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _start_sync(layout: StoreLayout, start: int, segment_bytes: int) -> None:
    for path in sorted(layout.commit_log.iterdir()):
        if path.name.isdecimal() and int(path.name) + segment_bytes > start:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                start_writeback(fd)
            finally:
                os.close(fd)


def _sync_segments(layout: StoreLayout, start: int, end: int, segment_bytes: int) -> None:
    """Make the accepted records durable: after kill -9 they may only be in the page cache."""
    base = start - start % segment_bytes
    while base < end:
        path = layout.commit_log / segment_name(base)
        if path.exists():
            fd = os.open(path, os.O_RDWR)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        base += segment_bytes


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
        result = kernel.scan(segment, position - base, segment.size, base, False, out)
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
    fd = os.open(path, os.O_RDWR)
    try:
        zeroed = 0
        for at, chunk in nonzero_chunks(fd, position, os.fstat(fd).st_size):
            write_all(fd, bytes(len(chunk)), at)
            zeroed += len(chunk)
        return zeroed
    finally:
        os.close(fd)


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
