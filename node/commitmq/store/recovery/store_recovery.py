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

The recovery itself is crash-safe: if it is killed anywhere, it is simply run again. A cut has an order of its own for
that (:mod:`commitmq.store.recovery.tail_cut`). All changes are synced before positions are published.
"""

from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass
from pathlib import Path

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.mapped_file import check_size
from commitmq.format.file_names import segment_name
from commitmq.log import Log
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.expiry import finish_expiry
from commitmq.store.log.rewriting import write_anew
from commitmq.store.metadata.deleted_topics import lower_tombstones
from commitmq.store.queues.queue_ends import QueueEnds, lost_beginning
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery.cut_judge import Behind, judge, look_behind
from commitmq.store.recovery.cut_record import Cut
from commitmq.store.recovery.log_sync import drop_page_cache, start_sync, sync_segments
from commitmq.store.recovery.pool_recovery import take_over
from commitmq.store.recovery.recovery_start import Begin, where_to_begin
from commitmq.store.recovery.scan import Progress, ScanEnd, no_progress, scan_to_end
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.recovery.tail_cut import cut_tail

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
    """A person allowed the log to end below a promised position."""
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


def _judge_beginning(layout: StoreLayout, begin: Begin, first: int, log: Log) -> None:
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
            errno.EIO,
            f"the device does not have the bytes that the page cache had from {again.end} on",
            str(commit_log.folder),
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


def refuse_orphaned_queues(layout: StoreLayout) -> None:
    """Raise StoreError when there are ConsumeQueues, for a store whose log has no segment.

    A log of which nothing was flushed may have lost everything by a power cut; a stop then removes its unused segments.
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
