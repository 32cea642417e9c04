"""Counts of what RocketMQ's clients send and receive, per minute, hour and day (remoting 1.10). Pure: no clock.

Counts are memory only and begin at 0 with the process, as RocketMQ's do. A window's figures come from samples of the counts:
every ``SAMPLE_S`` for the minute, every ten minutes for the hour, and every hour for the day.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from commitmq_plugins.rocketmq.remoting.bodies.stats import StatsItem

SAMPLE_S: Final = 10.0
MAX_ITEMS: Final = 100_000
_IDLE_S: Final = 86_400.0


class _Sample(NamedTuple):
    at_s: float
    value: int
    times: int


class _Window:
    """The newest samples, ``period_s`` apart; the first and the last of them span the window."""

    def __init__(self, period_s: float, count: int) -> None:
        self._period_s = period_s
        self._samples: deque[_Sample] = deque(maxlen=count + 1)

    def sample(self, now_s: float, value: int, times: int) -> None:
        if not self._samples or now_s - self._samples[-1].at_s >= self._period_s - 0.5:
            self._samples.append(_Sample(now_s, value, times))

    def figures(self, now_s: float, value: int, times: int) -> StatsItem:
        """From the oldest sample to now."""
        if not self._samples:
            return StatsItem()
        first = self._samples[0]
        total, count = value - first.value, times - first.times
        seconds = max(now_s - first.at_s, self._period_s)  # a count that has just begun has no rate of its own yet
        return StatsItem(total, total / seconds, total / count if count else 0.0)


class _Item:
    """One count with its windows."""

    def __init__(self, now_s: float) -> None:
        self.value = self.times = 0
        self.changed_s = now_s
        self.windows = (_Window(SAMPLE_S, 6), _Window(600.0, 6), _Window(3_600.0, 24))
        self.sample(now_s)

    def sample(self, now_s: float) -> None:
        for window in self.windows:
            window.sample(now_s, self.value, self.times)


class Statistics:
    """See the module. At most ``max_items`` counts are kept; one that did not change for a day goes."""

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._max = max_items
        self._items: dict[tuple[str, str], _Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, name: str, key: str, value: int, now_s: float, times: int = 1) -> None:
        """Count ``value`` in ``times`` events."""
        item = self._items.get((name, key))
        if item is None:
            if len(self._items) >= self._max:
                return
            item = self._items[name, key] = _Item(now_s)
        item.value += value
        item.times += times
        item.changed_s = now_s

    def sample(self, now_s: float) -> None:
        """To be called every ``SAMPLE_S``."""
        for key, item in list(self._items.items()):
            if now_s - item.changed_s > _IDLE_S:
                del self._items[key]
            else:
                item.sample(now_s)

    def total(self, name: str, key: str) -> int:
        """The count since it began."""
        item = self._items.get((name, key))
        return 0 if item is None else item.value

    def figures(self, name: str, key: str, now_s: float) -> tuple[StatsItem, StatsItem, StatsItem] | None:
        """Of the last minute, hour and day; None for what was never counted."""
        item = self._items.get((name, key))
        if item is None:
            return None
        minute, hour, day = (window.figures(now_s, item.value, item.times) for window in item.windows)
        return minute, hour, day
