"""A cache of open file descriptors for thousands of queues: bounded in number, least recently used closed first."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from typing import Final

from commitmq.files import disk

_OTHER_FILES: Final = 256  # sockets, segments of the log, libraries


def affordable_files(wanted: int) -> int:
    """``wanted`` open files, or as many as this process may have: raises its soft limit as far as the system allows.
    The usual soft limit of 1,024 is for programs that use ``select``; CommitMQ does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(8, min(wanted, soft - _OTHER_FILES, soft * 3 // 4))


class FdCache:
    """Open descriptors by path. Not thread-safe; every process has its own.

    Closing a descriptor before its data is synced loses nothing: the page cache belongs to the file, and the kernel
    keeps a write-back error for the next process that opens and syncs the file.
    """

    __slots__ = ("_fds", "max_open")

    def __init__(self, max_open: int = 512) -> None:
        if max_open < 1:
            raise ValueError("an FdCache needs room for at least one descriptor")
        self.max_open = max_open
        self._fds: OrderedDict[str, tuple[int, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fds)

    def read_fd(self, path: str) -> int:
        """A descriptor that can read ``path``. Raises OSError (FileNotFoundError when the file does not exist). A file
        that was deleted since (and perhaps recreated by its owner, another process) is opened again.
        """
        found = self._fds.get(path)
        if found is not None:
            if os.fstat(found[0]).st_nlink:
                self._fds.move_to_end(path)
                return found[0]
            self.drop(path)
        return self._add(path, disk.open_file(path, os.O_RDONLY, "queue"), False)

    def write_fd(self, path: str) -> int:
        """A descriptor that can read and write ``path``, for the one process that owns it. Raises OSError."""
        found = self._fds.get(path)
        if found is not None:
            if found[1]:
                self._fds.move_to_end(path)
                return found[0]
            self.drop(path)
        return self._add(path, disk.open_file(path, os.O_RDWR, "queue"), True)

    def drop(self, path: str) -> None:
        """Close the descriptor of ``path`` if there is one."""
        found = self._fds.pop(path, None)
        if found is not None:
            os.close(found[0])

    def drop_deleted(self) -> None:
        """Close the descriptors of deleted files: an open one keeps its space."""
        for path in [path for path, (fd, _) in self._fds.items() if not os.fstat(fd).st_nlink]:
            self.drop(path)

    def __del__(self) -> None:
        # A store object that is dropped without close() must not keep hundreds of files open.
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1][0])

    def _add(self, path: str, fd: int, writable: bool) -> int:
        self._fds[path] = (fd, writable)
        if len(self._fds) > self.max_open:
            os.close(self._fds.popitem(last=False)[1][0])
        return fd
