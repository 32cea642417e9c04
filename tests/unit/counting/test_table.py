"""Goal: what a worker counts survives its death, is read whole by others, and is bounded.

Method: tables in a folder of the test's own; a writer that is dropped and made again, and a reader beside it.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from commitmq.counting import BLOCK_BYTES, OTHER, CountReader, CountTable, Described, Family, Kind, doubling
from commitmq.errors import StoreError

SENT = Family("sent_total", Kind.COUNTER, "Sent.", ("topic",))
OPEN = Family("open", Kind.GAUGE, "Open.", ("topic",))
TIMES = Family("times_seconds", Kind.HISTOGRAM, "Times.", ("kind",), (0.001, 0.01), 1e-9)


def rows(path: Path) -> dict[tuple[str, ...], list[int]]:
    reader = CountReader(path)
    found = {(one.name, *one.labels.values()): values for _, one, values in reader.rows()}
    reader.close()
    return found


def test_counts_are_seen_by_others(tmp_path: Path) -> None:
    table = CountTable(tmp_path / "writer.counts", 100)
    table.count(SENT, "a").add(3)
    table.count(SENT, "a").add()
    table.count(OPEN, "a").set(7)
    table.count(OPEN, "a").add(-2)
    for value in (500, 1_000_000, 1_000_001, 20_000_000):
        table.histogram(TIMES, "x").observe(value)
    table.histogram(TIMES, "x").observe(500, 2)
    assert rows(tmp_path / "writer.counts") == {
        ("sent_total", "a"): [4],
        ("open", "a"): [5],
        ("times_seconds", "x"): [6, 22_001_501, 4, 1, 1],
    }


@pytest.mark.parametrize("count", [0, 1, 15, 16, 500])
def test_many_observations_at_once_are_as_many_single_ones(tmp_path: Path, count: int) -> None:
    values = [number * number * 1_000 for number in range(count)]
    table = CountTable(tmp_path / "writer.counts", 100)
    table.histogram(TIMES, "all").observe_all(values)
    for value in values:
        table.histogram(TIMES, "each").observe(value)
    table.histogram(TIMES, "each").observe(1_000_000)
    table.histogram(TIMES, "all").observe_all([1_000_000])
    found = rows(tmp_path / "writer.counts")
    assert found["times_seconds", "all"] == found["times_seconds", "each"]


def test_a_row_says_what_it_is(tmp_path: Path) -> None:
    table = CountTable(tmp_path / "writer.counts", 100)
    table.histogram(TIMES, 'a "name"\n').observe(1)
    reader = CountReader(tmp_path / "writer.counts")
    [(number, found, _)] = reader.rows()
    described = Described("times_seconds", Kind.HISTOGRAM, "Times.", {"kind": 'a "name"\n'}, (0.001, 0.01), 1e-9)
    assert (number, found) == (0, described)
    table.count(SENT, "later").add()
    assert [one.name for _, one, _ in reader.rows()] == ["times_seconds", "sent_total"]


def test_a_successor_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "writer.counts"
    first = CountTable(path, 100)
    first.count(SENT, "a").add(3)
    first.count(OPEN, "a").set(9)
    first.histogram(TIMES, "x").observe(5)
    reader = CountReader(path)
    del first  # it was killed: nothing is closed
    second = CountTable(path, 100)
    second.reset(OPEN)
    second.count(SENT, "a").add()
    second.count(SENT, "b").add()
    second.histogram(TIMES, "x").observe(5)
    assert len(second) == 4
    assert reader.is_current
    assert [values for _, _, values in reader.rows()] == [[4], [0], [2, 10, 2, 0, 0], [1]]


def test_a_half_made_row_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "writer.counts"
    table = CountTable(path, 100)
    table.count(SENT, "a").add()
    data = bytearray(path.read_bytes())
    data[8:16] = (2).to_bytes(8, "little")  # the number of rows, of a row whose length was not stored
    path.write_bytes(data)
    assert rows(path) == {("sent_total", "a"): [1]}
    data[3 * BLOCK_BYTES : 3 * BLOCK_BYTES + 8] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)
    assert rows(path) == {("sent_total", "a"): [1]}


def test_names_beyond_the_limit_are_counted_together(tmp_path: Path) -> None:
    table = CountTable(tmp_path / "writer.counts", 3)
    for number in range(1_000):
        table.count(SENT, f"topic-{number}").add()
    found = rows(tmp_path / "writer.counts")
    assert found == {("sent_total", "topic-0"): [1], ("sent_total", "topic-1"): [1], ("sent_total", "topic-2"): [1],
                     ("sent_total", OTHER): [997]}  # fmt: skip
    assert len(table._counts) <= 4, "names without a row are remembered"
    again = CountTable(tmp_path / "writer.counts", 3)
    again.count(SENT, "topic-500").add()
    assert rows(tmp_path / "writer.counts")["sent_total", OTHER] == [998]


def test_gauges_that_share_a_row_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "writer.counts"
    table = CountTable(path, 2)
    table.set_all(OPEN, {("a",): 1, ("b",): 2, ("c",): 3, ("d",): 4})
    assert rows(path) == {("open", "a"): [1], ("open", "b"): [2], ("open", OTHER): [7]}
    assert [table.has_row(OPEN, name) for name in ("a", "c")] == [True, False]
    table.set_all(OPEN, {("b",): 5, ("d",): 6})
    assert rows(path) == {("open", "a"): [0], ("open", "b"): [5], ("open", OTHER): [6]}


def test_a_name_that_is_too_long_is_counted_with_the_others(tmp_path: Path) -> None:
    table = CountTable(tmp_path / "writer.counts", 100)
    table.count(SENT, "x" * 2_000).add(2)
    assert rows(tmp_path / "writer.counts") == {("sent_total", OTHER): [2]}


def test_a_full_disk_costs_counts_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store into a hole of the file would end the process."""
    table = CountTable(tmp_path / "writer.counts", 100)
    table.count(SENT, "a").add(1)

    def full(*_arguments: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        table.count(SENT, "a").add(1)
        table.count(SENT, "b").add(1)
        table.histogram(TIMES, "x").observe(1)
        with pytest.raises(StoreError):
            CountTable(tmp_path / "other.counts", 100)
    table.count(SENT, "b").add(5)
    assert rows(tmp_path / "writer.counts") == {("sent_total", "a"): [2], ("sent_total", "b"): [5]}


def test_another_size_begins_anew_and_readers_see_it(tmp_path: Path) -> None:
    path = tmp_path / "writer.counts"
    first = CountTable(path, 10)
    first.count(SENT, "a").add(3)
    reader = CountReader(path)
    CountTable(path, 20)
    assert not reader.is_current
    assert [values for _, _, values in reader.rows()] == [[3]], "the old file is still whole"
    assert rows(path) == {}


def test_a_family_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    wrong: list[tuple[str, Kind, tuple[float, ...]]] = [
        ("a", Kind.COUNTER, ()),
        ("a_total", Kind.GAUGE, ()),
        ("a", Kind.HISTOGRAM, ()),
        ("a", Kind.GAUGE, (1.0,)),
        ("a", Kind.HISTOGRAM, (2.0, 1.0)),
    ]
    for name, kind, bounds in wrong:
        with pytest.raises(ValueError, match=name):
            Family(name, kind, "", (), bounds)
    table = CountTable(tmp_path / "writer.counts", 10)
    with pytest.raises(ValueError, match="has the labels topic"):
        table.count(SENT)
    with pytest.raises(ValueError, match="buckets"):
        table.histogram(Family("b", Kind.HISTOGRAM, "", (), doubling(1.0, 40)))
