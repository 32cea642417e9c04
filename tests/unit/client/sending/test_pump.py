"""Goal: every pending send gets an outcome, also when a connection ends unnoticed while more waits to be sent.

Method: the sending side without its thread, on channels that take everything and answer nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from commitmq.client.results import BatchSendError
from commitmq.client.sending.batch import Batch, BatchRun, plan_batch
from commitmq.client.sending.delivery import LEAST_WINDOW, WINDOW, AtMostOnce, IdempotentDelivery, Sequences
from commitmq.client.sending.line import Line
from commitmq.client.sending.outbox import FULL_RUN_BYTES
from commitmq.client.sending.pump import Lanes, Pump
from commitmq.client.sending.run import MAX_RUN_BYTES
from commitmq.client.sending.send_future import SendFuture
from commitmq.errors import InvalidMessageError, NodeUnavailableError, Outcome, SendError
from commitmq.format.record import decode_record

HELLO: dict[str, Any] = {
    "max_message_bytes": 1 << 22,
    "born_host": {"v6": False},
    "store_host": {"v6": False},
    "properties_crc": False,
    "max_run_bytes": 1 << 22,
}


class DeafChannel:
    """Takes requests, numbers them from one as every channel does, and is lost when told so."""

    endpoint = "tcp://127.0.0.1:1"

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


def waiting(core: Pump, body: bytes) -> SendFuture:
    return core.outbox.submit("topic", 0, "memory", body, None, time.monotonic() + 60)


@pytest.fixture(params=[AtMostOnce, IdempotentDelivery])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    limits: dict[str, Any] = {"timeout_s": 60.0, "max_pending": 1000, "max_pending_bytes": 1 << 30}
    delivery = AtMostOnce() if request.param is AtMostOnce else IdempotentDelivery(Sequences("test", 0))
    lanes = Lanes(None, **limits, delivery=delivery)
    made = lanes.writer
    monkeypatch.setattr(lanes.routes, "is_memory", lambda topic, deadline: False)
    monkeypatch.setattr(lanes.routes, "fresh", lambda topic: True)
    made.thread = threading.current_thread()  # this test does what the thread would
    yield made
    made.thread = None
    lanes.close(time.monotonic())


def test_runs_of_a_lost_connection_are_not_forgotten_when_more_waits(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = [DeafChannel(), DeafChannel()]
    left = iter(channels)
    monkeypatch.setattr(core.lane.directory, "connect", lambda *_, **__: (next(left), HELLO))
    first = [waiting(core, b"x" * (MAX_RUN_BYTES // 2)) for _ in range(3)]
    core.fill()
    assert channels[0].taken == [1, 2, 3], "all are in flight, and one more run may be"
    channels[0].is_lost = True
    second = [waiting(core, b"y" * FULL_RUN_BYTES) for _ in range(2)]
    for _ in range(3):
        core.fill()
    known = {id(one) for run in core.lane.flying.values() for one in run.futures}
    known |= {id(one) for group in core.outbox.groups.values() for one in group}
    known |= {id(one) for run in getattr(core.lane.delivery, "_again", ()) for one in run.futures}
    for one in first + second:
        assert one.done() or id(one) in known, "nobody would ever tell its outcome"
    assert core.outbox.outstanding == sum(not one.done() for one in first + second)
    if type(core.lane.delivery) is AtMostOnce:
        for one in first:
            with pytest.raises(SendError) as caught:
                one.result(0)
            assert caught.value.outcome is Outcome.UNKNOWN
        assert channels[1].taken, "what was not sent goes on the new connection"
    else:
        assert [run.sequence for run in core.lane.flying.values()] == [0], "the oldest run is repeated first, alone"


def test_counts_and_ids_are_right_where_some_of_a_run_drop_out(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is cancelled, one too large for the node, one out of time when the answer comes; the others are stored."""
    plain.outbox.max_pending = 1000
    frames: list[Any] = []
    monkeypatch.setattr(DeafChannel, "put", lambda self, parts, deadline: frames.append(parts))
    futures = [waiting(plain, b"%d" % number) for number in range(600)]
    large = waiting(plain, b"x" * (HELLO["max_message_bytes"] + 1))
    assert futures[3].cancel()
    plain.fill()
    assert not futures[4].cancel(), "it was handed over"
    with pytest.raises(SendError, match="larger than"):
        large.result(0)
    (run,) = plain.lane.flying.values()
    assert len(run.futures) == 599
    plain.outbox.fail([futures[5]], lambda: SendError("TIMEOUT", "late", outcome=Outcome.UNKNOWN))
    plain.lane.take_answer({"id": 1, **OK, "msg_id": "A" * 32})
    assert (plain.outbox.outstanding, plain.outbox._outstanding_bytes, plain.outbox.pending_bytes) == (0, 0, 0)
    data = frames[0][1]
    for one in futures[:3] + futures[6:]:
        result = one.result(0)
        record = decode_record(data[result.physical_offset :][: run.sizes[result.queue_offset]])
        assert record.properties == {"UNIQ_KEY": result.unique_id}
        assert record.body == b"%d" % futures.index(one)
        assert result.msg_id == f"{'A' * 16}{result.physical_offset:016X}"


