"""What a store remembers of topics that were deleted: two files in ``commitmq/``.

``deleting_topics.json``, the *endings*: ``{name: incarnation}``
    Topics whose deletion is decided and not finished. From the moment an entry is durable nothing of that incarnation,
    or of an older one of the name, exists: whatever ``topics.json`` says, nobody may send to it or read it, and no topic
    of the name can be created until the entry is gone. The incarnation (``storage.created``, see
    :mod:`commitmq.store.metadata.topic_config`) is there so that a reader that sees this file and another generation of
    ``topics.json`` never takes the next topic of the name for the one that ends.

``deleted_topics.json``, the *tombstones*: ``{name: physical offset}``
    Where in the log the last incarnation of a name that was deleted ended: its records lie below, those of every later
    incarnation at or above. It stays for as long as records or queue files of the old incarnation may be found.

A tombstone never lies behind the log's end: records that come to lie below it later would be nobody's. It is written when
the log had got that far, so only a power cut, or a person who cuts the log, can make it so, and every recovery lowers what
lies behind the end that it found (:func:`lower_tombstones`).

Both are written by the coordinator alone while a node runs, in RocketMQ's way of writing JSON, with a ``.bak``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config

NO_END: Final = 1 << 62
"""Stands for the tombstone of a topic that is ending: where it ends is not known yet, but nothing of it is left."""


def load_tombstones(layout: StoreLayout) -> dict[str, int]:
    """Physical offsets by topic. Raises StoreError when neither generation of the file can be read."""
    return _load(layout.tombstones)


def load_endings(layout: StoreLayout) -> dict[str, int]:
    """Incarnations by topic. Raises StoreError when neither generation of the file can be read."""
    return _load(layout.endings)


class WatchedTable:
    """One of the two files for who looks at it at every change of a topic, which is seldom one of this file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._table: dict[str, int] = {}

    def load(self) -> dict[str, int]:
        """The file's content, the same object as long as the file is the same. Raises StoreError."""
        try:
            # It is only ever replaced, so another content is another file.
            there = os.stat(self._path)
            seen = (there.st_ino, there.st_mtime_ns, there.st_size)
        except FileNotFoundError:
            seen = None
        if seen is None or seen != self._seen:
            self._table, self._seen = _load(self._path), seen
        return self._table


def lower_tombstones(layout: StoreLayout, log_end: int) -> list[str]:
    """Lower what lies behind the log's end to it, durably; returns the names. While no other process of the node lives."""
    tombstones = load_tombstones(layout)
    names = sorted(name for name, offset in tombstones.items() if offset > log_end)
    if names:
        json_config.persist(layout.tombstones, {name: min(offset, log_end) for name, offset in tombstones.items()})
    return names


def _load(path: Path) -> dict[str, int]:
    data = json_config.load(path) or {}
    try:
        return {str(name): int(number) for name, number in data.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(f"not a table of topics and numbers: {error}", path=path) from error
