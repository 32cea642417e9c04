"""Makes the device and the page cache agree on the log, before any process of the node relies on it."""

from __future__ import annotations

import os

from commitmq.files import disk
from commitmq.files.writeback import start_writeback
from commitmq.format.file_names import segment_name
from commitmq.log import Log
from commitmq.store.layout import StoreLayout


def drop_page_cache(layout: StoreLayout, log: Log) -> None:
    """Make the kernel drop the log's clean pages: after a failed sync they may never have reached the device.

    No process of the node has a file mapped now. Dirty pages stay, and this recovery's syncs write them.
    """
    log.warning("a sync failed in the last run: the log is read from the device, not from the page cache")
    for path in sorted(layout.commit_log.iterdir()):
        with disk.opened(path, os.O_RDONLY, "segment") as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def start_sync(layout: StoreLayout, start: int, segment_bytes: int) -> None:
    """Start the write-back of the segments from ``start`` on, which :func:`sync_segments` will wait for."""
    for path in sorted(layout.commit_log.iterdir()):
        if path.name.isdecimal() and int(path.name) + segment_bytes > start:
            with disk.opened(path, os.O_RDWR, "segment") as fd:
                start_writeback(fd)


def sync_segments(layout: StoreLayout, start: int, end: int, segment_bytes: int) -> None:
    """Make the accepted records durable: after kill -9 they may only be in the page cache."""
    base = start - start % segment_bytes
    while base < end:
        path = layout.commit_log / segment_name(base)
        if path.exists():
            with disk.opened(path, os.O_RDWR, "segment") as fd:
                disk.sync(fd, "segment")
        base += segment_bytes
