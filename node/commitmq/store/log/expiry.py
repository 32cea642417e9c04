"""Deletes the oldest segments of the CommitLog so that a crash between any two steps leaves a consistent store.

The order of a deletion, and the work of the next start after a crash behind each step:

    1  ``commitmq/min_offset`` is durable     the rest of the deletion is done by recovery
    2  the new minimum is published           the same: readers may have told it to consumers, so it never goes back
    3  holders unmap, files are unlinked      the same, for the remaining files
    4  ConsumeQueue and index files follow    their dispatchers do it when they open, by position

RocketMQ does not know ``min_offset``: it begins with the first existing segment, which is right too.

The file is one line, the offset in 20 digits. It is overwritten in place: a new file would need space, and a deletion
happens because space is short. One sector is written as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import sync_folder
from commitmq.files.disk_space import FileId
from commitmq.files.write_all import write_all
from commitmq.format.constants import MIN_RECORD_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.record import peek
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.retention import Segment

_DIGITS = 20
_RESTORED_NS = 2_000_000_000  # file systems have coarse clocks


class MinOffsetFile:
    """The durable minimum of the log."""

    def __init__(self, layout: StoreLayout) -> None:
        self.path = layout.own / "min_offset"

    def read(self) -> int:
        """The minimum; 0 when none was ever written. Raises StoreError when the file holds anything else."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise StoreError(f"cannot read the log's minimum: {error.strerror}", path=self.path) from error
        if not text:
            return 0  # the crash came between creating the file and writing it
        if len(text) != _DIGITS + 1 or not text[:_DIGITS].isdigit() or text[_DIGITS:] != b"\n":
            raise StoreError(
                "the log's minimum is not a number of 20 digits; remove the file, and the first segment counts",
                path=self.path,
            )
        return int(text)

    def write(self, offset: int) -> None:
        """Make ``offset`` the minimum, durably. Raises StoreError."""
        try:
            made = not self.path.exists()
            fd = disk.open_file(self.path, os.O_WRONLY | os.O_CREAT, "min_offset")
            try:
                # In place: a new file needs space, and this deletion makes room on a full disk.
                write_all(fd, b"%020d\n" % offset, 0, place="min_offset.write")
                if failpoints.ACTIVE:
                    failpoints.hit("min_offset.before_fsync")
                disk.sync(fd, "min_offset")
            finally:
                os.close(fd)
            if made:
                disk.sync_folder(self.path.parent, "min_offset")
        except OSError as error:
            raise StoreError(f"cannot write the log's minimum: {error.strerror}", path=self.path) from error


def list_bases(folder: Path) -> list[int]:
    """Base offsets of the segments in ``folder``, ascending; segments may be missing between them."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if len(name) == _DIGITS and name.isdigit())
    except FileNotFoundError:
        return []


def finish_expiry(layout: StoreLayout, segment_bytes: int, *, forget: bool = True) -> int:
    """Finish the deletion that a crash interrupted; returns where the log begins. No other process may be alive.

    It must run before anything examines the segments: a power cut may have taken back the deletion of one segment and
    not of the next. A minimum behind the last segment belongs to a log that was since replaced, and is forgotten;
    without ``forget`` it is kept, because the log may equally have lost its end, and then the minimum is evidence; a
    second call forgets it.
    """
    durable = MinOffsetFile(layout)
    minimum = durable.read()
    bases = list_bases(layout.commit_log)
    if minimum > (bases[-1] if bases else 0):
        first = bases[0] if bases else 0
        if forget:
            get_log("recovery").warning(
                "the log is not the one that was expired before", minimum=minimum, begins_at=first
            )
            durable.write(first)
        return first
    below = [base for base in bases if base + segment_bytes <= minimum]
    _refuse_restored(layout, durable.path, below)
    for base in below:
        with contextlib.suppress(FileNotFoundError):
            (layout.commit_log / segment_name(base)).unlink()
    if below:
        sync_folder(layout.commit_log)
        get_log("recovery").info("finished the deletion of expired segments", segments=len(below), begins_at=minimum)
    return max(minimum, bases[0] if bases else 0)


def _refuse_restored(layout: StoreLayout, note: Path, below: Sequence[int]) -> None:
    """Raise StoreError when segments below the minimum were put there after it was written: a deletion leaves no such
    segments, so a person restored them and wants them.
    """
    for base in below:
        path = layout.commit_log / segment_name(base)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ctime_ns > note.stat().st_mtime_ns + _RESTORED_NS:
                raise StoreError(
                    f"this segment was put back after it had been deleted as expired. Remove {note} to have the log begin with"
                    " the first segment that is there, or take the segment away; nothing was deleted",
                    path=path,
                )


def look_at_segments(folder: Path, segment_bytes: int, now_ms: int | None = None) -> tuple[Segment, ...]:
    """All segments in ``folder``, oldest first, with age and size.

    A segment that a fast clock dated in the future counts as old as the next one that is not. One that a slow clock dated
    earlier than the segment before counts as old as that.
    """
    found: list[Segment] = []
    now = following = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    for base in reversed(list_bases(folder)):
        try:
            status = os.stat(folder / segment_name(base))
        except FileNotFoundError:
            continue
        modified = status.st_mtime_ns // 1_000_000
        following = following if modified > now else modified
        found.append(Segment(base, segment_bytes, following, status.st_blocks * 512))
    modified = 0
    for number in range(len(found) - 1, -1, -1):
        modified = max(modified, found[number].modified_ms)
        found[number] = replace(found[number], modified_ms=modified)
    return tuple(reversed(found))


def offset_before(log: CommitLog, segments: Sequence[Segment], timestamp: int) -> int:
    """Offset below which every record was stored before ``timestamp`` (ms), at a segment's beginning.

    A segment's records are not newer than the first one of the next segment, so one record of each segment is read.
    """
    # From the newest on: no record was stored later than those behind it, though a fast clock may have stamped it so.
    for following in reversed(segments[1:]):
        first = first_timestamp(log, following.base)
        if 0 <= first <= timestamp:
            return following.base
    return segments[0].base if segments else 0


def first_timestamp(log: CommitLog, base: int) -> int:
    """Store time (ms) of the first record of the segment at ``base``, -1 when it holds none."""
    size, _ = peek(log.read(base, MIN_RECORD_BYTES))
    return log.store_timestamp(base, size) if size <= log.segment_bytes else -1


def delete_segment(layout: StoreLayout, base: int) -> FileId | None:
    """Unlink one segment; returns the file's identity, None when it was already gone. Raises StoreError.

    Its mappings stay valid, and hold its space until the last one is gone.
    """
    path = layout.commit_log / segment_name(base)
    if failpoints.ACTIVE:
        failpoints.hit("cleanup.before_unlink")
    try:
        status = path.stat()
        disk.unlink(path, "segment")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot delete the segment: {error.strerror}", path=path) from error
    if failpoints.ACTIVE:
        failpoints.hit("cleanup.after_unlink")
    return status.st_dev, status.st_ino


def store_bytes(folder: Path) -> int:
    """Bytes that everything under ``folder`` takes on the disk."""
    total = 0
    pending = [os.fspath(folder)]
    while pending:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
