"""Goal: ``pipeline stats`` counts what is there.

Method: RocketMQ's golden stores; every exact figure is counted again from messages.jsonl, and the approximate ones lie among
so few messages that they are exact too.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.dom.minidom import parseString

import pytest

from commitmq.cli.main import main
from commitmq_plugins.spark.jobs import svg
from commitmq_plugins.spark.jobs.stats import GROUPINGS, Stats, iso, stats, step_of
from commitmq_plugins.spark.jobs.stats_page import page
from golden_stores import GoldenStore
from queue_store import QueueStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000


def place(message: dict[str, Any], column: str) -> Any:
    """The value of a grouping's column."""
    if column == "tag":
        return message["properties"].get("TAGS")
    if column == "hour":
        return iso(message["store_timestamp"] // HOUR_MS * HOUR_MS)
    return message[column]


def percentile(values: list[int], percent: int) -> int:
    """The least value that at least ``percent`` % of all do not exceed."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1]


@pytest.fixture(scope="module")
def found(spark: SparkSession, golden_stores: dict[str, GoldenStore]) -> Stats:
    """Of both golden stores, read as one."""
    topics = {one["topic"] for store in golden_stores.values() for one in store.messages}
    # A time zone that is no whole number of hours from UTC must change nothing.
    before = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        return _stats(spark, golden_stores, topics)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def _stats(spark: SparkSession, golden_stores: dict[str, GoldenStore], topics: set[str]) -> Stats:
    return stats(spark, [str(one.root) for one in golden_stores.values()], topics=sorted(topics), plots=True)


@pytest.mark.parametrize("grouping", list(GROUPINGS))
def test_every_group_is_counted(found: Stats, golden_stores: dict[str, GoldenStore], grouping: str) -> None:
    expected: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for store in golden_stores.values():
        for one in store.messages:
            expected[tuple(place(one, column) for column in GROUPINGS[grouping])].append(one)
    groups = found.groups[grouping]
    assert [tuple(one.of.values()) for one in groups] == sorted(
        expected, key=lambda values: [(value is not None, value) for value in values]
    )
    for group in groups:
        messages = expected[tuple(group.of.values())]
        sizes = [len(message["body_hex"]) // 2 for message in messages]
        delays = [message["store_timestamp"] - message["born_timestamp"] for message in messages]
        keys = [key for message in messages if (key := message["properties"].get("KEYS")) is not None]
        assert group.messages == len(messages)
        assert group.log_bytes == sum(message["total_size"] for message in messages)
        assert group.body_bytes == sum(sizes)
        assert group.body_size == {**{f"p{at}": percentile(sizes, at) for at in (50, 95, 99)}, "max": max(sizes)}
        assert group.delay_ms == {**{f"p{at}": percentile(delays, at) for at in (50, 95, 99)}, "max": max(delays)}
        assert group.with_key == len(keys)
        assert abs(group.distinct_keys - len(set(keys))) <= 0.05 * len(set(keys))
        assert (group.first_stored_ms, group.last_stored_ms) == (
            min(message["store_timestamp"] for message in messages),
            max(message["store_timestamp"] for message in messages),
        )


def test_the_page_is_well_formed_and_loads_nothing(found: Stats) -> None:
    text = page(found)
    document = parseString(re.sub("<!doctype html>|<meta[^>]*>", "", text))
    assert len(document.getElementsByTagName("svg")) == 6 * len(found.groups["topics"])
    assert not re.search("(src|href|url)[ =(]", text)
    for one in found.groups["topics"]:
        assert f"<h2>{one.of['topic']}</h2>" in text
    assert "There is no message" in page(Stats(["nowhere"], {name: [] for name in GROUPINGS}))


MORNING_MS = 1_790_000_000_000 // 86_400_000 * 86_400_000 + 9 * HOUR_MS


def drawn(text: str) -> tuple[Any, list[Any]]:
    """A page as a document, and its plots over time."""
    document = parseString(re.sub("<!doctype html>|<meta[^>]*>", "", text))
    plots = [one for one in document.getElementsByTagName("svg") if of_class(one, "tick")]
    return document, plots


def of_class(plot: Any, name: str) -> list[Any]:
    return [
        one for kind in ("text", "rect") for one in plot.getElementsByTagName(kind) if one.getAttribute("class") == name
    ]


def text_of(one: Any) -> str:
    return "".join(child.data for child in one.childNodes if child.nodeType == child.TEXT_NODE)


@pytest.mark.parametrize(
    ("span_ms", "ticks", "title", "bars"),
    [
        (HOUR_MS, [f"{at // 60:02d}:{at % 60:02d}" for at in range(540, 601, 10)], "Messages by minute", 31),
        (24 * HOUR_MS, ["12:00", "16:00", "20:00", "00:00", "04:00", "08:00"], "Messages by hour", 25),
    ],
)
def test_plots_of_an_hour_and_of_a_day(
    spark: SparkSession, tmp_path: Path, span_ms: int, ticks: list[str], title: str, bars: int
) -> None:
    store = QueueStore(tmp_path)
    store.topic("t", 1)
    for number in range(61):
        store.put("t", 0, b"x" * (number + 1), tag="a", timestamp=MORNING_MS + number // 2 * 2 * span_ms // 60)
    found = stats(spark, [str(tmp_path)], plots=True)
    document, plots = drawn(page(found))
    assert title in [text_of(one) for one in document.getElementsByTagName("h3")]
    assert len(plots) == 4
    for plot in plots:
        assert [text_of(one) for one in of_class(plot, "tick")] == ticks
        dates = [text_of(one) for one in of_class(plot, "date")]
        assert dates[0] == iso(MORNING_MS)[:10]
        assert len(dates) == (1 if span_ms == HOUR_MS else 2)
    shown = [one for one in plots[0].getElementsByTagName("rect") if one.getElementsByTagName("title")]
    assert len(shown) == bars
    assert sum(one.messages for one in found.steps) == 61


def test_the_legend_has_each_line_s_colour_and_approximate_figures_say_so(found: Stats) -> None:
    document, plots = drawn(page(found))
    for plot in plots:
        lines = [one.getAttribute("stroke") for one in plot.getElementsByTagName("polyline")]
        if not lines:
            continue
        texts = [one for one in of_class(plot, "legend") if one.tagName == "text"]
        assert [text_of(one) for one in texts] == ["≈ p50", "≈ p95", "≈ p99"]
        # The page's style for text would overrule the attribute.
        assert [one.getAttribute("style") for one in texts] == [f"fill:{colour}" for colour in lines]
        assert [one.getAttribute("fill") for one in of_class(plot, "legend") if one.tagName == "rect"] == lines
        assert len(set(lines)) == 3
        titles = [text_of(one.getElementsByTagName("title")[0]) for one in plot.getElementsByTagName("circle")]
        assert titles
        assert all(re.fullmatch(r"p\d\d, [-\d]+ [:\d]+: ≈ .+", one) for one in titles)
    rows = [row for row in document.getElementsByTagName("tr") if row.getElementsByTagName("td")]
    assert rows
    for row in rows:
        cells = [text_of(one) for one in row.getElementsByTagName("td")]
        assert all(one.startswith("≈ ") for one in cells[3:9])
        assert cells[9] == "0" or cells[9].startswith("≈ ")
        assert not any("≈" in one for one in cells[:3])
    assert any(
        "0.1% of the messages" in text_of(one) and "2%" in text_of(one) for one in document.getElementsByTagName("p")
    )


@pytest.mark.parametrize("days", [0, 1 / 1440, 1, 10, 40, 80, 200, 2000])
def test_an_axis_has_a_few_round_times(days: float) -> None:
    axis = svg.TimeAxis.of(MORNING_MS, MORNING_MS + int(days * 24 * HOUR_MS), step_of(int(days * 24 * HOUR_MS)))
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(axis.start <= one <= axis.end for one in ticks)


def test_scales_end_at_round_numbers() -> None:
    tries = [svg.nice_ceiling(value) for value in (0, -3, 0.03, 1, 1.01, 7, 99, 100, 2500.5)]
    assert tries == [1, 1, 0.05, 1, 2, 10, 100, 100, 5000]


def test_names_in_a_page_are_text() -> None:
    assert "<b>" not in svg.rows_chart(["<b>"], [1], show=str)


def test_the_verb(
    spark: SparkSession, golden_stores: dict[str, GoldenStore], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = golden_stores["clean"].root
    html = tmp_path / "stats.html"
    words = ["pipeline", "stats", str(store), "--topic", "GoldenNormal", "--master", "local[2]"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--by", "queue", "--html", str(html)])
    assert not ended.value.code
    table = capfd.readouterr().out
    assert re.search(r"^GoldenNormal +0 +60 ", table, re.MULTILINE)
    assert re.search(r"^all +240 .* ≈ ", table, re.MULTILINE)
    assert "≈: approximate." in table
    assert "GoldenNormal" in html.read_text()
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    assert json.loads(capfd.readouterr().out)["total"]["messages"] == 240
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "stats", str(tmp_path), "--master", "local[2]"])
    assert ended.value.code == 74
    assert "this is no store" in capfd.readouterr().err
