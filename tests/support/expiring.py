"""What the tests of expiry share: a producer that remembers, segments made old, and what a node must answer afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from commitmq import Admin, Producer, Reader, SendResult
from nodes import Node, eventually, wait_until_dispatched

SEGMENT_BYTES = 1 << 16
FILE_BYTES = 400  # 20 units, so that queues have many files
EVERY_HOUR = ";".join(map(str, range(24)))
SETTINGS = (
    f"commit_log.segment_bytes={SEGMENT_BYTES}",
    f"consume_queue.file_bytes={FILE_BYTES}",
    "commit_log.max_message_bytes=32768",
    "consume_queue.flush_thorough_interval_ms=200",  # what is not synced is not deleted
    "consume_queue.flush_interval_ms=100",
    "retention.check_interval_ms=100",
    "retention.delete_interval_ms=5",
    "index.hash_slots=200",
    "index.max_items=500",
)
AGE_SETTING = f"retention.delete_when={EVERY_HOUR}"
TOPIC = "orders"


class Stored:
    """What was sent to ``orders``, by place: queues 0 and 1 in turn, or one of them."""

    def __init__(self) -> None:
        self.acked: dict[tuple[int, int], tuple[bytes, SendResult]] = {}
        self._number = 0

    def send(self, producer: Producer, count: int, *, queue: int | None = None, body_bytes: int = 1_000) -> SendResult:
        assert count
        result: SendResult | None = None
        for _ in range(count):
            self._number += 1
            body = f"{self._number} ".encode().ljust(body_bytes, b".")
            result = producer.send(TOPIC, body, queue=self._number % 2 if queue is None else queue, ack="memory")
            self.acked[result.queue, result.queue_offset] = (body, result)
        assert result is not None
        return result

    def check(self, address: str, least_min: int = 0) -> int:
        """Everything at or above the log's minimum is there, as sent, at its place, and nothing below; the minimum."""
        wait_until_dispatched(address)
        with Admin(address) as admin:
            minimum = int(admin.status()["positions"]["min_offset"])
            bounds = {queue: (low, high) for queue, low, high, _ in admin.offsets(TOPIC)}
        assert minimum >= least_min, "the log's minimum went back"
        kept = {place: body for place, (body, sent) in self.acked.items() if sent.physical_offset >= minimum}
        ends = {queue: offset + 1 for queue, offset in sorted(self.acked)}
        for queue, end in ends.items():
            first = min((offset for one, offset in kept if one == queue), default=end)
            assert bounds[queue] == (first, end), f"queue {queue}"
        found: dict[tuple[int, int], bytes] = {}
        with Reader(queues=[(TOPIC, queue) for queue in ends], node=address, start="earliest") as consumer:
            while len(found) < len(kept):
                batch = consumer.poll(5)
                assert len(batch), f"only {len(found)} of {len(kept)} messages came"
                found.update({(one.queue_id, one.queue_offset): bytes(one.body) for one in batch})
            assert not len(consumer.poll(0.1))
        assert found == kept
        return minimum


def names(folder: Path) -> list[int]:
    """Offsets at which the files of ``folder`` begin."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def segments(node: Node) -> list[int]:
    return names(node.store / "commitlog")


def make_old(node: Node, bases: list[int], hours: float = 73) -> None:
    """Let these segments look as if they had been written that long ago, the newest of them first: an old segment
    behind one that is not stays, so a look in between finds nothing to do.
    """
    then = time.time() - hours * 3600
    for base in reversed(bases):
        os.utime(node.store / "commitlog" / f"{base:020d}", (then, then))


def expiry(node: Node) -> dict[str, Any]:
    """What ``status`` says of the last look."""
    found: dict[str, Any] = node.row("cleanup")["info"].get("expiry") or {}
    return found


def wait_for_first_segment(node: Node, base: int) -> None:
    eventually(lambda: segments(node)[0] >= base, f"the log begins at {base}: {segments(node)}, {expiry(node)}")


def wait_until_durable(node: Node) -> None:
    """ConsumeQueues are synced once a second; what is not, is not deleted."""
    eventually(
        lambda: (words := node.report()["positions"])["dispatched_durable"] >= words["written"], "everything is durable"
    )
