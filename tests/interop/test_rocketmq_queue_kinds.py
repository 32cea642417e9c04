"""Goal: a store with a BatchCQ topic and light message queues goes from a node to RocketMQ's classes and back.

Method: both take turns. Each side reads the other side's messages through its own queues, message by message and offset by
offset.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from interop_checks import Line
from node_process import NodeProcess

from commitmq import Admin, Message, Producer, Reader

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

LIGHT = ("consume_queue.enable_lmq=true", "consume_queue.enable_multi_dispatch=true")
NODE = ("consume_queue.batch_file_bytes=460", *LIGHT)
ROCKETMQ = {"enableLmq": "true", "enableMultiDispatch": "true", "mapperFileSizeBatchConsumeQueue": 460}
BATCHES, ORIGIN = "Batches", "Origin"
Found = dict[tuple[str, int], list[tuple[int, str, dict[str, str]]]]


def send(address: str, batches: int, messages: int) -> None:
    """Batches of 1, 2, … messages into both queues of the topic, and messages for two of three LMQs each."""
    with Producer(address) as producer:
        for number in range(batches):
            inside = [Message(b"ours %d-%d" % (number, i), tags=f"T{i}", keys=f"k{i}") for i in range(number + 1)]
            producer.send_batch(BATCHES, inside, queue=number % 2)
        for number in range(messages):
            names = [f"%LMQ%{letter}" for letter in "abc" if letter != "abc"[number % 3]]
            producer.send(ORIGIN, b"ours %d" % number, tags="T", multi_dispatch=names, queue=number % 4)


def read(address: str, topics: list[str], count: int) -> Found:
    """What a consumer gets, by queue: offset, body (hex) and properties."""
    found: Found = {}
    got = 0
    with Reader(topics, node=address, start="earliest") as consumer:
        while got < count:
            batch = consumer.poll(timeout_s=20)
            assert len(batch), f"only {got} of {count} messages came"
            got += len(batch)
            for one in batch:
                key = one.topic, one.queue_id
                found.setdefault(key, []).append((one.queue_offset, one.body.hex(), own(one.properties)))
        assert not consumer.poll(0.3)
    return found


def seen_by_rocketmq(lines: list[Line]) -> Found:
    """The same of StoreTool's lines."""
    found: Found = {}
    for line in lines:
        if "lmq" in line:
            key, offset, message = (line["lmq"], 0), line["lmq_offset"], line["message"]
        elif line["topic"] == BATCHES:
            key, offset, message = (BATCHES, line["queue_id"]), line["queue_offset"], line
        else:
            continue
        found.setdefault(key, []).append((offset, message["body_hex"], own(message["properties"])))
    return found


def own(properties: dict[str, str]) -> dict[str, str]:
    """Without the record's CRC, and without WAIT, which RocketMQ's consumers give to every message of a batch."""
    return {name: value for name, value in properties.items() if name not in ("__CRC32#", "WAIT")}


def topics(found: Found) -> list[str]:
    return sorted({topic for topic, _ in found})


def count(found: Found) -> int:
    return sum(map(len, found.values()))


def assert_whole(found: Found) -> None:
    for key, messages in found.items():
        assert [offset for offset, _, _ in messages] == list(range(len(messages))), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.long, id="stopped"), pytest.param(True, id="killed")]
)
def test_both_kinds_go_to_rocketmq_and_back(killed: bool, tmp_path: Path, run_rocketmq: Any) -> None:
    """Goal: RocketMQ finds in our queues what our consumers find, goes on in them, and we go on after it; also after
    kill -9 of the node, where it builds the queues anew from the log.
    """
    root = tmp_path / "store"
    with NodeProcess(root, *NODE) as node:
        with Admin(node.address) as admin:
            admin.topic_create(BATCHES, 2, attributes={"queue.type": "BatchCQ"})
        send(node.address, batches=24, messages=30)
        ours = read(node.address, [BATCHES, "%LMQ%a", "%LMQ%b", "%LMQ%c"], 300 + 60)
        if killed:
            node.kill()
    assert_whole(ours)
    assert count(ours) == 360
    if killed:
        shutil.rmtree(root / "run")
        (root / "checkpoint").unlink()

    run = run_rocketmq(root, "read", settings=ROCKETMQ)

    assert seen_by_rocketmq(run.lines) == ours
    assert run.complaints == []
    bounds = {key: (low, high) for key, (low, high, _) in run.queues.items()}
    assert {key: bounds[key] for key in ours} == {key: (0, len(messages)) for key, messages in ours.items()}
    # Its own messages follow ours.
    run_rocketmq(root, "append-inner", BATCHES, "1", "9", settings=ROCKETMQ)
    run_rocketmq(root, "append-light", ORIGIN, "2", "11", "%LMQ%c,%LMQ%new", settings=ROCKETMQ)
    both = seen_by_rocketmq(run_rocketmq(root, "read", settings=ROCKETMQ).lines)
    assert_whole(both)
    assert count(both) == 360 + 45 + 22
    assert all(both[key][: len(messages)] == messages for key, messages in ours.items())

    with NodeProcess(root, *NODE) as node:
        assert read(node.address, topics(both), count(both)) == both
        send(node.address, batches=6, messages=9)
        after = read(node.address, topics(both), count(both) + 21 + 18)
    assert_whole(after)
    assert all(after[key][: len(messages)] == messages for key, messages in both.items())
    run = run_rocketmq(root, "read", settings=ROCKETMQ)
    assert seen_by_rocketmq(run.lines) == after
    assert run.complaints == []


@pytest.mark.slow
def test_our_queues_of_a_log_that_rocketmq_wrote(tmp_path: Path, run_rocketmq: Any) -> None:
    """Goal: from RocketMQ's log alone the node builds the same queues, byte for byte, as RocketMQ did.

    Plain messages to a BatchCQ topic, which RocketMQ 5.4.0 stores, are batches of one in both.
    """
    root = tmp_path / "store"
    with NodeProcess(root, *NODE) as node, Admin(node.address) as admin:
        admin.topic_create(BATCHES, 1, attributes={"queue.type": "BatchCQ"})
        admin.topic_create(ORIGIN, 1)
    run_rocketmq(root, "append-inner", BATCHES, "0", "14", settings=ROCKETMQ)
    run_rocketmq(root, "append", BATCHES, "0", "3", settings=ROCKETMQ)
    run_rocketmq(root, "append-inner", BATCHES, "0", "4", settings=ROCKETMQ)
    run_rocketmq(root, "append-light", ORIGIN, "0", "13", "%LMQ%a,%LMQ%b", settings=ROCKETMQ)
    kinds = ("consumequeue", "batchconsumequeue")
    theirs = {kind: queue_bytes(root / kind) for kind in kinds}
    for kind in kinds:
        shutil.rmtree(root / kind)
    shutil.rmtree(root / "commitmq")
    (root / "checkpoint").unlink()
    (root / "abort").touch()
    with NodeProcess(root, *NODE) as node:
        found = read(node.address, [BATCHES, "%LMQ%a", "%LMQ%b"], 105 + 6 + 10 + 26)
    assert {kind: queue_bytes(root / kind) for kind in kinds} == theirs
    assert_whole(found)
    assert len(found[BATCHES, 0]) == 121
    assert not (root / "consumequeue" / BATCHES).exists()


def queue_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` that has content, by path."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: data for name, data in found.items() if data.strip(b"\0")}
