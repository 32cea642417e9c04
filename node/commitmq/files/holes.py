"""The data of a sparse file: the kernel knows the holes, so a gigabyte of zeros need not be read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np

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
