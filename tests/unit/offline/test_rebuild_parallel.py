"""Goal: a rebuild in pieces makes the files of ``store rebuild``, byte for byte, whoever does which part of it when.

Method: RocketMQ's stores and stores with every kind of queue, gaps and offsets that go back; tasks in any order, some twice,
all through pickle; pieces of several sizes. What ``store rebuild`` makes of a copy is what must come out. Killed at its
failpoints, or left by its tasks, a rebuild leaves the store as it was.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from commitmq.config import load
from commitmq.errors import CorruptRecordError, StoreError
from commitmq.format.record import Record
from commitmq.offline.held_store import HeldStore, StoreView, run_here
from commitmq.offline.rebuild import rebuild
from commitmq.offline.rebuild_parallel import rebuild_parallel
from commitmq.offline.rebuild_pieces import FillTask, fill
from commitmq.offline.verify import verify
from golden_stores import GoldenStore
from index_store import IndexStore
from scattered import scattered
from tricky_log import build

SETTINGS = ("index.hash_slots=200", "index.max_items=500")
FOLDERS = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "index", "commitmq/dispatchers")


def files(root: Path) -> dict[str, bytes]:
    """What a rebuild makes; names of index files come from the clock, so they are numbered, and so is what names them."""
    found = {}
    index = sorted(path.name for path in (root / "index").glob("*"))
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file():
                name = path.relative_to(root).as_posix()
                data = path.read_bytes()
                for number, one in enumerate(index):
                    name = name.replace(one, str(number))
                    data = data.replace(one.encode(), b"%d" % number)
                found[name] = data
    return found


def compare(
    root: Path, settings: Sequence[str] = SETTINGS, pieces: Sequence[int] = (20_000, 3_000)
) -> dict[str, bytes]:
    """Both rebuilds of copies of ``root``; returns the files."""
    ours = root.parent / "ours"
    shutil.copytree(root, ours)
    with HeldStore(ours, load(None, settings)) as store:
        expected_report = rebuild(store)
    expected = files(ours)
    for size in pieces:
        theirs = root.parent / f"pieces-{size}"
        shutil.copytree(root, theirs)
        with HeldStore(theirs, load(None, settings)) as store:
            done = rebuild_parallel(store, runner=scattered(size), piece_bytes=size)
        found = files(theirs)
        assert sorted(found) == sorted(expected), size
        assert [name for name in found if found[name] != expected[name]] == [], size
        assert (done.start, done.end, done.records) == (
            expected_report.start, expected_report.end, expected_report.records,
        )  # fmt: skip
        assert not list((theirs / "commitmq").glob("rebuild*"))
        assert (done.kept / "consumequeue").exists() == (root / "consumequeue").exists()
    return expected


@pytest.mark.parametrize("name", ["clean", "crash"])
def test_golden_stores(golden_copy: Callable[[str], GoldenStore], name: str) -> None:
    root = golden_copy(name).root
    compare(root)


@pytest.mark.parametrize("items", [12, 50, 1098])
def test_index_files_begin_where_they_must(golden_copy: Callable[[str], GoldenStore], items: int) -> None:
    """Goal: files that fill up within a record, at a record's end, and with the very last of the 1,097 items."""
    root = golden_copy("clean").root
    shutil.rmtree(root / "index")
    found = compare(root, ("index.hash_slots=50", f"index.max_items={items}"), (20_000,))
    assert sum(name.startswith("index/") for name in found) >= 1097 // (items - 1)


def test_rocketmqs_queues_into_an_empty_folder(golden_copy: Callable[[str], GoldenStore], tmp_path: Path) -> None:
    root = golden_copy("clean").root
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"}
    into = tmp_path / "new"
    with HeldStore(root, load(None, SETTINGS)) as store:
        rebuild_parallel(store, runner=scattered(1), into=into, piece_bytes=20_000)
        assert sorted(path.name for path in into.iterdir()) == ["consumequeue", "index"]
        with pytest.raises(StoreError, match="not empty"):
            rebuild_parallel(store, into=into)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"} == before
    wanted = {path.relative_to(root): data for path, data in before.items() if "consumequeue" in path.parts}
    assert {
        path.relative_to(into): path.read_bytes() for path in (into / "consumequeue").rglob("*") if path.is_file()
    } == wanted
    theirs, ours = ([path.read_bytes() for path in sorted((one / "index").iterdir())] for one in (root, into))
    assert ours == theirs


@pytest.fixture
def kinds(tmp_path: Path) -> IndexStore:
    """An empty store in which topic B has batch queues."""
    (tmp_path / "store").mkdir()
    made = IndexStore(tmp_path / "store")
    (made.root / "config").mkdir()
    table = {"topicConfigTable": {"B": {"topicName": "B", "attributes": {"queue.type": "BatchCQ"}}}}
    (made.root / "config" / "topics.json").write_text(json.dumps(table))
    return made


