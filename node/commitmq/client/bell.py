"""A bell between threads that a poller can wait for: an eventfd, or a pipe on a system without eventfd (macOS)."""

from __future__ import annotations

import contextlib
import os
import sys


class Bell:
    """``fd`` is readable from the first :meth:`ring` until :meth:`clear`."""

    __slots__ = ("_wake", "fd")

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._wake, False)

    def ring(self) -> None:
        """Make ``fd`` readable without waiting. A second ring before :meth:`clear` or one after :meth:`close` does nothing."""
        if self._wake < 0:
            return
        with contextlib.suppress(BlockingIOError):
            # An eventfd takes a number of 8 bytes. A pipe takes any bytes.
            os.write(self._wake, _ONE)

    def clear(self) -> None:
        """Forget every earlier :meth:`ring`."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, _MOST_BYTES)) == _MOST_BYTES:
                pass

    def close(self) -> None:
        """Closing twice is allowed."""
        ends = {self.fd, self._wake} - {-1}
        self.fd = self._wake = -1
        for end in ends:
            os.close(end)


_ONE = (1).to_bytes(8, sys.byteorder)
_MOST_BYTES = 4096
