"""Goal: a ConsumeQueue's files and bounds are RocketMQ's (spec 3), appending is idempotent, and nothing stale survives
a cut.

Method: small files of 10 units; expected bytes spelled out; a model (a plain list) for random series of operations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.errors import DiskFullError, SegmentSizeError, StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.file_names import segment_name
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues.consume_queue import MAX_GAP_UNITS, ConsumeQueue
from commitmq.store.queues.queue_files import list_queues
from log_builder import SEGMENT_BYTES, build_log, message, unit
from queue_times import offset_by_time

FILE_BYTES = 200
PREBLANK = bytes.fromhex("0000000000000000 7fffffff 0000000000000000")
Make = Callable[[], ConsumeQueue]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A fresh object on the same folder, as another process (or the next one) would have."""
    return lambda: ConsumeQueue(tmp_path / "T" / "0", FILE_BYTES, FdCache(2))


def units(first: int, count: int, *, step: int = 100) -> bytes:
    """``count`` units of records of ``step`` bytes, of which the first lies at ``first``."""
    return b"".join(unit(first + number * step, step, number) for number in range(count))


def file(tmp_path: Path, base: int) -> bytes:
    return (tmp_path / "T" / "0" / segment_name(base)).read_bytes()


def names(tmp_path: Path) -> list[int]:
    return sorted(int(path.name) for path in (tmp_path / "T" / "0").glob("*"))


def test_append_and_read(make: Make, tmp_path: Path) -> None:
    queue = make()
    assert (queue.min_offset, queue.max_offset, queue.has_files, queue.max_physical_offset) == (0, 0, False, -1)
    assert queue.append_units(0, units(0, 3)) == 3
    assert queue.append_units(3, units(300, 2)) == 2
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (0, 5, 500)
    assert file(tmp_path, 0) == (units(0, 3) + units(300, 2)).ljust(FILE_BYTES, b"\0")
    assert queue.read_units(1, 2) == units(0, 3)[20:]
    assert queue.read_units(4, 100) == units(300, 2)[20:]
    assert queue.read_units(5, 1) == queue.read_units(-1, 1) == b""
    assert queue.unit(3) == (300, 100, 0)
    assert queue.unit(5) is None


def test_rolling(make: Make, tmp_path: Path) -> None:
    queue = make()
    assert queue.append_units(0, units(0, 10)) == 10
    assert names(tmp_path) == [0]
    assert queue.append_units(10, units(1000, 25)) == 25
    assert names(tmp_path) == [0, 200, 400, 600]
    assert b"".join(file(tmp_path, base) for base in names(tmp_path)) == (units(0, 10) + units(1000, 25)).ljust(
        800, b"\0"
    )
    assert queue.read_units(5, 20) == (units(0, 10) + units(1000, 25))[100:500]
    other = make()
    assert other.refresh() == 35
    assert other.max_physical_offset == 3500


