"""Goal: each broadcasting consumer gets every message, at least once over its own death, and its positions stay in its file.

Method: a real node; several consumers, with and without handlers; a consumer killed by SIGKILL; topics that change while
nobody reads; a group that may not broadcast.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, AsyncConsumer, Consumer, ConsumeResult, Message, Producer, ProtocolError, StoreError
from commitmq.client.receiving.position_file import parsed
from nodes import Node, environment, eventually, start_node, wait_until_dispatched

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("broadcasting"), "network.broker_name=b1", "topics.default_queues=2"
    ) as made:
        yield made


def send(node: Node, topic: str, first: int, last: int) -> list[bytes]:
    bodies = [b"%d" % number for number in range(first, last)]
    with Producer(node.address) as producer:
        for body in bodies:
            producer.send(topic, body)
    return bodies


def consumer_of(node: Node, topic: str, folder: Path, **options: Any) -> Consumer:
    return Consumer(
        topic, group=f"all-{topic}", node=node.address, broadcasting=True, positions_folder=folder, **options
    )


def read(consumer: Consumer, count: int) -> list[bytes]:
    """That many bodies, sorted by number, and no more."""
    found: list[bytes] = []
    while len(found) < count:
        batch = consumer.poll(10.0)
        assert batch, f"{len(found)} of {count} messages came"
        found += [message.body for message in batch.messages()]
    assert not consumer.poll(0.2)
    return sorted(found, key=int)


def kept(folder: Path, topic: str, member: str = "DEFAULT") -> dict[tuple[str, int], int]:
    path = folder / member / f"all-{topic}" / "offsets.json"
    return parsed(path.read_text(), path).offsets


def test_each_member_gets_all_and_goes_on_where_it_was(node: Node, tmp_path: Path) -> None:
    bodies = send(node, "news", 0, 20)
    for member in ("a", "b"):
        with consumer_of(node, "news", tmp_path, member=member) as consumer:
            assert len(consumer.assignment) == 2
            assert read(consumer, 20) == bodies
    more = send(node, "news", 20, 30)
    for member in ("a", "b"):
        with consumer_of(node, "news", tmp_path, member=member) as consumer:
            assert read(consumer, 10) == more
            assert sum(kept(tmp_path, "news", member).values()) <= 30
        assert sum(kept(tmp_path, "news", member).values()) == 30
    assert '"brokerName": "b1"' in (tmp_path / "a" / "all-news" / "offsets.json").read_text()


def test_a_file_is_for_one_consumer(node: Node, tmp_path: Path) -> None:
    send(node, "one", 0, 1)
    with consumer_of(node, "one", tmp_path):
        with pytest.raises(StoreError, match="member="):
            consumer_of(node, "one", tmp_path)
        consumer_of(node, "one", tmp_path, member="second").close()
    consumer_of(node, "one", tmp_path).close()


def test_commits_by_hand(node: Node, tmp_path: Path) -> None:
    send(node, "by-hand", 0, 10)
    with consumer_of(node, "by-hand", tmp_path, auto_commit=False) as consumer:
        read(consumer, 10)
    with consumer_of(node, "by-hand", tmp_path, auto_commit=False) as consumer:
        read(consumer, 10)
        assert sum(consumer.commit().values()) == 10
    with consumer_of(node, "by-hand", tmp_path, auto_commit=False) as consumer:
        assert not consumer.poll(0.5)


def test_latest_holds_from_the_first_start_on(node: Node, tmp_path: Path) -> None:
    """A consumer that read nothing goes on at the end that it found, not at a later one; so does one of a new queue."""
    send(node, "late", 0, 5)
    with Admin(node.address) as admin:  # a queue ends behind what is dispatched
        eventually(lambda: sum(one.max for one in admin.offsets("late")) == 5, "all are dispatched")
    consumer_of(node, "late", tmp_path, start="latest", auto_commit=False).close()
    more = send(node, "late", 5, 9)
    with Admin(node.address) as admin:
        admin.topic_update("late", 4)
    with Producer(node.address) as producer:
        for queue in (2, 3):
            producer.send("late", b"%d" % (100 + queue), queue=queue)
    with consumer_of(node, "late", tmp_path, start="latest") as consumer:
        assert read(consumer, 6) == [*more, b"102", b"103"]


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(node: Node, tmp_path: Path) -> None:
    send(node, "anew", 0, 10)
    with consumer_of(node, "anew", tmp_path, start="latest", member="m") as consumer:
        consumer.seek("anew", 0, 0)
        consumer.seek("anew", 1, 0)
        read(consumer, 10)
    with Admin(node.address) as admin:
        admin.topic_delete("anew")
        admin.topic_create("anew", 2)
    again = send(node, "anew", 20, 32)
    with consumer_of(node, "anew", tmp_path, start="latest", member="m") as consumer:
        assert read(consumer, 12) == again
    assert sum(kept(tmp_path, "anew", "m").values()) == 12


def test_a_file_of_rocketmq_is_taken_over(node: Node, tmp_path: Path) -> None:
    send(node, "taken", 0, 10)
    wait_until_dispatched(node.address)
    folder = tmp_path / "DEFAULT" / "all-taken"
    folder.mkdir(parents=True)
    entries = ",".join(f'{{"brokerName":"x","queueId":{queue},"topic":"taken"}}:4' for queue in range(2))
    (folder / "offsets.json").write_text('{"offsetTable":{' + entries + "}}")
    with consumer_of(node, "taken", tmp_path) as consumer:
        assert len(read(consumer, 2)) == 2
        assert consumer.positions == {("taken", 0): 5, ("taken", 1): 5}


@pytest.mark.parametrize("ordered", [False, True])
def test_a_failed_message_is_told_and_counts_as_done(node: Node, tmp_path: Path, ordered: bool) -> None:
    topic = f"failing-{ordered}"
    bodies = send(node, topic, 0, 10)
    seen: list[bytes] = []
    told: list[str] = []
    consumer = consumer_of(node, topic, tmp_path)

    def handle(message: Message) -> ConsumeResult | None:
        seen.append(message.body)
        if len(set(seen)) == 10:
            consumer.close()
        if message.body == b"3":
            raise RuntimeError("no threes")
        return ConsumeResult.RETRY if message.body == b"4" else None

    consumer.run(
        handle,
        on_error=lambda _, error: told.append(str(error)),
        ordered=ordered,
        max_retries=1 if ordered else 16,
        backoff=0.05,
    )
    assert {*seen} == {*bodies}
    assert set(told) == {"no threes"}
    tries = 2 if ordered else 1
    assert seen.count(b"3") <= tries
    with consumer_of(node, topic, tmp_path) as again:
        eventually(lambda: not again.poll(0.3), "all is done")
    assert sum(kept(tmp_path, topic).values()) == 10
    with Admin(node.address) as admin:
        assert not [one.name for one in admin.topics() if one.name.startswith(f"%RETRY%all-{topic}")]


def test_asyncio(node: Node, tmp_path: Path) -> None:
    bodies = send(node, "loops", 0, 10)
    seen: list[bytes] = []

    async def main() -> None:
        async with AsyncConsumer(
            "loops", group="loops", node=node.address, broadcasting=True, positions_folder=tmp_path
        ) as consumer:

            async def handle(message: Message) -> None:
                seen.append(message.body)
                if len(seen) == 10:
                    await consumer.close()

            await consumer.run(handle)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert sorted(seen) == bodies


PROGRAM = """
import sys, time
from commitmq import Consumer
consumer = Consumer("killed", group="all-killed", node=sys.argv[1], broadcasting=True, positions_folder=sys.argv[2],
                    auto_commit_interval_s=0)
