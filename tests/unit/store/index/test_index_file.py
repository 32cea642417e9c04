"""Goal: index files are RocketMQ's, bit for bit, however the log is cut into batches and whatever the keys are.

Method: the golden stores' logs give the golden files; random logs give the files of a second, plain implementation of
the specification (tests/index_model.py), and the same ones after a process died with its work half done.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.errors import DiskFullError
from commitmq.format.index import IndexShape, list_index_files
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record
from commitmq.kernels.compiled import hash_on
from commitmq.store.index.index_file import IndexFile, file_name, new_state
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from golden_stores import GOLDEN_SEGMENT_BYTES, GoldenStore
from index_model import model_files
from index_store import IndexStore

GOLDEN_SHAPE = IndexShape(200, 500)
GOLDEN_ENDS = {"clean": 274_646, "crash": 286_835}
HEAD = 40

texts = st.text(st.sampled_from("ab 🚀é\u07ff\uffffZ"), min_size=1, max_size=6)
random_records = st.builds(
    lambda topic, keys, tags, unique, kind, step: Record(
        topic,
        sys_flag=kind,
        store_timestamp=step,
        properties={
            name: value for name, value in (("KEYS", keys), ("TAGS", tags), ("UNIQ_KEY", unique)) if value is not None
        },
    ),
    st.sampled_from(["T", "Ü", "long-topic"]),
    st.none() | texts,
    st.none() | texts,
    st.none() | st.text(st.sampled_from("0F"), min_size=3, max_size=3),
    st.sampled_from([0, 0, 0, 0x4, 0x8, 0xC]),
    st.integers(0, 3_000),
)


def stored(records: list[Record], first: int = 1_795_229_125_513) -> list[Record]:
    """The records with store times that rise by their steps."""
    stamp = first
    for record in records:
        stamp += record.store_timestamp
        record.store_timestamp = stamp
    return records


@pytest.mark.parametrize("batch_rows", [1, 37, 16_384])
def test_golden_logs_give_the_golden_files(golden: GoldenStore, tmp_path: Path, batch_rows: int) -> None:
    store = IndexStore(tmp_path, GOLDEN_SHAPE, end=GOLDEN_ENDS[golden.name])
    shutil.rmtree(tmp_path / "commitlog")
    files = store.files()
    files._commit_log = log = CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES)
    position = files.open(clean=True, index_timestamp=0)
    walker = LogWalker(log, max_rows=batch_rows, max_bytes=1 << 20)
    while position < store.end:
        batch = walker.walk(position, store.end)
        files.insert(batch)
        position = batch.end
    files.close(position)
    theirs = [(golden.layout.index / name).read_bytes() for name in list_index_files(golden.layout.index)]
    assert len(theirs) == 3
    assert store.contents() == theirs


@settings(max_examples=60, deadline=None)
@given(st.lists(random_records, max_size=25), st.integers(1, 30), st.integers(2, 12), st.integers(1, 9))
def test_random_logs_give_the_files_of_the_specification(
    records: list[Record], slots: int, items: int, batch_rows: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = IndexStore(Path(folder), IndexShape(slots, items))
        store.append(stored(records))
        store.build(batch_rows=batch_rows)
        assert store.contents() == [one.to_bytes() for one in model_files(store.records, store.shape)]


@settings(max_examples=60, deadline=None)
@given(st.lists(random_records, min_size=1, max_size=20), st.integers(2, 12), st.data())
def test_a_process_that_died_leaves_the_same_files_after_its_successor(
    records: list[Record], items: int, data: st.DataObject
) -> None:
    """The page cache of a killed process: all stores up to some item, of which the header counts fewer."""
    with tempfile.TemporaryDirectory() as folder:
        store = IndexStore(Path(folder), IndexShape(5, items))
        store.append(stored(records))
        files = store.files()
        position = files.open(clean=True, index_timestamp=0)
        cut = data.draw(st.sampled_from([record.physical_offset for record in store.records]))
        position = store.index(files, position, end=cut)
        newest = files._newest
        if newest is not None:
            # What is missing of the commit: nothing but the count, or the ends too.
            before = newest.header
            store.index(files, position, batch_rows=data.draw(st.integers(1, 20)))
            if files._newest is newest:
                fields = data.draw(st.sampled_from([(4,), (1, 3, 4), (0, 1, 2, 3, 4)]))
                values = (before.begin_timestamp, before.end_timestamp, before.begin_offset, before.end_offset)
                for number in fields:
                    if number == 4:
                        newest._put_count(before.slots_used, before.count)
                    else:
                        newest._put(number, values[number])
        # No close: the process is gone. Its successor in the same node:
        again = store.files()
        position = again.open(clean=True, index_timestamp=0, log_end=0)
        again.close(store.index(again, position))
        assert store.contents() == [one.to_bytes() for one in model_files(store.records, store.shape)]


@settings(max_examples=40, deadline=None)
@given(st.lists(random_records, min_size=1, max_size=20), st.integers(2, 12), st.data())
def test_truncate_leaves_what_was_there_before(records: list[Record], items: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = IndexStore(Path(folder), IndexShape(5, items))
        store.append(stored(records))
        files = store.files()
        store.index(files, files.open(clean=True, index_timestamp=0))
        number = data.draw(st.integers(0, len(store.records) - 1))
        cut = store.records[number].physical_offset
        files.truncate(cut)
        kept = [one for one in model_files(store.records[:number], store.shape) if len(one.items) > 1]
        found = [content for content in store.contents() if content[36:40] != b"\0\0\0\1"]  # an empty one may stay
        assert [content[HEAD:] for content in found] == [one.to_bytes()[HEAD:] for one in kept]
        assert [content[24:40] for content in found] == [one.to_bytes()[24:40] for one in kept]
        # And all of it comes back as if nothing had happened.
        files.close(store.index(files, cut))
        assert store.contents() == [one.to_bytes() for one in model_files(store.records, store.shape)]


@given(texts)
def test_the_hash_is_javas(text: str) -> None:
    data = np.frombuffer(f"T#{text}".encode(), np.uint8)
    assert np.int32(np.uint32(hash_on(data, 0, len(data), 0))) == java_string_hash(f"T#{text}")


def test_a_key_whose_hash_has_no_absolute_value_is_filed_under_zero(tmp_path: Path) -> None:
    key = "polygenelubricants"  # Java's hash of it is -2^31
    assert java_string_hash(key) == -(2**31)
    # The hashed text is topic#key, so look for a topic and key that end there too.
    topic, rest = key[:4], key[4:]
    store = IndexStore(tmp_path)
    suffix = _suffix(java_string_hash(f"{topic}#{rest}"))
    assert java_string_hash(f"{topic}#{rest}{suffix}") == -(2**31)
    store.append([Record(topic, store_timestamp=1, properties={"KEYS": rest + suffix})])
    store.build()
    with_item = store.contents()[0][store.shape.item_position(1) :]
    assert with_item[:4] == b"\0\0\0\0"


def _suffix(start: int) -> str:
    """The six characters that bring Java's hash from ``start`` to -2^31, found digit by digit in base 31."""
    wanted = (2**31 - start * 31**6) % 2**32
    for lap in range(31**6 // 2**32 + 400):
        rest, characters = wanted + lap * 2**32, ""
        for _ in range(6):
            low = rest % 31
            choices = [code for code in range(33, 127) if code % 31 == low and code <= rest]
            if not choices:
                break
            code = choices[-1]
            characters = chr(code) + characters
            rest = (rest - code) // 31
        if len(characters) == 6 and rest == 0:
            return characters
    raise AssertionError("no such suffix")


def test_file_names_are_local_time_and_always_rise() -> None:
    now = datetime(2026, 11, 21, 2, 45, 25, 538_999)
    assert file_name(now, None) == "20261121024525538"
    assert file_name(now, "20261121024525537") == "20261121024525538"
    assert file_name(now, "20261121024525538") == "20261121024525539"
    assert file_name(now, "20261231235959999") == "20270101000000000"
    assert file_name(now, "99999999999999998") == "99999999999999999"
    assert file_name(now + timedelta(hours=1), "20261121024525538") == "20261121034525538"


@pytest.mark.parametrize("clean", [True, False])
def test_files_of_another_size_are_torn_and_made_again(tmp_path: Path, clean: bool) -> None:
    store = IndexStore(tmp_path, IndexShape(5, 6))
    store.append([Record("T", store_timestamp=number + 1, properties={"KEYS": "k"}) for number in range(12)])
    store.build()
    names = list_index_files(store.folder)
    assert len(names) == 3
    for name in names:
        os.truncate(store.folder / name, 77)
    assert store.files().open(clean=clean, index_timestamp=1 << 60) == 0
    assert not list_index_files(store.folder)


def test_no_space_is_an_error_that_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = IndexStore(tmp_path, IndexShape(5, 8))
    store.append([Record("T", store_timestamp=number + 1, properties={"KEYS": f"a{number} b"}) for number in range(9)])
    files = store.files()
    position = files.open(clean=True, index_timestamp=0)
    real, calls = os.posix_fallocate, []

    def refuse(fd: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) % 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    refused = 0
    while True:
        try:
            position = store.index(files, position)
            break
        except DiskFullError:
            refused += 1
            assert refused < 20
    assert refused >= 3
    files.close(position)
    assert store.contents() == [one.to_bytes() for one in model_files(store.records, store.shape)]
    assert not (tmp_path / "run" / "index.new").exists()


def test_a_file_is_unmapped_when_closed(tmp_path: Path) -> None:
    store = IndexStore(tmp_path)
    store.append([Record("T", store_timestamp=1, properties={"KEYS": "k"})])
    store.build()
    file = IndexFile(store.folder / store.names()[0], store.shape)
    file.load(new_state())
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.item_offset(1)
