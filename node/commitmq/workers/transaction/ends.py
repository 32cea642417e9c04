"""Ends transactions: the commit or rollback that a producer, its answer to a check or an operator asks for (spec 12.3).

The ends of one turn are carried out together, with the ack that their producers want: a commit waits for the device
unless all of the turn want the ack ``memory``. A committed message is appended first; the op message that says so may
come some seconds later, because the committed message itself names its half message. A rollback has no other trace than
its op message, so that is appended before the answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from commitmq import counting, failpoints
from commitmq.control import DispatcherWord, Word
from commitmq.coordination import requests
from commitmq.counting import CountTable
from commitmq.errors import CorruptRecordError, OffsetOutOfRangeError, ProtocolError
from commitmq.format.constants import MIN_RECORD_BYTES, PREBLANK_SIZE, PREPARED_OFFSET_OFFSET, Host, Property, SysFlag
from commitmq.format.record import Record, body_bytes_of, decode_record, encode_record
from commitmq.semantics import delay, timer
from commitmq.semantics.derived import broker_order, derived
from commitmq.semantics.transaction import (
    COMMIT,
    DISCARD_TOPIC,
    ROLLBACK,
    EndTransaction,
    OpBuffer,
    check_end,
    committed_record,
    integer,
    op_record,
    real_queue,
)
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker
from commitmq.store.log.run_check import CheckedRun
from commitmq.store.queues.queue_reader import QueueReader
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.run_mover import MovedRun, PutMessageResult, RunMover, is_of_message
from commitmq.workers.runtime.topic_view import TopicViews

PASSED: Final = 0
"""The half message was put back or given up: it is no open one any more, and its transaction did not end by it."""
ENDED: Final = -1
"""An op message names it, which does not tell a commit from a rollback."""
_MOST_PAST: Final = 20_000

_T = TypeVar("_T")
Key = tuple[str, str, str, str, int, int]


class HalfPosition(NamedTuple):
    """A half message: its offset in the half topic's queue, and its physical offset."""

    offset: int
    physical: int


def key_of(record: Record) -> Key:
    """What all records of one transaction share: half messages, put back or not, and the committed message."""
    properties = record.properties
    topic = properties.get(Property.REAL_TOPIC) or record.topic
    queue = properties.get(Property.REAL_QUEUE_ID) or str(record.queue_id)
    unique = properties.get(Property.UNIQUE_KEY, "")
    group = properties.get(Property.PRODUCER_GROUP, "")
    return topic, queue, group, unique, record.born_timestamp, record.body_crc


