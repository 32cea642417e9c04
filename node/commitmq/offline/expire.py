"""``store expire`` of a closed store: deletes the oldest segments, and the files that only point below them.

A running node does the same in its cleanup process and its dispatchers; this does it in one go, by the same rules. The
minimum becomes durable first (after the state of idempotent producers), so a crash anywhere leaves a deletion that the
next start finishes (see :mod:`commitmq.store.log.expiry`). The files that follow are those whose last entry points
below the new minimum: of ConsumeQueues, of the queues of BatchCQ topics, of extensions, and of the index. The newest
file of each kind is never deleted: it tells where the next entry belongs.

Saves the state of idempotent producers before ``store expire`` deletes the log's beginning.

In a running node the writer does the same (:mod:`commitmq.workers.writer.producers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.files.disk import sync_folder
from commitmq.files.disk_space import is_no_space
from commitmq.files.fd_cache import FdCache
from commitmq.format.file_names import segment_name
from commitmq.format.index import HEADER_BYTES, header_of, list_index_files
from commitmq.offline.held_store import HeldStore
from commitmq.offline.log_damage import refuse_missing_beginning
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.log.expiry import MinOffsetFile, Segment, delete_segment, finish_expiry, list_bases
from commitmq.store.metadata import json_config
from commitmq.store.producers import ProducerSnapshot, ProducerTable, may_have_producers, replay
from commitmq.store.queues import queue_ends
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import ConsumeQueueExt, is_address
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery import abort_file
from commitmq.store.recovery.recovery_start import where_to_begin

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


@dataclass(frozen=True, slots=True)
class Expired:
    """The deletions done, or with ``dry_run`` planned; bytes are bytes of the disk. ``followers`` counts files by kind."""

    segments: tuple[str, ...]
    disk_bytes: int
    min_offset: int
    followers: dict[str, int] = field(default_factory=dict)


def expire(
    layout: StoreLayout, segments: Sequence[Segment], until: int, log_end: int, *, dry_run: bool = False
) -> Expired:
    """Delete the segments that end at or below ``until``, and the files that only point below them. The segment with
    the log's end stays, with any ``until``. The caller holds the store's lock. Raises StoreError.
    """
    last = log_end - 1 if log_end else 0
    gone = [one for one in segments if one.end <= until and one.end <= last]
    minimum = gone[-1].end if gone else segments[0].base if segments else 0
    names, disk_bytes = tuple(segment_name(one.base) for one in gone), sum(one.disk_bytes for one in gone)
    if dry_run or not gone:
        return Expired(names, disk_bytes, minimum)
    unsaved = write_down_producers(layout, gone[0].end - gone[0].base, log_end, minimum)
    for one in _make_minimum(layout, gone):
        delete_segment(layout, one.base)
    sync_folder(layout.commit_log)
    if unsaved is not None:
        unsaved.save(layout.producers)
    queue_ends.expect_expiry(layout.queue_ends, minimum)
    fds = FdCache()
    try:
        followers = {
            "consumequeue": _expire_queues(ConsumeQueue, layout.consume_queue, minimum, fds),
            "batchconsumequeue": _expire_queues(BatchConsumeQueue, layout.batch_consume_queue, minimum, fds),
            "consumequeue_ext": _expire_extensions(layout, fds),
            "index": _expire_index(layout, minimum),
        }
    finally:
        fds.close()
    return Expired(names, disk_bytes, minimum, followers)


def safe_end(held: HeldStore) -> int:
    """Where the recovery of the next start begins: everything below is flushed, and in the ConsumeQueues. Behind every
    segment when the store was closed orderly.

    Raises StoreError when the start would be refused, because the log does not match the sidecar.
    """
    layout, config = held.layout, held.config
    refuse_missing_beginning(held, list_bases(layout.commit_log))
    if not abort_file.exists(layout.abort):
        return 1 << 62
    # Without segments below the minimum: the next start or verb finishes an interrupted deletion.
    finish_expiry(layout, config.commit_log.segment_bytes, forget=False)
    log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, max_mapped=2)
    try:
        begin = where_to_begin(
            layout,
            log,
            Checkpoint.load(layout.checkpoint),
            clean=False,
            previous=abort_file.read_token(layout.abort),
            consume_queue_bytes=config.consume_queue.file_bytes,
            batch_queue_bytes=config.consume_queue.batch_file_bytes,
        )
    finally:
        log.close()
    if begin.contradiction:
        raise StoreError(f"{begin.contradiction}. Nothing was deleted", path=layout.commit_log)
    return min(begin.start, begin.durable)


def _make_minimum(layout: StoreLayout, gone: list[Segment]) -> list[Segment]:
    """Make the new minimum durable; returns the segments that still have to be deleted.

    On a completely full disk there may be no space for that file. Then the oldest segment is deleted first, durably:
    without a minimum the log begins with the first existing segment, so that is right by itself. The record of the
    log's beginning is deleted before that, else a start would miss the segment.
    """
    minimum = MinOffsetFile(layout)
    try:
        layout.own.mkdir(exist_ok=True)
        minimum.write(gone[-1].end)
    except (OSError, StoreError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not is_no_space(cause):
            raise
        queue_ends.forget(layout.queue_ends)
        delete_segment(layout, gone[0].base)
        sync_folder(layout.commit_log)
        layout.own.mkdir(exist_ok=True)
        minimum.write(gone[-1].end)
        return gone[1:]
    return gone


def _expire_queues(kind: type[ConsumeQueue] | type[BatchConsumeQueue], root: Path, minimum: int, fds: FdCache) -> int:
    deleted = 0
    for _, _, folder in list_queues(root):
        if size := _file_size(folder):
            queue = kind(folder, size, fds)
            queue.refresh()
            deleted += queue.delete_expired(minimum)
            queue.flush()
    return deleted


def _expire_extensions(layout: StoreLayout, fds: FdCache) -> int:
    """Delete extension files by each queue's first remaining unit: it tells from where on extension units are needed."""
    deleted = 0
    for topic, number, folder in list_queues(layout.consume_queue_ext):
        queue_folder = layout.consume_queue / topic / str(number)
        size, queue_size = _file_size(folder), _file_size(queue_folder) if queue_folder.is_dir() else 0
        if not size or not queue_size:
            continue
        queue = ConsumeQueue(queue_folder, queue_size, fds)
        queue.refresh()
        queue.correct_min_offset(MinOffsetFile(layout).read())
        first = queue.unit(queue.min_offset)
        if first is not None and is_address(first[2]):
            extensions = ConsumeQueueExt(folder, size, fds)
            extensions.recover()
            deleted += extensions.delete_below(first[2])
            extensions.flush()
    return deleted


def _expire_index(layout: StoreLayout, minimum: int) -> int:
    names = list_index_files(layout.index) if layout.index.is_dir() else []
    deleted = 0
    for name in names[:-1]:
        path = layout.index / name
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES or header_of(memoryview(head).cast("q")).end_offset >= minimum:
            break
        path.unlink()
        deleted += 1
    if deleted:
        sync_folder(layout.index)
    return deleted


def _file_size(folder: Path) -> int:
    """Size of a queue's oldest file; all files but the newest have it. 0 without a file."""
    files = sorted(path for path in folder.iterdir() if len(path.name) == 20 and path.name.isdecimal())
    return files[0].stat().st_size if files else 0
