"""Goal: the timer writes down no position that a power cut could take back, and none behind a delivery that is not done.

Method: the timer's loop state on a real control block, without a node. The test moves the words ``written`` and ``flushed``
as writer and flush process do, and reads what ``timer.json`` says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commitmq.control import Word
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.workers.runtime.mover_positions import MoverPositions
from commitmq.workers.timer.deliveries import ROW, DueSlot
from commitmq.workers.timer.process import Timer
from commitmq.workers.timer.progress import ClockSetBack, TimerProgress, TimerProgressFiles
from commitmq.workers.timer.wheel import TimerIndex
from small_disk import room


class Words(dict[Word, int]):
    """A control block's words."""

    def get(self, word: Word, default: Any = 0) -> int:
        return int(super().get(word, default))


@pytest.fixture
def timer(tmp_path_factory: pytest.TempPathFactory) -> Timer:
    layout = StoreLayout(tmp_path_factory.mktemp("timer"))
    (layout.config).mkdir(parents=True, exist_ok=True)
    (layout.own).mkdir(parents=True, exist_ok=True)
    made = object.__new__(Timer)
    made._control = Words({Word.WRITTEN: 1_000, Word.FLUSHED: 0})  # type: ignore[assignment]
    made._context = SimpleNamespace(tell=lambda **_: None, control=made._control, room=room())  # type: ignore[assignment]
    made._files = TimerProgressFiles(layout, get_log("test"))
    made._index = TimerIndex.make_empty(layout, 1_040)
    made._deliveries = SimpleNamespace(left=[], begins_at=list)  # type: ignore[assignment]
    made._metrics = SimpleNamespace(write_down=lambda: None)  # type: ignore[assignment]
    made._way = SimpleNamespace(report_again=lambda: None)  # type: ignore[assignment]
    made._positions = MoverPositions(made._context, 0, take=made._progress, store=made._store, start=TimerProgress())
    made._again, made._slot, made._changed = None, None, True
    made._read_ms, made._offset, made._set_backs = 5_000, 7, ()
    return made


def words(timer: Timer) -> dict[Word, int]:
    return timer._control  # type: ignore[return-value]


def test_nothing_is_written_down_before_the_log_is_flushed_as_far(timer: Timer) -> None:
    words(timer)[Word.FLUSHED] = 600
    timer._write_down()
    assert timer._files.load() == TimerProgress(), "the message before offset 7 may be lost with the power"
    timer._offset, timer._changed = 9, True
    words(timer)[Word.WRITTEN] = 2_000
    words(timer)[Word.FLUSHED] = 1_500
    timer._write_down()
    assert timer._files.load() == TimerProgress(5_000, 7, 600, 0, is_whole=True), "what was so when 1,000 was the end"
    timer._write_down()
    assert timer._files.load().queue_offset == 7
    words(timer)[Word.FLUSHED] = 2_000
    timer._write_down()
    assert timer._files.load().queue_offset == 9


def test_a_clock_that_was_set_back_is_written_down_when_what_was_delivered_is_flushed(timer: Timer) -> None:
    """It says that the messages of all slots before were delivered: a power cut must not take one of them back after that."""
    timer._now_ms, timer._set_back_log = 900_000_000, None
    timer._clock = SimpleNamespace(now_ms=lambda: 6_000, jump_ms=0)  # type: ignore[assignment]
    timer._room = timer._context.room
    timer._context.log = get_log("test")
    timer.resume = lambda: None  # type: ignore[method-assign]
    words(timer)[Word.FLUSHED] = 999
    assert not timer._follow_clock()
    words(timer)[Word.WRITTEN] = 5_000  # others send meanwhile
    assert not timer._follow_clock()
    assert timer._files.load() == TimerProgress()
    words(timer)[Word.FLUSHED] = 1_000
    assert timer._follow_clock()
    (one,) = timer._files.load().set_backs
    assert one == ClockSetBack(7, 5_000, 0, 6_000, 1_000)


def test_a_slot_that_was_opened_again_keeps_its_first_deliveries_in_view(timer: Timer) -> None:
    words(timer)[Word.FLUSHED] = 1_000
    timer._slot = DueSlot(5_000, 900)
    timer._deliveries.begins_at = lambda: [300]  # type: ignore[method-assign]
    timer._write_down()
    assert timer._files.load().log == 300, "some of the slot lies from there on; a second death needs it"


def test_large_messages_are_delivered_a_few_at_once() -> None:
    slot = DueSlot(5_000, 0)
    slot._rows = np.zeros(10, ROW)
    slot._rows["size"] = [30 << 20, *[4 << 20] * 9]
    counts = []
    while len(taken := slot.take(6_000, 8_192, None)):  # type: ignore[arg-type]
        counts.append(len(taken))
    assert counts == [1, 4, 4, 1]
