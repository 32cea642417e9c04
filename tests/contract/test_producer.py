"""Goal: what a producer says about each message is true: where it lies, that it lies there, or that it does not.

Method: a real node in real processes; what was stored is read back by a consumer of every queue. Outcomes are provoked
by killing and by halting the node's own processes.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commitmq import (
    Admin,
    BatchSendError,
    CommitMQError,
    InvalidMessageError,
    Message,
    Outcome,
    Producer,
    SendError,
)
from commitmq.client.sending.delivery import WINDOW
from commitmq.client.sending.outbox import MAX_RUN_MESSAGES
from commitmq.format.java import java_string_hash
from messages_stored import read_all, while_the_writer_dies
from nodes import Node, environment, eventually, free_ports, start_node

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("producer"), "topics.default_queues=4") as made:
        yield made


@pytest.fixture
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose processes a test may kill."""
    with start_node(tmp_path_factory.mktemp("killed")) as made:
        yield made


@pytest.fixture
def producer(node: Node) -> Iterator[Producer]:
    with Producer(node.address) as made:
        yield made


def by_place(messages: list[Message]) -> dict[tuple[int, int], Message]:
    return {(one.queue_id, one.queue_offset): one for one in messages}


@contextmanager
def halted(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------- one by one


@pytest.mark.parametrize("ack", ["flushed", "memory"])
def test_a_send_tells_where_the_message_lies(node: Node, producer: Producer, ack: str) -> None:
    topic = f"single-{ack}"
    sent = []
    for number in range(20):
        body = f"żółw 🚀 {number}".encode()
        fields: dict[str, Any] = {"tags": "🚀x", "keys": ["a", f"k{number}"], "properties": {"p": "ö"}, "flag": -number}
        sent.append((body, number, producer.send(topic, body, ack=ack, **fields)))
    stored = by_place(read_all(node, topic))
    assert len(stored) == 20
    for body, number, result in sent:
        message = stored[result.queue, result.queue_offset]
        assert message.body == body
        assert (message.tags, message.keys, message.properties["p"]) == ("🚀x", ["a", f"k{number}"], "ö")
        assert message.flag == -number
        assert message.unique_id == result.unique_id
        assert message.msg_id == result.msg_id
        assert message.physical_offset == result.physical_offset
        assert message.store_timestamp == result.store_timestamp
        assert (result.topic, result.ack) == (topic, ack)
    assert Counter(result.queue for _, _, result in sent) == {0: 5, 1: 5, 2: 5, 3: 5}, "round robin"


def test_queues_are_chosen_by_number_or_by_sharding_key(producer: Producer) -> None:
    assert {producer.send("chosen", b"x", queue=2).queue for _ in range(5)} == {2}
    for key in ("order-1", "order-2", "🚀", "polygenelubricants"):
        # The hash of the last one is Java's smallest integer, whose absolute value is itself there.
        expected = abs(java_string_hash(key)) % 4
        assert producer.send("chosen", b"x", sharding_key=key).queue == expected
        assert producer.send_async("chosen", b"x", sharding_key=key).result(10).queue == expected
        assert [one.queue for one in producer.send_batch("chosen", [b"x"] * 2, sharding_keys=[key, key])] == [
            expected
        ] * 2
    with pytest.raises(SendError) as caught:
        producer.send("chosen", b"x", queue=4)
    assert caught.value.code == "INVALID_PARAMETER"
    assert caught.value.outcome is Outcome.NOT_STORED


def test_message_objects_can_be_sent_and_sent_again(node: Node, producer: Producer) -> None:
    first = producer.send("objects", Message(b"body", tags="T", keys="k", sharding_key="s", flag=3))
    message = by_place(read_all(node, "objects"))[first.queue, first.queue_offset]
    again = producer.send("objects", message)
    assert again.queue == first.queue
    assert again.unique_id != first.unique_id
    copy = by_place(read_all(node, "objects"))[again.queue, again.queue_offset]
    assert (copy.body, copy.tags, copy.keys, copy.flag) == (b"body", "T", ["k"], 3)


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd"])
def test_compressed_bodies_come_back_as_they_were(node: Node, kind: str) -> None:
    body = b"compress me " * 1000
    noise = os.urandom(6000)
    with Producer(node.address, compress=kind, compress_over_bytes=1000) as producer:
        producer.send(f"z-{kind}", body)
        producer.send_async(f"z-{kind}", body).result(10)
        producer.send_batch(f"z-{kind}", [body, b"small", noise])
    messages = read_all(node, f"z-{kind}")
    assert Counter(one.body for one in messages) == {body: 3, b"small": 1, noise: 1}
    assert all(bool(one.sys_flag & 1) == (one.body == body) for one in messages)


# ---------------------------------------------------------------- many at once


def test_async_sends_keep_the_order_of_their_queue(node: Node, producer: Producer) -> None:
    futures = [producer.send_async("piped", b"%d" % number, queue=1, ack="memory") for number in range(5000)]
    done, rest = concurrent.futures.wait(futures, timeout=30)
    assert not rest
    assert len(done) == 5000
    results = [one.result() for one in futures]
    assert [one.queue_offset for one in results] == list(range(5000))
    assert len({one.unique_id for one in results}) == 5000
    stored = by_place(read_all(node, "piped"))
    for number, result in enumerate(results):
        message = stored[1, result.queue_offset]
        assert message.body == b"%d" % number
        assert message.physical_offset == result.physical_offset
        assert message.unique_id == result.unique_id


def test_a_synchronous_send_comes_after_the_asynchronous_ones_before_it(producer: Producer) -> None:
    for _ in range(50):
        futures = [producer.send_async("mixed", b"x", queue=0, ack="memory") for _ in range(3)]
        last = producer.send("mixed", b"y", queue=0, ack="memory")
        batch = producer.send_batch("mixed", [b"z", b"z"], queue=0, ack="memory")
        offsets = [
            *(one.result(10).queue_offset for one in futures),
            last.queue_offset,
            *(b.queue_offset for b in batch),
        ]
        assert offsets == list(range(offsets[0], offsets[0] + 6))


def test_threads_share_a_producer(node: Node, producer: Producer) -> None:
    results: list[Any] = []

    def work(number: int) -> None:
        for turn in range(40):
            results.append(producer.send("threads", b"%d-%d" % (number, turn), ack="memory"))
            if turn % 10 == 0:
                results.extend(producer.send_batch("threads", [b"%d-%d-%d" % (number, turn, i) for i in range(5)]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(one.queue, one.queue_offset) for one in results}) == 8 * (40 + 20)
    assert len(read_all(node, "threads")) == 8 * 60


def test_callbacks_may_send_but_not_wait(producer: Producer) -> None:
    chain: list[Any] = []
    finished = threading.Event()

    def on_first(_: Any) -> None:
        for wait in (lambda: producer.send("callback", b"x"), lambda: producer.send_batch("callback", [b"x"])):
            with pytest.raises(CommitMQError, match="must not wait"):
                wait()
        producer.send_async("callback", b"second").add_done_callback(on_second)

    def on_second(future: Any) -> None:
        chain.append(future.result())
        finished.set()

    producer.send_async("callback", b"first").add_done_callback(on_first)
    assert finished.wait(10)
    assert chain[0].topic == "callback"


def test_flush_waits_for_everything(producer: Producer) -> None:
    futures = [producer.send_async("flushed", b"x" * 1000) for _ in range(2000)]
    producer.flush(30)
    assert all(one.done() and one.exception() is None for one in futures)


def test_close_sends_what_is_pending(node: Node) -> None:
    with Producer(node.address) as producer:
        futures = [producer.send_async("closing", b"x") for _ in range(500)]
    assert all(one.result(0).topic == "closing" for one in futures)
    with pytest.raises(CommitMQError, match="closed"):
        producer.send("closing", b"x")
    with pytest.raises(CommitMQError, match="closed"):
        producer.send_async("closing", b"x")


# ---------------------------------------------------------------- batches


def test_a_batch_longer_than_a_segment(node: Node, producer: Producer) -> None:
    """The node's segments have 1 MiB, so that runs are split where a segment ends: results must follow the parts."""
    bodies = [b"%06d" % number + b"x" * (number % 3000) for number in range(3000)]
    results = producer.send_batch("long", bodies, tags="T", keys=[f"k{number}" for number in range(3000)])
    assert len(results) == 3000
    assert any(len(ack.answer["parts"]) > 1 for ack in results.acks)
    stored = by_place(read_all(node, "long"))
    for number, result in enumerate(results):
        message = stored[result.queue, result.queue_offset]
        assert message.body == bodies[number]
        assert (message.tags, message.keys) == ("T", [f"k{number}"])
        assert message.physical_offset == result.physical_offset
        assert message.msg_id == result.msg_id
        assert message.unique_id == result.unique_id
    assert results[-1].unique_id == results[2999].unique_id
    assert len(results[10:20]) == 10
    assert results.end_offset > max(one.physical_offset for one in results)


def test_a_batch_sorted_by_sharding_keys_has_its_results_in_order(node: Node, producer: Producer) -> None:
    keys = [f"s{number % 7}" if number % 5 else None for number in range(300)]
    results = producer.send_batch("sharded", [b"%d" % number for number in range(300)], sharding_keys=keys)
    stored = by_place(read_all(node, "sharded"))
    last: dict[str, int] = {}
    for number, (key, result) in enumerate(zip(keys, results, strict=True)):
        assert stored[result.queue, result.queue_offset].body == b"%d" % number
        if key is not None:
            assert result.queue == abs(java_string_hash(key)) % 4
            assert result.queue_offset > last.get(key, -1)
            last[key] = result.queue_offset


def test_a_lone_batch_of_one_run_needs_no_second_thread(node: Node) -> None:
    """Goal: it is sent as a lone send is, keeps its place among other sends, and larger ones go on through the pump."""
    with Producer(node.address, ack="memory") as producer:
        first = producer.send("lone", b"first", queue=0)
        offsets = [producer.send_batch("lone", [b"x"] * 10, queue=0)[9].queue_offset for _ in range(5)]
        assert offsets == [first.queue_offset + 10 * (number + 1) for number in range(5)]
        assert producer._lanes.writer.thread is None
        before = [producer.send_async("lone", b"y", queue=0) for _ in range(100)]
        behind = producer.send_batch("lone", [b"z"] * 10, queue=0)
        assert behind[0].queue_offset == before[-1].result(0).queue_offset + 1
        large = producer.send_batch("lone", [b"l" * 1000] * 10_000, queue=0)
        assert len(large.acks) > 1
        assert producer.send_batch("lone", [b"x"], queue=0)[0].queue_offset == large[-1].queue_offset + 1


def test_batches_of_one_and_of_none(producer: Producer) -> None:
    assert len(producer.send_batch("few", [])) == 0
    assert producer.send_batch("few", [Message(b"x", flag=5)])[0].queue_offset == 0


# ---------------------------------------------------------------- what is refused


def test_bad_input_is_refused_before_it_is_sent(node: Node, producer: Producer) -> None:
    producer.send("bad", b"good")
    limit = 4 * 1024 * 1024
    cases: list[tuple[Any, dict[str, Any]]] = [
        (b"", {}),
        ("text", {}),
        (b"x" * (limit + 1), {}),
        (b"x", {"tags": "a\x01"}),
        (b"x", {"properties": {"p": "y" * 32_767}}),
        (b"x", {"flag": 1 << 31}),
    ]
    for body, fields in cases:
        for send in (producer.send, producer.send_async):
            with pytest.raises(InvalidMessageError):
                send("bad", body, **fields)
    for topic in ("", "a b", "SCHEDULE_TOPIC_XXXX"):
        with pytest.raises(InvalidMessageError):
            producer.send(topic, b"x")
    with pytest.raises(InvalidMessageError, match="message 1"):
        producer.send_batch("bad", [b"x", b"y" * (limit + 1)])
    with pytest.raises(ValueError, match="ack must be"):
        producer.send("bad", b"x", ack="disk")
    assert [one.body for one in read_all(node, "bad")] == [b"good"]
    with pytest.raises(SendError, match="cannot fit a segment") as caught:
        producer.send("bad", b"z" * limit)
    assert caught.value.outcome is Outcome.NOT_STORED
    assert producer.send("bad", b"z" * 1_000_000).topic == "bad"


def test_a_topic_that_is_not_made_by_itself(tmp_path: Path) -> None:
    with start_node(tmp_path, "topics.auto_create=false") as node, Producer(node.address) as producer:
        for send in (
            lambda: producer.send("none", b"x"),
            lambda: producer.send_async("none", b"x").result(10),
            lambda: producer.send_batch("none", [b"x"]),
        ):
            with pytest.raises(SendError) as caught:
                send()
            assert caught.value.code == "TOPIC_NOT_EXIST"
            assert caught.value.outcome is Outcome.NOT_STORED
        with Admin(node.address) as admin:
            admin.topic_create("none", 2)
        assert producer.send("none", b"x").queue_offset == 0


def test_without_a_node(unused_tcp_address: str) -> None:
    started = time.monotonic()
    with Producer(unused_tcp_address, timeout_s=0.5) as producer:
        for send in (
            lambda: producer.send("t", b"x"),
            lambda: producer.send_batch("t", [b"x"]),
            lambda: producer.send_async("t", b"x").result(10),
        ):
            with pytest.raises(SendError) as caught:
                send()
            assert caught.value.outcome is Outcome.NOT_STORED
    assert time.monotonic() - started < 6


@pytest.fixture
def unused_tcp_address() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


# ---------------------------------------------------------------- deaths


@pytest.mark.slow
def test_every_send_has_an_outcome_when_the_writer_is_killed(own_node: Node) -> None:
    """Goal: acknowledged messages are there, not-stored ones are not, the rest is called unknown; the producer goes on."""
    sent: dict[bytes, Any] = {}
    with Producer(own_node.address, ack="memory", timeout_s=20) as producer:
        producer.send("killed", b"first")
        for number in while_the_writer_dies(own_node):
            body = b"%d" % number
            sent[body] = producer.send_async("killed", body)
        producer.flush(30)
        assert producer.send("killed", b"last").topic == "killed"
    assert all(one.done() for one in sent.values())
    errors = {body: one.exception() for body, one in sent.items()}
    stored = Counter(one.body for one in read_all(own_node, "killed"))
    assert set(stored.values()) == {1}, "nothing is stored twice"
    outcomes: Counter[str] = Counter()
    for body, error in errors.items():
        if error is None:
            assert body in stored, "acknowledged and lost"
            outcomes["acknowledged"] += 1
            continue
        assert isinstance(error, SendError)
        outcomes[error.outcome] += 1
        if error.outcome is Outcome.NOT_STORED:
            assert body not in stored
    assert outcomes["acknowledged"] > 0, outcomes
    assert outcomes[Outcome.UNKNOWN] <= WINDOW * MAX_RUN_MESSAGES * 3, "only what was in flight"


@pytest.mark.parametrize("kind", ["SimpleCQ", "BatchCQ"])
def test_a_topic_made_anew_begins_at_zero_though_the_writer_died_meanwhile(own_node: Node, kind: str) -> None:
    """Goal: a writer that starts while the dispatcher has not removed the deleted topic's queues does not count them."""
    with Admin(own_node.address) as admin, Producer(own_node.address, ack="memory") as producer:
        admin.topic_create("anew", 1, attributes={"queue.type": kind})
        producer.send_batch("anew", [b"old"] * 3)
        written = admin.status()["positions"]["written"]
        eventually(lambda: admin.status()["positions"]["dispatched"] >= written, "the queue has them")
        pids = own_node.pids()
        with halted(pids["dispatcher-consume_queue"]):
            admin.topic_delete("anew")
            os.kill(pids["writer"], signal.SIGKILL)
            eventually(lambda: own_node.pids().get("writer") not in (None, pids["writer"]), "the writer is back")
            admin.topic_create("anew", 1, attributes={"queue.type": kind})
            sent = producer.send_batch("anew", [b"new"])
            assert sent[0].queue_offset == 0
    assert [one.body for one in read_all(own_node, "anew")] == [b"new"]


@pytest.mark.parametrize("way", ["send", "async", "batch"])
def test_no_answer_in_time_is_unknown(own_node: Node, way: str) -> None:
    """Goal: a halted writer makes sends fail in time, as unknown; and what it finds when it goes on is stored once."""
    with Producer(own_node.address, timeout_s=1.0) as producer:
        producer.send("slow", b"before")
        ways: dict[str, Callable[[], object]] = {
            "send": lambda: producer.send("slow", b"during"),
            "async": lambda: producer.send_async("slow", b"during").result(10),
            "batch": lambda: producer.send_batch("slow", [b"during"]),
        }
        with halted(own_node.pids()["writer"]):
            started = time.monotonic()
            with pytest.raises(SendError) as caught:
                ways[way]()
            assert time.monotonic() - started < 4
            assert caught.value.outcome is Outcome.UNKNOWN
        eventually(lambda: try_send(producer), "the writer answers again")
    assert Counter(one.body for one in read_all(own_node, "slow"))[b"during"] <= 1


def try_send(producer: Producer) -> bool:
    try:
        producer.send("slow", b"after")
    except SendError:
        return False
    return True


def test_what_was_not_sent_is_not_sent_later(own_node: Node) -> None:
    """Goal: sends that failed as not stored while the writer was dead do not appear once it is back."""
    pids = own_node.pids()
    with Producer(own_node.address, timeout_s=1.0) as producer:
        producer.send("dead", b"before")
        with halted(pids["supervisor"]):  # nobody starts another writer
            os.kill(pids["writer"], signal.SIGKILL)
            time.sleep(0.3)
            for send in (
                lambda: producer.send("dead", b"during"),
                lambda: producer.send_async("dead", b"during").result(10),
                lambda: producer.send_batch("dead", [b"during"]),
            ):
                with pytest.raises(SendError) as caught:
                    send()
                assert caught.value.outcome is Outcome.NOT_STORED
        eventually(own_node.is_ready, "the node is whole again")
        producer.send("dead", b"after")
    assert {one.body for one in read_all(own_node, "dead")} == {b"before", b"after"}


@pytest.mark.slow
def test_pending_sends_outlive_a_restart_of_the_node(tmp_path: Path) -> None:
    """Goal: what was not handed over when the node stopped is sent to the next incarnation within its time."""
    with start_node(tmp_path, f"network.port={free_ports()}") as node:
        with Producer(node.address, ack="memory", timeout_s=60) as producer:
            producer.send("restart", b"before")
            assert node.stop().returncode == 0
            futures = [producer.send_async("restart", b"%d" % number) for number in range(100)]
            time.sleep(0.5)
            assert not any(one.done() for one in futures)
            assert node.start().returncode == 0
            results = [one.result(30) for one in futures]
        assert len({(one.queue, one.queue_offset) for one in results}) == 100
        assert len(read_all(node, "restart")) == 101


def test_a_batch_that_could_not_begin_is_counted_too(own_node: Node) -> None:
    with Producer(own_node.address, timeout_s=0.5) as producer:
        producer.send("absent", b"before")
        own_node.kill_all()
        for send in (producer.send_batch, lambda *batch: producer.send_batch_async(*batch).result(20)):
            with pytest.raises(BatchSendError) as caught:
                send("absent", [b"one", b"two"])
            error = caught.value
            assert (error.code, error.outcome) == ("NODE_UNAVAILABLE", Outcome.NOT_STORED)
            assert (error.total, error.stored, error.unknown, error.acks) == (2, 0, 0, [])
    assert own_node.start().returncode == 0


def test_a_partly_stored_batch_is_counted(own_node: Node) -> None:
    """Goal: when the writer dies in the middle of a batch, the error's numbers agree with what is in the log."""
    with Producer(own_node.address, ack="memory", timeout_s=5) as producer:
        producer.send("partly", b"before")
        bodies = [b"%08d" % number + b"x" * 2000 for number in range(100_000)]
        killer = threading.Thread(target=kill_behind, args=(own_node, own_node.pids()["writer"], 20_000_000))
        killer.start()
        error: BatchSendError | None = None
        try:
            producer.send_batch("partly", bodies)
        except BatchSendError as caught:
            error = caught
        killer.join()
    assert error is not None, "the writer was killed with most of the batch to come"
    stored = {one.body for one in read_all_healed(own_node, "partly")} - {b"before"}
    assert error.total == 100_000
    assert error.stored <= len(stored) <= error.stored + error.unknown
    assert stored >= set(bodies[: error.stored_prefix])
    assert (error.outcome is Outcome.UNKNOWN) == bool(error.unknown)


def kill_behind(node: Node, pid: int, written: int) -> None:
    """Kill ``pid`` once the log is longer than ``written`` bytes."""
    with Admin(node.address) as admin:
        while admin.status()["positions"]["written"] < written:
            time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)


