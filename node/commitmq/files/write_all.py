"""One way to write bytes to a place of a file: all of them, or an error.

A system call that writes may take less than it was given: that is how a disk about to be full shows itself, and only the
next call says why. Whoever does not look leaves half of a header or of a number behind.
"""

from __future__ import annotations

import errno
import os

from commitmq import failpoints


def write_all(fd: int, data: failpoints.Buffer, position: int, place: str = "") -> None:
    """Write ``data`` at byte ``position`` of ``fd``; ``place`` is the failpoint that each system call is.

    Raises OSError, with some of it written.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, failpoints.clip(place, rest) if failpoints.ACTIVE else rest, position)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        position += written
        rest = rest[written:]
