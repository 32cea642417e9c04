"""``abort``: the file that exists while a node runs, and afterwards if it did not end cleanly (spec 1.6).

Its text is the process id in decimal, as RocketMQ writes it. A CommitMQ node adds a line feed and a token:

    12345            RocketMQ, which never reads the text
    12345\n5f0c…     CommitMQ: 16 hexadecimal digits, drawn again by each supervisor

The token tells whose crash a start finds. The process id cannot tell: in containers it is nearly always the same. A
token survives everything that a store survives, such as a copy or a backup, and RocketMQ removes it by writing its own
text.

Creating the file copies the previous text to ``abort.bak`` (0 bytes when there was none), as RocketMQ's helper does;
that copy has no meaning.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from commitmq.files import disk
from commitmq.files.disk import write_all
from commitmq.store.metadata.json_config import backup_path

NO_TOKEN: Final = 0
_TOKEN_DIGITS: Final = 16


def exists(path: Path) -> bool:
    """True when the previous run did not end cleanly (or a node is running)."""
    return path.exists()


def new_token() -> int:
    """A token that no other run of any node has: 63 random bits, never :data:`NO_TOKEN`."""
    return secrets.randbelow((1 << 63) - 1) + 1


def create(path: Path, pid: int, token: int = NO_TOKEN) -> None:
    """Create the file, durably: a start after a crash right behind this must find it. Raises OSError. An existing file
    is overwritten in place: a full disk has no space for another.
    """
    text = b"%d" % pid if token == NO_TOKEN else b"%d\n%016x" % (pid, token)
    try:
        previous = path.read_bytes()
    except FileNotFoundError:
        previous = b""
    # The copy has no meaning, and a full disk has no space for it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with contextlib.suppress(OSError), disk.opened(backup_path(path), flags, "abort_backup") as copy:
        write_all(copy, previous, 0)
    with disk.opened(path, os.O_RDWR | os.O_CREAT, "abort") as fd:
        write_all(fd, text, 0, place="abort.write")
        disk.resize(fd, len(text), "abort")
        disk.sync(fd, "abort", metadata=True)
    disk.sync_folder(path.parent)


def read_pid(path: Path) -> int | None:
    """The process id in the file; None without a file, -1 without a number in it: old RocketMQs leave it empty."""
    try:
        text = path.read_bytes().partition(b"\n")[0]
    except FileNotFoundError:
        return None
    return int(text) if text.strip().isdigit() else -1


def read_token(path: Path) -> int | None:
    """The token in the file; None without a file, :data:`NO_TOKEN` when CommitMQ did not write it."""
    try:
        digits = path.read_bytes().partition(b"\n")[2]
    except FileNotFoundError:
        return None
    try:
        return int(digits, 16) if len(digits) == _TOKEN_DIGITS else NO_TOKEN
    except ValueError:
        return NO_TOKEN


def remove(path: Path) -> None:
    """Delete the file, durably, after a clean stop."""
    disk.unlink(path, "abort", missing_ok=True)
    disk.sync_folder(path.parent)
