"""Handles one ``send``, ``append`` or ``batch`` in the writer: has it checked, appends, has the answer made.

Uses no socket, only the frames' metadata; workers.writer.process has the loop around it. The checks of topic and fields
are in :mod:`commitmq.workers.writer.put_rules`, those of the payload here. All of them come before the first byte is
stored, so a refused request has ``outcome`` not_stored. :mod:`commitmq.workers.writer.send_answers` makes the answers.

Appends to the log, and waits a moment for what an append needs: the next segment, or a buffer of the pool.

Reads one record of the log that a request names.

The operation ``send_back``: a copy of a message that a consumer could not handle goes to its group's retry topic, through
a delay level, or to its dead letters (spec 12.4).

The consumer names the message by its place, and the copy is made from the log: a client can neither forge nor lose a part
of it. The rules are in :mod:`commitmq.semantics.retry`. A try that does not fit becomes a dead letter, and a message of which
not even that fits is set aside (:mod:`commitmq.semantics.derived`): a group is never held up.

The operation ``recall``: a cancellation of a message that waits for its time (spec 12.2, 18; remoting 3.8).

It is a timer message itself, which is due in the slot of the other one. The client names that one by its place in the log,
or by RocketMQ's recall handle. The rules are in :mod:`commitmq.semantics.timer`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final, NamedTuple

import numpy as np
import zmq

from commitmq import counting, failpoints
from commitmq.control import DiskFlag, Word
from commitmq.counting import Count, CountTable, Histogram
from commitmq.errors import CommitMQError, CorruptRecordError, InvalidMessageError, OffsetOutOfRangeError, StoreError
from commitmq.files import disk
from commitmq.format.constants import MIN_RECORD_BYTES, WAITING_TOPICS, Host, Property, SysFlag
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import unpack_host
from commitmq.format.producer_mark import mark_of
from commitmq.format.record import Record, decode_record, encode_record, peek
from commitmq.network.gate import Gate
from commitmq.network.guard import Guard
from commitmq.network.router import Router
from commitmq.protocol import wire
from commitmq.security.audit import Event
from commitmq.semantics import delay
from commitmq.semantics.derived import first_that_fits
from commitmq.semantics.retry import (
    DEFAULT_MAX_RETRIES,
    TO_DEAD_LETTERS,
    SentBack,
    copies,
    dead_letter_topic,
    is_last_try,
    retry_topic,
)
from commitmq.semantics.timer import (
    CANCEL_MARGIN_MS,
    TIMER_TOPIC,
    RecallHandle,
    TimerRefusedError,
    TimerRules,
    recall_handle,
    recall_record,
    timer_request,
)
from commitmq.store.log.append import Appended, CommitLogAppender, PoolFullError, SegmentUnavailableError
from commitmq.store.log.run_check import SPECIAL_PROPERTIES, CheckedRun, MessageIllegalError
from commitmq.store.metadata.topic_config import validate_group
from commitmq.store.producers import SequenceRefusedError
from commitmq.workers.runtime.context import Refusals, WorkerContext, monotonic_ms
from commitmq.workers.runtime.flow import Flow, FlowRefusedError
from commitmq.workers.runtime.set_aside import SetAside
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.local_sockets import Frames, Payload, Peer
from commitmq.workers.writer.producers import ProducerStateManager, ProducersUnusableError, SequenceFields, numbered
from commitmq.workers.writer.put_rules import (
    FORBIDDEN,
    FurtherQueues,
    PlacedRun,
    PutRefusal,
    PutRules,
    SendChecks,
    SpecialSendError,
    batch_properties,
    count_messages,
    integer,
    unnumbered,
)
from commitmq.workers.writer.send_answers import PendingAck, SendAnswers
from commitmq.workers.writer.unknown_topics import BornHosts, client_of, keeps_hosts, peer_address, user_of

Store = Callable[[Callable[[], Appended]], Appended]
_MOST_RETRY_MS: Final = 1_000


class BusySends:
    """When the writer refuses sends because it is behind: the time limits of ``[flow]`` (spec 5.4).

    Two limits, each off with 0. A refusal has the code SYSTEM_BUSY, the reason, and ``retry_after_ms``; nothing is stored.

    ``send_queue_wait_ms``: a request over ZeroMQ that waited longer is refused. The writer has no queue with times in
    it. The gate's thread notes how many bytes of a connection had come at which time (:meth:`Connection.judge`), so a
    request that ends below such a count has waited at least since then. That is proven by the node's own clock, with a
    resolution of some 25 ms. A request over the local socket waits for one turn of the writer only, which the other
    limit covers.

    ``page_cache_busy_ms``: an append that took longer. The sends that came while it lasted are refused: those that are
    there when it has ended, until the writer has caught up, for the time of the limit at most.

    ``gate`` guards the port of the writer.
    """

    def __init__(self, context: WorkerContext, gate: Gate) -> None:
        config = context.config.flow
        self._wait_ms = config.send_queue_wait_ms
        self._busy_s = config.page_cache_busy_ms / 1000
        self._peers = gate.peers
        self._refusals = Refusals(context.control, context.slot)
        self._took_s = 0.0
        """How long the slow append took; 0.0 while nothing is refused for one."""
        self._until = 0.0
        self._is_new = False
        if self._wait_ms:
            gate.limit_waits(self._wait_ms / 1000)

    @classmethod
    def of(cls, context: WorkerContext, gate: Gate) -> BusySends | None:
        """None where both limits are off."""
        config = context.config.flow
        return cls(context, gate) if config.send_queue_wait_ms or config.page_cache_busy_ms else None

    def admit(self, client: Peer) -> None:
        """Raise FlowRefusedError for a send of ``client`` that waited for too long."""
        if self._took_s:
            if time.monotonic() < self._until:
                self._refuse(
                    f"an append took {self._took_s * 1000:.0f} ms: the page cache or the disk is slower than the sends"
                    " (flow.page_cache_busy_ms)",
                    int(self._busy_s * 1000),
                )
            self._took_s = 0.0
        if self._wait_ms and not isinstance(client, int):
            connection = self._peers.get(client)
            if connection is not None and connection.is_late:
                self._refuse(
                    f"the send waited longer than {self._wait_ms} ms for the writer (flow.send_queue_wait_ms)",
                    self._wait_ms,
                )

    def timed(self, store: Store) -> Store:
        """``store``, which appends, with a look at its time; itself where that has no limit."""
        if not self._busy_s:
            return store

        def timed(append: Callable[[], Appended]) -> Appended:
            began = time.monotonic()
            try:
                return store(append)
            finally:
                now = time.monotonic()
                if now - began > self._busy_s:
                    self._took_s, self._until, self._is_new = now - began, now + self._busy_s, True

        return timed

    def end_turn(self, *, more: bool) -> None:
        """A turn of the writer has ended. ``more``: requests may be left that came before its end."""
        if self._is_new:  # what came over the local sockets in the meantime is in the next turn
            self._is_new = False
        elif not more:
            self._took_s = 0.0

    def _refuse(self, sentence: str, retry_ms: int) -> None:
        self._refusals.count()
        raise FlowRefusedError(sentence, min(retry_ms, _MOST_RETRY_MS))


_RETRY_MS: Final = 200
_SEGMENT_PATIENCE_MS: Final = 1_000
_SEGMENT_LOOK_S: Final = 0.0005
_POOL_PATIENCE_MS: Final = 100


class PatientAppend:
    """``publish`` makes what was appended visible."""

    def __init__(self, context: WorkerContext, publish: Callable[[], None]) -> None:
        self._context = context
        self._control = context.control
        self._allocate = context.ringer("allocate")
        self._publish = publish

    def store(self, append: Callable[[], Appended]) -> Appended:
        """Append and publish. When a segment is missing, wait for it a moment, unless the disk is known to be full.
        Raises PutRefusal; then nothing is stored.
        """
        deadline = 0
        while True:
            try:
                if failpoints.ACTIVE:
                    failpoints.hit("writer.before_append")
                done = append()
                break
            except PoolFullError:
                deadline = deadline or monotonic_ms() + _POOL_PATIENCE_MS
                if monotonic_ms() >= deadline:
                    raise PutRefusal(
                        "SYSTEM_BUSY",
                        "the transient store pool is full: the disk is slower than the sends",
                        _RETRY_MS,
                    ) from None
                self._context.heartbeat()
                time.sleep(0.002)
            except SegmentUnavailableError as error:
                if self._control.get(Word.DISK_FLAGS) & DiskFlag.NO_SEGMENT:
                    raise PutRefusal(
                        "CREATE_MAPPED_FILE_FAILED",
                        "no space for the next segment of the log; reads work",
                        self._context.config.disk.check_interval_ms,
                    ) from None
                # A run may need more segments than allocate keeps ready; with preallocate_segments = 0 it keeps none.
                self._control.put(Word.SEGMENT_WANTED, error.base)
                self._allocate.ring()
                deadline = deadline or monotonic_ms() + _SEGMENT_PATIENCE_MS
                if monotonic_ms() >= deadline:
                    raise PutRefusal(
                        "CREATE_MAPPED_FILE_FAILED", "the next segment is not ready yet", _RETRY_MS
                    ) from None
                self._context.heartbeat()
                time.sleep(_SEGMENT_LOOK_S)
            except StoreError as error:
                raise PutRefusal("SYSTEM_ERROR", str(error)) from error
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_append")
        self._publish()
        return done


Send = Callable[[Peer, dict[str, Any], Frames], "bytes | PendingAck"]
_BY_NODE: Final = ("send_back", "recall")
_CLIENT, _NODE = "client", "node"
_MOST_TOPICS: Final = 10_000
_MOST_NOTES: Final = 512
_OLDEST_NS: Final = 250_000_000


_Stored = tuple[str, int, int]
"""Topic, messages, bytes."""
_Note = tuple[_Stored | None, bool, int, int, bool]
"""What was stored, whether a process of the node moved it, when the request was read, the time until it was in the log or
answered, whether its answer waits for the device.
"""


class _TopicSends(NamedTuple):
    messages: Count
    size_bytes: Count
    sizes: Histogram


class SendCounts:
    """What the writer, and the process of memory topics, count of sends: see :mod:`commitmq.counting`.

    One note is taken for each request, of one message or of a run. The notes are counted together
    (:meth:`SendCounts.settle`): when a turn brings no further one, when there are many, or when the oldest is a quarter
    of a second older than the newest. So a send costs hardly more than the note, and a scrape sees it a moment later.
    Without ``metrics.enable`` none of this exists.
    """

    def __init__(self, table: CountTable) -> None:
        self._table = table
        self._memory = table.histogram(counting.SEND_DURATION, "memory")
        self._flushed = table.histogram(counting.SEND_DURATION, "flushed")
        self._single = table.histogram(counting.APPEND_DURATION, "single")
        self._run = table.histogram(counting.APPEND_DURATION, "run")
        self._lengths = table.histogram(counting.APPEND_MESSAGES)
        self._waiting = table.count(counting.SENDS_WAITING)
        self._topics: dict[tuple[str, bool], _TopicSends] = {}
        self.last: _Stored | None = None
        """What the send at hand has stored."""
        self._notes: list[_Note] = []
        self._acked: list[int] = []
        self._seen = self._were_waiting = 0

    @classmethod
    def of(cls, context: WorkerContext) -> SendCounts | None:
        table = context.counts
        return None if table is None else cls(table)

    def timed_send(self, send: Send) -> Send:
        """``send`` with a look at its time and its refusal."""

        def timed(identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
            began_ns = monotonic_ns()
            self.last = None
            try:
                answer = send(identity, header, frames)
            except Exception as error:
                code = str(getattr(error, "code", "SYSTEM_ERROR"))
                self._table.count(counting.SENDS_REFUSED, code).add()
                raise
            waits = type(answer) is PendingAck
            if waits:
                answer.began_ns = began_ns  # type: ignore[union-attr]
            moved = "moved" in header or header["op"] in _BY_NODE
            self._notes.append((self.last, moved, began_ns, monotonic_ns() - began_ns, waits))
            return answer

        return timed

    def acked(self, began_ns: int) -> None:
        """A send that waited for the device was answered."""
        self._acked.append(monotonic_ns() - began_ns)

    def settle(self, waiting: int) -> None:
        """At the end of a turn: count the notes when it is time; ``waiting`` sends wait for the device."""
        all_notes = self._notes
        count = len(all_notes) + len(self._acked)
        if (
            count != self._seen
            and count < _MOST_NOTES
            and (not all_notes or all_notes[-1][2] - all_notes[0][2] < _OLDEST_NS)
        ):
            self._seen = count
            return
        if waiting != self._were_waiting:
            self._were_waiting = waiting
            self._waiting.set(waiting)
        if not count:
            return
        self._seen = 0
        by_topic: dict[tuple[str, bool], list[_Stored]] = {}
        single: list[int] = []
        runs: list[int] = []
        for stored, moved, _, took_ns, _ in all_notes:
            if stored is not None:
                by_topic.setdefault((stored[0], moved), []).append(stored)
                (single if stored[1] == 1 else runs).append(took_ns)
        for (topic, moved), found in by_topic.items():
            self._count(topic, moved, found)
        self._single.observe_all(single)
        self._run.observe_all(runs)
        self._lengths.observe_all([stored[1] for found in by_topic.values() for stored in found])
        self._memory.observe_all([note[3] for note in all_notes if not note[4]])
        self._flushed.observe_all(self._acked)
        all_notes.clear()
        self._acked.clear()

    def _count(self, topic: str, moved: bool, stored: list[_Stored]) -> None:
        found = self._topics.get((topic, moved)) or self._begin(topic, moved)
        found.messages.add(sum(one[1] for one in stored))
        found.size_bytes.add(sum(one[2] for one in stored))
        if not moved:
            found.sizes.observe_all([one[2] // one[1] for one in stored])

    def dead_letter(self, topic: str, group: str) -> None:
        """A message of ``topic`` that a consumer of ``group`` sent back is a dead letter."""
        self._table.count(counting.DEAD_LETTERS, topic, group).add()

    def _begin(self, topic: str, moved: bool) -> _TopicSends:
        table, source = self._table, _NODE if moved else _CLIENT
        if len(self._topics) >= _MOST_TOPICS:
            self._topics.clear()  # deleted topics leave no trace but their rows
        found = self._topics[topic, moved] = _TopicSends(
            table.count(counting.MESSAGES_IN, topic, source),
            table.count(counting.BYTES_IN, topic, source),
            table.histogram(counting.MESSAGE_SIZE, topic),
        )
        return found


def read_record(context: WorkerContext, place: int) -> Record:
    """The record at ``place``. It is read and not mapped: a mapping would keep the space of an expired segment. Raises
    OSError, OffsetOutOfRangeError, CorruptRecordError.
    """
    end = context.control.committed()
    if place >= end:
        raise OffsetOutOfRangeError(f"the log ends at {end}")
    segment_bytes = context.config.commit_log.segment_bytes
    at = place % segment_bytes
    with disk.opened(context.layout.commit_log / segment_name(place - at), os.O_RDONLY, "segment") as fd:
        head = os.pread(fd, 8, at)
        size = peek(head)[0] if len(head) == 8 else 0
        if not MIN_RECORD_BYTES <= size <= segment_bytes - at:
            raise CorruptRecordError("no record begins there")
        return decode_record(os.pread(fd, size, at))


_MOST: Final = 1 << 62
_MOST_RETRIES_TOLD: Final = (1 << 31) - 2  # one more is stored, as a Java int
_MAX_RETRIES: Final = 1 << 30


class NoCopyError(CommitMQError):
    """No copy of ``record`` fits, not even as a dead letter of ``group``: the message is to be set aside."""

    def __init__(self, record: Record, group: str, why: str) -> None:
        super().__init__(why)
        self.record, self.group = record, group


@dataclass(frozen=True, slots=True)
class SendBackCopy:
    """A copy that is to be stored. ``topic`` and ``queue_id``: where the group will read it."""

    placed: PlacedRun
    topic: str
    queue_id: int
    dead: bool
    born_host_bytes: int
    source: Record
    group: str


class SendBacks:
    """Makes the copies. ``rules`` says where a delayed one waits."""

    def __init__(self, context: WorkerContext, topics: TopicViews, rules: PutRules) -> None:
        config = context.config
        self._context = context
        self._topics = topics
        self._rules = rules
        self._host = Host(config.network.store_host, config.network.store_port)
        self._turn = 0

    def copy_of(self, header: dict[str, Any]) -> SendBackCopy:
        """The copy that a request asks for, as it fits: the try may be a dead letter now. Raises PutRefusal, NoCopyError."""
        group = header.get("group")
        if type(group) is not str:
            raise PutRefusal("INVALID_PARAMETER", "group must be a string")
        try:
            validate_group(group)
        except InvalidMessageError as error:
            raise PutRefusal("INVALID_PARAMETER", str(error)) from error
        level = integer(header, "delay_level", 0, TO_DEAD_LETTERS, delay.MAX_LEVEL)
        if header.get("delay_ms") is not None:
            level = delay.level_at_least(integer(header, "delay_ms", 0, 0, _MOST))
        most = DEFAULT_MAX_RETRIES
        if header.get("max_retries") is not None:
            most = integer(header, "max_retries", 0, 0, _MAX_RETRIES)
        record = self._record(header)
        dead = is_last_try(record, level, most)
        queue = self._queue_of(dead_letter_topic(group) if dead else retry_topic(group), group)
        retries = integer(header, "reconsume_times", 0, 0, _MOST_RETRIES_TOLD)
        tries = copies(record, group, queue, delay_level=level, max_retries=most, retries=retries)
        try:
            made, placed = first_that_fits(tries, self._placed, (InvalidMessageError, MessageIllegalError))
        except (InvalidMessageError, MessageIllegalError) as error:
            raise NoCopyError(record, group, f"no copy fits: {error}") from error
        if made.dead and not dead:
            self._queue_of(made.record.topic, group)
        born_host_bytes = 20 if ":" in record.born_host.ip else 8
        return SendBackCopy(placed, made.record.topic, made.record.queue_id, made.dead, born_host_bytes, record, group)

    def _placed(self, made: SentBack) -> PlacedRun:
        """Where the copy is stored. Raises InvalidMessageError, MessageIllegalError when it breaks a limit there."""
        data = np.frombuffer(encode_record(replace(made.record, store_host=self._host), buckets=None), np.uint8)
        run = CheckedRun(data, np.array([len(data)], np.int64), 1, moved=True)
        return self._rules.place_copy(run, made.record.topic, made.record.queue_id, delayed=not made.dead)

    def _record(self, header: dict[str, Any]) -> Record:
        """The record that the request names. Raises PutRefusal."""
        topic = header.get("topic")
        queue = integer(header, "queue", -1, 0, 1 << 30)
        number = integer(header, "queue_offset", -1, 0, _MOST)
        place = integer(header, "physical_offset", -1, 0, _MOST)
        try:
            record = read_record(self._context, place)
        except (OSError, OffsetOutOfRangeError, CorruptRecordError) as error:
            raise PutRefusal("MESSAGE_ILLEGAL", f"there is no message at {place} of the log: {error}") from error
        if (record.topic, record.queue_id, record.queue_offset) != (topic, queue, number):
            raise PutRefusal("MESSAGE_ILLEGAL", f"the message at {place} of the log is not {topic}/{queue}@{number}")
        if record.topic in WAITING_TOPICS:
            raise PutRefusal(
                "MESSAGE_ILLEGAL", f"the message at {place} of the log waits in {record.topic}; no group has it"
            )
        if record.sys_flag & SysFlag.INNER_BATCH:
            raise PutRefusal("MESSAGE_ILLEGAL", "a message of an inner batch cannot be sent back alone")
        return record

    def _queue_of(self, topic: str, group: str) -> int:
        """A queue of the retry or dead-letter topic, each in its turn. Raises PutRefusal."""
        view = self._topics.get(topic)
        if view is None:
            raise PutRefusal(
                "TOPIC_NOT_EXIST", f"there is no topic {topic!r}: group.retry_topics makes those of the group {group!r}"
            )
        if not view.is_writable:
            raise PutRefusal("NO_PERMISSION", f"topic {topic!r} is not writable")
        self._turn += 1
        return self._turn % max(1, view.write_queues)


LATE_RECALL: Final = "the cancellation was stored too late to be sure: the message may be delivered all the same"
_STORED_IN_MS: Final = 50
_DEFAULT_GROUP: Final = "DEFAULT_PRODUCER"


@dataclass(frozen=True, slots=True)
class TimerCancellation:
    """A cancellation that is to be stored. ``slot_ms``: the slot of the message that it cancels."""

    placed: PlacedRun
    topic: str
    slot_ms: int

    @property
    def is_late(self) -> bool:
        """Whether the timer may have opened the slot without it, when it was just stored."""
        return time.time_ns() // 1_000_000 > self.slot_ms - CANCEL_MARGIN_MS + _STORED_IN_MS


class TimerCancellations:
    """Makes the cancellations."""

    def __init__(self, context: WorkerContext, rules: PutRules, port: Router | None = None) -> None:
        """``port``: knows who asks, for the audit log."""
        config = context.config
        self._context, self._port = context, port
        self._rules = rules
        self._timer = config.timer
        self._host = Host(config.network.store_host, config.network.store_port)

    def recall_of(self, identity: Peer, header: dict[str, Any], born_host: bytes) -> TimerCancellation:
        """The cancellation that a request of ``identity`` asks for; one ``by_person`` is audited. Raises PutRefusal."""
        if not self._timer.enable:
            raise PutRefusal(
                "WHEEL_TIMER_NOT_ENABLE", "this node delivers no messages at a time (timer.enable is false)"
            )
        handle = self._handle(header)
        now_ms = time.time_ns() // 1_000_000
        rules = TimerRules(max_delay_s=self._timer.max_delay_ms // 1000 + 1)
        group = header.get("group", _DEFAULT_GROUP)
        try:
            record = recall_record(handle, str(group), now_ms, unpack_host(born_host), rules)
            timed = timer_request(record, now_ms, rules, fresh=True)
        except TimerRefusedError as error:
            raise PutRefusal(error.code, str(error)) from error
        slot_ms = handle.deliver_ms - 1
        if timed is None or slot_ms - now_ms < CANCEL_MARGIN_MS:
            raise PutRefusal(
                "ILLEGAL_OPERATION", "the message cannot be cancelled: it is due in less than 0.5 s, or was due"
            )
        data = np.frombuffer(
            encode_record(replace(timed, store_host=self._host), buckets=None, empty_values=True), np.uint8
        )
        if header.get("by_person") is True and self._port is not None and isinstance(identity, bytes):
            about = {"unique_id": handle.unique_key, "due_ms": handle.deliver_ms}
            actor, resource = self._port.actor(identity, header), f"Topic:{handle.topic}"
            self._context.audit.change(Event(actor, "recall", resource, request=header["id"], after=about))
        run = CheckedRun(data, np.array([len(data)], np.int64), 1, moved=True)
        return TimerCancellation(self._rules.place_copy(run, TIMER_TOPIC, 0, delayed=False), handle.topic, slot_ms)

    def _handle(self, header: dict[str, Any]) -> RecallHandle:
        text = header.get("handle")
        if text is not None:
            try:
                return _of_topic(RecallHandle.decode(str(text)), header)
            except InvalidMessageError as error:
                raise PutRefusal("INVALID_PARAMETER", str(error)) from error
        place = integer(header, "physical_offset", -1, 0, _MOST)
        try:
            record = read_record(self._context, place)
        except (OSError, OffsetOutOfRangeError, CorruptRecordError) as error:
            raise PutRefusal("MESSAGE_ILLEGAL", f"there is no message at {place} of the log: {error}") from error
        handle = _checked(record, header.get("unique_id"), place, self._context.config.network.broker_name)
        return _of_topic(handle, header)


def _of_topic(handle: RecallHandle, header: dict[str, Any]) -> RecallHandle:
    """Raises PutRefusal for a message of another topic than the request's, whose rights were looked at."""
    if handle.topic != header.get("topic"):
        raise PutRefusal("INVALID_PARAMETER", f"the message belongs to another topic than {header.get('topic')!r:.300}")
    return handle


