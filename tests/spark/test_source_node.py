"""Goal: what a node stores in any kind of queue is what the source shows, from its files and over the wire.

Method: a real node with plain, batch and light queues; its own consumer says what is right.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from source_reading import read_table, wait_until_shown

from commitmq import Admin, Message, Producer, Reader
from commitmq.protocol.directory import Directory
from nodes import Node, start_node

COLUMNS = (
    "topic", "queue_id", "queue_offset", "tags", "keys", "properties", "body", "flag", "msg_id", "unique_id",
    "store_timestamp", "born_timestamp", "physical_offset", "reconsume_times", "sys_flag",
)  # fmt: skip
SEED = 20_611


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    rng = random.Random(SEED)
    folder = tmp_path_factory.mktemp("kinds")
    with start_node(
        folder,
        "commit_log.segment_bytes=131072",
        "consume_queue.enable_lmq=true",
        "consume_queue.enable_multi_dispatch=true",
    ) as node:
        with Admin(node.address) as admin:
            admin.topic_create("plain", 3)
            admin.topic_create("batches", 2, attributes={"queue.type": "BatchCQ"})
        with Producer(node=node.address) as producer:
            for topic in ("plain", "batches") * 4:
                producer.send_batch(
                    topic,
                    [
                        Message(
                            rng.randbytes(rng.randrange(900)),
                            tags=rng.choice(["TagA", "TagB", None]),
                            keys=[f"k{number}", "all"] if number % 3 else None,
                            properties={"ä": "ü" * rng.randrange(1, 5), "n": str(number)},
                        )
                        for number in range(150)
                    ],
                )
            producer.send("plain", b"light", multi_dispatch=["%LMQ%one"])
        wait_until_shown(node.address)
        yield node


def consumed(node: Node, topic: str) -> list[dict[str, Any]]:
    """What the node's consumer reads of a topic, in the columns of the source."""
    rows: list[dict[str, Any]] = []
    with Admin(node.address) as admin:
        count = sum(high - low for _, low, high, _ in admin.offsets(topic))
    with Reader(topic, node=node.address) as consumer:
        while len(rows) < count:
            for one in consumer.poll(timeout_s=10).messages():
                rows.append(
                    {
                        **{name: getattr(one, name) for name in COLUMNS if hasattr(one, name)},
                        "body": bytes(one.body),
                        "keys": " ".join(one.keys) or None,
                        "topic": one.topic,
                    }
                )
    return sorted(rows, key=lambda row: (row["queue_id"], row["queue_offset"]))


def read(topic: str, **options: Any) -> list[dict[str, Any]]:
    rows = read_table(COLUMNS, topics=topic, **options).to_pylist()
    for row in rows:
        row["properties"] = dict(row["properties"])
        for name in ("store_timestamp", "born_timestamp"):
            row[name] = round(row[name].timestamp() * 1000)
    return sorted(rows, key=lambda row: (row["queue_id"], row["queue_offset"]))


@pytest.mark.parametrize("way", ["store", "files", "pull"])
@pytest.mark.parametrize("topic", ["plain", "batches"])
def test_every_way_gives_what_a_consumer_gets(node: Node, topic: str, way: str) -> None:
    options = {"store": node.store} if way == "store" else {"node": node.address, "transfer": way}
    found = read(topic, **options)
    expected = consumed(node, topic)
    assert len(found) == len(expected) >= 600
    assert found == expected


@pytest.mark.parametrize("way", ["files", "pull"])
def test_a_range_may_begin_and_end_inside_a_batch(node: Node, way: str) -> None:
    every = read("batches", store=node.store)
    part = read(
        "batches",
        node=node.address,
        transfer=way,
        startingOffsets='{"batches": {"0": 7, "1": -1}}',
        endingOffsets='{"batches": {"0": 11}}',
    )
    assert part == [row for row in every if row["queue_id"] == 0 and 7 <= row["queue_offset"] < 11]


@pytest.mark.parametrize("way", ["files", "pull"])
@pytest.mark.parametrize("topic", ["plain", "batches"])
def test_filters_look_at_each_message(node: Node, topic: str, way: str) -> None:
    every = read(topic, store=node.store)
    options: dict[str, Any] = {"node": node.address, "transfer": way}
    assert read(topic, tags="TagA", **options) == [row for row in every if row["tags"] == "TagA"]
    wanted = [row for row in every if {"k4", "k7"} & set((row["keys"] or "").split())]
    assert read(topic, keys="k4, k7", **options) == wanted
    assert wanted


def test_a_light_queue_is_read_when_it_is_named(node: Node) -> None:
    rows = read("%LMQ%one", store=node.store)
    assert [(row["topic"], row["queue_offset"], row["body"]) for row in rows] == [("%LMQ%one", 0, b"light")]
    assert "%LMQ%one" not in set(read_table(["topic"], store=node.store)["topic"].to_pylist())


def test_a_body_that_cannot_be_decoded_is_null_and_its_neighbours_are_whole(node: Node) -> None:
    """The node accepts any body as compressed, as RocketMQ does."""
    directory = Directory(node.address)
    channel, _ = directory.connect("writer", time.monotonic() + 30)
    try:
        for body in (zlib.compress(b"one"), b"no zlib data", zlib.compress(b"three")):
            channel.request("send", {"topic": "poison", "queue": 0, "sys_flag": 1}, [body], timeout_s=30)
    finally:
        channel.close()
        directory.close()
    wait_until_shown(node.address)
    for transfer in ("files", "pull"):
        wanted: dict[str, Any] = {"node": node.address, "transfer": transfer, "topics": "poison", "decompress": "true"}
        assert read_table(["body"], **wanted)["body"].to_pylist() == [b"one", None, b"three"]
        assert read_table(["body"], **{**wanted, "decompress": "false"})["body"].to_pylist()[1] == b"no zlib data"


def test_a_node_with_rates_is_read_to_the_end(tmp_path: Path) -> None:
    with start_node(tmp_path, "flow.topic_pull_messages_per_s=500") as node:
        with Producer(node=node.address) as producer:
            for queue in (0, 1):
                producer.send_batch("slow", [Message(b"x")] * 400, queue=queue)
        wait_until_shown(node.address)
        # Each queue is a pull, and the first one leaves no token for a third.
        for _ in range(2):
            assert len(read_table(("body",), node=node.address, topics="slow", transfer="pull")) == 800
        with Admin(node.address) as admin:
            refused = {row["role"]: row.get("refused") for row in admin.status()["processes"]}
        assert refused["reader-0"]
