"""Goal: a verification tells the same however its work is cut, and whoever does which part of it when.

Method: RocketMQ's stores, whole and damaged by chance, and one with queues of every kind; cut into pieces of many sizes,
done in any order, some twice, each task and result sent through pickle as between processes. All reports must be equal,
finding by finding.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from commitmq.config import load
from commitmq.offline.held_store import HeldStore
from commitmq.offline.rebuild import rebuild
from commitmq.offline.runner import Runner, run_here
from commitmq.offline.verify import verify
from commitmq.store.record import Record
from golden_stores import GoldenStore
from index_store import IndexStore

SETTINGS = ("index.hash_slots=200", "index.max_items=500")
PIECES = (20_000, 4_096)


def scattered(seed: int) -> Runner:
    def run(work: Callable[..., Any], view: Any, tasks: Sequence[Any], finished: Callable[[int], None]) -> list[Any]:
        chance = random.Random(seed)
        order = list(range(len(tasks)))
        chance.shuffle(order)
        order += [number for number in order if chance.random() < 0.2]
        results = {}
        for number in order:
            sent = pickle.loads(pickle.dumps((view, tasks[number])))
            results[number] = pickle.loads(pickle.dumps(work(*sent)))
        return [results[number] for number in range(len(tasks))]

    return run


def report(root: Path, piece_bytes: int = 1 << 26, runner: Runner = run_here) -> dict[str, Any]:
    with HeldStore(root, load(None, SETTINGS)) as store:
        found = verify(store, runner=runner, piece_bytes=piece_bytes)
    found.seconds = 0
    return found.to_json()


def damage(root: Path, chance: random.Random) -> list[str]:
    """Change some files of the log, the queues and the index in one of many ways each; returns what was done."""
    done = []
    for _ in range(chance.randrange(1, 5)):
        kind = chance.choice(["commitlog", "consumequeue", "index"])
        path = chance.choice([one for one in sorted((root / kind).rglob("*")) if one.is_file()])
        data = bytearray(path.read_bytes())
        used = max((index for index, byte in enumerate(data) if byte), default=0) + 1
        at, size = chance.randrange(used), chance.choice([20, 60, 500, 4_096])
        how = chance.choice(["flip", "flip", "zero", "noise", "copy", "cut", "take away"])
        if how == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif how == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif how == "noise":
            data[at : at + size] = chance.randbytes(len(data[at : at + size]))
        elif how == "copy":
            source = chance.randrange(used)
            piece = data[source : source + min(size, len(data) - max(at, source))]
            data[at : at + len(piece)] = piece
        if how == "take away" and kind != "commitlog":
            path.unlink()
        elif how == "cut" and kind != "commitlog":
            os.truncate(path, at)
        else:
            path.write_bytes(data)
        done.append(f"{how} {path.relative_to(root)} {at}")
    if chance.random() < 0.2:
        (root / "abort").write_bytes(b"1")
        done.append("abort")
    return done


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
