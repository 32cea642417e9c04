"""Goal: a folder of segments is seen as it is, also while other processes make and delete files in it.

Method: a listing that lacks files which are there, as the kernel's listing of a changing folder may; and a folder in which a
thread makes files as fast as it can while it is looked at.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq.errors import SegmentSizeError, StoreError
from commitmq.files import mapped_file
from commitmq.files.mapped_file import MappedFileQueue, list_segments, list_sizes
from commitmq.format.file_names import segment_name

BYTES = 4096


def make(folder: Path, *numbers: int, size: int = BYTES) -> None:
    for number in numbers:
        (folder / segment_name(number * BYTES)).write_bytes(bytes(size))


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of segments that every listing of a folder passes over."""
    numbers: set[int] = set()
    scandir = os.scandir

    @contextlib.contextmanager
    def scan(folder: Any) -> Iterator[Any]:
        with scandir(folder) as entries:
            hidden = {segment_name(number * BYTES) for number in numbers}
            yield iter([entry for entry in entries if entry.name not in hidden])

    monkeypatch.setattr(os, "scandir", scan)
    return numbers


def test_a_listing_may_lack_files_that_are_there(tmp_path: Path, lacking: set[int]) -> None:
    make(tmp_path, *range(2, 9))
    lacking |= {3, 5, 6}
    assert list_segments(tmp_path, BYTES) == [number * BYTES for number in range(2, 9)]
    assert MappedFileQueue(tmp_path, BYTES).end_offset == 9 * BYTES


def test_a_file_that_is_missing_is_told(tmp_path: Path, lacking: set[int]) -> None:
    make(tmp_path, 0, 1, 2, 4, 5)
    lacking.add(1)
    with pytest.raises(StoreError, match=f"{segment_name(3 * BYTES)} is missing before {segment_name(4 * BYTES)}"):
        list_segments(tmp_path, BYTES)


def test_files_that_are_deleted_meanwhile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look finds 0, lacks 1 and 2, which are deleted by then, and finds what follows."""
    make(tmp_path, 0, 3, 4)
    scandir = os.scandir
    looks: list[Any] = []

    def scan(folder: Any) -> Any:
        if looks:
            (tmp_path / segment_name(0)).unlink(missing_ok=True)
        looks.append(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    assert list_segments(tmp_path, BYTES) == [3 * BYTES, 4 * BYTES]
    assert len(looks) == 2


def test_a_new_segment_costs_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 0)
    queue = MappedFileQueue(tmp_path, BYTES)
    make(tmp_path, 1, 2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(mapped_file, "list_segments", None)
        assert queue.base_of(2 * BYTES + 7) == 2 * BYTES
        assert queue.bases == [0, BYTES, 2 * BYTES], "only as far as it is asked"
    make(tmp_path, 4, size=17)
    with pytest.raises(SegmentSizeError, match="17 bytes"):
        queue.base_of(4 * BYTES)


def test_other_names_and_sizes_do_not_hold_up_a_look(tmp_path: Path) -> None:
    make(tmp_path, 0, 1 << 40)
    (tmp_path / "notes").write_text("x")
    assert list_sizes(tmp_path, 1) == [(0, BYTES), (BYTES << 40, BYTES)]
    assert list_sizes(tmp_path / "absent", BYTES) == []


def test_a_growing_folder_has_no_holes(tmp_path: Path) -> None:
    """A listing of a folder of this size lacks files now and then while others are made in it."""
    made, stop = [0], threading.Event()
    make(tmp_path, *range(2000))
    made[0] = 2000

    def grow() -> None:
        while not stop.is_set() and made[0] < 12_000:
            fresh = tmp_path / "fresh"
            fd = os.open(fresh, os.O_CREAT | os.O_WRONLY, 0o600)
            os.ftruncate(fd, BYTES)
            os.close(fd)
            fresh.rename(tmp_path / segment_name(made[0] * BYTES))
            made[0] += 1

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(30):
            before = made[0]
            found = list_segments(tmp_path, BYTES)
            assert found == [number * BYTES for number in range(len(found))]
            assert len(found) >= before
    finally:
        stop.set()
        thread.join()
