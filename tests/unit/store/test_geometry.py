"""Goal: a store's own files say how large its files are, whoever wrote them; damage neither deceives nor stops the look.

Method: golden stores and folders of files with chosen names and lengths; what is to be refused is refused with everything
that contradicts, and nothing is written by looking.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commitmq.config import NodeConfig, from_mapping, load
from commitmq.config.fitting import fit, sizes_of
from commitmq.errors import StoreError
from commitmq.format.file_names import segment_name
from commitmq.store.geometry import BATCH_FILE, EXT_FILE, HASH_SLOTS, MAX_ITEMS, QUEUE_FILE, SEGMENT, SIZES, look
from commitmq.store.layout import StoreLayout
from commitmq.store.store_file import StoreFile
from golden_stores import ALL_GOLDEN_NAMES, unpack

GOLDEN = {SEGMENT: 131_072, QUEUE_FILE: 1_000, HASH_SLOTS: 200, MAX_ITEMS: 500}


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return StoreLayout(tmp_path / "store")


def make(folder: Path, *files: tuple[int, int]) -> None:
    """Files of zeros, by where they begin and how long they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for base, size in files:
        path = folder / segment_name(base)
        path.touch()
        os.truncate(path, size)


def remember(layout: StoreLayout, **sizes: int) -> str:
    """Write a store.json; names with ``__`` for the dot. Returns its id."""
    layout.own.mkdir(parents=True, exist_ok=True)
    StoreFile("a" * 32, {name.replace("__", "."): size for name, size in sizes.items()}).save(layout.store_file)
    return "a" * 32


@pytest.mark.parametrize("name", ALL_GOLDEN_NAMES)
def test_golden_stores_say_what_rocketmq_was_configured_with(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in golden.root.rglob("*"))
    seen = look(golden.layout)
    assert seen.found == GOLDEN
    assert seen.sizes == GOLDEN
    assert seen.index_problem == ""
    assert f"there is no {golden.layout.store_file}" == seen.forgotten
    assert {key: Path(path).stat().st_size for key, path in seen.shown_by.items()} == {
        SEGMENT: 131_072, QUEUE_FILE: 1_000, HASH_SLOTS: 10_840, MAX_ITEMS: 10_840,
    }  # fmt: skip
    fitted = fit(golden.layout, load())
    assert {key: sizes_of(fitted.config)[key] for key in GOLDEN} == GOLDEN
    assert sorted((path, path.stat().st_mtime_ns) for path in golden.root.rglob("*")) == before


def test_a_store_that_is_not_there_yet_says_nothing(layout: StoreLayout) -> None:
    seen = look(layout)
    assert (seen.found, seen.sizes, seen.forgotten, seen.index_problem) == ({}, {}, "", "")
    fitted = fit(layout, load(profile="dev"))
    assert fitted.config == load(profile="dev")
    assert fitted.notes == ()
    assert not layout.root.exists()


def test_all_kinds_of_queues_are_looked_at(layout: StoreLayout) -> None:
    make(layout.commit_log, (0, 65_536))
    make(layout.consume_queue / "t" / "0", (0, 400))
    make(layout.batch_consume_queue / "b" / "1", (0, 460))
    make(layout.consume_queue_ext / "t" / "0", (0, 4_096))
    assert look(layout).found == {SEGMENT: 65_536, QUEUE_FILE: 400, BATCH_FILE: 460, EXT_FILE: 4_096}


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ([(0, 65_536), (65_536, 0)], 65_536),  # the newest was being made
        ([(131_072, 65_536)], 65_536),  # what was before expired
        ([(0, 65_536), (65_536, 4_096)], 65_536),  # the last one was cut short
        ([(0, 4_096), (65_536, 65_536), (131_072, 65_536)], 65_536),
        ([(0, 4_096), (65_536, 4_096), (131_072, 65_536)], 65_536),  # most were
        ([(0, 65_536), (196_608, 65_536)], 65_536),  # some are missing
    ],
)
def test_names_and_lengths_of_segments_say_their_size(
    layout: StoreLayout, files: list[tuple[int, int]], size: int
) -> None:
    make(layout.commit_log, *files)
    seen = look(layout)
    assert seen.found == {SEGMENT: size}
    assert os.path.getsize(seen.shown_by[SEGMENT]) == size


def test_a_damaged_queue_file_does_not_decide(layout: StoreLayout) -> None:
    make(layout.consume_queue / "a" / "0", (0, 200))  # cut short, or damaged: it comes first
    for queue in range(3):
        make(layout.consume_queue / "b" / str(queue), (0, 400), (400, 400))
    make(layout.consume_queue / "c" / "0", (0, 17), (400, 0))
    (layout.consume_queue / "c" / "no queue").mkdir()
    (layout.consume_queue / "file").write_bytes(b"x")
    assert look(layout).found == {QUEUE_FILE: 400}


def test_what_the_store_remembers_counts_where_files_cannot_tell(layout: StoreLayout) -> None:
    make(layout.commit_log, (0, 65_536))
    name = remember(
        layout, commit_log__segment_bytes=65_536, consume_queue__file_bytes=800, index__hash_slots=7, index__max_items=9
    )
    fitted = fit(layout, load())
    assert fitted.store_id == name
    assert fitted.notes == ()
    assert fitted.config.consume_queue.file_bytes == 800
    assert (fitted.config.index.hash_slots, fitted.config.index.max_items) == (7, 9)
    # There is no such file yet: whoever asks for another size gets it.
    asked = fit(layout, load(None, ["consume_queue.file_bytes=1200", "index.hash_slots=8"]))
    assert asked.config.consume_queue.file_bytes == 1200
    assert asked.config.index.hash_slots == 8


