"""Goal: what works on local cores works on a standalone cluster, where tasks run in processes that others have started.

Method: a real master and two workers that know nothing of this checkout; a real node; the source by every way, the jobs over
a store, and a write during which a Python worker and then a whole executor are killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from source_reading import wait_until_shown
from standalone import WORKERS, Cluster, Driver, start_cluster
from topic_contents import stored

import commitmq
from commitmq import Message
from commitmq.testing.node import CommitMQNode, start_node
from commitmq.testing.node_process import SMALL_INDEX
from commitmq_plugins.spark.jobs.manifest import Manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUEUES = 4
MESSAGES = 40_000
_DEADLINE_S = 240
_SEGMENT = "commit_log.segment_bytes=2097152"
# What nodes of tests are started with, for jobs that read the files of one.
_SIZES = [word for setting in (_SEGMENT, *SMALL_INDEX) for word in ("--set", setting)]

Row = list[object]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Driver:
    return cluster.driver()


def fill(node: CommitMQNode) -> list[Row]:
    """Send numbered messages to ``in``; returns what the source must show of them."""
    node.admin.topic_create("in", QUEUES)
    for queue in range(QUEUES):
        for first in range(queue, MESSAGES, QUEUES * 2_000):
            numbers = range(first, min(first + QUEUES * 2_000, MESSAGES), QUEUES)
            messages = [
                Message(f"{number} {'x' * (number % 200)}".encode(), tags=f"T{number % 3}", keys=[f"k{number}"])
                for number in numbers
            ]
            node.send_many("in", messages, queue=queue)
    wait_until_shown(node.address)
    return [
        [queue, offset, f"T{number % 3}", f"k{number}", f"{number} {'x' * (number % 200)}"]
        for queue in range(QUEUES)
        for offset, number in enumerate(range(queue, MESSAGES, QUEUES))
    ]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CommitMQNode, list[Row]]]:
    """A running node, and what its topic ``in`` holds."""
    with start_node(tmp_path_factory.mktemp("cmq"), [_SEGMENT]) as node:
        yield node, fill(node)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """A store of several segments that no node uses, and what its topic ``in`` holds."""
    with start_node(tmp_path_factory.mktemp("cmq"), [_SEGMENT]) as node:
        rows = fill(node)
        node.stop()
        assert len(list((node.store / "commitlog").iterdir())) > WORKERS
        return node.store, rows


def test_executors_import_what_the_driver_does(cluster: Cluster, driver: Driver) -> None:
    """Workers were started without PYTHONPATH, so it is the session's doing."""
    found = driver.ask("executors")
    assert [path for _, path in found] == [commitmq.__file__] * WORKERS
    assert len(cluster.executors()) == WORKERS
    family = {one.pid for executor in cluster.executors() for one in executor.children(recursive=True)}
    assert {pid for pid, _ in found} <= family


@pytest.mark.parametrize("way", ["folder at rest", "folder of a node", "files", "pull"])
def test_the_source_gives_every_message(
    driver: Driver, filled: tuple[CommitMQNode, list[Row]], store: tuple[Path, list[Row]], way: str
) -> None:
    node, rows = filled
    options = {"topics": "in", "minPartitions": "4"}
    if way == "folder at rest":
        rows = store[1]
        options["store"] = str(store[0])
    elif way == "folder of a node":
        options["store"] = str(node.store)
    else:
        options.update(node=node.address, transfer=way)
    found = driver.ask("read", options)
    assert len(found) == len(rows) == MESSAGES
    assert found == rows


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_jobs_over_a_store(driver: Driver, store: tuple[Path, list[Row]], tmp_path: Path) -> None:
    root, rows = store
    code, output = driver.ask("command", "verify", str(root), *_SIZES, "--json")
    (report,) = json.loads(output)["stores"]
    assert (code, report["findings"], report["records"]) == (0, [], MESSAGES)

    code, output = driver.ask("command", "rebuild", str(root), "--into", str(tmp_path / "new"), *_SIZES)
    assert (code, f"from {MESSAGES} records" in output) == (0, True), output
    made = files_of(tmp_path / "new" / "consumequeue")
    assert made == files_of(root / "consumequeue")
    assert len(made) >= QUEUES

    # Damage is found by whichever executor meets it.
    unit = max((root / "consumequeue" / "in").glob("*/*"))
    sound = unit.read_bytes()
    unit.write_bytes(b"\x01" + sound[1:])
    code, output = driver.ask("command", "verify", str(root), *_SIZES, "--json")
    unit.write_bytes(sound)
    (report,) = json.loads(output)["stores"]
    assert (code, [one["kind"] for one in report["findings"]]) == (65, ["queue.wrong"])

    for words in (f"{MESSAGES} messages", "nothing is new"):
        code, output = driver.ask("command", "export", str(root), "--to", str(tmp_path / "out"), "--topic", "in")
        assert (code, output.startswith(words)) == (0, True), output
    tables = [pq.ParquetFile(tmp_path / "out" / file.path).read() for file in Manifest(tmp_path / "out").files]
    found = [
        [row["queue_id"], row["queue_offset"], row["tags"], row["keys"], row["body"].decode()]
        for table in tables
        for row in table.to_pylist()
    ]
    assert sorted(found) == rows


def killed(candidates: Callable[[], list[psutil.Process]]) -> psutil.Process:
    """SIGKILL to the first of ``candidates``, as soon as there is one."""
    deadline = time.monotonic() + _DEADLINE_S
    while not (found := candidates()):
        assert time.monotonic() < deadline, "there is no process to kill"
        time.sleep(0.05)
    found[0].kill()
    return found[0]


def test_a_write_is_stored_once_though_a_worker_and_an_executor_die(
    cluster: Cluster, driver: Driver, filled: tuple[CommitMQNode, list[Row]]
) -> None:
    node, rows = filled
    node.admin.topic_create("out", QUEUES)

    def count() -> int:
        return sum(end for _, _, end, _ in node.admin.offsets("out"))

    def wait_for(messages: int) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while count() < messages:
            assert time.monotonic() < deadline, f"{count()} messages are written"
            time.sleep(0.05)

    driver.ask("executors")
    source = {"node": node.address, "topics": "in", "minPartitions": "6"}
    driver.begin("copy", source, {"node": node.address, "topic": "out"}, 50)
    wait_for(MESSAGES // 20)
    killed(cluster.python_workers)
    # At both moments there must be much left to do, or this would show nothing.
    at_first = count()
    assert at_first < MESSAGES // 2
    wait_for(at_first + MESSAGES // 10)
    executor = killed(cluster.executors)
    assert count() < MESSAGES * 3 // 4
    driver.result()

    found = [[one.queue_id, one.tags, *one.keys, one.body.decode()] for one in stored(node, "out")]
    assert len(found) == MESSAGES
    assert sorted(found) == sorted([queue, *rest] for queue, _, *rest in rows)
    assert not executor.is_running()
    assert len(driver.ask("executors")) == WORKERS
