"""recovery: one-shot; brings the store into a state from which all other processes can start.

Owns, while it runs alone: everything under the store. Advances: the initial values of all positions in the control
block. Sockets: none. Exit codes: 0 when the store is ready, STORE_UNUSABLE with a sentence when an operator has to
decide.

``params["clean"]`` says whether the last stop was clean (no ``abort`` file before this start). ``params["previous"]``
is the token in that file. ``params["shown"]`` is the end of the log in the previous node's control block, None without
one. ``params["owner"]`` is the token that the supervisor writes there when this process has ended
well.

Damaged ConsumeQueues are rebuilt from the log before other processes use them: :mod:`commitmq.offline.queue_check`
finds them. Then all queues are rebuilt from the log, as ``commitmq
store rebuild`` does it, and the old files are kept in ``commitmq/before-rebuild-TIME``. The node's log and the report
at the end of the start mention the rebuild.

The places in the store's own files are lowered to the end of a log that was cut: once for each cut, durably, before
anyone is served (:mod:`commitmq.store.recovery.cut_history`). A recovery that dies in between does it again.
:data:`commitmq.ownership.FILES` says of each file what is done with it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from commitmq import failpoints
from commitmq.config import PopConfig
from commitmq.control import DispatcherWord, Word
from commitmq.coordination.offsets import GroupOffsets, replay
from commitmq.errors import CorruptRecordError, DiskFullError, InvalidMessageError, StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.disk_space import DiskRoom, is_no_space
from commitmq.files.mapped_file import list_segments
from commitmq.format.constants import LMQ_PREFIX
from commitmq.log import Log
from commitmq.semantics.delay import SCHEDULE_TOPIC, queue_of
from commitmq.semantics.timer import TIMER_TOPIC
from commitmq.semantics.transaction import CHECK_GROUP
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log import transient_pool
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.expiry import first_timestamp
from commitmq.store.metadata import journal
from commitmq.store.metadata.group_config import ConsumerOffsets, journal_path, load_snapshot
from commitmq.store.metadata.journal import OffsetsJournal
from commitmq.store.metadata.topic_config import (
    QUEUE_TYPE,
    QUEUE_TYPE_BATCH,
    STORAGE_MEMORY,
    STORAGE_TYPE,
    TopicConfig,
)
from commitmq.store.metadata.topic_files import load_tombstones, load_topics
from commitmq.store.producers import ProducerSnapshot, ProducerTable, may_have_producers
from commitmq.store.queues import queue_ends
from commitmq.store.queues.queue_ends import EndsAt, QueueEnds
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.abort_file import NO_TOKEN
from commitmq.store.recovery.cut_history import BY_PERSON, NO_CUT, CutHistory, Lowered
from commitmq.store.recovery.sidecar import Sidecar
from commitmq.store.recovery.store_recovery import Recovered, recover
from commitmq.workers.dispatcher.dispatch_state import DispatchState
from commitmq.workers.pop.orders import OrderKey, Orders
from commitmq.workers.pop.recovery import ProgressFile
from commitmq.workers.runtime import set_aside
from commitmq.workers.runtime.context import StartProgress, WorkerContext
from commitmq.workers.schedule import progress as schedule_progress
from commitmq.workers.timer import progress as timer_progress

if TYPE_CHECKING:
    from commitmq.offline.queue_check import Loss

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
    """Why the log may lack what somebody has seen; empty when it cannot. ``shown``: the previous node had written the
    log up to there, as its control block says; None where that is gone.
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
    """Lower everything behind the cuts that are pending; the sentence for an operator, None when there was nothing."""
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

    schedule = schedule_progress.ScheduleProgressFiles(layout, log, flushed)
    if schedule.lower(place, lambda level: ends.end(SCHEDULE_TOPIC, queue_of(level))):
        found.append("delay levels")
    if timer_progress.TimerProgressFiles(layout, log, flushed).lower(place, ends.end(TIMER_TOPIC, 0)):
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
    """Forget the states of ordered receives that lie behind their queues: what they have out comes again."""
    try:
        table = journal.read(layout)
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
        orders = Orders(layout, log, DiskRoom.of_nobody(log), PopConfig())
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


