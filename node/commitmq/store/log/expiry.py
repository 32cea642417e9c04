"""Deletes the oldest segments of the CommitLog so that a crash between any two steps leaves a consistent store.

The order of a deletion, and the work of the next start after a crash behind each step:

    1  ``commitmq/min_offset`` is durable     the rest of the deletion is done by recovery
    2  the new minimum is published           the same: readers may have told it to consumers, so it never goes back
    3  holders unmap, files are unlinked      the same, for the remaining files
    4  ConsumeQueue and index files follow    their dispatchers do it when they open, by position

RocketMQ does not know ``min_offset``: it begins with the first existing segment, which is right too.

The file is one line, the offset in 20 digits. It is overwritten in place: a new file would need space, and a deletion
happens because space is short. One sector is written as a whole or not at all.

Decides which segments of the CommitLog are deleted, and why: RocketMQ's rules (spec 10.1 - 10.3), without side
effects.

Segments are examined from the oldest on, and nothing behind a segment that stays is deleted. Reasons for a deletion:

    age      it is expired (its last write is ``keep_ms`` ago), and it is an hour for that, or a user asked
    disk     it is expired, and the disk is fuller than ``clean_ratio`` (or its use cannot be told)
    forced   the disk is fuller than ``forced_ratio``: expired or not
    budget   the store takes more than ``store_bytes``
    manually  a user named an offset below which everything may be deleted

Never deleted: the active segment, and records that are not yet flushed and durably indexed (``limit``). Deleted only on
a disk above ``forced_ratio``: records that a lagging dispatcher still needs (``wanted_from``) and, with
``keep_unconsumed``, records that a consumer group has not read.

Unlike RocketMQ, the disk is measured again after each segment: a disk that is one segment too full costs one segment,
not a whole round of ten.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import overwrite, sync_folder
from commitmq.files.disk_space import FileId
from commitmq.format.constants import MIN_RECORD_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.record import peek
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog

_HOUR_MS = 3_600_000


class Reason(StrEnum):
    """Why a segment is deleted; ``status`` shows these words."""

    AGE = "age"
    DISK = "disk"
    FORCED = "forced"
    BUDGET = "budget"
    BY_HAND = "by hand"


@dataclass(frozen=True, slots=True)
class Rules:
    """The configured rules; see ``[retention]`` in node.toml. Ratios are shares of the disk, 0 to 1."""

    keep_ms: int
    hours: frozenset[int]
    clean_ratio: float
    forced_ratio: float
    forcibly: bool = True
    store_bytes: int = 0
    keep_unconsumed: bool = False
    batch_files: int = 10


@dataclass(frozen=True, slots=True)
class Segment:
    """One file: its base offset and size, its last write, and the bytes it takes on the disk."""

    base: int
    size: int
    modified_ms: int
    disk_bytes: int

    @property
    def end(self) -> int:
        """Offset behind its last byte."""
        return self.base + self.size


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim on the log from ``offset`` on; ``who`` completes the sentence "kept for ..."."""

    offset: int
    who: str


