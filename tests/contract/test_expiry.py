"""Goal: a real node deletes exactly what its rules name, consumers go on where there is something left, and space comes back.

Method: nodes with tiny segments; age is made with ``utime``. After each deletion every message above the log's minimum is
read back and compared, and every process is looked into for mappings and descriptors of files that are gone.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from commitmq import Admin, Consumer, Producer, Reader
from commitmq.errors import ProtocolError
from commitmq.files.disk_space import find_holders
from commitmq.supervision.exit_codes import CliExit
from expiring import (
    EVERY_HOUR,
    FILE_BYTES,
    SEGMENT_BYTES,
    SETTINGS,
    TOPIC,
    Stored,
    expiry,
    make_old,
    names,
    segments,
    wait_for_first_segment,
    wait_until_durable,
)
from nodes import Node, commitmq, eventually, start_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Expires by age at every hour."""
    with start_node(tmp_path_factory.mktemp("expiry"), *SETTINGS, f"retention.delete_when={EVERY_HOUR}") as running:
        yield running


@pytest.fixture(scope="module")
def stored(node: Node) -> Stored:
    """Ten segments and more, from two queues in turn; queue 2 has only old messages."""
    made = Stored()
    with Producer(node.address) as producer:
        made.send(producer, 30, queue=2)
        made.send(producer, 700)
    wait_until_durable(node)
    return made


def test_expired_segments_go_and_queue_files_follow(node: Node, stored: Stored) -> None:
    bases = segments(node)
    assert len(bases) > 10
    before = names(node.store / "consumequeue" / TOPIC / "0")
    make_old(node, bases[:3])
    wait_for_first_segment(node, bases[3])
    assert segments(node) == bases[3:], "one that is not expired went"

    assert stored.check(node.address) == bases[3]
    first_kept = min(
        offset for (queue, offset), (_, sent) in stored.acked.items() if queue == 0 and sent.physical_offset >= bases[3]
    )
    eventually(
        lambda: names(node.store / "consumequeue" / TOPIC / "0")[0] == first_kept * 20 // FILE_BYTES * FILE_BYTES,
        f"files of the queue follow: {before}",
    )
    # All of queue 2 expired: it is empty, and goes on behind its last offset.
    with Admin(node.address) as admin:
        assert admin.offsets(TOPIC)[2] == (2, 30, 30, None)
        with pytest.raises(ProtocolError, match="no message begins"):
            admin.view(stored.acked[0, 0][1].physical_offset if (0, 0) in stored.acked else 0)
    with Producer(node.address) as producer:
        assert stored.send(producer, 1, queue=2).queue_offset == 30
    row = node.row("cleanup")
    assert (row["state"], row["position"], row["restarts"]) == ("ready", bases[3], 0)
    told = eventually(lambda: expiry(node), "status shows the last round")
    assert told["last_round"]["segments"] == 3
    assert told["last_round"]["reasons"] == ["age"]
    assert told["kept_because"] == "not expired"
    assert told["next_by_age_ms"] > time.time() * 1000 + 71 * 3_600_000
    text = commitmq("status", "--node", node.address).stdout
    assert "because of age" in text
    assert f"oldest segment {bases[3]:020d}: not expired" in text


def test_nobody_in_the_node_holds_what_was_deleted(node: Node, stored: Stored) -> None:
    with Reader(queues=[(TOPIC, 0), (TOPIC, 1)], node=node.address, start="earliest", mode="bytes") as consumer:
        consumer.poll(5)  # the reader maps the oldest segments and opens the oldest files
    base = segments(node)[0]
    done = commitmq("store", "expire", "--node", node.address, "--json", "--keep-bytes", str(SEGMENT_BYTES * 5))
    assert json.loads(done.stdout)["segments"][0] == f"{base:020d}", done.stderr
    pids = set(node.pids().values())

    def held() -> list[object]:
        folders = [node.store / "commitlog", *(node.store / "consumequeue" / TOPIC).iterdir()]
        return [one for folder in folders for one in find_holders(folder) if one.pid in pids]

    eventually(lambda: not held(), f"every process of the node lets go: {held()}")
    stored.check(node.address, base + 1)


