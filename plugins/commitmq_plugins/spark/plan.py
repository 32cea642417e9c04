"""Cuts the messages to read into partitions: ranges of the log, each with a slice of every queue in it.

A partition costs Spark some 25 ms, and a topic may have thousands of queues, so partitions are not queues. Instead all
wanted queues are cut at the same physical offsets. A partition reads one range of the log from front to back. Its
slices are runs of queue offsets, so a queue's messages stay in order within a partition and across partitions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.datasource import InputPartition

from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.stores import OpenStore, Sizes, Slice

_MOST_PARTITIONS: Final = 32
_TOLERANCE: Final = 16  # a part may differ from its share by a sixteenth


@dataclass(frozen=True)
class FilePartition(InputPartition):
    """Slices of queues of one store folder, all below physical offset ``bound`` in this ``generation`` of the store;
    ``sizes`` are its files'. Each record
    at physical offset ``crc_from`` or behind it has a ``__CRC32#``.

    ``name`` is the store's name in the column and in offsets. With a ``node`` the folder is that node's, and an
    executor that does not find it (or finds one with another ``token``) pulls the records from the node instead.
    """

    name: str
    slices: tuple[Slice, ...]
    root: str
    sizes: Sizes
    bound: int
    generation: int
    crc_from: int
    node: str = ""
    token: str = ""


@dataclass(frozen=True)
class PullPartition(InputPartition):
    """Slices of queues whose records the node sends, in this ``generation`` of its store."""

    name: str
    slices: tuple[Slice, ...]
    node: str
    generation: int


Partition = FilePartition | PullPartition


def parts_of(store: OpenStore, slices: Sequence[Slice], bound: int, *, least: int, max_bytes: int) -> int:
    """The number of parts for ``slices``: ``least``, or more if one would hold over ``max_bytes`` of log."""
    slices = _real(store, slices, bound)
    if not slices:
        return 0
    low = min(store.place(one, one.first, bound) for one in slices)
    high = max(store.place(one, one.end - 1, bound) for one in slices)
    return min(max(least, -(-(high - low) // max_bytes)), sum(one.count for one in slices))


def cut(store: OpenStore, slices: Sequence[Slice], bound: int, parts: int) -> list[tuple[Slice, ...]]:
    """About ``parts`` parts of about equal numbers of messages.

    They depend only on the slices and ``parts``, not on later records of the log. So a micro-batch that is repeated
    after a crash is cut as it was the first time; otherwise its sink would not recognise its rows.
    """
    slices = _real(store, slices, bound)
    if not slices:
        return []
    low = min(store.place(one, one.first, bound) for one in slices)
    high = max(store.place(one, one.end - 1, bound) for one in slices) + 1
    cuts: dict[int, list[int]] = {}
    _divide(store, slices, (low, high), bound, range(1, parts), parts, cuts)
    return parts_between(slices, [cuts[number] for number in sorted(cuts)])


def _real(store: OpenStore, slices: Sequence[Slice], bound: int) -> list[Slice]:
    """``slices`` that are not empty, each up to its last message: offsets that never had one may follow."""
    found = [replace(one, end=store.last_message(one, bound) + 1) for one in slices if one.count > 0]
    return [one for one in found if one.count > 0]


def cut_evenly(slices: Sequence[Slice], parts: int) -> list[tuple[Slice, ...]]:
    """``parts`` parts with an equal share of each slice: for a store whose files are not on this host."""
    slices = [one for one in slices if one.count > 0]
    cuts = [[one.first + one.count * number // parts for one in slices] for number in range(1, parts)]
    return parts_between(slices, cuts)


def parts_between(slices: Sequence[Slice], cuts: Sequence[Sequence[int]]) -> list[tuple[Slice, ...]]:
    """``slices`` cut at the queue offsets of each of ``cuts``, which ascend; parts without a message are omitted."""
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


def _divide(
    store: OpenStore,
    slices: Sequence[Slice],
    span: tuple[int, int],
    bound: int,
    numbers: range,
    parts: int,
    cuts: dict[int, list[int]],
) -> None:
    """Find the cuts ``numbers`` of ``parts`` - 1, all within the physical offsets ``span``, the middle one first. Cut
    ``k`` has about ``k / parts`` of all messages before it: for each slice the queue offset at which to cut.
    """
    if not numbers:
        return
    middle_cut = len(numbers) // 2
    total = sum(one.count for one in slices)
    wanted, tolerance = total * numbers[middle_cut] // parts, total // parts // _TOLERANCE
    low, high = span
    ends = [store.offset_at(one, low, bound) for one in slices]
    at = low
    while high - low > 1:
        at = (low + high) // 2
        ends = [store.offset_at(one, at, bound) for one in slices]
        count = sum(end - one.first for end, one in zip(ends, slices, strict=True))
        if abs(count - wanted) <= tolerance:
            break
        if count < wanted:
            low = at
        else:
            high = at
    cuts[numbers[middle_cut]] = ends
    _divide(store, slices, (span[0], at), bound, numbers[:middle_cut], parts, cuts)
    _divide(store, slices, (at, span[1]), bound, numbers[middle_cut + 1 :], parts, cuts)


def least_partitions(options: SourceOptions, origins: int) -> int:
    """The least number of partitions for one of ``origins`` stores: one per core unless the option says otherwise."""
    wanted = options.min_partitions or min(max(2, os.cpu_count() or 1), _MOST_PARTITIONS)
    return -(-wanted // origins)
