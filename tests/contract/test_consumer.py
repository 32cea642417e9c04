"""Goal: a consumer gets every message once, in its queue's order, wherever it begins; a group shares, hands over,
commits.

Method: a real node in real processes. Members that die are real processes that are killed, and so are the node's own.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commitmq import (
    Admin,
    Consumer,
    FencedError,
    InvalidMessageError,
    Message,
    MessageBatch,
    NodeUnavailableError,
    Producer,
    ProtocolError,
    Reader,
)
from nodes import Node, environment, eventually, free_ports, start_node

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(
        tmp_path_factory.mktemp("consumer"),
        "topics.default_queues=4",
        "groups.heartbeat_interval_ms=200",
        "groups.session_timeout_ms=1500",
    ) as made:
        yield made


@pytest.fixture
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose processes a test may kill."""
    with start_node(
        tmp_path_factory.mktemp("killed"), "groups.heartbeat_interval_ms=200", "groups.session_timeout_ms=3000"
    ) as made:
        yield made


@pytest.fixture
def producer(node: Node) -> Iterator[Producer]:
    with Producer(node.address) as made:
        yield made


def fill(producer: Producer, topic: str, count: int = 400, **fields: Any) -> list[bytes]:
    """``count`` messages in all queues of ``topic``; returns their bodies."""
    bodies = [b"%06d" % number for number in range(count)]
    step = -(-count // 4)
    for queue in range(4):
        producer.send_batch(topic, bodies[queue * step : (queue + 1) * step], queue=queue, **fields)
    return bodies


def drain(consumer: Consumer | Reader, count: int, *, seconds: float = 20.0, **poll: Any) -> list[Message]:
    """Poll until ``count`` messages came; fails when they do not, or when more do."""
    messages: list[Message] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} came"
        messages += consumer.poll(0.2, **poll)
    assert len(messages) == count
    return messages


def at_end(consumer: Consumer | Reader, topic: str) -> bool:
    return not consumer.poll(0.1) and consumer.positions[topic, 0] == 500


def assigned(consumer: Consumer, count: int) -> Callable[[], bool]:
    """A condition that keeps ``consumer`` polling until it has ``count`` queues; nothing may be there to be polled."""

    def condition() -> bool:
        assert not consumer.poll(0), "a message came, and the test would not see it"
        return len(consumer.assignment) == count

    return condition


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("mode", ["ranges", "bytes", "auto"])
def test_every_message_once_and_in_order(node: Node, producer: Producer, mode: str) -> None:
    topic = f"read-{mode}"
    bodies = [b"%06d" % number + b"x" * (number % 2000) for number in range(4000)]
    for queue in range(4):
        producer.send_batch(topic, bodies[queue * 1000 : (queue + 1) * 1000], queue=queue, tags="T")
    seen: list[bytes] = []
    last = dict.fromkeys(range(4), -1)
    with Reader(topic, node=node.address, mode=mode) as consumer:
        while len(seen) < 4000:
            batch = consumer.poll(5)
            assert batch, f"{len(seen)} of 4000 came"
            columns = (batch.queue_id.tolist(), batch.queue_offset.tolist(), batch.body_size.tolist())
            for message, view, queue, offset, size in zip(batch, batch.bodies, *columns, strict=True):
                assert (message.queue_id, message.queue_offset, len(message.body)) == (queue, offset, size)
                assert message.body == bytes(view)
                assert offset == last[queue] + 1
                last[queue] = offset
                seen.append(message.body)
        assert not consumer.poll(0.1)
    assert sorted(seen) == bodies


def test_an_empty_poll_is_an_empty_batch_after_its_time(node: Node, producer: Producer) -> None:
    producer.send("quiet", b"x")
    with Reader("quiet", node=node.address) as consumer:
        drain(consumer, 1)
        for timeout_s in (0.0, 0.4):
            started = time.monotonic()
            assert len(consumer.poll(timeout_s)) == 0
            assert timeout_s <= time.monotonic() - started < timeout_s + 0.3


def test_a_waiting_poll_is_woken_by_a_message(node: Node, producer: Producer) -> None:
    producer.send("woken", b"first")
    with Reader("woken", node=node.address) as consumer:
        drain(consumer, 1)
        threading.Timer(0.5, producer.send, ("woken", b"second")).start()
        started = time.monotonic()
        (message,) = consumer.poll(10)
        assert message.body == b"second"
        assert 0.4 < time.monotonic() - started < 1.5


