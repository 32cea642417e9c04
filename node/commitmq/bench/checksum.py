"""Touching every byte of every body, as a real reader would: the sum of their CRC-32s.

A sum does not depend on the order in which queues are read, so it can be told beforehand and compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numba import njit

from commitmq.client.batch import MessageBatch
from commitmq.kernels.raw import crc32


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'A', readonly=True), Array(int32, 1, 'A', readonly=True))",
    cache=True,
    nogil=True,
)
def _sum_of_crcs(buffer, offsets, sizes):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for index in range(len(offsets)):
        total += np.int64(crc32(buffer, offsets[index], np.int64(sizes[index]), np.uint32(0)))
    return total


def checksum_of_batch(batch: MessageBatch) -> int:
    """Sum of the CRC-32 of each body (as stored) of ``batch``."""
    total = 0
    for data, offsets, sizes in batch.buffers:
        buffer = np.frombuffer(data, np.uint8)
        total += int(_sum_of_crcs(buffer, offsets, sizes))
    return total


def checksum_of_bodies(bodies: Sequence[bytes]) -> int:
    """What :func:`checksum_of_batch` gives for a batch of these bodies."""
    return sum(zlib.crc32(body) for body in bodies)
