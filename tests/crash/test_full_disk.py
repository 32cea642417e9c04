"""Goal: a full disk refuses sends with a clear status, loses nothing, keeps reads going, and heals when space is back.

Method: the store is on a tmpfs of its own, which a filler file fills to the last byte. Where mounting is not permitted
the tests are skipped by name; ``COMMITMQ_CI=1`` forbids that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Producer, Reader, SendResult
from commitmq.errors import Outcome, SendError
from commitmq.format.index import IndexShape
from commitmq.store.index.index_reader import IndexReader
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.recovery.sidecar import Sidecar
from mover_crashes import QUEUES, check_each_once, info, make_topic
from nodes import Node, commitmq, eventually, start_node
from small_disk import fill, small_disk

MIB = 1 << 20
SEGMENT_BYTES = 1 << 18
TOPIC = "orders"
BODY_BYTES = 2_000
INDEX_SHAPE = IndexShape(500, 50)  # small files, so that the index needs space again and again
INDEX = (f"index.hash_slots={INDEX_SHAPE.hash_slots}", f"index.max_items={INDEX_SHAPE.max_items}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty 8 MiB file system."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


class Stored:
    """A producer, and what it was told is stored."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.acked: dict[bytes, SendResult] = {}
        self.refused: set[bytes] = set()
        self._number = 0

    def send(self, ack: str = "flushed") -> SendResult:
        self._number += 1
        body = f"{self._number} ".encode().ljust(BODY_BYTES, b".")
        try:
            result = self.producer.send(TOPIC, body, queue=0, ack=ack)
        except SendError as error:
            if error.outcome is Outcome.NOT_STORED:
                self.refused.add(body)
            raise
        self.acked[body] = result
        return result

    def send_until_refused(self) -> SendError:
        for _ in range(10_000):
            try:
                self.send(ack="memory")
            except SendError as error:
                return error
        raise AssertionError("the disk never got full")

    def send_when_possible(self) -> SendResult:
        """Try again as an application would, until it is taken."""

        def attempt() -> SendResult | None:
            try:
                return self.send()
            except SendError as error:
                # A refusal that passes must say when to come back, and must not have stored anything.
                if error.outcome is not Outcome.NOT_STORED or not error.retry_after_ms:
                    raise
                return None

        result = eventually(attempt, "sends are accepted again", timeout_s=15)
        assert isinstance(result, SendResult)
        return result

    def read_all(self, address: str) -> dict[int, bytes]:
        """Body by queue offset, of all that a consumer gets."""
        found: dict[int, bytes] = {}
        with Reader(queues=[(TOPIC, 0)], node=address) as consumer:
            while batch := consumer.poll(0.3):
                found.update({message.queue_offset: message.body for message in batch})
        return found

    def check(self, found: dict[int, bytes]) -> None:
        """Every acknowledged message at its offset, no refused one, no gap."""
        assert sorted(found) == list(range(len(found)))
        for body, result in self.acked.items():
            assert found[result.queue_offset] == body
        assert not self.refused & set(found.values())


def check_after_stop(node: Node, stored: Stored) -> None:
    ended = node.stop()
    assert ended.returncode == 0, ended.stderr
    dumped = commitmq("store", "dump", str(node.store))
    assert dumped.returncode == 0, dumped.stderr
    assert len(dumped.stdout.splitlines()) >= len(stored.acked)
    # Every message has one unique key and no other: as many items, none twice, in the order of the log.
    reader = IndexReader(CommitLog(node.store / "none", 4096), node.store / "index", INDEX_SHAPE)
    offsets = [
        int.from_bytes(file.map[at + 4 : at + 12], "big")
        for file in filter(None, map(reader.mapped, reversed(reader.names())))
        for at in map(INDEX_SHAPE.item_position, range(1, file.header.count))
    ]
    assert offsets == [json.loads(line)["physical_offset"] for line in dumped.stdout.splitlines()]


def disk_flags(address: str) -> object:
    with Admin(address) as admin:
        return admin.status()["disk_flags"]


