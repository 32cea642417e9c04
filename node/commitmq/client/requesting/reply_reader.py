"""How a producer gets the replies to its requests: one reader, and those who wait, by correlation id.

The reader begins at the end of one queue of the reply topic before the first request is sent, so it misses no reply. It asks
the node for its own tag only. While nobody waits it asks nothing.

The two messages of an exchange: the request with the marks that lead to its requester, and the reply to it (spec 12.8).

A node of RocketMQ adds CLUSTER to a single message; here the requester does, because it knows the reply topic anyway.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commitmq.client.message import Message
from commitmq.client.routes import Routes, not_stored
from commitmq.errors import (
    CommitMQError,
    CorruptRecordError,
    InvalidMessageError,
    NodeUnavailableError,
    ProtocolError,
    RequestTimeoutError,
)
from commitmq.format.constants import Property
from commitmq.log import get_log
from commitmq.semantics import reply

if TYPE_CHECKING:
    from commitmq.client.receiving.base_consumer import BaseConsumer


def request_message(body: bytes | Message, fields: Mapping[str, Any], marks: Mapping[str, str]) -> Message:
    """The message of a request, which a send of ``body`` with ``fields`` would store.

    ``marks``: the properties that lead to the requester. Raises InvalidMessageError.
    """
    made = _copy(Message.of(body, fields))
    made.properties.update(marks)
    return made


class ReplyMessage(NamedTuple):
    """A reply, its topic, and the queue in which its requester reads; ``queue`` is None for a requester of another kind."""

    topic: str
    message: Message
    queue: int | None
    client_id: str


def reply_message(request: Message, body: bytes | Message, properties: Mapping[str, str] | None) -> ReplyMessage:
    """The reply to ``request``, a received message. Raises InvalidMessageError when that is no request.

    The requester's id is its tag too: the node skips the replies to others without reading them.
    """
    lead = reply.reply_to(request.properties)
    if isinstance(body, Message):
        if properties is not None:
            raise InvalidMessageError("a Message carries its own properties: give none beside it")
        made = _copy(body)
    else:
        made = Message(body, properties=properties)
    client_id = lead.properties[Property.REPLY_TO_CLIENT]
    made.properties.update(lead.properties)
    made.properties[Property.TAGS] = client_id
    return ReplyMessage(lead.topic, made, reply.queue_of_requester(client_id), client_id)


def _copy(message: Message) -> Message:
    """A message of its own, which gets further properties; the program's stays as it is."""
    made = Message(message.body, flag=message.flag)
    made.properties.update(message.properties)
    return made


_POLL_S: Final = 1.0
_JOIN_S: Final = 5.0

_log = get_log("producer")


class AwaitedReply(NamedTuple):
    """One request whose reply is awaited. ``marks`` are the properties of its message."""

    correlation_id: str
    marks: dict[str, str]
    reply: Future[Message]


def no_reply(topic: str, waiting: AwaitedReply, limit_s: float) -> RequestTimeoutError:
    """The error of a request that timed out."""
    sentence = f"no reply to the request in topic {topic!r} came within {limit_s} s; the request itself is stored"
    return RequestTimeoutError(sentence, correlation_id=waiting.correlation_id)


