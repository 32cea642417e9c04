"""Goal: batches say about every message what RocketMQ says, whichever way the bytes came; damage is noticed.

Method: the golden stores, read by their ConsumeQueues; and records of our own encoder with every host layout.
"""

from __future__ import annotations

import gc
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commitmq import CorruptRecordError, MessageBatch, SegmentSizeError
from commitmq.client.receiving.part import SegmentMaps, cut_parts, parts_of_records, parts_of_units
from commitmq.format.compression import decompress
from commitmq.format.constants import Host
from commitmq.format.record import Record, encode_record
from golden_stores import GoldenStore

SEGMENT_BYTES = 131072
COLUMNS = (
    "queue_offset",
    "physical_offset",
    "store_timestamp",
    "born_timestamp",
    "sys_flag",
    "flag",
    "reconsume_times",
    "total_size",
)


def queues_of(store: Path) -> list[tuple[str, int, bytes]]:
    """(topic, queue, its units) of every queue."""
    found = []
    for folder in sorted((store / "consumequeue").glob("*/*")):
        data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        count = sum(1 for at in range(0, len(data), 20) if struct.unpack_from(">i", data, at + 8)[0] > 0)
        found.append((folder.parent.name, int(folder.name), data[: 20 * count]))
    return found


def batch_of_units(store: Path, topic: str, queue: int, units: bytes) -> MessageBatch:
    # Two mappings at most: the golden logs have three segments, so one is always forgotten while a batch uses it.
    maps = SegmentMaps(store, SEGMENT_BYTES, max_mapped=2)
    batch = MessageBatch(parts_of_units(topic, queue, memoryview(units), maps))
    maps.close()
    return batch


def batch_of_bytes(store: Path, topic: str, queue: int, units: bytes) -> MessageBatch:
    records = []
    for physical, size, _ in struct.iter_unpack(">qiq", units):
        base = physical - physical % SEGMENT_BYTES
        data = (store / "commitlog" / f"{base:020d}").read_bytes()
        records.append(memoryview(data[physical - base : physical - base + size]))
    return MessageBatch(parts_of_records(topic, queue, records))


@pytest.mark.parametrize("read", [batch_of_units, batch_of_bytes], ids=["ranges", "bytes"])
def test_every_golden_message_reads_as_rocketmq_read_it(golden: GoldenStore, read: Any) -> None:
    expected = {(one["topic"], one["queue_id"], one["queue_offset"]): one for one in golden.messages}
    seen = 0
    for topic, queue, units in queues_of(golden.root):
        batch = read(golden.root, topic, queue, units)
        columns = {name: getattr(batch, name).tolist() for name in COLUMNS}
        bodies = batch.bodies
        for index, message in enumerate(batch):
            line = expected.get((topic, queue, message.queue_offset))
            if line is None:
                assert topic.startswith("%DLQ%")
                continue
            seen += 1
            for name in COLUMNS:
                assert columns[name][index] == line[name], name
                if name != "total_size":
                    assert getattr(message, name) == line[name], name
            assert message.properties == line["properties"]
            assert message.msg_id == line["offset_msg_id"]
            assert message.body == bytes(bodies[index]) == decompress(bytes.fromhex(line["body_hex"]), line["sys_flag"])
        assert batch.topic == [topic] * len(batch)
        assert set(batch.queue_id.tolist()) == {queue}
    assert seen == len(expected) > 400


