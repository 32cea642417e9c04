"""Goal: RocketMQ's classes understand every record, queue and configuration file that this project's store modules write.

Method: each test opens a store with DefaultMessageStore as a broker would, one of ours or a golden one, and compares the
records that RocketMQ sees with those that were meant.
"""

from __future__ import annotations

import ipaddress
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from interop_checks import CRC_NAME, Line, assert_queues_are_whole, store_digests, without_crc
from rocketmq import Run
from store_builder import QUEUE_FILE_BYTES, SEGMENT_BYTES, write_store

from commitmq.format.compression import compress, compression_flags
from commitmq.format.constants import Host
from commitmq.format.record import Record
from commitmq.store.log.commit_log import CommitLog
from commitmq.store.metadata.group_config import ConsumerOffsets, GroupConfig, GroupTable
from commitmq.store.metadata.topic_config import TopicConfig, TopicTable
from commitmq.store.queues.consume_queue import ConsumeQueue
from golden_stores import GoldenStore
from queue_times import offset_by_time

# The first test that needs it waits for the Java program's build.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

V4 = Host("127.0.0.1", 10911)
V6 = Host("fd00::1:2", 40001)


def by_place(lines: Iterable[Line]) -> dict[int, Line]:
    return {line["physical_offset"]: line for line in lines}


def as_java_tells(record: Record) -> Line:
    """What the Java program must print for ``record``; the computed fields come from zlib and the IP addresses."""
    flags = record.sys_flag
    for host, bit in ((record.born_host, 0x10), (record.store_host, 0x20)):
        flags |= bit if ":" in host.ip else 0
    return {
        **record.to_json(),
        "sys_flag": flags,
        "body_crc": zlib.crc32(record.body) & 0x7FFFFFFF,
        "born_host": java_host(record.born_host),
        "store_host": java_host(record.store_host),
    }


def java_host(host: Host) -> str:
    """A host in Java's spelling: the groups of an IPv6 address without leading zeros, none left out."""
    if ":" not in host.ip:
        return f"{host.ip} {host.port}"
    groups = ipaddress.IPv6Address(host.ip).exploded.split(":")
    return f"{':'.join(f'{int(group, 16):x}' for group in groups)} {host.port}"


def all_shapes(count: int = 400, seed: int = 20_260) -> Iterator[Record]:
    """Messages of every shape a record can have; the same for the same seed."""
    rng = random.Random(seed)
    topics = ["Plain", "With-all_chars|1%", "x" * 127, "%RETRY%" + "g" * 150, "%DLQ%group"]
    bodies = [b"", b"\0", b"x", "żółw 🚀".encode(), rng.randbytes(700), rng.randbytes(5_000), rng.randbytes(40_000)]
    compressed = [
        (compress(b"compress me " * 300, kind), 1 | compression_flags(kind)) for kind in ("zlib", "lz4", "zstd")
    ]
    next_offsets: dict[tuple[str, int], int] = {}
    for number in range(count):
        topic = topics[number % len(topics)]
        queue = rng.randrange(3)
        body, flags = rng.choice([*((body, 0) for body in bodies[: 7 if number % 40 == 0 else 6]), *compressed])
        offset = next_offsets.get((topic, queue), 0)
        next_offsets[topic, queue] = offset + 1
        properties = {"UNIQ_KEY": f"{number:032X}", "WAIT": "true"}
        if number % 2:
            properties["TAGS"] = rng.choice(
                ["TagA", "🚀", "标签", "e\u0301", "A-much-longer-tag-name-to-hash", "polygenelubricants"]
            )
        if number % 3:
            properties["KEYS"] = f"key-{number} 🔑{number}"
        if number % 7 == 0:
            properties["u" * 300] = "value 🚀 \u00e9 " * 100
        yield Record(
            topic,
            queue_id=queue,
            queue_offset=offset,
            sys_flag=flags,
            flag=rng.randrange(-(2**31), 2**31),
            born_timestamp=1_795_000_000_000 + number,
            store_timestamp=1_795_000_000_100 + number // 5,
            reconsume_times=number % 4,
            properties={} if number % 11 == 0 else properties,
            body=body,
            born_host=rng.choice([V4, V6]),
            store_host=rng.choice([V4, V6]),
        )


