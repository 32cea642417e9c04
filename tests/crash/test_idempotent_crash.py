"""Goal: what an idempotent producer sends through the deaths of a node is there once, in the order in which it was sent.

Method: one producer sends numbered bodies by all three ways while processes, or all of them at once, are killed at random
moments; another one, which has an id of its own, dies with them in mind: it is dropped in the middle and begins anew. A
consumer then reads each queue. Everything random comes from one seed, which is printed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from traffic import seed

from commitmq import ExactlyOnce, Producer, Reader, SendError
from nodes import Node, eventually, free_ports, start_node

SETTINGS = (
    "commit_log.segment_bytes=262144",
    "commit_log.max_message_bytes=65536",
    "producers.snapshot_bytes=65536",
    "producers.snapshot_interval_ms=50",
    "supervisor.restart_backoff_max_ms=400",
)
TOPIC = "once"
BATCH = 40


class Sender:
    """Sends 0, 1, 2 … to each of two queues until it is told to stop."""

    def __init__(self, address: str, number: int) -> None:
        self._address = address
        self._chance = random.Random(number)
        self._over = threading.Event()
        self.trouble: list[str] = []
        self.sent = {0: 0, 1: 0}
        self.named = 0
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._own, self._named)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(180)
        assert not self.trouble, "\n".join(self.trouble)

    def _guarded(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            self.trouble.append(repr(error))

    def _own(self) -> None:
        with Producer(self._address, delivery=ExactlyOnce(), timeout_s=120) as producer:
            while not self._over.is_set():
                queue = self._chance.randrange(2)
                first = self.sent[queue]
                way, ack = self._chance.randrange(3), self._chance.choice(("flushed", "memory"))
                bodies = [b"%d" % number for number in range(first, first + (1 if way == 0 else BATCH))]
                if way == 0:
                    producer.send(TOPIC, bodies[0], queue=queue, ack=ack)
                elif way == 1:
                    producer.send_batch(TOPIC, bodies, queue=queue, ack=ack)
                else:
                    for future in [producer.send_async(TOPIC, body, queue=queue, ack=ack) for body in bodies]:
                        future.result(150)
                self.sent[queue] += len(bodies)

    def _named(self) -> None:
        """Each time a job of the same 400 messages from the beginning, until one attempt gets through; then the next job."""
        while not self._over.is_set():
            while True:
                patience = self._chance.choice((0.3, 2.0, 20.0))
                try:
                    name = f"job/{self.named}"
                    with Producer(self._address, delivery=ExactlyOnce(name), timeout_s=patience) as producer:
                        size = self._chance.randrange(30, 90)
                        rows = [b"%d" % (self.named * 400 + number) for number in range(400)]
                        for at in range(0, 400, size):
                            producer.send_batch(TOPIC, rows[at : at + size], queue=2)
                    break
                except SendError:
                    time.sleep(0.05)
            self.named += 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.long)])
def test_exactly_once_through_random_kills(tmp_path: Path, kills: int) -> None:
    number = seed()
    chance = random.Random(number)
    with start_node(tmp_path, *SETTINGS, f"network.port={free_ports()}") as node:
        sender = Sender(node.address, number)
        try:
            for at in range(kills):
                time.sleep(0.3 + chance.random() * 0.7)
                if at % 3 == 0:
                    node.kill_all()
                    assert node.start().returncode == 0
                else:
                    pids = node.pids()
                    role = chance.choice(("writer", "writer", "flush", "supervisor", "allocate"))
                    os.kill(pids[role], signal.SIGKILL)
                    eventually(
                        lambda role=role, pids=pids: node.healed(role, pids[role]) and node.is_ready(),  # type: ignore[misc]
                        f"{role} is back",
                    )
        finally:
            sender.end()
        expected = {0: sender.sent[0], 1: sender.sent[1], 2: sender.named * 400}
        assert all(expected.values()), "too little was sent to show anything"
        for queue, bodies in read(node, sum(expected.values())).items():
            assert bodies == [b"%d" % index for index in range(expected[queue])], f"queue {queue} of {expected}"


def read(node: Node, count: int) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    with Reader(TOPIC, node=node.address) as consumer:
        deadline = time.monotonic() + 60
        quiet = 0
        while quiet < 3 and time.monotonic() < deadline:
            batch = consumer.poll(0.5)
            quiet = 0 if batch else quiet + (sum(map(len, found.values())) >= count)
            for message in batch:
                assert message.queue_offset == len(found[message.queue_id])
                found[message.queue_id].append(message.body)
    return found
