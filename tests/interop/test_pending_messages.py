"""Goal: RocketMQ's own broker goes on with the pending messages that our node leaves, and our node with those that RocketMQ's
broker leaves: none is lost, none comes early.

Method: a real node and a real broker (5.4.0, with its clients) take turns on one store. The one before was stopped in order,
or killed. In the end every message of the log is counted.
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

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(240)]

OpenBroker = Callable[..., Broker]
DELAY_S = 5  # level 2
ENDS = pytest.mark.parametrize("end", ["stop", "kill"])


def leave(node: NodeProcess, end: str) -> None:
    """End the node as ``end`` says."""
    (node.stop if end == "stop" else node.kill)()


def stored(root: Path, topic: str) -> list[dict[str, Any]]:
    """Every message of ``topic`` in the log."""
    return [line for line in dump(root) if line["topic"] == topic]


def bodies(lines: list[dict[str, Any]]) -> Counter[bytes]:
    return Counter(bytes.fromhex(line["body_hex"]) for line in lines)


def assert_not_early(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["store_timestamp"] >= line["born_timestamp"] + DELAY_S * 1000 - 1, line


@ENDS
def test_rocketmq_delivers_the_delayed_messages_that_we_leave(
    end: str, tmp_path: Path, rocketmq_broker: OpenBroker
) -> None:
    root = tmp_path / "store"
    sent = [b"delayed %d" % number for number in range(12)]
    with NodeProcess(root) as node:
        with Producer(node.address) as producer:
            for body in sent:
                producer.send("Later", body, delay_level=2)
        leave(node, end)
    with rocketmq_broker(root) as broker:
        broker.wait_for(lambda: len(broker.bodies("Later")) >= len(sent), "all are delivered")
        broker.kill()
    with NodeProcess(root) as node, Producer(node.address) as producer:
        producer.send("Later", b"the last one")
        time.sleep(2)  # a second delivery would come at once
    lines = stored(root, "Later")
    assert bodies(lines) == Counter([*sent, b"the last one"])
    assert_not_early([line for line in lines if b"delayed" in bytes.fromhex(line["body_hex"])])


@ENDS
def test_we_deliver_the_delayed_messages_that_rocketmq_leaves(
    end: str, tmp_path: Path, rocketmq_broker: OpenBroker
) -> None:
    root = tmp_path / "store"
    with rocketmq_broker(root) as broker:
        for number in range(6):
            broker.ask("send", "Later", f"delayed {number}", "DELAY", "2")
        if end == "kill":
            broker.kill()
    with NodeProcess(root) as node:
        deadline = time.monotonic() + 30
        while len(stored(root, "Later")) < 6 and time.monotonic() < deadline:
            time.sleep(0.5)
        leave(node, end)
    with NodeProcess(root):
        time.sleep(2)
    lines = stored(root, "Later")
    assert bodies(lines) == Counter(b"delayed %d" % number for number in range(6))
    assert_not_early(lines)
