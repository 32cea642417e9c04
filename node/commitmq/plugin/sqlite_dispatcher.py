"""A dispatcher whose state is a SQLite database, written in one transaction with the position that it reaches.

Records come again after a crash. The position is committed together with the changes of its records. So records that
were taken before are known by their offset and omitted: nothing counts twice, and nothing is missing.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from commitmq.plugin.hookspecs import DispatcherView
    from commitmq.store.log.dispatch_batch import DispatchBatch

_PROGRESS: Final = """
CREATE TABLE IF NOT EXISTS commitmq_progress (
    only INTEGER PRIMARY KEY CHECK (only = 0), began INTEGER, position INTEGER, timestamp INTEGER
)
"""


class SqliteDispatcher(ABC):
    """A base class: give it a ``schema``, and let :meth:`take` write the data of a batch. See
    :class:`.hookspecs.Dispatcher`.

    Within ``take``, ``drop_topic`` and ``clear`` a transaction is open on ``self.database``: use ``execute`` and
    ``executemany``, and do not use BEGIN, COMMIT and ``executescript``. An exception undoes the transaction. A method
    ``query(request)`` of your own answers ``Admin.dispatcher_query``.
    """

    schema: ClassVar[str] = ""
    """SQL that creates your missing tables (``CREATE TABLE IF NOT EXISTS …``); it runs at every start."""
    file_name: ClassVar[str] = "state.db"
    """The database's file name in the dispatcher's folder."""

    view: DispatcherView
    database: sqlite3.Connection

    @abstractmethod
    def take(self, batch: DispatchBatch) -> None:
        """Write the data of ``batch``. It is not empty, and has no record that was taken before."""

    def drop_topic(self, topic: str) -> None:  # noqa: B027
        """Drop the data of a deleted topic; nothing by default. Its records may come once more in a replay:
        ``self.view.topics_deleted()`` says below which physical offset.
        """

    def clear(self) -> None:
        """Drop all data, before the log is read again from its first record: by default every row of your tables."""
        tables = self.database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
            " AND name != 'commitmq_progress'"
        ).fetchall()
        for (name,) in tables:
            self.database.execute('DELETE FROM "{}"'.format(name.replace('"', '""')))

    @classmethod
    def path(cls, view: DispatcherView) -> Path:
        return Path(view.folder) / cls.file_name

    # ------------------------------------------------------------ called by the node

    def open(self, view: DispatcherView) -> int:
        self.view = view
        view.folder.mkdir(parents=True, exist_ok=True)
        # This class begins and ends the transactions; a commit is on the device when it returns.
        self.database = sqlite3.connect(self.path(view), isolation_level=None)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.execute("PRAGMA synchronous = FULL")
        self.database.executescript(self.schema)
        self.database.execute(_PROGRESS)
        self.database.execute(
            "INSERT OR IGNORE INTO commitmq_progress VALUES (0, ?, ?, 0)", (view.position, view.position)
        )
        found = self.database.execute("SELECT began, position, timestamp FROM commitmq_progress").fetchone()
        self._began, self._position, self._timestamp = (int(one) for one in found)
        return self._position

    def dispatch(self, batch: DispatchBatch) -> None:
        batch = batch.after(self._position)
        timestamp = int(batch.rows["store_timestamp"][-1]) if len(batch) else self._timestamp
        with self._transaction(self._began, batch.end, timestamp):
            if len(batch):
                self.take(batch)

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        return self._position, self._timestamp

    def truncate(self, offset: int) -> None:
        """Go back to where the data began, which means to begin again: single records cannot be taken out of the data."""
        if offset >= self._position:
            return
        if offset > self._began:
            raise NotImplementedError
        with self._transaction(offset, offset, 0):
            self.clear()

    def expire(self, min_offset: int) -> None:  # noqa: B027
        """Keep the data of expired messages, by default."""

    def forget(self, topic: str) -> None:
        with self._transaction(self._began, self._position, self._timestamp):
            self.drop_topic(topic)

    def close(self) -> None:
        self.database.close()

    @contextmanager
    def _transaction(self, began: int, position: int, timestamp: int) -> Iterator[None]:
        self.database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.database.execute(
                "UPDATE commitmq_progress SET began = ?, position = ?, timestamp = ?", (began, position, timestamp)
            )
            self.database.execute("COMMIT")
        except BaseException:
            if self.database.in_transaction:
                self.database.execute("ROLLBACK")
            raise
        self._began, self._position, self._timestamp = began, position, timestamp
