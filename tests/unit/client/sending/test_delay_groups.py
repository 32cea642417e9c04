"""Goal: messages of different delay levels never wait in one group, because a run has one level.

Method: an outbox without a pump, and the runs that it would give to one.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest

from commitmq import InvalidMessageError
from commitmq.client.sending.asked import asked_delay
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
        asked = asked_delay(None, level) if level else None
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
    asked = asked_delay(None, 12)
    assert decode_properties(asked.encoded) == {"DELAY": "12"}
    assert asked.json == '"DELAY":"12",'


def test_the_level_of_a_delay() -> None:
    assert asked_delay(1, None) == asked_delay(None, 1)
    assert asked_delay(timedelta(hours=2), None) == asked_delay(None, 18)
    for wrong in (math.nan, math.inf, -1, 1.2):
        with pytest.raises(InvalidMessageError):
            asked_delay(wrong, None)
    with pytest.raises(InvalidMessageError, match="not both"):
        asked_delay(1, 1)
