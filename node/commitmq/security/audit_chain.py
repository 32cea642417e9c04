"""The chain of lines of one process in its files, as a process that writes it sees it; see :mod:`.audit`.

Owns ``commitmq/audit/NAME.jsonl``. At ``max_file_bytes`` the file gets the number of its first line behind its name
(:mod:`.audit_files`), and the oldest is deleted, which a line in the chain announces.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from commitmq import failpoints
from commitmq.files import disk
from commitmq.log import Log
from commitmq.security.audit_files import first_of, last_line, older_files, older_name
from commitmq.security.audit_line import digest, encoded

REMOVED: Final = "audit.removed"
GAP: Final = "audit.lost"
_FILE_MODE: Final = 0o600


class _State(NamedTuple):
    """Where a file and its chain stand."""

    size: int
    number: int
    previous: str
    junk: int
    ends_open: bool
    lost: int


class AuditChain:
    """Nothing is opened before the first line. Its owner has a lock for all calls but :meth:`sync`.

    ``say`` gets the kind of a fault with its sentence, and an empty one when it has passed.
    """

    def __init__(
        self, path: Path, log: Log, say: Callable[[str, str], None], *, max_file_bytes: int, max_files: int
    ) -> None:
        self.path = path
        self._log, self._say = log, say
        self._max_file_bytes, self._max_files = max_file_bytes, max_files
        self._fd = -1
        self._file = (-1, -1)  # device and inode
        self._size = self._number = self._first = self._junk = 0
        self._previous = ""
        self._is_resumed = self._ends_open = False
        self._begun: _State | None = None
        self.lost = 0
        self._full_files: list[int] = []  # descriptors, for their last sync
        self._to_remove: list[Path] = []
        self._has_new_name = self._is_new = False

    def append(self, members: dict[str, Any]) -> int:
        """Write one line with one system call, if the disk lets it. Returns its bytes; 0 when it is lost."""
        try:
            self._open()
            if self._begun is None:
                self._turn_over()
            written = self._put(members)
        except OSError as error:
            self._lose(error)
            return 0
        self.lost = 0
        self._is_new = True
        self._say("write", "")
        return written

    def begin(self) -> None:
        """The lines from here on may be taken back: they stay in one file."""
        try:
            self._open()
            self._turn_over()
        except OSError as error:
            self._lose(error)
        else:
            self._begun = _State(self._size, self._number, self._previous, self._junk, self._ends_open, self.lost)

    def take_back(self) -> None:
        """Take the lines since :meth:`begin` back; that needs no room on the disk."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            disk.resize(self._fd, begun.size, "audit")
        except OSError as error:
            self._say("write", f"cannot take lines back from the audit log {self.path}: {error.strerror}")
            return
        self._size, self._number, self._previous, self._junk, self._ends_open, self.lost = begun
        self._is_new = True

    def close(self) -> None:
        """Close the files; they were synced, if the device lets it."""
        while self._full_files:
            os.close(self._full_files.pop())
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sync(self, lock: contextlib.AbstractContextManager[Any]) -> None:
        """Bring to the device what was written, and delete the files that are too many. Called without ``lock``."""
        with lock:
            if not self._is_new:
                return
            self._is_new = False
            full, self._full_files = self._full_files, []
            gone, self._to_remove = self._to_remove, []
            has_new_name, self._has_new_name = self._has_new_name, False
        sentence, newest = "", -1
        try:
            with lock:
                if self._fd >= 0:
                    newest = os.dup(self._fd)
            while full:
                disk.sync(full[0], "audit")
                os.close(full.pop(0))
            if newest >= 0:
                disk.sync(newest, "audit")
            if has_new_name or gone:
                disk.sync_folder(self.path.parent, "audit")
            for path in gone:
                disk.unlink(path, "audit", missing_ok=True)
        except OSError as error:
            sentence = f"cannot bring the audit log {self.path} to the device: {error.strerror}"
        finally:
            if newest >= 0:
                os.close(newest)
        with lock:
            if sentence:  # the next call tries again
                self._is_new = True
                self._full_files[:0], self._to_remove[:0] = full, gone
                self._has_new_name = self._has_new_name or has_new_name
            self._say("sync", sentence)

    def try_again(self) -> None:
        """After a fault, without waiting for the next line. A line says how many are lost, if any are."""
        lost = self.lost
        if lost:
            if not self.append({"op": GAP}):
                self.lost = lost  # the line of the gap is none that is missing
        elif self._fd >= 0:
            with contextlib.suppress(OSError):  # the next line meets it too
                self._turn_over()

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        self._say("write", f"cannot write the audit log {self.path}: {error.strerror}")

    def _put(self, members: dict[str, Any]) -> int:
        begin = b"\n" if self._ends_open else b""
        junk = self._junk + len(begin) if self._junk else 0
        marks = {name: value for name, value in (("torn", junk), ("lost", self.lost)) if value}
        line = encoded({**members, **marks}, self._number + 1, self._previous, time.time_ns())
        data = begin + line
        written = os.write(self._fd, failpoints.clip("audit.write", data) if failpoints.ACTIVE else data)
        self._size += written
        if written < len(data) - 1:
            self._junk += written
            self._ends_open = self._ends_open or written > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._number += 1
        self._previous = digest(line[:-1])
        self._junk, self._ends_open = 0, written < len(data)
        return written

    def _open(self) -> None:
        """Open the file where it is not, or is another one by now. Raises OSError."""
        if self._fd >= 0:
            try:
                found = os.stat(self.path)
            except FileNotFoundError:
                found = None
            if found is not None and (found.st_dev, found.st_ino) == self._file:
                if found.st_size != self._size:
                    self._log.error("another program has changed the audit log", path=str(self.path))
                    self._take_size(found.st_size)
                return
            self._log.error("the audit log is gone; another file begins", path=str(self.path))
            os.close(self._fd)
            self._fd = -1
        self.path.parent.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        fd = disk.open_file(self.path, flags, "audit", _FILE_MODE)
        try:
            about = os.fstat(fd)
            if not self._is_resumed:
                self._resume(about.st_size)
            else:
                self._first = self._number + 1
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._file = fd, (about.st_dev, about.st_ino)
        if self._size != about.st_size:
            self._take_size(about.st_size)
        self._has_new_name = True

    def _take_size(self, size: int) -> None:
        """Go on behind what another program has made of the file; the chain shows it."""
        self._size, self._junk, self._begun = size, 0, None
        self._ends_open = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _resume(self, size: int) -> None:
        """Take up the chain where the last process of this name left it. Raises OSError."""
        found = last_line(self.path)
        self._size = size
        if found is not None:
            self._number, self._previous = found.number, found.digest
            self._first = self._first_number()
            self._ends_open, self._junk = found.ends_open, size - found.end
        else:
            # No whole line: a new file, or one that holds the first line of a process that died.
            older = older_files(self.path)
            former = last_line(older[-1]) if older else None
            self._number, self._previous = (former.number, former.digest) if former is not None else (0, "")
            self._first = self._number + 1
            self._junk, self._ends_open = size, size > 0
        self._is_resumed = True

    def _first_number(self) -> int:
        """The number of the file's first line, from the end of the older file before it."""
        older = older_files(self.path)
        former = last_line(older[-1]) if older else None
        return 1 if former is None else former.number + 1

    def _turn_over(self) -> None:
        """Begin the next file, if this one is full; where it cannot be renamed it goes on. Raises OSError if none is there."""
        if self._size < self._max_file_bytes or self._junk or self._ends_open:
            return
        try:
            self._begin_file()
        except OSError as error:
            if self._fd < 0:
                raise
            self._say("files", f"a full file of the audit log goes on, {self.path}: {error.strerror}")
        else:
            self._say("files", "")

    def _begin_file(self) -> None:
        """Give the full file its other name, and begin the next one. Raises OSError."""
        disk.replace(self.path, older_name(self.path, self._first), "audit")
        self._full_files.append(self._fd)
        self._fd = -1
        self._size = self._junk = 0
        self._ends_open = False
        self._open()
        older = older_files(self.path)
        gone = older[: max(0, len(older) - self._max_files + 1)]
        if gone:
            kept = older[len(gone) :]
            oldest = first_of(kept[0]) if kept else self._number + 1
            self._put({"op": REMOVED, "oldest": oldest})
            self._to_remove += gone
