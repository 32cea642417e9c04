"""Goal: kill -9 of the writer, of the ConsumeQueue dispatcher and of the whole node leaves BatchCQ topics and light message
queues as they must be: every acknowledged message at the offset that was told, no offset twice, none left out.

Method: one thread sends batches and messages for LMQs without a pause while processes are killed; what was acknowledged
is the model. At the end the queues are read, and compared with the log record by record.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from commitmq import Admin, Producer, Reader
from commitmq.errors import CommitMQError, SendError
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from nodes import SEGMENT_BYTES, Node, commitmq, eventually, start_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETTINGS = (
    "consume_queue.enable_lmq=true",
    "consume_queue.enable_multi_dispatch=true",
    "consume_queue.batch_file_bytes=4600",
    "dispatch.coalesce_us=20000",
)
SEED = 20_261_121
LMQS = [f"%LMQ%{letter}" for letter in "abcd"]


class Traffic:
    """Sends until told to stop; ``batches`` and ``singles`` are what was acknowledged."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[bytes]]] = []  # first queue offset, bodies
        self.singles: list[tuple[int, bytes, list[str]]] = []  # physical offset, body, LMQs
        self._rng = random.Random(SEED)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, address: str) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(address,))
        self._thread.start()

    def stop(self) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self, address: str) -> None:
        number = len(self.batches) + len(self.singles)
        with Producer(address, timeout_s=3.0) as producer:
            while not self._stop.is_set():
                number += 1
                ack = self._rng.choice(["memory", "flushed"])
                with contextlib.suppress(SendError, CommitMQError):
                    if number % 2:
                        bodies = [b"%d-%d" % (number, i) for i in range(self._rng.randrange(1, 30))]
                        result = producer.send_batch("batches", bodies, queue=0, ack=ack)
                        self.batches.append((result[0].queue_offset, bodies))
                    else:
                        names = self._rng.sample(LMQS, self._rng.randrange(1, 5))
                        body = b"%d" % number
                        sent = producer.send("origin", body, multi_dispatch=names, queue=0, ack=ack)
                        self.singles.append((sent.physical_offset, body, names))


def test_offsets_and_units_after_kill9(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        with Admin(node.address) as admin:
            admin.topic_create("batches", 1, attributes={"queue.type": "BatchCQ"})
        traffic = Traffic()
        traffic.start(node.address)
        for role in ("writer", "dispatcher-consume_queue", "writer"):
            known = len(traffic.batches)
            eventually(lambda known=known: len(traffic.batches) > known + 20, "batches are stored")  # type: ignore[misc]
            pid = node.pids()[role]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda role=role, pid=pid: node.healed(role, pid), f"{role} is back")  # type: ignore[misc]
        known = len(traffic.singles)
        eventually(lambda: len(traffic.singles) > known + 20, "messages are stored")
        node.kill_all()
        traffic.stop()
        assert node.start().returncode == 0
        # The first sends afterwards go on where the queues end.
        known = len(traffic.batches)
        traffic.start(node.address)
        eventually(lambda: len(traffic.batches) > known + 5, "the node takes messages again")
        traffic.stop()
        check(node, traffic)
    # What was built bit by bit, between deaths, is what the log alone gives.
    built = {kind: queue_bytes(node.store / kind) for kind in ("consumequeue", "batchconsumequeue")}
    rebuilt = commitmq("store", "rebuild", str(node.store), "--only", "queues")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert {kind: queue_bytes(node.store / kind) for kind in built} == built


def queue_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` that has content, by path."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if data.strip(b"\0")}


def check(node: Node, traffic: Traffic) -> None:
    log = CommitLog(node.store / "commitlog", SEGMENT_BYTES)
    records = list(log.iter_records())
    inner = [one for one in records if one.topic == "batches"]
    expected = 0
    for record in inner:
        assert record.queue_offset == int(record.properties["INNER_BASE"]) == expected, f"seed {SEED}"
        expected += int(record.properties["INNER_NUM"])
    offsets = dict.fromkeys(LMQS, 0)
    light: dict[str, list[bytes]] = {name: [] for name in LMQS}
    for record in records:
        if record.topic == "origin":
            names = record.properties["INNER_MULTI_DISPATCH"].split(",")
            told = [int(text) for text in record.properties["INNER_MULTI_QUEUE_OFFSET"].split(",")]
            assert told == [offsets[name] for name in names], f"seed {SEED}"
            for name in names:
                offsets[name] += 1
                light[name].append(record.body)
    log.close()
    by_place = {record.physical_offset: record for record in records}
    assert all(by_place[physical].body == body for physical, body, _ in traffic.singles)

    with Reader(["batches", *LMQS], node=node.address) as consumer:
        found: dict[str, list[tuple[int, bytes]]] = {name: [] for name in ("batches", *LMQS)}
        while sum(map(len, found.values())) < expected + sum(offsets.values()):
            batch = consumer.poll(10.0)
            assert len(batch), f"messages are missing, seed {SEED}"
            for one in batch:
                found[one.topic].append((one.queue_offset, one.body))
        assert not consumer.poll(0.3)
    for name in LMQS:
        assert found[name] == list(enumerate(light[name]))
    assert [offset for offset, _ in found["batches"]] == list(range(expected))
    for first, bodies in traffic.batches:
        assert [body for _, body in found["batches"][first : first + len(bodies)]] == bodies
    queue = BatchConsumeQueue(node.store / "batchconsumequeue" / "batches" / "0", 4_600)
    queue.refresh()
    units = queue.units(0, queue.end_index)
    assert units["physical_offset"].tolist() == [record.physical_offset for record in inner]
    assert units["store_timestamp"].tolist() == [record.store_timestamp for record in inner]
