"""reader-N: answers pulls, long polls, and look-ups of offsets and single messages.

Owns       nothing on disk.
Reads      CommitLog and ConsumeQueue files (of BatchCQ topics too); dispatcher(0, DISPATCHED), the upper bound of
           readable records; MIN_OFFSET; the topic table; the files of memory topics (store.memory.memory_files),
           which have bounds of their own.
Advances   nothing; publishes in AWAITED_UNTIL_MS of its slot whether a pull waits here.
Sockets    ROUTER ``reader-N`` (ipc and tcp) for clients; SUB ``queues-changed`` (the ConsumeQueue dispatcher: which
           queues grew), SUB ``memory-changed`` (the memory dispatcher: the same), SUB ``topics`` (the coordinator:
           which topics changed). These are only hints to look: a sweep and a version in the control block cover
           lost ones. Rings flush and reput when the first pull begins to wait.
Exit       0 after ``stop``: parked pulls are answered empty first. 74 when topics or segments are unusable.

One loop, never blocked by a client: requests are answered as they come, and answers leave through ZeroMQ's own queues.
The unread answers of one client, and of all clients, are bounded there (SYSTEM_BUSY beyond).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any, Final, NamedTuple

import orjson
import zmq

from commitmq.control import DispatcherWord, Word, WorkerWord
from commitmq.errors import CommitMQError, FilterError, OffsetOutOfRangeError, ProtocolError, StoreError
from commitmq.files.fd_cache import affordable_files
from commitmq.format.constants import LMQ_PREFIX
from commitmq.protocol import wire
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.memory.memory_files import UNIT_FILE_BYTES, MemoryTopics, NodeWord, TopicWord
from commitmq.store.memory.shared_memory import memory_folder
from commitmq.store.metadata.topic_config import PERM_READ
from commitmq.store.queues.batch_queue_reader import BatchQueueReader
from commitmq.store.queues.pull_result import NO_UNITS, PullResult, PullStatus
from commitmq.store.queues.queue_reader import VIEW_BYTES, QueueReader
from commitmq.store.queues.record_filter import RecordFilter
from commitmq.workers.reader.filters import FAILED, ExpressionFilter, Filters
from commitmq.workers.reader.key_queries import KeyQueries, parse_query
from commitmq.workers.reader.parked_pulls import (
    ParkedPulls,
    Pull,
    QueueKey,
    incarnation_field,
    integer_field,
    parse_pull,
    text_field,
)
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.expired_segments import ExpiredSegments
from commitmq.workers.runtime.subscription_view import BitMapFilter, SubscriptionView
from commitmq.workers.runtime.topic_view import TopicView, TopicViews

ROLE = "reader"


class _Place(NamedTuple):
    """Where a topic's messages are. A message may be shown when it lies in [floor, bound) of ``log``."""

    queues: QueueReader | BatchQueueReader
    log: CommitLog
    bound: int
    floor: int
    in_memory: bool = False


_REQUESTS_A_TURN: Final = 256
# A turn gives this time each to requests, to woken pulls and to pulls whose time is up. So none of them waits for many
# of the others, and the supervisor sees the loop turn.
_PART_NS: Final = 20_000_000
_SWEEP_QUEUES: Final = 2_000
_HEARTBEAT_MS: Final = 1_000
# A consumer pulls again when it has processed its messages. It is expected back for this long, and meanwhile the node
# does not slow down.
_EXPECTED_BACK_MS: Final = 100
_NO_END_MS: Final = 1 << 62
_EVICTION_RETRIES: Final = 3
# Deleted ConsumeQueue files are looked for at this interval, for this long after the log's minimum grew.
_DROP_INTERVAL_MS: Final = 2_000
_EXPIRY_MS: Final = 60_000
_NO_QUEUE: Final = (PullStatus.NO_MATCHED_LOGIC_QUEUE, PullStatus.NO_MESSAGE_IN_QUEUE)
_BATCH_FILES: Final = 512
_LMQ: Final = TopicView(1, 1, PERM_READ)


