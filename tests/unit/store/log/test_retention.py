"""Goal: exactly the segments go that the rules of the ladder name, each for the reason that counts, and nothing else.

Method: a table of situations around every threshold; then random situations, for which the promises are checked rather than
the steps (oldest first, nothing above a limit, nothing more than needed).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commitmq.store.log.expiry import (
    Claim,
    Plan,
    Reason,
    RetentionState,
    Rules,
    Segment,
    decide,
    is_expired,
    next_by_age,
)

HOUR_MS = 3_600_000
NOW_MS = 1_800_000_000_000
SIZE = 100
WRITER = Claim(10 * SIZE, "the writer")


def segments(*ages_hours: float) -> tuple[Segment, ...]:
    """One segment for each age, oldest first, from offset 0 on; each takes 100 bytes of a disk of 1000."""
    return tuple(
        Segment(number * SIZE, SIZE, NOW_MS - int(age * HOUR_MS), SIZE) for number, age in enumerate(ages_hours)
    )


RULES = Rules(keep_ms=72 * HOUR_MS, hours=frozenset({4}), clean_ratio=0.75, forced_ratio=0.85)
OLD, NEW = 72, 71.99
THREE_OLD = segments(100, 90, OLD, NEW, 1)
ALL_NEW = segments(NEW, 50, 20, 1)


def situation(found: tuple[Segment, ...], **what: Any) -> RetentionState:
    limit = what.pop("limit", Claim(found[-1].base, WRITER.who))
    return RetentionState(NOW_MS, what.pop("hour", 12), found, limit, disk_bytes=1000, **what)


LADDER = [
    # name, situation, changes to the rules, segments that go, their reason, what is said of the next
    ("nothing is wrong", situation(ALL_NEW), {}, 0, None, "not expired"),
    ("expired, another hour", situation(THREE_OLD), {}, 0, None, "waits for its hour"),
    ("expired, its hour", situation(THREE_OLD, hour=4), {}, 3, Reason.AGE, "not expired"),
    ("one of two hours", situation(THREE_OLD, hour=16), {"hours": frozenset({4, 16})}, 3, Reason.AGE, "not expired"),
    ("no hour at all", situation(THREE_OLD, hour=4), {"hours": frozenset()}, 0, None, "none"),
    ("exactly as old as the limit", situation(segments(OLD, 1), hour=4), {}, 1, Reason.AGE, "the writer"),
    ("a moment younger", situation(segments(NEW, 1), hour=4), {}, 0, None, "not expired"),
    ("at 75 %", situation(THREE_OLD, used_ratio=0.75), {}, 0, None, "waits for its hour"),
    ("above 75 %, expired", situation(THREE_OLD, used_ratio=0.751), {}, 1, Reason.DISK, "waits for its hour"),
    ("above 75 % for long", situation(THREE_OLD, used_ratio=0.849), {}, 1, Reason.DISK, "waits for its hour"),
    ("above 75 %, nothing expired", situation(ALL_NEW, used_ratio=0.84), {}, 0, None, "not expired"),
    ("the use is unknown", situation(THREE_OLD, used_ratio=-1.0), {}, 3, Reason.DISK, "not expired"),
    ("at 85 %", situation(ALL_NEW, used_ratio=0.85), {}, 0, None, "not expired"),
    ("above 85 %", situation(ALL_NEW, used_ratio=0.86), {}, 1, Reason.FORCED, "not expired"),
    ("far above 85 %", situation(ALL_NEW, used_ratio=0.97), {}, 2, Reason.FORCED, "not expired"),
    ("full, but never the last", situation(ALL_NEW, used_ratio=1.9), {}, 3, Reason.FORCED, "the writer"),
    ("not forcibly", situation(ALL_NEW, used_ratio=0.99), {"forcibly": False}, 0, None, "not expired"),
    ("within the budget", situation(ALL_NEW, store_bytes=400), {"store_bytes": 400}, 0, None, "not expired"),
    ("over the budget", situation(ALL_NEW, store_bytes=401), {"store_bytes": 400}, 1, Reason.BUDGET, "not expired"),
    ("far over it", situation(ALL_NEW, store_bytes=650), {"store_bytes": 400}, 3, Reason.BUDGET, "the writer"),
    ("no budget", situation(ALL_NEW, store_bytes=1 << 60), {}, 0, None, "not expired"),
    (
        "a round is full",
        situation(segments(*[80] * 15), hour=4),
        {"batch_files": 10},
        10,
        Reason.AGE,
        "a round is full",
    ),
    ("by hand, at any hour", situation(THREE_OLD, at_any_hour=True), {}, 3, Reason.BY_HAND, "not expired"),
    ("by hand, nothing expired", situation(ALL_NEW, at_any_hour=True), {}, 0, None, "not expired"),
    ("by hand, up to an offset", situation(ALL_NEW, until=250), {}, 2, Reason.BY_HAND, "not expired"),
    ("by hand, up to a segment's end", situation(ALL_NEW, until=300), {}, 3, Reason.BY_HAND, "the writer"),
    ("by hand, everything", situation(ALL_NEW, until=1 << 60), {}, 3, Reason.BY_HAND, "the writer"),
    (
        "a young one protects older ones behind it",
        situation(segments(1, 99, 99, 1), hour=4),
        {},
        0,
        None,
        "not expired",
    ),
    ("not flushed yet", situation(THREE_OLD, hour=4, limit=Claim(250, "flush")), {}, 2, Reason.AGE, "kept for flush"),
    ("full, but not flushed", situation(ALL_NEW, used_ratio=2.0, limit=Claim(99, "flush")), {}, 0, None, "flush"),
    ("no segment", RetentionState(NOW_MS, 4, (), Claim(0, "x"), used_ratio=2.0), {}, 0, None, "no segment"),
]


@pytest.mark.parametrize(
    ("now", "changes", "count", "reason", "kept"), [row[1:] for row in LADDER], ids=[r[0] for r in LADDER]
)
def test_the_ladder(now: RetentionState, changes: dict[str, Any], count: int, reason: Reason | None, kept: str) -> None:
    plan = decide(replace(RULES, **changes), now)
    assert plan.segments == now.segments[:count]
    assert set(plan.reasons) == ({reason} if reason else set())
    assert kept in plan.kept
    if count:
        assert plan.min_offset == count * SIZE
        assert plan.disk_bytes == count * SIZE


def test_each_segment_has_its_own_reason() -> None:
    now = situation(segments(100, 1, 1, 1, 1), used_ratio=0.96, store_bytes=500)
    plan = decide(replace(RULES, store_bytes=250), now)
    # The first is expired, the second takes the disk below 85 %, the third the store below its budget.
    assert plan.reasons == (Reason.DISK, Reason.FORCED, Reason.BUDGET)


@pytest.mark.parametrize("shift_hours", [-1, -72, -24 * 365])
def test_a_clock_set_back_deletes_nothing_early(shift_hours: int) -> None:
    later = situation(THREE_OLD, hour=4)
    assert len(decide(RULES, later).segments) == 3
    back = replace(later, now_ms=later.now_ms + shift_hours * HOUR_MS)
    for segment in decide(RULES, back).segments:
        assert back.now_ms - segment.modified_ms >= RULES.keep_ms
    if shift_hours == -1:
        assert len(decide(RULES, back).segments) == 2
    else:
        assert not decide(RULES, back).segments


# ---------------------------------------------------------------- who needs the log

GROUP = Claim(150, "group slow")


@pytest.mark.parametrize("what", [{"hour": 4}, {"used_ratio": -1.0}, {"until": 300}, {"store_bytes": 999}])
def test_what_a_group_has_not_read_stays(what: dict[str, Any]) -> None:
    rules = replace(RULES, keep_unconsumed=True, store_bytes=200)
    now = situation(segments(99, 99, 99, 1), slowest_group=GROUP, **what)
    plan = decide(rules, now)
    assert [segment.base for segment in plan.segments] == [0]
    assert "group slow" in plan.kept
    assert plan.overridden == ()


def test_without_keep_unconsumed_nobody_asks_the_groups() -> None:
    assert len(decide(RULES, situation(segments(99, 99, 99, 1), hour=4, slowest_group=GROUP)).segments) == 3


def test_a_disk_at_the_forced_threshold_takes_what_is_unread_and_says_whose() -> None:
    rules = replace(RULES, keep_unconsumed=True)
    now = situation(segments(99, 99, 99, 1), used_ratio=0.96, slowest_group=GROUP, hour=4)
    plan = decide(rules, now)
    # 96 % less two segments is 76 %: the third stays for the group, although it is expired in its hour.
    assert plan.reasons == (Reason.AGE, Reason.FORCED)
    assert plan.overridden == (GROUP,)
    assert "group slow" in plan.kept
    assert decide(replace(rules, forcibly=False), now).overridden == ()


def test_a_dispatcher_that_is_behind_is_waited_for_unless_the_disk_is_full() -> None:
    behind = Claim(0, "dispatcher index")
    waiting = decide(RULES, situation(THREE_OLD, hour=4, wanted_from=behind))
    assert not waiting.segments
    assert "dispatcher index" in waiting.kept
    full = decide(RULES, situation(THREE_OLD, used_ratio=0.86, wanted_from=behind))
    assert full.reasons == (Reason.FORCED,)
    assert full.overridden == (behind,)


# ---------------------------------------------------------------- any situation


@given(
    ages=st.lists(st.floats(0, 200), min_size=1, max_size=30),
    hour=st.integers(0, 23),
    ratio=st.floats(-1, 1.5),
    store_bytes=st.integers(0, 4000),
    limit=st.integers(0, 3000),
    unread=st.one_of(st.none(), st.integers(0, 3000)),
    until=st.one_of(st.none(), st.integers(0, 3000)),
    rules=st.builds(
        Rules,
        keep_ms=st.just(72 * HOUR_MS),
        hours=st.frozensets(st.integers(0, 23)),
        clean_ratio=st.floats(0.1, 0.8),
        forced_ratio=st.floats(0.8, 1),
        forcibly=st.booleans(),
        store_bytes=st.sampled_from([0, 500, 1500]),
        keep_unconsumed=st.booleans(),
        batch_files=st.integers(1, 12),
    ),
)
def test_promises_hold_in_every_situation(
    ages: list[float],
    hour: int,
    ratio: float,
    store_bytes: int,
    limit: int,
    unread: int | None,
    until: int | None,
    rules: Rules,
) -> None:
    found = segments(*ages)
    slowest_group = None if unread is None else Claim(unread, "group")
    now = RetentionState(
        NOW_MS, hour, found, Claim(limit, "writer"), ratio, 1000, store_bytes, slowest_group=slowest_group, until=until
    )
    plan: Plan = decide(rules, now)
    count = len(plan.segments)
    assert plan.segments == found[:count], "oldest first and without a gap"
    assert count <= rules.batch_files
    assert all(segment.end <= limit for segment in plan.segments)
    for number, (segment, reason) in enumerate(zip(plan.segments, plan.reasons, strict=True)):
        left = ratio - number * SIZE / 1000
        forced = rules.forcibly and left > rules.forced_ratio
        expired = is_expired(rules, segment, NOW_MS)
        assert reason is not Reason.FORCED or forced, "not one segment more than the disk needs"
        assert reason is not Reason.BUDGET or store_bytes - number * SIZE > rules.store_bytes
        assert reason not in (Reason.AGE, Reason.DISK) or expired
        if rules.keep_unconsumed and unread is not None and unread < segment.end:
            assert forced
            assert plan.overridden
    assert plan.kept


# ---------------------------------------------------------------- when the next one goes


def utc_hour(at_ms: int) -> int:
    return at_ms // HOUR_MS % 24


@pytest.mark.parametrize(
    ("modified_hours_ago", "now_hour", "hours", "expected_in_hours"),
    [
        (100, 4.5, {4}, 0),  # at once: it is the hour
        (100, 5, {4}, 23),
        (100, 3.25, {4}, 0.75),
        (100, 5, {4, 6}, 1),
        (71, 4.5, {4}, 23.5),  # expires at 05:30, which is too late for today
        (71.75, 4.5, {4}, 0.25),  # expires within the hour
        (0, 4, {4}, 72),
    ],
)
def test_when_age_lets_the_oldest_go(
    modified_hours_ago: float, now_hour: float, hours: set[int], expected_in_hours: float
) -> None:
    midnight = NOW_MS - NOW_MS % (24 * HOUR_MS)
    now = midnight + int(now_hour * HOUR_MS)
    segment = Segment(0, SIZE, now - int(modified_hours_ago * HOUR_MS), SIZE)
    rules = replace(RULES, hours=frozenset(hours))
    assert next_by_age(rules, segment, now, utc_hour) == now + int(expected_in_hours * HOUR_MS)


def test_without_an_hour_age_never_deletes() -> None:
    assert next_by_age(replace(RULES, hours=frozenset()), THREE_OLD[0], NOW_MS, utc_hour) is None
