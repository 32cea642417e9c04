"""The sum of the CRC-32s of many stretches of one buffer; the sum does not depend on their order."""

from __future__ import annotations

import numpy as np
from numba import njit

from commitmq.kernels.raw import crc32


@njit(
    "int64(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'A', readonly=True), Array(int32, 1, 'A', readonly=True))",
    cache=True,
    nogil=True,
)
def sum_of_crcs(buffer, offsets, sizes):  # type: ignore[no-untyped-def]
    """Sum of the CRC-32 of each ``buffer[offsets[i] : offsets[i] + sizes[i]]``."""
    total = np.int64(0)
    for index in range(len(offsets)):
        total += np.int64(crc32(buffer, offsets[index], np.int64(sizes[index]), np.uint32(0)))
    return total
