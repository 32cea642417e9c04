"""Goal: a store of which a node has deleted the oldest segments is to RocketMQ what it would be had RocketMQ deleted them.

Method: a node expires by hand; RocketMQ's own classes open what is left, and must see the messages that ``store dump`` lists,
the minimum of every queue that the node told, and go on at the next offset of a queue of which everything expired.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from interop_checks import in_log_order, log_end, place, store_digests, without_crc
from node_process import NodeProcess, dump
from rocketmq import Run

from commitmq import Admin, Producer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

SEGMENT_BYTES = 131072
QUIET = ("Quiet", 1)


@pytest.mark.slow
def test_rocketmq_opens_what_expiry_left_and_goes_on(tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    root = tmp_path / "store"
    rng = random.Random(415)
    with NodeProcess(root, "consume_queue.flush_thorough_interval_ms=200") as node, Producer(node.address) as producer:
        for _ in range(60):
            producer.send(QUIET[0], rng.randbytes(100), queue=QUIET[1])
        for number in range(700):
            producer.send("Orders", rng.randbytes(1_000), queue=number % 3, keys=f"k{number}", tags="TagA")
        with Admin(node.address) as admin:
            while (words := admin.status()["positions"])["dispatched_durable"] < words["written"]:
                time.sleep(0.1)  # what is not synced is not deleted
            assert admin.expire(keep_bytes=2 * SEGMENT_BYTES)["kept"] == "newer than was asked for"
            told = {
                (topic, queue): (low, high)
                for topic in ("Quiet", "Orders")
                for queue, low, high, _ in admin.offsets(topic)
                if high
            }
            minimum = int(admin.status()["positions"]["min_offset"])
    ours = dump(root)
    before = store_digests(root)
    assert ours[0]["physical_offset"] >= minimum >= 4 * SEGMENT_BYTES
    assert told[QUIET] == (60, 60)

    run = run_rocketmq(root, "read")

    assert in_log_order(without_crc(run.lines)) == ours
    assert run.complaints == []
    assert run.recovered["max_physical_offset"] == log_end(ours)
    assert {queue: (low, high) for queue, (low, high, _) in run.queues.items()} == told
    assert store_digests(root).items() <= before.items(), "RocketMQ deleted ConsumeQueue files at most"

    appended = run_rocketmq(root, "append", QUIET[0], str(QUIET[1]), "5")
    assert [line["queue_offset"] for line in appended.lines][:5] == list(range(60, 65))
    with NodeProcess(root) as node, Producer(node.address) as producer, Admin(node.address) as admin:
        assert int(admin.status()["positions"]["min_offset"]) == minimum
        low, high = admin.offsets(QUIET[0])[QUIET[1]][1:3]
        assert low == 60
        assert producer.send(QUIET[0], b"ours again", queue=QUIET[1]).queue_offset == high
    again = run_rocketmq(root, "read")
    assert [place(line) for line in in_log_order(again.lines)][: len(ours)] == [place(line) for line in ours]
    assert again.complaints == []
