"""Finding the end of the log after a start, and making the store agree with it (spec section 8).

What a recovery decides
    end             behind the last valid record; everything behind is cut (kept in a copy first)
    redispatch_from where dispatchers start again; everything below is in the ConsumeQueues and durable

Rules
    * Our own sidecar agrees with the checkpoint, so nobody else used the store: the scan starts at what was flushed, and
      dispatchers start again at what was durable in the ConsumeQueues. What is read is the tail of about a second.
      A log in which no record ends at that place belongs to another moment, and is refused: a scan that begins inside a
      record would cut all that follows.
    * Else, clean stop (no ``abort``): ConsumeQueues cover the log; the scan starts in the segment of their newest record.
    * Else: the scan starts at the newest segment whose first record is older than the checkpoint's least timestamp
      (minus 3 s), because what is older was flushed, in the log and in the ConsumeQueues. Everything from there on is
      checked record by record (length chain, magic, physical offset, body CRC, ``__CRC32#`` when present) and dispatched
      again, which is idempotent.
    * A deletion of expired segments that was interrupted is finished first (see :mod:`commitmq.store.expiry`), and what a
      killed node had in its transient store pool is brought over (see :mod:`commitmq.store.pool_recovery`).
    * Zeros end the log. Something invalid behind what the sidecar knows as flushed is a torn tail: cut, later segments
      included, because a power cut keeps any subset of the pages that were not synced. (The sidecar is written before
      ``flushed`` passes a segment's end, so nothing in those later segments was promised to anyone.) Without a sidecar
      only the last written segment can be a torn tail; with records in a later segment it is corruption: nothing is
      touched and the start is refused.
    * After a failed sync the page cache may have what the device never got, and call it clean: it is dropped first.

Crash-safe in itself: a recovery killed anywhere is simply run again. It copies what it cuts before it zeroes it, zeroes
before it removes segments behind, the last one first and each durably, so that no hole can appear between two segments,
and syncs all of it before positions are published.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from commitmq import failpoints
from commitmq.errors import CorruptRecordError, StoreError
from commitmq.kernels import raw
from commitmq.kernels import walk as kernel
from commitmq.log import Log
from commitmq.store.batch_consume_queue import BatchConsumeQueue
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.commit_log import CommitLog
from commitmq.store.consume_queue import ConsumeQueue, list_queues
from commitmq.store.expiry import finish_expiry
from commitmq.store.fd_cache import FdCache
from commitmq.store.layout import StoreLayout, segment_name
from commitmq.store.log_proof import LogProof, has_record_before
from commitmq.store.mapped_file import check_size
from commitmq.store.pool_recovery import take_over
from commitmq.store.sidecar import Sidecar
from commitmq.store.write_all import write_all
from commitmq.store.writeback import start_writeback

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told again and again what is being done, how much of it is done and how much there is, in bytes of the log."""

_CHUNK_BYTES = 1 << 20
_SCAN_BYTES = 16 << 20  # checked between two reports
_FEW_FILES = 8  # each queue is looked at once
REASONS = {
    raw.REASON_SHORT: "a record ends behind the segment, or is cut",
    raw.REASON_MAGIC: "no record's magic",
    raw.REASON_LENGTHS: "the sizes of its parts do not add up",
    raw.REASON_BODY_CRC: "the body does not match its CRC",
    raw.REASON_RECORD_CRC_MISSING: "the record has no __CRC32#, and every record here has one",
    raw.REASON_RECORD_CRC: "the record does not match its __CRC32#",
    raw.REASON_PHYSICAL_OFFSET: "a record that belongs elsewhere",
    raw.REASON_PROPERTIES: "topic or properties hold zero bytes: parts of the record never reached the disk",
}


@dataclass(frozen=True, slots=True)
class Recovered:
    """What :func:`recover` found: offsets in bytes of the log, ``last_timestamp`` in ms, ``scanned_bytes`` it checked."""

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
    """Whether the sidecar said where to begin."""


