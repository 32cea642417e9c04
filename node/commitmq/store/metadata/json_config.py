r"""Reads and writes RocketMQ's JSON config files (spec 1.4).

RocketMQ's dialect: map keys that are integers have no quotes (``{0:123}``), files are indented by tabs without a space
after a colon, and an empty map still takes three lines. :func:`loads` returns such keys as ``int``, and :func:`dumps`
writes ``int`` keys the same way, so that reading a file and writing it again gives the same bytes.

A change never leaves less than one complete generation on disk: the new text is complete and synced under another name
before the current file becomes ``.bak`` and the new one replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from commitmq.errors import StoreError
from commitmq.files import atomic_file, disk
from commitmq.files.disk import DamagedFileError
from commitmq.files.disk_space import kind_of

# A string is matched as a whole, so that digits and braces inside it are never taken for a key.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)
# An integer key is passed to the JSON parser as a string that begins with this mark; a real key that begins with NUL
# gets a second NUL in front, so that the two cannot be confused.
_MARK = "\x00i"
_ESCAPED_NUL = '"\\u0000'


@dataclass(slots=True)
class DataVersion:
    """Generation of a config file: ``counter`` grows with every change, ``timestamp`` (ms) is that of the last change."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def advance(self) -> None:
        """Count one change, made now; the timestamp never goes back, even if the clock does."""
        self.counter += 1
        self.timestamp = max(self.timestamp, time.time_ns() // 1_000_000)

    @classmethod
    def from_json(cls, data: Any) -> DataVersion:
        """Missing or malformed members count as 0."""
        members = data if isinstance(data, dict) else {}
        numbers = [members.get(name) for name in ("counter", "stateVersion", "timestamp")]
        return cls(*(number if type(number) is int else 0 for number in numbers))

    def to_json(self) -> dict[str, int]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}


class Table(ABC):
    """The content of a config file of RocketMQ's."""

    __slots__ = ()

    @classmethod
    def load(cls, path: Path) -> Self:
        """The table in ``path`` or its ``.bak``; empty when neither exists. Raises StoreError."""
        return cls.from_json(load(path) or {}, path)

    @classmethod
    @abstractmethod
    def from_json(cls, data: Any, path: Path | None = None) -> Self:
        """Raises StoreError."""


@contextlib.contextmanager
def rocketmq_shape(what: str, path: Path | None) -> Iterator[None]:
    """Errors of the shape of ``path`` become a StoreError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{what} are not in RocketMQ's shape: {error}", path=path) from error


def loads(text: str) -> Any:
    """Parse ``text``; unquoted integer keys become ``int``. Raises ValueError for text outside this dialect."""
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
    """A member's text as :func:`dumps` would write it at its place; for files whose members seldom change."""

    __slots__ = ()


def encode_members(members: Mapping[str, Any], depth: int) -> Encoded:
    """The text between the braces of a map with ``members`` that is nested ``depth`` maps deep (0: the file itself)."""
    parts: list[str] = []
    _write(members, depth + 1, parts)
    return Encoded("".join(parts)[1 : -(depth + 2)])


def join_members(members: Iterable[Encoded], depth: int) -> Encoded:
    """A whole map, ``depth`` deep, from members that :func:`encode_members` made."""
    indent = "\n" + "\t" * depth
    return Encoded("{" + (",".join(members) or indent + "\t") + indent + "}")


class MemberTexts:
    """The texts of a map's members, each encoded once: a member is changed by replacing it, never in place. So writing
    a file again costs little more than its bytes, even with many members.
    """

    def __init__(self, depth: int, encode: Callable[[str, Any], Encoded | None] = lambda _name, _member: None) -> None:
        """``depth``: how many maps deep the map is nested. ``encode`` may be faster than :func:`encode_members`."""
        self._depth = depth
        self._encode = encode
        self._texts: dict[str, tuple[Any, Encoded]] = {}

    def join(self, members: Mapping[str, Any]) -> Encoded:
        """The whole map. Members have ``to_json``."""
        if len(self._texts) > 2 * len(members) + 64:
            self._texts = {name: one for name, one in self._texts.items() if name in members}
        return join_members((self._text(name, one) for name, one in members.items()), self._depth)

    def prepare(self, members: Iterable[tuple[str, Any]]) -> None:
        """Encode ``members`` now, instead of all at once later."""
        for name, member in members:
            self._text(name, member)

    def _text(self, name: str, member: Any) -> Encoded:
        known = self._texts.get(name)
        if known is not None and known[0] is member:
            return known[1]
        text = self._encode(name, member) or encode_members({name: member.to_json()}, self._depth)
        self._texts[name] = member, text
        return text


# Plain text in quotes, as most names and values are, needs no escapes.
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*').fullmatch


def scalar(value: Any) -> str:
    """A text, number, truth value or null, as :func:`dumps` writes it."""
    kind = type(value)
    if kind is str and _PLAIN(value):
        return f'"{value}"'
    if kind is int:
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def _write(value: Any, depth: int, parts: list[str]) -> None:
    kind = type(value)
    if kind is Encoded:
        parts.append(value)
    elif kind is str or kind is int or kind is bool:
        parts.append(scalar(value))
    elif kind is dict or isinstance(value, Mapping):
        indent = "\n" + "\t" * depth
        if not value:
            parts.append("{" + indent)
        for number, (name, member) in enumerate(value.items()):
            key = str(name) if isinstance(name, int) else scalar(name)
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
        parts.append(scalar(value))


