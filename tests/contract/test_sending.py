"""Goal: what a program gets wrong in a send is its own affair: it is told so, and neither another message, nor the order, nor
the producer, nor the end of the program suffers from it.

Method: a real node; what was stored is read back.
"""

from __future__ import annotations

import inspect
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from commitmq import (
    Admin,
    AsyncAdmin,
    BatchSendError,
    ConfigError,
    ExactlyOnce,
    InvalidMessageError,
    Message,
    NodeUnavailableError,
    Outcome,
    Producer,
    ProtocolError,
    SendError,
    Tombstone,
)
from commitmq.client.routes import Routes
from interrupts import logging_survives
from messages_stored import read_all
from nodes import Node, environment, halted, start_node

pytestmark = pytest.mark.timeout(90)

NOBODY = "tcp://127.0.0.1:9"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("sending"), "topics.default_queues=4") as made:
        yield made


@pytest.fixture
def producer(node: Node) -> Iterator[Producer]:
    with Producer(node.address) as made:
        yield made


def changed(**slots: Any) -> Message:
    """A message that was right when it was made, and is not any more."""
    message = Message(b"body", tags="T")
    for name, value in slots.items():
        if name == "properties":
            message.properties.update(value)
        else:
            setattr(message, name, value)
    return message


# ---------------------------------------------------------------- one bad message fails alone


BAD_FIELDS = [{"queue": 2**40}, {"queue": 1.5}, {"queue": -1}, {"queue": "1"}, {"queue": True}, {"flag": 2**40}]
BAD_MESSAGES: list[dict[str, Any]] = [
    {"body": "text"},
    {"body": b""},
    {"body": None},
    {"flag": 2**40},
    {"flag": "1"},
    {"properties": {"DELAY": "3"}},
    {"properties": {"TRAN_MSG": "true"}},
    {"properties": {"INNER_NUM": "2"}},
    {"properties": {"TIMER_DELAY_MS": "5"}},
    {"properties": {"p": 5}},
    {"properties": {"p": ""}},
    {"properties": {"": "v"}},
    {"properties": {"p": "a\x01b"}},
    {"properties": {"p": "\0" * 512}},
    {"properties": {"p": "x" * 40_000}},
    {"properties": {"p": "\ud800"}},
]


@pytest.mark.parametrize("bad", BAD_FIELDS, ids=str)
def test_a_bad_argument_fails_alone(producer: Producer, bad: dict[str, Any]) -> None:
    before = [producer.send_async("alone", b"x", ack="memory") for _ in range(50)]
    for send in (producer.send, producer.send_async):
        with pytest.raises(InvalidMessageError):
            send("alone", b"x", **bad)
    after = [producer.send_async("alone", b"x", ack="memory") for _ in range(50)]
    assert {one.result(20).topic for one in (*before, *after)} == {"alone"}
    producer.flush(10)
    assert producer._lanes.all_in_flight() == 0


@pytest.mark.parametrize("bad", BAD_MESSAGES, ids=str)
def test_a_bad_message_fails_alone(producer: Producer, bad: dict[str, Any]) -> None:
    before = [producer.send_async("alone", b"x", ack="memory") for _ in range(50)]
    message = changed(**bad)
    for send in (producer.send, producer.send_async):
        with pytest.raises(InvalidMessageError):
            send("alone", message)
    with pytest.raises(InvalidMessageError, match="message 1"):
        producer.send_batch("alone", [b"x", message])
    after = [producer.send_async("alone", b"x", ack="memory") for _ in range(50)]
    assert {one.result(20).topic for one in (*before, *after)} == {"alone"}
    producer.flush(10)
    assert producer._lanes.all_in_flight() == 0


