"""Goal: the context of a trace travels with a message, and without OpenTelemetry nothing changes.

Method: a stand-in for opentelemetry-api that writes down what it is asked for; and a process without it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commitmq import ConsumeResult, Message, async_handler_span, handler_span, send_span
from commitmq.client import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Api:
    """What was started and set."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    @contextmanager
    def start_as_current_span(
        self, name: str, context: Any = None, kind: Any = None, attributes: Any = None
    ) -> Iterator[Any]:
        span: dict[str, Any] = {"name": name, "context": context, "kind": kind, "attributes": dict(attributes)}
        self.spans.append(span)
        try:
            yield SimpleNamespace(set_attribute=span["attributes"].__setitem__)
        except BaseException as error:
            span["error"] = error
            raise


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    found = Api()
    package, propagate, trace = (ModuleType(f"opentelemetry{name}") for name in ("", ".propagate", ".trace"))
    vars(propagate).update(
        inject=lambda carrier: carrier.update(traceparent=PARENT), extract=lambda carrier: carrier.get("traceparent")
    )
    vars(trace).update(
        get_tracer=lambda name: found, SpanKind=SimpleNamespace(PRODUCER="producer", CONSUMER="consumer")
    )
    for module in (package, propagate, trace):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_a_send_carries_the_context(api: Api) -> None:
    with send_span("orders") as properties:
        assert properties == {"traceparent": PARENT}
    [span] = api.spans
    assert (span["name"], span["kind"]) == ("send orders", "producer")
    assert span["attributes"]["messaging.destination.name"] == "orders"


def test_a_handler_is_in_the_trace_of_its_message(api: Api) -> None:
    message = Message(b"x", properties={"traceparent": PARENT})
    message.topic = "orders"
    assert handler_span(message, lambda one: ConsumeResult.DEAD) is ConsumeResult.DEAD
    assert handler_span(message, lambda one: None) is None
    first, second = api.spans
    assert (first["name"], first["kind"], first["context"]) == ("process orders", "consumer", PARENT)
    assert first["attributes"]["commitmq.result"] == str(ConsumeResult.DEAD)
    assert "commitmq.result" not in second["attributes"]


def test_an_exception_goes_through_the_span(api: Api) -> None:
    message = Message(b"x")
    message.topic = "orders"

    async def fail(_message: Message) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(async_handler_span(message, fail))
    assert isinstance(api.spans[0]["error"], ValueError)


def test_without_it_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_is_installed", lambda: False)
    monkeypatch.delitem(sys.modules, "opentelemetry", raising=False)
    with send_span("orders") as properties:
        assert properties == {}
    message = Message(b"x")
    assert handler_span(message, lambda one: one is message) is True


def test_it_is_imported_by_a_span_only() -> None:
    program = "import sys, commitmq; commitmq.send_span; commitmq.handler_span; commitmq.Producer; commitmq.Consumer\n"
    program += "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
