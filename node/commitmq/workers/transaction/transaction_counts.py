"""What the transaction process counts. Without ``metrics.enable`` none of this exists."""

from __future__ import annotations

import time

from commitmq.counting import families
from commitmq.counting.table import CountTable
from commitmq.format.constants import Property
from commitmq.format.record import Record
from commitmq.workers.runtime.context import WorkerContext


class TransactionCounts:
    """See the module."""

    def __init__(self, table: CountTable) -> None:
        self._table = table
        self._open = table.count(families.TRANSACTIONS_OPEN)

    @classmethod
    def of(cls, context: WorkerContext) -> TransactionCounts | None:
        """None where nothing is counted."""
        table = context.counts
        return None if table is None else cls(table)

    def committed(self, half: Record) -> None:
        """The transaction of ``half`` was committed."""
        topic = self._ended(half, "commit")
        age_ms = time.time_ns() // 1_000_000 - half.born_timestamp
        self._table.histogram(families.TRANSACTION_TIME, topic).observe(max(0, age_ms))

    def rolled_back(self, half: Record) -> None:
        """The transaction of ``half`` was rolled back."""
        self._ended(half, "rollback")

    def open(self, count: int) -> None:
        """So many transactions have no end."""
        self._open.set(count)

    def _ended(self, half: Record, outcome: str) -> str:
        topic = half.properties.get(Property.REAL_TOPIC) or half.topic
        self._table.count(families.TRANSACTIONS_ENDED, topic, outcome).add()
        return topic
