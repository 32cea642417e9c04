"""What a reader counts of pulls; for each pull, never for each message. Without ``metrics.enable`` none of this exists."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

from commitmq.counting import families
from commitmq.counting.table import Count, CountTable
from commitmq.store.queues.pull_result import PullResult
from commitmq.workers.reader.parked_pulls import ParkedPulls, Pull
from commitmq.workers.runtime.context import WorkerContext

Operation = Callable[[bytes, dict[str, Any]], None]
_MOST_NAMES: Final = 10_000
PULL: Final = "pull"
POP: Final = "pop"


class OutCounts:
    """The messages that a process hands to consumers, in one way."""

    def __init__(self, table: CountTable, way: str) -> None:
        self._table, self._way = table, way
        self._known: dict[tuple[str, str], tuple[Count, Count]] = {}

    def add(self, topic: str, group: str, messages: int, size_bytes: int) -> None:
        """``group`` got messages of ``topic``."""
        found = self._known.get((topic, group))
        if found is None:
            if len(self._known) >= _MOST_NAMES:
                self._known.clear()
            found = self._known[topic, group] = (
                self._table.count(families.MESSAGES_OUT, topic, group, self._way),
                self._table.count(families.BYTES_OUT, topic, group, self._way),
            )
        found[0].add(messages)
        found[1].add(size_bytes)


class PullCounts:
    """See the module. ``parked``: the pulls that wait."""

    def __init__(self, table: CountTable, parked: ParkedPulls) -> None:
        self._parked_pulls = parked
        self._found = table.histogram(families.PULL_DURATION, "found")
        self._empty = table.histogram(families.PULL_DURATION, "empty")
        self._refused = table.histogram(families.PULL_DURATION, "refused")
        self._parked, self._woken = table.count(families.PULLS_PARKED), table.count(families.PULLS_WOKEN)
        self._parked.set(0)
        self._woken.set(0)
        self._out = OutCounts(table, PULL)
        self._has_found = False

    @classmethod
    def of(cls, context: WorkerContext, parked: ParkedPulls) -> PullCounts | None:
        """None where nothing is counted."""
        table = context.counts
        return None if table is None else cls(table, parked)

    def timed(self, operation: Operation) -> Operation:
        """``operation`` with a look at its time."""

        def timed(client: bytes, header: dict[str, Any]) -> None:
            self._has_found = False
            began_ns = monotonic_ns()
            try:
                operation(client, header)
            except Exception:
                self._refused.observe(monotonic_ns() - began_ns)
                raise
            (self._found if self._has_found else self._empty).observe(monotonic_ns() - began_ns)
            self._look()

        return timed

    def answered(self, pull: Pull, result: PullResult) -> None:
        """A pull, which may have waited, gets its answer."""
        self._look()
        if result.count:
            self._has_found = True
            self._out.add(pull.topic, pull.group or "", result.count, int(result.units["size"].sum()))

    def _look(self) -> None:
        self._parked.set(len(self._parked_pulls))
        self._woken.set(len(self._parked_pulls.woken))
