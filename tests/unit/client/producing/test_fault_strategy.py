"""Goal: a node is avoided for as long as RocketMQ's tables say, and used again when that time is over or it answers again.

Method: the tables and the state of one node, with a clock that the test moves.
"""

from __future__ import annotations

import pytest

from commitmq.client.producing.fault_strategy import FaultStrategy, NodeFaults
from commitmq.errors import Outcome, SendError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def faults(clock: Clock, **settings: object) -> NodeFaults:
    return NodeFaults(FaultStrategy(**settings), clock)  # type: ignore[arg-type]


def refused(code: str, retry_after_ms: int | None = None, outcome: Outcome = Outcome.NOT_STORED) -> SendError:
    return SendError(code, "as the test wants it", outcome=outcome, retry_after_ms=retry_after_ms)


@pytest.mark.parametrize(
    ("latency_ms", "pause_ms"),
    [
        (0, 0),
        (49, 0),
        (50, 0),
        (100, 0),
        (549.9, 0),
        (550, 2000),
        (1799, 2000),
        (1800, 5000),
        (3000, 6000),
        (5000, 10_000),
        (14_999, 10_000),
        (15_000, 30_000),
        (10**6, 30_000),
    ],
)
def test_the_tables_are_rocketmqs(latency_ms: float, pause_ms: int) -> None:
    assert FaultStrategy().not_available_for_ms(latency_ms) == pause_ms


def test_a_slow_answer_counts_and_a_quick_one_does_not_end_the_time(clock: Clock) -> None:
    node = faults(clock)
    node.answered(0.549)
    assert node.is_available(clock.now, "t")
    node.answered(0.6)
    assert not node.is_available(clock.now, "t")
    clock.now += 1.99
    node.answered(0.001)
    assert not node.is_available(clock.now, "t"), "as with RocketMQ, a later answer does not shorten the time"
    clock.now += 0.02
    assert node.is_available(clock.now, "t")


def test_a_longer_time_is_not_made_shorter(clock: Clock) -> None:
    node = faults(clock)
    node.answered(20.0)
    node.answered(0.6)
    clock.now += 29.9
    assert not node.is_available(clock.now, "t")
    clock.now += 0.2
    assert node.is_available(clock.now, "t")


def test_a_request_without_an_answer_counts_with_its_age(clock: Clock) -> None:
    node = faults(clock)
    assert node.is_available(clock.now, "t", 0.5)
    assert not node.is_available(clock.now, "t", 0.55)
    assert node.is_available(clock.now, "t", 0.0), "and only while it is not answered"


def test_without_latency_only_failures_count(clock: Clock) -> None:
    node = faults(clock, send_latency_fault_enable=False)
    node.answered(60.0)
    assert node.is_available(clock.now, "t", 60.0)
    node.failed(refused("SYSTEM_ERROR"), "t")
    assert not node.is_available(clock.now, "t")


def test_a_refusal_of_the_whole_node_isolates_it(clock: Clock) -> None:
    node = faults(clock)
    node.failed(refused("CREATE_MAPPED_FILE_FAILED"), "t")
    clock.now += 9.9
    assert not node.is_available(clock.now, "other")
    assert node.is_reachable
    clock.now += 0.2
    assert node.is_available(clock.now, "t")


def test_a_busy_node_is_avoided_for_the_time_that_it_names(clock: Clock) -> None:
    node = faults(clock)
    node.failed(refused("SYSTEM_BUSY", 300), "t")
    assert not node.is_available(clock.now, "t")
    clock.now += 0.31
    assert node.is_available(clock.now, "t")


def test_a_refusal_of_a_topic_counts_for_that_topic(clock: Clock) -> None:
    node = faults(clock)
    node.failed(refused("NO_PERMISSION"), "shut")
    assert not node.is_available(clock.now, "shut")
    assert node.is_available(clock.now, "open")
    clock.now += 10.1
    assert node.is_available(clock.now, "shut")


def test_an_unreachable_node_waits_for_the_detector(clock: Clock) -> None:
    node = faults(clock)
    node.failed(refused("NODE_UNAVAILABLE"), "t")
    clock.now += 1000
    assert not node.is_available(clock.now, "t")
    node.detected()
    assert node.is_available(clock.now, "t"), "a node that only could not be reached is used at once"


def test_a_lost_answer_isolates_also_a_node_that_is_detected(clock: Clock) -> None:
    node = faults(clock)
    node.failed(refused("TIMEOUT", outcome=Outcome.UNKNOWN), "t")
    assert not node.is_reachable
    node.detected()
    assert not node.is_available(clock.now, "t")
    clock.now += 10.1
    assert node.is_available(clock.now, "t")


@pytest.mark.parametrize("code", ["CLIENT_BUSY", "CLIENT_BUFFER_FULL", "CLIENT_CLOSED", "CLIENT_ERROR"])
def test_what_the_client_refuses_is_no_fault_of_the_node(clock: Clock, code: str) -> None:
    node = faults(clock)
    node.failed(refused(code), "t")
    assert node.is_available(clock.now, "t")


@pytest.mark.parametrize(
    "settings",
    [
        {"latency_max_ms": ()},
        {"latency_max_ms": (1, 2)},
        {"latency_max_ms": (2, 1), "not_available_ms": (0, 0)},
        {"latency_max_ms": (1, 1), "not_available_ms": (0, 0)},
        {"latency_max_ms": (1.5,), "not_available_ms": (0,)},
        {"isolation_ms": -1},
        {"connect_timeout_s": 0},
        {"detect_interval_s": -1.0},
        {"detect_timeout_s": float("inf")},
        {"timeout_per_request_s": float("nan")},
    ],
    ids=str,
)
def test_settings_without_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|integers"):
        FaultStrategy(**settings)  # type: ignore[arg-type]


def test_the_least_slow_latency() -> None:
    assert FaultStrategy().slow_s == 0.55
    assert FaultStrategy(send_latency_fault_enable=False).slow_s == float("inf")
    assert FaultStrategy(not_available_ms=(0,) * 7).slow_s == float("inf")
