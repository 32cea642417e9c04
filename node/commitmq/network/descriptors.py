"""The descriptors that this process may have, and how many connections they suffice for."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Final

# Descriptors kept for other uses than connections: three quarters when there are few, this many when there are many.
# libzmq accepts connections before the gate learns of them, and its listener of a Unix socket ends the process when no
# descriptor is left. A gate that waits 30 ms for a processor may learn of 250 connections at once.
_OTHER_FILES: Final = 1_024


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """How many descriptors this process may have now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20) if soft == resource.RLIM_INFINITY else soft


def affordable_connections(wanted: int) -> int:
    """How many connections a port may accept: ``wanted``, or fewer as descriptors allow, and at least 8."""
    descriptors = raise_descriptor_limit()
    used = len(os.listdir("/proc/self/fd"))
    reserve = min(_OTHER_FILES, descriptors * 3 // 4)
    # Each connection takes two descriptors, libzmq's and the gate's.
    return max(8, min(wanted, (descriptors - used - reserve) // 2))