def test_a_consumer_at_a_deleted_offset_is_told_where_to_go_on(node: Node, stored: Stored) -> None:
    with Admin(node.address) as admin:
        low = admin.offsets(TOPIC)[0][1]
        assert low > 0
    for mode in ("bytes", "ranges"):
        with Reader(queues=[(TOPIC, 0)], node=node.address, start=0, mode=mode) as consumer:
            batch = consumer.poll(5)
            assert batch[0].queue_offset == low
            assert [(gap.from_offset, gap.to_offset, gap.reason) for gap in consumer.gaps] == [
                (0, low, "OFFSET_TOO_SMALL")
            ]


def test_a_consumer_that_keeps_a_batch_reads_on_in_it_and_holds_nothing_later(node: Node, stored: Stored) -> None:
    with Reader(queues=[(TOPIC, 0)], node=node.address, start="earliest", mode="ranges") as consumer:
        batch = consumer.poll(5, max_messages=20)
        bodies = [(one.queue_offset, bytes(one.body)) for one in batch]
        with Admin(node.address) as admin:
            done = admin.expire(keep_bytes=SEGMENT_BYTES * 3)
            assert done["segments"]
            assert done["disk_bytes"] == len(done["segments"]) * SEGMENT_BYTES
            assert segments(node)[0] == done["min_offset"]
            again = admin.expire(keep_bytes=SEGMENT_BYTES * 3)
            assert (again["segments"], again["kept"]) == ([], "newer than was asked for")
        assert find_holders(node.store / "commitlog"), "this test must hold a deleted segment, or it shows nothing"
        assert [(one.queue_offset, bytes(one.body)) for one in batch] == bodies
        assert all(stored.acked[0, offset][0] == body for offset, body in bodies)
        del batch

        def lets_go() -> bool:
            consumer.poll(0.1)
            gc.collect()
            return not find_holders(node.store / "commitlog")

        eventually(lets_go, "the consumer lets go of deleted segments")
    stored.check(node.address)


def test_by_hand_everything_before_a_time(node: Node, stored: Stored) -> None:
    with Producer(node.address) as producer:
        stored.send(producer, 200)
        time.sleep(0.05)
        between = datetime.now(UTC)
        time.sleep(0.05)
        last_before = stored.send(producer, 200)
        boundary = sorted(sent.physical_offset for _, sent in stored.acked.values())[-200]
        assert boundary < last_before.physical_offset
    wait_until_durable(node)
    expected = boundary - boundary % SEGMENT_BYTES
    arguments = ("store", "expire", "--node", node.address, "--before", between.isoformat())
    there = segments(node)
    tried = json.loads(commitmq(*arguments, "--dry-run", "--json").stdout)
    assert segments(node) == there, "a dry run deletes nothing"
    assert (tried["min_offset"], tried["dry_run"], tried["kept"]) == (expected, True, "newer than was asked for")

    done = commitmq(*arguments)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(tried['segments'])} segments deleted, ")
    assert segments(node)[0] == expected
    assert [f"{base:020d}" for base in there if base < expected] == tried["segments"]
    assert stored.check(node.address) == expected
    early = json.loads(commitmq("store", "expire", "--node", node.address, "--before", "2000-01-01", "--json").stdout)
    assert early["segments"] == []


def test_a_running_node_keeps_others_off_its_store_and_refuses_nonsense(node: Node) -> None:
    refused = commitmq("store", "expire", str(node.store), "--keep-bytes", "0")
    assert refused.returncode == CliExit.STORE_LOCKED, refused.stderr
    assert commitmq("store", "expire", str(node.store)).returncode == CliExit.USAGE
    assert commitmq("store", "expire", "--node", node.address, "--before", "soon").returncode == CliExit.USAGE
    with Admin(node.address) as admin, pytest.raises(ProtocolError, match="INVALID_PARAMETER"):
        admin.expire(keep_bytes=-1)
    with Admin(node.address) as admin:
        nothing = admin.expire()
    assert (nothing["segments"], nothing["kept"]) == ([], "not expired")