def test_max_messages_is_kept_and_nothing_lost_between(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "limited", 400)
    seen: list[bytes] = []
    with Reader("limited", node=node.address) as consumer:
        while len(seen) < 400:
            batch = consumer.poll(5, max_messages=7)
            assert 0 < len(batch) <= 7
            seen += [one.body for one in batch]
    assert sorted(seen) == bodies


@pytest.mark.parametrize("mode", ["ranges", "bytes"])
def test_a_tag_expression_is_exact(node: Node, producer: Producer, mode: str) -> None:
    """Aa and BB have the same hash, so the ConsumeQueue alone cannot tell them apart."""
    topic = f"tags-{mode}"
    tags = ["Aa", "BB", "🚀x", None, "Other"]
    producer.send_batch(topic, [b"%d" % n for n in range(500)], tags=[tags[n % 5] for n in range(500)], queue=0)
    for expression, wanted in (("Aa", {"Aa"}), ("BB || 🚀x", {"BB", "🚀x"}), ("*", set(tags)), ("None", set())):
        with Reader(topic, node=node.address, filter=expression, mode=mode) as consumer:
            count = sum(tags[n % 5] in wanted for n in range(500))
            messages = drain(consumer, count)
            assert {one.tags for one in messages} == wanted
            eventually(partial(at_end, consumer, topic), "the end is reached")


def test_start(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "starts", 40)
    time.sleep(0.05)
    middle = datetime.now(UTC)
    time.sleep(0.05)
    producer.send_batch("starts", [b"later"] * 8, queue=1)
    time.sleep(0.2)

    def bodies_from(start: Any, count: int) -> list[bytes]:
        with Reader("starts", node=node.address, start=start) as consumer:
            if start == "latest":
                assert not consumer.poll(0.5)
                producer.send("starts", b"new")
            return [one.body for one in drain(consumer, count)]

    assert sorted(bodies_from("earliest", 48)) == sorted([*bodies, *[b"later"] * 8])
    assert bodies_from(middle, 8) == [b"later"] * 8
    assert len(bodies_from(datetime.fromtimestamp(0, UTC), 48)) == 48
    assert Counter(bodies_from(7, 4 * 3 + 8))[b"later"] == 8, "from offset 7 on in every queue"
    assert bodies_from("latest", 1) == [b"new"]


def test_explicit_queues_and_seek(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "explicit", 400)
    with Reader(queues=[("explicit", 1), ("explicit", 3)], node=node.address) as consumer:
        assert consumer.assignment == [("explicit", 1), ("explicit", 3)]
        assert sorted(one.body for one in drain(consumer, 200)) == sorted(bodies[100:200] + bodies[300:])
        consumer.seek("explicit", 3, 90)
        assert [one.body for one in drain(consumer, 10)] == bodies[390:]
        assert consumer.positions == {("explicit", 1): 100, ("explicit", 3): 100}
        with pytest.raises(ValueError, match="not assigned"):
            consumer.seek("explicit", 0, 0)


def test_offsets_beyond_the_queue_become_gaps(node: Node, producer: Producer) -> None:
    fill(producer, "gaps", 40)
    with Admin(node.address) as admin:
        # Else the queue may end earlier when the consumer asks, and what comes then is read.
        eventually(lambda: sum(end for _, _, end, _ in admin.offsets("gaps")) == 40, "all of them can be read")
    with Reader(queues=[("gaps", 0)], node=node.address, start=10_000) as consumer:
        assert not consumer.poll(0.5)
        producer.send("gaps", b"new", queue=0)
        messages: list[Message] = []
        deadline = time.monotonic() + 10
        while b"new" not in [one.body for one in messages] and time.monotonic() < deadline:
            messages += consumer.poll(0.5)
        assert messages[-1].body == b"new"
        (gap,) = consumer.gaps
        assert (gap.topic, gap.queue, gap.from_offset, gap.reason) == ("gaps", 0, 10_000, "OFFSET_OVERFLOW_BADLY")
        assert gap.to_offset <= 10


def test_a_new_topic_and_its_queues_are_picked_up(node: Node, producer: Producer) -> None:
    with (
        Reader("comes-later", node=node.address) as alone,
        Consumer("comes-later", group="later", node=node.address) as member,
    ):
        assert not alone.poll(0.2)
        assert not member.poll(0.2)
        producer.send_batch("comes-later", [b"x"] * 10, queue=2)
        assert len(drain(alone, 10)) == 10
        assert len(drain(member, 10)) == 10