@dataclass(frozen=True, slots=True)
class ScanEnd:
    """Where a scan stopped. ``torn`` is None at a clean end of log, else why the bytes there are no record."""

    end: int
    last_timestamp: int
    records: int
    torn: str | None


def no_progress(_phase: str, _done: int, _total: int) -> None:
    """For callers that show none."""


def recover(
    layout: StoreLayout,
    *,
    segment_bytes: int,
    consume_queue_bytes: int,
    batch_queue_bytes: int,
    clean: bool,
    log: Log,
    previous_pid: int | None = None,
    progress: Progress = no_progress,
) -> Recovered:
    """Run the recovery. Only while no other process of the node lives. Raises StoreError when the store needs a person.

    The three sizes are those of a CommitLog segment and of the files of plain and of BatchCQ queues. ``previous_pid`` is
    what ``abort`` held when the node was started, None when it was not there. ``progress`` must be cheap.
    """
    _make_folders(layout)
    finish_expiry(layout, segment_bytes)
    take_over(layout, segment_bytes, log)
    commit_log = CommitLog(layout.commit_log, segment_bytes)
    try:
        bases = commit_log.segments()
        if not bases:
            _refuse_orphaned_queues(layout)
            return Recovered(0, 0, 0, 0, 0, 0, 0, crc_from=0)
        _check_queue_files(layout.consume_queue, consume_queue_bytes)
        _check_queue_files(layout.batch_consume_queue, batch_queue_bytes)
        if layout.flush_failed.exists():
            _drop_page_cache(layout, log)
        checkpoint = Checkpoint.load_durable(layout.checkpoint)
        sidecar = _trusted_sidecar(layout, commit_log, previous_pid, bases)
        if sidecar is not None:
            start, durable, crc_from = max(sidecar.flushed, bases[0]), sidecar.queues_durable, sidecar.crc_from
            stamp = sidecar.flushed_timestamp
        else:
            covered = _covered_by_queues(layout, segment_bytes, consume_queue_bytes, batch_queue_bytes) if clean else -1
            start = _start_segment(commit_log, bases, covered if clean else None, checkpoint.min_timestamp)
            durable = covered if clean and covered >= 0 else start
            crc_from, stamp = -1, checkpoint.physic_msg_timestamp
        # The device works while the records are checked: what is accepted must be on it before anybody is told.
        _start_sync(layout, start, segment_bytes)
        found = scan_to_end(
            commit_log, start, crc_from=crc_from, start_is_flushed=sidecar is not None, progress=progress
        )
    finally:
        commit_log.close()
    if failpoints.ACTIVE:
        failpoints.hit("recovery.after_scan")
    progress("cutting the tail", 0, 0)
    cut = _cut_tail(layout, found, segment_bytes, bases, log)
    progress("syncing the log", 0, 0)
    if failpoints.ACTIVE:
        failpoints.hit("recovery.before_sync")
    _sync_segments(layout, start, found.end, segment_bytes)
    if layout.flush_failed.exists():
        layout.flush_failed.unlink()
        _sync_folder(layout.own)
    if clean and durable < found.end:
        log.warning(
            "the stop was clean but the queues are behind the log, they catch up", queues=durable, log_end=found.end
        )
    return Recovered(
        bases[0],
        found.end,
        max(bases[0], min(found.end, durable)),
        max(found.last_timestamp, stamp if sidecar is not None or found.records == 0 else 0),
        found.records,
        found.end - start,
        cut,
        crc_from=crc_from if crc_from >= 0 else found.end,
        by_sidecar=sidecar is not None,
    )


def _check_queue_files(queues: Path, file_bytes: int) -> None:
    """Raise SegmentSizeError unless the first queue's files have the configured size. All files of a store have one size,
    and with thousands of queues nobody should wait until each was looked at.
    """
    for _topic, _queue, folder in list_queues(queues):
        for path in folder.iterdir():
            size = path.stat().st_size
            if path.name.isdecimal() and size:
                check_size(path, size, file_bytes)
        return


