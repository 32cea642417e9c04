"""Goal: deleting segments leaves a whole store whatever interrupts it; nobody holds or sees half of a deletion.

Method: real files; what a crash or a power cut leaves is made by hand and handed to the functions that must cope with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commitmq.errors import OffsetOutOfRangeError, StoreError
from commitmq.files import disk_space
from commitmq.files.disk_space import PATIENCE_MS, RETURN_MS, DiskWatch, Holder, find_holders
from commitmq.files.fd_cache import FdCache
from commitmq.files.mapped_file import MappedFileQueue, list_segments
from commitmq.format.file_names import segment_name
from commitmq.store.layout import StoreLayout
from commitmq.store.log.expiry import Claim, MinOffsetFile, finish_expiry, list_bases, look_at_segments, store_bytes
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_ends import GroupPosition, UnitFinder, slowest

SIZE = 4096


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    made = StoreLayout(tmp_path / "store")
    made.commit_log.mkdir(parents=True)
    made.own.mkdir()
    return made


def segments(layout: StoreLayout, *numbers: int) -> None:
    for number in numbers:
        (layout.commit_log / segment_name(number * SIZE)).write_bytes(bytes([number % 256]) * SIZE)


# ---------------------------------------------------------------- the durable minimum


def test_the_minimum_is_read_as_it_was_written(layout: StoreLayout) -> None:
    file = MinOffsetFile(layout)
    assert file.read() == 0
    for offset in (0, 4096, 10**15, 12):
        file.write(offset)
        assert file.read() == offset
        assert file.path.stat().st_size == 21, "a new length would need a new block"


@pytest.mark.parametrize("content", [b"abc", b"1" * 20, b"1" * 22, b"-" + b"1" * 19 + b"\n"])
def test_a_minimum_that_is_no_number_is_named(layout: StoreLayout, content: bytes) -> None:
    (layout.own / "min_offset").write_bytes(content)
    with pytest.raises(StoreError, match="min_offset"):
        MinOffsetFile(layout).read()


def test_an_empty_file_of_a_crash_counts_as_none(layout: StoreLayout) -> None:
    (layout.own / "min_offset").touch()
    assert MinOffsetFile(layout).read() == 0


# ---------------------------------------------------------------- after a crash


@pytest.mark.parametrize(
    ("there", "minimum", "left"),
    [
        ([0, 1, 2, 3], 0, [0, 1, 2, 3]),  # killed before the minimum was durable
        ([0, 1, 2, 3], 2, [2, 3]),  # killed before the first file went
        ([1, 2, 3], 2, [2, 3]),  # killed in between
        ([0, 2, 3], 2, [2, 3]),  # a power cut brought one back and not the other
        ([2, 3], 2, [2, 3]),  # killed at the end
        ([5, 6], 3, [5, 6]),  # RocketMQ deleted more since
        ([2, 3], 3, [3]),
    ],
)
def test_recovery_finishes_a_deletion(layout: StoreLayout, there: list[int], minimum: int, left: list[int]) -> None:
    segments(layout, *there)
    MinOffsetFile(layout).write(minimum * SIZE)
    assert finish_expiry(layout, SIZE) == left[0] * SIZE
    assert list_bases(layout.commit_log) == [number * SIZE for number in left]
    assert finish_expiry(layout, SIZE) == left[0] * SIZE


def test_the_minimum_of_another_log_deletes_nothing_now_or_later(layout: StoreLayout) -> None:
    MinOffsetFile(layout).write(7 * SIZE)
    segments(layout, 0, 1)
    assert finish_expiry(layout, SIZE) == 0
    segments(layout, *range(2, 12))  # the log grows beyond the old minimum
    assert finish_expiry(layout, SIZE) == 0
    assert len(list_bases(layout.commit_log)) == 12


def test_an_emptied_store_begins_at_zero(layout: StoreLayout) -> None:
    MinOffsetFile(layout).write(7 * SIZE)
    assert finish_expiry(layout, SIZE) == 0
    assert MinOffsetFile(layout).read() == 0


def test_what_a_person_put_back_is_not_deleted_without_a_word(layout: StoreLayout) -> None:
    segments(layout, 0, 1, 2)
    file = MinOffsetFile(layout)
    file.write(2 * SIZE)
    past = time.time() - 60
    os.utime(file.path, (past, past))  # it was noted a minute before the segments came
    with pytest.raises(StoreError, match="put back"):
        finish_expiry(layout, SIZE)
    assert list_bases(layout.commit_log) == [0, SIZE, 2 * SIZE]
    file.path.unlink()
    assert finish_expiry(layout, SIZE) == 0


def test_a_date_in_the_future_makes_no_segment_younger_than_the_next(layout: StoreLayout) -> None:
    """A clock that was 400 days ahead must not keep what was written then for so long."""
    segments(layout, 0, 1, 2, 3)
    now = time.time()
    for number, age in enumerate((5_000, -400 * 86_400, -400 * 86_400 + 5, 1_000)):
        os.utime(layout.commit_log / segment_name(number * SIZE), (now - age, now - age))
    ages = [round(now - one.modified_ms / 1000) for one in look_at_segments(layout.commit_log, SIZE)]
    assert ages == [5_000, 1_000, 1_000, 1_000]


def test_a_date_in_the_past_makes_no_segment_older_than_the_one_before(layout: StoreLayout) -> None:
    """A clock that was four days behind must not expire what was written then."""
    segments(layout, 0, 1, 2, 3)
    now = time.time()
    for number, age in enumerate((5_000, 4 * 86_400, 1_000, 2_000)):
        os.utime(layout.commit_log / segment_name(number * SIZE), (now - age, now - age))
    ages = [round(now - one.modified_ms / 1000) for one in look_at_segments(layout.commit_log, SIZE)]
    assert ages == [5_000, 5_000, 1_000, 1_000]


# ---------------------------------------------------------------- who looks meanwhile


def test_a_listing_survives_deletions_under_way(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    segments(layout, 0, 1, 2, 3)
    real = os.scandir

    class Entry:
        """Deletes two segments when the first one has been looked at, as another process may."""

        def __init__(self, entry: os.DirEntry[str]) -> None:
            self._entry = entry
            self.name = entry.name

        def stat(self) -> os.stat_result:
            found = self._entry.stat()
            for number in (0, 1):
                (layout.commit_log / segment_name(number * SIZE)).unlink(missing_ok=True)
            return found

    class Listing:
        def __init__(self, folder: Path) -> None:
            with real(folder) as entries:
                self._entries = sorted((Entry(entry) for entry in entries), key=lambda entry: entry.name)

        def __enter__(self) -> list[Entry]:
            return self._entries

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(os, "scandir", Listing)
    assert list_segments(layout.commit_log, SIZE) == [2 * SIZE, 3 * SIZE]


def test_a_hole_that_stays_is_still_an_error(layout: StoreLayout) -> None:
    segments(layout, 0, 2)
    with pytest.raises(StoreError, match="missing"):
        list_segments(layout.commit_log, SIZE)


def test_segments_are_unmapped_before_they_go_and_not_mapped_again(layout: StoreLayout) -> None:
    segments(layout, 0, 1, 2)
    queue = MappedFileQueue(layout.commit_log, SIZE)
    for number in range(3):
        queue.mapped(number * SIZE)
    held = queue.mapped(SIZE).view()
    assert queue.release_below(2 * SIZE) == SIZE, "somebody still reads the second"
    assert queue.mapped_count == 2
    assert bytes(held[:3]) == b"\1\1\1"
    with pytest.raises(OffsetOutOfRangeError):
        queue.mapped(0)  # still on the disk, but not in the log
    with pytest.raises(OffsetOutOfRangeError):
        queue.mapped(SIZE)
    held.release()
    assert queue.release_below(2 * SIZE) == 2 * SIZE
    assert queue.mapped_count == 1
    assert queue.min_offset == 2 * SIZE
    queue.refresh()
    assert queue.bases == [2 * SIZE]
    queue.close()


def test_descriptors_of_deleted_files_are_closed(tmp_path: Path) -> None:
    fds = FdCache()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
        fds.read_fd(str(tmp_path / name))
    (tmp_path / "a").unlink()
    fds.drop_deleted()
    assert len(fds) == 1
    fds.close()


# ---------------------------------------------------------------- the disk

HOLDER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
held = mmap.mmap(fd, 0, prot=mmap.PROT_READ) if sys.argv[2] == "map" else fd
if sys.argv[2] == "map": os.close(fd)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["map", "open"])
def test_deleted_segments_that_a_process_holds_count_as_free(layout: StoreLayout, how: str) -> None:
    segments(layout, 0, 1)
    path = layout.commit_log / segment_name(0)
    watch = DiskWatch(layout.commit_log, [layout.consume_queue], SIZE)
    assert find_holders(layout.commit_log) == ()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        assert find_holders(layout.commit_log) == (), "what is not deleted is not held"
        status, free = path.stat(), watch.free_bytes()
        path.unlink()
        watch.deleted((status.st_dev, status.st_ino), SIZE, free + SIZE, now_ms=0)
        found = watch.look(0, worry_above=-1.0)
        assert [one.pid for one in found.holders] == [holder.pid]
        assert found.held_bytes == SIZE
        assert found.ratio < found.raw_ratio
        assert watch.look(0, worry_above=1.0).holders == (), "holders are only looked for on a full disk"
        holder.stdin.close()  # type: ignore[union-attr]
        holder.wait(10)
    assert watch.look(0, worry_above=-1.0).held_bytes == SIZE, "who dies is seen to let go before the space is back"
    assert watch.look(RETURN_MS, worry_above=-1.0).held_bytes == 0, "it let go, so nothing is to be waited for"


def test_a_holder_that_lets_go_during_a_look_is_not_taken_for_a_fuller_disk(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"used": 90}
    monkeypatch.setattr(disk_space, "_use", lambda folder: (disk["used"], 100))
    watch = DiskWatch(layout.commit_log, [], 10)
    monkeypatch.setattr(disk_space, "find_holders", lambda folder: (Holder(1, "one", frozenset({(1, 1)})),))
    assert watch.look(0, worry_above=0.5).ratio == 0.8

    def lets_go(folder: Path) -> tuple[Holder, ...]:
        disk["used"] = 80
        return ()

    monkeypatch.setattr(disk_space, "find_holders", lets_go)
    assert watch.look(1, worry_above=0.5).ratio == 0.8


def test_space_that_has_not_come_back_is_believed_for_a_while(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder may be a process that cannot be seen."""
    segments(layout, 0)
    watch = DiskWatch(layout.commit_log, [], SIZE)
    monkeypatch.setattr(watch, "free_bytes", lambda: 10_000)
    watch.deleted((1, 1), SIZE, 10_000, now_ms=1_000)
    watch.deleted((1, 2), SIZE, 10_000 - SIZE, now_ms=1_000)  # this one came back
    assert watch.look(1_000, worry_above=-1.0).held_bytes == SIZE
    assert watch.look(999 + PATIENCE_MS, worry_above=-1.0).held_bytes == SIZE
    assert watch.look(1_000 + PATIENCE_MS, worry_above=-1.0).held_bytes == 0


