"""Goal: whatever a crash leaves of the journal file, every acknowledged change is read back, in order, and damage of
acknowledged data is an error. Method: a table of damages to a real file, and random histories cut at random bytes.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commitmq import failpoints
from commitmq.errors import DiskFullError, StoreError
from commitmq.store.metadata.journal import Change, DropTopic, OffsetsJournal, SetOffsets, encode_record

A = SetOffsets("group", "topic", ((0, 5), (3, 1 << 62)))
B = SetOffsets("group", "other-topic", ((1, 7),))
C = DropTopic("topic")


def _written(path: Path, *turns: list[Change]) -> list[int]:
    """A journal with one record a turn; returns where each record starts, and the end."""
    journal = OffsetsJournal.create(path, "base-1")
    ends = [journal.size_bytes]
    for turn in turns:
        journal.append(turn)
        ends.append(journal.size_bytes)
    journal.close()
    return ends


def _opened(path: Path) -> tuple[list[Change], int, Path | None]:
    found = OffsetsJournal.open(path)
    assert found is not None
    journal, replay = found
    journal.close()
    assert replay.base == "base-1"
    return replay.changes, replay.torn_bytes, replay.torn_copy


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    _written(path, [A, B], [C], [A])
    assert _opened(path) == ([A, B, C, A], 0, None)


def test_no_file_is_no_journal(tmp_path: Path) -> None:
    assert OffsetsJournal.open(tmp_path / "offsets.journal") is None


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    path.mkdir()
    for read in (OffsetsJournal.open, OffsetsJournal.read):
        with pytest.raises(StoreError, match="a folder is in the place of") as error:
            read(path)
        assert str(path) in str(error.value)


def test_appending_goes_on_behind_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    _written(path, [A])
    found = OffsetsJournal.open(path)
    assert found is not None
    found[0].append([B])
    found[0].close()
    assert _opened(path)[0] == [A, B]


def test_a_torn_tail_is_cut_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    ends = _written(path, [A], [B])
    whole = path.read_bytes()
    for size in range(ends[1] + 1, ends[2]):
        path.write_bytes(whole[:size])
        changes, torn_bytes, copy = _opened(path)
        assert changes == [A]
        assert torn_bytes == size - ends[1]
        assert copy is not None
        assert copy.read_bytes() == whole[ends[1] : size]
        assert path.stat().st_size == ends[1]
        assert _opened(path)[1] == 0, "the cut is on disk, so the next start finds a clean end"
    assert len(list(tmp_path.glob("*.torn-*"))) <= 9, "copies do not pile up"


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\xff" * 30, b"\xc3OJ\x01", encode_record(9, b"[]")[:-1]])
def test_rubbish_behind_the_last_record_is_a_torn_tail(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "offsets.journal"
    _written(path, [A])
    with path.open("ab") as file:
        file.write(tail)
    assert _opened(path)[:2] == ([A], len(tail))


def test_damage_before_a_good_record_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    ends = _written(path, [A], [B], [C])
    whole = path.read_bytes()
    for position in range(ends[0], ends[2]):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="damaged") as caught:
            OffsetsJournal.open(path)
        assert caught.value.offset == (ends[0] if position < ends[1] else ends[1])
        assert path.read_bytes() == damaged


def test_a_record_missing_between_two_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    ends = _written(path, [A], [B])
    whole = path.read_bytes()
    path.write_bytes(whole[: ends[0]] + whole[ends[1] :])
    with pytest.raises(StoreError, match="damaged"):
        OffsetsJournal.open(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"{}", encode_record(0, b"{}"), encode_record(0, b"[1]")])
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "offsets.journal"
    path.write_bytes(content)
    with pytest.raises(StoreError):
        OffsetsJournal.open(path)


def test_restart_begins_anew_on_another_base(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    journal = OffsetsJournal.create(path, "base-0")
    journal.append([A])
    journal.begin_anew("base-1", lambda: None)
    journal.append([B])
    journal.close()
    assert _opened(path)[0] == [B]
    assert [one.name for one in tmp_path.iterdir()] == ["offsets.journal"]


def test_after_a_failed_sync_nothing_is_appended_before_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offsets.journal"
    journal = OffsetsJournal.create(path, "base-1")
    journal.append([A])

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(StoreError, match="Input/output"):
            journal.append([B])
        with pytest.raises(StoreError):
            journal.begin_anew("base-1", lambda: None)
    with pytest.raises(StoreError, match="not replaced"):
        journal.append([B])
    assert _opened(path)[0] == [A]
    journal.begin_anew("base-1", lambda: None)
    journal.append([C])
    journal.close()
    assert _opened(path)[0] == [C]


@pytest.mark.parametrize("before", [0, 5], ids=["no byte fits", "a part fits"])
def test_a_journal_without_room_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Nothing was synced, so nothing of what it has can be lost: no snapshot is needed, for which there is no room either."""
    path = tmp_path / "offsets.journal"
    journal = OffsetsJournal.create(path, "base-1")
    journal.append([A])
    write, parts = os.pwrite, [before] if before else []

    def full(fd: int, data: memoryview, position: int) -> int:
        if not parts:
            raise OSError(28, "No space left on device")
        return write(fd, bytes(data)[: parts.pop()], position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFullError):
            journal.append([B])
    assert not journal.failed
    assert _opened(path)[0] == [A]
    journal.append([C])
    journal.close()
    assert _opened(path)[0] == [A, C]


