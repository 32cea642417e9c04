"""Goal: the source says of each message what it is, and which topic it is for.

Method: RocketMQ's store with delayed, half, retried and dead messages, read in this process; its messages.jsonl has the
properties of each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from source_reading import read_table

from commitmq_plugins.spark import columns
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.reading import NORMAL, STATES, real_topic_property, state_of
from golden_stores import GoldenStore, unpack

WAITING = ("delayed", "timer", "half", "discarded_half")
NAMES = ("topic", "physical_offset", "properties", "state", "real_topic")


@pytest.fixture(scope="module")
def semantics(tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    return unpack("semantics", tmp_path_factory.mktemp("states"))


def test_every_row_of_rocketmqs_store_says_what_it_is(semantics: GoldenStore) -> None:
    rows = read_table(NAMES, store=semantics.root).to_pylist()
    seen = {row["state"] for row in rows}
    assert {NORMAL, "delayed", "half", "op", "retry", "dead_letter"} <= seen <= set(STATES)
    for row in rows:
        properties = dict(row["properties"])
        assert row["state"] == state_of(row["topic"])
        if row["state"] in WAITING:
            assert row["real_topic"] == properties["REAL_TOPIC"]
        elif row["state"] in ("retry", "dead_letter"):
            assert row["real_topic"] == properties.get("RETRY_TOPIC", row["topic"])  # POP names none
        else:
            assert row["real_topic"] == row["topic"]
    assert any(row["real_topic"] != row["topic"] for row in rows)


def test_one_partition_of_many_topics_is_told_apart(semantics: GoldenStore) -> None:
    whole = read_table(("physical_offset", "state", "real_topic"), least=1, store=semantics.root).to_pylist()
    parts = read_table(("physical_offset", "state", "real_topic"), least=50, store=semantics.root).to_pylist()
    key = lambda row: (row["physical_offset"], row["state"])  # noqa: E731
    assert sorted(whole, key=key) == sorted(parts, key=key)


def test_the_state_alone_does_not_read_the_log(semantics: GoldenStore, tmp_path: Path) -> None:
    assert "state" in columns.OF_UNITS
    alone = read_table(("topic", "state"), store=semantics.root).to_pylist()
    assert all(row["state"] == state_of(row["topic"]) for row in alone)


def test_the_columns_come_only_on_request() -> None:
    plain = columns.default_schema(several_stores=False, properties=True)
    assert "state" not in plain
    asked = columns.default_schema(several_stores=False, properties=True, state=True)
    assert asked == plain + ", state string, real_topic string"
    assert SourceOptions.parse({"store": "x", "state": "true"}).state
    assert not SourceOptions.parse({"store": "x"}).state


@pytest.mark.parametrize(
    ("topic", "state", "property_name"),
    [
        ("orders", NORMAL, None),
        ("SCHEDULE_TOPIC_XXXX", "delayed", "REAL_TOPIC"),
        ("rmq_sys_wheel_timer", "timer", "REAL_TOPIC"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", "half", "REAL_TOPIC"),
        ("RMQ_SYS_TRANS_OP_HALF_TOPIC", "op", None),
        ("%RETRY%kitchen", "retry", "RETRY_TOPIC"),
        ("%DLQ%kitchen", "dead_letter", "RETRY_TOPIC"),
        ("rmq_sys_REVIVE_LOG_DefaultCluster", "pop", None),
    ],
)
def test_states_follow_from_the_topic(topic: str, state: str, property_name: str | None) -> None:
    assert (state_of(topic), real_topic_property(topic)) == (state, property_name)
