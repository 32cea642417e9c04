"""Goal: a memory topic is used like any other, stays within its budget, and nothing of it reaches the CommitLog.

Method: one real node with a small budget, the public clients and the command; raw requests where the protocol decides;
what is in memory is asked of the kernel (allocated blocks of the folder's files) while a producer sends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from commitmq import Admin, Consumer, Message, Producer, Sql
from commitmq.client.aio import AsyncConsumer, AsyncProducer
from commitmq.client.sending.batch import TARGET_RUN_BYTES
from commitmq.errors import InvalidMessageError, Outcome, ProtocolError, SendError
from commitmq.store.layout import StoreLayout
from commitmq.store.shared_memory import memory_folder
from nodes import Node, commitmq, eventually, start_node

SEGMENT = 256 * 1024
BUDGET = 16 * 1024 * 1024
IN_MEMORY = {"storage.type": "memory"}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = (f"memory.budget_bytes={BUDGET}", f"memory.segment_bytes={SEGMENT}")
    with start_node(tmp_path_factory.mktemp("memory"), *settings) as made:
        yield made


@pytest.fixture
def admin(node: Node) -> Iterator[Admin]:
    with Admin(node.address) as made:
        yield made


@pytest.fixture
def producer(node: Node) -> Iterator[Producer]:
    with Producer(node.address) as made:
        yield made


@pytest.fixture
def topic(admin: Admin) -> Iterator[str]:
    """A fresh memory topic with one queue."""
    name = f"mem{next(_numbers)}"
    assert admin.topic_create(name, 1, attributes=IN_MEMORY).created
    yield name
    try:
        admin.topic_delete(name)
    except ProtocolError as error:
        assert error.code == "TOPIC_NOT_EXIST"


def folder_of(node: Node) -> Path:
    return memory_folder(StoreLayout(node.store))


def allocated(folder: Path) -> int:
    """Bytes of memory that the files under ``folder`` really take."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # evicted since it was listed
    return total


def consume(node: Node, topic: str, count: int, *, group: str = "", **options: Any) -> list[Message]:
    """``count`` messages from the first on, by a group of their own."""
    found: list[Message] = []
    deadline = time.monotonic() + 20
    group = group or f"g{next(_numbers)}"
    with Consumer(topic, group=group, node=node.address, start="earliest", **options) as consumer:
        while len(found) < count and time.monotonic() < deadline:
            found += list(consumer.poll(timeout_s=0.5))
    return found


def ask(node: Node, role: str, header: dict[str, Any], *payload: bytes) -> dict[str, Any]:
    """One raw request and its answer."""
    context = zmq.Context()
    try:
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.RCVTIMEO, 10_000)
        sock.connect(node.endpoints()[role])
        sock.send_multipart([orjson.dumps({"v": 1, "id": 1, **header}), *payload])
        answer: dict[str, Any] = orjson.loads(sock.recv_multipart()[0])
        return answer
    finally:
        context.destroy(linger=0)


# ---------------------------------------------------------------- like any other topic


def test_every_way_of_sending_and_reading_works_and_the_log_stays_as_it_is(
    node: Node, admin: Admin, producer: Producer, topic: str
) -> None:
    before = admin.status()["positions"]["written"]
    started = datetime.now(UTC)
    first = producer.send(topic, b"single", tags="A", keys=["k1", "k2"], properties={"p": "q"}, ack="flushed")
    assert (first.queue, first.queue_offset, first.ack) == (0, 0, "memory")
    second = producer.send_async(topic, b"async", tags="B", queue=0).result(10)
    assert second.queue_offset == 1
    results = producer.send_batch(topic, [b"b%d" % number for number in range(500)], tags="A")
    assert [one.queue_offset for one in results] == list(range(2, 502))
    found = consume(node, topic, 502)
    assert [one.queue_offset for one in found] == list(range(502))
    assert (found[0].body, found[0].tags, found[0].keys, found[0].properties["p"]) == (
        b"single",
        "A",
        ["k1", "k2"],
        "q",
    )
    assert found[2].body == b"b0"
    assert [one.body for one in consume(node, topic, 1, filter="B")] == [b"async"]
    assert [one.body for one in consume(node, topic, 1, filter=Sql("p = 'q'"))] == [b"single"]
    assert len(consume(node, topic, 502, mode="ranges")) == 502
    assert len(consume(node, topic, 502, mode="bytes")) == 502
    assert admin.offsets(topic, started) == [(0, 0, 502, 0)]
    assert admin.view(results[0].msg_id, topic).body == b"b0"
    with pytest.raises(ProtocolError):
        admin.view(results[0].msg_id, "no such topic")
    assert admin.status()["positions"]["written"] == before


