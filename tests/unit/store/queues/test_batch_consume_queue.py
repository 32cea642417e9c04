"""Goal: a BatchConsumeQueue's files and bounds are RocketMQ's (spec 3.9), appending is idempotent, and nothing stale
survives a cut.

Method: small files of 5 units; expected bytes spelled out; a model (a plain list) for random series of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.errors import CorruptRecordError, SegmentSizeError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import BATCH_UNIT_BYTES
from commitmq.format.file_names import segment_name
from commitmq.format.units import BATCH_UNIT
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue, make_units

FILE_BYTES = 5 * BATCH_UNIT_BYTES
Make = Callable[[], BatchConsumeQueue]
Row = tuple[int, int, int, int, int, int]  # physical offset, size, tags code, store timestamp, base, count


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A fresh object on the same folder, as another process (or the next one) would have."""
    return lambda: BatchConsumeQueue(tmp_path / "T" / "0", FILE_BYTES, FdCache(2))


def rows(*counts: int, start: int = 0, base: int = 0, time: int = 1_000) -> list[Row]:
    """Units of records of 100 bytes each, with batches of ``counts`` messages; 10 ms between two."""
    result = []
    for number, count in enumerate(counts):
        result.append((start + number * 100, 100, number, time + number * 10, base, count))
        base += count
    return result


def units(some: list[Row]) -> np.ndarray:
    return make_units(*np.array(some, np.int64).reshape(-1, 6).T)


def read(queue: BatchConsumeQueue) -> list[Row]:
    """What may be read of the queue."""
    found = queue.units(queue.min_index, queue.end_index - queue.min_index)
    return [tuple(int(value) for value in list(one)[:6]) for one in found]  # type: ignore[misc]


def names(tmp_path: Path) -> list[int]:
    return sorted(int(path.name) for path in (tmp_path / "T" / "0").glob("*"))


def test_bytes(make: Make, tmp_path: Path) -> None:
    queue = make()
    assert (queue.min_offset, queue.max_offset, queue.has_files, queue.max_physical_offset) == (-1, 0, False, -1)
    some = [(0x1122, 0x3344, -2, 0x0102030405, 7, 3), (0x5566, 0x7788, 2598919, 0x0102030406, 10, 32767)]
    assert queue.append_units(units(some)) == 2
    assert (tmp_path / "T" / "0" / ("0" * 20)).read_bytes() == bytes.fromhex(
        "0000000000001122 00003344 fffffffffffffffe 0000000102030405 0000000000000007 0003 ffffffff 00000000"
        "0000000000005566 00007788 000000000027a807 0000000102030406 000000000000000a 7fff ffffffff 00000000"
    ).ljust(FILE_BYTES, b"\0")
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (7, 32777, 0x5566 + 0x7788)


def test_look_up_by_queue_offset(make: Make) -> None:
    queue = make()
    queue.append_units(units(rows(3, 1, 5, 2, 4, 6, 1)))  # bases 0 3 4 9 11 15 21
    wanted = {0: 0, 2: 0, 3: 1, 4: 2, 8: 2, 9: 3, 10: 3, 11: 4, 14: 4, 15: 5, 20: 5, 21: 6, 22: 7, 99: 7}
    assert {offset: queue.index_of(offset) for offset in wanted} == wanted
    assert queue.index_of(15, stop=3) == 3
    with pytest.raises(CorruptRecordError, match="unit 7"):
        queue.unit(7)


def test_appending_again_changes_nothing(make: Make) -> None:
    queue = make()
    some = rows(3, 1, 5, 2, 4, 6, 1)
    assert queue.append_units(units(some[:4])) == 4
    assert queue.append_units(units(some[:4])) == 0
    assert queue.append_units(units(some[2:])) == 3
    assert read(queue) == some


