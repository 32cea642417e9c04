"""Goal: QueueReader shows exactly the visible part of a queue, under every limit, filter and change of the files.

Method: a store is written message by message, with queue files of ten units so that every border is crossed; what is
read is compared with the list of what was put. The golden stores are read queue by queue against their messages.jsonl.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from commitmq.format.constants import PREBLANK_SIZE
from commitmq.format.file_names import segment_name
from commitmq.format.record import Record, decode_record
from commitmq.format.units import UNIT
from commitmq.kernels.codes import MATCH, NO_MATCH
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.queues import queue_reader
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.store.queues.record_filter import JUDGED_BYTES, PullResult, PullStatus
from commitmq.store.queues.tag_filter import MAX_TAGS, TagFilter
from golden_stores import GOLDEN_QUEUE_FILE_BYTES, GOLDEN_SEGMENT_BYTES, GoldenStore
from queue_store import QueueStore
from queue_times import offset_by_time

EVERYTHING: dict[str, Any] = {"max_messages": 1 << 20, "max_bytes": 1 << 30}


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path / "store")


def reader_of(store: QueueStore, **limits: Any) -> QueueReader:
    return QueueReader(
        CommitLog(store.layout.commit_log, store.segment_bytes), store.layout.consume_queue, store.file_bytes, **limits
    )


def decoded(reader: QueueReader, result: PullResult) -> list[Record]:
    """What ``result`` found, decoded from its frames."""
    if not result.count:
        return []
    data = b"".join(reader.frames(result.units))
    records = []
    for size in result.units["size"].tolist():
        records.append(decode_record(data))
        assert records[-1].total_size == size
        data = data[size:]
    assert not data
    return records


def pull(reader: QueueReader, store: QueueStore, offset: int, **options: object) -> PullResult:
    arguments: dict[str, object] = {"bound": store.end, **EVERYTHING, **options}
    return reader.read("t", 0, offset, **arguments)  # type: ignore[arg-type]


def bodies(reader: QueueReader, result: PullResult) -> list[bytes]:
    return [record.body for record in decoded(reader, result)]


# ---------------------------------------------------------------- bounds and statuses


def test_statuses(store: QueueStore) -> None:
    reader = reader_of(store)
    assert reader.bounds("t", 0, bound=store.end) is None
    assert pull(reader, store, 0).status is PullStatus.NO_MATCHED_LOGIC_QUEUE
    hidden = store.put("t", 0, b"first")
    result = pull(reader, store, 0, bound=hidden.physical_offset)
    assert (result.status, result.next_offset, result.max_offset) == (PullStatus.NO_MESSAGE_IN_QUEUE, 0, 0)
    for number in range(24):
        store.put("t", 0, b"%d" % number)
    for offset, status, following in [
        (0, PullStatus.FOUND, 25),
        (24, PullStatus.FOUND, 25),
        (25, PullStatus.OFFSET_OVERFLOW_ONE, 25),
        (26, PullStatus.OFFSET_OVERFLOW_BADLY, 25),
        (1 << 70, PullStatus.OFFSET_OVERFLOW_BADLY, 25),
        (-1, PullStatus.OFFSET_TOO_SMALL, 0),
    ]:
        result = pull(reader, store, offset)
        assert (result.status, result.next_offset) == (status, following)
        assert (result.min_offset, result.max_offset) == (0, 25)


def test_bound_hides_what_is_not_dispatched(store: QueueStore) -> None:
    """Every bound, taken in rising order by one reader and afresh by another, shows the records that end below it."""
    records = [store.put("t", 0, b"x" * number) for number in range(45)]
    growing = reader_of(store)
    for bound in range(0, store.end + 200, 37):
        expected = sum(one.physical_offset + one.total_size <= bound for one in records)
        assert growing.bounds("t", 0, bound=bound) == (0, expected)
        assert reader_of(store).bounds("t", 0, bound=bound) == (0, expected)
        result = pull(growing, store, 0, bound=bound)
        assert bodies(growing, result) == [one.body for one in records[:expected]]


@pytest.mark.parametrize("step", [1, 7, 10, 13, 300])
def test_growth_is_followed(store: QueueStore, step: int) -> None:
    reader = reader_of(store)
    for total in range(step, 601, step):
        for number in range(total - step, total):
            store.put("t", 0, b"%d" % number)
        assert reader.bounds("t", 0, bound=store.end) == (0, total)
        assert bodies(reader, pull(reader, store, total - 1)) == [b"%d" % (total - 1)]


def test_pre_blank_units_are_passed_over(store: QueueStore) -> None:
    """Also when the log is larger than their size field claims, and when they were seen before the first real unit."""
    store.put("other", 0, b"fill")
    queue = store.queue("t", 0)
    reader = reader_of(store)
    store.put("t", 0, b"first", start=1_234)
    assert reader.bounds("t", 0, bound=0) == (1_234, 1_234)
    store.put("t", 0, b"second")
    assert queue.max_offset == 1_236
    for one in (reader, reader_of(store)):
        for bound in (store.end, 1 << 40):
            assert one.bounds("t", 0, bound=bound) == (1_234, 1_236)
        result = pull(one, store, 1_230)
        assert (result.status, result.next_offset) == (PullStatus.OFFSET_TOO_SMALL, 1_234)
        assert bodies(one, pull(one, store, 1_234)) == [b"first", b"second"]


def test_min_follows_the_floor(store: QueueStore) -> None:
    records = [store.put("t", 0, b"%d" % number) for number in range(45)]
    rising = reader_of(store)
    for index in (0, 1, 9, 10, 11, 30, 44):
        for floor in (records[index].physical_offset, records[index].physical_offset - 1):
            expected = index if floor > 0 else 0
            assert rising.bounds("t", 0, bound=store.end, floor=floor) == (expected, 45)
            assert reader_of(store).bounds("t", 0, bound=store.end, floor=floor) == (expected, 45)
    assert rising.bounds("t", 0, bound=store.end, floor=store.end) == (45, 45)
    result = pull(rising, store, 3, floor=store.end)
    assert (result.status, result.next_offset) == (PullStatus.OFFSET_TOO_SMALL, 45)
    store.put("t", 0, b"new")
    assert bodies(rising, pull(rising, store, 45, floor=records[-1].physical_offset + 1)) == [b"new"]


def test_files_and_segments_that_expire(tmp_path: Path) -> None:
    """Cleanup deletes segments and queue files under the reader's feet; it goes on with what is left."""
    store = QueueStore(tmp_path / "store", segment_bytes=4_096)
    for number in range(100):
        store.put("t", 0, b"%03d" % number * 20, tag="A")
    reader = reader_of(store)
    assert reader.bounds("t", 0, bound=store.end) == (0, 100)
    os.unlink(store.layout.commit_log / segment_name(0))
    reader.commit_log.refresh()
    units = pull(reader, store, 0, max_messages=5).units
    with pytest.raises(Exception, match="outside the log"):
        reader.frames(units)
    # A filter has to look at the records: those that vanished are passed over.
    first = next(one for one in store.records["t", 0] if one.physical_offset >= 4_096).queue_offset
    result = reader_of(store).read("t", 0, 0, bound=4_096, **EVERYTHING, wanted=TagFilter(["A"]))
    assert (result.status, result.next_offset) == (PullStatus.MESSAGE_WAS_REMOVING, first)
    result = pull(reader, store, 0, wanted=TagFilter(["A"]), max_messages=1)
    assert (result.status, result.next_offset) == (PullStatus.FOUND, first + 1)
    assert store.queue("t", 0).delete_expired(4_096) == first // 10
    assert reader.bounds("t", 0, bound=store.end, floor=4_096) == (first, 100)
    assert bodies(reader, pull(reader, store, first, floor=4_096)) == store.bodies("t", 0)[first:]
    # The word moves after the files went: a reader that does not know yet is led over the hole.
    late = reader_of(store)
    found = late.read("t", 0, 0, bound=store.end, **EVERYTHING)
    assert found.status in (PullStatus.OFFSET_TOO_SMALL, PullStatus.MESSAGE_WAS_REMOVING)
    assert 0 < found.next_offset <= first


