"""Writes bytes at a position of a file: all of them, or an error.

A system call that writes may take fewer bytes than it was given: this is how a disk about to be full shows itself, and
only the next call returns the error. A caller that does not check leaves half of a header or of a number behind.
"""

from __future__ import annotations

import errno
import os

from commitmq import failpoints


def write_all(fd: int, data: failpoints.Buffer, position: int, place: str = "") -> None:
    """Write ``data`` at byte ``position`` of ``fd``; ``place`` is the failpoint of each system call.

    Raises OSError, with a part of the data written.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, failpoints.clip(place, rest) if failpoints.ACTIVE else rest, position)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        position += written
        rest = rest[written:]