def test_a_disk_that_cannot_be_asked_has_a_negative_ratio(tmp_path: Path) -> None:
    assert DiskWatch(tmp_path / "gone", [], SIZE).look(0, 0.5).ratio < 0


def test_what_the_store_takes_is_what_its_files_take(layout: StoreLayout) -> None:
    segments(layout, 0, 1)
    sparse = layout.consume_queue / "t" / "0" / segment_name(0)
    sparse.parent.mkdir(parents=True)
    with sparse.open("wb") as file:
        file.truncate(1 << 20)
    os.sync()
    assert store_bytes(layout.root) == sum(one.disk_bytes for one in look_at_segments(layout.commit_log, SIZE))
    assert store_bytes(layout.root / "gone") == 0


def test_segments_are_seen_with_their_age(layout: StoreLayout) -> None:
    segments(layout, 3, 4)
    old = time.time() - 5_000
    os.utime(layout.commit_log / segment_name(3 * SIZE), (old, old))
    (layout.commit_log / "notes.txt").touch()
    found = look_at_segments(layout.commit_log, SIZE)
    assert [one.base for one in found] == [3 * SIZE, 4 * SIZE]
    assert found[0].modified_ms == int(old * 1000)
    assert found[0].end == 4 * SIZE


# ---------------------------------------------------------------- ConsumeQueue files


