"""Message trace: what a producer sent and what handlers made of messages, as RocketMQ's records in its trace topic.

The traced path only appends to a bounded queue: a run that was stored is one entry, whose bytes are kept, not copied. A thread
of its own reads the records of the run, makes trace records of them (:mod:`commitmq.semantics.trace`), and sends these in
batches, with a producer of its own, acknowledged from memory. What finds no room, and what the node does not take, is dropped
and counted: a trace is never worth a message.

OpenTelemetry: the context of a trace travels in message properties, and sends and handlers have spans of their own.

The context is W3C's: the property ``traceparent``, and ``tracestate`` where there is one. Without opentelemetry-api, or when
no trace is under way, messages and handlers are as they were. It is imported at the first span, and not before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any, Final, NamedTuple, Protocol, Self

import orjson

from commitmq.client.handling.consume_result import ConsumeResult, RetryLater
from commitmq.client.handling.settings import AsyncHandler, AsyncMiddleware, Handler, Middleware, Returned
from commitmq.client.message import Message
from commitmq.errors import CommitMQError, InvalidMessageError
from commitmq.format.constants import KEY_SEPARATOR, Property
from commitmq.format.message_id import parse_offset_message_id
from commitmq.log import get_log
from commitmq.semantics import trace
from commitmq.semantics.transaction import HALF_TOPIC

_NAME: Final = "commitmq"
_PACKAGE: Final = "opentelemetry"


def _opentelemetry() -> tuple[Any, Any] | None:
    """Its modules ``propagate`` and ``trace``; None where the API is not installed."""
    if _PACKAGE not in sys.modules and not _is_installed():
        return None
    return import_module(f"{_PACKAGE}.propagate"), import_module(f"{_PACKAGE}.trace")


@cache
def _is_installed() -> bool:
    return find_spec(_PACKAGE) is not None


@contextlib.contextmanager
def send_span(topic: str) -> Iterator[dict[str, str]]:
    """A span of a producer, around the sends to ``topic``: they take the properties that it gives.

    ``with send_span("orders") as properties: producer.send("orders", body, properties=properties)``. The span has the
    exception of a send that fails.
    """
    api = _opentelemetry()
    if api is None:
        yield {}
        return
    propagate, trace = api
    attributes = _attributes("send", topic)
    tracer = trace.get_tracer(_NAME)
    with tracer.start_as_current_span(f"send {topic}", kind=trace.SpanKind.PRODUCER, attributes=attributes):
        properties: dict[str, str] = {}
        propagate.inject(properties)
        yield properties


def handler_span(message: Message, following: Handler) -> Returned:
    """Middleware: a span of a consumer around the handler, in the trace of the message's producer.

    ``consumer.run(handle, middleware=[handler_span])``. The span has the handler's exception, and its result.
    """
    with _process(message) as span:
        result = following(message)
        _tell(span, result)
    return result


async def async_handler_span(message: Message, following: AsyncHandler) -> Returned:
    """:func:`handler_span` for coroutine functions."""
    with _process(message) as span:
        result = await following(message)
        _tell(span, result)
    return result


@contextlib.contextmanager
def _process(message: Message) -> Iterator[Any]:
    api = _opentelemetry()
    if api is None:
        yield None
        return
    propagate, trace = api
    attributes = _attributes("process", message.topic)
    identity = message.unique_id or message.msg_id
    if identity:
        attributes["messaging.message.id"] = identity
    context = propagate.extract(dict(message.properties))
    tracer = trace.get_tracer(_NAME)
    name = f"process {message.topic}"
    with tracer.start_as_current_span(name, context, trace.SpanKind.CONSUMER, attributes) as span:
        yield span


def _tell(span: Any, result: Returned) -> None:
    if span is not None and result not in (None, True):
        span.set_attribute("commitmq.result", "retry" if result is False else str(result))


def _attributes(operation: str, topic: str) -> dict[str, str]:
    """OpenTelemetry's names for messaging."""
    return {"messaging.system": _NAME, "messaging.operation.type": operation, "messaging.destination.name": topic}


MAX_ENTRIES: Final = 2_048
"""RocketMQ's asyncTraceDispatcher keeps at most so many."""
MAX_PENDING_BYTES: Final = 32 * 1024 * 1024
REGION: Final = "DefaultRegion"
DEFAULT_GROUP: Final = "DEFAULT_PRODUCER"
_GATHER_S: Final = 0.1
_SEND_S: Final = 5.0
_MESSAGES_A_BATCH: Final = 100
_STATES: Final = {"commit": "COMMIT_MESSAGE", "rollback": "ROLLBACK_MESSAGE", "unknown": "UNKNOW"}

_log = get_log("trace")
_numbers = count(1)


