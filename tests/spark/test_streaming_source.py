"""Goal: a stream gives every message once, whoever dies, keeps its limits, and sees new queues and topics.

Method: a real node is sent to while real queries run in micro-batches; what they gave is compared with what was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StringType, StructField, StructType
from source_reading import wait_until_shown
from streamed import Query

from commitmq import Admin, Message, Producer
from commitmq.errors import ConfigError
from commitmq_plugins.spark.options import SourceOptions
from commitmq_plugins.spark.source import StreamReader
from golden_stores import GoldenStore
from nodes import Node, start_node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("stream")) as node:
        yield node


def send(node: Node, topic: str, bodies: list[str]) -> None:
    with Producer(node=node.address) as producer:
        producer.send_batch(topic, [Message(body.encode()) for body in bodies])
    wait_until_shown(node.address)


@pytest.mark.parametrize("kind", ["folder", "files", pytest.param("pull", marks=pytest.mark.slow)])
def test_a_stream_goes_on_where_it_was_and_sees_new_topics(
    spark: SparkSession, node: Node, tmp_path: Path, kind: str
) -> None:
    options = {"store": str(node.store)} if kind == "folder" else {"node": node.address, "transfer": kind}
    query = Query(spark, tmp_path, topicsPattern=f"{kind}_.*", **options)
    first = [f"a{number:03d}" for number in range(100)]
    send(node, f"{kind}_one", first)
    assert query.run() == first
    second = [f"b{number:03d}" for number in range(50)]
    send(node, f"{kind}_one", second[:20])
    send(node, f"{kind}_two", second[20:])
    assert query.run() == second
    assert query.run() == []


def test_a_stream_from_the_end_begins_once(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    """It dies twice in its first micro-batch while producers write: what came before it never comes, and nothing behind its
    begin is missing.
    """
    topic, over, sent = "written", threading.Event(), [0] * 4
    with Producer(node=node.address) as producer:
        for queue in range(4):
            producer.send_batch(topic, [b"old"] * 500, queue=queue)
    wait_until_shown(node.address)

    def write() -> None:
        with Producer(node=node.address) as producer:
            while not over.wait(0.02):
                queue = sum(sent) % 4
                producer.send(topic, b"new", queue=queue)
                sent[queue] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        query = Query(spark, tmp_path, node=node.address, topics=topic, startingOffsets="latest")
        with pytest.raises(StreamingQueryException, match="the driver dies"):
            query.run(dies=True)
        (first,) = query.batches
        with pytest.raises(StreamingQueryException, match="the driver dies"):
            query.run(dies=True)
        assert sorted(query.batches[0]) == sorted(first)
        query.run()
        rows = [row for batch in query.batches for row in batch]
    finally:
        over.set()
        writer.join()
    wait_until_shown(node.address)
    query.run()
    rows += [row for batch in query.batches for row in batch]
    assert {row.body for row in rows} == {b"new"}
    for queue, count in enumerate(sent):
        offsets = sorted(row.queue_offset for row in rows if row.queue_id == queue)
        assert offsets == list(range(min(offsets), 500 + count))


def test_limits_are_kept(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    bodies = [f"{number:04d}" + "x" * 200 for number in range(90)]
    send(node, "limited", bodies)
    query = Query(spark, tmp_path / "rows", store=str(node.store), topics="limited", maxOffsetsPerTrigger="40")
    assert query.run() == bodies
    assert [len(batch) for batch in query.batches] == [40, 40, 10]
    query = Query(spark, tmp_path / "bytes", node=node.address, topics="limited", maxBytesPerTrigger="12000")
    assert query.run() == bodies
    assert all(len(batch) * 200 <= 12_000 for batch in query.batches)
    assert 2 <= len(query.batches) <= 6


def test_the_progress_is_told_to_the_node_as_a_group(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    send(node, "grouped", [str(number) for number in range(60)])
    query = Query(
        spark, tmp_path, node=node.address, topics="grouped", group="spark_readers", maxOffsetsPerTrigger="25"
    )
    assert len(query.run()) == 60
    send(node, "grouped", ["one more"])

    def lag() -> int:
        with Admin(node.address) as admin:
            return sum(row.lag for row in admin.group_lag("spark_readers"))

    assert lag() == 1
    assert query.run() == ["one more"]
    assert lag() == 0


def test_a_stream_waits_for_its_topic_and_says_so_once(
    golden_stores: dict[str, GoldenStore], caplog: pytest.LogCaptureFixture
) -> None:
    def looked(**options: str) -> list[str]:
        given = {"store": str(golden_stores["clean"].root), "topics": "GoldenNormal,nobody", **options}
        reader = StreamReader(SourceOptions.parse(given), StructType([StructField("topic", StringType())]))
        caplog.clear()
        start = reader.initialOffset()
        for _ in range(2):
            end = reader.latestOffset(start, ReadAllAvailable())
        (topics,) = end["positions"].values()
        assert list(topics) == ["GoldenNormal"]
        return [one.getMessage() for one in caplog.records]

    (line,) = looked()
    assert line.startswith("the topic does not exist; the query waits for it topic=nobody places=")
    assert looked(missingTopics="ignore") == []
    with pytest.raises(ConfigError, match=r"there is no topic 'nobody' in .*With missingTopics=wait"):
        looked(missingTopics="fail")
