"""Goal: a node started on a store that RocketMQ wrote serves every message of every topic, and takes new ones.

Method: the real command on copies of all golden stores, without a word of their sizes; what a Consumer returns is compared
field by field with what RocketMQ's own client read before the stop, and queries with a search through that.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, Message, Producer, Reader
from golden_stores import ALL_GOLDEN_NAMES, GoldenStore, unpack
from nodes import Node, started


def read(address: str, topic: str, queue: int, count: int, mode: str) -> list[Message]:
    """The first ``count`` messages of one queue."""
    messages: list[Message] = []
    with Reader(node=address, queues=[(topic, queue)], start="earliest", mode=mode) as consumer:
        while len(messages) < count:
            batch = consumer.poll(timeout_s=10)
            assert len(batch), f"{topic}/{queue} ends after {len(messages)} of {count} messages"
            messages.extend(batch)
    return messages


def fields(message: Message) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "physical_offset": message.physical_offset,
        "sys_flag": message.sys_flag,
        "flag": message.flag,
        "born_timestamp": message.born_timestamp,
        "store_timestamp": message.store_timestamp,
        "reconsume_times": message.reconsume_times,
        "properties": dict(message.properties),
        "body_hex": bytes(message.body).hex(),
    }


def check_queries(address: str, golden: GoldenStore) -> None:
    """For every message and each of its keys, exactly the messages that have it; and every message by its id."""
    wanted: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for line in golden.messages:
        topic, properties = line["topic"], line["properties"]
        for key in filter(None, properties.get("KEYS", "").split(" ")):
            wanted[topic, "key", key].add(line["physical_offset"])
        for kind, name in (("unique_key", "UNIQ_KEY"), ("tag", "TAGS")):
            if name in properties:
                wanted[topic, kind, properties[name]].add(line["physical_offset"])
    assert len(wanted) > 700
    with Admin(address) as admin:
        for (topic, kind, key), offsets in wanted.items():
            result = admin.query(topic, **{kind: key}, max_messages=1_000)  # type: ignore[arg-type]
            assert [message.physical_offset for message in result] == sorted(offsets), (topic, kind, key)
            assert result.complete
            assert result.next is None
        for line in golden.messages[::7]:
            assert admin.message(line["offset_msg_id"]).physical_offset == line["physical_offset"]


@pytest.mark.parametrize("mode", ["auto", "bytes"])
@pytest.mark.parametrize("name", ALL_GOLDEN_NAMES)
def test_every_message_of_every_topic_is_served(name: str, tmp_path: Path, mode: str) -> None:
    golden = unpack(name, tmp_path)
    expected: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for line in golden.messages:
        expected[line["topic"], line["queue_id"]].append(line)
    # RocketMQ was stopped before all of its delayed messages were due; this node would deliver them.
    with started(Node.bare(golden.root, "network.port=0", "schedule.enable=false", "timer.enable=false")) as node:
        for (topic, queue), lines in expected.items():
            lines.sort(key=lambda line: int(line["queue_offset"]))
            messages = read(node.address, topic, queue, len(lines), mode)
            for message, line in zip(messages, lines, strict=True):
                found = fields(message)
                if line["sys_flag"] & 1:
                    # A consumer hands out what was sent; messages.jsonl has the body as it is stored, compressed.
                    assert len(set(bytes.fromhex(found.pop("body_hex")))) == 1
                    found["body_hex"] = line["body_hex"]
                assert found == {name: line[name] for name in found}
        if mode == "auto":
            check_queries(node.address, golden)
        topic, queue = next(key for key in expected if key[0] in ("GoldenNormal", "CrashedNormal", "PendingWork"))
        with Producer(node.address) as producer:
            new = producer.send(topic, b"one more", tags="TagA", queue=queue)
            assert new.queue_offset == len(expected[topic, queue])
        again = read(node.address, topic, queue, len(expected[topic, queue]) + 1, mode)
        assert again[-1].body == b"one more"
