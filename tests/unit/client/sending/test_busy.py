"""Goal: messages that a busy node refused wait again in their order, or fail where a later run of their queue was stored.

Method: runs without a node, and a clock that the test moves.
"""

from __future__ import annotations

from typing import Any

import pytest

from commitmq.client.sending.delivery import MAX_REST_S, BusyRuns, is_busy
from commitmq.client.sending.run import NEVER_S, MakeError, SendRun

BUSY = {"ok": False, "code": "SYSTEM_BUSY", "error": "over a rate", "outcome": "not_stored", "retry_after_ms": 300}


class FakeRun(SendRun):
    def __init__(self, log: list[str], name: str, queue: int = 0) -> None:
        super().__init__("t", queue, 1, {}, b"")
        self.log, self.name = log, name

    def stored(self, answer: dict[str, Any]) -> None:
        self.log.append(f"stored {self.name}")

    def give_back(self) -> None:
        self.log.append(f"back {self.name}")

    def failed(self, make_error: MakeError, answer: dict[str, Any] | None = None) -> None:
        self.log.append(f"failed {self.name} {make_error().code}")

    def expire(self, now: float, make_error: MakeError) -> float:
        if now < 5:
            return 5.0
        self.failed(make_error)
        return NEVER_S


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, time_s: float) -> None:
        self.now += time_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def busy(clock: Clock) -> BusyRuns:
    return BusyRuns(clock, clock.sleep)


def test_the_lane_rests_for_the_time_of_the_refusal(busy: BusyRuns, clock: Clock) -> None:
    log: list[str] = []
    busy.hold(FakeRun(log, "a"), BUSY, alone=True)
    assert log == ["back a"]
    while not busy.is_over(in_flight=False):
        assert busy.error is not None
    assert clock.now == pytest.approx(0.3)
    assert busy.error is None


def test_a_rest_is_bounded(busy: BusyRuns, clock: Clock) -> None:
    busy.hold(FakeRun([], "a"), BUSY | {"retry_after_ms": 60_000}, alone=True)
    while not busy.is_over(in_flight=False):
        pass
    assert clock.now == pytest.approx(MAX_REST_S)


def test_runs_wait_for_those_in_flight_and_then_keep_their_order(busy: BusyRuns) -> None:
    log: list[str] = []
    for name in "abc":
        busy.hold(FakeRun(log, name), BUSY, alone=False)
    assert not busy.is_over(in_flight=True)
    assert log == []
    busy.is_over(in_flight=False)
    assert log == ["back c", "back b", "back a"]  # each is put before those that wait


def test_a_run_that_was_overtaken_in_its_queue_fails(busy: BusyRuns) -> None:
    log: list[str] = []
    busy.hold(FakeRun(log, "a", 0), BUSY, alone=False)
    busy.hold(FakeRun(log, "b", 1), BUSY, alone=False)
    busy.hold(FakeRun(log, "any", -1), BUSY, alone=False)
    busy.passed(FakeRun(log, "later", 0))
    busy.passed(FakeRun(log, "anywhere", -1))
    busy.is_over(in_flight=False)
    assert log == ["back any", "back b", "failed a SYSTEM_BUSY"]


def test_held_messages_end_with_their_refusal(busy: BusyRuns) -> None:
    log: list[str] = []
    busy.hold(FakeRun(log, "a"), BUSY, alone=False)
    assert busy.expire(1.0) == 5.0
    assert busy.expire(6.0) == NEVER_S
    assert log == ["failed a SYSTEM_BUSY"]
    busy.fail()
    assert log[1:] == ["failed a SYSTEM_BUSY"]  # a second failure changes nothing in a real run


@pytest.mark.parametrize(
    "change", [{"code": "SYSTEM_ERROR"}, {"outcome": "unknown"}, {"retry_after_ms": None}, {"outcome": None}]
)
def test_other_refusals_are_no_reason_to_wait(change: dict[str, Any]) -> None:
    assert is_busy(BUSY)
    assert not is_busy(BUSY | change)
