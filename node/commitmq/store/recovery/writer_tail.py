"""The tail of the log for a writer that was restarted alone, and its segments mapped for writing."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.holes import nonzero_chunks
from commitmq.files.write_all import write_all
from commitmq.format.file_names import segment_name
from commitmq.kernels import compiled
from commitmq.kernels.codes import WALK_BLANK
from commitmq.store.log.commit_log import CommitLog


def writer_tail(commit_log: CommitLog, segment_bytes: int, *, start: int, published: int) -> tuple[int, int]:
    """End of the log for a writer that was restarted alone, and its last store timestamp (0 when nothing was scanned).

    ``start`` is a record boundary at or below ``published``, the dead writer's published end. Records that were
    complete but not published are taken over; the log never ends below ``published``. Raises StoreError if it would.
    """
    out = np.zeros(5, np.int64)
    position, stamp = start, 0
    while True:
        base = position - position % segment_bytes
        commit_log.refresh()
        if base not in commit_log.segments():
            break
        segment = np.frombuffer(commit_log.read(base, segment_bytes), np.uint8)
        result = compiled.scan(segment, position - base, segment.size, base, False, out)
        position = base + int(out[1])
        stamp = max(stamp, int(out[3]))
        if result != WALK_BLANK:
            break
        following = base + segment_bytes
        if following not in commit_log.segments():
            break  # the filler was stored, the move to the next segment was not: the next append stores it again
        position = following
    if position < published:
        raise StoreError(
            f"the log is valid up to {position} only, but {published} was published: "
            "the segment was damaged while the node ran",
            path=commit_log.folder / segment_name(position - position % segment_bytes),
            offset=position % segment_bytes,
        )
    return position, stamp


def zero_behind(path: Path, position: int) -> int:
    """Zero the nonzero bytes behind ``position`` in a segment, without a copy; returns the number of bytes examined.

    For a restarted writer: those bytes were never published, acknowledged or seen.
    """
    with disk.opened(path, os.O_RDWR, "segment") as fd:
        zeroed = 0
        for at, chunk in nonzero_chunks(fd, position, os.fstat(fd).st_size):
            write_all(fd, bytes(len(chunk)), at)
            zeroed += len(chunk)
        return zeroed


def map_segment(path: Path, segment_bytes: int) -> mmap.mmap | None:
    """A writable mapping of a segment; None while the file does not exist. Raises StoreError for a wrong size."""
    try:
        fd = disk.open_file(path, os.O_RDWR, "segment")
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size != segment_bytes:
            raise StoreError(f"the segment has {size} bytes, the configuration says {segment_bytes}", path=path)
        return disk.map_file(fd, segment_bytes, "segment")
    finally:
        os.close(fd)