while True:
    for message in consumer.poll(1.0, 5).messages():
        print(message.body.decode(), flush=True)
    time.sleep(0.02)
"""


def test_a_killed_consumer_misses_nothing(node: Node, tmp_path: Path) -> None:
    bodies = send(node, "killed", 0, 200)
    seen: set[bytes] = set()
    for _ in range(3):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, node.address, str(tmp_path)], stdout=subprocess.PIPE, env=environment()
        )
        assert program.stdout is not None
        for _ in range(40):
            seen.add(program.stdout.readline().strip())
        program.send_signal(signal.SIGKILL)
        program.wait(10)
        program.stdout.close()
        assert sum(kept(tmp_path, "killed").values()) <= len(seen) + 5
    with consumer_of(node, "killed", tmp_path) as consumer:
        while batch := consumer.poll(2.0):
            seen.update(message.body for message in batch.messages())
    assert seen >= {*bodies}


def test_the_reader_process_dies(node: Node, tmp_path: Path) -> None:
    send(node, "healed", 0, 10)
    with consumer_of(node, "healed", tmp_path) as consumer:
        read(consumer, 10)
        subprocess.run(["kill", "-9", str(node.pids()["reader-0"])], check=True)
        more = send(node, "healed", 10, 20)
        found: list[bytes] = []
        deadline = threading.Event()
        threading.Timer(30, deadline.set).start()
        while len(found) < 10 and not deadline.is_set():
            found += [message.body for message in consumer.poll(1.0).messages()]
        assert sorted(found) == more
        deadline.set()


def test_a_group_that_may_not_broadcast(tmp_path: Path) -> None:
    config = tmp_path / "store" / "config"
    config.mkdir(parents=True)
    group = {"groupName": "all-x", "consumeBroadcastEnable": False, "consumeEnable": True, "retryQueueNums": 1}
    (config / "subscriptionGroup.json").write_text(json.dumps({"subscriptionGroupTable": {"all-x": group}}))
    with start_node(tmp_path) as node:
        send(node, "x", 0, 1)
        with pytest.raises(ProtocolError, match="consumeBroadcastEnable") as refused:
            consumer_of(node, "x", tmp_path / "positions")
        assert refused.value.code == "NO_PERMISSION"
        Consumer("x", group="all-x", node=node.address).close()


def test_arguments_that_do_not_fit(node: Node, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broadcasting=True"):
        Consumer("x", group="g", node=node.address, positions_folder=tmp_path)
    with pytest.raises(ValueError, match="folder"):
        consumer_of(node, "x", tmp_path, member="a/b")