def mend_queues(context: WorkerContext, found: Recovered, progress: StartProgress) -> tuple[Recovered, dict[str, Any]]:
    """``found`` with the offset at which dispatchers begin once the queues are right, and the report of the rebuild.
    Raises StoreError: the log cannot be read from its beginning, or there is no room.
    """
    layout, config = context.layout, context.config
    _compare_topics(context)
    bases = tuple(list_segments(layout.commit_log, config.commit_log.segment_bytes))
    ends = _ends_of_last_use(context, found)
    if not bases or found.end <= found.min_offset:
        return found, {}
    # Every process of a node shares what its keeper has loaded; a check of queues and a rebuild are this one's alone.
    from commitmq.offline.held_store import HeldStore, StoreView
    from commitmq.offline.queue_check import find_losses
    from commitmq.offline.rebuild import rebuild

    # Recovery has refused other sizes, so the configuration's sizes are the files' sizes.
    store = HeldStore(layout.root, config)
    store.config = config
    losses = find_losses(StoreView.of(store, bases), ends, found.redispatch_from, progress)
    if not losses:
        if ends is not None and ends.position < found.redispatch_from:
            # The ends of queues behind the record are unknown: those units are dispatched again.
            found = replace(found, redispatch_from=max(found.min_offset, ends.position))
        return found, {}
    for loss in losses[:_NAMED]:
        context.log.error("a ConsumeQueue is damaged", topic=loss.topic, queue=loss.queue_id, why=loss.why)
    context.log.warning("rebuilding the ConsumeQueues from the log", damaged_queues=len(losses))
    try:
        done = rebuild(
            store, ("queues",), lambda at, total: progress("rebuilding queues", at, total), ends=ends or QueueEnds(-1)
        )
    except DiskFullError as error:
        raise StoreError(f"{_told(losses)}, and there is no room to rebuild them from the log: {error}") from error
    context.log.info("ConsumeQueues rebuilt", records=done.records, seconds=round(done.seconds, 3), kept=str(done.kept))
    rebuilt = {"queues": [str(loss) for loss in losses[:_NAMED]], "damaged": len(losses), "kept": str(done.kept)}
    return replace(found, redispatch_from=found.end), {"rebuilt": rebuilt}


def _ends_of_last_use(context: WorkerContext, found: Recovered) -> QueueEnds | None:
    """The record of queue ends from the last use; None when another program used the store since, and after an operator
    allowed the log to end earlier. Raises StoreError.
    """
    path = context.layout.queue_ends
    if found.by_sidecar:
        return QueueEnds.load(path)
    # A start that dies from here on leaves a sidecar of its own, and the next start would take the record for current.
    if path.exists():
        queue_ends.forget(path)
    return None


def _told(losses: list[Loss]) -> str:
    more = f" and {len(losses) - 1} more" if len(losses) > 1 else ""
    return f"ConsumeQueues are damaged: {losses[0]}{more}"


def _compare_topics(context: WorkerContext) -> None:
    """Topics that have queues must be in ``config/topics.json``, else no consumer can read them.

    Raises StoreError when that file is missing, unless a death between the two renames of its replacement took it: then its
    previous generation is whole. Single missing topics are only logged: RocketMQ deletes a topic's queues later.
    """
    layout = context.layout
    path = layout.config / "topics.json"
    known = load_topics(layout).topics
    deleted = load_tombstones(layout)
    found = {topic for root in (layout.consume_queue, layout.batch_consume_queue) for topic, _, _ in list_queues(root)}
    unknown = sorted(one for one in found - known.keys() - deleted.keys() if not one.startswith(LMQ_PREFIX))
    if not unknown:
        return
    named = ", ".join(unknown[:_NAMED]) + (f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else "")
    if not path.exists() and not path.with_name(path.name + atomic_file.SUFFIX).exists():
        raise StoreError(
            f"the table of topics is missing, and no client could read the queues of these topics: {named}. Put it back, "
            "from topics.json.bak perhaps; or write {} into it, start, and create these topics again, which keep their "
            "messages",
            path=path,
        )
    context.log.warning("no client can read these queues: config/topics.json does not have their topics", topics=named)


