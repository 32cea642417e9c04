"""A plugin whose dispatcher counts the messages of each key, and a program that asks it.
Start a node with `COMMITMQ_PLUGINS=key_counts=key_counts PYTHONPATH=examples`, then run `python examples/key_counts.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from commitmq import Admin, Producer
from commitmq.plugin import DispatcherSpec, SqliteDispatcher, hookimpl

if TYPE_CHECKING:
    from commitmq.plugin import DispatchBatch, NodeConfig

COMMITMQ_HOOK_API = 1
TOPIC = "example-visits"


@hookimpl
def commitmq_dispatchers(config: NodeConfig) -> list[DispatcherSpec]:
    return [DispatcherSpec("key_counts", "key_counts:KeyCounts")]


class KeyCounts(SqliteDispatcher):
    """The position is in the same transaction as the counts, so a record that comes again after a crash counts once."""

    schema = "CREATE TABLE IF NOT EXISTS counts (topic TEXT, key TEXT, messages INTEGER, PRIMARY KEY (topic, key))"

    def take(self, batch: DispatchBatch) -> None:
        # A node imports this module at its start, so heavy imports come where the work is.
        from commitmq.plugin import consumable

        wanted = consumable(batch.rows).tolist()
        counts = Counter(
            (batch.topics[topic], key)
            for number, topic in enumerate(batch.rows["topic"].tolist())
            if wanted[number]
            for key in batch.text(number, "keys").split()
        )
        add = "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET messages = messages + excluded.messages"
        self.database.executemany(add, [(*key, messages) for key, messages in counts.items()])

    def query(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to ``Admin.dispatcher_query``; JSON values both ways."""
        rows = self.database.execute("SELECT key, messages FROM counts WHERE topic = ?", (request["topic"],))
        return {"counts": dict(rows.fetchall())}


def main() -> None:
    with Producer() as producer, Admin() as admin:
        before = admin.dispatcher_query("key_counts", {"topic": TOPIC})["counts"].get("home", 0)
        producer.send_batch(TOPIC, [b"a visit"] * 5, key=["home", "news", "home", "about", "home"])
        counts: dict[str, int] = {}
        while counts.get("home", 0) < before + 3:  # the dispatcher is a moment behind the send
            time.sleep(0.05)
            counts = admin.dispatcher_query("key_counts", {"topic": TOPIC})["counts"]
        print(dict(sorted(counts.items())))


if __name__ == "__main__":
    main()
