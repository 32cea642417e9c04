"""Goal: a second that has too many messages takes no more, as in RocketMQ, and others are not concerned.

Method: a wheel's file by hand, and draws that the test chooses.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commitmq.format.timer import SLOT_BYTES, WHEEL_BYTES, Slot, encode_slot
from commitmq.semantics.timer import slot_index
from commitmq.workers.writer import put_rules as module
from commitmq.workers.writer.put_rules import PutRefusal, SlotLimit

SLOT_MS = 1_795_000_000_000
LIMIT = 4


def wheel(path: Path, *slots: Slot) -> Path:
    with path.open("wb") as file:
        file.truncate(WHEEL_BYTES)
        for one in slots:
            file.seek(slot_index(one.time * 1_000) * SLOT_BYTES)
            file.write(encode_slot(one))
    return path


def refuses(limit: SlotLimit, slot_ms: int = SLOT_MS, count: int = 1) -> bool:
    try:
        limit.take(np.full(count, slot_ms, np.int64))
    except PutRefusal as refusal:
        assert refusal.code == "WHEEL_TIMER_FLOW_CONTROL"
        assert refusal.fields == {"retry_after_ms": 1_000}
        return True
    return False


def test_up_to_the_limit_all_are_taken_and_with_twice_the_limit_none(tmp_path: Path) -> None:
    lucky = SlotLimit(tmp_path / "none", LIMIT, draw=lambda: 1.0)
    assert [refuses(lucky) for _ in range(11)] == [False] * 2 * LIMIT + [True] * 3
    unlucky = SlotLimit(tmp_path / "none", LIMIT, draw=lambda: 0.0)
    assert [refuses(unlucky) for _ in range(8)] == [False] * (LIMIT + 1) + [True] * 3
    assert not refuses(unlucky, SLOT_MS + 1_000)


def test_in_between_the_fuller_the_less_likely(tmp_path: Path) -> None:
    limit = SlotLimit(tmp_path / "none", 4, draw=lambda: 0.4)
    assert [refuses(limit) for _ in range(7)] == [False] * 6 + [True], "6 of 4 to 8: half of them are refused"


def test_a_run_is_taken_or_refused_as_a_whole(tmp_path: Path) -> None:
    limit = SlotLimit(tmp_path / "none", LIMIT, draw=lambda: 1.0)
    assert refuses(limit, count=2 * LIMIT + 1)
    assert not refuses(limit, count=2 * LIMIT)
    with pytest.raises(PutRefusal):
        limit.take(np.array([SLOT_MS + 1_000, SLOT_MS], np.int64))
    assert not refuses(limit, SLOT_MS + 1_000, 2 * LIMIT), "nothing of the refused run counts"


def test_what_is_in_the_wheel_counts(tmp_path: Path) -> None:
    second = SLOT_MS // 1_000
    path = wheel(tmp_path / "timerwheel", Slot(second, 0, 52, 7), Slot(second + 1 - 1_209_600, 0, 52, 9))
    limit = SlotLimit(path, LIMIT, draw=lambda: 1.0)
    assert [refuses(limit), refuses(limit)] == [False, True]
    assert not refuses(limit, SLOT_MS + 1_000, 2 * LIMIT), "that content is of the turn before"


def test_a_look_counts_nothing_and_the_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SLOTS", 10)
    limit = SlotLimit(tmp_path / "none", LIMIT)
    limit.take(np.full(2 * LIMIT, SLOT_MS, np.int64), counts=False)
    assert not limit._counts
    far = 4_000_000_000_000
    for number in range(50):
        assert not refuses(limit, far + 1_000 * number)
        assert not refuses(limit, 1_000 * number), "these have passed"
    assert len(limit._counts) <= 10
    assert far + 49_000 in limit._counts


def test_without_a_limit_nothing_is_counted(tmp_path: Path) -> None:
    limit = SlotLimit(tmp_path / "none", 2**31 - 1)
    assert not refuses(limit, count=100)
    assert not limit._counts
