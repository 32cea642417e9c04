"""Cutting what is to be read into partitions: ranges of the log, each with a slice of every queue that lies in it.

A partition costs Spark some 25 ms, and a topic may have thousands of queues, so partitions are not queues. All wanted
queues are cut at the same physical offsets instead: a partition reads one stretch of the log from front to back, and its
slices are runs of queue offsets, so a queue's messages stay in order within it and across it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.datasource import InputPartition

from commitmq_plugins.spark.stores import OpenStore, Sizes, Slice

_ROUNDS: Final = 40


@dataclass(frozen=True)
class FilePartition(InputPartition):
    """Slices of queues of one store folder, all below physical offset ``bound``; ``sizes`` are its files'.

    ``name`` is what the store is called in the column and in offsets. With a ``node`` the folder is that node's, and an
    executor that does not find it (or one whose ``token`` is another) asks the node for the records instead.
    """

    name: str
    slices: tuple[Slice, ...]
    root: str
    sizes: Sizes
    bound: int
    node: str = ""
    token: str = ""


@dataclass(frozen=True)
class PullPartition(InputPartition):
    """Slices of queues whose records the node sends."""

    name: str
    slices: tuple[Slice, ...]
    node: str


Partition = FilePartition | PullPartition


def cut(
    store: OpenStore, slices: Sequence[Slice], bound: int, *, least: int, max_bytes: int
) -> list[tuple[Slice, ...]]:
    """Parts of about equal numbers of messages: ``least``, or more if one would hold over ``max_bytes`` of log."""
    slices = [one for one in slices if one.count > 0]
    if not slices:
        return []
    low = min(store.place(one, one.first, bound) for one in slices)
    high = max(store.place(one, one.end, bound) for one in slices)
    total = sum(one.count for one in slices)
    wanted = min(max(least, -(-(high - low) // max_bytes)), total)
    cuts = [_quantile(store, slices, low, bound, total * number // wanted) for number in range(1, wanted)]
    return parts_between(slices, cuts)


def cut_evenly(slices: Sequence[Slice], parts: int) -> list[tuple[Slice, ...]]:
    """``parts`` parts with an equal share of each slice: for a store whose files are out of sight."""
    slices = [one for one in slices if one.count > 0]
    cuts = [[one.first + one.count * number // parts for one in slices] for number in range(1, parts)]
    return parts_between(slices, cuts)


def parts_between(slices: Sequence[Slice], cuts: Sequence[Sequence[int]]) -> list[tuple[Slice, ...]]:
    """``slices`` cut at the queue offsets of each of ``cuts``, which ascend; parts without a message are left out."""
    parts = []
    starts: Sequence[int] = [one.first for one in slices]
    for ends in [*cuts, [one.end for one in slices]]:
        part = tuple(
            replace(one, first=start, end=end)
            for one, start, end in zip(slices, starts, ends, strict=True)
            if start < end
        )
        if part:
            parts.append(part)
        starts = ends
    return parts


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
