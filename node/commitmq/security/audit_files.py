"""The files of the audit log: their names, and their lines.

    commitmq/audit/ROLE.jsonl                    the file of a process, which it appends to
    commitmq/audit/ROLE.refused.jsonl            the same for refusals: they have a chain of their own
    commitmq/audit/ROLE.jsonl.000000000123       an older one, by the number of its first line

``users.jsonl`` is that of changes of users and policies; who changes them holds their lock (:mod:`.access_file`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from commitmq.security.audit_line import digest, parsed

ENDING: Final = ".jsonl"
REFUSALS: Final = ".refused"
_DIGITS: Final = 12
_TAIL_BYTES: Final = 128 * 1024


class Piece(NamedTuple):
    """What stands between two line ends. ``members``: None for what is no line. ``is_whole``: a line end follows."""

    data: bytes
    at_byte: int
    members: dict[str, Any] | None
    is_whole: bool


class LastLine(NamedTuple):
    """Where a file's chain stands. ``end``: the byte behind its last whole line. ``ends_open``: no line end is at the end of
    the file.
    """

    number: int
    digest: str
    end: int
    ends_open: bool


def older_name(path: Path, first: int) -> Path:
    """The name of the file ``path`` when it is full; its first line has the number ``first``."""
    return path.with_name(f"{path.name}.{first:0{_DIGITS}d}")


def first_of(path: Path) -> int | None:
    """The number of the first line by the name of an older file; None for another name."""
    _, mark, digits = path.name.rpartition(f"{ENDING}.")
    return int(digits) if mark and len(digits) == _DIGITS and digits.isdecimal() and digits.isascii() else None


def older_files(path: Path) -> list[Path]:
    """The older files of ``path``, the oldest first. Raises OSError."""
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    found = [path.with_name(name) for name in names if name.startswith(f"{path.name}.")]
    return sorted(one for one in found if first_of(one) is not None)


def roles(folder: Path) -> list[str]:
    """The chains that have files in ``folder``. Raises OSError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = {name.partition(ENDING)[0] for name in names if name.endswith(ENDING) or first_of(Path(name)) is not None}
    return sorted(found)


def process_of(role: str) -> str:
    """The process that writes the chain ``role``."""
    return role.removesuffix(REFUSALS)


def pieces(data: bytes) -> Iterator[Piece]:
    """The pieces of a file."""
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        piece = data[at:] if end < 0 else data[at:end]
        yield Piece(piece, at, parsed(piece), end >= 0)
        at = len(data) if end < 0 else end + 1


def last_line(path: Path) -> LastLine | None:
    """The chain's end in a file; None where it has no whole line, or is not there. Raises OSError."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            for most in (_TAIL_BYTES, size):
                begin = max(0, size - most)
                file.seek(begin)
                found = _last_of(file.read(size - begin), begin)
                if found is not None or not begin:
                    return found
    except FileNotFoundError:
        pass
    return None


def _last_of(data: bytes, begin: int) -> LastLine | None:
    found, ends_open = None, bool(data) and not data.endswith(b"\n")
    former = None
    for one in pieces(data):
        if one.members is None:
            continue
        number, previous = one.members["n"], one.members["prev"]
        if not one.is_whole and former is not None and (number, previous) != (former.number + 1, former.digest):
            continue
        former = found = LastLine(
            number, digest(one.data), begin + one.at_byte + len(one.data) + one.is_whole, ends_open
        )
    return found