class _HalfWritten(QueueReader):
    """Sees unit ``half`` as a read beside a write may show it: a size already, the physical offset not yet."""

    half = -1

    def _pread(self, state: Any, offset: int, count: int) -> bytes:
        data = bytearray(super()._pread(state, offset, count))
        at = (self.half - offset) * UNIT.itemsize
        if self.half >= 0 and 0 <= at < len(data):
            data[at : at + 8] = bytes(8)
            self.half = -1
        return bytes(data)


@pytest.mark.parametrize("wanted", [None, TagFilter(["A"])])
def test_a_unit_read_while_it_is_written_is_not_passed_over(store: QueueStore, wanted: TagFilter | None) -> None:
    """It looks like one of the first records of the log, so it counts as readable; a moment later it is not."""
    for number in range(3):
        store.put("t", 0, b"%d" % number, tag="A")
    bound = store.end
    reader = _HalfWritten(
        CommitLog(store.layout.commit_log, store.segment_bytes), store.layout.consume_queue, store.file_bytes
    )
    assert reader.read("t", 0, 0, bound=bound, **EVERYTHING, wanted=wanted).next_offset == 3
    store.put("t", 0, b"3", tag="A")
    reader.half = 3
    result = reader.read("t", 0, 3, bound=bound + 1, **EVERYTHING, wanted=wanted)
    assert reader.half == -1
    assert (result.status, result.next_offset) == (PullStatus.OFFSET_OVERFLOW_ONE, 3)
    result = reader.read("t", 0, 3, bound=store.end, **EVERYTHING, wanted=wanted)
    assert (bodies(reader, result), result.next_offset) == ([b"3"], 4)


