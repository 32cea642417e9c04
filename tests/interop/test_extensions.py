"""Goal: RocketMQ reads the queues with extension units (spec 3.8) that a node wrote, and the other way round.

Method: both work on one store in turn, with files so small that they roll, with the extension switched off in between, and
after a kill. At each step both judge every unit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node_process import NodeProcess

from commitmq import Consumer, Message, Producer, Reader, Sql
from commitmq.coordination.subscriptions import subscriptions_path
from commitmq.files.fd_cache import FdCache
from commitmq.format.java import java_string_hash
from commitmq.store.layout import StoreLayout
from commitmq.store.queues.consume_queue import ConsumeQueue
from commitmq.store.queues.consume_queue_ext import ExtensionReader, is_address
from nodes import eventually

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

EXT_FILE_BYTES = 1_024
QUEUE_FILE_BYTES = 1_000
ON = ("consume_queue.enable_ext=true", f"consume_queue.ext_file_bytes={EXT_FILE_BYTES}")
OFF = ("consume_queue.enable_ext=false", f"consume_queue.ext_file_bytes={EXT_FILE_BYTES}")
ROCKETMQ = {"enableConsumeQueueExt": "true", "mappedFileSizeConsumeQueueExt": EXT_FILE_BYTES}
TAGS = ["Aa", "BB", "🚀x", None, "Other"]  # the first two have the same hash
TOPIC = "Extended"


def published(store: Path) -> list[str]:
    """The groups whose messages are told from each other by bit maps from now on."""
    try:
        listed = json.loads(subscriptions_path(StoreLayout(store)).read_bytes())
    except FileNotFoundError:
        return []
    return [one["group"] for one in listed if one["from"] is not None]


def send(node: NodeProcess, rng: random.Random, count: int) -> None:
    with Producer(node.address) as producer:
        messages = [Message(b"%d" % number, tags=rng.choice(TAGS)) for number in range(count)]
        for queue in range(2):
            producer.send_batch(TOPIC, messages[queue::2], queue=queue)


def our_units(root: Path, queue_id: int) -> list[tuple[int, bool]]:
    """For each unit of the queue: its tags code after the look-up, and whether an extension unit had it."""
    queue = ConsumeQueue(root / "consumequeue" / TOPIC / str(queue_id), QUEUE_FILE_BYTES, FdCache(8))
    queue.refresh()
    codes = [unit[2] for number in range(queue.max_offset) if (unit := queue.unit(number)) is not None]
    found = ExtensionReader(root / "consumequeue_ext", EXT_FILE_BYTES, FdCache(8)).resolve(
        f"{TOPIC}/{queue_id}", np.array(codes, np.int64)
    )
    resolved = codes if found is None else found.codes.tolist()
    return [(now, is_address(before)) for now, before in zip(resolved, codes, strict=True)]


def their_units(lines: list[dict[str, Any]], queue_id: int) -> list[tuple[int, bool]]:
    mine = [line for line in lines if (line["topic"], line["queue_id"]) == (TOPIC, queue_id)]
    for line in mine:
        if "ext_size" in line:
            assert line["ext_tags_code"] == line["tags_code"]
            assert line["ext_size"] == 20
            assert line["ext_store_timestamp"] > 1_700_000_000_000
    return [(line["tags_code"], "ext_size" in line) for line in mine]


def tags_by_offset(node: NodeProcess, queue_id: int, end: int, **settings: Any) -> dict[int, str | None]:
    """Tag by queue offset of every message below ``end`` that a consumer gets from one queue."""
    found: dict[int, str | None] = {}
    with Reader(queues=[(TOPIC, queue_id)], node=node.address, **settings) as consumer:
        while consumer.positions[TOPIC, queue_id] < end:
            found.update({one.queue_offset: one.tags for one in consumer.poll(5)})
    return found


@pytest.mark.long
def test_a_store_with_extensions_goes_back_and_forth(tmp_path: Path, run_rocketmq: Callable[..., Any]) -> None:
    rng = random.Random(11)
    root = tmp_path / "store"
    with NodeProcess(root, *ON) as node:
        send(node, rng, 150)
        node.kill()
    with NodeProcess(root, *ON) as node:
        send(node, rng, 30)
    with NodeProcess(root, *OFF) as node:
        send(node, rng, 60)
    with NodeProcess(root, *ON) as node:
        send(node, rng, 90)
    extended = [is_extended for _, is_extended in our_units(root, 0)]
    assert extended == [True] * 90 + [False] * 30 + [True] * 45
    assert len(list((root / "consumequeue_ext" / TOPIC / "0").iterdir())) > 2, "the extension should have rolled"

    run = run_rocketmq(root, "units", settings=ROCKETMQ)
    assert run.complaints == []
    for queue_id in range(2):
        assert our_units(root, queue_id) == their_units(run.lines, queue_id)
    run_rocketmq(root, "append", TOPIC, "1", "45", settings=ROCKETMQ)
    run = run_rocketmq(root, "units", settings=ROCKETMQ)
    assert run.complaints == []
    for queue_id in range(2):
        assert our_units(root, queue_id) == their_units(run.lines, queue_id)
    assert our_units(root, 1)[-1][1], "what RocketMQ appended has extension units"

    with NodeProcess(root, *ON) as node:
        send(node, rng, 40)
        ends = [165 + 20, 165 + 45 + 45 + 20]
        everything = {queue_id: tags_by_offset(node, queue_id, end) for queue_id, end in enumerate(ends)}
        for queue_id, by_offset in everything.items():
            assert sorted(by_offset) == list(range(ends[queue_id]))
            for tag in ("Aa", "🚀x", "Tag-🚀-1"):
                wanted = {offset: one for offset, one in by_offset.items() if one == tag}
                assert tags_by_offset(node, queue_id, ends[queue_id], filter=tag) == wanted
                assert len(wanted) > 5 or tag == "Tag-🚀-1"
    for queue_id, by_offset in everything.items():
        codes = [java_string_hash(tag) if tag else 0 for _, tag in sorted(by_offset.items())]
        assert [code for code, _ in our_units(root, queue_id)] == codes
        tagged = run_rocketmq(root, "tagged", TOPIC, str(queue_id), str(java_string_hash("Aa")), settings=ROCKETMQ)
        assert [line["queue_offset"] for line in tagged.lines] == [
            offset for offset, tag in sorted(by_offset.items()) if tag in ("Aa", "BB")
        ]


def test_bit_maps_and_subscriptions_are_rocketmqs(
    tmp_path: Path,
    run_rocketmq: Callable[..., Any],
    rocketmq_subscriptions: Callable[[Path], list[dict[str, Any]]],
) -> None:
    """RocketMQ's manager understands our consumerFilter.json, and its Bloom filter finds its bits in our bit maps."""
    root = tmp_path / "store"
    groups = {"g-one": "price > 5", "g-two": "price BETWEEN 3 AND 6", "g-none": "price = 99"}
    with NodeProcess(root, *ON, "consume_queue.enable_filter_bit_map=true") as node:
        with Producer(node.address) as producer:
            producer.send(TOPIC, b"before", queue=0)
        consumers = [
            Consumer(TOPIC, group=group, node=node.address, filter=Sql(text)) for group, text in groups.items()
        ]
        # Told to the dispatcher at intervals; only what is stored behind that has their bits.
        eventually(lambda: len(published(root)) == len(groups), "the dispatcher knows the subscriptions")
        with Producer(node.address) as producer:
            for number in range(40):
                producer.send_async(TOPIC, b"%d" % number, queue=0, properties={"price": str(number % 10)})
            producer.flush(20)
        for consumer in consumers:
            consumer.close()
    entries = {one["group"]: one for one in rocketmq_subscriptions(root / "config" / "consumerFilter.json")}
    assert {group: one["expression"] for group, one in entries.items()} == groups
    for one in entries.values():
        assert one["compiled"]
        assert one["positions_kept"] == one["positions"]
    run = run_rocketmq(root, "units", settings=ROCKETMQ)
    assert run.complaints == []
    sent = [line for line in run.lines if line["queue_id"] == 0][1:]
    assert len(sent) == 40
    for number, line in enumerate(sent):
        bits = int(line["ext_bitmap"], 16)
        expected = 0
        for group, matching in (("g-one", range(6, 10)), ("g-two", range(3, 7))):
            if number % 10 in matching:
                expected |= int(entries[group]["mask"], 16)
        assert bits == expected
        assert all(one["born"] <= line["ext_store_timestamp"] for one in entries.values())
