"""Lowers the places in the store's own files to the end of a log that was cut; part of the recovery process.

:mod:`commitmq.store.recovery.cut_history` says when that is to be done: once for each cut, durably, before anyone is served.
A recovery that dies in between does it again. :data:`commitmq.ownership.FILES` says of each file what is done with it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

from commitmq.config import PopConfig
from commitmq.coordination.offsets import GroupOffsets, replay
from commitmq.errors import InvalidMessageError, StoreError
from commitmq.files import disk
from commitmq.files.room import Room
from commitmq.format.constants import LMQ_PREFIX
from commitmq.log import Log
from commitmq.semantics.delay import SCHEDULE_TOPIC, queue_of
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import CHECK_GROUP
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.metadata import orders_journal
from commitmq.store.metadata.group_config import ConsumerOffsets, journal_path, load_snapshot
from commitmq.store.metadata.offsets_journal import OffsetsJournal
from commitmq.store.metadata.topic_config import (
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
)
from commitmq.store.metadata.topic_files import load_topics
from commitmq.store.producers import ProducerSnapshot
from commitmq.store.queues.queue_ends import EndsAt
from commitmq.store.recovery.cut_history import BY_PERSON, NO_CUT, CutHistory, Lowered
from commitmq.store.recovery.store_recovery import Recovered
from commitmq.workers.dispatcher.dispatch_state import DispatchState
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.recovery import ProgressFile
from commitmq.workers.runtime import set_aside
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.schedule import progress as schedule_progress
from commitmq.workers.timer import progress as timer_progress

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
    served, history.served = history.served, history.lowered
    if by:
        history.add(found.end, by, 0 if found.cut is None else found.cut.id)
    if by or served != history.served:
        history.save(layout)
    sentence = None
    if history.lowered < history.generation:
        sentence = _lower(context, history, found)
    return {
        "generation": history.generation,
        "log_cuts": history.total,
        "positions_lowered": history.positions,
        "log_ends": [(cut.generation, cut.end) for cut in history.cuts],
        "last_log_cut": history.cuts[-1].to_json() if history.cuts else None,
        "lowered_now": sentence,
    }


def _reason(layout: StoreLayout, history: CutHistory, found: Recovered, shown: int | None) -> str:
    """Why the log may lack what somebody has seen; empty when it cannot. ``shown``: the former node had written the log up
    to there, as its control block says; None where that is gone.
    """
    if found.allowed:
        return "allow-cut"
    if not history.generation:
        return "first use"
    if history.is_copy:
        return "copied store"
    if not found.by_sidecar or found.end < (shown or 0):
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
        place = min(place, found.end)
        # Flushed messages are gone: so are ends of transactions that their positions have passed.
        by_person = any(one.by in BY_PERSON for one in history.cuts if one.generation > history.lowered)
        log = CommitLog(layout.commit_log, config.commit_log.segment_bytes)
        ends = EndsAt(
            layout,
            log,
            file_bytes=config.consume_queue.file_bytes,
            batch_file_bytes=config.consume_queue.batch_file_bytes,
            dispatched=found.redispatch_from,
            place=place,
            beat=context.heartbeat,
        )
        try:
            lowered = lower_committed(layout, ends, looks_again=by_person)
            others = lower_others(layout, ends, place, context.log)
        finally:
            ends.close()
            log.close()
        if others:
            context.log.warning("the node's own positions were behind the end of the log", lowered=", ".join(others))
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


def lower_others(layout: StoreLayout, ends: EndsAt, place: int, log: Log) -> list[str]:
    """Lower all other places in the store's files; returns which files needed it. Raises StoreError, OSError."""
    found = []

    def flushed() -> int:
        return place

    schedule = schedule_progress.ProgressFiles(layout, log, flushed)
    if schedule.lower(place, lambda level: ends.end(SCHEDULE_TOPIC, queue_of(level))):
        found.append("delay levels")
    if timer_progress.ProgressFiles(layout, log, flushed).lower(place, ends.end(TIMER_TOPIC, 0)):
        found.append("timer")
    if ProgressFile(layout, log, flushed).lower(place):
        found.append("pop")
    if _lower_orders(layout, ends, log):
        found.append("ordered receives")
    for path in sorted((layout.own / "dispatchers").glob("*.json")):
        if DispatchState.load(path, log).lower(place):
            found.append(f"dispatcher {path.stem}")
    if set_aside.lower(layout.set_aside, place):
        found.append("messages set aside")
    if _forget_producers(layout, place):
        found.append("producers")
    return found


def _lower_orders(layout: StoreLayout, ends: EndsAt, log: Log) -> bool:
    """Forget the states of ordered receives that know messages behind the ends of their queues: what they have in flight
    comes again.
    """
    try:
        table = orders_journal.read(layout)
    except (StoreError, InvalidMessageError) as error:  # the process that owns them sets them aside
        log.warning("the state of ordered receives cannot be read", error=str(error))
        return False
    topics = load_topics(layout).topics
    gone = [
        OrderKey(topic, group, queue)
        for (topic, group), states in table.items()
        for queue, state in states.items()
        if state.offsets
        and (end := _end(ends, topics.get(topic), topic, queue)) is not None
        and state.offsets[-1] >= end
    ]
    if gone:
        orders = Orders(layout, log, Room.of_nobody(log), PopConfig())
        orders.load()
        for key in gone:
            orders.drop(key)
        orders.store()
        orders.close()
    return bool(gone)


def _forget_producers(layout: StoreLayout, place: int) -> bool:
    """Remove a snapshot of producers that covers more than is left: the writer makes the table from the log then."""
    try:
        snapshot = ProducerSnapshot.load(layout.producers)
    except StoreError:
        return False  # the writer does not take it either
    if snapshot is None or snapshot.position <= place:
        return False
    disk.unlink(layout.producers, "producers")
    disk.sync_folder(layout.own, "producers")
    return True


def lower_committed(layout: StoreLayout, ends: EndsAt, *, looks_again: bool = False) -> list[LoweredOffset]:
    """Lower committed offsets behind the ends of their queues, durably, also in RocketMQ's file; returns those of groups.

    Open transactions are found again from the beginning of their topics if one of the node's own offsets there was behind,
    or with ``looks_again``. Raises StoreError.
    """
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
    found += _of_transactions(table, found, looks_again)
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
    return [one for one in found if one.group != CHECK_GROUP]


def _of_transactions(table: ConsumerOffsets, found: list[LoweredOffset], looks_again: bool) -> list[LoweredOffset]:
    """Offsets of the node's own group in half and op topic, all to 0: an end may be gone whose half message is still there."""
    if not looks_again and not any(one.group == CHECK_GROUP for one in found):
        return []
    return [
        LoweredOffset(CHECK_GROUP, topic, queue, offset, 0)
        for topic, queue, offset in table.of_group(CHECK_GROUP)
        if offset > 0
    ]


def _end(ends: EndsAt, topic: TopicConfig | None, name: str, queue: int) -> int | None:
    """The end of a queue; None where it cannot be told: of a topic in memory, and of an unknown one without files."""
    attributes = {} if topic is None else topic.attributes
    if attributes.get(STORAGE_TYPE) == STORAGE_MEMORY:
        return None
    end = ends.end(name, queue, in_batches=attributes.get(QUEUE_TYPE) == QUEUE_TYPE_BATCH)
    return 0 if end is None and (topic is not None or name.startswith(LMQ_PREFIX)) else end