def test_a_message_that_a_repair_took_out_makes_no_gap_of_its_neighbours(store: QueueStore) -> None:
    for number in range(20):
        store.put("t", 0, b"%d" % number, tag="A")
    file = store.layout.consume_queue / "t" / "0" / segment_name(0)
    data = bytearray(file.read_bytes())
    data[4 * 20 : 5 * 20] = bytes(8) + PREBLANK_SIZE.to_bytes(4, "big") + bytes(8)
    file.write_bytes(data)
    reader = reader_of(store)
    others = pull(reader, store, 0, wanted=TagFilter(["B"]))
    assert (others.status, others.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 20)
    assert len(pull(reader, store, 0, wanted=TagFilter(["A"])).units) == 19
    bound = store.records["t", 0][5].physical_offset
    alone = reader.read("t", 0, 4, bound=bound, **EVERYTHING, wanted=TagFilter(["B"]))
    assert (alone.status, alone.next_offset) == (PullStatus.MESSAGE_WAS_REMOVING, 5)


@pytest.mark.parametrize("wanted", [None, TagFilter(["A"])])
@pytest.mark.parametrize("unit", [bytes(20), (1 << 40).to_bytes(8, "big") + (200).to_bytes(4, "big") + bytes(8)])
def test_a_damaged_unit_ends_a_read_and_is_a_gap_of_its_own(
    store: QueueStore, unit: bytes, wanted: TagFilter | None
) -> None:
    for number in range(25):
        store.put("t", 0, b"%d" % number, tag="A")
    file = store.layout.consume_queue / "t" / "0" / segment_name(0)
    data = bytearray(file.read_bytes())
    data[4 * 20 : 5 * 20] = unit
    file.write_bytes(data)
    reader = reader_of(store)
    before = pull(reader, store, 0, wanted=wanted)
    assert (bodies(reader, before), before.next_offset) == ([b"0", b"1", b"2", b"3"], 4)
    gap = pull(reader, store, 4, wanted=wanted)
    assert (gap.status, gap.next_offset) == (PullStatus.MESSAGE_WAS_REMOVING, 5)
    assert bodies(reader, pull(reader, store, 5, wanted=wanted)) == [b"%d" % number for number in range(5, 25)]


@pytest.mark.parametrize("before", [1, 2, 3, 4, 30])
def test_a_queue_made_anew_is_noticed(store: QueueStore, before: int) -> None:
    """A topic deleted and created again: descriptors and bounds of the old files must not be used."""
    for number in range(before):
        store.put("t", 0, b"old %d" % number)
    reader = reader_of(store)
    assert reader.bounds("t", 0, bound=store.end) == (0, before)
    assert reader.bounds("t", 0, bound=store.end, floor=store.end) == (before, before)
    tombstone = store.end
    store.delete_queue("t", 0)
    for number in range(3):
        store.put("t", 0, b"new %d" % number)
    assert reader.bounds("t", 0, bound=store.end, floor=tombstone) == (0, 3)
    assert bodies(reader, pull(reader, store, 0, floor=tombstone)) == [b"new 0", b"new 1", b"new 2"]


