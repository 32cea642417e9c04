"""Goal: what Spark writes to a topic is there once, whatever is repeated, and never silently left out.

Method: a real node; tasks that fail after they have sent, writes and micro-batches that are repeated with the same id, and
repetitions whose rows are others.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from topic_contents import bodies, stored

from commitmq.errors import ConfigError, InvalidMessageError
from commitmq.testing.node import CommitMQNode, start_node
from commitmq_plugins.spark.sessions import plain
from commitmq_plugins.spark.sinks import SinkError, SinkOptions, TaskCommit, send_partition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommitMQNode]:
    with start_node(tmp_path_factory.mktemp("cmq"), ["commit_log.segment_bytes=16777216"]) as found:
        yield found


def write(frame: DataFrame, node: CommitMQNode, **options: Any) -> None:
    texts = {name: str(value) for name, value in options.items()}
    frame.write.format("commitmq").mode("append").options(node=node.address, **texts).save()


def test_every_column_arrives(spark: SparkSession, node: CommitMQNode) -> None:
    rows = [
        (b"one", "a", "k1", {"colour": "red", "UNIQ_KEY": "not mine"}, 7, 2),
        (b"two", None, None, None, None, 2),
        (b"three", "b", "k2 k3", {"TAGS": "not this one"}, 0, 0),
    ]
    schema = "body binary, tags string, keys string, properties map<string,string>, flag int, queue_id int"
    write(spark.createDataFrame(rows, schema).coalesce(1), node, topic="columns")
    three, one, two = stored(node, "columns")
    assert (one.body, one.tags, one.keys, one.flag, one.queue_id) == (b"one", "a", ["k1"], 7, 2)
    assert one.properties["colour"] == "red"
    assert one.unique_id != "not mine"
    assert (two.body, two.tags, two.keys, two.flag, two.queue_id) == (b"two", None, [], 0, 2)
    assert (three.body, three.tags, three.keys, three.queue_id) == (b"three", "b", ["k2", "k3"], 0)


def test_text_bodies_key_lists_and_topics_by_row(spark: SparkSession, node: CommitMQNode) -> None:
    rows = [("by-row-a", "x", ["k1", "k2"]), ("by-row-b", "y", ["k1", "k2"]), ("by-row-a", "z", [])]
    write(spark.createDataFrame(rows, "topic string, body string, keys array<string>").coalesce(1), node)
    assert bodies(node, "by-row-a") == {b"x": 1, b"z": 1}
    (one,) = stored(node, "by-row-b")
    assert (one.body, one.keys) == (b"y", ["k1", "k2"])


def test_rows_of_one_key_stay_in_one_queue_in_order(spark: SparkSession, node: CommitMQNode) -> None:
    frame = spark.range(0, 600, 1, 1).selectExpr("concat('key-', id % 7) as keys", "cast(id as string) as body")
    write(frame, node, topic="keyed")
    found = stored(node, "keyed")
    assert len(found) == 600
    by_key: dict[str, list[Any]] = {}
    for one in found:
        by_key.setdefault(one.keys[0], []).append(one)
    for messages in by_key.values():
        assert len({one.queue_id for one in messages}) == 1
        assert [int(one.body) for one in messages] == sorted(int(one.body) for one in messages)
    assert len({one.queue_id for one in found}) > 1


def test_a_write_repeated_with_its_id_stores_nothing(spark: SparkSession, node: CommitMQNode) -> None:
    frame = spark.range(0, 5000, 1, 2).selectExpr("cast(id as string) as body", "cast(id % 3 as int) as queue_id")
    for _ in range(2):
        write(frame, node, topic="repeated", sinkId="job-1", epoch=3)
    assert bodies(node, "repeated") == Counter(str(number).encode() for number in range(5000))
    write(frame.limit(10), node, topic="repeated", sinkId="job-1", epoch=4)
    assert sum(bodies(node, "repeated").values()) == 5010
    with pytest.raises(Exception, match="PRODUCER_FENCED"):
        write(frame.limit(10), node, topic="repeated", sinkId="job-1", epoch=3)


def batches(start: int, end: int, size: int = 100) -> Iterator[pa.RecordBatch]:
    for first in range(start, end, size):
        numbers = [str(number) for number in range(first, min(first + size, end))]
        yield pa.RecordBatch.from_pydict({"body": numbers, "queue_id": pa.array([0] * len(numbers), pa.int32())})


def send(node: CommitMQNode, topic: str, rows: Iterator[pa.RecordBatch]) -> TaskCommit:
    return send_partition(rows, SinkOptions(node=node.address, topic=topic), f"sink-{topic}", 1)


def broken_off(rows: Iterator[pa.RecordBatch], after: int) -> Iterator[pa.RecordBatch]:
    for number, batch in enumerate(rows):
        if number == after:
            raise RuntimeError("the task is over")
        yield batch


@pytest.mark.parametrize("after", [1, 9, 30])
def test_an_attempt_goes_on_where_the_last_one_ended(node: CommitMQNode, after: int) -> None:
    """Also where it is more runs ago than the node knows the places of."""
    topic = f"attempts-{after}"
    with pytest.raises(RuntimeError):
        send(node, topic, broken_off(batches(0, 4000), after))
    again = send(node, topic, batches(0, 4000))
    assert (again.messages, again.repeated) == (4000, after * 100)
    assert send(node, topic, batches(0, 4000)).repeated == 4000
    assert [one.body for one in stored(node, topic)] == [str(number).encode() for number in range(4000)]


@pytest.mark.parametrize("other", ["others from the first", "others later", "fewer", "fewer, and others"])
def test_other_rows_under_stored_numbers_are_refused(node: CommitMQNode, other: str) -> None:
    """What a repartitioned micro-batch would do: rows must not pass for ones that are stored."""
    topic = "other-" + "".join(filter(str.isalpha, other))
    first = batches(0, 3000)
    # Other messages between them, or the node would remember them all as one run.
    send(node, topic, (batch for batch in first if node.send("between", b"x")))
    rows: Callable[[], Any] = {
        "others from the first": lambda: batches(5000, 8000),
        "others later": lambda: (one for part in (batches(0, 1500), batches(5000, 6500)) for one in part),
        "fewer": lambda: batches(0, 300),  # stored too long ago to be compared
        "fewer, and others": lambda: batches(5000, 5300),
    }[other]
    with pytest.raises(SinkError, match="A new sinkId"):
        send(node, topic, rows())
    assert bodies(node, topic) == Counter(str(number).encode() for number in range(3000))


def test_a_stream_into_a_topic_stores_a_repeated_micro_batch_once(
    spark: SparkSession, node: CommitMQNode, tmp_path: Path
) -> None:
    """The checkpoint forgets that a micro-batch was finished, as after a driver's death between sink and commit."""
    (tmp_path / "in").mkdir()
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        source = spark.readStream.schema("body string, keys string").json(str(tmp_path / "in"))
        query = (
            source.writeStream.format("commitmq")
            .options(node=node.address, topic="streamed", checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def put(name: str, start: int, end: int) -> None:
        lines = [json.dumps({"body": f"row {number}", "keys": f"k{number % 5}"}) for number in range(start, end)]
        (tmp_path / "in" / f"{name}.json").write_text("\n".join(lines))

    put("one", 0, 50)
    run()
    put("two", 50, 100)
    run()
    last = max(checkpoint.glob("commits/[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)
    run()
    assert bodies(node, "streamed") == Counter(f"row {number}".encode() for number in range(100))


def test_a_row_may_have_a_time(spark: SparkSession, node: CommitMQNode) -> None:
    rows = [(b"now", None, None), (b"zero", 0, None), (b"delay", 1_500, None), (b"past", None, 1)]
    rows += [(b"at-%d" % number, None, 4_000_000_000 + number) for number in range(40)]
    frame = spark.createDataFrame(rows, "body binary, delay_ms long, at long").selectExpr(
        "body", "delay_ms", "timestamp_seconds(at) as deliver_at"
    )
    options = {"topic": "timed", "idempotent": "false"}
    with pytest.raises(Exception, match="idempotent=false") as raised:
        write(frame, node, topic="timed")
    assert isinstance(plain(raised.value), ConfigError)
    with pytest.raises(Exception, match="WHEEL_TIMER_MSG_ILLEGAL"):
        write(frame.where("body like 'at-%'"), node, **options)  # the year 2096
    with pytest.raises(Exception, match="both delay_ms and deliver_at"):
        write(frame.selectExpr("body", "1L as delay_ms", "timestamp_seconds(1) as deliver_at"), node, **options)
    with pytest.raises(Exception, match="0 or more"):
        write(frame.selectExpr("body", "-1L as delay_ms"), node, **options)
    soon = frame.where("body not like 'at-%'")
    write(soon, node, **options)
    assert bodies(node, "timed") >= Counter([b"now", b"zero", b"past"])
    later = frame.where("body like 'at-%'").selectExpr(
        "body", "timestamp_millis(unix_millis(current_timestamp()) + 2000 + hash(body) % 500) as deliver_at"
    )
    write(later, node, **options)
    deadline = time.monotonic() + 20
    while sum(bodies(node, "timed").values()) < len(rows) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert bodies(node, "timed") == Counter(row[0] for row in rows)
    timed = [one for one in stored(node, "timed") if one.body.startswith(b"at-")]
    assert all(one.store_timestamp >= int(one.properties["TIMER_DELIVER_MS"]) for one in timed), "none is early"
    delayed = next(one for one in stored(node, "timed") if one.body == b"delay")
    assert delayed.store_timestamp >= delayed.born_timestamp + 1_500


def test_what_is_no_message_is_refused(spark: SparkSession, node: CommitMQNode) -> None:
    frame = spark.createDataFrame([(b"x", "y")], "body binary, what string")
    for wrong, options, sentence in (
        (frame, {"topic": "t"}, "a message has no 'what'"),
        (frame.select("body"), {}, "say where the messages go"),
        (frame.selectExpr("what as keys"), {"topic": "t"}, "no column body"),
        (frame.selectExpr("body", "1 as tags"), {"topic": "t"}, "the column tags is string"),
        (frame.select("body"), {"topic": "t", "sinkid2": "x"}, "no option 'sinkid2'"),
        (frame.select("body"), {"topic": "t", "sinkId": "a b"}, "option sinkId"),
    ):
        with pytest.raises(Exception, match=sentence) as raised:
            write(wrong, node, **options)
        assert isinstance(plain(raised.value), ConfigError)
    with pytest.raises(Exception, match="the body is empty") as raised:
        write(frame.selectExpr("cast('' as binary) as body"), node, topic="t")
    assert "empty" in str(plain(raised.value))
    with pytest.raises(InvalidMessageError, match="no body"):
        send(node, "t", iter([pa.RecordBatch.from_pydict({"body": pa.array([None], pa.binary())})]))
