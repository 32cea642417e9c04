"""A small file system of its own, which a test fills to the last byte; and a DiskRoom without a process."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq.files.disk_space import DiskRoom
from commitmq.log import get_log


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[Path]:
    """An empty tmpfs at ``folder``. Where nobody may mount one the test is skipped by name; COMMITMQ_CI=1 forbids that."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=4096", "commitmq-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        reason = f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}"
        if os.environ.get("COMMITMQ_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """A file that takes all space of the file system but ``leave_bytes``."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    usage = os.statvfs(folder)
    size = usage.f_bavail * usage.f_frsize - leave_bytes
    with open(filler, "wb") as file:
        while size > 0:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), min(size, 4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
            size -= 4096
    return filler


class Told:
    """What a :class:`DiskRoom` has told: ``waiting`` now, and how often it told something."""

    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}
        self.times = self.pauses = 0
        self.stopping = False

    def tell(self, **info: Any) -> None:
        self.waiting = info["no_room"]
        self.times += 1

    def pause(self, _ms: int) -> bool:
        self.pauses += 1
        return not self.stopping


def room(told: Told | None = None) -> DiskRoom:
    """A DiskRoom that tells ``told``."""
    told = told or Told()
    return DiskRoom(get_log("test"), told.tell, told.pause)
