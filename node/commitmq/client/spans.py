"""OpenTelemetry: the context of a trace travels in message properties, and sends and handlers have spans of their own.

The context is W3C's: the property ``traceparent``, and ``tracestate`` where there is one. Without opentelemetry-api, or when
no trace is under way, messages and handlers are as they were. It is imported at the first span, and not before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from commitmq.client.handling.chain import AsyncHandler, Handler, Returned
from commitmq.client.message import Message

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
