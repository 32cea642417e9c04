"""Goal: whoever waits for a node that recovers sees how far it is, and whoever has a damaged log is told where, how much
and what can be done. After a crash queries by key say what they miss until the index is built again.

Method: a real node that is killed with its flush process halted, so that a tail of several segments was never flushed;
failpoints make its recovery slow. Damage is made with a byte in a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.restart import measure_restart
from commitmq import Admin, Message, Producer, Reader
from commitmq.format.record import Record
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.supervision.exit_codes import CliExit
from nodes import SEGMENT_BYTES, Node, eventually, start_node

SEGMENTS = 6
BODY = b"x" * 1000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with start_node(tmp_path) as running:
        yield running


def send_segments(node: Node, count: int) -> int:
    """Fill about ``count`` segments with acks from memory; returns how many messages that took."""
    with Producer(node.address, ack="memory") as producer:
        messages = [Message(BODY, keys=[f"k{number}"]) for number in range(count * SEGMENT_BYTES // 1_200)]
        producer.send_batch("orders", messages, queue=0)
    return len(messages)


def count_readable(node: Node) -> int:
    found = 0
    with Reader(queues=[("orders", 0)], node=node.address) as consumer:
        while batch := consumer.poll(1.0):
            found += len(batch)
    return found


@pytest.mark.slow
def test_a_slow_recovery_shows_how_far_it_is_and_queries_what_they_miss(node: Node) -> None:
    os.kill(node.pids()["flush"], signal.SIGSTOP)
    sent = send_segments(node, SEGMENTS)
    node.kill_all()
    ended: list[subprocess.CompletedProcess[str]] = []
    # A piece of the work is a segment; and the index, which is built again, is slow with its first batches: slower than what
    # comes between its start and the first query, on a busy machine too.
    points: tuple[str, ...] = ("recovery.inside_scan=delay:400ms", "recovery.before_sync=delay:400ms")
    points += ("dispatcher.index.before_dispatch=delay:1s@1-7",)

    def start() -> None:
        ended.append(node.start("dispatch.batch_messages=300", COMMITMQ_FAILPOINTS=";".join(points)))

    thread = threading.Thread(target=start)
    thread.start()
    try:
        seen = eventually(lambda: half_way(node), "the log is being checked")
        said = node.run("status", "--store", str(node.store)).stdout
    finally:
        thread.join()
    assert ended[0].returncode == 0, ended[0].stderr
    newest = f"k{sent - 1}"
    with Admin(node.address) as admin:
        result = admin.query("orders", key=newest, wait_s=0)
        assert not result.complete
        assert result.indexed_to < result.log_end
        with Producer(node.address) as producer:
            last = producer.send("orders", b"sent while the index is built", queue=0)
        assert last.queue_offset == sent
        eventually(lambda: admin.offsets("orders")[0][2] == sent + 1, "nobody but queries waits for the index")
        assert not admin.query("orders", key=newest, wait_s=0).complete
        assert len(eventually(lambda: query(admin, newest), "the index is built again")) == 1
    assert seen["role"] == "recovery"
    assert 0 < seen["done"] < seen["total"]
    # What was made ready behind the end may count until the end is known.
    assert abs(seen["total"] - SEGMENTS * SEGMENT_BYTES) <= 4 * SEGMENT_BYTES
    assert "starting" in said.splitlines()[0]
    assert "\nrecovery: " in said
    assert "recovery: checking the log, " in ended[0].stderr
    assert "starting: checking the log, " in node.log()
    assert node.report()["node"]["progress"] is None
    recovered = node.row("recovery")["info"]["recovered"]
    assert recovered["by_sidecar"]
    assert recovered["records"] == sent


def half_way(node: Node) -> dict[str, Any] | None:
    progress = node.report()["node"].get("progress") or {}
    return progress if progress.get("phase") == "checking the log" and progress["done"] else None


@pytest.mark.parametrize("found_by", [pytest.param(one, marks=pytest.mark.slow) for one in ("recovery", "writer")])
def test_damage_in_the_middle_is_named_and_can_be_taken_out(node: Node, found_by: str) -> None:
    if found_by == "writer":
        # What is flushed needs no check; but it is not in the queues yet, so the writer must count it.
        os.kill(node.pids()["dispatcher-consume_queue"], signal.SIGSTOP)
    sent = send_segments(node, 3)
    with Producer(node.address) as producer:
        producer.send("orders", BODY, queue=0)
    flushed = node.report()["positions"]["flushed"]
    layout = StoreLayout(node.store)
    eventually(lambda: int.from_bytes(layout.sidecar.read_bytes()[8:16], "big") >= flushed, "the sidecar is written")
    node.kill_all()
    victim = damage_one(layout)
    if found_by == "recovery":
        layout.sidecar.unlink()
    refused = node.start()
    assert refused.returncode == CliExit.STORE_UNUSABLE
    segment = victim.physical_offset // SEGMENT_BYTES * SEGMENT_BYTES
    at = victim.physical_offset - segment
    assert f"segment {segment:020d} at offset {at}, {victim.total_size} bytes" in refused.stderr
    assert f"commitmq store repair {node.store}" in refused.stderr
    shown = node.run("store", "repair", str(node.store), *settings(node))
    assert shown.returncode == CliExit.DAMAGE_FOUND
    assert f"segment {segment:020d} at {at}, {victim.total_size} bytes" in shown.stdout
    repaired = node.run("store", "repair", str(node.store), "--skip", "--yes", *settings(node))
    assert repaired.returncode == 0, repaired.stderr
    assert node.start().returncode == 0
    assert count_readable(node) == sent  # one more was sent, and one is gone


def settings(node: Node) -> list[str]:
    return [part for setting in node.settings for part in ("--set", setting)]


def damage_one(layout: StoreLayout) -> Record:
    """Overwrite the length of a record in the second segment; returns the record."""
    log = CommitLog(layout.commit_log, SEGMENT_BYTES)
    victim = next(one for one in log.iter_records(SEGMENT_BYTES) if one.physical_offset > SEGMENT_BYTES + 50_000)
    log.close()
    path = layout.commit_log / f"{SEGMENT_BYTES:020d}"
    data = bytearray(path.read_bytes())
    data[victim.physical_offset - SEGMENT_BYTES : victim.physical_offset - SEGMENT_BYTES + 4] = b"\x7f\xff\xff\xff"
    path.write_bytes(data)
    return victim


def query(admin: Admin, key: str) -> list[Message] | None:
    result = admin.query("orders", key=key, wait_s=0)
    return list(result) if result.complete else None


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_serving_again_takes_no_longer_than_a_small_store_and_its_tail(tmp_path: Path) -> None:
    runs = measure_restart(tmp_path, log_bytes=1 << 30, topics=100, queues=10, tail_bytes=128 << 20, repeat=3)
    extra = [full.acked_s - base.acked_s - full.plain_read_s for base, full in zip(runs[::2], runs[1::2], strict=True)]
    small = sorted(base.acked_s for base in runs[::2])[1]
    # Both are work of processors and their caches, so a machine that is slow for one is slow for the other.
    assert sorted(extra)[1] <= max(2.0, small), f"seconds beyond a small store's start of {small}: {extra}"
    for full in runs[1::2]:
        # What is checked is the tail (records are larger than their bodies), and a second of flushes at most.
        assert full.recovery["scanned_bytes"] <= 1.5 * full.tail_bytes
        assert full.recovery["by_sidecar"]
