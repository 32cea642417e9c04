"""Goal: messages at the limits of a record end no mover and are not lost, whatever is killed while they move; and no other
group waits meanwhile.

Method: a node gets messages of every kind whose properties end at the limit or up to 2,000 bytes before it: with delay
levels, with times, half messages, and some whose handlers fail, that nobody acknowledges, or that are given up in order.
Sizes and kills are drawn from a seed, which is the test's parameter. In the end each message was handled, is a dead letter,
or is listed as set aside; no process ended by an exception; and while movers work on full messages, a message of another
group is handed out within a second.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from commitmq import Admin, Consumer, Message, Producer, Reader, ShareConsumer, TransactionState
from commitmq.errors import CommitMQError
from nodes import Node, eventually, start_node

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
SETTINGS = (
    "topics.default_queues=1",
    "supervisor.restart_backoff_max_ms=300",
    "transaction.timeout_ms=1000",
    "transaction.check_interval_ms=1000",
    "groups.heartbeat_interval_ms=200",
)
KILLED = ("pop", "schedule", "timer", "transaction", "writer", "coordinator")
GROUPS = {kind: f"{kind}-".ljust(120, "g") for kind in ("fails", "shared", "ordered")}
LIMIT = 32_767 - 20 - len("UNIQ_KEY") - 34 - 3
"""Of a value, in a message with the property ``a`` alone."""


class Full:
    """Sends full messages, and knows what must become of them. ``seen`` are bodies that were handled."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node, self.chosen = node, random.Random(seed)
        self.sent: set[bytes] = set()
        self.seen: set[bytes] = set()
        self.lock = threading.Lock()
        self._is_over = threading.Event()

    def send(self, kind: str, count: int) -> None:
        """``count`` messages of ``kind``, into the topic of that name; those that the node refuses do not count."""
        with Producer(
            self.node.address, group="shop", transaction_listener=lambda _: TransactionState.COMMIT
        ) as producer:
            for number in range(count):
                short = self.chosen.choice([*range(8), *range(100, 420, 20), self.chosen.randrange(2_000)])
                body = b"%s %d %d" % (kind.encode(), number, short)
                properties = {"a": "x" * (LIMIT - short)}
                with contextlib.suppress(CommitMQError):
                    self._send(producer, kind, body, properties)
                    self.sent.add(body)

    def _send(self, producer: Producer, kind: str, body: bytes, properties: dict[str, str]) -> None:
        if kind == "level":
            producer.send(kind, body, queue=0, properties=properties, delay_level=1)
        elif kind == "time":
            producer.send(kind, body, queue=0, properties=properties, delay=self.chosen.uniform(0.5, 5))
        elif kind == "half":
            with producer.transaction(kind, body, properties=properties) as transaction:
                if self.chosen.random() < 0.5:
                    transaction.unknown()
        else:
            producer.send(kind, body, queue=0, properties=properties)

    def kills(self, count: int) -> None:
        for _ in range(count):
            time.sleep(self.chosen.uniform(0.3, 1.2))
            role = self.chosen.choice(KILLED)
            if (pid := self.node.pids().get(role)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # ------------------------------------------------------------ who handles them

    def note(self, body: bytes) -> None:
        with self.lock:
            self.seen.add(bytes(body))

    def fail(self) -> None:
        def handle(message: Message) -> None:
            raise ValueError("it always fails")

        while not self._is_over.is_set():
            with (
                contextlib.suppress(CommitMQError),
                Consumer("fails", group=GROUPS["fails"], node=self.node.address) as consumer,
            ):
                threading.Thread(target=self._close_later, args=(consumer,)).start()
                consumer.run(handle, backoff=1, max_retries=1)

    def _close_later(self, consumer: Consumer) -> None:
        self._is_over.wait()
        consumer.close()

    def share(self, *, ordered: bool) -> None:
        """What comes the first time is not acknowledged; in order it is given up."""
        topic = "ordered" if ordered else "shared"
        while not self._is_over.is_set():
            with (
                contextlib.suppress(CommitMQError),
                ShareConsumer(
                    topic, group=GROUPS[topic], node=self.node.address, invisible_s=2, ordered=ordered
                ) as consumer,
            ):
                while not self._is_over.is_set():
                    for message in consumer.receive(8, 0.5):
                        if ordered:
                            consumer.nack(message, dead=True)
                        elif message.reconsume_times:
                            self.note(message.body)
                            message.ack()  # may say that it is acknowledged already: who answered the first try was killed

    def end(self) -> None:
        self._is_over.set()

    def found(self) -> set[bytes]:
        """Bodies that were handled, lie where they were to come, are dead letters, or are set aside."""
        found = set(self.seen)
        dead = [f"%DLQ%{group}" for group in (*GROUPS.values(), "CMQ_UNDELIVERED")]
        for topic in ("level", "time", "half", *dead, "TRANS_CHECK_MAX_TIME_TOPIC"):
            with contextlib.suppress(CommitMQError), Reader(topic, node=self.node.address, start="earliest") as reader:
                while many := reader.poll(0.3):
                    for message in many:
                        assert set(message.properties["a"]) == {"x"}
                        found.add(bytes(message.body))
        with Admin(self.node.address) as admin:
            places = [(one["topic"], one["queue_offset"]) for one in admin.set_aside()]
        for topic, offset in places:
            with Reader(topic, node=self.node.address, start="earliest") as reader:
                found |= {bytes(one.body) for one in reader.poll(2) if one.queue_offset == offset}
        return found


@pytest.mark.parametrize("seed", range(1, 6))
def test_full_messages_end_no_mover_and_are_not_lost(tmp_path: Path, seed: int) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        full = Full(node, seed)
        threads = [
            threading.Thread(target=full.fail),
            threading.Thread(target=full.share, kwargs={"ordered": False}),
            threading.Thread(target=full.share, kwargs={"ordered": True}),
        ]
        with Producer(node.address) as producer:
            for topic in ("fails", "shared", "ordered", "quick"):
                producer.send(topic, b"first", queue=0, properties={"a": "x"})
        for thread in threads:
            thread.start()
        try:
            for kind in ("level", "time", "half", "fails", "shared", "ordered"):
                full.send(kind, 12)
            full.kills(8)
            eventually(node.is_ready, "all serve again")
            missing: set[bytes] = set()

            def nothing_is_missing() -> bool:
                nonlocal missing
                missing = full.sent - full.found()
                return not missing

            try:
                eventually(nothing_is_missing, "all are handled, dead letters or set aside", timeout_s=90)
            except AssertionError:
                pytest.fail(f"seed {seed}: lost {sorted(missing)}")
            assert neighbour_waits_s(node, full) < 1.0
        finally:
            full.end()
            for thread in threads:
                thread.join()
        log = (node.store / "commitmq" / "node.log").read_text()
        assert "worker crashed" not in log
        assert "Traceback" not in log


def neighbour_waits_s(node: Node, full: Full) -> float:
    """The longest wait of another group's message while the movers work on full ones."""
    longest = 0.0
    with (
        ShareConsumer("quick", group="neighbour", node=node.address) as consumer,
        Producer(node.address) as producer,
    ):
        for message in consumer.receive(8, 5):
            message.ack()
        for kind in ("shared", "fails", "level"):
            full.send(kind, 4)
            for number in range(5):
                began = time.monotonic()
                producer.send("quick", b"%d" % number, queue=0)
                (message,) = consumer.receive(1, 10)
                longest = max(longest, time.monotonic() - began)
                message.ack()
    return longest