def filled(
    layout: StoreLayout, topic: str, count: int, *, first_physical: int = 0, file_units: int = 10
) -> ConsumeQueue:
    """A queue whose unit n points at ``first_physical + 100 n``."""
    queue = ConsumeQueue(layout.consume_queue / topic / "0", file_units * 20, FdCache(8))
    units = b"".join(
        (first_physical + 100 * number).to_bytes(8, "big") + (100).to_bytes(4, "big") + bytes(8)
        for number in range(count)
    )
    queue.append_units(0, units)
    queue.flush()
    return queue


def test_a_file_waits_until_the_next_units_are_safe_from_a_power_cut(layout: StoreLayout) -> None:
    queue = filled(layout, "t", 11)
    # Unit 10 points at 1000: as long as the log begins below, a power cut might take its record and the unit itself.
    assert queue.delete_files_below(1_000, settled_below=1_000) == 0
    assert queue.delete_files_below(1_000, settled_below=None) == 1
    again = filled(layout, "u", 11)
    assert again.delete_files_below(1_100, settled_below=1_100) == 1


def test_a_queue_of_which_everything_expired_keeps_its_next_offset(layout: StoreLayout) -> None:
    queue = filled(layout, "t", 35)
    assert queue.delete_files_below(1 << 40, settled_below=1 << 40) == 3
    for again in (ConsumeQueue(queue.folder, 200, FdCache(8)) for _ in range(2)):
        again.recover(1 << 41)
        again.correct_min_offset(1 << 40)
        assert (again.min_offset, again.max_offset) == (35, 35)


