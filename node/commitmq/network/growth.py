"""The growth of this process: its private memory, compared with the least since nothing was held."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Final

_PAGE_BYTES: Final = resource.getpagesize()
_TRIM_S: Final = 0.5


class Growth:
    """Measures the process. Call :meth:`settle` at each look while nothing is held, else :meth:`measure`."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.trim_s = 0.0
        """When :meth:`settle` gives freed memory back to the kernel, in monotonic seconds; 0: none was freed."""
        self._low = self._private_bytes()

    def close(self) -> None:
        os.close(self._statm)

    def trim_soon(self, now_s: float) -> None:
        """Memory is about to be freed: give it back to the kernel a moment after ``now_s``."""
        self.trim_s = now_s + _TRIM_S

    def settle(self, now_s: float) -> None:
        """Growth counts from here."""
        if self.trim_s and now_s >= self.trim_s:
            # Memory that libzmq freed stays in the heap, and would count as growth.
            self.trim_s = 0.0
            ctypes.CDLL(None).malloc_trim(0)
        self._low = self._private_bytes()

    def measure(self) -> int:
        """The growth of the process, in bytes."""
        private = self._private_bytes()
        self._low = min(self._low, private)
        return private - self._low

    def _private_bytes(self) -> int:
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES
