"""Finds the end of the log after a start, and makes the store agree with it (spec section 8).

What a recovery decides
    end             behind the last valid record; everything behind is cut (after a copy was kept)
    redispatch_from where dispatchers restart; everything below is in the ConsumeQueues and durable

Rules
    * Sidecar, checkpoint and ConsumeQueues tell where the scan begins, and which records it must find
      (:mod:`commitmq.store.recovery.recovery_start`). Everything from there on is checked record by record (length
      chain, magic, physical offset, body CRC, ``__CRC32#`` when present) and dispatched again, which is idempotent.
    * An interrupted deletion of expired segments is finished first (see :mod:`commitmq.store.log.expiry`), and records
      that only a killed node's transient store pool has are taken over (see
      :mod:`commitmq.store.recovery.store_recovery`).
    * Segments that are missing at the log's beginning must have expired
      (:func:`commitmq.store.queues.queue_ends.lost_beginning`).
    * Zeros end the log. Invalid bytes are a torn tail or damage; which of the two, and whether the log may end there,
      is decided before anything is changed (:mod:`commitmq.store.recovery.cut_record`). A refused recovery changes
      nothing, so it is refused again until an operator decides.
    * A topic's tombstone behind the end is lowered to it: records appended there later do not belong to a deleted
      topic.
    * After a failed sync the page cache may hold bytes that the device never got, and count them clean: it is dropped
      first.
    * A sync may also have failed without a report, when its process was killed during it. So after a crash every
      accepted byte behind the last place known as durable is rewritten before the sync: the kernel then counts it as
      dirty again.

The recovery itself is crash-safe: if it is killed anywhere, it is simply run again. A cut has an order of its own for
that (:mod:`commitmq.store.recovery.store_recovery`). All changes are synced before positions are published.

Makes the device and the page cache agree on the log, before any process of the node relies on it.

Cuts the log behind its end, so that a cut that is killed anywhere can be repeated.

It copies the bytes and writes that down (:mod:`commitmq.store.recovery.cut_record`) before it zeroes them. It zeroes
before it removes later segments, the last one first and each durably, so that no segment can be missing between two
others.

Takes over records that only a killed node's transient store pool has, before the log's end is searched.

Rules
    * Only the pool that the store's note names is examined: made for this store (not for one it was copied from), in
      this boot of the machine. Nothing is taken from another pool, and nothing in it is changed.
    * The takeover begins at the pool's ``COMMITTED``. Each record is checked as a recovery checks the log's own: length
      chain, magic, physical offset, CRCs. The first invalid one ends it. Zeros there are the place of a record that a
      killed writer did not complete, and that was never acknowledged.
    * The records must continue the log: a record ends in the log at ``COMMITTED``, and the log's files behind that have
      the same bytes as the pool, or zeros. If not, RocketMQ or another program has used the store since, or the device
      lost bytes that were never flushed. Then the log stays as it is, and the pool's bytes are kept in
      ``commitmq/cut/``.
    * The pool is removed only when all of its bytes are on the device. A takeover that is killed is repeated from the
      start.

After a machine failure none of this applies, because shared memory is empty; the note names another boot.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from commitmq import failpoints
from commitmq.errors import DiskFullError, SegmentSizeError, StoreError
from commitmq.files import disk
from commitmq.files.disk import start_writeback, sync_folder, write_all
from commitmq.files.disk_space import is_no_space
from commitmq.files.mapped_file import check_size
from commitmq.files.unshare import nonzero_chunks, unshare
from commitmq.format.file_names import segment_name
from commitmq.kernels.codes import WALK_BLANK
from commitmq.kernels.compiled import scan
from commitmq.log import Log
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log import transient_pool
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.expiry import finish_expiry
from commitmq.store.log.readdressing import write_anew
from commitmq.store.log.transient_pool import PoolNote, TransientPool
from commitmq.store.metadata.topic_files import lower_tombstones
from commitmq.store.queues.queue_ends import QueueEnds, lost_beginning
from commitmq.store.queues.queue_files import has_record_before, list_queues
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.cut_record import Behind, Cut, judge, look_behind
from commitmq.store.recovery.recovery_start import RecoveryStart, where_to_begin
from commitmq.store.recovery.scan import Progress, ScanEnd, no_progress, scan_to_end
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.shared_memory import check_private


def drop_page_cache(layout: StoreLayout, log: Log) -> None:
    """Make the kernel drop the log's clean pages: after a failed sync they may never have reached the device. No
    process of the node has a file mapped now. Dirty pages stay, and this recovery's syncs write them.
    """
    log.warning("a sync failed in the last run: the log is read from the device, not from the page cache")
    for path in sorted(layout.commit_log.iterdir()):
        with disk.opened(path, os.O_RDONLY, "segment") as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def start_sync(layout: StoreLayout, start: int, segment_bytes: int) -> None:
    """Start the write-back of the segments from ``start`` on, which :func:`sync_segments` will wait for."""
    for path in sorted(layout.commit_log.iterdir()):
        if path.name.isdecimal() and int(path.name) + segment_bytes > start:
            with disk.opened(path, os.O_RDWR, "segment") as fd:
                start_writeback(fd)


def sync_segments(layout: StoreLayout, start: int, end: int, segment_bytes: int) -> None:
    """Make the accepted records durable: after kill -9 they may only be in the page cache."""
    base = start - start % segment_bytes
    while base < end:
        path = layout.commit_log / segment_name(base)
        if path.exists():
            with disk.opened(path, os.O_RDWR, "segment") as fd:
                disk.sync(fd, "segment")
        base += segment_bytes


def cut_tail(
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
            disk.unlink(path, "segment")
            disk.sync_folder(layout.commit_log)
            log.info("removed a segment that holds no records", segment=str(path))
    if cut is None:
        # The last line of an interrupted cut was never written: the log no longer has any of the cut bytes.
        begun = cut_record.unfinished(layout, "recovery", found.end)
        if begun is not None:
            cut_record.mark_done(layout, begun.id)
        return None
    cut_record.mark_done(layout, cut.id)
    log.warning("cut the end of the log", what=cut_record.sentence(layout, cut))
    return replace(cut, done=True)


def _write_down(layout: StoreLayout, found: ScanEnd, paths: dict[int, Path], behind: Behind, allowed: bool) -> Cut:
    """Copy the bytes behind the end, and record the cut, durably; an interrupted cut at this place is continued."""
    fds: dict[int, int] = {}
    try:
        for base, path in sorted(paths.items()):
            fds[base] = disk.open_file(path, os.O_RDONLY, "segment")
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
    reason = found.torn or ("promised messages are missing" if allowed else "stale bytes")
    cut = Cut(number, time.time_ns() // 1_000_000, "recovery", reason, found.end, tuple(parts), allowed)
    cut_record.append(layout, cut)
    return cut


def _zero_tail(path: Path, start: int) -> None:
    """Zero a segment from ``start`` on, durably; in this store only, not in a snapshot that has a link to it."""
    unshare(path, keep=start)
    with disk.opened(path, os.O_RDWR, "segment") as fd:
        zeroed = False
        for position, chunk in nonzero_chunks(fd, start, os.fstat(fd).st_size):
            write_all(fd, bytes(len(chunk)), position, place="recovery.cut")
            zeroed = True
        if zeroed:
            disk.sync(fd, "segment")


_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Span:
    """Complete records (and a filler) of one buffer: ``[start, end)`` of the segment at ``base``."""

    base: int
    start: int
    end: int
    buffer: mmap.mmap

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.buffer, np.uint8)[self.start : self.end]


def take_over(layout: StoreLayout, segment_bytes: int, log: Log) -> int:
    """Copy to the log the records that only the pool has, sync them, remove the pool; returns the number of records. No
    process of the node may be alive. Raises StoreError, without changes, when an operator must decide.
    """
    note = PoolNote.load(layout)
    if note is None:
        return 0
    folder = Path(note.folder)
    if not _is_ours(layout, note, folder, log):
        transient_pool.forget(layout)
        return 0
    check_private(folder)
    pool = TransientPool(folder, writable=False)
    try:
        if pool.segment_bytes != segment_bytes:
            raise SegmentSizeError(
                f"the transient store pool has segments of {pool.segment_bytes} bytes, but {segment_bytes} bytes are"
                " configured for the log; open the store with the size it was written with",
                path=folder,
            )
        spans, records, damage = _whole_records(pool)
        conflict = _conflict(layout, spans, segment_bytes) if spans else None
        if conflict is not None:
            spans, records = [], 0
        if conflict is not None or damage is not None:
            copies = _keep_copies(layout, pool)
            log.error("the transient store pool could not be taken over whole", why=conflict or damage, copies=copies)
        if failpoints.ACTIVE:
            failpoints.hit("recovery.before_takeover")
        for span in spans:
            _write(layout, span, segment_bytes)
        if spans:
            sync_folder(layout.commit_log)
            log.warning(
                "copied to the log the messages that a killed node had in its transient store pool only",
                start=spans[0].base + spans[0].start,
                end=spans[-1].base + spans[-1].end,
                records=records,
            )
    finally:
        pool.close()
    if failpoints.ACTIVE:
        failpoints.hit("recovery.after_takeover")
    transient_pool.remove(layout)
    return records


def _is_ours(layout: StoreLayout, note: PoolNote, folder: Path, log: Log) -> bool:
    root = layout.root.stat()
    if (note.device, note.inode) != (root.st_dev, root.st_ino):
        log.warning("this store is a copy: the transient store pool of the original is left alone", pool=folder)
        return False
    if note.boot != transient_pool.boot_id():
        log.warning("the machine was restarted: messages in the transient store pool only are lost", pool=folder)
        transient_pool.remove(layout)
        return False
    found = transient_pool.owner_id(folder)
    if found == note.id:
        return True
    if found:
        log.error("another transient store pool is in the place of this store's", pool=folder)
    elif os.path.lexists(folder):
        transient_pool.remove(layout)  # half made, or half removed: the log has all its records
    else:
        log.error("the transient store pool was deleted: its messages beyond the log are lost", pool=folder)
    return False


def _whole_records(pool: TransientPool) -> tuple[list[_Span], int, str | None]:
    """The spans that can be taken over, the number of their records, and the damage of the rest, if any."""
    out = np.zeros(5, np.int64)
    spans: list[_Span] = []
    records, damage = 0, None
    at = pool.committed
    while (buffer := pool.find(base := at - at % pool.segment_bytes)) is not None:
        data = np.frombuffer(buffer, np.uint8)
        result = scan(data, at - base, data.size, base, pool.has_crc, out)
        records += int(out[0])
        end = data.size if result == WALK_BLANK else int(out[1])
        if end > at - base:
            spans.append(_Span(base, at - base, end, buffer))
        at = base + end
        if result != WALK_BLANK:
            if data[end : end + 8].any():
                damage = f"no record is at {at}, behind the last whole one"
            break
    for base, buffer in pool.in_use():
        # The writer takes a buffer before it completes the previous one; once it has a record, the previous one is
        # complete.
        if damage is None and base > at and any(buffer[:8]):
            damage = f"the records end at {at}, and there are others in the segment at {base}"
    return spans, records, damage


def _conflict(layout: StoreLayout, spans: list[_Span], segment_bytes: int) -> str | None:
    """Why ``spans`` cannot continue the log; None when they can."""
    first = spans[0]
    start = first.base + first.start
    log = CommitLog(layout.commit_log, segment_bytes)
    try:
        bases = log.segments()
        if first.base in bases:
            if not has_record_before(log, start):
                return f"the log does not reach {start}, where the pool begins"
        elif first.start or first.base != log.end_offset:
            return f"the log ends with {log.end_offset}, the pool begins at {start}"
        for span in spans:
            if span.base in bases and not _fits(log.read(span.base + span.start, span.end - span.start), span.bytes()):
                return f"the log has other bytes behind {span.base + span.start}: it was written to without the pool"
    finally:
        log.close()
    return None


def _fits(found: memoryview, wanted: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """Whether ``found`` equals ``wanted``, or is zero where the write-back never arrived."""
    data = np.frombuffer(found, np.uint8)
    for at in range(0, data.size, _CHUNK_BYTES):
        piece, other = data[at : at + _CHUNK_BYTES], wanted[at : at + _CHUNK_BYTES]
        if np.any((piece != 0) & (piece != other)):
            return False
    return True


def _write(layout: StoreLayout, span: _Span, segment_bytes: int) -> None:
    path = layout.commit_log / segment_name(span.base)
    try:
        with disk.opened(path, os.O_RDWR | os.O_CREAT, "segment") as fd:
            if os.fstat(fd).st_size < segment_bytes:
                disk.reserve(fd, 0, segment_bytes, "segment")
            write_all(fd, memoryview(span.buffer)[span.start : span.end], span.start, place="recovery.takeover")
            disk.sync(fd, "segment")
    except OSError as error:
        raise StoreError(
            f"cannot write the messages of the transient store pool to the log; they stay in the pool: {error.strerror}",
            path=path,
        ) from error


def _keep_copies(layout: StoreLayout, pool: TransientPool) -> list[str]:
    """Copy the nonzero bytes behind ``COMMITTED`` into ``commitmq/cut/``, durably; returns the copies' names."""
    folder = layout.own / "cut"
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for base, buffer in pool.in_use():
        start = max(0, pool.committed - base)
        copy = folder / f"{base:020d}-{start}-{time.time_ns() // 1_000_000}.pool"
        with disk.opened(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "cut") as fd:
            for at in range(start, pool.segment_bytes, _CHUNK_BYTES):
                chunk = buffer[at : at + _CHUNK_BYTES]
                if any(chunk):
                    write_all(fd, chunk, at - start)
            disk.sync(fd, "cut", metadata=True)
        copies.append(str(copy))
    sync_folder(folder)
    sync_folder(layout.own)
    return copies


