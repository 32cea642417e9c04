"""Goal: topics with queue.type=BatchCQ and light message queues work through a real node, from a producer's call to a
consumer's message, and survive the death of any process with every offset in place.

Method: one node with LMQs enabled for all tests of the module; each test has topics of its own. A model is what was
sent: per queue, the list of messages in order.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from commitmq import Admin, Consumer, Message, Producer, Reader, SendResult, Sql
from commitmq.errors import InvalidMessageError, ProtocolError, SendError
from commitmq.format.client_batch import BatchElement, encode_client_batch
from commitmq.format.properties import encode_properties
from commitmq.format.units import BATCH_UNIT
from commitmq.protocol import wire
from commitmq.protocol.directory import Directory
from commitmq.store.queues.batch_consume_queue import BatchConsumeQueue
from nodes import Node, commitmq, start_node

BATCH = {"queue.type": "BatchCQ"}
BATCH_FILE_BYTES = 20 * BATCH_UNIT.itemsize
LMQ = ("consume_queue.enable_lmq=true", "consume_queue.enable_multi_dispatch=true", "consume_queue.max_lmq_queues=40")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("kinds")
    with start_node(folder, f"consume_queue.batch_file_bytes={BATCH_FILE_BYTES}", *LMQ) as running:
        yield running


@pytest.fixture
def producer(node: Node) -> Iterator[Producer]:
    with Producer(node.address) as one:
        yield one


def make_topic(node: Node, name: str, queues: int = 1) -> str:
    with Admin(node.address) as admin:
        admin.topic_create(name, queues, attributes=BATCH)
    return name


def read(node: Node, topic: str, count: int, **options: Any) -> list[Message]:
    """``count`` messages of ``topic`` from where ``options`` say, and no more."""
    found: list[Message] = []
    with (Consumer if "group" in options else Reader)([topic], node=node.address, **options) as consumer:
        deadline = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
            found += consumer.poll(1.0)
        found += consumer.poll(0.05)
    assert len(found) == count
    return found


@pytest.mark.parametrize("mode", ["bytes", "ranges"])
def test_batches_in_messages_out(node: Node, producer: Producer, mode: str) -> None:
    """Every message comes as it was sent, numbered through; a batch is one record."""
    topic = make_topic(node, f"batches-{mode}")
    sent: list[tuple[Message, SendResult]] = []
    for number in range(30):
        messages = [
            Message(b"%d-%d" % (number, i) * (i + 1), tags=f"T{i % 2}", keys=[f"k{number}", f"i{i}"], flag=i - 3)
            for i in range(number % 7 + 1)
        ]
        result = producer.send_batch(topic, messages)
        assert [one.queue_offset for one in result] == list(range(len(sent), len(sent) + len(messages)))
        assert len({one.physical_offset for one in result}) == len({one.msg_id for one in result}) == 1
        sent += [(one, result[i]) for i, one in enumerate(messages)]
    found = read(node, topic, len(sent), mode=mode)
    for offset, (message, (original, stored)) in enumerate(zip(found, sent, strict=True)):
        assert (message.topic, message.queue_id, message.queue_offset) == (topic, 0, offset)
        assert (message.body, message.tags, message.keys, message.flag) == (
            original.body,
            original.tags,
            original.keys,
            original.flag,
        )
        assert (message.unique_id, message.physical_offset, message.msg_id, message.store_timestamp) == (
            stored.unique_id,
            stored.physical_offset,
            stored.msg_id,
            stored.store_timestamp,
        )
    queue = BatchConsumeQueue(node.store / "batchconsumequeue" / topic / "0", BATCH_FILE_BYTES)
    assert queue.refresh() == len(sent)
    assert queue.end_index == 30
    assert not (node.store / "consumequeue" / topic).exists()


def test_queries_give_the_messages_of_batches(node: Node, producer: Producer) -> None:
    """By time, by the tag of a batch and by message id: messages one by one, also where a page ends inside a batch."""
    topic = make_topic(node, "asked")
    producer.send_batch(topic, [Message(b"a%d" % n, tags="A", keys="k") for n in range(10)])
    sent = producer.send_batch(topic, [Message(b"b%d" % n, tags="B") for n in range(5)])
    eventually_dispatched(node, topic, 15)
    wanted = [b"a%d" % n for n in range(10)] + [b"b%d" % n for n in range(5)]
    with Admin(node.address) as admin:
        found: list[Message] = []
        following: str | None = None
        while not found or following:
            page = admin.query(topic, begin=0, max_messages=4, continue_from=following)
            assert len(page) <= 4
            found += list(page)
            following = page.next
        assert [message.body for message in found] == wanted
        assert [message.queue_offset for message in found] == list(range(15))
        assert [message.body for message in admin.query(topic, tag="B")] == wanted[10:]
        assert admin.message(sent[3].msg_id).body == b"b0"


def test_a_query_by_time_in_a_light_queue(node: Node, producer: Producer) -> None:
    for number in range(5):
        producer.send("light-asked", b"%d" % number, tags="T", multi_dispatch=["%LMQ%asked"], queue=number % 2)
    read(node, "%LMQ%asked", 5, start="earliest")
    with Admin(node.address) as admin:
        found = list(admin.query("%LMQ%asked", begin=0))
    assert [(one.topic, one.queue_id, one.queue_offset, one.body) for one in found] == [
        ("%LMQ%asked", 0, number, b"%d" % number) for number in range(5)
    ]
    assert {(one.origin_topic, one.tags) for one in found} == {("light-asked", "T")}


def test_columns_of_a_batch(node: Node, producer: Producer) -> None:
    topic = make_topic(node, "columns")
    producer.send_batch(topic, [b"a", b"bb", b"ccc"])
    producer.send_batch(topic, [b"d" * 4, b"e" * 5])
    eventually_dispatched(node, topic, 5)
    with Reader([topic], node=node.address) as consumer:
        batch = consumer.poll(10.0)
    assert batch.queue_offset.tolist() == [0, 1, 2, 3, 4]
    assert batch.body_size.tolist() == [1, 2, 3, 4, 5]
    assert [bytes(body) for body in batch.bodies] == [b"a", b"bb", b"ccc", b"dddd", b"eeeee"]
    assert batch.total_size.tolist() == [22 + size + len("UNIQ_KEY") + 34 for size in (1, 2, 3, 4, 5)]
    assert batch[1:4].queue_offset.tolist() == [1, 2, 3]
    assert batch[3].body == b"dddd"
    view, offsets, sizes = batch.buffers[0]
    assert bytes(view[offsets[2] : offsets[2] + sizes[2]]) == b"ccc"


def test_a_pull_may_begin_inside_a_batch(node: Node, producer: Producer) -> None:
    topic = make_topic(node, "inside")
    for _ in range(40):
        producer.send_batch(topic, [b"x"] * 5)
    for start in (0, 1, 4, 5, 99, 198, 199):
        assert [one.queue_offset for one in read(node, topic, 200 - start, start=start)] == list(range(start, 200))
    # A group's offset can lie inside a batch: the next member goes on there.
    with Consumer([topic], group="inside", node=node.address, auto_commit=False) as consumer:
        taken: list[Message] = []
        while len(taken) < 13:
            taken += consumer.poll(5.0, max_messages=13 - len(taken))
        assert consumer.commit() == {(topic, 0): 13}
    assert read(node, topic, 187, group="inside")[0].queue_offset == 13
    with Admin(node.address) as admin:
        (one,) = admin.group_lag("inside")
    assert (one.topic, one.committed, one.end, one.lag) == (topic, 200, 200, 0)


def test_the_node_answers_pulls_in_whole_records(node: Node, producer: Producer) -> None:
    topic = make_topic(node, "limits")
    for count in (5, 3, 4, 10, 1):
        producer.send_batch(topic, [b"x" * 100] * count)
    eventually_dispatched(node, topic, 23)
    with directory(node) as (_, channel):

        def pull(offset: int, **limits: Any) -> tuple[str, int, int]:
            answer = channel.request("pull", {"topic": topic, "queue": 0, "offset": offset, **limits}, timeout_s=10)[0]
            return answer["status"], answer["next_offset"], answer["count"]

        assert pull(0) == ("FOUND", 23, 5)
        assert pull(0, max_messages=1) == ("FOUND", 5, 1)
        assert pull(0, max_messages=8) == ("FOUND", 8, 2)
        assert pull(0, max_messages=11) == ("FOUND", 8, 2)
        assert pull(4, max_messages=8) == ("FOUND", 12, 3)  # what lies before the offset does not count
        assert pull(6, max_bytes=1) == ("FOUND", 8, 1)
        assert pull(23) == ("OFFSET_OVERFLOW_ONE", 23, 0)
        assert pull(24) == ("OFFSET_OVERFLOW_BADLY", 23, 0)
        answer = channel.request("offsets", {"topic": topic, "timestamp": 0}, timeout_s=10)[0]
        assert answer["queues"] == [[0, 0, 23, 0]]
        upper = {"topic": topic, "timestamp": 1 << 50, "boundary": "upper"}
        assert channel.request("offsets", upper, timeout_s=10)[0]["queues"] == [[0, 0, 23, 22]]
        later = {"topic": topic, "timestamp": 1 << 50}
        assert channel.request("offsets", later, timeout_s=10)[0]["queues"] == [[0, 0, 23, 23]]


def test_tags_of_the_messages_inside(node: Node, producer: Producer) -> None:
    """Batches of one tag are passed over by the node, mixed ones are taken apart by the consumer."""
    topic = make_topic(node, "tags")
    wanted = []
    for number in range(12):
        if number % 3:
            tags: Any = ["A", "B"][number % 2]
            each = [tags] * 4
        else:
            tags = each = ["A", None, "C", "B"]
        result = producer.send_batch(topic, [b"m"] * 4, tags=tags)
        wanted += [one.queue_offset for one, tag in zip(result, each, strict=True) if tag in ("A", "C")]
    queue = BatchConsumeQueue(node.store / "batchconsumequeue" / topic / "0", BATCH_FILE_BYTES)
    eventually_dispatched(node, topic, 48)
    queue.refresh()
    assert set(queue.units(0, 99)["tags_code"].tolist()) == {0, 65, 66}
    found = read(node, topic, len(wanted), filter="A || C")
    assert [one.queue_offset for one in found] == wanted
    with Consumer([topic], group="tagged", node=node.address, filter="nothing") as consumer:
        assert not consumer.poll(1.0)
        assert consumer.positions == {(topic, 0): 48}
    # The node would have to look at the messages inside, which it does not.
    with (
        Reader([topic], node=node.address, filter=Sql("TAGS = 'A'")) as consumer,
        pytest.raises(ProtocolError, match="by tags only"),
    ):
        consumer.poll(5.0)


def test_long_poll(node: Node, producer: Producer) -> None:
    topic = make_topic(node, "waiting")
    with Reader([topic], node=node.address) as consumer:
        assert not consumer.poll(0.1)
        producer.send_batch(topic, [b"a", b"b"])
        started = time.monotonic()
        got = consumer.poll(10.0)
        assert time.monotonic() - started < 2
        assert [one.body for one in got] == [b"a", b"b"]


def test_sharding_and_queues(node: Node, producer: Producer) -> None:
    topic = make_topic(node, "sharded", queues=4)
    keys = [f"customer-{i % 9}" for i in range(90)]
    bodies = [b"%d" % i for i in range(90)]
    result = producer.send_batch(topic, bodies, sharding_keys=keys)
    assert len(result) == 90
    found = read(node, topic, 90)
    places = {(one.queue_id, one.queue_offset): one for one in found}
    for i, one in enumerate(result):
        assert places[one.queue, one.queue_offset].body == bodies[i]
        assert places[one.queue, one.queue_offset].sharding_key == keys[i]
    assert [one.queue for one in producer.send_batch(topic, [b"x"] * 3, queue=2)] == [2, 2, 2]


def test_large_batches_are_cut(node: Node, producer: Producer) -> None:
    """One record takes 32,767 messages and max_message_bytes at most; a segment here has 1 MiB."""
    topic = make_topic(node, "large")
    result = producer.send_batch(topic, [b"x" * 10] * 40, timeout_s=20)
    assert len(result.acks) == 1
    with pytest.raises(InvalidMessageError, match="message 1 takes"):
        producer.send_batch(topic, [b"y", b"x" * (4 * 1024 * 1024)])


# ---------------------------------------------------------------- what is refused


def directory(node: Node, role: str = "reader") -> Any:
    import contextlib

    @contextlib.contextmanager
    def connected() -> Iterator[Any]:
        found = Directory(node.address)
        channel, hello = found.connect(role, time.monotonic() + 10, hello=role == "writer")
        try:
            yield hello, channel
        finally:
            channel.close()
            found.close()

    return connected()


def eventually_dispatched(node: Node, topic: str, count: int) -> None:
    deadline = time.monotonic() + 10
    with directory(node) as (_, channel):
        while channel.request("offsets", {"topic": topic}, timeout_s=10)[0]["queues"][0][2] != count:
            assert time.monotonic() < deadline, f"{topic} does not get to {count}"
            time.sleep(0.02)


def refused(channel: Any, fields: dict[str, Any], body: bytes) -> tuple[str, str]:
    identity = channel.next_id()
    header = {"v": wire.PROTOCOL_VERSION, "id": identity, **fields}
    channel.put([json.dumps(header).encode(), body], time.monotonic() + 5)
    answer = wire.parse_answer(channel.wait(time.monotonic() + 10))
    assert answer["id"] == identity
    if answer["ok"]:
        return "", ""
    assert answer["outcome"] == "not_stored"
    return answer["code"], answer["error"]


def test_illegal_batches(node: Node, producer: Producer) -> None:
    topic = make_topic(node, "illegal")
    producer.send_batch("plain-one", [b"made"])
    good = encode_client_batch([BatchElement(b"a"), BatchElement(b"b", encode_properties({"KEYS": "k"}))])
    fields = {"op": "batch", "topic": topic, "queue": 0, "count": 2}
    with directory(node, "writer") as (_, channel):
        cases: list[tuple[dict[str, Any], bytes, str, str]] = [
            ({}, good[:-1], "MESSAGE_ILLEGAL", "message 1 of the batch, at byte 23"),
            ({}, good + b"\0", "MESSAGE_ILLEGAL", "message 2"),
            ({}, b"", "MESSAGE_ILLEGAL", "message 0"),
            ({"count": 3}, good, "MESSAGE_ILLEGAL", "the header says 3 messages, the batch holds 2"),
            ({"count": None}, good, "INVALID_PARAMETER", "count"),
            ({"topic": "plain-one"}, good, "MESSAGE_ILLEGAL", "queue.type=BatchCQ"),
            ({"op": "send"}, b"plain", "MESSAGE_ILLEGAL", "queue.type=BatchCQ"),
            ({"op": "append"}, good, "MESSAGE_ILLEGAL", "queue.type=BatchCQ"),
            ({"properties": {"INNER_NUM": "2"}}, good, "MESSAGE_ILLEGAL", "INNER_NUM"),
            ({"properties": {"INNER_BASE": "0"}}, good, "MESSAGE_ILLEGAL", "INNER_BASE"),
            ({"properties": {"DELAY": "3"}}, good, "MESSAGE_ILLEGAL", "DELAY"),
            ({"properties": {"TRAN_MSG": "true"}}, good, "MESSAGE_ILLEGAL", "TRAN_MSG"),
            ({"properties": {"INNER_MULTI_DISPATCH": "%LMQ%a"}}, good, "MESSAGE_ILLEGAL", "INNER_MULTI_DISPATCH"),
            ({"properties": 3}, good, "INVALID_PARAMETER", "properties"),
            ({"queue": 9}, good, "INVALID_PARAMETER", "queue"),
        ]
        for change, body, code, sentence in cases:
            assert refused(channel, {**fields, **change}, body)[0] == code, change
            assert sentence in refused(channel, {**fields, **change}, body)[1]
        marked = encode_client_batch([BatchElement(b"a", encode_properties({"DELAY": "1"}))])
        assert "only the node may set" in refused(channel, {**fields, "count": 1}, marked)[1]
        many = encode_client_batch([BatchElement(b"")] * 32_768)
        assert "32767" in refused(channel, {**fields, "count": 32_768}, many)[1]
        assert refused(channel, {**fields, "count": 32_767}, many[:-22]) == ("", "")
    with pytest.raises(SendError, match="BatchCQ"):
        producer.send(topic, b"single")
    with pytest.raises(SendError, match="BatchCQ"):
        producer.send_async(topic, b"single").result(10)
    eventually_dispatched(node, topic, 32_767)


def test_a_topic_made_anew_with_another_type(node: Node, producer: Producer) -> None:
    """What was a BatchCQ topic's is gone, and nothing remembers its type."""
    topic = make_topic(node, "changing")
    producer.send_batch(topic, [b"old"] * 3)
    eventually_dispatched(node, topic, 3)
    with Admin(node.address) as admin:
        for round_number in range(3):
            admin.topic_delete(topic)
            admin.topic_create(topic, 1, attributes=BATCH if round_number % 2 else {})
            with Producer(node.address) as other:
                other.send_batch(topic, [b"%d" % round_number] * 2)
            assert [one.body for one in read(node, topic, 2)] == [b"%d" % round_number] * 2
        with pytest.raises(ProtocolError, match="other settings"):
            admin.topic_create(topic, 1, attributes=BATCH)
    assert not (node.store / "batchconsumequeue" / topic).exists()


