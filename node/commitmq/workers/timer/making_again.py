"""Makes wheel and timer log again from the queue of the timer topic: which of its messages still wait.

A message does not wait any more when its slot was delivered, or when it rolled: then a copy of it, with the same unique id and
time and one roll more, stands for it (spec 18). After more days than the wheel holds, the oldest slots are not opened any
more: what waits for them is delivered at once, unless it was cancelled.

After the clock was set back, slots come a second time. Which of their messages were delivered the first time, the progress
says, and messages whose delay was added to a clock that was ahead move to earlier slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from commitmq.workers.timer.incoming import (
    NO_DELAY,
    PRECISION_MS,
    Incoming,
    Integers,
    RollKey,
    TimerQueue,
    delete_keys,
    message_key,
)
from commitmq.workers.timer.progress import Progress

_CHUNK = 32_768
_SOON_MS = 60_000


class MakingAgain:
    """Reads the queue once, up to its end ``until``, before the timer takes its messages a second time: first those that are
    due soon, then the others, from ``at`` on, beside its usual work.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._replaced: set[RollKey] = set()
        self._cancelled: set[tuple[int, bytes]] = set()
        """(slot, key) of the cancellations of slots that are not opened any more; of all, when messages leave their slots."""
        self._replaced_ms = self._cancelled_slots = np.empty(0, np.int64)
        self.soon_ms = 0
        """Messages whose slots are no later go into the wheel first: until all are there, no slot behind it is opened."""
        self._soon = np.empty(0, np.int64)  # their queue offsets
        self._next_soon = self.at = self.until = 0
        self.first_overdue: int | None = None
        """The physical offset of the first message that may have been delivered, though nobody wrote it down."""

    def survey(
        self, queue: TimerQueue, bound: int, floor: int, now_ms: int, opens_ms: int, beat: Callable[[], None]
    ) -> None:
        """Look at all messages. Slots before ``opens_ms`` will not be opened."""

        def cancels(messages: Incoming) -> NDArray[np.bool_]:
            is_wanted = messages.out_ms < opens_ms if not self._progress.set_backs else np.True_
            return messages.cancels & is_wanted

        at, self.until = queue.bounds(bound, floor)
        self.at, self.soon_ms, soon = at, now_ms + _SOON_MS, [np.empty(0, np.int64)]
        while at < self.until:
            messages = queue.take(
                at, _CHUNK, bound=bound, floor=floor, with_keys=lambda one: (one.rolled > 0) | cancels(one)
            )
            if messages is None:
                break
            for key in messages.roll_keys(np.flatnonzero(messages.rolled > 0)):
                self._replaced.add(key._replace(rolled=key.rolled - 1))
            for index in np.flatnonzero(cancels(messages)).tolist():
                slot, keys = _slot(messages, index), messages.keys[index]
                self._cancelled.update((slot, key) for key in delete_keys(keys.deletes, keys.topic))
            is_open, out_ms, _ = self._open(messages)
            soon.append(messages.offsets[is_open & (out_ms <= self.soon_ms)])
            overdue = is_open & (messages.out_ms <= now_ms)
            if overdue.any() and self.first_overdue is None:
                self.first_overdue = int(messages.physical[np.argmax(overdue)])
            at = messages.behind
            beat()
        self._soon = np.concatenate(soon)
        self._replaced_ms = np.array([*{key.out_ms for key in self._replaced}], np.int64)
        self._cancelled_slots = np.array([*{slot for slot, _ in self._cancelled}], np.int64)

    def asks(self, messages: Incoming) -> NDArray[np.bool_]:
        """Of which of ``messages`` :meth:`keep_waiting` needs the keys: most are alone with their time."""
        found = np.isin(messages.out_ms, self._replaced_ms)
        found |= np.isin(messages.out_ms // PRECISION_MS, self._cancelled_slots) & ~messages.cancels
        return found

    def _open(self, messages: Incoming) -> tuple[NDArray[np.bool_], Integers, Integers]:
        """Which of ``messages`` were not delivered, and the slot and the very time of each now."""
        progress = self._progress
        out_ms, due_ms = messages.out_ms, messages.due_ms
        closed = np.zeros(len(messages), np.bool_)
        for one in progress.set_backs:
            before = messages.offsets < one.queue_offset
            closed |= before & (out_ms < np.where(due_ms <= one.due_ms, one.read_ms + PRECISION_MS, one.read_ms))
            latest_ms = one.clock_ms + messages.delay_ms
            sooner = before & (messages.delay_ms != NO_DELAY) & (latest_ms < due_ms)
            due_ms = np.where(sooner, latest_ms, due_ms)
            out_ms = np.where(sooner, latest_ms - latest_ms % PRECISION_MS, out_ms)
        return ~closed & ((messages.offsets >= progress.queue_offset) | (out_ms >= progress.read_ms)), out_ms, due_ms

    def soon(self, queue: TimerQueue, count: int, bound: int, floor: int) -> Incoming | None:
        """Of the next ``count`` messages those that wait and are due soon; None when there are no more."""
        if self._next_soon == len(self._soon):
            return None
        at = int(self._soon[self._next_soon])
        messages = queue.take(at, count, bound=bound, floor=floor, with_keys=self.asks)
        if messages is None:
            self._next_soon = len(self._soon)
            return None
        self._next_soon = int(np.searchsorted(self._soon, messages.behind))
        return self._part(messages, soon=True)

    def others(self, queue: TimerQueue, count: int, bound: int, floor: int) -> Incoming | None:
        """The same of those that are due later."""
        if self.at >= self.until:
            return None
        messages = queue.take(self.at, count, bound=bound, floor=floor, with_keys=self.asks)
        if messages is None:
            return None
        self.at = messages.behind
        return self._part(messages, soon=False)

    def _part(self, messages: Incoming, *, soon: bool) -> Incoming:
        messages.keep(messages.offsets < self.until)
        self.keep_waiting(messages)
        messages.keep((messages.out_ms <= self.soon_ms) == soon)
        return messages

    def keep_waiting(self, messages: Incoming) -> None:
        """Drop those of ``messages`` (taken with the keys that :meth:`asks` names) that do not wait any more; the others get
        their slots of now.
        """
        waiting, out_ms, due_ms = self._open(messages)
        asked = np.flatnonzero(self.asks(messages))
        for index, key in zip(asked.tolist(), messages.roll_keys(asked), strict=True):
            waiting[index] &= key not in self._replaced and not self._is_cancelled(messages, index)
        messages.out_ms, messages.due_ms = out_ms, due_ms
        messages.keep(waiting)

    def _is_cancelled(self, messages: Incoming, index: int) -> bool:
        unique, topic, _ = messages.keys[index]
        key = _slot(messages, index), message_key(topic, unique)
        return bool(unique) and not messages.cancels[index] and key in self._cancelled


def _slot(messages: Incoming, index: int) -> int:
    return int(messages.out_ms[index]) // PRECISION_MS
