"""Gives a file a copy of its own before it is changed in place, if other names are links to it.

A snapshot of a store links full segments (:mod:`commitmq.offline.snapshot`). A start that cuts the log, and repairs, change
bytes of segments, and must not change them in the snapshot, which a person may need just then.
"""

from __future__ import annotations

import os
from pathlib import Path

from commitmq.files import disk
from commitmq.files.holes import nonzero_chunks
from commitmq.files.write_all import write_all

_SUFFIX = ".unshared"


def unshare(path: Path, keep: int | None = None) -> bool:
    """Make ``path`` a file with no other name, durably; False if it was one. Raises OSError; the file is as before then.

    ``keep``: only so many bytes are copied, and zeros follow them: for a caller that is about to zero the rest.
    The copy is made beside the file's folder, where no reader of segments looks.
    """
    found = path.stat()
    if found.st_nlink == 1:
        return False
    size = found.st_size
    copy = path.parent.with_name(f".{path.parent.name}-{path.name}{_SUFFIX}")
    try:
        with (
            disk.opened(path, os.O_RDONLY, "unshare") as old,
            disk.opened(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC, "unshare", found.st_mode & 0o777) as new,
        ):
            disk.reserve(new, 0, size, "unshare")  # a node maps it for writing
            for position, chunk in nonzero_chunks(old, 0, size if keep is None else min(keep, size)):
                write_all(new, chunk, position, place="unshare.write")
            disk.sync(new, "unshare", metadata=True)
        os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))  # retention goes by it
        disk.replace(copy, path, "unshare")
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    disk.sync_folder(path.parent)
    return True