def test_queues_of_every_kind_with_gaps_and_offsets_that_go_back(kinds: IndexStore) -> None:
    small = ("consume_queue.file_bytes=400", "consume_queue.batch_file_bytes=460", *SETTINGS)
    chance = random.Random(5)
    light, back, gap = 0, 0, 1_000
    for number in range(200):
        light += 1 if chance.random() < 0.9 else chance.randrange(3, 70)
        gap += 1 if chance.random() < 0.9 else chance.randrange(2, 90)
        back += 1 if chance.random() < 0.9 else chance.randrange(-5, 5)
        further = {
            "INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b",
            "INNER_MULTI_QUEUE_OFFSET": f"{light},{number}",
            "KEYS": "a b",
        }
        kinds.append(
            [
                Record("T", queue_offset=number + 7, store_timestamp=1_000 + number, properties=further),
                Record("B", queue_offset=number, store_timestamp=1_000, queue_id=number % 2),
                Record("G", queue_offset=gap, store_timestamp=1_000, body=bytes(chance.randrange(300))),
                Record("R", queue_offset=max(0, back), store_timestamp=1_000, properties={"TAGS": "x"}),
            ]
        )
    found = compare(kinds.root, small, (20_000, 3_000, 700))
    assert {name.split("/")[1] for name in found if name.startswith("consumequeue")} == {
        "T",
        "%LMQ%a",
        "%LMQ%b",
        "G",
        "R",
    }


def test_records_in_bodies_get_no_units(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    log, offsets = build(root / "commitlog", ["joined", "chain", "placed"] * 20, 5)
    log.close()
    found = compare(root, SETTINGS, (2_000, 900))
    assert sum(data.count(b"\x7f\xff\xff\xff") for data in found.values()) == 0
    with HeldStore(root.parent / "ours", load(None, SETTINGS)) as store:
        report = verify(store)
    assert (report.findings, report.records) == ([], len(offsets))


def test_a_damaged_log_is_refused_and_a_torn_end_is_the_end(golden_copy: Callable[[str], GoldenStore]) -> None:
    root = golden_copy("clean").root
    torn = root / "commitlog" / f"{262_144:020d}"
    data = bytearray(torn.read_bytes())
    data[9_000] ^= 1
    torn.write_bytes(data)
    compare(root, SETTINGS, (4_000,))
    first = root / "commitlog" / f"{0:020d}"
    data = bytearray(first.read_bytes())
    data[60_000:60_200] = bytes(200)
    first.write_bytes(data)
    before = files(root)
    for work in (rebuild, rebuild_parallel):
        with HeldStore(root, load(None, SETTINGS)) as store, pytest.raises(CorruptRecordError, match="in the middle"):
            work(store)
    assert files(root) == before


def test_a_rebuild_that_dies_leaves_the_store_as_it_was(golden_copy: Callable[[str], GoldenStore]) -> None:
    root = golden_copy("clean").root
    before = files(root)
    code = (
        "import sys; from pathlib import Path; from commitmq.config import load;"
        "from commitmq.offline.held_store import HeldStore;"
        "from commitmq.offline.rebuild_parallel import rebuild_parallel;"
        f"store = HeldStore(Path(sys.argv[1]), load(None, {SETTINGS!r})); store.__enter__(); rebuild_parallel(store)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(sys.path),
        "COMMITMQ_FAILPOINTS": "rebuild.before_exchange=kill",
    }
    ended = subprocess.run([sys.executable, "-c", code, str(root)], env=environment, timeout=120, check=False)
    assert ended.returncode == -9
    assert files(root) == before
    with HeldStore(root, load(None, SETTINGS)) as store:
        assert verify(store).findings == []
        rebuild_parallel(store)
    with HeldStore(root, load(None, SETTINGS)) as store:
        assert verify(store).findings == []
    assert not list((root / "commitmq").glob("rebuild-*")), "what the dead one left is gone"


def test_a_task_that_nobody_waits_for_writes_nothing(golden_copy: Callable[[str], GoldenStore]) -> None:
    """Goal: a copy of a task that begins, or is begun again, when the rebuild is over brings no folder back."""
    root = golden_copy("clean").root
    late: list[tuple[Any, Any]] = []

    def remembering(work: Any, view: Any, tasks: Any, finished: Any) -> Any:
        late.extend((view, task) for task in tasks if isinstance(task, FillTask))
        return list(run_here(work, view, tasks, finished))

    with HeldStore(root, load(None, SETTINGS)) as store:
        rebuild_parallel(store, runner=remembering)
    assert late
    after = sorted(path for path in root.rglob("*"))
    view: StoreView
    for view, task in late:
        with pytest.raises(StoreError, match="has ended"):
            fill(view, task)
    assert sorted(path for path in root.rglob("*")) == after