def _trusted_sidecar(
    layout: StoreLayout, commit_log: CommitLog, previous_pid: int | None, bases: list[int]
) -> Sidecar | None:
    segment_bytes = commit_log.segment_bytes
    sidecar = Sidecar.load(layout.sidecar)
    if sidecar is None or not sidecar.agrees_with(
        layout.checkpoint, segment_bytes=segment_bytes, previous_pid=previous_pid
    ):
        return None
    if sidecar.flushed > bases[-1] + segment_bytes:
        raise StoreError(
            f"the log must reach physical offset {sidecar.flushed}, which was acknowledged as flushed, but its last segment "
            f"is {segment_name(bases[-1])}. Put the missing segments back, or remove {layout.sidecar} to go on without them",
            path=layout.commit_log,
        )
    if sidecar.flushed > bases[0] and not has_record_before(commit_log, sidecar.flushed):
        raise StoreError(
            f"no record ends at physical offset {sidecar.flushed}, up to which the log was flushed: these are files of "
            f"different moments, or of different stores. Nothing was changed. Put the right ones back, or remove "
            f"{layout.sidecar} to have the log end where its records do",
            path=layout.commit_log,
        )
    return sidecar


def _make_folders(layout: StoreLayout) -> None:
    """The store's own folders, and their names durable: what is synced in a folder that nobody finds again is lost.

    Done at every start, because a killed one may have made a folder without getting as far as the sync.
    """
    for folder in (layout.commit_log, layout.consume_queue, layout.config, layout.own):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in (layout.commit_log, layout.config, layout.own, layout.root):
        _sync_folder(folder)


def _drop_page_cache(layout: StoreLayout, log: Log) -> None:
    """Have the kernel forget what it calls clean of the log: after a failed sync that may never have reached the device.

    No process of the node has a file mapped now. What is dirty stays, and is written by this recovery's syncs.
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

    Records from ``crc_from`` on must have a ``__CRC32#``, unless it is negative. What lies behind the end of the log is
    not read where it was never written: a segment is a gigabyte, and the kernel knows its holes.

    Raises CorruptRecordError when something invalid has records behind it in a later segment, unless the sidecar says
    that what lies behind ``start`` need not be whole (``start_is_flushed``).
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
        if result == kernel.WALK_BLANK:
            if number + 1 == len(bases):
                # The next segment went with the crash, or was removed unused by a clean stop.
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
    :func:`commitmq.kernels.walk.scan`. A piece at a time, and ``checked`` is told the position behind each.
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
        goes_on = result == kernel.WALK_LIMIT or reason == raw.REASON_SHORT
        if result == kernel.WALK_BLANK or stop == segment.size or not goes_on:
            return result, records, good_end, stamp, reason
        if good_end == at:
            piece = segment.size  # longer than a piece, or no record at all: the whole segment tells
        at = good_end


def _written_end(commit_log: CommitLog, bases: list[int]) -> int:
    """Where, by the kernel's account of holes, the last written byte of the log may be; for showing progress only."""
    for base in reversed(bases):
        fd = os.open(commit_log.folder / segment_name(base), os.O_RDONLY | os.O_CLOEXEC)
        try:
            extents = _data_extents(fd, 0, commit_log.segment_bytes)
        finally:
            os.close(fd)
        if extents:
            return base + extents[-1][1]
    return 0


def _is_empty_behind(commit_log: CommitLog, base: int, position: int) -> bool:
    """Whether a segment holds zeros only from ``position`` on."""
    fd = os.open(commit_log.folder / segment_name(base), os.O_RDONLY | os.O_CLOEXEC)
    try:
        return next(_nonzero_chunks(fd, position, commit_log.segment_bytes), None) is None
    finally:
        os.close(fd)


