"""Writes a whole store from records, with this project's store modules and no node.

For shapes that a node's clients cannot make: topics long enough for version 2 records, IPv6 hosts, every host mixture.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from commitmq.format.file_names import segment_name
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record, encode_filler, encode_record
from commitmq.store.checkpoint import Checkpoint
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.recovery import abort_file

SEGMENT_BYTES = 131072
QUEUE_FILE_BYTES = 1000
FILLER_BYTES = 8


def write_store(root: Path, records: Iterable[Record], *, properties_crc: bool, killed: bool = False) -> list[Record]:
    """Lay ``records`` out as a store and give them back with their offsets and sizes filled in.

    ``killed`` leaves what a kill leaves: the abort file, queues that miss their last units, a torn record at the end.
    """
    layout = StoreLayout(root)
    for folder in (layout.commit_log, layout.consume_queue, layout.config):
        folder.mkdir(parents=True)
    log = bytearray()
    written = []
    for record in records:
        record.physical_offset = len(log)
        data = encode_record(record, properties_crc=properties_crc)
        rest = SEGMENT_BYTES - len(log) % SEGMENT_BYTES
        if len(data) + FILLER_BYTES > rest:
            log += encode_filler(rest).ljust(rest, b"\0")
            record.physical_offset = len(log)
            data = encode_record(record, properties_crc=properties_crc)
        log += data
        record.total_size = len(data)
        written.append(record)
    _write_queues(layout, written[: len(written) * 3 // 4] if killed else written)
    if killed:
        # Torn inside its body. Where only properties are torn, RocketMQ notices with forceVerifyPropCRC alone.
        torn = encode_record(Record("Torn", physical_offset=len(log), body=b"x" * 1000), properties_crc=properties_crc)
        log += torn[:500]
        abort_file.create(layout.abort, 1)
    for base in range(0, len(log), SEGMENT_BYTES):
        segment = bytes(log[base : base + SEGMENT_BYTES]).ljust(SEGMENT_BYTES, b"\0")
        (layout.commit_log / segment_name(base)).write_bytes(segment)
    newest = written[len(written) // 2 if killed else -1].store_timestamp
    Checkpoint(newest, newest).save(layout.checkpoint)
    table = TopicTable()
    for topic in dict.fromkeys(record.topic for record in written):
        table.put(TopicConfig(topic, read_queues=4, write_queues=4))
    table.persist(layout.config / "topics.json")
    return written


def _write_queues(layout: StoreLayout, records: list[Record]) -> None:
    queues: dict[tuple[str, int], ConsumeQueue] = {}
    for record in records:
        key = record.topic, record.queue_id
        if key not in queues:
            folder = layout.consume_queue / record.topic / str(record.queue_id)
            queues[key] = ConsumeQueue(folder, QUEUE_FILE_BYTES)
            queues[key].recover()
        tags = record.properties.get("TAGS")
        unit = (
            record.physical_offset.to_bytes(8, "big")
            + record.total_size.to_bytes(4, "big")
            + (java_string_hash(tags) if tags else 0).to_bytes(8, "big", signed=True)
        )
        assert queues[key].append_units(record.queue_offset, unit) == 1
    for queue in queues.values():
        queue.flush()