class ReplyReader:
    """Thread-safe."""

    def __init__(self, node: str | None, routes: Routes, *, max_waiting: int, timeout_s: float) -> None:
        """``timeout_s`` bounds each request of the reader. Nothing is connected yet."""
        self.late = 0
        """Replies that came when nobody waited for them any more."""
        self._node, self._routes = node, routes
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: dict[str, Future[Message]] = {}
        self._reader: BaseConsumer | None = None
        self._thread: threading.Thread | None = None
        self._cluster = self._client_id = ""
        self._is_closed = False

    @property
    def is_started(self) -> bool:
        """Whether :meth:`start` has nothing to do."""
        return self._reader is not None

    def start(self, deadline: float) -> None:
        """Begin to read replies, unless that is under way. Raises SendError (not stored)."""
        if self._reader is not None:
            return
        if not self._starting.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise not_stored("NODE_UNAVAILABLE", "the reader of replies did not start in time")
        try:
            if self._reader is None:
                self._start(deadline)
        finally:
            self._starting.release()

    def _start(self, deadline: float) -> None:
        # It needs numpy, and a producer does not.
        from commitmq.client.receiving.base_consumer import BaseConsumer

        topic, queues = self._routes.reply_topic(deadline)
        queue = secrets.randbelow(queues)
        client_id = reply.requester_id(queue, secrets.token_hex(8))
        try:
            reader = BaseConsumer(
                group=None,
                queues=[(topic, queue)],
                start="latest",
                filter=client_id,
                node=self._node,
                timeout_s=max(min(self._timeout_s, deadline - time.monotonic()), 0.01),
            )
        except (NodeUnavailableError, ProtocolError) as error:
            raise not_stored(error.code, f"the replies cannot be read: {error.message}") from error
        with self._changed:
            if self._is_closed:
                reader.close()
                raise CommitMQError("the producer is closed")
            self._cluster = topic.removesuffix(reply.REPLY_TOPIC_POSTFIX)
            self._client_id = client_id
            self._reader = reader
            self._thread = threading.Thread(
                target=self._run, args=(reader, (topic, queue)), name="commitmq-replies", daemon=True
            )
            self._thread.start()

    def open(self, ttl_s: float) -> AwaitedReply:
        """Wait for a reply from now on. :meth:`drop` must follow. Raises SendError (not stored) while too many wait."""
        correlation_id = str(uuid.uuid4())
        awaited: Future[Message] = Future()
        with self._changed:
            if self._is_closed:
                raise CommitMQError("the producer is closed")
            if self._reader is None:
                raise not_stored(
                    "SERVICE_NOT_AVAILABLE", "the reader of replies has just ended; send the request again"
                )
            if len(self._waiting) >= self._max_waiting:
                raise not_stored(
                    "CLIENT_BUFFER_FULL", f"{self._max_waiting} requests wait for their replies (max_requests)"
                )
            self._waiting[correlation_id] = awaited
            marks = reply.request_properties(correlation_id, self._client_id, max(int(ttl_s * 1000), 1))
            marks[Property.CLUSTER] = self._cluster
            if len(self._waiting) == 1:
                self._changed.notify()
        return AwaitedReply(correlation_id, marks, awaited)

    def drop(self, waiting: AwaitedReply) -> None:
        """Wait no longer; a reply that comes later is counted."""
        with self._changed:
            self._waiting.pop(waiting.correlation_id, None)

    def close(self) -> None:
        """Who waits gets CommitMQError."""
        with self._changed:
            self._is_closed = True
            reader, thread = self._reader, self._thread
            self._changed.notify()
        self._fail(CommitMQError("the producer was closed while a request waited for its reply"))
        if reader is not None:
            reader.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    # ------------------------------------------------------------ the thread

    def _run(self, reader: BaseConsumer, queue: tuple[str, int]) -> None:
        error: Exception = CommitMQError("the reader of replies has ended")
        try:
            while self._wait_for_requests():
                try:
                    self._take(reader.poll(_POLL_S).messages())
                except CorruptRecordError as damage:
                    _log.warning("a damaged reply is skipped", error=str(damage))
                    reader.seek(*queue, reader.positions[queue] + 1)
        except Exception as problem:
            if not self._is_closed:
                _log.error("replies cannot be read", error=str(problem))
            error = problem
        finally:
            with self._changed:
                if self._reader is reader:
                    self._reader = None  # the next request starts another one
            self._fail(error)
            reader.close()

    def _wait_for_requests(self) -> bool:
        """False at the end."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            return not self._is_closed

    def _take(self, messages: Iterable[Message]) -> None:
        for message in messages:
            properties = message.properties
            if reply.receiver_of(properties) != self._client_id:
                continue  # another tag with the same hash
            with self._changed:
                awaited = self._waiting.pop(properties.get(Property.CORRELATION_ID, ""), None)
                self.late += awaited is None
            if awaited is not None:
                properties[reply.ARRIVE_TIME] = str(time.time_ns() // 1_000_000)
                with contextlib.suppress(Exception):  # cancelled in the meantime
                    awaited.set_result(message)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            lost, self._waiting = self._waiting, {}
        for awaited in lost.values():
            with contextlib.suppress(Exception):  # cancelled in the meantime
                awaited.set_exception(error)
