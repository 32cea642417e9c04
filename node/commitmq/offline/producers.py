"""Saves the state of idempotent producers before ``store expire`` deletes the log's beginning.

In a running node the writer does the same (:mod:`commitmq.workers.writer.producers`).
"""

from __future__ import annotations

from typing import Final

from commitmq.errors import StoreError
from commitmq.files.no_space import is_no_space
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.metadata import json_config
from commitmq.store.producers import ProducerSnapshot, ProducerTable, may_have_producers, replay

_MOST: Final = 1 << 62  # no producer is forgotten here: the node decides that, by its configuration
_WINDOW: Final = 8
_ROWS, _BYTES = 16_384, 32 * 1024 * 1024


def write_down_producers(layout: StoreLayout, segment_bytes: int, end: int, minimum: int) -> ProducerSnapshot | None:
    """Ensure a snapshot of producers that covers the log at least up to ``minimum``; ``end`` is the log's end.

    Returns the snapshot if the disk has no room for it: then it must be saved as soon as something is deleted. Raises
    StoreError.
    """
    deleted = _deleted(layout)
    table = _empty()
    log = CommitLog(layout.commit_log, segment_bytes, max_mapped=2)
    try:
        at = log.min_offset
        try:
            found = ProducerSnapshot.load(layout.producers)
            if found is None and not may_have_producers(layout):
                return None
            if found is not None:
                if minimum <= found.position <= end:
                    return None
                table.load_bytes(found.table, deleted)
                at = found.position if at <= found.position <= end else at
        except StoreError:
            table = _empty()
        walker = LogWalker(log, max_rows=_ROWS, max_bytes=_BYTES)
        while at < end:
            batch = walker.walk(at, end)
            replay(table, batch, deleted)
            at = batch.end
        walker.release()
    finally:
        log.close()
    return _saved(layout, ProducerSnapshot(end, table.to_bytes()))


def _empty() -> ProducerTable:
    return ProducerTable(max_entries=_MOST, window=_WINDOW, expiry_ms=_MOST)


def _deleted(layout: StoreLayout) -> dict[str, int]:
    found = json_config.load(layout.own / "deleted_topics.json") or {}
    return {str(name): int(offset) for name, offset in found.items()}


def _saved(layout: StoreLayout, snapshot: ProducerSnapshot) -> ProducerSnapshot | None:
    try:
        snapshot.save(layout.producers)
    except OSError as error:
        if is_no_space(error):
            return snapshot
        raise StoreError(
            f"cannot write the table of idempotent producers, so nothing is deleted: {error.strerror}",
            path=layout.producers,
        ) from error
    return None
