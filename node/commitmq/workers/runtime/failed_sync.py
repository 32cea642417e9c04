"""What a failed fdatasync of the CommitLog leaves behind: a note for the next recovery, and doubt about a sync that died.

After a failure the kernel counts the pages as clean, so a later fdatasync would succeed without them being on the device. It
tells of it once: to the descriptors that were open then. So the page cache cannot be believed any more when the process
that asked for a sync was killed in it, by the supervisor because the device hung, or by whoever: the error, if there was
one, went with it. Its successor makes the pages dirty again, by writing what they hold, before it calls anything durable.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.files.write_all import write_all
from commitmq.format.file_names import segment_name
from commitmq.log import Log
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery.scan import writer_tail

_CHUNK_BYTES = 1 << 20


def leave_note(note: Path, error: OSError, log: Log) -> None:
    """Write the file ``note`` (one of StoreLayout.failed_syncs), as durably as the device lets us; never raises."""
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
    """Write what the log holds in [``start``, ``end``), whole records that nobody changes any more, over itself.

    ``alive`` is called again and again. Raises OSError; an EIO when the kernel has given up the pages and what is on the
    device is no log.
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