def test_a_gap_between_batches_is_kept_and_reported(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """In a store of an older RocketMQ plain messages take queue offsets without a unit: they cannot be consumed."""
    queue = make()
    queue.append_units(units(rows(3)))
    assert queue.append_units(units([(500, 100, 0, 2_000, 8, 2)])) == 1
    assert caplog.records[-1].fields == {"queue": queue.folder, "expected": 8, "end": 3}  # type: ignore[attr-defined]
    assert (queue.min_offset, queue.max_offset) == (0, 10)
    assert [queue.index_of(offset) for offset in (2, 3, 7, 8, 9, 10)] == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("damage", ["size", "count", "base", "physical", "falls"])
def test_recovery_ends_at_what_is_no_unit(make: Make, tmp_path: Path, damage: str) -> None:
    """What lies behind is zeroed: it would link up again when the queue has grown to it."""
    make().append_units(units(rows(2, 2, 2, 2)))
    path = tmp_path / "T" / "0" / segment_name(0)
    bad = np.frombuffer(path.read_bytes(), BATCH_UNIT).copy()
    name, value = {
        "size": ("size", 0),
        "count": ("count", -1),
        "base": ("base_offset", -1),
        "physical": ("physical_offset", -5),
        "falls": ("physical_offset", 150),
    }[damage]
    bad[name][2] = value
    path.write_bytes(bad.tobytes())
    other = make()
    assert other.refresh() == 4  # a reader sees the same end, and changes nothing
    assert path.read_bytes() == bad.tobytes()
    queue = make()
    queue.recover()
    assert read(queue) == rows(2, 2)
    assert path.read_bytes()[2 * BATCH_UNIT_BYTES :] == bytes(3 * BATCH_UNIT_BYTES)


def test_files_of_wrong_size_are_refused(make: Make, tmp_path: Path) -> None:
    make().append_units(units(rows(2)))
    with open(tmp_path / "T" / "0" / segment_name(0), "ab") as file:
        file.write(b"x")
    with pytest.raises(SegmentSizeError):
        make().recover()
    with pytest.raises(ValueError, match="multiple of 46"):
        BatchConsumeQueue(tmp_path, 100)


def test_a_follower_sees_growth_truncation_and_a_new_queue(make: Make) -> None:
    writer, reader = make(), make()
    assert reader.refresh() == 0
    writer.append_units(units(rows(1, 2, 3, 4, 5, 6, 7)))
    assert reader.refresh() == 28
    writer.append_units(units(rows(8, start=700, base=28)))
    assert reader.refresh() == 36
    writer.truncate(600)
    assert reader.refresh() == 21
    reader.correct_min_offset(350)
    assert reader.min_offset == 10
    writer.destroy()
    assert reader.refresh() == 0
    assert not reader.has_files
    make().append_units(units(rows(9, start=5_000)))
    assert reader.refresh() == 9
    assert reader.min_offset == 0


def test_look_up_by_time(make: Make) -> None:
    queue = make()
    assert queue.offset_by_time(5, "lower") == queue.offset_by_time(5, "upper") == 0
    times = [1_000, 1_000, 1_020, 1_030, 1_030, 1_030, 1_090]
    some = [(n * 100, 100, 0, time, n * 3, 3) for n, time in enumerate(times)]
    queue.append_units(units(some))
    for wanted in range(990, 1_100):
        later = [base for _, _, _, time, base, _ in some if time >= wanted]
        earlier = [base + count - 1 for _, _, _, time, base, count in some if time <= wanted]
        assert queue.offset_by_time(wanted, "lower") == (later[0] if later else 21), wanted
        assert queue.offset_by_time(wanted, "UPPER") == (earlier[-1] if earlier else 0), wanted
    queue.correct_min_offset(250)
    assert queue.offset_by_time(0, "lower") == queue.offset_by_time(0, "upper") == 9
    assert queue.offset_by_time(2_000, "lower", stop=5) == 15
    assert queue.offset_by_time(2_000, "upper", stop=5) == 14


def test_the_writers_next_offset_counts_what_was_dispatched(make: Make) -> None:
    queue = make()
    assert queue.max_offset_below(10) == 0
    queue.append_units(units(rows(3, 4, 5, start=100)))
    assert [queue.max_offset_below(offset) for offset in (100, 101, 200, 201, 301, 999)] == [0, 3, 3, 7, 12, 12]


operations = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(1, 9), min_size=1, max_size=12)),
    st.tuples(st.just("again"), st.integers(0, 40)),
    st.tuples(st.just("truncate"), st.integers(0, 60)),
    st.tuples(st.just("expire"), st.integers(0, 60)),
    st.tuples(st.just("restart"), st.booleans()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(operations, max_size=12))
def test_model(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]]) -> None:
    """Any series of appends, replays, truncations, expiries and restarts gives what a list would."""
    folder = tmp_path_factory.mktemp("queue") / "T" / "0"
    queue = BatchConsumeQueue(folder, FILE_BYTES, FdCache(3))
    model: list[Row] = []
    physical = 0  # the log's end
    floor = 0  # the log's minimum
    for name, value in steps:
        if name == "append":
            base = model[-1][4] + model[-1][5] if model else 0
            new = rows(*value, start=physical, base=base, time=physical)  # type: ignore[misc]
            physical += 100 * len(new)
            assert queue.append_units(units(new)) == len(new)
            model += new
        elif name == "again":
            assert queue.append_units(units(model[int(value) :])) == 0  # type: ignore[call-overload]
        elif name == "truncate":
            physical = min(physical, max(floor, int(value) * 100))  # type: ignore[call-overload]
            queue.truncate(physical)
            model = [row for row in model if row[0] < physical]
            if not queue.has_files and all(row[0] < floor for row in model):
                model = []  # what is left has expired, its files too: a queue without a unit is as one that never had any
        elif name == "expire":
            floor = max(floor, min(physical, int(value) * 100))  # type: ignore[call-overload]
            queue.delete_expired(floor)
        elif name == "restart":
            queue = BatchConsumeQueue(folder, FILE_BYTES, FdCache(3))
            queue.recover() if value else queue.refresh()
            queue.correct_min_offset(floor)
        if queue.has_files and not model:
            raise AssertionError("files without a unit are left")
        queue.correct_min_offset(floor)
        kept = [row for row in model if row[0] >= floor]
        assert read(queue) == kept
        assert queue.max_offset == (model[-1][4] + model[-1][5] if model else 0)
        assert queue.min_offset == (kept[0][4] if kept else queue.max_offset if model else -1)
        assert queue.max_physical_offset == (model[-1][0] + 100 if model else -1)
