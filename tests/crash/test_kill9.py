"""Goal: SIGKILL of any process at any moment loses nothing that was acknowledged, and the node heals by itself.

Method: the real node under real traffic (see ``traffic``). Processes are killed from outside at random moments, and from
inside at the places where it matters most (failpoints). Everything random comes from one seed, which is printed;
``COMMITMQ_SEED=… pytest …`` repeats a run's choices (not the scheduling of processes).
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import orjson
import pytest
from traffic import Traffic, check_reads, check_store, seed

from commitmq.format.index import IndexShape, list_index_files
from index_model import model_files
from nodes import WORKERS, Node, commitmq, eventually, start_node
from shares import shared

SEGMENT_BYTES = 1 << 18
FILE_BYTES = 4_000  # 200 units, so that queues roll to new files all the time
INDEX_SHAPE = IndexShape(100, 150)  # rolls all the time too, often in the middle of a record's keys
SETTINGS = (
    f"commit_log.segment_bytes={SEGMENT_BYTES}",
    f"consume_queue.file_bytes={FILE_BYTES}",
    f"index.hash_slots={INDEX_SHAPE.hash_slots}",
    f"index.max_items={INDEX_SHAPE.max_items}",
    "commit_log.max_message_bytes=65536",
    "supervisor.restart_backoff_max_ms=400",
)
VICTIMS = (*WORKERS, "forkserver", "supervisor")
# Each kills its process once, at a hit that is drawn between the two numbers.
FAILPOINTS = {
    "writer.after_append": (20, 200),
    "writer.before_publish": (20, 200),
    "writer.after_publish": (20, 200),
    "dispatcher.consume_queue.before_dispatch": (10, 60),
    "dispatcher.consume_queue.before_publish": (10, 60),
    "dispatcher.index.before_dispatch": (10, 60),
    "dispatcher.index.before_publish": (10, 60),
    "index.before_header": (10, 60),
    "index.inside_header": (10, 60),
    "index.after_header": (10, 60),
    "index.before_allocate": (2, 6),
    "index.before_rename": (2, 6),
    "index.after_create": (2, 6),
    "index.before_fdatasync": (2, 6),
    "reput.before_push": (10, 60),
    "flush.before_fdatasync": (10, 60),
    "flush.after_fdatasync": (10, 60),
    "flush.before_checkpoint": (1, 2),
    "disk.reserve.segment:before": (4, 5),
    "disk.rename.segment:before": (4, 5),
    "allocate.before_publish": (4, 5),
    "writer.before_append": (20, 200),
    "flush.after_checkpoint": (1, 2),
    "sidecar.before_checkpoint": (1, 2),
    "disk.sync.json:after": (2, 5),
    "disk.replace.json:before": (2, 5),
    "disk.replace.json:after": (2, 5),
    "journal.append": (2, 9),
    "journal.before_fdatasync": (2, 9),
    "journal.after_fdatasync": (2, 9),
    "queue.append": (20, 200),
    "queue.before_create": (10, 20),
    "queue.inside_create": (10, 20),
    "queue.before_fdatasync": (4, 20),
}
# The default suite has these; the slow one has all.
FIRST = {
    "writer.after_append",
    "writer.after_publish",
    "dispatcher.consume_queue.before_dispatch",
    "dispatcher.consume_queue.before_publish",
    "dispatcher.index.before_publish",
    "index.inside_header",
    "index.after_create",
    "index.before_fdatasync",
    "reput.before_push",
    "flush.before_fdatasync",
    "flush.after_fdatasync",
    "disk.rename.segment:before",
    "disk.replace.json:before",
    "journal.before_fdatasync",
    "queue.append",
    "queue.inside_create",
}


def check_everything(node: Node, traffic: Traffic) -> None:
    """What can be read from the running node, then its files, then the dump of a store that is closed."""
    check_reads(node.address, traffic)
    ended = node.stop()
    assert ended.returncode == 0, ended.stderr
    check_files(node, traffic)


def check_files(node: Node, traffic: Traffic) -> None:
    records = check_store(node.store, traffic, segment_bytes=SEGMENT_BYTES, file_bytes=FILE_BYTES)
    assert len(records) > 500, "too little happened to show anything"
    dumped = commitmq("store", "dump", str(node.store))
    assert dumped.returncode == 0, dumped.stderr
    lines = [orjson.loads(line) for line in dumped.stdout.splitlines()]
    assert [line["physical_offset"] for line in lines] == [record.physical_offset for record in records]
    # Whoever died when: the index is what one process that never died would have made.
    folder = node.store / "index"
    found = [(folder / name).read_bytes() for name in list_index_files(folder)]
    assert found == [one.to_bytes() for one in model_files(records, INDEX_SHAPE)]


def kill(node: Node, role: str, pids: dict[str, int]) -> None:
    os.kill(pids[role], signal.SIGKILL)


def wait_healed(node: Node, role: str, before: dict[str, int]) -> None:
    eventually(lambda: node.healed(role, before[role]) and node.is_ready(), f"{role} is back")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "share",
    [pytest.param(0.3, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.long)],
    ids=["some", "each"],
)
def test_each_process_killed_in_turn_under_traffic(tmp_path: Path, share: float) -> None:
    number = seed()
    chance = random.Random(number)
    victims = chance.sample(VICTIMS, round(share * len(VICTIMS)))
    with start_node(tmp_path, *SETTINGS) as node:
        with Traffic(node.address, number).running() as traffic:
            traffic.wait_for_sends(20)
            for role in victims:
                time.sleep(chance.random() * 0.3)
                before = node.pids()
                restarts = node.row(role)["restarts"]
                epoch = node.report()["node"]["epoch"]
                kill(node, role, before)
                wait_healed(node, role, before)
                if role == "supervisor":
                    assert node.report()["node"]["epoch"] == epoch + 1
                else:
                    assert node.row(role)["restarts"] == restarts + 1
                traffic.wait_for_sends()
        check_everything(node, traffic)


@pytest.mark.slow
def test_everything_killed_at_once_under_traffic(tmp_path: Path) -> None:
    number = seed()
    chance = random.Random(number)
    with start_node(tmp_path, *SETTINGS) as node:
        with Traffic(node.address, number).running() as traffic:
            for _ in range(2):
                traffic.wait_for_sends(20)
                time.sleep(chance.random())
                port = node.address
                node.kill_all()
                assert (node.store / "abort").exists()
                ended = node.start()
                assert ended.returncode == 0, ended.stderr
                assert node.address == port, "clients must find the node where it was"
                traffic.wait_for_sends()
            assert "store recovered clean=False" in node.log()
        check_everything(node, traffic)


@pytest.mark.parametrize(
    "names", [FIRST, pytest.param(sorted(FAILPOINTS.keys() - FIRST), marks=pytest.mark.long)], ids=["first", "others"]
)
def test_killed_at_the_worst_places(tmp_path: Path, names: list[str]) -> None:
    """Each failpoint fires once over all lives of its process; the traffic goes on until all have."""
    number = seed()
    chance = random.Random(number)
    fired = tmp_path / "fired"
    fired.mkdir()
    points = ";".join(f"{name}=kill@{chance.randint(*FAILPOINTS[name])}" for name in sorted(names))
    extra = {"COMMITMQ_FAILPOINTS": points, "COMMITMQ_FAILPOINTS_ONCE": str(fired)}
    with start_node(tmp_path, *SETTINGS, **extra) as node:
        with Traffic(node.address, number).running() as traffic:
            eventually(
                lambda: len(list(fired.iterdir())) == len(names) or traffic.check(),  # type: ignore[func-returns-value]
                f"all of {points} fire",
                timeout_s=60,
            )
            eventually(node.is_ready, "the node is whole again")
            traffic.wait_for_sends()
        deaths = node.log().count("worker died")
        assert deaths >= len(names)
        check_everything(node, traffic)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", shared(range(6), 1))
@pytest.mark.parametrize("flush_mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_random_processes_killed_at_random_moments(tmp_path: Path, flush_mode: str, run: int) -> None:
    number = seed() + run
    chance = random.Random(number)
    with start_node(tmp_path, *SETTINGS, f"commit_log.flush_mode={flush_mode}") as node:
        with Traffic(node.address, number).running() as traffic:
            traffic.wait_for_sends(20)
            for _ in range(12):
                time.sleep(chance.random() * 0.5)
                before = node.pids()
                victims = chance.sample([role for role in VICTIMS if role in before], chance.choice((1, 1, 2, 3)))
                for role in victims:
                    kill(node, role, before)
                    time.sleep(chance.choice((0, 0, 0.05)))
                eventually(
                    lambda before=before, victims=victims: (  # type: ignore[misc]
                        node.is_ready() and all(node.pids().get(role) != before[role] for role in victims)
                    ),
                    f"healed after {victims}",
                )
                if chance.random() < 0.3:
                    traffic.wait_for_sends()
            traffic.wait_for_sends()
        check_everything(node, traffic)
