"""Goal: how a range of messages is cut into tasks depends on the range alone, so that a micro-batch which is repeated after a
crash has the same tasks, and its sink knows their rows again.

Method: plans are made in this process, of the same range: with less and more log behind it, and under other settings than
those that the offset in the checkpoint was made with.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType
from source_reading import wait_until_shown

from commitmq import Admin, Message, Producer
from commitmq.errors import ConfigError
from commitmq_plugins.spark.options import DataLossError, SourceOptions
from commitmq_plugins.spark.origins import FolderOrigin, open_origins
from commitmq_plugins.spark.plan import PullPartition
from commitmq_plugins.spark.source import StreamReader
from commitmq_plugins.spark.stores import Slice
from nodes import Node, start_node

SCHEMA = StructType([StructField("topic", StringType()), StructField("queue_offset", LongType())])
MANY = 24_000  # above the number from which a micro-batch is cut into several tasks


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("layout"), "commit_log.segment_bytes=4194304") as node:
        put(node, MANY)
        yield node


def put(node: Node, count: int) -> None:
    with Producer(node=node.address) as producer:
        for first in range(0, count, 4_000):
            bodies: list[bytes | Message] = [b"x" * (1 + number % 50) for number in range(first, first + 4_000)]
            producer.send_batch("t", bodies)
    wait_until_shown(node.address)


def reader(node: Node, **options: str) -> StreamReader:
    return StreamReader(SourceOptions.parse({"store": str(node.store), "topics": "t", **options}), SCHEMA)


def shape(parts: Any) -> list[list[tuple[int, int, int]]]:
    """Each task's queues and offsets."""
    return [[(one.queue_id, one.first, one.end) for one in part.slices] for part in parts]


def test_a_micro_batch_is_cut_the_same_way_when_the_log_has_grown(node: Node) -> None:
    stream = reader(node)
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, ReadMaxRows(20_000))
    before = shape(stream.partitions(begin, end))
    assert len(before) > 1
    put(node, 12_000)
    assert shape(reader(node).partitions(begin, end)) == before


def test_a_micro_batch_is_cut_the_same_way_under_other_settings(node: Node) -> None:
    stream = reader(node, minPartitions="3")
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, ReadMaxRows(9_000))
    before = shape(stream.partitions(begin, end))
    assert len(before) == 3
    for other in ({}, {"minPartitions": "1"}, {"minPartitions": "7"}, {"maxBytesPerPartition": "1000"}):
        assert shape(reader(node, **other).partitions(begin, end)) == before


def test_a_node_out_of_sight_is_cut_the_same_way_too(node: Node) -> None:
    stream = reader_of_node(node)
    begin = stream.initialOffset()
    end = stream.latestOffset(begin, ReadMaxRows(9_000))
    before = stream.partitions(begin, end)
    assert before
    assert all(isinstance(one, PullPartition) for one in before)
    put(node, 4_000)
    assert shape(reader_of_node(node, minPartitions="9").partitions(begin, end)) == shape(before)


def reader_of_node(node: Node, **options: str) -> StreamReader:
    chosen = {"node": node.address, "transfer": "pull", "topics": "t", **options}
    return StreamReader(SourceOptions.parse(chosen), SCHEMA)


def test_nothing_new_is_no_micro_batch(node: Node) -> None:
    stream = reader(node)
    end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert reader(node, minPartitions="5").latestOffset(end, ReadAllAvailable()) == end


def test_a_checkpoint_of_another_version_is_refused(node: Node) -> None:
    stream = reader(node)
    end = stream.latestOffset(stream.initialOffset(), ReadMaxRows(9_000))
    for other, said in (({**end, "version": 4}, "version 4"), ({str(node.store): {"t": {"0": 5}}}, "version 1")):
        with pytest.raises(ConfigError, match=f"offsets of {said}"):
            stream.latestOffset(other, ReadMaxRows(10))


def test_cuts_do_not_depend_on_how_much_of_the_log_is_seen(node: Node) -> None:
    (origin,) = open_origins(SourceOptions.parse({"store": str(node.store)}))
    assert isinstance(origin, FolderOrigin)
    slices = [replace(one, first=100, end=4_000) for one in origin.slices(lambda topic: topic == "t")]
    bound = origin._bound
    ends = [origin._store.place(one, one.end - 1, bound) for one in slices]
    try:
        least = max(ends) + 2_000
        assert least < bound
        for parts in (2, 3, 17, 400):
            origin._bound = bound
            whole = shape(origin.partitions(slices, parts))
            origin._bound = least
            assert shape(origin.partitions(slices, parts)) == whole
            counts = [sum(end - first for _, first, end in part) for part in whole]
            assert sum(counts) == sum(one.count for one in slices)
            assert len(counts) == parts
            assert max(counts) <= 2 * sum(counts) / parts
    finally:
        origin.close()


def test_many_partitions_are_planned_with_few_looks_at_the_queues(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look is a bisection in one queue. Each cut took some twenty of them in each queue."""
    (origin,) = open_origins(SourceOptions.parse({"store": str(node.store)}))
    assert isinstance(origin, FolderOrigin)
    looks = 0
    real = origin._store.offset_at

    def counted(queue: Slice, physical: int, bound: int) -> int:
        nonlocal looks
        looks += 1
        return real(queue, physical, bound)

    monkeypatch.setattr(origin._store, "offset_at", counted)
    slices = origin.slices(lambda topic: topic == "t")
    try:
        assert len(origin.partitions(slices, 1_000)) > 900
    finally:
        origin.close()
    assert looks / len(slices) < 1_000 * 12


def test_a_topic_made_anew_is_noticed_even_when_its_queues_are_longer(node: Node, tmp_path: Path) -> None:
    """Its end is behind the position, so the numbers alone tell nothing."""
    topic = "again"

    def send(count: int) -> None:
        with Producer(node=node.address) as producer:
            producer.send_batch(topic, [b"m"] * count, queue=0)
        wait_until_shown(node.address)

    send(20)
    for stream in (
        reader(node, topics=topic),
        StreamReader(
            SourceOptions.parse({"node": node.address, "transfer": "pull", "topics": topic, "failOnDataLoss": "true"}),
            SCHEMA,
        ),
    ):
        begin = stream.initialOffset()
        end = stream.latestOffset(begin, ReadAllAvailable())
        with Admin(node.address) as admin:
            admin.topic_delete(topic)
        send(150)
        with pytest.raises(DataLossError, match="deleted and recreated"):
            stream.latestOffset(end, ReadAllAvailable())
        with pytest.raises(DataLossError, match="deleted and recreated"):
            stream.partitions(begin, end)
    lenient = reader(node, topics=topic, failOnDataLoss="false", gapReport=str(tmp_path / "gaps"))
    following = lenient.latestOffset(
        {**end, "positions": {str(node.store): {topic: {"0": 20}}}, "incarnations": {str(node.store): {topic: "1"}}},
        ReadAllAvailable(),
    )
    assert following["positions"][str(node.store)][topic]["0"] == 150
    parts = lenient.partitions(lenient.initialOffset(), following)
    assert shape(parts) == [[(0, 0, 150)]]
    shutil.rmtree(tmp_path / "gaps")
