"""Goal: a batch of one run that its own thread sends has the outcome that the pump would give it, and leaves no trace.

Method: a pump without its thread, on a channel that answers, refuses, takes nothing, ends or is interrupted as a test says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import zmq

from commitmq.client.results import BatchResult, BatchSendError
from commitmq.client.sending.batch import Batch, plan_batch
from commitmq.client.sending.delivery import AtMostOnce, IdempotentDelivery, Sequences
from commitmq.client.sending.pump import Lanes, Pump
from commitmq.errors import InvalidMessageError, Outcome
from commitmq.protocol.channel import ConnectionLost

HELLO: dict[str, Any] = {
    "max_message_bytes": 1 << 20,
    "born_host": {"v6": False},
    "store_host": {"v6": False},
    "properties_crc": False,
    "max_run_bytes": 1 << 22,
}
PLACE: dict[str, Any] = {
    "ok": True,
    "ack": "memory",
    "queue": 0,
    "queue_offset": 7,
    "physical_offset": 1000,
    "store_timestamp": 1,
    "msg_id": "7F000001000029AF" + "0" * 16,
    "end_offset": 2000,
}


class Interrupted(BaseException):
    """What a signal handler raises."""


class ScriptedChannel:
    """Takes frames, and does with each request what ``answer`` does with its header."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.frames: list[bytes] = []
        self.closed = False
        self._answer = answer
        self._next = 0

    def next_id(self) -> int:
        self._next += 1
        return self._next

    def send(self, frame: bytes, flags: int = 0) -> None:
        if self._answer is not_taken:
            raise zmq.Again
        self.frames.append(frame)

    def receive(self) -> bytes:
        header = orjson.loads(self.frames[-2])
        return orjson.dumps({"v": 1, "id": header["id"], **self._answer(header)})

    def wait(self, deadline: float) -> bytes:
        time.sleep(max(deadline - time.monotonic(), 0))
        raise ConnectionLost("no answer in time")

    def lost_while_idle(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def stored(header: dict[str, Any]) -> dict[str, Any]:
    return PLACE


def not_taken(header: dict[str, Any]) -> dict[str, Any]:
    raise AssertionError


def refused(header: dict[str, Any]) -> dict[str, Any]:
    return {"ok": False, "code": "MESSAGE_ILLEGAL", "error": "no", "outcome": "not_stored"}


def stored_and_refused(header: dict[str, Any]) -> dict[str, Any]:
    return {**PLACE, "ok": False, "code": "FLUSH_FAILED", "error": "no", "outcome": "stored"}


def lost(header: dict[str, Any]) -> dict[str, Any]:
    raise ConnectionLost("the connection ended")


def silent(header: dict[str, Any]) -> dict[str, Any]:
    raise zmq.Again


def interrupted(header: dict[str, Any]) -> dict[str, Any]:
    raise Interrupted


@pytest.fixture(params=[AtMostOnce])
def pump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pump]:
    delivery = AtMostOnce() if request.param is AtMostOnce else IdempotentDelivery(Sequences("test", 0))
    lanes = Lanes(None, timeout_s=1.0, max_pending=1000, max_pending_bytes=1 << 30, delivery=delivery)
    made = lanes.writer
    monkeypatch.setattr(made.outbox, "_wake", lambda: None)  # no thread comes
    yield made
    assert not made.lane.line, "the next one has its turn"
    lanes.close(time.monotonic())