def test_below_a_tombstone_nothing_is_shown(store: QueueStore) -> None:
    for number in range(15):
        store.put("t", 0, b"old %d" % number)
    tombstone = store.end
    store.put("t", 0, b"new")
    reader = reader_of(store)
    assert reader.bounds("t", 0, bound=store.end, floor=tombstone) == (15, 16)
    assert bodies(reader, pull(reader, store, 15, floor=tombstone)) == [b"new"]
    assert pull(reader, store, 0, floor=tombstone).status is PullStatus.OFFSET_TOO_SMALL


# ---------------------------------------------------------------- limits


def test_limits(store: QueueStore) -> None:
    """At least one message however large; never more than asked for in number or bytes."""
    for number in range(60):
        store.put("t", 0, b"x" * (number * 7 % 200))
    records = store.records["t", 0]
    reader = reader_of(store)
    for tags in (None, TagFilter(["A"])):
        if tags is not None:
            for number in range(60):
                store.put("tagged", 0, b"x" * (number * 7 % 200), tag="A")
            records = store.records["tagged", 0]
        for max_messages in (1, 2, 9, 10, 11, 100):
            for max_bytes in (1, 150, 1_000, 5_000, 1 << 20):
                offset = 0
                seen: list[bytes] = []
                while offset < 60:
                    result = reader.read(
                        records[0].topic,
                        0,
                        offset,
                        bound=store.end,
                        max_messages=max_messages,
                        max_bytes=max_bytes,
                        wanted=tags,
                    )
                    assert result.status is PullStatus.FOUND
                    assert 1 <= result.count <= max_messages
                    size = sum(result.units["size"].tolist())
                    assert size <= max_bytes or result.count == 1
                    # Nothing more would have fitted.
                    if result.next_offset < 60 and result.count < max_messages and max_bytes >= 1_000:
                        assert size + records[result.next_offset].total_size > max_bytes
                    seen += bodies(reader, result)
                    assert result.next_offset == offset + result.count
                    offset = result.next_offset
                assert seen == [one.body for one in records]


def test_few_descriptors_and_states_serve_many_queues(store: QueueStore) -> None:
    for queue in range(300):
        store.put("t", queue, b"%d" % queue)
    before = len(os.listdir("/proc/self/fd"))
    reader = reader_of(store, max_open_files=10, max_queues=50)
    for _ in range(2):
        for queue in range(300):
            found = reader.read("t", queue, 0, bound=store.end, **EVERYTHING)
            assert bodies(reader, found) == [b"%d" % queue]
    assert len(os.listdir("/proc/self/fd")) - before <= 12
    assert len(reader) == 50
    reader.close()


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        (None, None),
        ("", None),
        ("  ", None),
        ("*", None),
        (" * ", None),
        ("A", ["A"]),
        (" A ||B||  || A", ["A", "B"]),
        ("A B", ["A B"]),
        ("* || A", ["*", "A"]),
    ],
)
def test_expressions(expression: str | None, tags: list[str] | None) -> None:
    found = TagFilter.parse(expression)
    assert (None if found is None else found.tags) == tags


@pytest.mark.parametrize("expression", ["||", " || ", "x" * 70_000, "||".join(map(str, range(MAX_TAGS + 1)))])
def test_refused_expressions(expression: str) -> None:
    with pytest.raises(ValueError, match="tag"):
        TagFilter.parse(expression)


