"""writer: the only process that appends to the CommitLog; producers send to its address.

Owns: the CommitLog's tail, queue offsets, the table of idempotent producers (workers.writer.producers). Reads: the
topic table, ``flushed``, disk flags, the ConsumeQueue dispatcher's flags. Advances: ``written``, ``written_timestamp``,
``flush_wanted``, ``writer_topics``, ``writer_synced`` (:mod:`commitmq.workers.writer.writer_sync`). Sockets: ROUTER
(ipc and tcp) for producers, a Unix socket for single sends (:mod:`commitmq.workers.writer.local_sockets`); DEALER to
the coordinator (which creates unknown topics); SUB ``topics``; doorbell (rung by flush and allocate); rings flush and
the coordinator, and in asynchronous mode reput. Exit codes: workers.runtime.context.ExitCode.

Start: the writer scans the log from min(flushed, dispatched), skips what recovery has checked, and finds the tail,
which never lies below ``written``. It zeroes the bytes behind the tail. Queue offsets are the ConsumeQueue ends (units
below ``dispatched``; BatchCQ topics and LMQs have their own files) plus the records from there on. The producer table
is its snapshot plus the records behind it. That is the whole state, so a writer may die between any two lines: a record
is published or it is not, and only published records are acknowledged.

With the transient store pool the writer appends to the pool, and only the flush process writes the log's files. A start
then waits until all published records are in the files, and gives up complete records that were not published.

Queue offsets of a deleted topic begin at 0 again: records below its tombstone do not count, and neither do queues that
hold only such records and whose folders the dispatcher has not removed yet. A topic ends when this process hears of the
deletion, before the coordinator reads the log's end for the tombstone (:mod:`commitmq.coordination.deletions`): the
writer takes no more messages for the topic, forgets its queue offsets, and then confirms the deletion in
``writer_topics``. It confirms nothing before its own start has published the log's end.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import zmq

from commitmq import failpoints, stations
from commitmq.control import DispatcherWord, Word
from commitmq.errors import CorruptRecordError, ProtocolError, StoreError
from commitmq.files.fd_cache import FdCache
from commitmq.format.file_names import segment_name
from commitmq.format.message_id import pack_host
from commitmq.format.record import Host
from commitmq.network.router import FRAME_HEAD_BYTES, MAX_FRAMES
from commitmq.offline.damage import explained
from commitmq.protocol import wire
from commitmq.protocol.connection import new_routing_id
from commitmq.stations import Station
from commitmq.store.log.append import CommitLogAppender, PoolFullError
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.log.dispatch_batch import DispatchBatch, LogWalker, consumable
from commitmq.store.log.transient_pool import TransientPool
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from commitmq.store.queues.consume_queue import ConsumeQueue, list_queues
from commitmq.store.recovery.scan import map_segment, writer_tail, zero_behind
from commitmq.workers.flush.log_committer import attach_pool
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.start_progress import StartProgress
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.local_sockets import Frames, LocalSockets, Payload, Peer
from commitmq.workers.writer.producers import Producers
from commitmq.workers.writer.send_answers import Waiting
from commitmq.workers.writer.send_checks import SendChecks
from commitmq.workers.writer.send_requests import SendRequests
from commitmq.workers.writer.special_sends import further_offsets, offset_behind
from commitmq.workers.writer.writer_sync import OwnSync

ROLE = "writer"
# Plain ints: an enum's operators and look-ups cost half a microsecond each, several times a send.
_NOBLOCK = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_WRITTEN, _WRITTEN_TIMESTAMP = int(Word.WRITTEN), int(Word.WRITTEN_TIMESTAMP)
_FLUSHED, _FLUSH_WANTED = int(Word.FLUSHED), int(Word.FLUSH_WANTED)
_PRODUCERS_KNOWN, _PRODUCERS_WANTED = int(Word.PRODUCERS_KNOWN), int(Word.PRODUCERS_WANTED)
_SENDS = ("send", "append", "batch")
_POLL_MS = 200
_TURN_REQUESTS = 256
_TURN_BYTES = 8 * 1024 * 1024
_TOPIC_TIMEOUT_MS = 5_000
_DELETED_RETRY_MS = 50
_MAX_WAITING_FOR_TOPIC = 10_000
_MAX_WAITING_BYTES = 64 * 1024 * 1024
_DRAIN_MS = 10_000
_FINISH_MS = 2_000
_COMMIT_PATIENCE_MS = 30_000
_FEW_FILES = 8  # each queue is opened only once
_QUEUES_A_REPORT = 64


class Writer:
    """The loop's state: sockets, sends that wait for a flush, sends that wait for a topic."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._control = context.control
        config = context.config
        self._topics = TopicViews(context.layout, context.control)
        self._news: zmq.Socket[bytes] = context.zmq.socket(zmq.SUB)
        self._news.setsockopt(zmq.SUBSCRIBE, b"topics")
        self._news.connect(context.layout.ipc("topics"))
        self._pool = attach_pool(context) if self._control.get(Word.POOL_BUFFERS) else None
        self._producers = Producers(context.layout, config, context.log)
        self.own_sync = OwnSync(context, pooled=self._pool is not None)
        offsets, position, stamp = recover_tail(context, self._producers, self._pool, self._topics.tombstones())
        if self._pool is not None:
            self._pool.advise_huge()
        appender = CommitLogAppender(
            position,
            segment_bytes=config.commit_log.segment_bytes,
            open_segment=self._open_segment,
            close_segment=None if self._pool is None else lambda _buffer: None,
            store_host=pack_host(Host(config.network.store_host, config.network.store_port)),
            max_message_bytes=config.commit_log.max_message_bytes,
            properties_crc=config.commit_log.append_properties_crc,
            last_timestamp=max(stamp, self._control.get(Word.WRITTEN_TIMESTAMP)),
            max_clock_lead_ms=config.commit_log.max_clock_lead_ms,
            populate_window_bytes=config.commit_log.populate_window_bytes,
        )
        self.appender = appender
        self._flush, self._reput = context.ringer("flush"), context.ringer("reput")
        self._allocate = context.ringer("allocate")
        self._known, self._wanted, self._turns = self._producers.durable, 0, 0
        self._control.put(Word.PRODUCERS_KNOWN, self._known)
        self._stamp = self._control.get(_WRITTEN_TIMESTAMP)
        self._control.put(Word.WRITER_GENERATION, self._control.get(Word.WRITER_GENERATION) + 1)
        self._publish()
        self.router, self.endpoints = context.bind_router("writer", takes_payload=True)
        # Every turn ends with a look for requests, and nothing touches the socket between that look and the wait.
        context.register(self.router, quiet=True)
        self.local = LocalSockets(
            context.layout.local_socket,
            config.network.max_local_connections,
            context.register,
            context.unregister,
            context.log,
        )
        self._checks = SendChecks(context, self._topics)
        self.requests = SendRequests(
            context, appender, offsets, self._checks, self._publish, self._producers, local_socket=self.local.path
        )
        self._coordinator: zmq.Socket[bytes] = context.zmq.socket(zmq.DEALER)
        self._coordinator.setsockopt(zmq.LINGER, 0)
        self._coordinator.setsockopt(zmq.ROUTING_ID, new_routing_id())
        self._coordinator.connect(context.layout.ipc("coordinator"))
        context.register(self._coordinator, quiet=True)
        context.register(self._news, quiet=True)
        # True when a message may be waiting on the ZeroMQ socket. ZMQ_FD is edge-triggered: any call on the socket may
        # consume the event, so no turn ends with a wait while this is true. Asking costs two system calls, which turns
        # for the local sockets leave out.
        self._look = True
        self._arrived: list[tuple[int, list[Payload]]] = []
        self._waiting: deque[Waiting] = deque()
        self._last_waiting: Peer = b""
        self._requests = 0  # handled since the last decision about an own sync
        self._for_topic: dict[str, list[tuple[Peer, dict[str, Any], Frames]]] = {}
        self._for_topic_count = self._for_topic_bytes = 0
        self._topic_deadlines: dict[str, int] = {}
        self._asked: dict[int, str] = {}
        self._next_ask = 0
        self._segment = self.appender.position // config.commit_log.segment_bytes
        self._coordinator_bell = context.ringer("coordinator")
        self._say_heard()

    def _open_segment(self, base: int) -> mmap.mmap | None:
        """The mapping or pool buffer that takes the appends of the segment at ``base``; None while it is not allocated.
        Raises StoreError, PoolFullError.

        An existing file is not enough: until ``allocated`` covers it, a power cut may remove its name. A pool buffer
        needs an allocated segment as well, or a full disk would show too late.
        """
        segment_bytes = self._context.config.commit_log.segment_bytes
        if base + segment_bytes > self._control.get(Word.ALLOCATED):
            return None
        if self._pool is None:
            return map_segment(self._context.layout.commit_log / segment_name(base), segment_bytes)
        buffer = self._pool.take(base)
        if buffer is None:
            raise PoolFullError(base)
        return buffer

    def _publish(self) -> None:
        """Publish the appended records; the timestamp first, so that it never belongs to a newer record."""
        if failpoints.ACTIVE:
            failpoints.hit("writer.before_publish")
        if self.appender.position > self._control.get(_WRITTEN):
            stamp = self.appender.last_timestamp
            if stamp < self._stamp:
                self._tell_clock(self._stamp - stamp)
            self._stamp = stamp
            self._control.put(_WRITTEN_TIMESTAMP, stamp)
            self._control.put(_WRITTEN, self.appender.position)
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_publish")

    def _tell_clock(self, ahead_ms: int) -> None:
        """Log that the clock stamped the records before this one ``ahead_ms`` too far in the future."""
        self._context.log.error(
            "the clock was ahead: store timestamps go back with it",
            ahead_ms=ahead_ms,
            from_offset=self._control.get(_WRITTEN),
        )
        self._context.tell(clock={"was_ahead_ms": ahead_ms, "until_offset": self._control.get(_WRITTEN)})

    # ------------------------------------------------------------ one turn

    def take_requests(self, local: Sequence[tuple[int, Frames]] = ()) -> bool:
        """Handle ``local`` requests and what has arrived over ZeroMQ, up to a turn's limits; True when there may be more."""
        budget = _TURN_BYTES
        before = self.appender.position
        wanted = 0
        answer: bytes | Waiting | None
        for number, parts in local:
            answer = self._handle(number, parts)
            if isinstance(answer, Waiting):
                self._waiting.append(answer)
                wanted = answer.end
            elif answer is not None:
                self._answer(number, answer)
        router = self.router
        gate = router.gate
        more = self._look
        for _ in range(_TURN_REQUESTS if more else 0):
            # Asking for events costs half of what an Again exception does, and every turn ends with one of the two.
            if not int(router.getsockopt(_EVENTS)) & _POLLIN:
                more = self._look = False
                gate.looks += 1
                gate.is_empty = True
                break
            gate.is_empty = False
            identity = router.recv(_NOBLOCK)
            frame = router.recv(_NOBLOCK, copy=False)
            frames = [frame]
            while frame.more:
                if len(frames) > MAX_FRAMES:
                    router.skip_rest(identity, gate.peers.get(identity))
                    break
                frame = router.recv(_NOBLOCK, copy=False)
                frames.append(frame)
            connection = gate.peers.get(identity) or router.meet(identity, frames[0])
            if connection is None:
                continue
            connection.handled += sum(map(len, frames)) + FRAME_HEAD_BYTES * len(frames)
            answer = self._handle(identity, frames)
            if isinstance(answer, Waiting):
                self._waiting.append(answer)
                wanted = answer.end
            elif answer is not None:
                self._answer(identity, answer)
            budget -= len(frames[-1])
            if budget <= 0:
                break
        if wanted and not more and self._sync_alone():
            self.answer_flushed()
            wanted = 0
            more = self._look  # sending the answer may have consumed the event of a new message
        if wanted:
            self._control.put(_FLUSH_WANTED, wanted)
        if self.appender.position != before:
            self._wake_followers(urgent=bool(wanted))
        return more

    def _sync_alone(self) -> bool:
        """Sync here when one sender alone waits, as it did last time; False when the sync is left to flush."""
        waiting, position = self._waiting, self.appender.position
        before, self._last_waiting = self._last_waiting, waiting[-1].identity
        requests, self._requests = self._requests, 0
        return (
            len(waiting) == 1
            and before == self._last_waiting
            and requests == 1
            and self.own_sync.suits(position)
            and self.own_sync.sync(position, self.appender.last_timestamp)
        )

    def _wake_followers(self, *, urgent: bool) -> None:
        """Ring flush and allocate. Not urgent: no sender waits for the flush, so flush is woken only from a long sleep."""
        self._flush.ring(urgent=urgent)
        if not self._context.config.sync_flush:
            self._reput.ring(urgent=False)
        segment = self.appender.position // self.appender.segment_bytes
        if segment != self._segment:
            self._segment = segment
            self.own_sync.roll()
            self._allocate.ring()

    def _handle(self, identity: Peer, frames: Frames) -> bytes | Waiting | None:
        header_frame = frames[0].bytes
        try:
            header = wire.parse_request(header_frame)
        except ProtocolError as error:
            return wire.error(wire.request_id(header_frame), error.code, error.message, outcome="not_stored")
        self._requests += 1
        try:
            return self._dispatch(identity, header, frames)
        except Exception as error:
            # A bug must not stop the node. Whether the message was stored is then unknown.
            self._context.log.exception("a request failed", op=header["op"], error=repr(error))
            return wire.error(
                header["id"], "SYSTEM_ERROR", f"the node failed on this request: {error!r}", outcome="unknown"
            )

    def _dispatch(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | Waiting | None:
        op = header["op"]
        if op == "hello":
            if len(frames) != 1:
                return wire.error(header["id"], "INVALID_PARAMETER", "hello takes no payload", outcome="not_stored")
            return self.requests.hello(header, frames[0])
        if op not in _SENDS or (op != "send" and isinstance(identity, int)):
            known = (
                "local socket knows send" if isinstance(identity, int) else "writer knows send, append, batch and hello"
            )
            return wire.error(
                header["id"],
                "UNKNOWN_OP",
                f"the {known}, not {op!r}",
                outcome="not_stored",
            )
        topic = header.get("topic")
        if (
            type(topic) is str
            and self._topics.get(topic) is None
            and len(frames) == 2
            and not self._checks.is_lmq(topic)
        ):
            return self._ask_for_topic(identity, topic, header, frames)
        return self.requests.send(identity, header, frames)

    def _answer(self, identity: Peer, answer: bytes) -> None:
        if isinstance(identity, int):
            self.local.answer(identity, answer)
            return
        self._look = True
        with contextlib.suppress(zmq.ZMQError):  # the peer has gone, so its answer is dropped
            self.router.send(identity, _SEND_MORE)
            self.router.send(answer, _NOBLOCK)

    # ------------------------------------------------------------ waiting for the flush

    def answer_flushed(self) -> None:
        """Answer every send whose end is flushed, whose time is up, or whose flush failed."""
        waiting = self._waiting
        if not waiting:
            return
        flushed = max(self._control.get(_FLUSHED), self.own_sync.synced)
        while waiting and waiting[0].end <= flushed:
            one = waiting.popleft()
            self._answer(one.identity, one.answer)
        if not waiting:
            return
        if self._control.get(Word.FLUSH_ERRNO):
            sentence = "the message is in the log, but the device refused to make it durable"
            while waiting:
                self._fail(waiting.popleft(), "FLUSH_DISK_TIMEOUT", sentence, "unknown")
            return
        now = monotonic_ms()
        while waiting and waiting[0].deadline_ms <= now:
            self._fail(
                waiting.popleft(),
                "FLUSH_DISK_TIMEOUT",
                f"stored, but not flushed within {self._context.config.commit_log.sync_flush_timeout_ms} ms",
                "stored",
            )

    def _fail(self, one: Waiting, code: str, sentence: str, outcome: str) -> None:
        self._answer(one.identity, wire.error(one.request_id, code, sentence, outcome=outcome, **one.fields))

    # ------------------------------------------------------------ unknown topics

    def _ask_for_topic(
        self, identity: Peer, topic: str, header: dict[str, Any], frames: Frames
    ) -> bytes | Waiting | None:
        size = sum(map(len, frames))
        if self._for_topic_count >= _MAX_WAITING_FOR_TOPIC or self._for_topic_bytes + size > _MAX_WAITING_BYTES:
            return wire.error(
                header["id"],
                "SYSTEM_BUSY",
                "too many sends wait for new topics",
                outcome="not_stored",
                retry_after_ms=100,
            )
        waiting = self._for_topic.get(topic)
        if waiting is None:
            self._next_ask += 1
            ask = wire.pack({"op": "topic.route", "id": self._next_ask, "topic": topic, "create": True})
            try:
                self._coordinator.send(ask, zmq.NOBLOCK)
            except zmq.Again:
                return wire.error(
                    header["id"],
                    "SYSTEM_BUSY",
                    "the coordinator does not answer, so a new topic cannot be made",
                    outcome="not_stored",
                    retry_after_ms=500,
                )
            waiting = self._for_topic[topic] = []
            self._topic_deadlines[topic] = monotonic_ms() + _TOPIC_TIMEOUT_MS
            self._asked[self._next_ask] = topic
        waiting.append((identity, header, frames))
        self._for_topic_count += 1
        self._for_topic_bytes += size
        return None

    def hear_coordinator(self) -> None:
        """Take the coordinator's answers about topics, and the news of changed topics."""
        with contextlib.suppress(zmq.Again):
            while True:
                reply = orjson.loads(self._coordinator.recv(zmq.NOBLOCK))
                topic = self._asked.pop(reply.get("id"), None)
                if topic is None:
                    continue
                if reply.get("ok") and self._topics.learn(topic, reply["topic"]):
                    self._release(topic, None)
                elif reply.get("ok"):
                    # The topic was deleted while this answer was on its way.
                    sentence = f"topic {topic} is just being deleted"
                    refusal = {"code": "SERVICE_NOT_AVAILABLE", "error": sentence, "retry_after_ms": _DELETED_RETRY_MS}
                    self._release(topic, refusal)
                else:
                    self._release(topic, reply)
        if self._topic_deadlines:
            now = monotonic_ms()
            for topic in [topic for topic, deadline in self._topic_deadlines.items() if deadline <= now]:
                self._release(
                    topic,
                    {
                        "code": "SYSTEM_BUSY",
                        "error": "the coordinator did not answer about this topic",
                        "retry_after_ms": 500,
                    },
                )

    def _hear_news(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._topics.hear(self._news.recv_multipart(zmq.NOBLOCK)[-1])
                self._forget_ended()
        if self._topics.is_stale:
            self._topics.reload()
            self._forget_ended()
        self._say_heard()

    def _forget_ended(self) -> None:
        """Forget the topics that ended. Nothing was appended since they left the table, so the log's end is behind all
        their records.
        """
        for topic in self._topics.ended:
            self.requests.forget_topic(topic)
            self._producers.forget_topic(topic, self.appender.position)

    def _say_heard(self) -> None:
        """Confirm the deletions that this process has heard of, so that the coordinator goes on with them."""
        version = self._topics.version
        if version == self._control.get(Word.WRITER_TOPICS):
            return
        if failpoints.ACTIVE:
            failpoints.hit("writer.before_heard")
        self._control.put(Word.WRITER_TOPICS, version)
        if self._topics.has_endings:
            self._coordinator_bell.ring()
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_heard")

    def _release(self, topic: str, refusal: dict[str, Any] | None) -> None:
        self._topic_deadlines.pop(topic, None)
        wanted = 0
        for identity, header, frames in self._for_topic.pop(topic, []):
            self._for_topic_count -= 1
            self._for_topic_bytes -= sum(map(len, frames))
            answer: bytes | Waiting
            if refusal is not None:
                more = {key: refusal[key] for key in ("retry_after_ms",) if key in refusal}
                answer = wire.error(header["id"], refusal["code"], refusal["error"], outcome="not_stored", **more)
            else:
                answer = self.requests.send(identity, header, frames)
            if isinstance(answer, Waiting):
                self._waiting.append(answer)
                wanted = answer.end
            else:
                self._answer(identity, answer)
        if wanted:
            self._control.put(Word.FLUSH_WANTED, max(wanted, self._control.get(Word.FLUSH_WANTED)))
            self._wake_followers(urgent=True)

    # ------------------------------------------------------------ the end

    def drain(self) -> None:
        """Take no more requests; wait until every message acknowledged as flushed is flushed."""
        for name in self.endpoints:
            with contextlib.suppress(zmq.ZMQError):
                self.router.unbind(name)
        self._look = True
        more = self.take_requests([*self._arrived, *self.local.last()])
        while more:
            more = self.take_requests()
        deadline = monotonic_ms() + _DRAIN_MS
        while self._waiting and monotonic_ms() < deadline:
            self._context.wait(10)
            self.answer_flushed()
        for one in self._waiting:
            self._fail(one, "SERVICE_NOT_AVAILABLE", "the node stops before this was flushed", "stored")
        self.local.close()
        self._finish_producers()
        self.own_sync.close()
        self.appender.close()

    def _finish_producers(self) -> None:
        """Wait a moment for the flush of messages acknowledged without one: a snapshot must not be ahead of ``flushed``."""
        position = self.appender.position
        deadline = monotonic_ms() + _FINISH_MS
        while self._control.get(_FLUSHED) < position and monotonic_ms() < deadline:
            self._control.put(_FLUSH_WANTED, position)
            self._flush.ring(urgent=True)
            self._context.wait(5)
        self._producers.finish(position, self._control.get(_FLUSHED))

    def step(self) -> None:
        """One turn of the loop."""
        more = self.take_requests(self._arrived)
        while not more and self.appender.populate_ahead():
            # Between requests the kernel maps the next pages to append to, a piece at a time.
            more = self._look = bool(int(self.router.getsockopt(_EVENTS)) & _POLLIN)
        timeout_ms = 0 if more else 20 if self._waiting or self._topic_deadlines else _POLL_MS
        readable = self._context.wait(timeout_ms, self._flush_done)
        self._arrived = self.local.requests(readable)
        if self.router in readable:
            self._look = True
        if self._waiting:
            self.answer_flushed()
        if self._coordinator in readable or self._topic_deadlines:
            self.hear_coordinator()
        if self._news in readable or self._topics.is_stale:
            self._hear_news()
        # Looking at every word costs a call: while local requests follow each other, only one turn in 64 looks.
        self._turns += 1
        if not (self._arrived and self._turns & 63):
            self._wanted = self._control.get(_PRODUCERS_WANTED)
        hurry = self._producers.turn(self.appender.position, self._control.get(_FLUSHED), self._wanted)
        if hurry and hurry > self._control.get(_FLUSH_WANTED):
            self._control.put(_FLUSH_WANTED, hurry)
            self._flush.ring(urgent=True)
        if self._producers.durable != self._known:
            self._known = self._producers.durable
            self._control.put(_PRODUCERS_KNOWN, self._known)

    def _flush_done(self) -> bool:
        waiting = self._waiting
        return bool(waiting) and max(self._control.get(_FLUSHED), self.own_sync.synced) >= waiting[0].end


def recover_tail(
    context: WorkerContext,
    producers: Producers | None = None,
    pool: TransientPool | None = None,
    deleted: Mapping[str, int] | None = None,
) -> tuple[dict[tuple[str, int], int], int, int]:
    """Queue offsets by (topic, queue), the log's end and the newest store timestamp; see the module.

    ``producers`` is brought up to the log's end. ``deleted`` has for each deleted topic the physical offset below which
    its records do not count; it must come from the same topic table that sends are checked against later.
    """
    config, control, layout = context.config, context.control, context.layout
    segment_bytes = config.commit_log.segment_bytes
    started = time.monotonic()
    dispatched = control.dispatcher(0, DispatcherWord.DISPATCHED)
    published = control.get(Word.WRITTEN)
    if pool is not None:
        published = _committed(context, pool)
    log = CommitLog(layout.commit_log, segment_bytes, config.commit_log.max_mapped_segments)
    # Recovery has checked the log up to here. The scan need not begin earlier, however far behind the ConsumeQueues
    # are.
    start = max(control.get(Word.RECOVERED_END), min(published, control.get(Word.FLUSHED), dispatched))
    position, stamp = writer_tail(log, segment_bytes, start=start, published=published)
    segment = layout.commit_log / segment_name(position - position % segment_bytes)
    if segment.exists() and pool is None:
        zero_behind(segment, position % segment_bytes)
    following = layout.commit_log / segment_name(position - position % segment_bytes + segment_bytes)
    if following.exists() and pool is None:
        # A dead writer may have stored records in the next segment before it published any of them.
        zero_behind(following, 0)
    if deleted is None:
        deleted = TopicViews(layout, control).tombstones()
    offsets: dict[tuple[str, int], int] = {}
    fds = FdCache(_FEW_FILES)
    progress = StartProgress(context)
    queues = list(list_queues(layout.consume_queue))
    for number, (topic, queue_id, folder) in enumerate(queues):
        if number % _QUEUES_A_REPORT == 0:
            progress("looking at the ends of queues", number, len(queues), "queues")
        queue = ConsumeQueue(folder, config.consume_queue.file_bytes, fds)
        # No proof is needed: the dispatcher opened before this process, and cleared the units behind the ends.
        if queue.refresh(dispatched, proof=lambda *_unit: True) and not (
            topic in deleted and queue.last_offset_below(deleted[topic]) == queue.max_offset
        ):
            offsets[topic, queue_id] = queue.max_offset
    for topic, queue_id, folder in list_queues(layout.batch_consume_queue):
        batches = BatchConsumeQueue(folder, config.consume_queue.batch_file_bytes, fds)
        if batches.refresh():
            end = batches.max_offset_below(dispatched)
            if not (topic in deleted and batches.max_offset_below(deleted[topic]) >= end):
                offsets[topic, queue_id] = end
    fds.close()
    walker = LogWalker(log, max_rows=16_384, max_bytes=32 * 1024 * 1024)
    known = position if producers is None else producers.open(log, position, deleted)
    at = begin = min(dispatched, known)
    while at < position:
        batch = walker.walk(at, position)
        if producers is not None and batch.end > known:
            producers.replay(batch.after(known), deleted)
        if batch.end > dispatched:
            _count_rows(batch.after(dispatched), deleted, offsets)
        at = batch.end
        progress("counting what is not in the queues yet", at - begin, position - begin)
    progress.over()
    walker.release()
    log.close()
    context.log.info(
        "tail found",
        end=position,
        scanned_bytes=position - start,
        counted_bytes=position - begin,
        queues=len(offsets),
        seconds=round(time.monotonic() - started, 3),
    )
    return offsets, position, stamp


def _committed(context: WorkerContext, pool: TransientPool) -> int:
    """Wait until all published records are in the log's files, and zero the unpublished ones; returns the log's end.

    After a failed flush nothing is committed any more, and a node that stops commits after this process has ended. In
    both cases the end is what the files have so far: sends are refused, so nothing is appended there, and nothing is
    zeroed.
    """
    control = context.control
    deadline = monotonic_ms() + _COMMIT_PATIENCE_MS
    while control.get(Word.COMMITTED) < control.get(Word.WRITTEN):
        if control.get(Word.FLUSH_ERRNO) or context.stopping:
            return control.get(Word.COMMITTED)
        if monotonic_ms() > deadline:
            raise StoreError("what is in the transient store pool cannot be committed", path=pool.folder)
        context.wait(5)
    pool.zero_from(control.get(Word.WRITTEN))
    return control.get(Word.WRITTEN)


def _count_rows(batch: DispatchBatch, deleted: Mapping[str, int], offsets: dict[tuple[str, int], int]) -> None:
    """Raise ``offsets`` to behind the batch's last record of each queue. Records of a deleted topic do not count."""
    rows = batch.rows[consumable(batch.rows)]
    # Log order is queue order, so the last row of each queue decides. It is the first one in the reversed columns.
    keys = rows["topic"][::-1].astype(np.int64) << 32 | rows["queue_id"][::-1]
    _, last = np.unique(keys, return_index=True)
    for row in rows[::-1][last]:
        key = (batch.topics[int(row["topic"])], int(row["queue_id"]))
        if int(row["physical_offset"]) >= deleted.get(key[0], -1):
            offsets[key] = max(offsets.get(key, 0), offset_behind(row))
    for key, behind in further_offsets(batch, rows):
        offsets[key] = max(offsets.get(key, 0), behind)


def run(context: WorkerContext) -> None:
    """The loop: requests, answers whose flush is done, news of topics."""
    try:
        writer = Writer(context)
    except CorruptRecordError as error:
        raise explained(error, context.layout, context.config.commit_log.segment_bytes) from error
    stations.watch(
        ROLE,
        (context, "wait", None, Station.W_AWAKE),
        (writer, "_handle", Station.W_RECEIVED, Station.W_DONE),
        (writer.appender, "append_record", Station.W_APPEND, Station.W_APPENDED),
        (writer, "_answer", Station.W_ANSWER, Station.W_ANSWERED),
        (writer.own_sync, "sync", Station.F_SYNC, Station.F_SYNCED),
    )
    context.ready(endpoints=writer.endpoints)
    while not context.stopping:
        writer.step()
    writer.drain()
