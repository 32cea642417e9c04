"""``lock``: the file whose lock admits one process at a time to a store (spec 1.6).

It is a POSIX lock on the first byte, the same lock that RocketMQ's ``FileChannel.tryLock(0, 1)`` takes: RocketMQ and
CommitMQ exclude each other. The kernel releases it with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError, StoreLockedError
from commitmq.files import disk

_FLOCK: Final = struct.Struct("@hhqqi")  # l_type, l_whence, l_start, l_len, l_pid of Linux's struct flock
_held: set[tuple[int, int]] = set()  # POSIX locks do not exclude their own process, so this set does


class StoreLock:
    """The lock of one store, from :meth:`acquire` to :meth:`release` or the end of the process.

    Closing any descriptor of the file releases a process's POSIX locks on it: while the lock is held, the process must
    not open and close ``lock`` elsewhere. A forked child does not have the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._key = (0, 0)

    def acquire(self) -> None:
        """Take the lock without waiting. Raises StoreLockedError with the holder's pid, or StoreError."""
        if self._fd is not None:
            return
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) in _held:
                raise _locked(self.path, os.getpid())
        except FileNotFoundError:
            pass
        try:
            fd = disk.open_file(self.path, os.O_RDWR | os.O_CREAT, "lock")
        except OSError as error:
            raise StoreError(f"cannot open the lock file: {error.strerror}", path=self.path) from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            os.pwrite(fd, b"lock", 0)
            disk.sync(fd, "lock", metadata=True)
        except (BlockingIOError, PermissionError) as error:
            pid = _holder(fd)
            os.close(fd)
            raise _locked(self.path, pid) from error
        except OSError as error:
            os.close(fd)
            raise StoreError(f"cannot lock the store: {error.strerror}", path=self.path) from error
        status = os.fstat(fd)
        self._fd, self._key = fd, (status.st_dev, status.st_ino)
        _held.add(self._key)

    def release(self) -> None:
        """Release the lock; does nothing when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _held.discard(self._key)

    def __enter__(self) -> StoreLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_holder(path: Path) -> int:
    """Pid of the process that holds the lock of ``path``; 0 when none does. The holder itself must not call this.

    Raises StoreError where this account lacks permission.
    """
    try:
        fd = disk.open_file(path, os.O_RDWR, "lock")
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"cannot use this folder as a store: {error.strerror}", path=path.parent) from error
    try:
        return _holder(fd)
    finally:
        os.close(fd)


def _holder(fd: int) -> int:
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack_from(fcntl.fcntl(fd, fcntl.F_GETLK, question.ljust(32, b"\0")))
    return 0 if kind == fcntl.F_UNLCK else int(pid)


def _locked(path: Path, pid: int) -> StoreLockedError:
    who = f"process {pid}" if pid > 0 else "another process"
    return StoreLockedError(f"the store is in use by {who}", pid=max(pid, 0), path=path)
