"""Gives a file a copy of its own before it is changed in place, if other names are links to it.

A snapshot of a store links full segments (:mod:`commitmq.offline.snapshot`). A start that cuts the log, and repairs,
change bytes of segments, and must not change them in the snapshot, which an operator may need just then. Segments are
sparse: the kernel knows the holes, so a gigabyte of zeros need not be read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from commitmq.files import disk
from commitmq.files.disk import write_all

_CHUNK_BYTES = 1 << 20


def nonzero_chunks(fd: int, start: int, size: int) -> Iterator[tuple[int, bytes]]:
    """``(position, bytes)`` of each chunk of [start, size) that is not all zero; holes are not read."""
    # All extents are queried before the first read: pages that the kernel reads ahead count as data from then on, so a
    # walk that queried extents between reads would read the rest of a segment, which is up to a gigabyte of zeros.
    for position, stop in data_extents(fd, start, size):
        while position < stop:
            data = os.pread(fd, min(_CHUNK_BYTES, stop - position), position)
            if not data:
                return
            if np.frombuffer(data, np.uint8).any():
                yield position, data
            position += len(data)


def data_extents(fd: int, start: int, size: int) -> list[tuple[int, int]]:
    """``(begin, end)`` of each part of [start, size) that is no hole: written blocks, and pages in the page cache."""
    extents = []
    while start < size:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            stop = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            stop = size  # a file system that does not report holes
        if start < stop:
            extents.append((start, stop))
        start = stop
    return extents


_SUFFIX = ".unshared"


def unshare(path: Path, keep: int | None = None) -> bool:
    """Make ``path`` a file with no other name, durably; False if it was one. Raises OSError; the file is as before
    then.

    ``keep``: only this many bytes are copied, and zeros follow them: for a caller that is about to zero the rest.
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
            os.fchmod(new, found.st_mode & 0o777)  # whatever the umask of this process
            disk.sync(new, "unshare", metadata=True)
        os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))  # retention goes by it
        disk.replace(copy, path, "unshare")
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    disk.sync_folder(path.parent)
    return True
