"""What a store remembers of itself: ``commitmq/store.json``, its id and the sizes of its files, and ``commitmq/epoch``, how
often a node was started on it, as a decimal number and a line feed.

    version     1
    store_id    32 hex digits, random, made once by the first start: clients and jobs identify a store by it
    sizes       by the configuration's names ("commit_log.segment_bytes": 67108864, ...), of present or future files
    crc32       of the members above, so that a damaged file is not taken for one that contradicts the store

Only a start whose recovery succeeded writes this file: a refused start must not make the next one believe that the
store has other sizes. A store without the file (RocketMQ's, or one of an earlier version) works as well: its sizes are
found in its files (:mod:`commitmq.store.geometry`), and the next start writes it. A copied store folder keeps its id,
as its copied messages keep theirs; to use both copies as different stores, remove the file from one of them.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from commitmq.errors import StoreError
from commitmq.files import atomic_file
from commitmq.files.disk_space import kind_of
from commitmq.store.layout import StoreLayout

_VERSION: Final = 1
_ID_DIGITS: Final = 32
_MOST_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StoreFile:
    """The meaningful members of the file; see the module's text."""

    store_id: str
    sizes: Mapping[str, int]

    @classmethod
    def load(cls, path: Path) -> StoreFile | None:
        """The file's content; None without the file. Raises ValueError with the reason if it cannot be read or trusted."""
        try:
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from error
        try:
            members = json.loads(data)
            found = cls(members["store_id"], members["sizes"])
            version, crc = members["version"], members["crc32"]
            sizes = found.sizes.items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError("no node writes such a file") from error
        if version != _VERSION:
            raise ValueError(f"it has version {version!r:.20}, and this program knows {_VERSION}")
        if crc != found._crc():
            raise ValueError("its checksum does not match")
        if not _is_id(found.store_id) or not all(type(size) is int and size > 0 for _, size in sizes):
            raise ValueError("no node writes such a file")
        return found

    def save(self, path: Path) -> None:
        """Replace ``path``, durably. Raises DiskFullError or StoreError; then ``path`` has the old or the new content."""
        text = json.dumps({**self._members(), "crc32": self._crc()}, indent=1) + "\n"
        try:
            atomic_file.replace(path, text.encode(), "store_file")
        except OSError as error:
            kind = kind_of(error)
            raise kind(f"cannot write the store's id and sizes: {error.strerror}", path=path) from error

    def _members(self) -> dict[str, Any]:
        return {"version": _VERSION, "store_id": self.store_id, "sizes": dict(self.sizes)}

    def _crc(self) -> int:
        return zlib.crc32(json.dumps(self._members(), sort_keys=True).encode())


def new_id() -> str:
    return uuid.uuid4().hex


def store_id(store: Path | str) -> str | None:
    """The id of the store in folder ``store``; None if this version never started it. A copied store has the same id."""
    try:
        found = StoreFile.load(StoreLayout(Path(store)).store_file)
    except ValueError:
        return None
    return None if found is None else found.store_id


def _is_id(text: object) -> bool:
    return isinstance(text, str) and len(text) == _ID_DIGITS and all(digit in "0123456789abcdef" for digit in text)


_MOST: Final = 1 << 62


def read_epoch(path: Path) -> int:
    """The number in ``path``; 0 without the file. Raises StoreError."""
    try:
        if not 0 <= (epoch := int(path.read_text(encoding="ascii"))) < _MOST:
            raise ValueError("it has more than 62 bits")
        return epoch
    except FileNotFoundError:
        return 0
    except ValueError as error:
        sentence = "the count of starts is no such number; write one at least as high as before"
        raise StoreError(sentence, path=path) from error
