"""Drops a store's files from the page cache, and checks that they are gone."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def drop(files: Iterable[Path]) -> float:
    """Write ``files`` to the device and drop them from the page cache; returns the share of their bytes that stayed.

    Pages that a process has mapped stay, so no server may run.
    """
    total = stayed = 0
    for path in files:
        try:
            with open(path, "rb") as file:
                with contextlib.suppress(OSError):
                    os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                size = os.fstat(file.fileno()).st_size
                total += size
                stayed += resident_bytes(file.fileno(), size)
        except OSError:
            continue  # a socket, or gone meanwhile
    return stayed / total if total else 0.0


def resident_bytes(fd: int, size: int) -> int:
    """The share of a file that is in the page cache. Raises OSError when the kernel does not tell."""
    if not size:
        return 0
    pages = -(-size // _PAGE_BYTES)
    vector = (ctypes.c_ubyte * pages)()
    # A private mapping, because ctypes takes the address of writable buffers only; nothing is written to it.
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), vector)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return min(sum(one & 1 for one in vector) * _PAGE_BYTES, size)