class TransactionTable:
    """What is known of the transactions behind the position in the half topic: which have ended, and where one is now.

    A half message that is checked goes back to the end of the half topic, so a transaction has several places. The newest one
    stands for it; an end may name any of them. The others are found by what all of them share: :func:`key_of`.

    The state of all transactions; offsets are those of the half topic's queue. ``ops`` wait for their op message.
    """

    def __init__(self, half_offset: int, op_offset: int, ops: OpBuffer) -> None:
        self.half_offset = half_offset
        self.op_offset = op_offset
        self.ops = ops
        self.has_rollback = False
        """Whether an op message with a rollback is to be written, which has no other trace in the log."""
        self.decided_before: set[int] = set()
        """Half messages below ``half_offset`` that op messages name."""
        self._ended: dict[int, int] = {}
        self._past: OrderedDict[int, int] = OrderedDict()
        self._past_by_key: OrderedDict[Key, int] = OrderedDict()
        """The ends of transactions that were put back: an end may name any of their places."""
        self._now_at: dict[Key, HalfPosition] = {}

    def outcome(self, half: Record) -> int | None:
        """COMMIT, ROLLBACK, ENDED or PASSED for the transaction of ``half``; None while it is open, or forgotten."""
        offset = half.queue_offset
        found = self._ended.get(offset, self._past.get(offset, PASSED))
        if found != PASSED:
            return found
        return self._past_by_key.get(key_of(half), self._ended.get(offset))

    def is_open(self, offset: int) -> bool:
        """Whether the half message at ``offset`` stands for a transaction without an end."""
        return offset >= self.half_offset and offset not in self._ended

    def open_below(self, end: int) -> int:
        """How many half messages below offset ``end`` stand for transactions without an end."""
        return max(0, end - self.half_offset - len(self._ended))

    def newest(self, half: Record) -> HalfPosition | None:
        """Where the transaction of ``half`` is now; None when it has ended, or was given up."""
        if self.is_open(half.queue_offset):
            return HalfPosition(half.queue_offset, half.physical_offset)
        place = self._now_at.get(key_of(half))
        return place if place is not None and self.is_open(place.offset) else None

    def put_back_from(self, offset: int) -> list[HalfPosition]:
        """Open half messages at or behind ``offset`` that were put back, in their order."""
        return sorted(one for one in self._now_at.values() if one.offset >= offset and self.is_open(one.offset))

    def note_end(self, half: Record, place: HalfPosition, decision: int) -> None:
        """The transaction of ``half``, now at ``place``, ended: an op message will say so."""
        self._ended[place.offset] = decision
        self.ops.add(place.offset)
        self.has_rollback |= decision == ROLLBACK
        key = key_of(half)
        if self._now_at.pop(key, None) is not None:
            _remember(self._past_by_key, key, decision)

    def note_known_end(self, offset: int) -> None:
        """An op message names ``offset``."""
        if offset < self.half_offset:
            self.decided_before.add(offset)
        else:
            self._ended.setdefault(offset, ENDED)

    def note_passed(self, offset: int, half: Record, renewed: HalfPosition | None) -> None:
        """The half message at ``offset`` was put back to ``renewed``, or given up (None)."""
        self._ended[offset] = PASSED
        if renewed is None:
            self._now_at.pop(key_of(half), None)
            _remember(self._past_by_key, key_of(half), PASSED)
        else:
            self._now_at[key_of(half)] = renewed

    def note_superseded(self, offset: int) -> None:
        """The half message at ``offset`` was put back or given up by an earlier process."""
        self._ended[offset] = PASSED

    def note_place(self, half: Record) -> None:
        """``half`` was put back by an earlier process, and stands for its transaction."""
        self._now_at[key_of(half)] = HalfPosition(half.queue_offset, half.physical_offset)

    def pass_to(self, half_offset: int, op_offset: int) -> None:
        """Half messages below ``half_offset`` and op messages below ``op_offset`` are dealt with."""
        for offset in range(self.half_offset, half_offset):
            decision = self._ended.pop(offset, None)
            if decision in (COMMIT, ROLLBACK):
                _remember(self._past, offset, decision)
        self.half_offset = max(self.half_offset, half_offset)
        self.op_offset = max(self.op_offset, op_offset)


def _remember(past: OrderedDict[_T, int], what: _T, decision: int) -> None:
    past[what] = decision
    if len(past) > _MOST_PAST:
        past.popitem(last=False)


@dataclass(slots=True)
class FoundEnds:
    """Finds in the log what became of half messages that no op message names: so a committed message is appended once.

    The op message of an end comes up to some seconds after the committed message. A process that dies in between leaves the
    committed message as the only trace. It names the place of its half message. One that was ended by an earlier place, before
    it went back to the half topic, is found by what the records share (:func:`commitmq.workers.transaction.ends.key_of`).

    Queue offsets of half messages.
    """

    committed: set[int] = field(default_factory=set)
    discarded: set[int] = field(default_factory=set)


def find_superseded(halves: Sequence[Record]) -> set[int]:
    """Which of ``halves``, in queue order, were put back: a later one is the same message, checked once more."""
    found: set[int] = set()
    open_at: dict[tuple[Key, int], list[int]] = {}
    for half in halves:
        key, times = key_of(half), check_times(half)
        former = open_at.get((key, times - 1))
        if times and former:
            found.add(former.pop(0))
        open_at.setdefault((key, times), []).append(half.queue_offset)
    return found


