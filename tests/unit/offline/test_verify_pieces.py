"""Goal: a verification tells the same however its work is cut, and whoever does which part of it when.

Method: RocketMQ's stores, whole and damaged by chance, and one with queues of every kind; cut into pieces of many sizes,
done in any order, some twice, each task and result sent through pickle as between processes. All reports must be equal,
finding by finding.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commitmq.config import load
from commitmq.format.record import Record
from commitmq.offline.held_store import HeldStore, Runner, run_here
from commitmq.offline.rebuild import rebuild
from commitmq.offline.verify import verify
from damaged_stores import damage
from golden_stores import GoldenStore
from index_store import IndexStore
from scattered import scattered

SETTINGS = ("index.hash_slots=200", "index.max_items=500")
PIECES = (20_000, 4_096)


def report(root: Path, piece_bytes: int = 1 << 26, runner: Runner = run_here) -> dict[str, Any]:
    with HeldStore(root, load(None, SETTINGS)) as store:
        found = verify(store, runner=runner, piece_bytes=piece_bytes)
    found.seconds = 0
    return found.to_json()


@pytest.mark.parametrize("name", ["clean", "crash"])
def test_a_whole_store_is_sound_in_any_pieces(golden_copy: Callable[[str], GoldenStore], name: str) -> None:
    root = golden_copy(name).root
    whole = report(root)
    assert whole["findings"] == []
    assert all(report(root, size, scattered(size)) == whole for size in PIECES)


@pytest.mark.parametrize(
    "seed", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_damage_is_told_the_same_in_any_pieces(
    golden_stores: dict[str, GoldenStore], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    for round_number in range(3):
        root = tmp_path / "store"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(golden_stores[chance.choice(["clean", "crash"])].root, root)
        what = damage(root, chance)
        whole = report(root)
        for size in (*PIECES, chance.randrange(1_000, 9_000)):
            assert report(root, size, scattered(seed)) == whole, f"seed {seed} round {round_number}: {what}, in {size}"


def test_queues_of_every_kind_are_told_the_same_in_any_pieces(tmp_path: Path) -> None:
    """Goal: units that come one after the other (batch queues) are found where they are, also behind damage."""
    made = IndexStore(tmp_path)
    (made.root / "config").mkdir()
    table = {"topicConfigTable": {"B": {"topicName": "B", "attributes": {"queue.type": "BatchCQ"}}}}
    (made.root / "config" / "topics.json").write_text(json.dumps(table))
    for number in range(60):
        further = {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b", "INNER_MULTI_QUEUE_OFFSET": f"{number},{number}"}
        made.append(
            [
                Record("T", queue_offset=number, store_timestamp=1_000, properties=further),
                Record("B", queue_offset=number, store_timestamp=1_000),
            ]
        )
    with HeldStore(made.root, load(None, SETTINGS)) as store:
        rebuild(store, ("queues",))
    batch = made.root / "batchconsumequeue" / "B" / "0" / f"{0:020d}"
    plain = made.root / "consumequeue" / "%LMQ%b" / "0" / f"{0:020d}"
    sound = report(made.root)
    assert sound["findings"] == []
    for path, at, size in (
        (batch, 46 * 30, 46 * 3),
        (batch, 46 * 20, 8),
        (batch, 0, 46 * 40),
        (plain, 20 * 7, 20 * 30),
    ):
        before = path.read_bytes()
        for junk in (bytes(size), b"\x11" * size)[:: 1 if path is batch else 2]:
            path.write_bytes(before[:at] + junk + before[at + size :])
            whole = report(made.root)
            assert not whole["sound"]
            for pieces in (3_000, 1_500):
                assert report(made.root, pieces, scattered(at)) == whole, (path, at, size, pieces)
        path.write_bytes(before)
    assert all(report(made.root, size, scattered(size)) == sound for size in (3_000, 1_000))
