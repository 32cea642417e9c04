"""Cutting what is to be read into partitions: ranges of the log, each with a slice of every queue that lies in it.

A partition costs Spark some 25 ms, and a topic may have thousands of queues, so partitions are not queues. All wanted
queues are cut at the same physical offsets instead: a partition reads one stretch of the log from front to back, and its
slices are runs of queue offsets, so a queue's messages stay in order within it and across it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import InputPartition

from commitmq_plugins.spark.stores import OpenStore, Queue, Sizes

_ROUNDS: Final = 40


@dataclass(frozen=True)
class Slice:
    """Queue offsets ``[first, end)`` of one queue; records below physical offset ``floor`` belong to nobody."""

    topic: str
    queue_id: int
    is_batch: bool
    first: int
    end: int
    floor: int

    @property
    def count(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class StorePartition(InputPartition):
    """Slices of queues of one store folder, all below physical offset ``bound``; ``sizes`` are its files'."""

    store: str
    sizes: Sizes
    bound: int
    slices: tuple[Slice, ...]

    def __hash__(self) -> int:
        return hash((self.store, self.bound, self.slices))


def slices_of(store: OpenStore, queues: Sequence[Queue], floor: int) -> list[Slice]:
    """All that may be shown of ``queues``."""
    return [
        Slice(one.topic, one.queue_id, one.is_batch, one.first, one.end, store.floor_of(one.topic, floor))
        for one in queues
    ]


def cut(store: OpenStore, slices: Sequence[Slice], bound: int, *, least: int, max_bytes: int) -> list[StorePartition]:
    """Partitions of about equal numbers of messages: ``least``, or more if one would hold over ``max_bytes`` of log."""
    slices = [one for one in slices if one.count > 0]
    if not slices:
        return []
    low = min(store.place(one, one.first, bound) for one in slices)
    total = sum(one.count for one in slices)
    wanted = min(max(least, -(-(bound - low) // max_bytes)), total)
    partitions = []
    starts = [one.first for one in slices]
    for number in range(1, wanted + 1):
        if number == wanted:
            ends = [one.end for one in slices]
        else:
            ends = _quantile(store, slices, low, bound, total * number // wanted)
        part = tuple(
            Slice(one.topic, one.queue_id, one.is_batch, start, end, one.floor)
            for one, start, end in zip(slices, starts, ends, strict=True)
            if start < end
        )
        if part:
            partitions.append(StorePartition(str(store.layout.root), store.sizes, bound, part))
        starts = ends
    return partitions


def _quantile(store: OpenStore, slices: Sequence[Slice], low: int, high: int, wanted: int) -> list[int]:
    """For each slice the queue offset at which to cut so that about ``wanted`` messages lie before all cuts."""
    bound = high
    ends = [one.first for one in slices]
    for _ in range(_ROUNDS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        ends = [store.offset_at(one, middle, bound) for one in slices]
        count = sum(end - one.first for end, one in zip(ends, slices, strict=True))
        if abs(count - wanted) * 50 <= wanted:
            break
        if count < wanted:
            low = middle
        else:
            high = middle
    return ends
