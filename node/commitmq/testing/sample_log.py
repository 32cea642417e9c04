"""A CommitLog with all kinds of records that a dispatcher may meet, written by the node's own appender."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from commitmq.format.constants import Host
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import pack_host
from commitmq.format.record import Record, encode_record
from commitmq.store.log.append import CommitLogAppender
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.store.recovery.writer_tail import map_segment

SEGMENT_BYTES = 16_384
TOPICS = ("orders", "a-topic-with-a-name-that-is-rather-long-for-one", "metrics%2", "SCHEDULE_TOPIC_XXXX")
RECORDS = 160
_HOST = Host("127.0.0.1", 10911)
_HOST_V6 = Host("::1", 10911)
_BORN_MS = 1_700_000_000_000
_PREPARED, _ROLLED_BACK = 0x4, 0xC
# Prepared, committed and rolled-back transactions, and no transaction most of the time.
_TRANSACTIONS = (0x0, 0x0, 0x0, _PREPARED, 0x0, 0x8, 0x0, _ROLLED_BACK)
# Words with one, two, three and four bytes a character, two with the same Java hash, and none.
_TAGS = ("drink", "", "grün", "标签", "🚀🚀", "Aa", "BB", "x" * 100)
_KEYS = ("", "table-7", "a b c", "schlüssel 钥匙 🗝", "k" * 300)


@dataclass(frozen=True, slots=True)
class SampleLog:
    """A log in ``folder``; ``offsets`` are its records' physical offsets, ``end`` is the offset behind the last one."""

    folder: Path
    offsets: tuple[int, ...]
    end: int
    segment_bytes: int = SEGMENT_BYTES

    def batches(self, log: CommitLog, start: int, end: int, cuts: Collection[int] = ()) -> Iterator[DispatchBatch]:
        """The range ``[start, end)`` as batches that also end at the records with the numbers in ``cuts``.

        They come as in a node: over the wire, with read-only rows.
        """
        walker = LogWalker(log, max_rows=4096, max_bytes=self.segment_bytes)
        stops = [self.offsets[number] for number in sorted(cuts) if start < self.offsets[number] < end]
        for stop in (*stops, end):
            while start < stop:
                frames = [bytes(frame) for frame in walker.walk(start, stop).to_frames()]
                batch = DispatchBatch.from_frames(frames, log)
                start = batch.end
                yield batch
        walker.release()

    def bounds(self, number: int) -> tuple[int, int]:
        """First offset of record ``number``, and where the next one starts (or a filler ends the segment)."""
        following = self.offsets[number + 1] if number + 1 < len(self.offsets) else self.end
        return self.offsets[number], following


def write_sample_log(folder: Path, extra: Record | None = None) -> SampleLog:
    """Write the log into ``folder``, some segments long; ``extra`` is one more record, put in the middle.

    Its content: several topics and queues, keys and tags of all widths of UTF-8, records without properties or body,
    records that wait for their delivery time, prepared and rolled-back transactions, both widths of hosts, a filler at
    each segment's end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock = [_BORN_MS]
    appender = CommitLogAppender(
        0,
        segment_bytes=SEGMENT_BYTES,
        open_segment=lambda base: _segment(folder, base),
        store_host=pack_host(_HOST),
        max_message_bytes=SEGMENT_BYTES // 2,
        properties_crc=True,
        clock=lambda: clock[0],
    )
    queue_offsets: dict[tuple[str, int], int] = {}
    offsets = []
    records = [_record(number) for number in range(RECORDS)]
    if extra is not None:
        records.insert(RECORDS // 2, extra)
    for number, record in enumerate(records):
        clock[0] = _BORN_MS + number * 1_700  # records of several minutes
        queue = (record.topic, record.queue_id)
        counted = record.sys_flag & 0xC not in (_PREPARED, _ROLLED_BACK)
        data = bytearray(encode_record(record, properties_crc=True))
        done = appender.append_record(
            data, queue_offsets.get(queue, 0) if counted else 0, 20 if record.born_host is _HOST_V6 else 8
        )
        queue_offsets[queue] = queue_offsets.get(queue, 0) + counted
        offsets.append(done.physical_offset)
    appender.close()
    return SampleLog(folder, tuple(offsets), appender.position)


def _record(number: int) -> Record:
    tag, keys = _TAGS[number % len(_TAGS)], _KEYS[number % len(_KEYS)]
    properties = {name: value for name, value in (("TAGS", tag), ("KEYS", keys)) if value}
    if number % 3:
        properties["UNIQ_KEY"] = f"7F0000010001{number:020X}"
    topic = TOPICS[number % 13 % len(TOPICS)]
    if topic == TOPICS[-1]:
        properties["DELAY"] = str(number % 18 + 1)
    return Record(
        topic,
        queue_id=number % 3,
        sys_flag=_TRANSACTIONS[number % 8] if topic != TOPICS[-1] else 0,
        flag=number,
        born_timestamp=_BORN_MS + number,
        reconsume_times=number % 2,
        properties=properties if number % 11 else {},
        body=bytes((number + at) % 256 for at in range(number * 37 % 900)),
        born_host=_HOST_V6 if number % 5 == 0 else _HOST,
        store_host=_HOST,
    )


def _segment(folder: Path, base: int) -> mmap.mmap | None:
    path = folder / segment_name(base)
    if not path.exists():
        path.write_bytes(bytes(SEGMENT_BYTES))
    return map_segment(path, SEGMENT_BYTES)
