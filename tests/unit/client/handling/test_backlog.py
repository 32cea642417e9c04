"""Goal: the sentences about a run's state (commitmq.client.handling) hold, whatever handlers do and in whatever order.

Method: the engine with a clock, a sender and a pool that the test plays; hypothesis drives it through fetches, handlers that
end in every way, send-backs that fail, and queues that come and go.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from commitmq.client.handling.consume_result import ConsumeResult, HandlerResult, RetryLater, of_error, of_value
from commitmq.client.handling.engine import SEND_BACK_PAUSE_S, SUSPEND_S, Engine, ProcessQueue, UnfinishedMessage
from commitmq.client.handling.send_back import DEAD_LEVEL, NODE_LEVEL, SendBackRequest, SendBackResult
from commitmq.client.handling.settings import Settings
from commitmq.client.message import Message
from commitmq.errors import NodeUnavailableError

DONE = HandlerResult(ConsumeResult.DONE)
RETRY = HandlerResult(ConsumeResult.RETRY)
DEAD = HandlerResult(ConsumeResult.DEAD)


def message(offset: int, queue: int = 0, body: bytes = b"x") -> Message:
    made = Message(body)
    made.topic, made.queue_id, made.queue_offset, made.physical_offset = "t", queue, offset, 1000 + offset
    return made


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class NoSender:
    """The engine's thread is not started here: the test takes its place (:func:`send`)."""

    def exchange(self, requests: list[SendBackRequest]) -> list[SendBackResult]:
        raise AssertionError("not here")

    def close(self) -> None:
        """Nothing is open."""


class Playing:
    """An engine, and the parts around it."""

    def __init__(self, **options: object) -> None:
        self.clock = Clock()
        self.engine = Engine(Settings(**options), NoSender(), clock=self.clock)  # type: ignore[arg-type]
        self.engine._max_retries = self.engine.settings.max_retries or 16
        self.woken = 0
        self.rung = 0
        self.engine.wake = self._wake
        self.engine.ring = self._ring

    def _wake(self, count: int) -> None:
        self.woken += count

    def _ring(self) -> None:
        self.rung += 1

    def take(self) -> UnfinishedMessage | None:
        with self.engine.lock:
            return self.engine.take()

    def took(self) -> UnfinishedMessage:
        entry = self.take()
        assert entry is not None
        return entry

    def all(self) -> list[UnfinishedMessage]:
        return list(iter(self.take, None))

    def send(self, *answers: SendBackResult) -> list[SendBackRequest]:
        """One round of the engine's thread, whose requests get ``answers``."""
        asked: list[SendBackRequest] = []

        def exchange(requests: list[SendBackRequest]) -> list[SendBackResult]:
            asked.extend(requests)
            return list(answers) or [SendBackResult()] * len(requests)

        self.engine._sender.exchange = exchange  # type: ignore[method-assign]
        with self.engine.lock:
            waiting = bool([one for one in self.engine._back if not one[0].queue.is_dropped])
        if waiting:
            self.engine._send(self.engine._next_batch())
        return asked


REFUSED = SendBackResult(error=NodeUnavailableError("away"))


# ---------------------------------------------------------------- what a handler says


def test_what_a_handler_returns() -> None:
    for value in (None, True, ConsumeResult.DONE):
        assert of_value(value) == DONE
    for value in (False, ConsumeResult.RETRY):
        assert of_value(value) == RETRY
    assert of_value(ConsumeResult.DEAD) == DEAD
    mistakes: list[object] = [0, 1, "done", []]
    for mistake in mistakes:
        verdict = of_value(mistake)
        assert verdict.result is ConsumeResult.RETRY
        assert isinstance(verdict.error, TypeError)


def test_what_a_handler_raises() -> None:
    error = ValueError("x")
    assert of_error(error) == HandlerResult(ConsumeResult.RETRY, None, error)
    with pytest.raises(RetryLater) as caught:
        message(1).retry_later(2.5)
    assert of_error(caught.value) == HandlerResult(ConsumeResult.RETRY, 2.5, None)
    with pytest.raises(ValueError, match="delay"):
        RetryLater(-1)


