"""``abort``: there while a node runs, and afterwards if it did not end cleanly (spec 1.6).

Its text is the process id in decimal without a line end. Making it copies the previous text to ``abort.bak`` (0 bytes
when there was none), as RocketMQ's helper does; that file has no meaning.
"""

from __future__ import annotations

import os
from pathlib import Path

from commitmq.store.json_config import backup_path, sync_folder


def exists(path: Path) -> bool:
    """True when the previous run did not end cleanly (or one is running)."""
    return path.exists()


def create(path: Path, pid: int) -> None:
    """Make the file, durably: a crash right after this must find it. Raises OSError."""
    try:
        previous = path.read_bytes()
    except FileNotFoundError:
        previous = b""
    backup_path(path).write_bytes(previous)
    with open(path, "wb") as file:
        file.write(b"%d" % pid)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def read_pid(path: Path) -> int | None:
    """The process id in the file; None without a file, -1 without a number in it: old RocketMQs leave it empty."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    return int(text) if text.strip().isdigit() else -1


def remove(path: Path) -> None:
    """Delete the file, durably, after a clean stop."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)
