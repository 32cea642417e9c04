"""Goal: a log is walked to its true end; end of log, torn tail and corruption are three outcomes; maps are bounded and
none is unmapped while it is read.

Method: logs built record by record in a folder, then damaged at a known place.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError, SegmentSizeError, StoreError
from commitmq.files.mapped_file import MappedFile, MappedFileQueue
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record
from commitmq.store.log.commit_log import CommitLog, TornTailError
from log_builder import SEGMENT_BYTES, build_log, message


def damage(folder: Path, offset: int, data: bytes) -> None:
    base = offset - offset % SEGMENT_BYTES
    with open(folder / segment_name(base), "r+b") as file:
        file.seek(offset - base)
        file.write(data)


def map_count(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.parametrize("start", [0, 10 * SEGMENT_BYTES])
def test_walk_over_several_segments(tmp_path: Path, start: int) -> None:
    placed = build_log(tmp_path, (message(number) for number in range(40)), start=start)
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    assert list(log.iter_records()) == placed
    assert list(log.iter_spans()) == [(one.physical_offset, one.total_size) for one in placed]
    assert log.min_offset == start
    assert len(log.segments()) == 4
    assert list(log.iter_records(placed[7].physical_offset, placed[30].physical_offset)) == placed[7:30]
    for one in placed:
        assert log.record(one.physical_offset) == one
        assert log.store_timestamp(one.physical_offset, one.total_size) == one.store_timestamp


def test_sizes_at_the_end_of_a_segment(tmp_path: Path) -> None:
    """A record may leave exactly 8 bytes, which the filler takes; one with a byte more goes on (spec 2.11)."""
    largest = SEGMENT_BYTES - 8 - 92
    build_log(tmp_path, [message(0, size=largest), message(1, size=10), message(2, size=largest - 102 + 1)])
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    assert [offset for offset, _ in log.iter_spans()] == [0, SEGMENT_BYTES, 2 * SEGMENT_BYTES]
    assert bytes(log.read(SEGMENT_BYTES - 8, 8)) == bytes.fromhex("00000008cbd43194")


def test_empty_logs(tmp_path: Path) -> None:
    assert list(CommitLog(tmp_path / "absent", SEGMENT_BYTES).iter_spans()) == []
    (tmp_path / segment_name(0)).write_bytes(b"")
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    assert (log.segments(), log.min_offset, log.end_offset) == ([], 0, 0)
    (tmp_path / segment_name(0)).write_bytes(bytes(SEGMENT_BYTES))
    log.refresh()
    assert log.segments() == [0]
    assert list(log.iter_spans()) == []


def test_unused_segments_behind_the_end(tmp_path: Path) -> None:
    placed = build_log(tmp_path, (message(number) for number in range(15)))
    (tmp_path / segment_name(2 * SEGMENT_BYTES)).write_bytes(bytes(SEGMENT_BYTES))
    (tmp_path / segment_name(3 * SEGMENT_BYTES)).write_bytes(b"")
    assert list(CommitLog(tmp_path, SEGMENT_BYTES).iter_records()) == placed


@pytest.mark.parametrize(
    ("at", "data"),
    [(4, b"\x12\x34\x56\x78"), (0, b"\x7f\xff\xff\xff"), (0, b"\0\0\0\1"), (8, b"\xff"), (100, b"\xff"), (30, b"\xff")],
)
def test_torn_tail_and_corruption_are_told_apart(tmp_path: Path, at: int, data: bytes) -> None:
    placed = build_log(tmp_path, (message(number) for number in range(25)))
    last, middle = placed[-1], placed[3]
    damage(tmp_path, last.physical_offset + at, data)
    found: list[Record] = []
    with pytest.raises(TornTailError) as caught:
        found.extend(CommitLog(tmp_path, SEGMENT_BYTES).iter_records())
    assert found == placed[:-1]
    base = last.physical_offset - last.physical_offset % SEGMENT_BYTES
    assert (caught.value.path, caught.value.offset) == (tmp_path / segment_name(base), last.physical_offset - base)

    damage(tmp_path, middle.physical_offset + at, data)
    with pytest.raises(CorruptRecordError) as corrupt:
        list(CommitLog(tmp_path, SEGMENT_BYTES).iter_records())
    assert not isinstance(corrupt.value, TornTailError)
    assert (corrupt.value.path, corrupt.value.offset) == (tmp_path / segment_name(0), middle.physical_offset)
    assert segment_name(0) in str(corrupt.value)
    assert f"at offset {middle.physical_offset}" in str(corrupt.value)


def test_zeros_before_written_segments_are_corruption(tmp_path: Path) -> None:
    placed = build_log(tmp_path, (message(number) for number in range(25)))
    damage(tmp_path, placed[3].physical_offset, bytes(8))
    with pytest.raises(CorruptRecordError, match="0x00000000"):
        list(CommitLog(tmp_path, SEGMENT_BYTES).iter_spans())


def test_a_lying_filler_is_found(tmp_path: Path) -> None:
    placed = build_log(tmp_path, (message(number) for number in range(15)))
    filler = max(sum(span) for span in CommitLog(tmp_path, SEGMENT_BYTES).iter_spans() if sum(span) < SEGMENT_BYTES)
    damage(tmp_path, filler + 3, b"\x01")
    with pytest.raises(CorruptRecordError, match="filler"):
        list(CommitLog(tmp_path, SEGMENT_BYTES).iter_spans())
    assert placed


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2 * SEGMENT_BYTES - 1), st.binary(min_size=1, max_size=30))
def test_any_damage_ends_the_walk_or_is_a_typed_error(tmp_path: Path, at: int, data: bytes) -> None:
    build_log(tmp_path, (message(number) for number in range(15)))
    damage(tmp_path, at, data[: SEGMENT_BYTES - at % SEGMENT_BYTES])
    try:
        assert len(list(CommitLog(tmp_path, SEGMENT_BYTES).iter_records())) <= 15
    except CorruptRecordError as error:
        named = error.path is not None and error.offset is not None
        assert named, error


def test_another_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    build_log(tmp_path, (message(number) for number in range(15)))
    with pytest.raises(SegmentSizeError, match=r"4096.*8192"):
        CommitLog(tmp_path, 2 * SEGMENT_BYTES)
    os.truncate(tmp_path / segment_name(0), 4000)
    with pytest.raises(SegmentSizeError, match=r"4000.*4096") as caught:
        CommitLog(tmp_path, SEGMENT_BYTES)
    assert caught.value.path == tmp_path / segment_name(0)


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    build_log(tmp_path, (message(number) for number in range(40)))
    (tmp_path / segment_name(SEGMENT_BYTES)).unlink()
    with pytest.raises(StoreError, match=f"{segment_name(SEGMENT_BYTES)} is missing"):
        CommitLog(tmp_path, SEGMENT_BYTES)


def test_reads_outside_the_log(tmp_path: Path) -> None:
    build_log(tmp_path, [message(0)], start=SEGMENT_BYTES)
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    for offset, size in ((0, 8), (SEGMENT_BYTES - 1, 8), (2 * SEGMENT_BYTES, 8), (-1, 8), (2 * SEGMENT_BYTES - 4, 8)):
        with pytest.raises(OffsetOutOfRangeError):
            log.read(offset, size)
    assert log.store_timestamp(0, 392) == -1
    assert log.store_timestamp(SEGMENT_BYTES, 391) == -1
    assert log.store_timestamp(SEGMENT_BYTES, 0) == -1


def test_new_segments_are_found_and_old_ones_go(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    placed = build_log(tmp_path, (message(number) for number in range(25)))
    assert log.record(placed[-1].physical_offset) == placed[-1]
    assert log.record(placed[0].physical_offset) == placed[0]
    (tmp_path / segment_name(0)).unlink()
    log.refresh()
    assert log.min_offset == SEGMENT_BYTES
    with pytest.raises(OffsetOutOfRangeError):
        log.record(placed[0].physical_offset)


def test_maps_are_bounded_and_given_up_least_recently_used_first(tmp_path: Path) -> None:
    placed = build_log(tmp_path, (message(number) for number in range(80)))
    log = CommitLog(tmp_path, SEGMENT_BYTES, max_mapped=3)
    assert len(log.segments()) == 8
    for one in placed:
        log.record(one.physical_offset)
        log.record(0)
    assert log.files.mapped_count == 3
    assert map_count(tmp_path) == 3
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / segment_name(0)) in maps
    log.close()
    assert map_count(tmp_path) == 0


def test_a_segment_in_use_is_never_unmapped(tmp_path: Path) -> None:
    """Views survive eviction, refresh after deletion and close; the maps go when the last view does."""
    placed = build_log(tmp_path, (message(number) for number in range(80)))
    log = CommitLog(tmp_path, SEGMENT_BYTES, max_mapped=1)
    held = {one.physical_offset: log.read(one.physical_offset, one.total_size) for one in placed[::10]}
    kept = {offset: bytes(view) for offset, view in held.items()}
    assert map_count(tmp_path) == len(log.segments()) == log.files.mapped_count
    # What is in use is found again instead of being mapped twice.
    assert log.segment(0) is log.segment(5)
    assert map_count(tmp_path) == 8
    (tmp_path / segment_name(0)).unlink()
    log.refresh()
    assert {offset: bytes(view) for offset, view in held.items()} == kept
    held.clear()
    gc.collect()
    log.record(placed[-1].physical_offset)
    log.record(placed[-20].physical_offset)
    assert log.files.mapped_count == 1
    assert map_count(tmp_path) == 1
    last = log.read(placed[-1].physical_offset, 8)
    log.close()
    assert bytes(last[4:8]) == bytes.fromhex("daa320a7")


def test_read_maps_cannot_be_written(tmp_path: Path) -> None:
    build_log(tmp_path, [message(0)])
    view = CommitLog(tmp_path, SEGMENT_BYTES).read(0, 8)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


def test_a_writable_map_writes(tmp_path: Path) -> None:
    path = tmp_path / segment_name(SEGMENT_BYTES)
    path.write_bytes(bytes(SEGMENT_BYTES))
    segment = MappedFile(path, SEGMENT_BYTES, SEGMENT_BYTES, writable=True)
    assert segment.end_offset == 2 * SEGMENT_BYTES
    view = segment.view(10, 4)
    view[:] = b"abcd"
    assert not segment.try_close()
    view.release()
    assert segment.try_close()
    assert path.read_bytes()[8:16] == b"\0\0abcd\0\0"
    queue = MappedFileQueue(tmp_path, SEGMENT_BYTES, writable=True)
    queue.mapped(SEGMENT_BYTES).view()[0:1] = b"x"
    assert path.read_bytes()[:1] == b"x"