# ---------------------------------------------------------------- the harness itself


@pytest.mark.parametrize("kind", ["clean", "crash"])
def test_golden_store_is_read_as_its_messages_say(
    kind: str, golden_copy: Callable[[str], GoldenStore], run_rocketmq: Callable[..., Run]
) -> None:
    """Goal: the Java program reports what RocketMQ's client reported when the store was made."""
    store = golden_copy(kind)
    root, expected = store.root, store.messages
    run = run_rocketmq(root, "read")

    seen = [line for line in run.lines if not line["topic"].startswith("%DLQ%")]
    assert by_place(seen) == by_place(expected)
    assert len(run.lines) == len(expected) + 1
    assert run.report["abort_file_found"] == (kind == "crash")
    assert run.report["abort_file_left"] is False
    assert_queues_are_whole(run.lines)


# ---------------------------------------------------------------- stores of ours


@pytest.mark.parametrize("properties_crc", [True, False], ids=["crc", "no-crc"])
def test_every_shape_of_record_is_read_back(
    properties_crc: bool, tmp_path: Path, run_rocketmq: Callable[..., Run]
) -> None:
    """Goal: RocketMQ sees each field of each record as we meant it, and changes no byte of log and queues.

    Covers both record versions, both kinds of hosts, all compressions, empty bodies, tags and keys outside the BMP.
    """
    root = tmp_path / "store"
    records = write_store(root, all_shapes(), properties_crc=properties_crc)
    before = store_digests(root)
    log_end = records[-1].physical_offset + records[-1].total_size
    assert log_end > 3 * SEGMENT_BYTES

    run = run_rocketmq(root, "read", options=("--hosts",))

    assert by_place(without_crc(run.lines)) == by_place(as_java_tells(record) for record in records)
    assert sum(CRC_NAME in line["properties"] for line in run.lines) == (len(records) if properties_crc else 0)
    assert run.complaints == []
    assert run.recovered["max_physical_offset"] == log_end
    assert run.recovered["flushed_offset"] == log_end
    assert_queues_are_whole(run.lines)
    assert store_digests(root) == before


