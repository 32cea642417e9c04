"""Pulls: the messages that a pull finds, its answer, and the pulls that wait for messages.

SUB ``queues-changed`` (the ConsumeQueue dispatcher: which queues grew) and ``memory-changed`` (the memory dispatcher:
the same) wake parked pulls. A sweep covers lost wake-ups.

Answers to clients: they leave through ZeroMQ's own queues, and any failure becomes the answer to one request.

Pull requests, and parked pulls (long polls): by queue for wake-ups, by deadline for time-outs, counted by client.

An answered pull leaves its heap entry behind. The heap is rebuilt when such entries outnumber the live ones, so memory
follows the number of parked pulls, not of all pulls ever parked.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Final

import orjson
import zmq

from commitmq import counting
from commitmq.config import NodeConfig, ReaderConfig
from commitmq.control import Word
from commitmq.counting import Count, CountTable
from commitmq.errors import CommitMQError, FilterError, OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.log import Log
from commitmq.network.router import Router
from commitmq.protocol import wire
from commitmq.security.native_rights import Actions
from commitmq.store.queues.queue_reader import VIEW_BYTES, QueueReader
from commitmq.store.queues.record_filter import NO_UNITS, PullResult, PullStatus, RecordFilter
from commitmq.store.recovery.cut_history import NO_CUT
from commitmq.workers.reader.filters import FAILED, ExpressionFilter, Filters
from commitmq.workers.reader.places import ReadableTopic, ReadableTopics, subscribe
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.flow import Flow, FlowRefusedError
from commitmq.workers.runtime.topic_view import BitMapFilter, SubscriptionView


class AnswerSocket:
    """Sends the answers of one reader over its ROUTER."""

    def __init__(self, router: Router, log: Log) -> None:
        self._router = router
        self.unsent = router.unsent
        self._log = log
        # This code decides whether a frame is copied, not pyzmq's own threshold.
        router.copy_threshold = 0

    def is_local(self, client: bytes) -> bool:
        """Whether the client is a process of the node's own account."""
        found = self._router.gate.peers.get(client)
        return found is not None and found.is_local

    def user_of(self, header: dict[str, Any]) -> str | None:
        """Whose quotas hold for the request that was just taken, see :meth:`Router.user_of`."""
        return self._router.user_of(header)

    def lacks(self, header: dict[str, Any], topics: Iterable[str], actions: Actions) -> str | None:
        """Why who sent the request that was just taken may not use one of ``topics``; see :meth:`Guard.lacks`."""
        guard = self._router.guard
        return None if guard is None else guard.lacks(header, topics, actions)

    def guarded(self, client: bytes, request: int, work: Callable[..., None], *arguments: Any) -> None:
        """Do ``work``. Any failure becomes the answer to this one request."""
        try:
            work(*arguments)
        except FilterError as error:
            self._log.error("a filter failed", error=str(error))
            self.send(client, wire.error(request, FAILED, str(error)))
        except ProtocolError as error:
            self.send(client, wire.refused(request, error))
        except (CommitMQError, OSError) as error:
            self._log.error("request failed", error=str(error))
            self.send(client, wire.error(request, "SYSTEM_ERROR", str(error)))
        except Exception as error:
            self._log.exception("request failed unexpectedly", error=repr(error))
            self.send(client, wire.error(request, "SYSTEM_ERROR", f"unexpected: {error!r}"))

    def send(self, client: bytes, header: bytes, frames: list[Any] | None = None) -> None:
        """Answer ``client``. A client that has gone costs nothing: the ROUTER drops messages that it cannot route."""
        if not frames:
            self._router.send_multipart([client, header])
            return
        send = self._router.send
        send(client, zmq.SNDMORE)
        send(header, zmq.SNDMORE)
        for frame in frames[:-1]:
            send(frame, zmq.SNDMORE, copy=len(frame) < VIEW_BYTES)
        last = frames[-1]
        if self.unsent.wants_tracker(client, sum(map(len, frames))):
            self.unsent.add(client, send(last, copy=False, track=True))
        else:
            send(last, copy=len(last) < VIEW_BYTES)


