"""Goal: counts have RocketMQ's windows and stay bounded. Method: a clock of the test's own."""

from __future__ import annotations

from commitmq_plugins.rocketmq.broker.counting import SAMPLE_S, Statistics


def test_the_minute_forgets_what_is_older() -> None:
    found = Statistics()
    found.add("TOPIC_PUT_NUMS", "t", 60, 0.0, 6)
    for turn in range(1, 13):
        found.sample(turn * SAMPLE_S)
        if turn == 1:
            figures = found.figures("TOPIC_PUT_NUMS", "t", 10.0)
            assert figures is not None
            assert (figures[0].sum, figures[0].tps, figures[0].avgpt) == (60, 6.0, 10.0)
    figures = found.figures("TOPIC_PUT_NUMS", "t", 120.0)
    assert figures is not None
    assert [one.sum for one in figures] == [0, 60, 60]
    assert found.total("TOPIC_PUT_NUMS", "t") == 60


def test_a_count_that_has_just_begun_has_the_rate_of_its_window() -> None:
    found = Statistics()
    found.add("TOPIC_PUT_NUMS", "t", 20, 0.0)
    figures = found.figures("TOPIC_PUT_NUMS", "t", 0.001)
    assert figures is not None
    assert [(one.sum, one.tps) for one in figures] == [(20, 2.0), (20, 20 / 600), (20, 20 / 3_600)]


def test_what_was_never_counted_has_no_figures() -> None:
    found = Statistics()
    assert found.figures("TOPIC_PUT_NUMS", "t", 0.0) is None
    assert found.total("TOPIC_PUT_NUMS", "t") == 0


def test_the_number_of_counts_is_bounded_and_idle_ones_go() -> None:
    found = Statistics(max_items=2)
    for key in "abc":
        found.add("TOPIC_PUT_NUMS", key, 1, 0.0)
    assert len(found) == 2
    found.add("TOPIC_PUT_NUMS", "a", 1, 80_000.0)
    found.sample(90_000.0)
    assert len(found) == 1
