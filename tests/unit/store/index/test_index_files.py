"""Goal: after any end of process or machine every record is in the index once, and nothing durable was written again.

Method: real files; an end is simulated by not closing, by putting back what a device would still have, and by the state
that a start finds. Expected contents come from tests/index_model.py and from the golden stores.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq.errors import StoreError
from commitmq.format.index import IndexShape, list_index_files
from commitmq.format.record import Record
from commitmq.log import get_log
from commitmq.store.index.index_file import IndexFile
from commitmq.store.index.index_files import IndexFiles
from commitmq.store.index.index_reader import IndexReader
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from golden_stores import GOLDEN_SEGMENT_BYTES, GoldenStore
from index_model import model_files
from index_store import IndexStore

SHAPE = IndexShape(5, 6)  # five items a file: two records of two items and half of a third


def records(count: int, first: int = 0) -> list[Record]:
    return [
        Record("T", store_timestamp=1_000_000 + number, properties={"KEYS": f"k{number}", "TAGS": "t"})
        for number in range(first, first + count)
    ]


@pytest.fixture
def store(tmp_path: Path) -> IndexStore:
    made = IndexStore(tmp_path, SHAPE)
    made.append(records(13))
    return made


def expected(store: IndexStore) -> list[bytes]:
    return [one.to_bytes() for one in model_files(store.records, store.shape)]


def settled(files: IndexFiles) -> tuple[int, int]:
    """What ``flush`` says once all fdatasyncs are done."""
    for future in list(files._syncing.values()):
        future.exception(10)
    return files.flush()


# ---------------------------------------------------------------- RocketMQ's stores


def golden_files(golden: GoldenStore, root: Path) -> IndexFiles:
    (root / "run").mkdir(exist_ok=True)
    log = CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES)
    state = root / "files.json"
    return IndexFiles(golden.layout.index, IndexShape(200, 500), log, get_log("t"), state_path=state, run=root / "run")


def feed(files: IndexFiles, position: int, end: int) -> int:
    walker = LogWalker(files._commit_log, max_rows=50, max_bytes=1 << 20)
    while position < end:
        batch = walker.walk(position, end)
        files.insert(batch)
        position = batch.end
    return position


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        name: ((folder / name).read_bytes(), (folder / name).stat().st_mtime_ns) for name in list_index_files(folder)
    }


def test_a_store_that_rocketmq_stopped_keeps_its_files(
    golden_copy: Callable[[str], GoldenStore], tmp_path: Path
) -> None:
    golden = golden_copy("clean")
    before = snapshot(golden.layout.index)
    for _ in range(3):
        files = golden_files(golden, tmp_path)
        position = files.open(clean=True, index_timestamp=1_795_229_127_083, log_end=274_646)
        assert position >= 273_917
        position = feed(files, position, 274_646)
        assert settled(files) == (256_464, 1_795_229_127_083)
        files.close(position)
        assert {name: content for name, (content, _) in snapshot(golden.layout.index).items()} == {
            name: content for name, (content, _) in before.items()
        }
        (tmp_path / "run" / "index.written").unlink(missing_ok=True)


def test_a_store_that_rocketmq_was_killed_on_is_completed(
    golden_copy: Callable[[str], GoldenStore], tmp_path: Path
) -> None:
    golden = golden_copy("crash")
    before = snapshot(golden.layout.index)
    files = golden_files(golden, tmp_path)
    position = files.open(clean=False, index_timestamp=1_795_229_208_666, log_end=286_835)
    assert position == 259_572
    assert list_index_files(golden.layout.index) == list(before)[:2]
    files.close(feed(files, position, 286_835))
    after = snapshot(golden.layout.index)
    assert [content for content, _ in after.values()] == [content for content, _ in before.values()]
    # The two that were durable were not even touched.
    assert list(after.items())[:2] == list(before.items())[:2]


# ---------------------------------------------------------------- ends of processes and machines


def test_only_durable_files_survive_a_crash_of_the_machine(store: IndexStore) -> None:
    files = store.files()
    half = store.records[9].physical_offset
    position = store.index(files, files.open(clean=True, index_timestamp=0), end=half)
    settled(files)
    kept = store.names()[:-1]
    assert len(kept) == 3
    store.index(files, position)  # further files, full ones too, that nobody noted as durable

    store.new_node()
    again = store.files()
    position = again.open(clean=False, index_timestamp=10**13, log_end=store.end)
    assert store.names() == kept, "the time in the checkpoint does not count where files.json says more"
    assert position == int.from_bytes(store.contents()[-1][24:32])
    again.close(store.index(again, position))
    assert store.contents() == expected(store)


def test_a_clean_node_whose_index_did_not_close_builds_it_again(store: IndexStore) -> None:
    files = store.files()
    store.index(files, files.open(clean=True, index_timestamp=0))
    settled(files)
    # What the machine had in its page cache never reached the device.
    newest = store.folder / store.names()[-1]
    newest.write_bytes(b"\0" * store.shape.file_bytes)

    store.new_node()
    again = store.files()
    position = again.open(clean=True, index_timestamp=0, log_end=store.end)
    assert not newest.exists()
    again.close(store.index(again, position))
    assert store.contents() == expected(store)


def test_a_process_killed_while_it_opens_is_not_taken_for_one_that_wrote(store: IndexStore) -> None:
    files = store.files()
    store.index(files, files.open(clean=True, index_timestamp=0))
    settled(files)
    store.new_node()
    store.files().open(clean=False, index_timestamp=0)  # and dies, before it has written anything
    left = store.names()
    again = store.files()
    position = again.open(clean=False, index_timestamp=0)
    assert store.names() == left
    again.close(store.index(again, position))
    assert store.contents() == expected(store)


def test_a_stop_in_order_is_taken_up_where_it_was(store: IndexStore) -> None:
    store.append([Record("T", store_timestamp=1_000_100) for _ in range(5)])  # without any key
    store.build()
    before = snapshot(store.folder)
    store.new_node()
    files = store.files()
    assert files.open(clean=True, index_timestamp=0, log_end=store.end) == store.end
    files.close(store.end)
    assert snapshot(store.folder) == before
    # Somebody else went on with the log, but not with the index: from the files' own end on.
    store.append(records(4, first=200))
    store.build()
    assert store.contents() == expected(store)


def test_a_log_that_lost_its_end_takes_its_items_along(store: IndexStore) -> None:
    """Asynchronous flushing: the index is durable where the log was not, and other records come to the same place."""
    store.build()
    for survivors in (11, 7, 2, 0):
        end = store.records[survivors].physical_offset
        store.records = store.records[:survivors]
        store.end = end
        store.append(records(1, first=500 + survivors))
        store.new_node()
        files = store.files()
        position = files.open(clean=False, index_timestamp=0, log_end=end)
        assert position <= end
        files.close(store.index(files, position))
        contents = [content for content in store.contents() if content[36:40] != b"\0\0\0\1"]
        assert contents == [one.to_bytes() for one in model_files(store.records, store.shape) if len(one.items) > 1]


def test_a_process_killed_while_it_cuts_leaves_nothing_of_what_was_lost(
    store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.build()
    end = store.records[4].physical_offset
    store.records, store.end = store.records[:4], end
    store.append(records(2, first=700))
    store.new_node()

    def die(_self: IndexFile, _count: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(IndexFile, "_undo", die)
        with pytest.raises(KeyboardInterrupt):
            store.files().open(clean=False, index_timestamp=0, log_end=end)
    files = store.files()
    position = files.open(clean=False, index_timestamp=0, log_end=end)
    files.close(store.index(files, position))
    assert store.contents() == expected(store)


def test_a_durable_file_that_is_cut_is_durable_no_longer(store: IndexStore) -> None:
    files = store.files()
    store.index(files, files.open(clean=True, index_timestamp=0))
    durable, stamp = settled(files)
    cut = store.records[3].physical_offset
    files.truncate(cut)
    lowered, earlier = settled(files)
    assert (lowered, earlier) < (durable, stamp)
    assert lowered < cut
    # The machine dies now, and what was cut is half on the device.
    name = store.names()[-1]
    (store.folder / name).write_bytes(b"\xff" * store.shape.file_bytes)
    store.new_node()
    again = store.files()
    position = again.open(clean=False, index_timestamp=stamp, log_end=store.end)
    assert name not in store.names()
    again.close(store.index(again, position))
    assert store.contents() == expected(store)


def test_a_failed_fdatasync_costs_the_file(store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fdatasync, []

    def broken(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", broken)
    files = store.files()
    store.index(files, files.open(clean=True, index_timestamp=0))
    second = store.names()[1]
    with pytest.raises(OSError, match="Input/output"):
        settled(files)
    assert second not in store.names()
    # The host's process ends; the next one builds the rest again.
    again = store.files()
    again.close(store.index(again, again.open(clean=True, index_timestamp=0)))
    assert store.contents() == expected(store)
    assert second not in store.names()


def test_a_checkpoint_never_covers_a_file_that_is_not_durable(tmp_path: Path) -> None:
    """RocketMQ keeps every file that ends at the checkpoint's time or earlier, so equal times must not count."""
    store = IndexStore(tmp_path, SHAPE)
    same = [Record("T", store_timestamp=1_000_000, properties={"KEYS": f"k{number} l"}) for number in range(9)]
    store.append([*same, Record("T", store_timestamp=1_000_001, properties={"KEYS": "later"})])
    files = store.files()
    position = store.index(files, files.open(clean=True, index_timestamp=0), end=store.records[-1].physical_offset)
    assert settled(files)[1] == 999_999
    store.index(files, position)
    assert settled(files)[1] == 1_000_000