@pytest.mark.parametrize("place", ["journal.before_fdatasync", "disk.resize.journal:before"])
def test_a_journal_whose_record_may_have_stayed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    journal = OffsetsJournal.create(tmp_path / "offsets.journal", "base-1")
    points = f"{place}=errno:ENOSPC" + (";journal.append=errno:ENOSPC" if "resize" in place else "")
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(points))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    with pytest.raises(DiskFullError):
        journal.append([B])
    assert journal.failed
    journal.close()


def test_a_journal_without_a_new_file_goes_on_and_knows_both_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offsets.journal"
    journal = OffsetsJournal.create(path, "base-1")
    journal.append([A])
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "replace", lambda source, target: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(DiskFullError):
            journal.begin_anew("base-2", lambda: None)
    journal.append([B])
    journal.close()
    found = OffsetsJournal.read(path)
    assert found is not None
    assert [found.since(name) for name in ("base-1", "base-2", "another")] == [[A, B], [B], None]


@pytest.mark.parametrize("side", ["before", "after"])
def test_an_error_of_the_replace_costs_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """It may arrive although the new file has the name; what goes to the old one then would be in no file."""
    path = tmp_path / "offsets.journal"
    journal = OffsetsJournal.create(path, "base-1")
    journal.append([A])
    monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"disk.replace.journal:{side}=errno:EIO@1"))
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    with pytest.raises(StoreError, match="cannot replace"):
        journal.begin_anew("base-2", lambda: None)
    assert journal.failed == (side == "after")
    if not journal.failed:
        journal.append([B])
        assert _opened(path)[0] == [A, B]
    journal.begin_anew("base-1", lambda: None)
    journal.append([C])
    assert _opened(path)[0] == [C]
    journal.close()


def test_no_space_is_a_disk_full_error_and_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "offsets.journal"
    journal = OffsetsJournal.create(path, "base-1")
    journal.append([A])
    size = path.stat().st_size
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, old[1]))
    try:
        with pytest.raises(DiskFullError):
            journal.append([B])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert journal.failed
    assert path.stat().st_size == size
    journal.close()
    assert _opened(path)[0] == [A]


_changes = st.one_of(
    st.builds(DropTopic, st.text(max_size=8)),
    st.builds(
        SetOffsets,
        st.text(max_size=8),
        st.text(max_size=8),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, (1 << 63) - 1)), max_size=3).map(tuple),
    ),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(turns=st.lists(st.lists(_changes, max_size=3), max_size=6), data=st.data())
def test_a_crash_at_any_byte_keeps_every_acknowledged_change(
    tmp_path: Path, turns: list[list[Change]], data: st.DataObject
) -> None:
    """The last turn is in flight: any part of its bytes, in any order of pages, may have reached the disk."""
    path = tmp_path / "offsets.journal"
    ends = _written(path, *turns)
    content = bytearray(path.read_bytes())
    acknowledged = data.draw(st.integers(0, len(turns)))
    end = ends[acknowledged]
    tail_end = ends[min(acknowledged + 1, len(turns))]
    reached = bytearray(content[:tail_end])
    for position in range(end, tail_end):
        if data.draw(st.booleans()):
            reached[position] = 0
    del reached[data.draw(st.integers(end, tail_end)) :]
    path.write_bytes(reached)
    changes, _, _ = _opened(path)
    expected = [change for turn in turns[:acknowledged] for change in turn]
    assert changes[: len(expected)] == expected
    in_flight = turns[acknowledged] if acknowledged < len(turns) else []
    assert changes[len(expected) :] in ([], in_flight)
    for copy in tmp_path.glob("*.torn-*"):
        copy.unlink()
