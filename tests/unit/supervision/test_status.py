"""Goal: the positions and lags of ``status`` mean what they say. Method: a control block of known words."""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq.control import ControlBlock, DiskFlag, DispatcherWord, Word
from commitmq.supervision import status


@pytest.fixture
def control(tmp_path: Path) -> ControlBlock:
    block = ControlBlock(tmp_path / "control", create=True)
    for word, value in ((Word.WRITTEN, 900), (Word.FLUSHED, 700), (Word.REPUT, 600), (Word.ALLOCATED, 4096)):
        block.put(word, value)
    block.put_dispatcher(0, DispatcherWord.DISPATCHED, 450)
    return block


@pytest.mark.parametrize(
    ("role", "sync_flush", "expected"),
    [
        ("writer", True, (900, 0)),
        ("flush", True, (700, 200)),
        ("reput", True, (600, 100)),
        ("reput", False, (600, 300)),
        ("dispatcher-consume_queue", True, (450, 150)),
        ("allocate", True, (4096, 0)),
        ("coordinator", True, (None, None)),
        ("reader-0", True, (None, None)),
    ],
)
def test_positions_and_lags(
    control: ControlBlock, role: str, sync_flush: bool, expected: tuple[int | None, int | None]
) -> None:
    assert status.position_and_lag(role, control, sync_flush, 0 if "dispatcher" in role else -1) == expected


def test_a_lag_read_a_moment_too_late_is_not_negative(control: ControlBlock) -> None:
    control.put(Word.FLUSHED, 901)
    assert status.position_and_lag("flush", control, True) == (901, 0)


def test_words_and_flags_are_named(control: ControlBlock) -> None:
    control.put(Word.DISK_FLAGS, DiskFlag.DISK_FULL)
    words = status.positions(control)
    assert (words["written"], words["flushed"], words["dispatched"]) == (900, 700, 450)
    assert status.disk_flags(control) == ["DISK_FULL"]
