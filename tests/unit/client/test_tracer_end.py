"""Goal: a trace that ended by a failure keeps nothing of what comes after it, and counts that.

Method: a producer that cannot be opened.
"""

from __future__ import annotations

from typing import Any

from commitmq.client.tracing import Tracer
from commitmq.errors import NodeUnavailableError


def test_a_trace_that_ended_keeps_nothing() -> None:
    def refuse(**_: Any) -> Any:
        raise NodeUnavailableError("no node")

    tracer = Tracer(refuse)
    tracer.stored("orders", {"op": "send"}, b"x" * 1_000, {}, 0.0)
    assert tracer._is_gone.wait(10)
    for _ in range(10):
        tracer.stored("orders", {"op": "send"}, b"x" * 1_000, {}, 0.0)
    assert (tracer.dropped, len(tracer._entries), tracer._bytes) == (11, 0, 0)
    tracer.close()
