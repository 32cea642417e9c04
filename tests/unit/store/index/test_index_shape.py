"""Goal: slots and items of index files are found in the files, or said not to be; never a wrong pair.

Method: files of random shapes (a failure tells the seed) are written by the index itself, and RocketMQ's by RocketMQ; pairs of
the same length, damage and files of different lengths are what must not deceive.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from commitmq.format.constants import Host
from commitmq.format.index import IndexShape
from commitmq.format.record import Record
from commitmq.store.geometry import find_shape
from golden_stores import ALL_GOLDEN_NAMES, unpack
from index_store import IndexStore

DEFAULT = IndexShape(5_000_000, 20_000_000)
SMALL = IndexShape(1_000_000, 4_000_000)


def records(rng: random.Random, count: int) -> list[Record]:
    host = Host("127.0.0.1", 1)
    return [
        Record(
            topic=f"topic-{rng.randrange(4)}",
            queue_id=0,
            queue_offset=number,
            physical_offset=0,
            body=b"x" * rng.randrange(40),
            properties={"KEYS": " ".join(f"k{rng.randrange(90)}" for _ in range(rng.randrange(1, 4)))},
            born_host=host,
            store_host=host,
            born_timestamp=1_000,
            store_timestamp=1_700_000_000_000 + number,
        )
        for number in range(count)
    ]


def built(root: Path, shape: IndexShape, made: list[Record]) -> IndexStore:
    store = IndexStore(root, shape)
    store.append(made)
    store.build()
    return store


@pytest.mark.parametrize("name", ALL_GOLDEN_NAMES)
@pytest.mark.parametrize("likely", [[], [DEFAULT, SMALL, IndexShape(205, 499), IndexShape(195, 501)]])
def test_rocketmqs_files_show_what_it_was_configured_with(name: str, likely: list[IndexShape], tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    found = find_shape(golden.root / "index", likely)
    assert (found.shape, found.problem) == (IndexShape(200, 500), "")


@pytest.mark.parametrize("turn", range(25))
def test_a_random_shape_is_found_without_a_hint(turn: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    shape = IndexShape(rng.randrange(5, 4_000), rng.randrange(12, 3_000))
    store = built(tmp_path, shape, records(rng, rng.randrange(2, 60)))
    # Any pair of the same length, even the nearest, is no answer.
    others = [IndexShape(shape.hash_slots + 5 * step, shape.max_items - step) for step in (-1, 1, 2, 5)]
    others = [one for one in others if one.hash_slots > 0 and one.max_items > 1]
    assert all(one.file_bytes == shape.file_bytes for one in others)
    for likely in ([], others, [*others, shape]):
        assert find_shape(store.folder, likely).shape == shape, f"seed {seed}"


def test_a_single_message_at_the_logs_begin_shows_the_shape(tmp_path: Path) -> None:
    """Its offset is zero, so its items look like nothing but their hashes."""
    rng = random.Random(7)
    store = built(tmp_path, IndexShape(1_003, 777), records(rng, 1))
    assert find_shape(store.folder, []).shape == IndexShape(1_003, 777)


def test_files_of_the_default_size_are_found_by_the_default_and_by_search(tmp_path: Path) -> None:
    store = built(tmp_path, DEFAULT, records(random.Random(3), 30))
    assert find_shape(store.folder, [SMALL, DEFAULT]).shape == DEFAULT
    assert find_shape(store.folder, []).shape == DEFAULT


def test_without_files_nothing_is_said(tmp_path: Path) -> None:
    assert find_shape(tmp_path / "index", [DEFAULT]).shape is None
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "20260101000000000").touch()
    (tmp_path / "index" / "no index file").write_bytes(b"x")
    found = find_shape(tmp_path / "index", [DEFAULT])
    assert (found.shape, found.problem) == (None, "")


def test_a_file_without_items_may_have_any_shape_of_its_length(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "20260101000000000"
    path.touch()
    for shape in (IndexShape(200, 500), IndexShape(7, 20), IndexShape(50_000, 200_000)):
        os.truncate(path, shape.file_bytes)
        assert find_shape(folder, [shape]).shape == shape
        alone = find_shape(folder, []).shape
        assert alone is not None
        assert alone.file_bytes == shape.file_bytes


def test_what_is_no_index_file_is_a_problem_and_no_guess(tmp_path: Path) -> None:
    store = built(tmp_path, IndexShape(300, 900), records(random.Random(5), 40))
    path = store.folder / store.names()[0]
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(40)
        file.write(random.Random(9).randbytes(size - 40))
    found = find_shape(store.folder, [IndexShape(300, 900), DEFAULT])
    assert found.shape is None
    assert f"of {size} bytes each, cannot be told" in found.problem


def test_files_of_different_lengths_are_a_problem_and_most_of_them_right(tmp_path: Path) -> None:
    store = built(tmp_path, IndexShape(30, 40), records(random.Random(5), 60))
    names = store.names()
    assert len(names) > 2
    shutil.copyfile(store.folder / names[0], store.folder / "20200101000000000")
    os.truncate(store.folder / "20200101000000000", 500)
    found = find_shape(store.folder, [])
    assert found.shape == IndexShape(30, 40)
    assert f"differ in size ({len(names)} of {IndexShape(30, 40).file_bytes} bytes, 1 of 500 bytes)" in found.problem