def find_ends(log: CommitLog, halves: Sequence[Record], end: int, beat: Callable[[], None]) -> FoundEnds:
    """What became of ``halves``. The log is read up to ``end``. ``beat`` is called now and then. Raises
    CorruptRecordError.
    """
    found = FoundEnds()
    if not halves:
        return found
    by_place = {half.physical_offset: half for half in halves}
    by_key = {key_of(half): half for half in halves if check_times(half)}
    by_times: dict[tuple[Key, int], list[int]] = {}
    for one in halves:
        by_times.setdefault((key_of(one), check_times(one)), []).append(one.queue_offset)
    walker = LogWalker(log, max_rows=65_536, max_bytes=16 << 20)
    at = min(by_place)
    while at < end:
        batch = walker.walk(at, end)
        discards = batch.topics.index(DISCARD_TOPIC) if DISCARD_TOPIC in batch.topics else -1
        flags = batch.rows["sys_flag"] & int(SysFlag.TRANSACTION_MASK)
        for row in np.flatnonzero(flags == int(SysFlag.TRANSACTION_COMMIT)).tolist():
            half = by_place.get(_prepared_offset(batch, row))
            if half is None and not by_key:
                continue
            record = decode_record(batch.record(row))
            key = key_of(record)
            if half is None or key_of(half) != key:
                half = by_key.get(key)
            if half is not None and record.prepared_transaction_offset <= half.physical_offset:
                found.committed.add(half.queue_offset)
        if discards >= 0:
            for row in np.flatnonzero(batch.rows["topic"] == discards).tolist():
                record = decode_record(batch.record(row))
                found.discarded.update(by_times.get((key_of(record), check_times(record)), ()))
        at = batch.end
        beat()
    walker.release()
    return found


def check_times(half: Record) -> int:
    """How often ``half`` was checked before it was stored."""
    return max(0, integer(half.properties.get(Property.TRANSACTION_CHECK_TIMES, "0")))


def _prepared_offset(batch: DispatchBatch, row: int) -> int:
    flags = int(batch.rows["sys_flag"][row])
    hosts = sum(20 if flags & wide else 8 for wide in (SysFlag.BORN_HOST_V6, SysFlag.STORE_HOST_V6))
    at = PREPARED_OFFSET_OFFSET + hosts
    return int.from_bytes(batch.record(row)[at : at + 8], "big", signed=True)


class TransactionCounts:
    """What the transaction process counts. Without ``metrics.enable`` none of this exists."""

    def __init__(self, table: CountTable) -> None:
        self._table = table
        self._open = table.count(counting.TRANSACTIONS_OPEN)

    @classmethod
    def of(cls, context: WorkerContext) -> TransactionCounts | None:
        table = context.counts
        return None if table is None else cls(table)

    def committed(self, half: Record) -> None:
        """The transaction of ``half`` was committed."""
        topic = self._ended(half, "commit")
        age_ms = time.time_ns() // 1_000_000 - half.born_timestamp
        self._table.histogram(counting.TRANSACTION_TIME, topic).observe(max(0, age_ms))

    def rolled_back(self, half: Record) -> None:
        """The transaction of ``half`` was rolled back."""
        self._ended(half, "rollback")

    def open(self, count: int) -> None:
        """So many transactions have no end."""
        self._open.set(count)

    def _ended(self, half: Record, outcome: str) -> str:
        topic = half.properties.get(Property.REAL_TOPIC) or half.topic
        self._table.count(counting.TRANSACTIONS_ENDED, topic, outcome).add()
        return topic


QUEUE: Final = 0
_HEAD_BYTES: Final = 8

Wanted = Callable[[int, memoryview], bool]


class HalfHead(NamedTuple):
    """A half message whose body was not read: ``record`` has none."""

    record: Record
    body_bytes: int


