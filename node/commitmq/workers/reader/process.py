"""reader-N: answers pulls, long polls, and look-ups of offsets and single messages.

Owns       nothing on disk.
Reads      CommitLog and ConsumeQueue files (of BatchCQ topics too); dispatcher(0, DISPATCHED), the upper bound of
           readable records; FLUSHED, up to which single messages are found by their place; MIN_OFFSET; the topic
           table; the files of memory topics (store.memory.memory_files), which have bounds of their own.
Advances   nothing; publishes in AWAITED_UNTIL_MS of its slot whether a pull waits here.
Sockets    ROUTER ``reader-N`` (ipc and tcp) for clients; SUB ``queues-changed`` (the ConsumeQueue dispatcher: which
           queues grew), SUB ``memory-changed`` (the memory dispatcher: the same), SUB ``topics`` (the coordinator:
           which topics changed). These are only hints to look: a sweep and a version in the control block cover
           lost ones. Rings flush and reput when the first pull begins to wait.
Exit       0 after ``stop``: parked pulls are answered empty first. 74 when topics or segments are unusable.

One loop (:meth:`ReaderProcess.turn`), never blocked by a client: requests are answered as they come (``pulls``,
:class:`LookUps`), and answers leave through ZeroMQ's own queues. The unread answers of one client, and of all clients,
are bounded there (SYSTEM_BUSY beyond).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, Final

import numpy as np
import zmq

from commitmq.config import NodeConfig, ReaderConfig
from commitmq.control import ControlBlock, DispatcherWord, Word, WorkerWord
from commitmq.errors import OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.format.index import IndexShape
from commitmq.format.units import UNIT
from commitmq.protocol import wire
from commitmq.security.native_rights import SUB_GET
from commitmq.semantics.retry import topics_of
from commitmq.store.index.index_reader import Cursor, IndexReader, KeyKind, KeyQuery, QueryOffsetResult
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory_files import NodeWord, TopicWord
from commitmq.store.queues.queue_reader import QueueReader, queues_on_disk
from commitmq.workers.reader.places import ReadableTopic, ReadableTopics
from commitmq.workers.reader.pulls import (
    PART_NS,
    AnswerSocket,
    ParkedPulls,
    Pulls,
    incarnation_field,
    integer_field,
    text_field,
)
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments

CONSUME_QUEUE_SLOT: Final = 0
INDEX_SLOT: Final = 1
_KINDS: Final = {"key": KeyKind.KEY, "unique": KeyKind.UNIQUE, "tag": KeyKind.TAG}
_NO_END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """One request. ``up_to`` bounds the log that is searched; ``start`` continues behind an earlier answer."""

    query: KeyQuery
    max_messages: int
    up_to: int | None
    start: Cursor | None

    @property
    def topic(self) -> str:
        return self.query.topic


def parse_query(header: dict[str, Any], limits: ReaderConfig) -> QueryRequest:
    """The query that ``header`` asks for, its values cut down to ``limits``. Raises ProtocolError INVALID_PARAMETER."""
    topic, key = text_field(header, "topic"), text_field(header, "key")
    kind = _KINDS.get(header.get("type", "key")) if isinstance(header.get("type", "key"), str) else None
    if kind is None:
        raise ProtocolError("INVALID_PARAMETER", f"type must be one of {', '.join(_KINDS)}")
    if kind is KeyKind.KEY and " " in key:
        raise ProtocolError("INVALID_PARAMETER", "a key has no spaces: they separate the keys of a message")
    try:
        topic.encode(), key.encode()
        following = header.get("next")
        start = None if following is None else Cursor.parse(text_field(header, "next"))
    except ValueError as error:
        raise ProtocolError("INVALID_PARAMETER", str(error)) from error
    query = KeyQuery(topic, key, kind, integer_field(header, "begin", 0), integer_field(header, "end", _NO_END))
    up_to = None if header.get("up_to") is None else integer_field(header, "up_to")
    most = min(limits.max_query_messages, integer_field(header, "max", limits.max_query_messages, 1))
    return QueryRequest(query, most, up_to, start)


class KeyQueries:
    """Answers requests for messages by key, unique key or tag (op ``query``); part of the reader process.

    Reads the index files (:mod:`commitmq.store.index.index_reader`) and the records that they point to. ``complete``
    promises that no message is missing among the newer ones. It is false while the index, or the bound of readable records,
    is behind the log's end (so also while the index is built again after a crash), and when the work allowed for one
    request was used up before enough messages were found. The index dispatcher's position is read before the search and
    after it, because a dispatcher that dies in between may go back.

    Answers queries; not thread-safe.
    """

    def __init__(
        self, config: NodeConfig, folder: Any, control: ControlBlock, commit_log: CommitLog, queues: QueueReader
    ) -> None:
        self._config = config
        self._control = control
        self._queues = queues
        self._index = IndexReader(commit_log, folder, IndexShape(config.index.hash_slots, config.index.max_items))

    def answer(self, request: QueryRequest, floor: Callable[[], int]) -> tuple[dict[str, Any], list[Any]]:
        """``(header fields, frames)`` of the answer; the frames are whole records by rising offset. ``floor`` returns
        the log offset at which the topic's readable records begin. Raises ProtocolError when there is no index.
        """
        if not self._config.index.enable:
            raise ProtocolError(
                "INDEX_DISABLED", "this node keeps no index: index.enable is false, or `status` says why"
            )
        for attempt in range(3):
            end = self._control.get(Word.WRITTEN)
            if request.up_to is not None:
                end = min(end, request.up_to)
            visible = self._control.dispatcher(CONSUME_QUEUE_SLOT, DispatcherWord.DISPATCHED)
            indexed = min(visible, self._indexed())
            found = self._search(request, min(visible, end), floor())
            indexed = min(indexed, self._indexed())
            try:
                frames = self._frames(found)
                break
            except OffsetOutOfRangeError:
                if attempt == 2:
                    raise  # three times a segment was deleted between the look at its records and the read
        whole = found.is_whole and indexed >= end
        fields = {
            "count": len(found.offsets),
            "complete": whole and not found.ran_out,
            "cut_short": whole and found.ran_out,
            "next": None if found.following is None else str(found.following),
            "log_end": end,
            "indexed_to": indexed,
            "last_timestamp": self._index.last_timestamp(),
        }
        return fields, frames

    def _indexed(self) -> int:
        return self._control.dispatcher(INDEX_SLOT, DispatcherWord.DISPATCHED)

    def _search(self, request: QueryRequest, visible: int, floor: int) -> QueryOffsetResult:
        limits = self._config.reader
        return self._index.search(
            request.query,
            bound=visible,
            floor=floor,
            max_messages=request.max_messages,
            max_bytes=limits.max_pull_bytes,
            max_items=limits.max_query_items,
            start=request.start,
        )

    def _frames(self, found: QueryOffsetResult) -> list[Any]:
        if not found.offsets:
            return []
        units = np.zeros(len(found.offsets), UNIT)
        units["physical_offset"] = found.offsets[::-1]
        units["size"] = found.sizes[::-1]
        return list(self._queues.frames(units))

    def drop_deleted_files(self) -> None:
        """Unmap index files that were deleted, so that their space is freed."""
        self._index.names()

    def close(self) -> None:
        self._index.close()


_MOST_HIDDEN: Final = 4_096


class LookUps:
    """Look-ups: of offsets, of messages by key or by physical offset, and of the memory that memory topics use. The
    operations ``offsets``, ``query``, ``memory`` and ``view`` of one reader.
    """

    def __init__(
        self,
        limits: ReaderConfig,
        control: ControlBlock,
        places: ReadableTopics,
        key_queries: KeyQueries,
        answers: AnswerSocket,
    ) -> None:
        self._limits, self._control = limits, control
        self._places, self._key_queries, self._answers = places, key_queries, answers

    def offsets(self, client: bytes, header: dict[str, Any]) -> None:
        """First and last queue offset of queues of a topic, and the offset of a store time. With ``hidden`` also those
        of queues with messages that lie beyond the topic's read queues.
        """
        name = text_field(header, "topic")
        topic = self._places.topic(name, incarnation_field(header))
        queues = header.get("queues")
        if queues is None:
            queues = list(range(topic.read_queues))
        if type(queues) is not list or any(type(queue) is not int for queue in queues):
            raise ProtocolError("INVALID_PARAMETER", "queues must be a list of integers")
        if len(queues) > topic.read_queues:
            raise ProtocolError("INVALID_PARAMETER", f"topic {name!r} has only {topic.read_queues} queues")
        timestamp = header.get("timestamp")
        if timestamp is not None:
            timestamp = integer_field(header, "timestamp")
        boundary = header.get("boundary", "lower")
        if boundary not in ("lower", "upper"):
            raise ProtocolError("INVALID_PARAMETER", "boundary must be lower or upper")
        hidden_too = header.get("hidden", False)
        if type(hidden_too) is not bool:
            raise ProtocolError("INVALID_PARAMETER", "hidden must be true or false")
        place = self._places.place(name, topic)
        if not topic.is_memory and not self._places.topics.is_cleared(name):
            place = self._places.nowhere()
        for queue in queues:
            self._places.check_queue(name, topic, queue)
        rows = [_row(place, name, queue, timestamp, boundary) for queue in queues]
        answer: dict[str, Any] = {"queues": rows, "log_generation": self._places.cuts.generation}
        if hidden_too:
            beyond = [one for one in queues_on_disk(place.queues.folder, name) if one >= topic.read_queues]
            hidden = [_row(place, name, queue, timestamp, boundary) for queue in beyond[:_MOST_HIDDEN]]
            answer["hidden"] = [row for row in hidden if row[1] != row[2]]
        self._answers.send(client, wire.ok(header["id"], **answer))

    def query(self, client: bytes, header: dict[str, Any]) -> None:
        """Messages of a key, found in the index; with ``deleted`` how many there are, also of a topic that was deleted."""
        query = parse_query(header, self._limits)
        deleted = header.get("deleted", False)
        if type(deleted) is not bool:
            raise ProtocolError("INVALID_PARAMETER", "deleted must be true or false")
        if deleted:
            fields, _ = self._key_queries.answer(query, lambda: self._control.get(Word.MIN_OFFSET))
            self._answers.send(client, wire.ok(header["id"], **fields))
            return
        topic = self._places.topic(query.topic)
        if not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {query.topic!r} may not be read")
        if topic.is_memory:
            raise ProtocolError("INVALID_PARAMETER", f"topic {query.topic!r} is kept in memory, where no index is made")
        fields, frames = self._key_queries.answer(query, lambda: self._places.floor(query.topic))
        self._answers.send(client, wire.ok(header["id"], **fields), frames)

    def memory_use(self, client: bytes, header: dict[str, Any]) -> None:
        """The memory that memory topics use: of the whole budget, and of one topic if the request names it."""
        page = self._places.memory.page()
        words = (NodeWord.BUDGET, NodeWord.USED, NodeWord.SEGMENT_BYTES, NodeWord.EVICTED, NodeWord.TOPICS)
        budget, used, segment, evicted, topics = (0,) * 5 if page is None else (page.get(word) for word in words)
        answer: dict[str, Any] = {
            "budget_bytes": budget,
            "used_bytes": used,
            "segment_bytes": segment,
            "evicted_segments": evicted,
            "topics": topics,
        }
        if "topic" in header:
            name = text_field(header, "topic")
            topic = self._places.topic(name)
            if not topic.is_memory:
                raise ProtocolError("INVALID_PARAMETER", f"topic {name!r:.300} is not kept in memory")
            found = self._places.memory.get(name, topic.incarnation)
            answer["topic_used_bytes"] = 0 if found is None else found.head.get(TopicWord.USED)
            answer["topic_evicted_segments"] = 0 if found is None else found.head.get(TopicWord.EVICTED)
        self._answers.send(client, wire.ok(header["id"], **answer))

    def view(self, client: bytes, header: dict[str, Any]) -> None:
        """One message at its physical offset."""
        offset = integer_field(header, "physical_offset")
        name = header.get("topic")
        if name is not None and (known := self._places.topic(text_field(header, "topic"))).is_memory:
            place = self._places.place(str(name), known)
        else:
            # A flushed message is found by its place as soon as its producer has the answer; queues show it a moment later.
            bound = max(self._places.bound(), self._control.get(Word.FLUSHED))
            place = ReadableTopic(self._places.queues, self._places.log, bound, self._control.get(Word.MIN_OFFSET))
        record = None
        if place.floor <= offset < place.bound:
            try:
                record = place.log.record(offset)
            except StoreError:
                record = None
        hidden_below = 0 if record is None or place.in_memory else self._places.topics.tombstone(record.topic)
        if record is None or offset + record.total_size > place.bound or offset < hidden_below:
            raise ProtocolError("INVALID_PARAMETER", f"no message begins at physical offset {offset}")
        # A place does not tell its topic, so that of what is there decides.
        if (why := self._answers.lacks(header, topics_of(record.topic, record.properties), SUB_GET)) is not None:
            raise ProtocolError("NO_PERMISSION", why)
        topic = self._places.topics.get(record.topic)
        if topic is not None and not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {record.topic!r} may not be read")
        frame = bytes(place.log.read(offset, record.total_size))
        self._answers.send(client, wire.ok(header["id"], size=record.total_size), [frame])


def _row(place: ReadableTopic, topic: str, queue: int, timestamp: int | None, boundary: str) -> list[int | None]:
    """Queue, first offset, next offset, and the offset of ``timestamp``."""
    bound, floor = place.bound, place.floor
    low, high = place.queues.bounds(topic, queue, bound=bound, floor=floor) or (0, 0)
    if timestamp is None:
        return [queue, low, high, None]
    found = place.queues.offset_by_time(topic, queue, timestamp, upper=boundary == "upper", bound=bound, floor=floor)
    return [queue, low, high, low if found is None else found]


ROLE = "reader"
_REQUESTS_A_TURN: Final = 256
_HEARTBEAT_MS: Final = 1_000
# A consumer pulls again when it has processed its messages. It is expected back for this long, and in the meantime the
# node does not slow down.
_EXPECTED_BACK_MS: Final = 100
_NO_END_MS: Final = 1 << 62
# Deleted ConsumeQueue files are looked for at this interval, for this long after the log's minimum grew.
_DROP_INTERVAL_MS: Final = 2_000
_EXPIRY_MS: Final = 60_000


def run(ctx: WorkerContext) -> None:
    """Serve until told to stop. Raises StoreError when the store's files cannot be used."""
    reader = ReaderProcess(ctx)
    ctx.ready(endpoints=reader.endpoints)
    try:
        while not ctx.stopping:
            reader.turn()
        reader.drain()
    finally:
        reader.close()


