"""reput: walks the visible part of the CommitLog and pushes it to every dispatcher as DispatchBatches (spec section 7).

Owns: nothing on disk. Reads: the CommitLog, ``visible``. Advances: ``reput``. Sockets: one PUSH per dispatcher,
connected to its ipc endpoint; doorbell (rung by flush, or by the writer in asynchronous mode, and by a reader when its
first pull begins to wait). Exit codes: workers.runtime.context.ExitCode.

Reput waits a moment to batch small appends, longer while no consumer waits for messages
(:mod:`commitmq.workers.runtime.coalescing`). This paces the dispatchers too, which wake up for each batch.

A PUSH has room for ``dispatch.queue_batches``. A dispatcher that does not take its batches misses them, and reads the
gap from the log itself. So a slow or dead dispatcher holds up neither reput nor the other dispatchers.

A record that cannot be parsed below the end of the log is corruption: reput stops there, logs it, and looks again each
second. It never skips: skipped records would be acknowledged and invisible.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import zmq

from commitmq import failpoints
from commitmq.control import ControlBlock, Word
from commitmq.errors import CorruptRecordError
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.workers.runtime.coalescing import LITTLE_BYTES, CoalescingDelay
from commitmq.workers.runtime.context import WorkerContext
from commitmq.workers.runtime.expired_segments import ExpiredSegments

ROLE = "reput"
_STAY_NEAR_S = 0.010
_NAP_S = 0.001


def dispatch_endpoint(context: WorkerContext, name: str) -> str:
    """The endpoint at which the dispatcher called ``name`` takes its batches."""
    return context.layout.ipc(f"dispatch-{name}")


def run(context: WorkerContext) -> None:
    """The loop: walk and push while new records are visible, else sleep until rung."""
    config, control = context.config, context.control
    log = CommitLog(context.layout.commit_log, config.commit_log.segment_bytes, config.commit_log.max_mapped_segments)
    walker = LogWalker(log, max_rows=config.dispatch.batch_messages, max_bytes=config.dispatch.batch_bytes)
    pushers: list[zmq.Socket[bytes]] = []
    for name in context.params.get("dispatchers", ["consume_queue"]):
        pusher: zmq.Socket[bytes] = context.zmq.socket(zmq.PUSH)
        pusher.setsockopt(zmq.LINGER, 0)
        pusher.setsockopt(zmq.SNDHWM, config.dispatch.queue_batches)
        # Queue nothing for a dispatcher that is not connected: it will read the log from its position.
        pusher.setsockopt(zmq.IMMEDIATE, 1)
        pusher.setsockopt(zmq.RECONNECT_IVL, 20)
        pusher.connect(dispatch_endpoint(context, name))
        pushers.append(pusher)
    sync = config.sync_flush
    coalescing = CoalescingDelay(control, config)
    expired = ExpiredSegments(context, log)
    expired.release()
    position = control.get(Word.REPUT)
    context.ready()
    stuck = ""
    while True:
        coalescing.look()
        limit = control.visible(sync)
        left_s = coalescing.left_s()
        if position < limit:
            if left_s > 0 and limit - position < LITTLE_BYTES and not context.stopping:
                # Under a stream of small sends one batch for several of them costs a fraction of one batch each.
                if left_s >= _NAP_S:
                    context.wait(left_s * 1000, unless=coalescing.is_late, nap=True)
                    continue
                time.sleep(left_s)  # an epoll would take a millisecond
                limit = control.visible(sync)
            try:
                batch = walker.walk(position, limit)
            except CorruptRecordError as error:
                if str(error) != stuck:
                    stuck = str(error)
                    context.log.error("the log cannot be read, dispatching stops here", error=stuck)
                    context.tell(stuck=stuck)
                if context.stopping:
                    break
                context.wait(1000)
                continue
            coalescing.done(batch.end - position)
            position = batch.end
            # Publish REPUT before the batch leaves: a dispatcher takes nothing beyond REPUT. A dispatcher that was
            # quicker than this store dropped the batch, and read it from the log up to 100 ms later.
            control.put(Word.REPUT, position)
            if failpoints.ACTIVE:
                failpoints.hit("reput.before_push")
            _push(pushers, batch)
            expired.release()
            context.wait(0)
            continue
        if context.stopping:
            break
        walker.release_below(control.get(Word.MIN_OFFSET))
        expired.release()
        # More appends are likely soon, and while no consumer waits for them, not before the pause is over.
        naps = left_s > 0 or coalescing.since_s() < _STAY_NEAR_S
        timeout_ms = max(1.0, left_s * 1000) if naps else context.poll_ms
        context.wait(timeout_ms, unless=_has_come(control, sync, position, coalescing), nap=naps)
    walker.release()


def _has_come(control: ControlBlock, sync: bool, position: int, coalescing: CoalescingDelay) -> Callable[[], bool]:
    return lambda: control.visible(sync) > position or coalescing.is_late()


def _push(pushers: list[zmq.Socket[bytes]], batch: DispatchBatch) -> None:
    frames = batch.to_frames()
    for pusher in pushers:
        with contextlib.suppress(zmq.Again):
            pusher.send_multipart(frames, zmq.NOBLOCK, copy=len(batch) < 256)