def test_bodies_outlive_the_consumer(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "outlive", 40)
    batches: list[MessageBatch] = []
    with Reader("outlive", node=node.address, mode="ranges") as consumer:
        while sum(map(len, batches)) < 40:
            batches.append(consumer.poll(5))
    gc.collect()
    assert sorted(bytes(view) for batch in batches for view in batch.bodies) == bodies


def test_a_client_that_cannot_see_the_store_uses_tcp(node: Node) -> None:
    """Goal: what a client on another host does works: tcp endpoints, bytes instead of ranges."""
    token = node.store / "run" / "token"
    hidden = token.with_name("hidden")
    token.rename(hidden)
    try:
        with Producer(node.address) as far:
            far.send("far", b"0", queue=0)
            assert far._lanes.writer.lane.channel is not None
            assert far._lanes.writer.lane.channel.endpoint.startswith("tcp://")
            far.send_batch("far", [b"%d" % number for number in range(1, 3000)], queue=0)
            far.send_async("far", b"3000", queue=0).result(10)
        kinds = (partial(Reader, "far"), partial(Consumer, "far", group="far"))
        for kind in kinds:
            with kind(node=node.address) as consumer:
                assert [one.body for one in drain(consumer, 3001)] == [b"%d" % number for number in range(3001)]
        with (
            Reader("far", node=node.address, mode="ranges") as consumer,
            pytest.raises(ProtocolError, match="same host"),
        ):
            consumer.poll(5)
    finally:
        hidden.rename(token)


def test_bad_settings_are_refused(node: Node, producer: Producer) -> None:
    cases: list[tuple[type[Consumer] | type[Reader], dict[str, Any]]] = [
        (Reader, {}),
        (Consumer, {"group": "g"}),
        (Consumer, {"group": "g", "topics": "a b"}),
        (Consumer, {"group": "g g", "topics": "t"}),
        (Consumer, {"group": "g", "topics": "t", "start": "yesterday"}),
        (Consumer, {"group": "g", "topics": "t", "start": -1}),
        (Reader, {"topics": "t", "mode": "fast"}),
    ]
    for kind, fields in cases:
        with pytest.raises((ValueError, InvalidMessageError)):
            kind(node=node.address, **fields)
    producer.send("bad-filter", b"x")
    with Reader("bad-filter", node=node.address, filter="||") as consumer, pytest.raises(ProtocolError):
        for _ in range(20):
            consumer.poll(0.2)


def test_without_a_node() -> None:
    with pytest.raises(NodeUnavailableError, match="is it started"):
        Consumer("t", group="g", node="tcp://127.0.0.1:9", timeout_s=0.5)


# ---------------------------------------------------------------- groups


def test_what_was_committed_is_not_read_again(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "commits", 400)
    with Consumer("commits", group="committing", node=node.address, auto_commit=False) as consumer:
        first = [one.body for one in drain(consumer, 100, max_messages=10)]
        stored = consumer.commit()
        assert sum(stored.values()) == 100
        drain(consumer, 50, max_messages=10)  # not committed: comes again
    with Consumer("commits", group="committing", node=node.address, auto_commit=False) as consumer:
        rest = [one.body for one in drain(consumer, 300)]
        assert consumer.commit({("commits", 0): 3})["commits", 0] >= 3, "offsets never go back"
    assert sorted(first + rest) == bodies


def test_automatic_commits(node: Node, producer: Producer) -> None:
    fill(producer, "auto", 400)
    lag = [400]
    with Admin(node.address) as admin:
        # A lag counts what can be read, so all of it must be there before the lag says what was committed.
        eventually(lambda: sum(row[2] for row in admin.offsets("auto")) == 400, "all messages can be read")

        def committed() -> int:
            lag[0] = sum(row.lag for row in admin.group_lag("autos"))
            return 400 - lag[0]

        with Consumer("auto", group="autos", node=node.address, auto_commit_interval_s=0) as consumer:
            drain(consumer, 100, max_messages=100)
            assert committed() < 100, "the batch is not done yet"
            consumer.poll(0.2, max_messages=100)
            assert committed() >= 100
        before = committed()
        assert before >= 200, "close commits what was polled"
        with (
            pytest.raises(ZeroDivisionError),
            Consumer("auto", group="autos", node=node.address, auto_commit_interval_s=0) as consumer,
        ):
            assert consumer.poll(5, max_messages=10)
            raise ZeroDivisionError
        assert committed() == before, "the batch that failed comes again"


