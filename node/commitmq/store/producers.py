"""``commitmq/producers``: a snapshot of the table of idempotent producers at a place of the log.

    0    magic and version     8 bytes
    8    position i8           physical offset up to which the table covers the log; a record's boundary
    16   length i8             bytes of the table
    24   crc u4                CRC-32 of the 24 bytes above and of the table
    28   the table             see ProducerTable.to_bytes

This file and the records behind ``position`` give the table of any later moment, so a start need not read the whole
log. Two rules make it right after any crash:

* It is written only once everything below ``position`` is flushed. So it never covers a record that a power cut could
  take away; a recovery never cuts flushed records. If it did after all (an operator repaired the log), the log shows
  it: it ends below ``position``, has no record that ends there, or not the newest record that the table knows. Then the
  table is made from the whole log, which takes long but is right.
* The recovery that takes a store over, RocketMQ's or a new one, makes the first snapshot, of no producers at the log's
  end. A store was taken over when it has ``commitmq/store.json``, which is written after that. If the snapshot is
  missing afterwards, or is damaged, there may be producers, and the whole log is read.

It is written to a new file, synced and renamed: a complete one always exists.

The table of idempotent producers: which of their messages are stored, so that a retried one is not stored again.

A producer numbers its messages in each queue: the message's *sequence*, from 0 on in each of the producer's *epochs*.
The table holds, for each producer, its epoch, and for each of its queues the next sequence and the places of the
messages stored last (the *window*). The writer owns it, asks it before it stores (:meth:`ProducerTable.judge`) and
tells it afterwards (:meth:`ProducerTable.note`).

Invariants
    * A sequence of a producer's epoch is stored in a queue at most once, as long as the producer is remembered;
      sequences of one producer and queue are in the log in their order.
    * A message is stored only as the next of its queue: nothing is skipped, so "all below ``next`` are stored" is all
      that must be remembered. Messages that a producer gave up are a gap that it must close (use the numbers again) or
      leave behind with a new epoch.
    * Only a higher epoch replaces an epoch; the lower one is refused from then on, in all queues.
    * The table is a function of the log: each record carries its mark (:mod:`commitmq.format.producer_mark`), so the
      table at a place of the log and the records behind it give the table of every later moment. In that replay the log
      is always right: a record that does not follow the known state (its producer had been forgotten when it was
      stored) restarts its producer or queue.
    * The window is a hint where to look, never the proof that something is stored: ``next`` is the proof.

Failure cases
    The writer dies before the first record of a run is complete: nothing is stored, its successor's table does not know
    the run, and the retried run is stored. Between the parts of a run that met a segment's end: the successor knows the
    first part, and stores the rest when the run is retried. After the append, before the answer: the successor knows
    all of the run, and answers the retry with the places it finds. The node dies with the page cache, and recovery cuts
    unflushed records: the table is derived from the remaining log, so lost messages may be stored again; a producer
    whose acknowledged (``memory``) messages are lost is told OUT_OF_ORDER_SEQUENCE, because its next number no longer
    follows. Two attempts send the same numbers at once: the first to arrive stores each message, and the other is
    answered with it.

    The table *forgets* a producer that has sent nothing for ``expiry_ms``. When ``max_entries`` (one for each producer
    and queue) are used up, it forgets the producer that has sent nothing for the longest time. A later retry cannot be
    recognised: its sequence 0 would be stored again, and any other is refused as UNKNOWN_PRODUCER_ID, because it is
    unknown whether it is stored. The same applies to a deleted topic. As a replay may begin before a producer was
    forgotten, a restarted node may remember more than before, never less.

Bound of memory: about 500 bytes for each of ``max_entries``, and 40 for each place in its window.

Replays the log into the table of idempotent producers, and finds a producer's stored messages in the log.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError, StoreError
from commitmq.files import atomic_file
from commitmq.format.producer_mark import MAX_SEQUENCE
from commitmq.kernels.codes import MARK_EPOCH, MARK_FOLLOWS, MARK_ID_SIZE, MARK_ID_START, MARK_SEQUENCE
from commitmq.kernels.compiled import find_marks
from commitmq.store.layout import StoreLayout
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker

_MAGIC: Final = b"CMQPRD01"
_HEAD: Final = struct.Struct(">8sqq")
_CRC: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class ProducerSnapshot:
    """The file's content. ``table`` is the result of ProducerTable.to_bytes."""

    position: int
    table: bytes

    @classmethod
    def load(cls, path: Path) -> ProducerSnapshot | None:
        """The content of ``path``; None without a file. Raises StoreError when it is damaged."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise StoreError("a folder is in the place of the snapshot of producers", path=path) from error
        start = _HEAD.size + _CRC.size
        if len(data) < start or data[:8] != _MAGIC:
            raise StoreError("this is no snapshot of producers", path=path, offset=0)
        _, position, length = _HEAD.unpack_from(data)
        table = data[start:]
        if len(table) != length or zlib.crc32(table, zlib.crc32(data[: _HEAD.size])) != _CRC.unpack_from(data, 24)[0]:
            raise StoreError("the snapshot of producers is damaged", path=path, offset=24)
        return cls(position, table)

    def save(self, path: Path) -> None:
        """Replace the file, durably. Raises OSError; then the old one is still there."""
        head = _HEAD.pack(_MAGIC, self.position, len(self.table))
        data = head + _CRC.pack(zlib.crc32(self.table, zlib.crc32(head))) + self.table
        atomic_file.make_way(path)
        atomic_file.replace(path, data, "producers")


def may_have_producers(layout: StoreLayout) -> bool:
    """Whether a node has ever served the store: if so, a missing snapshot was lost."""
    return layout.producers.exists() or layout.store_file.exists()


PRODUCER_FENCED: Final = "PRODUCER_FENCED"
OUT_OF_ORDER: Final = "OUT_OF_ORDER_SEQUENCE"
UNKNOWN_PRODUCER: Final = "UNKNOWN_PRODUCER_ID"
LIMIT_EXCEEDED: Final = "LIMIT_EXCEEDED"

_FIELDS: Final = 5
# Adjacent records in the log become one place of at most this many records. So the window of a producer of single
# messages covers as much as one of runs; a larger limit would make finding a record inside a place slow.
_MERGED_RECORDS: Final = 1024
# A replay does not see where runs began; it must not make the window smaller than the runs did.
_REPLAYED_RECORDS: Final = 32_768


class BatchMetadata(NamedTuple):
    """Records of one producer and queue that are adjacent both in their queue and in the log. ``end`` is the physical
    offset behind the last.
    """

    sequence: int
    records: int
    queue_offset: int
    physical_offset: int
    end: int


class SequenceRefusedError(Exception):
    """The messages are not the next ones to store; nothing was stored. ``code`` is for the answer."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