def test_asyncio_twins(node: Node, topic: str) -> None:
    async def both() -> list[bytes]:
        async with AsyncProducer(node.address) as producer:
            await asyncio.gather(*(producer.send(topic, b"%d" % number) for number in range(50)))
        bodies: list[bytes] = []
        async with AsyncConsumer(topic, group="aio", node=node.address, start="earliest") as consumer:
            while len(bodies) < 50:
                bodies += [message.body for message in await consumer.poll(timeout_s=5)]
        return bodies

    assert sorted(asyncio.run(both()), key=int) == [b"%d" % number for number in range(50)]


def test_a_waiting_consumer_hears_of_a_message_at_once(node: Node, producer: Producer, topic: str) -> None:
    """By a wake-up: the look that the reader takes by itself comes once a second."""
    with Consumer(topic, group="waiting", node=node.address, start="earliest") as consumer:
        assert not len(consumer.poll(timeout_s=0.3))
        waits = []
        for number in range(8):
            timer = threading.Timer(0.05, producer.send, (topic, b"%d" % number))
            timer.start()
            (message,) = consumer.poll(timeout_s=10)
            waits.append(time.time() - message.store_timestamp / 1000)
            assert message.body == b"%d" % number
            timer.join()
    assert sorted(waits)[len(waits) // 2] < 0.3, waits


def test_groups_commit_and_go_on(node: Node, producer: Producer, topic: str) -> None:
    producer.send_batch(topic, [b"%d" % number for number in range(10)], queue=0)
    with Consumer(topic, group="steps", node=node.address, start="earliest", auto_commit=False) as consumer:
        seen = list(consumer.poll(max_messages=4, timeout_s=5))
        consumer.commit()
    with Consumer(topic, group="steps", node=node.address, start="latest") as consumer:
        while len(seen) < 10:
            seen += list(consumer.poll(timeout_s=5))
    assert [one.queue_offset for one in seen] == list(range(10))


def test_one_thread_s_messages_keep_their_order_while_the_topic_is_found_to_be_in_memory(
    node: Node, topic: str
) -> None:
    """The producer learns at the first message where the topic is kept; those behind it must not overtake it."""
    with Producer(node.address) as producer:
        futures = [producer.send_async(topic, b"%d" % number, queue=0) for number in range(3_000)]
        assert producer.send(topic, b"3000", queue=0).queue_offset == 3_000
        assert [one.result(10).queue_offset for one in futures] == list(range(3_000))
    assert [one.body for one in consume(node, topic, 3_001)] == [b"%d" % number for number in range(3_001)]


def test_threads_share_one_producer(node: Node, producer: Producer, topic: str) -> None:
    def work(name: int) -> None:
        for number in range(100):
            producer.send(topic, b"%d/%d" % (name, number))
            producer.send("beside", b"%d/%d" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    for name in (topic, "beside"):
        bodies = [one.body for one in consume(node, name, 400)]
        assert sorted(bodies) == sorted(b"%d/%d" % (thread, number) for thread in range(4) for number in range(100))


# ---------------------------------------------------------------- what is refused


def test_what_a_plain_send_may_not_do_is_refused_here_too(node: Node, producer: Producer, topic: str) -> None:
    refused = ask(node, "dispatcher-memory", {"op": "send", "topic": topic, "properties": {"DELAY": "3"}}, b"x")
    assert (refused["code"], refused["outcome"]) == ("MESSAGE_ILLEGAL", "not_stored")
    further = {"op": "send", "topic": topic, "properties": {"INNER_MULTI_DISPATCH": "%LMQ%a"}}
    assert ask(node, "dispatcher-memory", further, b"x")["code"] == "MESSAGE_ILLEGAL"
    assert ask(node, "dispatcher-memory", {"op": "batch", "topic": topic}, b"x")["code"] == "UNKNOWN_OP"
    for size in (SEGMENT - 65_536, SEGMENT):
        producer.send(topic, b"small")
        with pytest.raises(InvalidMessageError):
            producer.send(topic, bytes(size))
        with pytest.raises(InvalidMessageError):
            producer.send_batch(topic, [bytes(size)])
        assert ask(node, "dispatcher-memory", {"op": "send", "topic": topic}, bytes(size))["code"] == "MESSAGE_ILLEGAL"
    assert (
        ask(node, "dispatcher-memory", {"op": "send", "topic": topic, "ack": "replicated"}, b"x")["code"]
        == "INVALID_PARAMETER"
    )
    assert ask(node, "dispatcher-memory", {"op": "pull", "topic": topic})["code"] == "UNKNOWN_OP"
    assert (
        ask(node, "dispatcher-memory", {"op": "send", "topic": "nobody knows it"}, b"x")["code"] == "INVALID_PARAMETER"
    )
    assert ask(node, "dispatcher-memory", {"op": "send", "topic": "unknown"}, b"x")["code"] == "TOPIC_NOT_EXIST"
    hello = ask(node, "dispatcher-memory", {"op": "hello"})
    assert hello["max_run_bytes"] == BUDGET // 4 > TARGET_RUN_BYTES
    too_much = bytes(hello["max_run_bytes"] + 1)
    assert ask(node, "dispatcher-memory", {"op": "append", "topic": topic, "queue": 0, "count": 1}, too_much)[
        "code"
    ] == ("FRAME_TOO_LARGE")


def test_nonsense_gets_an_answer_and_harms_nothing(node: Node, producer: Producer, topic: str) -> None:
    """Whatever comes in: an answer about the request, the process goes on, and nothing is stored."""
    producer.send(topic, b"before")
    before = node.row("dispatcher-memory")
    odd: tuple[Any, ...] = (None, True, -1, 1 << 62, 1.5, "", "x" * 300, [], ["flushed"], {}, {"a": 1})
    context = zmq.Context()
    try:
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.RCVTIMEO, 10_000)
        sock.connect(node.endpoints()["dispatcher-memory"])
        for garbage in (
            b"",
            b"{",
            b"[]",
            b"\xff" * 100,
            b'{"v":1}',
            b'{"v":2,"op":"send","id":1}',
            b'{"v":1,"op":7,"id":1}',
        ):
            sock.send_multipart([garbage, b"x"])
            assert orjson.loads(sock.recv_multipart()[0])["ok"] is False
        for op in ("send", "append", "hello"):
            for field in ("topic", "queue", "ack", "properties", "flag", "sys_flag", "born", "count"):
                for value in odd:
                    if op == "hello" or (field, value) in (("properties", None), ("properties", {}), ("queue", -1)):
                        continue
                    header = {"v": 1, "id": 1, "op": op, "topic": topic, "queue": 7, "count": 1, field: value}
                    sock.send_multipart([orjson.dumps(header), b"\xff" * 91])
                    assert orjson.loads(sock.recv_multipart()[0])["outcome"] == "not_stored", (op, field, value)
        sock.send_multipart([orjson.dumps({"v": 1, "id": 1, "op": "send", "topic": topic})])
        assert orjson.loads(sock.recv_multipart()[0])["code"] == "BAD_HEADER"
    finally:
        context.destroy(linger=0)
    assert producer.send(topic, b"after").queue_offset == 1
    after = node.row("dispatcher-memory")
    assert (after["pid"], after["restarts"]) == (before["pid"], before["restarts"])


def test_the_wrong_process_names_the_right_one(node: Node, admin: Admin, producer: Producer, topic: str) -> None:
    there = ask(node, "writer", {"op": "send", "topic": topic}, b"x")
    assert (there["code"], there["endpoint"], there["outcome"]) == ("WRONG_ENDPOINT", "memory", "not_stored")
    producer.send("durable", b"x")
    back = ask(node, "dispatcher-memory", {"op": "append", "topic": "durable", "queue": 0, "count": 1}, b"x")
    assert (back["code"], back["endpoint"], back["outcome"]) == ("WRONG_ENDPOINT", "writer", "not_stored")


def test_a_producer_follows_a_topic_that_is_made_again_as_the_other_kind(
    node: Node, admin: Admin, producer: Producer
) -> None:
    sends: tuple[Callable[[], Any], ...] = (
        lambda: producer.send("changes", b"x"),
        lambda: producer.send_batch("changes", [b"x"] * 3),
        lambda: producer.send("changes", b"x", queue=0),
    )
    for send in sends:
        for attributes, ack in ((IN_MEMORY, "memory"), ({}, "flushed"), (IN_MEMORY, "memory")):
            admin.topic_create("changes", 1, attributes=attributes)
            result = send()
            first = result if not hasattr(result, "acks") else result[0]
            assert (first.ack, first.queue_offset) == (ack, 0)
            if attributes:
                assert len(consume(node, "changes", 1)) >= 1, admin.offsets("changes")
            admin.topic_delete("changes")
    # A pipelined send may meet the change; it then fails as not stored, and the next one finds the way.
    admin.topic_create("changes", 1)
    outcomes = set()
    for _ in range(50):
        try:
            producer.send_async("changes", b"y").result(10)
            break
        except SendError as error:
            outcomes.add(error.outcome)
    assert outcomes <= {Outcome.NOT_STORED}
    admin.topic_delete("changes")


# ---------------------------------------------------------------- the budget


def test_the_budget_is_held_under_a_producer_of_five_times_its_size(node: Node, producer: Producer, topic: str) -> None:
    """Sampled from outside all the while: never more than 5 % above the budget. Between two batches, when no file comes
    or goes under the look: used to 95 % at least, once it was full.
    """
    folder = folder_of(node)
    samples: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            samples.append(allocated(folder))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    bodies = [os.urandom(1024) for _ in range(500)]
    sent = 0
    between: list[int] = []
    try:
        while sent * 1024 < 5 * BUDGET:
            results = producer.send_batch(topic, bodies)
            assert results[0].queue_offset == sent
            sent += len(results)
            between.append(allocated(folder))
    finally:
        done.set()
        watcher.join()
    assert len(samples) > 50
    assert max(samples) <= 1.05 * BUDGET, f"{max(samples)} bytes at most, {len(samples)} samples"
    full = between[next(index for index, one in enumerate(between) if one > 0.95 * BUDGET) :]
    assert len(full) > 20
    assert 0.95 * BUDGET <= min(full) <= max(full) <= 1.05 * BUDGET, f"from {min(full)} to {max(full)} bytes"
    with Admin(node.address) as admin:
        use = admin.memory_use(topic)
        ((_, low, high, _),) = admin.offsets(topic)
    assert use["budget_bytes"] == BUDGET
    assert abs(use["used_bytes"] - allocated(folder)) <= 4096  # the owner file does not count
    assert use["topic_evicted_segments"] > 0
    assert (high, high - low > 10_000) == (sent, True)
    found = consume(node, topic, high - low)
    assert [one.queue_offset for one in found] == list(range(low, high))
    assert [one.body for one in found[-500:]] == bodies


def test_a_consumer_that_is_too_slow_is_told_of_the_gap_and_goes_on(node: Node, producer: Producer, topic: str) -> None:
    bodies = [bytes(1000)] * 1000
    producer.send_batch(topic, bodies, queue=0)
    with Consumer(topic, group="slow", node=node.address, start="earliest", mode="bytes") as consumer:
        assert consumer.poll(max_messages=10, timeout_s=5)[0].queue_offset == 0
        total = 1000
        while total * 1000 < 2 * BUDGET:
            producer.send_batch(topic, bodies, queue=0)
            total += 1000
        last = -1
        deadline = time.monotonic() + 20
        while last < total - 1 and time.monotonic() < deadline:
            for message in consumer.poll(timeout_s=1):
                assert message.queue_offset > last
                last = message.queue_offset
        assert last == total - 1
        assert [gap.reason for gap in consumer.gaps] == ["OFFSET_TOO_SMALL"]


def test_deleting_a_topic_frees_its_memory(node: Node, admin: Admin, producer: Producer, topic: str) -> None:
    producer.send_batch(topic, [bytes(1000)] * 4000, queue=0)
    consume(node, topic, 1000, group="stays")
    before = admin.memory_use()["used_bytes"]
    mine = admin.memory_use(topic)["topic_used_bytes"]
    assert mine > 4_000_000
    admin.topic_delete(topic)
    eventually(lambda: admin.memory_use()["used_bytes"] <= before - mine, "the memory is free", 5)
    assert not (folder_of(node) / "topics" / topic).exists()
    admin.topic_create(topic, 1, attributes=IN_MEMORY)
    assert producer.send(topic, b"new").queue_offset == 0
    assert [one.body for one in consume(node, topic, 1, group="stays")] == [b"new"]


# ---------------------------------------------------------------- what people see


def test_the_command_creates_and_describes(node: Node, producer: Producer) -> None:
    made = commitmq("topic", "create", "cli-mem", "--queues", "2", "--memory", "--node", node.address)
    assert (made.returncode, "storage.type=memory" in made.stdout) == (0, True), made.stderr
    again = commitmq(
        "topic", "create", "cli-mem", "--queues", "2", "--attribute", "storage.type=memory", "--node", node.address
    )
    assert "exists already" in again.stdout, again.stderr
    refused = commitmq("topic", "create", "cli-mem", "--queues", "2", "--node", node.address)
    assert refused.returncode != 0
    assert "other settings" in refused.stderr
    for wrong in (("--attribute", "nonsense"), ("--memory", "--attribute", "storage.type=log")):
        assert commitmq("topic", "create", "x", *wrong, "--node", node.address).returncode == 2
    producer.send("cli-mem", b"hello")
    text = commitmq("topic", "describe", "cli-mem", "--node", node.address).stdout
    assert "lost when the node stops" in text
    assert "of 16.0 MiB" in text
    report = json.loads(commitmq("topic", "describe", "cli-mem", "--json", "--node", node.address).stdout)
    assert report["memory"]["topic_used_bytes"] > 0
    assert sum(row["max"] for row in report["queues"]) == 1
    read = commitmq("consume", "cli-mem", "--from", "earliest", "--node", node.address)
    assert "hello" in read.stdout, read.stderr


def test_bench_compares_both_kinds(node: Node) -> None:
    arguments = ("bench", "memory", "--messages", "200", "--batch", "50", "--count", "10", "--repeat", "1")
    report = json.loads(commitmq(*arguments, "--json", "--node", node.address).stdout)
    names = [one["name"] for one in report["result"]["kinds"]]
    assert names == ["durable, ack flushed", "durable, ack memory", "memory topic"]
    assert all(one["messages_per_s"]["median"] > 0 < one["single"]["p50_us"] for one in report["result"]["kinds"])
    text = commitmq(*arguments, "--node", node.address)
    assert text.returncode == 0, text.stderr
    assert "memory topic" in text.stdout


def test_without_the_process_memory_topics_are_refused(tmp_path: Path) -> None:
    with start_node(tmp_path, "memory.enable=false") as node, Admin(node.address) as admin:
        assert "memory" not in admin.metadata()["endpoints"]
        with pytest.raises(ProtocolError, match=r"memory\.enable"):
            admin.topic_create("mem", 1, attributes=IN_MEMORY)
        with Producer(node.address) as producer:
            producer.send("durable", b"x")
