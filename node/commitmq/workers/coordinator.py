"""The coordinator: topics, consumer groups and their offsets.

Owns (only it writes): ``config/topics.json``, ``config/consumerOffset.json``, ``config/subscriptionGroup.json``,
    ``config/consumerFilter.json``, ``run/subscriptions.json``, ``commitmq/offsets.journal``,
    ``commitmq/deleted_topics.json``, ``commitmq/deleting_topics.json``, ``commitmq/topics.journal``,
    ``commitmq/group_members.log``, ``commitmq/makers.log``; membership of groups and connected clients, in memory.
Reads: the control block's WRITTEN, MIN_OFFSET, WRITER_TOPICS and MEMORY_TOPICS, and the ConsumeQueue dispatcher's TOPICS,
    for deletions (:mod:`commitmq.coordination.topics`).
Advances: TOPICS_VERSION, SUBSCRIPTIONS_VERSION.
Sockets: ROUTER ``coordinator`` (ipc and tcp) for requests; PUB ipc ``topics`` for changes: ``[b"topics", {"version",
    "topics": {name: settings}, "ending": [[name, incarnation]], "deleted": [[name, physical offset, incarnation]]}]``.
    Exit codes: :class:`commitmq.workers.runtime.context.ExitCode`; STORE_UNUSABLE when one of its files is damaged.

A change of topics is made durable first, then counted in TOPICS_VERSION, then published. A worker that sees the word
ahead of the news it has taken (a message was lost, or this process died between file and message) reads the rest in the
files. A new coordinator advances the word at once, because it cannot know whether its predecessor still did.

The answer to a deletion waits, over many turns if need be, until the processes that take sends have ended the topic.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import orjson
import zmq

from commitmq.config import NodeConfig
from commitmq.control import Word
from commitmq.coordination.groups import Seats
from commitmq.coordination.requests import Answer
from commitmq.coordination.service import LISTS, READ_ONLY, RETRY_MS, Service, TopicNews
from commitmq.errors import ProtocolError, StoreError
from commitmq.network.gate import ShareOfTime
from commitmq.network.guard import LOCAL
from commitmq.protocol import wire
from commitmq.security.audit import Event
from commitmq.workers.runtime.context import WorkerContext, monotonic_ms

ROLE = "coordinator"

_MAX_WAIT_MS = 500  # a heartbeat for the supervisor at least this often
# After a stall (this process was stopped, or a sync took seconds) no session ends for this long: the heartbeats of that
# time are still on their way through kernel and I/O thread, and an empty socket does not prove the opposite.
_STALL_MS = 2 * _MAX_WAIT_MS
_GRACE_MS = 500
# A turn ends when no request waits or at one of these limits, which bound its memory and the wait of its first answer.
_TURN_REQUESTS = 512
_TURN_BYTES = 4 * 1024 * 1024
# The time of a turn for each kind of request. Only changes share a sync. Many questions end a turn early, so that a commit
# among them gets its answer.
_QUESTION, _OF_SESSIONS, _CHANGE = range(3)
_TURN_NS = (250_000, 1_000_000, 10_000_000)
_SHARE_OF_QUESTIONS = 0.25  # of a processor; refusals are questions too
# Clients that wait for their answers leave a turn that ends with no request waiting. Clients that ask on and on do not:
# after two turns in a row that other requests than questions brought to a limit this process rests for this many times a
# turn, so that others get the processor.
_REST = 2
_LONGEST_REST_S = 0.04
# The socket takes its clients in turns, so a client that sends without a pause delays the requests of others by less
# than this. A session that is overdue by this much ends, although requests wait.
_FLOODED_MS = 1_000

_OF_MEMBERS = ("group.join", "group.heartbeat")
_DELETION_LOOK_MS = 20
_MAX_PARKED = 10_000  # answers that wait for the end of a topic; beyond this number a request is refused at once
_STILL_ENDING = (
    "the topic is deleted, but the process that takes sends to it has not ended it yet (is it being restarted?);"
    " the deletion continues by itself, and this request may be repeated"
)


class _ParkedAnswer(NamedTuple):
    """An answer that waits for the end of a topic."""

    peer: bytes
    identity: int | None
    answer: Answer
    deadline_ms: int


class Coordinator:
    """The loop and its sockets."""

    def __init__(self, context: WorkerContext) -> None:
        """Load the files and bind. Raises StoreError when a file is damaged."""
        self._context = context
        self._log = context.log
        self._service = Service(context.layout, context.config, context.control, monotonic_ms(), context.room)
        self._seats = Seats(self._service.groups, context.config.groups.disconnect_grace_ms)
        self._service.clients.who = self._service.listing.who = self._seats.who
        self._last_turn_ms = monotonic_ms()
        self._no_expiry_before_ms = 0
        self._version = context.control.get(Word.TOPICS_VERSION) + 1
        self._publisher: zmq.Socket[bytes] = context.zmq.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 500)
        # News for a subscriber that does not read may be lost: it then sees TOPICS_VERSION ahead and reads the file.
        self._publisher.setsockopt(zmq.SNDHWM, 10_000)
        self._publisher.bind(context.layout.ipc("topics"))
        context.control.put(Word.TOPICS_VERSION, self._version)
        # With this version the other processes also learn of a deletion that a crash interrupted. It continues when
        # they confirm it.
        self._service.tell(self._version)
        self._parked: list[_ParkedAnswer] = []
        self._changed: list[tuple[Answer, Event]] = []  # in this turn, for the audit log
        # The lists that this turn answers, by their requests without ids, and their encoded answers by id().
        self._lists: dict[bytes, Answer] = {}
        self._encoded: dict[int, tuple[int, bytes]] = {}
        self._full_turns = 0  # in a row
        self._rest_s = 0.0
        self._share = ShareOfTime(_SHARE_OF_QUESTIONS)
        self._delete_timeout_ms = context.config.topics.delete_timeout_ms
        context.on_settings(self._take_settings)
        self._asked: dict[str, Any] = {}  # the request that is handled at the moment
        self._service.makers.who = lambda: self._router.user_of(self._asked)
        self._service.makers.most = lambda kind, user: getattr(context.quotas.of(user), f"{kind}s")
        self._router, self._endpoints = context.bind_router(ROLE)
        context.register(self._router)

    def _take_settings(self, config: NodeConfig) -> None:
        self._service.configure(config)
        self._seats.grace_ms = config.groups.disconnect_grace_ms
        self._delete_timeout_ms = config.topics.delete_timeout_ms

    def serve(self) -> None:
        """Serve until the supervisor says stop, then answer the requests that have arrived and write everything."""
        context = self._context
        context.ready(endpoints=self._endpoints, topics=len(self._service.topics.table.topics))
        self._log.info("ready", topics=len(self._service.topics.table.topics), endpoints=",".join(self._endpoints))
        while not context.stopping:
            if self._rest_s:
                time.sleep(self._rest_s)
            context.wait(self._timeout_ms())
            self._turn()
        self._router.line.stop_resting()
        while self._turn():
            pass
        self._refuse_parked("the node stops; the deletion continues with its next start")
        self._service.close()
        self._publisher.close()
        self._router.close()

    def _timeout_ms(self) -> int:
        due_ms, now_ms = self._service.next_ms(), monotonic_ms()
        wait_ms = _MAX_WAIT_MS if due_ms is None else max(0, min(_MAX_WAIT_MS, due_ms - now_ms))
        if self._service.awaits_writer:
            wait_ms = min(wait_ms, _DELETION_LOOK_MS)  # the process rings, but a ring may be lost
        # The due item may be a session that must not end yet; looking for it without a pause would use up the grace
        # time.
        return max(wait_ms, _GRACE_MS // 20) if now_ms < self._no_expiry_before_ms else wait_ms

    def _turn(self) -> bool:
        """Take the waiting requests, write once, answer them all. False when none waited."""
        answers: list[tuple[bytes, int | None, Answer | bytes]] = []
        taken_bytes = 0
        drained = False
        now_ms = monotonic_ms()
        if now_ms - self._last_turn_ms > _STALL_MS:
            self._no_expiry_before_ms = now_ms + _GRACE_MS
        self._last_turn_ms = now_ms
        self._service.mend(now_ms)
        began_s, began_ns = time.thread_time(), time.monotonic_ns()
        spent_ns, before_ns, kind = [0, 0, 0], began_ns, _QUESTION
        while len(answers) < _TURN_REQUESTS and taken_bytes < _TURN_BYTES and spent_ns[kind] < _TURN_NS[kind]:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                drained = True
                break
            taken_bytes += sum(map(len, frames))
            identity, answer, kind = self._handle(frames, has_left=self._router.gate.has_left(frames[0]))
            if answer is not None:
                answers.append((frames[0], identity, answer))
            now_ns = time.monotonic_ns()
            spent_ns[kind] += now_ns - before_ns
            before_ns = now_ns
        departed = self._router.gate.departed
        self._seats.ended((departed.popleft() for _ in range(len(departed))), now_ms)
        is_full = not drained and 2 * spent_ns[_QUESTION] <= sum(spent_ns)
        self._full_turns = self._full_turns + 1 if is_full else 0
        calm = now_ms >= self._no_expiry_before_ms
        self._service.tick(now_ms, expire_ms=(now_ms if drained else now_ms - _FLOODED_MS) if calm else None)
        self._end_turn(answers)
        self._service.write_snapshots(now_ms)
        turn_s = (time.monotonic_ns() - began_ns) / 1e9
        self._rest_s = min(_REST * turn_s, _LONGEST_REST_S) if self._full_turns > 1 else 0.0
        if spent_ns[_QUESTION]:
            used_s = (time.thread_time() - began_s) * spent_ns[_QUESTION] / sum(spent_ns)
            self._rest_s = max(self._rest_s, self._share.spend(used_s))
        return bool(answers)

    def _handle(self, frames: list[bytes], *, has_left: bool) -> tuple[int | None, Answer | bytes | None, int]:
        """One request's id, its answer or the bytes of its refusal, and its kind; no answer for a peer that has left, where
        the request would change nothing. ``frames`` begin with the peer's id. No content of a request raises here.
        """
        peer, frames = frames[0], frames[1:]
        header_frame = frames[0] if frames else b""
        identity: int | None = None
        try:
            header = wire.parse_request(header_frame)
            identity = header["id"]
            if len(frames) > 1:
                raise ProtocolError(
                    "INVALID_PARAMETER", f"{header['op']} takes no payload, but {len(frames) - 1} frames came"
                )
            if has_left and header["op"] in READ_ONLY:
                return identity, None, _QUESTION
            if header["op"] in LISTS:
                key = orjson.dumps({**header, "id": 0})
                if key not in self._lists:
                    self._lists[key] = self._service.handle(header, monotonic_ms())
                return identity, self._lists[key], _QUESTION
            answer = self._handle_one(peer, header)
            if header["op"] in _OF_MEMBERS and not has_left:
                self._seats.take(peer, header["group"], header["member"], lambda: self._asker(peer, header))
            kind = _CHANGE if answer.needs is not None else _QUESTION if header["op"] in READ_ONLY else _OF_SESSIONS
            return identity, answer, kind
        except ProtocolError as error:
            identity = wire.request_id(header_frame) if identity is None else identity
            return identity, wire.refused(identity, error), _QUESTION
        except StoreError as error:
            return identity, _not_available(identity, error), _QUESTION
        except Exception as error:
            self._log.exception("a request failed", error=repr(error))
            sentence = f"the coordinator failed on this request: {error!r}"
            return identity, wire.error(identity, "SYSTEM_ERROR", sentence), _QUESTION

    def _asker(self, peer: bytes, header: dict[str, Any]) -> tuple[str, str]:
        """User and address of who asked: an IP address, or on this host "process PID"."""
        actor, connection = self._router.actor(peer, header, looks_up=False), self._router.gate.peers.get(peer)
        if connection is not None and actor.address in ("", LOCAL):
            return actor.name, connection.client
        return actor.name, actor.address

    def _handle_one(self, peer: bytes, header: dict[str, Any]) -> Answer:
        self._asked = header
        change = self._service.changes.of(header)
        if change is None:
            return self._service.handle(header, monotonic_ms())
        event = Event(
            self._router.actor(peer, header),
            change.operation or header["op"],
            change.resource,
            request=header["id"],
            before=change.before,
            after=change.after,
        )
        with self._context.audit.changing(event):
            answer = self._service.handle(header, monotonic_ms())
        self._changed.append((answer, event))
        return answer

    def _end_turn(self, answers: list[tuple[bytes, int | None, Answer | bytes]]) -> None:
        service = self._service
        news = service.end_turn(monotonic_ms())
        if news is not None:
            self._publish(news)
        for changed, event in self._changed:
            if (fault := service.fault(changed.needs)) is not None:
                self._context.audit.failed(event, str(fault))
        self._changed.clear()
        now_ms = monotonic_ms()
        for peer, identity, answer in answers:
            if self._must_wait(answer):
                assert isinstance(answer, Answer)
                self._parked.append(_ParkedAnswer(peer, identity, answer, now_ms + self._delete_timeout_ms))
                continue
            self._router.send_multipart([peer, self._encode(identity, answer)])
        if self._parked:
            self._answer_parked(now_ms)
        self._lists.clear()
        self._encoded.clear()
        service.forget_faults()

    def _must_wait(self, answer: Answer | bytes) -> bool:
        """Whether an answer waits for the end of a topic. A disk that refuses the deletion is told at once."""
        return (
            isinstance(answer, Answer)
            and answer.after is not None
            and self._service.is_ending(answer.after)
            and self._service.fault("topics") is None
            and len(self._parked) < _MAX_PARKED
        )

    def _answer_parked(self, now_ms: int) -> None:
        waiting = []
        for one in self._parked:
            assert one.answer.after is not None
            is_over = not self._service.is_ending(one.answer.after) or self._service.fault("topics") is not None
            if is_over or one.deadline_ms <= now_ms:
                self._router.send_multipart([one.peer, self._encode(one.identity, one.answer)])
            else:
                waiting.append(one)
        self._parked = waiting

    def _refuse_parked(self, reason: str) -> None:
        for one in self._parked:
            self._router.send_multipart([one.peer, wire.error(one.identity, "SERVICE_NOT_AVAILABLE", reason)])
        self._parked.clear()

    def _encode(self, identity: int | None, answer: Answer | bytes) -> bytes:
        if isinstance(answer, bytes):
            return answer
        fault = self._service.fault(answer.needs)
        if fault is not None:
            return _not_available(identity, fault)
        if answer.after is not None and self._service.is_ending(answer.after):
            return wire.error(identity, "SERVICE_NOT_AVAILABLE", _STILL_ENDING, retry_after_ms=RETRY_MS)
        shared = self._encoded.get(id(answer))
        if shared is not None:
            return wire.answer_again(shared[1], shared[0], identity or 0)
        try:
            fields: dict[str, Any] = answer.fields()
            encoded = wire.ok(identity or 0, **fields)
            if self._lists and any(answer is one for one in self._lists.values()):
                self._encoded[id(answer)] = identity or 0, encoded
            return encoded
        except Exception as error:
            self._log.exception("an answer could not be made", error=repr(error))
            return wire.error(identity, "SYSTEM_ERROR", f"the coordinator failed on this request: {error!r}")

    def _publish(self, news: TopicNews) -> None:
        self._version += 1
        self._service.tell(self._version)
        self._context.control.put(Word.TOPICS_VERSION, self._version)
        message = {"version": self._version, "topics": news.topics, "ending": news.ending, "deleted": news.deleted}
        self._publisher.send_multipart([b"topics", orjson.dumps(message)])


def _not_available(identity: int | None, error: OSError | StoreError) -> bytes:
    return wire.error(identity, "SERVICE_NOT_AVAILABLE", str(error), retry_after_ms=RETRY_MS)


def run(context: WorkerContext) -> None:
    """Serve until asked to stop."""
    Coordinator(context).serve()