def test_integers_of_numpy_are_queues(producer: Producer) -> None:
    queue = np.int64(1)
    assert producer.send("numbers", b"x", queue=queue).queue == 1  # type: ignore[arg-type]
    assert producer.send_async("numbers", b"x", queue=queue).result(10).queue == 1  # type: ignore[arg-type]
    assert producer.send_batch("numbers", [b"x"], queue=queue)[0].queue == 1  # type: ignore[arg-type]
    with pytest.raises(SendError, match="INVALID_PARAMETER"):
        producer.send_async("numbers", b"x", queue=2**31 - 1).result(10)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "beside",
    [{"tags": "A"}, {"keys": "k"}, {"properties": {"a": "b"}}, {"sharding_key": "s"}, {"key": "k"}, {"flag": 3}],
    ids=str,
)
def test_nothing_is_dropped_beside_a_message(producer: Producer, beside: dict[str, Any]) -> None:
    for send in (producer.send, producer.send_async):
        with pytest.raises(InvalidMessageError, match=next(iter(beside))):
            send("beside", Message(b"x"), **beside)
    with pytest.raises(InvalidMessageError):
        producer.send("beside", Message(b"x"), multi_dispatch=["%LMQ%x"], **beside)


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1, float("nan")])
def test_no_time_is_refused_and_not_taken_for_the_default(producer: Producer, timeout_s: float) -> None:
    calls: list[Callable[[], object]] = [
        lambda: producer.send("t", b"x", timeout_s=timeout_s),
        lambda: producer.send_async("t", b"x", timeout_s=timeout_s),
        lambda: producer.send_batch("t", [b"x"], timeout_s=timeout_s),
        lambda: producer.send_batch_async("t", [b"x"], timeout_s=timeout_s),
        lambda: Admin(NOBODY, timeout_s=timeout_s),
        lambda: Producer(NOBODY, timeout_s=timeout_s),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="timeout_s must be positive"):
            call()


def test_a_node_that_does_not_answer_is_the_same_error_everywhere() -> None:
    with Producer(NOBODY, timeout_s=0.7) as producer, Admin(NOBODY, timeout_s=0.7) as admin:
        calls: list[Callable[[], object]] = [
            lambda: producer.send("t", b"x"),
            lambda: producer.send("t", b"x", key="k"),
            lambda: producer.send_async("t", b"x").result(10),
            lambda: producer.send_batch("t", [b"x"]),
            lambda: producer.send_batch("t", [b"x"], key="k"),
            lambda: producer.send_batch_async("t", [b"x"]).result(10),
        ]
        for call in calls:
            with pytest.raises(NodeUnavailableError) as caught:
                call()
            assert isinstance(caught.value, SendError)
            assert caught.value.outcome is Outcome.NOT_STORED
        with pytest.raises(BatchSendError):
            producer.send_batch("t", [b"x"])
        with pytest.raises(NodeUnavailableError):
            admin.status()
        with pytest.raises(NodeUnavailableError):
            admin.topics()


def test_errors_tell_how_long_was_waited() -> None:
    with Producer(NOBODY, timeout_s=2.0) as producer:
        ways: list[Callable[[], object]] = [
            lambda: producer.send("t", b"x"),
            lambda: producer.send_async("t", b"x").result(10),
        ]
        for send in ways:
            time.sleep(0.5)
            with pytest.raises(NodeUnavailableError) as caught:
                send()
            text = str(caught.value)
            told = float(text.partition("within ")[2].partition(" s")[0]) if "within" in text else 2.0
            assert 1.5 <= told <= 8, text


@pytest.mark.parametrize(("timeout_s", "idempotent"), [(0.5, False), (2.0, False), (3.0, False), (3.0, True)])
def test_a_batch_tells_how_long_it_waited_in_all(timeout_s: float, idempotent: bool) -> None:
    """And not how long its last step did: it asks for the topic's queues before it connects to the writer."""
    time.sleep(0.5)
    import_module(
        "commitmq.client.sending.batch"
    )  # numpy: importing it is part of the first batch's time, but no waiting
    producer = Producer(NOBODY, timeout_s=timeout_s, delivery=ExactlyOnce() if idempotent else None)
    with producer, pytest.raises(NodeUnavailableError) as caught:
        producer.send_batch("t", [b"x"])
    told = float(str(caught.value).partition("within ")[2].partition(" s")[0])
    assert timeout_s - 0.2 <= told <= timeout_s + 2


@pytest.mark.parametrize(
    "address", ["localhost", "http://localhost:7310", "tcp://localhost", "tcp://:7310", "tcp://a:b"]
)
def test_a_wrong_address_is_said_without_a_traceback(address: str) -> None:
    with pytest.raises(ConfigError, match="node address"):
        Producer(address)
    with pytest.raises(ConfigError, match="node address"):
        Admin(address)


# ---------------------------------------------------------------- keys and tombstones


def test_a_key_finds_and_orders(node: Node, producer: Producer) -> None:
    wanted = producer.send("keyed", b"0", key="order-7").queue
    sent = [
        producer.send_async("keyed", b"1", key="order-7").result(10),
        producer.send("keyed", Message(b"2", key="order-7")),
        *producer.send_batch("keyed", [b"3", b"4"], key="order-7"),
        *producer.send_batch("keyed", [b"5", b"6"], key=["order-7", "order-7"]),
        producer.send_batch_async("keyed", [b"7"], key=["order-7"]).result(10)[0],
    ]
    assert {one.queue for one in sent} == {wanted}
    found = sorted(read_all(node, "keyed"), key=lambda one: one.queue_offset)
    assert [one.body for one in found] == [b"%d" % number for number in range(8)]
    assert all((one.keys, one.sharding_key) == (["order-7"], "order-7") for one in found)