def _start_segment(commit_log: CommitLog, bases: list[int], covered: int | None, min_timestamp: int) -> int:
    """The segment a scan starts in: see the rules in the module's text."""
    out = np.zeros(5, np.int64)
    rows = np.zeros(1, kernel.ROW)
    for base in reversed(bases):
        segment = np.frombuffer(commit_log.read(base, commit_log.segment_bytes), np.uint8)
        # One record only: its end bounds the scan.
        topics, table = np.zeros((1, 2), np.int64), np.full(4, -1, np.int32)
        walked = np.zeros(4, np.int64)
        result = kernel.walk(segment, 0, segment.size, base, rows, topics, table, walked)
        if int(walked[0]) != 1 or result == kernel.WALK_BAD:
            continue
        if kernel.scan(segment, 0, int(rows["size"][0]), base, False, out) != kernel.WALK_LIMIT or not int(out[0]):
            continue
        if covered is not None:
            if base <= covered:
                return base
        elif 0 < int(rows["store_timestamp"][0]) <= min_timestamp:
            return base
    return bases[0]


def _covered_by_queues(layout: StoreLayout, segment_bytes: int, file_bytes: int, batch_file_bytes: int) -> int:
    """End of the newest record that any ConsumeQueue points to; -1 when there is no unit at all."""
    covered = -1
    proof = LogProof(layout.commit_log, segment_bytes)
    fds = FdCache(_FEW_FILES)
    for _topic, _queue, folder in list_queues(layout.batch_consume_queue):
        batches = BatchConsumeQueue(folder, batch_file_bytes, fds)
        batches.refresh()
        covered = max(covered, batches.max_physical_offset)
    for topic, queue_id, folder in list_queues(layout.consume_queue):
        queue = ConsumeQueue(folder, file_bytes, fds)
        queue.refresh(proof=proof.of(topic, queue_id))
        covered = max(covered, queue.max_physical_offset)
    fds.close()
    proof.close()
    return covered


def _refuse_orphaned_queues(layout: StoreLayout) -> None:
    for queues in (layout.consume_queue, layout.batch_consume_queue):
        if any(True for _ in list_queues(queues)):
            raise StoreError(
                "there are ConsumeQueues but no CommitLog: the log was moved or deleted. Put it back, or remove "
                f"{queues.name}/",
                path=layout.commit_log,
            )


def _cut_tail(layout: StoreLayout, found: ScanEnd, segment_bytes: int, bases: list[int], log: Log) -> int:
    """Zero what lies behind the end in its segment, remove the segments behind; returns the bytes that were not zero."""
    base = found.end - found.end % segment_bytes
    cut = 0
    path = layout.commit_log / segment_name(base)
    if path.exists():
        cut += _zero_tail(layout, path, base, found, log)
    for later in sorted((one for one in bases if one >= found.end and one != base), reverse=True):
        segment = layout.commit_log / segment_name(later)
        # What a power cut left of records that nobody was told of goes too, but not without a copy.
        cut += _zero_tail(layout, segment, later, found, log)
        if failpoints.ACTIVE:
            failpoints.hit("recovery.before_remove")
        segment.unlink()
        _sync_folder(layout.commit_log)
        log.info("removed a segment that holds no records", segment=str(segment))
    return cut


def _zero_tail(layout: StoreLayout, path: Path, base: int, found: ScanEnd, log: Log) -> int:
    """Zero a segment behind the end, which lies in it or before it, durably; what was there is copied first."""
    start = max(0, found.end - base)
    fd = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        cut, copy = _keep_copy(layout, fd, base, start, size)
        if not cut:
            return 0
        if failpoints.ACTIVE:
            failpoints.hit("recovery.before_cut")
        for position, chunk in _nonzero_chunks(fd, start, size):
            write_all(fd, bytes(len(chunk)), position, place="recovery.cut")
        os.fdatasync(fd)
    finally:
        os.close(fd)
    log.warning(
        "cut the unfinished tail of the log",
        segment=path.name,
        offset=start,
        reason=found.torn or "stale bytes",
        copy=str(copy),
    )
    return cut


