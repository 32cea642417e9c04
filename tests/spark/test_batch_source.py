"""Goal: ``spark.read.format("commitmq")`` shows exactly the messages of a store, whoever wrote it.

Method: RocketMQ's golden stores against messages.jsonl, which its own classes wrote.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from golden_stores import GoldenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EPOCH = datetime(1970, 1, 1)


def read(spark: SparkSession, store: GoldenStore, **options: str) -> DataFrame:
    return spark.read.format("commitmq").options(store=str(store.root), **options).load()


def milliseconds(moment: datetime) -> int:
    """A timestamp as Spark gives it: without a zone, in the session's."""
    return (moment.astimezone(UTC).replace(tzinfo=None) - EPOCH) // timedelta(milliseconds=1)


def as_line(row: Any) -> dict[str, Any]:
    """The members of messages.jsonl that the source has."""
    return {
        "topic": row.topic,
        "queue_id": row.queue_id,
        "queue_offset": row.queue_offset,
        "physical_offset": row.physical_offset,
        "sys_flag": row.sys_flag,
        "flag": row.flag,
        "born_timestamp": milliseconds(row.born_timestamp),
        "store_timestamp": milliseconds(row.store_timestamp),
        "reconsume_times": row.reconsume_times,
        "offset_msg_id": row.msg_id,
        "properties": row.properties,
        "body_hex": row.body.hex(),
    }


def test_golden_stores_are_read_message_by_message(spark: SparkSession, golden: GoldenStore) -> None:
    rows = read(spark, golden).collect()
    found = {row.physical_offset: row for row in rows}
    assert len(found) == len(rows)
    for message in golden.messages:
        row = found.pop(message["physical_offset"])
        line = as_line(row)
        assert line == {name: message[name] for name in line}
        assert row.tags == message["properties"].get("TAGS")
        assert row["keys"] == message["properties"].get("KEYS")
        assert row.unique_id == message["properties"].get("UNIQ_KEY")
    assert {row.topic.partition("%")[0] or row.topic[:5] for row in found.values()} == {"%DLQ%"}


@pytest.mark.parametrize("partitions", [1, 6])
def test_partitions_hold_every_message_once_and_queues_in_order(
    spark: SparkSession, golden: GoldenStore, partitions: int
) -> None:
    frame = read(spark, golden, minPartitions=str(partitions))
    parts = frame.select("topic", "queue_id", "queue_offset").rdd.glom().collect()
    assert len(parts) >= partitions * 2 // 3
    seen: dict[tuple[str, int], list[int]] = {}
    for part in parts:
        for row in part:
            seen.setdefault((row.topic, row.queue_id), []).append(row.queue_offset)
    assert sum(map(len, seen.values())) == len(golden.messages) + len(seen[f"%DLQ%{prefix(golden)}_group", 0])
    assert all(offsets == list(range(len(offsets))) for offsets in seen.values())


def prefix(golden: GoldenStore) -> str:
    return {"clean": "Golden", "crash": "Crashed"}[golden.name]


def test_a_topic_that_does_not_exist_is_an_error(spark: SparkSession, golden_stores: dict[str, GoldenStore]) -> None:
    golden = golden_stores["clean"]
    with pytest.raises(Exception, match=r"there is no topic 'nobody' in .*topics there are: .*Golden"):
        read(spark, golden, topics="GoldenNormal,nobody").count()


def test_a_schema_is_the_projection(spark: SparkSession, golden_stores: dict[str, GoldenStore]) -> None:
    golden = golden_stores["crash"]
    frame = (
        spark.read.format("commitmq")
        .schema("body_size int, queue_offset bigint, store string")
        .load(str(golden.root), topics=f"{prefix(golden)}Normal", startingOffsets="latest")
    )
    assert frame.columns == ["body_size", "queue_offset", "store"]
    assert frame.count() == 0
    narrow = spark.read.format("commitmq").schema("queue_id int").load(str(golden.root))
    assert narrow.count() == read(spark, golden).count()


@pytest.mark.parametrize(
    ("schema", "says"),
    [("wrong int", "there is no column 'wrong'"), ("queue_id bigint", "the column queue_id is int, not bigint")],
)
def test_a_schema_with_other_columns_is_refused(
    spark: SparkSession, golden_stores: dict[str, GoldenStore], schema: str, says: str
) -> None:
    golden = golden_stores["clean"]
    with pytest.raises(Exception, match=says):
        spark.read.format("commitmq").schema(schema).load(str(golden.root)).collect()