_FEW_QUEUES = 64


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
    """An operator allowed the log to end below a promised position."""
    clean: bool = False
    """The last stop was clean."""
    power_may_have_gone: bool = True
    """Bytes that were written and never synced may be missing."""


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
    """Run the recovery. No other process of the node may be alive. Raises StoreError when the store needs an operator.

    The three sizes are those of a CommitLog segment and of the files of plain and of BatchCQ queues. ``previous`` is
    the token in ``abort`` when the node was started, None without that file. ``allowed_end`` is where an operator
    allowed the log to end, -1 for nowhere. ``progress`` must be cheap.
    """
    _make_folders(layout)
    finish_expiry(layout, segment_bytes, forget=False)
    take_over(layout, segment_bytes, log)
    commit_log = CommitLog(layout.commit_log, segment_bytes)
    try:
        bases = commit_log.segments()
        first = bases[0] if bases else 0
        if not bases:
            refuse_orphaned_queues(layout)
        _check_queue_files(layout.consume_queue, consume_queue_bytes)
        _check_queue_files(layout.batch_consume_queue, batch_queue_bytes)
        if any(note.exists() for note in layout.failed_syncs):
            drop_page_cache(layout, log)
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
            start_sync(layout, begin.start, segment_bytes)
        found = scan_to_end(
            commit_log,
            begin.start,
            crc_from=begin.must_have_crc_from,
            # Whether the log may end there is decided below; without an operator's permission the damage is reported
            # here.
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
    cut = cut_tail(layout, found, segment_bytes, bases, behind, allowed, log)
    progress("syncing the log", 0, 0)
    if not clean:
        # A sync that failed without a report has left pages that are clean but not on the device.
        write_anew(layout, begin.start, found.end, segment_bytes)
        _confirm(layout, begin, found, segment_bytes)
    if failpoints.ACTIVE:
        failpoints.hit("recovery.before_sync")
    sync_segments(layout, begin.start, found.end, segment_bytes)
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
        clean=clean,
        power_may_have_gone=begin.power_may_have_gone,
    )


