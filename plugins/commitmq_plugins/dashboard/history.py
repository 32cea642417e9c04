"""Rings of figures: one sample every ``history_s`` seconds, of a day, 1,441 at most, in the memory of the dashboard's process.

Of the node the end of the log is kept, of topics their ends, and of groups how many messages wait. What is not known at a
sample is a gap. A topic is followed while groups read it, or since somebody looked at its history. The number of topics and of
groups is bounded: a new one takes the place of one that is gone, or waits, the groups that are furthest behind first.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

DAY_S: Final = 86_400
_MOST_SAMPLES: Final = 1_441
_Numbers = npt.NDArray[np.float64]


class History:
    """Thread-safe. ``step_s``: between two samples; ``most``: topics, and groups, that are kept."""

    def __init__(self, step_s: int, most: int) -> None:
        self.step_s, self._most = step_s, most
        self._length = max(2, min(_MOST_SAMPLES, DAY_S // max(1, step_s) + 1))
        self._lock = threading.Lock()
        self._count = 0
        self._times_ms = self._empty()
        self._node = self._empty()
        self._topics: OrderedDict[str, _Numbers] = OrderedDict()
        self._groups: OrderedDict[str, _Numbers] = OrderedDict()

    def follow(self, topic: str) -> None:
        """Somebody looks at this topic."""
        with self._lock:
            self._series(self._topics, topic)

    def followed(self, read: Iterable[str]) -> list[str]:
        """The topics whose ends the next sample wants; ``read``: those that groups read."""
        with self._lock:
            room = self._most - len(self._topics)
            new = [name for name in dict.fromkeys(read) if name not in self._topics]
            return [*self._topics, *new[: max(0, room)]]

    def add(self, at_ms: int, written: int, topics: Mapping[str, int | None], groups: Mapping[str, int | None]) -> None:
        """One sample."""
        with self._lock:
            at = self._count % self._length
            self._count += 1
            self._times_ms[at], self._node[at] = at_ms, written
            for kept, values in ((self._topics, topics), (self._groups, groups)):
                for series in kept.values():
                    series[at] = math.nan
                known = [(name, one) for name, one in values.items() if one is not None]
                known.sort(key=lambda pair: -pair[1])
                for name, one in known:
                    if name in kept or self._makes_room(kept, values):
                        self._series(kept, name)[at] = one

    def rate_of_node(self, span_s: int) -> list[tuple[int, float | None]]:
        """Bytes a second, with the time of each sample."""
        with self._lock:
            return _rates(self._since(self._node, span_s))

    def rate_of_topic(self, topic: str, span_s: int) -> list[tuple[int, float | None]]:
        """Messages a second; empty for one that is not followed yet."""
        with self._lock:
            series = self._topics.get(topic)
            return [] if series is None else _rates(self._since(series, span_s))

    def lag_of_group(self, group: str, span_s: int) -> list[tuple[int, float | None]]:
        """Messages that waited; empty for a group that is not known."""
        with self._lock:
            series = self._groups.get(group)
            return [] if series is None else self._since(series, span_s)

    def _makes_room(self, kept: OrderedDict[str, _Numbers], values: Mapping[str, int | None]) -> bool:
        """Whether another series fits: one without a value now gives way."""
        if len(kept) >= self._most:
            gone = next((name for name in kept if name not in values), None)
            if gone is None:
                return False
            del kept[gone]
        return True

    def _series(self, kept: OrderedDict[str, _Numbers], name: str) -> _Numbers:
        found = kept.get(name)
        if found is None:
            found = kept[name] = self._empty()
        kept.move_to_end(name)
        while len(kept) > self._most:
            kept.popitem(last=False)
        return found

    def _since(self, series: _Numbers, span_s: int) -> list[tuple[int, float | None]]:
        """Time and value of the samples in the last ``span_s`` before the newest one, the oldest first."""
        count = min(self._count, self._length)
        order = [number % self._length for number in range(self._count - count, self._count)]
        if not order:
            return []
        newest_ms = self._times_ms[order[-1]]
        found = []
        for at in order:
            if self._times_ms[at] >= newest_ms - span_s * 1000:
                one = float(series[at])
                found.append((int(self._times_ms[at]), None if math.isnan(one) else one))
        return found

    def _empty(self) -> _Numbers:
        return np.full(self._length, np.nan)


def _rates(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """The differences a second. A count that went back, as of a topic that was made anew, is a gap."""
    found: list[tuple[int, float | None]] = []
    for (before_ms, before), (at_ms, now) in pairwise(points):
        seconds = (at_ms - before_ms) / 1000
        rate = None
        if before is not None and now is not None and now >= before and seconds > 0:
            rate = (now - before) / seconds
        found.append((at_ms, rate))
    return found
