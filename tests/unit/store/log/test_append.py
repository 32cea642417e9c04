"""Goal: the appender stores a run as it was sent, and stores nothing of one that lies, is cut or meets a full disk.

Method: a real segment folder in a temporary directory; runs built with the pure-Python record encoder, read back with the
pure-Python decoder, so that the kernels are checked against code that shares nothing with them.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commitmq.errors import StoreError
from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import pack_host
from commitmq.format.record import Record, decode_record, encode_record
from commitmq.kernels.compiled import store_run
from commitmq.store.log.append import Appended, BrokenTailError, CommitLogAppender, SegmentUnavailableError
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.run_check import MessageIllegalError
from commitmq.store.recovery.scan import map_segment, scan_to_end

SEGMENT = 65_536
TOPIC = "Orders"
HOST = pack_host(Host("127.0.0.1", 0))


class Log:
    """A folder of segments and an appender on it; segments are made on demand, up to ``available``."""

    def __init__(self, folder: Path, *, available: int = 100, crc: bool = True) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.available = available
        self.appender = CommitLogAppender(
            0,
            segment_bytes=SEGMENT,
            open_segment=self.open,
            store_host=pack_host(Host("10.0.0.1", 10911)),
            max_message_bytes=16_384,
            properties_crc=crc,
            clock=lambda: 1_700_000_000_000,
        )

    def open(self, base: int) -> mmap.mmap | None:
        path = self.folder / segment_name(base)
        if not path.exists():
            if base // SEGMENT >= self.available:
                return None
            path.write_bytes(bytes(SEGMENT))
        return map_segment(path, SEGMENT)

    def records(self) -> list[Record]:
        self.appender.close()
        log = CommitLog(self.folder, SEGMENT)
        try:
            return list(log.iter_records())
        finally:
            log.close()


def a_record(body: bytes, *, properties: dict[str, str] | None = None, queue_id: int = 3, crc: bool = True) -> bytes:
    """One record of a run: ordinary, with zeros where the writer fills in."""
    record = Record(
        topic=TOPIC,
        queue_id=queue_id,
        queue_offset=0,
        physical_offset=0,
        sys_flag=0,
        flag=7,
        born_timestamp=1_600_000_000_000,
        born_host=Host("0.0.0.0", 0),
        store_timestamp=0,
        store_host=Host("0.0.0.0", 0),
        reconsume_times=0,
        prepared_transaction_offset=0,
        body=body,
        properties=properties or {},
    )
    data = bytearray(encode_record(record, properties_crc=crc))
    if crc:
        data[-11:-1] = b"0" * 10  # the slot comes empty; its digits are the writer's
    return bytes(data)


def append(log: Log, run: bytes, *, queue_offset: int = 0, queue_id: int = 3) -> Appended:
    return log.appender.append_run(
        log.appender.check_run(run, TOPIC.encode(), queue_id, born_v6=False), queue_offset, HOST
    )


def test_run_is_stored_as_it_was_sent_with_the_writers_fields(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    bodies = [b"", b"x", os.urandom(1000), "grüße 🚀".encode()]
    run = b"".join(a_record(body, properties={"TAGS": "标签🚀", "KEYS": "a b"}) for body in bodies)
    done = append(log, run, queue_offset=41)
    assert [part.count for part in done.parts] == [4]
    records = log.records()
    assert [record.body for record in records] == bodies
    assert [record.queue_offset for record in records] == [41, 42, 43, 44]
    assert {record.store_timestamp for record in records} == {1_700_000_000_000}
    assert records[0].store_host == Host("10.0.0.1", 10911)
    assert records[0].born_host == Host("127.0.0.1", 0)
    assert records[0].properties["TAGS"] == "标签🚀"
    assert records[-1].physical_offset + records[-1].total_size == done.end


def test_single_record_equals_the_same_record_sent_as_a_run(tmp_path: Path) -> None:
    single, run = Log(tmp_path / "single"), Log(tmp_path / "run")
    record = single.appender.encode(
        TOPIC.encode(),
        3,
        b"body",
        b"TAGS\x01A\x02",
        sys_flag=0,
        flag=7,
        born_timestamp=1_600_000_000_000,
        born_host=HOST,
    )
    single.appender.append_record(record, 5, len(HOST))
    append(run, a_record(b"body", properties={"TAGS": "A"}), queue_offset=5)
    single.appender.close()
    run.appender.close()
    assert (tmp_path / "single" / segment_name(0)).read_bytes() == (tmp_path / "run" / segment_name(0)).read_bytes()


def test_run_is_split_at_segment_ends_with_fillers(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    count = 300
    done = append(log, b"".join(a_record(bytes([i % 256]) * 900) for i in range(count)))
    assert len(done.parts) > 3
    assert sum(part.count for part in done.parts) == count
    records = log.records()
    assert [record.queue_offset for record in records] == list(range(count))
    for part in done.parts[1:]:
        assert part.physical_offset % SEGMENT == 0
        # Spec 2.11: the file before ends with a filler that names the bytes left.
        before = (log.folder / segment_name(part.physical_offset - SEGMENT)).read_bytes()
        last = [r for r in records if r.physical_offset < part.physical_offset][-1]
        at = (last.physical_offset + last.total_size) % SEGMENT
        blank, magic = struct.unpack_from(">iI", before, at)
        assert (blank, magic) == (SEGMENT - at, 0xCBD43194)
        assert blank >= 8
        assert last.total_size + 8 > blank


def test_missing_segment_undoes_the_whole_run(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", available=2)
    append(log, a_record(b"before"))
    first = (log.folder / segment_name(0)).read_bytes()
    position = log.appender.position
    with pytest.raises(SegmentUnavailableError):
        append(log, b"".join(a_record(bytes(900)) for _ in range(200)), queue_offset=1)
    assert log.appender.position == position
    log.appender.close()
    assert (log.folder / segment_name(0)).read_bytes() == first
    assert not any((log.folder / segment_name(SEGMENT)).read_bytes())
    # And the log goes on where it was once there is room.
    log.available = 100
    append(log, a_record(b"after"), queue_offset=1)
    assert [record.body for record in log.records()] == [b"before", b"after"]


@pytest.mark.parametrize("sizes", [[900] * 73, [900] * 72 + [10], [16_000] * 5, [0] * 700])
def test_undo_at_every_alignment_leaves_zeros(tmp_path: Path, sizes: list[int]) -> None:
    log = Log(tmp_path / "log", available=1)
    with pytest.raises(SegmentUnavailableError):
        append(log, b"".join(a_record(bytes(size)) for size in sizes))
    log.appender.close()
    assert not any((log.folder / segment_name(0)).read_bytes())


@pytest.mark.parametrize("sizes", [[900] * 150, [900] * 72 + [10] * 900, [16_000] * 12, [0] * 1500])
@pytest.mark.parametrize("error", [StoreError("gone"), OSError(errno.EMFILE, "no descriptors"), MemoryError()])
def test_a_segment_that_cannot_be_opened_undoes_the_whole_run(
    tmp_path: Path, error: Exception, sizes: list[int]
) -> None:
    """Every segment of a run is opened before its first byte is stored, whatever opening raises."""
    log = Log(tmp_path / "log")
    append(log, a_record(b"before"))
    opened = log.appender._open_segment

    def refused(base: int) -> mmap.mmap | None:
        if base == 2 * SEGMENT:
            raise error
        return opened(base)

    log.appender._open_segment = refused
    position, descriptors = log.appender.position, len(os.listdir("/proc/self/fd"))
    with pytest.raises(type(error)):
        append(log, b"".join(a_record(bytes(size)) for size in sizes), queue_offset=1)
    assert log.appender.position == position
    assert len(os.listdir("/proc/self/fd")) == descriptors
    written = [any((log.folder / segment_name(base)).read_bytes()[at:]) for base, at in ((0, position), (SEGMENT, 0))]
    assert written == [False, False]
    log.appender._open_segment = opened
    append(log, b"".join(a_record(bytes(size)) for size in sizes), queue_offset=1)
    assert [record.queue_offset for record in log.records()] == list(range(len(sizes) + 1))


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_what_was_stored_of_a_run_that_fails_is_zeroed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    log = Log(tmp_path / "log")
    append(log, a_record(b"before"))
    position, calls = log.appender.position, itertools.count(1)

    def store(*arguments: Any) -> None:
        store_run(*arguments)
        if next(calls) == failing:
            raise MemoryError

    monkeypatch.setattr("commitmq.store.log.append.store_run", store)
    run = b"".join(a_record(bytes(900)) for _ in range(180))
    with pytest.raises(MemoryError):
        append(log, run, queue_offset=1)
    assert log.appender.position == position
    made = 0
    for base, at in ((0, position), (SEGMENT, 0), (2 * SEGMENT, 0)):
        path = log.folder / segment_name(base)
        if path.exists():
            made += 1
            assert not any(path.read_bytes()[at:])
    assert made >= failing, "a part of the run was stored in each of these segments"
    append(log, run, queue_offset=1)
    assert [record.queue_offset for record in log.records()] == list(range(181))


def test_a_run_that_cannot_be_taken_back_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler of failed requests, which catches Exception, may go on behind half a run."""
    log = Log(tmp_path / "log")

    class Broken(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> object:
            raise OSError(errno.EIO, "gone")

    mappings = log.appender._mappings
    monkeypatch.setattr(log.appender, "_mappings", lambda pieces: Broken(mappings(pieces)))
    with pytest.raises(BrokenTailError) as raised:
        append(log, a_record(b"x"))
    assert not isinstance(raised.value, Exception)


def test_timestamps_never_go_back(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    clock = iter([2_000, 1_000, 3_000])
    log.appender._clock = lambda: next(clock)
    for number in range(3):
        append(log, a_record(b"x"), queue_offset=number)
    assert [record.store_timestamp for record in log.records()] == [2_000, 2_000, 3_000]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda run: run[:-1], "past the end"),
        (lambda run: struct.pack(">i", 10_000) + run[4:], "past the end"),
        (lambda run: struct.pack(">i", -5) + run[4:], "past the end"),
        (lambda run: run[:4] + b"\0\0\0\0" + run[8:], "magic"),
        (lambda run: run[:8] + b"\0\0\0\1" + run[12:], "bodyCRC"),
        (lambda run: run[:12] + struct.pack(">i", 9) + run[16:], "another queue"),
        (lambda run: run[:20] + struct.pack(">q", 1) + run[28:], "not zero"),
        (lambda run: run[:28] + struct.pack(">q", 1) + run[36:], "not zero"),
        (lambda run: run[:36] + struct.pack(">i", 4) + run[40:], "sysFlag"),
        (lambda run: run[:36] + struct.pack(">i", 0x10) + run[40:], "past the end|sysFlag|add up"),
        (lambda run: run[:76] + struct.pack(">q", 1) + run[84:], "not zero"),
        (lambda run: run[:84] + struct.pack(">i", 1 << 30) + run[88:], "add up"),
        (lambda run: run.replace(b"Orders", b"Others"), "another topic"),
        (lambda run: run.replace(b"__CRC32#", b"__CRC33#"), "slot"),
        (lambda run: run.replace(b"TAGS", b"TA\x02S"), "pairs"),
        (lambda run: run.replace(b"KEYS", b"KE\xffS"), "UTF-8"),
    ],
)
def test_a_run_that_lies_is_refused_and_nothing_is_stored(tmp_path: Path, damage: Any, sentence: str) -> None:
    log = Log(tmp_path / "log")
    good = a_record(b"good", properties={"TAGS": "a", "KEYS": "k"})
    bad = damage(a_record(b"body", properties={"TAGS": "a", "KEYS": "k"}))
    with pytest.raises(MessageIllegalError, match=sentence) as caught:
        append(log, good + bad)
    assert "record 1" in str(caught.value)
    assert log.appender.position == 0
    append(log, good)
    assert [record.body for record in log.records()] == [b"good"]


