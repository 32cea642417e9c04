"""Decides which segments of the CommitLog are deleted, and why: RocketMQ's rules (spec 10.1 - 10.3), without side
effects.

Segments are examined from the oldest on, and nothing behind a segment that stays is deleted. Reasons for a deletion:

    age      it is expired (its last write is ``keep_ms`` ago), and it is an hour for that, or a user asked
    disk     it is expired, and the disk is fuller than ``clean_ratio`` (or its use cannot be told)
    forced   the disk is fuller than ``forced_ratio``: expired or not
    budget   the store takes more than ``store_bytes``
    by hand  a user named an offset below which everything may be deleted

Never deleted: the active segment, and records that are not yet flushed and durably indexed (``limit``). Deleted only on
a disk above ``forced_ratio``: records that a lagging dispatcher still needs (``wanted_from``) and, with
``keep_unconsumed``, records that a consumer group has not read.

Unlike RocketMQ, the disk is measured again after each segment: a disk that is one segment too full costs one segment,
not a whole round of ten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

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
class Situation:
    """The current situation. ``segments`` are all of them, oldest first; times are milliseconds since 1970.

    ``used_ratio``: share of the disk in use, with space that only deleted files still hold counted as free; negative
    when it cannot be measured. ``disk_bytes``: the whole of that disk. ``store_bytes``: the part that the store uses.
    ``until``: by hand, segments that end at or below this offset are deleted. ``at_any_hour``: by hand, expired
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


def decide(rules: Rules, now: Situation, *, bounded: bool = True) -> Plan:
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


def _reason(rules: Rules, now: Situation, segment: Segment, ratio: float, freed: int) -> Reason | None:
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


def _claims(rules: Rules, now: Situation) -> list[Claim]:
    found = [] if now.wanted_from is None else [now.wanted_from]
    if rules.keep_unconsumed and now.slowest_group is not None:
        found.append(now.slowest_group)
    return found


def _why_not(rules: Rules, now: Situation, segment: Segment) -> str:
    if is_expired(rules, segment, now.now_ms):
        hours = ", ".join(f"{hour:02d}" for hour in sorted(rules.hours)) or "none"
        return f"expired, waits for its hour (delete_when: {hours})"
    return "not expired"


def is_expired(rules: Rules, segment: Segment, now_ms: int) -> bool:
    """Whether the segment's last write is old enough. A clock that was set back makes segments younger, never older."""
    return now_ms >= segment.modified_ms + rules.keep_ms


def next_by_age(rules: Rules, segment: Segment, now_ms: int, hour_of: Callable[[int], int] | None = None) -> int | None:
    """When age allows deleting ``segment``: the first time from now on at which it is expired in an allowed hour.

    None when no hour is allowed. ``hour_of`` tells the local hour of a time; by default the system's time zone does.
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
