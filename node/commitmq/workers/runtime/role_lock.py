"""The lock of a role: one live process has it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class RoleTaken(BlockingIOError):
    """Another process holds the lock of this role."""


def acquire_role_lock(path: Path) -> int:
    """Take the POSIX lock of a role, without waiting. Returns the descriptor that holds it.

    POSIX and not flock: ``F_GETLK`` names the holder's pid, so a supervisor can end exactly the orphan that holds it.
    The process must never close this or another descriptor of the file: that drops the lock. Raises RoleTaken.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise RoleTaken(f"{path} is held by another process") from error
    return fd