def test_expired_files_go_but_never_the_newest(store: IndexStore) -> None:
    files = store.files()
    store.index(files, files.open(clean=True, index_timestamp=0))
    names = store.names()
    ends = [int.from_bytes(content[24:32]) for content in store.contents()]
    files.expire(ends[1])
    assert store.names() == names[1:], "a file that ends at the log's beginning still points to it"
    files.expire(ends[1] + 1)
    assert store.names() == names[2:]
    files.expire(10**9)
    assert store.names() == names[-1:]
    files.close(store.end)


def test_a_damaged_header_is_not_trusted(store: IndexStore) -> None:
    store.build()
    name = store.names()[2]
    with open(store.folder / name, "r+b") as file:
        file.seek(36)
        file.write((10**6).to_bytes(4))
    store.build()
    assert store.contents() == expected(store)
    assert name not in store.names()


def test_a_newest_file_that_rocketmqs_recovery_took_away_is_built_again(store: IndexStore) -> None:
    """RocketMQ crashed on our store, dropped the unfinished file and indexed only what its recovery looked at."""
    store.build()
    (store.folder / store.names()[-1]).unlink()
    # Files made within one millisecond are named after the next ones: theirs must come later all the same.
    time.sleep(0.05)
    theirs = IndexStore(store.root / "theirs", SHAPE, end=store.end)
    (theirs.root / "commitlog").rmdir()
    (theirs.root / "commitlog").symlink_to(store.root / "commitlog")
    files = theirs.files()
    files.open(clean=True, index_timestamp=0)
    files.close(theirs.index(files, store.records[-1].physical_offset))
    shutil.copy(theirs.folder / theirs.names()[0], store.folder / theirs.names()[0])
    store.build()
    assert store.contents() == expected(store)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"durable":1,"clean":true}', b"\xff"])
