"""Finds the damage of a stopped store's log: damage between records, and an end that is not where it must be.

``store repair`` and a start decide alike: the extents of :mod:`commitmq.offline.extents` tell which bytes are not
records, and the rules of a recovery (:mod:`commitmq.store.recovery.recovery_start`,
:mod:`commitmq.store.recovery.cut_record`) whether the log may end where it does. A segment that was cut short counts as
filled up with zeros.

Explains a damaged log to the user whose node does not start: where the damage is, its extent, and the remedies.

Checks that the log of a stopped store begins where it must: its first segments may only be missing if they expired.

A start decides by the same rules (:mod:`commitmq.store.recovery.store_recovery`); offline verbs must not make it forget them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from commitmq.errors import CorruptRecordError, CutRefusedError, OffsetOutOfRangeError, SegmentSizeError, StoreError
from commitmq.files.mapped_file import MappedFile, MappedFileQueue, list_sizes
from commitmq.format.file_names import segment_name
from commitmq.offline.extents import Extent, extents
from commitmq.offline.held_store import HeldStore
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.queue_ends import QueueEnds, lost_beginning
from commitmq.store.recovery import abort_file
from commitmq.store.recovery.cut_record import judge, look_behind
from commitmq.store.recovery.recovery_start import RecoveryStart, where_to_begin
from commitmq.store.recovery.scan import scan_to_end
from commitmq.store.recovery.sidecar import Sidecar


def explained(error: CorruptRecordError, layout: StoreLayout, segment_bytes: int) -> CorruptRecordError:
    """``error`` with the extent of the damage in its segment, and the commands that show and repair it. Reads that
    segment; changes nothing. Returns ``error`` itself when it names no place, or when nothing is damaged there.
    """
    if error.path is None or error.offset is None or not error.path.name.isdecimal():
        return error
    base = int(error.path.name)
    log = CommitLog(layout.commit_log, segment_bytes)
    try:
        bases = log.segments()
        damaged = (one for one in extents(log, base, bases) if one.damage and one.end > base + (error.offset or 0))
        extent = next(damaged, None)
    except StoreError:
        return error
    finally:
        log.close()
    if extent is None:
        return error
    at, size = extent.start - base, extent.end - extent.start
    follows = "the segment ends there" if extent.end == base + segment_bytes else "a whole record follows"
    return CorruptRecordError(
        f"the log is damaged in the middle: segment {segment_name(base)} at offset {at}, {size} bytes, behind which "
        f"{follows}: {extent.damage}. Nothing was changed. Put back a copy of this segment, or let `commitmq store repair "
        f"{layout.root}` show all damage, and end the log there (--cut) or take out these bytes only (--skip)",
        path=error.path,
        offset=at,
    )


def trusted_ends(store: HeldStore) -> QueueEnds | None:
    """The record of the queues' ends, if no other program used the store since it was written."""
    sidecar = Sidecar.load(store.layout.sidecar)
    if sidecar is None or not sidecar.agrees_with(
        store.layout.checkpoint,
        segment_bytes=store.config.commit_log.segment_bytes,
        previous=abort_file.read_token(store.layout.abort),
    ):
        return None
    return QueueEnds.load(store.layout.queue_ends)


def missing_beginning(store: HeldStore, bases: Sequence[int]) -> str:
    """A message when segments are missing before the first of ``bases``, else "". Raises StoreError."""
    ends = trusted_ends(store)
    return lost_beginning(store.layout, ends, bases[0]) if bases and ends is not None else ""


def refuse_missing_beginning(store: HeldStore, bases: Sequence[int]) -> None:
    """Raise StoreError when segments are missing before the first of ``bases``."""
    why = missing_beginning(store, bases)
    if why:
        raise StoreError(f"{why}. Nothing was changed", path=store.layout.commit_log / segment_name(bases[0]))


_MAPS = 2


def find_damage(store: HeldStore) -> list[Extent]:
    """Every damaged extent of the log, in order. Changes nothing. Raises StoreError when a segment at the beginning or
    between two others is missing, or is larger than the others.
    """
    log = open_whole(store)
    try:
        bases = log.segments()
        refuse_missing_beginning(store, bases)
        found = [extent for base in bases for extent in extents(log, base, bases) if extent.damage]
        short = [
            (base, size) for base, size in list_sizes(log.folder, log.segment_bytes) if 0 < size < log.segment_bytes
        ]
        found += [
            Extent(base + size, base + log.segment_bytes, "its file was cut short, and only zeros are missing", True)
            for base, size in short
            if not any(base <= one.start < base + log.segment_bytes for one in found)
        ]
        return sorted(found, key=lambda one: one.start) or missing_end(store, log)
    finally:
        log.close()


