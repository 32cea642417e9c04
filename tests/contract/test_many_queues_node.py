"""Goal: a node with 10,000 queues starts in bounded time and memory, takes batches at no less than half the rate it has
with ten queues, and loses nothing at a kill -9.

Method: a real node with 1,000 topics of 10 queues; rates are compared within one run, in turns, and the clock stops when
the last message is visible; then every process is killed at one moment, and every message is read and compared.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commitmq import Admin, Producer, Reader
from nodes import Node, eventually, start_node

TOPICS, QUEUES = 1_000, 10
NAMES = [f"many-{number:04d}" for number in range(TOPICS)]
# What the busiest process of a node may hold for itself; store mappings belong to the page cache. The dispatcher of
# ConsumeQueues holds 58 to 64 when it catches up after a kill, by how far it was behind.
ANONYMOUS_MIB = 72
START_S = 30.0

_log = logging.getLogger(__name__)  # the figures: pytest -o log_cli=true -o log_cli_level=INFO


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = (f"commit_log.segment_bytes={64 << 20}", "supervisor.hang_timeout_s=120")
    with start_node(tmp_path_factory.mktemp("queues"), *settings) as running:
        yield running


def anonymous_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss_Anon:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def send(node: Node, admin: Admin, names: list[str], first: int, messages: int, batch: int) -> float:
    """Messages a second, sent as batches over all queues in turn, until the last is visible. Batch n goes to queue n."""
    bodies = [bytes(100) for _ in range(batch)]
    turn = itertools.islice(itertools.cycle(itertools.product(range(QUEUES), names)), first, None)
    with Producer(node.address, timeout_s=60) as producer:
        producer.send_batch("warm", bodies)
        started = time.perf_counter()
        for _ in range(messages // batch):
            queue, name = next(turn)
            done = producer.send_batch(name, bodies, queue=queue)
        last = done[len(done) - 1]
        while admin.offsets(name)[queue][2] <= last.queue_offset:
            time.sleep(0.001)
        return messages / (time.perf_counter() - started)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_ten_thousand_queues(node: Node) -> None:
    with Admin(node.address, timeout_s=60) as admin:
        started = time.perf_counter()
        admin.topic_create("few", QUEUES)
        admin.topic_create("warm", 1)
        for name in NAMES:
            admin.topic_create(name, QUEUES)
        created_s = time.perf_counter() - started
        ratios = []
        sent = 0
        # Each queue gets its files in the first turns: that costs once, and is not what is compared.
        send(node, admin, NAMES, 0, TOPICS * QUEUES * 10, 10)
        for _ in range(4):
            few = send(node, admin, ["few"], 0, 75_000, 100)
            many = send(node, admin, NAMES, sent, 250_000, 100)
            few = (few + send(node, admin, ["few"], 0, 75_000, 100)) / 2
            sent += 2_500
            ratios.append(many / few)
    _log.info("created in %.1f s, ratios %s", created_s, [round(ratio, 2) for ratio in ratios])
    assert sorted(ratios)[1] >= 0.5, f"10,000 queues against 10: {ratios}"
    expected = {name: [10 + 100] * QUEUES for name in NAMES}
    check_memory(node)
    node.kill_all()
    started = time.perf_counter()
    assert node.start().returncode == 0
    seconds = time.perf_counter() - started
    _log.info("started after kill -9 in %.1f s", seconds)
    assert seconds <= START_S
    check_memory(node)
    with Admin(node.address, timeout_s=60) as admin:
        eventually(lambda: [high for _, _, high, _ in admin.offsets(NAMES[-1])] == expected[NAMES[-1]], "dispatched")
        found = {name: [high for _, _, high, _ in admin.offsets(name)] for name in NAMES}
    assert found == expected
    seen: dict[tuple[str, int], int] = {}
    with Reader(NAMES, node=node.address) as consumer:
        missing = TOPICS * QUEUES * 110
        while missing:
            batch = consumer.poll(timeout_s=30)
            assert len(batch), f"{missing} messages do not come"
            missing -= len(batch)
            for topic, queue, offset in zip(
                batch.topic, batch.queue_id.tolist(), batch.queue_offset.tolist(), strict=True
            ):
                assert seen.get((topic, queue), 0) == offset
                seen[topic, queue] = offset + 1
    assert seen == {(name, queue): 110 for name in NAMES for queue in range(QUEUES)}
    started = time.perf_counter()
    assert node.stop().returncode == 0
    assert node.start().returncode == 0
    _log.info("stopped and started in %.1f s", time.perf_counter() - started)


def check_memory(node: Node) -> None:
    used = {role: anonymous_mib(pid) for role, pid in node.pids().items()}
    _log.info("anonymous MiB: %s", {role: round(mib) for role, mib in used.items()})
    assert max(used.values()) <= ANONYMOUS_MIB, used
