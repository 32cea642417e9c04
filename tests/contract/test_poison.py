"""Goal: a message whose body is not what it claims to be harms nobody but itself: it is delivered as what it is, and every
other message of its queue and batch is delivered, however careless the program is.

Method: the node accepts ``sys_flag`` 1 with any body, as RocketMQ does. Such messages are put among good ones, compressed
and not, and read in every way there is: by groups that stumble and go on, by queries, by the command line and offline.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import pickle
import time
import zlib
from collections.abc import Iterator

import pytest

from commitmq import Admin, AsyncConsumer, Consumer, Message, MessageBatch, Producer, Reader, UndecodableBodyError
from commitmq.protocol.directory import Directory
from nodes import Node, start_node, wait_until_dispatched

GARBAGE = b"this is no zlib data"
CUT_SHORT = zlib.compress(b"only the first half of this arrives" * 10)[:-9]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("poison")) as node:
        yield node


def fill(node: Node, topic: str, poisons: dict[int, bytes], count: int = 30) -> list[bytes]:
    """``count`` messages in one queue, every third one compressed; at the numbers in ``poisons`` others. The good bodies."""
    good = []
    with Producer(node.address) as producer:
        producer.send(topic, b"first", queue=0)
    good.append(b"first")
    directory = Directory(node.address)
    channel, _ = directory.connect("writer", time.monotonic() + 30)
    try:
        for number in range(1, count):
            body = b"message %d" % number
            flag = number % 3 == 0
            if number in poisons:
                payload, flag = poisons[number], True
            else:
                payload = zlib.compress(body) if flag else body
                good.append(body)
            header = {"topic": topic, "queue": 0, "sys_flag": int(flag), "properties": {"KEYS": f"k{number}"}}
            answer, _ = channel.request("send", header, [payload], timeout_s=30)
            assert answer["queue_offset"] == number, "the node does not look into bodies, as RocketMQ does not"
    finally:
        channel.close()
        directory.close()
    wait_until_dispatched(node.address)  # so that what is pulled is not divided before the poison, but by it
    return good


@pytest.mark.parametrize("mode", ["ranges", "bytes"])
def test_a_group_that_stumbles_and_polls_on_misses_no_neighbour(node: Node, mode: str) -> None:
    """The program that was seen to lose messages: it catches what a batch raises, and polls on."""
    topic = f"careless-{mode}"
    good = fill(node, topic, {7: GARBAGE, 8: CUT_SHORT, 29: GARBAGE})
    handled: list[bytes] = []
    stumbled = 0
    with Consumer(
        topic, group=f"careless-{mode}", node=node.address, mode=mode, auto_commit_interval_s=0.0
    ) as consumer:
        deadline = time.monotonic() + 60
        while consumer.positions.get((topic, 0), 0) < 30 and time.monotonic() < deadline:
            try:
                for message in consumer.poll(1.0):
                    handled.append(message.body)
            except UndecodableBodyError:
                stumbled += 1
    assert handled == good
    assert stumbled == 3
    with Admin(node.address) as admin:
        assert {row.queue: row.committed for row in admin.group_lag(f"careless-{mode}")}[0] == 30


def test_such_a_message_is_delivered_with_its_raw_body_and_the_reason(node: Node) -> None:
    good = fill(node, "told", {4: GARBAGE}, 6)
    with Reader("told", node=node.address, queues=[("told", 0)]) as consumer:
        batches: list[MessageBatch] = []
        while sum(map(len, batches)) < 6:
            batches.append(consumer.poll(30))
    messages = [message for batch in batches for message in batch]
    (with_it,) = [batch for batch in batches if any(one.damage for one in batch)]
    assert len(with_it) == 1, "it comes alone"
    assert [one.body for one in messages if one.damage is None] == good
    damaged = messages[4]
    assert damaged.raw_body == GARBAGE
    assert damaged.damage is not None
    assert "zlib" in damaged.damage
    assert (damaged.queue_offset, damaged.keys) == (4, ["k4"])
    with pytest.raises(UndecodableBodyError, match="told/0@4"):
        _ = damaged.body
    with pytest.raises(UndecodableBodyError):
        _ = batches[1].bodies
    assert [None if one is None else bytes(one) for one in batches[1].to_arrow()["body"].to_pylist()] == [None]
    assert damaged.to_json()["raw_body_base64"] == base64.b64encode(GARBAGE).decode()
    assert "cannot be decoded" in repr(damaged)
    for twin in (pickle.loads(pickle.dumps(damaged)), copy.copy(damaged)):
        assert (twin.damage, twin.raw_body, twin.queue_offset) == (damaged.damage, GARBAGE, 4)
    ordinary = Message(b"x")
    assert (ordinary.damage, ordinary.raw_body) == (None, b"x")


def test_small_polls_pass_it_in_order(node: Node) -> None:
    good = fill(node, "small", {1: GARBAGE, 2: GARBAGE, 5: GARBAGE}, 9)
    seen: list[int] = []
    with Reader("small", node=node.address, queues=[("small", 0)]) as consumer:
        while len(seen) < 9:
            batch = consumer.poll(30, max_messages=2)
            assert len(batch) <= 2
            seen += [message.queue_offset for message in batch]
            good = [body for body in good if body not in [one.body for one in batch if one.damage is None]]
    assert seen == list(range(9))
    assert not good


def test_asynchronous_consumers_get_it_alone_too(node: Node) -> None:
    good = fill(node, "awaited", {3: GARBAGE}, 8)

    async def read() -> list[bytes]:
        handled: list[bytes] = []
        async with AsyncConsumer("awaited", group="awaited", node=node.address) as consumer:
            while consumer.positions.get(("awaited", 0), 0) < 8:
                try:
                    for message in await consumer.poll(1.0):
                        handled.append(message.body)
                except UndecodableBodyError as error:
                    assert "awaited/0@3" in str(error)
        return handled

    assert asyncio.run(asyncio.wait_for(read(), 60)) == good


def test_queries_the_command_line_and_a_dump_show_it(node: Node) -> None:
    good = fill(node, "shown", {2: GARBAGE}, 5)
    with Admin(node.address) as admin:
        found = list(admin.query("shown", key="k2"))
        assert [one.raw_body for one in found] == [GARBAGE]
        assert found[0].damage is not None
    shown = node.run("query", "--topic", "shown", "--key", "k2", "--node", node.address)
    assert shown.returncode == 0, shown.stderr
    assert "no valid zlib data" in shown.stdout
    text = node.run("consume", "shown", "--node", node.address)
    assert text.returncode == 0, text.stderr
    assert text.stdout.encode().splitlines() == [*good[:2], GARBAGE, *good[2:]]
    assert "shown/0@2" in text.stderr
    lines = node.run("consume", "shown", "--node", node.address, "--json")
    assert lines.returncode == 0, lines.stderr
    documents = [json.loads(line) for line in lines.stdout.splitlines()]
    texts = [body.decode() for body in good]
    assert [one.get("body") for one in documents] == [*texts[:2], None, *texts[2:]]
    assert "no valid zlib data" in documents[2]["damage"]
    dumped = node.run("store", "dump", str(node.store))
    assert dumped.returncode == 0, dumped.stderr
    assert len([line for line in dumped.stdout.splitlines() if '"shown"' in line]) == 5