def connected(pump: Pump, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> ScriptedChannel:
    channel: Any = ScriptedChannel(answer)
    pump.lane.hello = HELLO
    pump.lane.max_message_bytes = HELLO["max_message_bytes"]
    pump.lane.channel = channel
    return channel  # type: ignore[no-any-return]


def batch_of(pump: Pump, bodies: list[bytes], limit_s: float = 10.0) -> Batch:
    plan = plan_batch("topic", bodies, tags=None, keys=None, properties=None, sharding_keys=None, compressed=None)
    return Batch(pump, plan, ack="memory", limit_s=limit_s, inner=False, queue=0)


def outcome(pump: Pump, answer: Callable[[dict[str, Any]], dict[str, Any]], limit_s: float = 10.0) -> BatchSendError:
    """The error of a batch of three."""
    connected(pump, answer)
    batch = batch_of(pump, [b"x"] * 3, limit_s)
    pump.send_waiting(batch)
    with pytest.raises(BatchSendError) as caught:
        batch.wait()
    assert caught.value.total == 3
    assert (pump.outbox.outstanding, pump.outbox.is_empty) == (0, True)
    return caught.value


def test_a_stored_batch_tells_its_places(pump: Pump) -> None:
    channel = connected(pump, stored)
    batch = batch_of(pump, [b"x"] * 3)
    pump.send_waiting(batch)
    result = batch.wait()
    assert isinstance(result, BatchResult)
    assert [one.queue_offset for one in result] == [7, 8, 9]
    header = orjson.loads(channel.frames[0])
    assert (header["op"], header["topic"], header["count"], header["ack"]) == ("append", "topic", 3, "memory")
    assert (pump.outbox.outstanding, pump.outbox.is_empty) == (0, True)


def test_a_refusal_says_what_is_stored(pump: Pump) -> None:
    error = outcome(pump, refused)
    assert (error.code, error.outcome, error.stored, error.unknown) == ("MESSAGE_ILLEGAL", Outcome.NOT_STORED, 0, 0)
    error = outcome(pump, stored_and_refused)
    assert (error.outcome, error.stored, error.stored_prefix) == (Outcome.STORED, 3, 3)
    assert error.acks[0].result(2).queue_offset == 9


def test_a_lost_connection_leaves_the_fate_unknown(pump: Pump) -> None:
    error = outcome(pump, lost)
    assert (error.code, error.outcome, error.unknown) == ("CONNECTION_LOST", Outcome.UNKNOWN, 3)
    assert pump.lane.channel is None
    error = outcome(pump, silent, limit_s=0.05)
    assert (error.code, error.outcome, error.unknown) == ("TIMEOUT", Outcome.UNKNOWN, 3)
    assert pump.lane.channel is None, "a late answer meets nobody"


def test_what_the_connection_does_not_take_waits_for_the_next_one(pump: Pump) -> None:
    channel = connected(pump, not_taken)
    batch = batch_of(pump, [b"x"] * 3)
    pump.send_waiting(batch)
    assert channel.closed
    assert list(pump.outbox.batches) == [batch]
    assert pump.outbox.outstanding == 3
    connected(pump, stored)
    run = batch.next_run(time.monotonic() + 1)
    assert run is not None
    run.stored(PLACE)
    assert len(batch.wait()) == 3
    assert (pump.outbox.outstanding, pump.outbox.is_empty) == (0, True)


def test_an_interruption_leaves_no_count_and_no_connection(pump: Pump) -> None:
    channel = connected(pump, interrupted)
    with pytest.raises(Interrupted):
        pump.send_waiting(batch_of(pump, [b"x"] * 3))
    assert channel.closed
    assert (pump.outbox.outstanding, pump.outbox.is_empty) == (0, True)


def test_a_body_that_the_node_does_not_take_is_refused(pump: Pump) -> None:
    channel = connected(pump, stored)
    batch = batch_of(pump, [b"x", b"y" * (HELLO["max_message_bytes"] + 1)])
    pump.send_waiting(batch)
    with pytest.raises(InvalidMessageError, match="nothing of the batch was sent"):
        batch.wait()
    assert not channel.frames


def test_a_batch_of_several_runs_is_the_pumps(pump: Pump) -> None:
    channel = connected(pump, stored)
    batch = batch_of(pump, [b"x" * (1 << 20)] * 5)
    pump.send_waiting(batch)
    assert not channel.frames
    assert list(pump.outbox.batches) == [batch]


def test_a_batch_waits_behind_what_is_pending(pump: Pump) -> None:
    channel = connected(pump, stored)
    earlier = pump.outbox.submit("topic", 0, "memory", b"earlier", None, time.monotonic() + 10)
    batch = batch_of(pump, [b"x"] * 3)
    pump.send_waiting(batch)
    assert not channel.frames
    assert list(pump.outbox.batches) == [batch]
    assert earlier.cancel()


def test_a_batch_waits_while_another_thread_has_the_connection(pump: Pump) -> None:
    channel = connected(pump, stored)
    other = object()
    pump.lane.line.append(other)
    pump.send_waiting(batch_of(pump, [b"x"] * 3))
    assert not channel.frames
    pump.lane.line.remove(other)


@pytest.mark.parametrize("pump", [IdempotentDelivery], indirect=True)
def test_numbering_is_the_pumps(pump: Pump) -> None:
    channel = connected(pump, stored)
    pump.send_waiting(batch_of(pump, [b"x"] * 3))
    assert not channel.frames
    assert pump.outbox.outstanding == 3
