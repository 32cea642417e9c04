"""Goal: where groups have more queues than an answer may look at, those that lag most are in it.

Method: the coordinator's pages are a list, and the queues' ends a table; what is read of the log is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from commitmq_plugins.metrics.figures import FigureCollector, Figures, Lags

MOST = 100
QUEUES = 300


class KnownLags(Lags):
    """Queues of 1,000 messages; ``read`` are the places of the log that were looked at."""

    def __init__(self) -> None:
        self.read: list[tuple[str, int, int]] = []
        self.looked_at: list[tuple[str, int]] = []

    def begin(self, topics: object) -> None:
        pass

    def oldest_ms(self) -> int | None:
        return None

    def bounds(self, topic: str, queue: int) -> tuple[int, int] | None:
        self.looked_at.append((topic, queue))
        return None if topic == "under repair" else (0, 1_000)

    def _stored_ms(self, topic: str, queue: int, offset: int) -> int | None:
        self.read.append((topic, queue, offset))
        return 7


def gathered(rows: list[list[Any]]) -> tuple[Figures, KnownLags]:
    def pages(role: str, op: str, name: str, most: int) -> Iterator[Any]:
        assert (role, op, name) == ("coordinator", "group.positions", "positions")
        yield from rows[:most]

    lags = KnownLags()
    looking = object.__new__(FigureCollector)
    vars(looking).update(
        line=SimpleNamespace(pages=pages),
        lags=lags,
        errors=0,
        _is_late=False,
        _settings=SimpleNamespace(max_positions=MOST),
    )
    figures = Figures(0, {}, {})
    looking._look_at_lags(figures)
    return figures, lags


@pytest.fixture
def rows() -> list[list[Any]]:
    """Group ``a`` has read nearly everything; ``z``, the last one, nothing of two queues."""
    nearly = [["a", "t", queue, 1_000 - queue % 2] for queue in range(QUEUES)]
    return [*nearly, ["b", "under repair", 0, 0], ["z", "t", 5, 0], ["z", "t", 6, 10]]


def test_those_that_lag_most_are_not_left_out(rows: list[list[Any]]) -> None:
    figures, lags = gathered(rows)
    assert len(figures.queue_lags) == MOST
    assert [(one.group, one.queue, one.messages) for one in figures.queue_lags[:2]] == [("z", 5, 1_000), ("z", 6, 990)]
    assert figures.group_lags["z", "t"].messages == 1_990
    assert all(one.messages for one in figures.queue_lags)
    assert figures.positions_left_out == len(rows) - MOST
    assert len(lags.read) == MOST, "the log is read for the chosen ones alone"
    assert len(lags.looked_at) == len({*lags.looked_at}), "each queue is looked at once, whoever reads it"


def test_what_is_looked_at_has_a_bound(rows: list[list[Any]]) -> None:
    many = [["a", "t", queue, 1_000] for queue in range(20 * MOST)]
    figures, lags = gathered([*many, *rows])
    assert len(lags.looked_at) == 10 * MOST
    assert figures.positions_left_out == 9 * MOST + 1


def test_few_queues_are_all_there(rows: list[list[Any]]) -> None:
    figures, _ = gathered(rows[-60:])
    assert len(figures.queue_lags) == 59, "all but the one that cannot be read"
    assert not figures.positions_left_out