def _checked(record: Record, unique_id: object, place: int, broker: str) -> RecallHandle:
    """The handle of ``record``. Raises PutRefusal when it is no message that waits for its time, or another one."""
    try:
        handle = recall_handle(record, broker) if record.topic == TIMER_TOPIC else None
    except ValueError:
        handle = None
    if handle is None or handle.unique_key != unique_id or Property.TIMER_DELETE_KEY in record.properties:
        raise PutRefusal("MESSAGE_ILLEGAL", f"the message at {place} of the log is none that waits for its time")
    return handle


# Properties that the writer sets itself, after it has refused a client's.
_INNER = FORBIDDEN - {Property.INNER_NUM, Property.INNER_BASE}
_FURTHER = FORBIDDEN - {Property.INNER_MULTI_DISPATCH, Property.INNER_MULTI_QUEUE_OFFSET}
_SPECIAL = frozenset(SPECIAL_PROPERTIES)
_PLAIN = FORBIDDEN - _SPECIAL
_MAX_TIME_MS = 1 << 62


class SendRequests:
    """Queue offsets, peers, and the handlers of ``send``, ``append`` and ``batch``."""

    def __init__(
        self,
        context: WorkerContext,
        appender: CommitLogAppender,
        offsets: dict[tuple[str, int], int],
        checks: SendChecks,
        publish: Callable[[], None],
        producers: ProducerStateManager | None = None,
        *,
        topics: TopicViews | None = None,
        local_socket: Path | None = None,
        port: Router | None = None,
    ) -> None:
        """``producers``: the table of idempotent producers; None where idempotent sends are refused. ``topics``: the topic
        table, where messages can be sent back. ``local_socket``: the path that ``hello`` tells. ``port``: where requests come.
        """
        self._answers = SendAnswers(context, appender, producers)
        self._local_socket = {} if local_socket is None else {"local_socket": str(local_socket)}
        self._checks, self._producers, self._control = checks, producers, context.control
        self._appender, self._offsets = appender, offsets
        patient = PatientAppend(context, publish)
        self.guard: Guard | None = None if port is None else port.guard
        self.busy = None if port is None else BusySends.of(context, port.gate)
        self._stored = patient.store if self.busy is None else self.busy.timed(patient.store)
        self.counts = SendCounts.of(context)
        self._context, self._config, self._vouching = context, context.config, context.vouching
        self._rules = PutRules(appender, context.config, context.layout)
        self._send_backs = None if topics is None else SendBacks(context, topics, self._rules)
        self._recalls = None if topics is None else TimerCancellations(context, self._rules, port)
        self._aside: SetAside | None = None
        self._flow: Flow | None = None
        self._set_rates()
        context.on_settings(lambda _config: self._set_rates())
        self._born_hosts, self._further = BornHosts(), FurtherQueues(context.config, offsets)
        self._max_run_bytes = context.config.commit_log.max_run_bytes
        self._max_message_bytes = context.config.commit_log.max_message_bytes

    def _set_rates(self) -> None:
        self._flow = Flow.of_sends(self._context, self._flow)
        take: Send = self._handled if self._flow is None and self.busy is None else self._within_limits
        self._take: Send = take if self.counts is None else self.counts.timed_send(take)

    def hello(self, header: dict[str, Any], frame: zmq.Frame | Payload) -> bytes:
        """The answer to ``hello``: the values that a client needs to lay out runs."""
        host = peer_address(frame)
        network = self._config.network
        return wire.ok(
            header["id"],
            epoch=self._control.get(Word.EPOCH),
            generation=self._control.get(Word.WRITER_GENERATION),
            born_host={"ip": host or "127.0.0.1", "v6": bool(host) and ":" in str(host)},
            store_host={"ip": network.store_host, "port": network.store_port, "v6": ":" in network.store_host},
            max_message_bytes=self._max_message_bytes,
            max_run_bytes=self._max_run_bytes,
            properties_crc=self._config.commit_log.append_properties_crc,
            **self._local_socket,
        )

    def forget_topic(self, topic: str) -> None:
        """Drop the queue offsets of a deleted topic: its queues begin at 0 when it is created again."""
        for key in [key for key in self._offsets if key[0] == topic]:
            del self._offsets[key]
        self._checks.forget_topic(topic)

    def send(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Handle one ``send``, ``append`` or ``batch``. Returns the answer, or a PendingAck that waits for the flush."""
        try:
            return self._take(identity, header, frames)
        except (SpecialSendError, SequenceRefusedError) as refusal:
            return wire.error(header["id"], refusal.code, refusal.sentence, outcome="not_stored")
        except PutRefusal as refusal:
            return wire.error(header["id"], refusal.code, refusal.sentence, outcome="not_stored", **refusal.fields)
        except MessageIllegalError as error:
            return wire.error(header["id"], error.code, str(error), outcome="not_stored")

    def _handled(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        if header["op"] == "send":
            return self._send(identity, header, frames)
        if header["op"] == "append":
            return self._append(identity, header, frames)
        if header["op"] == "send_back":
            return self._send_back(identity, header, frames)
        if header["op"] == "recall":
            return self._recall(identity, header, frames)
        return self._send_batch(identity, header, frames)

    def _within_limits(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Handle a request of a client, if ``[flow]`` lets it pass. Raises PutRefusal and others."""
        if header["op"] in ("send_back", "recall") or "moved" in header:
            return self._handled(identity, header, frames)
        topic, flow = header.get("topic"), self._flow
        try:
            if self.busy is not None:
                self.busy.admit(identity)
            if flow is None or type(topic) is not str:
                return self._handled(identity, header, frames)
            client = client_of(identity, header, frames[1])
            user = user_of(self.guard, self._vouching, header, frames) if flow.bounds_users else None
            flow.admit(client, topic, user)
        except FlowRefusedError as refusal:
            raise PutRefusal(refusal.code, refusal.sentence, refusal.retry_after_ms) from refusal
        answer = self._handled(identity, header, frames)
        # It did not raise. So the topic is there, which bounds the names, and the count was compared with the records.
        flow.take(1 if header["op"] == "send" else header["count"], len(frames[1]), client, topic, user)
        return answer

    # ------------------------------------------------------------ send, append, batch

    def _send(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        topic, queue_id, ack = self._checks.checked(header, frames)
        properties = header.get("properties")
        further: list[str] = []
        if type(properties) is dict and Property.INNER_MULTI_DISPATCH in properties:
            further, properties = self._further.assign(topic, properties)
            encoded = self._checks.encoded_properties(properties, _FURTHER)
        else:
            encoded = self._checks.encoded_properties(properties, _PLAIN)
        flag = integer(header, "flag", 0, -(1 << 31), (1 << 31) - 1) if "flag" in header else 0
        sys_flag = integer(header, "sys_flag", 0, 0, 0x7FFF) if "sys_flag" in header else 0
        born = integer(header, "born", -1, -1, _MAX_TIME_MS) if "born" in header else -1
        if born < 0:
            born = time.time_ns() // 1_000_000
        host = self._born_hosts.of(identity, frames[1])
        sender = self._numbered(header) if "producer_id" in header else None
        if sender is not None and further:
            raise PutRefusal("MESSAGE_ILLEGAL", "an idempotent send cannot go to further queues")
        record = self._appender.encode(
            topic.encode(),
            queue_id,
            frames[1].buffer,
            encoded,
            sys_flag=sys_flag,
            flag=flag,
            born_timestamp=born,
            born_host=host,
            checked=True,
            mark=b"" if sender is None else mark_of(sender.mark, sender.sequence),
        )
        if further and len(record) > self._appender.max_message_bytes:
            raise PutRefusal(
                "MESSAGE_ILLEGAL",
                f"the record has {len(record)} bytes, commit_log.max_message_bytes allows {self._appender.max_message_bytes}"
                " for all of a message that goes to further queues",
            )
        if sender is not None:
            if properties and not _SPECIAL.isdisjoint(properties):
                raise unnumbered()
            if self._stored_before(sender, topic, queue_id, 1):
                return self._answers.repeated(identity, header, topic, queue_id, sender, 1, 1, None, ack)
            number, done = self._store_record(topic, queue_id, record, len(host))
            self._note(sender, topic, queue_id, 0, number, done)
            return self._answers.acknowledged(identity, header, topic, queue_id, number, 1, done, ack)
        if properties and not _SPECIAL.isdisjoint(properties):
            run = self._appender.check_run(record, topic.encode(), queue_id, born_v6=len(host) == 20)
            return self._store_special(identity, header, topic, queue_id, run, host, ack)
        number, done = self._store_record(topic, queue_id, record, len(host))
        if further:
            self._further.count(further)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, 1, done, ack)

    def _append(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        topic, queue_id, ack = self._checks.checked(header, frames)
        size = len(frames[1])
        count = integer(header, "count", -1, -1, 1 << 31)
        moved = "moved" in header and keeps_hosts(header, "moved", frames[1])
        # A message that the log has is moved, whatever the limit is now.
        if size > self._max_run_bytes and not (moved and count == 1):
            raise PutRefusal(
                "FRAME_TOO_LARGE",
                f"the run has {size} bytes, this node takes {self._max_run_bytes} (commit_log.max_run_bytes)",
            )
        host = self._born_hosts.of(identity, frames[1])
        forwarded = "forwarded" in header and keeps_hosts(header, "forwarded", frames[1])
        sender = self._numbered(header) if "producer_id" in header else None
        run = self._appender.check_run(
            frames[1].buffer,
            topic.encode(),
            queue_id,
            born_v6=6 in (header.get("moved"), header.get("forwarded")) if moved or forwarded else len(host) == 20,
            moved=moved,
            forwarded=forwarded,
            mark=b"" if sender is None else sender.mark,
            sequence=0 if sender is None else sender.sequence,
        )
        if count != run.count:
            raise PutRefusal("MESSAGE_ILLEGAL", f"the header says {count} records, the run holds {run.count}")
        if run.special:
            if sender is not None:
                raise unnumbered()
            return self._store_special(identity, header, topic, queue_id, run, host, ack)
        if sender is not None:
            return self._append_numbered(identity, header, topic, queue_id, sender, run, host, ack)
        number, done = self._store_run(topic, queue_id, run, host)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, run.count, done, ack)

    def _store_special(
        self, identity: Peer, header: dict[str, Any], topic: str, queue_id: int, run: CheckedRun, host: bytes, ack: str
    ) -> bytes | PendingAck:
        """Store messages with special properties where they wait; the answer names that place too."""
        placed = self._rules.place(run, topic, queue_id)
        number, done = self._store_run(placed.topic, placed.queue_id, placed.run, host)
        where = placed.where(topic)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, run.count, done, ack, where)

    def _append_numbered(
        self,
        identity: Peer,
        header: dict[str, Any],
        topic: str,
        queue_id: int,
        sender: SequenceFields,
        run: CheckedRun,
        host: bytes,
        ack: str,
    ) -> bytes | PendingAck:
        """Append the messages of an idempotent producer's run that are not stored yet; the answer covers all."""
        before = self._stored_before(sender, topic, queue_id, run.count)
        if before == run.count:
            return self._answers.repeated(identity, header, topic, queue_id, sender, run.count, before, None, ack)
        rest = run.without_first(before) if before else run
        number, done = self._store_run(topic, queue_id, rest, host)
        self._note(sender, topic, queue_id, before, number, done)
        if before:
            return self._answers.repeated(
                identity, header, topic, queue_id, sender, run.count, before, (number, done), ack
            )
        return self._answers.acknowledged(identity, header, topic, queue_id, number, run.count, done, ack)

    def _send_batch(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Several messages as the body of one record, for a topic whose queues count batches (spec 2.8)."""
        topic, queue_id, ack = self._checks.checked(header, frames)
        if "producer_id" in header:
            raise PutRefusal(
                "MESSAGE_ILLEGAL", f"topic {topic!r} has queue.type=BatchCQ, which takes no idempotent sends"
            )
        body = frames[1].buffer
        # Check this before the messages inside are read: the limit bounds that work.
        if len(body) > self._appender.max_message_bytes:
            raise PutRefusal(
                "MESSAGE_ILLEGAL",
                f"the batch has {len(body)} bytes, commit_log.max_message_bytes allows {self._appender.max_message_bytes}",
            )
        count = count_messages(body)
        stated = integer(header, "count", -1, -1, 1 << 31)
        if stated != count:
            raise PutRefusal("MESSAGE_ILLEGAL", f"the header says {stated} messages, the batch holds {count}")
        properties = header.get("properties") or {}
        if type(properties) is not dict:
            raise PutRefusal("INVALID_PARAMETER", "properties must be an object of strings")
        for name in (Property.INNER_NUM, Property.INNER_BASE):
            if name in properties:
                raise PutRefusal("MESSAGE_ILLEGAL", f"only the node may set the property {name!r}")
        born = integer(header, "born", -1, -1, _MAX_TIME_MS)
        number = self._offsets.get((topic, queue_id), 0)
        host = self._born_hosts.of(identity, frames[1])
        record = self._appender.encode(
            topic.encode(),
            queue_id,
            body,
            self._checks.encoded_properties(batch_properties(properties, count, number), _INNER),
            sys_flag=0,
            flag=integer(header, "flag", 0, -(1 << 31), (1 << 31) - 1),
            born_timestamp=born if born >= 0 else time.time_ns() // 1_000_000,
            born_host=host,
            checked=True,
            inner_batch=True,
        )
        done = self._stored(lambda: self._appender.append_record(record, number, len(host)))
        self._offsets[topic, queue_id] = number + count
        if self.counts is not None:
            self.counts.last = topic, count, len(record)
        return self._answers.acknowledged(identity, header, topic, queue_id, number, count, done, ack)

    def _send_back(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Store a copy of a message that failed, for another try of its group or as a dead letter (spec 12.4)."""
        if self._send_backs is None:
            raise PutRefusal("UNKNOWN_OP", "messages are sent back to the writer")
        ack = self._checks.checked_ack(header, frames)
        try:
            copy = self._send_backs.copy_of(header)
            placed = copy.placed
            try:
                number, done = self._store_run(placed.topic, placed.queue_id, placed.run, bytes(copy.born_host_bytes))
            except MessageIllegalError as error:
                raise NoCopyError(copy.source, copy.group, str(error)) from error
        except NoCopyError as error:
            return self._set_aside(header, error)
        if copy.dead and self.counts is not None:
            self.counts.dead_letter(header["topic"], header["group"])
        where = {"topic": copy.topic, "dead": copy.dead, **placed.where(copy.topic)}
        return self._answers.acknowledged(identity, header, copy.topic, copy.queue_id, number, 1, done, ack, where)

    def _set_aside(self, header: dict[str, Any], error: NoCopyError) -> bytes:
        """The group continues behind the message, which stays where it is and is listed."""
        self._aside = self._aside or SetAside(self._context)
        self._aside.message(error.record, str(error), group=error.group)
        self._aside.write_down(at_once=True)
        return wire.ok(header["id"], topic=dead_letter_topic(error.group), dead=True, set_aside=True)

    def _recall(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck:
        """Store the cancellation of a message that waits for its time (spec 12.2)."""
        if self._recalls is None:
            raise PutRefusal("UNKNOWN_OP", "messages are recalled at the writer")
        ack = self._checks.checked_ack(header, frames)
        host = self._born_hosts.of(identity, frames[1])
        recall = self._recalls.recall_of(identity, header, host)
        placed = recall.placed
        number, done = self._store_run(placed.topic, placed.queue_id, placed.run, host)
        if recall.is_late:
            return wire.error(header["id"], "ILLEGAL_OPERATION", LATE_RECALL, outcome="unknown")
        return self._answers.acknowledged(identity, header, recall.topic, 0, number, 1, done, ack)

    # ------------------------------------------------------------ where it is stored

    def _store_record(self, topic: str, queue_id: int, record: bytearray, born_host_bytes: int) -> tuple[int, Appended]:
        """Store a record. Returns its queue offset and its place."""
        number = self._offsets.get((topic, queue_id), 0)
        done = self._stored(lambda: self._appender.append_record(record, number, born_host_bytes))
        self._offsets[topic, queue_id] = number + 1
        if self.counts is not None:
            self.counts.last = topic, 1, len(record)
        return number, done

    def _store_run(self, topic: str, queue_id: int, run: CheckedRun, host: bytes) -> tuple[int, Appended]:
        """Store a run. Returns its first queue offset and its place."""
        number = self._offsets.get((topic, queue_id), 0)
        done = self._stored(lambda: self._appender.append_run(run, number, host))
        self._offsets[topic, queue_id] = number + run.count
        if self.counts is not None:
            self.counts.last = topic, run.count, len(run.data)
        return number, done

    # ------------------------------------------------------------ idempotent producers

    def _numbered(self, header: dict[str, Any]) -> SequenceFields:
        if self._producers is None:
            raise PutRefusal("MESSAGE_ILLEGAL", "memory topics take no idempotent sends")
        if header.get("queue", -1) == -1:
            raise PutRefusal(
                "INVALID_PARAMETER", "an idempotent send needs its queue: sequences count messages of one queue"
            )
        try:
            return numbered(header)
        except ValueError as error:
            raise PutRefusal("INVALID_PARAMETER", str(error)) from error

    def _stored_before(self, sender: SequenceFields, topic: str, queue_id: int, count: int) -> int:
        assert self._producers is not None
        try:
            return self._producers.judge(sender, topic, queue_id, count)
        except ProducersUnusableError as error:
            raise PutRefusal("SERVICE_NOT_AVAILABLE", str(error), _RETRY_MS) from error

    def _note(
        self, sender: SequenceFields, topic: str, queue_id: int, before: int, queue_offset: int, done: Appended
    ) -> None:
        assert self._producers is not None
        self._producers.note(sender, topic, queue_id, before, queue_offset, done)
        if failpoints.ACTIVE:
            failpoints.hit("writer.before_answer")
