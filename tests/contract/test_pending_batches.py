"""Goal: batches sent without waiting are stored as synchronous ones are, in order, and what is said of each is true.

Method: a real node; what was stored is read back. The writer is killed while batches are on their way.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from commitmq import (
    Admin,
    BatchSendError,
    ExactlyOnce,
    InvalidMessageError,
    Message,
    Outcome,
    Producer,
    Reader,
)
from commitmq.client.sending.delivery import WINDOW
from messages_stored import read_all, while_the_writer_dies
from nodes import Node, start_node

LIMIT = 4 << 20  # commit_log.max_message_bytes


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("batches"), "topics.default_queues=4") as made:
        yield made


@pytest.mark.parametrize("ack", ["flushed", "memory"])
def test_batches_to_one_queue_are_stored_in_order(node: Node, ack: str) -> None:
    topic = f"ordered-{ack}"
    with Producer(node.address, ack=ack, max_pending=500) as producer:
        futures = [
            producer.send_batch_async(topic, [b"%d/%d" % (part, number) for number in range(100)], queue=1)
            for part in range(50)
        ]
        producer.flush()
        assert all(one.done() for one in futures)
        results = [one.result() for one in futures]
    assert [one.body for one in sorted(read_all(node, topic), key=lambda one: one.queue_offset)] == [
        b"%d/%d" % (part, number) for part in range(50) for number in range(100)
    ]
    assert [result[0].queue_offset for result in results] == list(range(0, 5000, 100))
    assert {one.ack for result in results for one in result} == {ack}


def test_keys_tags_and_sharding_go_along(node: Node) -> None:
    with Producer(node.address) as producer:
        keys = [f"key-{number}" for number in range(300)]
        future = producer.send_batch_async(
            "along", [key.encode() for key in keys], tags="t", keys=keys, properties={"a": "b"}, sharding_keys=keys
        )
        single = producer.send_async("along", b"single")
        result = future.result(30)
        single.result(30)
    found = {(one.queue_id, one.queue_offset): one for one in read_all(node, "along") if one.body != b"single"}
    assert len(found) == 300
    for key, one in zip(keys, result, strict=True):
        message = found[one.queue, one.queue_offset]
        assert (message.body, message.keys, message.tags, message.properties["a"]) == (key.encode(), [key], "t", "b")


@pytest.mark.parametrize("attributes", [{"storage.type": "memory"}, {"queue.type": "BatchCQ"}], ids=["memory", "inner"])
def test_topics_of_other_kinds_take_them_too(node: Node, attributes: dict[str, str]) -> None:
    topic = next(iter(attributes)).replace(".", "-")
    with Admin(node.address) as admin:
        admin.topic_create(topic, 2, attributes=attributes)
    with Producer(node.address, ack="memory") as producer:
        futures = [producer.send_batch_async(topic, [b"%d" % (part * 10 + n) for n in range(10)]) for part in range(20)]
        for one in futures:
            assert len(one.result(30)) == 10
    with Reader(topic, node=node.address) as consumer:
        seen: set[bytes] = set()
        deadline = time.monotonic() + 30
        while len(seen) < 200:
            assert time.monotonic() < deadline, len(seen)
            seen |= {one.body for one in consumer.poll(0.5)}
    assert seen == {b"%d" % number for number in range(200)}


def test_bad_input_is_told_at_once_or_by_the_future(node: Node) -> None:
    with Producer(node.address) as producer:
        with pytest.raises(InvalidMessageError):
            producer.send_batch_async("bad topic!", [b"x"])
        with pytest.raises(InvalidMessageError):
            producer.send_batch_async("fine", [b"x"], tags=["a", "b"])
        for single in (b"abc", "abc", Message(b"abc")):
            with pytest.raises(InvalidMessageError, match="not a single one"):
                producer.send_batch_async("fine", single)  # type: ignore[arg-type]
        assert list(producer.send_batch_async("fine", []).result()) == []
        with pytest.raises(InvalidMessageError, match="nothing of the batch was sent"):
            producer.send_batch_async("fine", [b"y", b"x" * (LIMIT + 1)]).result(30)
        assert len(producer.send_batch_async("fine", [b"z"]).result(30)) == 1
    assert [one.body for one in read_all(node, "fine")] == [b"z"]


def test_an_idempotent_producer_numbers_them_in_the_order_of_the_calls(node: Node) -> None:
    """Single messages among them, too: what a program sends again must get the same numbers."""
    with Producer(node.address, delivery=ExactlyOnce()) as producer:
        futures: list[Future[Any]] = []
        for number in range(20):
            futures.append(producer.send_batch_async("numbered", [b"%d a" % number, b"%d b" % number], queue=0))
            futures.append(producer.send_async("numbered", b"%d c" % number, queue=0))
        assert all(one.result(30) for one in futures)
    bodies = [one.body for one in sorted(read_all(node, "numbered"), key=lambda one: one.queue_offset)]
    assert bodies == [b"%d %c" % (number, letter) for number in range(20) for letter in b"abc"]


def test_every_batch_has_an_outcome_when_the_writer_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Acknowledged batches are there once, not stored ones are not there, and of the rest what is said is kept."""
    with start_node(tmp_path_factory.mktemp("killed")) as node:
        sent = {}
        with Producer(node.address, ack="memory", timeout_s=20) as producer:
            for number in while_the_writer_dies(node):
                bodies = [b"%d.%d" % (number, at) for at in range(200)]
                sent[number] = producer.send_batch_async("killed", bodies, queue=0)
            producer.flush(30)
            assert len(producer.send_batch_async("killed", [b"last"]).result(30)) == 1
        stored = Counter(one.body for one in read_all(node, "killed"))
        assert set(stored.values()) == {1}, "nothing is stored twice"
        outcomes: Counter[str] = Counter()
        for number, future in sent.items():
            there = sum(b"%d.%d" % (number, at) in stored for at in range(200))
            error = future.exception(0)
            if error is None:
                assert there == 200, "acknowledged and lost"
                outcomes["acknowledged"] += 1
                continue
            assert isinstance(error, BatchSendError)
            outcomes[error.outcome] += 1
            assert error.stored <= there <= error.stored + error.unknown
            if error.outcome is Outcome.NOT_STORED:
                assert there == 0
        assert outcomes["acknowledged"] > 0, outcomes
        assert outcomes[Outcome.UNKNOWN] <= 3 * WINDOW, "only what was in flight"


