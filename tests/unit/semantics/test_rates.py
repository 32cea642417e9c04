"""Goal: a name passes as often as its rate says; one request of any size passes; memory is bounded whatever names come.

Method: a clock that the test moves.
"""

from __future__ import annotations

from commitmq.semantics.rates import LEAST_WAIT_MS, LONGEST_WAIT_MS, RateLimiter


def passes(rates: RateLimiter, name: str, count: int, size_bytes: int, now_s: float) -> bool:
    if rates.wait_ms(name, now_s):
        return False
    rates.take(name, count, size_bytes, now_s)
    return True


def test_a_stream_passes_at_its_rate_after_the_burst() -> None:
    rates = RateLimiter("topic", 100, 0, 10)
    passed = sum(passes(rates, "a", 1, 1_000, step / 1000) for step in range(10_000))
    assert 1_050 <= passed <= 1_110  # ten seconds of the rate, and the burst of one


def test_a_refused_request_passes_after_the_time_that_its_refusal_names() -> None:
    rates = RateLimiter("topic", 10, 0, 10)
    assert passes(rates, "a", 25, 0, 0.0)
    wait_ms = rates.wait_ms("a", 0.0)
    assert 1_500 < wait_ms < 1_700  # a debt of 15 messages and one more
    assert rates.wait_ms("a", (wait_ms - 150) / 1000)
    assert not rates.wait_ms("a", wait_ms / 1000)


def test_rates_that_are_set_anew_forgive_no_debt_and_give_no_second_burst() -> None:
    before = RateLimiter("user", 100, 0, 10)
    assert passes(before, "greedy", 1_000, 0, 0.0)
    assert passes(before, "used", 60, 0, 0.0)
    for messages_per_s in (100, 200):
        rates = RateLimiter("user", messages_per_s, 0, 10)
        rates.continue_from(before)
        assert rates.wait_ms("greedy", 0.0) >= 900 * 1000 // messages_per_s
        assert passes(rates, "used", 40, 0, 0.0)
        assert not passes(rates, "used", 1, 0, 0.0)
        assert passes(rates, "new", messages_per_s, 0, 0.0)
    lower = RateLimiter("user", 10, 50, 1)
    lower.continue_from(before)
    assert len(lower) == 1
    assert lower.wait_ms("greedy", 0.0) == LONGEST_WAIT_MS
    off = RateLimiter("user", 0, 0, 10)
    off.continue_from(before)
    assert len(off) == 0
    bytes_too = RateLimiter("user", 0, 100, 10)
    bytes_too.continue_from(before)  # bytes were not bounded, so nothing of them is known
    assert not bytes_too.wait_ms("greedy", 0.0)


def test_bytes_and_messages_bound_each_by_itself() -> None:
    rates = RateLimiter("client", 1_000, 1_000, 10)
    assert passes(rates, "bytes", 1, 5_000, 0.0)
    assert not passes(rates, "bytes", 1, 1, 1.0)
    assert passes(rates, "messages", 1_000, 10, 0.0)
    assert not passes(rates, "messages", 1, 1, 0.0)


def test_one_request_of_any_size_passes_and_the_wait_after_it_is_bounded() -> None:
    rates = RateLimiter("topic", 0, 1, 10)
    assert passes(rates, "a", 1, 1 << 40, 0.0)
    assert rates.wait_ms("a", 1.0) == LONGEST_WAIT_MS
    rates = RateLimiter("topic", 1 << 30, 0, 10)
    assert passes(rates, "a", 1 << 30, 0, 0.0)
    assert rates.wait_ms("a", 0.0) == LEAST_WAIT_MS


def test_names_without_end_take_bounded_memory_and_a_debt_is_not_forgotten_for_them() -> None:
    rates = RateLimiter("client", 1, 0, 100)
    assert passes(rates, "greedy", 1_000, 0, 0.0)
    for number in range(10_000):
        rates.take(f"idle-{number}", 0, 0, 0.0)
    assert len(rates) == 100
    assert rates.wait_ms("greedy", 1.0)
    for number in range(10_000):
        rates.take(f"greedy-{number}", 1_000, 0, 1.0)
    assert len(rates) == 100


def test_a_clock_that_stands_still_gives_nothing() -> None:
    rates = RateLimiter("topic", 1, 0, 10)
    assert passes(rates, "a", 1, 0, 5.0)
    assert not passes(rates, "a", 1, 0, 5.0)
    assert not passes(rates, "a", 1, 0, 4.0)


def test_names_have_rates_of_their_own() -> None:
    of = {"small": (10, 0), "large": (1_000, 0)}
    rates = RateLimiter("user", 0, 0, 10, lambda name: of.get(str(name), (0, 0)))
    assert rates.is_bounded
    for name, most in (("small", 130), ("large", 10_000)):
        passed = sum(passes(rates, name, 1, 0, step / 1000) for step in range(10_000))
        assert most * 0.8 <= passed <= most
    assert all(passes(rates, "free", 1_000, 1_000, 0.0) for _ in range(100))
    assert len(rates) == 2, "a name without a rate has no bucket"
    assert rates.sentence("small", "'small'") == "user 'small' is over its rate of 10 messages/s"