@pytest.mark.parametrize("name", ["DELAY", "TRAN_MSG", "INNER_NUM", "INNER_BASE", "TIMER_DELAY_SEC", "__CRC32#"])
def test_marks_of_the_node_are_refused(tmp_path: Path, name: str) -> None:
    log = Log(tmp_path / "log")
    with pytest.raises(MessageIllegalError, match="only the node may set"):
        log.appender.encode(
            b"T", 0, b"x", f"A\x01b\x02{name}\x013\x02".encode(), sys_flag=0, flag=0, born_timestamp=1, born_host=HOST
        )


def test_limits_name_the_number(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    arguments: dict[str, Any] = {"sys_flag": 0, "flag": 0, "born_timestamp": 1, "born_host": HOST}
    with pytest.raises(MessageIllegalError, match="16385 bytes"):
        log.appender.encode(b"T", 0, bytes(16_385), b"", **arguments)
    with pytest.raises(MessageIllegalError) as caught:
        log.appender.encode(b"T", 0, b"x", b"A\x01" + b"v" * 32_760 + b"\x02", **arguments)
    assert caught.value.code == "PROPERTIES_SIZE_EXCEEDED"


_RUN = b"".join(a_record(bytes([65 + i]) * (i * 37), properties={"TAGS": "äß", "K": str(i)}) for i in range(6))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(_RUN) - 1), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 40)
)
def test_a_mutated_run_is_refused_or_decodes_to_valid_messages(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    log = Log(tmp_path_factory.mktemp("mutated") / "log")
    run = bytearray(_RUN)
    for position, value in changes:
        run[position] = value
    data = bytes(run[: len(run) - cut])
    try:
        done = append(log, data)
    except MessageIllegalError:
        assert log.appender.position == 0
        log.appender.close()
        return
    records = log.records()
    assert sum(part.count for part in done.parts) == len(records)
    assert all(record.topic == TOPIC and record.queue_id == 3 for record in records)


def test_scan_agrees_with_the_python_decoder_and_stops_at_damage(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    append(log, b"".join(a_record(os.urandom(500), properties={"TAGS": "t"}) for _ in range(50)))
    records = log.records()
    path = log.folder / segment_name(0)
    reader = CommitLog(log.folder, SEGMENT)
    whole = scan_to_end(reader, 0)
    assert (whole.records, whole.end, whole.torn) == (50, records[-1].physical_offset + records[-1].total_size, None)
    reader.close()
    victim = records[20]
    data = bytearray(path.read_bytes())
    # Body, topic and property bytes alike: the record's own CRC covers all of them.
    for inside in (100, victim.total_size - 30, victim.total_size - 45):
        damaged = bytearray(data)
        damaged[victim.physical_offset + inside] ^= 1
        path.write_bytes(bytes(damaged))
        reader = CommitLog(log.folder, SEGMENT)
        found = scan_to_end(reader, 0)
        reader.close()
        assert found.records == 20
        assert found.end == victim.physical_offset
        assert found.torn is not None


def test_record_of_another_place_is_no_record_here(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    append(log, a_record(b"one") + a_record(b"two"))
    records = log.records()
    path = log.folder / segment_name(0)
    data = bytearray(path.read_bytes())
    second = bytes(data[records[1].physical_offset : records[1].physical_offset + records[1].total_size])
    assert decode_record(second).body == b"two"
    end = records[1].physical_offset + records[1].total_size
    data[end : end + len(second)] = second  # a stale copy that would link up
    path.write_bytes(bytes(data))
    reader = CommitLog(log.folder, SEGMENT)
    found = scan_to_end(reader, 0)
    reader.close()
    assert (found.records, found.end) == (2, end)


def test_the_next_segment_is_made_ready_before_the_roll(tmp_path: Path) -> None:
    """Goal: the window of populated pages goes on into the next segment, once that is there, and a roll opens nothing."""
    segment = 1 << 20
    opened: list[int] = []
    ready = {0}

    def look(base: int) -> mmap.mmap | None:
        opened.append(base)
        path = tmp_path / segment_name(base)
        if base in ready and not path.exists():
            path.write_bytes(bytes(segment))
        return map_segment(path, segment)

    appender = CommitLogAppender(
        0,
        segment_bytes=segment,
        open_segment=look,
        store_host=pack_host(Host("10.0.0.1", 10911)),
        max_message_bytes=16_384,
        properties_crc=True,
        populate_window_bytes=segment // 2,
    )

    def send(until: int) -> None:
        while appender.position < until:
            record = appender.encode(
                TOPIC.encode(), 0, b"x" * 8000, b"", sys_flag=0, flag=0, born_timestamp=1, born_host=HOST
            )
            appender.append_record(record, 0, 8)

    def prepare() -> int:
        pieces = 0
        while appender.populate_ahead():
            pieces += 1
        return pieces

    assert prepare() == 0, "nothing is mapped yet"
    send(1)
    assert prepare() == 2
    send(segment * 7 // 8)
    assert prepare() == 0
    assert opened == [0, segment], "the next segment is not there, which one look has told"
    ready.add(segment)
    send(segment * 15 // 16)
    assert prepare() == 0, "it looks again only when the tail has moved on by a piece"
    send(segment + 1)
    assert opened == [0, segment, segment]
    ready.update((2 * segment, 3 * segment))
    while appender.position < 3 * segment:
        send(appender.position + 1)
        prepare()
    assert opened == [0, segment, segment, 2 * segment, 3 * segment], "before the roll, which then opens none"
    appender.close()
    log = CommitLog(tmp_path, segment)
    assert sum(1 for _ in log.iter_records()) > 350
    log.close()
