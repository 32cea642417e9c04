"""Which part of each queue is wanted: options and filters made into slices, and what is missing of what was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from commitmq_plugins.spark.gaps import Gap
from commitmq_plugins.spark.options import EARLIEST, LATEST, Bound, SourceOptions
from commitmq_plugins.spark.origins import Origin
from commitmq_plugins.spark.stores import Slice

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


@dataclass
class Pruning:
    """What pushed filters say: only these topics and queues, offsets and store times (ms) between these, both inclusive.

    None of it decides about a message: Spark looks at every row again. It only spares reading what cannot pass.
    """

    topics: set[str] | None = None
    queues: set[int] | None = None
    least: dict[str, int] = field(default_factory=dict)
    greatest: dict[str, int] = field(default_factory=dict)

    def learn(self, filters: Iterable[Filter]) -> None:
        """Take what can be used of ``filters``, all of which must hold for a row."""
        for one in filters:
            attribute: tuple[str, ...] = getattr(one, "attribute", ())
            if len(attribute) != 1:
                continue
            (name,), kind = attribute, type(one).__name__
            values = list(getattr(one, "value", ())) if kind == "In" else [getattr(one, "value", None)]
            if name == "topic" and kind in ("EqualTo", "In"):
                wanted = {str(value) for value in values}
                self.topics = wanted if self.topics is None else self.topics & wanted
            elif name == "queue_id" and kind in ("EqualTo", "In"):
                numbers = {int(value) for value in values if value is not None}
                self.queues = numbers if self.queues is None else self.queues & numbers
            elif name in ("queue_offset", "store_timestamp"):
                self._learn_limit(name, kind, values[0])

    def _learn_limit(self, name: str, kind: str, value: Any) -> None:
        number = _milliseconds(value) if isinstance(value, datetime) else value
        if not isinstance(number, int):
            return
        if kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual"):
            self.least[name] = max(self.least.get(name, number), number)
        if kind in ("EqualTo", "LessThan", "LessThanOrEqual"):
            self.greatest[name] = min(self.greatest.get(name, number), number)

    def applied(self, origin: Origin, one: Slice) -> Slice:
        """``one`` without what cannot pass."""
        if self.topics is not None and one.topic not in self.topics:
            return replace(one, end=one.first)
        if self.queues is not None and one.queue_id not in self.queues:
            return replace(one, end=one.first)
        first = max(one.first, self.least.get("queue_offset", one.first))
        end = min(one.end, self.greatest.get("queue_offset", one.end) + 1)
        if "store_timestamp" in self.least:
            first = max(first, origin.offset_by_time(one, self.least["store_timestamp"]))
        if "store_timestamp" in self.greatest:
            end = min(end, origin.offset_by_time(one, self.greatest["store_timestamp"] + 1))
        return replace(one, first=min(first, max(first, end)), end=max(first, end))


def _milliseconds(moment: datetime) -> int:
    """Rounded down; a time without a zone is in this process's, as Spark makes it."""
    return int(moment.astimezone(UTC).timestamp() * 1000)


def chosen(origin: Origin, options: SourceOptions, gaps: list[Gap]) -> list[Slice]:
    """The slices that ``options`` ask for. What is missing of them is added to ``gaps``."""
    found = origin.slices(options.wants)
    if options.end == Bound(LATEST):
        gaps += origin.lost(options.wants)
    result = []
    for one in found:
        first = position(origin, one, options.start, gaps)
        end = position(origin, one, options.end, gaps)
        result.append(replace(one, first=min(first, end), end=end))
    for bound in (options.start, options.end):
        gaps += unknown_queues(origin, bound, found)
    return result


def position(origin: Origin, one: Slice, bound: Bound, gaps: list[Gap]) -> int:
    """The queue offset that ``bound`` means, within the slice. One outside is a gap."""
    if bound.timestamp is not None:
        return origin.offset_by_time(one, bound.timestamp)
    wanted = bound.of(origin.name, one.topic, one.queue_id)
    if wanted == EARLIEST:
        return one.first
    if wanted == LATEST:
        return one.end
    offset = int(wanted)
    if offset < one.first:
        gaps.append(Gap(origin.name, one.topic, one.queue_id, offset, one.first, "expired"))
    if offset > one.end:
        gaps.append(Gap(origin.name, one.topic, one.queue_id, one.end, offset, "the queue ends before"))
    return min(max(offset, one.first), one.end)


def unknown_queues(origin: Origin, bound: Bound, found: Sequence[Slice]) -> list[Gap]:
    """Queues that ``bound`` names with an offset above 0, and that do not exist."""
    known = {(one.topic, one.queue_id) for one in found}
    topics = (bound.offsets or {}).get(origin.name) or (bound.offsets or {}).get("") or {}
    return [
        Gap(origin.name, topic, queue, 0, offset, "there is no such queue")
        for topic, queues in topics.items()
        for queue, offset in queues.items()
        if (topic, queue) not in known and isinstance(offset, int) and offset > 0
    ]
