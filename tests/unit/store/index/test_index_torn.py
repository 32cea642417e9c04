"""Goal: a store that knows its own shape of index files keeps it, whatever pages of them a power cut took; files of another
program show their shape, or are left to a person.

Method: index files of small shapes, whose pages are zeroed and whose lengths are changed, and the look that a start takes.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from commitmq.config import load
from commitmq.config.fitting import Fitted, fit
from commitmq.format.index_header import HEADER_BYTES, IndexShape
from commitmq.format.record import Record
from commitmq.store.layout import StoreLayout
from commitmq.store.store_file import StoreFile
from index_store import SEGMENT_BYTES, IndexStore

OWN, OTHER = IndexShape(7, 20), IndexShape(12, 19)  # of one length


def fitted(root: Path, own: IndexShape | None) -> Fitted:
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
