"""Goal: messages that wait for a time of their own are delivered by whoever comes next, RocketMQ's own broker or our node, and
cancelled ones by nobody.

Method: a real node and a real broker (5.4.0, with its clients) take turns on one store. The one before was stopped in order,
or killed. It leaves messages that are overdue when the next one serves, messages that are due later, and cancellations of
some of both. In the end every message of the log is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broker import Broker
from node_process import NodeProcess, dump

from commitmq import Producer

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(300)]

OpenBroker = Callable[..., Broker]
ENDS = pytest.mark.parametrize("end", ["stop", pytest.param("kill", marks=pytest.mark.long)])
TOPIC = "Timed"
RECALL = {"recallMessageEnable": "true"}
SOON_MS, LATER_MS = 4_000, 30_000
EACH = 6


def due_times() -> dict[bytes, int]:
    """Messages, and when each is due. Odd times, so that none lies at the end of a second."""
    now = time.time_ns() // 1_000_000
    times = {b"soon %d" % number: now + SOON_MS + 137 * number for number in range(EACH)}
    return times | {b"later %d" % number: now + LATER_MS + 137 * number for number in range(EACH)}


def is_cancelled(body: bytes) -> bool:
    return body.endswith((b"1", b"4"))


def wanted(due: dict[bytes, int]) -> set[bytes]:
    return {body for body in due if not is_cancelled(body)}


def delivered(root: Path) -> list[dict[str, Any]]:
    return [line for line in dump(root) if line["topic"] == TOPIC]


def body_of(line: dict[str, Any]) -> bytes:
    return bytes.fromhex(line["body_hex"])


def check(root: Path, due: dict[bytes, int], *, each_once: bool) -> None:
    """None is lost, none early, none that was cancelled."""
    lines = delivered(root)
    found = Counter(map(body_of, lines))
    assert found.keys() == wanted(due)
    assert [line for line in lines if line["store_timestamp"] < due[body_of(line)]] == []
    if each_once:
        assert set(found.values()) == {1}, found


@ENDS
def test_we_deliver_the_timers_that_rocketmq_leaves(end: str, tmp_path: Path, rocketmq_broker: OpenBroker) -> None:
    root = tmp_path / "store"
    with rocketmq_broker(root, **RECALL) as broker:
        broker.ask("send", TOPIC, "now")  # makes the topic
        due = due_times()
        for body, at in due.items():
            sent = broker.ask("send", TOPIC, body.decode(), "TIMER_DELIVER_MS", at)
            if is_cancelled(body):
                broker.ask("recall", TOPIC, sent["recall_handle"])
        time.sleep(1.5)  # RocketMQ has put some of them into its wheel
        if end == "kill":
            broker.kill()
    with NodeProcess(root, "network.cluster_name=C", "network.broker_name=b0") as node:
        await_all(root, due)
        (node.stop if end == "stop" else node.kill)()
    with NodeProcess(root):
        time.sleep(3)  # a second delivery would come at once
    check(root, due | {b"now": 0}, each_once=True)


@ENDS
def test_rocketmq_delivers_the_timers_that_we_leave(end: str, tmp_path: Path, rocketmq_broker: OpenBroker) -> None:
    root = tmp_path / "store"
    with NodeProcess(root, "network.cluster_name=C", "network.broker_name=b0") as node:
        with Producer(node.address) as producer:
            producer.send(TOPIC, b"now")
            due = due_times()
            for body, at in due.items():
                result = producer.send(TOPIC, body, deliver_at=at)
                if is_cancelled(body):
                    producer.cancel(result)
            time.sleep(1.5)  # they are in the wheel
        (node.stop if end == "stop" else node.kill)()
    due |= {b"now": 0}
    with rocketmq_broker(root) as broker:
        broker.wait_for(lambda: wanted(due) <= set(broker.bodies(TOPIC)), "all are delivered", 120)
        broker.kill()
    with NodeProcess(root) as node, Producer(node.address) as producer:
        producer.send(TOPIC, b"the last one")
        time.sleep(3)
    # RocketMQ may deliver twice what a killed node had delivered and not written down.
    check(root, due | {b"the last one": 0}, each_once=end == "stop")


def await_all(root: Path, due: dict[bytes, int]) -> None:
    deadline = time.monotonic() + 120
    while not wanted(due) <= set(map(body_of, delivered(root))):
        assert time.monotonic() < deadline, "not all are delivered"
        time.sleep(1)