# ---------------------------------------------------------------- concurrent mode


def test_the_lowest_unfinished_message_bounds_the_commit() -> None:
    play = Playing()
    queue = play.engine.open()
    play.engine.add(queue, [message(offset) for offset in (3, 4, 7)])
    entries = play.all()
    assert [entry.offset for entry in entries] == [3, 4, 7]
    assert play.engine.first_unfinished(queue) == 3
    play.engine.judge(entries[1], DONE)
    assert play.engine.first_unfinished(queue) == 3
    play.engine.judge(entries[0], DONE)
    assert play.engine.first_unfinished(queue) == 7
    play.engine.judge(entries[2], DONE)
    assert play.engine.first_unfinished(queue) is None
    assert play.engine.counts == (3, 0, 0, 0, 0)


def test_a_failed_message_is_done_when_its_send_back_is_acknowledged() -> None:
    play = Playing(backoff=[1, 2])
    queue = play.engine.open()
    play.engine.add(queue, [message(offset) for offset in range(4)])
    for entry, verdict in zip(play.all(), (RETRY, DEAD, HandlerResult(ConsumeResult.RETRY, 9.0), DONE), strict=True):
        play.engine.judge(entry, verdict)
    assert play.engine.first_unfinished(queue) == 0
    asked = play.send(SendBackResult(), SendBackResult(True), REFUSED)
    assert [(one.queue_offset, one.delay_level, one.delay_s, one.max_retries) for one in asked] == [
        (0, NODE_LEVEL, 1, 16),
        (1, DEAD_LEVEL, None, None),
        (2, NODE_LEVEL, 9.0, 16),
    ]
    assert play.engine.first_unfinished(queue) == 2
    assert play.engine.counts == (1, 3, 1, 0, 1)
    assert play.take() is None, "RocketMQ's pause"
    play.clock.now += SEND_BACK_PAUSE_S
    entry = play.took()
    assert (entry.offset, entry.message.reconsume_times) == (2, 1)
    play.engine.judge(entry, DONE)
    assert play.engine.first_unfinished(queue) is None


def test_without_a_backoff_the_node_decides() -> None:
    play = Playing(max_retries=None)
    queue = play.engine.open()
    play.engine.add(queue, [message(0)])
    play.engine.judge(play.took(), RETRY)
    assert play.send() == [SendBackRequest("t", 0, 0, 1000, NODE_LEVEL, None, 16)], "16 is the group's own number here"


def test_a_backoff_function_that_fails_is_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    play = Playing(backoff=lambda times: 1 / times)
    queue = play.engine.open()
    play.engine.add(queue, [message(0)])
    play.engine.judge(play.took(), RETRY)
    assert play.send()[0].delay_s is None
    assert "back-off" in caplog.text


def test_a_backoff_function_that_returns_too_much_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    play = Playing(backoff=lambda times: 7_201)
    queue = play.engine.open()
    play.engine.add(queue, [message(0)])
    play.engine.judge(play.took(), RETRY)
    assert play.send()[0].delay_s is None
    assert "at most 7200 seconds" in caplog.text


def test_queues_take_turns() -> None:
    play = Playing()
    busy, retried = play.engine.open(), play.engine.open()
    play.engine.add(busy, [message(offset) for offset in range(5)])
    play.engine.add(retried, [message(offset, queue=1) for offset in range(2)])
    assert [entry.message.queue_id for entry in play.all()] == [0, 1, 0, 1, 0, 0, 0]


def test_a_queue_that_was_taken_away_counts_no_more() -> None:
    play = Playing()
    queue = play.engine.open()
    play.engine.add(queue, [message(offset) for offset in range(3)])
    first, second = play.took(), play.took()
    play.engine.judge(first, RETRY)
    play.engine.drop(queue)
    play.engine.judge(second, RETRY)
    assert play.all() == []
    assert play.send() == [], "the next owner gets them again"
    assert play.engine.counts.unfinished == 0
    assert play.engine.is_quiet or play.engine._back


