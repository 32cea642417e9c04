"""Goal: a message that a handler does not accept comes again and becomes a dead letter, on a real node, with nothing lost.

Method: a real node with its schedule process. The back-off is the shortest delay level, 1 second.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from commitmq import Admin, Consumer, ConsumeResult, Message, Producer, Reader
from nodes import Node, eventually, start_node

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("retries"), "groups.heartbeat_interval_ms=200") as made:
        yield made


def dead_letters(node: Node, group: str, count: int) -> list[Message]:
    found: list[Message] = []
    with Reader(f"%DLQ%{group}", node=node.address) as reader:
        deadline = time.monotonic() + 30
        while len(found) < count and time.monotonic() < deadline:
            found += reader.poll(1.0)
    return found


def test_retries_and_dead_letters(node: Node) -> None:
    bodies = [b"%03d" % number for number in range(40)]
    with Producer(node.address) as producer:
        producer.send_batch("orders", bodies, tags="a")
    tries: dict[bytes, list[int]] = {}
    done: Counter[bytes] = Counter()
    lock = threading.Lock()

    def handle(message: Message) -> ConsumeResult | None:
        with lock:
            tries.setdefault(message.body, []).append(message.reconsume_times)
        assert message.topic == "orders"
        assert message.tags == "a"
        if message.body == b"007":
            return ConsumeResult.DEAD
        if message.body == b"013" or (message.body == b"021" and message.reconsume_times < 2):
            raise ValueError("not now")
        with lock:
            done[message.body] += 1
        return None

    with Consumer("orders", group="kitchen", node=node.address, filter="a") as consumer:
        thread = threading.Thread(
            target=consumer.run,
            args=(handle,),
            kwargs={"max_retries": 3, "backoff": 1, "on_error": lambda message, error: None},
        )
        thread.start()
        eventually(lambda: consumer.handler_counts.dead == 2, "two are dead letters", 60)
        eventually(lambda: len(done) == 38, "all others are done", 60)
        consumer.close()
        thread.join(60)
    assert done == Counter({body: 1 for body in bodies if body not in (b"007", b"013")})
    assert tries[b"007"] == [0]
    assert tries[b"013"] == [0, 1, 2, 3]
    assert tries[b"021"] == [0, 1, 2]
    dead = dead_letters(node, "kitchen", 2)
    assert {(message.body, message.properties["RETRY_TOPIC"]) for message in dead} == {
        (b"007", "orders"),
        (b"013", "orders"),
    }
    with Admin(node.address) as admin:
        assert sum(row.lag or 0 for row in admin.group_lag("kitchen")) == 0


def test_an_ordered_queue_goes_on_behind_a_dead_letter(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send_batch("line", [b"%d" % number for number in range(5)], queue=0)
    seen: list[tuple[int, int]] = []

    def handle(message: Message) -> bool:
        seen.append((message.queue_offset, message.reconsume_times))
        return message.queue_offset != 2

    with Consumer("line", group="line", node=node.address) as consumer:
        thread = threading.Thread(
            target=consumer.run, args=(handle,), kwargs={"ordered": True, "max_retries": 2, "backoff": 0.05}
        )
        thread.start()
        eventually(lambda: len(seen) == 7, "all were handled", 60)
        consumer.close()
        thread.join(60)
    assert seen == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (4, 0)]
    assert [(message.body, message.reconsume_times) for message in dead_letters(node, "line", 1)] == [(b"2", 3)], (
        "3 tries"
    )


def test_what_failed_survives_the_node_and_the_consumer(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send_batch("late", [b"%d" % number for number in range(20)])
    first = Consumer("late", group="late", node=node.address)
    thread = threading.Thread(target=first.run, args=(lambda message: False,), kwargs={"backoff": 5})
    thread.start()
    eventually(
        lambda: first.handler_counts.failed >= 20 and first.handler_counts.unfinished == 0, "all were sent back", 60
    )
    first.close()
    thread.join(60)
    node.stop()
    node.start()
    seen: Counter[bytes] = Counter()
    with Consumer("late", group="late", node=node.address) as second:
        thread = threading.Thread(target=second.run, args=(lambda message: seen.update([message.body]),))
        thread.start()
        eventually(lambda: len(seen) == 20, "all come again", 60)
        second.close()
        thread.join(60)
    assert max(seen.values()) == 1