def test_members_share_the_queues(node: Node, producer: Producer) -> None:
    """Goal: joining and leaving moves queues within seconds; every message reaches the group, once when all is calm."""
    bodies = fill(producer, "shared", 400)
    seen: Counter[bytes] = Counter()
    lock = threading.Lock()
    stop = threading.Event()
    shares: dict[int, list[Any]] = {}

    def work(number: int, leave: threading.Event) -> None:
        with Consumer("shared", group="sharing", node=node.address, auto_commit_interval_s=0) as consumer:
            while not (stop.is_set() or leave.is_set()):
                batch = consumer.poll(0.1)
                shares[number] = consumer.assignment
                with lock:
                    seen.update(one.body for one in batch)
        shares.pop(number)

    leaves = [threading.Event() for _ in range(3)]
    threads = [threading.Thread(target=work, args=(number, leaves[number])) for number in range(3)]

    def spread() -> list[int]:
        return sorted(len(share) for share in list(shares.values()))

    threads[0].start()
    eventually(lambda: spread() == [4] and len(seen) == 400, "the first member reads everything", 10)
    threads[1].start()
    eventually(lambda: spread() == [2, 2], "two members share", 10)
    threads[2].start()
    eventually(lambda: spread() == [1, 1, 2], "three members share", 10)
    more = [b"more%06d" % number for number in range(400)]
    for queue in range(4):
        producer.send_batch("shared", more[queue * 100 : queue * 100 + 100], queue=queue)
    eventually(lambda: len(seen) == 800, "the new messages came", 10)
    leaves[0].set()
    threads[0].join(10)
    eventually(lambda: spread() == [2, 2], "the queues of the one that left are taken over", 10)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert seen == Counter([*bodies, *more]), "each once: every hand-over followed a commit"


MEMBER = """
import sys, time
from commitmq import Consumer
consumer = Consumer("deaths", group="deaths", node=sys.argv[1], auto_commit=False)
while len(consumer.assignment) < 1:
    consumer.poll(0.1)
count = 0
while count < 400:
    count += len(consumer.poll(5))
print(count, flush=True)
while True:
    time.sleep(1)
"""


