"""Goal: what is taken out of the log can be told and found again, whatever interrupts the taking.
Method: real files in a real folder: copies compared byte by byte, journals torn at every byte, failing system calls.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from commitmq import failpoints
from commitmq.store.layout import StoreLayout
from commitmq.store.recovery import cut_record
from commitmq.store.recovery.cut_record import Cut, CutPart


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    found = StoreLayout(tmp_path)
    found.own.mkdir()
    return found


def a_cut(number: int, *parts: CutPart) -> Cut:
    return Cut(number, 1_700_000_000_000 + number, "recovery", "no record's magic", 64, parts)


def test_a_copy_has_every_byte_and_holes_cost_nothing(layout: StoreLayout, tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    data = bytes(70) + b"abc" + bytes((3 << 20) - 73) + b"tail" + bytes(1 << 20)
    segment.write_bytes(data)
    with segment.open("rb") as file:
        part = cut_record.keep(layout, 7, file.fileno(), 1 << 30, 64, len(data))
        assert cut_record.keep(layout, 7, file.fileno(), 1 << 30, 3 << 20 | 4, len(data)) is None
    assert part is not None
    copy = cut_record.cut_folder(layout) / part.copy
    assert copy.name == f"{1 << 30:020d}-64-7"
    assert copy.read_bytes().ljust(len(data) - 64, b"\0") == data[64:]
    assert (part.begin, part.end) == ((1 << 30) + 64, (1 << 30) + 64 + part.size)
    assert part.bytes < part.size, "the zeros between were not copied"
    assert cut_record.copy_is_whole(layout, part)
    assert copy.stat().st_mode & 0o777 == 0o600
    copy.write_bytes(copy.read_bytes()[:-1])
    assert not cut_record.copy_is_whole(layout, part)


def test_a_copy_that_cannot_be_finished_is_not_left(
    layout: StoreLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = tmp_path / "segment"
    segment.write_bytes(b"x" * 5000)
    monkeypatch.setattr(failpoints, "_points", failpoints.parse("disk.sync.cut:before=errno:EIO"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    with segment.open("rb") as file, pytest.raises(OSError, match="Input/output"):
        cut_record.keep(layout, 1, file.fileno(), 0, 0, 5000)
    assert list(cut_record.cut_folder(layout).iterdir()) == []


def test_the_journal_tells_what_happened_to_each_cut(layout: StoreLayout) -> None:
    first = a_cut(cut_record.new_id(layout), CutPart(0, 64, 10, 10, 2, "a", 1), CutPart(128, 0, 5, 5, 3, "b", 2))
    cut_record.append(layout, first)
    assert cut_record.load(layout) == [first]
    assert cut_record.unfinished(layout, "recovery", 64) == first
    assert cut_record.unfinished(layout, "recovery", 65) is None
    cut_record.mark_done(layout, first.id)
    assert cut_record.unfinished(layout, "recovery", 64) is None
    second = a_cut(cut_record.new_id(layout), CutPart(0, 64, 10, 10, -1, "c", 1))
    assert second.id > first.id
    cut_record.append(layout, second)
    cut_record.mark_restored(layout, first.id)
    found = cut_record.load(layout)
    assert [(one.done, one.restored, one.bytes, one.records) for one in found] == [
        (True, True, 15, 5),
        (False, False, 10, -1),
    ]
    assert "5 whole records" in cut_record.sentence(layout, found[0])
    assert found[0].to_json(layout)["copies"] == [str(cut_record.cut_folder(layout) / name) for name in "ab"]


def test_a_line_that_a_crash_tore_harms_no_other(layout: StoreLayout) -> None:
    path = cut_record.cut_folder(layout) / cut_record.JOURNAL
    cuts = [a_cut(number, CutPart(0, number, 1, 1, -1, str(number), 0)) for number in (1, 2, 3)]
    cut_record.append(layout, cuts[0])
    whole = path.stat().st_size
    cut_record.append(layout, cuts[1])
    data = path.read_bytes()
    for length in range(whole, len(data)):
        path.write_bytes(data[:length])
        cut_record.append(layout, cuts[2])
        assert [cut.id for cut in cut_record.load(layout)] == [1, *([2] if length == len(data) - 1 else []), 3], length


def test_an_interrupted_cut_is_known_again_by_its_copies(layout: StoreLayout, tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.write_bytes(bytes(10) + b"first" + bytes(2 << 20) + b"second")
    with segment.open("r+b", buffering=0) as file:
        fd, size = file.fileno(), segment.stat().st_size
        part = cut_record.keep(layout, 1, fd, 0, 10, size)
        assert part is not None
        cut = a_cut(1, part)
        assert cut_record.still_kept(layout, cut, [(fd, 0, 10, size)])
        os.pwrite(fd, bytes(5), 10)
        assert cut_record.still_kept(layout, cut, [(fd, 0, 10, size)]), "half of it is zeroed already"
        os.pwrite(fd, b"other", 10)
        assert not cut_record.still_kept(layout, cut, [(fd, 0, 10, size)])
        os.pwrite(fd, bytes(5), 10)
        lost = replace(cut, parts=(replace(part, crc=part.crc ^ 1),))
        assert not cut_record.still_kept(layout, lost, [(fd, 0, 10, size)])
