"""The dispatcher: messages and bytes of each topic in SQLite, in one transaction a batch with the position they reach.

Records come again after a crash. Because the position is committed together with the sums, what was counted is known by its
offset and left out: nothing counts twice, and nothing is missing.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import numpy as np

from commitmq.store.dispatch_batch import consumable

if TYPE_CHECKING:
    from commitmq.hookspecs import DispatcherView
    from commitmq.store.dispatch_batch import DispatchBatch

_SCHEMA = """
CREATE TABLE IF NOT EXISTS topics (topic TEXT PRIMARY KEY, messages INTEGER, bytes INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS progress (
    only INTEGER PRIMARY KEY CHECK (only = 0), began INTEGER, position INTEGER, timestamp INTEGER
);
"""
_ADD = """
INSERT INTO topics VALUES (?, ?, ?) ON CONFLICT (topic)
DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes
"""


class ExamplePlugin:
    """See :class:`commitmq.hookspecs.Dispatcher` for when each method is called."""

    def open(self, view: DispatcherView) -> int:
        self._largest_body_bytes = view.settings.largest_body_bytes
        self._topics_deleted = view.topics_deleted
        view.folder.mkdir(parents=True, exist_ok=True)
        # Transactions are ours to begin and end; a commit is on the device when it returns.
        self._database = sqlite3.connect(view.folder / "topics.db", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(_SCHEMA)
        self._database.execute("INSERT OR IGNORE INTO progress VALUES (0, ?, ?, 0)", (view.position, view.position))
        row = self._database.execute("SELECT began, position, timestamp FROM progress").fetchone()
        self._began, self._position, self._timestamp = row
        return int(self._position)

    def dispatch(self, batch: DispatchBatch) -> None:
        batch = batch.after(self._position)
        if len(batch):
            self._timestamp = int(batch.rows["store_timestamp"][-1])
        sums = self._sums(batch)
        self._commit([(_ADD, row) for row in sums], batch.end)

    def _sums(self, batch: DispatchBatch) -> list[tuple[str, int, int]]:
        """(topic, messages, bytes of bodies) of a batch, by columns: Python does nothing once a message."""
        rows = batch.rows[consumable(batch.rows)]  # without prepared and rolled-back transactions
        limit = self._largest_body_bytes
        if limit and len(rows) and int(rows["body_size"].max()) > limit:
            worst = rows[int(rows["body_size"].argmax())]
            raise ValueError(f"a body of {worst['body_size']} bytes at physical offset {worst['physical_offset']}")
        sums = []
        for number, topic in enumerate(batch.topics):
            mine = rows[(rows["topic"] == number) & (rows["physical_offset"] >= self._topics_deleted().get(topic, 0))]
            if len(mine):
                sums.append((topic, len(mine), int(mine["body_size"].sum(dtype=np.int64))))
        return sums

    def flush(self, *, thorough: bool) -> tuple[int, int]:
        return self._position, self._timestamp

    def truncate(self, offset: int) -> None:
        """Back to where it began, which means to count anew: what lies between cannot be taken out of a sum."""
        if offset >= self._position:
            return
        if offset > self._began:
            raise NotImplementedError
        self._began, self._timestamp = offset, 0
        self._commit([("DELETE FROM topics", ()), ("UPDATE progress SET began = ?", (offset,))], offset)

    def expire(self, min_offset: int) -> None:
        """The sums outlive the messages."""

    def forget(self, topic: str) -> None:
        self._commit([("DELETE FROM topics WHERE topic = ?", (topic,))], self._position)

    def query(self, request: dict[str, Any]) -> dict[str, Any]:
        """``topics``: rows [topic, messages, bytes]; with ``topic`` in the request that one only."""
        wanted = request.get("topic")
        rows = self._database.execute("SELECT * FROM topics WHERE topic = ? OR ? IS NULL", (wanted, wanted)).fetchall()
        return {"topics": [list(row) for row in rows]}

    def close(self) -> None:
        self._database.close()

    def _commit(self, statements: list[tuple[str, tuple[Any, ...]]], position: int) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                self._database.execute(statement, values)
            self._database.execute("UPDATE progress SET position = ?, timestamp = ?", (position, self._timestamp))
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
        self._position = position
