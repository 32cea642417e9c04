"""Lowers the places in the store's own files to the end of a log that was cut; part of the recovery process.

:mod:`commitmq.store.recovery.cut_history` says when that is to be done: once for each cut, durably, before anyone is served.
A recovery that dies in between does it again. :data:`commitmq.ownership.FILES` says of each file what is done with it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

from commitmq.coordination.offsets import GroupOffsets, replay
from commitmq.format.constants import LMQ_PREFIX
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.metadata.consumer_offsets import journal_path, load_snapshot
from commitmq.store.metadata.offsets_journal import OffsetsJournal
from commitmq.store.metadata.topic_config import (
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
)
from commitmq.store.metadata.topic_files import load_topics
from commitmq.store.queues.ends_at import EndsAt
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory, Lowered, home_of
from commitmq.store.recovery.store_recovery import Recovered
from commitmq.workers.runtime.context import WorkerContext

_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class LoweredOffset:
    """A committed offset that lay behind the end of its queue."""

    group: str
    topic: str
    queue: int
    before: int
    now: int

    def __str__(self) -> str:
        return f"{self.group} in {self.topic} queue {self.queue} from {self.before} to {self.now}"


def begin_generation(context: WorkerContext, found: Recovered) -> dict[str, Any]:
    """Write down the cut of this start, if the log may lack what somebody has seen, and lower all places in the store's files
    that lie behind a cut. Returns what ``status`` shows. Raises StoreError, OSError.
    """
    layout = context.layout
    history = CutHistory.load(layout)
    by = _reason(layout, history, found, context.params.get("shown"))
    if by:
        history.add(found.end, by, 0 if found.cut is None else found.cut.id)
        history.save(layout)
    sentence = None
    if history.lowered < history.generation:
        sentence = _lower(context, history, found)
    return {
        "generation": history.generation,
        "log_cuts": history.total,
        "positions_lowered": history.positions,
        "last_log_cut": history.cuts[-1].to_json() if history.cuts else None,
        "lowered_now": sentence,
    }


def _reason(layout: StoreLayout, history: CutHistory, found: Recovered, shown: int | None) -> str:
    """Why the log may lack what somebody has seen; empty when it cannot. ``shown``: the former node had written the log up
    to there, as its control block says; None where that is gone.
    """
    if not history.generation:
        return "first use"
    if history.home != home_of(layout):
        return "copied store"
    if not found.by_sidecar or found.allowed or found.end < (shown or 0):
        return "recovery"
    if not found.clean and (found.power_may_have_gone or shown is None):
        return "recovery"
    return ""


def _lower(context: WorkerContext, history: CutHistory, found: Recovered) -> str | None:
    """Lower everything behind the cuts that are pending; the sentence for a person, None when there was nothing."""
    layout, config = context.layout, context.config
    place = history.pending_end
    lowered: list[LoweredOffset] = []
    if place != NO_CUT:
        log = CommitLog(layout.commit_log, config.commit_log.segment_bytes)
        ends = EndsAt(
            layout,
            log,
            file_bytes=config.consume_queue.file_bytes,
            batch_file_bytes=config.consume_queue.batch_file_bytes,
            dispatched=found.redispatch_from,
            place=min(place, found.end),
            beat=context.heartbeat,
        )
        try:
            lowered = lower_committed(layout, ends)
        finally:
            ends.close()
            log.close()
    groups = {one.group for one in lowered}
    messages = sum(one.before - one.now for one in lowered)
    history.has_lowered(Lowered(len(groups), len(lowered), messages))
    history.save(layout)
    if not lowered:
        return None
    for one in lowered[:_NAMED]:
        context.log.warning("a committed offset was behind the end of its queue", lowered=str(one))
    return (
        f"The log ends at {place}, before what {len(groups)} group(s) had committed: {len(lowered)} offset(s) were lowered by "
        f"{messages} message(s) together, first that of {lowered[0]}"
    )


def lower_committed(layout: StoreLayout, ends: EndsAt) -> list[LoweredOffset]:
    """Lower committed offsets behind the ends of their queues, durably, also in RocketMQ's file. Raises StoreError."""
    topics = load_topics(layout).topics
    table, base = load_snapshot(layout)
    content = OffsetsJournal.read(journal_path(layout))
    if content is not None:
        replay(table, content, base)
    found = [
        LoweredOffset(group, topic, queue, offset, end)
        for (topic, group), queues in table.offsets.items()
        for queue, offset in queues.items()
        if offset > 0 and (end := _end(ends, topics.get(topic), topic, queue)) is not None and end < offset
    ]
    if not found:
        return []
    by_group: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for one in found:
        by_group[one.group].append((one.topic, one.queue, one.now))
    offsets = GroupOffsets.open(layout)
    try:
        for group, wanted in by_group.items():
            offsets.stage(group, wanted, reset=True)
        offsets.sync()
        offsets.snapshot()
    finally:
        offsets.close()
    return found


def _end(ends: EndsAt, topic: TopicConfig | None, name: str, queue: int) -> int | None:
    """The end of a queue; None where it cannot be told: of a topic in memory, and of an unknown one without files."""
    attributes = {} if topic is None else topic.attributes
    if attributes.get(STORAGE_TYPE) == STORAGE_MEMORY:
        return None
    end = ends.end(name, queue, in_batches=attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH)
    return 0 if end is None and (topic is not None or name.startswith(LMQ_PREFIX)) else end
