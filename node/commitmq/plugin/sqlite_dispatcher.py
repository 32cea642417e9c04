"""A dispatcher whose state is a SQLite database, written in one transaction with the position that it reaches.

Records come again after a crash. Because the position is committed together with what the records changed, what was taken is
known by its offset and left out: nothing counts twice, and nothing is missing.
"""

from __future__ import annotations

import sqlite3
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


class SqliteDispatcher:
    """To inherit from: give a ``schema``, and :meth:`take` what a batch means. See :class:`.hookspecs.Dispatcher`.

    Within ``take``, ``drop_topic`` and ``clear`` a transaction is open on ``self.database``: change what you like with
    ``execute`` and ``executemany``, and leave BEGIN, COMMIT and ``executescript`` alone. What they raise undoes it.
    A method ``query(request)`` of your own answers ``Admin.dispatcher_query``.
    """

    schema: ClassVar[str] = ""
    """SQL that makes your tables where they are missing (``CREATE TABLE IF NOT EXISTS …``); runs at every start."""
    file_name: ClassVar[str] = "state.db"
    """In the dispatcher's folder."""

    view: DispatcherView
    database: sqlite3.Connection

    def take(self, batch: DispatchBatch) -> None:
        """Write what ``batch`` means; it is not empty, and has no record that was taken before."""
        raise NotImplementedError

    def drop_topic(self, topic: str) -> None:
        """Forget what belongs to a topic that was deleted; nothing by default. Its records may come once more in a replay:
        ``self.view.topics_deleted()`` says below which physical offset.
        """

    def clear(self) -> None:
        """Forget everything, before the log is read once more from where it began: by default every row of your tables."""
        tables = self.database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
            " AND name != 'commitmq_progress'"
        ).fetchall()
        for (name,) in tables:
            self.database.execute('DELETE FROM "{}"'.format(name.replace('"', '""')))

    @classmethod
    def path(cls, view: DispatcherView) -> Path:
        """The database's file."""
        return Path(view.folder) / cls.file_name

    # ------------------------------------------------------------ what the node calls

    def open(self, view: DispatcherView) -> int:
        self.view = view
        view.folder.mkdir(parents=True, exist_ok=True)
        # Transactions are ours to begin and end; a commit is on the device when it returns.
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
        """Back to where it began, which means to begin anew: what lies between may not be told apart."""
        if offset >= self._position:
            return
        if offset > self._began:
            raise NotImplementedError
        with self._transaction(offset, offset, 0):
            self.clear()

    def expire(self, min_offset: int) -> None:
        """What was made of the messages outlives them, by default."""

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
