"""Goal: what a store keeps outside of itself lies in a folder that only its owner can make, find and enter, and that is found
again by whoever opens the store next.

Method: folders are claimed, lost, copied and pre-created as an attacker would, in a parent of the test's own.
"""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.store import shared_memory
from commitmq.store.layout import StoreLayout
from commitmq.store.log import transient_pool
from commitmq.supervision import node_files


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    (tmp_path / "shm").mkdir()
    layout = StoreLayout(tmp_path / "store")
    node_files.make_folders(layout)
    return layout


def claim(layout: StoreLayout) -> Path:
    return shared_memory.claim(layout, str(layout.root.parent / "shm"))


def test_a_folder_is_claimed_once_and_closed_to_others(layout: StoreLayout) -> None:
    folder = claim(layout)
    assert claim(layout) == folder == shared_memory.recorded_folder(layout)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert shared_memory.memory_folder(layout).parent == folder
    shared_memory.release(layout)
    assert not folder.exists()
    assert shared_memory.recorded_folder(layout) is None
    assert claim(layout) != folder, "a name that others have seen is never used again"


def test_a_folder_with_something_in_it_stays_recorded(layout: StoreLayout) -> None:
    folder = claim(layout)
    (folder / "pool").mkdir()
    shared_memory.release(layout)
    assert claim(layout) == folder


def test_a_copy_of_a_store_has_a_folder_of_its_own(layout: StoreLayout) -> None:
    folder = claim(layout)
    (folder / "memory").mkdir()
    shutil.copytree(layout.root, layout.root.with_name("copy"))
    copy = StoreLayout(layout.root.with_name("copy"))
    assert shared_memory.recorded_folder(copy) is None
    assert claim(copy) != folder
    assert (folder / "memory").exists(), "the original's is left alone"


@pytest.mark.parametrize("kind", ["open", "link", "file", "gone"])
def test_what_is_not_ours_alone_is_neither_used_nor_touched(layout: StoreLayout, kind: str) -> None:
    folder = claim(layout)
    elsewhere = layout.root.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "memory").mkdir()
    folder.rmdir()
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        folder.symlink_to(elsewhere)
    elif kind == "file":
        folder.touch()
    assert claim(layout) != folder
    assert (elsewhere / "memory").exists()


def test_another_parent_gets_another_folder_and_the_former_memory_is_freed(layout: StoreLayout) -> None:
    folder = claim(layout)
    (folder / "memory" / "topics").mkdir(parents=True)
    (layout.root.parent / "other").mkdir()
    moved = shared_memory.claim(layout, str(layout.root.parent / "other"))
    assert moved.parent.name == "other"
    assert not folder.exists()


def test_a_parent_that_is_not_there_is_named(layout: StoreLayout) -> None:
    with pytest.raises(StoreError, match=r"memory\.folder.*nowhere"):
        shared_memory.claim(layout, "/nowhere")


def test_a_record_that_cannot_be_read_counts_as_none(layout: StoreLayout) -> None:
    claim(layout)
    (layout.own / "shared_memory.json").write_bytes(b'{"folder": 1')
    assert shared_memory.recorded_folder(layout) is None
    assert claim(layout).is_dir()


STEPS = ("disk.open.{}:after", "{}.write", "disk.sync.{}:after", "disk.replace.{}:before", "disk.replace.{}:after")


@pytest.mark.parametrize("point", [*STEPS, "disk.sync_folder.{}:before"])
def test_a_folder_that_could_not_be_recorded_is_not_used(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """No name of a folder is forgotten: the record comes first, so at most it names a folder that does not exist."""
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"{point.format('shared_memory')}=errno:ENOSPC@1"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    with pytest.raises(StoreError, match="No space left"):
        claim(layout)
    parent = layout.root.parent / "shm"
    assert list(parent.iterdir()) == []
    folder = claim(layout)
    assert [folder] == list(parent.iterdir()) == [shared_memory.recorded_folder(layout)]


@pytest.mark.parametrize("point", [*STEPS, "disk.sync_folder.{}:after"])
@pytest.mark.parametrize("what", ["pool_note", "pool_owner"])
def test_a_pool_that_could_not_be_made_leaves_nothing(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch, point: str, what: str
) -> None:
    if what == "pool_owner" and "sync" in point:
        return  # memory is not synced
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"{point.format(what)}=errno:ENOSPC@1"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)

    def make() -> None:
        parent = str(layout.root.parent / "shm")
        transient_pool.make(layout, parent, buffers=1, segment_bytes=65_536, properties_crc=False, committed=0)

    with pytest.raises(StoreError, match="No space left"):
        make()
    assert not transient_pool.note_path(layout).exists()
    make()
    note = transient_pool.PoolNote.load(layout)
    assert note is not None
    assert transient_pool.owner_id(Path(note.folder)) == note.id