@dataclass(slots=True)
class ProducerStateEntry:
    """A producer in one queue: the next sequence, the places stored last (flat, see BatchMetadata), the end of the newest."""

    next: int
    places: array[int]
    end: int


class IdempotentProducer:
    """One producer: ``queues`` by (topic, queue), ``used_ms`` the store time of its newest record."""

    __slots__ = ("epoch", "queues", "used_ms")

    def __init__(self, epoch: int, used_ms: int) -> None:
        self.epoch = epoch
        self.used_ms = used_ms
        self.queues: dict[tuple[str, int], ProducerStateEntry] = {}


class ProducerTable:
    """The table of idempotent producers, and its snapshot. Not thread-safe."""

    def __init__(self, *, max_entries: int, window: int, expiry_ms: int) -> None:
        """``window``: places remembered for each entry."""
        self.max_entries = max_entries
        self.window = window
        self.expiry_ms = expiry_ms
        self.forgotten = 0  # producers so far, for lack of room or by age
        self._producers: OrderedDict[str, IdempotentProducer] = OrderedDict()  # the most recently heard one at the end
        self._entries = 0

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def entries(self) -> int:
        """Number of pairs of a producer and a queue."""
        return self._entries

    # ------------------------------------------------------------ asking

    def judge(self, producer_id: str, epoch: int, topic: str, queue: int, sequence: int, count: int) -> int:
        """How many of ``count`` messages from ``sequence`` on are already stored; the others are next in order. Raises
        SequenceRefusedError. Changes nothing.
        """
        producer = self._producers.get(producer_id)
        entry = None
        if producer is not None:
            if epoch < producer.epoch:
                raise SequenceRefusedError(
                    PRODUCER_FENCED,
                    f"producer {producer_id!r} has epoch {producer.epoch} now; this one has {epoch}",
                )
            if epoch == producer.epoch:
                entry = producer.queues.get((topic, queue))
        following = 0 if entry is None else entry.next
        if sequence > following:
            if entry is None and (producer is None or epoch == producer.epoch):
                raise SequenceRefusedError(
                    UNKNOWN_PRODUCER,
                    f"the node knows nothing (any more) of what producer {producer_id!r} sent to queue {queue} of {topic!r},"
                    f" so it cannot tell whether sequence {sequence} is the next",
                )
            raise SequenceRefusedError(
                OUT_OF_ORDER,
                f"producer {producer_id!r} sent sequence {sequence} to queue {queue} of {topic!r}, the next is {following}",
            )
        if sequence + count - 1 > MAX_SEQUENCE:
            raise SequenceRefusedError(
                OUT_OF_ORDER, f"sequences end at {MAX_SEQUENCE}; producer {producer_id!r} must begin a new epoch"
            )
        if entry is None and self._entries >= self.max_entries and self._only(producer):
            raise SequenceRefusedError(
                LIMIT_EXCEEDED,
                f"producer {producer_id!r} sends to {self._entries} queues, producers.max_entries allows no more",
            )
        return min(count, following - sequence)

    def places(self, producer_id: str, topic: str, queue: int) -> list[BatchMetadata]:
        """The remembered places of this producer's epoch in a queue, in their order."""
        producer = self._producers.get(producer_id)
        entry = None if producer is None else producer.queues.get((topic, queue))
        return [] if entry is None else list(_places(entry.places))

    def end(self, producer_id: str, topic: str, queue: int) -> int:
        """Physical offset behind the newest record of this producer in a queue; 0 when none is known."""
        producer = self._producers.get(producer_id)
        entry = None if producer is None else producer.queues.get((topic, queue))
        return 0 if entry is None else entry.end

    # ------------------------------------------------------------ changing

    def note(self, producer_id: str, epoch: int, topic: str, queue: int, place: BatchMetadata, used_ms: int) -> None:
        """Records were stored. Records that :meth:`judge` would have refused (in a replay) restart the state from them."""
        self._note(producer_id, epoch, topic, queue, place, used_ms, _MERGED_RECORDS)

    def replay(self, producer_id: str, epoch: int, topic: str, queue: int, place: BatchMetadata, used_ms: int) -> None:
        """Like :meth:`note`, for records found in the log."""
        self._note(producer_id, epoch, topic, queue, place, used_ms, _REPLAYED_RECORDS)

    def _note(
        self, producer_id: str, epoch: int, topic: str, queue: int, place: BatchMetadata, used_ms: int, merged: int
    ) -> None:
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = IdempotentProducer(epoch, used_ms)
        elif producer.epoch != epoch:
            self._entries -= len(producer.queues)
            producer.queues.clear()
            producer.epoch = epoch
        self._producers.move_to_end(producer_id)
        producer.used_ms = used_ms
        entry = producer.queues.get((topic, queue))
        if entry is None:
            entry = producer.queues[topic, queue] = ProducerStateEntry(place.sequence, array("q"), 0)
            self._entries += 1
            if self._entries > self.max_entries:
                self._make_room(producer)
        elif entry.next != place.sequence:
            del entry.places[:]
        places = entry.places
        if places and places[-1] == place.physical_offset:
            last = len(places) - _FIELDS
            if (
                places[last + 1] + place.records <= merged
                and places[last + 2] + places[last + 1] == place.queue_offset
                and places[last] + places[last + 1] == place.sequence
            ):
                places[last + 1] += place.records
                places[last + 4] = place.end
                entry.next = place.sequence + place.records
                entry.end = place.end
                return
        places.extend(place)
        if len(places) > _FIELDS * self.window:
            del places[:_FIELDS]
        entry.next = place.sequence + place.records
        entry.end = place.end

    def forget_topic(self, topic: str, below: int) -> None:
        """A topic was deleted: forget its records below physical offset ``below``."""
        for producer in self._producers.values():
            for key in [key for key, entry in producer.queues.items() if key[0] == topic and entry.end <= below]:
                del producer.queues[key]
                self._entries -= 1

    def expire(self, now_ms: int) -> int:
        """Forget producers that have sent nothing for ``expiry_ms``; returns how many."""
        count = 0
        for name, producer in list(self._producers.items()):
            if producer.used_ms >= now_ms - self.expiry_ms:
                break  # they are in the order of their first messages
            self._forget(name)
            count += 1
        return count

    def _only(self, producer: IdempotentProducer | None) -> bool:
        return producer is not None and len(self._producers) == 1

    def _make_room(self, keep: IdempotentProducer) -> None:
        for name, producer in list(self._producers.items()):
            if self._entries <= self.max_entries:
                return
            if producer is not keep:
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._entries -= len(self._producers.pop(name).queues)
        self.forgotten += 1

    # ------------------------------------------------------------ as bytes

    def to_bytes(self) -> bytes:
        """The whole table: a line of JSON with names and numbers, then the windows as 8-byte integers."""
        producers: list[Any] = []
        windows = []
        for name, producer in self._producers.items():
            queues = []
            for (topic, queue), entry in producer.queues.items():
                queues.append((topic, queue, entry.next, entry.end, len(entry.places)))
                windows.append(entry.places.tobytes())
            producers.append((name, producer.epoch, producer.used_ms, queues))
        return orjson.dumps(producers) + b"\n" + b"".join(windows)

    def load_bytes(self, data: bytes | memoryview, deleted: Mapping[str, int]) -> None:
        """Restore the result of :meth:`to_bytes` into an empty table. Raises StoreError when it is anything else.
        ``deleted``: the physical offset below which a topic's records no longer count.
        """
        try:
            head, _, rest = bytes(data).partition(b"\n")
            numbers = array("q")
            numbers.frombytes(rest)
            at = 0
            for name, epoch, used_ms, queues in orjson.loads(head):
                producer = self._producers[name] = IdempotentProducer(epoch, used_ms)
                for topic, queue, following, end, size in queues:
                    places = numbers[at : at + size]
                    if len(places) != size or size % _FIELDS:
                        raise ValueError("the windows are too short")
                    at += size
                    if end > deleted.get(topic, 0):
                        producer.queues[topic, queue] = ProducerStateEntry(
                            following, places[-_FIELDS * self.window :], end
                        )
                        self._entries += 1
            if at != len(numbers):
                raise ValueError("the windows are too long")
        except (ValueError, TypeError) as error:
            raise StoreError(f"this is no table of producers: {error}") from error
        if self._producers:
            self._make_room(next(reversed(self._producers.values())))

    def newest(self) -> tuple[str, int, str, int, int, BatchMetadata] | None:
        """(producer, epoch, topic, queue, last sequence, its place) of the record farthest on in the log."""
        best: tuple[str, int, str, int, int, BatchMetadata] | None = None
        for name, producer in self._producers.items():
            for (topic, queue), entry in producer.queues.items():
                if entry.places and (best is None or entry.end > best[5].end):
                    last = BatchMetadata(*entry.places[-_FIELDS:])
                    best = (name, producer.epoch, topic, queue, entry.next - 1, last)
        return best


