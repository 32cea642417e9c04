"""Goal: the consumers of a group share queues: each message goes to one of them, is acknowledged, or comes back in time.

Method: real nodes with short invisible times; consumers in threads; nodes that are stopped and killed while messages are in
flight.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import commitmq
from commitmq import Admin, CommitMQError, Consumer, Message, Producer, ShareConsumer, connect
from commitmq.errors import ProtocolError
from commitmq.protocol.directory import Directory
from delays import everything
from nodes import Node, eventually, start_node, started

pytestmark = pytest.mark.timeout(120)
INVISIBLE_S = 2.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("sharing")) as made:
        yield made


def fill(node: Node, topic: str, count: int, queues: int = 1) -> list[bytes]:
    with Admin(node.address) as admin:
        admin.topic_create(topic, queues)
    bodies = [b"%d" % number for number in range(count)]
    with Producer(node.address) as producer:
        producer.send_batch(topic, bodies)
    return bodies


def drain(consumer: ShareConsumer, wait_s: float, *, ack: bool = True) -> list[Message]:
    """All that comes until nothing comes for ``wait_s``."""
    found: list[Message] = []
    while many := consumer.receive(256, wait_s):
        found += many
        if ack:
            assert consumer.ack(many) == []
    return found


def drain_one(consumer: ShareConsumer, count: int) -> list[Message]:
    """The next ``count`` messages."""
    found: list[Message] = []
    while len(found) < count and (many := consumer.receive(count - len(found), 5)):
        found += many
    return found


def offsets_of(admin: Admin, group: str) -> set[tuple[str, int, int]]:
    return {(str(topic), int(queue), int(offset)) for topic, queue, offset in admin.group(group)["offsets"]}


def sharer(node: Node, topic: str, group: str, invisible_s: float = INVISIBLE_S) -> ShareConsumer:
    return ShareConsumer(topic, group=group, node=node.address, invisible_s=invisible_s)


def test_several_consumers_share_one_queue(node: Node) -> None:
    bodies = fill(node, "shared", 2_000)
    found: list[list[bytes]] = [[], [], []]

    def work(number: int) -> None:
        with sharer(node, "shared", "several", 30) as consumer:
            while many := consumer.receive(20, 1.0):
                found[number] += [one.body for one in many]
                assert consumer.ack(many) == []

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(body for part in found for body in part) == Counter(bodies)
    assert all(found), "one of them got nothing"


def test_what_is_not_acknowledged_comes_again_once(node: Node) -> None:
    fill(node, "again", 10)
    with sharer(node, "again", "later") as consumer:
        began = time.monotonic()
        first = consumer.receive(10, 5)
        assert len(first) == 10
        assert consumer.ack(first[:6]) == []
        assert consumer.receive(10, 0.5) == []
        second = drain(consumer, 3)
        assert time.monotonic() - began >= INVISIBLE_S
        assert sorted(one.body for one in second) == sorted(one.body for one in first[6:])
        assert {(one.topic, one.stored_topic, one.reconsume_times) for one in second} == {
            ("again", "%RETRY%later_again", 1)
        }
        assert consumer.ack(first[6:]) == first[6:], "the receipts of the first delivery are over"


def test_a_message_that_is_given_back_comes_at_once(node: Node) -> None:
    fill(node, "back", 1)
    with sharer(node, "back", "failing", 60) as consumer:
        for times in range(3):
            (message,) = consumer.receive(1, 5)
            assert message.reconsume_times == times
            assert message.nack()
            assert not message.nack(), "it was given back before"
        (message,) = consumer.receive(1, 5)
        assert message.ack()
        assert not message.ack()


def test_a_message_that_is_given_back_can_wait(node: Node) -> None:
    fill(node, "wait", 1)
    with sharer(node, "wait", "patient", 60) as consumer:
        (message,) = consumer.receive(1, 5)
        began = time.monotonic()
        assert message.nack(2.5)
        (message,) = consumer.receive(1, 10)
        assert 2.4 <= time.monotonic() - began < 6
        assert message.ack()


def test_an_extended_message_stays_invisible(node: Node) -> None:
    fill(node, "long", 2)
    with sharer(node, "long", "slow") as consumer:
        kept, left = consumer.receive(2, 5)
        until = time.monotonic() + 2 * INVISIBLE_S
        seen: list[bytes] = []
        while time.monotonic() < until:
            assert kept.extend()
            many = consumer.receive(10, 1)
            seen += [one.body for one in many]
            consumer.ack(many)
        assert seen == [left.body]
        assert kept.ack()
        assert consumer.receive(1, INVISIBLE_S + 0.5) == []


def test_the_last_try_is_a_dead_letter(node: Node) -> None:
    fill(node, "poison", 1)
    with sharer(node, "poison", "dying", 60) as consumer:
        for _ in range(17):
            (message,) = consumer.receive(1, 5)
            assert message.nack()
        assert consumer.receive(1, 1) == []
    assert [one.body for one in everything(node, "%DLQ%dying")] == [b"0"]


def test_a_group_is_shared_or_has_members(node: Node) -> None:
    fill(node, "kinds", 4)
    with sharer(node, "kinds", "one-kind", 30) as consumer:
        assert consumer.receive(1, 5)
        with pytest.raises(ProtocolError, match="share queues"):
            Consumer("kinds", group="one-kind", node=node.address).poll(1)
    with Consumer("kinds", group="other-kind", node=node.address) as member:
        member.poll(1)
        with sharer(node, "kinds", "other-kind") as consumer, pytest.raises(ProtocolError, match="cannot share queues"):
            consumer.receive(1, 1)


def test_a_filter_passes_over_messages(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("mixed", 2)
    with Producer(node.address) as producer:
        for number in range(40):
            producer.send("mixed", b"%d" % number, tags="even" if number % 2 == 0 else "odd")
    with ShareConsumer("mixed", group="evens", node=node.address, filter="even") as consumer:
        assert sorted(int(one.body) for one in drain(consumer, 1)) == list(range(0, 40, 2))


def test_a_receive_waits_for_a_message(node: Node) -> None:
    fill(node, "quiet", 1)
    with sharer(node, "quiet", "waiting", 30) as consumer, Producer(node.address) as producer:
        drain(consumer, 0.5)
        timer = threading.Timer(1.0, lambda: producer.send("quiet", b"now"))
        timer.start()
        began = time.monotonic()
        (message,) = consumer.receive(1, 10)
        assert message.body == b"now"
        assert time.monotonic() - began < 3
        message.ack()


def test_handlers_share_a_queue(node: Node) -> None:
    bodies = fill(node, "handled", 200)
    seen: Counter[bytes] = Counter()
    lock = threading.Lock()
    with sharer(node, "handled", "handlers", 30) as consumer:

        def handle(message: Message) -> bool:
            with lock:
                seen[message.body] += 1
                done = len(seen) == len(bodies) and seen[b"7"] == 2
            if done:
                threading.Thread(target=consumer.close).start()
            return message.body != b"7" or message.reconsume_times > 0

        consumer.run(handle, workers=4, backoff=0)
        assert consumer.is_closed
        assert consumer.handler_counts.failed == 1
    assert seen == Counter(bodies) + Counter([b"7"])
    with sharer(node, "handled", "handlers", 30) as consumer:
        assert consumer.receive(10, 1) == []


@pytest.mark.slow
def test_a_handler_may_take_longer_than_the_invisible_time(node: Node) -> None:
    fill(node, "slowly", 1)
    calls: list[int] = []
    with sharer(node, "slowly", "slow-handlers") as consumer:

        def handle(message: Message) -> None:
            calls.append(message.reconsume_times)
            time.sleep(2.5 * INVISIBLE_S)
            threading.Timer(INVISIBLE_S + 1, consumer.close).start()

        consumer.run(handle, workers=2)
    assert calls == [0]


PROGRAM = """
import signal, sys
from commitmq import ShareConsumer