def test_appending_again_changes_nothing(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.append_units(0, units(0, 12))
    before = [file(tmp_path, base) for base in names(tmp_path)]
    assert queue.append_units(0, units(0, 12)) == 0
    assert queue.append_units(4, units(400, 8)) == 0
    assert [file(tmp_path, base) for base in names(tmp_path)] == before
    # A batch that overlaps the end: only what is new is written, at its place.
    assert queue.append_units(10, units(1000, 5)) == 3
    assert queue.read_units(0, 99) == units(0, 12) + units(1000, 5)[40:]
    # A place that is taken is left alone, even if the record is a later one.
    assert queue.append_units(14, unit(5000) + unit(6000)) == 1
    assert queue.unit(14) == (1400, 100, 4)
    assert queue.unit(15) == (6000, 100, 0)


def test_a_gap_is_reported_and_every_unit_stays_at_its_offset(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """RocketMQ warns and moves the unit to the end (spec 3.3 step 4); here a message keeps its queue offset."""
    queue = make()
    queue.append_units(0, units(0, 2))
    assert queue.append_units(7, unit(900)) == 1
    assert queue.unit(7) == (900, 100, 0)
    assert [queue.unit(number) for number in range(2, 7)] == [(0, 0x7FFFFFFF, 0)] * 5
    assert caplog.records[-1].fields == {"queue": queue.folder, "expected": 7, "end": 2}  # type: ignore[attr-defined]
    # Searches pass over the blank places, from either side.
    for offset, expected in [(0, 0), (1, 1), (101, 7), (900, 7), (901, 8)]:
        assert queue.last_offset_below(offset) == expected, offset
    queue.correct_min_offset(150)
    assert queue.min_offset == 7
    again = make()
    again.recover()
    assert (again.max_offset, again.max_physical_offset) == (8, 1000)
    again.truncate(900)
    # The blank places stay taken when what is behind them goes.
    assert (again.max_offset, again.max_physical_offset) == (7, 200)
    assert again.append_units(7, unit(950)) == 1
    assert again.unit(7) == (950, 100, 0)


def test_an_absurd_gap_is_not_filled(make: Make) -> None:
    queue = make()
    queue.append_units(0, units(0, 2))
    queue.append_units(MAX_GAP_UNITS + 3, unit(900))
    assert queue.unit(2) == (900, 100, 0)


@pytest.mark.parametrize(("first", "base", "blanks"), [(23, 400, 3), (20, 400, 0), (9, 0, 9)])
def test_preblank(make: Make, tmp_path: Path, first: int, base: int, blanks: int) -> None:
    queue = make()
    assert queue.append_units(first, unit(8000, 50, -1)) == 1
    assert names(tmp_path) == [base]
    assert file(tmp_path, base) == (PREBLANK * blanks + unit(8000, 50, -1)).ljust(FILE_BYTES, b"\0")
    assert (queue.min_offset, queue.max_offset) == (first, first + 1)
    assert queue.read_units(first - 1, 2) == b""
    assert queue.append_units(first + 1, units(8050, 10)) == 10
    assert queue.read_units(first, 99) == unit(8000, 50, -1) + units(8050, 10)


def test_min_offset_of_preblanked_queues_at_log_minimum_zero(make: Make) -> None:
    """RocketMQ's own minimum points at a pre-blank unit then (its offset 0 is not below 0); ours passes over them."""
    make().append_units(23, unit(8000, 50) + unit(8050, 50))
    queue = make()
    queue.recover()
    assert queue.min_offset == 20
    queue.correct_min_offset(0)
    assert queue.min_offset == 23
    queue.correct_min_offset(8050)
    assert queue.min_offset == 24


def test_a_queue_with_preblanks_only_begins_anew(make: Make, tmp_path: Path) -> None:
    """A crash between the pre-blanks and the unit: appending behind them would give every message a wrong offset."""
    make().append_units(23, unit(8000, 50))
    path = tmp_path / "T" / "0" / segment_name(400)
    path.write_bytes((PREBLANK * 2).ljust(FILE_BYTES, b"\0"))
    queue = make()
    queue.recover()
    assert not queue.has_files
    assert names(tmp_path) == []
    queue.append_units(23, unit(8000, 50))
    assert file(tmp_path, 400) == (PREBLANK * 3 + unit(8000, 50)).ljust(FILE_BYTES, b"\0")


@pytest.mark.parametrize(
    ("log_min", "expected"), [(0, 0), (1, 1), (100, 1), (101, 2), (950, 10), (2400, 24), (2401, 25), (9999, 25)]
)
def test_correct_min_offset(make: Make, log_min: int, expected: int) -> None:
    queue = make()
    queue.append_units(0, units(0, 25))
    queue.correct_min_offset(log_min)
    assert queue.min_offset == expected
    assert queue.read_units(expected, 1) == (b"" if expected == 25 else unit(expected * 100, 100, expected))
    if expected:
        assert queue.read_units(expected - 1, 1) == b""


def test_min_offset_never_goes_back(make: Make) -> None:
    queue = make()
    queue.append_units(0, units(0, 25))
    queue.correct_min_offset(1200)
    queue.correct_min_offset(300)
    assert queue.min_offset == 12


@pytest.mark.parametrize(
    ("log_min", "deleted", "left"),
    [(0, 0, [0, 200, 400]), (900, 0, [0, 200, 400]), (901, 1, [200, 400]), (9999, 2, [400])],
)
def test_delete_expired(make: Make, tmp_path: Path, log_min: int, deleted: int, left: list[int]) -> None:
    queue = make()
    queue.append_units(0, units(0, 25))
    assert queue.delete_expired(log_min) == deleted
    assert names(tmp_path) == left
    assert queue.max_offset == 25
    assert queue.min_offset == min(25, -(-log_min // 100))
    queue.append_units(25, unit(2500))
    again = make()
    again.recover()
    assert again.max_offset == 26


@pytest.mark.parametrize("cut", [0, 1, 50, 100, 950, 1000, 1001, 1950, 2000, 2449, 2500, 9000])
def test_truncate_removes_and_zeroes(make: Make, tmp_path: Path, cut: int) -> None:
    queue = make()
    queue.append_units(0, units(0, 25))
    queue.truncate(cut)
    kept = min(25, -(-cut // 100))
    assert queue.max_offset == kept
    assert queue.max_physical_offset == (kept * 100 if kept else -1)
    assert b"".join(file(tmp_path, base) for base in names(tmp_path)) == units(0, kept).ljust(
        -(-kept // 10) * FILE_BYTES, b"\0"
    )
    assert not queue.is_dirty
    # What was cut cannot link up again: the queue grows over it and a new look finds exactly its own units.
    assert queue.append_units(kept, units(cut + 10_000, 3)) == 3
    again = make()
    again.recover()
    assert again.max_offset == kept + 3
    assert again.read_units(0, 99) == units(0, kept) + units(cut + 10_000, 3)


def test_truncate_to_preblanks_begins_anew(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.append_units(23, units(8000, 5))
    queue.truncate(8000)
    assert (names(tmp_path), queue.has_files, queue.max_offset) == ([], False, 0)
    queue.append_units(23, units(8000, 5))
    assert queue.min_offset == 23


def test_a_cut_reaches_the_device(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))  # type: ignore[func-returns-value]
    queue = make()
    queue.append_units(0, units(0, 15))
    queue.flush()
    assert [Path(one).name for one in synced] == [segment_name(0), segment_name(200)]
    queue.flush()
    assert len(synced) == 2
    queue.truncate(400)
    assert [Path(one).name for one in synced[2:]] == [segment_name(0)]


@pytest.mark.parametrize("physical", [0, 1, 99, 100, 101, 1500, 2400, 2401, 9999])
def test_last_offset_below(make: Make, physical: int) -> None:
    queue = make()
    queue.append_units(0, units(0, 25))
    assert queue.last_offset_below(physical) == sum(number * 100 < physical for number in range(25))


def test_last_offset_below_counts_preblanks(make: Make) -> None:
    queue = make()
    assert queue.last_offset_below(5) == 0
    queue.append_units(23, units(8000, 5))
    assert queue.last_offset_below(0) == 23
    assert queue.last_offset_below(8101) == 25


GARBAGE = {
    "negative size": unit(1300, -5),
    "negative offset": unit(-1, 100),
    "stale": unit(700, 100),
    "zeros then stale": bytes(20) + unit(1300, 100),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_recover_clears_what_is_behind_the_end(make: Make, tmp_path: Path, garbage: bytes) -> None:
    queue = make()
    queue.append_units(0, units(0, 13))
    path = tmp_path / "T" / "0" / segment_name(200)
    data = bytearray(path.read_bytes())
    data[60 : 60 + len(garbage)] = garbage
    path.write_bytes(data)
    (tmp_path / "T" / "0" / segment_name(400)).write_bytes(units(2000, 10))
    reader = make()
    assert reader.refresh() == 13
    assert names(tmp_path) == [0, 200, 400]
    again = make()
    again.recover()
    assert (again.max_offset, again.max_physical_offset) == (13, 1300)
    assert names(tmp_path) == [0, 200]
    assert file(tmp_path, 200) == units(0, 13)[200:].ljust(FILE_BYTES, b"\0")


def test_recover_of_odd_folders(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "T" / "0"
    queue = make()
    queue.recover()
    assert (queue.max_offset, queue.refresh()) == (0, 0)
    make().append_units(0, units(0, 10))
    (folder / segment_name(200)).write_bytes(b"")  # a crash between making a file and giving it its size
    (folder / "notes.txt").write_text("not ours")
    assert make().refresh() == 10
    queue.recover()
    assert queue.max_offset == 10
    assert not (folder / segment_name(200)).exists()
    queue.append_units(10, units(1000, 1))
    assert file(tmp_path, 200) == units(1000, 1).ljust(FILE_BYTES, b"\0")


def test_long_queues_are_recovered_from_their_last_files(make: Make, tmp_path: Path) -> None:
    make().append_units(0, units(0, 95))
    queue = make()
    queue.recover()
    assert (queue.max_offset, queue.max_physical_offset, queue.min_offset) == (95, 9500, 0)
    for base in names(tmp_path)[-3:]:
        (tmp_path / "T" / "0" / segment_name(base)).write_bytes(bytes(FILE_BYTES))
    queue = make()
    queue.recover()
    assert (queue.max_offset, queue.max_physical_offset) == (70, 7000)
    assert queue.append_units(70, units(7000, 2)) == 2


def test_a_reader_follows(make: Make, tmp_path: Path) -> None:
    writer, reader = make(), make()
    assert reader.refresh() == 0
    for count in (1, 9, 10, 3, 0, 30):
        writer.append_units(writer.max_offset, units(writer.max_offset * 100, count))
        assert reader.refresh() == writer.max_offset
        assert reader.max_physical_offset == writer.max_physical_offset
    assert reader.read_units(0, 99) == writer.read_units(0, 99)
    writer.truncate(1250)
    assert reader.refresh() == 13
    writer.append_units(13, units(5000, 3))
    assert reader.refresh() == 16
    writer.truncate(0)
    assert reader.refresh() == 0
    # The same file names again: a descriptor of the deleted files would show their old content.
    writer.append_units(0, units(70_000, 2))
    assert reader.refresh() == 2
    assert reader.read_units(0, 9) == units(70_000, 2)


def test_a_reader_follows_over_preblanks(make: Make) -> None:
    writer, reader = make(), make()
    writer.append_units(23, units(8000, 2))
    assert reader.refresh() == 25
    reader.correct_min_offset(0)
    assert reader.min_offset == 23
    writer.append_units(25, units(8200, 7))
    assert reader.refresh() == 32


def test_errors_name_file_and_place(make: Make, tmp_path: Path) -> None:
    make().append_units(0, units(0, 25))
    os.truncate(tmp_path / "T" / "0" / segment_name(200), 199)
    with pytest.raises(SegmentSizeError, match=r"199.*200") as caught:
        make().recover()
    assert caught.value.path == tmp_path / "T" / "0" / segment_name(200)
    (tmp_path / "T" / "0" / segment_name(200)).unlink()
    with pytest.raises(StoreError, match="missing") as missing:
        make().refresh()
    assert missing.value.path == tmp_path / "T" / "0" / segment_name(400)
    with pytest.raises(ValueError, match="20"):
        make().append_units(0, b"short")
    with pytest.raises(ValueError, match="20"):
        ConsumeQueue(tmp_path, 50)


def test_a_full_disk_is_named_and_the_append_can_be_repeated(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make()
    queue.append_units(0, units(0, 8))
    real = os.pwrite
    room = [1]

    def full(fd: int, data: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        room[0] -= 1
        return real(fd, bytes(data)[:30], offset)  # a write that is cut short, then none

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError) as caught:
        queue.append_units(8, units(800, 5))
    assert caught.value.path == Path(queue.folder) / segment_name(0)
    assert (queue.max_offset, queue.max_physical_offset) == (8, 800)
    monkeypatch.setattr(os, "pwrite", real)
    assert queue.append_units(8, units(800, 5)) == 5
    assert queue.read_units(0, 99) == units(0, 8) + units(800, 5)


def test_files_are_sparse_and_full_size(tmp_path: Path) -> None:
    queue = ConsumeQueue(tmp_path / "T" / "0", 6_000_000)
    queue.append_units(0, units(0, 3))
    status = os.stat(tmp_path / "T" / "0" / segment_name(0))
    assert status.st_size == 6_000_000
    assert status.st_blocks * 512 <= 16_384


def test_thousands_of_queues_are_small_and_hold_few_descriptors(tmp_path: Path) -> None:
    fds = FdCache(8)
    before = len(os.listdir("/proc/self/fd"))
    queues = [ConsumeQueue(tmp_path / f"T{number}" / "0", FILE_BYTES, fds) for number in range(300)]
    for round_number in range(2):
        for queue in queues:
            queue.append_units(round_number, unit(round_number * 100))
    for queue in queues:
        assert queue.max_offset == 2
        queue.flush()
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    assert not hasattr(queues[0], "__dict__")
    assert sys.getsizeof(queues[0]) + sys.getsizeof(queues[0].folder) < 400
    fds.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_list_queues(tmp_path: Path) -> None:
    for name in ("B/10", "B/2", "B/x", "A/0", "%RETRY%g/0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    found = [(topic, queue) for topic, queue, _ in list_queues(tmp_path)]
    assert found == [("%RETRY%g", 0), ("A", 0), ("B", 2), ("B", 10)]
    assert list(list_queues(tmp_path / "absent")) == []


def test_destroy(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.append_units(0, units(0, 25))
    queue.destroy()
    assert not (tmp_path / "T" / "0").exists()
    assert (queue.max_offset, queue.has_files) == (0, False)
    queue.append_units(0, units(0, 1))
    assert names(tmp_path) == [0]


# ---------------------------------------------------------------- by time


Timed = Callable[[list[int], int], tuple[ConsumeQueue, CommitLog]]


@pytest.fixture
def timed(make: Make, tmp_path: Path) -> Timed:
    """``timed(times, first)``: a log of one record a store time, and its queue beginning at offset ``first``."""

    def build(times: list[int], first: int) -> tuple[ConsumeQueue, CommitLog]:
        placed = build_log(tmp_path / "commitlog", (message(number, time=time) for number, time in enumerate(times)))
        queue = make()
        queue.append_units(first, b"".join(unit(one.physical_offset, one.total_size) for one in placed))
        return queue, CommitLog(tmp_path / "commitlog", SEGMENT_BYTES)

    return build


@pytest.mark.parametrize(
    ("time", "lower", "upper"), [(5, 1, 1), (10, 1, 3), (20, 4, 3), (30, 4, 5), (31, 6, 5), (999, 6, 5)]
)
def test_the_specifications_example_by_time(timed: Timed, time: int, lower: int, upper: int) -> None:
    """Times t1, t1, t1, t3, t3 at offsets 1..5 (spec 3.7); t1 = 10, t2 = 20, t3 = 30."""
    queue, log = timed([10, 10, 10, 30, 30], 1)
    assert offset_by_time(queue, time, "lower", log) == lower
    assert offset_by_time(queue, time, "UPPER", log) == upper
    assert offset_by_time(queue, time, "anything else", log) == lower


@pytest.mark.parametrize("first", [0, 7, 20])
@pytest.mark.parametrize("log_min_record", [0, 4, 17])
def test_by_time_over_files_and_expired_units(timed: Timed, first: int, log_min_record: int) -> None:
    """Method: every time against the definition: first with time >= T, last with time <= T, clamped to the bounds."""
    times = sorted((number * 7) % 31 for number in range(35))
    queue, log = timed(times, first)
    least = queue.unit(first + log_min_record)
    assert least is not None
    queue.correct_min_offset(least[0])
    present = list(enumerate(times, first))[log_min_record:]
    for time in range(-1, 33):
        lower = next((offset for offset, stamp in present if stamp >= time), queue.max_offset)
        assert offset_by_time(queue, time, "lower", log) == lower, time
        upper = next((offset for offset, stamp in reversed(present) if stamp <= time), queue.min_offset)
        assert offset_by_time(queue, time, "upper", log) == upper, time


def test_by_time_in_an_empty_queue(make: Make, tmp_path: Path) -> None:
    log = CommitLog(tmp_path / "commitlog", SEGMENT_BYTES)
    assert offset_by_time(make(), 5, "lower", log) == 0
    queue = make()
    queue.append_units(0, units(0, 3))
    queue.correct_min_offset(10_000)
    assert offset_by_time(queue, 5, "lower", log) == offset_by_time(queue, 5, "upper", log) == 3


# ---------------------------------------------------------------- against a model

operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 15)),
        st.tuples(st.just("replay"), st.integers(0, 30)),
        st.tuples(st.just("truncate"), st.integers(0, 6000)),
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=80)
@given(st.integers(0, 25), operations)
def test_any_series_of_operations_leaves_what_a_list_would(
    tmp_path_factory: pytest.TempPathFactory, first: int, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("model") / "T" / "0"
    fds = FdCache(2)
    queue = ConsumeQueue(folder, FILE_BYTES, fds)
    model: list[int] = []  # physical offsets of the units from queue offset `first` on
    end = 1  # of the log
    for name, number in steps:
        if name == "append":
            queue.append_units(first + len(model), units(end, number))
            model += [end + 100 * index for index in range(number)]
            end += 100 * number
        elif name == "replay":
            for index, offset in list(enumerate(model))[-number:]:
                assert queue.append_units(first + index, unit(offset)) == 0
        elif name == "truncate":
            queue.truncate(number)
            model = [offset for offset in model if offset < number]
            end = model[-1] + 100 if model else 1
        else:
            queue = ConsumeQueue(folder, FILE_BYTES, fds)
            queue.recover()
            queue.correct_min_offset(0)
        reader = ConsumeQueue(folder, FILE_BYTES, FdCache(1))
        reader.refresh()
        for one in (queue, reader):
            assert one.max_offset == (first + len(model) if model else 0)
            found = [one.unit(first + index) for index in range(len(model))]
            assert [place[0] for place in found if place] == model
        assert queue.min_offset == (first if model else 0)
    fds.close()
