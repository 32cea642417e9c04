"""Turns options into the wanted slice of each queue, and reports missing messages of the requested range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from commitmq_plugins.spark.gaps import Gap
from commitmq_plugins.spark.options import EARLIEST, LATEST, Bound, SourceOptions
from commitmq_plugins.spark.origins import Origin
from commitmq_plugins.spark.stores import Slice

ANEW: Final = "the topic was deleted and made anew"
EXPIRED: Final = "expired"
GONE: Final = "the queue is gone"
SHORT: Final = "the queue ends before"
CUT: Final = "it was there, and the log has it no more: the log was cut, or is another one"


def chosen(origin: Origin, options: SourceOptions, gaps: list[Gap]) -> list[Slice]:
    """The slices that ``options`` select. Missing parts of them are added to ``gaps``."""
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
    """The queue offset of ``bound``, within the slice. An offset outside the slice is a gap."""
    if bound.timestamp is not None:
        return origin.offset_by_time(one, bound.timestamp)
    wanted = bound.of(origin.name, one.topic, one.queue_id)
    if wanted == EARLIEST:
        return one.first
    if wanted == LATEST:
        return one.end
    offset = int(wanted)
    if offset < one.first:
        gaps.append(Gap(origin.name, one.topic, one.queue_id, offset, one.first, EXPIRED))
    if offset > one.end:
        gaps.append(Gap(origin.name, one.topic, one.queue_id, one.end, offset, SHORT))
    return min(max(offset, one.first), one.end)


def resumed(
    origin: Origin, store: str, one: Slice, known: int | None, was: str | None, generation: int, gaps: list[Gap]
) -> int:
    """The queue offset at which a job goes on in a queue that it has read up to ``known``, when its topic had the
    incarnation ``was`` and the store this ``generation``; None for a new queue. What it cannot read any more, and what it
    has read and the log has not any more, is added to ``gaps``.

    A new queue is read from its first message, and so is one of a topic made anew. Where the log was cut below ``known``, the
    queue is read from the cut on.
    """
    if known is None:
        return one.first
    if was != one.incarnation:
        gaps.append(Gap(store, one.topic, one.queue_id, max(known - 1, 0), max(known, 1), ANEW))
        return one.first
    kept = origin.kept(one, generation)
    gaps.append(Gap(store, one.topic, one.queue_id, known, one.first, EXPIRED))
    gaps.append(Gap(store, one.topic, one.queue_id, kept, known, CUT))
    return max(min(known, kept), one.first)


def cut_off(
    origin: Origin,
    store: str,
    found: Iterable[Slice],
    known: Iterable[tuple[str, int, int]],
    generations: Mapping[str, int],
) -> list[Gap]:
    """What a job has read of queues of which a cut of the log left nothing; ``known`` are topic, queue and position,
    ``generations`` those of the positions by topic.
    """
    there = {(one.topic, one.queue_id) for one in found}
    gone = [
        Gap(store, topic, queue, 0, at, CUT)
        for topic, queue, at in known
        if (topic, queue) not in there and origin.is_cut_since(generations.get(topic, 0))
    ]
    topics = origin.topics() if gone else {}
    return [gap for gap in gone if gap.topic in topics]


def remaining(
    origin: Origin, wanted: Slice, found: Mapping[tuple[str, int], Slice], generation: int, gaps: list[Gap]
) -> Slice | None:
    """The part of ``wanted`` that can still be read; it was chosen when the store had this ``generation``. ``found`` are the
    present queues by topic and number. What is missing is added to ``gaps``.
    """
    if wanted.count <= 0:
        return None
    one = found.get((wanted.topic, wanted.queue_id))

    def miss(first: int, end: int, reason: str) -> None:
        gaps.append(Gap(origin.name, wanted.topic, wanted.queue_id, first, end, reason))

    if one is None or one.incarnation != wanted.incarnation:
        miss(wanted.first, wanted.end, GONE if one is None else ANEW)
        return None
    kept = origin.kept(one, generation)
    miss(wanted.first, min(one.first, wanted.end), EXPIRED)
    miss(max(wanted.first, kept), wanted.end, CUT)
    left = replace(one, first=max(wanted.first, one.first), end=min(wanted.end, kept))
    return left if left.count > 0 else None


def unknown_queues(origin: Origin, bound: Bound, found: Sequence[Slice]) -> list[Gap]:
    """Queues that ``bound`` names with an offset above 0 and that do not exist."""
    known = {(one.topic, one.queue_id) for one in found}
    topics = (bound.offsets or {}).get(origin.name) or (bound.offsets or {}).get("") or {}
    return [
        Gap(origin.name, topic, queue, 0, offset, "there is no such queue")
        for topic, queues in topics.items()
        for queue, offset in queues.items()
        if (topic, queue) not in known and isinstance(offset, int) and offset > 0
    ]
