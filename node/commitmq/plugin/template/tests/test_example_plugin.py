"""The contract of all dispatchers, and the plugin's own behaviour on a real node."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from commitmq.testing import DispatcherContract


class TestContract(DispatcherContract):
    """Replay, crashes, power cuts, poison …: see commitmq.testing.contract."""

    plugin = "example_plugin"
    name = "example_plugin"
    settings = ("plugins.example_plugin.largest_body_bytes=2000",)
    poison = {"body": b"x" * 2001}

    def snapshot(self, view):
        with closing(sqlite3.connect(view.folder / "state.db")) as database:
            sums = database.execute("SELECT * FROM topics").fetchall()
            return sums, database.execute("SELECT position FROM commitmq_progress").fetchone()


@pytest.mark.commitmq(plugins=["example_plugin"])
def test_it_counts(commitmq_node):
    commitmq_node.send_many("orders", [b"one", b"three"])
    commitmq_node.send("bills", "x")
    commitmq_node.wait_until_dispatched("example_plugin")
    assert commitmq_node.query("example_plugin", {"topic": "orders"}) == {"topics": [["orders", 2, 8]]}
    shown = commitmq_node.run("example-plugin")
    assert shown.output == "bills  1 messages  1 bytes\norders  2 messages  8 bytes\n", shown
    # A deleted topic is forgotten; a new one of its name begins at nothing.
    commitmq_node.admin.topic_delete("orders")
    commitmq_node.send("orders", "x")
    commitmq_node.wait_until_dispatched("example_plugin")
    assert commitmq_node.run("example-plugin", "orders").output == "orders  1 messages  1 bytes\n"