def _places(numbers: array[int]) -> Iterator[BatchMetadata]:
    for at in range(0, len(numbers), _FIELDS):
        yield BatchMetadata(*numbers[at : at + _FIELDS])


StoredRecord = tuple[int, int, int, str]
"""Queue offset, physical offset, store timestamp (ms) and unique id of a stored message."""

UNKNOWN: Final[StoredRecord] = (-1, -1, -1, "")
"""The message is stored, but its place is not remembered."""

_Marks = np.ndarray[Any, np.dtype[np.int64]]
_WALK_ROWS: Final = 16_384


def marks_of(batch: DispatchBatch) -> tuple[_Marks, memoryview] | None:
    """The marks of ``batch``'s records, a row each (MARK_*), and the segment they point into; None if none."""
    rows = batch.rows
    if not len(rows) or batch.log is None:
        return None
    segment_bytes = batch.log.segment_bytes
    base = int(rows["physical_offset"][0]) // segment_bytes * segment_bytes
    segment = batch.log.read(base, segment_bytes)
    properties = np.ascontiguousarray(rows["physical_offset"] - base + rows["properties_start"], np.int64)
    marks = np.empty((len(rows), 5), np.int64)
    sizes = np.ascontiguousarray(rows["properties_size"], np.int64)
    if not find_marks(np.frombuffer(segment, np.uint8), properties, sizes, marks):
        return None
    return marks, segment


