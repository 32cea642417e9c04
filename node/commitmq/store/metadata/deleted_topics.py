"""Deleted topics, as a store remembers them: two files in ``commitmq/``.

``deleting_topics.json``, the *endings*: ``{name: incarnation}``
    Topics whose deletion is decided but not finished. From the moment an entry is durable that incarnation, and every
    older one of the name, no longer exists: whatever ``topics.json`` says, no client may send to it or read it, and no
    topic of the name can be created until the entry is gone. The incarnation (``storage.created``, see
    :mod:`commitmq.store.metadata.topic_config`) is stored so that a reader that sees this file and another generation
    of ``topics.json`` never takes the next topic of the name for the ending one.

``deleted_topics.json``, the *tombstones*: ``{name: physical offset}``
    The place in the log where the last deleted incarnation of a name ended: its records are below, those of every later
    incarnation at or above. A tombstone stays for as long as records or queue files of the old incarnation may exist.

A tombstone is never behind the log's end: otherwise records appended below it later would belong to no incarnation. It
is written when the log has already reached it, so only a power cut, or a person who cuts the log, can leave it behind
the end. Every recovery lowers such tombstones to the end that it found (:func:`lower_tombstones`).

While a node runs, only the coordinator writes both files, in RocketMQ's JSON style, with a ``.bak``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from commitmq.errors import StoreError
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config

NO_END: Final = 1 << 62
"""The tombstone of a topic that is still ending: its end is not known yet, but none of its records may be used."""


def load_tombstones(layout: StoreLayout) -> dict[str, int]:
    """Physical offsets by topic. Raises StoreError when neither generation of the file can be read."""
    return _load(layout.tombstones)


def load_endings(layout: StoreLayout) -> dict[str, int]:
    """Incarnations by topic. Raises StoreError when neither generation of the file can be read."""
    return _load(layout.endings)


class WatchedTable:
    """One of the two files, for a process that checks it at every change of a topic; those seldom change this file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._table: dict[str, int] = {}

    def load(self) -> dict[str, int]:
        """The file's content; the same object while the file is unchanged. Raises StoreError."""
        try:
            # The file is only ever replaced, so different content means a different file.
            there = os.stat(self._path)
            seen = (there.st_ino, there.st_mtime_ns, there.st_size)
        except FileNotFoundError:
            seen = None
        if seen is None or seen != self._seen:
            self._table, self._seen = _load(self._path), seen
        return self._table


def lower_tombstones(layout: StoreLayout, log_end: int) -> list[str]:
    """Lower tombstones behind the log's end to it, durably; returns their names. No other process may be alive."""
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
