"""Goal: RocketMQ's classes read a store that a real node filled, and a node goes on with it.

Method: each test fills a store through a node and its Producer, ends the node, and opens the folder with RocketMQ's own
DefaultMessageStore. The messages in RocketMQ's ConsumeQueues must be those that ``commitmq store dump`` lists, field by field,
at the places that the producer was told.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interop_checks import (
    CRC_NAME,
    Line,
    assert_queues_are_whole,
    in_log_order,
    log_end,
    place,
    store_digests,
    without_crc,
)
from node_process import NodeProcess, dump
from rocketmq import Run

from commitmq import Consumer, Producer
from golden_stores import GoldenStore

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

SEGMENT_BYTES = 131072
LONG_TOPIC = "%RETRY%" + "g" * 150  # longer than 127 characters: its records have version 2
Sent = dict[tuple[str, int, int], dict[str, Any]]


def send_singles(address: str, rng: random.Random, count: int = 120) -> Sent:
    """Single messages over several topics; by place, what was sent."""
    sent: Sent = {}
    with Producer(address) as producer:
        for number in range(count):
            topic = ["Orders", "With-all_chars|1%", LONG_TOPIC, "x" * 127][number % 4]
            body = rng.choice([b"x", b"\0\0", "żółw 🚀".encode(), rng.randbytes(700), rng.randbytes(9_000)])
            if number % 60 == 0:
                body = rng.randbytes(100_000)  # most of a segment
            tags = rng.choice([None, "TagA", "🚀x", "标签", "polygenelubricants"])
            keys = rng.choice([None, f"order-{number}", f"k{number} 🔑{number}"])
            properties = {"größe": "📦 läßt grüßen", "n": str(number)} if number % 3 else {}
            result = producer.send(topic, body, tags=tags, keys=keys, properties=properties, flag=number - 60)
            expected = dict(properties)
            if tags:
                expected["TAGS"] = tags
            if keys:
                expected["KEYS"] = keys
            sent[topic, result.queue, result.queue_offset] = {
                "body_hex": body.hex(),
                "flag": number - 60,
                "properties": expected,
                "physical_offset": result.physical_offset,
                "offset_msg_id": result.msg_id,
            }
    return sent


def assert_told_truly(lines: list[Line], sent: Sent) -> None:
    """Every message that the producer was promised is there, as it was sent and where it was told."""
    seen = {place(line): line for line in lines}
    for where, expected in sent.items():
        line = seen[where]
        for name, value in expected.items():
            if name == "properties":
                assert {k: line["properties"].get(k) for k in value} == value, where
                assert set(line["properties"]) - set(value) <= {"UNIQ_KEY", "WAIT"}, where
            else:
                assert line[name] == value, (where, name)


def send_batches(address: str, rng: random.Random) -> int:
    """Runs of many small messages; the number of messages. The largest run is longer than a segment."""
    total = 0
    with Producer(address) as producer:
        for number, count in enumerate([1, 2, 500, 40, 300]):
            bodies = [rng.randbytes(rng.choice([1, 50, 600])) for _ in range(count)]
            producer.send_batch(
                "Telemetry", bodies, tags=["🚀", "TagB"][number % 2], keys=[f"t{number}-{i}" for i in range(count)]
            )
            total += count
    return total


def send_compressed(address: str) -> dict[str, bytes]:
    """One message for each kind of compression; the original body by kind."""
    bodies = {}
    for kind in ("zlib", "lz4", "zstd"):
        bodies[kind] = f"compress me with {kind} ".encode() * 400
        with Producer(address, compress=kind, compress_over_bytes=1000) as producer:
            producer.send("Compressed", bodies[kind], keys=kind, queue=0)
    return bodies


def assert_rocketmq_agrees(run: Any, ours: list[Line], *, properties_crc: bool = True) -> None:
    """RocketMQ read through its ConsumeQueues exactly what our dump lists, to the same end of the log."""
    assert in_log_order(without_crc(run.lines)) == ours
    assert all((CRC_NAME in line["properties"]) == properties_crc for line in run.lines)
    assert_queues_are_whole(run.lines)
    assert run.recovered["max_physical_offset"] == run.recovered["flushed_offset"] == log_end(ours)
    assert run.recovered["writeable"]
    assert not run.report["abort_file_left"]


# ---------------------------------------------------------------- RocketMQ reads what a node wrote


@pytest.mark.parametrize("properties_crc", [True, False], ids=["crc", "no-crc"])
def test_rocketmq_reads_a_stopped_node(properties_crc: bool, tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: a store that a node wrote and closed opens in RocketMQ as its own would: same messages, no byte changed."""
    root = tmp_path / "store"
    rng = random.Random(411)
    with NodeProcess(root, f"commit_log.append_properties_crc={str(properties_crc).lower()}") as node:
        sent = send_singles(node.address, rng)
        batched = send_batches(node.address, rng)
        originals = send_compressed(node.address)
    ours = dump(root)
    before = store_digests(root)
    assert len(ours) == len(sent) + batched + len(originals)
    assert log_end(ours) > 4 * SEGMENT_BYTES
    assert_told_truly(ours, sent)

    run = run_rocketmq(root, "read")

    assert_rocketmq_agrees(run, ours, properties_crc=properties_crc)
    assert not run.report["abort_file_found"]
    assert run.complaints == []
    assert store_digests(root) == before
    inflated = run_rocketmq(root, "read", options=("--inflate",))
    assert {
        line["properties"]["KEYS"]: bytes.fromhex(line["body_hex"])
        for line in inflated.lines
        if line["topic"] == "Compressed"
    } == originals


