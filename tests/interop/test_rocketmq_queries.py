"""Goal: RocketMQ's own classes find messages by index files of a node, and a node by those that RocketMQ went on with.

Method: both answer the same queries. RocketMQ compares hashes only, so the test filters its answers by the real topic and
key, as RocketMQ's clients do.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interop_checks import Line, without_crc
from node_process import NodeProcess, dump
from rocketmq import Run

from commitmq import Admin, Message, Producer
from commitmq.format.index import list_index_files

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.timeout(420)]

# More than RocketMQ's 64 messages an answer, so that whole chains are compared.
SETTINGS = {"maxMsgsNumBatch": 1_000_000}
Wanted = dict[tuple[str, str], set[int]]


def send(address: str, rng: random.Random, count: int) -> None:
    """Messages with none to four keys, many of them shared, some with the same hash."""
    with Producer(address) as producer:
        for topic in ("Orders", "With-all_chars|1%"):
            messages = []
            for number in range(count):
                keys = [*rng.sample(["Aa", "BB", "shared", "🔑-é", f"own-{number}"], rng.randint(0, 4))]
                tag = rng.choice([None, "TagA", "标签"])
                messages.append(Message(b"x" * rng.randint(1, 300), keys=keys, tags=tag))
            producer.send_batch(topic, messages)


def wanted_of(lines: list[Line]) -> Wanted:
    """Physical offsets by topic and what is behind the topic in the index: a key, a unique key, or T# and a tag."""
    wanted: Wanted = defaultdict(set)
    for line in lines:
        properties = line["properties"]
        keys = [key for key in properties.get("KEYS", "").split(" ") if key]
        keys += [properties["UNIQ_KEY"]] + ([f"T#{properties['TAGS']}"] if "TAGS" in properties else [])
        for key in keys:
            wanted[line["topic"], key].add(line["physical_offset"])
    return wanted


def assert_rocketmq_finds(run_rocketmq: Any, root: Path, lines: list[Line], rng: random.Random) -> Any:
    wanted = wanted_of(lines)
    asked = rng.sample(sorted(wanted), min(400, len(wanted)))
    asked += [pair for pair in wanted if pair[1] in ("Aa", "BB", "shared", "🔑-é", "T#TagA", "T#标签")]
    file = root.with_name("queries")
    file.write_text("".join(f"{topic}\t{key}\n" for topic, key in asked), encoding="utf-8")
    run = run_rocketmq(root, "queries", str(file), settings=SETTINGS)
    assert len(run.lines) == len(asked)
    by_offset = wanted
    for found in run.lines:
        pair = (found["topic"], found["key"])
        exact = {offset for offset in found["physical_offsets"] if offset in by_offset[pair]}
        assert exact == wanted[pair], pair
    return run


def index_of(root: Path) -> dict[str, bytes]:
    return {name: (root / "index" / name).read_bytes() for name in list_index_files(root / "index")}


def assert_node_finds(address: str, lines: list[Line], rng: random.Random) -> None:
    wanted = wanted_of(lines)
    pairs = rng.sample(sorted(wanted), 150) + [pair for pair in wanted if pair[1] in ("Aa", "BB", "shared")]
    unique = {(line["topic"], line["properties"]["UNIQ_KEY"]) for line in lines}
    with Admin(address) as admin:
        for topic, key in pairs:
            if key.startswith("T#"):
                result = admin.query(topic, tag=key[2:], max_messages=100_000)
            elif (topic, key) in unique:
                result = admin.query(topic, unique_key=key, max_messages=100_000)
            else:
                result = admin.query(topic, key=key, max_messages=100_000)
            assert result.complete
            assert [message.physical_offset for message in result] == sorted(wanted[topic, key]), (topic, key)


def test_rocketmq_finds_in_our_index_what_it_would_in_its_own(tmp_path: Path, run_rocketmq: Callable[..., Run]) -> None:
    """Goal: chains, rolls and headers of our files are what RocketMQ expects; a clean hand-over changes no byte.

    Method: a node writes, RocketMQ queries; the node is killed and rebuilds, RocketMQ queries; RocketMQ appends, and
    both query; RocketMQ opens what another kill left, and both query once more.
    """
    root = tmp_path / "store"
    rng = random.Random(441)
    with NodeProcess(root) as node:
        send(node.address, rng, 300)
    lines = dump(root)
    files = index_of(root)
    assert len(files) >= 3
    run = assert_rocketmq_finds(run_rocketmq, root, lines, rng)
    assert run.complaints == []
    assert index_of(root) == files

    with NodeProcess(root) as node:
        send(node.address, rng, 100)
        node.kill()
    with NodeProcess(root):
        pass
    lines = dump(root)
    assert len(lines) == 800
    rebuilt = index_of(root)
    assert len(rebuilt) > len(files)
    run = assert_rocketmq_finds(run_rocketmq, root, lines, rng)
    assert run.complaints == []
    assert index_of(root) == rebuilt

    run_rocketmq(root, "append", "Orders", "1", "150")
    lines = without_crc(dump(root))
    appended = index_of(root)
    assert_rocketmq_finds(run_rocketmq, root, lines, rng)
    with NodeProcess(root) as node:
        assert_node_finds(node.address, lines, rng)
    assert index_of(root) == appended

    with NodeProcess(root) as node:
        send(node.address, rng, 50)
        node.kill()
    # RocketMQ builds its newest file again as far back as its recovery looks, which may leave a hole, and indexes the
    # record where it begins a second time. We find everything once.
    run_rocketmq(root, "read")
    with NodeProcess(root) as node:
        assert_node_finds(node.address, dump(root), rng)