def test_a_body_that_is_known_to_be_too_large_is_refused_at_once(plain: Any) -> None:
    waiting(plain, b"x")
    plain.fill()
    with pytest.raises(InvalidMessageError, match="the node allows"):
        waiting(plain, b"x" * (HELLO["max_message_bytes"] + 1))
    assert plain.outbox.outstanding == 1


# ---------------------------------------------------------------- pending batches


def pending(core: Pump, *bodies: bytes, limit_s: float = 60) -> Batch:
    nothing: dict[str, Any] = dict.fromkeys(("tags", "keys", "properties", "sharding_keys", "compressed"))
    plan = plan_batch("topic", list(bodies), **nothing)
    batch = Batch(core, plan, ack="memory", limit_s=limit_s, inner=False, queue=0, is_async=True)
    core.outbox.submit_batch(batch)
    return batch


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    lanes = Lanes(None, timeout_s=60, max_pending=100, max_pending_bytes=1 << 30)
    made: Any = lanes.writer
    made.lanes = lanes
    monkeypatch.setattr(lanes.routes, "is_memory", lambda topic, deadline: False)
    monkeypatch.setattr(lanes.routes, "fresh", lambda topic: True)
    made.thread = threading.current_thread()
    made.lane.window = 4
    made.channels = []

    def connect(*_: Any, **__: Any) -> tuple[DeafChannel, dict[str, Any]]:
        made.channels.append(DeafChannel())
        return made.channels[-1], HELLO

    monkeypatch.setattr(made.lane.directory, "connect", connect)
    yield made
    made.thread = None
    lanes.close(time.monotonic())


def answer(core: Any, identity: int, **fields: Any) -> None:
    core.lane.take_answer({"id": identity, **fields})


OK = {
    "ok": True,
    "queue": 0,
    "queue_offset": 0,
    "physical_offset": 0,
    "store_timestamp": 1,
    "msg_id": "",
    "ack": "memory",
}


@pytest.mark.parametrize(
    ("max_pending_bytes", "window"), [(128 << 20, WINDOW), (1 << 30, WINDOW), (16 << 20, 8), (1, LEAST_WINDOW)]
)
def test_copies_in_flight_take_no_more_than_may_be_pending(max_pending_bytes: int, window: int) -> None:
    lanes = Lanes(None, timeout_s=1, max_pending=100, max_pending_bytes=max_pending_bytes)
    assert lanes.writer.lane.window == window
    lanes.close(time.monotonic())


def test_batches_go_in_order_and_no_more_than_fit_the_window(plain: Any) -> None:
    batches = [pending(plain, b"a", b"b") for _ in range(6)]
    plain.fill()
    assert plain.channels[0].taken == [1, 2, 3, 4]
    assert list(plain.outbox.batches) == batches[4:]
    answer(plain, 1, **OK)
    assert len(batches[0].future.result(0)) == 2
    plain.fill()
    assert plain.channels[0].taken[-1] == 5
    assert plain.outbox.outstanding == 10


def test_batches_and_messages_take_turns(plain: Any) -> None:
    for _ in range(4):
        pending(plain, b"batch")
        waiting(plain, b"m" * FULL_RUN_BYTES * 4)  # a run of its own each
    plain.fill()
    assert [isinstance(run, BatchRun) for run in plain.lane.flying.values()].count(True) == 2
    assert len(plain.lane.flying) == 4


def test_a_lost_connection_fails_the_batches_on_it_and_no_others(plain: Any) -> None:
    batches = [pending(plain, b"x") for _ in range(6)]
    plain.fill()
    plain.channels[0].is_lost = True
    plain.lane.lose("gone")
    for one in batches[:4]:
        with pytest.raises(BatchSendError) as caught:
            one.future.result(0)
        assert (caught.value.outcome, caught.value.unknown) == (Outcome.UNKNOWN, 1)
    plain.fill()
    assert plain.channels[1].taken == [1, 2]
    answer(plain, 1, **OK)
    answer(plain, 2, **OK)
    assert all(one.future.result(0) for one in batches[4:])
    assert plain.outbox.outstanding == 0
    assert plain.outbox._outstanding_bytes == 0


