"""Goal: a message goes to another node only if it is certainly not stored, as often as it may, and within its time.

Method: the rule for each code and outcome; attempts over fake nodes, with errors that the test makes.
"""

from __future__ import annotations

import pytest

from commitmq.client.producing.choice import (
    MAX_PAUSE_S,
    PAUSE_S,
    Affinity,
    NodeSet,
    RetryDecision,
    SendAttempts,
    verdict,
)
from commitmq.errors import Code, Outcome, SendError
from fake_nodes import fake_set, refused

COUNTED = {
    "SERVICE_NOT_AVAILABLE",
    "CREATE_MAPPED_FILE_FAILED",
    "SYSTEM_BUSY",
    "SYSTEM_ERROR",
    "TOPIC_NOT_EXIST",
    "NO_PERMISSION",
    "LIMIT_EXCEEDED",
    "WHEEL_TIMER_FLOW_CONTROL",
    "CLIENT_BUFFER_FULL",
    "TIMEOUT",
}
UNCOUNTED = {"NODE_UNAVAILABLE", "CLIENT_BUSY"}


@pytest.mark.parametrize("code", list(Code))
def test_a_refusal_moves_unless_it_is_about_the_message(code: Code) -> None:
    otherwise = RetryDecision.UNCOUNTED if code in UNCOUNTED else RetryDecision.RAISE
    expected = RetryDecision.COUNTED if code in COUNTED else otherwise
    assert verdict(refused(code), may_store_twice=False) is expected


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.STORED])
@pytest.mark.parametrize("code", list(Code))
def test_what_may_be_stored_moves_only_with_leave(code: Code, outcome: Outcome) -> None:
    assert verdict(refused(code, outcome), may_store_twice=False) is RetryDecision.RAISE
    assert verdict(refused(code, outcome), may_store_twice=True) is RetryDecision.COUNTED


def test_a_busy_node_that_names_a_time_is_not_counted() -> None:
    assert verdict(refused("SYSTEM_BUSY", retry_after_ms=10), may_store_twice=False) is RetryDecision.UNCOUNTED


def attempts(nodes: NodeSet, affinity: Affinity = Affinity.FREE, name: str = "", time_s: float = 100.0) -> SendAttempts:
    return nodes.attempts("t", affinity, name, time_s)


def tries(made: SendAttempts, *errors: SendError, now: float = 0.0) -> list[str]:
    """The nodes of the tries, each of which ends with one of ``errors``; "raised" at the end where the attempts gave up."""
    found = []
    for error in errors:
        found.append(made.next().address)
        try:
            now += made.failed(error, now)
        except SendError as last:
            assert last is error
            return [*found, "raised"]
    return [*found, made.next().address]


def test_refusals_are_counted() -> None:
    made = attempts(fake_set())
    assert tries(made, *[refused("SYSTEM_ERROR")] * 4) == ["n0", "n1", "n2", "raised"]


def test_a_round_without_a_connection_is_not_counted_and_pauses() -> None:
    made = attempts(fake_set(2))
    pauses = []
    for _ in range(6):
        made.next()
        pauses.append(made.failed(refused("NODE_UNAVAILABLE"), 0.0))
    assert pauses == [0.0, PAUSE_S, 0.0, PAUSE_S * 2, 0.0, PAUSE_S * 4]
    for _ in range(20):
        made.next()
        assert made.failed(refused("NODE_UNAVAILABLE"), 0.0) <= MAX_PAUSE_S


def test_the_time_bounds_everything() -> None:
    made = attempts(fake_set(2), time_s=10.0)
    made.next()
    assert made.failed(refused("NODE_UNAVAILABLE"), 9.99) == 0.0
    made.next()
    with pytest.raises(SendError, match="NODE_UNAVAILABLE") as caught:
        made.failed(refused("NODE_UNAVAILABLE"), 9.99)
    assert caught.value.__notes__ == ["tried n0: NODE_UNAVAILABLE, n1: NODE_UNAVAILABLE"]


def test_a_pause_is_as_long_as_busy_nodes_ask() -> None:
    made = attempts(fake_set(2))
    made.next()
    assert made.failed(refused("SYSTEM_BUSY", retry_after_ms=400), 0.0) == 0.0
    made.next()
    assert made.failed(refused("SYSTEM_BUSY", retry_after_ms=400), 0.0) == 0.4


def test_an_unknown_fate_is_raised() -> None:
    unknown = refused("CONNECTION_LOST", Outcome.UNKNOWN)
    assert tries(attempts(fake_set()), unknown) == ["n0", "raised"]
    allowed = fake_set(may_store_twice=True)
    assert tries(attempts(allowed), unknown, unknown, unknown) == ["n0", "n1", "n2", "raised"]


def test_a_try_is_shorter_only_where_another_may_follow_an_unknown_fate() -> None:
    assert attempts(fake_set()).time_s(90.0) == 10.0
    allowed = fake_set(may_store_twice=True)
    made = attempts(allowed)
    assert made.time_s(0.0) == allowed.strategy.timeout_per_request_s
    assert tries(made, *[refused("SYSTEM_ERROR")] * 2) == ["n0", "n1", "n2"]
    assert made.time_s(0.0) == 100.0, "the last try has all of the time"


def test_without_retries_nothing_moves() -> None:
    nodes = fake_set(retries=0)
    assert tries(attempts(nodes), refused("SYSTEM_ERROR")) == ["n0", "raised"]
    assert tries(attempts(nodes), refused("NODE_UNAVAILABLE")) == ["n1", "raised"]


def test_a_queue_stays_at_its_node() -> None:
    nodes = fake_set()
    affinity, name = nodes.affinity("t", 3, None)
    home = nodes.home(name).address
    made = attempts(nodes, affinity, name)
    assert tries(made, *[refused("NODE_UNAVAILABLE")] * 3) == [home] * 4
    assert tries(made, refused("SYSTEM_ERROR")) == [home, "raised"]


def test_a_key_leaves_a_node_that_cannot_be_reached_and_returns() -> None:
    nodes = fake_set()
    affinity, name = nodes.affinity("t", None, "order-7")
    assert affinity is Affinity.KEY
    home = nodes.home(name)
    first, second = tries(attempts(nodes, affinity, name), refused("NODE_UNAVAILABLE"))
    assert (first, second != first) == (home.address, True)
    assert attempts(nodes, affinity, name).next().address == second, "and so does the next message of the key"
    home.faults.detected()
    assert attempts(nodes, affinity, name).next() is home
    assert tries(attempts(nodes, affinity, name), refused("SYSTEM_ERROR")) == [home.address, "raised"]
    home.faults.answered(20.0)
    assert attempts(nodes, affinity, name).next() is home, "slowness does not move a key"


def test_a_key_pauses_where_no_node_can_be_reached() -> None:
    nodes = fake_set(2)
    affinity, name = nodes.affinity("t", None, "k")
    made = attempts(nodes, affinity, name)
    made.next()
    assert made.failed(refused("NODE_UNAVAILABLE"), 0.0) == 0.0
    made.next()
    assert made.failed(refused("NODE_UNAVAILABLE"), 0.0) == PAUSE_S


def test_without_retries_a_key_never_moves() -> None:
    nodes = fake_set(retries=0)
    assert nodes.affinity("t", None, "order-7")[0] is Affinity.FIXED
