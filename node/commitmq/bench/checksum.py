"""Touches every byte of every body, as a real reader would: the sum of their CRC-32s.

A sum does not depend on the order in which queues are read, so it can be computed beforehand and compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from commitmq.client.receiving.batch import MessageBatch
from commitmq.kernels.compiled import sum_of_crcs


def checksum_of_batch(batch: MessageBatch) -> int:
    """Sum of the CRC-32 of each body (as stored) of ``batch``."""
    total = 0
    for data, offsets, sizes in batch.buffers:
        buffer = np.frombuffer(data, np.uint8)
        total += sum_of_crcs(buffer, np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(sizes, np.int32))
    return total


def checksum_of_bodies(bodies: Sequence[bytes]) -> int:
    """The same sum for a batch of these bodies."""
    return sum(zlib.crc32(body) for body in bodies)