def _keep_copy(layout: StoreLayout, fd: int, base: int, start: int, size: int) -> tuple[int, Path | None]:
    """Copy what is not zero in [start, size) into ``commitmq/cut/``; returns its bytes and the copy."""
    cut = 0
    copy = layout.own / "cut" / f"{base:020d}-{start}-{time.time_ns() // 1_000_000}"
    chunks = _nonzero_chunks(fd, start, size)
    first = next(chunks, None)
    if first is None:
        return 0, None
    copy.parent.mkdir(parents=True, exist_ok=True)
    with copy.open("wb") as target:
        for position, chunk in itertools.chain([first], chunks):
            target.seek(position - start)
            target.write(chunk)
            cut += len(chunk)
        target.flush()
        os.fsync(target.fileno())
    _sync_folder(copy.parent)
    _sync_folder(layout.own)
    return cut, copy


def _nonzero_chunks(fd: int, start: int, size: int) -> Iterator[tuple[int, bytes]]:
    """``(position, bytes)`` of each chunk of [start, size) that is not all zero; holes are not read."""
    # All extents are asked for before the first read: what the kernel reads ahead of one counts as data from then on, so
    # a walk that asked as it went would read the rest of a segment, which is up to a gigabyte of zeros.
    for position, stop in _data_extents(fd, start, size):
        while position < stop:
            data = os.pread(fd, min(_CHUNK_BYTES, stop - position), position)
            if not data:
                return
            if np.frombuffer(data, np.uint8).any():
                yield position, data
            position += len(data)


def _data_extents(fd: int, start: int, size: int) -> list[tuple[int, int]]:
    """``(begin, end)`` of what in [start, size) is no hole: blocks that were written, and pages in the page cache."""
    extents = []
    while start < size:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            stop = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            stop = size  # a file system that knows no holes
        if start < stop:
            extents.append((start, stop))
        start = stop
    return extents


def _start_sync(layout: StoreLayout, start: int, segment_bytes: int) -> None:
    for path in sorted(layout.commit_log.iterdir()):
        if path.name.isdecimal() and int(path.name) + segment_bytes > start:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                start_writeback(fd)
            finally:
                os.close(fd)


def _sync_segments(layout: StoreLayout, start: int, end: int, segment_bytes: int) -> None:
    """Make what the scan accepted durable: after kill -9 it may only be in the page cache."""
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


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def writer_tail(commit_log: CommitLog, segment_bytes: int, *, start: int, published: int) -> tuple[int, int]:
    """End of the log for a writer that was restarted alone, and its last store timestamp (0 when nothing was scanned).

    ``start`` is a record boundary at or below ``published``, what the dead writer had published. Records that were complete
    but not published are taken over; the log never ends below ``published``. Raises StoreError if it would.
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
        if result != kernel.WALK_BLANK:
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
    """Zero what is not zero behind ``position`` in a segment, without a copy; returns how many bytes were looked at anew.

    For a restarted writer: what lies there was never published, acknowledged or seen.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        zeroed = 0
        for at, chunk in _nonzero_chunks(fd, position, os.fstat(fd).st_size):
            write_all(fd, bytes(len(chunk)), at)
            zeroed += len(chunk)
        return zeroed
    finally:
        os.close(fd)


def map_segment(path: Path, segment_bytes: int) -> mmap.mmap | None:
    """A writable mapping of a segment; None while the file does not exist. Raises StoreError for a wrong size."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size != segment_bytes:
            raise StoreError(f"the segment has {size} bytes, the configuration says {segment_bytes}", path=path)
        return mmap.mmap(fd, segment_bytes)
    finally:
        os.close(fd)