def test_a_queue_that_is_wanted_back_starts_nothing() -> None:
    play = Playing()
    queue = play.engine.open()
    play.engine.add(queue, [message(offset) for offset in range(3)])
    entry = play.took()
    play.engine.revoke(queue, True)
    assert play.all() == []
    assert not play.engine.is_idle(queue)
    play.engine.judge(entry, DONE)
    assert play.engine.is_idle(queue)
    assert play.rung, "the loop gives it back at once"
    assert play.engine.first_unfinished(queue) == 1
    play.engine.revoke(queue, False)
    assert [one.offset for one in play.all()] == [1, 2]


def test_room() -> None:
    play = Playing(max_unfinished=4, max_unfinished_bytes=1000, max_unfinished_span=10)
    queue = play.engine.open()
    assert play.engine.room(queue) == (4, 1000)
    play.engine.add(queue, [message(0, body=b"x" * 400), message(1, body=b"x" * 700)])
    assert play.engine.room(queue) == (0, 0), "the bytes"
    for entry in play.all():
        play.engine.judge(entry, DONE)
    assert play.rung == 1
    play.engine.add(queue, [message(offset) for offset in (2, 3, 11)])
    entries = play.all()
    assert play.engine.room(queue) == (1, 997), "the span"
    play.engine.add(queue, [message(12)])
    assert play.engine.room(queue) == (0, 0)
    play.engine.judge(entries[0], DONE)
    assert play.engine.room(queue)[0] == 1
    play.engine.judge(entries[1], DONE)
    assert play.engine.room(queue)[0] == 2


def test_after_the_stop_nothing_starts() -> None:
    play = Playing()
    queue = play.engine.open()
    play.engine.add(queue, [message(0), message(1)])
    entry = play.took()
    play.engine.stop()
    assert play.take() is None
    assert not play.engine.is_quiet
    play.engine.judge(entry, RETRY)
    assert not play.engine.is_quiet, "it is on its way back"
    play.send()
    assert play.engine.is_quiet
    assert play.engine.first_unfinished(queue) == 1


# ---------------------------------------------------------------- ordered mode


def test_ordered_mode_waits_for_the_message_that_failed() -> None:
    play = Playing(ordered=True, max_retries=2)
    queue = play.engine.open()
    play.engine.add(queue, [message(offset) for offset in range(3)])
    for times in range(2):
        entry = play.took()
        assert (entry.offset, entry.message.reconsume_times) == (0, times)
        assert play.take() is None, "one at a time"
        play.engine.judge(entry, RETRY)
        assert play.take() is None, "the queue is suspended"
        play.clock.now += SUSPEND_S
    play.engine.judge(play.took(), RETRY)
    assert play.take() is None
    assert [one.delay_level for one in play.send(REFUSED)] == [DEAD_LEVEL]
    assert play.take() is None, "the order stays while the dead letter cannot be sent"
    play.clock.now += SEND_BACK_PAUSE_S
    play.engine.judge(play.took(), RETRY)
    assert len(play.send()) == 1
    assert play.took().offset == 1


# ---------------------------------------------------------------- the model


