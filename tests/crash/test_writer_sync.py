"""Goal: what the writer syncs by itself is as durable, and known as well, as what flush syncs.

Method: one sender that waits for each of its sends, so that the writer syncs; the node or the writer is killed at the places
around that sync, and halted in it. (Power cuts and failing devices: test_power_loss, test_io_errors.)
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from commitmq import Admin, Producer, Reader, SendError
from commitmq.control import ControlBlock, Word
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)
NEVER_SLOW = "commit_log.writer_sync_slow_ms=60000"
PLACES = ("writer.before_fdatasync", "writer.after_fdatasync")


def stored(node: Node) -> list[bytes]:
    bodies: list[bytes] = []
    with Reader("t", node=node.address) as consumer:
        while batch := consumer.poll(1.0):
            bodies += [bytes(one.body) for one in batch]
    return bodies


def send_until_trouble(producer: Producer, most: int = 2_000) -> list[bytes]:
    acked: list[bytes] = []
    for number in range(most):
        body = b"%d" % number
        try:
            producer.send("t", body, queue=0)
        except SendError:
            break
        acked.append(body)
    return acked


@pytest.mark.parametrize(
    ("place", "action"),
    [
        pytest.param(place, action, marks=pytest.mark.slow if number == kind else pytest.mark.long)
        for number, place in enumerate(PLACES)
        for kind, action in enumerate(("kill", "kill_node"))
    ],
)
def test_a_death_around_the_sync(tmp_path: Path, place: str, action: str) -> None:
    extra = {"COMMITMQ_FAILPOINTS": f"{place}={action}@40", "COMMITMQ_FAILPOINTS_ONCE": str(tmp_path)}
    with start_node(tmp_path, NEVER_SLOW, **extra) as node, Producer(node.address, timeout_s=3) as producer:
        pid = node.pids()["writer"]
        acked = send_until_trouble(producer)
        assert 30 < len(acked) < 1_000, "the writer did not sync by itself, or did not die of it"
        eventually(lambda: node.healed("writer", pid) and node.is_ready(), "the node is whole again", timeout_s=40)
        producer.send("t", b"after", queue=0, timeout_s=10)
        found = stored(node)
        assert found[: len(acked)] == acked
        assert found[-1] == b"after"
        assert len(found) - len(acked) in (1, 2)


@pytest.mark.slow
def test_flush_takes_over_what_the_writer_synced(tmp_path: Path) -> None:
    """``flushed`` follows without a sync of flush's own, so consumers, plugins and the sidecar do."""
    with start_node(tmp_path, NEVER_SLOW) as node, Producer(node.address) as producer:
        control = ControlBlock(StoreLayout(node.store).control)
        try:
            taken_over = 0
            for number in range(300):
                producer.send("t", b"%d" % number, queue=0)
                written = control.get(Word.WRITTEN)
                if control.get(Word.WRITER_SYNCED) == written:
                    taken_over += 1
                    eventually(lambda: control.get(Word.FLUSHED) == written, "flush has taken over")  # noqa: B023
            assert taken_over > 30
        finally:
            control.close()
        assert len(stored(node)) == 300
        with Admin(node.address) as admin:
            assert admin.status()["positions"]["flushed"] == written


def test_other_senders_are_not_kept_waiting(tmp_path: Path) -> None:
    """With several senders flush does it: a slow device then stops nobody who does not wait for it."""
    extra = {"COMMITMQ_FAILPOINTS": "writer.before_fdatasync=delay:300ms;flush.before_fdatasync=delay:300ms"}
    with (
        start_node(tmp_path, NEVER_SLOW, **extra) as node,
        Producer(node.address) as first,
        Producer(node.address, ack="memory") as second,
    ):
        first.send("t", b"a", queue=0)
        took = []
        for _ in range(5):
            second.send("t", b"m", queue=0)
            pending = first.send_async("t", b"b", queue=0)
            time.sleep(0.05)  # it waits for the device now
            began = time.monotonic()
            second.send("t", b"m", queue=0)
            took.append(time.monotonic() - began)
            pending.result(5)
        assert sorted(took)[2] < 0.2, took


def test_after_a_slow_sync_flush_does_it(tmp_path: Path) -> None:
    extra = {"COMMITMQ_FAILPOINTS": "writer.before_fdatasync=delay:300ms"}
    with start_node(tmp_path, **extra) as node, Producer(node.address) as producer:
        took = []
        for _ in range(300):
            began = time.monotonic()
            producer.send("t", b"x", queue=0)
            took.append(time.monotonic() - began)
        slow = [one for one in took if one > 0.28]
        assert 1 <= len(slow) <= 1 + sum(took) / 5, slow


def test_what_comes_over_zeromq_during_a_sync_is_taken_at_once(tmp_path: Path) -> None:
    """Its signal is taken by the answer to the one who waited for the sync; the writer must not sleep on it."""
    extra = {"COMMITMQ_FAILPOINTS": "writer.after_fdatasync=delay:60ms"}
    with (
        start_node(tmp_path, NEVER_SLOW, **extra) as node,
        Producer(node.address) as first,
        Producer(node.address, ack="memory") as second,
    ):
        second.send_async("t", b"m", queue=0).result(5)
        took = []
        for _ in range(12):
            first.send_async("t", b"a", queue=0).result(5)
            pending = first.send_async("t", b"b", queue=0)
            time.sleep(0.03)  # in the writer's own sync, if it is one
            began = time.monotonic()
            second.send_async("t", b"m", queue=0).result(5)
            took.append(time.monotonic() - began)
            pending.result(5)
        assert sorted(took)[8] < 0.15, took  # one or two may have met a busy machine


def test_the_writer_lets_go_of_a_segment_it_left(tmp_path: Path) -> None:
    with (
        start_node(tmp_path, NEVER_SLOW, "commit_log.segment_bytes=1048576") as node,
        Producer(node.address) as producer,
    ):
        for _ in range(100):
            producer.send("t", b"x", queue=0)
        producer.send_batch("t", [bytes(4_000)] * 600, queue=0)
        folder = Path(f"/proc/{node.pids()['writer']}/fd")
        open_now = {os.path.basename(os.readlink(one)) for one in folder.iterdir() if one.exists() or one.is_symlink()}
        assert not open_now & {segment_name(0), f"{segment_name(0)} (deleted)"}