QueueKey = tuple[str, int]
Owner = bytes | str

# A deadline further away than this is rounded up to whole steps, so that thousands of idle pulls cause few wake-ups.
_COARSE_FROM_MS = 1_000
_COARSE_STEP_MS = 200
_LIMIT = 1 << 63
# A filter takes this many bytes, and more for each character of its expression.
_FILTER_BYTES = 1_024
_CHARACTER_BYTES = 4
# One client may park this share of all pulls that the reader parks, so that one client cannot keep others from waiting.
_CLIENT_SHARE = 4
_OWNER_CHARACTERS = 255


@dataclass(slots=True, eq=False)
class Pull:
    """One pull request. ``offset`` moves on over messages that the filter rejects; ``asked`` is the requested offset.
    ``client`` gets the answer. ``owner`` is the client whose limits hold: the same, or one of a gateway of this node.
    """

    client: bytes
    request: int
    topic: str
    queue: int
    offset: int
    asked: int
    max_messages: int
    max_bytes: int
    wait_ms: int
    ranges: bool
    wanted: RecordFilter | None
    in_memory: bool = False  # the last read found a memory topic
    log_end: int = 0  # of the log, when the pull came; known once its offset was beyond its queue's end
    group: str | None = None
    incarnation: int | None = None  # of the wanted topic; None: any incarnation
    log_generation: int | None = None  # in which the offset was learnt; -1: not known, or judged; None: not asked for
    deadline_ms: int = 0
    done: bool = False
    awaits_log: bool = False  # a parked pull for a topic in the log, not for a memory topic
    filter_bytes: int = 0  # upper bound of its filter's memory
    is_woken: bool = False  # it will be looked at again in this or the next turn
    owner: Owner = b""
    user: str | None = None  # whose quotas hold; known only while there are rates

    def __post_init__(self) -> None:
        self.owner = self.owner or self.client

    @property
    def key(self) -> QueueKey:
        return self.topic, self.queue


def parse_pull(
    client: bytes, header: dict[str, Any], limits: ReaderConfig, filters: Filters, *, is_local: bool = False
) -> Pull:
    """The pull that ``header`` asks for, its values cut down to ``limits``. Whoever is ``is_local`` may pull for
    others. Raises ProtocolError: INVALID_PARAMETER, or FILTER_FAILED for a plugin's failure.
    """
    mode = header.get("mode", "bytes")
    if mode not in ("bytes", "ranges"):
        raise ProtocolError("INVALID_PARAMETER", "mode must be bytes or ranges")
    expression, kind = header.get("filter"), header.get("filter_type")
    group = header.get("group")
    for name, value in (("filter", expression), ("filter_type", kind), ("group", group)):
        if value is not None and type(value) is not str:
            raise ProtocolError("INVALID_PARAMETER", f"{name} must be a string")
    offset = integer_field(header, "offset")
    return Pull(
        client=client,
        request=header["id"],
        topic=text_field(header, "topic"),
        queue=integer_field(header, "queue"),
        offset=offset,
        asked=offset,
        max_messages=min(limits.max_pull_messages, integer_field(header, "max_messages", limits.max_pull_messages, 1)),
        max_bytes=min(limits.max_pull_bytes, integer_field(header, "max_bytes", limits.max_pull_bytes, 1)),
        wait_ms=min(limits.max_wait_ms, integer_field(header, "wait_ms", 0, 0)),
        ranges=mode == "ranges",
        wanted=filters.get(kind, expression),
        group=group,
        filter_bytes=_FILTER_BYTES + _CHARACTER_BYTES * len(expression) if expression else 0,
        incarnation=incarnation_field(header),
        log_generation=None
        if header.get("log_generation") is None
        else integer_field(header, "log_generation", least=-1),
        owner=text_field(header, "client")[:_OWNER_CHARACTERS] if is_local and "client" in header else b"",
    )


