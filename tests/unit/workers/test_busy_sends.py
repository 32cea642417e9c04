"""Goal: limits that are off cost nothing: no object, no look at the clock, the same function that appends.

Method: what the writer is given for some settings. A slow append and requests that really wait are in the contract tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commitmq.config.schema import FlowConfig
from commitmq.store.log.append import Appended
from commitmq.workers.runtime.flow import FlowRefusedError
from commitmq.workers.writer.send_requests import BusySends


def context_with(**settings: Any) -> Any:
    control = SimpleNamespace(worker=lambda *_: 0, put_worker=lambda *_: None)
    return SimpleNamespace(config=SimpleNamespace(flow=FlowConfig(**settings)), control=control, slot=0)


class Gate:
    """What a writer's gate offers here."""

    def __init__(self) -> None:
        self.peers = {b"late": SimpleNamespace(is_late=True), b"early": SimpleNamespace(is_late=False)}
        self.limit_s = 0.0

    def limit_waits(self, limit_s: float) -> None:
        self.limit_s = limit_s


def store(_append: Any) -> Appended:
    raise NotImplementedError


def made(gate: Gate, **settings: int) -> BusySends:
    found = BusySends.of(context_with(**settings), gate)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_without_limits_there_is_nothing() -> None:
    gate = Gate()
    assert BusySends.of(context_with(), gate) is None  # type: ignore[arg-type]
    assert gate.limit_s == 0.0


def test_only_the_limit_of_appends_looks_at_the_clock() -> None:
    assert made(Gate(), send_queue_wait_ms=200).timed(store) is store
    gate = Gate()
    assert made(gate, page_cache_busy_ms=200).timed(store) is not store
    assert gate.limit_s == 0.0


def test_only_what_waited_over_zeromq_is_late() -> None:
    gate = Gate()
    busy = made(gate, send_queue_wait_ms=200)
    assert gate.limit_s == 0.2
    for client in (b"early", b"unknown", 7):
        busy.admit(client)
    with pytest.raises(FlowRefusedError, match="waited longer than 200 ms") as refused:
        busy.admit(b"late")
    assert refused.value.retry_after_ms == 200
