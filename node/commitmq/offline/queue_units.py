"""Reads units of ConsumeQueue files as they are, whether or not a queue of them could be opened."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import BATCH_UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import BATCH_UNIT
from commitmq.offline.piece_bounds import Queue


class QueueUnits:
    """Reads units of the queues under one folder; zeros where no file exists."""

    def __init__(self, root: Path, kind: np.dtype[Any], file_bytes: int, fds: FdCache) -> None:
        self.root = root
        self._kind = kind
        self._file_bytes = file_bytes
        self._fds = fds

    def read(self, queue: Queue, number: int, count: int) -> NDArray[np.void]:
        """``count`` units from number ``number`` of ``queue`` on."""
        data = bytearray(count * self._kind.itemsize)
        at, end = number * self._kind.itemsize, (number + count) * self._kind.itemsize
        begun = at
        folder = f"{self.root}/{queue[0]}/{queue[1]}"
        while at < end:
            base = at - at % self._file_bytes
            wanted = min(end, base + self._file_bytes) - at
            try:
                part = os.pread(self._fds.read_fd(f"{folder}/{segment_name(base)}"), wanted, at - base)
            except OSError:
                part = b""
            data[at - begun : at - begun + len(part)] = part
            at += wanted
        return np.frombuffer(data, self._kind)


def locate(root: Path, queue: Queue, physical_offset: int) -> int:
    """Number of a batch queue's unit that points at ``physical_offset``; -1 if there is none."""
    for path in sorted((root / queue[0] / str(queue[1])).glob("[0-9]" * 20)):
        for position, units in written_units(path, 0, BATCH_UNIT):
            hits = np.flatnonzero(units["physical_offset"] == physical_offset)
            if len(hits):
                return (int(path.name) + position) // BATCH_UNIT_BYTES + int(hits[0])
    return -1


def written_units(path: Path, position: int, kind: np.dtype[Any]) -> Iterable[tuple[int, NDArray[np.void]]]:
    """Complete units behind ``position`` of a sparse file, with their position; holes are not read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        while position < size:
            try:
                position = os.lseek(fd, position, os.SEEK_DATA)
                hole = os.lseek(fd, position, os.SEEK_HOLE)
            except OSError:
                return  # only a hole remains
            position -= position % kind.itemsize
            data = os.pread(fd, min(size, hole + kind.itemsize) - position, position)
            data = _whole_units(data, kind.itemsize)
            if not data:
                return
            yield position, np.frombuffer(data, kind)
            position += len(data)
    finally:
        os.close(fd)


def _whole_units(data: bytes, unit_bytes: int) -> bytes:
    return data[: len(data) - len(data) % unit_bytes]


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """``(start, stop)`` of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def show(unit: Any) -> str:
    return f"(offset {unit['physical_offset']}, size {unit['size']}, tags code {unit['tags_code']})"
