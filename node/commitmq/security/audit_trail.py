"""Reads the audit log of a store: all its lines in order of time, and whether the chains are whole.

A node may write in the meantime. A line that it writes at this moment may be there in part; that is no fault.

The lines of the audit log from the newest on, read from the ends of the files: a look costs what it looks at.

A node may write in the meantime, and give a full file its other name. A *place* names a file by the number of its first
line, which stays with it, so a look continues where the one before has ended.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from commitmq.errors import StoreError
from commitmq.security.audit import (
    ENDING,
    MAX_LINE_BYTES,
    REMOVED,
    RawLine,
    digest,
    first_of,
    older_files,
    parsed,
    process_of,
    roles,
)

_BLOCK_BYTES: Final = 64 * 1024
_MOST_OPEN_BYTES: Final = 2 * MAX_LINE_BYTES


class TrailPosition(NamedTuple):
    """Before byte ``end`` of the file whose first line has the number ``first``."""

    first: int
    end: int


class Backwards:
    """The lines of one process. ``place``: where a later look continues, behind (in time before) the line that was
    given last. ``path``: its newest file. Raises OSError, also while it is read. Close it.
    """

    def __init__(self, path: Path, before: TrailPosition | None = None) -> None:
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
            self.place = before or TrailPosition(0, 0)
            if first is not None and self._newest is not None:
                self._files[first] = self._newest
                self.place = before or TrailPosition(first, self._newest.seek(0, os.SEEK_END))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
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
                self.place = TrailPosition(first, begin)
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


_TRIES: Final = 10
_MOST_FAULTS: Final = 100


@dataclass(slots=True)
class Chain:
    """What was found in the files of ``role``. ``head``: the digest of its last line, to be kept elsewhere: only that shows
    that lines at the end were cut off.
    """

    role: str
    lines: int = 0
    first: int = 0
    last: int = 0
    head: str = ""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("role", "lines", "first", "last", "head", "faults", "notes")}

    def fault(self, sentence: str) -> None:
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(sentence)


class AuditTrail:
    """The folder ``commitmq/audit`` of a store. Every method raises StoreError when a file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable = 0
        """Pieces that :meth:`lines` found and that are no lines."""

    def roles(self) -> list[str]:
        """The processes that have an audit log."""
        try:
            return roles(self.folder)
        except OSError as error:
            raise StoreError(f"cannot read the audit log: {error.strerror}", path=self.folder) from error

    def lines(self, since: str = "") -> Iterator[dict[str, Any]]:
        """The lines of all processes with their ``role``, by time; from the time ``since`` on, as in a line."""
        return heapq.merge(*(self._of_role(one, since) for one in self.roles()), key=lambda line: str(line["time"]))

    def verified(self) -> list[Chain]:
        """One chain for each process."""
        return [self._verify(one) for one in self.roles()]

    # ------------------------------------------------------------ files

    def _of_role(self, role: str, since: str) -> Iterator[dict[str, Any]]:
        for _, piece in self._pieces(role):
            if piece.members is None:
                self.unreadable += piece.is_whole
            elif piece.members["time"] >= since:
                yield {"role": process_of(role), **piece.members}

    def _pieces(self, role: str) -> Iterator[tuple[str, RawLine]]:
        """The pieces of a process's files in their order, with the name of the file."""
        with contextlib.ExitStack() as stack:
            try:
                files = self._open_all(self.folder / f"{role}{ENDING}")
                for file in files:
                    stack.enter_context(file)
                for file in files:
                    at = 0
                    for line in file:
                        data = line.removesuffix(b"\n")
                        yield Path(file.name).name, RawLine(data, at, parsed(data), len(data) < len(line))
                        at += len(line)
            except OSError as error:
                raise StoreError(f"cannot read the audit log: {error.strerror}", path=self.folder) from error

    @staticmethod
    def _open_all(path: Path) -> list[BinaryIO]:
        """The files of a process; a node may give the newest another name in the meantime. Raises OSError."""
        for _ in range(_TRIES):
            names = [*older_files(path), path]
            found: list[BinaryIO] = []
            for one in names:
                with contextlib.suppress(FileNotFoundError):
                    found.append(open(one, "rb"))  # noqa: SIM115 - the caller closes it
            if [*older_files(path), path] == names:
                return found
            for file in found:
                file.close()
        raise OSError(0, "its files change too quickly")

    # ------------------------------------------------------------ the chain

    def _verify(self, role: str) -> Chain:
        chain = Chain(role)
        oldest, junk, name = 1, 0, ""
        for file, piece in self._pieces(role):
            if file != name:
                if junk:
                    chain.fault(f"{name}: its last {junk} bytes are no line")
                name, junk = file, 0
            if piece.members is None:
                junk += len(piece.data) + piece.is_whole
                continue
            _check(chain, f"{file}, byte {piece.at_byte}", piece.members, junk)
            junk = 0
            chain.lines += 1
            chain.first = chain.first or piece.members["n"]
            chain.last, chain.head = piece.members["n"], digest(piece.data)
            if piece.members.get("op") == REMOVED and type(piece.members.get("oldest")) is int:
                oldest = piece.members["oldest"]
        if junk > 2 * MAX_LINE_BYTES:
            chain.fault(f"{name}: its last {junk} bytes are no line")
        elif junk:
            chain.notes.append(f"{name} ends with {junk} bytes of an unfinished line")
        if chain.first > oldest:
            chain.faults.insert(0, f"lines {oldest} to {chain.first - 1} are missing at the beginning")
        elif chain.first > 1:
            chain.notes.append(f"lines up to {chain.first - 1} are in files that were deleted by their age")
        return chain


def _check(chain: Chain, where: str, line: dict[str, Any], junk: int) -> None:
    """Compare one line with the chain so far. ``junk``: the bytes before it that are no line."""
    number, torn = line["n"], line.get("torn")
    if junk and (junk != torn or junk > 4 * MAX_LINE_BYTES):
        chain.fault(f"{where}: the {junk} bytes before line {number} are no line")
    elif junk:
        chain.notes.append(f"{where}: {junk} bytes of an unfinished line stand before line {number}")
    if line.get("lost"):
        chain.notes.append(f"{where}: {line['lost']} lines could not be written before line {number}")
    if not chain.lines:
        if number == 1 and line["prev"]:
            chain.fault(f"{where}: line 1 names a line before it")
    elif number > chain.last + 1:
        chain.fault(f"{where}: lines {chain.last + 1} to {number - 1} are missing")
    elif number <= chain.last:
        chain.fault(f"{where}: line {number} stands behind line {chain.last}")
    elif line["prev"] != chain.head:
        chain.fault(f"{where}: line {chain.last} is not the one that line {number} names: it was changed")