class HalfQueues:
    """Reads the half topic and the op topic: their one queue, and their records in the log. The queues as far as they
    are dispatched, and the log as far as it is committed.
    """

    def __init__(self, context: WorkerContext) -> None:
        config, layout = context.config, context.layout
        self._control = context.control
        self.log = CommitLog(layout.commit_log, config.commit_log.segment_bytes, config.commit_log.max_mapped_segments)
        self._expired = ExpiredSegments(context, self.log)
        self._reader = QueueReader(self.log, layout.consume_queue, config.consume_queue.file_bytes)

    def release(self) -> None:
        """Unmap what is to be deleted; call it in every turn."""
        self._expired.release()

    def bounds(self, topic: str) -> tuple[int, int]:
        """``(first offset, next offset)`` of a queue; zeros for one that has never had a message."""
        bound, floor = self._bounds()
        return self._reader.bounds(topic, QUEUE, bound=bound, floor=floor) or (0, 0)

    def records(self, topic: str, offset: int, count: int) -> tuple[int, list[Record]]:
        """``(offset behind, records)`` of up to ``count`` units from ``offset`` on. Units without a record are omitted."""
        behind, places = self._places(topic, offset, count)
        found = [record for _, place, _ in places if (record := self.record(place)) is not None]
        return behind, found

    def heads(self, topic: str, offset: int, count: int, wanted: Wanted) -> tuple[int, list[HalfHead]]:
        """As :meth:`records`, without bodies: a look at many half messages costs what their properties cost. ``wanted``
        is told a queue offset and the bytes of its record; only records that it wants are decoded.
        """
        behind, places = self._places(topic, offset, count)
        found = []
        for number, place, size in places:
            try:
                is_wanted = wanted(number, self.log.read(place, size))
            except OffsetOutOfRangeError:
                continue
            if is_wanted and (head := self.head(place)) is not None:
                found.append(head)
        return behind, found

    def record(self, place: int) -> Record | None:
        """The record at physical offset ``place``; None when none is there (any more)."""
        data = self._data(place)
        try:
            return None if data is None else decode_record(data, expected_physical_offset=place)
        except (CorruptRecordError, ValueError):
            return None

    def head(self, place: int) -> HalfHead | None:
        """As :meth:`record`, without the body."""
        data = self._data(place)
        try:
            if data is None:
                return None
            record = decode_record(data, with_body=False, expected_physical_offset=place)
        except (CorruptRecordError, ValueError):
            return None
        return HalfHead(record, body_bytes_of(data))

    def _places(self, topic: str, offset: int, count: int) -> tuple[int, list[tuple[int, int, int]]]:
        """``(offset behind, (queue offset, physical offset, size) of each unit that has a record)``."""
        bound, floor = self._bounds()
        at, units = self._reader.units(topic, QUEUE, offset, count, bound=bound, floor=floor)
        pairs = zip(units["physical_offset"].tolist(), units["size"].tolist(), strict=True)
        found = [
            (number, place, size)
            for number, (place, size) in enumerate(pairs, at)
            if size >= MIN_RECORD_BYTES and size != PREBLANK_SIZE
        ]
        return at + len(units), found

    def _data(self, place: int) -> memoryview | None:
        if not self._control.get(Word.MIN_OFFSET) <= place <= self._control.committed() - MIN_RECORD_BYTES:
            return None
        try:
            size = int.from_bytes(self.log.read(place, _HEAD_BYTES)[:4], "big")
            return self.log.read(place, size) if MIN_RECORD_BYTES <= size <= self.log.segment_bytes else None
        except (OffsetOutOfRangeError, ValueError):
            return None

    def _bounds(self) -> tuple[int, int]:
        return self._control.dispatcher(0, DispatcherWord.DISPATCHED), self._control.get(Word.MIN_OFFSET)

    def close(self) -> None:
        self._reader.close()


MOST_BYTES = 16 << 20
"""Of bodies that are appended together: they are copied several times on their way."""
_MOST_RUN_BYTES = 1 << 20
_CRC_DIGITS = 10
_LOOK_S = 0.05


@dataclass(slots=True)
class Append:
    """A record to append. Afterwards ``place`` is where it is, or ``code`` and ``sentence`` say why it is not stored;
    ``retry``: waiting may help.
    """

    record: Record
    place: HalfPosition | None = None
    code: str = ""
    sentence: str = ""
    retry: bool = False


@dataclass(slots=True)
class _Run:
    data: list[bytes]
    appends: list[Append]
    size: int = 0