def test_store_dump_shows_the_messages_inside(node: Node, producer: Producer) -> None:
    topic = make_topic(node, "dumped")
    producer.send_batch(topic, [Message(b"one", tags="A", flag=7), Message(b"two")])
    lines = [json.loads(line) for line in commitmq("store", "dump", str(node.store)).stdout.splitlines()]
    (line,) = [line for line in lines if line["topic"] == topic]
    assert (line["properties"]["INNER_NUM"], line["properties"]["INNER_BASE"]) == ("2", "0")
    first, second = line["inner_messages"]
    assert (first["queue_offset"], first["flag"], first["body_hex"]) == (0, 7, b"one".hex())
    assert first["properties"]["TAGS"] == "A"
    assert (second["queue_offset"], second["body_hex"]) == (1, b"two".hex())
    assert all("inner_messages" not in line for line in lines if "INNER_NUM" not in line["properties"])


# ---------------------------------------------------------------- light message queues


def test_one_message_in_many_queues(node: Node, producer: Producer) -> None:
    expected: dict[str, list[tuple[bytes, str]]] = {}
    for number in range(25):
        names = [f"%LMQ%m{i}" for i in range(6) if number % (i + 1) == 0]
        topic = f"origin-{number % 2}"
        producer.send(topic, b"%d" % number, tags=f"T{number % 3}", properties={"n": str(number)}, multi_dispatch=names)
        for name in names:
            expected.setdefault(name, []).append((b"%d" % number, topic))
    for name, messages in expected.items():
        found = read(node, name, len(messages), mode="bytes" if name.endswith("1") else "auto")
        assert [(one.topic, one.queue_id, one.queue_offset) for one in found] == [
            (name, 0, offset) for offset in range(len(messages))
        ]
        assert [(one.body, one.origin_topic) for one in found] == messages
        assert all(one.properties["n"] == one.body.decode() for one in found)
    # They are messages of their own topics, too.
    assert [one.origin_topic for one in read(node, "origin-0", 13)] == ["origin-0"] * 13
    tagged = read(node, "%LMQ%m0", 9, filter="T0")
    assert [one.queue_offset for one in tagged] == list(range(0, 25, 3))[:9]


