"""Goal: messages of different delay levels never wait in one group, because a run has one level.

Method: an outbox without a pump, and the runs that it would give to one.
"""

from __future__ import annotations

import math
import time
from datetime import datetime, timedelta, timezone

import pytest

from commitmq import InvalidMessageError
from commitmq.client.sending.asked import asked_time
from commitmq.client.sending.outbox import Outbox, Waiters
from commitmq.format.properties import decode_properties


def test_a_group_has_one_level() -> None:
    outbox = Outbox(
        Waiters(), max_pending=100, max_pending_bytes=1 << 20, linger_s=0.0, wake=lambda: None, in_pump=lambda: False
    )
    outbox.max_message_bytes = 1024
    deadline = time.monotonic() + 60
    sent: dict[int, list[object]] = {}
    for number in range(30):
        level = number % 3
        asked = asked_time(None, level) if level else None
        extras = (asked.encoded, 0, 0) if asked else None
        future = outbox.submit("t", 0, "memory", b"x", extras, deadline, asked.key if asked else "")
        sent.setdefault(level, []).append(future)
    assert set(outbox.groups) == {("t", 0, "memory", key) for key in ("", "level 1", "level 2")}
    for level in range(3):
        group = outbox.next_group()
        assert group[3] == (f"level {level}" if level else "")
        assert outbox.take(group) == sent[level]
    assert outbox.is_empty


def test_the_property() -> None:
    asked = asked_time(None, 12)
    assert decode_properties(asked.encoded) == {"DELAY": "12"}
    assert asked.json == '"DELAY":"12",'


def test_messages_with_times_of_their_own_share_a_run() -> None:
    first, second = asked_time(1.5), asked_time(None, None, 4_000_000_000_000)
    assert first.key == second.key
    assert decode_properties(first.encoded + second.encoded) == {
        "TIMER_DELAY_MS": "1500",
        "TIMER_DELIVER_MS": "4000000000000",
    }


@pytest.mark.parametrize(
    ("delay", "ms"),
    [
        (1, 1_000),
        (0.0001, 1),
        (0.1, 100),
        (1.0005, 1_001),
        (timedelta(microseconds=1), 1),
        (timedelta(days=3), 259_200_000),
    ],
)
def test_a_delay_is_rounded_up(delay: float | timedelta, ms: int) -> None:
    assert decode_properties(asked_time(delay).encoded) == {"TIMER_DELAY_MS": str(ms)}


def test_a_time_is_rounded_up() -> None:
    at = datetime(1970, 1, 1, 2, 0, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    assert decode_properties(asked_time(None, None, at).encoded) == {"TIMER_DELIVER_MS": "1001"}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1, 0, 1e300])
def test_a_wrong_delay(wrong: float) -> None:
    with pytest.raises(InvalidMessageError, match="more than 0"):
        asked_time(wrong)