def integer_field(header: dict[str, Any], name: str, default: int | None = None, least: int | None = None) -> int:
    """An integer of a request, ``default`` when it is absent. Raises ProtocolError INVALID_PARAMETER. All such integers
    are offsets, times (ms), sizes or counts, which have 63 bits everywhere in the store.
    """
    value = header.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int:
        raise ProtocolError("INVALID_PARAMETER", f"{name} must be an integer")
    if not -_LIMIT <= value < _LIMIT:
        raise ProtocolError("INVALID_PARAMETER", f"{name} is out of range")
    if least is not None and value < least:
        raise ProtocolError("INVALID_PARAMETER", f"{name} must be {least} or more, not {value}")
    return value


def incarnation_field(header: dict[str, Any]) -> int | None:
    """The incarnation of a topic that a request names, or None. Raises ProtocolError INVALID_PARAMETER."""
    return None if header.get("incarnation") is None else integer_field(header, "incarnation", least=0)


def text_field(header: dict[str, Any], name: str) -> str:
    """A non-empty string of a request. Raises ProtocolError INVALID_PARAMETER."""
    value = header.get(name)
    if type(value) is not str or not value:
        raise ProtocolError("INVALID_PARAMETER", f"{name} must be a string")
    return value


@dataclass(slots=True)
class ParkedPulls:
    """The parked pulls of a reader: ``limit`` at most, filters of ``limit_bytes``; a quarter of both a client."""

    limit: int
    limit_bytes: int
    _by_queue: dict[QueueKey, list[Pull]] = field(default_factory=dict)
    _heap: list[tuple[int, int, Pull]] = field(default_factory=list)
    _by_client: dict[Owner, int] = field(default_factory=dict)
    _bytes_by_client: dict[Owner, int] = field(default_factory=dict)
    _bytes: int = 0
    _count: int = 0
    _log_count: int = 0
    _used: bool = False
    _serial: int = 0
    woken: deque[Pull] = field(default_factory=deque)
    """Pulls to look at again; some may have been answered in the meantime."""

    def __len__(self) -> int:
        return self._count

    @property
    def awaits_log(self) -> bool:
        """Whether any pull waits for messages of the log (messages of memory topics do not go through reput)."""
        return self._log_count > 0

    def has_room(self, pull: Pull) -> bool:
        client, size = pull.owner, pull.filter_bytes
        return (
            self._count < self.limit
            and self._by_client.get(client, 0) < max(1, self.limit // _CLIENT_SHARE)
            and (
                not size
                or (
                    self._bytes + size <= self.limit_bytes
                    and self._bytes_by_client.get(client, 0) + size <= self.limit_bytes // _CLIENT_SHARE
                )
            )
        )

    def add(self, pull: Pull, now_ms: int) -> None:
        """Park ``pull`` for its ``wait_ms``."""
        deadline = now_ms + pull.wait_ms
        if pull.wait_ms >= _COARSE_FROM_MS:
            deadline = -(-deadline // _COARSE_STEP_MS) * _COARSE_STEP_MS
        pull.deadline_ms = deadline
        self._by_queue.setdefault(pull.key, []).append(pull)
        self._by_client[pull.owner] = self._by_client.get(pull.owner, 0) + 1
        if pull.filter_bytes:
            self._bytes += pull.filter_bytes
            self._bytes_by_client[pull.owner] = self._bytes_by_client.get(pull.owner, 0) + pull.filter_bytes
        self._count += 1
        pull.awaits_log = not pull.in_memory
        self._log_count += pull.awaits_log
        self._used = True
        self._serial += 1
        heapq.heappush(self._heap, (deadline, self._serial, pull))

    def was_used(self) -> bool:
        """Whether any pull is parked, or was parked since the last call."""
        used = self._used or self._count > 0
        self._used = False
        return used

    def waiting(self, key: QueueKey) -> list[Pull]:
        """The pulls that wait for a queue, oldest first (a copy: they may be removed in the meantime)."""
        found = self._by_queue.get(key)
        return [] if found is None else list(found)

    def queues(self) -> list[QueueKey]:
        return list(self._by_queue)

    def wake(self, key: QueueKey) -> None:
        """Have the pulls that wait for a queue looked at again."""
        for pull in self.waiting(key):
            if not pull.is_woken:
                pull.is_woken = True
                self.woken.append(pull)

    def wake_topics(self, names: set[str]) -> None:
        """Have the pulls that wait for a queue of these topics looked at again."""
        for key in self.queues():
            if key[0] in names:
                self.wake(key)

    def remove(self, pull: Pull) -> None:
        """Take a parked pull out; it is about to be answered."""
        pull.done = True
        waiting = self._by_queue[pull.key]
        waiting.remove(pull)
        if not waiting:
            del self._by_queue[pull.key]
        left = self._by_client[pull.owner] - 1
        if left:
            self._by_client[pull.owner] = left
        else:
            del self._by_client[pull.owner]
        if pull.filter_bytes:
            self._bytes -= pull.filter_bytes
            left_bytes = self._bytes_by_client[pull.owner] - pull.filter_bytes
            if left_bytes:
                self._bytes_by_client[pull.owner] = left_bytes
            else:
                del self._bytes_by_client[pull.owner]
        self._count -= 1
        self._log_count -= pull.awaits_log
        if len(self._heap) > 2 * self._count + 1_024:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)

    def next_deadline_ms(self) -> int | None:
        """When the next pull's time is up."""
        heap = self._heap
        while heap and heap[0][2].done:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_ms: int) -> Iterator[Pull]:
        """Remove and give the pulls whose time is up, in the order of their deadlines."""
        while (deadline := self.next_deadline_ms()) is not None and deadline <= now_ms:
            pull = heapq.heappop(self._heap)[2]
            self.remove(pull)
            yield pull