consumer = ShareConsumer("signalled", group="signalled", node=sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: consumer.close())
consumer.run(lambda message: print(message.body.decode(), flush=True), workers=2)
print("over", flush=True)
"""


def test_a_signal_handler_ends_run(node: Node) -> None:
    fill(node, "signalled", 1)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, node.address], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"0\n"
        time.sleep(0.5)  # it waits for the next message
        program.terminate()
        assert program.stdout.readline() == b"over\n"
        assert program.wait(20) == 0


RECEIVER = """
import signal, sys
from commitmq import ShareConsumer

consumer = ShareConsumer("received", group="receivers", node=sys.argv[1])
signal.signal(signal.SIGTERM, lambda number, frame: consumer.close())
print("begun", flush=True)
while not consumer.is_closed:
    consumer.receive(10, 5)
print("over", flush=True)
"""


def test_a_signal_handler_closes_while_a_receive_waits(node: Node) -> None:
    fill(node, "received", 1)
    with subprocess.Popen([sys.executable, "-c", RECEIVER, node.address], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"begun\n"
            time.sleep(0.5)
            program.terminate()
            assert program.wait(20) == 0
            assert program.stdout.readline() == b"over\n"
        finally:
            program.kill()


def test_a_delay_that_the_node_refuses_holds_up_no_other_message(node: Node) -> None:
    fill(node, "far", 20)
    with sharer(node, "far", "far", 30) as consumer:

        def handle(message: Message) -> None:
            if message.body == b"3":
                message.retry_later(7 * 86_400)  # more than pop.max_invisible_ms

        running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 1})
        running.start()
        eventually(lambda: consumer.handler_counts == (19, 1, 0, 0, 0), "all are settled, and one comes back later")
    running.join(20)


def test_the_twin_for_asyncio(node: Node) -> None:
    bodies = fill(node, "looped", 30)

    async def main() -> Counter[bytes]:
        seen: Counter[bytes] = Counter()
        async with commitmq.connect_async(node.address) as connection:
            consumer = await connection.share_consumer("looped", group="tasks", invisible_s=30).start()
            many = await consumer.receive(10, 5)
            with pytest.raises(CommitMQError, match="would block the event loop"):
                many[0].ack()
            assert await consumer.ack(many[:8]) == []
            assert await consumer.extend(many[8]) == []
            assert await consumer.nack(many[8:]) == []
            seen.update(one.body for one in many[:8])
            receiving = asyncio.create_task(consumer.receive(3, 5))
            await asyncio.sleep(0)
            receiving.cancel()

            async def handle(message: Message) -> None:
                seen[message.body] += 1
                if len(seen) == len(bodies) - len(kept):
                    await consumer.close()

            kept = await consumer.receive(1, 5)  # (what the cancelled one got)
            assert kept
            await consumer.run(handle, workers=3)
            assert consumer.is_closed
            assert consumer.handler_counts.handled == len(bodies) - 8 - len(kept)
        return seen + Counter(one.body for one in kept)

    assert asyncio.run(main()) == Counter(bodies)


def test_a_group_that_was_reset_begins_there(node: Node) -> None:
    fill(node, "reset", 10)
    with connect(node.address) as connection:
        consumer = connection.share_consumer("reset", group="again-please", invisible_s=30)
        assert len(drain(consumer, 0.5)) == 10
        directory = Directory(node.address)
        channel, _ = directory.connect("coordinator", time.monotonic() + 5)
        reset = {"group": "again-please", "offsets": [["reset", 0, 4]], "reset": True}
        channel.request("offset.commit", reset, timeout_s=5)
        channel.close()
        directory.close()
        assert [one.queue_offset for one in drain(consumer, 3)] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("offset", [2, 4, 8])
def test_the_next_receive_begins_where_the_group_was_reset(node: Node, offset: int) -> None:
    """Before, and behind, the offset that was committed last, and there."""
    topic, group = f"at-once-{offset}", f"resetting-{offset}"
    fill(node, topic, 10)
    with sharer(node, topic, group, 30) as consumer, Admin(node.address) as admin:
        assert consumer.ack(drain_one(consumer, 4)) == []
        eventually(lambda: (topic, 0, 4) in offsets_of(admin, group), "the offset is committed")
        assert len(drain_one(consumer, 2)) == 2
        admin.reset_offsets(group, topic, offset)
        assert [one.queue_offset for one in consumer.receive(256, 0)] == list(range(offset, 10))


def test_a_reset_wakes_a_receive_that_waits(node: Node) -> None:
    fill(node, "woken", 3)
    with sharer(node, "woken", "sleepers", 30) as consumer, Admin(node.address) as admin:
        assert len(drain_one(consumer, 3)) == 3
        directory = Directory(node.address)
        channel, _ = directory.connect("pop", time.monotonic() + 5)
        fields = {"group": "sleepers", "topics": ["woken"], "invisible_ms": 30_000, "wait_ms": 4_000}
        timer = threading.Timer(1.0, admin.reset_offsets, ("sleepers", "woken", "earliest"))
        timer.start()
        answer, _ = channel.request("pop", fields, timeout_s=20)
        assert [part["count"] for part in answer["parts"]] == [3]
        timer.join()
        channel.close()
        directory.close()


def test_groups_whose_retry_topics_have_one_name_keep_their_messages(node: Node) -> None:
    fill(node, "b_c", 1)
    fill(node, "c", 1)
    with sharer(node, "b_c", "a", 30) as one, sharer(node, "c", "a_b", 30) as other:
        for consumer in (one, other):
            (message,) = consumer.receive(1, 5)
            assert message.nack()
        for consumer, topic in ((one, "b_c"), (other, "c")):
            (message,) = drain(consumer, 0.7)
            assert (message.topic, message.stored_topic) == (topic, "%RETRY%a_b_c")


@pytest.mark.slow
def test_messages_in_flight_outlive_a_restart(tmp_path: Path) -> None:
    node = Node(tmp_path / "store")
    with started(node):
        fill(node, "kept", 20)
        with sharer(node, "kept", "restarted", 4) as consumer:
            received = time.time()
            many = consumer.receive(20, 5)
            assert len(many) == 20
            consumer.ack(many[:10])
        assert node.stop().returncode == 0
        assert node.start().returncode == 0
        with sharer(node, "kept", "restarted", 30) as consumer:
            again = drain(consumer, 5)
            assert Counter(one.body for one in again) == Counter(one.body for one in many[10:])
            assert min(one.store_timestamp for one in again) >= int(received * 1000) + 4_000, "it came too early"
        assert node.stop().returncode == 0


def test_a_group_goes_on_behind_what_was_handed_out_although_nothing_was_committed(tmp_path: Path) -> None:
    with started(Node(tmp_path / "store", "pop.commit_interval_ms=60000")) as node:
        fill(node, "kept", 20)
        with sharer(node, "kept", "killed", 30) as consumer:
            many = consumer.receive(10, 5)
            node.kill_all()
        assert node.start().returncode == 0
        with sharer(node, "kept", "killed", 30) as consumer:
            rest = consumer.receive(20, 5)
            assert not {one.body for one in many} & {one.body for one in rest}
            assert len(rest) == 10


@pytest.mark.slow
def test_a_topic_that_was_made_anew_begins_anew_after_a_restart(tmp_path: Path) -> None:
    with started(Node(tmp_path / "store")) as node:
        fill(node, "anew", 50)
        with sharer(node, "anew", "g", 600) as consumer:
            assert len(consumer.receive(50, 5)) == 50
        with Admin(node.address) as admin:
            admin.topic_delete("anew")
        bodies = fill(node, "anew", 20)
    with started(Node(tmp_path / "store")) as node, sharer(node, "anew", "g", 600) as consumer:
        assert sorted(one.body for one in drain(consumer, 2)) == sorted(bodies)


def test_what_cannot_be_shared_is_refused(node: Node) -> None:
    with Admin(node.address) as admin:
        admin.topic_create("in-memory", 1, attributes={"storage.type": "memory"})
    with sharer(node, "in-memory", "refused") as consumer, pytest.raises(ProtocolError) as refused:
        consumer.receive(1, 0)
    assert refused.value.code == "INVALID_PARAMETER"
    with sharer(node, "nowhere", "refused") as consumer, pytest.raises(ProtocolError) as refused:
        fields = {"group": "refused", "topics": ["nowhere"], "invisible_ms": 60_000}
        consumer._receiver.request("pop", fields, timeout_s=5)
    assert refused.value.code == "TOPIC_NOT_EXIST"
    with sharer(node, "nowhere", "refused") as consumer, pytest.raises(ProtocolError, match="late must be a list"):
        consumer._receiver.request("pop", {**fields, "late": "nowhere"}, timeout_s=5)
    fill(node, "bounds", 1)
    with sharer(node, "bounds", "refused", 0.5) as consumer, pytest.raises(ProtocolError, match="min_invisible_ms"):
        consumer.receive(1, 0)


def test_limits_bound_what_is_in_flight(tmp_path: Path) -> None:
    with start_node(tmp_path, "pop.max_in_flight_of_queue=5") as node:
        fill(node, "much", 20)
        with sharer(node, "much", "greedy", 60) as consumer:
            first = consumer.receive(20, 5)
            assert len(first) == 5
            assert consumer.receive(20, 0.5) == []
            consumer.ack(first)
            assert len(consumer.receive(20, 5)) == 5


def test_a_client_at_its_limit_keeps_nothing_from_others(tmp_path: Path) -> None:
    with start_node(tmp_path, "pop.max_in_flight_of_client=1") as node:
        fill(node, "fair", 1)
        with sharer(node, "fair", "all", 60) as full, sharer(node, "fair", "all", 60) as free:
            assert len(full.receive(1, 5)) == 1
            waiting = threading.Thread(target=lambda: full.receive(1, 4))
            waiting.start()
            time.sleep(0.3)
            timer = threading.Timer(0.5, lambda: fill_one(node, "fair"))
            timer.start()
            began = time.monotonic()
            assert len(free.receive(1, 4)) == 1
            assert time.monotonic() - began < 3
            waiting.join()


def fill_one(node: Node, topic: str) -> None:
    with Producer(node.address) as producer:
        producer.send(topic, b"one more")


def test_an_idle_node_runs_no_pop(node: Node, tmp_path: Path) -> None:
    with start_node(tmp_path) as fresh:
        assert fresh.row("pop")["state"] == "idle"
    eventually(lambda: node.row("pop")["state"] == "ready", "the other one does")
