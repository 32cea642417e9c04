"""Keeping the memory of one run for the next.

A run of a thousand messages is a megabyte, allocated twice (encoded, and in ZeroMQ's queue) and freed again. With glibc's
defaults every such round gives the top of the heap back to the kernel and asks for it anew: two thirds of the CPU time a
batch took in the client went into page faults on that memory (1.6 of 2.4 us a message of 1 KiB, measured on two cores).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

# Numbers of mallopt(3). A run and its copy, several times over, fit below both.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_OVER_BYTES: Final = 8 * 1024 * 1024
_TRIM_OVER_BYTES: Final = 16 * 1024 * 1024


@cache
def keep_freed_memory() -> bool:
    """Let this process keep up to 16 MiB of freed heap; once a process. False where the C library has no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_OVER_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_OVER_BYTES))