Operation = Callable[[bytes, dict[str, Any]], None]
_MOST_NAMES: Final = 10_000
PULL: Final = "pull"
POP: Final = "pop"


class OutCounts:
    """The messages that a process hands to consumers, in one way."""

    def __init__(self, table: CountTable, way: str) -> None:
        self._table, self._way = table, way
        self._known: dict[tuple[str, str], tuple[Count, Count]] = {}

    def add(self, topic: str, group: str, messages: int, size_bytes: int) -> None:
        """``group`` got messages of ``topic``."""
        found = self._known.get((topic, group))
        if found is None:
            if len(self._known) >= _MOST_NAMES:
                self._known.clear()
            found = self._known[topic, group] = (
                self._table.count(counting.MESSAGES_OUT, topic, group, self._way),
                self._table.count(counting.BYTES_OUT, topic, group, self._way),
            )
        found[0].add(messages)
        found[1].add(size_bytes)


class PullCounts:
    """What a reader counts of pulls; for each pull, never for each message. Without ``metrics.enable`` none of this
    exists. ``parked``: the pulls that wait.
    """

    def __init__(self, table: CountTable, parked: ParkedPulls) -> None:
        self._parked_pulls = parked
        self._found = table.histogram(counting.PULL_DURATION, "found")
        self._empty = table.histogram(counting.PULL_DURATION, "empty")
        self._refused = table.histogram(counting.PULL_DURATION, "refused")
        self._parked, self._woken = table.count(counting.PULLS_PARKED), table.count(counting.PULLS_WOKEN)
        self._parked.set(0)
        self._woken.set(0)
        self._out = OutCounts(table, PULL)
        self._has_found = False

    @classmethod
    def of(cls, context: WorkerContext, parked: ParkedPulls) -> PullCounts | None:
        table = context.counts
        return None if table is None else cls(table, parked)

    def timed(self, operation: Operation) -> Operation:
        """``operation`` with a look at its time."""

        def timed(client: bytes, header: dict[str, Any]) -> None:
            self._has_found = False
            began_ns = monotonic_ns()
            try:
                operation(client, header)
            except Exception:
                self._refused.observe(monotonic_ns() - began_ns)
                raise
            (self._found if self._has_found else self._empty).observe(monotonic_ns() - began_ns)
            self._look()

        return timed

    def answered(self, pull: Pull, result: PullResult) -> None:
        """A pull, which may have waited, gets its answer."""
        self._look()
        if result.count:
            self._has_found = True
            self._out.add(pull.topic, pull.group or "", result.count, int(result.units["size"].sum()))

    def _look(self) -> None:
        self._parked.set(len(self._parked_pulls))
        self._woken.set(len(self._parked_pulls.woken))


