"""``abort``: there while a node runs, and afterwards if it did not end cleanly (spec 1.6).

Its text is the process id in decimal, as RocketMQ writes it, and in a node's own file a line feed and a token:

    12345            RocketMQ, which never reads the text
    12345\n5f0c…     this node: 16 hexadecimal digits, drawn anew by each supervisor

The token says whose crash it is that a start finds. The process id cannot: in containers it is nearly always the same. A
token survives what a store survives, such as a copy or a backup, and RocketMQ takes it away by writing its own text.

Making the file copies the previous text to ``abort.bak`` (0 bytes when there was none), as RocketMQ's helper does; that
file has no meaning.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from commitmq.files.disk import sync_folder
from commitmq.files.write_all import write_all
from commitmq.store.metadata.json_config import backup_path

NO_TOKEN: Final = 0
_TOKEN_DIGITS: Final = 16


def exists(path: Path) -> bool:
    """True when the previous run did not end cleanly (or one is running)."""
    return path.exists()


def new_token() -> int:
    """A token that no other run of any node has: 63 bits by chance, not :data:`NO_TOKEN`."""
    return secrets.randbelow((1 << 63) - 1) + 1


def create(path: Path, pid: int, token: int = NO_TOKEN) -> None:
    """Make the file, durably: a crash right after this must find it. Raises OSError.

    One that is there is overwritten in place: on a full disk there is no space for another.
    """
    text = b"%d" % pid if token == NO_TOKEN else b"%d\n%016x" % (pid, token)
    try:
        previous = path.read_bytes()
    except FileNotFoundError:
        previous = b""
    with contextlib.suppress(OSError):  # it has no meaning, and a full disk has no space for it
        backup_path(path).write_bytes(previous)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, text, 0, place="abort.write")
        os.ftruncate(fd, len(text))
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(path.parent)


def read_pid(path: Path) -> int | None:
    """The process id in the file; None without a file, -1 without a number in it: old RocketMQs leave it empty."""
    try:
        text = path.read_bytes().partition(b"\n")[0]
    except FileNotFoundError:
        return None
    return int(text) if text.strip().isdigit() else -1


def read_token(path: Path) -> int | None:
    """The token in the file; None without a file, :data:`NO_TOKEN` when it is not a node's own."""
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
    path.unlink(missing_ok=True)
    sync_folder(path.parent)
