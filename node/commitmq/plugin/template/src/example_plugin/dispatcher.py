"""The dispatcher: messages and bytes of each topic, in a SQLite database.

``SqliteDispatcher`` commits them in one transaction with the position that they reach, so nothing counts twice after a crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from commitmq.plugin import SqliteDispatcher, consumable

if TYPE_CHECKING:
    from commitmq.plugin import DispatchBatch

_ADD = """
INSERT INTO topics VALUES (?, ?, ?) ON CONFLICT (topic)
DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes
"""


class ExamplePlugin(SqliteDispatcher):
    schema = "CREATE TABLE IF NOT EXISTS topics (topic TEXT PRIMARY KEY, messages INTEGER, bytes INTEGER) WITHOUT ROWID"

    def take(self, batch: DispatchBatch) -> None:
        """By columns: Python does nothing once a message."""
        rows = batch.rows[consumable(batch.rows)]  # without prepared and rolled-back transactions
        limit = self.view.settings.largest_body_bytes
        if limit and len(rows) and int(rows["body_size"].max()) > limit:
            worst = rows[int(rows["body_size"].argmax())]
            raise ValueError(f"a body of {worst['body_size']} bytes at physical offset {worst['physical_offset']}")
        deleted = self.view.topics_deleted()  # a replay brings records of topics that are gone
        for number, topic in enumerate(batch.topics):
            mine = rows[(rows["topic"] == number) & (rows["physical_offset"] >= deleted.get(topic, 0))]
            if len(mine):
                self.database.execute(_ADD, (topic, len(mine), int(mine["body_size"].sum(dtype=np.int64))))

    def drop_topic(self, topic: str) -> None:
        self.database.execute("DELETE FROM topics WHERE topic = ?", (topic,))

    def query(self, request: dict[str, Any]) -> dict[str, Any]:
        """``topics``: rows [topic, messages, bytes]; with ``topic`` in the request that one only."""
        wanted = request.get("topic")
        rows = self.database.execute("SELECT * FROM topics WHERE topic = ? OR ? IS NULL", (wanted, wanted)).fetchall()
        return {"topics": [list(row) for row in rows]}