def test_a_key_beside_its_parts_is_refused(producer: Producer) -> None:
    others: list[dict[str, Any]] = [{"keys": "k"}, {"sharding_key": "k"}]
    for beside in others:
        for call in (producer.send, producer.send_async):
            with pytest.raises(InvalidMessageError, match="either"):
                call("keyed", b"x", key="k", **beside)
        with pytest.raises(InvalidMessageError, match="either"):
            Message(b"x", key="k", **beside)
    with pytest.raises(InvalidMessageError, match="either"):
        producer.send_batch("keyed", [b"x"], key=["k"], keys=["k"])
    with pytest.raises(InvalidMessageError, match="entries"):
        producer.send_batch("keyed", [b"x"], key=["k", "l"])
    with pytest.raises(InvalidMessageError, match="space"):
        producer.send("keyed", b"x", key="a b")


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_tombstone_is_a_message_without_a_body(node: Node, idempotent: bool) -> None:
    topic = f"stones-{idempotent}"
    with Producer(node.address, delivery=ExactlyOnce() if idempotent else None) as producer:
        producer.send(topic, b"value", key="k")
        producer.send(topic, Tombstone("k"))
        producer.send_async(topic, Tombstone("k", tags="T")).result(10)
        producer.send_batch(topic, [b"value", Tombstone("k", properties={"a": "b"})])
        for empty in (b"", Message(b"x")):
            if isinstance(empty, Message):
                empty.body = b""
            with pytest.raises(InvalidMessageError, match="Tombstone"):
                producer.send(topic, empty)
        stones = [one for one in read_all(node, topic) if one.is_tombstone]
        assert [(one.body, one.keys, one.sharding_key) for one in stones] == [(b"", ["k"], "k")] * 3
        # One that was received is a copy of what is stored.
        again = producer.send(topic, stones[0])
        assert again.queue == stones[0].queue_id


def test_a_tombstone_in_an_inner_batch_and_by_the_long_way(node: Node) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("stones-inner", 1, attributes={"queue.type": "BatchCQ"})
        producer.send_batch("stones-inner", [b"x", Tombstone("k")])
        assert [one.body for one in read_all(node, "stones-inner")] == [b"x", b""]
        admin.topic_create("stones-memory", 1, attributes={"storage.type": "memory"})
        producer.send("stones-memory", Tombstone("k"))
        assert [one.body for one in read_all(node, "stones-memory")] == [b""]


def test_user_properties_can_be_sent_again(node: Node, producer: Producer) -> None:
    producer.send("own", b"x", tags="T", key="k", properties={"colour": "red", "size": "3"})
    message = read_all(node, "own")[0]
    assert message.user_properties == {"colour": "red", "size": "3"}
    producer.send("own", message.body, properties=message.user_properties)
    assert [one.user_properties for one in read_all(node, "own")] == [{"colour": "red", "size": "3"}] * 2


# ---------------------------------------------------------------- order, and who waits for whom


def test_a_batch_of_messages_with_sharding_keys_comes_behind_what_was_sent_before(producer: Producer) -> None:
    for turn in range(10):
        futures = [producer.send_async("behind", b"x" * 100, sharding_key="k", ack="memory") for _ in range(200)]
        batch = producer.send_batch("behind", [Message(b"y", sharding_key="k")], ack="memory")
        assert batch[0].queue_offset > max(one.result(10).queue_offset for one in futures), turn


def test_a_batch_does_not_go_before_what_it_must_follow(node: Node) -> None:
    """When what was sent before is still pending at the batch's end, nothing of the batch is stored."""
    writer = node.pids()["writer"]
    with Producer(node.address, timeout_s=20) as producer:
        producer.send("follow", b"x", key="k")
        with halted(writer):
            before = producer.send_async("follow", b"before", key="k")
            with pytest.raises(BatchSendError) as caught:
                producer.send_batch("follow", [Message(b"after", key="k")], timeout_s=0.5)
            assert caught.value.outcome is Outcome.NOT_STORED
        assert before.result(20).queue_offset == 1
    assert [one.body for one in read_all(node, "follow")] == [b"x", b"before"]


