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

import pytest

from commitmq.cli.main import main
from commitmq_plugins.spark.jobs.stats import GROUPINGS, Stats, iso, stats
from golden_stores import GoldenStore

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
    return stats(spark, [str(one.root) for one in golden_stores.values()], topics=sorted(topics))


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


def test_the_verb(
    spark: SparkSession, golden_stores: dict[str, GoldenStore], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = golden_stores["clean"].root
    words = ["pipeline", "stats", str(store), "--topic", "GoldenNormal", "--master", "local[2]"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--by", "queue"])
    assert not ended.value.code
    table = capfd.readouterr().out
    assert re.search(r"^GoldenNormal +0 +60 ", table, re.MULTILINE)
    assert re.search(r"^all +240 .* ≈ ", table, re.MULTILINE)
    assert "≈: approximate." in table
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    assert json.loads(capfd.readouterr().out)["total"]["messages"] == 240
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "stats", str(tmp_path), "--master", "local[2]"])
    assert ended.value.code == 74
    assert "this is no store" in capfd.readouterr().err
