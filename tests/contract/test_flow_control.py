"""Goal: rates and time limits of ``[flow]`` refuse with code, reason and time; clients wait, lose nothing and keep the order.

Method: a node with small rates, another whose append is held up by a failpoint, requests at the level of the protocol, and the
clients.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from commitmq import Admin, AsyncProducer, Consumer, ExactlyOnce, Message, Producer, SendError
from commitmq.errors import Outcome
from delays import Peer, everything
from nodes import Node, commitmq, eventually, start_node

pytestmark = pytest.mark.timeout(120)
RATE = 50
SETTINGS = (f"flow.topic_send_messages_per_s={RATE}", "flow.group_pull_messages_per_s=100", "topics.default_queues=1")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("flow"), *SETTINGS) as made:
        yield made


def topic(node: Node, name: str) -> str:
    with Admin(node.address) as admin:
        admin.topic_create(name, 1)
    return name


def bodies(node: Node, name: str) -> list[bytes]:
    return [one.body for one in everything(node, name)]


def test_a_refusal_names_code_reason_and_time_and_stores_nothing(node: Node) -> None:
    name = topic(node, "refused")
    with Peer(node) as peer:
        assert peer.append(name, [b"x"] * (2 * RATE), [0] * (2 * RATE))["ok"]
        answer = peer.append(name, [b"y"], [0])
    assert (answer["ok"], answer["code"], answer["outcome"]) == (False, "SYSTEM_BUSY", "not_stored")
    assert 0 < answer["retry_after_ms"] <= 1_100
    assert "topic 'refused' is over its rate of 50 messages/s" in answer["error"]
    assert len(bodies(node, name)) == 2 * RATE


def test_a_change_of_settings_forgives_no_debt(tmp_path: Path) -> None:
    with start_node(tmp_path, *SETTINGS) as node:
        name = topic(node, "debt")
        with Peer(node) as peer:
            assert peer.append(name, [b"x"] * 20 * RATE, [0] * 20 * RATE)["ok"]
            assert not peer.append(name, [b"y"], [0])["ok"]
            changed = node.run(
                "config", "set", "flow.topic_send_messages_per_s", str(RATE + 1), "--store", str(node.store)
            )
            assert changed.returncode == 0, changed.stderr
            answer: dict[str, Any] = {}

            def is_told() -> bool:
                answer.update(peer.append(name, [b"y"], [0]))
                return answer["ok"] or f"{RATE + 1} messages/s" in answer["error"]

            assert eventually(is_told, "the writer has the new rate", 10)
            assert (answer["ok"], answer["code"]) == (False, "SYSTEM_BUSY")
            assert answer["retry_after_ms"] > 5_000


def test_other_topics_are_not_refused(node: Node) -> None:
    busy, free = topic(node, "busy"), topic(node, "free")
    with Peer(node) as peer:
        assert peer.append(busy, [b"x"] * 500, [0] * 500)["ok"]
        assert not peer.append(busy, [b"x"], [0])["ok"]
        assert peer.append(free, [b"x"], [0])["ok"]


@pytest.mark.parametrize("kind", ["send", "send_async", "send_batch", "numbered", "asyncio"])
def test_a_producer_waits_and_every_message_is_stored_once_in_order(node: Node, kind: str) -> None:
    name = topic(node, f"waits-{kind}")
    sent = [b"%d" % number for number in range(3 * RATE)]
    began = time.monotonic()
    if kind == "asyncio":
        asyncio.run(_send_with_asyncio(node, name, sent))
    else:
        delivery = ExactlyOnce() if kind == "numbered" else None
        with Producer(node.address, ack="memory", timeout_s=30, delivery=delivery, linger_ms=0) as producer:
            if kind == "send":
                for body in sent:
                    producer.send(name, body, queue=0)
            elif kind == "send_batch":
                for first in range(0, len(sent), 10):
                    producer.send_batch(name, [Message(body) for body in sent[first : first + 10]], queue=0)
            else:
                futures = []
                for body in sent:
                    futures.append(producer.send_async(name, body, queue=0))
                    time.sleep(0.002)
                for future in futures:
                    future.result()
    took_s = time.monotonic() - began
    assert bodies(node, name) == sent
    if kind in ("send", "send_batch"):  # runs of hundreds pass at once, so a stream of runs may be shorter
        assert 1.5 < took_s < 10


async def _send_with_asyncio(node: Node, name: str, sent: list[bytes]) -> None:
    async with AsyncProducer(node.address, ack="memory", timeout_s=30) as producer:
        for body in sent:
            await producer.send(name, body, queue=0)


def test_a_send_whose_time_is_over_says_why_it_is_not_stored(node: Node) -> None:
    name = topic(node, "late")
    with Peer(node) as peer:
        assert peer.append(name, [b"x"] * 1_000, [0] * 1_000)["ok"]
    for delivery in (None, ExactlyOnce()):
        with Producer(node.address, timeout_s=0.5, delivery=delivery) as producer:
            began = time.monotonic()
            with pytest.raises(SendError) as caught:
                producer.send(name, b"y")
            assert time.monotonic() - began < 3
            assert (caught.value.code, caught.value.outcome) == ("SYSTEM_BUSY", Outcome.NOT_STORED)
            assert "over its rate" in str(caught.value)


def test_pulls_of_a_group_keep_its_rate_and_status_shows_what_was_refused(node: Node) -> None:
    name = topic(node, "pulled")
    with Peer(node) as peer:
        assert peer.append(name, [b"%d" % number for number in range(300)], [0] * 300)["ok"]
    got: list[bytes] = []
    began = time.monotonic()
    with Consumer(
        name, group="slow", node=node.address, start="earliest", max_pull_bytes=4096, mode="bytes"
    ) as consumer:
        while len(got) < 300 and time.monotonic() - began < 30:
            got += [one.body for one in consumer.poll(timeout_s=1)]
    assert got == [b"%d" % number for number in range(300)]
    assert time.monotonic() - began > 1.5  # a burst of 100, and 200 at 100 a second, the last answer on credit
    with Admin(node.address) as admin:
        refused = {row["role"]: row["refused"] for row in admin.status()["processes"] if row.get("refused")}
    assert refused["reader-0"] > 0
    assert refused["writer"] > 0
    assert f"writer {refused['writer']}" in commitmq("status", "--node", node.address).stdout


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("flow.send_queue_wait_ms=200", "waited longer than 200 ms for the writer"),
        ("flow.page_cache_busy_ms=200", r"an append took 1\d\d\d ms"),
    ],
)
def test_sends_behind_a_long_append_are_refused_and_later_ones_are_not(
    tmp_path: Path, setting: str, reason: str
) -> None:
    slow = {"COMMITMQ_FAILPOINTS": "writer/writer.before_append=delay:1200ms@3-3"}
    with (
        start_node(tmp_path, setting, "topics.default_queues=1", **slow) as node,
        Peer(node) as first,
        Peer(node) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        name = topic(node, "t")
        assert first.append(name, [b"0"], [0])["ok"]
        assert second.append(name, [b"1"], [0])["ok"]
        time.sleep(0.5)  # the gate learns what belongs to handshakes
        long = threads.submit(first.append, name, [b"2"], [0])
        time.sleep(0.3)
        refused = threads.submit(second.ask, b"3", op="send", topic=name, queue=0).result()
        assert long.result()["ok"]
        assert (refused["ok"], refused["code"], refused["outcome"]) == (False, "SYSTEM_BUSY", "not_stored")
        assert refused["retry_after_ms"] == 200
        assert re.search(reason, refused["error"])
        time.sleep(0.3)
        for number in range(4, 50):
            assert first.append(name, [b"%d" % number], [0])["ok"]
        assert bodies(node, name) == [b"%d" % number for number in (0, 1, 2, *range(4, 50))]
        with Admin(node.address) as admin:
            assert [row["refused"] for row in admin.status()["processes"] if row["role"] == "writer"] == [1]


def test_producers_wait_behind_a_long_append(tmp_path: Path) -> None:
    slow = {"COMMITMQ_FAILPOINTS": "writer/writer.before_append=delay:800ms@3-4"}
    limits = ("flow.send_queue_wait_ms=100", "flow.page_cache_busy_ms=100", "topics.default_queues=1")
    with start_node(tmp_path, *limits, **slow) as node, ThreadPoolExecutor(4) as threads:
        name = topic(node, "t")

        def send(sender: int) -> None:
            with Producer(node.address, ack="memory", timeout_s=30) as producer:
                for number in range(20):
                    producer.send(name, b"%d %d" % (sender, number), queue=0)
                    time.sleep(0.02)

        for sent in [threads.submit(send, sender) for sender in range(4)]:
            sent.result()
        found = bodies(node, name)
        for sender in range(4):
            own = [body for body in found if body.startswith(b"%d " % sender)]
            assert own == [b"%d %d" % (sender, number) for number in range(20)]
        with Admin(node.address) as admin:
            assert next(row["refused"] for row in admin.status()["processes"] if row["role"] == "writer") > 0