def test_compressed_bodies_inflate_in_rocketmq(tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: what we compress with each kind, RocketMQ's own compressors inflate to the original."""
    original = b"compress me " * 300
    records = [
        Record("T", queue_offset=i, sys_flag=1 | compression_flags(kind), body=compress(original, kind), born_host=V4,
               store_host=V4, born_timestamp=5, store_timestamp=10 + i, properties={"KEYS": kind})
        for i, kind in enumerate(["zlib", "lz4", "zstd"])
    ]  # fmt: skip
    write_store(tmp_path / "store", records, properties_crc=True)

    run = run_rocketmq(tmp_path / "store", "read", options=("--inflate",))

    assert [(line["properties"]["KEYS"], bytes.fromhex(line["body_hex"])) for line in run.lines] == [
        ("zlib", original),
        ("lz4", original),
        ("zstd", original),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["clean", "killed"])
def test_rocketmq_verifies_our_crc_digits(killed: bool, tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: with forceVerifyPropCRC RocketMQ's recovery takes our ``__CRC32#`` digits, and only right ones.

    Method: the whole log is recovered with that switch; then one digit of a record in its middle is changed, and the
    recovery must end right before that record (the method's own check: without it nothing would have been verified).
    """
    settings = {"forceVerifyPropCRC": "true"}
    good, bad = tmp_path / "good", tmp_path / "bad"
    records = write_store(good, all_shapes(), properties_crc=True, killed=killed)
    run = run_rocketmq(good, "read", settings=settings)
    assert len(run.lines) == len(records)
    assert run.recovered["max_physical_offset"] == records[-1].physical_offset + records[-1].total_size

    records = write_store(bad, all_shapes(), properties_crc=True, killed=killed)
    victim = records[-3]
    digit_at = victim.physical_offset + victim.total_size - 2
    segment = bad / "commitlog" / f"{digit_at - digit_at % SEGMENT_BYTES:020d}"
    data = bytearray(segment.read_bytes())
    data[digit_at % SEGMENT_BYTES] = ord("0") + (data[digit_at % SEGMENT_BYTES] - ord("0") + 1) % 10
    segment.write_bytes(data)
    run = run_rocketmq(bad, "read", settings=settings)
    assert run.recovered["max_physical_offset"] == victim.physical_offset


def test_rocketmq_recovers_a_killed_store(tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: after a kill RocketMQ keeps every whole record, cuts the torn one and builds the missing units."""
    root = tmp_path / "store"
    records = write_store(root, all_shapes(), properties_crc=True, killed=True)

    run = run_rocketmq(root, "read")

    assert run.report["abort_file_found"]
    assert run.recovered["max_physical_offset"] == records[-1].physical_offset + records[-1].total_size
    assert sorted(by_place(run.lines)) == [record.physical_offset for record in records]
    assert_queues_are_whole(run.lines)


# ---------------------------------------------------------------- look-ups and config files


def test_offsets_by_time_agree(golden_copy: Callable[[str], GoldenStore], run_rocketmq: Callable[..., Run]) -> None:
    """Goal: our look-up by store time gives RocketMQ's answer, at, between, before and after every time stamp."""
    store = golden_copy("clean")
    root, expected = store.root, store.messages
    log = CommitLog(root / "commitlog", SEGMENT_BYTES)
    queue = ConsumeQueue(root / "consumequeue" / "GoldenNormal" / "1", QUEUE_FILE_BYTES)
    queue.refresh()
    stamps = {line["store_timestamp"] for line in expected if line["topic"] == "GoldenNormal" and line["queue_id"] == 1}
    times = sorted({stamp + step for stamp in stamps for step in (-1, 0, 1)} | {0, 2**50})
    ours = [
        {
            "timestamp": time,
            "lower": offset_by_time(queue, time, "lower", log),
            "upper": offset_by_time(queue, time, "upper", log),
        }
        for time in times
    ]
    log.close()

    run = run_rocketmq(root, "times", "GoldenNormal", "1", *map(str, times))

    assert run.lines == ours


def test_config_files_of_ours_are_read(tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: topics, groups and offsets that we persist are what RocketMQ's own classes decode."""
    config = tmp_path / "store" / "config"
    config.mkdir(parents=True)
    topics = TopicTable()
    topics.put(TopicConfig("Orders", read_queues=8, write_queues=4, perm=6, attributes={"cleanup.policy": "DELETE"}))
    # An attribute of ours that RocketMQ does not know must neither stop it nor be lost.
    topics.put(TopicConfig("Cache", read_queues=2, write_queues=2, attributes={"storage.type": "memory"}))
    topics.put(TopicConfig("%RETRY%billing", read_queues=1, write_queues=1, perm=4, order=True))
    topics.persist(config / "topics.json")
    offsets = ConsumerOffsets()
    offsets.put("billing", "Orders", 0, 123)
    offsets.put("billing", "Orders", 11, 2**40)
    offsets.put("billing", "%RETRY%billing", 0, 1)
    offsets.persist(config / "consumerOffset.json")
    groups = GroupTable()
    groups.put(GroupConfig("billing"))
    groups.persist(config / "subscriptionGroup.json")

    seen = run_rocketmq(tmp_path / "store", "config").lines[0]

    assert seen["topics"] == [
        ["%RETRY%billing", 1, 1, 4, "SINGLE_TAG", 0, True, {}],
        ["Cache", 2, 2, 6, "SINGLE_TAG", 0, False, {"storage.type": "memory"}],
        ["Orders", 8, 4, 6, "SINGLE_TAG", 0, False, {"cleanup.policy": "DELETE"}],
    ]
    assert seen["groups"] == [["billing", True, 1, 16, 15]]
    assert sorted(seen["offsets"]) == sorted(
        [["Orders@billing", 0, 123], ["Orders@billing", 11, 2**40], ["%RETRY%billing@billing", 0, 1]]
    )
