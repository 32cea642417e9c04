"""The topic table on disk: a journal of changes, and ``config/topics.json``, which follows at intervals.

At 100,000 topics ``topics.json`` is 25 MB. See :mod:`commitmq.store.metadata.topic_files`.
"""

from __future__ import annotations

import itertools

from commitmq.coordination.pace import Pace
from commitmq.errors import StoreError
from commitmq.log import get_log
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from commitmq.store.metadata.topic_config import TopicTable
from commitmq.store.metadata.topic_files import (
    TopicsJournal,
    TopicTurn,
    journal_path,
    load_snapshot,
    replay,
    snapshot_path,
)

_PREPARED_AT_ONCE = 1_000
_MAX_JOURNAL_BYTES = 32 * 1024 * 1024  # a start reads the whole journal
_log = get_log("coordinator")


class TopicStorage:
    """Both files of one table. A change is durable when :meth:`append` returns."""

    def __init__(
        self, layout: StoreLayout, table: TopicTable, journal: TopicsJournal, *, snapshot_interval_ms: int
    ) -> None:
        """Use :meth:`load`."""
        self.table = table
        self.journal = journal
        self._path = snapshot_path(layout)
        self._pace = Pace(snapshot_interval_ms)
        self._unprepared = iter(list(table.topics.items()))
        self._is_dirty = False  # the journal has changes that topics.json lacks

    @classmethod
    def load(cls, layout: StoreLayout, *, snapshot_interval_ms: int) -> TopicStorage:
        """Load a store's topics. Raises StoreError for files that cannot be read in either generation.

        A full disk is no error here: topics are served, and changes are refused until :meth:`recover` succeeds.
        """
        table, base = load_snapshot(layout)
        path = journal_path(layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = TopicsJournal.open(path)
        if found is None:
            try:
                journal = TopicsJournal.create(path, base)
            except StoreError as error:
                _log.error("topics cannot be changed", error=str(error))
                journal = TopicsJournal.absent(path)
        else:
            journal, content = found
            if content.torn_copy is not None:
                _log.warning("torn tail of the topics journal cut", bytes=content.torn_bytes, copy=content.torn_copy)
            if content.since(base) is None:
                sentence = "topics.json was not written by this node last: it counts, with the changes of the journal"
                _log.warning(sentence, changes=len(content.changes))
            replay(table, content, base)
            # The journal's last record may have been read from the page cache of a machine whose disk never got it, and
            # no durable record may be appended behind such a record.
            journal.failed = bool(content.changes) or content.base != base
        return cls(layout, table, journal, snapshot_interval_ms=snapshot_interval_ms)

    def try_recover(self) -> None:
        """At the end of a start: :meth:`recover` when the journal is not to be appended to. A failure is logged."""
        if self.failed and self.journal.size_bytes:
            try:
                self.recover()
            except StoreError as error:
                _log.error("topics cannot be changed", error=str(error))

    def append(self, turn: TopicTurn) -> None:
        """Make the changes of a turn durable in the journal. Raises StoreError."""
        self.journal.append([turn])
        self._is_dirty = True

    @property
    def failed(self) -> bool:
        """True while changes are refused because a write or sync failed."""
        return self.journal.failed

    def next_snapshot_ms(self) -> int | None:
        """When :meth:`snapshot` has something to do, in monotonic ms; None: not before something changes."""
        return self._pace.next_ms if self._is_dirty and not self.failed else None

    def snapshot(self, now_ms: int, *, at_once: bool = False) -> None:
        """Write ``topics.json`` if something changed and it is time, and begin a new journal. Raises StoreError.

        Call it with nothing staged: the file's content must survive a crash.
        """
        # After a start all texts have to be encoded, which would take a second at 100,000 topics: each call encodes
        # some, and the first file waits for the last of them.
        some = list(itertools.islice(self._unprepared, _PREPARED_AT_ONCE))
        self.table.prepare(some)
        is_due = (not some and self._pace.is_due(now_ms)) or self.journal.size_bytes >= _MAX_JOURNAL_BYTES
        if self._is_dirty and not self.failed and (at_once or is_due):
            self.recover()

    def recover(self) -> None:
        """Write both files again from the acknowledged state. Raises StoreError. After a failure topics can be changed
        again once it has succeeded.
        """
        with self._pace:
            data = json_config.encode(self.table.dumps())
            self.journal.begin_anew(json_config.name_of(data), lambda: json_config.replace_bytes(self._path, data))
        self._is_dirty = False

    def close(self) -> None:
        """Leave ``topics.json`` as RocketMQ expects it. Raises StoreError; the journal has everything."""
        try:
            if self._is_dirty or self.failed:
                self.recover()
        finally:
            self.journal.close()