def replay(table: ProducerTable, batch: DispatchBatch, deleted: Mapping[str, int]) -> None:
    """Enter every record of ``batch`` with a producer's mark into ``table``; the batch must have its log attached.
    ``deleted``: the physical offset below which a topic's records no longer count.
    """
    found = marks_of(batch)
    if found is None:
        return
    marks, segment = found
    rows = batch.rows
    offsets, sizes = rows["physical_offset"], rows["size"].astype(np.int64)
    joined = marks[:, MARK_FOLLOWS] == 1
    joined[1:] &= (
        (rows["topic"][1:] == rows["topic"][:-1])
        & (rows["queue_id"][1:] == rows["queue_id"][:-1])
        & (rows["queue_offset"][1:] == rows["queue_offset"][:-1] + 1)
        & (offsets[1:] == offsets[:-1] + sizes[:-1])
    )
    starts = np.flatnonzero((marks[:, MARK_SEQUENCE] >= 0) & ~joined)
    # A stretch continues as long as each record joins the one before.
    breaks = np.append(np.flatnonzero(~joined), len(rows))
    stops = breaks[np.searchsorted(breaks, starts, side="right")]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        row, last = rows[start], rows[stop - 1]
        topic = batch.topics[int(row["topic"])]
        if int(row["physical_offset"]) < deleted.get(topic, 0):
            continue
        at, size = int(marks[start, MARK_ID_START]), int(marks[start, MARK_ID_SIZE])
        place = BatchMetadata(
            int(marks[start, MARK_SEQUENCE]),
            stop - start,
            int(row["queue_offset"]),
            int(row["physical_offset"]),
            int(last["physical_offset"]) + int(last["size"]),
        )
        name = bytes(segment[at : at + size]).decode("utf-8", "replace")
        stamp = int(last["store_timestamp"])
        table.replay(name, int(marks[start, MARK_EPOCH]), topic, int(row["queue_id"]), place, stamp)


