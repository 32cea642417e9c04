"""Rewrites a part of the log byte for byte, so that the next sync writes it to the device even if the kernel believes
that it is there.

After a failed sync the kernel counts the pages as clean: a later sync succeeds without them. If the process that called
the sync was killed before it could report the failure, no other process knows of it. Rewritten pages are dirty again.
"""

from __future__ import annotations

import os
from typing import Final

from commitmq import failpoints
from commitmq.files import disk
from commitmq.files.holes import data_extents
from commitmq.files.write_all import write_all
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout

_CHUNK_BYTES: Final = 1 << 20


def write_anew(layout: StoreLayout, start: int, end: int, segment_bytes: int) -> int:
    """Write [start, end) of the log over itself; returns the bytes. Syncs nothing. Raises OSError.

    No other process may write there meanwhile. A crash in the middle leaves the same bytes.
    """
    written = 0
    for base in range(start - start % segment_bytes, end, segment_bytes):
        path = layout.commit_log / segment_name(base)
        if not path.exists():
            continue
        with disk.opened(path, os.O_RDWR, "segment") as fd:
            for begin, stop in data_extents(fd, max(0, start - base), min(segment_bytes, end - base)):
                for at in range(begin, stop, _CHUNK_BYTES):
                    data = os.pread(fd, min(_CHUNK_BYTES, stop - at), at)
                    write_all(fd, data, at, place="recovery.write_anew")
                    written += len(data)
        if failpoints.ACTIVE:
            failpoints.hit("recovery.after_write_anew")
    return written
