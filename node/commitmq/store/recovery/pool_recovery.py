"""Takes over records that only a killed node's transient store pool has, before the log's end is searched.

Rules
    * Only the pool that the store's note names is examined: made for this store (not for one it was copied from), in
      this boot of the machine. Nothing is taken from another pool, and nothing in it is changed.
    * The takeover begins at the pool's ``COMMITTED``. Each record is checked as a recovery checks the log's own: length
      chain, magic, physical offset, CRCs. The first invalid one ends it. Zeros there are the place of a record that a
      killed writer did not complete, and that was never acknowledged.
    * The records must continue the log: a record ends in the log at ``COMMITTED``, and the log's files behind that have
      the same bytes as the pool, or zeros. If not, RocketMQ or another program has used the store since, or the device
      lost bytes that were never flushed. Then the log stays as it is, and the pool's bytes are kept in
      ``commitmq/cut/``.
    * The pool is removed only when all of its bytes are on the device. A takeover that is killed is repeated from the
      start.

After a machine failure none of this applies, because shared memory is empty; the note names another boot.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from commitmq import failpoints
from commitmq.errors import SegmentSizeError, StoreError
from commitmq.files import disk
from commitmq.files.disk import sync_folder
from commitmq.files.write_all import write_all
from commitmq.format.file_names import segment_name
from commitmq.kernels.codes import WALK_BLANK
from commitmq.kernels.compiled import scan
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.store.log import transient_pool
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.transient_pool import PoolNote, TransientPool
from commitmq.store.memory.shared_memory import check_private
from commitmq.store.queues.log_proof import has_record_before

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Span:
    """Complete records (and a filler) of one buffer: ``[start, end)`` of the segment at ``base``."""

    base: int
    start: int
    end: int
    buffer: mmap.mmap

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.buffer, np.uint8)[self.start : self.end]


def take_over(layout: StoreLayout, segment_bytes: int, log: Log) -> int:
    """Copy to the log the records that only the pool has, sync them, remove the pool; returns the number of records.

    No process of the node may be alive. Raises StoreError, without changes, when a person must decide.
    """
    note = PoolNote.load(layout)
    if note is None:
        return 0
    folder = Path(note.folder)
    if not _is_ours(layout, note, folder, log):
        transient_pool.forget(layout)
        return 0
    check_private(folder)
    pool = TransientPool(folder, writable=False)
    try:
        if pool.segment_bytes != segment_bytes:
            raise SegmentSizeError(
                f"the transient store pool has segments of {pool.segment_bytes} bytes, but {segment_bytes} bytes are"
                " configured for the log; open the store with the size it was written with",
                path=folder,
            )
        spans, records, damage = _whole_records(pool)
        conflict = _conflict(layout, spans, segment_bytes) if spans else None
        if conflict is not None:
            spans, records = [], 0
        if conflict is not None or damage is not None:
            copies = _keep_copies(layout, pool)
            log.error("the transient store pool could not be taken over whole", why=conflict or damage, copies=copies)
        if failpoints.ACTIVE:
            failpoints.hit("recovery.before_takeover")
        for span in spans:
            _write(layout, span, segment_bytes)
        if spans:
            sync_folder(layout.commit_log)
            log.warning(
                "copied to the log the messages that a killed node had in its transient store pool only",
                start=spans[0].base + spans[0].start,
                end=spans[-1].base + spans[-1].end,
                records=records,
            )
    finally:
        pool.close()
    if failpoints.ACTIVE:
        failpoints.hit("recovery.after_takeover")
    transient_pool.remove(layout)
    return records


def _is_ours(layout: StoreLayout, note: PoolNote, folder: Path, log: Log) -> bool:
    root = layout.root.stat()
    if (note.device, note.inode) != (root.st_dev, root.st_ino):
        log.warning("this store is a copy: the transient store pool of the original is left alone", pool=folder)
        return False
    if note.boot != transient_pool.boot_id():
        log.warning("the machine was restarted: messages in the transient store pool only are lost", pool=folder)
        transient_pool.remove(layout)
        return False
    found = transient_pool.owner_id(folder)
    if found == note.id:
        return True
    if found:
        log.error("another transient store pool is in the place of this store's", pool=folder)
    elif os.path.lexists(folder):
        transient_pool.remove(layout)  # half made, or half removed: the log has all its records
    else:
        log.error("the transient store pool was deleted: its messages beyond the log are lost", pool=folder)
    return False


def _whole_records(pool: TransientPool) -> tuple[list[_Span], int, str | None]:
    """The spans that can be taken over, the number of their records, and the damage of the rest, if any."""
    out = np.zeros(5, np.int64)
    spans: list[_Span] = []
    records, damage = 0, None
    at = pool.committed
    while (buffer := pool.find(base := at - at % pool.segment_bytes)) is not None:
        data = np.frombuffer(buffer, np.uint8)
        result = scan(data, at - base, data.size, base, pool.has_crc, out)
        records += int(out[0])
        end = data.size if result == WALK_BLANK else int(out[1])
        if end > at - base:
            spans.append(_Span(base, at - base, end, buffer))
        at = base + end
        if result != WALK_BLANK:
            if data[end : end + 8].any():
                damage = f"no record is at {at}, behind the last whole one"
            break
    for base, buffer in pool.in_use():
        # The writer takes a buffer before it completes the previous one; once it has a record, the previous one is
        # complete.
        if damage is None and base > at and any(buffer[:8]):
            damage = f"the records end at {at}, and there are others in the segment at {base}"
    return spans, records, damage


def _conflict(layout: StoreLayout, spans: list[_Span], segment_bytes: int) -> str | None:
    """Why ``spans`` cannot continue the log; None when they can."""
    first = spans[0]
    start = first.base + first.start
    log = CommitLog(layout.commit_log, segment_bytes)
    try:
        bases = log.segments()
        if first.base in bases:
            if not has_record_before(log, start):
                return f"the log does not reach {start}, where the pool begins"
        elif first.start or first.base != log.end_offset:
            return f"the log ends with {log.end_offset}, the pool begins at {start}"
        for span in spans:
            if span.base in bases and not _fits(log.read(span.base + span.start, span.end - span.start), span.bytes()):
                return f"the log has other bytes behind {span.base + span.start}: it was written to without the pool"
    finally:
        log.close()
    return None


def _fits(found: memoryview, wanted: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """Whether ``found`` equals ``wanted``, or is zero where the write-back never arrived."""
    data = np.frombuffer(found, np.uint8)
    for at in range(0, data.size, _CHUNK_BYTES):
        piece, other = data[at : at + _CHUNK_BYTES], wanted[at : at + _CHUNK_BYTES]
        if np.any((piece != 0) & (piece != other)):
            return False
    return True


def _write(layout: StoreLayout, span: _Span, segment_bytes: int) -> None:
    path = layout.commit_log / segment_name(span.base)
    try:
        with disk.opened(path, os.O_RDWR | os.O_CREAT, "segment") as fd:
            if os.fstat(fd).st_size < segment_bytes:
                disk.reserve(fd, 0, segment_bytes, "segment")
            write_all(fd, memoryview(span.buffer)[span.start : span.end], span.start, place="recovery.takeover")
            disk.sync(fd, "segment")
    except OSError as error:
        raise StoreError(
            f"cannot write the messages of the transient store pool to the log; they stay in the pool: {error.strerror}",
            path=path,
        ) from error


def _keep_copies(layout: StoreLayout, pool: TransientPool) -> list[str]:
    """Copy the nonzero bytes behind ``COMMITTED`` into ``commitmq/cut/``, durably; returns the copies' names."""
    folder = layout.own / "cut"
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for base, buffer in pool.in_use():
        start = max(0, pool.committed - base)
        copy = folder / f"{base:020d}-{start}-{time.time_ns() // 1_000_000}.pool"
        with disk.opened(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "cut") as fd:
            for at in range(start, pool.segment_bytes, _CHUNK_BYTES):
                chunk = buffer[at : at + _CHUNK_BYTES]
                if any(chunk):
                    write_all(fd, chunk, at - start)
            disk.sync(fd, "cut", metadata=True)
        copies.append(str(copy))
    sync_folder(folder)
    sync_folder(layout.own)
    return copies
