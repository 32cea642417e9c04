"""Access to a store: one process at a time (:class:`StoreLock`), and with every umask only its owner may read it, unless the
store's own folder admits a group.

Messages are in the files, so files are 0600 and folders 0700. The processes of a node, the offline verbs and the tasks
of jobs that write to a store all set their umask by :func:`umask_of`, so no file is missed.

To share a store with a group, set the permissions of its folder before its first use: ``chgrp GROUP STORE; chmod 2750
STORE``. Files are then 0640 and folders 2750 of that group, and its members can map the log. Only the store's owner
ever writes. A folder that is merely open to others (0755, say) shares nothing: folders get that mode by default.

Files made by an earlier version or by RocketMQ keep their permissions: another account may rely on them. The node names
such folders when it starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError, StoreLockedError
from commitmq.files import disk
from commitmq.store.layout import StoreLayout

_BEFORE_THE_FIRST_START: Final = frozenset({"config", "commitmq", "lock", "run", "lost+found"})
"""What users, node keys and a start that was refused leave in a folder that is no store yet."""


@contextlib.contextmanager
def refusals_told(root: Path) -> Iterator[None]:
    """Turn OSErrors in the block (a folder that this account may not enter) into a StoreError about ``root``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot use this folder as a store: {error.strerror}", path=root) from error


def require_store(layout: StoreLayout) -> None:
    """Raise StoreError unless ``layout`` is a store that this account may enter."""
    with refusals_told(layout.root):
        if not layout.commit_log.is_dir():
            raise StoreError("this is no store: it has no folder commitlog", path=layout.root)


def require_store_or_new(layout: StoreLayout) -> None:
    """As :func:`require_store`, but a folder that was never started will do: it has no other files."""
    with refusals_told(layout.root):
        if layout.commit_log.is_dir():
            return
        others = sorted({one.name for one in layout.root.iterdir()} - _BEFORE_THE_FIRST_START)
    if others:
        raise StoreError(
            f"this is no store, and no empty folder for one: it has no folder commitlog, but {', '.join(others[:3])}. Name the"
            " store's folder, or start a node on it first (`commitmq start`)",
            path=layout.root,
        )


def shares_with_group(root: Path) -> bool:
    """Whether the folder ``root`` admits its group to the store: set-group-id, and open to that group."""
    try:
        mode = root.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_ISGID) and mode & 0o050 == 0o050


def umask_of(root: Path) -> int:
    """The umask for every process that makes files in the store at ``root``."""
    return 0o027 if shares_with_group(root) else 0o077


def keep_private(root: Path) -> None:
    """Set this process's umask to the store's; for a process that does nothing else."""
    os.umask(umask_of(root))


@contextlib.contextmanager
def private_files(root: Path) -> Iterator[None]:
    """Set the store's umask during the block, in a process that has other work too."""
    before = os.umask(umask_of(root))
    try:
        yield
    finally:
        os.umask(before)


def close_own_folders(layout: StoreLayout) -> None:
    """Close the two folders that only CommitMQ uses to other accounts. Raises OSError."""
    wanted = 0o2750 if shares_with_group(layout.root) else 0o700
    for folder in (layout.own, layout.run):
        folder.chmod(wanted)


def open_folders(layout: StoreLayout) -> list[Path]:
    """Folders with messages that unintended accounts can read: made by RocketMQ or by an earlier version."""
    unwanted = umask_of(layout.root)
    if not layout.root.stat().st_mode & unwanted & 0o011:
        return []  # no other account gets that far
    folders = (layout.commit_log, layout.consume_queue, layout.batch_consume_queue, layout.index, layout.config)
    return [folder for folder in folders if folder.is_dir() and folder.stat().st_mode & unwanted & 0o055]


_FLOCK: Final = struct.Struct("@hhqqi")  # l_type, l_whence, l_start, l_len, l_pid of Linux's struct flock
_held: set[tuple[int, int]] = set()  # POSIX locks do not exclude their own process, so this set does
os.register_at_fork(after_in_child=_held.clear)


class StoreLock:
    """``lock``: the file whose lock admits one process at a time to a store (spec 1.6).

    It is a POSIX lock on the first byte, the same lock that RocketMQ's ``FileChannel.tryLock(0, 1)`` takes: RocketMQ and
    CommitMQ exclude each other. The kernel releases it with the process, however that ends.

    The lock of one store, from :meth:`acquire` to :meth:`release` or the end of the process.

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
