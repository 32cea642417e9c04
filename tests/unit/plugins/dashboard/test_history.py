"""Goal: a history has the samples of a day and no more, says nothing about what was not known, and stays within its bounds.

Method: samples with a clock of the test's own; the drawing is read as SVG reads it.
"""

from __future__ import annotations

import re

from commitmq_plugins.dashboard.api.machine import drawn
from commitmq_plugins.dashboard.api.node import DAY_S, HistoryRings

START_MS = 1_780_000_000_000


def test_rates_and_lags() -> None:
    history = HistoryRings(60, 10)
    for number in range(5):
        history.add(START_MS + number * 60_000, 6_000 * number, {"orders": 120 * number}, {"desk": 5 - number})
    minutes = [START_MS + number * 60_000 for number in range(5)]
    assert history.rate_of_node(3_600) == [(at, 100.0) for at in minutes[1:]]
    assert history.rate_of_topic("orders", 3_600) == [(at, 2.0) for at in minutes[1:]]
    assert history.lag_of_group("desk", 3_600) == list(zip(minutes, [5.0, 4.0, 3.0, 2.0, 1.0], strict=True))
    assert history.lag_of_group("desk", 120) == list(zip(minutes[2:], [3.0, 2.0, 1.0], strict=True))
    assert history.rate_of_topic("never", 3_600) == history.lag_of_group("never", 3_600) == []


def test_what_is_not_known_is_a_gap() -> None:
    history = HistoryRings(60, 10)
    ends: list[int | None] = [10, None, 30, 5, 10]
    for number, end in enumerate(ends):
        history.add(START_MS + number * 60_000, 0, {"orders": end}, {} if number == 2 else {"desk": 1})
    assert [one for _, one in history.rate_of_topic("orders", 3_600)] == [None, None, None, 5 / 60]
    assert [one for _, one in history.lag_of_group("desk", 3_600)] == [1.0, 1.0, None, 1.0, 1.0]


def test_a_day_and_no_more() -> None:
    history = HistoryRings(600, 10)
    for number in range(500):
        history.add(START_MS + number * 600_000, number, {}, {"desk": number})
    found = history.lag_of_group("desk", DAY_S)
    assert len(found) == DAY_S // 600 + 1
    assert found[-1] == (START_MS + 499 * 600_000, 499.0)
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    quick = HistoryRings(1, 10)
    for number in range(2_000):
        quick.add(START_MS + number * 1_000, number, {}, {"desk": number})
    assert len(quick.lag_of_group("desk", DAY_S)) == 1_441, "memory is bounded whatever the step"


def test_the_number_of_series_is_bounded() -> None:
    history = HistoryRings(60, 3)
    many: dict[str, int | None] = {f"g{number}": number for number in range(10)}
    for number in range(3):
        history.add(START_MS + number * 60_000, 0, {}, many)
    kept = [name for name in many if history.lag_of_group(name, 3_600)]
    assert kept == ["g7", "g8", "g9"], "those that are furthest behind"
    assert len(history.lag_of_group("g9", 3_600)) == 3, "and they stay"
    assert [one for _, one in history.lag_of_group("g9", 3_600)] == [9.0] * 3
    history.add(START_MS + 180_000, 0, {}, {"g8": 8, "g9": 9, "new": 1})
    assert history.lag_of_group("new", 3_600)[-1] == (START_MS + 180_000, 1.0)
    assert history.lag_of_group("g7", 3_600) == []
    assert history.followed(["a", "b", "c", "d"]) == ["a", "b", "c"]
    for name in ("x", "y", "z", "x", "w"):
        history.follow(name)
    assert history.followed(["a"]) == ["z", "x", "w"]


def test_drawing() -> None:
    points: list[tuple[int, float | None]] = [(0, 0.0), (60_000, 10.0), (120_000, None), (180_000, 5.0)]
    path = drawn(points, 180)
    assert path == "M0.0 180.0h0.1L240.0 0.0M720.0 90.0h0.1"
    assert re.fullmatch(r"[MLh0-9. ]+", path)
    assert drawn([], 3_600) == ""
    assert drawn([(0, None)], 3_600) == ""
    assert drawn([(0, 0.0)], 3_600) == "M720.0 180.0h0.1"
