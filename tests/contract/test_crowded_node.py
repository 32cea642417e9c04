"""Goal: clients that ask for much, or make much, do not keep the node from the others, from its own workers, or from a quick
start. Method: a real node, crowds of clients, and well-behaved ones beside them; ratios to the quiet node, and counts.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import pytest
import zmq

from commitmq import Admin, Consumer, Producer
from commitmq.control import ControlBlock, WorkerWord, role_slot
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import json_config
from nodes import Node, eventually, start_node

SETTINGS = ("network.port=0", "groups.heartbeat_interval_ms=200", "supervisor.restart_backoff_ms=50")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with start_node(tmp_path, *SETTINGS) as node:
        yield node


class Crowd:
    """DEALERs that speak raw headers."""

    def __init__(self, endpoint: str, size: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets = []
        for _ in range(size):
            one = self._context.socket(zmq.DEALER)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.SNDHWM, 0)
            one.setsockopt(zmq.RCVHWM, 0)
            one.connect(endpoint)
            self.sockets.append(one)

    def ask(self, number: int, identity: int, op: str, **fields: Any) -> None:
        self.sockets[number].send(orjson.dumps({"v": 1, "id": identity, "op": op, **fields}))

    def answer(self, number: int, timeout_s: float = 60) -> dict[str, Any]:
        assert self.sockets[number].poll(int(timeout_s * 1000)), "no answer"
        answer: dict[str, Any] = orjson.loads(self.sockets[number].recv())
        return answer

    def close(self) -> None:
        self._context.destroy(linger=0)


def _restart_s(control: ControlBlock) -> float:
    """Kill the writer; how long it takes until another one takes sends."""
    slot = role_slot("writer")
    pid = control.worker(slot, WorkerWord.PID)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: control.worker(slot, WorkerWord.PID) not in (0, pid), "another writer", timeout_s=60)
    return time.monotonic() - began


def test_a_dead_writer_is_replaced_before_hundreds_of_status_requests_are_answered(node: Node) -> None:
    control = ControlBlock(StoreLayout(node.store).control)
    killed = [control.worker(role_slot("writer"), WorkerWord.PID)]
    quiet_s = _restart_s(control)
    eventually(node.is_ready, "the node is whole again", timeout_s=60)
    crowd = Crowd(node.address, 10)
    try:
        for number in range(600):
            crowd.ask(number % 10, number, "status")
        crowd.answer(0)
        killed.append(control.worker(role_slot("writer"), WorkerWord.PID))
        busy_s = _restart_s(control)
        answered = sum(one.poll(0) for one in crowd.sockets)
        for number in range(1, 600):
            answer = crowd.answer(number % 10)
            assert answer["ok"]
            # (A dead writer is shown as ready until the supervisor has looked, and nobody can say what it takes.)
            living = [row for row in answer["processes"] if row["pid"] and row["pid"] not in killed]
            sizes = [row["memory_bytes"] for row in living if row["state"] == "ready"]
            assert len(sizes) > 5
            assert all(sizes)
        assert busy_s < 5 * quiet_s + 1, (quiet_s, busy_s, answered)
    finally:
        crowd.close()
        control.close()


def test_a_member_keeps_its_session_beside_a_crowd_that_joins_with_large_filters(node: Node) -> None:
    """600 joins with SQL filters of 16 KB, again and again; a consumer with a session of two seconds and a producer."""
    with Admin(node.address) as admin:
        admin.topic_create("t", 4)
        coordinator = admin.metadata()["endpoints"]["coordinator"][1]
    crowd = Crowd(coordinator, 20)
    ended = threading.Event()

    def attack() -> None:
        large = "a = 1 OR " * 1_800
        round_ = 0
        while not ended.is_set():
            round_ += 1
            for number in range(600):
                expression = f"{large[:16_000]} b = {round_}"
                crowd.ask(
                    number % 20, number, "group.join", group=f"g{number}", member="m", topics=["t"],
                    filter={"type": "SQL92", "expression": expression},
                )  # fmt: skip
            for number in range(600):
                crowd.answer(number % 20)

    thread = threading.Thread(target=attack)
    try:
        with (
            Producer(node.address) as producer,
            Consumer(["t"], group="good", node=node.address, session_timeout_ms=2_000) as consumer,
        ):
            producer.send("t", b"first")
            eventually(lambda: len(consumer.poll(0.2)), "the first message", timeout_s=60)
            with Admin(node.address) as admin:
                generation = admin.group("good")["generation"]
            thread.start()
            end = time.monotonic() + 6
            received = sent = 0
            while time.monotonic() < end:
                producer.send("t", b"more")
                sent += 1
                received += len(consumer.poll(0.05))
            while received < sent:
                assert time.monotonic() < end + 60
                received += len(consumer.poll(0.2))
            with Admin(node.address, timeout_s=60) as admin:
                described = admin.group("good")
            assert described["generation"] == generation, "its session ended meanwhile"
            assert "session ended, joining again" not in node.log()
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
        crowd.close()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1_200)
def test_a_hundred_thousand_topics(tmp_path: Path) -> None:
    """They are made at a rate that does not fall, are in RocketMQ's file after a stop, and a start with them is quick."""
    count, batch = 100_000, 10_000
    rates = []
    with start_node(tmp_path, "network.port=0") as node:
        with Admin(node.address) as admin:
            coordinator = admin.metadata()["endpoints"]["coordinator"][1]
        crowd = Crowd(coordinator)
        try:
            for first in range(0, count, batch):
                began = time.monotonic()
                for number in range(first, first + batch):
                    # As many clients as one likes may create topics at a time; here it is one that does not wait.
                    crowd.ask(0, number, "topic.create", topic=f"topic-{number:06d}", queues=4)
                    if number >= first + 8:
                        assert crowd.answer(0)["ok"]
                for _ in range(8):
                    assert crowd.answer(0)["ok"]
                rates.append(batch / (time.monotonic() - began))
        finally:
            crowd.close()
        with Admin(node.address) as admin:
            assert len(admin.topics()) == count
            memory = {row["role"]: row["memory_bytes"] for row in admin.status()["processes"]}
        with Producer(node.address) as producer:
            assert producer.send("topic-099999", b"x").queue_offset == 0
    layout = StoreLayout(tmp_path / "store")
    kept = json_config.load(layout.config / "topics.json")
    assert kept is not None
    assert len(kept["topicConfigTable"]) == count
    began = time.monotonic()
    with start_node(tmp_path, "network.port=0") as node:
        started_s = time.monotonic() - began
        with Admin(node.address) as admin:
            assert admin.topic("topic-000000").name == "topic-000000"
        with Consumer(["topic-099999"], group="g", node=node.address) as consumer:
            eventually(lambda: len(consumer.poll(0.5)), "the message", timeout_s=60)
    figures = f"rates {[round(one) for one in rates]} topics/s, start {started_s:.1f} s, memory {memory}"
    # The machine's own ups and downs last for a batch or two; a rate that falls with the number of topics does not come back.
    early, late = median(rates[:5]), median(rates[5:])
    assert late > 0.6 * early, figures
    assert median(rates) > 500, figures
    assert started_s < 10, figures