class Model(RuleBasedStateMachine):
    """Queues that come and go, handlers that end in every way. What was committed is remembered over assignments."""

    ordered = False

    def __init__(self) -> None:
        super().__init__()
        self.play = Playing(ordered=self.ordered, max_retries=2, backoff=0.5, max_unfinished=5, max_unfinished_span=12)
        self.queues: dict[int, ProcessQueue] = {}
        self.fetched: dict[int, int] = {}  # queue -> the next offset to fetch
        self.committed: Counter[int] = Counter()
        self.running: list[tuple[int, UnfinishedMessage]] = []
        self.ended: set[tuple[int, int]] = set()  # queue and offset of what was handled, or sent back, once
        self.tried: set[tuple[int, int]] = set()
        self.history: dict[ProcessQueue, list[int]] = {}

    @initialize()
    def begin(self) -> None:
        self.assign(0)

    def assign(self, queue: int) -> None:
        if queue not in self.queues:
            made = self.queues[queue] = self.play.engine.open()
            self.fetched[queue] = self.committed[queue]
            self.history[made] = []

    @rule(queue=st.integers(0, 2))
    def gain(self, queue: int) -> None:
        self.assign(queue)

    @rule(queue=st.integers(0, 2))
    def lose(self, queue: int) -> None:
        if queue in self.queues:
            self.play.engine.drop(self.queues.pop(queue))

    @rule(queue=st.integers(0, 2), wanted=st.booleans())
    def revoke(self, queue: int, wanted: bool) -> None:
        if queue in self.queues:
            self.play.engine.revoke(self.queues[queue], wanted)

    @rule(queue=st.integers(0, 2), count=st.integers(1, 4), gap=st.integers(0, 2))
    def fetch(self, queue: int, count: int, gap: int) -> None:
        if queue not in self.queues:
            return
        state = self.queues[queue]
        room = self.play.engine.room(state)[0]
        start = self.fetched[queue] + gap
        offsets = [start + one for one in range(min(room, count))]
        for skipped in range(self.fetched[queue], start):
            self.ended.add((queue, skipped))  # nothing there is for us
        self.fetched[queue] = start + len(offsets)
        self.play.engine.add(state, [message(offset, queue) for offset in offsets])

    @rule()
    def start_handler(self) -> None:
        entry = self.play.take()
        if entry is None:
            return
        queue = entry.message.queue_id
        assert self.queues.get(queue) is entry.queue, "a queue that was taken away starts nothing"
        assert not entry.queue.is_revoked
        assert all(other is not entry for _, other in self.running)
        if self.ordered:
            assert all(other.queue is not entry.queue for _, other in self.running), "one at a time"
            history = self.history[entry.queue]
            assert not history or entry.offset >= history[-1], "in order"
            history.append(entry.offset)
        self.tried.add((queue, entry.offset))
        self.running.append((queue, entry))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), verdict=st.sampled_from([DONE, DONE, RETRY, DEAD, HandlerResult(ConsumeResult.RETRY, 0.1)]))
    def end_handler(self, data: st.DataObject, verdict: HandlerResult) -> None:
        queue, entry = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.play.engine.judge(entry, verdict)
        if verdict is DONE:
            self.ended.add((queue, entry.offset))

    @rule(fails=st.lists(st.booleans(), min_size=12, max_size=12))
    def send_back(self, fails: list[bool]) -> None:
        back = [entry for entry, _ in self.play.engine._back if not entry.queue.is_dropped]
        if back:
            answers = [
                REFUSED if failing else SendBackResult()
                for _, failing in zip(back, itertools.cycle(fails), strict=False)
            ]
            asked = self.play.send(*answers)
            assert len(asked) == len(back)
            for request, answer in zip(asked, answers, strict=True):
                if answer.error is None:
                    self.ended.add((request.queue, request.queue_offset))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.play.clock.now += seconds

    @rule(queue=st.integers(0, 2))
    def commit(self, queue: int) -> None:
        if queue in self.queues:
            first = self.play.engine.first_unfinished(self.queues[queue])
            offset = self.fetched[queue] if first is None else first
            assert offset >= self.committed[queue], "it does not go back"
            assert all((queue, one) in self.ended for one in range(self.committed[queue], offset))
            self.committed[queue] = offset

    @invariant()
    def limits_hold(self) -> None:
        for queue in self.queues.values():
            assert len(queue) <= 5
            assert queue.out <= (1 if self.ordered else 5)

    def teardown(self) -> None:
        """Everything comes to an end: no message is stuck."""
        for queue in self.queues.values():
            self.play.engine.revoke(queue, False)
        for _ in range(1000):
            for _, entry in self.running:
                self.play.engine.judge(entry, DONE)
            self.running = [(0, entry) for entry in self.play.all()]
            self.play.send()
            self.play.clock.now += 6
            if not self.running and not self.play.engine.counts.unfinished:
                return
        raise AssertionError("messages are stuck")


class Ordered(Model):
    """The same in ordered mode."""

    ordered = True


FEW = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None)
TestModel = Model.TestCase
TestModel.settings = FEW
TestOrdered = Ordered.TestCase
TestOrdered.settings = FEW
