"""The coordinator: topics, consumer groups and their offsets.

Owns (only it writes): ``config/topics.json``, ``config/consumerOffset.json``, ``config/subscriptionGroup.json``,
    ``commitmq/offsets.journal``, ``commitmq/deleted_topics.json``, ``commitmq/deleting_topics.json``,
    ``commitmq/group_members.json``; membership of groups, in memory.
Reads: the control block's WRITTEN and MIN_OFFSET, for tombstones.
Advances: TOPICS_VERSION.
Sockets: ROUTER ``coordinator`` (ipc and tcp) for requests; PUB ipc ``topics`` for what changed:
    ``[b"topics", {"version", "topics": {name: settings}, "deleted": [[name, physical offset]]}]``.
Exit codes: :class:`commitmq.workers.runtime.ExitCode`; STORE_UNUSABLE when a file of it is damaged.

A change of topics is durable first, then counted in TOPICS_VERSION, then published. A worker that sees the word ahead
of what it heard (a message was lost, or this process died between file and message) reads ``topics.json``. A new
coordinator advances the word at once, because it cannot know whether its predecessor still did.
"""

from __future__ import annotations

from typing import Any

import orjson
import zmq

from commitmq.client import wire
from commitmq.control import Word
from commitmq.coordination.service import RETRY_MS, Answer, Service, TopicNews
from commitmq.errors import ProtocolError, StoreError
from commitmq.workers.runtime import WorkerContext, monotonic_ms

ROLE = "coordinator"

_MAX_WAIT_MS = 500  # a heartbeat for the supervisor at least this often
# After a stall (this process was stopped, or a sync took seconds) no session ends for this long: the heartbeats of that
# time are on their way through kernel and I/O thread, and an empty socket does not say that they are not.
_STALL_MS = 2 * _MAX_WAIT_MS
_GRACE_MS = 500
# A turn ends when nothing waits or at one of these limits, which bound its memory and the wait of its first answer.
_TURN_REQUESTS = 512
_TURN_BYTES = 4 * 1024 * 1024


class Coordinator:
    """The loop and its sockets."""

    def __init__(self, context: WorkerContext) -> None:
        """Load the files and bind. Raises StoreError when a file is damaged."""
        self._context = context
        self._log = context.log
        self._service = Service(context.layout, context.config, context.control, monotonic_ms())
        self._last_turn_ms = monotonic_ms()
        self._no_expiry_before_ms = 0
        self._version = context.control.get(Word.TOPICS_VERSION) + 1
        self._publisher: zmq.Socket[bytes] = context.zmq.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 500)
        # News for a subscriber that does not read may be lost: it sees TOPICS_VERSION and reads the file.
        self._publisher.setsockopt(zmq.SNDHWM, 10_000)
        self._publisher.bind(context.layout.ipc("topics"))
        context.control.put(Word.TOPICS_VERSION, self._version)
        # A deletion that a crash interrupted is finished before anyone can ask for the topic.
        self._end_turn([])
        self._router, self._endpoints = context.bind_router(ROLE)
        context.register(self._router)

    def serve(self) -> None:
        """Turn until the supervisor says stop, then answer what has arrived and write everything."""
        context = self._context
        context.ready(endpoints=self._endpoints, topics=len(self._service.topics.table.topics))
        self._log.info("ready", topics=len(self._service.topics.table.topics), endpoints=",".join(self._endpoints))
        while not context.stopping:
            context.wait(self._timeout_ms())
            self._turn()
        while self._turn():
            pass
        self._service.close()
        self._publisher.close()
        self._router.close()

    def _timeout_ms(self) -> int:
        due_ms, now_ms = self._service.next_ms(), monotonic_ms()
        wait_ms = _MAX_WAIT_MS if due_ms is None else max(0, min(_MAX_WAIT_MS, due_ms - now_ms))
        # What is due may be a session that must not end yet; looking for it without a pause would burn the grace.
        return max(wait_ms, _GRACE_MS // 20) if now_ms < self._no_expiry_before_ms else wait_ms

    def _turn(self) -> bool:
        """Take the requests that wait, write once, answer them all; False when none waited."""
        answers: list[tuple[bytes, int | None, Answer | bytes]] = []
        taken_bytes = 0
        drained = False
        now_ms = monotonic_ms()
        if now_ms - self._last_turn_ms > _STALL_MS:
            self._no_expiry_before_ms = now_ms + _GRACE_MS
        self._last_turn_ms = now_ms
        while len(answers) < _TURN_REQUESTS and taken_bytes < _TURN_BYTES:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                drained = True
                break
            taken_bytes += sum(map(len, frames))
            answers.append((frames[0], *self._handle(frames[1:])))
        if drained:
            self._service.tick(now_ms, expire=now_ms >= self._no_expiry_before_ms)
        self._end_turn(answers)
        return bool(answers)

    def _handle(self, frames: list[bytes]) -> tuple[int | None, Answer | bytes]:
        """One request's id and its answer, or the bytes of its refusal. Nothing a client sends raises here."""
        header_frame = frames[0] if frames else b""
        identity: int | None = None
        try:
            header = wire.parse_request(header_frame)
            identity = header["id"]
            if len(frames) > 1:
                raise ProtocolError(
                    "INVALID_PARAMETER", f"{header['op']} takes no payload, but {len(frames) - 1} frames came"
                )
            return identity, self._service.handle(header, monotonic_ms())
        except ProtocolError as error:
            identity = wire.request_id(header_frame) if identity is None else identity
            return identity, _refusal(identity, error)
        except StoreError as error:
            return identity, _not_available(identity, error)
        except Exception as error:
            self._log.exception("a request failed", error=repr(error))
            return identity, wire.error(identity, "SYSTEM_ERROR", f"the coordinator failed on this request: {error!r}")

    def _end_turn(self, answers: list[tuple[bytes, int | None, Answer | bytes]]) -> None:
        service = self._service
        news = service.end_turn(monotonic_ms())
        if news is not None:
            self._publish(news)
        for peer, identity, answer in answers:
            self._router.send_multipart([peer, self._encode(identity, answer)])
        service.forget_faults()

    def _encode(self, identity: int | None, answer: Answer | bytes) -> bytes:
        if isinstance(answer, bytes):
            return answer
        fault = self._service.fault(answer.needs)
        if fault is not None:
            return _not_available(identity, fault)
        try:
            fields: dict[str, Any] = answer.fields()
            return wire.ok(identity or 0, **fields)
        except Exception as error:
            self._log.exception("an answer could not be made", error=repr(error))
            return wire.error(identity, "SYSTEM_ERROR", f"the coordinator failed on this request: {error!r}")

    def _publish(self, news: TopicNews) -> None:
        self._version += 1
        self._context.control.put(Word.TOPICS_VERSION, self._version)
        message = {"version": self._version, "topics": news.topics, "deleted": news.deleted}
        self._publisher.send_multipart([b"topics", orjson.dumps(message)])


def _refusal(identity: int | None, error: ProtocolError) -> bytes:
    more = {} if error.retry_after_ms is None else {"retry_after_ms": error.retry_after_ms}
    return wire.error(identity, error.code, error.message, **more)


def _not_available(identity: int | None, error: StoreError) -> bytes:
    return wire.error(identity, "SERVICE_NOT_AVAILABLE", str(error), retry_after_ms=RETRY_MS)


def run(context: WorkerContext) -> None:
    """Serve until asked to stop."""
    Coordinator(context).serve()
