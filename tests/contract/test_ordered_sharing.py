"""Goal: a queue that a group receives in order hands out nothing while an earlier message is out; each message comes again in
its place until it is acknowledged.

Method: real nodes with short invisible times; consumers by hand and with handlers; nodes that are killed while messages are
out; RocketMQ's own state.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

import commitmq
from commitmq import Admin, Message, Producer, ShareConsumer
from commitmq.errors import ProtocolError
from commitmq.protocol.directory import Directory
from commitmq.semantics.pop import OrderState, table_from_json
from commitmq.store.layout import StoreLayout
from commitmq.store.metadata import journal as orders_journal
from commitmq.store.metadata import json_config
from delays import everything
from golden_stores import unpack
from nodes import Node, eventually, start_node, started

pytestmark = pytest.mark.timeout(120)
INVISIBLE_S = 2.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("ordered")) as made:
        yield made


def fill(node: Node, topic: str, count: int, queues: int = 1) -> list[bytes]:
    with Admin(node.address) as admin:
        admin.topic_create(topic, queues)
    many = [b"%d" % number for number in range(count)]
    with Producer(node.address) as producer:
        for queue in range(queues):
            producer.send_batch(topic, many, queue=queue)
    wait_until_readable(node, topic, count * queues)
    return many


def wait_until_readable(node: Node, topic: str, count: int) -> None:
    """A flushed message is readable a moment later."""
    with Admin(node.address) as admin:
        eventually(lambda: sum(one.max for one in admin.offsets(topic)) == count, "all can be read")


def sharer(node: Node, topic: str, invisible_s: float = 60, group: str = "") -> ShareConsumer:
    return ShareConsumer(topic, group=group or f"of-{topic}", node=node.address, invisible_s=invisible_s, ordered=True)


def bodies(many: list[Message]) -> list[int]:
    return [int(one.body) for one in many]


def states(node: Node, topic: str) -> dict[int, OrderState]:
    return orders_journal.read(StoreLayout(node.store))[topic, f"of-{topic}"]


def test_a_queue_hands_out_nothing_while_messages_of_it_are_out(node: Node) -> None:
    fill(node, "blocks", 8)
    with sharer(node, "blocks") as one, sharer(node, "blocks") as other:
        first = one.receive(4, 20)  # the first receive starts the process pop
        assert bodies(first) == [0, 1, 2, 3]
        assert other.receive(4, 0.3) == []
        assert one.ack(first[:2]) == []
        assert one.ack(first[3]) == []
        assert other.receive(4, 0.3) == [], "one of them is still out"
        began = time.monotonic()
        threading.Timer(0.5, lambda: one.ack(first[2])).start()
        second = other.receive(32, 10)
        assert bodies(second) == [4, 5, 6, 7]
        assert time.monotonic() - began < 5, "the ack wakes who waits"
        assert one.ack(first[0]) == [first[0]], "it was acknowledged before"
        assert other.ack(second) == []
        assert other.receive(1, 0.3) == []
    with Admin(node.address) as admin:
        assert [(one.queue, one.committed) for one in admin.group_lag("of-blocks")] == [(0, 8)]


def test_queues_block_each_for_itself(node: Node) -> None:
    fill(node, "several", 3, queues=2)
    with sharer(node, "several") as consumer:
        first = consumer.receive(3, 5)
        assert bodies(first) == [0, 1, 2]
        assert len({one.queue_id for one in first}) == 1
        second = consumer.receive(3, 5)
        assert bodies(second) == [0, 1, 2]
        assert {one.queue_id for one in first + second} == {0, 1}
        assert consumer.ack(first + second) == []


def test_what_is_not_acknowledged_comes_again_in_its_place(node: Node) -> None:
    fill(node, "again", 6)
    with sharer(node, "again", INVISIBLE_S) as consumer:
        began = time.monotonic()
        first = consumer.receive(4, 5)
        assert consumer.ack([first[0], first[2]]) == []
        second = consumer.receive(32, 10)
        assert INVISIBLE_S - 0.1 <= time.monotonic() - began < INVISIBLE_S + 3
        assert [(int(one.body), one.reconsume_times) for one in second] == [(1, 1), (3, 1), (4, 0), (5, 0)]
        assert {one.stored_topic for one in second} == {"again"}
        assert consumer.ack(first[1]) == [first[1]], "its first receipt is over"
        third = consumer.receive(32, 10)
        assert [(int(one.body), one.reconsume_times) for one in third] == [(1, 2), (3, 2), (4, 1), (5, 1)]
        assert consumer.ack(third) == []
        assert consumer.receive(1, INVISIBLE_S + 0.5) == []


def test_a_message_that_is_given_back_holds_up_its_queue(node: Node) -> None:
    fill(node, "back", 3)
    with sharer(node, "back") as consumer:
        first = consumer.receive(3, 5)
        assert consumer.nack(first) == []
        second = consumer.receive(3, 5)
        assert [(int(one.body), one.reconsume_times) for one in second] == [(0, 1), (1, 1), (2, 1)]
        assert second[0].ack()
        began = time.monotonic()
        assert consumer.nack(second[1], 2.5) == []
        assert consumer.nack(second[2]) == []
        third = consumer.receive(3, 10)
        assert bodies(third) == [1, 2]
        assert 2.4 <= time.monotonic() - began < 6
        assert consumer.ack(third) == []


def test_an_extended_message_stays_invisible(node: Node) -> None:
    fill(node, "long", 2)
    with sharer(node, "long", INVISIBLE_S) as consumer:
        (first,) = consumer.receive(1, 5)
        for _ in range(3):
            assert consumer.receive(1, INVISIBLE_S / 2) == []
            assert first.extend()
        assert first.ack()
        assert bodies(consumer.receive(2, 5)) == [1]


def test_the_last_try_is_a_dead_letter_and_frees_the_queue(node: Node) -> None:
    fill(node, "poison", 3)
    with sharer(node, "poison") as consumer:
        for times in range(17):
            (message,) = consumer.receive(1, 5)
            assert (message.body, message.reconsume_times) == (b"0", times)
            assert message.nack()
        (message,) = consumer.receive(1, 5)
        assert message.body == b"1"
        assert consumer.nack(message, dead=True) == []
        assert bodies(consumer.receive(1, 5)) == [2]
    assert [one.body for one in everything(node, "%DLQ%of-poison")] == [b"0", b"1"]


def test_a_group_is_ordered_or_not(node: Node) -> None:
    fill(node, "kinds", 2)
    with sharer(node, "kinds") as consumer:
        (message,) = consumer.receive(1, 5)
        other = ShareConsumer("kinds", group="of-kinds", node=node.address)
        with other, pytest.raises(ProtocolError, match="in order"):
            other.receive(1, 0)
        plain = ShareConsumer("kinds", group="plain", node=node.address)
        (unordered,) = plain.receive(1, 5)
        mixed = [["kinds", message._receipt.handle], ["kinds", unordered._receipt.handle]]
        with pytest.raises(ProtocolError, match="or none of them"):
            plain._settler.request("ack", {"group": "plain", "receipts": mixed}, timeout_s=5)
        plain.close()
        assert message.ack()


def test_a_repeated_receive_gets_the_same_messages(node: Node) -> None:
    """Its answer was lost, as far as the node knows."""
    fill(node, "repeated", 4)
    with sharer(node, "repeated") as consumer:
        fields = {"group": "of-repeated", "topics": ["repeated"], "max_messages": 3, "invisible_ms": 60_000}
        attempt = {"ordered": True, "attempt": "the first"}
        answers = [consumer._receiver.request("pop", {**fields, **attempt}, timeout_s=5)[0] for _ in range(2)]
        assert [part["count"] for one in answers for part in one["parts"]] == [3, 3]
        assert answers[1]["parts"][0]["counts"] == []
        assert consumer.receive(3, 0.3) == []
        attempt["attempt"] = "x" * 129
        with pytest.raises(ProtocolError, match="attempt"):
            consumer._receiver.request("pop", {**fields, **attempt}, timeout_s=5)


def test_a_queue_can_be_named(node: Node) -> None:
    fill(node, "named", 2, queues=3)
    with sharer(node, "named") as consumer:
        fields = {"group": "of-named", "topics": ["named"], "invisible_ms": 60_000, "ordered": True}
        answer, _ = consumer._receiver.request("pop", {**fields, "queue": 1}, timeout_s=5)
        assert [part["queue"] for part in answer["parts"]] == [1]
        with pytest.raises(ProtocolError, match="queues 0 to 2"):
            consumer._receiver.request("pop", {**fields, "queue": 3}, timeout_s=5)


def test_a_filter_passes_over_messages(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("mixed", 1)
    with Producer(node.address) as producer:
        for number in range(20):
            producer.send("mixed", b"%d" % number, tags="even" if number % 2 == 0 else "odd")
    wait_until_readable(node, "mixed", 20)
    with ShareConsumer("mixed", group="evens", node=node.address, filter="even", ordered=True) as consumer:
        first = consumer.receive(4, 5)
        assert bodies(first) == [0, 2, 4, 6]
        assert consumer.nack(first[1:]) == []
        assert first[0].ack()
        second = consumer.receive(32, 5)
        assert bodies(second) == list(range(2, 20, 2))
        assert consumer.ack(second) == []
        assert consumer.receive(32, 0.3) == []


def test_handlers_keep_the_order_of_each_queue(node: Node) -> None:
    many = fill(node, "handled", 25, queues=3)
    done: dict[int, list[int]] = {0: [], 1: [], 2: []}
    tries: dict[tuple[int, int], int] = {}
    running: set[int] = set()
    lock = threading.Lock()
    with sharer(node, "handled", 30) as consumer:

        def handle(message: Message) -> bool:
            queue, number = message.queue_id, int(message.body)
            with lock:
                assert queue not in running, "two handlers for one queue"
                running.add(queue)
                tries[queue, number] = tries.get((queue, number), 0) + 1
            time.sleep(0.002)
            with lock:
                running.discard(queue)
                if number % 10 == 4 and tries[queue, number] < 3:
                    return False
                done[queue].append(number)
                if sum(map(len, done.values())) == 3 * len(many):
                    threading.Thread(target=consumer.close).start()
            return True

        consumer.run(handle, workers=6, backoff=0)
    assert done == {queue: list(range(25)) for queue in range(3)}
    assert {key: count for key, count in tries.items() if count > 1} == {
        (queue, number): 3 for queue in range(3) for number in (4, 14, 24)
    }, "a message behind one that failed was handled before it was its turn"


def test_a_handler_that_never_succeeds_makes_a_dead_letter(node: Node) -> None:
    fill(node, "hopeless", 3)
    seen: list[bytes] = []
    with Admin(node.address) as admin:
        admin.group_config("of-hopeless", {"retryMaxTimes": 2})
    with sharer(node, "hopeless", 30) as consumer:

        def handle(message: Message) -> bool:
            seen.append(message.body)
            if message.body == b"2":
                threading.Thread(target=consumer.close).start()
            return message.body != b"0"

        consumer.run(handle, workers=3, backoff=0)
        assert consumer.handler_counts.dead == 1
    assert seen == [b"0"] * 3 + [b"1", b"2"]
    assert [one.body for one in everything(node, "%DLQ%of-hopeless")] == [b"0"]


def test_the_twin_for_asyncio(node: Node) -> None:
    fill(node, "looped", 12)

    async def main() -> list[int]:
        seen: list[int] = []
        async with commitmq.connect_async(node.address) as connection:
            consumer = await connection.share_consumer("looped", group="of-looped", ordered=True).start()
            (first,) = await consumer.receive(1, 5)
            assert await consumer.ack(first) == []

            async def handle(message: Message) -> bool:
                seen.append(int(message.body))
                if len(seen) == 12:
                    await consumer.close()
                return seen.count(5) != 1 or seen[-1] != 5

            await consumer.run(handle, workers=3, backoff=0)
        return seen

    assert asyncio.run(main()) == [1, 2, 3, 4, 5, *range(5, 12)]


def test_what_was_acknowledged_behind_a_gap_comes_again_if_the_receive_says_so(node: Node) -> None:
    fill(node, "gap", 4)
    directory = Directory(node.address)
    with sharer(node, "gap", 60) as consumer:
        first, middle, last = consumer.receive(3, 5)
        assert consumer.ack([first, last]) == []
        assert middle.nack()
        channel, _ = directory.connect("pop", time.monotonic() + 5)
        fields = {"group": "of-gap", "topics": ["gap"], "max_messages": 3, "invisible_ms": 60_000, "ordered": True}
        answer = channel.request("pop", {**fields, "repeats_acked": True}, timeout_s=5)[0]
        assert [part["count"] for part in answer["parts"]] == [3]
        assert states(node, "gap")[0].offsets == (1, 2, 3)
        assert states(node, "gap")[0].acked_bits == 0
        channel.close()
    directory.close()


def test_a_reset_ends_the_wait_for_what_is_out(node: Node) -> None:
    fill(node, "reset", 10)
    with sharer(node, "reset", 60) as consumer:
        first = consumer.receive(6, 5)
        assert consumer.ack(first) == []
        assert bodies(consumer.receive(2, 5)) == [6, 7]
        directory = Directory(node.address)
        channel, _ = directory.connect("coordinator", time.monotonic() + 5)
        reset = {"group": "of-reset", "offsets": [["reset", 0, 3]], "reset": True}
        channel.request("offset.commit", reset, timeout_s=5)
        channel.close()
        directory.close()
        assert bodies(consumer.receive(4, 0)) == [3, 4, 5, 6]


def test_nothing_changes_by_a_kill(tmp_path: Path) -> None:
    with started(Node(tmp_path / "store")) as node:
        fill(node, "kept", 6)
        with sharer(node, "kept") as consumer:
            first = consumer.receive(3, 5)
            assert first[1].ack()
            node.kill_all()
            assert node.start().returncode == 0
            assert consumer.receive(3, 1) == [], "two of them are out"
            assert states(node, "kept")[0].acked_bits == 0b010
            assert consumer.ack([first[0], first[2]]) == [], "the receipts are good"
            second = consumer.receive(3, 5)
            assert bodies(second) == [3, 4, 5]
            assert consumer.ack(second) == []
        assert states(node, "kept")[0].is_done()


def test_the_next_topic_of_a_name_begins_anew(node: Node) -> None:
    fill(node, "remade", 4)
    with sharer(node, "remade") as consumer:
        assert bodies(consumer.receive(2, 5)) == [0, 1]
    with Admin(node.address) as admin:
        admin.topic_delete("remade")
    fill(node, "remade", 3)
    with sharer(node, "remade") as consumer:
        assert bodies(consumer.receive(3, 10)) == [0, 1, 2]


def test_rocketmqs_file_follows_and_is_whole_after_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "store" / "config" / "consumerOrderInfo.json"

    def in_file() -> dict[int, OrderState]:
        if not path.exists():
            return {}
        return table_from_json(json_config.loads(path.read_text(encoding="utf-8"))).get(("follows", "of-follows"), {})

    with started(Node(tmp_path / "store")) as node:
        fill(node, "follows", 6)
        with sharer(node, "follows") as consumer:
            first = consumer.receive(3, 5)
            eventually(lambda: in_file() == states(node, "follows"), "the file follows")
            assert consumer.ack(first[1]) == []
            eventually(lambda: in_file() and in_file()[0].acked_bits == 0b010, "and follows again")
            assert consumer.ack([first[0], first[2]]) == []
            assert states(node, "follows")[0].is_done(), "at once"
        assert node.stop().returncode == 0
    assert in_file()[0].is_done()
    journal = orders_journal.OrdersJournal.read(orders_journal.journal_path(StoreLayout(tmp_path / "store")))
    assert journal is not None
    assert journal.changes == []


def test_a_damaged_file_is_kept_aside(tmp_path: Path) -> None:
    with started(Node(tmp_path / "store")) as node:
        fill(node, "broken", 2)
        path = node.store / "config" / "consumerOrderInfo.json"
        path.write_text('{"table":{"broken@of-broken":{0:{"o":["x"]}}}}')
        with sharer(node, "broken") as consumer:
            assert bodies(consumer.receive(2, 5)) == [0, 1]
        assert '"x"' in path.with_name(path.name + ".damaged").read_text(encoding="utf-8")


def test_what_rocketmq_handed_out_in_order_goes_on(tmp_path: Path) -> None:
    golden = unpack("semantics", tmp_path)
    expected = orjson.loads((tmp_path / "expected.json").read_bytes())["messages"]
    before = json_config.loads((golden.root / "config" / "consumerOrderInfo.json").read_text(encoding="utf-8"))
    state = table_from_json(before)["PendingPopOrder", "Pending_popfifo"]
    assert {one["topic"] for one in expected if "order" in one["kind"] and "pop" in one["kind"]} <= {"PendingPopOrder"}
    found: dict[int, list[int]] = {}
    with (
        started(Node.bare(golden.root, "network.port=0")) as node,
        ShareConsumer("PendingPopOrder", group="Pending_popfifo", node=node.address, ordered=True) as consumer,
    ):
        while many := consumer.receive(32, 3 if found else 20):
            for one in many:
                found.setdefault(one.queue_id, []).append(one.queue_offset)
            assert consumer.ack(many) == []
    now = time.time_ns() // 1_000_000
    for queue, last in state.items():
        if not last.is_blocked(now):
            out = [offset for offset in last.offsets if last.is_out(offset, last.pop_time)]
            assert found[queue][: len(out)] == out, "in their order, without those that were acknowledged"
    assert found