ROLE = "recovery"
_CUTS_TOLD = 10  # the size of a message to the supervisor is limited


def run(context: WorkerContext) -> None:
    """Recover, publish the positions, end."""
    try:
        _run(context)
    except CorruptRecordError as error:
        from commitmq.offline.log_damage import explained

        raise explained(error, context.layout, context.config.commit_log.segment_bytes) from error
    except OSError as error:
        if not is_no_space(error):
            raise
        # Trying again would not help. The supervisor prints the sentence for the person at the start.
        raise DiskFullError(f"the store cannot be recovered: {error}", path=context.layout.root) from error


def _run(context: WorkerContext) -> None:
    started = time.monotonic()
    config = context.config
    progress = StartProgress(context)
    found = recover(
        context.layout,
        segment_bytes=config.commit_log.segment_bytes,
        consume_queue_bytes=config.consume_queue.file_bytes,
        batch_queue_bytes=config.consume_queue.batch_file_bytes,
        clean=bool(context.params.get("clean", False)),
        log=context.log,
        previous=context.params.get("previous"),
        allowed_end=config.commit_log.allow_cut,
        progress=progress,
    )
    found, mended = mend_queues(context, found, progress)
    # Before any position is published: a start that dies before this must find no sign that nothing is missing.
    generation = begin_generation(context, found)
    control = context.control
    control.put(Word.GENERATION, generation["generation"])
    control.put(Word.WRITTEN_TIMESTAMP, found.last_timestamp)
    for word in (Word.WRITTEN, Word.FLUSHED, Word.RECOVERED_END):
        control.put(word, found.end)
    _make_pool(context, found)
    control.put(Word.MIN_OFFSET, found.min_offset)
    control.put(Word.CRC_FROM, found.crc_from if config.commit_log.append_properties_crc else -1)
    control.put(Word.REPUT, found.redispatch_from)
    control.put(Word.REDISPATCH_FROM, found.redispatch_from)
    control.put_dispatcher(0, DispatcherWord.DISPATCHED, found.redispatch_from)
    control.put_dispatcher(0, DispatcherWord.DURABLE, found.redispatch_from)
    _remember(context, found)
    _first_producers(context, found)
    recovered = {
        "clean": bool(context.params.get("clean", False)),
        "end": found.end,
        "redispatch_from": found.redispatch_from,
        "records": found.records,
        "scanned_bytes": found.scanned_bytes,
        "cut_bytes": found.cut_bytes,
        "by_sidecar": found.by_sidecar,
        "seconds": round(time.monotonic() - started, 3),
        **mended,
    }
    context.log.info("store recovered", **recovered)
    progress.over()
    if failpoints.ACTIVE:
        failpoints.hit("recovery.done")
    context.ready(recovered=recovered, **_cuts(context, found), **generation)


def _cuts(context: WorkerContext, found: Recovered) -> dict[str, Any]:
    """For status requests: the bytes that this start cut, and the other cut pieces of the log in ``commitmq/cut``."""
    layout = context.layout
    kept = [cut for cut in cut_record.load(layout) if not cut.restored]
    return {
        "cut_now": None if found.cut is None else cut_record.sentence(layout, found.cut),
        "cuts": [one.to_json(layout) for one in kept[-_CUTS_TOLD:]],
        "cuts_kept": len(kept),
    }