class ReaderProcess:
    """The process's state; :meth:`turn` is one round of its loop."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        config = ctx.config
        self._limits = config.reader
        self._parked = ParkedPulls(self._limits.max_parked_pulls, self._limits.max_parked_bytes)
        self._places = ReadableTopics(ctx, self._parked.wake_topics)
        self._topics = self._places.topics
        self._key_queries = KeyQueries(config, ctx.layout.index, ctx.control, self._places.log, self._places.queues)
        self._expired = ExpiredSegments(ctx, self._places.log)
        self._expired.release()
        self._drop_files_until_ms = self._next_drop_ms = 0
        self._is_awaited = False
        # a pull that waited in the predecessor is sent again
        ctx.control.put_worker(ctx.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        self._ringers = [ctx.ringer("flush"), ctx.ringer("reput")]
        self._next_sweep_ms = 0
        self._router, self.endpoints = ctx.bind_router(ctx.role, only_answers=True)
        ctx.register(self._router)
        self._answers = AnswerSocket(self._router, ctx.log)
        self._pulls = Pulls(ctx, self._places, self._parked, self._answers)
        pull = self._pulls.pull if self._pulls.counts is None else self._pulls.counts.timed(self._pulls.pull)
        look_ups = LookUps(self._limits, ctx.control, self._places, self._key_queries, self._answers)
        self._operations: dict[str, Callable[[bytes, dict[str, Any]], None]] = {
            "pull": pull,
            "offsets": look_ups.offsets,
            "view": look_ups.view,
            "query": look_ups.query,
            "memory": look_ups.memory_use,
        }

    def close(self) -> None:
        # A subscription that no publisher has taken yet would delay the end for as long as answers may linger.
        self._ctx.control.put_worker(self._ctx.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        for ringer in self._ringers:
            ringer.close()
        self._pulls.close()
        self._places.close()

    # ------------------------------------------------------------ the loop

    def turn(self) -> None:
        """Wait for events, and handle them."""
        readable = self._ctx.wait(self._timeout_ms())
        if self._places.changes in readable:
            self._places.hear_topics()
        if self._topics.is_stale:
            self._places.reload_topics()
        if self._router in readable:
            self._serve()
        if self._pulls.changes in readable:
            self._pulls.hear_changes()
        now = monotonic_ms()
        self._let_go(now)
        end_ns = monotonic_ns() + PART_NS
        for pull in self._parked.due(now):
            self._answers.guarded(pull.client, pull.request, self._pulls.time_up, pull)
            if monotonic_ns() >= end_ns:
                break  # the next turn comes at once: the remaining pulls are due
        self._pulls.look_again()
        if now >= self._next_sweep_ms:
            self._next_sweep_ms = now + self._limits.sweep_interval_ms
            self._places.memory.release_evicted()
            self._pulls.sweep_some()
            self._pulls.rest()
        if self._parked.awaits_log is not self._is_awaited:
            self._publish_awaited(now)

    def _publish_awaited(self, now: int) -> None:
        """Publish that a pull begins to wait or that none waits any more. The first one ends the long pauses of flush
        and reput.

        It rings them even when everything written can be read: the next message, too, would be delayed until the pauses
        are over.
        """
        control, slot = self._ctx.control, self._ctx.slot
        self._is_awaited = self._parked.awaits_log
        if not self._is_awaited:
            control.put_worker(slot, WorkerWord.AWAITED_UNTIL_MS, now + _EXPECTED_BACK_MS)
            return
        is_first = control.worker(slot, WorkerWord.AWAITED_UNTIL_MS) <= now
        control.put_worker(slot, WorkerWord.AWAITED_UNTIL_MS, _NO_END_MS)
        if is_first:
            for ringer in self._ringers:
                ringer.ring()

    def _let_go(self, now: int) -> None:
        """Unmap and close expired files between two requests, so that no answer loses its data while it is built."""
        if self._expired.release():
            self._drop_files_until_ms = now + _EXPIRY_MS
        if self._next_drop_ms <= now < self._drop_files_until_ms:
            # ConsumeQueue files follow the log's minimum within seconds.
            self._next_drop_ms = now + _DROP_INTERVAL_MS
            self._places.drop_deleted_files()
            self._key_queries.drop_deleted_files()

    def drain(self) -> None:
        """Answer the requests that have arrived and the parked pulls, without waiting for messages."""
        self._router.line.stop_resting()
        self._serve()
        for key in self._parked.queues():
            for pull in self._parked.waiting(key):
                self._parked.remove(pull)
                self._answers.guarded(pull.client, pull.request, self._pulls.time_up, pull)

    def _timeout_ms(self) -> int:
        if self._parked.woken:
            return 0
        timeout = _HEARTBEAT_MS
        now = monotonic_ms()
        if len(self._parked):
            timeout = min(timeout, self._next_sweep_ms - now)
            deadline = self._parked.next_deadline_ms()
            if deadline is not None:
                timeout = min(timeout, deadline - now)
        return max(0, timeout)

    def _serve(self) -> None:
        end_ns = monotonic_ns() + PART_NS
        for _ in range(_REQUESTS_A_TURN):
            if monotonic_ns() >= end_ns:
                return
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = frames[0]
            if len(frames) < 2:
                self._answers.send(client, wire.error(None, "BAD_HEADER", "a request needs a header frame"))
                continue
            try:
                header = wire.parse_request(frames[1])
            except ProtocolError as error:
                self._answers.send(client, wire.refused(wire.request_id(frames[1]), error))
                continue
            operation = self._operations.get(header["op"])
            if operation is None:
                sentence = f"a reader does not know the op {header['op']!r}"
                self._answers.send(client, wire.error(header["id"], "UNKNOWN_OP", sentence))
                continue
            if len(frames) > 2:
                sentence = f"{header['op']} takes no payload, but {len(frames) - 2} frames came"
                self._answers.send(client, wire.error(header["id"], "INVALID_PARAMETER", sentence))
                continue
            self._answers.guarded(client, header["id"], operation, client, header)