def read_all_healed(node: Node, topic: str) -> list[Message]:
    eventually(node.is_ready, "the node is whole again")
    return read_all(node, topic)


# ---------------------------------------------------------------- resources


def test_a_child_process_is_told_to_make_its_own(producer: Producer) -> None:
    producer.send("forked", b"x")
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns that this process has threads; the child does nothing with them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        text = "no error"
        try:
            producer.send("forked", b"x")
        except CommitMQError as error:
            text = str(error)
        finally:
            os.write(write_end, text.encode())
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        assert "made before a fork" in answer.read()
    assert producer.send("forked", b"x").topic == "forked"


def test_an_unclosed_producer_is_complained_about(node: Node) -> None:
    producer = Producer(node.address)
    producer.send("unclosed", b"x")
    with pytest.warns(ResourceWarning, match="unclosed producer"):
        del producer


def test_closing_leaves_no_descriptor_and_no_thread(node: Node) -> None:
    with Producer(node.address) as producer:
        producer.send("leak", b"x")
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        with Producer(node.address) as producer:
            producer.send("leak", b"x", sharding_key="s")
            producer.send_async("leak", b"x")
            producer.send_batch("leak", [b"x"])
    assert threading.active_count() == before[1]
    # libzmq closes what a socket had in a thread of its own, a moment later.
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before[0], "the descriptors are closed", timeout_s=20)


def test_single_sends_do_not_load_numpy(node: Node) -> None:
    code = f"""
import sys
from commitmq import Producer
with Producer({node.address!r}) as producer:
    producer.send("light", b"x", tags="t", keys=["k"], sharding_key="s")
    producer.send_async("light", b"x").result(10)
    assert "numpy" not in sys.modules and "commitmq.kernels" not in sys.modules
    producer.send_batch("light", [b"x", b"y"])
    assert "commitmq.kernels" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
