"""Gives a damaged file another name: its process goes on without it, and the evidence stays."""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path

from commitmq.errors import StoreError
from commitmq.files import disk


class DamagedFileError(StoreError):
    """The content of the file ``path`` cannot be what a process wrote. (One that cannot be read now is another error.)"""

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message, path=path)
        self.damaged = path


def set_aside(path: Path) -> Path:
    """Rename ``path`` to ``<name>.damaged``, or to the first of ``.damaged-1``, ``.damaged-2``, … that is free.

    Returns the new path. Raises OSError.
    """
    for number in count():
        aside = path.with_name(f"{path.name}.damaged{f'-{number}' if number else ''}")
        with contextlib.suppress(FileExistsError):
            disk.rename(path, aside, "aside")
            return aside
    raise AssertionError  # (count has no end)
