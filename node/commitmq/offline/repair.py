"""``store repair``: makes a log with damage in its middle readable again, and puts back what was cut.

The user chooses one of two ways:

    cut    the log ends where the damage begins; everything behind it is cut, including whole records
    skip   only the damaged stretches are cut: blank records that every reader skips replace them (of a rolled back
           transaction, so no queue and no index has them), and pre-blank units replace their ConsumeQueue units

:mod:`commitmq.offline.log_damage` decides what is damage, by the rules of a start. Both ways cut a torn end, as a
recovery does. All bytes that are overwritten or cut are copied first, and the cut is written down
(:mod:`commitmq.store.recovery.cut_record`), so ``store repair --restore-cut`` can bring them back.

Steps: copies and the line in the journal, the store's history of cuts, the log, queues, sidecar and checkpoint, the journal's
"done"; finally queues and index are rebuilt from the log. The next repair continues a killed one: it finds the remaining
damage again, and a line without "done" says that the remaining steps must be done. Batch queues have no place for a lost
message, so damage in one of their topics can only be cut.

``store repair --restore-cut`` puts back bytes that a recovery or a repair cut from the log and kept in ``commitmq/cut``. This
works only while nothing was written over their place: behind a cut that ended the log there must be zeros, or
bytes of an interrupted restoration; in the place of a repair that skipped damage, the records it put there. Everything
else is refused with a message, and nothing is changed. The newest cut is put back first.

The part that continues the log comes last, and its first eight bytes at the very last: until then the log ends where it
ended, so a restoration that is killed is run again. Afterwards queues and index are rebuilt.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from commitmq import failpoints
from commitmq.errors import CommitMQError, StoreError
from commitmq.files import disk
from commitmq.files.disk import sync_folder, write_all
from commitmq.files.disk_space import kind_of
from commitmq.files.fd_cache import FdCache
from commitmq.files.unshare import nonzero_chunks, unshare
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
from commitmq.format.record import Record, encode_record, peek
from commitmq.format.units import BATCH_UNIT, UNIT
from commitmq.offline.extents import Extent, extents
from commitmq.offline.held_store import HeldStore
from commitmq.offline.log_damage import find_damage, log_end, refuse_missing_beginning, short_segments
from commitmq.offline.rebuild import KINDS, Progress, rebuild
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.expiry import list_bases
from commitmq.store.metadata import json_config
from commitmq.store.queues import queue_ends
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.cut_history import note_cut, note_restored
from commitmq.store.recovery.cut_record import Cut, CutPart

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
    """Replace each extent by records that readers skip, or a filler; zeros for a torn end. Returns lost bytes."""
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


_CHUNK_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Restored:
    """``cut``: the one put back, None when there was none; ``damage``: its bytes that are not whole records."""

    cut: Cut | None = None
    restored_bytes: int = 0
    damage: tuple[str, ...] = ()


def restorable(store: HeldStore) -> list[Cut]:
    """The cuts that were not put back, newest first; not those of transient store pools, which never were in the log."""
    return [cut for cut in reversed(cut_record.load(store.layout)) if not cut.restored and cut.by != "pool"]


def restore(store: HeldStore, progress: Progress = lambda _done, _total: None) -> Restored:
    """Put the newest cut back. Raises StoreError, with nothing changed, when that cannot be done."""
    cuts = restorable(store)
    if not cuts:
        return Restored()
    cut = cuts[0]
    for part in cut.parts:
        if not cut_record.copy_is_whole(store.layout, part):
            raise StoreError("the copy of the cut bytes is missing or damaged", path=_copy(store, part))
    refuse_missing_beginning(store, list_bases(store.layout.commit_log))
    regions = _end_regions(store, cut) if cut.log_end >= 0 else _skipped_regions(store, cut)
    # From here on the store is changed: the new end will be beyond the promised one.
    forget_promises(store)
    _make_segments(store, cut)
    for part, stop in sorted(regions, key=lambda one: one[0].begin, reverse=True):
        _put(store, part, stop)
        if failpoints.ACTIVE:
            failpoints.hit("restore.between_parts")
    note_restored(store.layout, cut.id)
    cut_record.mark_restored(store.layout, cut.id)
    _plan_path(store, cut).unlink(missing_ok=True)
    damage = tuple(
        f"segment {segment_name(one.start - one.start % store.config.commit_log.segment_bytes)} at "
        f"{one.start % store.config.commit_log.segment_bytes}, {one.end - one.start} bytes: {one.damage}"
        for one in find_damage(store)
    )
    if not damage:
        rebuild(store, KINDS if store.config.index.enable else ("queues",), progress)
    return Restored(cut, cut.bytes, damage)


def _copy(store: HeldStore, part: CutPart) -> str:
    return str(cut_record.cut_folder(store.layout) / part.copy)


def _end_regions(store: HeldStore, cut: Cut) -> list[tuple[CutPart, int]]:
    """``(part, end of its copy in the segment)``. Raises StoreError unless the log still ends where it was cut."""
    layout, segment_bytes = store.layout, store.config.commit_log.segment_bytes
    fds = {
        int(path.name): disk.open_file(path, os.O_RDONLY, "segment")
        for path in sorted(layout.commit_log.iterdir())
        if path.name.isdecimal() and int(path.name) + segment_bytes > cut.log_end
    }
    try:
        spans = [(fd, base, max(0, cut.log_end - base), os.fstat(fd).st_size) for base, fd in fds.items()]
        is_free = cut_record.still_kept(layout, cut, spans)
    finally:
        for fd in fds.values():
            os.close(fd)
    if not is_free:
        try:
            end = log_end(store)
        except CommitMQError:
            end = -1
        since = f"the log ends at {end} now" if end > cut.log_end else "other bytes are there now"
        raise StoreError(
            f"the bytes cut at physical offset {cut.log_end} cannot be put back: {since}, and messages that were stored since "
            f"would be overwritten. The copies stay; `commitmq store dump` reads a store made of them",
            path=cut_record.cut_folder(layout),
        )
    return [(part, part.start + part.size) for part in cut.parts]


def _skipped_regions(store: HeldStore, cut: Cut) -> list[tuple[CutPart, int]]:
    """``(part, end of the repair's records, in the segment)``. Raises StoreError when other bytes are there. A
    restoration that has begun overwrites the bytes that tell the end; so the ends are written down before.
    """
    plan = _plan_path(store, cut)
    try:
        stops = [int(stop) for stop in orjson.loads(plan.read_bytes())]
    except FileNotFoundError:
        log = CommitLog(store.layout.commit_log, store.config.commit_log.segment_bytes)
        try:
            stops = [_blank_end(log, part) for part in cut.parts]
        finally:
            log.close()
        json_config.replace_text(plan, orjson.dumps(stops).decode())
    return list(zip(cut.parts, stops, strict=True))


def _plan_path(store: HeldStore, cut: Cut) -> Path:
    return cut_record.cut_folder(store.layout) / f"restoring-{cut.id}.json"


def _blank_end(log: CommitLog, part: CutPart) -> int:
    """End, in the segment, of the records with which a repair replaced ``part``, or of the zeros of a torn end."""
    segment = log.read(part.segment, log.segment_bytes)
    at = part.start
    while at + _HEAD_BYTES <= len(segment):
        size, magic = peek(segment, at)
        if magic == MAGIC_FILLER and at + size == len(segment):
            return len(segment)
        try:
            if log.record(part.segment + at).topic not in (REPAIRED_TOPIC, SHORT_TOPIC):
                break
        except StoreError:
            break
        at += size
    end = part.start + part.size
    if at >= end or not any(segment[part.start : end]):
        return max(at, end)
    raise StoreError(
        "the bytes that a repair cut here cannot be put back: other bytes are in their place",
        path=log.folder / segment_name(part.segment),
        offset=part.start,
    )


def _make_segments(store: HeldStore, cut: Cut) -> None:
    """Make a file for every segment from the cut up to the last part: some were all zeros, and were removed."""
    segment_bytes = store.config.commit_log.segment_bytes
    first = max(cut.log_end, 0) // segment_bytes * segment_bytes
    last = max((part.segment for part in cut.parts), default=-1) if cut.log_end >= 0 else -1
    for base in range(first, last + 1, segment_bytes):
        path = store.layout.commit_log / segment_name(base)
        if path.exists() and path.stat().st_size == segment_bytes:
            continue
        try:
            with disk.opened(path, os.O_RDWR | os.O_CREAT, "segment") as fd:
                # A node maps its segments for writing: a store into a hole on a full disk would kill it.
                disk.reserve(fd, 0, segment_bytes, "segment")
                disk.sync(fd, "segment", metadata=True)
            sync_folder(path.parent)
        except OSError as error:
            raise _error(error, path) from error


def _error(error: OSError, path: Path) -> StoreError:
    kind = kind_of(error)
    return kind(f"cannot put back the cut bytes: {error.strerror}; try again", path=path)


def _put(store: HeldStore, part: CutPart, stop: int) -> None:
    """Put one part back, with zeros behind it up to ``stop``, durably; its first bytes last. Raises StoreError."""
    path = store.layout.commit_log / segment_name(part.segment)
    try:
        unshare(path)
        with disk.opened(path, os.O_RDWR, "segment") as fd:
            with open(_copy(store, part), "rb") as copy:
                head = copy.read(_HEAD_BYTES)
                at = part.start + len(head)
                while data := copy.read(_CHUNK_BYTES):
                    write_all(fd, data, at, place="restore.write")
                    at += len(data)
            for position, chunk in nonzero_chunks(fd, at, stop):
                write_all(fd, bytes(len(chunk)), position, place="restore.write")
            disk.sync(fd, "segment")
            if failpoints.ACTIVE:
                failpoints.hit("restore.before_head")
            write_all(fd, head, part.start, place="restore.write")
            disk.sync(fd, "segment")
    except OSError as error:
        raise _error(error, path) from error
