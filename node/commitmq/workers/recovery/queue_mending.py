"""Rebuilds damaged ConsumeQueues from the log before other processes use them; part of the recovery process.

:mod:`commitmq.offline.queue_check` finds the damaged queues. Then all queues are rebuilt from the log, as ``commitmq
store rebuild`` does it, and the old files are kept in ``commitmq/before-rebuild-TIME``. The node's log and the report
at the end of the start mention the rebuild.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from commitmq.errors import DiskFullError, StoreError
from commitmq.files.mapped_file import list_segments
from commitmq.format.constants import LMQ_PREFIX
from commitmq.offline.held_store import HeldStore
from commitmq.offline.queue_check import Loss, find_losses
from commitmq.offline.rebuild import rebuild
from commitmq.offline.store_view import StoreView
from commitmq.store.metadata.deleted_topics import load_tombstones
from commitmq.store.metadata.topic_files import load_topics
from commitmq.store.queues import queue_ends
from commitmq.store.queues.queue_ends import QueueEnds
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery.store_recovery import Recovered
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.start_progress import StartProgress

_NAMED: Final = 20


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
    """The record of queue ends from the last use; None when another program used the store since, and after a person
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

    Raises StoreError when that file is missing. Single missing topics are only logged: RocketMQ deletes a topic's
    queues later.
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
    if not path.exists():
        raise StoreError(
            f"the table of topics is missing, and no client could read the queues of these topics: {named}. Put it back, "
            "from topics.json.bak perhaps; or write {} into it, start, and create these topics again, which keep their "
            "messages",
            path=path,
        )
    context.log.warning("no client can read these queues: config/topics.json does not have their topics", topics=named)
