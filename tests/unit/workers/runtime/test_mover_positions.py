"""Goal: a mover stores positions when all that they speak of is durable, and waits for that no longer than it must.

Method: a mover whose position is a number. The test moves the words ``written`` and ``flushed`` as the node does.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from commitmq.control import Word
from commitmq.errors import StoreError
from commitmq.workers.runtime.mover_positions import MoverPositions
from small_disk import room


class Mover:
    """``now`` is its position; None while it cannot be told."""

    def __init__(self, *, sync: bool = True, interval_ms: int = 0) -> None:
        self.words = {Word.WRITTEN: 100, Word.FLUSHED: 50}
        self.now: int | None = 0
        self.stored: list[int] = []
        self.waits = 0
        self.fails = False
        config = SimpleNamespace(sync_flush=sync)
        errors = SimpleNamespace(error=lambda *_, **__: None)
        context: Any = SimpleNamespace(control=self.words, config=config, wait=self.wait, log=errors, room=room())
        self.positions: MoverPositions[int] = MoverPositions(
            context, interval_ms, take=lambda: self.now, store=self.store, start=0
        )

    def wait(self, _ms: float) -> None:
        self.waits += 1
        self.words[Word.FLUSHED] += 25

    def store(self, position: int) -> None:
        if self.fails:
            raise StoreError("no space")
        self.stored.append(position)

    def change(self, position: int) -> None:
        self.now = position
        self.positions.note_change()


def test_what_others_append_behind_the_last_change_is_not_waited_for() -> None:
    mover = Mover()
    mover.change(7)
    mover.words[Word.WRITTEN] = 1_000
    assert not mover.positions.write_down()
    mover.words[Word.FLUSHED] = 100
    assert mover.positions.write_down()
    assert mover.stored == [7]
    assert mover.positions.written == 7
    assert not mover.positions.write_down(), "nothing has changed since"


def test_a_position_that_cannot_be_told_now_is_written_down_later() -> None:
    mover = Mover()
    mover.words[Word.FLUSHED] = 100
    mover.change(7)
    mover.now = None
    assert not mover.positions.write_down()
    mover.now = 8
    assert mover.positions.write_down()
    assert mover.stored == [8]


def test_a_failure_is_tried_again_with_the_next_interval() -> None:
    mover = Mover(interval_ms=40)
    mover.words[Word.FLUSHED] = 100
    mover.change(7)
    mover.fails = True
    assert not mover.positions.write_down()
    mover.fails = False
    assert not mover.positions.write_down(), "the disk is left alone for a while"
    time.sleep(0.05)
    assert mover.positions.write_down()
    assert mover.stored == [7]


def test_the_end_waits_for_a_log_that_is_flushed_at_once() -> None:
    mover = Mover(interval_ms=60_000)
    mover.change(7)
    mover.positions.write_down()
    mover.change(9)
    mover.positions.close()
    assert mover.stored == [9]
    assert mover.waits == 2


def test_the_end_does_not_wait_for_a_log_that_is_flushed_now_and_then() -> None:
    mover = Mover(sync=False)
    mover.change(7)
    mover.positions.close()
    assert (mover.stored, mover.waits) == ([], 0)
    mover.words[Word.FLUSHED] = 100
    mover.positions.close()
    assert mover.stored == [7], "it was durable already"


def test_the_end_of_an_idle_mover_writes_nothing() -> None:
    mover = Mover()
    mover.positions.begin(7)
    mover.positions.close()
    assert (mover.stored, mover.waits) == ([], 0)
