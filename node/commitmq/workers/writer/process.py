"""writer: the only process that appends to the CommitLog; producers send to its address.

Owns: the CommitLog's tail, queue offsets, the table of idempotent producers (workers.writer.producers). Reads: the
topic table, ``flushed``, disk flags, the ConsumeQueue dispatcher's flags. Advances: ``written``, ``written_timestamp``
(:mod:`commitmq.workers.writer.log_tail`), ``flush_wanted``, ``writer_topics``, ``writer_synced``
(:mod:`commitmq.workers.writer.writer_sync`). Sockets: ROUTER (ipc and tcp) for producers, a Unix socket for single
sends (:mod:`commitmq.workers.writer.local_sockets`); DEALER to the coordinator
(:mod:`commitmq.workers.writer.unknown_topics`); SUB ``topics`` (:class:`TopicListener`); doorbell
(rung by flush and allocate); rings flush and the coordinator, and in asynchronous mode reput. Exit codes:
workers.runtime.context.ExitCode.

Start: :mod:`commitmq.workers.writer.log_tail` finds the log's end and the queue offsets.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from commitmq import failpoints
from commitmq.control import Word
from commitmq.errors import CorruptRecordError, ProtocolError
from commitmq.network.router import LONG_HEADER_BYTES, MAX_FRAMES
from commitmq.offline.log_damage import explained
from commitmq.protocol import wire
from commitmq.workers.flush import attach_pool
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms
from commitmq.workers.runtime.topic_view import TopicViews
from commitmq.workers.writer.local_sockets import Frames, LocalSockets, Payload, Peer
from commitmq.workers.writer.log_tail import LogTail, recover_tail
from commitmq.workers.writer.producers import ProducerStateManager
from commitmq.workers.writer.put_rules import SendChecks
from commitmq.workers.writer.send_answers import PendingAck
from commitmq.workers.writer.send_requests import SendRequests
from commitmq.workers.writer.unknown_topics import UnknownTopics
from commitmq.workers.writer.writer_sync import InlineFsync


class TopicListener:
    """The coordinator's news of topics, and the writer's confirmation that it has heard of a deletion.

    A topic ends when this process hears of the deletion, before the coordinator reads the log's end for the tombstone
    (:mod:`commitmq.coordination.topics`): the writer takes no more messages for the topic, forgets its queue offsets,
    and then confirms the deletion in ``writer_topics``. It confirms nothing before its own start has published the log's
    end.

    SUB socket ``topics``, and the topic table that it keeps up to date.
    """

    def __init__(self, context: WorkerContext, topics: TopicViews) -> None:
        """Subscribe: nothing that is published from now on is missed. :meth:`say_heard` belongs to the end of the start."""
        self._control = context.control
        self._topics = topics
        self._bell = context.ringer("coordinator")
        self.socket: zmq.Socket[bytes] = context.zmq.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"topics")
        self.socket.connect(context.layout.ipc("topics"))

    def hear(self) -> Iterator[str]:
        """Take the news. Yields the topics that ended, and confirms their deletion after that."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._topics.hear(self.socket.recv_multipart(zmq.NOBLOCK)[-1])
                yield from self._topics.ended
        if self._topics.is_stale:
            self._topics.reload()
            yield from self._topics.ended
        self.say_heard()

    def say_heard(self) -> None:
        """Confirm the deletions that this process knows, so that the coordinator continues them."""
        version = self._topics.version
        if version == self._control.get(Word.WRITER_TOPICS):
            return
        if failpoints.ACTIVE:
            failpoints.hit("writer.before_heard")
        self._control.put(Word.WRITER_TOPICS, version)
        if self._topics.has_endings:
            self._bell.ring()
        if failpoints.ACTIVE:
            failpoints.hit("writer.after_heard")


