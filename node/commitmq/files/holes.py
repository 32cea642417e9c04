"""What of a sparse file holds data: the kernel knows its holes, so a gigabyte of zeros is not read to find out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np

_CHUNK_BYTES = 1 << 20


def nonzero_chunks(fd: int, start: int, size: int) -> Iterator[tuple[int, bytes]]:
    """``(position, bytes)`` of each chunk of [start, size) that is not all zero; holes are not read."""
    # All extents are asked for before the first read: what the kernel reads ahead of one counts as data from then on, so
    # a walk that asked as it went would read the rest of a segment, which is up to a gigabyte of zeros.
    for position, stop in data_extents(fd, start, size):
        while position < stop:
            data = os.pread(fd, min(_CHUNK_BYTES, stop - position), position)
            if not data:
                return
            if np.frombuffer(data, np.uint8).any():
                yield position, data
            position += len(data)


def data_extents(fd: int, start: int, size: int) -> list[tuple[int, int]]:
    """``(begin, end)`` of what in [start, size) is no hole: blocks that were written, and pages in the page cache."""
    extents = []
    while start < size:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            stop = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            stop = size  # a file system that knows no holes
        if start < stop:
            extents.append((start, stop))
        start = stop
    return extents
