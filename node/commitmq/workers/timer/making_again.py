"""Makes wheel and timer log again from the queue of the timer topic: which of its messages still wait.

A message does not wait any more when its slot was delivered, or when it rolled: then a copy of it, with the same unique id and
time and one roll more, stands for it (spec 18). After more days than the wheel holds, the oldest slots are not opened any
more: what waits for them is delivered at once, unless it was cancelled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commitmq.workers.timer.incoming import PRECISION_MS, Incoming, RollKey, TimerQueue, delete_keys, message_key
from commitmq.workers.timer.progress import Progress

_CHUNK = 32_768


class MakingAgain:
    """Reads the queue once, up to its end ``until``, before the timer takes its messages a second time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._replaced: set[RollKey] = set()
        self._cancelled: set[tuple[int, bytes]] = set()
        """(slot, key) of the cancellations of slots that are not opened any more."""
        self.until = 0
        self.first_overdue: int | None = None
        """The physical offset of the first message that may have been delivered, though nobody wrote it down."""

    def survey(
        self, queue: TimerQueue, bound: int, floor: int, now_ms: int, opens_ms: int, beat: Callable[[], None]
    ) -> None:
        """Look at all messages. Slots before ``opens_ms`` will not be opened."""
        at, self.until = queue.bounds(bound, floor)
        while at < self.until:
            messages = queue.take(at, _CHUNK, bound=bound, floor=floor, with_keys=True)
            if messages is None:
                break
            if (messages.rolled > 0).any():
                self._replaced.update(
                    key._replace(rolled=key.rolled - 1) for key in messages.roll_keys() if key.rolled > 0
                )
            for index in np.flatnonzero(messages.cancels & (messages.out_ms < opens_ms)).tolist():
                slot, keys = _slot(messages, index), messages.keys[index]
                self._cancelled.update((slot, key) for key in delete_keys(keys.deletes, keys.topic))
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
        if self._cancelled:
            waiting &= ~np.array([self._is_cancelled(messages, index) for index in range(len(messages))], np.bool_)
        messages.keep(waiting)

    def _is_cancelled(self, messages: Incoming, index: int) -> bool:
        unique, topic, _ = messages.keys[index]
        key = _slot(messages, index), message_key(topic, unique)
        return bool(unique) and not messages.cancels[index] and key in self._cancelled


def _slot(messages: Incoming, index: int) -> int:
    return int(messages.out_ms[index]) // PRECISION_MS