def log_end(store: HeldStore) -> int:
    """End of the last whole record of the log, or of its segment when only a filler follows. Raises CorruptRecordError."""
    log = open_whole(store)
    try:
        return scan_to_end(log, log.min_offset).end if log.segments() else 0
    finally:
        log.close()


def refuse_damage(store: HeldStore, log: CommitLog) -> None:
    """Raise StoreError when a start would refuse the log because segments are missing at its beginning,
    CorruptRecordError when a start would refuse to end it where it ends now.
    """
    refuse_missing_beginning(store, log.segments())
    missing = missing_end(store, log)
    if missing:
        one = missing[0]
        base = one.start - one.start % log.segment_bytes
        raise CorruptRecordError(
            f"{one.damage}. Nothing was changed. `commitmq store repair {store.layout.root}` shows the damage and mends it",
            path=log.folder / segment_name(base),
            offset=one.start - base,
        )


def missing_end(store: HeldStore, log: CommitLog) -> list[Extent]:
    """The place where a start would refuse to end the log: promised records are missing behind it."""
    begin = begin_of(store, log)
    try:
        found = scan_to_end(
            log, begin.start, crc_from=begin.must_have_crc_from, start_is_flushed=begin.by_sidecar
        )  # fmt: skip
    except CorruptRecordError as error:
        start = int(error.path.name) + (error.offset or 0) if error.path is not None else begin.start
        return [Extent(start, start, str(error), is_torn_end=True)]
    newest = max(found.last_timestamp, begin.timestamp if begin.by_sidecar else 0)
    try:
        judge(
            store.layout, begin, found.end, newest, log.min_offset, found.torn, look_behind(log, found.end, newest), -1
        )
    except CutRefusedError as error:
        sidecar = Sidecar.load(store.layout.sidecar)
        promised = max(found.end, begin.covered, sidecar.flushed if sidecar is not None else 0)
        why = "the log ends here, and a start refuses that: " + str(error).partition("refused to cut the log: ")[2]
        return [Extent(found.end, promised, why.partition(". ")[0], is_torn_end=True)]
    return []


def begin_of(store: HeldStore, log: CommitLog) -> RecoveryStart:
    """Where a recovery of the store would begin, and what it would have to find."""
    layout, config = store.layout, store.config.consume_queue
    return where_to_begin(
        layout,
        log,
        Checkpoint.load_durable(layout.checkpoint),
        clean=not abort_file.exists(layout.abort),
        previous=abort_file.read_token(layout.abort),
        consume_queue_bytes=config.file_bytes,
        batch_queue_bytes=config.batch_file_bytes,
    )


def short_segments(store: HeldStore) -> list[Path]:
    folder, size = store.layout.commit_log, store.config.commit_log.segment_bytes
    return [folder / segment_name(base) for base, found in list_sizes(folder, size) if found < size]


def open_whole(store: HeldStore) -> CommitLog:
    """The log, with zeros where a segment's file was cut short. Raises StoreError."""
    folder, size = store.layout.commit_log, store.config.commit_log.segment_bytes
    return CommitLog(folder, size, files=_Lengthened(folder, size, max_mapped=_MAPS))


class _Lengthened(MappedFileQueue):
    """Segments as if all files had full size; shorter files are read into memory."""

    def refresh(self) -> None:
        sizes = list_sizes(self.folder, self.file_bytes)
        if sizes and sizes[-1][1] == 0:
            sizes.pop()  # it was just being made; every reader ignores such a segment
        for number, (base, size) in enumerate(sizes):
            if size > self.file_bytes:
                raise SegmentSizeError(
                    f"the segment has {size} bytes, the others {self.file_bytes}", path=self.folder / segment_name(base)
                )
            expected = sizes[0][0] + number * self.file_bytes
            if base != expected:
                raise StoreError(
                    f"segment {segment_name(expected)} is missing before {segment_name(base)}; put it back",
                    path=self.folder,
                )
        self._bases = [base for base, _ in sizes]
        self._short = {base: size for base, size in sizes if size < self.file_bytes}

    def mapped(self, offset: int) -> MappedFile:
        base = self.base_of(offset)
        if base not in self._short:
            return super().mapped(offset)
        found = self._maps.get(base)
        if found is None:
            found = self._maps[base] = _InMemory(self.folder / segment_name(base), base, self.file_bytes)
            self._give_up_surplus()
        return found


class _InMemory(MappedFile):
    """A segment whose file is shorter than ``size``."""

    def __init__(self, path: Path, base_offset: int, size: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self.size = size
        self.writable = False
        self._map = mmap.mmap(-1, size)
        try:
            with path.open("rb") as file:
                at = 0
                while data := file.read(1 << 20):
                    self._map[at : at + len(data)] = data
                    at += len(data)
        except OSError as error:
            raise OffsetOutOfRangeError(f"cannot read the segment: {error.strerror}", path=path) from error
