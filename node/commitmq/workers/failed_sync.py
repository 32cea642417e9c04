"""The note that a failed fdatasync of the CommitLog leaves: the next recovery must not believe the page cache.

After a failure the kernel counts the pages as clean, so a later fdatasync would succeed without them being on the device.
"""

from __future__ import annotations

import errno
import os

from commitmq.log import Log
from commitmq.store.json_config import sync_folder
from commitmq.store.layout import StoreLayout


def leave_note(layout: StoreLayout, error: OSError, log: Log) -> None:
    """Write the note, as durably as the device lets us; never raises."""
    try:
        with open(layout.flush_failed, "wb") as file:
            file.write(os.strerror(error.errno or errno.EIO).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(layout.own)
    except OSError as again:
        log.error("cannot leave a note of the failed flush", error=os.strerror(again.errno or errno.EIO))
