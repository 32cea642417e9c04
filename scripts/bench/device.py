"""Measures the disk alone: a record stored in a mapped file, and fdatasync, without a node.

No send that waits for its flush can be faster.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

FILE_BYTES = 4 * 1024 * 1024


class Device:
    """A small file of its own in ``folder`` (the store's file system), preallocated and mapped as a segment is.

    Its blocks must not have been written through the file: large writes leave large folios in the page cache, and the
    kernel (6.18, ext4) writes a whole folio out for one record in it, which took three times as long.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError when ``folder`` cannot be written to."""
        # A file without a name, so that nothing can be left behind.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, FILE_BYTES)
            os.fsync(self._file.fileno())
            self._map = mmap.mmap(self._file.fileno(), FILE_BYTES)
        except BaseException:
            self._file.close()
            raise
        self._at = 0

    def store(self, data: bytes) -> None:
        """Store ``data`` behind the last data, round and round, and make it durable."""
        if self._at + len(data) > FILE_BYTES:
            self._at = 0
        self._map[self._at : self._at + len(data)] = data
        self._at += len(data)
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
