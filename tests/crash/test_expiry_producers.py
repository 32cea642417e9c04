"""Goal: expiry takes from nobody what an idempotent producer may repeat: it is known from its snapshot before the log goes.

Method: a producer sends, other messages fill segments, the first ones are deleted online or of the closed store, and the node
is killed. A snapshot is taken rarely enough that only expiry can have had one made.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commitmq import Admin, ExactlyOnce, Producer
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout
from commitmq.store.producers import ProducerSnapshot
from nodes import Node, commitmq, eventually, start_node
from shares import shared

SEGMENT_BYTES = 1 << 18
SETTINGS = (
    f"commit_log.segment_bytes={SEGMENT_BYTES}",
    "commit_log.max_message_bytes=65536",
    "producers.snapshot_interval_ms=3600000",
)


def send(node: Node, count: int) -> list[bool]:
    """The first ``count`` messages of the producer ``job``: which of them were stored before."""
    with Producer(node.address, delivery=ExactlyOnce("job", 0)) as producer:
        return [one.duplicate for one in producer.send_batch("jobs", [b"%d" % n for n in range(count)], queue=0)]


def fill(node: Node) -> None:
    with Producer(node.address) as producer:
        for _ in range(5):
            producer.send_batch("other", [bytes(50_000)] * 5, queue=0)


@pytest.mark.parametrize("how", shared(["damaged", "online", "closed"], 1))
def test_what_a_producer_sent_is_known_after_its_messages_are_gone(tmp_path: Path, how: str) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        assert send(node, 5) == [False] * 5
        fill(node)
        layout = StoreLayout(node.store)
        if how == "online":
            with Admin(node.address) as admin:
                # What the ConsumeQueues have not synced stays for now.
                eventually(lambda: admin.expire(keep_bytes=SEGMENT_BYTES)["min_offset"] > 0, "segments go")
            node.kill_all()
        else:
            assert node.stop().returncode == 0
            # As a stop leaves it that could not write one, or a device that lost it.
            if how == "closed":
                ProducerSnapshot(0, b"[]\n").save(layout.producers)
            else:
                layout.producers.write_bytes(b"nonsense")
            expired = commitmq("store", "expire", str(node.store), "--keep-bytes", str(SEGMENT_BYTES))
            assert expired.returncode == 0, expired.stderr
        assert not (layout.commit_log / segment_name(0)).exists()
        assert node.start().returncode == 0
        assert send(node, 8) == [True] * 5 + [False] * 3
