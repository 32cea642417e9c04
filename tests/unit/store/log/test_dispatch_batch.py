"""Goal: a walk through a real log has the pure-Python decoder's columns, and the ConsumeQueues built from it RocketMQ's bytes.

Method: the golden stores' CommitLogs go through LogWalker and the ConsumeQueue dispatcher; results are compared with
decode_record and with the ConsumeQueue files that RocketMQ wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commitmq.config import load
from commitmq.errors import CorruptRecordError
from commitmq.format.java import java_string_hash
from commitmq.kernels.compiled import string_hash
from commitmq.log import get_log
from commitmq.plugin.hookspecs import DispatcherView
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, NoBatchError
from commitmq.store.recovery.cut_record import JOURNAL
from commitmq.store.recovery.store_recovery import Recovered, recover
from commitmq_dispatchers.consume_queue import ConsumeQueueDispatcher
from golden_stores import GoldenStore

SEGMENT = 131_072
CONFIG = load(None, ["consume_queue.file_bytes=1000", f"commit_log.segment_bytes={SEGMENT}"])


def walk_all(log: CommitLog, end: int, **limits: int) -> list[DispatchBatch]:
    walker = LogWalker(log, **{"max_rows": 1000, "max_bytes": 1 << 20, **limits})
    batches, position = [], 0
    while position < end:
        batch = walker.walk(position, end)
        assert batch.start == position
        assert batch.end > position
        batches.append(batch)
        position = batch.end
    walker.release()
    return batches


@pytest.mark.parametrize("limits", [{}, {"max_rows": 7}, {"max_bytes": 3000}, {"max_rows": 1, "max_bytes": 100}])
def test_columns_equal_the_decoders(golden: GoldenStore, limits: dict[str, int]) -> None:
    log = CommitLog(golden.root / "commitlog", SEGMENT)
    records = list(log.iter_records())
    end = records[-1].physical_offset + records[-1].total_size
    batches = walk_all(log, end, **limits)
    seen = [(batch, index) for batch in batches for index in range(len(batch))]
    assert len(seen) == len(records)
    for (batch, index), record in zip(seen, records, strict=True):
        row = batch.rows[index]
        assert batch.topics[row["topic"]] == record.topic == batch.text(index, "topic")
        for name in ("queue_id", "queue_offset", "physical_offset", "sys_flag", "store_timestamp", "born_timestamp"):
            assert row[name] == getattr(record, name), name
        assert row["size"] == record.total_size
        assert row["prepared_offset"] == record.prepared_transaction_offset
        assert batch.text(index, "keys") == record.properties.get("KEYS", "")
        assert batch.text(index, "tags") == record.properties.get("TAGS", "")
        assert batch.text(index, "uniq") == record.properties.get("UNIQ_KEY", "")
        start, size = int(row["body_start"]), int(row["body_size"])
        assert bytes(batch.record(index)[start : start + size]) == record.body
    log.close()


@pytest.mark.parametrize("limits", [{}, {"max_rows": 5}])
def test_consume_queues_equal_rocketmqs_byte_for_byte(
    golden: GoldenStore, tmp_path: Path, limits: dict[str, int]
) -> None:
    log = CommitLog(golden.root / "commitlog", SEGMENT)
    records = list(log.iter_records())
    end = records[-1].physical_offset + records[-1].total_size
    announced: list[tuple[str, int]] = []
    view = DispatcherView(StoreLayout(tmp_path), CONFIG, get_log("test"), log, 0, dict, announced.extend)
    dispatcher = ConsumeQueueDispatcher()
    assert dispatcher.open(view) == 0
    for batch in walk_all(log, end, **limits):
        dispatcher.dispatch(DispatchBatch.from_frames(batch.to_frames(), log))
    durable, stamp = dispatcher.flush(thorough=True)
    assert (durable, stamp) == (end, records[-1].store_timestamp)
    # Everything once more: dispatching is idempotent by physical offset.
    for batch in walk_all(log, end, **limits):
        dispatcher.dispatch(batch)
    dispatcher.close()
    theirs, ours = golden.root / "consumequeue", tmp_path / "consumequeue"
    files = sorted(path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file())
    assert len(files) == 25
    assert files == sorted(path.relative_to(ours) for path in ours.rglob("*") if path.is_file())
    for name in files:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert {topic for topic, _ in announced} == {record.topic for record in records}
    log.close()


def test_a_deleted_topics_records_get_no_units(golden: GoldenStore, tmp_path: Path) -> None:
    log = CommitLog(golden.root / "commitlog", SEGMENT)
    records = list(log.iter_records())
    end = records[-1].physical_offset + records[-1].total_size
    topic = records[0].topic
    view = DispatcherView(StoreLayout(tmp_path), CONFIG, get_log("test"), log, 0, lambda: {topic: end}, lambda _: None)
    dispatcher = ConsumeQueueDispatcher()
    dispatcher.open(view)
    for batch in walk_all(log, end):
        dispatcher.dispatch(batch)
    dispatcher.close()
    assert not (tmp_path / "consumequeue" / topic).exists()
    assert (tmp_path / "consumequeue" / records[-1].topic).exists()
    log.close()


def test_trimming_keeps_what_lies_behind(golden: GoldenStore) -> None:
    log = CommitLog(golden.root / "commitlog", SEGMENT)
    batch = LogWalker(log, max_rows=20, max_bytes=1 << 20).walk(0, SEGMENT)
    position = int(batch.rows["physical_offset"][7])
    trimmed = batch.after(position)
    assert (trimmed.start, trimmed.end, len(trimmed)) == (position, batch.end, len(batch) - 7)
    assert trimmed.text(0, "uniq") == batch.text(7, "uniq")
    assert batch.after(0) is batch


def test_no_record_below_the_limit_is_corruption(golden_copy: Callable[[str], GoldenStore]) -> None:
    store = golden_copy("clean")
    path = store.root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[4] ^= 0xFF
    path.write_bytes(bytes(data))
    log = CommitLog(store.root / "commitlog", SEGMENT)
    with pytest.raises(CorruptRecordError) as caught:
        LogWalker(log, max_rows=10, max_bytes=1 << 20).walk(0, SEGMENT)
    assert caught.value.offset == 0
    assert caught.value.path == path
    log.close()


@pytest.mark.parametrize(
    "text", ["TagA", "Aa", "BB", "\U0001f600", "标签", "🚀x", "", "A-much-longer-tag-name-to-hash"]
)
def test_hash_of_a_tag_is_javas(text: str) -> None:
    data = np.frombuffer(text.encode() or b"\0", np.uint8)
    assert string_hash(data, 0, len(text.encode())) == java_string_hash(text)


def recovered(store: Path, *, clean: bool) -> Recovered:
    return recover(
        StoreLayout(store),
        segment_bytes=SEGMENT,
        consume_queue_bytes=1000,
        batch_queue_bytes=460,
        clean=clean,
        log=get_log("test"),
    )


@pytest.mark.parametrize(("name", "end"), [("clean", 274_646), ("crash", 286_835)])
@pytest.mark.parametrize("clean", [True, False])
def test_recovery_finds_the_golden_ends(
    golden_copy: Callable[[str], GoldenStore], name: str, end: int, clean: bool
) -> None:
    store = golden_copy(name)
    before = {path.name: path.read_bytes() for path in (store.root / "commitlog").iterdir()}
    found = recovered(store.root, clean=clean)
    assert found.end == end
    assert found.min_offset == 0
    assert found.cut_bytes == 0
    assert found.redispatch_from == (end if clean else 0)
    after = {path.name: path.read_bytes() for path in (store.root / "commitlog").iterdir()}
    # Only a segment that holds nothing goes (spec 8.4); the rest is untouched.
    assert after == {name: data for name, data in before.items() if any(data)}


def test_recovery_keeps_a_copy_of_the_torn_tail_it_cuts(golden_copy: Callable[[str], GoldenStore]) -> None:
    store = golden_copy("clean")
    path = store.root / "commitlog" / f"{262144:020d}"
    log = CommitLog(store.root / "commitlog", SEGMENT)
    last = list(log.iter_records())[-1]
    log.close()
    data = bytearray(path.read_bytes())
    at = last.physical_offset - 262_144
    data[at + 100] ^= 1
    path.write_bytes(bytes(data))
    found = recovered(store.root, clean=False)
    assert found.end == last.physical_offset
    assert not any(path.read_bytes()[at:])
    (copy,) = (one for one in (store.root / "commitmq" / "cut").iterdir() if one.name != JOURNAL)
    assert copy.read_bytes().rstrip(b"\0") == bytes(data[at:]).rstrip(b"\0")
    assert recovered(store.root, clean=False).end == found.end  # and again, as after a killed recovery


def test_recovery_refuses_corruption_in_the_middle_and_touches_nothing(
    golden_copy: Callable[[str], GoldenStore],
) -> None:
    store = golden_copy("crash")
    path = store.root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptRecordError, match="middle of the log") as caught:
        recovered(store.root, clean=False)
    assert caught.value.path == path
    assert path.read_bytes() == bytes(data)
    assert (store.root / "commitlog" / f"{393216:020d}").exists()


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"request"], [b"{}", b"", b"[]"], [b'{"start":0,"end":"x"}', b"", b"[]"], [b"[]", b"abc", b"[]"]],
)
def test_what_is_no_batch_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(NoBatchError, match="are no batch"):
        DispatchBatch.from_frames(frames)
