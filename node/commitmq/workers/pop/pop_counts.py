"""What the pop process counts: messages in flight, and messages handed out. Without ``metrics.enable`` none of this exists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from commitmq.counting import families
from commitmq.counting.table import CountTable
from commitmq.workers.reader.pull_counts import POP, OutCounts
from commitmq.workers.runtime.context import WorkerContext


class _Portion(Protocol):
    @property
    def topic(self) -> str: ...
    @property
    def offsets(self) -> Any: ...
    @property
    def frames(self) -> Any: ...


class PopCounts:
    """See the module."""

    def __init__(self, table: CountTable) -> None:
        self._table = table
        self._out = OutCounts(table, POP)
        table.reset(families.POP_IN_FLIGHT)

    @classmethod
    def of(cls, context: WorkerContext) -> PopCounts | None:
        """None where nothing is counted. The process knows of nothing that is in flight yet."""
        table = context.counts
        return None if table is None else cls(table)

    def in_flight(self, topic: str, group: str, change: int) -> None:
        """So many messages more of ``topic``, or fewer, are in flight."""
        self._table.count(families.POP_IN_FLIGHT, topic, group).add(change)

    def handed_out(self, group: str, portions: Iterable[_Portion]) -> None:
        """``group`` got these messages."""
        for one in portions:
            self._out.add(one.topic, group, len(one.offsets), sum(map(len, one.frames)))
