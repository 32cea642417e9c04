"""Goal: requests take no more than their share of a processor, and a few after an idle time do not wait.

Method: a clock and a processor time that the test moves.
"""

from __future__ import annotations

import pytest

from commitmq.network.gate import BURST_S, LONGEST_REST_S, ShareOfTime


class _Loop:
    """A loop whose requests have the share ``share``."""

    def __init__(self, share: float) -> None:
        self.now_s = self.used_s = 100.0
        self.share = ShareOfTime(share, lambda: self.now_s)

    def turn(self, cost_s: float) -> float:
        """Handle requests that take ``cost_s``; returns the rest."""
        self.now_s += cost_s
        self.used_s += cost_s
        return self.share.spend(cost_s)


@pytest.mark.parametrize("cost_s", [0.0003, 0.004, 0.03])
def test_without_a_pause_between_requests_the_share_holds(cost_s: float) -> None:
    loop, began_s = _Loop(0.2), 100.0
    while loop.now_s < began_s + 60:
        loop.now_s += loop.turn(cost_s)
    used_s = loop.used_s - began_s
    assert used_s <= 0.2 * 60 + BURST_S + 2 * cost_s
    assert used_s >= 0.2 * 60 * 0.9


def test_few_requests_do_not_wait() -> None:
    loop = _Loop(0.2)
    for _ in range(1_000):
        assert loop.turn(0.004) == 0.0
        loop.now_s += 0.02


def test_some_at_once_do_not_wait_and_an_idle_time_counts_once() -> None:
    loop = _Loop(0.2)
    for _ in range(2):
        for _ in range(10):
            assert loop.turn(BURST_S / 11) == 0.0
        assert loop.turn(BURST_S) > 0.0
        loop.now_s += 1_000


def test_a_dear_turn_has_a_rest_that_ends() -> None:
    loop = _Loop(0.2)
    assert loop.turn(30.0) == pytest.approx(LONGEST_REST_S)
    loop.now_s += LONGEST_REST_S
    assert loop.turn(0.0) == pytest.approx(0.0)
