"""``store repair --restore-cut``: puts back bytes that a recovery or a repair cut from the log and kept in ``commitmq/cut``.

This works only while nothing was written over their place: behind a cut that ended the log there must be zeros, or
bytes of an interrupted restoration; in the place of a repair that skipped damage, the records it put there. Everything
else is refused with a message, and nothing is changed. The newest cut is put back first.

The part that continues the log comes last, and its first eight bytes at the very last: until then the log ends where it
ended, so a restoration that is killed is run again. Afterwards queues and index are rebuilt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from commitmq import failpoints
from commitmq.errors import CommitMQError, StoreError
from commitmq.files import disk
from commitmq.files.disk import sync_folder
from commitmq.files.holes import nonzero_chunks
from commitmq.files.no_space import kind_of
from commitmq.files.unshare import unshare
from commitmq.files.write_all import write_all
from commitmq.format.constants import MAGIC_FILLER
from commitmq.format.file_names import segment_name
from commitmq.format.record import peek
from commitmq.offline.held_store import HeldStore
from commitmq.offline.log_damage import find_damage, log_end, refuse_missing_beginning
from commitmq.offline.rebuild import KINDS, Progress, rebuild
from commitmq.offline.repair import REPAIRED_TOPIC, SHORT_TOPIC, forget_promises
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.expiry import list_bases
from commitmq.store.metadata import json_config
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.cut_history import note_restored
from commitmq.store.recovery.cut_record import Cut, CutPart

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
    """``(part, end of the repair's records, in the segment)``. Raises StoreError when other bytes are there.

    A restoration that has begun overwrites the bytes that tell the end; so the ends are written down before.
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