class Appends:
    """Appends the records of this process through the writer, those of one queue together. The way to the writer."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        self.way = RunMover(context)
        self.host = Host(config.network.store_host, config.network.store_port)
        self._has_crc = config.commit_log.append_properties_crc
        self._run_bytes = min(_MOST_RUN_BYTES, config.commit_log.max_run_bytes)

    def writer_serves(self) -> bool:
        """Wait for the writer. False when this process shall stop first."""
        while not self._context.stopping:
            if self.way.writer_lives:
                return True
            self._context.wait(0)  # requests may wait in the meantime: they would end a longer wait at once
            time.sleep(_LOOK_S)
        return False

    @property
    def writer_lives(self) -> bool:
        return self.way.writer_lives

    def put(self, name: str, appends: Sequence[Append], ack: str = "flushed") -> None:
        """Append all, and wait for the acks. ``name`` is that of the failpoints. Raises WriterLost."""
        runs = self._runs(appends)
        if not runs:
            return
        if failpoints.ACTIVE:
            failpoints.hit(f"transaction.before_{name}")
        again: list[Append] = []
        for run, (moved, put) in zip(runs, self._sent(runs, ack), strict=True):
            if put.code and len(run.appends) > 1 and not put.retry:
                again += run.appends  # one of them is not as it should be: each for itself
            else:
                _note(run, moved, put)
        for one in again:
            for run in self._runs([one]):
                _note(run, *self._sent([run], ack)[0])
        if failpoints.ACTIVE:
            failpoints.hit(f"transaction.after_{name}")

    def _sent(self, runs: Sequence[_Run], ack: str) -> list[tuple[MovedRun, PutMessageResult]]:
        moved = []
        for run in runs:
            first = run.appends[0].record
            ends = np.cumsum([len(one) for one in run.data], dtype=np.int64)
            checked = CheckedRun(np.frombuffer(b"".join(run.data), np.uint8), ends, len(run.data), moved=True)
            moved.append(MovedRun(first.topic, first.queue_id, checked, ":" in first.born_host.ip))
        return list(zip(moved, self.way.put(moved, ack), strict=True))

    def _runs(self, appends: Sequence[Append]) -> list[_Run]:
        open_runs: dict[tuple[str, int, bool], _Run] = {}
        runs: list[_Run] = []
        for one in appends:
            try:
                data = self._encoded(one.record)
            except Exception as error:
                if not is_of_message(error):
                    raise
                one.code, one.sentence = "MESSAGE_ILLEGAL", str(error) or repr(error)
                continue
            key = one.record.topic, one.record.queue_id, ":" in one.record.born_host.ip
            run = open_runs.get(key)
            if run is None or run.size + len(data) > self._run_bytes:
                run = open_runs[key] = _Run([], [])
                runs.append(run)
            run.data.append(data)
            run.appends.append(one)
            run.size += len(data)
        return runs

    def _encoded(self, record: Record) -> bytes:
        properties = record.properties
        if self._has_crc:  # the writer fills it in
            properties = {**properties, Property.CRC32: "0" * _CRC_DIGITS}
        return encode_record(replace(record, store_host=self.host, properties=properties), buckets=None)

    def close(self) -> None:
        self.way.close()


def _note(run: _Run, moved: MovedRun, put: PutMessageResult) -> None:
    places = [] if put.code else put.places(moved.run)
    for index, one in enumerate(run.appends):
        if put.code:
            one.code, one.sentence, one.retry = put.code, put.sentence, put.retry
        else:
            one.code = ""
            one.place = HalfPosition(*places[index]) if index < len(places) else HalfPosition(-1, -1)


DECISIONS: Final = {"commit": int(COMMIT), "rollback": int(ROLLBACK)}
NAMES: Final = {value: name for name, value in DECISIONS.items()}
_MOST: Final = (1 << 63) - 1
_RETRY_MS: Final = 200


class EndedError(ProtocolError):
    """The transaction has another end already. ``decision`` is that end, None when it is not known any more."""

    def __init__(self, why: str, decision: str | None) -> None:
        super().__init__("TRANSACTION_ENDED", f"the transaction cannot be ended again: {why}")
        self._decision = decision

    @property
    def more(self) -> dict[str, Any]:
        return {**super().more, "decision": self._decision}


@dataclass(slots=True)
class End:
    """A request to end a transaction, and afterwards its answer: fields, or an error."""

    request: EndTransaction
    by_person: bool
    ack: str
    fields: dict[str, Any] | None = None
    error: ProtocolError | None = None

    @property
    def is_answered(self) -> bool:
        return self.fields is not None or self.error is not None


def parse_end(header: dict[str, Any]) -> End:
    """The request of a header. Raises ProtocolError."""
    decision = header.get("decision")
    if decision not in DECISIONS:
        raise requests.refuse("decision", "commit or rollback", decision)
    ack = header.get("ack", "flushed")
    if ack not in ("memory", "flushed"):
        raise requests.refuse("ack", "memory or flushed", ack)
    by_person = requests.flag(header, "by_person")
    group = "" if by_person else requests.text(header, "group")
    return End(
        EndTransaction(
            group,
            requests.integer(header, "queue_offset", 0, _MOST),
            requests.integer(header, "physical_offset", 0, _MOST),
            DECISIONS[decision],
            requests.flag(header, "from_check"),
            requests.text(header, "topic") if header.get("topic") is not None else "",
        ),
        by_person,
        ack,
    )


@dataclass(slots=True)
class _PendingCommit:
    """A commit of this turn: its half message, where its transaction is now, and who asked."""

    half: Record
    place: HalfPosition
    append: Append
    asked: list[End]


class Ends:
    """Carries ends out. ``transactions`` is set by the owner when it has resumed."""

    transactions: TransactionTable

    def __init__(self, queues: HalfQueues, appends: Appends, topics: TopicViews, timeout_ms: int) -> None:
        self._queues, self._appends, self._topics = queues, appends, topics
        self._timeout_ms = timeout_ms
        self.committed = self.rolled_back = 0
        self.unflushed = 0
        """Commits whose ack did not wait for the device lie below this position of the log."""
        self.counts: TransactionCounts | None = None

    def carry_out(self, ends: Sequence[End], now_ms: int) -> None:
        """End the transactions; afterwards each of ``ends`` has its answer. Raises WriterLost: then the same call comes
        again, after a look into the log.
        """
        wanted: dict[int, _PendingCommit] = {}
        size = 0
        for end in ends:
            if size >= MOST_BYTES:
                self._commit(wanted)
                size = 0
            try:
                size += self._begin(end, now_ms, wanted)
            except ProtocolError as error:
                end.error = error
            except Exception as error:
                if not is_of_message(error):
                    raise
                end.error = ProtocolError("SYSTEM_ERROR", str(error) or repr(error))
        self._commit(wanted)
        failed = self.write_ops(now_ms) if self.transactions.has_rollback else None
        for end in ends:
            if end.is_answered:
                continue
            if failed is None:  # a rollback, now in the log
                end.fields = {"decision": NAMES[end.request.decision]}
            else:
                end.error = ProtocolError(failed.code, failed.sentence, retry_after_ms=_RETRY_MS)

    def _commit(self, wanted: dict[int, _PendingCommit]) -> None:
        """Append and settle the commits of ``wanted``, which is empty afterwards. Raises WriterLost."""
        if wanted:
            waits = any(end.ack != "memory" for one in wanted.values() for end in one.asked)
            self._appends.put("commit", [one.append for one in wanted.values()], "flushed" if waits else "memory")
            if not waits:
                ends = (one.append.place.physical + 1 for one in wanted.values() if one.append.place is not None)
                self.unflushed = max(self.unflushed, *ends, 0)
        for one in wanted.values():
            self._settle(one)
        wanted.clear()

    def write_ops(self, now_ms: int) -> Append | None:
        """Append the op messages of all ends so far; returns the one that was refused. Raises WriterLost."""
        buffer = self.transactions.ops
        while taken := buffer.take(monotonic_ms()):
            append = Append(op_record(taken, 0, now_ms, self._appends.host))
            self._appends.put("op", [append])
            if append.place is None:
                for offset in taken:
                    buffer.add(offset)  # later, with the next ones
                return append
        self.transactions.has_rollback = False
        return None

    def is_gone(self, half: Record, place: HalfPosition) -> bool:
        """Whether the real topic of ``half`` was deleted since: then its transaction has ended with its topic."""
        return self._topics.tombstone(half.properties.get(Property.REAL_TOPIC, "")) > place.physical

    def _begin(self, end: End, now_ms: int, wanted: dict[int, _PendingCommit]) -> int:
        """Judge one end: answer it, note a rollback, or add it to ``wanted``; returns the bytes of its body then.
        Raises ProtocolError, InvalidMessageError.
        """
        request = end.request
        half = self._queues.record(request.physical_offset)
        if end.by_person and half is not None:
            group = half.properties.get(Property.PRODUCER_GROUP, "")
            request = request._replace(producer_group=group, from_check=True)
        refusal = check_end(request, half, now_ms, self._timeout_ms)
        if refusal is not None:
            raise ProtocolError(refusal.code, refusal.remark)
        assert half is not None
        place = self.transactions.newest(half)
        if place is None:
            self._answer_ended(end, half)
            return 0
        former = wanted.get(place.offset)
        if former is not None:
            if request.decision != COMMIT:
                raise EndedError("it is being committed", "commit")
            former.asked.append(end)
            return 0
        if self.is_gone(half, place):
            self.transactions.note_end(half, place, int(ROLLBACK))
            raise ProtocolError(
                "TOPIC_NOT_EXIST",
                f"topic {half.properties[Property.REAL_TOPIC]!r} was deleted; the transaction is rolled back",
            )
        if request.decision == ROLLBACK:
            self.transactions.note_end(half, place, int(ROLLBACK))
            self.rolled_back += 1
            if self.counts is not None:
                self.counts.rolled_back(half)
            return 0
        real_queue(half)
        wanted[place.offset] = _PendingCommit(half, place, Append(placed_commit(half)), [end])
        return len(half.body)

    def _answer_ended(self, end: End, half: Record) -> None:
        """The transaction has ended before, or was given up. The same end again is in order."""
        outcome = self.transactions.outcome(half)
        known = NAMES.get(outcome) if outcome is not None else None
        if known is not None and outcome == end.request.decision:
            if outcome == ROLLBACK and self.transactions.has_rollback:
                return  # it is answered when its op message is in the log
            end.fields = {"decision": known, "before": True}
            return
        what = "was given up" if outcome == PASSED else f"has ended ({known})" if known else "has ended"
        raise EndedError(f"it {what}", known)

    def _settle(self, one: _PendingCommit) -> None:
        """Note and answer a commit whose append has come to its end."""
        append = one.append
        if append.place is None:
            error = ProtocolError(append.code, append.sentence, retry_after_ms=_RETRY_MS if append.retry else None)
            for end in one.asked:
                end.error = error
            return
        self.transactions.note_end(one.half, one.place, int(COMMIT))
        self.committed += 1
        if self.counts is not None:
            self.counts.committed(one.half)
        topic, queue = real_queue(one.half)
        fields: dict[str, Any] = {
            "decision": "commit",
            "topic": topic,
            "queue": queue,
            "queue_offset": append.place.offset,
            "physical_offset": append.place.physical,
        }
        if append.record.topic != topic:
            fields["stored_topic"] = append.record.topic
        for end in one.asked:
            end.fields = fields


def _timed_commit(half: Record) -> Record | None:
    """The record in the timer topic of a committed ``half`` that asks for a time of delivery to come (spec 12.2)."""
    if not timer.asks_for_timer(half.properties.get(Property.REAL_TOPIC, ""), half.properties):
        return None
    try:
        # Its time was checked when the half message came; it does not become too far away by waiting.
        return timer.timer_request(
            committed_record(half, rewritten=True), time.time_ns() // 1_000_000, timer.TimerRules(max_delay_s=1 << 40)
        )
    except timer.TimerRefusedError:
        return None  # the node refuses such a half message; RocketMQ may have left one


def placed_commit(half: Record) -> Record:
    """The record that a committed ``half`` is stored as: in its real queue, or where it waits (spec 12.3). A delay
    level wins over requests for a time, which are then not stored (spec 12.2).
    """
    try:
        level = delay.parse_level(half.properties.get(Property.DELAY, "0"))
    except ValueError:
        level = 0  # the node refuses such a half message; RocketMQ may have left one
    if not level:
        return _timed_commit(half) or committed_record(half)
    record = committed_record(half, rewritten=True)
    properties = {
        **{name: value for name, value in record.properties.items() if name not in timer.REQUESTS},
        Property.DELAY: str(level),
        Property.REAL_TOPIC: record.topic,
        Property.REAL_QUEUE_ID: str(record.queue_id),
    }
    return derived(
        record,
        delay.SCHEDULE_TOPIC,
        delay.queue_of(level),
        broker_order(properties),
        prepared_transaction_offset=half.physical_offset,
    )