# ---------------------------------------------------------------- where the groups stand


def test_the_slowest_group_is_found_through_its_unit(layout: StoreLayout) -> None:
    filled(layout, "a", 25)
    filled(layout, "b", 25, first_physical=50)
    finder = UnitFinder(layout.consume_queue, 200, layout.batch_consume_queue, 460)

    def of(*positions: tuple[str, str, int], log_min: int = 0) -> Claim | None:
        return slowest(finder, [GroupPosition(group, topic, 0, offset) for group, topic, offset in positions], log_min)

    found = of(("g", "a", 20), ("h", "a", 12), ("h", "b", 11))
    assert found is not None
    assert found.offset == 1_150
    assert "group h" in found.who
    assert "b/0 from 11" in found.who
    assert of(("g", "a", 25), ("g", "b", 25)) is None, "both have read everything"
    assert of(("g", "a", 30)) is None
    assert of(("g", "nothing-was-ever-stored", 0)) is None
    assert of() is None
    finder.close()


def test_a_group_at_a_deleted_offset_stands_at_the_first_message_that_is_left(layout: StoreLayout) -> None:
    queue = filled(layout, "a", 35)
    finder = UnitFinder(layout.consume_queue, 200, layout.batch_consume_queue, 460)
    assert queue.delete_files_below(1_550, settled_below=1_550) == 1
    for offset in (0, 9, 12, 15):
        assert finder.physical_offset("a", 0, offset, 1_550) == 1_600
    assert finder.physical_offset("a", 0, 17, 1_550) == 1_700
    finder.close()