def test_groups_read_light_queues(node: Node, producer: Producer) -> None:
    name = "%LMQ%grouped"
    with Consumer([name], group="light", node=node.address, start="earliest") as consumer:
        assert consumer.assignment == [(name, 0)]
        assert not consumer.poll(0.2)
        producer.send("origin-g", b"first", multi_dispatch=[name])
        assert [one.body for one in consumer.poll(10)] == [b"first"]
        assert consumer.commit() == {(name, 0): 1}
    producer.send("origin-g", b"second", multi_dispatch=name)
    assert [one.queue_offset for one in read(node, name, 1, group="light")] == [1]
    with directory(node) as (_, channel):
        assert channel.request("offsets", {"topic": name}, timeout_s=10)[0]["queues"] == [[0, 0, 2, None]]
        with pytest.raises(ProtocolError, match="queues 0 to 0"):
            channel.request("pull", {"topic": name, "queue": 1, "offset": 0}, timeout_s=10)


def test_what_light_queues_refuse(node: Node, producer: Producer) -> None:
    odd: list[list[Any]] = [[], ["a"], ["%LMQ%"], ["%LMQ%a", "%LMQ%a"], ["%LMQ%a/b"], ["%LMQ%" + "x" * 251], [3]]
    for names in odd:
        with pytest.raises(InvalidMessageError):
            producer.send("origin-r", b"x", multi_dispatch=names)
    with pytest.raises(InvalidMessageError, match="multi_dispatch="):
        producer.send("origin-r", b"x", properties={"INNER_MULTI_DISPATCH": "%LMQ%a"})
    producer.send("origin-r", b"made")
    with directory(node, "writer") as (_, channel):
        fields = {"op": "send", "topic": "origin-r", "queue": 0}
        for value, code in [
            ("plain", "MESSAGE_ILLEGAL"),
            ("%LMQ%a,,%LMQ%b", "MESSAGE_ILLEGAL"),
            ("%LMQ%a,%LMQ%a", "MESSAGE_ILLEGAL"),
            ("%LMQ%../x", "MESSAGE_ILLEGAL"),
            ("", "MESSAGE_ILLEGAL"),
            (7, "INVALID_PARAMETER"),
            (",".join(f"%LMQ%many{i}" for i in range(41)), "LMQ_CONSUME_QUEUE_NUM_EXCEEDED"),
        ]:
            properties = {"INNER_MULTI_DISPATCH": value}
            assert refused(channel, {**fields, "properties": properties}, b"x")[0] == code, value
        both = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": "7"}
        assert refused(channel, {**fields, "properties": both}, b"x")[0] == "MESSAGE_ILLEGAL"
        whole = {"INNER_MULTI_DISPATCH": "%LMQ%a"}
        assert "for all of a message" in refused(channel, {**fields, "properties": whole}, bytes(1 << 22))[1]
        assert refused(channel, {**fields, "topic": "%LMQ%a"}, b"x")[0] == "NO_PERMISSION"
        dropped = {"WAIT": "false", "INNER_MULTI_DISPATCH": "%LMQ%wait"}
        assert refused(channel, {**fields, "properties": dropped}, b"x") == ("", "")
    (message,) = read(node, "%LMQ%wait", 1)
    assert "WAIT" not in message.properties
    assert message.properties["INNER_MULTI_QUEUE_OFFSET"] == "0"
    with Admin(node.address) as admin:
        for change in (lambda: admin.topic_create("%LMQ%a", 1), lambda: admin.topic_delete("%LMQ%wait")):
            with pytest.raises(ProtocolError, match="LMQ"):
                change()


