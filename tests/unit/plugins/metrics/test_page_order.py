"""Goal: a flood of topics or groups pushes out of an answer nothing that an alert or a board of the node asks for.

Method: figures as a flood leaves them, on a page that takes a part of them only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from commitmq import counting
from commitmq.config import from_mapping
from commitmq.control import Word
from commitmq.counting import Described, Family, Kind
from commitmq_plugins.metrics import process
from commitmq_plugins.metrics.figures import CountedMetric, Figures, GroupLag
from commitmq_plugins.metrics.process import EXPORTER, NORMAL, Collector
from exposition import Metric, parse

MAX_SERIES = 1_000
FLOOD = 3_000
BY_TOPIC = {f"commitmq_{one}_in{suffix}" for one in ("messages", "bytes") for suffix in ("", "_total")}
"""Counters come after the lags of groups, so a flood of groups may leave no room for them."""
DEPLOY = Path(__file__).parents[4] / "deploy"
RULES, BOARD = DEPLOY / "prometheus" / "commitmq-rules.yml", DEPLOY / "grafana" / "commitmq.json"


def counted(family: Family, *rows: tuple[str, ...]) -> CountedMetric:
    labels = dict.fromkeys(family.labels, "")
    described = Described(family.name, family.kind, family.help, labels, family.bounds, family.scale)
    size = 3 + len(family.bounds) if family.kind is Kind.HISTOGRAM else 1
    return CountedMetric(described, {row: [1] * size for row in rows})


def figures_of(*, topics: int, groups: int) -> Figures:
    words = {word.name.lower(): 0 for word in Word} | {"visible": 0, "dispatched": 0, "dispatched_durable": 0}
    names = [f"topic-{number}" for number in range(topics)]
    found = [
        counted(counting.MESSAGE_SIZE, *((name,) for name in names)),
        counted(counting.MESSAGES_IN, *((name, "client") for name in names)),
        counted(counting.BYTES_IN, *((name, "client") for name in names)),
        counted(counting.FLUSH_DURATION, ("flush",)),
        counted(counting.SENDS_REFUSED, ("14",)),
    ]
    figures = Figures(1_000, {one.described.name: one for one in found}, words)
    figures.topics = {name: {"attributes": {}, "read_queues": 1} for name in names}
    figures.groups = {f"group-{number}": {"members": 1} for number in range(groups)} | {"alerted": {"members": 1}}
    figures.group_lags = {(f"group-{number}", "t"): GroupLag(number % 7, 1, 0) for number in range(groups)}
    figures.group_lags["alerted", "t"] = GroupLag(1_000_000, 1, 0)
    figures.disk_total, figures.disk_used = 100, 10
    figures.dispatchers = [{"name": "d", "position": 0, "durable": 0, "lag_bytes": 0, "state": "running"}]
    return figures


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Metric]]:
    def make(figures: Figures, kind: str = NORMAL, *, openmetrics: bool = False) -> dict[str, Metric]:
        gathering = MagicMock(errors=0)
        gathering.gather.return_value = figures
        monkeypatch.setattr(process, "FigureCollector", lambda context: gathering)
        health = MagicMock()
        health.reasons.return_value = []
        config = from_mapping({"metrics": {"max_series": MAX_SERIES}})
        body = Collector(MagicMock(config=config), health).body(kind, openmetrics=openmetrics)
        return parse(body.decode(), openmetrics=openmetrics)

    return make


Answer = Callable[..., dict[str, Metric]]


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize(("topics", "groups"), [(FLOOD, 0), (0, FLOOD), (FLOOD, FLOOD)])
def test_a_flood_of_names_leaves_what_alerts_and_boards_ask_for(
    answer: Answer, topics: int, groups: int, openmetrics: bool
) -> None:
    found = answer(figures_of(topics=topics, groups=groups), openmetrics=openmetrics)
    assert found["commitmq_series_dropped"].value() > FLOOD
    asked = {name for file in (RULES, BOARD) for name in re.findall(r"(?<![a-z_])commitmq_[a-z_]+", file.read_text())}
    asked |= {name.removesuffix(suffix) for name in asked for suffix in ("_bucket", "_total", "_sum", "_count")}
    wanted = (asked & answer(figures_of(topics=1, groups=1), openmetrics=openmetrics).keys()) - BY_TOPIC
    assert wanted > {"commitmq_group_lag_messages", "commitmq_group_lag_seconds", "commitmq_flush_duration_seconds"}
    assert wanted <= found.keys(), wanted - found.keys()
    assert found["commitmq_group_lag_messages"].value(group="alerted") == 1_000_000
    assert found["commitmq_group_members"].value(group="alerted") == 1
    assert found["rocketmq_consumer_lag_messages"].value(consumer_group="alerted") == 1_000_000


def test_groups_that_are_furthest_behind_come_first(answer: Answer) -> None:
    found = answer(figures_of(topics=0, groups=FLOOD))
    lags = list(found["commitmq_group_lag_messages"].samples.values())
    assert lags == sorted(lags, reverse=True)
    assert lags[:2] == [1_000_000, 6]


def test_a_flood_leaves_the_node_in_the_exporters_names(answer: Answer) -> None:
    found = answer(figures_of(topics=FLOOD, groups=FLOOD), EXPORTER)
    assert found["rocketmq_brokeruntime_dispatch_behind_bytes"].value() == 0
    assert found["rocketmq_group_diff"].value(group="alerted") == 1_000_000
