"""recovery: one-shot; brings the store into a state from which all other processes can start.

Owns, while it runs alone: everything under the store. Advances: the initial values of all positions in the control block.
Sockets: none. Exit codes: 0 when the store is ready, STORE_UNUSABLE with a sentence when a person has to decide.

``params["clean"]`` says whether the last stop was clean (no ``abort`` file before this start), ``params["previous_pid"]``
which process that file named.
"""

from __future__ import annotations

import os
import time

from commitmq.control import DispatcherWord, Word, WorkerWord
from commitmq.errors import CorruptRecordError
from commitmq.offline.damage import explained
from commitmq.store import transient_pool
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.recovery import Recovered, recover
from commitmq.store.sidecar import Sidecar
from commitmq.workers.runtime import WorkerContext, role_slot
from commitmq.workers.start_progress import StartProgress

ROLE = "recovery"


def run(context: WorkerContext) -> None:
    """Recover, publish the positions, end."""
    try:
        _run(context)
    except CorruptRecordError as error:
        raise explained(error, context.layout, context.config.commit_log.segment_bytes) from error


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
        previous_pid=context.params.get("previous_pid"),
        progress=progress,
    )
    control = context.control
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
    recovered = {
        "clean": bool(context.params.get("clean", False)),
        "end": found.end,
        "redispatch_from": found.redispatch_from,
        "records": found.records,
        "scanned_bytes": found.scanned_bytes,
        "cut_bytes": found.cut_bytes,
        "by_sidecar": found.by_sidecar,
        "seconds": round(time.monotonic() - started, 3),
    }
    context.log.info("store recovered", **recovered)
    progress.over()
    context.ready(recovered=recovered)


def _make_pool(context: WorkerContext, found: Recovered) -> None:
    """The transient store pool, if the node is to have one; a former one was taken over. Raises StoreError."""
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
        folder=transient_pool.pool_folder(context.layout, config.memory.folder),
        buffers=buffers,
        seconds=round(time.monotonic() - started, 3),
    )


def _remember(context: WorkerContext, found: Recovered) -> None:
    """Write down what this recovery made sure of, so that one after a crash in the next second need not do it again."""
    control, layout = context.control, context.layout
    sidecar = Sidecar(
        found.end,
        found.last_timestamp,
        found.redispatch_from,
        control.get(Word.CRC_FROM),
        context.config.commit_log.segment_bytes,
        control.worker(role_slot("supervisor"), WorkerWord.PID),
    )
    try:
        sidecar.save_with(layout.sidecar, Checkpoint.load(layout.checkpoint), layout.checkpoint)
    except OSError as error:
        context.log.warning("cannot write down what was recovered", error=os.strerror(error.errno or 5))