def test_filter_is_exact(store: QueueStore) -> None:
    """Hash collisions, codes that are no hash and codes that lie do not let a wrong message through."""
    tags = ["Aa", "BB", None, "标签", "🚀x", "A"]
    for number in range(60):
        store.put("t", 0, b"%d" % number, tag=tags[number % 6])
    store.put("t", 0, b"delayed", tag="Aa", code=1_795_229_125_513)
    store.put("t", 0, b"delayed B", tag="B", code=1_795_229_125_513)
    store.put("t", 0, b"lie", tag="other", code=2112)
    reader = reader_of(store)
    for wanted in (["Aa"], ["BB", "🚀x"], ["标签"], ["none"], [f"x{n}" for n in range(20)] + ["A"]):
        expected = [one.body for one in store.records["t", 0] if one.properties.get("TAGS") in wanted]
        result = pull(reader, store, 0, wanted=TagFilter(wanted))
        assert bodies(reader, result) == expected
        assert result.status is (PullStatus.FOUND if expected else PullStatus.NO_MATCHED_MESSAGE)
        assert result.next_offset == 63


def test_filter_resumes_where_it_stopped(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and scan limits: nothing is skipped, nothing read twice, and rejected messages are behind us."""
    monkeypatch.setattr(queue_reader, "SCAN_UNITS", 23)
    monkeypatch.setattr(queue_reader, "_CHUNK_UNITS", 7)
    seed = random.randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    source = random.Random(seed)
    for number in range(300):
        store.put("t", 0, b"%d" % number, tag=source.choice("AABCDEFGH") if number < 200 else "Z")
    expected = [one.body for one in store.records["t", 0] if one.properties["TAGS"] in "AB"]
    reader = reader_of(store)
    for max_messages in (1, 3, 1_000):
        seen: list[bytes] = []
        offset = 0
        while offset < 300:
            result = pull(reader, store, offset, wanted=TagFilter(["A", "B"]), max_messages=max_messages)
            assert offset < result.next_offset <= offset + 23
            assert result.count <= max_messages
            assert (result.status is PullStatus.FOUND) == bool(result.count)
            seen += bodies(reader, result)
            offset = result.next_offset
        assert seen == expected


class Odd:
    """Wants the messages whose body is an odd number, and counts the records it was shown."""

    terms = 1

    def __init__(self) -> None:
        self.seen = 0

    def may_match(self, units: object, codes: NDArray[np.int64], extensions: object) -> NDArray[np.bool_]:
        return np.ones(len(codes), np.bool_)

    def judge(
        self,
        data: NDArray[np.uint8],
        positions: NDArray[np.int64],
        sizes: NDArray[np.int64],
        verdicts: NDArray[np.uint8],
    ) -> None:
        self.seen += len(positions)
        for index in range(len(positions)):
            record = decode_record(data[positions[index] : positions[index] + sizes[index]].tobytes())
            verdicts[index] = MATCH if int(record.body) % 2 else NO_MATCH


def test_a_filter_looks_into_a_bounded_number_of_records(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivery times in the units of delayed messages (spec 3.2) are none of such a filter's business."""
    monkeypatch.setattr(queue_reader, "SCAN_RECORDS", 40)
    monkeypatch.setattr(queue_reader, "_CHUNK_UNITS", 16)
    for number in range(300):
        body = number if number < 100 else 2 * number
        store.put("t", 0, b"%d" % body, code=1_795_229_125_513 + number if number % 3 else None)
    reader = reader_of(store)
    for max_messages in (1, 5, 1_000):
        wanted = Odd()
        seen: list[bytes] = []
        offset = 0
        while offset < 300:
            before = wanted.seen
            result = pull(reader, store, offset, wanted=wanted, max_messages=max_messages)
            assert wanted.seen - before <= 40 + 16
            assert result.next_offset > offset
            assert result.count <= max_messages
            seen += bodies(reader, result)
            offset = result.next_offset
        assert seen == [b"%d" % number for number in range(1, 100, 2)]


@pytest.mark.parametrize("terms", [1, 20, 840])
def test_a_filter_of_many_terms_looks_into_fewer_records_at_a_time(tmp_path: Path, terms: int) -> None:
    """Bytes of properties times terms are bounded in one read; the next read goes on where it stopped."""
    store = QueueStore(tmp_path / "store", segment_bytes=8 << 20, file_bytes=20_000)
    for number in range(200):
        store.put("t", 0, b"%d" % number, tag="p" * 30_000)
    reader = reader_of(store)
    offset = reads = 0
    seen: list[bytes] = []
    while offset < 200:
        wanted = Odd()
        wanted.terms = terms
        result = pull(reader, store, offset, wanted=wanted, max_messages=1_000)
        assert 1 <= wanted.seen <= max(1, JUDGED_BYTES // (30_000 * terms))
        assert result.next_offset > offset
        seen += bodies(reader, result)
        offset, reads = result.next_offset, reads + 1
    assert seen == [b"%d" % number for number in range(1, 200, 2)]
    assert (reads == 1) == (terms == 1)


# ---------------------------------------------------------------- frames


def test_frames_of_neighbours_are_one_view(tmp_path: Path) -> None:
    store = QueueStore(tmp_path / "store", segment_bytes=4 << 20, file_bytes=2_000)
    for number in range(100):
        store.put("t", 0, bytes([number]) * 10_000)
    for number in range(100):
        for topic in ("t", "u"):
            store.put(topic, 0, bytes([number]) * 100)
    reader = reader_of(store)
    frames = reader.frames(pull(reader, store, 0, max_messages=100).units)
    assert [type(frame) for frame in frames] == [memoryview]
    frames = reader.frames(pull(reader, store, 100).units)
    assert [type(frame) for frame in frames] == [bytes]
    assert bodies(reader, pull(reader, store, 0)) == store.bodies("t", 0)
    # A view that is still held keeps its segment readable although the map was given up.
    view = reader.frames(pull(reader, store, 0, max_messages=100).units)[0]
    reader.commit_log.close()
    shutil.rmtree(store.layout.commit_log)
    assert decode_record(bytes(view[:10_200])).body == store.bodies("t", 0)[0]
    del view
    gc.collect()


def test_number_of_frames_is_bounded(tmp_path: Path) -> None:
    store = QueueStore(tmp_path / "store", segment_bytes=64 << 20, file_bytes=20_000)
    for number in range(400):
        store.put("t", 0, bytes([number % 256]) * 60_000)
        store.put("u", 0, b"between")
    reader = reader_of(store)
    result = pull(reader, store, 0)
    assert result.count == 400
    assert len(reader.frames(result.units)) <= queue_reader.MAX_FRAMES
    assert bodies(reader, result) == store.bodies("t", 0)


def test_records_over_several_segments(tmp_path: Path) -> None:
    store = QueueStore(tmp_path / "store", segment_bytes=4_096)
    for number in range(300):
        store.put("t", number % 3, b"%d" % number, tag="A" if number % 7 else "B")
    reader = reader_of(store)
    for queue in range(3):
        found = reader.read("t", queue, 0, bound=store.end, **EVERYTHING)
        assert bodies(reader, found) == store.bodies("t", queue)
        found = reader.read("t", queue, 0, bound=store.end, **EVERYTHING, wanted=TagFilter(["B"]))
        wanted = [one.body for one in store.records["t", queue] if one.properties["TAGS"] == "B"]
        assert bodies(reader, found) == wanted


# ---------------------------------------------------------------- time


def test_by_time_example_of_the_rule(store: QueueStore) -> None:
    """The example of spec 3.7: times t1,t1,t1,t3,t3 at offsets 1..5: LOWER(t2) = 4, UPPER(t2) = 3."""
    for timestamp in (50, 100, 100, 100, 300, 300):
        store.put("t", 0, b"x", timestamp=timestamp)
    reader = reader_of(store)
    assert reader.offset_by_time("t", 0, 200, bound=store.end) == 4
    assert reader.offset_by_time("t", 0, 200, upper=True, bound=store.end) == 3


def test_by_time_agrees_with_the_queue_itself(store: QueueStore) -> None:
    """The store's own ConsumeQueue follows the rule step by step; both must give the same offsets."""
    seed = random.randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    source = random.Random(seed)
    timestamp = 1_000
    for _ in range(75):
        timestamp += source.choice((0, 0, 0, 5, 10))
        store.put("t", 0, b"x", timestamp=timestamp)
    reader = reader_of(store)
    queue = store.queue("t", 0)
    later = store.records["t", 0][13].physical_offset
    for floor in (0, later):
        queue.correct_min_offset(floor)
        for wanted in range(990, timestamp + 12):
            for boundary in ("lower", "upper"):
                found = reader.offset_by_time("t", 0, wanted, upper=boundary == "upper", bound=store.end, floor=floor)
                assert found == offset_by_time(queue, wanted, boundary, reader.commit_log), (seed, wanted, boundary)
    assert reader.offset_by_time("none", 0, 5, bound=store.end) is None
    bound = store.records["t", 0][20].physical_offset
    assert reader.offset_by_time("t", 0, 1 << 50, bound=bound, floor=later) is not None
    assert reader_of(store).offset_by_time("t", 0, 1 << 50, bound=bound) == 20


# ---------------------------------------------------------------- golden stores


def golden_queues(golden: GoldenStore) -> Iterator[tuple[QueueReader, str, int]]:
    reader = QueueReader(
        CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES), golden.layout.consume_queue, GOLDEN_QUEUE_FILE_BYTES
    )
    for topic, queue, _ in list_queues(golden.layout.consume_queue):
        yield reader, topic, queue


def test_golden_queues(golden: GoldenStore) -> None:
    """Every message of messages.jsonl comes out of its queue at its queue offset, and nothing else does."""
    expected: dict[tuple[str, int], list[dict[str, object]]] = {}
    for line in golden.messages:
        expected.setdefault((str(line["topic"]), int(line["queue_id"])), []).append(line)
    seen = 0
    for reader, topic, queue in golden_queues(golden):
        result = reader.read(topic, queue, 0, bound=1 << 40, max_messages=17, max_bytes=1 << 20)
        lines = []
        while result.count:
            lines += [record.to_json() for record in decoded(reader, result)]
            result = reader.read(topic, queue, result.next_offset, bound=1 << 40, max_messages=17, max_bytes=1 << 20)
        assert result.status is PullStatus.OFFSET_OVERFLOW_ONE
        assert [line["queue_offset"] for line in lines] == list(range(result.max_offset))
        if not topic.startswith("%DLQ%"):  # the one topic that messages.jsonl leaves out
            wanted = sorted(expected.pop((topic, queue)), key=lambda line: int(str(line["queue_offset"])))
            assert lines == wanted
            seen += len(lines)
    assert not expected
    assert seen == len(golden.messages)


def test_golden_tags(golden: GoldenStore) -> None:
    """Filters by every tag that occurs, in queues whose codes are delivery times too (SCHEDULE_TOPIC_XXXX)."""
    tags = {line["properties"].get("TAGS") for line in golden.messages} - {None}
    assert len(tags) > 5
    for reader, topic, queue in golden_queues(golden):
        lines = [line for line in golden.messages if (line["topic"], line["queue_id"]) == (topic, queue)]
        if topic.startswith("%DLQ%"):
            continue
        for tag in sorted(tags):
            wanted = sorted(line["queue_offset"] for line in lines if line["properties"].get("TAGS") == tag)
            result = reader.read(topic, queue, 0, bound=1 << 40, **EVERYTHING, wanted=TagFilter([tag]))
            assert [record.queue_offset for record in decoded(reader, result)] == wanted


def test_golden_times(golden: GoldenStore) -> None:
    log = CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES)
    for reader, topic, queue in golden_queues(golden):
        plain = ConsumeQueue(golden.layout.consume_queue / topic / str(queue), GOLDEN_QUEUE_FILE_BYTES)
        plain.refresh()
        times = {line["store_timestamp"] for line in golden.messages if line["topic"] == topic}
        for timestamp in sorted(times):
            for wanted in (timestamp - 1, timestamp, timestamp + 1):
                for boundary in ("lower", "upper"):
                    found = reader.offset_by_time(topic, queue, wanted, upper=boundary == "upper", bound=1 << 40)
                    assert found == offset_by_time(plain, wanted, boundary, log)


def test_unit_type_is_the_disk_layout() -> None:
    unit = np.frombuffer(bytes(range(20)), UNIT)[0]
    assert int(unit["physical_offset"]) == int.from_bytes(bytes(range(8)), "big")
    assert int(unit["size"]) == int.from_bytes(bytes(range(8, 12)), "big")
    assert int(unit["tags_code"]) == int.from_bytes(bytes(range(12, 20)), "big")
