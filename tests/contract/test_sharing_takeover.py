"""Goal: what RocketMQ's POP left behind goes on: what was not acknowledged comes back once, what was does not.

Method: RocketMQ's own store with pending semantics, whose check points and acks are all overdue by now, mostly in its
timer; its ``expected.json`` says what must become of each message. The node is also killed before the groups are drained.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from commitmq import ShareConsumer
from golden_stores import unpack
from nodes import Node, started

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["started", "killed"])
def test_what_rocketmq_handed_out_comes_back_once(tmp_path: Path, killed: bool) -> None:
    golden = unpack("semantics", tmp_path)
    expected = orjson.loads((tmp_path / "expected.json").read_bytes())["messages"]
    shared = [one for one in expected if "pop" in one["kind"] and "order" not in one["kind"]]
    wanted: dict[tuple[str, str], Counter[str]] = {}
    for one in shared:
        counter = wanted.setdefault((one["group"], one["topic"]), Counter())
        if one["must"] in ("redeliver-at", "deliver-to-group"):
            counter[one["uniq_key"]] += 1
    assert sum(one.total() for one in wanted.values()) == 43
    with started(Node.bare(golden.root)) as node:
        if killed:
            time.sleep(2.5)  # messages are coming back
            node.kill_all()
            assert node.start().returncode == 0
        for (group, topic), keys in wanted.items():
            found: Counter[str] = Counter()
            with ShareConsumer(topic, group=group, node=node.address, invisible_s=60) as consumer:
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline and (many := consumer.receive(32, 20 if found < keys else 3)):
                    found.update(str(one.unique_id) for one in many)
                    consumer.ack(many)
            assert found == keys, (group, topic)
