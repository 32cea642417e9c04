"""After a failed or interrupted fdatasync of the CommitLog: a note for the next recovery, and pages made dirty again.

After a failure the kernel counts the pages as clean, so a later fdatasync would succeed without them being on the
device. The kernel reports the error once: to the descriptors that were open then. A process may be killed in its sync,
for example by the supervisor because the device hung. Then an error, if there was one, is lost with the process, and
the page cache cannot be trusted any more. The successor makes the pages dirty again, by writing their content, before
it calls anything durable.

What a process counts of its syncs of the log: how long they take, and how many bytes each makes durable.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from commitmq import counting
from commitmq.counting import CountTable
from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.disk import write_all
from commitmq.format.file_names import segment_name
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery.scan import writer_tail
from commitmq.workers.runtime.context import WorkerContext


class SyncCounts:
    """The histograms of one process."""

    def __init__(self, table: CountTable, by: str) -> None:
        self._durations = table.histogram(counting.FLUSH_DURATION, by)
        self._sizes = table.histogram(counting.FLUSH_SIZE, by)

    @classmethod
    def of(cls, context: WorkerContext, by: str) -> SyncCounts | None:
        table = context.counts
        return None if table is None else cls(table, by)

    def synced(self, took_ns: int, size_bytes: int) -> None:
        """A sync that took so long made this many bytes durable."""
        self._durations.observe(took_ns)
        self._sizes.observe(size_bytes)


_CHUNK_BYTES = 1 << 20


def leave_note(note: Path, error: OSError, log: Log) -> None:
    """Write the file ``note`` (one of StoreLayout.failed_syncs), as durably as the device allows. Never raises."""
    try:
        with disk.opened(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "flush_failed") as fd:
            write_all(fd, os.strerror(error.errno or errno.EIO).encode(), 0)
            disk.sync(fd, "flush_failed")
        disk.sync_folder(note.parent, "flush_failed")
    except OSError as again:
        log.error("cannot leave a note of the failed flush", error=os.strerror(again.errno or errno.EIO))


def write_again(
    layout: StoreLayout, start: int, end: int, segment_bytes: int, alive: Callable[[], None] = lambda: None
) -> None:
    """Write the log's bytes in [``start``, ``end``) over themselves: whole records that no process changes any more.

    ``alive`` is called again and again. Raises OSError; an EIO when the kernel has given up the pages and the bytes on
    the device are no log.
    """
    at = start
    while at < end:
        base = at - at % segment_bytes
        with disk.opened(layout.commit_log / segment_name(base), os.O_RDWR, "segment") as fd:
            stop = min(end, base + segment_bytes)
            while at < stop:
                data = os.pread(fd, min(_CHUNK_BYTES, stop - at), at - base)
                if not data:
                    raise OSError(errno.EIO, f"the segment ends at {at}, below {end}")
                write_all(fd, data, at - base)
                at += len(data)
                alive()
    log = CommitLog(layout.commit_log, segment_bytes)
    try:
        writer_tail(log, segment_bytes, start=start, published=end)
    except StoreError as error:
        raise OSError(errno.EIO, str(error)) from error
    finally:
        log.close()
