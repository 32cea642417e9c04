"""Goal: with the transient store pool a node keeps every promise it makes without: what is acknowledged survives every
process, consumers see what is in the files and nothing before, a pool that is full says so, a stop leaves nothing behind.

Method: a real node whose flush process is halted or killed at will, so that messages stay in the pool as long as the test
wants; what must be in the files is read from the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import ExactlyOnce, Message, Producer, Reader
from commitmq.errors import Outcome, SendError
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.transient_pool import TransientPool, note_path, pool_folder
from commitmq.supervision.exit_codes import CliExit
from commitmq.testing import CommitMQNode, start_node
from commitmq.testing.node_process import SMALL_INDEX
from nodes import commitmq, eventually

SEGMENT_BYTES = 1 << 17
BUFFERS = 3
SETTINGS = [
    "commit_log.transient_store_pool=true",
    f"commit_log.transient_store_pool_size={BUFFERS}",
    f"commit_log.segment_bytes={SEGMENT_BYTES}",
    "commit_log.max_message_bytes=16384",
    "commit_log.commit_thorough_interval_ms=50",
]


@pytest.fixture(scope="module", params=["async", pytest.param("sync", marks=pytest.mark.slow)])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommitMQNode]:
    settings = [*SETTINGS, f"commit_log.flush_mode={request.param}"]
    with start_node(tmp_path_factory.mktemp("pool"), settings) as running:
        yield running


def folder_of(node: CommitMQNode) -> Path:
    return pool_folder(StoreLayout(node.store))


def positions(node: CommitMQNode) -> dict[str, int]:
    return dict(node.status()["positions"])


def read(node: CommitMQNode, topic: str, count: int, *, patience_s: float = 20) -> list[bytes]:
    """Bodies of queue 0 from the beginning: at least ``count``, or as many as come."""
    found: list[bytes] = []
    with Reader(queues=[(topic, 0)], node=node.address) as consumer:
        while batch := consumer.poll(patience_s if len(found) < count else 0.3):
            found += [message.body for message in batch]
    return found


def bodies(word: str, count: int) -> list[bytes]:
    return [b"%s %d " % (word.encode(), number) + b"x" * 900 for number in range(count)]


def test_an_ack_of_memory_does_not_wait_and_nothing_uncommitted_is_seen(node: CommitMQNode) -> None:
    node.send("seen", b"first", queue=0)
    with node.paused("flush"):
        before = positions(node)
        wanted = bodies("waits", 20)
        for body in wanted:
            result = node.send("seen", body, queue=0, ack="memory")
            assert result.ack == "memory"
        after = positions(node)
        assert after["written"] > before["written"]
        assert after["committed"] == before["committed"]
        assert after["reput"] <= after["committed"]
        assert read(node, "seen", 2, patience_s=0.5) == [b"first"]
        log = CommitLog(StoreLayout(node.store).commit_log, SEGMENT_BYTES)
        in_files = [record.physical_offset for record in log.iter_records()]
        log.close()
        assert result.physical_offset not in in_files
    assert read(node, "seen", 21) == [b"first", *wanted]


def test_small_sends_are_committed_within_the_thorough_interval(node: CommitMQNode) -> None:
    node.send("small", b"only one", queue=0, ack="memory")
    assert read(node, "small", 1) == [b"only one"]
    found = positions(node)
    assert found["committed"] == found["written"]


def test_what_is_committed_is_zeroed_and_its_buffers_are_given_back(node: CommitMQNode) -> None:
    for _ in range(3):
        node.send_many("round", [Message(body) for body in bodies("round", 100)], queue=0)
    pool = TransientPool(folder_of(node), writable=False)
    base = positions(node)["written"] // SEGMENT_BYTES * SEGMENT_BYTES

    def is_tidy() -> bool:
        # The writer may have taken the next one ahead.
        return all(base <= at <= base + SEGMENT_BYTES and not any(buffer[:]) for at, buffer in pool.in_use())

    eventually(is_tidy, "the pool holds nothing any more")
    assert pool.committed == positions(node)["committed"] > 2 * SEGMENT_BYTES
    pool.close()


def test_an_ack_of_flushed_means_the_device(node: CommitMQNode) -> None:
    for _ in range(3):
        result = node.send("durable", b"x" * 100, queue=0)
        assert result.ack == "flushed"
        assert positions(node)["flushed"] > result.physical_offset


def test_a_repetition_is_told_where_lies_what_was_sent_a_moment_ago(node: CommitMQNode) -> None:
    named: dict[str, Any] = {"delivery": ExactlyOnce("again"), "node": node.address}
    with Producer(**named) as one, Producer(**named) as other:
        one.send("again", b"elsewhere", queue=1)
        other.send("again", b"elsewhere", queue=1)  # both are connected
        first = one.send("again", b"once", queue=0, ack="memory")
        second = other.send("again", b"once", queue=0, ack="memory")
    assert second.duplicate
    assert (second.queue_offset, second.physical_offset) == (first.queue_offset, first.physical_offset)
    assert read(node, "again", 1) == [b"once"]


def test_a_writer_that_dies_goes_on_behind_what_it_had_published(node: CommitMQNode) -> None:
    wanted = bodies("writer", 30)
    generation = positions(node)["writer_generation"]
    with node.paused("flush"):
        acked = [node.send("writer", body, queue=0, ack="memory") for body in wanted]
        node.kill("writer")
    eventually(lambda: node.status()["positions"]["writer_generation"] > generation, "another writer serves")
    with Producer(node.address) as producer:
        result = producer.send("writer", b"next", queue=0)
    assert (result.queue_offset, result.physical_offset) > (acked[-1].queue_offset, acked[-1].physical_offset)
    assert read(node, "writer", 31) == [*wanted, b"next"]


def test_a_flush_process_that_dies_loses_nothing(node: CommitMQNode) -> None:
    wanted = bodies("flush", 200)
    with node.paused("flush"):
        node.send_many("flush", [Message(body) for body in wanted], queue=0, ack="memory")
        node.kill("flush")
    assert read(node, "flush", 200) == wanted


def test_a_full_pool_refuses_and_takes_sends_again_when_there_is_room(node: CommitMQNode) -> None:
    stored: list[bytes] = []
    with node.paused("flush"), Producer(node.address, timeout_s=1) as producer:
        refused = None
        for body in bodies("full", 4 * BUFFERS * SEGMENT_BYTES // 900):
            try:
                producer.send("full", body, queue=0, ack="memory")
            except SendError as error:
                refused = error
                break
            stored.append(body)
        assert refused is not None, "the pool took more than it has"
        assert (refused.code, refused.outcome) == ("SYSTEM_BUSY", Outcome.NOT_STORED)
        assert refused.retry_after_ms
        assert len(stored) * 900 > (BUFFERS - 1) * SEGMENT_BYTES * 0.8
    node.send("full", b"room", queue=0)
    assert read(node, "full", len(stored) + 1) == [*stored, b"room"]


@pytest.mark.parametrize("pooled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_node_that_is_killed_as_a_whole_brings_the_pool_over(
    node: CommitMQNode, tmp_path: Path, pooled: bool
) -> None:
    """Also when the next start is without the pool; the segments are the same then."""
    topic = f"crash-{pooled}"
    wanted = bodies(topic, 160)  # more than a segment
    node.send(topic, b"flushed", queue=0)
    committed = positions(node)["committed"]
    with node.paused("flush"):
        for at in range(0, len(wanted), 40):
            node.send_many(topic, [Message(body) for body in wanted[at : at + 40]], queue=0, ack="memory")
        assert positions(node)["committed"] == committed
        node.crash()
    if pooled:
        node.start()
    else:
        other = CommitMQNode(node.store.parent, [*SETTINGS, "commit_log.transient_store_pool=false"])
        try:
            other.start()
            assert not folder_of(other).exists()
            assert read(other, topic, 161) == [b"flushed", *wanted]
        finally:
            other.stop()
            other.end()
        node.start()
    assert "that a killed node had in its transient store pool" in node.log()
    assert read(node, topic, 161) == [b"flushed", *wanted]
    assert node.send(topic, b"on", queue=0).queue_offset == 161


def test_a_stop_leaves_nothing_in_memory_and_an_ordinary_store(node: CommitMQNode) -> None:
    assert folder_of(node).exists()
    wanted = bodies("stop", 7)
    for body in wanted:
        node.send("stop", body, queue=0, ack="memory")
    node.stop()
    assert not folder_of(node).exists()
    assert not note_path(StoreLayout(node.store)).exists()
    assert not (node.store / "abort").exists()
    flags = [word for setting in SMALL_INDEX for word in ("--set", setting)]
    checked = commitmq("store", "verify", str(node.store), *flags)
    assert checked.returncode == 0, checked.stdout
    node.start()
    assert read(node, "stop", 7) == wanted


def test_a_pool_that_does_not_fit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    settings = [*SETTINGS, "commit_log.transient_store_pool_size=128", f"commit_log.segment_bytes={1 << 40}"]
    flags = [word for setting in settings for word in ("--set", setting)]
    ended = commitmq("start", "--background", "--store", str(tmp_path / "store"), "--set", "network.port=0", *flags)
    assert ended.returncode == CliExit.STORE_UNUSABLE
    assert "commit_log.transient_store_pool_size" in ended.stderr
    eventually(lambda: not pool_folder(StoreLayout(tmp_path / "store")).exists(), "nothing is left")