_CHANGES_A_TURN: Final = 256
# A turn gives this time each to requests, to woken pulls and to pulls whose time is up. So none of them waits for many
# of the others, and the supervisor sees the loop turn.
PART_NS: Final = 5_000_000
_SWEEP_QUEUES: Final = 2_000
_EVICTION_RETRIES: Final = 3
_JUDGED: Final = -1
_NO_QUEUE: Final = (PullStatus.NO_MATCHED_LOGIC_QUEUE, PullStatus.NO_MESSAGE_IN_QUEUE)


class Pulls:
    """The operation ``pull`` of one reader."""

    def __init__(self, ctx: WorkerContext, places: ReadableTopics, parked: ParkedPulls, answers: AnswerSocket) -> None:
        self._ctx = ctx
        self._places, self._parked, self._answers = places, parked, answers
        self._limits = ctx.config.reader
        self._flow = Flow.of_pulls(ctx)
        ctx.on_settings(self._take_settings)
        self.counts = PullCounts.of(ctx, parked)
        self._subscriptions = SubscriptionView(ctx.layout, ctx.control)
        self._filters = Filters(ctx.params.get("filters", ()), limit=ctx.config.filter.max_compiled)
        self.changes = subscribe(ctx, "queues-changed", *(("memory-changed",) if ctx.config.memory.enable else ()))
        self._is_listening = True
        self._sweep: list[QueueKey] = []
        self._sweep_bound = (-1, -1)

    def _take_settings(self, _config: NodeConfig) -> None:
        self._flow = Flow.of_pulls(self._ctx, self._flow)

    def close(self) -> None:
        if self._is_listening:
            self._ctx.unregister(self.changes)
        self.changes.close()

    def pull(self, client: bytes, header: dict[str, Any]) -> None:
        """Answer a pull, or park it until a message comes."""
        is_local = "client" in header and self._answers.is_local(client)
        pull = parse_pull(client, header, self._limits, self._filters, is_local=is_local)
        if self._flow is not None:
            # A pull that waits for messages passes now; what it gets is taken from its rates when it is answered.
            if self._flow.bounds_users:
                pull.user = self._answers.user_of(header)
            try:
                self._flow.admit(pull.owner, pull.topic, pull.group, pull.user)
            except FlowRefusedError as refusal:
                raise ProtocolError(refusal.code, refusal.sentence, retry_after_ms=refusal.retry_after_ms) from refusal
        result = self._read(pull)
        if pull.wait_ms and not self._ctx.stopping and self._is_nothing_yet(pull, result):
            if not self._parked.has_room(pull):
                raise ProtocolError("SYSTEM_BUSY", "too many pulls wait for messages already", retry_after_ms=1_000)
            pull.offset = result.next_offset
            self._parked.add(pull, monotonic_ms())
            if not self._is_listening:
                self._listen()
                self._answers.guarded(client, pull.request, self._retry, pull)
            return
        self._answer(pull, result)

    def _read(self, pull: Pull) -> PullResult:
        topic = self._places.topic(pull.topic, pull.incarnation)
        if not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {pull.topic!r} may not be read")
        self._places.check_queue(pull.topic, topic, pull.queue)
        if not topic.is_memory and not self._places.topics.is_cleared(pull.topic):
            # The units there belong to a deleted topic. The new topic has no messages there yet.
            return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, pull.offset, 0, pull.offset, NO_UNITS)
        place = self._places.place(pull.topic, topic)
        if (
            pull.log_generation not in (None, _JUDGED, self._places.cuts.generation)
            and (moved := self._judge(pull, place)) is not None
        ):
            return moved
        result = place.queues.read(
            pull.topic,
            pull.queue,
            pull.offset,
            bound=place.bound,
            floor=place.floor,
            max_messages=pull.max_messages,
            max_bytes=pull.max_bytes,
            wanted=self._wanted(pull),
        )
        pull.in_memory = place.in_memory
        if place.in_memory:
            if result.status is PullStatus.OFFSET_OVERFLOW_BADLY:
                # Only a node that was started again has fewer messages than a consumer has seen: begin with the first
                # message.
                result.next_offset = result.min_offset
        elif pull.offset > result.max_offset and place.bound < self._end_of_log(pull):
            # The dispatcher has to catch up with the log: after a crash, or behind a message that was just acknowledged.
            # The queue may grow to this offset. Sending the consumer back to the queue's end would make it read messages
            # twice, or messages that it has skipped.
            result.status = PullStatus.OFFSET_OVERFLOW_ONE
            result.next_offset = pull.offset
        return result

    def _judge(self, pull: Pull, place: ReadableTopic) -> PullResult | None:
        """The answer to a pull whose offset lies behind the queue's end at a cut of the log since the client learnt it; None
        for any other.

        The messages that the client has seen there are gone, and those that are there now it has not seen.
        """
        cuts = self._places.cuts
        assert pull.log_generation is not None
        cut = cuts.end_since(pull.log_generation)
        if cut != NO_CUT and not place.in_memory:
            if place.bound < min(cut, self._ctx.control.get(Word.RECOVERED_END)):
                # The dispatcher has to catch up with what recovery found.
                return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, pull.offset, 0, pull.offset, NO_UNITS)
            queue: dict[str, Any] = {
                "topic": pull.topic,
                "queue": pull.queue,
                "bound": place.bound,
                "floor": place.floor,
            }
            end, bounds = place.queues.offset_at(physical=cut, **queue), place.queues.bounds(**queue)
            if end is not None and bounds is not None and end < pull.offset:
                pull.log_generation = _JUDGED
                return PullResult(PullStatus.OFFSET_OVERFLOW_BADLY, end, *bounds, NO_UNITS)
        pull.log_generation = _JUDGED
        return None

    def _generation(self, pull: Pull) -> dict[str, int]:
        """The generation of the log that the answer's offsets belong to, for a client that asked."""
        known = pull.log_generation
        return {} if known is None else {"log_generation": self._places.cuts.generation if known == _JUDGED else known}

    def _end_of_log(self, pull: Pull) -> int:
        """The end of the log when the pull came: beyond it no message can be that its client knows of. A pull that does
        not wait is judged by what recovery found, so that it gets its verdict at once.
        """
        if not pull.log_end:
            control = self._ctx.control
            written = control.get(Word.WRITTEN) if pull.wait_ms else 0
            pull.log_end = max(written, control.get(Word.RECOVERED_END))
        return pull.log_end

    def _wanted(self, pull: Pull) -> RecordFilter | None:
        """The pull's filter, with bit maps if its group is known for exactly this expression. Call it after the bound
        was taken: see :mod:`commitmq.coordination.subscriptions`.
        """
        wanted = pull.wanted
        if pull.group is None or not isinstance(wanted, ExpressionFilter):
            return wanted
        self._subscriptions.refresh()
        known = self._subscriptions.of_group(pull.topic, pull.group)
        if known is None or (known.kind, known.expression) != (wanted.kind, wanted.expression):
            return wanted
        return BitMapFilter(wanted, known)

    def _is_nothing_yet(self, pull: Pull, result: PullResult) -> bool:
        """Whether only a new message can change the answer."""
        if result.status is PullStatus.OFFSET_OVERFLOW_ONE:
            return True
        if result.status in _NO_QUEUE:
            return pull.offset == 0
        return result.status is PullStatus.NO_MATCHED_MESSAGE and result.next_offset >= result.max_offset

    def _answer(self, pull: Pull, result: PullResult) -> None:
        frames: list[Any] = []
        if result.count:
            if pull.in_memory:
                result, frames = self._memory_frames(pull, result)
            elif pull.ranges:
                frames = [result.units.tobytes()]
            else:
                try:
                    frames = self._places.queues.frames(result.units)
                except OffsetOutOfRangeError:
                    # The segment was deleted between the look at the units and now. The minimum grew before that, so
                    # another look skips exactly the deleted records.
                    result = self._read(pull)
                    try:
                        frames = self._places.queues.frames(result.units) if result.count else []
                    except OffsetOutOfRangeError:
                        result.status, result.units = PullStatus.MESSAGE_WAS_REMOVING, result.units[:0]
        if not result.count and result.status is PullStatus.OFFSET_OVERFLOW_ONE and pull.offset > pull.asked:
            result.status = PullStatus.NO_MATCHED_MESSAGE
        if self._flow is not None and result.count:
            size_bytes = int(result.units["size"].sum())
            self._flow.take(result.count, size_bytes, pull.owner, pull.topic, pull.group, pull.user)
        if self.counts is not None:
            self.counts.answered(pull, result)
        header = wire.ok(
            pull.request,
            status=result.status,
            next_offset=result.next_offset,
            min_offset=result.min_offset,
            max_offset=result.max_offset,
            count=result.count,
            **self._generation(pull),
            **({"mode": "bytes"} if pull.in_memory and pull.ranges else {}),
        )
        self._answers.send(pull.client, header, frames)

    def _memory_frames(self, pull: Pull, result: PullResult) -> tuple[PullResult, list[Any]]:
        """The records of ``result``. When they are evicted during the read, the records that are there now."""
        for _ in range(_EVICTION_RETRIES):
            place = self._places.place(pull.topic, self._places.topic(pull.topic))
            assert isinstance(place.queues, QueueReader)  # a memory topic has plain queues
            try:
                return result, place.queues.frames(result.units) if result.count else []
            except StoreError:
                result = self._read(pull)
        result.status, result.units = PullStatus.MESSAGE_WAS_REMOVING, result.units[:0]
        result.next_offset = max(result.min_offset, pull.offset)
        return result, []

    def _retry(self, pull: Pull) -> None:
        """Answer a parked pull if it has a result now."""
        try:
            result = self._read(pull)
        except BaseException:
            self._parked.remove(pull)
            raise
        if self._is_nothing_yet(pull, result):
            pull.offset = result.next_offset
            return
        self._parked.remove(pull)
        if self._answers.unsent.is_over(pull.client):
            result.status, result.units = PullStatus.NO_MATCHED_MESSAGE, result.units[:0]
            result.next_offset = pull.offset
        self._answer(pull, result)

    def time_up(self, pull: Pull) -> None:
        """Answer a pull that was parked until now."""
        self._answer(pull, self._read(pull))

    def look_again(self) -> None:
        """Answer woken pulls. Those that this turn has no time for come first in the next one."""
        woken = self._parked.woken
        end_ns = monotonic_ns() + PART_NS
        while woken:
            pull = woken.popleft()
            pull.is_woken = False
            if not pull.done:
                self._answers.guarded(pull.client, pull.request, self._retry, pull)
                if monotonic_ns() >= end_ns:
                    return

    # ------------------------------------------------------------ changes

    def _listen(self) -> None:
        """Listen for wake-ups again, and discard those that came while no pull waited. Look at the queue afterwards."""
        self._ctx.register(self.changes)
        self._is_listening = True
        with contextlib.suppress(zmq.Again):
            while True:
                self.changes.recv_multipart(zmq.NOBLOCK)

    def hear_changes(self) -> None:
        """Wake the pulls that wait for a queue that grew."""
        for _ in range(_CHANGES_A_TURN):
            try:
                frames = self.changes.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not len(self._parked):
                continue  # no pull waits: the next pull will see the change
            for topic, queue in orjson.loads(frames[-1]):
                self._parked.wake((topic, queue))

    def sweep_some(self) -> None:
        """Look at parked queues as if a wake-up had come, some of them in each sweep."""
        if not self._sweep:
            bounds = self._places.bound(), self._places.memory.stored()
            if bounds == self._sweep_bound:
                return
            self._sweep_bound = bounds
            self._sweep = self._parked.queues()
        part, self._sweep = self._sweep[:_SWEEP_QUEUES], self._sweep[_SWEEP_QUEUES:]
        for key in part:
            self._parked.wake(key)

    def rest(self) -> None:
        """Listen no more until a pull waits: producers must not wake this process for every batch."""
        if self._is_listening and not self._parked.was_used():
            self._ctx.unregister(self.changes)
            self._is_listening = False