def _judge_beginning(layout: StoreLayout, begin: RecoveryStart, first: int, log: Log) -> None:
    """Raise StoreError when segments before the ``first`` are missing, and no other program used the store since."""
    ends = QueueEnds.load(layout.queue_ends)
    lost = "" if ends is None else lost_beginning(layout, ends, first)
    if lost and begin.by_sidecar:
        raise StoreError(f"{lost}. Nothing was changed", path=layout.commit_log / segment_name(first))
    if lost:
        log.warning(
            "the log begins later than this node left it: another program has used the store since, or its files of positions "
            "are gone",
            begins_at=first,
        )


def _confirm(layout: StoreLayout, begin: RecoveryStart, found: ScanEnd, segment_bytes: int) -> None:
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
            errno.EIO,
            f"the device does not have the bytes that the page cache had from {again.end} on",
            str(commit_log.folder),
        )


def _crc_from(begin: RecoveryStart, found: ScanEnd) -> int:
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


def refuse_orphaned_queues(layout: StoreLayout) -> None:
    """Raise StoreError when there are ConsumeQueues, for a store whose log has no segment. A log of which nothing was
    flushed may have lost everything by a power cut; a stop then removes its unused segments.
    """
    sidecar = Sidecar.load(layout.sidecar)
    if sidecar is not None and not sidecar.flushed and sidecar.has_seen(layout.checkpoint):
        return
    for queues in (layout.consume_queue, layout.batch_consume_queue):
        if any(True for _ in list_queues(queues)):
            raise StoreError(
                "there are ConsumeQueues but no CommitLog: the log was moved or deleted. Put it back, or remove "
                f"{queues.name}/",
                path=layout.commit_log,
            )