def test_a_killed_members_queues_and_uncommitted_messages_go_to_another(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "deaths", 400)
    member = subprocess.Popen(
        [sys.executable, "-c", MEMBER, node.address], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert member.stdout is not None
        assert int(member.stdout.readline()) == 400
        with Consumer("deaths", group="deaths", node=node.address) as consumer:
            assert not consumer.poll(0.5)
            member.kill()
            killed = time.monotonic()
            messages = drain(consumer, 400)
            assert time.monotonic() - killed < 8
            assert sorted(one.body for one in messages) == bodies
    finally:
        member.kill()
        member.wait()
        if member.stdout is not None:
            member.stdout.close()


def test_heartbeats_go_on_while_the_handler_works(node: Node, producer: Producer) -> None:
    fill(producer, "slow-handler", 40)
    with Consumer("slow-handler", group="slow", node=node.address) as consumer:
        drain(consumer, 40)
        time.sleep(3)  # two sessions long
        assert len(consumer.assignment) == 4
        consumer.commit()
        with Admin(node.address) as admin:
            assert len(admin.group("slow")["members"]) == 1


def test_a_queue_is_handed_over_only_after_the_batch_is_done(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "handover", 400)
    with Consumer("handover", group="handing", node=node.address) as first:
        messages = drain(first, 400)
        with Consumer("handover", group="handing", node=node.address) as second:
            assert not second.poll(1.0), "the first one still works on its batch"
            eventually(lambda: assigned(first, 2)() and assigned(second, 2)(), "the queues are shared", 10)
            assert not second.poll(0.5), "what the first one did was committed before"
            for queue in range(4):
                producer.send("handover", b"new", queue=queue)
            seen = [*drain(first, 2), *drain(second, 2)]
    assert sorted(one.body for one in messages) == bodies
    assert sorted(one.queue_id for one in seen) == [0, 1, 2, 3]


def test_a_member_that_does_not_poll_is_fenced(node: Node, producer: Producer) -> None:
    fill(producer, "fenced", 400)
    with Consumer("fenced", group="fencing", node=node.address, auto_commit=False, rebalance_timeout_s=0.5) as first:
        drain(first, 400)
        with Consumer("fenced", group="fencing", node=node.address) as second:
            # Without a poll: it may get the share in the midst of one, and that one's messages would be missing below.
            eventually(lambda: len(second.assignment) == 2, "the second one gets its share, without any poll", 10)
            lost = second.assignment
            assert len(drain(second, 200)) == 200, "what was not committed comes again"
            with pytest.raises(FencedError):
                first.commit(dict.fromkeys(lost, 100))
            assert set(first.commit()) == set(first.assignment)


def test_offsets_can_be_reset_while_nobody_reads(node: Node, producer: Producer) -> None:
    bodies = fill(producer, "resets", 400)
    with Admin(node.address) as admin:
        with Consumer("resets", group="resetting", node=node.address) as consumer:
            drain(consumer, 400)
            with pytest.raises(FencedError):
                admin.reset_offsets("resetting", "resets", "earliest")
        assert sum(row.lag for row in admin.group_lag("resetting")) == 0
        assert admin.reset_offsets("resetting", "resets", 90) == [("resets", queue, 90) for queue in range(4)]
        assert sum(row.lag for row in admin.group_lag("resetting")) == 40
        admin.reset_offsets("resetting", "resets", "latest", queues=[0, 1, 2])
    with Consumer("resets", group="resetting", node=node.address) as consumer:
        assert [one.body for one in drain(consumer, 10)] == bodies[390:]


# ---------------------------------------------------------------- deaths of the node's processes


@pytest.mark.parametrize("role", ["reader-0", "coordinator", "dispatcher-consume_queue"])
def test_a_group_goes_on_when_a_process_of_the_node_is_killed(own_node: Node, role: str) -> None:
    """Goal: nothing acknowledged is missed and offsets do not go back, whichever process dies under the consumer."""
    seen: Counter[bytes] = Counter()
    sent: list[bytes] = []
    stop = threading.Event()

    def consume() -> None:
        with Consumer("survives", group="surviving", node=own_node.address, auto_commit_interval_s=0) as consumer:
            while not stop.is_set():
                seen.update(one.body for one in consumer.poll(0.1))

    thread = threading.Thread(target=consume)
    with Producer(own_node.address) as producer:
        producer.send("survives", b"first")
        sent.append(b"first")
        thread.start()
        try:
            for turn in range(2):
                pid = own_node.pids()[role]
                for number in range(200):
                    body = b"%d-%d" % (turn, number)
                    producer.send("survives", body)
                    sent.append(body)
                    if number == 100:
                        os.kill(pid, signal.SIGKILL)
                eventually(partial(own_node.healed, role, pid), f"{role} is back")
            eventually(lambda: set(sent) <= set(seen), "every message came")
        finally:
            stop.set()
            thread.join(20)
    assert set(seen) == set(sent)
    with Admin(own_node.address) as admin:
        assert sum(row.lag for row in admin.group_lag("surviving")) == 0


def test_a_consumer_outlives_a_restart_of_the_node(tmp_path: Path) -> None:
    with start_node(tmp_path, f"network.port={free_ports()}") as node, Producer(node.address, timeout_s=60) as producer:
        producer.send_batch("again", [b"before"] * 100)
        with Consumer("again", group="again", node=node.address) as consumer:
            drain(consumer, 100)
            consumer.commit()
            assert node.stop().returncode == 0
            assert not consumer.poll(0.5)
            assert node.start().returncode == 0
            producer.send_batch("again", [b"after"] * 100)
            assert {one.body for one in drain(consumer, 100, seconds=30)} == {b"after"}


# ---------------------------------------------------------------- resources


def test_an_unclosed_consumer_is_complained_about(node: Node) -> None:
    consumer = Reader("unclosed", node=node.address)
    with pytest.warns(ResourceWarning, match="unclosed consumer"):
        del consumer


def test_closing_leaves_no_descriptor_and_no_thread(node: Node, producer: Producer) -> None:
    fill(producer, "leaks", 40)

    def once() -> None:
        with Consumer("leaks", group="leaking", node=node.address) as consumer:
            drain(consumer, 40)
        with Admin(node.address) as admin:
            admin.reset_offsets("leaking", "leaks", "earliest")

    once()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        once()
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_consuming_does_not_load_kernels(node: Node, producer: Producer) -> None:
    producer.send("light", b"x")
    code = f"""
import sys
from commitmq import Reader
with Reader("light", node={node.address!r}) as consumer:
    assert [one.body for one in consumer.poll(10)] == [b"x"]
assert "commitmq.kernels" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
