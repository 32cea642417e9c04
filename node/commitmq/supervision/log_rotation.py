"""Rotation of ``commitmq/node.log`` by its size: node.log, node.log.1 (the newest before it), up to node.log.N.

One process rotates, the supervisor; all others only follow (:mod:`commitmq.log`): a process that is about to write a line
and finds that the file's name belongs to another file opens that one. So no line is lost or cut, and no process waits for
another. A process that writes without the log, such as a library that aborts, still writes into the file it has, which is
node.log.1 by then.

The file that is deleted is emptied first: a process that did not write for long may have it open, and its space is free at
once. A death between two steps leaves a number out, which the next rotation closes; nothing is overwritten, because a file
takes only a name that was freed before.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from commitmq import log as log_module
from commitmq.config.schema import LogConfig
from commitmq.log import Log

_LOOK_MS: Final = 1_000


class LogRotation:
    """Looks at the size once a second."""

    def __init__(self, path: Path, log: Log) -> None:
        self._path, self._log = path, log
        self._next_ms = 0
        self._complained = False

    def tick(self, now_ms: int, config: LogConfig) -> None:
        """Rotate when it is time. An error, as of a full disk, is logged once, and tried again."""
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + _LOOK_MS
        try:
            if self._path.stat().st_size < config.max_bytes or not log_module.is_followed():
                return
            rotate(self._path, config.files)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._log.error("the log cannot be rotated and grows", error=str(error))
        else:
            self._complained = False
            self._log.info("a new log file begins", the_last=f"{self._path.name}.1")


def rotate(path: Path, files: int) -> None:
    """Give ``path`` the number 1, and each older file one more; ``files``, at least 2, stay. Raises OSError."""
    numbers = _numbers(path)
    free = next((number for number in range(1, files) if number not in numbers), files - 1)
    for number in {one for one in numbers if one >= files} | ({free} & numbers):
        with contextlib.suppress(OSError):
            os.truncate(_numbered(path, number), 0)
        _numbered(path, number).unlink()
    for number in range(free - 1, 0, -1):
        _numbered(path, number).rename(_numbered(path, number + 1))
    path.rename(_numbered(path, 1))


def _numbers(path: Path) -> set[int]:
    ends = [one.name.removeprefix(f"{path.name}.") for one in path.parent.glob(f"{path.name}.*")]
    return {int(end) for end in ends if end.isdecimal() and end.isascii() and int(end) > 0}


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
