"""What a process counts of its syncs of the log: how long they take, and how many bytes each makes durable."""

from __future__ import annotations

from commitmq.counting import families
from commitmq.counting.table import CountTable
from commitmq.workers.runtime.context import WorkerContext


class SyncCounts:
    """The histograms of one process."""

    def __init__(self, table: CountTable, by: str) -> None:
        self._durations = table.histogram(families.FLUSH_DURATION, by)
        self._sizes = table.histogram(families.FLUSH_SIZE, by)

    @classmethod
    def of(cls, context: WorkerContext, by: str) -> SyncCounts | None:
        """None where nothing is counted."""
        table = context.counts
        return None if table is None else cls(table, by)

    def synced(self, took_ns: int, size_bytes: int) -> None:
        """A sync that took so long made so many bytes durable."""
        self._durations.observe(took_ns)
        self._sizes.observe(size_bytes)
