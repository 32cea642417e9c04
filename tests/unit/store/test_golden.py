"""Goal: what RocketMQ 5.4.0 wrote is read field by field and written again byte by byte.

Method: both golden stores; the expected values come from messages.jsonl (made by RocketMQ's own classes), from the
files themselves, and from the tables of the specification's section 17.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from commitmq.errors import CorruptRecordError
from commitmq.files.fd_cache import FdCache
from commitmq.format.constants import SysFlag
from commitmq.format.java import java_string_hash
from commitmq.format.message_id import offset_message_id, parse_offset_message_id
from commitmq.format.properties import BROKER_BUCKETS, CLIENT_BUCKETS
from commitmq.format.record import Record, encode_filler, encode_record
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.metadata import json_config
from commitmq.store.metadata.group_config import ConsumerOffsets, GroupTable
from commitmq.store.metadata.topic_config import TopicTable
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.queue_files import list_queues
from commitmq.store.recovery import abort_file
from golden_stores import GOLDEN_QUEUE_FILE_BYTES, GOLDEN_SEGMENT_BYTES, GoldenStore
from queue_times import offset_by_time

RECORDS = {"clean": 410, "crash": 412}
LOG_END = {"clean": 274_646, "crash": 286_835}
FILLERS = {
    "clean": [(129_665, 1407), (261_948, 196)],
    "crash": [(130_912, 160), (261_763, 381)],
}
CHECKPOINTS = {
    "clean": (1795229127144, 1795229148766, 1795229127083, 0, 0),
    "crash": (1795229208811, 1795229230484, 1795229208666, 0, 0),
}
SCHEDULE = "SCHEDULE_TOPIC_XXXX"
CopyGolden = Callable[[str], GoldenStore]


@pytest.fixture
def log(golden: GoldenStore) -> CommitLog:
    return CommitLog(golden.layout.commit_log, GOLDEN_SEGMENT_BYTES, max_mapped=2)


def test_every_field_of_every_record(golden: GoldenStore, log: CommitLog) -> None:
    found = {record.physical_offset: record for record in log.iter_records()}
    assert len(found) == RECORDS[golden.name]
    for message in golden.messages:
        assert found.pop(message["physical_offset"]).to_json() == message
    assert [record.topic for record in found.values()] == [f"%DLQ%{prefix(golden)}_group"]


def test_json_has_the_names_order_and_format_of_the_golden_file(golden: GoldenStore, log: CommitLog) -> None:
    lines = {json.dumps(record.to_json(), separators=(",", ":")) for record in log.iter_records()}
    assert set(golden.lines) <= lines


def test_reencoding_a_record_gives_its_bytes(golden: GoldenStore, log: CommitLog) -> None:
    for offset, size in log.iter_spans():
        record = log.record(offset)
        assert encode_record(record, buckets=buckets_of(record, golden)) == log.read(offset, size), record


def test_the_log_ends_where_it_should_and_has_its_fillers(golden: GoldenStore, log: CommitLog) -> None:
    spans = list(log.iter_spans())
    assert sum(spans[-1]) == LOG_END[golden.name]
    ends = [sum(span) for span in spans]
    starts = [span[0] for span in spans]
    gaps = [(end, start - end) for end, start in zip(ends, starts[1:], strict=False) if end != start]
    assert gaps == FILLERS[golden.name]
    for offset, blank in gaps:
        assert log.read(offset, 8) == encode_filler(blank)
        assert not any(log.read(offset + 8, blank - 8))
    # A bounded walk passes the fillers the same way, and one that ends inside the log shows only what is below.
    assert list(log.iter_spans(spans[10][0], spans[200][0])) == spans[10:200]


def test_a_bounded_walk_must_find_everything_below_its_end(golden: GoldenStore, log: CommitLog) -> None:
    with pytest.raises(CorruptRecordError) as caught:
        list(log.iter_records(end=LOG_END[golden.name] + 1))
    assert caught.value.path == golden.layout.commit_log / "00000000000000262144"
    assert caught.value.offset == LOG_END[golden.name] - 262_144


def test_sys_flags_and_queue_offsets(golden: GoldenStore, log: CommitLog) -> None:
    records = list(log.iter_records())
    plain = {"clean": 392, "crash": 394}[golden.name]
    compressed = SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZLIB
    assert Counter(record.sys_flag for record in records) == {0: plain, compressed: 15, SysFlag.TRANSACTION_COMMIT: 3}
    queues: dict[tuple[str, int], list[int]] = {}
    for record in records:
        if record.topic == "RMQ_SYS_TRANS_HALF_TOPIC" or "TRAN_MSG" not in record.properties:
            queues.setdefault((record.topic, record.queue_id), []).append(record.queue_offset)
    assert all(offsets == list(range(len(offsets))) for offsets in queues.values())


def test_offset_message_ids(golden: GoldenStore) -> None:
    for message in golden.messages:
        host, offset = parse_offset_message_id(message["offset_msg_id"])
        assert offset == message["physical_offset"]
        assert offset_message_id(host.ip, host.port, offset) == message["offset_msg_id"]
        assert host == ("127.0.0.1", 10911)


def test_consume_queues_rebuilt_from_the_log_are_byte_equal(
    golden: GoldenStore, log: CommitLog, tmp_path: Path
) -> None:
    fds = FdCache(4)
    queues: dict[tuple[str, int], ConsumeQueue] = {}
    for record in log.iter_records():
        key = (record.topic, record.queue_id)
        if key not in queues:
            queues[key] = ConsumeQueue(tmp_path / record.topic / str(record.queue_id), GOLDEN_QUEUE_FILE_BYTES, fds)
        code = golden_tags_code(golden, record)
        unit = record.physical_offset.to_bytes(8) + record.total_size.to_bytes(4) + code.to_bytes(8, signed=True)
        assert queues[key].append_units(record.queue_offset, unit) == 1
    assert len(fds) <= 4
    expected = files_below(golden.layout.consume_queue)
    assert len(expected) == 25
    assert files_below(tmp_path) == expected


def test_consume_queues_are_recovered_and_left_as_they_are(golden: GoldenStore, golden_copy: CopyGolden) -> None:
    copy = golden_copy(golden.name)
    before = files_below(copy.layout.consume_queue)
    lengths = Counter((message["topic"], message["queue_id"]) for message in golden.messages)
    lengths[f"%DLQ%{prefix(golden)}_group", 0] = 1
    found = {}
    for topic, queue_id, folder in list_queues(copy.layout.consume_queue):
        queue = ConsumeQueue(folder, GOLDEN_QUEUE_FILE_BYTES)
        queue.recover()
        queue.correct_min_offset(0)
        assert queue.min_offset == 0
        found[topic, queue_id] = queue.max_offset
    assert found == lengths
    assert files_below(copy.layout.consume_queue) == before


def test_checkpoint_is_read_and_written_back(golden: GoldenStore, tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(golden.layout.checkpoint)
    assert (
        checkpoint.physic_msg_timestamp,
        checkpoint.logics_msg_timestamp,
        checkpoint.index_msg_timestamp,
        checkpoint.master_flushed_offset,
        checkpoint.confirm_physical_offset,
    ) == CHECKPOINTS[golden.name]
    assert checkpoint.min_timestamp == CHECKPOINTS[golden.name][0] - 3000
    checkpoint.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint").read_bytes() == golden.layout.checkpoint.read_bytes()


def test_json_files_are_written_back_byte_for_byte(golden: GoldenStore, tmp_path: Path) -> None:
    files = [path for path in golden.layout.config.iterdir() if not path.name.startswith("transactionMetrics")]
    assert len(files) >= 10
    for path in files:
        json_config.persist(tmp_path / path.name, json_config.loads(path.read_text(encoding="utf-8")))
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_typed_tables_are_written_back_byte_for_byte(golden: GoldenStore, tmp_path: Path) -> None:
    for name, table in (
        ("topics.json", TopicTable),
        ("subscriptionGroup.json", GroupTable),
        ("consumerOffset.json", ConsumerOffsets),
    ):
        loaded = table.load(golden.layout.config / name)
        loaded.persist(tmp_path / name)
        assert (tmp_path / name).read_bytes() == (golden.layout.config / name).read_bytes(), name


def test_what_the_tables_say(golden: GoldenStore) -> None:
    name = prefix(golden)
    topics = TopicTable.load(golden.layout.config / "topics.json")
    assert topics.version.counter == 7
    assert len(topics.topics) == 21
    normal = topics.topics[f"{name}Normal"]
    assert (normal.read_queues, normal.write_queues, normal.perm) == (4, 4, 6)
    groups = GroupTable.load(golden.layout.config / "subscriptionGroup.json")
    assert groups.version.counter == 2
    assert groups.groups[f"{name}_group"].consume_enabled
    offsets = ConsumerOffsets.load(golden.layout.config / "consumerOffset.json")
    assert [offsets.get(f"{name}_group", f"{name}Normal", queue) for queue in range(5)] == [60, 60, 60, 60, None]
    delays = json_config.load(golden.layout.config / "delayOffset.json")
    assert delays is not None
    assert delays["offsetTable"] == {
        1: 6,
        3: {"clean": 12, "crash": 13}[golden.name],
    }


def test_abort_file(golden: GoldenStore) -> None:
    assert abort_file.exists(golden.layout.abort) == (golden.name == "crash")
    assert abort_file.read_pid(golden.layout.abort) == (17217 if golden.name == "crash" else None)


def test_look_up_by_time_finds_every_message(golden: GoldenStore, log: CommitLog) -> None:
    """Method: for each store time in a queue, the answers by definition, from messages.jsonl."""
    folder = golden.layout.consume_queue / f"{prefix(golden)}Normal" / "2"
    queue = ConsumeQueue(folder, GOLDEN_QUEUE_FILE_BYTES)
    queue.refresh()
    topic = f"{prefix(golden)}Normal"
    times = [one["store_timestamp"] for one in golden.messages if (one["topic"], one["queue_id"]) == (topic, 2)]
    assert len(times) == 60
    for time in range(times[0] - 2, times[-1] + 3):
        lower = sum(one < time for one in times)
        upper = max(0, sum(one <= time for one in times) - 1)
        assert offset_by_time(queue, time, "lower", log) == lower
        assert offset_by_time(queue, time, "UPPER", log) == upper


def prefix(golden: GoldenStore) -> str:
    return "Golden" if golden.name == "clean" else "Crashed"


def buckets_of(record: Record, golden: GoldenStore) -> int:
    """Batch elements and op messages are stored as the client's small maps ordered them (spec 2.5)."""
    client = record.topic in (f"{prefix(golden)}Batch", "RMQ_SYS_TRANS_OP_HALF_TOPIC")
    return CLIENT_BUCKETS if client else BROKER_BUCKETS


def golden_tags_code(golden: GoldenStore, record: Record) -> int:
    """Spec 3.2; both delay levels that occur (1 and 3) are in the golden stores' table."""
    if record.topic == SCHEDULE:
        return record.store_timestamp + {0: 1_000, 2: 10_000}[record.queue_id]
    tags = record.properties.get("TAGS")
    return java_string_hash(tags) if tags else 0


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
