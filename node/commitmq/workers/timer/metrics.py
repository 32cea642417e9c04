"""How many messages wait for each topic: RocketMQ's file ``config/timermetrics`` (spec 18, 14).

A count is the number of units that wait in the wheel minus that of cancellations among them, as a slot counts. Units name
their topic by a hash, so a start counts them without a look at their messages: the counts are right after any death. The
file is for people and for RocketMQ, and a few seconds behind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from commitmq.counting import families
from commitmq.counting.table import CountTable
from commitmq.errors import StoreError
from commitmq.files.room import Room
from commitmq.log import Log
from commitmq.store.metadata import json_config
from commitmq.store.metadata.json_config import DataVersion
from commitmq.workers.runtime.context import monotonic_ms

Integers = NDArray[np.int64]
NameOf = Callable[[int], "str | None"]
"""The topic whose name has this hash, None while no message has told it."""

_INTERVAL_MS: Final = 10_000
UNKNOWN: Final = "_unknown"
"""Stands in counts for a topic whose name no message has told yet."""


class TimerMetrics:
    """The counts and the file. One process uses it."""

    def __init__(
        self,
        path: Path,
        log: Log,
        room: Room,
        name_of: NameOf,
        now_ms: Callable[[], int],
        counts: CountTable | None = None,
    ) -> None:
        self._path, self._log, self._room, self._name_of, self._now_ms = path, log, room, name_of, now_ms
        self._counts: dict[int, int] = {}
        self._changed_ms: dict[int, int] = {}
        self._version: DataVersion | None = None
        self._changed = False
        self._store_at_ms = 0
        self._table = counts
        self._shared: dict[int, int] = {}
        """What each topic without a row of its own has added to the row that they share."""

    def begin(self, hashes: Integers, steps: Integers) -> None:
        """These units wait, and no others."""
        self._counts.clear()
        table, self._table = self._table, None  # these were counted when they came
        self.add(hashes, steps)
        self._table = table
        if table is None:
            return
        waiting: dict[tuple[str, ...], int] = {(name,): count for name, count in self.counts().items()}
        table.set_all(families.DELAYED_WAITING, waiting)
        names = {topic: self._name_of(topic) for topic in self._counts}
        self._shared = {
            topic: self._counts[topic]
            for topic, name in names.items()
            if name and not table.has_row(families.DELAYED_WAITING, name)
        }

    def add(self, hashes: Integers, steps: Integers) -> None:
        """Units of the topics ``hashes`` came; each changes its topic's count by its step."""
        if not len(hashes):
            return
        topics, numbers = np.unique(hashes, return_inverse=True)
        sums = np.bincount(numbers, weights=steps).astype(np.int64)
        now_ms = self._now_ms()
        for topic, change in zip(topics.tolist(), sums.tolist(), strict=True):
            self._counts[topic] = self._counts.get(topic, 0) + change
            self._changed_ms[topic] = now_ms
            if self._table is not None:
                self._count(self._table, topic, change)
        self._changed = True

    def _count(self, table: CountTable, topic: int, change: int) -> None:
        name = self._name_of(topic) or UNKNOWN
        if name != UNKNOWN:
            waiting, count = table.count(families.DELAYED_WAITING, name), self._counts[topic]
            if table.has_row(families.DELAYED_WAITING, name):
                waiting.set(count)
            else:
                waiting.add(count - self._shared.get(topic, 0))
                self._shared[topic] = count
        table.count(families.DELAYED_IN if change > 0 else families.DELAYED_OUT, name).add(abs(change))

    def counts(self) -> dict[str, int]:
        """By topic. A topic that is not known by its name yet is left out."""
        named = ((self._name_of(topic), count) for topic, count in self._counts.items())
        return {name: count for name, count in named if name}

    def write_down(self, *, at_once: bool = False) -> None:
        """Write the file when anything has changed and it is time. A failure is logged: nobody depends on the file."""
        now = monotonic_ms()
        if not self._changed or (now < self._store_at_ms and not at_once):
            return
        self._store_at_ms = now + _INTERVAL_MS
        try:
            if self._version is None:
                self._version = _version_of(self._path)
            self._version.advance()
            replace = partial(json_config.replace_text, self._path, self._encoded(self._version))
            self._changed = not self._room.try_to("timermetrics", replace)
        except (StoreError, OSError) as error:
            self._log.warning("timermetrics cannot be written", error=str(error))

    def _encoded(self, version: DataVersion) -> str:
        """In RocketMQ's compact form."""
        stamps = {self._name_of(topic): stamp for topic, stamp in self._changed_ms.items()}
        counts = {name: {"count": count, "timeStamp": stamps[name]} for name, count in sorted(self.counts().items())}
        data: dict[str, Any] = {"dataVersion": dict(sorted(version.to_json().items())), "timingCount": counts}
        return orjson.dumps(data).decode()


def _version_of(path: Path) -> DataVersion:
    """The version of the file that is there; the first one for none, and for one that nobody can read."""
    try:
        return DataVersion.from_json((json_config.load(path) or {}).get("dataVersion"))
    except (StoreError, TypeError, ValueError, AttributeError, KeyError):
        return DataVersion()
