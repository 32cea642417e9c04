"""Makes wheel and timer log again from the queue of the timer topic: which of its messages still wait.

A message does not wait any more when its slot was delivered, or when it rolled: then a copy of it, with the same unique id and
time and one roll more, stands for it (spec 18).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commitmq.workers.timer.incoming import Incoming, RollKey, TimerQueue
from commitmq.workers.timer.progress import Progress

_CHUNK = 32_768


class MakingAgain:
    """Reads the queue once, up to its end ``until``, before the timer takes its messages a second time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._replaced: set[RollKey] = set()
        self.until = 0
        self.first_overdue: int | None = None
        """The physical offset of the first message that may have been delivered, though nobody wrote it down."""

    def survey(self, queue: TimerQueue, bound: int, floor: int, now_ms: int, beat: Callable[[], None]) -> None:
        """Look at all messages."""
        at, self.until = queue.bounds(bound, floor)
        while at < self.until:
            messages = queue.take(at, _CHUNK, bound=bound, floor=floor, with_keys=True)
            if messages is None:
                break
            for index in np.flatnonzero(messages.rolled > 0).tolist():
                key = RollKey(messages.unique_keys[index], int(messages.out_ms[index]), int(messages.rolled[index]) - 1)
                self._replaced.add(key)
            overdue = self._open(messages) & (messages.out_ms <= now_ms)
            if overdue.any() and self.first_overdue is None:
                self.first_overdue = int(messages.physical[np.argmax(overdue)])
            at = messages.behind
            beat()

    def _open(self, messages: Incoming) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        progress = self._progress
        waiting: np.ndarray[tuple[int], np.dtype[np.bool_]]
        waiting = (messages.offsets >= progress.queue_offset) | (messages.out_ms >= progress.read_ms)
        return waiting

    def keep_waiting(self, messages: Incoming) -> None:
        """Drop those of ``messages`` that do not wait any more."""
        waiting = self._open(messages)
        if self._replaced:
            waiting &= np.array([key not in self._replaced for key in messages.roll_keys()], np.bool_)
        messages.keep(waiting)
