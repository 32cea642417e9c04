"""The topics of a store in its files: RocketMQ's ``config/topics.json``, a journal of the changes since, and two files
of deleted topics.

Every change goes to ``commitmq/topics.journal`` (:mod:`commitmq.store.metadata.journal`) before any process hears of
it, so making one of 100,000 topics costs as much as making the first. A record is a list: the TOPICS_VERSION under
which the other processes hear of it, the table's data version after it (``[counter, stateVersion, timestamp]``), then
the changes, ``["put", {entry of topics.json}]`` or ``["drop", name, incarnation]``. Replaying one twice is the same as
once.

``topics.json`` is written whole at an orderly stop and, while the node runs, ``topics.snapshot_interval_ms`` after the
last time, or 50 times as long as writing it takes if that is longer. So a RocketMQ that takes over a store after a
crash knows all topics except those of that last interval; it still has their messages, and recreates a topic when a
client sends to it. When the node comes back, the journal is merged with the file that RocketMQ left (which the journal
does not know by name):

* a topic that only the journal has exists again;
* a topic without an incarnation is as RocketMQ wrote it;
* for another topic that both have, the greater incarnation counts, and with equal ones RocketMQ's entry;
* a topic that was deleted here, and that RocketMQ still had in the same incarnation, is deleted.

Other processes than the coordinator read these files with :class:`TopicReader`: the snapshot once, and from then on
only new records of the journal. Each journal names the one that it continues, which a reader keeps open: it reads the
old journal to its end and continues with the next, and reads everything again only when it has missed a whole journal.

Deleted topics are in two files in ``commitmq/``.

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
is written when the log has already reached it, so only a power cut, or an operator who cuts the log, can leave it
behind the end. Every recovery lowers such tombstones to the end that it found (:func:`lower_tombstones`).

While a node runs, only the coordinator writes both files, in RocketMQ's JSON style, with a ``.bak``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from commitmq.errors import StoreError
from commitmq.files import disk
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.journal import HEADER_BYTES, Journal, Replay, record_at, store_error
from commitmq.store.metadata.json_config import DataVersion
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable

_ATTEMPTS = 50  # to read files that the coordinator is replacing; each replacement takes milliseconds at least


class TopicChange(NamedTuple):
    """``topic`` is the new entry of ``name``, None for a deleted topic; ``incarnation`` is the entry's, old or new."""

    name: str
    topic: TopicConfig | None
    incarnation: int


class TopicTurn(NamedTuple):
    """One record of the journal."""

    topics_version: int
    data_version: DataVersion
    changes: tuple[TopicChange, ...]


class TopicsJournal(Journal[TopicTurn]):
    """The topics of a store in their files. Each record is one turn."""

    kind = "topics journal"
    place = "topics"
    snapshot_name = "topics.json"

    @classmethod
    def encode(cls, changes: Sequence[TopicTurn]) -> list[Any]:
        (turn,) = changes
        version = turn.data_version
        entries = [
            ["put", one.topic.to_json()] if one.topic is not None else ["drop", one.name, one.incarnation]
            for one in turn.changes
        ]
        return [turn.topics_version, [version.counter, version.state_version, version.timestamp], *entries]

    @classmethod
    def decode(cls, payload: list[Any]) -> list[TopicTurn]:
        topics_version, numbers, *entries = payload
        return [TopicTurn(int(topics_version), DataVersion(*map(int, numbers)), tuple(map(_change_from_json, entries)))]


def _change_from_json(entry: Any) -> TopicChange:
    match entry:
        case ["put", dict(members)]:
            topic = TopicConfig.from_json(str(members["topicName"]), members)
            return TopicChange(topic.name, topic, topic.incarnation)
        case ["drop", str(name), int(incarnation)]:
            return TopicChange(name, None, incarnation)
    raise ValueError(f"unknown change {entry!r}")


def journal_path(layout: StoreLayout) -> Path:
    return layout.own / "topics.journal"


def snapshot_path(layout: StoreLayout) -> Path:
    return layout.config / "topics.json"


def load_snapshot(layout: StoreLayout) -> tuple[TopicTable, str]:
    """``topics.json`` or its ``.bak``, and its name; an empty table when neither exists. Raises StoreError."""
    path = snapshot_path(layout)
    data, name = json_config.load_named(path, needed="topics that are gone then keep their messages when created again")
    return TopicTable.from_json(data or {}, path), name


def replay(table: TopicTable, journal: Replay[TopicTurn], snapshot: str) -> None:
    """Merge the journal into ``table``, a snapshot of this name, by the module's rules."""
    turns = journal.since(snapshot)
    if turns is not None:
        for turn in turns:
            for change in turn.changes:
                apply(table, change)
            table.version = turn.data_version
        return
    last = {change.name: change for turn in journal.changes for change in turn.changes}
    for change in last.values():
        there = table.topics.get(change.name)
        if there is None:
            counts = change.topic is not None
        elif not there.incarnation:
            counts = False  # RocketMQ made the topic, or has changed it since
        else:
            counts = there.incarnation < change.incarnation + (change.topic is None)
        if counts:
            apply(table, change)
    for turn in journal.changes[-1:]:
        # No incarnation may be assigned twice, and the timestamp covers those of deleted topics.
        known, ours = table.version, turn.data_version
        table.version = DataVersion(
            max(known.counter, ours.counter) + 1, known.state_version, max(known.timestamp, ours.timestamp)
        )


