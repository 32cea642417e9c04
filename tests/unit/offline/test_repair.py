"""Goal: damage in the middle of a log is told apart from its end, and either way of repair leaves a store that is sound.

Method: RocketMQ's clean store with one stretch damaged; what must be left afterwards is worked out from its messages.
Killed at its failpoints, a repair is run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Producer, Reader
from commitmq.config import load
from commitmq.errors import StoreError
from commitmq.offline.held_store import HeldStore
from commitmq.offline.log_damage import find_damage
from commitmq.offline.repair import How, Repaired, repair
from commitmq.offline.verify import verify
from commitmq.store.log.commit_log import CommitLog
from commitmq.supervision.exit_codes import CliExit
from golden_stores import GoldenStore
from nodes import Node, commitmq

SETTINGS = ("index.hash_slots=200", "index.max_items=500")
SEGMENT_BYTES = 131_072


@pytest.fixture
def clean(golden_copy: Callable[[str], GoldenStore]) -> GoldenStore:
    return golden_copy("clean")


def held(store: GoldenStore) -> HeldStore:
    return HeldStore(store.root, load(None, SETTINGS))


def overwrite(store: GoldenStore, offset: int, data: bytes) -> None:
    path = store.layout.commit_log / f"{offset - offset % SEGMENT_BYTES:020d}"
    with path.open("r+b") as file:
        file.seek(offset % SEGMENT_BYTES)
        file.write(data)


def run(store: GoldenStore, how: How) -> Repaired:
    with held(store) as locked:
        return repair(locked, how)


def offsets_in_log(store: GoldenStore) -> list[int]:
    log = CommitLog(store.layout.commit_log, SEGMENT_BYTES)
    try:
        return [record.physical_offset for record in log.iter_records() if record.topic != "RMQ_SYS_REPAIRED"]
    finally:
        log.close()


def middle(store: GoldenStore, number: int = 60) -> dict[str, Any]:
    """A message in the middle of the first segment, of a topic with plain queues."""
    return [one for one in store.messages if one["topic"] == "GoldenNormal" and one["physical_offset"] < 120_000][
        number
    ]


@pytest.mark.parametrize("damage", ["body", "size", "magic", "three records"])
def test_skip_takes_out_the_damage_and_nothing_else(clean: GoldenStore, damage: str) -> None:
    hit = middle(clean)
    offset = hit["physical_offset"]
    before = offsets_in_log(clean)
    lost = {offset}
    if damage == "body":
        overwrite(clean, offset + 100, b"\xff\xfe\xfd")
    elif damage == "size":
        overwrite(clean, offset, b"\x00\x00\x00\x01")
    elif damage == "magic":
        overwrite(clean, offset + 4, b"\x00\x00\x00\x00")
    else:
        lost = set(before[before.index(offset) : before.index(offset) + 3])
        overwrite(clean, offset, b"\xee" * (max(lost) - offset + 50))
    done = run(clean, "skip")
    assert [extent.start for extent in done.damage] == [offset]
    assert done.blanked_units == len(lost)
    assert offsets_in_log(clean) == [one for one in before if one not in lost]
    with held(clean) as store:
        report = verify(store)
    assert report.is_sound, [one.detail for one in report.findings if not one.is_note]
    evidence = b"".join(path.read_bytes() for path in done.evidence)
    assert len(evidence) == done.damage[0].end - offset
    assert run(clean, "skip").damage == [], "a second repair has nothing to do"


def test_cut_ends_the_log_there(clean: GoldenStore) -> None:
    hit = middle(clean)
    before = offsets_in_log(clean)
    original = (clean.layout.commit_log / f"{0:020d}").read_bytes()
    overwrite(clean, hit["physical_offset"] + 100, b"\xff\xfe\xfd")
    asked = commitmq("store", "repair", str(clean.root), "--cut")
    assert asked.returncode == 2
    assert "give --yes to end the log" in asked.stderr
    done = run(clean, "cut")
    assert done.lost_bytes < before[-1] + 2_000 - hit["physical_offset"], "the zeros after the log's end do not count"
    assert offsets_in_log(clean) == [one for one in before if one < hit["physical_offset"]]
    with held(clean) as store:
        assert verify(store).is_sound
    # What was cut is whole in the copies, so a person may still read it.
    assert done.evidence[0].read_bytes()[103:] == original[hit["physical_offset"] + 103 :]
    assert len(done.evidence) == 3


def test_an_index_that_is_switched_off_does_not_outlive_a_cut(clean: GoldenStore) -> None:
    overwrite(clean, middle(clean)["physical_offset"] + 100, b"\xff\xfe\xfd")
    with HeldStore(clean.root, load(None, (*SETTINGS, "index.enable=false"))) as store:
        repair(store, "cut")
    assert not clean.layout.index.exists()


def test_damage_up_to_a_segments_end_becomes_its_filler(clean: GoldenStore) -> None:
    before = offsets_in_log(clean)
    last = [one for one in before if one < SEGMENT_BYTES][-2:]
    overwrite(clean, last[0], b"\xaa" * (SEGMENT_BYTES - last[0]))
    run(clean, "skip")
    assert offsets_in_log(clean) == [one for one in before if one not in last]
    with held(clean) as store:
        assert verify(store).is_sound


def test_a_torn_end_is_cut_in_both_ways(clean: GoldenStore) -> None:
    before = offsets_in_log(clean)
    overwrite(clean, before[-1] + 50, b"\x00" * 40)
    assert [extent.is_torn_end for extent in run(clean, "skip").damage] == [True]
    assert offsets_in_log(clean) == before[:-1]


def test_a_whole_log_is_left_alone(clean: GoldenStore) -> None:
    files = {path: path.read_bytes() for path in clean.root.rglob("*") if path.is_file() and path.name != "lock"}
    assert run(clean, "cut").damage == run(clean, "skip").damage == []
    assert {path: path.read_bytes() for path in files} == files


def test_a_missing_segment_is_nothing_that_a_repair_can_mend(clean: GoldenStore) -> None:
    (clean.layout.commit_log / f"{SEGMENT_BYTES:020d}").unlink()
    with pytest.raises(StoreError, match="is missing"):
        run(clean, "skip")


@pytest.mark.parametrize("how", ["cut", "skip"])
@pytest.mark.parametrize("point", ["repair.before_log", "repair.write", "rebuild.before_exchange"])
def test_a_repair_that_is_killed_is_run_again(clean: GoldenStore, how: How, point: str) -> None:
    hit = middle(clean)
    overwrite(clean, hit["physical_offset"] + 100, b"\xff\xfe\xfd")
    code = (
        "import sys; from pathlib import Path; from commitmq.config import load;"
        "from commitmq.offline.held_store import HeldStore; from commitmq.offline.repair import repair;"
        f"store = HeldStore(Path(sys.argv[1]), load(None, {SETTINGS!r})); store.__enter__(); repair(store, sys.argv[2])"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "COMMITMQ_FAILPOINTS": f"{point}=kill"}
    ended = subprocess.run([sys.executable, "-c", code, str(clean.root), how], env=environment, timeout=60, check=False)
    assert ended.returncode == -9
    run(clean, how)
    with held(clean) as store:
        assert find_damage(store) == []
        report = verify(store)
    # The index of a repair that died behind the log's part is made by the next rebuild.
    assert [one.kind for one in report.findings if not one.is_note and not one.kind.startswith("index.")] == []


def test_a_node_serves_the_rest_of_a_repaired_store(clean: GoldenStore, tmp_path: Path) -> None:
    hit = middle(clean)
    queue = hit["queue_id"]
    newest = next(
        one
        for one in reversed(clean.messages)
        if one["topic"] == "GoldenNormal" and one["queue_id"] != queue and one["queue_offset"] == 59
    )
    overwrite(clean, hit["physical_offset"] + 100, b"\xff\xfe\xfd")
    overwrite(clean, newest["physical_offset"] + 4, b"\xff\xfe\xfd")
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    shown = commitmq("store", "repair", str(clean.root), *sets)
    assert shown.returncode == CliExit.DAMAGE_FOUND
    assert f"segment {0:020d} at {hit['physical_offset']}, {hit['total_size']} bytes" in shown.stdout
    done = commitmq("store", "repair", str(clean.root), "--skip", "--yes", "--json", *sets)
    assert json.loads(done.stdout)["blanked_units"] == 2, done.stderr
    rebuilt = commitmq("store", "rebuild", str(clean.root), *sets)
    assert rebuilt.returncode == 0, rebuilt.stderr
    wanted = sorted(
        (one["queue_id"], one["queue_offset"], one["physical_offset"])
        for one in clean.messages
        if one["topic"] == "GoldenNormal"
        and one["physical_offset"] not in (hit["physical_offset"], newest["physical_offset"])
    )
    node = Node(
        clean.root, f"commit_log.segment_bytes={SEGMENT_BYTES}", "consume_queue.file_bytes=1000", *SETTINGS,
    )  # fmt: skip
    try:
        ended = node.start()
        assert ended.returncode == 0, ended.stderr
        found: list[tuple[int, int, int]] = []
        with Reader("GoldenNormal", node=node.address, start="earliest") as consumer:
            while len(found) < len(wanted):
                batch = consumer.poll(timeout_s=5)
                assert batch, f"only {len(found)} of {len(wanted)} messages came"
                found += [(one.queue_id, one.queue_offset, one.physical_offset) for one in batch]
        assert sorted(found) == wanted
        # The newest message of another queue is gone as well: its place is not given to the next one.
        with Producer(node.address) as producer:
            sent = producer.send("GoldenNormal", b"next", queue=newest["queue_id"])
            assert sent.queue_offset == newest["queue_offset"] + 1
        with Admin(node.address) as admin:
            low, high = admin.offsets("GoldenNormal")[queue][1:3]
            assert (low, high) == (0, 60), "the message that is gone keeps its place"
    finally:
        node.end()
