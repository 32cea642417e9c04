"""Starts writing a file's pages back without waiting: ``sync_file_range``, which Python's ``os`` lacks.

It promises nothing and does not replace a sync. It makes many syncs in a row cheap: the device works on all files at
once, and the first fdatasync commits the block allocations of them all (10,000 files with new blocks: 0.6 s, not 2 s).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE


@functools.cache
def _call() -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    return function


def start_writeback(fd: int) -> None:
    """Hand the dirty pages of ``fd`` to the device. Errors are left to the sync that must follow."""
    function = _call()
    if function is not None:
        function(fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_WRITE))
