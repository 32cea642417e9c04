"""Goal: where a producer has further nodes, messages without a queue do not wait for one that is away, busy or silent;
others do, and a producer of one node is as before.

Method: the sending side without its thread, on channels that the test answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from commitmq.client.results import BatchSendError
from commitmq.client.sending.batch import Batch, plan_batch
from commitmq.client.sending.lane import NodeWatch
from commitmq.client.sending.lone import LoneMessage
from commitmq.client.sending.pump import Lanes, Pump
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import NodeUnavailableError, Outcome, SendError

HELLO: dict[str, Any] = {
    "max_message_bytes": 1 << 22,
    "born_host": {"v6": False},
    "store_host": {"v6": False},
    "properties_crc": False,
    "max_run_bytes": 1 << 22,
}
BUSY = {"ok": False, "code": "SYSTEM_BUSY", "error": "over a rate", "outcome": "not_stored", "retry_after_ms": 300}


class Channel:
    """Takes requests, numbered from one."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.taken = 0

    def next_id(self) -> int:
        self.taken += 1
        return self.taken

    def put(self, frames: Any, deadline: float) -> None:
        pass

    def lost(self) -> bool:
        return False

    lost_while_idle = lost

    def close(self) -> None:
        pass


class World:
    """A pump, what its watch tells, and messages of all kinds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, watched: bool = True, gives_back: bool = True) -> None:
        self.lanes = Lanes(None, timeout_s=60.0, max_pending=1000, max_pending_bytes=1 << 30)
        self.pump: Pump = self.lanes.writer
        routes = self.lanes.routes
        for name, value in (("is_memory", False), ("fresh", True), ("next_queue", 1)):
            monkeypatch.setattr(routes, name, lambda *_, value=value: value)
        self.latencies: list[float] = []
        self.away: list[SendError] = []
        self.silence_s = 0.0
        self.has_other = True
        if watched:
            self.lanes.watch(
                lambda: NodeWatch(
                    gives_back=gives_back,
                    connect_timeout_s=0.5,
                    most_silence_s=0.55,
                    silence_s=lambda: self.silence_s,
                    latency=self.latencies.append,
                    away=self.away.append,
                    has_other=lambda: self.has_other,
                )
            )
        self.pump.thread = threading.current_thread()  # this test does what the thread would
        self.channel = Channel()
        self.connects: list[float] = []
        self.is_there = True
        monkeypatch.setattr(self.pump.lane.directory, "connect", self.connect)

    def connect(self, role: str, deadline: float, *, hello: bool) -> tuple[Channel, dict[str, Any]]:
        self.connects.append(deadline - time.monotonic())
        if not self.is_there:
            raise NodeUnavailableError("nobody is there")
        return self.channel, HELLO

    def message(self, queue: int) -> SendFuture:
        return self.pump.outbox.submit("topic", queue, "memory", b"x", None, time.monotonic() + 60)

    def batch(self, queue: int | None, keys: list[str | None] | None = None) -> Batch:
        nothing: dict[str, Any] = dict.fromkeys(("tags", "keys", "properties", "compressed"))
        plan = plan_batch("topic", [b"a", b"b"], **nothing, sharding_keys=keys)
        made = Batch(self.pump, plan, ack="memory", limit_s=60, inner=False, queue=queue, is_async=True)
        self.pump.outbox.submit_batch(made)
        return made

    def close(self) -> None:
        self.pump.thread = None
        self.lanes.close(time.monotonic())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.close()


def error_of(future: Any) -> SendError:
    error = future.exception(0)
    assert isinstance(error, SendError)
    return error


def test_without_a_connection_only_pinned_messages_wait(world: World) -> None:
    world.is_there = False
    free, pinned = world.message(-1), world.message(0)
    batch, queued, keyed = world.batch(None), world.batch(0), world.batch(None, ["k", None])
    world.pump.fill()
    for one in (free, batch.future):
        assert (error_of(one).code, error_of(one).outcome) == ("NODE_UNAVAILABLE", Outcome.NOT_STORED)
    assert isinstance(error_of(batch.future), BatchSendError)
    assert not any(one.done() for one in (pinned, queued.future, keyed.future))
    assert [one.code for one in world.away] == ["NODE_UNAVAILABLE"]
    assert world.pump.outbox.outstanding == 5
    assert max(world.connects) <= 0.5


def test_a_lone_message_without_a_queue_moves_too(world: World) -> None:
    fields = {"topic": "topic", "queue": -1, "properties": {}, "op": "send"}
    lone, pinned = (
        LoneMessage(world.pump, {**fields, "queue": queue}, b"x", time.monotonic() + 60) for queue in (-1, 0)
    )
    world.is_there = False
    for one in (lone, pinned):
        world.pump.outbox.submit_batch(one)
    world.pump.fill()
    with pytest.raises(NodeUnavailableError):
        lone.wait()
    assert world.pump.outbox.outstanding == 1


def test_one_node_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({"watched": False}, {"gives_back": False}):
        world = World(monkeypatch, **settings)
        world.is_there = False
        free, batch = world.message(-1), world.batch(None)
        world.pump.fill()
        assert not free.done()
        assert not batch.future.done()
        assert len(world.away) == ("gives_back" in settings)
        world.close()


def test_a_busy_node_gives_back_what_names_no_queue(world: World) -> None:
    free = world.message(-1)
    world.pump.fill()
    world.pump.lane.take_answer({"id": 1, **BUSY})
    assert (error_of(free).code, error_of(free).retry_after_ms) == ("SYSTEM_BUSY", 300)
    assert world.pump.lane.delivery.busy.error is None, "the node is not rested for"
    pinned = world.message(0)
    world.pump.fill()
    world.pump.lane.take_answer({"id": 2, **BUSY})
    assert not pinned.done()
    assert world.pump.lane.delivery.busy.error is not None, "it keeps its order, and waits"
    assert len(world.latencies) == 2


def test_a_batch_of_one_run_moves_from_a_busy_node(world: World) -> None:
    free, keyed = world.batch(None), world.batch(0)
    world.pump.fill()
    world.pump.lane.take_answer({"id": 1, **BUSY})
    world.pump.lane.take_answer({"id": 2, **BUSY})
    assert error_of(free.future).outcome is Outcome.NOT_STORED
    assert not keyed.future.done()


def test_behind_a_silent_run_nothing_waits(world: World) -> None:
    first = world.message(-1)
    world.pump.fill()
    watch = world.pump.lane.watch
    assert watch is not None
    assert watch.since < float("inf")
    second, pinned = world.message(-1), world.message(0)
    watch.look(world.pump.outbox)
    world.silence_s = 0.6
    world.has_other = False
    watch.look(world.pump.outbox)
    assert not second.done(), "where should it go?"
    world.has_other = True
    watch.look(world.pump.outbox)
    assert error_of(second).code == "CLIENT_BUSY"
    assert not first.done(), "it may be stored"
    assert not pinned.done()
    world.pump.lane.lose("gone")
    assert watch.since == float("inf")
    assert error_of(first).outcome is Outcome.UNKNOWN


def test_the_oldest_run_is_the_one_that_counts(world: World) -> None:
    watch = world.pump.lane.watch
    assert watch is not None
    for queue in (0, 1):
        world.batch(queue)
    world.pump.fill()
    first, second = (run.sent_at for run in world.pump.lane.flying.values())
    assert watch.since == first
    world.pump.lane.take_answer({"id": 1, **BUSY})
    assert watch.since == second
    world.pump.lane.take_answer({"id": 2, **BUSY})
    assert watch.since == float("inf")