def load(path: Path) -> Any | None:
    """The content of :func:`load_named` without the name."""
    return load_named(path)[0]


def load_table(path: Path) -> dict[Any, Any] | None:
    """:func:`load` of a file that has a map. Raises DamagedFileError for another content, too."""
    content = load(path)
    if isinstance(content, dict):
        return content
    found = loaded_path(path)
    if content is None and not found.exists():
        return None
    raise DamagedFileError("it has no map", path=found)


def name_of(data: bytes) -> str:
    """The name of the snapshot with these bytes in a journal."""
    return hashlib.sha256(data).hexdigest()[:32]


def load_named(path: Path, *, journal: Path | None = None, needed: str = "") -> tuple[Any | None, str]:
    """The content of ``path`` and its name, as :func:`name_of` makes it; of its ``.bak`` when the file is missing; None
    if neither exists. Changes nothing on disk.

    Raises StoreError for an existing file that cannot be read, DamagedFileError for its content. A crash of this node
    never leaves one: the content was synced before it got its name. Only an operator can decide to continue with less
    than was acknowledged, and the message names everything that must be done for it: a ``journal`` that builds on the
    file and is refused without it must be removed too; and a file without which a start is refused is not removed but
    emptied, followed by the consequence that ``needed`` names.
    """
    backup = backup_path(path)
    try:
        return _generation(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        sentence = f"the config file is damaged: {error}. {_way_out(path, journal, needed)}"
        raise _unreadable(error, sentence, path) from error
    try:
        return _generation(backup)
    except FileNotFoundError:
        return None, name_of(b"")
    except (OSError, ValueError) as error:
        sentence = f"{path.name} is missing, and its previous generation is damaged: {error}. "
        raise _unreadable(error, sentence + _way_out(path, journal, needed), backup) from error


def _unreadable(error: Exception, sentence: str, path: Path) -> StoreError:
    """(A folder in the place of the file is never read later: it is damage.)"""
    is_of_now = isinstance(error, OSError) and not isinstance(error, IsADirectoryError)
    return StoreError(sentence, path=path) if is_of_now else DamagedFileError(sentence, path=path)


def _way_out(path: Path, journal: Path | None, needed: str) -> str:
    """How to continue without ``path``, which is missing or damaged; see :func:`load_named`."""
    backup = backup_path(path)
    is_whole = False
    with contextlib.suppress(OSError, ValueError):
        _generation(backup)
        is_whole = True
    if needed:
        if is_whole:
            return f"Put back a copy: its previous generation, {backup.name}, is whole"
        return f"Put back a copy, or write {{}} into it and start; {needed}"
    gone = [path, *([backup] if not is_whole else []), *([journal] if journal is not None else [])]
    names = " and ".join(str(one) for one in gone if one.exists())
    if is_whole:
        then = f"its previous generation, {backup.name}, is whole, and the next start then continues with it"
    else:
        then = "the next start then continues without it"
    return f"Put back a copy, or remove {names}: {then}"


def _generation(path: Path) -> tuple[Any, str]:
    """The content of one file and its name. Raises OSError, or ValueError with the reason."""
    data = path.read_bytes()
    text = data.decode()
    if not text.strip():
        raise ValueError("it is empty")
    return _loads_quickly(data, text), name_of(data)


def _loads_quickly(data: bytes, text: str) -> Any:
    """:func:`loads`, by a faster parser if the text is standard JSON: no key is an integer without quotes."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def persist(path: Path, data: Any) -> None:
    """Make ``data`` the content of ``path``, durably; the previous content is in ``.bak`` afterwards.

    Raises DiskFullError (``path``, or its ``.bak`` if it is missing, has the previous content) or StoreError (when only
    the folder's sync failed, ``path`` has the new content, which a power cut may take back).
    """
    replace_text(path, dumps(data))


def replace_text(path: Path, text: str) -> None:
    """:func:`persist` for a text that is already encoded."""
    replace_bytes(path, encode(text))


def encode(text: str) -> bytes:
    """The bytes of a file. Text that is not Unicode becomes "?", as in Java."""
    return text.encode(errors="replace")


def replace_bytes(path: Path, data: bytes) -> None:
    """:func:`persist` for the bytes of the file."""
    is_there = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(atomic_file.write_beside(path, data, "json"))
        atomic_file.take_name(path, "json", before=lambda: _keep_previous(path))
        is_there = True
        disk.sync_folder(path.parent, "json")
    except OSError as error:
        if is_there:
            sentence = f"the config file has its new content, and a power cut may take it back: {error.strerror}"
            raise StoreError(sentence, path=path) from error
        kind = kind_of(error)
        raise kind(f"cannot write the config file: {error.strerror}", path=path) from error


def _keep_previous(path: Path) -> None:
    """RocketMQ's convention (spec 1.4): the previous generation becomes ``.bak``, for a load without the file.

    The new generation's name is durable first: between the two renames a power cut leaves ``.new``, by which a start tells
    this from a table that somebody deleted.
    """
    if _looks_whole(path):
        atomic_file.make_way(backup_path(path))
        disk.sync_folder(path.parent, "json_backup")
        disk.replace(path, backup_path(path), "json_backup")


def loaded_path(path: Path) -> Path:
    """The file whose content :func:`load` returns for ``path``: its previous generation when it is missing."""
    return path if path.exists() else backup_path(path)


def backup_path(path: Path) -> Path:
    """The path of the previous generation of ``path``."""
    return path.with_name(path.name + ".bak")


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
