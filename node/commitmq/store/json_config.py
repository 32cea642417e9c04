r"""Reading and writing RocketMQ's JSON config files (spec 1.4).

The dialect: map keys that are integers come without quotes (``{0:123}``), files are indented by tabs with no space
after a colon, and an empty map still takes three lines. :func:`loads` gives such keys as ``int``, :func:`dumps` writes
``int`` keys the same way, so that reading a file and writing it again gives the same bytes.

A change never leaves less than one whole generation on disk: the new text is complete and synced under another name
before the current file becomes ``.bak`` and the new one takes its place.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commitmq import failpoints
from commitmq.errors import DiskFullError, StoreError
from commitmq.store.write_all import write_all

# A string is matched as a whole so that digits and braces inside one are never taken for a key.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)
# An integer key is handed to the JSON parser as a string that begins with this mark; a real key that begins with NUL
# gets a second NUL in front, so that the two can never be mixed up.
_MARK = "\x00i"
_ESCAPED_NUL = '"\\u0000'


@dataclass(slots=True)
class DataVersion:
    """Generation of a config file: ``counter`` grows with every change, ``timestamp`` (ms) is that of the last."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def advance(self) -> None:
        """Count one change, now."""
        self.counter += 1
        self.timestamp = time.time_ns() // 1_000_000

    @classmethod
    def from_json(cls, data: Any) -> DataVersion:
        """Missing or malformed members count as 0."""
        members = data if isinstance(data, dict) else {}
        numbers = [members.get(name) for name in ("counter", "stateVersion", "timestamp")]
        return cls(*(number if type(number) is int else 0 for number in numbers))

    def to_json(self) -> dict[str, int]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}


def loads(text: str) -> Any:
    """Parse ``text``; unquoted integer keys become ``int``. Raises ValueError for what is not this dialect."""
    return json.loads(_TOKEN.sub(_quote_key, text), object_pairs_hook=_build_object)


def _quote_key(match: re.Match[str]) -> str:
    if match[3] is not None:
        return f'{match[2]}"\\u0000i{match[3]}"'
    if match[1] is not None and match[0].startswith(_ESCAPED_NUL):
        return f"{_ESCAPED_NUL}{match[0][1:]}"
    return match[0]


def _build_object(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    return {_real_key(name): value for name, value in pairs}


def _real_key(name: str) -> str | int:
    if not name.startswith("\x00"):
        return name
    return int(name[2:]) if name.startswith(_MARK) else name[1:]


def dumps(data: Any) -> str:
    """``data`` in RocketMQ's pretty form, members in the order given."""
    parts: list[str] = []
    _write(data, 1, parts)
    return "".join(parts)


class Encoded(str):
    """A member's text in the form :func:`dumps` gives it at its place, for files whose members seldom change."""

    __slots__ = ()


def encode_members(members: Mapping[str, Any], depth: int) -> Encoded:
    """The text between the braces of a map with ``members`` that is nested ``depth`` maps deep (0: the file itself)."""
    parts: list[str] = []
    _write(members, depth + 1, parts)
    return Encoded("".join(parts)[1 : -(depth + 2)])


def join_members(members: Iterable[Encoded], depth: int) -> Encoded:
    """A whole map, ``depth`` deep, of members that :func:`encode_members` made."""
    indent = "\n" + "\t" * depth
    return Encoded("{" + (",".join(members) or indent + "\t") + indent + "}")


def _write(value: Any, depth: int, parts: list[str]) -> None:
    if type(value) is Encoded:
        parts.append(value)
    elif isinstance(value, Mapping):
        indent = "\n" + "\t" * depth
        if not value:
            parts.append("{" + indent)
        for number, (name, member) in enumerate(value.items()):
            key = str(name) if isinstance(name, int) else json.dumps(name, ensure_ascii=False)
            parts.append(f"{',' if number else '{'}{indent}{key}:")
            _write(member, depth + 1, parts)
        parts.append(indent[:-1] + "}")
    elif isinstance(value, list | tuple):
        indent = "\n" + "\t" * depth
        if not value:
            parts.append("[]")
            return
        for number, member in enumerate(value):
            parts.append(f"{',' if number else '['}{indent}")
            _write(member, depth + 1, parts)
        parts.append(indent[:-1] + "]")
    else:
        parts.append(json.dumps(value, ensure_ascii=False))


def load(path: Path) -> Any | None:
    """The content of ``path``; of its ``.bak`` when the file is missing, empty or unreadable as JSON; None if neither
    is there. Changes nothing on disk. Raises StoreError when something is there but no generation can be read.
    """
    reasons = []
    for candidate in (path, backup_path(path)):
        try:
            text = candidate.read_bytes().decode()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            reasons.append(f"{candidate.name}: {error}")
            continue
        try:
            # An empty file is what a crash leaves of a file that was just being made.
            if text.strip():
                return loads(text)
            reasons.append(f"{candidate.name} is empty")
        except ValueError as error:
            reasons.append(f"{candidate.name}: {error}")
    if any("is empty" not in reason for reason in reasons):
        raise StoreError("neither the config file nor its .bak can be read: " + "; ".join(reasons), path=path)
    return None


def persist(path: Path, data: Any) -> None:
    """Make ``data`` the content of ``path``, durably; the previous content is in ``.bak`` afterwards.

    Raises DiskFullError (nothing changed) or StoreError.
    """
    replace_text(path, dumps(data))


def replace_text(path: Path, text: str) -> None:
    """:func:`persist` for a text that is encoded already."""
    fresh = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(fresh, "wb") as file:
            # What is no Unicode becomes "?", as in Java.
            write_all(file.fileno(), text.encode(errors="replace"), 0, place="json.write")
            if failpoints.ACTIVE:
                failpoints.hit("json.before_fsync")
            os.fsync(file.fileno())
        if failpoints.ACTIVE:
            failpoints.hit("json.before_replace")
        if _looks_whole(path):
            os.replace(path, backup_path(path))
        if failpoints.ACTIVE:
            failpoints.hit("json.inside_replace")
        os.replace(fresh, path)
        if failpoints.ACTIVE:
            failpoints.hit("json.after_replace")
        sync_folder(path.parent)
    except OSError as error:
        kind = DiskFullError if error.errno in (28, 122) else StoreError
        raise kind(f"cannot write the config file: {error.strerror}", path=path) from error


def backup_path(path: Path) -> Path:
    """Where the previous generation of ``path`` lies."""
    return path.with_name(path.name + ".bak")


def sync_folder(folder: Path) -> None:
    """Make created, renamed and deleted names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _looks_whole(path: Path) -> bool:
    """False for a file that is missing or was cut short: it must not push a good generation out of ``.bak``."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - 64))
            return file.read().rstrip()[-1:] in (b"}", b"]")
    except FileNotFoundError:
        return False