class _StoredRequest(NamedTuple):
    """A request that the node stored. ``fields``: its header, as a dictionary or as JSON without its end."""

    topic: str
    fields: dict[str, Any] | str
    data: bytes
    answer: dict[str, Any]
    cost_ms: int


class BatchSender(Protocol):
    """The producer underneath."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
    def send_batch(self, topic: str, messages: Sequence[bytes | Message]) -> Any: ...


_Entry = _StoredRequest | trace.TraceRecord


class Tracer:
    """Writes the trace of one client. ``dropped`` counts the entries (runs of a send, or records) that found no room."""

    def __init__(self, open_producer: Callable[..., BatchSender], group: str | None = None) -> None:
        """``open_producer``: makes the producer that sends the trace, with the settings of a :class:`commitmq.Producer`.

        ``group``: the traced producer's; None: RocketMQ's default.
        """
        self.dropped = 0
        self._group = DEFAULT_GROUP if group is None else group
        self._open_producer = open_producer
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._wake = threading.Event()
        self._closing = False
        self._is_gone = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ the traced path

    def stored(
        self, topic: str, fields: dict[str, Any] | str, data: bytes, answer: dict[str, Any], began_s: float
    ) -> None:
        """The node has stored a request that left at ``began_s`` (monotonic). Never blocks, never raises."""
        if topic != trace.TRACE_TOPIC:
            self._add(_StoredRequest(topic, fields, data, answer, int((time.monotonic() - began_s) * 1000)), len(data))

    def ended(
        self,
        group: str,
        topic: str,
        unique_id: str,
        properties: Mapping[str, str],
        state: str,
        *,
        msg_id: str | None = None,
        from_check: bool = False,
    ) -> None:
        """The transaction of the message with these ``properties`` has ended. ``state``: commit, rollback or unknown.

        ``msg_id`` is the offset message id of the half message. Never blocks, never raises.
        """
        self.record(
            trace.EndTransactionTrace(
                timestamp=_now_ms(),
                region=REGION,
                group=group,
                topic=topic,
                message_id=unique_id,
                tags=properties.get(Property.TAGS),
                keys=properties.get(Property.KEYS),
                store_host=_host_of(msg_id),
                message_type=trace.MessageType.COMMIT,
                transaction_id=unique_id,
                state=_STATES[state],
                from_check=from_check,
            )
        )

    def record(self, record: trace.TraceRecord) -> None:
        """Write a record. Never blocks, never raises."""
        self._add(record, 0)

    def _add(self, entry: _Entry, size_bytes: int) -> None:
        with self._lock:
            if len(self._entries) >= MAX_ENTRIES or self._bytes + size_bytes > MAX_PENDING_BYTES or self._closing:
                self.dropped += 1
                return
            self._entries.append(entry)
            self._bytes += size_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="commitmq-trace", daemon=True)
                self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float = _SEND_S) -> None:
        """Send what is there, for at most ``timeout_s``."""
        with self._lock:
            self._closing = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            self._is_gone.wait(timeout_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with self._open_producer(ack="memory", timeout_s=_SEND_S) as producer:
                while True:
                    self._wake.wait()
                    if not self._closing:
                        time.sleep(_GATHER_S)
                    self._wake.clear()
                    self._send(producer.send_batch)
                    if self._closing and not self._entries:
                        return
        except Exception:
            _log.exception("the trace ended")
        finally:
            with self._lock:  # what comes later is dropped and counted, not kept
                self._closing = True
                self.dropped += len(self._entries)
                self._entries.clear()
                self._bytes = 0
            self._is_gone.set()

    def _send(self, send_batch: Callable[..., Any]) -> None:
        with self._lock:
            entries, self._entries = self._entries, deque()
            self._bytes = 0
        messages = list(trace_messages(record for entry in entries for record in _records(entry, self._group)))
        for first in range(0, len(messages), _MESSAGES_A_BATCH):
            part = messages[first : first + _MESSAGES_A_BATCH]
            try:
                send_batch(trace.TRACE_TOPIC, part)
            except CommitMQError as error:
                self.dropped += len(part)
                _log.warning("trace records are lost", messages=len(part), error=str(error))


def trace_messages(records: Iterator[trace.TraceRecord]) -> Iterator[Message]:
    """Trace messages of at most MAX_RECORDS records and MAX_BODY_BYTES each, with the keys that find them."""
    part: list[trace.TraceRecord] = []
    size = 0
    for record in records:
        try:
            length = len(record.encode())
        except InvalidMessageError:
            continue  # a text with a separator cannot be told
        if part and (len(part) >= trace.MAX_RECORDS or size + length > trace.MAX_BODY_BYTES):
            yield _message(part)
            part, size = [], 0
        part.append(record)
        size += length
    if part:
        yield _message(part)


def _message(records: Sequence[trace.TraceRecord]) -> Message:
    return Message(trace.encode_trace(records), keys=trace.trace_keys(records).split(KEY_SEPARATOR))


def _records(entry: _Entry, group: str) -> Iterator[trace.TraceRecord]:
    if not isinstance(entry, _StoredRequest):
        yield entry
        return
    fields = entry.fields if isinstance(entry.fields, dict) else orjson.loads(entry.fields + "}")
    msg_id = str(entry.answer.get("msg_id") or "")
    if fields["op"] != "append":
        yield _pub(entry, group, fields.get("properties") or {}, len(entry.data), msg_id, int(fields.get("born", -1)))
        return
    from commitmq.format.record import decode_record

    places = iter(entry.answer.get("parts") or ())
    left, physical, offset = 0, 0, 0
    while offset < len(entry.data):
        record = decode_record(entry.data, offset, check_crc=False)
        if not left:
            left, physical = next(places, (len(entry.data), -1))
        shown = f"{msg_id[:-16]}{physical:016X}" if physical >= 0 else None
        yield _pub(entry, group, record.properties, len(record.body), shown, record.born_timestamp)
        offset += record.total_size
        physical += record.total_size if physical >= 0 else 0
        left -= 1


def _pub(
    entry: _StoredRequest,
    group: str,
    properties: dict[str, str],
    body_bytes: int,
    msg_id: str | None,
    born_timestamp: int,
) -> trace.Pub:
    kind = trace.MessageType.DELAY if entry.answer.get("stored_topic") else trace.MessageType.NORMAL
    if entry.answer.get("stored_topic") == HALF_TOPIC:
        kind = trace.MessageType.HALF
    return trace.Pub(
        timestamp=born_timestamp,
        region=REGION,
        group=group,
        topic=entry.topic,
        message_id=properties.get(Property.UNIQUE_KEY),
        tags=properties.get(Property.TAGS),
        keys=properties.get(Property.KEYS),
        store_host=_host_of(entry.answer.get("msg_id")),
        body_bytes=body_bytes,
        cost_ms=entry.cost_ms,
        message_type=kind,
        offset_message_id=msg_id,
    )


def _host_of(msg_id: str | None) -> str | None:
    """``ip:port`` of the node that stored a message."""
    if not msg_id:
        return None
    found = parse_offset_message_id(msg_id)[0]
    return f"{found.ip}:{found.port}"


# ---------------------------------------------------------------- handlers


class _HandlerSpan:
    """One call of a handler."""

    def __init__(self, tracer: Tracer, group: str, message: Message) -> None:
        self._tracer, self._group, self._message = tracer, group, message
        self._request = f"{time.time_ns():X}{next(_numbers):08X}"
        self._began_s = time.monotonic()
        tracer.record(
            trace.SubBefore(
                timestamp=_now_ms(),
                region=REGION,
                group=group,
                request_id=self._request,
                message_id=self._message_id,
                retry_times=message.reconsume_times,
                keys=self._keys,
            )
        )

    def ended(self, result: trace.ConsumeReturnType) -> None:
        self._tracer.record(
            trace.SubAfter(
                request_id=self._request,
                message_id=self._message_id,
                cost_ms=int((time.monotonic() - self._began_s) * 1000),
                success=result is trace.ConsumeReturnType.SUCCESS,
                keys=self._keys,
                result=result,
                timestamp=_now_ms(),
                group=self._group,
            )
        )

    def returned(self, value: Returned) -> None:
        is_done = value is None or value is True or value is ConsumeResult.DONE
        self.ended(trace.ConsumeReturnType.SUCCESS if is_done else trace.ConsumeReturnType.FAILED)

    def raised(self, error: BaseException) -> None:
        """A handler that asks for a retry by an exception of ours has not failed by an exception."""
        asked = isinstance(error, RetryLater)
        self.ended(trace.ConsumeReturnType.FAILED if asked else trace.ConsumeReturnType.EXCEPTION)

    @property
    def _message_id(self) -> str | None:
        return self._message.unique_id or self._message.msg_id

    @property
    def _keys(self) -> str | None:
        return KEY_SEPARATOR.join(self._message.keys) or None


def traced(tracer: Tracer, group: str) -> Middleware:
    """The middleware that traces handlers."""

    def middleware(message: Message, following: Handler) -> Returned:
        call = _HandlerSpan(tracer, group, message)
        try:
            value = following(message)
        except BaseException as error:
            call.raised(error)
            raise
        call.returned(value)
        return value

    return middleware


def traced_async(tracer: Tracer, group: str) -> AsyncMiddleware:
    """:func:`traced` for coroutine functions."""

    async def middleware(message: Message, following: AsyncHandler) -> Returned:
        call = _HandlerSpan(tracer, group, message)
        try:
            value = await following(message)
        except BaseException as error:
            call.raised(error)
            raise
        call.returned(value)
        return value

    return middleware


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