def test_a_state_that_cannot_be_read_means_rocketmqs_rule(store: IndexStore, content: bytes) -> None:
    store.build()
    (store.root / "files.json").write_bytes(content)
    store.new_node()
    files = store.files()
    ends = [int.from_bytes(one[8:16]) for one in store.contents()]
    names = store.names()
    files.open(clean=False, index_timestamp=ends[1], log_end=store.end)
    assert store.names() == names[:2]


def test_the_folder_may_be_deleted(store: IndexStore) -> None:
    store.build()
    shutil.rmtree(store.folder)
    store.build()
    assert store.contents() == expected(store)


def test_the_folder_may_be_another_file_system(store: IndexStore) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == store.root.stat().st_dev:
            pytest.skip("/dev/shm and the folder of the tests are one file system")
        store.folder.symlink_to(elsewhere)
        (Path(elsewhere) / "index.new").write_bytes(b"of a process that was killed")
        store.append(records(20))
        store.build()
        assert store.contents() == expected(store)
        assert store.names() == sorted(os.listdir(elsewhere))


def test_files_of_other_names_are_left_alone(store: IndexStore) -> None:
    store.build()
    (store.folder / "notes").write_text("mine")
    store.build()
    assert (store.folder / "notes").read_text() == "mine"
    assert store.contents() == expected(store)


def test_a_folder_that_cannot_be_made_is_an_error_with_its_reason(store: IndexStore) -> None:
    store.folder.write_text("a file")
    with pytest.raises(StoreError, match="folder of the index"):
        store.files().open(clean=True, index_timestamp=0)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_file_that_somebody_deleted_is_noticed_by_its_writer_and_by_queries(store: IndexStore, which: int) -> None:
    reader = IndexReader(store.log, store.folder, store.shape)
    files = store.files()
    store.index(files, files.open(clean=True, index_timestamp=0))
    names = store.names()
    assert len(names) > 2
    assert not reader.lacks_file(reader.names())
    (store.folder / names[which]).unlink()
    # What the newest file had is behind what the others have: there the writer's position tells.
    assert reader.lacks_file(reader.names()) == (which != -1)
    with pytest.raises(FileNotFoundError, match="an index file is gone"):
        settled(files)
    # The process ends; its successor builds what is missing.
    again = store.files()
    again.close(store.index(again, again.open(clean=True, index_timestamp=0)))
    assert not reader.lacks_file(reader.names())
    assert store.contents() == expected(store)