@pytest.mark.parametrize(
    ("ratio", "code"),
    [("0.9", "SERVICE_NOT_AVAILABLE"), ("1.0", "CREATE_MAPPED_FILE_FAILED")],
    ids=["fuller than the warning ratio", "no space for the next segment"],
)
def test_a_full_disk_refuses_sends_and_heals_by_itself(disk: Path, ratio: str, code: str) -> None:
    settings = (
        f"commit_log.segment_bytes={SEGMENT_BYTES}",
        f"disk.warning_ratio={ratio}",
        "disk.check_interval_ms=100",
        "retention.clean_forcibly=false",
        "commit_log.preallocate_segments=1",
    )
    with start_node(disk, *INDEX, *settings) as node, Producer(node.address, timeout_s=5) as producer:
        stored = Stored(producer)
        for _ in range(10):
            stored.send()
        restarts = {row["role"]: row["restarts"] for row in node.report()["processes"]}
        filler = fill(disk, leave_bytes=64 * 1024)  # the queue's files may still grow
        if code == "SERVICE_NOT_AVAILABLE":
            eventually(lambda: disk_flags(node.address), "the node has noticed")

        error = stored.send_until_refused()

        assert error.code == code, error
        assert error.outcome is Outcome.NOT_STORED
        assert error.retry_after_ms
        assert "space" in error.message or "disk" in error.message
        assert disk_flags(node.address)
        with pytest.raises(SendError) as batch:
            producer.send_batch(TOPIC, [b"x" * 100] * 10_000, queue=0)
        assert batch.value.code == code
        assert batch.value.outcome is Outcome.NOT_STORED
        stored.check(stored.read_all(node.address))  # reads go on

        filler.unlink()
        stored.send_when_possible()
        for _ in range(300):
            stored.send(ack="memory")
        assert not disk_flags(node.address)
        assert {row["role"]: row["restarts"] for row in node.report()["processes"]} == restarts
        eventually(lambda: len(stored.read_all(node.address)) >= len(stored.acked), "everything is readable")
        stored.check(stored.read_all(node.address))
        check_after_stop(node, stored)


def test_consume_queues_that_cannot_grow_refuse_sends_and_catch_up(disk: Path) -> None:
    settings = (
        f"commit_log.segment_bytes={MIB}",
        "commit_log.preallocate_segments=1",
        "consume_queue.file_bytes=400",  # 20 units: every 20 messages need a new page of the file system
        "disk.warning_ratio=1.0",
        "disk.check_interval_ms=100",
        "retention.clean_forcibly=false",
    )
    with start_node(disk, *INDEX, *settings) as node, Producer(node.address, timeout_s=5) as producer:
        stored = Stored(producer)
        for _ in range(10):
            stored.send()
        eventually(lambda: len(stored.read_all(node.address)) == 10, "the first messages are dispatched")
        filler = fill(disk)

        refused: list[SendError] = []
        for _ in range(200):
            try:
                stored.send()
            except SendError as error:
                refused.append(error)
                break
            time.sleep(0.01)  # one batch of units each
        assert refused, "the ConsumeQueue did not need space"
        assert refused[0].code == "SERVICE_NOT_AVAILABLE", refused[0]
        assert refused[0].outcome is Outcome.NOT_STORED
        assert refused[0].retry_after_ms
        assert "ConsumeQueue" in refused[0].message
        # Reads go on, up to the last batch of units that could be written as a whole.
        assert 10 <= len(stored.read_all(node.address)) <= len(stored.acked)

        filler.unlink()
        stored.send_when_possible()
        eventually(lambda: len(stored.read_all(node.address)) >= len(stored.acked), "the queue has caught up")
        stored.check(stored.read_all(node.address))
        check_after_stop(node, stored)


def test_a_node_killed_on_a_full_disk_starts_there_and_has_everything(disk: Path) -> None:
    settings = (
        f"commit_log.segment_bytes={SEGMENT_BYTES}",
        "commit_log.preallocate_segments=1",
        "disk.warning_ratio=1.0",
        "disk.check_interval_ms=100",
        "retention.clean_forcibly=false",
    )
    with start_node(disk, *INDEX, *settings) as node, Producer(node.address, timeout_s=5) as producer:
        stored = Stored(producer)
        stored.send()
        filler = fill(disk, leave_bytes=64 * 1024)
        stored.send_until_refused()
        node.kill_all()

        ended = node.start()

        assert ended.returncode == 0, ended.stderr
        eventually(lambda: len(stored.read_all(node.address)) >= len(stored.acked), "everything is readable")
        stored.check(stored.read_all(node.address))
        filler.unlink()
        stored.send_when_possible()
        stored.check(stored.read_all(node.address))
        check_after_stop(node, stored)


def timer_progress(disk: Path) -> dict[str, object]:
    with contextlib.suppress(FileNotFoundError):
        found: dict[str, object] = json.loads((disk / "store/commitmq/timer.json").read_bytes())
        return found
    return {}