def test_a_stopped_coordinator_holds_up_who_needs_it_and_nobody_else(node: Node) -> None:
    coordinator = node.pids()["coordinator"]
    with Producer(node.address, timeout_s=20) as producer:
        producer.send("plain", b"x")
        with halted(coordinator):
            failed: list[BaseException] = []

            def send_elsewhere() -> None:
                try:
                    producer.send("nobody-knows", b"x", sharding_key="k", timeout_s=6)
                except SendError as error:
                    failed.append(error)

            thread = threading.Thread(target=send_elsewhere)
            thread.start()
            time.sleep(0.3)
            longest = 0.0
            for _ in range(20):
                began = time.perf_counter()
                producer.send("plain", b"x")
                longest = max(longest, time.perf_counter() - began)
            assert thread.is_alive()
            assert longest < 1.0
        thread.join()
    # The coordinator is back after a moment: the send that waited for it is stored, unless the machine took 6 s for the rest.
    if failed:
        assert isinstance(failed[0], NodeUnavailableError)
    else:
        assert [one.body for one in read_all(node, "nobody-knows")] == [b"x"]


def test_asynchronous_sends_to_a_new_topic_hold_up_no_others(node: Node) -> None:
    coordinator = node.pids()["coordinator"]
    with Producer(node.address, timeout_s=3) as producer:
        producer.send_async("plain", b"x").result(10)
        with halted(coordinator):
            stuck = producer.send_async("nobody-knows-either", b"x")
            time.sleep(0.2)
            began = time.perf_counter()
            producer.send_async("plain", b"x").result(10)
            assert time.perf_counter() - began < 1.0
            stuck.cancel()


def test_a_question_that_begins_while_the_producer_closes_opens_no_connection(node: Node) -> None:
    routes = Routes(node.address)
    count = routes.queues("plain", time.monotonic() + 10)
    known = routes._known["plain"]
    routes.close()
    assert routes._look_up("plain", known, time.monotonic() + 5) == count
    with pytest.raises(SendError, match="the producer is closed"):
        routes._look_up("plain", None, time.monotonic() + 5)
    assert routes._coordinator is None


