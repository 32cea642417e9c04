"""Goal: each message of an idempotent producer is stored once, whatever is repeated, and every crash leaves that so.

Method: a model that knows nothing of tables (a set of what is stored) beside the real table, appender and log, driven by
hypothesis: runs are repeated, cut differently, sent too early; the log is cut anywhere behind the last snapshot, and the table
made again from snapshot and log must judge every send as the model does. Then single rules, and files that lie.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from commitmq.client.sending.run_encoder import RunLayout, encode_messages, encode_run
from commitmq.errors import StoreError
from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import UniqueIds, pack_host
from commitmq.format.producer_mark import is_producer_id, mark_prefix, parse_mark
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import LogWalker
from commitmq.store.log.run_check import MessageIllegalError
from commitmq.store.producers import (
    UNKNOWN,
    BatchMetadata,
    ProducerSnapshot,
    ProducerTable,
    SequenceRefusedError,
    find_stored,
    marks_of,
    replay,
)
from commitmq.store.recovery.scan import map_segment
from one_message import OneMessage

SEGMENT = 16_384
HOST = pack_host(Host("127.0.0.1", 0))
IDS = UniqueIds()
TOPICS = ("a", "b")
PRODUCERS = ("p", "sink/1", "p:no".replace(":", "."))


def empty(**settings: int) -> ProducerTable:
    return ProducerTable(**{"max_entries": 1000, "window": 4, "expiry_ms": 1 << 40, **settings})


class Log:
    """A log in a folder; ``send`` does what the writer does with a numbered run."""

    def __init__(self, folder: Path, *, crc: bool = True) -> None:
        self.folder = folder
        self.crc = crc
        folder.mkdir(exist_ok=True)
        self.offsets: dict[tuple[str, int], int] = {}
        self.open(0)

    def open(self, position: int) -> None:
        self.appender = CommitLogAppender(
            position,
            segment_bytes=SEGMENT,
            open_segment=self._segment,
            store_host=HOST,
            max_message_bytes=8_192,
            properties_crc=self.crc,
        )

    def _segment(self, base: int) -> Any:
        path = self.folder / segment_name(base)
        if not path.exists():
            path.write_bytes(bytes(SEGMENT))
        return map_segment(path, SEGMENT)

    def run(self, name: str, epoch: int, topic: str, queue: int, sequence: int, bodies: list[bytes]) -> Any:
        mark = mark_prefix(name, epoch)
        layout = RunLayout(topic, born_v6=False, store_v6=False, properties_crc=self.crc, mark=mark)
        encoded = encode_run(layout, queue, bodies, b"TAGS\x01x\x02", IDS, born=1, sequence=sequence)
        return self.appender.check_run(encoded.data, topic.encode(), queue, born_v6=False, mark=mark, sequence=sequence)

    def send(
        self, table: ProducerTable, name: str, epoch: int, topic: str, queue: int, sequence: int, bodies: list[bytes]
    ) -> int:
        """Returns how many were stored before. Raises SequenceRefusedError."""
        run = self.run(name, epoch, topic, queue, sequence, bodies)
        before = table.judge(name, epoch, topic, queue, sequence, run.count)
        if before < run.count:
            number = self.offsets.get((topic, queue), 0)
            done = self.appender.append_run(run.without_first(before) if before else run, number, HOST)
            sequence += before
            for part in done.parts:
                end = part.physical_offset + part.size_bytes
                table.note(
                    name, epoch, topic, queue, BatchMetadata(sequence, part.count, number, part.physical_offset, end), 7
                )
                sequence += part.count
                number += part.count
            self.offsets[topic, queue] = number
        return before

    def reader(self) -> CommitLog:
        return CommitLog(self.folder, SEGMENT)

    def replayed(self, table: ProducerTable, start: int, deleted: dict[str, int] | None = None) -> None:
        log = self.reader()
        walker = LogWalker(log, max_rows=7, max_bytes=1 << 20)
        at = start
        while at < self.appender.position:
            batch = walker.walk(at, self.appender.position)
            replay(table, batch, deleted or {})
            at = batch.end
        walker.release()
        log.close()


class Machine(RuleBasedStateMachine):
    @initialize(crc=st.booleans())
    def begin(self, crc: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.log = Log(self.folder / "log", crc=crc)
        self.table = empty()
        # The model: bodies in log order with their numbers and the end of their record.
        self.stored: list[tuple[str, int, str, int, int, bytes]] = []
        self.ends: list[int] = []
        self.snapshot = ProducerSnapshot(0, self.table.to_bytes())

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.log.appender.close()
            shutil.rmtree(self.folder)

    def epoch(self, name: str) -> int:
        return max((one[1] for one in self.stored if one[0] == name), default=-1)

    def following(self, name: str, epoch: int, topic: str, queue: int) -> int:
        return sum(one[:4] == (name, epoch, topic, queue) for one in self.stored)

    @rule(
        name=st.sampled_from(PRODUCERS),
        epoch=st.sampled_from((-1, 0, 0, 0, 0, 0, 1)),
        topic=st.sampled_from(TOPICS),
        queue=st.integers(0, 1),
        start=st.sampled_from((-40, -7, -3, -1, 0, 0, 0, 0, 1)),
        count=st.integers(1, 30),
    )
    def send(self, name: str, epoch: int, topic: str, queue: int, start: int, count: int) -> None:
        known = self.epoch(name)
        epoch = max(0, max(known, 0) + epoch)
        following = self.following(name, epoch, topic, queue)
        sequence = max(0, following + start)
        bodies = [b"%b/%d/%b/%d/%d" % (name.encode(), epoch, topic.encode(), queue, sequence + i) for i in range(count)]
        if epoch < known or sequence > following:
            with pytest.raises(SequenceRefusedError) as refused:
                self.log.send(self.table, name, epoch, topic, queue, sequence, bodies)
            expected = {"PRODUCER_FENCED"} if epoch < known else {"OUT_OF_ORDER_SEQUENCE", "UNKNOWN_PRODUCER_ID"}
            assert refused.value.code in expected
            return
        before = self.log.send(self.table, name, epoch, topic, queue, sequence, bodies)
        assert before == min(count, following - sequence)
        for number in range(sequence + before, sequence + count):
            self.stored.append((name, epoch, topic, queue, number, bodies[number - sequence]))
        self.check_places(name, epoch, topic, queue, sequence, before)

    def check_places(self, name: str, epoch: int, topic: str, queue: int, sequence: int, count: int) -> None:
        log = self.log.reader()
        places = self.table.places(name, topic, queue)
        for at, found in enumerate(find_stored(log, places, name, epoch, sequence, count)):
            covered = any(one.sequence <= sequence + at < one.sequence + one.records for one in places)
            assert (found != UNKNOWN) == covered
            if covered:
                record = log.record(found[1])
                assert record.body.endswith(b"/%d/%d" % (queue, sequence + at))
                assert (record.queue_offset, record.store_timestamp) == (found[0], found[2])
                assert record.properties["UNIQ_KEY"] == found[3]
        log.close()

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = ProducerSnapshot(self.log.appender.position, self.table.to_bytes())

    @rule(lost=st.integers(0, 40), write=st.booleans())
    def crash(self, lost: int, write: bool) -> None:
        """The log ends anywhere behind the last snapshot; the table is made anew."""
        log = self.log.reader()
        records = list(log.iter_records(end=self.log.appender.position)) if self.stored else []
        log.close()
        flushed = self.snapshot.position
        while lost and records and records[-1].physical_offset >= flushed:
            records.pop()
            self.stored.pop()
            lost -= 1
        end = records[-1].physical_offset + records[-1].total_size if records else 0
        end = max(end, flushed)
        self.log.appender.close()
        for path in self.log.folder.iterdir():
            base = int(path.name)
            with path.open("r+b") as file:
                at = min(max(end - base, 0), SEGMENT)
                file.seek(at)
                file.write(bytes(SEGMENT - at))
        self.log.open(end)
        self.log.offsets = {}
        for record in records:
            self.log.offsets[record.topic, record.queue_id] = record.queue_offset + 1
        path = self.folder / "producers"
        self.snapshot.save(path)
        found = ProducerSnapshot.load(path)
        assert found == self.snapshot
        self.table = empty()
        self.table.load_bytes(found.table, {})
        self.log.replayed(self.table, found.position)

    @invariant()
    def every_body_is_stored_once_in_order(self) -> None:
        if not getattr(self, "stored", None):
            return
        log = self.log.reader()
        bodies = [record.body for record in log.iter_records(end=self.log.appender.position)]
        log.close()
        assert bodies == [one[5] for one in self.stored]

    @precondition(lambda self: self.stored)
    @invariant()
    def the_table_agrees(self) -> None:
        for name in PRODUCERS:
            epoch = self.epoch(name)
            if epoch < 0:
                continue
            for topic in TOPICS:
                for queue in (0, 1):
                    following = self.following(name, epoch, topic, queue)
                    assert self.table.judge(name, epoch, topic, queue, following, 1) == 0
                    if following:
                        assert self.table.judge(name, epoch, topic, queue, 0, following + 5) == following


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase


# ---------------------------------------------------------------- marks


@given(
    st.text("abcXYZ019._-/@+=", min_size=1, max_size=64),
    st.integers(0, 10**15 - 1),
    st.integers(0, 10**12 - 300),
    st.integers(1, 300),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_both_encoders_make_marks_that_the_node_checks_and_finds(
    name: str, epoch: int, sequence: int, count: int, crc: bool
) -> None:
    mark = mark_prefix(name, epoch)
    layout = RunLayout("T", born_v6=False, store_v6=False, properties_crc=crc, mark=mark)
    bodies = [b"%d" % number for number in range(count)]
    run = encode_run(layout, 0, bodies, b"", IDS, born=5, sequence=sequence)
    assert isinstance(run.unique, tuple)
    unique = (run.unique[0].encode(), run.unique[1])
    messages = [OneMessage(body, born=5) for body in bodies]
    assert encode_messages(layout, 0, messages, unique, sequence) == (np.asarray(run.sizes).tolist(), run.data)
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder) / "log", crc=crc)
        checked = log.appender.check_run(run.data, b"T", 0, born_v6=False, mark=mark, sequence=sequence)
        for other, first in ((mark, sequence + 1), (mark_prefix(name + "x", epoch), sequence)):
            with pytest.raises(MessageIllegalError, match="__PSEQ__"):
                log.appender.check_run(run.data, b"T", 0, born_v6=False, mark=other, sequence=first)
        with pytest.raises(MessageIllegalError, match="only the node"):
            log.appender.check_run(run.data, b"T", 0, born_v6=False)
        log.appender.append_run(checked, 0, HOST)
        reader = log.reader()
        records = list(reader.iter_records(end=log.appender.position))
        values = [parse_mark(record.properties["__PSEQ__"]) for record in records]
        assert values == [(name, epoch, sequence + i) for i in range(count)]
        table = empty()
        log.replayed(table, 0)
        reader.close()
        log.appender.close()
    assert table.judge(name, epoch, "T", 0, sequence, count) == count


@pytest.mark.parametrize(
    "value",
    [
        b"__PSEQ__\x01id:1:00000000001\x02",  # eleven digits
        b"__PSEQ__\x01id:1:0000000000x1\x02",
        b"__PSEQ__\x01id::000000000001\x02",
        b"__PSEQ__\x01:1:000000000001\x02",
        b"x__PSEQ__\x01id:1:000000000001\x02",
        b"__PSEQ__\x01id:1:000000000001\x02A\x01b\x02",  # not at the end: copied from another message
    ],
)
def test_what_only_looks_like_a_mark_is_none(tmp_path: Path, value: bytes) -> None:
    from commitmq.kernels.compiled import find_marks

    log = np.frombuffer(b"\x02\x02" + value + b"\x02\x02\x02", np.uint8)
    marks = np.zeros((1, 5), np.int64)
    assert find_marks(log, np.array([2]), np.array([len(value)]), marks) == 0
    assert marks[0, 3] == -1


def test_a_mark_follows_only_that_of_the_record_before() -> None:
    """A producer's next record stands behind another's, and behind one without a mark."""
    from commitmq.kernels.compiled import find_marks

    first, next_one, other = (
        f"__PSEQ__\x01{name}:1:{sequence:012d}\x02".encode() for name, sequence in (("id", 2), ("id", 3), ("od", 2))
    )
    plain = b"A\x01b\x02"
    records = [first, plain, next_one, first, next_one, other, next_one, first, other, next_one]
    starts = np.cumsum([0, *map(len, records[:-1])])
    marks = np.full((len(records), 5), 1 << 40, np.int64)
    assert find_marks(np.frombuffer(b"".join(records), np.uint8), starts, np.array([*map(len, records)]), marks) == 9
    assert marks[:, 3].tolist() == [2, -1, 3, 2, 3, 2, 3, 2, 2, 3]
    assert marks[:, 4].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]


def test_ids_are_checked() -> None:
    assert is_producer_id("sink/3")
    assert is_producer_id("a" * 64)
    assert not any(is_producer_id(bad) for bad in ("", "a" * 65, "a:b", "ä", "a b", "a\x01", None, 7))
    assert parse_mark("a:1") is None
    assert parse_mark("a:x:1") is None


# ---------------------------------------------------------------- the table's rules


def place(sequence: int, count: int, at: int) -> BatchMetadata:
    return BatchMetadata(sequence, count, sequence, at, at + count * 100)


def test_the_one_not_heard_of_for_longest_makes_room() -> None:
    table = empty(max_entries=3)
    for number, name in enumerate(("a", "b", "c")):
        table.note(name, 0, "t", 0, place(0, 2, number * 1000), number)
    table.note("a", 0, "t", 0, place(2, 2, 5000), 9)  # now b is the oldest
    table.note("d", 0, "t", 0, place(0, 1, 6000), 10)
    assert (table.entries, table.forgotten, len(table)) == (3, 1, 3)
    assert table.judge("a", 0, "t", 0, 0, 4) == 4
    assert table.judge("b", 0, "t", 0, 0, 1) == 0, "forgotten: a repetition of the first message is not recognised"
    with pytest.raises(SequenceRefusedError, match="nothing") as refused:
        table.judge("b", 0, "t", 0, 2, 1)
    assert refused.value.code == "UNKNOWN_PRODUCER_ID"


def test_a_producer_alone_does_not_make_room_for_itself() -> None:
    table = empty(max_entries=2)
    for queue in (0, 1):
        table.note("a", 0, "t", queue, place(0, 1, queue), 1)
    with pytest.raises(SequenceRefusedError) as refused:
        table.judge("a", 0, "t", 2, 0, 1)
    assert refused.value.code == "LIMIT_EXCEEDED"


def test_expiry_goes_by_store_time() -> None:
    table = empty(expiry_ms=1000)
    table.note("a", 0, "t", 0, place(0, 1, 0), 100)
    table.note("b", 0, "t", 0, place(0, 1, 100), 1500)
    assert table.expire(1600) == 1
    assert table.judge("b", 0, "t", 0, 0, 1) == 1
    assert table.judge("a", 0, "t", 0, 0, 1) == 0


def test_window_drops_the_oldest_places_only() -> None:
    table = empty(window=3)
    for number in range(5):
        table.note("a", 0, "t", 0, place(number * 2, 2, number * 1000), 1)
    assert [one.sequence for one in table.places("a", "t", 0)] == [4, 6, 8]
    assert table.judge("a", 0, "t", 0, 0, 10) == 10


def test_neighbours_are_one_place() -> None:
    table = empty(window=3)
    for number in range(2000):
        table.note("a", 0, "t", 0, place(number, 1, number * 100), 1)
    places = table.places("a", "t", 0)
    assert sum(one.records for one in places) == 2000
    assert len(places) == 2


def test_a_deleted_topic_is_forgotten_with_what_lies_below_its_tombstone() -> None:
    table = empty()
    table.note("a", 0, "t", 0, place(0, 2, 0), 1)
    table.note("a", 0, "u", 0, place(0, 2, 300), 1)
    again = empty()
    again.load_bytes(table.to_bytes(), {"t": 200})
    table.forget_topic("t", 200)
    for one in (table, again):
        assert one.entries == 1
        assert one.judge("a", 0, "t", 0, 0, 2) == 0
        assert one.judge("a", 0, "u", 0, 0, 2) == 2


def test_in_a_replay_the_log_is_right() -> None:
    """A producer that had been forgotten began anew: what it sent before does not count, also of a higher epoch."""
    table = empty()
    table.replay("a", 5, "t", 0, place(0, 100, 0), 1)
    table.replay("a", 5, "t", 0, place(0, 3, 20_000), 2)
    assert table.judge("a", 5, "t", 0, 0, 9) == 3
    table.replay("a", 2, "t", 0, place(0, 1, 30_000), 3)
    assert table.judge("a", 2, "t", 0, 0, 9) == 1


def test_sequences_end() -> None:
    table = empty()
    table.replay("a", 0, "t", 0, BatchMetadata(10**12 - 2, 1, 0, 0, 100), 1)
    assert table.judge("a", 0, "t", 0, 10**12 - 1, 1) == 0
    with pytest.raises(SequenceRefusedError, match="new epoch"):
        table.judge("a", 0, "t", 0, 10**12 - 1, 2)


# ---------------------------------------------------------------- files that lie


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "producers"
    assert ProducerSnapshot.load(path) is None
    table = empty()
    table.note("a", 0, "t", 0, place(0, 2, 0), 1)
    snapshot = ProducerSnapshot(200, table.to_bytes())
    snapshot.save(path)
    assert ProducerSnapshot.load(path) == snapshot
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        with pytest.raises(StoreError):
            ProducerSnapshot.load(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(StoreError):
            ProducerSnapshot.load(path)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"[1]\n", b'[["a",0,1,[["t",0,1,100,5]]]]\n', b'[["a",0,1,[]]]\n12345678']
)
def test_a_table_that_is_none_is_refused(data: bytes) -> None:
    if data == b"[]":
        empty().load_bytes(data, {})
        return
    with pytest.raises(StoreError):
        empty().load_bytes(data, {})


def test_expired_and_foreign_records_are_unknown_places(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    table = empty(window=100)
    for number in range(100):
        log.send(table, "a", 0, "t", 0, number * 5, [b"x" * 300] * 5)
        log.send(table, "b", 0, "t", 0, number * 5, [b"y" * 300] * 5)
    places = table.places("a", "t", 0)
    gone = SEGMENT * 2
    for base in (0, SEGMENT):
        (log.folder / segment_name(base)).unlink()
    reader = log.reader()
    found = find_stored(reader, places, "a", 0, 0, 500)
    wanted = [
        at for one in places if one.physical_offset >= gone for at in range(one.sequence, one.sequence + one.records)
    ]
    assert [at for at, one in enumerate(found) if one != UNKNOWN] == wanted
    assert set(find_stored(reader, places, "b", 0, 0, 500)) == {UNKNOWN}, "these are another producer's records"
    assert set(find_stored(reader, places, "a", 1, 0, 500)) == {UNKNOWN}
    reader.close()
    log.appender.close()


def test_records_without_marks_cost_no_rows(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    layout = RunLayout("t", born_v6=False, store_v6=False, properties_crc=True)
    encoded = encode_run(layout, 0, [b"plain"] * 10, b"", IDS, born=1)
    log.appender.append_run(log.appender.check_run(encoded.data, b"t", 0, born_v6=False), 0, HOST)
    reader = log.reader()
    batch = LogWalker(reader, max_rows=100, max_bytes=1 << 20).walk(0, log.appender.position)
    assert len(batch) == 10
    assert marks_of(batch) is None
    log.appender.close()