# Plain ints: an enum's operators and look-ups cost half a microsecond each, several times a send.
_send = zmq.backend.Socket.send  # that of the subclass only adds options of other kinds of sockets
_NOBLOCK = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.SNDMORE) | _NOBLOCK
_FLUSHED, _FLUSH_WANTED = int(Word.FLUSHED), int(Word.FLUSH_WANTED)
_PRODUCERS_KNOWN, _PRODUCERS_WANTED = int(Word.PRODUCERS_KNOWN), int(Word.PRODUCERS_WANTED)
_SENDS = ("send", "append", "batch", "send_back", "recall")
_KNOWN_LOCALLY, _KNOWN = "the local socket knows send and append", f"the writer knows hello, {', '.join(_SENDS)}"
_POLL_MS = 200
_TURN_REQUESTS = 256
_TURN_BYTES = 8 * 1024 * 1024
_DRAIN_MS = 10_000
_FINISH_MS = 2_000


class Writer:
    """The loop's state: sockets, sends that wait for a flush, sends that wait for a topic."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._control = context.control
        config = context.config
        self._topics = TopicViews(context.layout, context.control)
        self._news = TopicListener(context, self._topics)
        pool = attach_pool(context) if self._control.get(Word.POOL_BUFFERS) else None
        self._producers = ProducerStateManager(context.layout, config, context.log, context.room)
        self.inline_fsync = InlineFsync(context, pooled=pool is not None)
        offsets, position, stamp = recover_tail(context, self._producers, pool, self._topics.tombstones())
        if pool is not None:
            pool.advise_huge()
        tail = LogTail(context, pool, position, stamp)
        self.appender = tail.appender
        self._flush, self._reput = context.ringer("flush"), context.ringer("reput")
        self._allocate = context.ringer("allocate")
        self._known, self._wanted, self._turns = self._producers.durable, 0, 0
        self._control.put(Word.PRODUCERS_KNOWN, self._known)
        self._control.put(Word.WRITER_GENERATION, self._control.get(Word.WRITER_GENERATION) + 1)
        tail.publish()
        self.router, self.endpoints = context.bind_router("writer", takes_payload=True)
        # Every turn ends with a look for requests, and nothing touches the socket between that look and the wait.
        context.register(self.router, quiet=True)
        watch, has_guard = (context.register, context.unregister), self.router.guard is not None
        most = config.network.max_local_connections
        self.local = LocalSockets(context.layout.local_socket, most, *watch, context.log, only_own=has_guard)
        self._checks = SendChecks(context, self._topics)
        self.requests = SendRequests(
            context,
            tail.appender,
            offsets,
            self._checks,
            tail.publish,
            self._producers,
            topics=self._topics,
            local_socket=self.local.path,
            port=self.router,
        )
        self._unknown = UnknownTopics(context, self._topics, self.router.guard)
        context.register(self._news.socket, quiet=True)
        # True when a message may be waiting on the ZeroMQ socket. ZMQ_FD is edge-triggered: any call on the socket may
        # consume the event, so no turn ends with a wait while this is true. Asking costs two system calls, which turns
        # for the local sockets leave out.
        # ``_is_told``: by epoll, of something on that socket. Mostly a request is there.
        self._look, self._is_told = True, False
        self._arrived: list[tuple[int, list[Payload]]] = []
        self._waiting: deque[PendingAck] = deque()
        self._last_waiting: Peer = b""
        self._requests = 0  # handled since the last decision about an inline fsync
        self._segment = self.appender.position // config.commit_log.segment_bytes
        self._news.say_heard()

    # ------------------------------------------------------------ one turn

    def take_requests(self, local: Sequence[tuple[int, Frames]] = ()) -> bool:
        """Handle ``local`` requests and those over ZeroMQ, up to a turn's limits; True when there may be more."""
        before, wanted, budget = self.appender.position, 0, _TURN_BYTES
        answer: bytes | PendingAck | None
        for number, parts in local:
            answer = self._handle(number, parts)
            if isinstance(answer, PendingAck):
                self._waiting.append(answer)
                wanted = answer.end
            elif answer is not None:
                self._answer(number, answer)
        router = self.router
        gate, line = router.gate, router.line
        more, told, self._is_told = self._look, self._is_told, False
        for _ in range(_TURN_REQUESTS if more or line.waiting else 0):
            if line.waiting and (long := router.take_long()) is not None:
                identity, *frames = long
            else:
                first, told = router.next_sender(told=told), False
                if first is None:
                    more = self._look = False
                    gate.looks += 1
                    gate.is_empty = True
                    break
                gate.is_empty, identity = False, first
                frames = [frame := router.recv(_NOBLOCK, copy=False)]
                while frame.more:
                    if len(frames) > MAX_FRAMES:
                        router.skip_rest(identity, gate.peers.get(identity))
                        break
                    frame = router.recv(_NOBLOCK, copy=False)
                    frames.append(frame)
                if (connection := gate.peers.get(identity) or router.meet(identity, frames[0])) is None:
                    continue
                connection.handled += (size := sum(map(len, frames)) + connection.head_bytes * len(frames))
                is_plain = not line.waiting and not connection.ending and len(frames[0]) <= LONG_HEADER_BYTES
                if not is_plain and router.sets_aside([identity, *frames], size, connection):
                    continue
            if router.guard is not None and router.turns_away(router.guard, identity, frames[0]):
                self._look = True
                continue
            answer = self._handle(identity, frames)
            if isinstance(answer, PendingAck):
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
        if self.requests.busy is not None:
            self.requests.busy.end_turn(more=more)
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
            and self.inline_fsync.suits(position)
            and self.inline_fsync.sync(position, self.appender.last_timestamp)
        )

    def _wake_followers(self, *, urgent: bool) -> None:
        """Ring flush and allocate. Not urgent: no sender waits for the flush, so flush is woken only from a long sleep."""
        self._flush.ring(urgent=urgent)
        if not self._context.config.sync_flush:
            self._reput.ring(urgent=False)
        segment = self.appender.position // self.appender.segment_bytes
        if segment != self._segment:
            self._segment = segment
            self.inline_fsync.roll()
            self._allocate.ring()

    def _handle(self, identity: Peer, frames: Frames) -> bytes | PendingAck | None:
        if not isinstance(identity, int) and len(frames[0]) > wire.MAX_HEADER_BYTES:  # it may have 64 MiB: no copy
            return wire.error(None, "BAD_HEADER", wire.too_long(len(frames[0])), outcome="not_stored")
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

    def _dispatch(self, identity: Peer, header: dict[str, Any], frames: Frames) -> bytes | PendingAck | None:
        op = header["op"]
        if op == "hello":
            if len(frames) != 1:
                return wire.error(header["id"], "INVALID_PARAMETER", "hello takes no payload", outcome="not_stored")
            return self.requests.hello(header, frames[0])
        if op not in _SENDS or (op not in _SENDS[:2] and isinstance(identity, int)):
            known = _KNOWN_LOCALLY if isinstance(identity, int) else _KNOWN
            return wire.error(header["id"], "UNKNOWN_OP", f"{known}, not {op!r}", outcome="not_stored")
        topic = header.get("topic")
        if (
            type(topic) is str
            and self._topics.get(topic) is None
            and len(frames) == 2
            and op not in ("send_back", "recall")
            and self._checks.may_be_made(header, topic)
        ):
            return self._unknown.ask(identity, topic, header, frames)
        return self.requests.send(identity, header, frames)

    def _answer(self, identity: Peer, answer: bytes) -> None:
        if isinstance(identity, int):
            self.local.answer(identity, answer)
            return
        self._look = True
        try:  # (contextlib.suppress costs as much as a send)
            _send(self.router, identity, _SEND_MORE)
            _send(self.router, answer, _NOBLOCK)
        except zmq.ZMQError:  # the peer has gone, so its answer is dropped
            pass

    # ------------------------------------------------------------ waiting for the flush

    def answer_flushed(self) -> None:
        """Answer every send whose end is flushed, whose time is up, or whose flush failed."""
        waiting = self._waiting
        if not waiting:
            return
        flushed = max(self._control.get(_FLUSHED), self.inline_fsync.synced)
        while waiting and waiting[0].end <= flushed:
            one = waiting.popleft()
            self._answer(one.identity, one.answer)
            if one.began_ns and self.requests.counts is not None:
                self.requests.counts.acked(one.began_ns)
        if not waiting:
            return
        if self._control.get(Word.FLUSH_ERRNO):
            sentence = "the message is in the log, but the device refused to make it durable"
            while waiting:
                self._fail(waiting.popleft(), "FLUSH_DISK_TIMEOUT", sentence, "unknown")
            return
        now, limit_ms = monotonic_ms(), self._context.config.commit_log.sync_flush_timeout_ms
        while waiting and waiting[0].deadline_ms <= now:
            sentence = f"stored, but not flushed within {limit_ms} ms"
            self._fail(waiting.popleft(), "FLUSH_DISK_TIMEOUT", sentence, "stored")

    def _fail(self, one: PendingAck, code: str, sentence: str, outcome: str) -> None:
        self._answer(one.identity, wire.error(one.request_id, code, sentence, outcome=outcome, **one.fields))

    # ------------------------------------------------------------ topics

    def hear_coordinator(self) -> None:
        """Take the coordinator's answers about topics, and handle the sends that waited for them."""
        for sends, refusal in self._unknown.hear():
            wanted = 0
            for identity, header, frames in sends:
                answer: bytes | PendingAck
                if refusal is not None:
                    more = {key: refusal[key] for key in ("retry_after_ms",) if key in refusal}
                    answer = wire.error(header["id"], refusal["code"], refusal["error"], outcome="not_stored", **more)
                else:
                    answer = self.requests.send(identity, header, frames)
                if isinstance(answer, PendingAck):
                    self._waiting.append(answer)
                    wanted = answer.end
                else:
                    self._answer(identity, answer)
            if wanted:
                self._control.put(Word.FLUSH_WANTED, max(wanted, self._control.get(Word.FLUSH_WANTED)))
                self._wake_followers(urgent=True)

    def _hear_news(self) -> None:
        """Take the news of topics, and forget the topics that ended. Nothing was appended since they left the table, so
        the log's end is behind all their records.
        """
        for topic in self._news.hear():
            self.requests.forget_topic(topic)
            self._producers.forget_topic(topic, self.appender.position)

    # ------------------------------------------------------------ the end

    def drain(self) -> None:
        """Take no more requests; wait until every message acknowledged as flushed is flushed."""
        for name in self.endpoints:
            with contextlib.suppress(zmq.ZMQError):
                self.router.unbind(name)
        self.router.line.stop_resting()
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
        self.inline_fsync.close()
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
        more = self.take_requests(self._arrived)
        while not more and self.appender.populate_ahead():
            # Between requests the kernel maps the next pages to append to, a piece at a time.
            more = self._look = self.router.has_request
        if self.requests.counts is not None:
            self.requests.counts.settle(len(self._waiting))
        timeout_ms = 0 if more else 20 if self._waiting or self._unknown.deadlines else _POLL_MS
        readable = self._context.wait(timeout_ms, self._flush_done)
        self._arrived = self.local.requests(readable)
        if self.router in readable:
            self._look = self._is_told = True
        if self._waiting:
            self.answer_flushed()
        if self._unknown.socket in readable or self._unknown.deadlines:
            self.hear_coordinator()
        if self._news.socket in readable or self._topics.is_stale:
            self._hear_news()
        # Looking at every word costs a call: while local requests follow each other, only one turn in 64 looks.
        self._turns += 1
        if not (self._arrived and self._turns & 63):
            self._wanted = self._control.get(_PRODUCERS_WANTED)
        flush_to = self._producers.turn(self.appender.position, self._control.get(_FLUSHED), self._wanted)
        if flush_to and flush_to > self._control.get(_FLUSH_WANTED):
            self._control.put(_FLUSH_WANTED, flush_to)
            self._flush.ring(urgent=True)
        if self._producers.durable != self._known:
            self._known = self._producers.durable
            self._control.put(_PRODUCERS_KNOWN, self._known)

    def _flush_done(self) -> bool:
        waiting = self._waiting
        return bool(waiting) and max(self._control.get(_FLUSHED), self.inline_fsync.synced) >= waiting[0].end


def run(context: WorkerContext) -> None:
    """The loop: requests, answers whose flush is done, news of topics."""
    try:
        writer = Writer(context)
    except CorruptRecordError as error:
        raise explained(error, context.layout, context.config.commit_log.segment_bytes) from error
    context.ready(endpoints=writer.endpoints)
    while not context.stopping:
        writer.step()
    writer.drain()
