"""Settings of the heap, by which the memory of one run is kept for the next run.

A run of a thousand messages takes a megabyte twice, for the encoded run and in ZeroMQ's queue, and frees both. With its
defaults glibc gives the top of the heap back to the kernel after each run and asks for it again. The page faults on that
memory took two thirds of a client's CPU time (1.6 of 2.4 µs a message of 1 KiB, measured on two cores).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

# Parameters of mallopt(3). Several runs with their copies fit below both limits.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_OVER_BYTES: Final = 8 * 1024 * 1024
_TRIM_OVER_BYTES: Final = 16 * 1024 * 1024


@cache
def keep_freed_memory() -> bool:
    """Let this process keep up to 16 MiB of freed heap. Later calls do nothing. False if the C library has no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_OVER_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_OVER_BYTES))