@pytest.mark.parametrize("loses_positions", [False, True], ids=["its files as they are", "all of it made again"])
def test_a_timer_that_starts_on_a_full_disk_waits_there(disk: Path, loses_positions: bool) -> None:
    """It ends neither by SIGBUS nor by an error; it says for which files it waits, and delivers when there is room."""
    settings = (
        "disk.warning_ratio=1.0",
        "retention.clean_forcibly=false",
        "memory.enable=false",
        "timer.persist_interval_ms=50",
    )
    with start_node(disk, f"commit_log.segment_bytes={MIB}", *settings, *INDEX) as node:
        make_topic(node)
        sent = [b"%d" % number for number in range(20)]
        with Producer(node.address) as producer:
            for queue in range(QUEUES):
                producer.send("parcels", b"a page of queue %d" % queue, queue=queue)
            for body in sent[:-1]:
                producer.send("parcels", body, delay=3.0)
            producer.send("parcels", sent[-1], delay=60.0)
            eventually(
                lambda: timer_progress(disk).get("is_whole"), "they wait in the wheel, and its positions are written"
            )
            fill(disk)
            if loses_positions:
                for path in (disk / "store/commitmq/timer.json", disk / "store/config/timercheck"):
                    path.unlink()
                fill(disk)
            old = node.pids()["timer"]
            os.kill(old, signal.SIGKILL)
            eventually(lambda: node.healed("timer", old), "it is started again")

            def says_why() -> bool:
                warnings = node.report()["disk_warnings"]
                return any(one.startswith("timer waits for room on the disk: ") for one in warnings)

            eventually(says_why, "it waits for room")
            time.sleep(3.0)
            assert says_why()
            assert node.row("timer")["restarts"] == 1
            (disk / "filler").unlink()
            eventually(lambda: not info(node, "timer").get("no_room"), "it goes on")
            check_each_once(node, "timer", sent[:-1])


@pytest.mark.slow
@pytest.mark.timeout(300)  # six runs of the command, each of which may take long on a busy machine
def test_a_store_that_a_crash_left_without_a_byte_of_space_can_be_expired(disk: Path) -> None:
    """No node starts where not even the small files of a start fit; the command that makes room needs no space itself."""
    with start_node(disk, f"commit_log.segment_bytes={SEGMENT_BYTES}", *INDEX) as node:
        with Producer(node.address, timeout_s=5) as producer:
            stored = Stored(producer)
            for _ in range(5 * SEGMENT_BYTES // BODY_BYTES):
                stored.send("memory")
            newest = stored.send("flushed")
        eventually(lambda: durable(node.store) > 3 * SEGMENT_BYTES, "the queues are durable beyond the old segments")
        node.kill_all()
        minimum = node.store / "commitmq" / "min_offset"
        minimum.unlink(missing_ok=True)
        shutil.rmtree(node.store / "run")  # whose files would make room for new ones
        filler = fill(disk)
        refused = node.start()
        assert refused.returncode != 0
        assert f"commitmq store expire {node.store}" in refused.stderr, refused.stderr
        assert "No space left on device" in refused.stderr
        again = node.start()
        assert again.stderr.splitlines()[-1] == refused.stderr.splitlines()[-1]
        arguments = ("store", "expire", str(node.store), "--keep-bytes", str(2 * SEGMENT_BYTES), "--json")
        would = json.loads(node.run(*arguments, "--dry-run").stdout)
        ended = node.run(*arguments)
        assert ended.returncode == 0, ended.stderr
        done = json.loads(ended.stdout)
        assert done["segments"] == would["segments"]
        assert done["segments"]
        assert int(minimum.read_text()) == done["min_offset"]
        ended = node.start("commit_log.preallocate_segments=1", "memory.enable=false")
        assert ended.returncode == 0, ended.stderr + node.log_tail()
        read: list[int] = []
        with Reader(node=node.address, queues=[(TOPIC, 0)]) as consumer:
            while not read or read[-1] < newest.queue_offset:
                batch = consumer.poll(20.0)
                assert len(batch), f"nothing behind {read[-1:]}"
                read += [message.queue_offset for message in batch]
        assert read == list(range(read[0], newest.queue_offset + 1))
        assert read[0] > 0, "the oldest are gone"
        filler.unlink()
        eventually(lambda: not disk_flags(node.address), "the node has noticed")
        with Producer(node.address) as again_producer:
            assert again_producer.send(TOPIC, b"one more", queue=0).queue_offset == newest.queue_offset + 1


def durable(store: Path) -> int:
    sidecar = Sidecar.load(StoreLayout(store).sidecar)
    return 0 if sidecar is None else sidecar.queues_durable