def test_a_message_that_is_sent_on_goes_nowhere_else(node: Node, producer: Producer) -> None:
    producer.send("origin-f", b"once", multi_dispatch=["%LMQ%forwarded"])
    (message,) = read(node, "%LMQ%forwarded", 1)
    producer.send("elsewhere", message)
    (again,) = read(node, "elsewhere", 1)
    assert "INNER_MULTI_DISPATCH" not in again.properties
    read(node, "%LMQ%forwarded", 1)


@pytest.mark.parametrize("way", ["send_batch", "send_batch_async"])
def test_a_coordinator_that_is_late_makes_no_message_illegal(node: Node, way: str) -> None:
    """A new producer does not know that the topic's queues count batches, and asks until it does."""
    topic = make_topic(node, f"late-{way}")
    coordinator = node.pids()["coordinator"]
    with Producer(node.address, timeout_s=30) as producer:
        producer.send("other", b"x")  # the other connections are there
        os.kill(coordinator, signal.SIGSTOP)
        again = threading.Timer(2.5, os.kill, (coordinator, signal.SIGCONT))
        again.start()
        try:
            if way == "send_batch":
                sent = producer.send_batch(topic, [b"1", b"2"], queue=0)
            else:
                sent = producer.send_batch_async(topic, [b"1", b"2"], queue=0).result(30)
        finally:
            again.join()
    assert [one.queue_offset for one in sent] == [0, 1]
    assert [one.body for one in read(node, topic, 2)] == [b"1", b"2"]
