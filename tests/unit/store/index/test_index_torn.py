"""Goal: a store that knows its own shape of index files keeps it, whatever pages of them a power cut took; files of another
program show their shape, or are left to a person.

Method: index files of small shapes, whose pages are zeroed and whose lengths are changed, and the look that a start takes.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.config import load
from commitmq.config.fitting import FittedConfig, fit
from commitmq.format.index import HEADER_BYTES, IndexShape
from commitmq.format.record import Record
from commitmq.store.index.index_reader import IndexReader, KeyQuery
from commitmq.store.layout import StoreLayout
from commitmq.store.store_file import StoreFile
from index_store import SEGMENT_BYTES, IndexStore

OWN, OTHER = IndexShape(7, 20), IndexShape(12, 19)  # of one length


def fitted(root: Path, own: IndexShape | None) -> FittedConfig:
    """The look of a start at the store, which remembers ``own``."""
    layout = StoreLayout(root)
    if own is not None:
        layout.own.mkdir()
        sizes = {"index.hash_slots": own.hash_slots, "index.max_items": own.max_items}
        StoreFile("a" * 32, {"commit_log.segment_bytes": SEGMENT_BYTES, **sizes}).save(layout.store_file)
    return fit(layout, load())


def built(root: Path, shape: IndexShape) -> IndexStore:
    store = IndexStore(root, shape)
    store.append(Record("T", store_timestamp=at + 1, properties={"KEYS": f"k{at} all"}) for at in range(30))
    store.build()
    assert len(store.names()) > 2
    return store


def zero_pages(path: Path) -> None:
    """Only the header reached the device."""
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(bytes(path.stat().st_size - HEADER_BYTES))


def noise(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(random.Random(7).randbytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, 300)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("tear", [zero_pages, noise, cut, empty])
@pytest.mark.parametrize("which", [slice(None), slice(-1, None), slice(1, 2)])
def test_a_stores_own_shape_outlives_its_torn_files(tmp_path: Path, tear: object, which: slice) -> None:
    assert callable(tear)
    store = built(tmp_path, OWN)
    for name in store.names()[which]:
        tear(store.folder / name)
    found = fitted(tmp_path, OWN)
    assert (found.index_problem, found.notes) == ("", ())
    assert found.config.index.enable
    assert (found.config.index.hash_slots, found.config.index.max_items) == (OWN.hash_slots, OWN.max_items)
    found.remember(StoreLayout(tmp_path))
    kept = StoreFile.load(StoreLayout(tmp_path).store_file)
    assert kept is not None
    assert kept.sizes["index.hash_slots"] == OWN.hash_slots


def test_items_that_show_another_shape_of_the_same_length_count_more(tmp_path: Path) -> None:
    assert OWN.file_bytes == OTHER.file_bytes
    store = built(tmp_path, OTHER)
    zero_pages(store.folder / store.names()[0])
    found = fitted(tmp_path, OWN)
    assert (found.config.index.hash_slots, found.config.index.max_items) == (OTHER.hash_slots, OTHER.max_items)


def test_torn_files_of_a_store_that_no_node_used_are_left_to_a_person(tmp_path: Path) -> None:
    store = built(tmp_path, OWN)
    for name in store.names():
        zero_pages(store.folder / name)
    found = fitted(tmp_path, None)
    assert "cannot be told" in found.index_problem
    assert not found.config.index.enable


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 40))
def test_any_torn_file_is_made_again_while_the_others_answer(seed: int) -> None:
    """After a crash, wherever the damage is: in what a start samples, and between the samples."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = IndexStore(Path(folder), IndexShape(61, 500))
        store.append(Record("T", store_timestamp=at + 1, properties={"KEYS": f"k{at} all"}) for at in range(800))
        store.build(batch_rows=500)
        names = store.names()
        before = [(store.folder / name).read_bytes() for name in names]
        assert len(names) == 4
        name = chance.choice(names)
        data = bytearray((store.folder / name).read_bytes())
        start = chance.choice((0, *range(HEADER_BYTES, len(data) - 512, 100)))
        size = chance.choice((48, 512, 4_096))
        size = len(data[start : start + size])
        data[start : start + size] = chance.choice((bytes(size), chance.randbytes(size)))
        (store.folder / name).write_bytes(data)
        reader = IndexReader(store.log, store.folder, store.shape)
        reader.search(KeyQuery("T", "all"), bound=store.end, max_messages=100)
        store.new_node()
        files = store.files()
        position = store.index(files, files.open(clean=False, index_timestamp=0, log_end=store.end), batch_rows=500)
        while files._unread or files._reading:
            reader.search(KeyQuery("T", "all"), bound=store.end, max_messages=100)
            if files._reading:
                files._reading[1].result(10)
            files.flush()
            if files.goes_back_to is not None:
                assert files.goes_back_to < position
                position = store.index(files, files.goes_back_to, batch_rows=500)
                files.goes_back_to = None
        found = reader.search(KeyQuery("T", "all"), bound=store.end, max_messages=2_000)
        while found.following is not None:
            more = reader.search(KeyQuery("T", "all"), bound=store.end, max_messages=2_000, start=found.following)
            more.offsets[:0], more.is_whole = found.offsets, more.is_whole and found.is_whole
            found = more
        files.close(position)
        assert [(store.folder / name).read_bytes() for name in store.names()] == before, f"seed {seed}"
        assert (len(found.offsets), found.is_whole) == (800, True)