def records(count: int = 12) -> list[Record]:
    """Records with all four host layouts in turn."""
    hosts = [Host("10.1.2.3", 4), Host("2001:db8::7", 5)]
    return [
        Record(
            "T",
            queue_id=3,
            queue_offset=100 + index,
            physical_offset=1000 * index,
            flag=index,
            born_timestamp=50 + index,
            store_timestamp=70 + index,
            reconsume_times=index % 3,
            properties={"TAGS": f"t{index}"},
            body=f"body {index}".encode() * (index + 1),
            born_host=hosts[index % 2],
            store_host=hosts[index // 2 % 2],
        )
        for index in range(count)
    ]


def test_hosts_of_both_kinds_in_one_batch() -> None:
    expected = records()
    batch = MessageBatch(parts_of_records("T", 3, [memoryview(b"".join(map(encode_record, expected)))]))
    assert batch.store_timestamp.tolist() == [one.store_timestamp for one in expected]
    assert batch.reconsume_times.tolist() == [one.reconsume_times for one in expected]
    assert [bytes(body) for body in batch.bodies] == [one.body for one in expected]
    for message, record in zip(batch.messages(), expected, strict=True):
        assert message.body == record.body
        assert message.properties == record.properties
        assert message.msg_id == record.offset_msg_id


def test_slices_share_memory_and_keep_order() -> None:
    data = memoryview(b"".join(map(encode_record, records())))
    parts = parts_of_records("T", 3, [data]) + parts_of_records("T", 3, [data])
    batch = MessageBatch(parts)
    assert len(batch) == 24
    offsets = [*range(100, 112), *range(100, 112)]
    for cut in (slice(0, 24), slice(3, 15), slice(12, 12), slice(20, 99), slice(-3, None)):
        part = batch[cut]
        assert [one.queue_offset for one in part] == offsets[cut]
        assert part.queue_offset.tolist() == offsets[cut]
    assert batch[-1].queue_offset == 111
    assert [one.queue_offset for one in batch[::5]] == offsets[::5]
    assert sum(map(len, cut_parts(parts, 5, 20))) == 15
    with pytest.raises(IndexError):
        batch[24]


def test_an_empty_batch() -> None:
    batch = MessageBatch()
    assert not batch
    assert (list(batch), batch.bodies, batch.topic, batch.buffers) == ([], [], [], [])
    assert batch.queue_offset.dtype == np.int64
    assert len(batch.queue_offset) == 0


def test_buffers_cover_the_bodies() -> None:
    expected = records()
    batch = MessageBatch(parts_of_records("T", 3, [memoryview(b"".join(map(encode_record, expected)))]))
    bodies = [
        bytes(buffer[start : start + size])
        for buffer, starts, sizes in batch.buffers
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]
    assert bodies == [one.body for one in expected]


def test_a_body_outlives_batch_and_mapping(golden_stores: dict[str, GoldenStore]) -> None:
    root = golden_stores["clean"].root
    topic, queue, units = next(one for one in queues_of(root) if one[0] == "GoldenNormal")
    body = batch_of_units(root, topic, queue, units).bodies[0]
    gc.collect()
    assert len(bytes(body)) == len(body) > 0


def _flipped(position: int) -> bytes:
    data = bytearray(b"".join(map(encode_record, records(4))))
    data[position] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        _flipped(4),  # magic
        _flipped(15),  # queue id
        _flipped(0),  # size: negative
        _flipped(2),  # size: past the end
        _flipped(84),  # body size
        encode_record(records(1)[0])[:-1],
        encode_record(records(1)[0]) + bytes(10),
        encode_record(records(1)[0]) + bytes(100),
    ],
    ids=["magic", "queue", "negative", "large", "body", "cut", "short rest", "zeros"],
)
def test_damaged_records_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        MessageBatch(parts_of_records("T", 3, [memoryview(data)]))


@pytest.mark.parametrize(
    "unit", [(1, 1125, 0), (1758, 1124, 0), (131000, 500, 0), (-5, 500, 0)], ids=["start", "size", "edge", "negative"]
)
def test_units_that_name_no_record_are_refused(
    golden_stores: dict[str, GoldenStore], unit: tuple[int, int, int]
) -> None:
    maps = SegmentMaps(golden_stores["clean"].root, SEGMENT_BYTES)
    with pytest.raises((CorruptRecordError, OSError)):
        parts_of_units("GoldenNormal", 3, memoryview(struct.pack(">qiq", *unit)), maps)
    maps.close()


def test_a_segment_of_another_size_is_refused(golden_stores: dict[str, GoldenStore]) -> None:
    maps = SegmentMaps(golden_stores["clean"].root, 65536)
    with pytest.raises(SegmentSizeError, match=r"131072 bytes.*65536"):
        maps.map(0)


def test_to_arrow_has_every_column() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    expected = records()
    table = MessageBatch(parts_of_records("T", 3, [memoryview(b"".join(map(encode_record, expected)))])).to_arrow()
    assert table.num_rows == len(expected)
    assert table["body"].to_pylist() == [one.body for one in expected]
    assert table["tags"].to_pylist() == [one.properties["TAGS"] for one in expected]
    assert table["queue_offset"].to_pylist() == [one.queue_offset for one in expected]
