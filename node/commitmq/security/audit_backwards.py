"""The lines of the audit log from the newest on, read from the ends of the files: a look costs what it looks at.

A node may write meanwhile, and give a full file its other name. A *place* names a file by the number of its first line, which
stays with it, so a look goes on where the one before has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from commitmq.security.audit_files import first_of, older_files
from commitmq.security.audit_line import MAX_LINE_BYTES, parsed

_BLOCK_BYTES: Final = 64 * 1024
_MOST_OPEN_BYTES: Final = 2 * MAX_LINE_BYTES


class Place(NamedTuple):
    """Before byte ``end`` of the file whose first line has the number ``first``."""

    first: int
    end: int


class Backwards:
    """The lines of one process. ``place``: where a later look goes on, behind (in time before) the line that was given last.

    ``path``: its newest file. Raises OSError, also while it is read. Close it.
    """

    def __init__(self, path: Path, before: Place | None = None) -> None:
        self._before = before
        # It is opened before the others are listed: one that gets its other name in between is among them, under its number.
        self._newest: BinaryIO | None = None
        with contextlib.suppress(FileNotFoundError):
            self._newest = open(path, "rb")  # noqa: SIM115 - close() closes it
        try:
            first = None if self._newest is None else _first_number(self._newest)
            self._files: dict[int, Path | BinaryIO] = {}
            for one in older_files(path):
                if (number := first_of(one)) is not None:
                    self._files[number] = one
            self.place = before or Place(0, 0)
            if first is not None and self._newest is not None:
                self._files[first] = self._newest
                self.place = before or Place(first, self._newest.seek(0, os.SEEK_END))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the look."""
        if self._newest is not None:
            self._newest.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = self._before
        for first in sorted(self._files, reverse=True):
            if before is not None and first > before.first:
                continue
            most = before.end if before is not None and first == before.first else None
            found = self._files[first]
            if not isinstance(found, Path):
                yield from self._of_file(first, found, most)
                continue
            with contextlib.suppress(FileNotFoundError), open(found, "rb") as file:  # it is deleted when it is too old
                yield from self._of_file(first, file, most)

    def _of_file(self, first: int, file: BinaryIO, most: int | None) -> Iterator[dict[str, Any]]:
        end = file.seek(0, os.SEEK_END)
        for line, begin in _lines(file, end if most is None else min(end, most)):
            members = parsed(line)
            if members is not None:
                self.place = Place(first, begin)
                yield members


def _first_number(file: BinaryIO) -> int | None:
    for line in file.read(_BLOCK_BYTES).split(b"\n"):
        members = parsed(line)
        if members is not None:
            return int(members["n"])
    return None


def _lines(file: BinaryIO, end: int) -> Iterator[tuple[bytes, int]]:
    """Each line before ``end``, the last first, with the byte at which it begins. Of what is too long for one only parts."""
    at, rest = end, b""
    while at > 0:
        size = min(_BLOCK_BYTES, at)
        at -= size
        file.seek(at)
        data = file.read(size) + rest
        pieces = data.split(b"\n")
        begin = at + len(data)
        for piece in reversed(pieces[1:]):
            begin -= len(piece)
            yield piece, begin
            begin -= 1
        rest = pieces[0] if len(pieces[0]) <= _MOST_OPEN_BYTES else b""
    if rest:
        yield rest, 0
