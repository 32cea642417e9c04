"""A small store written message by message through the project's own codecs, for tests of what reads it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from commitmq.format.file_names import segment_name
from commitmq.format.java import java_string_hash
from commitmq.format.record import Record, encode_filler, encode_record
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable
from commitmq.store.queues.consume_queue import ConsumeQueue

_UNIT = struct.Struct(">qiq")


@dataclass
class QueueStore:
    """Appends records and their units; ``end`` is the log's end, ``records`` what was put, by (topic, queue)."""

    root: Path
    segment_bytes: int = 65_536
    file_bytes: int = 200
    end: int = 0
    records: dict[tuple[str, int], list[Record]] = field(default_factory=dict)
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    _queues: dict[tuple[str, int], ConsumeQueue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = StoreLayout(self.root)
        for folder in (self.layout.commit_log, self.layout.consume_queue, self.layout.config, self.layout.run):
            folder.mkdir(parents=True, exist_ok=True)
        self.layout.own.mkdir(exist_ok=True)

    def topic(self, name: str, queues: int = 4, perm: int = 6) -> None:
        """Add or change a topic in topics.json."""
        self.topics[name] = TopicConfig(name, queues, queues, perm)
        self.save_topics()

    def save_topics(self) -> None:
        TopicTable(dict(self.topics)).persist(self.layout.config / "topics.json")

    def put(
        self,
        topic: str,
        queue: int,
        body: bytes,
        *,
        tag: str | None = None,
        code: int | None = None,
        timestamp: int = 0,
        dispatch: bool = True,
        start: int = 0,
        light: str | None = None,
    ) -> Record:
        """Append one message; ``code`` replaces the unit's tags code, ``start`` is a new queue's first offset, and
        ``light`` a light queue that gets a unit at the same offset.
        """
        known = self.records.setdefault((topic, queue), [])
        record = Record(
            topic,
            queue_id=queue,
            queue_offset=known[-1].queue_offset + 1 if known else start,
            store_timestamp=timestamp,
            body=body,
            properties={} if tag is None else {"KEYS": "k", "TAGS": tag},
        )
        if light is not None:
            record.properties |= {"INNER_MULTI_DISPATCH": light, "INNER_MULTI_QUEUE_OFFSET": str(record.queue_offset)}
        size = len(encode_record(record))
        left = self.segment_bytes - self.end % self.segment_bytes
        if size + 8 > left:
            self._write(encode_filler(left))
            self.end += left
        record.physical_offset = self.end
        record.total_size = size
        self._write(encode_record(record))
        self.end += size
        known.append(record)
        if dispatch:
            self.dispatch(record, code)
        return record

    def dispatch(self, record: Record, code: int | None = None) -> None:
        """Append the unit of ``record``."""
        tag = record.properties.get("TAGS")
        if code is None:
            code = java_string_hash(tag) if tag else 0
        unit = _UNIT.pack(record.physical_offset, record.total_size, code)
        self.queue(record.topic, record.queue_id).append_units(record.queue_offset, unit)
        if light := record.properties.get("INNER_MULTI_DISPATCH"):
            self.queue(light, 0).append_units(record.queue_offset, unit)

    def queue(self, topic: str, queue: int) -> ConsumeQueue:
        key = (topic, queue)
        if key not in self._queues:
            self._queues[key] = ConsumeQueue(self.layout.consume_queue / topic / str(queue), self.file_bytes)
            self._queues[key].recover()
        return self._queues[key]

    def delete_queue(self, topic: str, queue: int) -> None:
        """Remove a queue's files and what is known of it, as the deletion of its topic does."""
        self._queues.pop((topic, queue)).destroy()
        del self.records[topic, queue]

    def bodies(self, topic: str, queue: int) -> list[bytes]:
        return [record.body for record in self.records[topic, queue]]

    def _write(self, data: bytes) -> None:
        base = self.end - self.end % self.segment_bytes
        path = self.layout.commit_log / segment_name(base)
        if not path.exists():
            path.write_bytes(b"")
            with open(path, "r+b") as file:
                file.truncate(self.segment_bytes)
        with open(path, "r+b") as file:
            file.seek(self.end - base)
            file.write(data)