def test_everything_that_contradicts_is_in_one_sentence(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    asked = ["commit_log.segment_bytes=64MiB", "consume_queue.file_bytes=2000", "index.hash_slots=300"]
    with pytest.raises(StoreError) as caught:
        fit(golden.layout, load(None, asked))
    for part in (
        "the store has commit_log.segment_bytes=131072, consume_queue.file_bytes=1000, index.hash_slots=200 (see ",
        "but commit_log.segment_bytes=67108864, consume_queue.file_bytes=2000, index.hash_slots=300 was asked for",
    ):
        assert part in str(caught.value)
    fit(golden.layout, load(None, ["commit_log.segment_bytes=128KiB", "index.hash_slots=200"]))
    fit(golden.layout, from_mapping({"commit_log": {"segment_bytes": 64 << 20}}))  # a default of somebody's


def test_files_that_the_store_remembers_otherwise_are_refused_until_confirmed(layout: StoreLayout) -> None:
    make(layout.commit_log, (0, 65_536))
    make(layout.consume_queue / "t" / "0", (0, 400))
    remember(layout, commit_log__segment_bytes=131_072, consume_queue__file_bytes=6_000_000)
    with pytest.raises(StoreError) as caught:
        fit(layout, load())
    assert "the store remembers commit_log.segment_bytes=131072, but" in str(caught.value)
    assert "remembers consume_queue.file_bytes=6000000" in str(caught.value)
    assert "give their size once with --set" in str(caught.value)
    # Whoever looks for damage must be able to: what the store remembers is right there.
    assert fit(layout, load(), offline=True).config.commit_log.segment_bytes == 131_072
    confirmed = fit(layout, load(None, ["consume_queue.file_bytes=400", "commit_log.segment_bytes=64KiB"]))
    confirmed.remember(layout)
    assert fit(layout, load()).config.commit_log.segment_bytes == 65_536


def test_an_index_made_anew_by_somebody_goes_over_what_is_remembered(tmp_path: Path) -> None:
    golden = unpack("crash", tmp_path)
    remember(golden.layout, commit_log__segment_bytes=131_072, index__hash_slots=50, index__max_items=60)
    fitted = fit(golden.layout, load())
    assert (fitted.config.index.hash_slots, fitted.config.index.max_items) == (200, 500)
    fitted.remember(golden.layout)
    kept = StoreFile.load(golden.layout.store_file)
    assert kept is not None
    assert kept.sizes[HASH_SLOTS] == 200


def test_an_index_is_rebuilt_with_other_sizes_by_whoever_asks(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    asked = load(None, ["index.hash_slots=1000", "index.max_items=4000"])
    with pytest.raises(StoreError, match=r"index\.hash_slots=1000, index\.max_items=4000 was asked for"):
        fit(golden.layout, asked, offline=True)
    assert fit(golden.layout, asked, offline=True, new_index=True).config.index.hash_slots == 1000
    assert fit(golden.layout, load(), offline=True, new_index=True).config.index.hash_slots == 200


def test_sizes_that_no_node_can_work_with_are_the_stores_trouble_not_the_configurations(layout: StoreLayout) -> None:
    make(layout.commit_log, (0, 100_000))
    with pytest.raises(
        StoreError, match=r"cannot work with, or were cut short: .*segment_bytes=100000 must be a multiple"
    ):
        fit(layout, load())
    assert fit(layout, load(), offline=True).config.commit_log.segment_bytes == 100_000


def test_only_files_that_a_node_makes_are_remembered_before_they_are_there(layout: StoreLayout) -> None:
    """BatchCQ and extension files may first be made by RocketMQ, by its configuration."""
    layout.own.mkdir(parents=True)
    fit(layout, load()).remember(layout)
    kept = StoreFile.load(layout.store_file)
    assert kept is not None
    assert set(kept.sizes) == {SEGMENT, QUEUE_FILE, HASH_SLOTS, MAX_ITEMS}
    make(layout.batch_consume_queue / "b" / "0", (0, 460))
    fitted = fit(layout, load())
    assert fitted.config.consume_queue.batch_file_bytes == 460
    fitted.remember(layout)
    kept = StoreFile.load(layout.store_file)
    assert kept is not None
    assert kept.sizes[BATCH_FILE] == 460
    before = layout.store_file.stat().st_mtime_ns, layout.store_file.stat().st_ino
    fit(layout, load()).remember(layout)
    assert (layout.store_file.stat().st_mtime_ns, layout.store_file.stat().st_ino) == before, "nothing new to say"


def test_names_of_sizes_are_the_configurations() -> None:
    assert set(sizes_of(NodeConfig())) == set(SIZES)


def test_looking_at_a_store_loads_nothing_heavy() -> None:
    """The supervisor and `commitmq start` look, and both must stay small."""
    heavy = ("numpy", "isal", "zmq", "click")
    code = f"import sys, commitmq.config.fitting; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