def test_a_run_that_was_not_taken_is_sent_on_the_next_connection(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pending(plain, b"x")

    def refuse(*_: Any) -> None:
        raise NodeUnavailableError("full")

    with monkeypatch.context() as patch:
        patch.setattr(DeafChannel, "put", refuse)
        plain.fill()
    assert not batch.future.done()
    plain.fill()
    answer(plain, 1, **OK)
    assert len(batch.future.result(0)) == 1


def test_a_batch_that_was_not_sent_in_time_is_not_stored(plain: Any) -> None:
    batch = pending(plain, b"x", b"y", limit_s=0)
    plain.expire()
    with pytest.raises(BatchSendError) as caught:
        batch.future.result(0)
    assert (caught.value.outcome, caught.value.code) == (Outcome.NOT_STORED, "TIMEOUT")
    assert plain.outbox.outstanding == 0


def test_a_batch_without_an_answer_in_time_is_unknown_and_ends_the_connection(plain: Any) -> None:
    batch = pending(plain, b"x", limit_s=0.01)
    plain.fill()
    time.sleep(0.02)
    plain.expire()
    with pytest.raises(BatchSendError) as caught:
        batch.future.result(0)
    assert (caught.value.outcome, caught.value.code) == (Outcome.UNKNOWN, "TIMEOUT")
    assert plain.lane.channel is None


def test_a_cancelled_batch_is_not_sent(plain: Any) -> None:
    batch = pending(plain, b"x")
    assert batch.future.cancel()
    plain.fill()
    assert plain.channels[0].taken == []
    assert plain.outbox.outstanding == 0


def test_a_body_larger_than_the_node_allows_is_refused_through_the_future(plain: Any) -> None:
    batch, other = pending(plain, b"x" * (HELLO["max_message_bytes"] + 1)), pending(plain, b"y")
    plain.fill()
    with pytest.raises(InvalidMessageError, match="nothing of the batch was sent"):
        batch.future.result(0)
    answer(plain, 1, **OK)
    assert other.future.result(0)
    assert plain.outbox.outstanding == 0


def test_closing_tells_what_became_of_each_batch(plain: Any) -> None:
    batches = [pending(plain, b"x") for _ in range(5)]
    plain.fill()
    plain.thread = None
    plain.lanes.close(time.monotonic())
    outcomes = []
    for one in batches:
        with pytest.raises(BatchSendError) as caught:
            one.future.result(0)
        outcomes.append(caught.value.outcome)
    assert outcomes == [Outcome.UNKNOWN] * 4 + [Outcome.NOT_STORED]


def test_a_batch_that_cannot_be_encoded_is_its_own_end_only(plain: Any) -> None:
    bad, good = pending(plain, b"x"), pending(plain, b"y")
    bad._queue = "one"  # type: ignore[assignment]
    plain.fill()
    with pytest.raises(TypeError):
        bad.future.result(0)
    answer(plain, max(plain.lane.flying), **OK)
    assert good.future.result(0)
    assert plain.outbox.outstanding == 0


def test_a_callback_has_the_room_of_its_batch(plain: Any) -> None:
    plain.outbox.max_pending = 2
    first = pending(plain, b"a", b"b")
    sent: list[Batch] = []
    first.future.add_done_callback(lambda _: sent.append(pending(plain, b"c", b"d")))
    plain.fill()
    answer(plain, 1, **OK)
    assert len(sent) == 1
    assert plain.outbox.outstanding == 2


def test_a_callback_that_ends_the_program_leaves_the_others_their_outcomes(plain: Any) -> None:
    batches = [pending(plain, b"x") for _ in range(3)]
    batches[0].future.add_done_callback(lambda _: sys.exit(1))
    plain.fill()
    plain.lane.lose("gone")
    assert all(one.future.done() for one in batches)
    assert plain.outbox.outstanding == 0


def test_a_cancelled_batch_gives_its_room_back_at_once(plain: Any) -> None:
    batch = pending(plain, b"x", b"y")
    assert batch.future.cancel()
    assert plain.outbox.outstanding == 0
    plain.fill()
    plain.outbox.fail_all("X", "y")
    assert plain.outbox.outstanding == 0


def test_closing_in_a_callback_settles_each_batch_once(plain: Any) -> None:
    batches = [pending(plain, b"x", limit_s=0) for _ in range(3)]
    batches[0].future.add_done_callback(lambda _: plain.outbox.fail_all("CLIENT_CLOSED", "closed"))
    plain.expire()
    assert all(one.future.done() for one in batches)
    assert plain.outbox.outstanding == 0


def test_a_batch_whose_queues_nobody_knows_waits_until_it_is_late(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: Any) -> int:
        raise SendError("NODE_UNAVAILABLE", "no coordinator", outcome=Outcome.NOT_STORED)

    with monkeypatch.context() as patch:
        patch.setattr(plain.lane.routes, "queues", nobody)
        batch = pending(plain, b"x")
        batch._queue = None
        plain.fill()
        assert not batch.future.done()
    monkeypatch.setattr(plain.lane.routes, "queues", lambda *_: 4)
    plain.fill()
    answer(plain, 1, **OK)
    assert len(batch.future.result(0)) == 1


def test_a_connection_that_is_found_lost_while_it_is_asked_for_takes_its_batches_along(plain: Any) -> None:
    batch = pending(plain, *[b"x" * (3 << 20)] * 6)
    plain.fill()
    assert batch.more
    plain.channels[0].lost_while_idle = lambda: True
    answer(plain, 1, **OK)
    plain.fill()
    with pytest.raises(BatchSendError):
        batch.future.result(0)
    assert plain.outbox.outstanding == 0


def test_guests_without_an_end_leave_the_pump_its_turn(plain: Any) -> None:
    plain.lane.line.extend((Line.ticket(), Line.ticket()))  # the pump's own, and one that waits
    batch = pending(plain, b"x")
    plain._receive = lambda: answer(plain, 1, **OK)
    plain.drive()
    assert len(batch.future.result(0)) == 1
    plain.lane.line.clear()  # closing would wait a minute for them
