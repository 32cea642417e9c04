"""Goal: ``commitmq/store.json`` is believed when a node wrote it, and never when a byte of it changed.

Method: every byte of a real one is changed in turn; a write is interrupted at each of its steps.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.errors import StoreError
from commitmq.store.store_file import StoreFile, new_id, store_id

SIZES = {"commit_log.segment_bytes": 131_072, "consume_queue.file_bytes": 1_000}


def saved(folder: Path) -> tuple[Path, StoreFile]:
    file = StoreFile(new_id(), SIZES)
    path = folder / "commitmq" / "store.json"
    path.parent.mkdir()
    file.save(path)
    return path, file


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path, file = saved(tmp_path)
    assert StoreFile.load(path) == file
    assert store_id(tmp_path) == store_id(str(tmp_path)) == file.store_id
    assert not path.with_suffix(".new").exists()


def test_two_stores_have_two_ids() -> None:
    assert len({new_id() for _ in range(1_000)}) == 1_000


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert StoreFile.load(tmp_path / "store.json") is None
    assert store_id(tmp_path) is None


def test_no_changed_byte_goes_unnoticed(tmp_path: Path) -> None:
    path, file = saved(tmp_path)
    data = path.read_bytes()
    for at in range(len(data)):
        for changed in (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at]):
            path.write_bytes(changed)
            try:
                found = StoreFile.load(path)
            except ValueError:
                assert store_id(tmp_path) is None
                continue
            assert found == file, "only white space may differ"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "3", '{"version": 2}', "\0" * 4096, '{"sizes": {}, "store_id": 1}']
)
def test_what_is_no_such_file_is_damaged(tmp_path: Path, text: str) -> None:
    path, _ = saved(tmp_path)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"."):
        StoreFile.load(path)


def test_an_interrupted_write_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old = saved(tmp_path)
    new = StoreFile(old.store_id, {**SIZES, "index.hash_slots": 7})
    for step in ("open", "sync", "replace", "sync_folder"):
        old.save(path)

        def fail(name: str, step: str = step) -> None:
            if name == f"disk.{step}.store_file:before":
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as failing:
            failing.setattr(failpoints, "ACTIVE", True)
            failing.setattr(failpoints, "hit", fail)
            with pytest.raises(StoreError, match="cannot write the store's id and sizes"):
                new.save(path)
        assert StoreFile.load(path) == (new if step == "sync_folder" else old)