@dataclass(frozen=True, slots=True)
class RetentionState:
    """The current situation. ``segments`` are all of them, oldest first; times are milliseconds since 1970.

    ``used_ratio``: share of the disk in use, with space that only deleted files still hold counted as free; negative
    when it cannot be measured. ``disk_bytes``: the whole of that disk. ``store_bytes``: the part that the store uses.
    ``until``: manually, segments that end at or below this offset are deleted. ``at_any_hour``: manually, expired
    segments are deleted now.
    """

    now_ms: int
    hour: int
    segments: tuple[Segment, ...]
    limit: Claim
    used_ratio: float = 0.0
    disk_bytes: int = 1
    store_bytes: int = 0
    wanted_from: Claim | None = None
    slowest_group: Claim | None = None
    until: int | None = None
    at_any_hour: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments to delete now, oldest first, with reasons; why the next one stays; the claim that the full disk overrode."""

    segments: tuple[Segment, ...]
    reasons: tuple[Reason, ...]
    kept: str
    overridden: tuple[Claim, ...] = ()

    @property
    def min_offset(self) -> int:
        """Where the log begins afterwards. Only for a plan that deletes something."""
        return self.segments[-1].end

    @property
    def disk_bytes(self) -> int:
        return sum(segment.disk_bytes for segment in self.segments)


def decide(rules: Rules, now: RetentionState, *, bounded: bool = True) -> Plan:
    """The next round of deletions: with ``bounded`` at most ``rules.batch_files`` segments."""
    gone: list[Segment] = []
    reasons: list[Reason] = []
    overridden: dict[str, Claim] = {}
    freed = 0
    kept = "there is no segment"
    for segment in now.segments:
        if bounded and len(gone) >= rules.batch_files:
            kept = "a round is full, the next one continues"
            break
        if segment.end > now.limit.offset:
            kept = f"kept for {now.limit.who}"
            break
        ratio = now.used_ratio - freed / now.disk_bytes
        forced = rules.forcibly and ratio > rules.forced_ratio
        reason = _reason(rules, now, segment, ratio, freed)
        if reason is None:
            kept = _why_not(rules, now, segment)
            break
        claims = [claim for claim in _claims(rules, now) if claim.offset < segment.end]
        if claims and not forced:
            kept = f"kept for {claims[0].who}"
            break
        overridden.update((claim.who, claim) for claim in claims)
        gone.append(segment)
        reasons.append(Reason.FORCED if claims else reason)
        freed += segment.disk_bytes
    return Plan(tuple(gone), tuple(reasons), kept, tuple(overridden.values()))


def _reason(rules: Rules, now: RetentionState, segment: Segment, ratio: float, freed: int) -> Reason | None:
    if now.until is not None and segment.end <= now.until:
        return Reason.BY_HAND
    if is_expired(rules, segment, now.now_ms):
        if now.at_any_hour:
            return Reason.BY_HAND
        if now.hour in rules.hours:
            return Reason.AGE
        if ratio > rules.clean_ratio or now.used_ratio < 0:
            return Reason.DISK
    if rules.forcibly and ratio > rules.forced_ratio:
        return Reason.FORCED
    if rules.store_bytes and now.store_bytes - freed > rules.store_bytes:
        return Reason.BUDGET
    return None


def _claims(rules: Rules, now: RetentionState) -> list[Claim]:
    found = [] if now.wanted_from is None else [now.wanted_from]
    if rules.keep_unconsumed and now.slowest_group is not None:
        found.append(now.slowest_group)
    return found


def _why_not(rules: Rules, now: RetentionState, segment: Segment) -> str:
    if is_expired(rules, segment, now.now_ms):
        hours = ", ".join(f"{hour:02d}" for hour in sorted(rules.hours)) or "none"
        return f"expired, waits for its hour (delete_when: {hours})"
    return "not expired"


def is_expired(rules: Rules, segment: Segment, now_ms: int) -> bool:
    """Whether the segment's last write is old enough. A clock that was set back makes segments younger, never older."""
    return now_ms >= segment.modified_ms + rules.keep_ms


def next_by_age(rules: Rules, segment: Segment, now_ms: int, hour_of: Callable[[int], int] | None = None) -> int | None:
    """When age allows deleting ``segment``: the first time from now on at which it is expired in an allowed hour. None
    when no hour is allowed. ``hour_of`` tells the local hour of a time; by default the system's time zone does.
    """
    hour_of = hour_of or local_hour
    at = max(now_ms, segment.modified_ms + rules.keep_ms)
    if hour_of(at) in rules.hours:
        return at
    at -= at % 60_000
    # In steps of a quarter of an hour, because some time zones are shifted by that; two days cover every clock change.
    at -= at % (_HOUR_MS // 4)
    for _ in range(48 * 4):
        at += _HOUR_MS // 4
        if hour_of(at) in rules.hours:
            return at
    return None


def local_hour(at_ms: int) -> int:
    """Hour of the day, 0 to 23, in the system's time zone."""
    return time.localtime(at_ms / 1000).tm_hour


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
            # In place: a new file needs space, and this deletion makes room on a full disk.
            points = {"place": "min_offset.write", "before_sync": "min_offset.before_fsync"}
            overwrite(self.path, b"%020d\n" % offset, "min_offset", **points)
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
    segments, so an operator restored them and wants them.
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
    """Offset below which every record was stored before ``timestamp`` (ms), at a segment's beginning. A segment's
    records are not newer than the first one of the next segment, so one record of each segment is read.
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
    """Unlink one segment; returns the file's identity, None when it was already gone. Raises StoreError. Its mappings
    stay valid, and hold its space until the last one is gone.
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
