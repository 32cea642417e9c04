"""Goal: no position outlives the log's end: after a power cut, or a repair that cut the log, everybody gets what is stored
later.

Method: nodes with everything that can have a position, killed as a whole; then the log ends earlier, as a power cut leaves
it on a node that flushes asynchronously, or as `store repair --cut` leaves it. More messages are stored than were lost.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Consumer, Producer, Reader, ShareConsumer
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout
from commitmq.store.recovery.cut_history import NO_CUT, CutHistory
from commitmq_plugins.rocketmq.remoting.codes import RequestCode, ResponseCode
from commitmq_plugins.rocketmq.remoting.frame import Command, request
from nodes import Node, commitmq, start_node, wait_until_dispatched
from rocketmq_client import served
from rocketmq_peer import asked, make_group, pull, served_node

NEVER_FLUSHED = (
    "commit_log.flush_mode=async",
    "commit_log.flush_interval_ms=600000",
    "commit_log.flush_thorough_interval_ms=600000",
    "commit_log.flush_least_pages=100000",
    "commit_log.writer_sync_bytes=0",
)


def read(consumer: Consumer | Reader, wanted: int, seconds: float = 20.0) -> list[bytes]:
    """``wanted`` messages, and any more that come within a moment."""
    found: list[bytes] = []
    until = time.monotonic() + seconds
    while len(found) < wanted and time.monotonic() < until:
        found += [message.body for message in consumer.poll(0.3)]
    return found + [message.body for message in consumer.poll(0.3)]


def overwrite(node: Node, place: int, data: bytes) -> None:
    with (node.store / "commitlog" / segment_name(0)).open("r+b") as file:
        file.seek(place)
        file.write(data)


def history(node: Node) -> CutHistory:
    return CutHistory.load(StoreLayout(node.store))


def test_a_group_gets_what_is_stored_after_a_power_cut(tmp_path: Path) -> None:
    with start_node(tmp_path, *NEVER_FLUSHED) as node:
        with Producer(node.address, ack="memory") as producer:
            for number in range(5):
                producer.send("t", b"safe %d" % number, queue=0, ack="flushed")
            lost_from = producer.send("t", b"lost", queue=0).physical_offset
            for _ in range(4):
                producer.send("t", b"lost", queue=0)
        with Consumer("t", group="g", node=node.address) as consumer:
            assert len(read(consumer, 10)) == 10
        before = history(node)
        node.kill_all()
        overwrite(node, lost_from, bytes(32_768))
        started = node.start()
        assert started.returncode == 0, started.stderr
        said = started.stdout + started.stderr
        assert f"The log ends at {lost_from}, before what 1 group(s) had committed" in said
        assert "lowered by 5 message(s)" in said
        with Admin(node.address) as admin:
            assert [offset for _, queue, offset in admin.group("g")["offsets"] if queue == 0] == [5]
            shown = admin.status()["node"]
        after = history(node)
        assert shown["generation"] == after.generation > before.generation
        assert (shown["log_cuts"], shown["positions_lowered"]) == (before.total + 1, 1)
        assert (after.cuts[-1].end, after.pending_end) == (lost_from, NO_CUT)
        assert "1 offset(s) of 1 group(s) were lowered by" in commitmq("status", "--node", node.address).stdout
        assert "1 offset(s) were lowered" in commitmq("doctor", "--node", node.address).stdout
        new = [b"new %d" % number for number in range(8)]
        with Producer(node.address) as producer:
            for body in new:
                producer.send("t", body, queue=0)
        with Consumer("t", group="g", node=node.address) as consumer:
            assert read(consumer, 8) == new


def test_whoever_keeps_positions_itself_goes_back_to_the_end_and_says_so(tmp_path: Path) -> None:
    """A reader, a member of a group that had not committed, and broadcasting consumers: one lives on, one was away.


    More messages are stored than were lost, so no position is behind the queue's end any more when it is asked for.
    """
    with start_node(tmp_path, *NEVER_FLUSHED) as node:
        with Producer(node.address, ack="memory") as producer:
            for number in range(5):
                producer.send("t", b"safe %d" % number, queue=0, ack="flushed")
            lost_from = producer.send("t", b"lost", queue=0).physical_offset
            for _ in range(4):
                producer.send("t", b"lost", queue=0)
        local: dict[str, Any] = {
            "group": "all", "node": node.address, "broadcasting": True, "positions_folder": tmp_path / "positions",
        }  # fmt: skip
        with Consumer("t", member="away", **local) as away:
            assert len(read(away, 10)) == 10
            away.commit()
        with (
            Reader("t", node=node.address) as reader,
            Consumer("t", group="g", node=node.address, auto_commit=False) as live,
            Consumer("t", member="there", **local) as there,
        ):
            for consumer in (reader, live, there):
                assert len(read(consumer, 10)) == 10
            there.commit()
            node.kill_all()
            overwrite(node, lost_from, bytes(32_768))
            started = node.start()
            assert started.returncode == 0, started.stderr
            new = [b"new %d" % number for number in range(8)]
            with Producer(node.address) as producer:
                for body in new:
                    producer.send("t", body, queue=0)
            wait_until_dispatched(node.address)
            # The member commits what it had read before its next pull tells it that those messages are gone.
            live.commit({("t", 0): 10})
            with Admin(node.address) as admin:
                assert [offset for _, queue, offset in admin.group("g")["offsets"] if queue == 0] == [5]
            with Consumer("t", member="away", **local) as back:
                for consumer in (reader, live, there, back):
                    assert read(consumer, 8) == new
                    assert [gap[:4] for gap in consumer.gaps] == [("t", 0, 10, 5)]
                    assert consumer.positions["t", 0] == 13
            assert read(live, 0) == []
            live.commit()
            with Admin(node.address) as admin:
                assert [offset for _, queue, offset in admin.group("g")["offsets"] if queue == 0] == [13]


def share(node: Node, group: str, wanted: int, *, ordered: bool = False) -> set[bytes]:
    found: set[bytes] = set()
    with ShareConsumer("t", group=group, node=node.address, ordered=ordered) as consumer:
        until = time.monotonic() + 20
        while len(found) < wanted and time.monotonic() < until:
            received = consumer.receive(max_messages=32, wait_s=1)
            found |= {message.body for message in received}
            consumer.ack(received)
    return found


def everything(node: Node, topic: str, wanted: int) -> list[bytes]:
    with Reader(topic, node=node.address) as reader:
        return sorted(read(reader, wanted))


@pytest.mark.timeout(300)
def test_everybody_goes_on_after_a_repair_that_cut_flushed_messages(tmp_path: Path) -> None:
    """The delayed messages are stored before the place of the cut, and their deliveries, acks and positions behind it."""
    quick = [f"{name}.persist_interval_ms=50" for name in ("schedule", "timer", "pop")]
    with start_node(tmp_path, *quick) as node:
        with Producer(node.address) as producer:
            for number in range(10):
                producer.send("t", b"old %d" % number, queue=0)
            for number in range(4):
                producer.send("d", b"level %d" % number, delay_level=1)
                producer.send("d", b"timer %d" % number, delay=1.0)
        waited = sorted(b"%s %d" % (kind, number) for kind in (b"level", b"timer") for number in range(4))
        assert everything(node, "d", 8) == waited
        with Reader("d", node=node.address) as reader:
            cut = min(message.physical_offset for message in reader.poll(5))
        with Producer(node.address) as producer:
            for number in range(5):
                producer.send("t", b"lost %d" % number, queue=0)
        with Consumer("t", group="g", node=node.address) as consumer:
            assert len(read(consumer, 15)) == 15
        assert len(share(node, "shared", 15)) == 15
        assert len(share(node, "ordered", 15, ordered=True)) == 15
        time.sleep(1)
        node.kill_all()
        overwrite(node, cut, b"\xff" * 40)
        assert node.start().returncode, "damage in the middle of a log is for a person"
        repaired = commitmq("store", "repair", str(node.store), "--cut", "--yes")
        assert repaired.returncode == 0, repaired.stderr
        noted = history(node)
        assert (noted.cuts[-1].by, noted.pending_end) == ("repair --cut", cut)
        started = node.start()
        assert started.returncode == 0, started.stderr
        said = started.stdout + started.stderr
        assert f"The log ends at {cut}, before what" in said
        new = [b"new %d" % number for number in range(20)]
        with Producer(node.address) as producer:
            for body in new:
                producer.send("t", body, queue=0)
        with Consumer("t", group="g", node=node.address) as consumer:
            assert read(consumer, 20) == new
        assert share(node, "shared", 20) >= set(new)
        assert share(node, "ordered", 20, ordered=True) >= set(new)
        assert everything(node, "d", 8) == waited
        rows = {row["role"]: row for row in node.report()["processes"]}
        assert {(name, rows[name]["restarts"]) for name in ("pop", "schedule", "timer")} == {
            ("pop", 0),
            ("schedule", 0),
            ("timer", 0),
        }


def test_a_client_of_rocketmq_is_sent_back_to_the_end_once(tmp_path: Path) -> None:
    """It knows no generation, had read what was lost, and had committed some of it or nothing at all; or it comes back only to
    the second start behind the cut.
    """
    with served_node(tmp_path, *NEVER_FLUSHED) as (node, port, _):
        with Producer(node.address, ack="memory") as producer:
            for number in range(5):
                producer.send("t", b"safe %d" % number, queue=0, ack="flushed")
            lost_from = producer.send("t", b"lost", queue=0).physical_offset
            for _ in range(4):
                producer.send("t", b"lost", queue=0)
        for group, offset in (("late", 3), ("ahead", 8), ("away", 8), ("back", 8)):
            assert asked(port, make_group(group), commit(group, offset))[1].code == 0
        node.kill_all()
        overwrite(node, lost_from, bytes(32_768))
        started = node.start()
        assert started.returncode == 0, started.stderr
        with Producer(node.address) as producer:
            for number in range(8):
                producer.send("t", b"new %d" % number, queue=0)
        wait_until_dispatched(node.address)
        served(port)
        for group in ("late", "ahead"):
            # What it commits before it pulls is of messages that are gone.
            told, moved, went_on, seen = asked(
                port, commit(group, 10), pull(group, "t", 10), pull(group, "t", 5), pull(group, "t", 10)
            )
            assert told.code == 0
            assert (moved.code, moved.ext_fields["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "5"), group
            assert (went_on.code, seen.code) == (0, 0), "once"
            with Admin(node.address) as admin:
                assert [offset for _, queue, offset in admin.group(group)["offsets"] if queue == 0] == [5]
        moved, _ = asked(port, pull("back", "t", 8), commit("back", 7))
        assert moved.code == ResponseCode.PULL_OFFSET_MOVED
        assert node.stop().returncode == 0
        started = node.start()
        assert started.returncode == 0, started.stderr
        served(port)
        moved, seen = asked(port, pull("away", "t", 8), pull("back", "t", 8))
        assert (moved.code, moved.ext_fields["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "5")
        assert seen.code == 0, "it came back since"


def commit(group: str, offset: int) -> Command:
    fields = {"consumerGroup": group, "topic": "t", "queueId": "0", "commitOffset": str(offset)}
    return request(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