def test_a_closed_store_is_expired_offline_and_opens_as_it_is(node: Node, stored: Stored) -> None:
    """The last test of this node: it is stopped, and started again."""
    with Producer(node.address) as producer:
        stored.send(producer, 300)
    minimum = stored.check(node.address)
    assert node.stop().returncode == 0
    there = segments(node)
    arguments = ("store", "expire", str(node.store), "--keep-bytes", str(2 * SEGMENT_BYTES), "--json")
    tried = json.loads(commitmq(*arguments, "--dry-run").stdout)
    assert segments(node) == there
    assert tried["segments"] == [f"{base:020d}" for base in there[:-3]]

    done = json.loads(commitmq(*arguments).stdout)

    assert done == {**tried, "dry_run": False, "followers": done["followers"]}
    assert done["followers"]["consumequeue"] > 10
    assert segments(node) == there[-3:]
    first = json.loads(commitmq("store", "dump", str(node.store)).stdout.splitlines()[0])
    assert there[-3] <= first["physical_offset"] < there[-2]
    (node.store / "abort").touch()
    crashed = json.loads(commitmq("store", "expire", str(node.store), "--keep-bytes", "1", "--json").stdout)
    assert crashed["kept"].endswith("on the next start recovers it"), "its ConsumeQueues may lack what is behind"
    assert segments(node) == there[-3:]
    (node.store / "abort").unlink()
    assert node.start().returncode == 0
    assert stored.check(node.address, minimum) == there[-3]
    with Producer(node.address) as producer:
        following = 1 + max(offset for queue, offset in stored.acked if queue == 2)
        assert stored.send(producer, 1, queue=2).queue_offset == following


@pytest.mark.slow
def test_every_kind_of_file_follows_offline(tmp_path: Path) -> None:
    settings = (
        "consume_queue.enable_ext=true",
        "consume_queue.ext_file_bytes=4096",
        "consume_queue.batch_file_bytes=920",
    )
    with start_node(tmp_path, *SETTINGS, *settings) as node:
        stored = Stored()
        with Admin(node.address) as admin, Producer(node.address) as producer:
            admin.topic_create("batches", queues=1, attributes={"queue.type": "BatchCQ"})
            for number in range(20):
                stored.send(producer, 50)
                for part in range(4):
                    producer.send_batch("batches", [b"%d.%d" % (number, part)] * 10, queue=0)
        assert node.stop().returncode == 0
        arguments = ("--keep-bytes", str(2 * SEGMENT_BYTES), "--json")

        done = json.loads(commitmq("store", "expire", str(node.store), *arguments).stdout)

        assert min(done["followers"].values()) > 0, done["followers"]
        sizes = ("--set", "index.hash_slots=200", "--set", "index.max_items=500")
        checked = commitmq("store", "verify", str(node.store), *sizes, "--json")
        assert (checked.returncode, json.loads(checked.stdout)["findings"]) == (0, [])
        assert node.start().returncode == 0
        assert stored.check(node.address) == done["min_offset"]


# ---------------------------------------------------------------- budget, and groups that have not read


def test_the_budget_is_kept_but_for_what_a_group_has_not_read(tmp_path: Path) -> None:
    budget = 12 * SEGMENT_BYTES
    settings = ("retention.keep_unconsumed=true", f"retention.store_bytes={budget}", "index.enable=false")
    with start_node(tmp_path, *SETTINGS, *settings) as node:
        stored = Stored()
        with Producer(node.address) as producer, Admin(node.address) as admin:
            stored.send(producer, 200)
            with Consumer(TOPIC, group="slow", node=node.address, start="earliest") as consumer:
                read = 0
                while read < 200:
                    read += len(consumer.poll(5))
                consumer.commit()
            stand = stored.send(producer, 800)
            told = eventually(lambda: (one := expiry(node)).get("last_round") and one, "the budget bites")
            told = eventually(
                lambda: "group slow" in (one := expiry(node))["kept_because"] and one, f"the group is named: {told}"
            )
            assert told["store_bytes"] > budget
            assert told["last_round"]["reasons"] == ["budget"]
            first_unread = min(sent.physical_offset for place, (_, sent) in stored.acked.items() if place[1] in (100,))
            base = first_unread - first_unread % SEGMENT_BYTES
            wait_for_first_segment(node, base)
            assert admin.expire(keep_bytes=0)["segments"] == [], "a person does not get around the rule either"
            assert segments(node)[0] == base
            assert stored.check(node.address) == base

            admin.reset_offsets("slow", TOPIC, "latest")
            eventually(lambda: expiry(node)["store_bytes"] <= budget, f"the budget is kept: {expiry(node)}")
            assert segments(node)[0] > base
            assert segments(node)[0] <= stand.physical_offset
            stored.check(node.address, base)
            assert expiry(node)["overrode"] is None
