"""Goal: every pending send gets an outcome, also when a connection ends unnoticed while more waits to be sent.

Method: the sending side without its thread, on channels that take everything and answer nothing.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from commitmq.client.idempotent import IdempotentCore, Sequences
from commitmq.client.send_core import FULL_RUN_BYTES, MAX_PUMP_RUN_BYTES, SendCore
from commitmq.client.send_future import SendFuture
from commitmq.errors import Outcome, SendError

HELLO = {
    "max_message_bytes": 1 << 22,
    "born_host": {"v6": False},
    "store_host": {"v6": False},
    "properties_crc": False,
}


class DeafChannel:
    """Takes requests, numbers them from one as every channel does, and is lost when told so."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.is_lost = False
        self._next = 0

    def next_id(self) -> int:
        self._next += 1
        return self._next

    def put(self, frames: Any, deadline: float) -> None:
        self.taken.append(self._next)

    def lost(self) -> bool:
        return self.is_lost

    lost_while_idle = lost

    def close(self) -> None:
        self.is_lost = True


def waiting(core: SendCore, body: bytes) -> SendFuture:
    future = SendFuture(
        core.condition, body, b"", "0" * 32, 0, 0, 0, len(body) + 100, time.monotonic() + 60, core.forget
    )
    core._enqueue(("topic", 0, "memory"), future)
    return future


@pytest.fixture(params=[SendCore, IdempotentCore])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    limits = {"timeout_s": 60.0, "max_pending": 1000, "max_pending_bytes": 1 << 30}
    plain = request.param is SendCore
    made = SendCore(None, **limits) if plain else IdempotentCore(None, Sequences("test", 0), **limits)
    monkeypatch.setattr(made.routes, "is_memory", lambda topic, deadline: False)
    made._thread = threading.current_thread()  # this test does what the thread would
    yield made
    made._thread = None
    made.close(time.monotonic())


def test_runs_of_a_lost_connection_are_not_forgotten_when_more_waits(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = [DeafChannel(), DeafChannel()]
    left = iter(channels)
    monkeypatch.setattr(core.directory, "connect", lambda *_, **__: (next(left), HELLO))
    first = [waiting(core, b"x" * (MAX_PUMP_RUN_BYTES // 2)) for _ in range(3)]
    core._fill()
    assert channels[0].taken == [1, 2, 3], "all are in flight, and one more run may be"
    channels[0].is_lost = True
    second = [waiting(core, b"y" * FULL_RUN_BYTES) for _ in range(2)]
    for _ in range(3):
        core._fill()
    known = {id(one) for run in core._flying.values() for one in run.futures}
    known |= {id(one) for group in core._groups.values() for one in group}
    known |= {id(one) for run in getattr(core, "_again", ()) for one in run.futures}
    for one in first + second:
        assert one.done() or id(one) in known, "nobody would ever tell its outcome"
    assert core.outstanding == sum(not one.done() for one in first + second)
    if type(core) is SendCore:
        for one in first:
            with pytest.raises(SendError) as caught:
                one.result(0)
            assert caught.value.outcome is Outcome.UNKNOWN
        assert channels[1].taken, "what was not sent goes on the new connection"
    else:
        assert [run.sequence for run in core._flying.values()] == [0], "the oldest run is repeated first, alone"