def find_stored(
    log: CommitLog, places: Iterable[BatchMetadata], producer_id: str, epoch: int, sequence: int, count: int
) -> list[StoredRecord]:
    """The places of ``count`` messages from ``sequence`` on, read from the log; ``places`` say where to look.

    :data:`UNKNOWN` for messages that no place covers, or that expired in the meantime. Each found record's mark is
    compared.
    """
    stored = [UNKNOWN] * count
    name = producer_id.encode()
    for place in places:
        first, stop = max(place.sequence, sequence), min(place.sequence + place.records, sequence + count)
        if first >= stop:
            continue
        walker = LogWalker(log, max_rows=_WALK_ROWS, max_bytes=log.segment_bytes)
        at = place.physical_offset
        try:
            while at < place.end:
                batch = walker.walk(at, place.end)
                found = marks_of(batch)
                if found is None:
                    break
                marks, segment = found
                wanted = (
                    (marks[:, MARK_SEQUENCE] >= first)
                    & (marks[:, MARK_SEQUENCE] < stop)
                    & (marks[:, MARK_EPOCH] == epoch)
                )
                for index in np.flatnonzero(wanted).tolist():
                    start, size = int(marks[index, MARK_ID_START]), int(marks[index, MARK_ID_SIZE])
                    if bytes(segment[start : start + size]) != name:
                        continue
                    row = batch.rows[index]
                    stored[int(marks[index, MARK_SEQUENCE]) - sequence] = (
                        int(row["queue_offset"]),
                        int(row["physical_offset"]),
                        int(row["store_timestamp"]),
                        batch.text(index, "uniq"),
                    )
                at = batch.end
        except (OffsetOutOfRangeError, CorruptRecordError):
            continue  # expired since, or another record than remembered: that it is stored is known all the same
        finally:
            walker.release()
    return stored
