"""Goal: a search finds exactly the records that have the key, newest first, whatever shares its hash and however it is cut.

Method: random logs in small index files, compared with a search through the records; the golden stores with RocketMQ's
own files; and the moments in which a reader meets a writer.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commitmq.format.index import IndexShape
from commitmq.format.record import Record
from commitmq.store.index import index_reader
from commitmq.store.index.index_file import IndexFile
from commitmq.store.index.index_reader import Cursor, IndexReader, KeyKind, KeyQuery, QueryOffsetResult
from commitmq.store.log.commit_log import CommitLog
from golden_stores import GOLDEN_SEGMENT_BYTES, GoldenStore
from index_model import matches
from index_store import IndexStore

KINDS = {"key": KeyKind.KEY, "unique": KeyKind.UNIQUE, "tag": KeyKind.TAG}
# Aa and BB share a hash, and so do all strings made of them.
colliding = st.text(st.sampled_from(["Aa", "BB"]), min_size=1, max_size=2)
records = st.builds(
    lambda topic, keys, tag, unique, step: Record(
        topic,
        store_timestamp=step,
        properties={
            name: value for name, value in (("KEYS", " ".join(keys)), ("TAGS", tag), ("UNIQ_KEY", unique)) if value
        },
    ),
    st.sampled_from(["Aa", "BB"]),
    st.lists(st.sampled_from(["Aa", "BB", "AaAa", "BBBB", "AaBB", ""]), max_size=3),
    st.sampled_from(["", "Aa", "BB"]),
    st.sampled_from(["", "Aa", "BB", "BBAa"]),
    st.integers(0, 1_500),
)


def timed(items: list[Record]) -> list[Record]:
    stamp = 1_000_000
    for record in items:
        stamp += record.store_timestamp
        record.store_timestamp = stamp
    return items


def reader_of(store: IndexStore) -> IndexReader:
    return IndexReader(store.log, store.folder, store.shape)


def test_keys_of_spaces_alone_are_not_missing_in_the_index(tmp_path: Path) -> None:
    store = IndexStore(tmp_path, IndexShape(1, 2))
    blank = Record("Aa", properties={"KEYS": " "})
    store.append(timed([blank, Record("Aa", properties={"UNIQ_KEY": "Aa"})]))
    store.build()
    found = reader_of(store).search(KeyQuery("Aa", "BB", KINDS["unique"]), bound=store.end, floor=0, max_messages=1)
    assert found.is_whole


@settings(max_examples=50, deadline=None)
@given(st.lists(records, max_size=30), st.integers(1, 4), st.integers(2, 15), st.data())
def test_random_logs(items: list[Record], slots: int, max_items: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = IndexStore(Path(folder), IndexShape(slots, max_items))
        store.append(timed(items))
        store.build()
        reader = reader_of(store)
        edges = [record.physical_offset for record in store.records] + [store.end]
        bound, floor = data.draw(st.sampled_from(edges)), data.draw(st.sampled_from([0, *edges]))
        stamps = [record.store_timestamp for record in store.records] or [0]
        begin, end = data.draw(st.sampled_from([0, *stamps])), data.draw(st.sampled_from([10**15, *stamps]))
        most, cost = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 10**9]))
        shown = [
            record
            for record in store.records
            if floor <= record.physical_offset < bound and begin <= record.store_timestamp <= end
        ]
        for topic in ("Aa", "BB"):
            for kind, number in KINDS.items():
                for key in ("Aa", "BB", "AaBB", "BBAa"):
                    wanted = sorted(set(matches(shown, topic, kind, key)), reverse=True)
                    query = KeyQuery(topic, key, number, begin, end)
                    found: list[int] = []
                    start: Cursor | None = None
                    for _ in range(1_000):
                        page = reader.search(
                            query, bound=bound, floor=floor, max_messages=most, max_items=cost, start=start
                        )
                        assert page.is_whole
                        assert len(page.offsets) <= most
                        found += page.offsets
                        if page.following is None:
                            break
                        start = Cursor.parse(str(page.following))
                    assert found == wanted, (topic, kind, key)


def test_rocketmqs_files_give_every_message_of_every_key(golden: GoldenStore) -> None:
    log = CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES)
    reader = IndexReader(log, golden.layout.index, IndexShape(200, 500))
    wanted: dict[tuple[str, str, KeyKind], set[int]] = defaultdict(set)
    for line in golden.messages:
        properties = line["properties"]
        for key in filter(None, properties.get("KEYS", "").split(" ")):
            wanted[line["topic"], key, KeyKind.KEY].add(line["physical_offset"])
        for name, kind in (("UNIQ_KEY", KeyKind.UNIQUE), ("TAGS", KeyKind.TAG)):
            if name in properties:
                wanted[line["topic"], properties[name], kind].add(line["physical_offset"])
    assert len(wanted) > 700
    for (topic, key, kind), offsets in wanted.items():
        found = reader.search(KeyQuery(topic, key, kind), bound=1 << 40, max_messages=1_000)
        assert found.offsets == sorted(offsets, reverse=True)
        assert found.is_whole
        assert found.following is None
    assert reader.last_timestamp() == {"clean": 1_795_229_148_766, "crash": 1_795_229_230_484}[golden.name]


def small(tmp_path: Path, count: int = 40, shape: IndexShape | None = None) -> IndexStore:
    store = IndexStore(tmp_path, shape or IndexShape(3, 16))
    store.append(timed([Record("T", store_timestamp=1, properties={"KEYS": f"all k{n}"}) for n in range(count)]))
    store.build()
    return store


def everything(reader: IndexReader, store: IndexStore) -> QueryOffsetResult:
    return reader.search(KeyQuery("T", "all"), bound=store.end, max_messages=1_000)


def test_items_that_rocketmq_wrote_twice_count_once(tmp_path: Path) -> None:
    """Its rebuild after a crash indexes the record at the end of the last full file again."""
    store = small(tmp_path, 8, IndexShape(3, 17))
    assert len(store.names()) == 1
    store.shape = IndexShape(3, 17)
    files = store.files()
    position = store.records[-1].physical_offset
    files.open(clean=True, index_timestamp=0)
    files._state[:] = files._state
    files._state[7], files._state[8] = -1, 0  # nothing is known to be there
    store.index(files, position)
    assert len(store.names()) == 2
    assert everything(reader_of(store), store).offsets == [one.physical_offset for one in reversed(store.records)]


def test_a_reader_follows_a_file_that_grows_rolls_and_goes(tmp_path: Path) -> None:
    store = IndexStore(tmp_path, IndexShape(3, 16))
    reader = reader_of(store)
    assert everything(reader, store).offsets == []
    assert reader.last_timestamp() == 0
    files = store.files()
    position = files.open(clean=True, index_timestamp=0)
    for number in range(30):
        store.append([Record("T", store_timestamp=1_000 + number, properties={"KEYS": "all"})])
        position = store.index(files, position)
        assert len(everything(reader, store).offsets) == number + 1
    assert len(store.names()) == 2
    files.expire(store.records[20].physical_offset)
    assert everything(reader, store).offsets == [one.physical_offset for one in reversed(store.records[15:])]
    files.truncate(store.records[18].physical_offset)
    assert everything(reader, store).offsets == [one.physical_offset for one in reversed(store.records[15:18])]


def test_what_the_header_does_not_count_yet_does_no_harm(tmp_path: Path) -> None:
    """A batch in the middle: slots lead to items that the header does not count."""
    store = small(tmp_path, 6)
    file = IndexFile(store.folder / store.names()[0], store.shape)
    header = file.header
    file._put_count(header.slots_used, 4)
    assert len(everything(reader_of(store), store).offsets) == 6
    # Taken out by the successor of a process that died: the chain is short, but whole.
    file.cut(5, header.end_timestamp, store.records[1].physical_offset)
    assert len(everything(reader_of(store), store).offsets) == 2
    file.close()


def test_a_chain_that_never_holds_still_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small(tmp_path, 6)
    query = KeyQuery("T", "all")
    slot = 10 + query.hashed % 3
    file = IndexFile(store.folder / store.names()[0], store.shape)
    # The chain's head leads to an item of another chain, as it does while an item is written on some machines.
    other = next(n for n in range(1, file.header.count) if _hash_of(file, n) % 3 != query.hashed % 3)
    file.words[slot] = int.from_bytes(other.to_bytes(4), "little")
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    found = everything(reader_of(store), store)
    assert not found.is_whole
    file.close()


def _hash_of(file: IndexFile, number: int) -> int:
    at = file.shape.item_position(number)
    return int.from_bytes(file._map[at : at + 4])


def test_an_item_without_its_record_is_said(tmp_path: Path) -> None:
    store = small(tmp_path, 6)
    segment = store.root / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    at = store.records[2].physical_offset
    data[at + 4 : at + 8] = b"\0\0\0\0"
    segment.write_bytes(data)
    found = everything(reader_of(store), store)
    assert len(found.offsets) == 5
    assert not found.is_whole


def test_the_time_of_one_search_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small(tmp_path, 40)
    monkeypatch.setattr(index_reader, "SLICE_MS", 0)
    monkeypatch.setattr(index_reader, "_SLICE_ITEMS", 2)
    reader, start, found, rounds = reader_of(store), None, [], 0
    while True:
        page = reader.search(KeyQuery("T", "k3"), bound=store.end, max_messages=10, start=start)
        found += page.offsets
        start = page.following
        rounds += 1
        if start is None:
            break
        assert page.ran_out
    assert rounds >= 4
    assert found == [store.records[3].physical_offset]


def test_bytes_are_bounded_but_one_message_always_comes(tmp_path: Path) -> None:
    store = small(tmp_path, 10)
    size = store.records[0].total_size
    for limit, count in ((1, 1), (size, 1), (3 * size, 3)):
        page = reader_of(store).search(KeyQuery("T", "all"), bound=store.end, max_messages=100, max_bytes=limit)
        assert len(page.offsets) == count
        assert page.following is not None
        assert not page.ran_out


def test_a_file_of_another_size_is_torn_and_the_others_answer(tmp_path: Path) -> None:
    store = small(tmp_path, 40)
    whole = len(everything(reader_of(store), store).offsets)
    names = store.names()
    assert len(names) > 2
    os.truncate(store.folder / names[1], 100)
    found = reader_of(store).search(KeyQuery("T", "all"), bound=store.end, max_messages=100)
    assert 0 < len(found.offsets) < whole
    assert not found.is_whole


@pytest.mark.parametrize("text", ["", "1", "1-2", "1-2-3-4", "a-1-2", "1--2", "1-2-" + "9" * 30, "١-2-3"])
def test_a_cursor_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="a query can continue"):
        Cursor.parse(text)
