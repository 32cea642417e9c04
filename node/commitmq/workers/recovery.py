"""recovery: one-shot; brings the store into a state from which all other processes can start.

Owns, while it runs alone: everything under the store. Advances: the initial values of all positions in the control block.
Sockets: none. Exit codes: 0 when the store is ready, STORE_UNUSABLE with a sentence when a person has to decide.

``params["clean"]`` says whether the last stop was clean (no ``abort`` file before this start).
"""

from __future__ import annotations

import time

from commitmq.control import DispatcherWord, Word
from commitmq.store.recovery import recover
from commitmq.workers.runtime import WorkerContext

ROLE = "recovery"


def run(context: WorkerContext) -> None:
    """Recover, publish the positions, end."""
    started = time.monotonic()
    config = context.config
    found = recover(
        context.layout,
        segment_bytes=config.commit_log.segment_bytes,
        consume_queue_bytes=config.consume_queue.file_bytes,
        clean=bool(context.params.get("clean", False)),
        log=context.log,
    )
    control = context.control
    control.put(Word.WRITTEN_TIMESTAMP, found.last_timestamp)
    for word in (Word.WRITTEN, Word.FLUSHED, Word.RECOVERED_END):
        control.put(word, found.end)
    control.put(Word.MIN_OFFSET, found.min_offset)
    control.put(Word.REPUT, found.redispatch_from)
    control.put(Word.REDISPATCH_FROM, found.redispatch_from)
    control.put_dispatcher(0, DispatcherWord.DISPATCHED, found.redispatch_from)
    control.put_dispatcher(0, DispatcherWord.DURABLE, found.redispatch_from)
    context.log.info(
        "store recovered",
        clean=bool(context.params.get("clean", False)),
        end=found.end,
        redispatch_from=found.redispatch_from,
        records=found.records,
        scanned_bytes=found.scanned_bytes,
        cut_bytes=found.cut_bytes,
        seconds=round(time.monotonic() - started, 3),
    )
    context.ready()