def apply(table: TopicTable, change: TopicChange) -> None:
    """Apply one change to ``table``, without counting it in the version."""
    if change.topic is None:
        table.topics.pop(change.name, None)
    else:
        table.topics[change.name] = change.topic


def load_topics(layout: StoreLayout) -> TopicTable:
    """All topics of a store without a running node. Raises StoreError."""
    table, name = load_snapshot(layout)
    journal = TopicsJournal.read(journal_path(layout))
    if journal is not None:
        replay(table, journal, name)
    return table


class TopicReader:
    """Follows the topics of a store with a running coordinator."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        self._fd = -1
        self._file_id = ""
        self._position = 0
        self._sequence = 0

    def everything(self) -> TopicTable:
        """All topics as they are now; :meth:`changes` continues from here. Raises StoreError."""
        for _ in range(_ATTEMPTS):
            table = self._attempt()
            if table is not None:
                return table
        raise StoreError(
            "the topics' files changed while they were read, again and again", path=snapshot_path(self._layout)
        )

    def _attempt(self) -> TopicTable | None:
        """None when the coordinator replaced the journal in the meantime."""
        path = journal_path(self._layout)
        self.close()
        try:
            self._fd = disk.open_file(path, os.O_RDONLY, "journal")
        except FileNotFoundError:
            table, _ = load_snapshot(self._layout)  # no CommitMQ coordinator has served this store yet
            return table if not path.exists() else None
        table, name = load_snapshot(self._layout)
        head, turns, marks = self._read_on()
        if not self._is_current(path):
            return None
        self._file_id = str(head.get("id", ""))
        replay(table, Replay(str(head["base"]), [[turn] for turn in turns], marks, head, 0, None), name)
        return table

    def changes(self, topics_version: int) -> list[TopicChange] | None:
        """The last change of each name since the last call, of those that are published up to ``topics_version``. None:
        everything must be read again. It must also be read again after a StoreError.
        """
        if self._fd < 0:
            return None
        try:
            return self._changes(journal_path(self._layout), topics_version)
        except BaseException as error:
            self.close()  # changes that were read but not returned would be missed
            if isinstance(error, OSError):
                raise store_error(error, "cannot read the topics journal", journal_path(self._layout)) from error
            raise

    def _changes(self, path: Path, topics_version: int) -> list[TopicChange] | None:
        found: dict[str, TopicChange] = {}
        while not self._is_current(path):
            # Only the journal that continues this one says how many of this one's records count.
            following = disk.open_file(path, os.O_RDONLY, "journal")
            head = _head_of(following)
            continues = head.get("continues") or {}
            if continues.get("id") != self._file_id or int(continues.get("records", -1)) < self._sequence:
                os.close(following)
                return None
            self._collect(found, int(continues["records"]), None)
            if self._sequence != int(continues["records"]):
                os.close(following)
                return None
            os.close(self._fd)
            self._fd, self._file_id = following, str(head.get("id", ""))
            self._position = self._sequence = 0
            self._read_on(1)
        self._collect(found, None, topics_version)
        return list(found.values())

    def _collect(self, found: dict[str, TopicChange], records: int | None, topics_version: int | None) -> None:
        _, turns, _ = self._read_on(records, topics_version)
        for turn in turns:
            for change in turn.changes:
                found.pop(change.name, None)
                found[change.name] = change

    def _read_on(
        self, records: int | None = None, topics_version: int | None = None
    ) -> tuple[dict[str, Any], list[TopicTurn], dict[str, int]]:
        """The records behind the last one read: the head, turns, marks. An incomplete record ends them."""
        data = os.pread(self._fd, max(0, os.fstat(self._fd).st_size - self._position), self._position)
        head: dict[str, Any] = {}
        turns: list[TopicTurn] = []
        marks: dict[str, int] = {}
        at = 0
        while (records is None or self._sequence < records) and (record := record_at(data, at)) is not None:
            if record[0] != self._sequence:
                break
            content = orjson.loads(record[1])
            if isinstance(content, list):
                (turn,) = TopicsJournal.decode(content)
                if topics_version is not None and turn.topics_version > topics_version:
                    break  # not acknowledged yet, and perhaps never
                turns.append(turn)
            elif "snapshot" in content:
                marks[str(content["snapshot"])] = len(turns)
            else:
                head = content
            at += HEADER_BYTES + len(record[1])
            self._sequence += 1
        self._position += at
        return head, turns, marks

    def _is_current(self, path: Path) -> bool:
        """Whether the journal that is open here still has the name."""
        try:
            there, here = os.stat(path), os.fstat(self._fd)
        except FileNotFoundError:
            return True  # one file always has the name, so an operator removed it
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._position, self._sequence = -1, 0, 0


def _head_of(fd: int) -> dict[str, Any]:
    data = os.pread(fd, 65_536, 0)
    record = record_at(data, 0)
    content = orjson.loads(record[1]) if record is not None else {}
    return content if isinstance(content, dict) else {}


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
