"""Goal: the times of sends have RocketMQ's classes and shares, of the last whole minute.

Method: times and a clock that are handed in; the classes are those of RocketMQ's StoreStatsService.
"""

from __future__ import annotations

import pytest

from commitmq_plugins.rocketmq.broker.counting import PutTimes


def counts(puts: PutTimes, now_s: float) -> list[int]:
    return [int(one.rpartition(":")[2]) for one in puts.classes(now_s).split()]


@pytest.mark.parametrize(
    ("took_ms", "number"),
    [
        (0, 0),
        (0.9, 0),
        (1, 1),
        (9, 1),
        (10, 2),
        (49, 2),
        (50, 3),
        (100, 4),
        (200, 5),
        (500, 6),
        (999, 6),
        (1_000, 7),
        (2_000, 8),
        (3_000, 9),
        (4_000, 10),
        (5_000, 11),
        (9_999, 11),
        (10_000, 12),
        (99_000, 12),
    ],
)
def test_a_time_has_its_class(took_ms: float, number: int) -> None:
    puts = PutTimes(0.0)
    puts.add(took_ms / 1_000 + 1e-6, 1.0)
    assert counts(puts, 61.0) == [int(one == number) for one in range(13)]
    assert puts.longest_ms == int(took_ms)


def test_shares_are_interpolated_in_their_class() -> None:
    puts = PutTimes(0.0)
    assert puts.share_ms(0.99, 1.0) == 0.0
    for _ in range(90):
        puts.add(0.0, 1.0)
    for _ in range(10):
        puts.add(0.1505, 1.0)  # in the class of 140 to 150 ms
    assert puts.share_ms(0.5, 61.0) == pytest.approx(50 / 90)
    assert puts.share_ms(0.95, 61.0) == pytest.approx(145.0)
    assert puts.share_ms(0.99, 61.0) == pytest.approx(149.0)


def test_figures_are_those_of_the_last_whole_minute() -> None:
    puts = PutTimes(0.0)
    puts.add(0.0, 10.0)
    assert sum(counts(puts, 59.0)) == 0
    puts.add(0.0, 61.0)
    puts.add(0.0, 62.0)
    assert sum(counts(puts, 63.0)) == 1
    assert sum(counts(puts, 121.0)) == 2
    assert sum(counts(puts, 181.0)) == 0
    puts.add(0.0, 182.0)
    assert sum(counts(puts, 400.0)) == 0, "that minute is long over"
    assert puts.longest_ms == puts.failed == 0


def test_what_is_longer_than_all_classes_has_no_time_of_its_own() -> None:
    puts = PutTimes(0.0)
    for _ in range(100):
        puts.add(60.0, 1.0)
    assert puts.share_ms(0.99, 61.0) == 10_000.0