def test_a_topic_in_use_is_asked_for_in_the_background(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is used while it is asked again; a stopped coordinator costs no send anything then."""
    coordinator = node.pids()["coordinator"]
    routes = Routes(node.address)
    try:
        count = routes.queues("plain", time.monotonic() + 10)
        known = routes._known["plain"]
        routes._known["plain"] = (known[0], known[1] - 12, known[2])
        with halted(coordinator):
            began = time.perf_counter()
            assert routes.queues("plain", time.monotonic() + 10) == count
            assert time.perf_counter() - began < 0.5
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and routes._known["plain"][1] < known[1]:
            time.sleep(0.05)
        assert routes._known["plain"][1] >= known[1]
    finally:
        routes.close()


# ---------------------------------------------------------------- the end of a program, and its children


def run_program(text: str, *arguments: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def test_a_program_ends_though_a_thread_that_runs_no_more_holds_the_lock(node: Node) -> None:
    """When a program ends its other threads stop where they are, the producer's perhaps while it has its lock."""
    ended = run_program(
        """
        import sys, threading, time
        from commitmq import Producer
        from commitmq.protocol import channel

        producer = Producer(sys.argv[1])
        producer.send_async("ending", b"x").result(30)
        held = threading.Event()

        def hold():
            with producer._lanes.lock, channel._context_lock:
                held.set()
                time.sleep(3600)

        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        """,
        node.address,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_child_can_connect_whatever_the_parents_threads_did(node: Node) -> None:
    ended = run_program(
        """
        import os, signal, sys, threading
        from commitmq.protocol.channel import Channel
        from commitmq import Admin

        ends = threading.Event()

        def connect():
            while not ends.is_set():
                Channel(sys.argv[1]).close()

        thread = threading.Thread(target=connect)
        thread.start()
        bad = 0
        for _ in range(40):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                with Admin(sys.argv[1]) as admin:
                    admin.metadata()
                os._exit(0)
            bad += os.waitpid(child, 0)[1] != 0
        ends.set()
        thread.join()
        sys.exit(bad)
        """,
        node.address,
        limit_s=85,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_system_without_eventfd_will_do(node: Node) -> None:
    """macOS has none: a pipe rings instead."""
    ended = run_program(
        """
        import os, sys
        for name in [one for one in dir(os) if one.startswith(("eventfd", "EFD_"))]:
            delattr(os, name)
        import asyncio
        from commitmq import Admin, AsyncProducer, Producer

        with Admin(sys.argv[1]) as admin:
            admin.topics()
        with Producer(sys.argv[1]) as producer:
            producer.send("bells", b"x", key="k")
            producer.send_batch("bells", [b"x"] * 10)
            for _ in range(3):
                futures = [producer.send_async("bells", b"x") for _ in range(3000)]
                producer.flush(30)
                assert all(one.result(0).topic == "bells" for one in futures)

        async def main():
            async with AsyncProducer(sys.argv[1]) as producer:
                await asyncio.gather(*(producer.send("bells", b"x", key="k") for _ in range(100)))

        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(main())
        assert len(os.listdir("/proc/self/fd")) == before
        """,
        node.address,
    )
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------- twins and topics


def test_the_asynchronous_admin_has_every_verb() -> None:
    def verbs(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}

    assert verbs(AsyncAdmin) == verbs(Admin)


def test_a_topic_can_be_updated(node: Node) -> None:
    with Admin(node.address) as admin, Producer(node.address) as producer:
        admin.topic_create("grown", 2, attributes={"reserve.time": "5"})
        made = admin.topic("grown")
        updated = admin.topic_update("grown", 4)
        assert (updated.write_queues, updated.perm, updated.attributes) == (4, 6, made.attributes)
        assert updated.incarnation == made.incarnation
        assert producer.send("grown", b"x", queue=3).queue == 3
        assert admin.topic_update("grown", perm=4).perm == 4
        with pytest.raises(SendError):
            producer.send("grown", b"x")
        changed = admin.topic_update("grown", perm=6, attributes={"reserve.time": "7"})
        assert (changed.attributes, changed.write_queues) == ({"reserve.time": "7"}, 4)
        with pytest.raises(Exception, match="cannot change"):
            admin.topic_update("grown", attributes={"storage.type": "memory"})
        with pytest.raises(Exception, match="TOPIC_NOT_EXIST"):
            admin.topic_update("never-made", 3)


def test_an_update_makes_no_topic(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was deleted, or deleted and made again, after the client had looked at its settings."""
    with Admin(node.address) as admin:
        admin.topic_create("away", 2)
        before = admin.topic("away")
        admin.topic_delete("away")
        monkeypatch.setattr(admin, "topic", lambda _name: before)
        with pytest.raises(ProtocolError, match="TOPIC_NOT_EXIST"):
            admin.topic_update("away", 3)
        assert all(one.name != "away" for one in admin.topics())
        admin.topic_create("away", 1)
        with pytest.raises(ProtocolError, match="TOPIC_NOT_EXIST"):
            admin.topic_update("away", 3)
        assert [one.write_queues for one in admin.topics() if one.name == "away"] == [1]


class _Interrupted(BaseException):
    """What a signal handler raises."""


# Who is interrupted while it opens a connection leaves the socket to the garbage collector, which complains.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.slow) for way in ("alone", "batches", "full")), "numbered", "pending"]
)
def test_exceptions_from_outside_leave_the_producer_usable(node: Node, way: str) -> None:
    """Ctrl-C, or a time limit by a signal, may come between any two steps of a send; the next one works."""
    rng = random.Random(way)
    armed = [False]
    ended = threading.Event()
    main = threading.get_ident()

    def interrupted(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise _Interrupted

    def disturb() -> None:
        while not ended.wait(rng.uniform(0, 0.001)):
            signal.pthread_kill(main, signal.SIGUSR1)

    def work() -> None:
        if way == "pending":
            disturbed.send_async("interrupted", b"x").result(5)
        elif way == "batches":
            disturbed.send_batch("interrupted", [b"x", b"y"])
        elif way == "full":
            for _ in range(100):
                disturbed.send_async("interrupted", b"x")
            disturbed.flush()
        else:
            disturbed.send("interrupted", b"x")

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        with (
            logging_survives(),
            Producer(
                node.address,
                timeout_s=5,
                delivery=ExactlyOnce() if way == "numbered" else None,
                max_pending=50 if way == "full" else 10_000,
            ) as disturbed,
        ):
            disturbed.send("interrupted", b"x")
            disturber = threading.Thread(target=disturb)
            disturber.start()
            hits = 0
            try:
                end = time.monotonic() + 2
                while time.monotonic() < end:
                    try:
                        armed[0] = True
                        work()
                        armed[0] = False
                    except _Interrupted:
                        hits += 1
            finally:
                armed[0] = False
                ended.set()
                disturber.join()
            assert hits > 100
            disturbed.flush()
            disturbed.send("interrupted", b"last")
            assert len(disturbed.send_batch("interrupted", [b"last", b"last"])) == 2
            assert not disturbed._lanes.writer.outbox.outstanding
    finally:
        signal.signal(signal.SIGUSR1, before)