def test_what_the_caller_does_with_its_lists_afterwards_changes_nothing(node: Node) -> None:
    with Producer(node.address) as producer:
        bodies, keys = [b"kept"] * 100, ["k"] * 100
        futures = [producer.send_batch_async("lists", bodies, keys=keys, queue=0) for _ in range(5)]
        bodies[:] = [b"changed"]
        keys.clear()
        assert [len(one.result(30)) for one in futures] == [100] * 5
        producer.flush()
        for queue in (-7, "1", True):
            with pytest.raises(InvalidMessageError, match="is not a queue id"):
                producer.send_batch_async("lists", [b"x"], queue=queue)  # type: ignore[arg-type]
            with pytest.raises(InvalidMessageError, match="is not a queue id"):
                producer.send_batch("lists", [b"x"], queue=queue)  # type: ignore[arg-type]
    assert {one.body for one in read_all(node, "lists")} == {b"kept"}


def test_synchronous_batches_of_other_threads_do_not_keep_one_from_being_sent(node: Node) -> None:
    with Producer(node.address, ack="memory") as producer:
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                producer.send_batch("busy", [b"x" * 100] * 200)

        threads = [threading.Thread(target=busy) for _ in range(3)]
        for one in threads:
            one.start()
        try:
            for _ in range(5):
                assert len(producer.send_batch_async("quiet", [b"y"]).result(20)) == 1
                assert producer.send_async("quiet", b"z").result(20)
        finally:
            stop.set()
            for one in threads:
                one.join()
