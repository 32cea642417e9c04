"""How many messages may be due in the same second: RocketMQ's ``timerCongestNumEachSlot`` (spec 12.2).

While a slot of the wheel has more messages than the limit, further ones are refused at random, the more the fuller it is; with
twice the limit all are. The file of the wheel says what a slot had when this writer first saw a message for it. From then on
the writer counts what it takes itself, for the timer puts messages into the wheel a moment later. A cancellation is
never refused. Messages that a transaction commits are not counted before they are in the wheel.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from commitmq.files import disk
from commitmq.format.timer_wheel import SLOT_BYTES, decode_slot
from commitmq.semantics.timer import TimerRules, refused_share, slot_for, slot_index
from commitmq.workers.writer.send_checks import Refusal

_MOST_SLOTS: Final = 65_536
_PRECISION_MS: Final = 1_000
_RETRY_MS: Final = 1_000  # then a delay leads to another slot
_OFF: Final = 2**31 - 1


class SlotLimit:
    """``wheel`` is the path of the file ``timerwheel``. ``draw`` gives a number from 0 to 1."""

    def __init__(self, wheel: Path, limit: int, draw: Callable[[], float] = random.random) -> None:
        self._wheel = wheel
        self._rules = TimerRules(congest_count=limit)
        self._draw = draw
        self._counts: dict[int, int] = {}
        """By the slot's time, in the order in which they were first seen."""

    def take(self, slots_ms: NDArray[np.int64], *, counts: bool = True) -> None:
        """Count messages of one run for the slots ``slots_ms``, all or none. Raises Refusal.

        Without ``counts`` it is a look: the messages are not stored in the wheel now.
        """
        limit = self._rules.congest_count
        if limit >= _OFF:
            return
        slots, numbers = np.unique(slots_ms, return_counts=True)
        totals: dict[int, int] = {}
        for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True):
            before = self._count(slot)
            totals[slot] = before + number
            if totals[slot] > 2 * limit or (before > limit and self._draw() < refused_share(before, self._rules)):
                raise Refusal(
                    "WHEEL_TIMER_FLOW_CONTROL",
                    f"{before} messages are due in the same second as {number} of this send; more than {limit}"
                    f" (timer.slot_messages) are refused at random, more than {2 * limit} always",
                    _RETRY_MS,
                )
        if counts:
            self._counts.update(totals)
            if len(self._counts) > _MOST_SLOTS:
                self._forget()

    def _count(self, slot_ms: int) -> int:
        if slot_ms in self._counts:
            return self._counts[slot_ms]
        try:
            with disk.opened(self._wheel, os.O_RDONLY, "timerwheel") as fd:
                raw = os.pread(fd, SLOT_BYTES, slot_index(slot_ms) * SLOT_BYTES)
        except OSError:
            return 0  # the timer has not made it yet
        slot = slot_for(decode_slot(raw, 0), slot_ms) if len(raw) == SLOT_BYTES else None
        return 0 if slot is None else max(0, slot.messages)

    def _forget(self) -> None:
        """Slots that have passed; then, if need be, the oldest half: the file knows them by now."""
        now_ms = time.time_ns() // 1_000_000 - _PRECISION_MS
        kept = [slot for slot in self._counts if slot > now_ms]
        if len(kept) > _MOST_SLOTS // 2:
            kept = kept[len(kept) - _MOST_SLOTS // 2 :]
        self._counts = {slot: self._counts[slot] for slot in kept}