@pytest.mark.slow
def test_rocketmq_recovers_a_killed_node(tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: after kill -9 of a whole node RocketMQ's recovery and ours find the same messages, each promised one too.

    Method: two copies of what the kill left; one is opened by RocketMQ, the other by a new node, then by RocketMQ too.
    RocketMQ verifies each record's ``__CRC32#`` from the first segment on, because the copy's checkpoint is taken away.
    """
    root, theirs = tmp_path / "store", tmp_path / "theirs"
    rng = random.Random(412)
    with NodeProcess(root) as node:
        sent = send_singles(node.address, rng)
        batched = send_batches(node.address, rng)
        node.kill()
    assert (root / "abort").exists()
    shutil.copytree(root, theirs, ignore=lambda folder, names: ["run"] if folder == str(root) else [])
    (theirs / "checkpoint").unlink()

    killed = run_rocketmq(theirs, "read", settings={"forceVerifyPropCRC": "true"})
    with NodeProcess(root):
        pass
    ours = dump(root)
    run = run_rocketmq(root, "read")

    assert killed.report["abort_file_found"]
    assert len(ours) == len(sent) + batched
    assert_told_truly(ours, sent)
    assert_rocketmq_agrees(killed, ours)
    assert_rocketmq_agrees(run, ours)
    assert run.complaints == []


# ---------------------------------------------------------------- and both write


@pytest.mark.slow
def test_rocketmq_and_node_append_in_turns(tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: node, RocketMQ and node again append to one store; neither loses, cuts or renumbers messages."""
    root = tmp_path / "store"
    rng = random.Random(413)
    with NodeProcess(root) as node:
        send_singles(node.address, rng)
        send_batches(node.address, rng)
    first = dump(root)
    end = log_end(first)
    before = {path.name: path.read_bytes() for path in (root / "commitlog").iterdir()}

    appended = run_rocketmq(root, "append", "Orders", "1", "150")

    assert appended.complaints == []
    assert appended.recovered["max_physical_offset"] == end
    second = dump(root)
    assert second[: len(first)] == first
    theirs = second[len(first) :]
    assert len(theirs) == 2 * 150
    assert [line["physical_offset"] for line in theirs[:150]] == [
        line["physical_offset"] for line in appended.lines[:150]
    ]
    next_offset = sum(line["topic"] == "Orders" and line["queue_id"] == 1 for line in first)
    assert [line["queue_offset"] for line in theirs] == list(range(next_offset, next_offset + 300))
    assert {line["properties"]["writer"] for line in theirs} == {"rocketmq"}
    assert_log_begins_as(root, before, end)

    wanted = {place(line): line["body_hex"] for line in second if line["topic"] in ("Orders", "Telemetry")}
    with NodeProcess(root) as node:
        read = read_all(node.address, ["Orders", "Telemetry"], len(wanted))
        with Producer(node.address) as producer:
            result = producer.send("Orders", b"after rocketmq", queue=1, tags="TagA")
        send_batches(node.address, rng)
    assert read == wanted
    assert result.queue_offset == next_offset + 300

    # The group's progress is where RocketMQ looks for it.
    assert ["Orders@interop", 1, next_offset + 300] in run_rocketmq(root, "config").lines[0]["offsets"]
    third = dump(root)
    assert third[: len(second)] == second
    run = run_rocketmq(root, "read")
    assert in_log_order(without_crc(run.lines)) == third
    assert run.complaints == []
    assert_queues_are_whole(run.lines)
    # RocketMQ indexed its own messages when it dispatched them, and still finds them by key.
    found = run_rocketmq(root, "query", "Orders", "java-key-single-3")
    assert [place(line) for line in found.lines] == [("Orders", 1, next_offset + 3)]


@pytest.mark.parametrize("kind", ["clean", "crash"])
def test_node_hands_a_store_of_rocketmq_back(
    kind: str, golden_copy: Callable[[str], GoldenStore], run_rocketmq: Callable[..., Run]
) -> None:
    """Goal: a node may run on a store of RocketMQ's, also a killed one, and RocketMQ then goes on with it."""
    store = golden_copy(kind)
    root, expected = store.root, store.messages
    topic = next(line["topic"] for line in expected if line["topic"].endswith("Normal"))
    with NodeProcess(root) as node, Producer(node.address) as producer:
        result = producer.send(topic, b"from a node", queue=2, tags="TagA", keys="ours")
    assert result.queue_offset == 60
    ours = dump(root)

    run = run_rocketmq(root, "append", topic, "2", "3")
    assert run.complaints == []
    run = run_rocketmq(root, "read")

    assert run.complaints == []
    seen = {line["physical_offset"]: line for line in without_crc(run.lines)}
    assert all(seen[line["physical_offset"]] == line for line in [*expected, *ours])
    assert len(seen) == len(expected) + 1 + 1 + 6  # the dead letter, the node's message, RocketMQ's six
    mine = [line["queue_offset"] for line in run.lines if (line["topic"], line["queue_id"]) == (topic, 2)]
    assert mine == list(range(60 + 1 + 6))


def assert_log_begins_as(root: Path, before: dict[str, bytes], end: int) -> None:
    """The log's first ``end`` bytes are those of ``before`` (segments by name)."""
    for name, data in before.items():
        whole = min(len(data), max(0, end - int(name)))
        assert (root / "commitlog" / name).read_bytes()[:whole] == data[:whole], f"segment {name} was changed"


def read_all(address: str, topics: list[str], count: int) -> dict[tuple[str, int, int], str]:
    """Body (hex) by place of ``count`` messages of ``topics``, read and committed by the consumer group ``interop``."""
    read: dict[tuple[str, int, int], str] = {}
    with Consumer(topics, group="interop", node=address, start="earliest") as consumer:
        while len(read) < count:
            batch = consumer.poll(timeout_s=20)
            assert len(batch), f"only {len(read)} of {count} messages came"
            for message in batch:
                read[message.topic, message.queue_id, message.queue_offset] = bytes(message.body).hex()
        consumer.commit()
    return read