def _make_pool(context: WorkerContext, found: Recovered) -> None:
    """Create the transient store pool if it is configured; an earlier pool was taken over already. Raises StoreError."""
    config, control = context.config, context.control
    if not config.commit_log.transient_store_pool:
        return
    started = time.monotonic()
    buffers = config.commit_log.transient_store_pool_size
    transient_pool.make(
        context.layout,
        config.memory.folder,
        buffers=buffers,
        segment_bytes=config.commit_log.segment_bytes,
        properties_crc=config.commit_log.append_properties_crc,
        committed=found.end,
    )
    control.put(Word.COMMITTED, found.end)
    control.put(Word.COMMITTED_TIMESTAMP, found.last_timestamp)
    control.put(Word.POOL_BUFFERS, buffers)
    context.log.info(
        "transient store pool is ready",
        folder=transient_pool.pool_folder(context.layout),
        buffers=buffers,
        seconds=round(time.monotonic() - started, 3),
    )


def _first_producers(context: WorkerContext, found: Recovered) -> None:
    """Write an empty producer snapshot for a store that no node has served yet: no idempotent producers are below its
    end, so no writer has to read its log for them.

    It is written before ``commitmq/store.json``. So once that file exists, a missing snapshot means that it was lost.
    """
    layout = context.layout
    if may_have_producers(layout):
        return
    settings = context.config.producers
    none = ProducerTable(max_entries=settings.max_entries, window=settings.window, expiry_ms=settings.expiry_ms)
    try:
        ProducerSnapshot(found.end, none.to_bytes()).save(layout.producers)
    except OSError as error:
        context.log.warning("the writer will read the log for producers", why=os.strerror(error.errno or 5))


def _stored_before(context: WorkerContext, offset: int) -> int:
    """A store timestamp (ms) such that no record at or behind ``offset`` is older; 0 when none is known."""
    segment_bytes = context.config.commit_log.segment_bytes
    log = CommitLog(context.layout.commit_log, segment_bytes)
    try:
        return max(0, first_timestamp(log, max(log.min_offset, offset - offset % segment_bytes)))
    except (StoreError, CorruptRecordError):
        return 0
    finally:
        log.close()


def _remember(context: WorkerContext, found: Recovered) -> None:
    """Write down the result of this recovery, so that a recovery after a crash in the next second need not repeat it."""
    control, layout = context.control, context.layout
    sidecar = Sidecar(
        found.end,
        found.last_timestamp,
        found.redispatch_from,
        control.get(Word.CRC_FROM),
        context.config.commit_log.segment_bytes,
        int(context.params.get("owner", NO_TOKEN)),
        # Until ``abort`` has the owner's token, a start finds this one there.
        int(context.params.get("previous") or NO_TOKEN) if found.by_sidecar else NO_TOKEN,
    )
    former, checkpoint = Sidecar.load(layout.sidecar), Checkpoint.load(layout.checkpoint)
    if found.allowed:
        # The log was cut below the checkpoint's promise. A later recovery must not ask for it again.
        for name in ("physic_msg_timestamp", "logics_msg_timestamp", "index_msg_timestamp"):
            setattr(checkpoint, name, min(getattr(checkpoint, name), found.last_timestamp))
    if found.redispatch_from < found.end:
        # The queues are cut there, and the units behind it are not durable again until they are dispatched again.
        # RocketMQ begins at the checkpoint's timestamp, so the checkpoint must have it too.
        stored = _stored_before(context, found.redispatch_from)
        checkpoint.logics_msg_timestamp = min(checkpoint.logics_msg_timestamp, stored)
    try:
        sidecar.save_with(layout.sidecar, checkpoint, layout.checkpoint)
    except OSError as error:
        if former is not None and former.queues_durable > found.redispatch_from:
            # The checkpoint on disk promises more than will be true in a moment.
            raise StoreError(
                f"cannot write down that the ConsumeQueues hold only records below {found.redispatch_from}"
                f" ({error.strerror}); nothing of them was changed",
                path=layout.sidecar,
            ) from error
        context.log.warning("cannot write the result of the recovery", error=os.strerror(error.errno or 5))
