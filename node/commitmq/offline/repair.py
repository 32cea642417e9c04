"""``store repair``: makes a log with damage in its middle readable again, in one of two ways that the user chooses.

    cut    the log ends where the damage begins; everything behind it is cut, including whole records
    skip   only the damaged stretches are cut: blank records that every reader skips replace them (of a rolled back
           transaction, so no queue and no index has them), and pre-blank units replace their ConsumeQueue units

:mod:`commitmq.offline.log_damage` decides what is damage, by the rules of a start. Both ways cut a torn end, as a
recovery does. All bytes that are overwritten or cut are copied first, and the cut is written down
(:mod:`commitmq.store.recovery.cut_record`), so ``store repair --restore-cut`` can bring them back
(:mod:`commitmq.offline.restore`).

Steps: copies and the line in the journal, the store's history of cuts, the log, queues, sidecar and checkpoint, the journal's
"done"; finally queues and index are rebuilt from the log. The next repair continues a killed one: it finds the remaining
damage again, and a line without "done" says that the remaining steps must be done. Batch queues have no place for a lost
message, so damage in one of their topics can only be cut.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files.disk import sync_folder
from commitmq.files.fd_cache import FdCache
from commitmq.files.no_space import kind_of
from commitmq.files.unshare import unshare
from commitmq.files.write_all import write_all
from commitmq.format.constants import (
    FILLER_BYTES,
    MAGIC_FILLER,
    MIN_RECORD_BYTES,
    PREBLANK_SIZE,
    UNIT_BYTES,
    Host,
    SysFlag,
)
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record, encode_record
from commitmq.format.units import BATCH_UNIT, UNIT
from commitmq.offline.extents import Extent, extents
from commitmq.offline.held_store import HeldStore
from commitmq.offline.log_damage import find_damage, short_segments
from commitmq.offline.rebuild import KINDS, Progress, rebuild
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues import queue_ends
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.cut_history import note_cut
from commitmq.store.recovery.cut_record import Cut

How = Literal["cut", "skip"]

REPAIRED_TOPIC: Final = "RMQ_SYS_REPAIRED"
SHORT_TOPIC: Final = "-"
_MOST_BODY_BYTES: Final = 1 << 20
_LEAST_RECORD_BYTES: Final = MIN_RECORD_BYTES + 1  # no record is shorter: its topic has a character


@dataclass(slots=True)
class Repaired:
    """``damage`` found; ``lost_bytes`` of the log that were cut; ``blanked_units``; ``evidence``: the copies."""

    damage: list[Extent] = field(default_factory=list)
    lost_bytes: int = 0
    blanked_units: int = 0
    evidence: list[Path] = field(default_factory=list)


def repair(store: HeldStore, how: How, progress: Progress = lambda _done, _total: None) -> Repaired:
    """Repair ``store`` (see the module's text). Raises StoreError, with nothing changed, if it cannot be repaired."""
    layout = store.layout
    damage = find_damage(store)
    begun = next(
        (cut for cut in reversed(cut_record.load(layout)) if cut.by.startswith("repair") and not cut.done), None
    )
    done = Repaired(damage)
    if not damage and begun is None:
        return done
    if damage:
        if how == "skip":
            _refuse_short(layout, damage)
            _refuse_batches(store, damage)
        for path in short_segments(store):
            _lengthen(path, store.config.commit_log.segment_bytes)
        begun = _keep(store, damage, how)
    assert begun is not None
    if begun.log_end >= 0:
        note_cut(
            layout, begun.log_end, begun.by, begun.id
        )  # also for an interrupted repair, which may not have come so far
    if damage:
        if failpoints.ACTIVE:
            failpoints.hit("repair.before_log")
        if how == "cut":
            _cut(store, damage[0].start)
            done.lost_bytes = begun.bytes
        else:
            done.lost_bytes = _overwrite(store, damage)
    done.evidence = [cut_record.cut_folder(layout) / part.copy for part in begun.parts]
    if begun.log_end >= 0:
        _cut_queues(store, begun.log_end)
    else:
        done.blanked_units = _blank_units(store, damage or [Extent(part.begin, part.end) for part in begun.parts])
    forget_promises(store)
    cut_record.mark_done(layout, begun.id)
    rebuild(store, KINDS if store.config.index.enable else ("queues",), progress)
    if layout.index.is_dir() and not store.config.index.enable:
        # Its items would point into records written from now on; a node that switches the index on again rebuilds it.
        shutil.rmtree(layout.index)
    return done


def forget_promises(store: HeldStore) -> None:
    """Withdraw the statements of sidecar and checkpoint about the log's end. Raises StoreError, OSError."""
    layout = store.layout
    layout.sidecar.unlink(missing_ok=True)
    sync_folder(layout.own)
    queue_ends.forget(layout.queue_ends)
    log = CommitLog(layout.commit_log, store.config.commit_log.segment_bytes)
    try:
        newest = newest_timestamp(log)
    finally:
        log.close()
    checkpoint = Checkpoint.load(layout.checkpoint)
    stamps = (checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp, checkpoint.index_msg_timestamp)
    if max(stamps) > newest:
        checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp, checkpoint.index_msg_timestamp = (
            min(stamp, newest) for stamp in stamps
        )
        checkpoint.save(layout.checkpoint)


def newest_timestamp(log: CommitLog) -> int:
    """Store time (ms) of the log's last record; 0 if there is none."""
    for base in reversed(log.segments()):
        spans = [one for one in extents(log, base, log.segments()) if not one.damage]
        stamps = [
            log.store_timestamp(start, size) for one in spans[-1:] for start, size in log.iter_spans(one.start, one.end)
        ]
        if stamps:
            return max(stamps)
    return 0


def _lengthen(path: Path, segment_bytes: int) -> None:
    """Restore the size of a segment file that was cut short, and its disk space: a node maps it for writing."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, segment_bytes)
        os.fsync(fd)
    except OSError as error:
        kind = kind_of(error)
        raise kind(f"the segment cannot get its size again: {error.strerror}", path=path) from error
    finally:
        os.close(fd)


# ---------------------------------------------------------------- before anything is changed


def _refuse_short(layout: StoreLayout, damage: list[Extent]) -> None:
    for extent in damage:
        if not extent.is_torn_end and extent.end - extent.start < FILLER_BYTES:
            raise StoreError(
                f"the damage of {extent.end - extent.start} bytes is too short to be skipped; cut there",
                path=layout.commit_log,
                offset=extent.start,
            )


def _refuse_batches(store: HeldStore, damage: list[Extent]) -> None:
    for topic, queue_id, folder in list_queues(store.layout.batch_consume_queue):
        for path in folder.iterdir():
            units = np.frombuffer(path.read_bytes(), BATCH_UNIT)
            if any(
                _inside(units["physical_offset"].astype(np.int64), units["size"], extent).any() for extent in damage
            ):
                raise StoreError(
                    f"{topic} queue {queue_id} is a batch queue with messages in the damage; its damage can only be cut",
                    path=path,
                )


def _inside(offsets: NDArray[np.int64], sizes: NDArray[np.int32], extent: Extent) -> NDArray[np.bool_]:
    is_inside: NDArray[np.bool_] = (offsets >= extent.start) & (offsets < extent.end)
    is_inside &= (sizes > 0) & (sizes != PREBLANK_SIZE)
    return is_inside


def _keep(store: HeldStore, damage: list[Extent], how: How) -> Cut:
    """Copy the bytes that will be cut, and record them, durably: the damaged extents, or all from the first on."""
    layout, segment_bytes = store.layout, store.config.commit_log.segment_bytes
    first = damage[0].start
    bases = sorted(int(path.name) for path in layout.commit_log.iterdir() if path.name.isdecimal())
    if how == "cut":
        spans = [(base, max(0, first - base), segment_bytes) for base in bases if base + segment_bytes > first]
    else:
        spans = [(one.start - one.start % segment_bytes, one.start, one.end) for one in damage]
        spans = [(base, start - base, end - base) for base, start, end in spans if base in bases]
    number = cut_record.new_id(layout)
    parts = []
    for base, start, stop in spans:
        fd = os.open(layout.commit_log / segment_name(base), os.O_RDONLY | os.O_CLOEXEC)
        try:
            part = cut_record.keep(layout, number, fd, base, start, stop)
        except OSError as error:
            raise StoreError(f"cannot copy the bytes that are to be cut: {error.strerror}", path=layout.own) from error
        finally:
            os.close(fd)
        if part is not None:
            parts.append(part)
    log_end = first if how == "cut" else -1
    cut = Cut(number, time.time_ns() // 1_000_000, f"repair --{how}", damage[0].damage, log_end, tuple(parts), True)
    cut_record.append(layout, cut)
    return cut


# ---------------------------------------------------------------- cut


def _cut(store: HeldStore, first: int) -> None:
    """End the log at ``first``: zero the rest of its segment, remove the later ones."""
    layout, segment_bytes = store.layout, store.config.commit_log.segment_bytes
    base = first - first % segment_bytes
    # The latest segment first: so the rest is a valid log at every moment.
    for path in sorted(layout.commit_log.iterdir(), reverse=True):
        if path.name.isdecimal() and int(path.name) > base:
            path.unlink()
    if (layout.commit_log / segment_name(base)).exists():
        _write(layout.commit_log / segment_name(base), first - base, bytes(base + segment_bytes - first))
    sync_folder(layout.commit_log)


def _cut_queues(store: HeldStore, first: int) -> None:
    config = store.config.consume_queue
    fds = FdCache(config.max_open_files)
    for _, _, folder in list_queues(store.layout.consume_queue):
        queue = ConsumeQueue(folder, config.file_bytes, fds)
        queue.recover(first)
        queue.flush()
    for _, _, folder in list_queues(store.layout.batch_consume_queue):
        batches = BatchConsumeQueue(folder, config.batch_file_bytes, fds)
        batches.recover()
        batches.truncate(first)
        batches.flush()
    fds.close()
    # The extension is only read through the remaining units.
    shutil.rmtree(store.layout.own / "rebuild", ignore_errors=True)


# ---------------------------------------------------------------- skip


def _overwrite(store: HeldStore, damage: list[Extent]) -> int:
    """Replace each extent by records that every reader skips, or by a filler; replace a torn end by zeros. Returns the
    number of lost bytes.
    """
    layout, segment_bytes = store.layout, store.config.commit_log.segment_bytes
    log = CommitLog(layout.commit_log, segment_bytes)
    try:
        stamps = [0 if extent.is_torn_end else _stamp_before(log, extent.start) for extent in damage]
    finally:
        log.close()
    for extent, stamp in zip(damage, stamps, strict=True):
        base = extent.start - extent.start % segment_bytes
        size = extent.end - extent.start
        if not (layout.commit_log / segment_name(base)).exists():
            continue  # the whole segment was cut
        if extent.is_torn_end:
            data = bytes(min(size, base + segment_bytes - extent.start))
        elif extent.end == base + segment_bytes or size < _LEAST_RECORD_BYTES:
            if extent.end != base + segment_bytes:
                raise StoreError("too short for a record; cut there", path=layout.commit_log, offset=extent.start)
            data = (size.to_bytes(4, "big") + (MAGIC_FILLER & 0xFFFFFFFF).to_bytes(4, "big")).ljust(size, b"\0")
        else:
            data = _blank_records(extent.start, size, stamp)
        _write(layout.commit_log / segment_name(base), extent.start - base, data)
    return sum(extent.end - extent.start for extent in damage)


def _stamp_before(log: CommitLog, offset: int) -> int:
    """Store time of the newest record before ``offset`` in its segment: times must not fall along the log. Else 0."""
    base = offset - offset % log.segment_bytes
    stamp = 0
    for extent in extents(log, base, log.segments()):
        if extent.start >= offset:
            break
        if not extent.damage:
            for start, size in log.iter_spans(extent.start, extent.end):
                stamp = max(stamp, log.store_timestamp(start, size))
    return stamp


def _blank_records(start: int, size: int, stamp: int) -> bytes:
    """Records of a rolled back transaction that exactly fill ``size`` bytes from physical offset ``start``."""
    data = bytearray()
    while len(data) < size:
        left = size - len(data)
        topic = REPAIRED_TOPIC if left >= MIN_RECORD_BYTES + len(REPAIRED_TOPIC) else SHORT_TOPIC
        body = left - MIN_RECORD_BYTES - len(topic)
        if body > _MOST_BODY_BYTES:
            # Never leave a rest that is too short for a record.
            body = min(_MOST_BODY_BYTES, body - _LEAST_RECORD_BYTES - len(REPAIRED_TOPIC))
        host = Host("127.0.0.1", 0)
        record = Record(
            topic,
            physical_offset=start + len(data),
            body=bytes(body),
            sys_flag=int(SysFlag.TRANSACTION_ROLLBACK),
            born_timestamp=stamp,
            store_timestamp=stamp,
            born_host=host,
            store_host=host,
        )
        data += encode_record(record)
    return bytes(data)


def _blank_units(store: HeldStore, damage: list[Extent]) -> int:
    """Turn the units of records in the damage into pre-blank ones; returns their number."""
    blanked = 0
    for _, _, folder in list_queues(store.layout.consume_queue):
        for path in sorted(folder.iterdir()):
            if not path.name.isdecimal():
                continue
            units = np.frombuffer(bytearray(path.read_bytes()), UNIT)
            offsets = units["physical_offset"].astype(np.int64)
            hit = np.zeros(len(units), np.bool_)
            for extent in damage:
                hit |= _inside(offsets, units["size"], extent)
            if not hit.any():
                continue
            numbers = np.flatnonzero(hit)
            first, last = int(numbers[0]), int(numbers[-1]) + 1
            units[hit] = (0, PREBLANK_SIZE, 0)
            _write(path, first * UNIT_BYTES, units[first:last].tobytes())
            blanked += len(numbers)
    return blanked


def _write(path: Path, position: int, data: bytes) -> None:
    try:
        unshare(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror}", path=path, offset=position) from error
    try:
        write_all(fd, data, position, place="repair.write")
        os.fdatasync(fd)
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror}", path=path, offset=position) from error
    finally:
        os.close(fd)
