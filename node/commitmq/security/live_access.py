"""The table of users as a running process sees it: read again when the file has changed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from commitmq.errors import StoreError
from commitmq.log import Log
from commitmq.security.access_file import AccessFile
from commitmq.security.access_table import AccessTable

LOOK_MS: Final = 200
"""A change acts after this time at most."""


class LiveAccess:
    """Raises StoreError when the file cannot be used at the start.

    Later a file that is missing, damaged or not readable changes nothing: the last table stays, the log tells once, and each
    look tries again. The threads of a process may share it.
    """

    def __init__(self, file: AccessFile, log: Log, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._file, self._log, self._clock_ns = file, log, clock_ns
        self._lock = threading.Lock()
        self._told = ""
        self._seen = self._state()
        self._table = file.load()
        self._next_ns = clock_ns() + LOOK_MS * 1_000_000

    def table(self) -> AccessTable:
        """The newest table, at most LOOK_MS old."""
        now_ns = self._clock_ns()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + LOOK_MS * 1_000_000
            self._look()
        return self._table

    def newest(self) -> AccessTable:
        """The table of this moment; for questions that are rare."""
        self._look()
        return self._table

    def _look(self) -> None:
        with self._lock:  # of two reads at once the older could be kept
            state = self._state()
            if state == self._seen:
                return
            try:
                table = self._file.load()
            except StoreError as error:
                self._tell(str(error))
                return
            if table.is_open and not self._table.is_open and table.version <= self._table.version:
                self._tell(f"it is gone: {self._file.path}")
                return
            self._log.info("users and policies were read", version=table.version, users=len(table.users))
            self._seen, self._table, self._told = state, table, ""

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self._log.error("the file of users cannot be used; the users of before stay", error=reason)

    def _state(self) -> tuple[int, int, int, int] | None:
        """What changes with the file: each change makes another file, and a change of its rights another ``ctime``."""
        try:
            found = os.stat(self._file.path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