class _NoSuchQueueError(ProtocolError):
    """The topic has fewer queues; the answer says how many it has."""

    def __init__(self, topic: str, read_queues: int, queue: int) -> None:
        super().__init__("INVALID_PARAMETER", f"topic {topic!r} has the queues 0 to {read_queues - 1}, not {queue}")
        self.read_queues = read_queues


def run(ctx: WorkerContext) -> None:
    """Serve until told to stop. Raises StoreError when the store's files cannot be used."""
    reader = Reader(ctx)
    ctx.ready(endpoints=reader.endpoints)
    try:
        while not ctx.stopping:
            reader.turn()
        reader.drain()
    finally:
        reader.close()


class Reader:
    """The process's state; :meth:`turn` is one round of its loop."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        config = ctx.config
        self._limits = config.reader
        self._log = CommitLog(
            ctx.layout.commit_log, config.commit_log.segment_bytes, max_mapped=config.commit_log.max_mapped_segments
        )
        self._queues = QueueReader(
            self._log,
            ctx.layout.consume_queue,
            config.consume_queue.file_bytes,
            ext_file_bytes=config.consume_queue.ext_file_bytes,
            max_open_files=affordable_files(config.consume_queue.max_open_files),
        )
        self._key_queries = KeyQueries(config, ctx.layout.index, ctx.control, self._log, self._queues)
        self._batches = BatchQueueReader(
            ctx.layout.batch_consume_queue,
            config.consume_queue.batch_file_bytes,
            max_open_files=affordable_files(min(_BATCH_FILES, config.consume_queue.max_open_files)),
        )
        self._lmq_enabled = config.consume_queue.enable_lmq
        self._expired = ExpiredSegments(ctx, self._log)
        self._expired.release()
        self._drop_files_until_ms = self._next_drop_ms = 0
        self._memory = MemoryTopics(memory_folder(ctx.layout))
        # Answers for a memory topic that holds no messages.
        self._nothing = QueueReader(self._log, self._memory.folder / "nothing", UNIT_FILE_BYTES)
        self._changes = self._subscribe("queues-changed", *(("memory-changed",) if config.memory.enable else ()))
        self._topic_changes = self._subscribe("topics")
        self._topics = TopicViews(ctx.layout, ctx.control)
        self._parked = ParkedPulls(self._limits.max_parked_pulls, self._limits.max_parked_bytes)
        self._woken: deque[Pull] = deque()
        self._is_awaited = False
        # a pull that waited in the predecessor is sent again
        ctx.control.put_worker(ctx.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        self._ringers = [ctx.ringer("flush"), ctx.ringer("reput")]
        self._subscriptions = SubscriptionView(ctx.layout, ctx.control)
        self._filters = Filters(ctx.params.get("filters", ()), limit=config.filter.max_compiled)
        self._is_listening = True
        self._sweep: list[QueueKey] = []
        self._sweep_bound = (-1, -1)
        self._next_sweep_ms = 0
        self._operations: dict[str, Callable[[bytes, dict[str, Any]], None]] = {
            "pull": self._pull,
            "offsets": self._offsets,
            "view": self._view,
            "query": self._query,
            "memory": self._memory_use,
        }
        self._router, self.endpoints = ctx.bind_router(ctx.role)
        self._unsent = self._router.unsent
        # This code decides whether a frame is copied, not pyzmq's own threshold.
        self._router.copy_threshold = 0
        ctx.register(self._router)

    def _subscribe(self, *names: str) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._ctx.zmq.socket(zmq.SUB)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SUBSCRIBE, b"")
        for name in names:
            sock.connect(self._ctx.layout.ipc(name))
        self._ctx.register(sock)
        return sock

    def close(self) -> None:
        # A subscription that no publisher has taken yet would delay the end for as long as answers may linger.
        self._ctx.control.put_worker(self._ctx.slot, WorkerWord.AWAITED_UNTIL_MS, 0)
        for ringer in self._ringers:
            ringer.close()
        for sock in (self._changes, self._topic_changes):
            if sock is self._topic_changes or self._is_listening:
                self._ctx.unregister(sock)
            sock.close()
        self._queues.close()
        self._batches.close()
        self._memory.close()

    # ------------------------------------------------------------ the loop

    def turn(self) -> None:
        """Wait for events, and handle them."""
        readable = self._ctx.wait(self._timeout_ms())
        if self._topic_changes in readable:
            self._hear_topics()
        if self._topics.is_stale:
            self._topics_changed(self._topics.reload)
        if self._router in readable:
            self._serve()
        if self._changes in readable:
            self._hear_changes()
        now = monotonic_ms()
        self._let_go(now)
        end_ns = monotonic_ns() + _PART_NS
        for pull in self._parked.due(now):
            self._guarded(pull.client, pull.request, self._time_up, pull)
            if monotonic_ns() >= end_ns:
                break  # the next turn comes at once: the remaining pulls are due
        self._look_again()
        if now >= self._next_sweep_ms:
            self._next_sweep_ms = now + self._limits.sweep_interval_ms
            self._memory.release_evicted()
            self._sweep_some()
            if self._is_listening and not self._parked.was_used():
                # Producers without waiting consumers must not wake this process for every batch.
                self._ctx.unregister(self._changes)
                self._is_listening = False
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
            self._queues.drop_deleted_files()
            self._batches.drop_deleted_files()
            self._key_queries.drop_deleted_files()

    def drain(self) -> None:
        """Answer the requests that have arrived and the parked pulls, without waiting for messages."""
        self._serve()
        for key in self._parked.queues():
            for pull in self._parked.waiting(key):
                self._parked.remove(pull)
                self._guarded(pull.client, pull.request, self._time_up, pull)

    def _timeout_ms(self) -> int:
        if self._woken:
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
        end_ns = monotonic_ns() + _PART_NS
        for _ in range(_REQUESTS_A_TURN):
            if monotonic_ns() >= end_ns:
                return
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = frames[0]
            if len(frames) < 2:
                self._send(client, wire.error(None, "BAD_HEADER", "a request needs a header frame"))
                continue
            try:
                header = wire.parse_request(frames[1])
            except ProtocolError as error:
                self._send(client, wire.error(wire.request_id(frames[1]), error.code, error.message))
                continue
            operation = self._operations.get(header["op"])
            if operation is None:
                sentence = f"a reader does not know the op {header['op']!r:.100}"
                self._send(client, wire.error(header["id"], "UNKNOWN_OP", sentence))
                continue
            if len(frames) > 2:
                sentence = f"{header['op']} takes no payload, but {len(frames) - 2} frames came"
                self._send(client, wire.error(header["id"], "INVALID_PARAMETER", sentence))
                continue
            self._guarded(client, header["id"], operation, client, header)

    def _guarded(self, client: bytes, request: int, work: Callable[..., None], *arguments: Any) -> None:
        """Do ``work``. Any failure becomes the answer to this one request."""
        try:
            work(*arguments)
        except FilterError as error:
            self._ctx.log.error("a filter failed", error=str(error))
            self._send(client, wire.error(request, FAILED, str(error)))
        except ProtocolError as error:
            more = {} if error.retry_after_ms is None else {"retry_after_ms": error.retry_after_ms}
            if isinstance(error, _NoSuchQueueError):
                more["read_queues"] = error.read_queues
            self._send(client, wire.error(request, error.code, error.message, **more))
        except (CommitMQError, OSError) as error:
            self._ctx.log.error("request failed", error=str(error))
            self._send(client, wire.error(request, "SYSTEM_ERROR", str(error)))
        except Exception as error:
            self._ctx.log.exception("request failed unexpectedly", error=repr(error))
            self._send(client, wire.error(request, "SYSTEM_ERROR", f"unexpected: {error!r}"))

    def _send(self, client: bytes, header: bytes, frames: list[Any] | None = None) -> None:
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
        if self._unsent.wants_tracker(client, sum(map(len, frames))):
            self._unsent.add(client, send(last, copy=False, track=True))
        else:
            send(last, copy=len(last) < VIEW_BYTES)

    # ------------------------------------------------------------ the readable range

    def _bound(self) -> int:
        return self._ctx.control.dispatcher(0, DispatcherWord.DISPATCHED)

    def _floor(self, topic: str) -> int:
        return max(self._ctx.control.get(Word.MIN_OFFSET), self._topics.tombstone(topic))

    def _place(self, name: str, topic: TopicView) -> _Place:
        """Where the messages of a topic are, and which of them may be shown now."""
        if not topic.is_memory:
            queues = self._batches if topic.is_batch else self._queues
            return _Place(queues, self._log, self._bound(), self._floor(name))
        found = self._memory.get(name, topic.incarnation)
        if found is None:
            return _Place(self._nothing, self._log, 0, 0, in_memory=True)
        # Read the bound first: a floor that is read later cannot be the older of the two.
        bound = found.bound
        return _Place(found.queues, found.log, bound, found.floor, in_memory=True)

    def _topic(self, name: str, incarnation: int | None = None) -> TopicView:
        """The topic, of this ``incarnation`` if one is named. Raises ProtocolError TOPIC_NOT_EXIST."""
        topic = self._topics.get(name)
        is_behind = topic is None or (incarnation is not None and topic.incarnation < incarnation)
        if is_behind and self._topics.is_stale:
            self._hear_topics()
            if self._topics.is_stale:
                self._topics_changed(self._topics.reload)
            topic = self._topics.get(name)
        if topic is None and self._lmq_enabled and name.startswith(LMQ_PREFIX) and "/" not in name:
            # A light message queue (LMQ) exists as soon as messages name it.
            return _LMQ
        if topic is None:
            raise ProtocolError("TOPIC_NOT_EXIST", f"there is no topic {name!r:.300}")
        if incarnation is not None and topic.incarnation != incarnation:
            raise ProtocolError(
                "TOPIC_NOT_EXIST",
                f"topic {name!r:.300} was made anew: incarnation {incarnation} is gone, this is {topic.incarnation}",
            )
        return topic

    def _checked_queue(self, name: str, topic: TopicView, queue: int) -> None:
        if not 0 <= queue < topic.read_queues:
            raise _NoSuchQueueError(name, topic.read_queues, queue)

    # ------------------------------------------------------------ pull

    def _pull(self, client: bytes, header: dict[str, Any]) -> None:
        pull = parse_pull(client, header, self._limits, self._filters)
        result = self._read(pull)
        if pull.wait_ms and not self._ctx.stopping and self._is_nothing_yet(pull, result):
            if not self._parked.has_room(pull):
                raise ProtocolError("SYSTEM_BUSY", "too many pulls wait for messages already", retry_after_ms=1_000)
            pull.offset = result.next_offset
            self._parked.add(pull, monotonic_ms())
            if not self._is_listening:
                self._listen()
                self._guarded(client, pull.request, self._retry, pull)
            return
        self._answer(pull, result)

    def _read(self, pull: Pull) -> PullResult:
        topic = self._topic(pull.topic, pull.incarnation)
        if not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {pull.topic!r} may not be read")
        self._checked_queue(pull.topic, topic, pull.queue)
        if not topic.is_memory and not self._topics.is_cleared(pull.topic):
            # The units there belong to a deleted topic. The new topic has no messages there yet.
            return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, pull.offset, 0, pull.offset, NO_UNITS)
        place = self._place(pull.topic, topic)
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
                # Only a node that was started anew has fewer messages than a consumer has seen: begin with the first
                # message.
                result.next_offset = result.min_offset
        elif pull.offset > result.max_offset and place.bound < self._ctx.control.get(Word.RECOVERED_END):
            # After a crash the dispatcher catches up with the log. Messages above this queue's end may have been shown
            # before: sending the consumer back to that end would make it read them twice.
            result.status = PullStatus.OFFSET_OVERFLOW_ONE
            result.next_offset = pull.offset
        return result

    def _wanted(self, pull: Pull) -> RecordFilter | None:
        """The pull's filter, with bit maps if its group is known for exactly this expression.

        Call it after the bound was taken: see :mod:`commitmq.coordination.subscriptions`.
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
                    frames = self._queues.frames(result.units)
                except OffsetOutOfRangeError:
                    # The segment was deleted between the look at the units and now. The minimum grew before that, so
                    # another look skips exactly the deleted records.
                    result = self._read(pull)
                    try:
                        frames = self._queues.frames(result.units) if result.count else []
                    except OffsetOutOfRangeError:
                        result.status, result.units = PullStatus.MESSAGE_WAS_REMOVING, result.units[:0]
        if not result.count and result.status is PullStatus.OFFSET_OVERFLOW_ONE and pull.offset > pull.asked:
            result.status = PullStatus.NO_MATCHED_MESSAGE
        header = wire.ok(
            pull.request,
            status=result.status,
            next_offset=result.next_offset,
            min_offset=result.min_offset,
            max_offset=result.max_offset,
            count=result.count,
            **({"mode": "bytes"} if pull.in_memory and pull.ranges else {}),
        )
        self._send(pull.client, header, frames)

    def _memory_frames(self, pull: Pull, result: PullResult) -> tuple[PullResult, list[Any]]:
        """The records of ``result``. When they are evicted during the read, the records that are there now."""
        for _ in range(_EVICTION_RETRIES):
            place = self._place(pull.topic, self._topic(pull.topic))
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
        if self._unsent.is_over(pull.client):
            result.status, result.units = PullStatus.NO_MATCHED_MESSAGE, result.units[:0]
            result.next_offset = pull.offset
        self._answer(pull, result)

    def _time_up(self, pull: Pull) -> None:
        self._answer(pull, self._read(pull))

    def _wake(self, key: QueueKey) -> None:
        for pull in self._parked.waiting(key):
            if not pull.is_woken:
                pull.is_woken = True
                self._woken.append(pull)

    def _look_again(self) -> None:
        """Answer woken pulls. Those that this turn has no time for come first in the next one."""
        woken = self._woken
        end_ns = monotonic_ns() + _PART_NS
        while woken:
            pull = woken.popleft()
            pull.is_woken = False
            if not pull.done:
                self._guarded(pull.client, pull.request, self._retry, pull)
                if monotonic_ns() >= end_ns:
                    return

    # ------------------------------------------------------------ changes

    def _listen(self) -> None:
        """Listen for wake-ups again, and discard those that came while no pull waited. Look at the queue afterwards."""
        self._ctx.register(self._changes)
        self._is_listening = True
        with contextlib.suppress(zmq.Again):
            while True:
                self._changes.recv_multipart(zmq.NOBLOCK)

    def _hear_changes(self) -> None:
        for _ in range(_REQUESTS_A_TURN):
            try:
                frames = self._changes.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not len(self._parked):
                continue  # no pull waits: the next pull will see the change
            for topic, queue in orjson.loads(frames[-1]):
                self._wake((topic, queue))

    def _hear_topics(self) -> None:
        while True:
            try:
                frame = self._topic_changes.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.Again:
                return
            self._topics_changed(partial(self._topics.hear, frame))

    def _topics_changed(self, update: Callable[[], set[str]]) -> None:
        """Bring the topic table up to date, and drop the cached data of changed topics."""
        try:
            changed = update()
        except StoreError as error:
            # The old table is better than none. The next turn tries again because the version is still ahead.
            self._ctx.log.error("cannot read the topics again", error=str(error))
            return
        for name in changed:
            self._queues.forget(name)
            self._batches.forget(name)
        for key in self._parked.queues():
            if key[0] in changed:
                self._wake(key)

    def _sweep_some(self) -> None:
        """Look at parked queues as if a wake-up had come, some of them in each sweep."""
        if not self._sweep:
            bounds = self._bound(), self._memory.stored()
            if bounds == self._sweep_bound:
                return
            self._sweep_bound = bounds
            self._sweep = self._parked.queues()
        part, self._sweep = self._sweep[:_SWEEP_QUEUES], self._sweep[_SWEEP_QUEUES:]
        for key in part:
            self._wake(key)

    # ------------------------------------------------------------ look-ups

    def _offsets(self, client: bytes, header: dict[str, Any]) -> None:
        name = text_field(header, "topic")
        topic = self._topic(name, incarnation_field(header))
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
        place = self._place(name, topic)
        if not topic.is_memory and not self._topics.is_cleared(name):
            place = _Place(self._nothing, self._log, 0, 0)
        bound, floor = place.bound, place.floor
        answer: list[list[int | None]] = []
        for queue in queues:
            self._checked_queue(name, topic, queue)
            low, high = place.queues.bounds(name, queue, bound=bound, floor=floor) or (0, 0)
            by_time = None
            if timestamp is not None:
                by_time = place.queues.offset_by_time(
                    name, queue, timestamp, upper=boundary == "upper", bound=bound, floor=floor
                )
                by_time = low if by_time is None else by_time
            answer.append([queue, low, high, by_time])
        self._send(client, wire.ok(header["id"], queues=answer))

    def _query(self, client: bytes, header: dict[str, Any]) -> None:
        query = parse_query(header, self._limits)
        topic = self._topic(query.topic)
        if not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {query.topic!r} may not be read")
        if topic.is_memory:
            raise ProtocolError("INVALID_PARAMETER", f"topic {query.topic!r} is kept in memory, where no index is made")
        fields, frames = self._key_queries.answer(query, lambda: self._floor(query.topic))
        self._send(client, wire.ok(header["id"], **fields), frames)

    def _memory_use(self, client: bytes, header: dict[str, Any]) -> None:
        """The memory that memory topics use: of the whole budget, and of one topic if the request names it."""
        page = self._memory.page()
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
            topic = self._topic(name)
            if not topic.is_memory:
                raise ProtocolError("INVALID_PARAMETER", f"topic {name!r:.300} is not kept in memory")
            found = self._memory.get(name, topic.incarnation)
            answer["topic_used_bytes"] = 0 if found is None else found.head.get(TopicWord.USED)
            answer["topic_evicted_segments"] = 0 if found is None else found.head.get(TopicWord.EVICTED)
        self._send(client, wire.ok(header["id"], **answer))

    def _view(self, client: bytes, header: dict[str, Any]) -> None:
        offset = integer_field(header, "physical_offset")
        name = header.get("topic")
        if name is not None and (known := self._topic(text_field(header, "topic"))).is_memory:
            place = self._place(str(name), known)
        else:
            place = _Place(self._queues, self._log, self._bound(), self._ctx.control.get(Word.MIN_OFFSET))
        record = None
        if place.floor <= offset < place.bound:
            try:
                record = place.log.record(offset)
            except StoreError:
                record = None
        hidden_below = 0 if record is None or place.in_memory else self._topics.tombstone(record.topic)
        if record is None or offset + record.total_size > place.bound or offset < hidden_below:
            raise ProtocolError("INVALID_PARAMETER", f"no message begins at physical offset {offset}")
        topic = self._topics.get(record.topic)
        if topic is not None and not topic.is_readable:
            raise ProtocolError("NO_PERMISSION", f"topic {record.topic!r} may not be read")
        frame = bytes(place.log.read(offset, record.total_size))
        self._send(client, wire.ok(header["id"], size=record.total_size), [frame])
